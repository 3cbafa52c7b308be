"""The budget of everything under the root, and who goes when it is short."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from promptstore import eviction, rebuild, snapshot
from promptstore.errors import DailyLimit, NoSpace, PromptStoreError, TooLarge
from promptstore.failpoints import reach
from promptstore.index import Row
from promptstore.root import is_name
from promptstore.volume import Volume


@dataclass(frozen=True)
class Limits:
    """What a store may take of a disk.

    Args:
        max_bytes: Bytes of everything under the root.
        min_free_bytes: What must remain free on the file system.
        daily_write_bytes: Bytes of snapshots to be written on a day (UTC), by all
            processes together; ``None`` for no limit.
    """

    max_bytes: int
    min_free_bytes: int = 0
    daily_write_bytes: int | None = None


class Budget:
    """Keeps what lies under a root within its limits."""

    def __init__(self, volume: Volume, limits: Limits) -> None:
        self.limits = limits
        self.n_evicted = 0
        self._volume = volume
        self._stray_bytes: int | None = None
        self._leases: Counter[int] = Counter()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget what was found in a directory that is gone."""
        self._stray_bytes = None
        with self._lock:
            self._leases.clear()

    def expect_strays(self) -> None:
        """Have the next save sweep: what failed may have left a file behind."""
        self._stray_bytes = None

    @contextlib.contextmanager
    def lease(self, ids: Iterable[int]) -> Iterator[None]:
        """Protect snapshots that are being read from eviction by this process.

        Another process may evict them; what is open can still be read to its end.
        """
        ids = list(ids)
        with self._lock:
            self._leases.update(ids)
        try:
            yield
        finally:
            with self._lock:
                self._leases.subtract(ids)
                self._leases = +self._leases

    def require_fit(self, nbytes: int, chain: Collection[Row]) -> None:
        """Make room for *nbytes* that continue *chain*, which stays; count them.

        Raises:
            TooLarge, NoSpace: They do not fit together; nothing was evicted.
            DailyLimit: Too much was written today.
        """
        held = sum(row.nbytes for row in chain)
        if held + nbytes > self.limits.max_bytes:
            raise TooLarge(held + nbytes, self.limits.max_bytes)
        self.make_room(nbytes, frozenset(row.id for row in chain))
        most = self.limits.daily_write_bytes
        if not self._volume.writer.reserve(nbytes, most):
            raise DailyLimit(nbytes, most or 0)

    def make_room(self, nbytes: int, spare: frozenset[int]) -> None:
        """Bring everything under the root to its limits less *nbytes*.

        Args:
            nbytes: Bytes about to be written.
            spare: Snapshots that stay.

        Raises:
            TooLarge, NoSpace: They do not fit together; nothing was evicted.
        """
        root, index = self._volume.root, self._volume.writer
        self._sweep_strays()
        used = root.nbytes()
        bound, error = self._bound(used, nbytes)
        if used + nbytes <= bound:
            return
        root.remove_damaged_index()
        index.truncate_log()
        spare |= self._leased()
        stays = root.nbytes() - index.nbytes() + index.protected_nbytes(spare)
        if stays + nbytes > bound:
            raise error
        for _ in range(2):  # evicting makes the log grow, which counts as well
            self._evict(bound - nbytes, spare)
            index.truncate_log()
        if root.nbytes() + nbytes > bound:
            raise error

    def _bound(self, used: int, nbytes: int) -> tuple[int, PromptStoreError]:
        """Return the bytes that may lie under the root, of which *used* do, and what to
        raise if the thing to be written cannot be had within them."""
        limits = self.limits
        free = self._volume.root.free_bytes()
        bound = used + free - limits.min_free_bytes
        if bound < limits.max_bytes:
            return bound, NoSpace(nbytes, free, limits.min_free_bytes)
        return limits.max_bytes, TooLarge(nbytes, limits.max_bytes)

    def evict(self, max_bytes: int) -> None:
        """Evict leaves until everything under the root is within *max_bytes*."""
        self.sweep()
        self._volume.root.remove_damaged_index()
        self._evict(max_bytes, self._leased())

    def _evict(self, max_bytes: int, spare: frozenset[int]) -> None:
        root, index = self._volume.root, self._volume.writer
        total = root.nbytes()
        if total <= max_bytes:
            return
        for one in eviction.order(index.candidates(), spare, time.time_ns()):
            if total <= max_bytes:
                return
            if index.remove_leaf(one.id):
                reach("evict: row gone")
                self.n_evicted += 1
                # What cannot be removed counts, but must not end all writing.
                with contextlib.suppress(OSError):
                    total -= root.unlink(one.name)
                    reach("evict: file gone")

    def _leased(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._leases)

    def _sweep_strays(self) -> None:
        """Sweep if there is more under the root that no row knows than there was."""
        stray = self._n_stray()
        if self._stray_bytes is None or stray > self._stray_bytes:
            self.sweep()
            self._stray_bytes = self._n_stray()

    def _n_stray(self) -> int:
        root = self._volume.root
        return root.nbytes() - root.index_nbytes() - self._volume.writer.nbytes()

    def sweep(self) -> None:
        """Remove files of ours that no row knows and no process is making; but those
        that are whole get a row again, for the index may be what has lost them."""
        root, writer = self._volume.root, self._volume.writer
        lost = self._lost()
        bad = {path for path in lost if not root.is_final(path)}
        whole = [path for path in lost if root.is_final(path)]
        for path in bad.union(rebuild.adopt(writer, root, whole) if whole else []):
            # What cannot be removed counts, but must not end all writing.
            with contextlib.suppress(OSError), snapshot.claim(path) as is_mine:
                # Another process may have locked or adopted it since it was found.
                if is_mine and not writer.has(path.stem):
                    path.unlink(missing_ok=True)
                    reach("sweep: file gone")

    def _lost(self) -> list[Path]:
        """Return the files of ours that no row knows and no process is making."""
        root = self._volume.root
        names = self._volume.writer.names()
        known = {root.path_of(name) for name in names if is_name(name)}
        return [
            path
            for path in root.files()
            if path not in known and root.is_ours(path) and self.is_orphan(path)
        ]

    def is_orphan(self, path: Path) -> bool:
        """Whether no row knows a file of ours, and no process is making it."""
        # First the lock, which is held until the row is there, then the row.
        if not snapshot.is_abandoned(path):
            return False
        volume = self._volume
        return not (volume.root.is_final(path) and volume.index.has(path.stem))
