"""Facts about which snapshot goes next."""

from __future__ import annotations

import itertools
import random

import pytest

from promptstore.eviction import STALE_NS, Candidate, order

NOW = 100 * STALE_NS


def one(
    id_: int, *, parent: int | None = None, **facts: int | bool | None
) -> Candidate:
    """Return a snapshot that was used *id_* nanoseconds after a moment."""
    values = {
        "layout": 1,
        "nbytes": 100,
        "used_ns": NOW - 1000 + id_,
        "hits": 1,
        "pinned": False,
        "expires_ns": None,
    }
    return Candidate(id=id_, name=f"{id_:032x}", parent=parent, **(values | facts))  # type: ignore[arg-type]


def ids(*candidates: Candidate, spare: tuple[int, ...] = ()) -> list[int]:
    return [found.id for found in order(candidates, spare, NOW)]


def test_the_least_recently_used_goes_first() -> None:
    """Order of use, not of making."""
    assert ids(one(1, used_ns=NOW - 5), one(2, used_ns=NOW - 9)) == [2, 1]


def test_a_tie_goes_by_age() -> None:
    """Equal uses: the smaller id goes first."""
    assert ids(*(one(id_, used_ns=5) for id_ in (3, 1, 2))) == [1, 2, 3]


def test_leaves_go_before_what_they_continue() -> None:
    """However long ago a parent was used, its children go first."""
    parent = one(1, used_ns=1)
    assert ids(parent, one(2, parent=1), one(3, parent=2)) == [3, 2, 1]


def test_a_pin_keeps_its_whole_chain() -> None:
    """What a pinned snapshot continues stays with it; its siblings go."""
    chain = one(1), one(2, parent=1, pinned=True)
    assert ids(*chain, one(3, parent=1)) == [3]


def test_a_spared_one_keeps_its_whole_chain() -> None:
    """What is being read or written, and what that continues, stays."""
    assert ids(one(1), one(2, parent=1), one(3), spare=(2,)) == [3]


def test_expired_ones_go_first_pinned_or_not() -> None:
    """Nobody can use them any more."""
    expired = one(3, pinned=True, expires_ns=NOW), one(2, expires_ns=NOW - 1)
    assert ids(one(1), *expired, one(4, expires_ns=NOW + 1)) == [2, 3, 1, 4]


def test_namespaces_that_nobody_used_for_a_week_go_before_others() -> None:
    """A model that was replaced makes room before the one in use, even if the one in
    use has older prompts."""
    old = [one(1, used_ns=NOW - 3 * STALE_NS), one(2)]
    stale = [
        one(3, layout=2, used_ns=NOW - 2 * STALE_NS),
        one(4, layout=2, used_ns=NOW - STALE_NS),
    ]
    assert ids(*old, *stale) == [3, 4, 1, 2]


def test_a_flood_of_one_shot_prompts_pushes_out_itself() -> None:
    """What was reused stays until the others hold less than a fifth."""
    reused = [one(id_, hits=3) for id_ in range(1, 9)]
    flood = [one(id_, hits=0) for id_ in range(101, 301)]
    first = list(itertools.islice(order([*reused, *flood], (), NOW), 198))
    assert [found.id for found in first] == list(range(101, 299))


def test_a_few_new_prompts_are_as_good_as_reused_ones() -> None:
    """Below a fifth the least recently used goes, reused or not."""
    reused = [one(id_, hits=3) for id_ in range(1, 10)]
    assert ids(*reused, one(20, hits=0))[:2] == [1, 2]


def test_a_use_in_what_is_now_the_future_counts_as_now() -> None:
    """A clock that was set back leaves nothing on disk for ever."""
    assert ids(one(1, used_ns=NOW + 10**18), one(2, used_ns=NOW)) == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_order_is_closed(seed: int) -> None:
    """Whatever the tree, a parent comes after its children; all that may go goes."""
    rng = random.Random(seed)
    found: list[Candidate] = []
    for id_ in range(1, 60):
        parent = rng.choice([None, *(c.id for c in found)])
        found.append(
            one(
                id_,
                parent=parent,
                hits=rng.randrange(3),
                layout=rng.randrange(3),
                used_ns=NOW - rng.randrange(3 * STALE_NS),
                pinned=rng.random() < 0.1,
                expires_ns=rng.choice([None, None, NOW - 1, NOW + 1]),
            )
        )
    gone = ids(*found)
    place = {id_: at for at, id_ in enumerate(gone)}
    for child in found:
        if child.parent in place:
            assert place.get(child.id, len(gone)) < place[child.parent]
    stays = {c.id for c in found} - set(gone)
    kept = {c.id for c in found if c.pinned and (c.expires_ns or NOW + 1) > NOW}
    while True:
        more = {c.parent for c in found if c.id in kept and c.parent} - kept
        if not more:
            break
        kept |= more
    assert stays == kept
