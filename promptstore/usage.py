"""How many bytes lie under a directory, without looking at every file each time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

_SETTLED_NS = 2_000_000_000
"""A directory's mtime may stay the same over changes that are closer than this."""


@dataclass(frozen=True)
class _Listing:
    """What a directory held when it was last read.

    Args:
        stamp: Inode and mtime of the directory then.
        nbytes: Bytes of its own files.
        folders: Paths of the directories in it.
    """

    stamp: tuple[int, int]
    nbytes: int
    folders: tuple[str, ...]


class Usage:
    """Counts everything under a directory; links are not followed.

    A directory is read again only if something was added to it or taken from it
    since, or if it holds files that may grow.

    Args:
        path: The directory.
        is_fixed: Whether a file of that name keeps its size for as long as it is there.
    """

    def __init__(
        self, path: str | os.PathLike[str], is_fixed: Callable[[str], bool]
    ) -> None:
        self._path = os.fspath(path)
        self._is_fixed = is_fixed
        self._known: dict[str, _Listing] = {}

    def nbytes(self) -> int:
        """Return the bytes of everything under the directory."""
        total, folders = 0, [self._path]
        while folders:
            folder = folders.pop()
            with contextlib.suppress(OSError):
                listing = self._listing(folder)
                total += listing.nbytes
                folders += listing.folders
        return total

    def _listing(self, folder: str) -> _Listing:
        now_ns = time.time_ns()  # before the look, so that a later change is not missed
        info = os.lstat(folder)
        stamp = info.st_ino, info.st_mtime_ns
        known = self._known.get(folder)
        if known is not None and known.stamp == stamp:
            return known
        listing, is_fixed = self._read(folder, stamp)
        if is_fixed and info.st_mtime_ns < now_ns - _SETTLED_NS:
            self._known[folder] = listing
        else:
            self._known.pop(folder, None)
        return listing

    def _read(self, folder: str, stamp: tuple[int, int]) -> tuple[_Listing, bool]:
        nbytes, folders, is_fixed = 0, [], True
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    nbytes += entry.stat(follow_symlinks=False).st_size
                    is_fixed = is_fixed and self._is_fixed(entry.name)
        return _Listing(stamp, nbytes, tuple(folders)), is_fixed
