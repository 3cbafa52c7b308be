"""The page cache: what is read only to be verified must not push out what is used."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_SPAN_BYTES = 1 << 20


@contextlib.contextmanager
def left_as_found(path: Path) -> Iterator[None]:
    """Drop from the page cache what is read of a file inside and was not there before.

    On Linux. Elsewhere, and for what cannot be opened, nothing is done.
    """
    if sys.platform != "linux":
        yield
        return
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags)
    except OSError:
        yield
        return
    try:
        absent = list(_absent(fd))
        yield
        for start, end in _joined(absent):
            os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _absent(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the spans ``(offset, nbytes)`` of a file whose first page must be read."""
    if sys.platform == "linux":
        for offset in range(0, os.fstat(fd).st_size, _SPAN_BYTES):
            try:
                os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                yield offset, _SPAN_BYTES
            except OSError:
                return  # this file system cannot tell


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ``[start, end)`` of spans without gaps between them: the system may keep
    pages of several spans as one, which it drops only as a whole."""
    starts = {offset for offset, _ in spans}
    ends = {offset + nbytes for offset, nbytes in spans}
    yield from zip(sorted(starts - ends), sorted(ends - starts), strict=True)


def bypass(fd: int) -> None:
    """Let what is read from *fd* not stay in the page cache, where that can be asked.

    On macOS; pages that are there already are used, and stay.
    """
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
