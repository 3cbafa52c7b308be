"""Facts about sets of token positions, against plain sets."""

from __future__ import annotations

import random

import pytest

from promptstore.ranges import (
    Ranges,
    Run,
    clip,
    count,
    covers,
    intersect,
    of_runs,
    subtract,
    union,
)


def members(ranges: Ranges) -> set[int]:
    return {at for lo, hi in ranges for at in range(lo, hi)}


def random_set(rng: random.Random) -> Ranges:
    pairs = [sorted(rng.choices(range(30), k=2)) for _ in range(rng.randrange(5))]
    return union((lo, hi) for lo, hi in pairs)


def assert_canonical(ranges: Ranges) -> None:
    """Ranges are sorted, not empty, and do not touch."""
    assert all(lo < hi for lo, hi in ranges)
    ends = [at for pair in ranges for at in pair]
    assert ends == sorted(set(ends))


def test_union_has_what_any_has() -> None:
    """Overlapping, touching, empty, reversed and repeated ranges are merged."""
    rng = random.Random(20)
    for _ in range(500):
        pairs = [tuple(rng.choices(range(30), k=2)) for _ in range(rng.randrange(6))]
        merged = union(pairs)
        assert_canonical(merged)
        assert members(merged) == {at for lo, hi in pairs for at in range(lo, hi)}
    assert union([(5, 7), (0, 2), (2, 5)]) == ((0, 7),)
    assert union([]) == union([(3, 3), (4, 1)]) == ()


def test_operations_are_those_of_sets() -> None:
    """Intersection, difference, inclusion and count agree with plain sets."""
    rng = random.Random(21)
    for _ in range(1000):
        a, b = random_set(rng), random_set(rng)
        for made, expected in (
            (intersect(a, b), members(a) & members(b)),
            (subtract(a, b), members(a) - members(b)),
        ):
            assert_canonical(made)
            assert members(made) == expected
        assert covers(a, b) == (members(a) >= members(b))
        assert count(a) == len(members(a))


def test_clip_keeps_what_is_inside() -> None:
    """Clipping is an intersection with one range, also with an empty one."""
    rng = random.Random(22)
    for _ in range(500):
        a = random_set(rng)
        lo, hi = sorted(rng.choices(range(-2, 33), k=2))
        clipped = clip(a, lo, hi)
        assert members(clipped) == {at for at in members(a) if lo <= at < hi}
        if lo < hi:
            assert_canonical(clipped)


def test_runs_place_the_tokens_of_their_ranges() -> None:
    """Where the rows lie does not matter to which tokens there are."""
    runs = [Run(10, 20, 0), Run(20, 25, 40), Run(0, 4, 10), Run(7, 7, 3)]
    assert of_runs(runs) == ((0, 4), (10, 25))
    assert of_runs([]) == ()


@pytest.mark.parametrize("empty", [(), ((3, 3),)])
def test_nothing_is_covered_by_anything(empty: Ranges) -> None:
    """No positions are needed for nothing."""
    assert covers((), empty)
    assert count(union(empty)) == 0
