"""The directory of a store while it is open: its files, and two connections to its
index, one for reading and one for the writer's thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from promptstore import rebuild
from promptstore.errors import IndexDamaged, StoreUnavailable
from promptstore.failpoints import reach
from promptstore.index import Index, Row, locked, require_whole
from promptstore.root import Root, remove_index

_LONG_S, _REST = 0.1, 10
"""Opening anew that took longer than this is tried again only after so many times what
it took: a disk in trouble must not cost every request a rebuild that fails."""


class Volume:
    """An open directory.

    Args:
        path: The directory; made if it is not there.
        read_only: Change nothing.
        full_sync: Have what is committed survive a power cut.

    Raises:
        StoreUnavailable: The directory cannot be used.
    """

    def __init__(self, path: Path, *, read_only: bool, full_sync: bool = False) -> None:
        self.root = Root(path, full_sync=full_sync)
        self._full_sync = full_sync
        self.read_only = read_only
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when another directory, or another index, is found in its place."""
        self._untold: list[IndexDamaged] = []
        self._on_rebuilt: Callable[[IndexDamaged], object] = self._untold.append
        self._retired: set[Index] = set()
        self._lock = threading.Lock()  # of what follows
        self._opening: threading.Event | None = None
        self._rests_until = 0.0
        self._open(None)

    def _open(self, damage: IndexDamaged | None) -> None:
        if self.read_only:
            self._connect()
            return
        root = self.root
        if os.path.lexists(root.index):
            root.require_writable()
            if not (root.path / "snapshots").is_dir():
                # No store of ours, perhaps: nothing is renamed or made there.
                require_whole(root.index, read_only=False)
        root.make()
        # Under the lock also to connect: who opens a database while it is renamed
        # finds the log of the one that comes after it.
        with locked(root.lock):
            if damage is not None and root.identity() != self._place:
                damage = None  # of an index that another process has replaced
            mended = rebuild.make_ready(root, damage)
            self._connect()
        if mended is not None:
            self._on_rebuilt(mended)

    def _connect(self) -> None:
        root = self.root
        index = self._open_read_only() if self.read_only else Index(root.index)
        try:
            writer = index
            if not self.read_only:
                writer = Index(root.index, full_sync=self._full_sync)
        except BaseException:
            index.close()
            raise
        self.index, self.writer, self._place = index, writer, root.identity()

    def _open_read_only(self) -> Index:
        root = self.root
        if not os.path.lexists(root.index):
            if next(root.snapshots(), None) is None:
                raise StoreUnavailable(root.path, "holds no store")
            raise _for_writing(IndexDamaged(root.path, "its index.db is gone"))
        try:
            require_whole(root.index, read_only=True)
            return Index(root.index, read_only=True)
        except IndexDamaged as error:
            raise _for_writing(error) from error

    def hear_of_damage(self, listener: Callable[[IndexDamaged], object]) -> None:
        """Have *listener* told what was wrong with each index that is rebuilt, one that
        was rebuilt at the opening included."""
        self._on_rebuilt = listener
        while self._untold:
            listener(self._untold.pop())

    def distrust(self, reason: str) -> IndexDamaged:
        """Have the index rebuilt by the next `stay_in_place`; return why, to raise."""
        self.index.damage = damage = IndexDamaged(self.root.path, reason)
        return damage

    def is_in_place(self) -> bool:
        """Whether the connections are to the index that is there, and it is sound as
        far as is known; a reader goes on with what is not."""
        if self.root.identity() != self._place:
            return False
        return self.read_only or self._damage is None

    @property
    def _damage(self) -> IndexDamaged | None:
        return self.index.damage or self.writer.damage

    def stay_in_place(self) -> None:
        """Open anew if the directory was removed or replaced (SQLite would go on in the
        file that is gone, and call it success), or if the index proved to be damaged.

        One thread does, and the others wait for it; no lock is held meanwhile.

        Raises:
            StoreUnavailable: It cannot be opened.
        """
        while not self.is_in_place():
            mine = threading.Event()
            with self._lock:
                others = self._opening
                if others is None:
                    self._opening = mine
            if others is not None:
                others.wait()
                continue
            try:
                self._open_anew()
            finally:
                self._opening = None
                mine.set()

    def _open_anew(self) -> None:
        if self.is_in_place():
            return  # another thread was faster
        start = time.monotonic()
        if start < self._rests_until:
            reason = f"is tried again in {self._rests_until - start:.1f} s"
            raise StoreUnavailable(self.root.path, reason)
        old = {self.index, self.writer}
        try:
            self._open(self._damage)
        except BaseException:
            now = time.monotonic()
            if now - start > _LONG_S:
                self._rests_until = now + _REST * (now - start)
            raise
        self.on_replaced()
        # Other threads may be at work on them: what they find is not in place any more.
        self._retired, retired = old, self._retired
        for index in retired:
            index.close()

    def unlink(self, rows: Iterable[Row]) -> None:
        """Remove the files of rows that are gone.

        Raises:
            OSError: One could not be removed; the sweep of a later save does it.
        """
        errors = []
        for row in rows:
            try:
                self.root.unlink(row.name)
                reach("remove: file gone")
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def remove_set_aside(self) -> None:
        """Remove the index that was set aside, and what a killed rebuild has left."""
        with locked(self.root.lock):
            remove_index(self.root.damaged_index)
            remove_index(self.root.new_index)

    def close(self) -> None:
        """Close the connections."""
        if not self.read_only:
            with contextlib.suppress(IndexDamaged):
                self.writer.truncate_log()  # of what was evicted nothing is left in it
        for index in {self.index, self.writer, *self._retired}:
            index.close()


def _for_writing(error: IndexDamaged) -> IndexDamaged:
    reason = str(error).removeprefix(f"{error.path}: ")
    return IndexDamaged(
        error.path, f"{reason}; open it for writing once to have it rebuilt"
    )
