"""The budget of everything under the root, and what goes when it is short."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from promptstore import snapshot
from promptstore.errors import TooLarge
from promptstore.failpoints import reach
from promptstore.index import Row
from promptstore.volume import Volume


class Budget:
    """Keeps the bytes of everything under a root within a bound.

    Args:
        max_bytes: The bound.
    """

    def __init__(self, volume: Volume, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_evicted = 0
        self._volume = volume
        self._swept = False

    def forget(self) -> None:
        """Forget what was found in a directory that is gone."""
        self._swept = False

    def require_fit(self, nbytes: int, chain: Collection[Row]) -> None:
        """Make room for *nbytes* that continue *chain*, which stays.

        Raises:
            TooLarge: They do not fit together; nothing was evicted.
        """
        held = sum(row.nbytes for row in chain)
        if held + nbytes > self.max_bytes:
            raise TooLarge(held + nbytes, self.max_bytes)
        self.make_room(nbytes, frozenset(row.id for row in chain))

    def make_room(self, nbytes: int, spare: frozenset[int]) -> None:
        """Bring everything under the root to the budget less *nbytes*.

        Args:
            nbytes: Bytes about to be written.
            spare: Snapshots that stay.

        Raises:
            TooLarge: They do not fit together; nothing was evicted.
        """
        root, index = self._volume.root, self._volume.writer
        if not self._swept:
            self._swept = True
            self.sweep()
        if root.nbytes() + nbytes <= self.max_bytes:
            return
        self.sweep()
        index.truncate_log()
        stays = root.nbytes() - index.nbytes() + index.protected_nbytes(spare)
        if stays + nbytes > self.max_bytes:
            raise TooLarge(stays + nbytes, self.max_bytes)
        for _ in range(2):  # evicting makes the log grow, which counts as well
            self._evict(self.max_bytes - nbytes, spare)
            index.truncate_log()
        total = root.nbytes() + nbytes
        if total > self.max_bytes:
            raise TooLarge(total, self.max_bytes)

    def evict(self, max_bytes: int) -> None:
        """Evict leaves until everything under the root is within *max_bytes*."""
        self.sweep()
        self._evict(max_bytes, frozenset())

    def _evict(self, max_bytes: int, spare: frozenset[int]) -> None:
        root, index = self._volume.root, self._volume.writer
        total = root.nbytes()
        for row in index.victims(spare):
            if total <= max_bytes:
                return
            if index.remove_leaf(row.id):
                reach("evict: row gone")
                total -= root.unlink(row.name)
                reach("evict: file gone")
                self.n_evicted += 1

    def sweep(self) -> None:
        """Remove files of ours that no row knows and no process is making."""
        root = self._volume.root
        known = {root.path_of(name) for name in self._volume.writer.names()}
        for path in root.files():
            if path not in known and root.is_ours(path) and self.is_orphan(path):
                path.unlink(missing_ok=True)
                reach("sweep: file gone")

    def is_orphan(self, path: Path) -> bool:
        """Whether no row knows a file of ours, and no process is making it."""
        # First the lock, which is held until the row is there, then the row.
        if not snapshot.is_abandoned(path):
            return False
        volume = self._volume
        return not (volume.root.is_final(path) and volume.index.has(path.stem))
