"""The SHA-256 of files: each is read once, several at once, and then remembered.

SHA-256, since the hub names its files by it: a plain copy then equals the hub's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from promptstore.errors import ModelUnreadable
from promptstore.reading import reading

Progress = Callable[[int, int], object]
"""Is told on the caller's thread, ten times a second, how many bytes of how many
were read."""

N_THREADS = 4
BLOCK_BYTES = 256 << 10
_TICK_S = 0.1
_MEMORY_NAME = "promptstore-files.json"
_MAX_REMEMBERED = 4096
_YOUNG_NS = 2_000_000_000
_SHA256 = re.compile("[0-9a-f]{64}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, without reading it where it is known.

    See `sha256_of_all`.
    """
    return sha256_of_all([path])[path]


def sha256_of_all(
    paths: Iterable[Path],
    *,
    progress: Progress | None = None,
    check: Callable[[Path], object] = lambda path: None,
) -> dict[Path, str]:
    """Return the SHA-256 of each file's content, all as they were at one moment.

    A hub snapshot's file is a link to a blob that is named by it. That of any other
    file is remembered, by device, inode, size and times, in the user's cache
    directory; a memory that fails costs a second hash, never an error.

    Args:
        paths: Regular files, or links to some.
        progress: Told how far it is; not called if no file must be read.
        check: Called with each file that must be read, before it is.

    Returns:
        64 hexadecimal digits for each.

    Raises:
        ModelUnreadable: One is missing, empty or unreadable, or changed meanwhile.
    """
    stamps = {path: _stamp(path) for path in paths}
    # A later change within the clock's resolution could leave the times as they are.
    settled_ns = time.time_ns() - _YOUNG_NS
    memory = _recall()
    known = {path: _blob_name(path) or memory.get(key) for path, key in stamps.items()}
    unknown = [path for path, digest in known.items() if digest is None]
    for path in unknown:
        check(path)
    hashed = _hash_all({path: _size(stamps[path]) for path in unknown}, progress)
    for path, stamp in stamps.items():
        if _stamp(path) != stamp:
            raise ModelUnreadable(path, "changed while it was read")
    old = [path for path in hashed if max(stamps[path][-2:]) < settled_ns]
    _remember({stamps[path]: hashed[path] for path in old})
    return {path: digest or hashed[path] for path, digest in known.items()}


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what the system changes with a file's content; the two times last."""
    with reading(path):
        info = path.stat()
    if not stat.S_ISREG(info.st_mode) or not info.st_size:
        raise ModelUnreadable(path, "empty, or not a file")
    times = info.st_mtime_ns, info.st_ctime_ns
    return info.st_dev, info.st_ino, info.st_size, *times


def _size(stamp: tuple[int, ...]) -> int:
    return stamp[2]


def _blob_name(path: Path) -> str | None:
    """Return the SHA-256 that a hub snapshot's file is named by, if it is one."""
    blob = Path(os.path.realpath(path))
    linked = path.is_symlink() and blob.parent.name == "blobs"
    return blob.name if linked and _SHA256.fullmatch(blob.name) else None


@dataclass
class _Tally:
    """What one thread has read of its file, and whether it should go on."""

    n_read: int = 0
    is_wanted: bool = True


def _hash_all(sizes: dict[Path, int], progress: Progress | None) -> dict[Path, str]:
    """Return the SHA-256 of files of known sizes, the largest begun first."""
    if not sizes:
        return {}
    paths = sorted(sizes, key=lambda path: -sizes[path])
    tallies = {path: _Tally() for path in paths}
    tell = progress or (lambda done, total: None)
    with ThreadPoolExecutor(N_THREADS) as pool:
        tasks = {path: pool.submit(_hash, path, tallies[path]) for path in paths}
        try:
            while _are_under_way(tasks.values()):
                tell(sum(t.n_read for t in tallies.values()), sum(sizes.values()))
        finally:  # after an error or Ctrl-C nobody waits for gigabytes
            for tally in tallies.values():
                tally.is_wanted = False
    tell(sum(sizes.values()), sum(sizes.values()))
    return {path: task.result() for path, task in tasks.items()}


def _are_under_way(tasks: Iterable[Future[str]]) -> bool:
    """Wait a moment; tell whether tasks are still running, or raise what one met."""
    done, pending = wait(tasks, _TICK_S, FIRST_EXCEPTION)
    for task in done:
        task.result()
    return bool(pending)


def _hash(path: Path, tally: _Tally) -> str:
    """Return the SHA-256 of a file, or of what was read of it when nobody wants it."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(BLOCK_BYTES))
    with reading(path), path.open("rb", buffering=0) as file:
        while tally.is_wanted and (n_read := file.readinto(block)):
            digest.update(block[:n_read])
            tally.n_read += n_read
    return digest.hexdigest()


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
