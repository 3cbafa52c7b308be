"""Sets of token positions as sorted half-open ranges, and where their rows lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Range = tuple[int, int]
Ranges = tuple[Range, ...]


class Run(NamedTuple):
    """Tokens ``[lo, hi)`` lie in the rows from *slot* on of a buffer."""

    lo: int
    hi: int
    slot: int


def union(ranges: Iterable[Range]) -> Ranges:
    """Return the positions that any of *ranges* has, merged and sorted."""
    merged: list[Range] = []
    for lo, hi in sorted(ranges):
        if lo >= hi:
            continue
        if merged and lo <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """Return the positions that both have."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if lo < hi:
            found.append((lo, hi))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """Return the positions of *a* that *b* lacks."""
    left = []
    j = 0
    for lo, hi in a:
        while j < len(b) and b[j][1] <= lo:
            j += 1
        k = j
        while k < len(b) and b[k][0] < hi:
            if lo < b[k][0]:
                left.append((lo, b[k][0]))
            lo = b[k][1]
            k += 1
        if lo < hi:
            left.append((lo, hi))
    return tuple(left)


def clip(ranges: Ranges, lo: int, hi: int) -> Ranges:
    """Return the positions inside ``[lo, hi)``."""
    return tuple((max(p, lo), min(q, hi)) for p, q in ranges if p < hi and q > lo)


def count(ranges: Ranges) -> int:
    """Return how many positions there are."""
    return sum(hi - lo for lo, hi in ranges)


def covers(a: Ranges, b: Ranges) -> bool:
    """Whether *a* has all positions of *b*."""
    return not subtract(b, a)


def of_runs(runs: Iterable[Run]) -> Ranges:
    """Return the positions that *runs* place."""
    return union((run.lo, run.hi) for run in runs)
