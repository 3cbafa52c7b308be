"""Verify snapshots slowly, in the background, and go on where the last run stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from promptstore.check import verify_row
from promptstore.disk import DiskTier
from promptstore.errors import SnapshotUnreadable, SnapshotUnsupported
from promptstore.types import Finding


class Pace:
    """Called with the bytes of each step, sleeps so long that a rate is kept.

    What a slow step lost is not made up for by faster ones.

    Args:
        bytes_per_s: The rate.
        clock: Tells the time in seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._due_s = clock()

    def __call__(self, nbytes: int) -> None:
        """Wait until *nbytes* more may have been read."""
        self._due_s += nbytes / self._bytes_per_s
        now_s = self._clock()
        if now_s < self._due_s:
            self._sleep(self._due_s - now_s)
        else:
            self._due_s = now_s


def scrub(
    disk: DiskTier,
    *,
    max_age_s: float,
    dry_run: bool,
    on_read: Callable[[int], None],
    progress: Callable[[int, int], None],
) -> Iterator[Finding]:
    """Yield what is wrong with the snapshots, those not verified for longest first.

    Each that is as it was written is recorded as verified: whenever this ends, the
    next one goes on from there. No lock is held while a file is read.

    Args:
        disk: Where. One that is opened read-only is not changed.
        max_age_s: Spare those that were verified so recently.
        dry_run: Change nothing. Else what is proven to be damaged is dropped, with
            what continues it; what is only unreadable stays.
        on_read: Called with the bytes of each step of reading.
        progress: Called with the number of snapshots done and of all to be done.
    """
    is_dry = dry_run or disk.read_only
    now_ns = time.time_ns()
    names = disk.index.unverified(now_ns - int(max_age_s * 1e9), now_ns)
    for n_done, name in enumerate(names):
        progress(n_done, len(names))
        row = disk.row(name)
        if row is None:
            continue  # evicted meanwhile, or dropped with what it continued
        try:
            finding = verify_row(disk, row, on_read)
        except SnapshotUnsupported:
            continue  # another version's
        except SnapshotUnreadable as error:
            yield Finding("unreadable", row.name, str(error))
            continue
        if finding is None:
            if not is_dry:
                disk.note_verified(row.id)
            continue
        if not is_dry and finding.kind == "index":
            disk.volume.distrust(f"its index.db is wrong about snapshot {row.name}")
        elif not is_dry:
            disk.remove([row.id])
        yield finding
    progress(len(names), len(names))
