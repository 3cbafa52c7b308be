"""The directory of a store: which file lies where, and what else is there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from promptstore import snapshot
from promptstore.errors import StoreUnavailable
from promptstore.failpoints import reach

_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_NAME = re.compile("[0-9a-f]{32}")
_OWN = frozenset({"index.db", "index.db-wal", "index.db-shm", "store.lock"})


class Root:
    """One directory and the files of its snapshots.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = path / "index.db"
        self.lock = path / "store.lock"

    def make(self) -> None:
        """Make the directory if it is not there.

        Raises:
            StoreUnavailable: It cannot be used.
        """
        root = self.path
        if root.exists() and not root.is_dir():
            raise StoreUnavailable(root, "is a file, not a directory")
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / "snapshots").mkdir(mode=0o700, exist_ok=True)
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
        """Return where the file of a snapshot is."""
        return self.path / "snapshots" / name[:2] / (name + _SUFFIX)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield the descriptor of a new file and what gives it its final name.

        Without that name it is removed; with it, by `unlink` alone.
        """
        final = self.path_of(name)
        temporary = final.with_suffix(_TEMPORARY)
        if not final.parent.exists():
            final.parent.parent.mkdir(mode=0o700, exist_ok=True)
            final.parent.mkdir(mode=0o700, exist_ok=True)
            _sync(final.parent.parent)

        def publish() -> None:
            os.rename(temporary, final)
            reach("insert: file renamed")
            _sync(final.parent)  # a row must not survive a power cut without its file
            reach("insert: directory synced")

        try:
            with snapshot.create(temporary) as fd:
                reach("insert: file made")
                yield fd, publish
        finally:
            temporary.unlink(missing_ok=True)
            reach("insert: file closed")

    def nbytes(self) -> int:
        """Return the bytes of everything under the root."""
        return sum(size for _, size in _files(self.path))

    def files(self) -> list[Path]:
        """Return every file under the root but the index and the lock."""
        return [
            path
            for path, _ in _files(self.path)
            if path.parent != self.path or path.name not in _OWN
        ]

    def is_ours(self, path: Path) -> bool:
        """Whether a file has the place and the name of a snapshot."""
        if not _NAME.fullmatch(path.stem):
            return False
        named = path in (
            self.path_of(path.stem),
            self.path_of(path.stem).with_suffix(_TEMPORARY),
        )
        return named and not path.is_symlink()

    def is_final(self, path: Path) -> bool:
        """Whether a file of ours has its final name."""
        return path.suffix == _SUFFIX

    def unlink(self, name: str) -> int:
        """Remove the file of a snapshot, if it is there; return the bytes freed."""
        path = self.path_of(name)
        try:
            size = path.stat(follow_symlinks=False).st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def identity(self) -> tuple[int, int] | None:
        """Return what tells the index from another at its place; None if it is gone."""
        try:
            info = self.index.stat()
        except OSError:
            return None
        return info.st_dev, info.st_ino


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _files(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield every file under *directory* with its size; links are not followed."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield Path(entry.path), entry.stat(follow_symlinks=False).st_size
