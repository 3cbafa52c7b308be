"""Large model directories: what a model is, against a plain read of its files."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs

from bench.common import Laps, Options, Row, at_most, fact, new_root, text_of
from promptstore import Namespace, filehash

N_SHARDS = 4
CHUNK = 1 << 20


def identity_5gb(options: Options) -> list[Row]:
    """Time to identify a model directory of 5 GB: at first and cold, and later.

    Against it a plain cold read of the same files by as many threads, in blocks as
    large. All files are random bytes, synced, and out of the page cache before each.
    2 GB where there is no room for 5. Beside it: the same against the slower of that
    read and SHA-256 alone (which no code can beat, and which decides where cores are
    few or busy); and the same bytes as one file, whose SHA-256 one thread must compute.
    """
    with new_root(options) as root:
        total = 64 << 20 if options.quick else _affordable(root)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # a memory of its own
        assert platformdirs.user_cache_path().is_relative_to(root)
        shards = make_model(root / "shards", total, N_SHARDS)
        n_laps = 2 if options.quick else 5
        cold = _laps(root / "shards", shards, n_laps)
        slower = max("read", "sha256", key=cold.median_ms)
        Namespace.from_model(root / "shards")
        later = Laps({"later": lambda: Namespace.from_model(root / "shards")}, 21)
        for shard in shards:
            shard.unlink()
        (single,) = make_model(root / "single", total, 1)
        alone = _laps(root / "single", [single], 1)
        single.unlink()
    size = f"{total / 1e9:.1f} GB"
    return [
        at_most(
            "identity_5GB.cold",
            cold.ratio("identify", "read"),
            1.2,
            f"{size} in {N_SHARDS} shards, {cold.versus('identify', 'read')}, "
            f"{filehash.N_THREADS} threads",
        ),
        fact(
            "identity_5GB.cold_bound",
            cold.ratio("identify", slower),
            f"the same against {slower} alone, {text_of(cold.median_ms(slower))} ms on "
            f"{os.cpu_count()} cores",
        ),
        at_most(
            "identity_5GB.later",
            later.median_ms("later"),
            20,
            f"{size} that are remembered, or are a hub's",
            "ms",
        ),
        fact(
            "identity_5GB.one_file",
            alone.ratio("identify", "read"),
            f"{size} in one file, {alone.versus('identify', 'read')}: one thread must "
            "compute its SHA-256, so this is disk against core",
        ),
    ]


def _affordable(root: Path) -> int:
    return 5_000_000_000 if shutil.disk_usage(root).free > 20 << 30 else 2_000_000_000


def make_model(path: Path, total: int, n_shards: int) -> list[Path]:
    """Write a model directory of random bytes; return its weight files."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    names = [f"model-{i:05d}-of-{n_shards:05d}" for i in range(1, n_shards + 1)]
    for seed, name in enumerate(names):
        rng = random.Random(seed)
        with (path / f"{name}.safetensors").open("wb") as file:
            header = _header(total // n_shards)
            file.write(header)
            left = total // n_shards
            while left:
                left -= file.write(rng.randbytes(min(left, CHUNK)))
            file.flush()
            os.fsync(file.fileno())
    return [path / f"{name}.safetensors" for name in names]


def _header(nbytes: int) -> bytes:
    entry = f'{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[0,{nbytes}]}}'
    text = f'{{"weight":{entry}}}'.encode()
    return len(text).to_bytes(8, "little") + text


def _laps(model: Path, files: Sequence[Path], n_laps: int) -> Laps:
    def forget(_: str) -> None:
        shutil.rmtree(platformdirs.user_cache_path(), ignore_errors=True)
        for file in files:
            drop_from_page_cache(file)

    variants: dict[str, Callable[[], object]] = {
        "identify": lambda: Namespace.from_model(model),
        "read": lambda: read_plainly(files),
        "sha256": lambda: digest_plainly([file.stat().st_size for file in files]),
    }
    return Laps(variants, n_laps, before=forget)


def drop_from_page_cache(file: Path) -> None:
    """Have the next read of a file come from the disk; macOS has no way to."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_plainly(files: Sequence[Path]) -> None:
    """Read files and drop what was read, several at once."""
    with ThreadPoolExecutor(filehash.N_THREADS) as pool:
        list(pool.map(_read, files))


def digest_plainly(sizes: Sequence[int]) -> None:
    """Compute SHA-256 of so many bytes that are in memory, several at once."""
    with ThreadPoolExecutor(filehash.N_THREADS) as pool:
        list(pool.map(_digest, sizes))


def _digest(nbytes: int) -> None:
    block, digest = bytes(filehash.BLOCK_BYTES), hashlib.sha256()
    for _ in range(nbytes // len(block)):
        digest.update(block)


def _read(path: Path) -> None:
    block = bytearray(filehash.BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
