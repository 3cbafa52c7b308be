"""Rows in memory, as bytes: where the tokens' rows lie, and slabs for vectored I/O."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from promptstore.ranges import Ranges, Run

_GROUP_BYTES = 512 << 10  # read and hash in pieces that stay in a core's own cache
_IOV_MAX = os.sysconf("SC_IOV_MAX")

Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Placed:
    """Rows of one part in memory, and which tokens they belong to.

    Shape: rows ``(n_kv_heads, n_rows, row_bytes)``.
    """

    rows: Rows
    runs: tuple[Run, ...]

    def slabs(self, ranges: Ranges) -> Iterator[Rows]:
        """Yield the bytes of the tokens of *ranges*, head by head."""
        slots = [slot for lo, hi in ranges for slot in self._slots(lo, hi)]
        for head in self.rows:
            for first, last in slots:
                yield head[first:last]

    def _slots(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of tokens ``[lo, hi)`` in the order of the tokens."""
        while lo < hi:
            run = next(run for run in self.runs if run.lo <= lo < run.hi)
            end = min(hi, run.hi)
            yield lo - run.lo + run.slot, end - run.lo + run.slot
            lo = end


def copy_rows(source: Placed, target: Placed, ranges: Ranges) -> None:
    """Copy the rows of the tokens of *ranges* from one place to another."""
    for lo, hi in ranges:
        for at, to, n in _steps(source, target, lo, hi):
            target.rows[:, to : to + n] = source.rows[:, at : at + n]


def _steps(
    source: Placed, target: Placed, lo: int, hi: int
) -> Iterator[tuple[int, int, int]]:
    """Yield source row, target row and length of each piece that both have whole."""
    while lo < hi:
        a = next(run for run in source.runs if run.lo <= lo < run.hi)
        b = next(run for run in target.runs if run.lo <= lo < run.hi)
        end = min(hi, a.hi, b.hi)
        yield lo - a.lo + a.slot, lo - b.lo + b.slot, end - lo
        lo = end


def groups(slabs: Iterable[Rows]) -> Iterator[list[memoryview]]:
    """Yield plain byte views in groups that one vectored call takes."""
    group: list[memoryview] = []
    nbytes = 0
    for slab in slabs:
        if not slab.size:
            continue
        if len(group) == _IOV_MAX or nbytes >= _GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(slab.reshape(-1).data)
        nbytes += slab.nbytes
    if group:
        yield group


def advance(group: list[memoryview], n: int) -> list[memoryview]:
    """Return what is left of *group* once its first *n* bytes are done."""
    for index, view in enumerate(group):
        if n < len(view):
            return [view[n:], *group[index + 1 :]]
        n -= len(view)
    return []
