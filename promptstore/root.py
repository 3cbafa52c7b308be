"""The directory of a store: which file lies where, and what else is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from promptstore import snapshot
from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    StoreUnavailable,
)
from promptstore.failpoints import reach
from promptstore.usage import Usage

_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_NAME = re.compile("[0-9a-f]{32}")
INDEX_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""What SQLite appends to the name of a database for the files beside it."""
_OWN = re.compile(
    r"store\.lock|index\.db(\.new|\.damaged|\.foreign-\d+)?(-wal|-shm|-journal)?"
)


class Root:
    """One directory and the files of its snapshots.

    Args:
        path: The directory.
        full_sync: Sync through the drive's own cache, where that is another thing.
    """

    def __init__(self, path: Path, *, full_sync: bool = False) -> None:
        self.path = path
        self._snapshots = path / "snapshots"
        self.index = path / "index.db"
        self.new_index = path / "index.db.new"
        self.damaged_index = path / "index.db.damaged"
        self.lock = path / "store.lock"
        self._full_sync = full_sync
        self._usage = Usage(path, _is_final_name)

    def make(self) -> None:
        """Make the directory if it is not there.

        Raises:
            StoreUnavailable: It cannot be used.
        """
        root = self.path
        if root.exists() and not root.is_dir():
            raise StoreUnavailable(root, "is a file, not a directory")
        if self._snapshots.is_symlink():
            raise StoreUnavailable(
                root, "its folder snapshots is a link; link the whole directory instead"
            )
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            # One that holds other things as well may be the user's home.
            if not root.exists() or self.index.exists() or not any(root.iterdir()):
                _make_private(root)
            _make_private(self._snapshots)
        except OSError as error:
            raise StoreUnavailable(
                root, f"cannot be used as a store: {error.strerror}"
            ) from error
        reach("open: root made")
        self.require_writable()

    def require_writable(self) -> None:
        """Raise unless files can be made here.

        Raises:
            StoreUnavailable: They cannot.
        """
        if not os.access(self.path, os.W_OK | os.X_OK):
            reason = "cannot be written; open it with read_only=True"
            raise StoreUnavailable(self.path, reason)

    def path_of(self, name: str) -> Path:
        """Return where the file of a snapshot is, or would be: never elsewhere.

        Raises:
            SnapshotCorrupt: That is no name of a snapshot.
        """
        if not is_name(name):
            raise SnapshotCorrupt(Path(name), "is no name of a snapshot")
        return self._snapshots / name[:2] / (name + _SUFFIX)

    def find(self, name: str) -> Path:
        """Return where the file of a snapshot is; what lies behind a link is not ours.

        Raises:
            SnapshotCorrupt: That is no name of a snapshot.
            SnapshotMissing: A link stands in place of its directory.
        """
        path = self.path_of(name)
        if self._is_behind_link(path):
            raise SnapshotMissing(path, "its directory is a link, not followed")
        return path

    def _is_behind_link(self, path: Path) -> bool:
        return os.path.islink(path.parent) or os.path.islink(self._snapshots)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield the descriptor of a new file and what gives it its final name.

        Without that name it is removed; with it, by `unlink` alone.

        Raises:
            OSError: As the system says, or a link stands in place of its directory.
        """
        final = self.path_of(name)
        if self._is_behind_link(final):
            raise OSError(errno.ELOOP, "is a link, not followed", str(final.parent))
        temporary = final.with_suffix(_TEMPORARY)
        if not final.parent.exists():
            _make_private(final.parent.parent)
            _make_private(final.parent)
            self.sync(final.parent.parent)
            reach("insert: folder made")
        try:
            with snapshot.create(temporary) as fd:
                reach("insert: file made")

                def publish() -> None:
                    self.sync(fd)
                    reach("insert: file synced")
                    os.rename(temporary, final)
                    reach("insert: file renamed")
                    # A row must not survive a power cut without its file.
                    self.sync(final.parent)
                    reach("insert: directory synced")

                yield fd, publish
        finally:
            temporary.unlink(missing_ok=True)
            reach("insert: file closed")

    def sync(self, file: int | Path) -> None:
        """Have the system write a file, or the names in a directory, to the device."""
        if isinstance(file, int):
            return _sync(file, full=self._full_sync)
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(fd, full=self._full_sync)
        finally:
            os.close(fd)

    def nbytes(self) -> int:
        """Return the bytes of everything under the root."""
        return self._usage.nbytes()

    def index_nbytes(self) -> int:
        """Return the bytes of the index, with its log, and of those set aside."""
        nbytes = 0
        for path in self.path.iterdir():
            with contextlib.suppress(OSError):
                if _OWN.fullmatch(path.name):
                    nbytes += path.stat(follow_symlinks=False).st_size
        return nbytes

    def free_bytes(self) -> int:
        """Return what is free on the file system for this user."""
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def files(self) -> list[Path]:
        """Return every file under the root but the lock, and the index in whatever
        state."""
        return [
            path
            for path in _files(self.path)
            if path.parent != self.path or not _OWN.fullmatch(path.name)
        ]

    def snapshots(self) -> Iterator[Path]:
        """Yield every file that has the place and the final name of a snapshot."""
        if self._snapshots.is_symlink():
            return
        for path in _files(self._snapshots):
            if self.is_final(path) and self.is_ours(path):
                yield path

    def is_ours(self, path: Path) -> bool:
        """Whether a file has the place and the name of a snapshot."""
        if not is_name(path.stem):
            return False
        named = path in (
            self.path_of(path.stem),
            self.path_of(path.stem).with_suffix(_TEMPORARY),
        )
        return named and not path.is_symlink()

    def is_final(self, path: Path) -> bool:
        """Whether a file of ours has its final name."""
        return _is_final_name(path.name)

    def unlink(self, name: str) -> int:
        """Remove the file of a snapshot, if it is there; return the bytes freed.

        A directory in its place, and what is behind a link, is nobody's to remove.
        """
        try:
            path = self.find(name)
            info = path.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                return 0
            path.unlink()
        except (FileNotFoundError, NotADirectoryError, SnapshotError):
            return 0
        return info.st_size

    def remove_damaged_index(self) -> None:
        """Remove the index that was set aside; it tells of prompts as the real one."""
        remove_index(self.damaged_index)

    def identity(self) -> tuple[int, int] | None:
        """Return what tells the index from another at its place; None if it is gone."""
        try:
            info = self.index.stat()
        except OSError:
            return None
        return info.st_dev, info.st_ino


def remove_index(path: Path) -> None:
    """Remove a database with the files beside it."""
    for suffix in INDEX_SUFFIXES:
        with contextlib.suppress(OSError):  # what remains shows when it is in the way
            os.unlink(f"{path}{suffix}")


def is_name(text: str) -> bool:
    """Whether a text can be the name of a snapshot."""
    return _NAME.fullmatch(text) is not None


def _is_final_name(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    return suffix == _SUFFIX and is_name(stem)


def _sync(fd: int, *, full: bool) -> None:
    # On macOS fsync leaves the bytes in the drive's own cache.
    if full and hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _make_private(directory: Path) -> None:
    """Make a directory for its owner only, whatever the umask, or make it so."""
    directory.mkdir(mode=0o700, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) != 0o700:
        directory.chmod(0o700)


def _files(directory: Path) -> Iterator[Path]:
    """Yield every file under *directory*; links are not followed."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield Path(entry.path)
