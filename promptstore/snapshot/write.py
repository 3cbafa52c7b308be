"""Write one snapshot file: the data, then the header with checksums."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from promptstore.extent import Chunk
from promptstore.failpoints import reach
from promptstore.snapshot import header
from promptstore.snapshot.header import Contents, Written, nbytes_of
from promptstore.snapshot.rows import Placed, Rows, advance, groups
from promptstore.tokens import Tokens

_TRIES = 8


@dataclass(frozen=True)
class Body:
    """The bytes of a snapshot in memory.

    Args:
        parts: By leaf, its row parts.
        state: The state arrays, each as plain bytes.
        tokens: The ids of ``[start, end)``.
    """

    parts: Sequence[Sequence[Placed]]
    state: Sequence[Rows]
    tokens: Tokens


@contextmanager
def create(path: Path) -> Iterator[int]:
    """Create *path* and yield its descriptor, locked until the block ends.

    The lock tells other processes that the file, whatever its name by then, is
    still being made: see `is_abandoned`.

    Raises:
        OSError: As the system says.
    """
    fd = _create_locked(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _create_locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_TRIES):
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.fchmod(fd, 0o600)  # whatever the umask
            is_there = os.fstat(fd).st_nlink > 0
        except BaseException:
            os.close(fd)
            raise
        if is_there:
            return fd
        os.close(fd)  # swept up by another process before it was locked
    raise FileNotFoundError(errno.ENOENT, "was swept up at once", str(path))


def is_abandoned(path: Path) -> bool:
    """Whether no process is still making the file at *path*."""
    with _locked(path, fcntl.LOCK_SH) as is_locked:
        return is_locked


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Yield whether no process is still making the file at *path*; until the block
    ends none begins to, and one that has just created it sees it go."""
    with _locked(path, fcntl.LOCK_EX) as is_locked:
        yield is_locked


@contextmanager
def _locked(path: Path, how: int) -> Iterator[bool]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        yield _lock(fd, how)
    finally:
        os.close(fd)


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write(fd: int, contents: Contents, body: Body) -> Written:
    """Write one snapshot.

    Args:
        fd: An empty file.
        contents: What the file says of itself.
        body: What it holds.

    Raises:
        OSError: As the system says; the file is then of no use.
    """
    shape = contents.shape
    data_start = nbytes_of(contents) - shape.data_nbytes
    os.lseek(fd, data_start, os.SEEK_SET)
    sums = [_write_slabs(fd, _chunk_slabs(chunk, body)) for chunk in shape.chunks]
    sums.append(_write_slabs(fd, body.state))
    ids = np.ascontiguousarray(body.tokens, "<i8").view(np.uint8)
    sums.append(_write_slabs(fd, [ids]))
    reach("insert: rows written")
    head = header.build(contents, b"".join(sums))
    assert len(head) == data_start
    _write_all(fd, head)
    reach("insert: header written")
    checksums = xxhash.xxh3_128_digest(head) + b"".join(sums)
    return Written(data_start + shape.data_nbytes, checksums)


def _chunk_slabs(chunk: Chunk, body: Body) -> Iterator[Rows]:
    for leaf in chunk.band.leaves:
        for placed in body.parts[leaf]:
            yield from placed.slabs(chunk.ranges)


def _write_slabs(fd: int, slabs: Iterable[Rows]) -> bytes:
    hasher = xxhash.xxh3_128()
    for group in groups(slabs):
        for slab in group:
            hasher.update(slab)
        _writev_all(fd, group)
    return hasher.digest()


def _writev_all(fd: int, group: list[memoryview]) -> None:
    left = sum(len(view) for view in group)
    while left:
        n = os.writev(fd, group)
        left -= n
        group = advance(group, n)


def _write_all(fd: int, data: bytes) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at:], at)
