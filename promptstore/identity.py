"""What a model is: the content of the files that mlx-lm computes its KV from.

Names, paths, the tokenizer, the chat template and ``generation_config.json`` are
not looked at: none of them changes the KV of given tokens. Not seen either: a
``model_config`` that a program passes to ``mlx_lm.load``.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from promptstore.errors import ModelUnreadable
from promptstore.positions import exact_until

_MEMORY_NAME = "promptstore-files.json"
_MAX_REMEMBERED = 4096
_YOUNG_NS = 2_000_000_000
_N_THREADS = 4
_SHA256 = re.compile("[0-9a-f]{64}")
# No model reads these; transformers writes them at any depth.
_NAMES = {"_name_or_path", "transformers_version"}
# Where mlx_lm.lora found things and put them, and under which name.
_PLACES = {"model", "adapter_path", "resume_adapter_file", "data", "config"}
_PLACES |= {"project_name", "report_to"}


@dataclass(frozen=True)
class ModelIdentity:
    """A model by content; equal on every machine and under every path.

    Args:
        weights: SHA-256 over the content of the weight files.
        config: SHA-256 over all else that mlx-lm builds the model from.
        exact_until: Tokens up to which its KV may be cut; ``None`` for all.
    """

    weights: str
    config: str
    exact_until: int | None = None


def of_model(path: Path) -> ModelIdentity:
    """Return what the model in a directory is, reading each weight file once.

    Args:
        path: A model directory as ``mlx_lm.load`` takes it; a hub snapshot too.

    Returns:
        Its identity. How the weights are split into files is part of it.

    Raises:
        ModelUnreadable: *path* has no weight files; or a file is missing, empty or
            damaged, or changed meanwhile.

    Source: mlx-lm 0.32.2 ``utils.load_model`` and ``utils.load_config``.
    """
    with _reading(path):
        names = os.listdir(path)
    weights = [path / name for name in fnmatch.filter(names, "model*.safetensors")]
    if not weights:
        raise ModelUnreadable(path, "no model*.safetensors in it")
    if "model.safetensors.index.json" in names:
        _require_shards(path / "model.safetensors.index.json")
    config = _read_object(path / "config.json")
    parts = {name: path / name for name in names if name == "hf_quant_config.json"}
    if (code := config.get("model_file")) is not None:
        parts["model_file"] = path / str(code)
    digests = _sha256_of_all([*weights, *parts.values()])
    return ModelIdentity(
        weights=_digest(sorted(digests[file] for file in weights)),
        config=_digest([config, {part: digests[file] for part, file in parts.items()}]),
        exact_until=exact_until(config),
    )


def of_adapter(path: Path) -> str:
    """Return what the adapter in a directory is: weights, rank, scale and layers.

    Args:
        path: A directory with ``adapters.safetensors`` and ``adapter_config.json``.

    Returns:
        64 hexadecimal digits.

    Raises:
        ModelUnreadable: One of the two files is missing or cannot be read.

    Source: mlx-lm 0.32.2 ``tuner.utils.load_adapters``.
    """
    config = _read_object(path / "adapter_config.json")
    settings = {key: config[key] for key in config.keys() - _PLACES}
    return _digest([settings, sha256_of(path / "adapters.safetensors")])


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, without reading it where it is known.

    A hub snapshot's file is a link to a blob that is named by it. That of any other
    file is remembered, by device, inode, size and times, in the user's cache
    directory; a memory that fails costs a second hash, never an error.

    Args:
        path: A regular file, or a link to one.

    Returns:
        64 hexadecimal digits.

    Raises:
        ModelUnreadable: It is missing, empty or unreadable, or changed meanwhile.
    """
    return _sha256_of_all([path])[path]


def _sha256_of_all(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file, all as they were at one moment."""
    stamps = {path: _stamp(path) for path in paths}
    # A later change within the clock's resolution could leave the times as they are.
    settled_ns = time.time_ns() - _YOUNG_NS
    memory = _recall()
    known = {path: _blob_name(path) or memory.get(key) for path, key in stamps.items()}
    unknown = [path for path, digest in known.items() if digest is None]
    with ThreadPoolExecutor(_N_THREADS) as pool:
        hashed = dict(zip(unknown, pool.map(_hash, unknown), strict=True))
    for path, stamp in stamps.items():
        if _stamp(path) != stamp:
            raise ModelUnreadable(path, "changed while it was read")
    old = [path for path in hashed if max(stamps[path][-2:]) < settled_ns]
    _remember({stamps[path]: hashed[path] for path in old})
    return {path: digest or hashed[path] for path, digest in known.items()}


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what the system changes with a file's content; the two times last."""
    with _reading(path):
        info = path.stat()
    if not stat.S_ISREG(info.st_mode) or not info.st_size:
        raise ModelUnreadable(path, "empty, or not a file")
    times = info.st_mtime_ns, info.st_ctime_ns
    return info.st_dev, info.st_ino, info.st_size, *times


def _hash(path: Path) -> str:
    with _reading(path), path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blob_name(path: Path) -> str | None:
    """Return the SHA-256 that a hub snapshot's file is named by, if it is one."""
    blob = Path(os.path.realpath(path))
    linked = path.is_symlink() and blob.parent.name == "blobs"
    return blob.name if linked and _SHA256.fullmatch(blob.name) else None


def _require_shards(index: Path) -> None:
    shards = _read_object(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelUnreadable(index, "weight_map is not an object")
    for shard in sorted({str(name) for name in shards.values()}):
        if not os.path.isfile(file := index.parent / shard):
            raise ModelUnreadable(file, f"missing, but {index.name} names it")


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, less ``_NAMES`` at any depth."""
    with _reading(path):
        value = json.loads(
            path.read_bytes(),
            object_hook=lambda pairs: {
                key: pairs[key] for key in pairs if key not in _NAMES
            },
        )
    if not isinstance(value, dict):
        raise ModelUnreadable(path, "not a JSON object")
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise what the system or the parser has against *path* as one error."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelUnreadable(path, reason) from error


def _recall() -> dict[tuple[int, ...], str]:
    try:
        rows = json.loads(_memory_path().read_bytes())
        return {tuple(stamp): sha for stamp, sha in rows if _SHA256.fullmatch(sha)}
    except (OSError, ValueError, TypeError, RuntimeError):
        return {}  # missing, damaged, or a user without a home: hash again


def _remember(fresh: dict[tuple[int, ...], str]) -> None:
    if not fresh:
        return
    # Recalled anew: another process may have hashed for as long as this one.
    rows = list((_recall() | fresh).items())[-_MAX_REMEMBERED:]
    with contextlib.suppress(OSError, RuntimeError):
        path = _memory_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=path.name, dir=path.parent) as scratch:
            whole = Path(scratch, path.name)
            whole.touch(mode=0o600)
            whole.write_text(json.dumps(rows))
            os.replace(whole, path)


def _memory_path() -> Path:
    return platformdirs.user_cache_path() / _MEMORY_NAME
