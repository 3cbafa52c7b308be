"""The directory of a store while it is open: its files, and two connections to its
index, one for reading and one for the writer's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from promptstore.errors import StoreUnavailable
from promptstore.failpoints import reach
from promptstore.index import Index, Row, prepare, require_known
from promptstore.root import Root


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
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        root = self.root
        if root.index.exists():
            if not self.read_only:
                root.require_writable()
            # Before anything is made beside it.
            require_known(root.index, read_only=self.read_only)
        elif self.read_only:
            raise StoreUnavailable(root.path, "holds no store")
        if not self.read_only:
            root.make()
            prepare(root.index, root.lock)
        self.index = Index(root.index, read_only=self.read_only)
        self.writer = self.index
        if not self.read_only:
            self.writer = Index(root.index, full_sync=self._full_sync)
        self._place = root.identity()

    def stay_in_place(self) -> None:
        """Open anew if the directory was removed or replaced: SQLite would go on in
        the file that is gone, and call it success."""
        with self._lock:
            if self.root.identity() == self._place:
                return
            old = {self.index, self.writer}
            self._open()
            self.on_replaced()
            for index in old:
                index.close()

    def unlink(self, rows: Iterable[Row]) -> None:
        """Remove the files of rows that are gone."""
        for row in rows:
            self.root.unlink(row.name)
            reach("remove: file gone")

    def close(self) -> None:
        """Close the connections."""
        if not self.read_only:
            self.writer.truncate_log()  # of what was evicted nothing is left in it
        self.index.close()
        self.writer.close()
