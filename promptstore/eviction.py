"""Which snapshot goes next. Pure: knows ids, sizes and times, no files and no SQL.

Leaves go before what they continue, so that a stored prefix is always whole. Among
leaves: expired ones, then those of namespaces that nobody has used for a week, then
the least recently used. As long as snapshots that were never reused hold more than a
fifth of what may go, only those go: a flood of one-shot prompts pushes out itself.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

STALE_NS = 7 * 86_400 * 10**9
PROBATION_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Candidate:
    """What eviction needs to know of a snapshot.

    Args:
        id: Its number in the index.
        name: Its name.
        parent: The snapshot that it continues.
        layout: Whose tree it is in.
        nbytes: Bytes of its file.
        used_ns: When it was last used.
        hits: How often it was reused.
        pinned: Whether it is protected.
        expires_ns: When its protection, and its use, end.
    """

    id: int
    name: str
    parent: int | None
    layout: int
    nbytes: int
    used_ns: int
    hits: int
    pinned: bool
    expires_ns: int | None


_Rank = tuple[bool, bool, int, int]
"""Not expired, namespace in use, time of the last use, id: the smallest goes first."""


def order(
    candidates: Collection[Candidate], spare: Collection[int], now_ns: int
) -> Iterator[Candidate]:
    """Yield what may be evicted, in the order in which it should go.

    Args:
        candidates: All snapshots.
        spare: Those that stay, with all that they continue.
        now_ns: The time.
    """
    used_by_layout: dict[int, int] = {}
    for one in candidates:
        used_ns = min(one.used_ns, now_ns)  # the clock may have been set back
        used_by_layout[one.layout] = max(used_by_layout.get(one.layout, 0), used_ns)

    def is_expired(one: Candidate) -> bool:
        return one.expires_ns is not None and one.expires_ns <= now_ns

    def rank(one: Candidate) -> _Rank:
        is_live = used_by_layout[one.layout] > now_ns - STALE_NS
        return not is_expired(one), is_live, min(one.used_ns, now_ns), one.id

    def may_go(one: Candidate) -> bool:
        return one.id not in spare and (not one.pinned or is_expired(one))

    by_id: dict[int | None, Candidate] = {one.id: one for one in candidates}
    n_children = Counter(one.parent for one in candidates)
    queues = _Queues()
    for one in candidates:
        queues.nbytes[bool(one.hits)] += one.nbytes
        if not n_children[one.id] and may_go(one):
            queues.push(one, rank(one))
    while (victim := queues.pop()) is not None:
        yield victim
        n_children[victim.parent] -= 1
        parent = by_id.get(victim.parent)
        if parent is not None and not n_children[parent.id] and may_go(parent):
            queues.push(parent, rank(parent))


class _Queues:
    """Leaves that were never reused, and leaves that were; the next of both."""

    def __init__(self) -> None:
        self.nbytes = {False: 0, True: 0}
        """Bytes of all snapshots, by whether they were reused."""
        self._heaps: dict[bool, list[tuple[_Rank, int, Candidate]]] = {
            False: [],
            True: [],
        }

    def push(self, one: Candidate, rank: _Rank) -> None:
        heapq.heappush(self._heaps[bool(one.hits)], (rank, one.id, one))

    def pop(self) -> Candidate | None:
        fresh, reused = self._heaps[False], self._heaps[True]
        if not fresh and not reused:
            return None
        from_reused = not fresh
        if fresh and reused:
            same_class = fresh[0][0][:2] == reused[0][0][:2]
            share = self.nbytes[False] / max(1, sum(self.nbytes.values()))
            is_flood = same_class and share > PROBATION_SHARE
            from_reused = not is_flood and reused[0][0] < fresh[0][0]
        _, _, one = heapq.heappop(self._heaps[from_reused])
        self.nbytes[from_reused] -= one.nbytes
        return one
