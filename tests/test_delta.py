"""Facts about what a new snapshot holds, given what the chain has already."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from builders import arrays_cache, grow, kv, rotating, row, tokens
from mlx_lm.models.cache import KVCache, RotatingKVCache

from promptstore import Namespace, NotCovered, resume
from promptstore.capture import take_in
from promptstore.delta import NewSnapshot, of_checkpoint, of_rows
from promptstore.extent import Band, Extent
from promptstore.index import Found
from promptstore.plan import held_by, pieces_of
from promptstore.ranges import union


def new_of(cache: list[Any], n: int, first: int | None = None) -> NewSnapshot:
    """Return a prompt to be stored, captured whole or from a token on."""
    taken = take_in(cache, n)
    capture = taken.capture() if first is None else taken.capture_rows(first)
    return NewSnapshot(Namespace("m"), np.array(tokens(n)), capture, "assistant")


def test_all_rows_of_a_new_prompt_are_held() -> None:
    """Full attention is one band of all its leaves."""
    extent = of_rows(new_of(kv(300), 300), Found())
    assert extent == Extent(0, 300, (Band((0, 1), ((0, 300),)),))


@pytest.mark.parametrize("first", [None, 200, 137])
def test_only_what_is_new_is_held(first: int | None) -> None:
    """A continuation starts where the chain ends, if its rows are at hand."""
    old = row(1, of_rows(new_of(kv(200), 200), Found()))
    extent = of_rows(new_of(kv(300), 300, first), Found(200, (old,)))
    assert extent == Extent(200, 300, (Band((0, 1), ((200, 300),)),))


def test_rows_that_went_away_meanwhile_are_not_covered() -> None:
    """Rows before the copy's first one, evicted since it was made, are not at hand."""
    with pytest.raises(NotCovered, match="evicted meanwhile"):
        of_rows(new_of(kv(300), 300, 200), Found())
    old = row(1, of_rows(new_of(kv(100), 100), Found()))
    with pytest.raises(NotCovered, match="evicted meanwhile"):
        of_rows(new_of(kv(300), 300, 200), Found(100, (old,)))


@pytest.mark.parametrize("keep", [0, 4])
def test_of_a_window_what_is_left_is_held(keep: int) -> None:
    """Right after a prefill all rows, after a step the window; full attention first."""
    extent = of_rows(new_of([*rotating(300, 64, keep), *kv(300)], 300), Found())
    assert extent.bands == (Band((0, 1, 2, 3), ((0, 300),)),)
    cache = [*rotating(300, 64, keep, steps=3), *kv(300)]
    extent = of_rows(new_of(cache, 300), Found())
    window = union([(0, keep), (300 - 64 + keep, 300)])
    assert extent.bands == (Band((2, 3), ((0, 300),)), Band((0, 1), window))
    assert extent.rings == {0: 3 + keep, 1: 3 + keep}
    assert extent.state == ()


def test_a_checkpoint_holds_state_and_what_the_chain_lacks() -> None:
    """No rows that are stored already, no tokens, and the state."""
    cache = [*kv(300), *rotating(300, 64, steps=3), *arrays_cache(300, n_layers=1)]
    new = new_of(cache, 300)
    rows = row(1, of_rows(new, Found()))
    extent = of_checkpoint(new, Found(300, (rows,)))
    assert (extent.start, extent.end, extent.bands) == (300, 300, ())
    assert [(array.leaf, array.name) for array in extent.state] == [(4, "0"), (4, "1")]
    bare = row(1, Extent(0, 300, (Band((0, 1), ((0, 300),)),)))
    extent = of_checkpoint(new, Found(300, (bare,)))
    assert extent.bands == (Band((2, 3), ((236, 300),)),)


def test_a_checkpoint_inside_a_snapshot_takes_rows_before_it_only() -> None:
    """A longer prompt's rows of tokens behind the place are of no use to it."""
    long = row(1, Extent(0, 300, (Band((0,), ((0, 300),)), Band((1,), ((236, 300),)))))
    cache = [*kv(200, n_layers=1), *rotating(200, 64, steps=3, n_layers=1)]
    extent = of_checkpoint(new_of(cache, 200), Found(200, (long,)))
    assert extent.bands == (Band((1,), ((136, 200),)),)


def test_a_chain_and_its_new_snapshot_can_always_be_resumed() -> None:
    """Over random conversations: rows, and a checkpoint where they do not suffice."""
    rng = random.Random(100)
    n_checkpoints = 0
    for _ in range(60):
        keep = rng.choice([0, 4])
        cache = [KVCache(), RotatingKVCache(16, keep)]
        n, chain, position = 0, [], 0
        for id_ in range(1, 6):
            sizes = [rng.randrange(1, 60)] + [1] * rng.randrange(20)
            for size in sizes:
                for layer in cache:
                    grow(layer, n, n + size)
                n += size
            if rng.random() < 0.3:
                continue
            new = new_of(cache, n, rng.choice([None, position]))
            extent = of_rows(new, Found(position, tuple(chain)))
            assert (extent.start, extent.end) == (position, n)
            assert extent.held(0) == ((position, n),)
            chain.append(row(id_, extent, id_ - 1 or None))
            position = n
            found = Found(n, tuple(chain))
            held = [held_by(pieces_of(found), leaf) for leaf in range(2)]
            if not resume.is_covered(new.layers, n, {}, held.__getitem__):
                n_checkpoints += 1
                marks = of_checkpoint(new, found)
                held = [
                    union([*own, *marks.held(leaf)]) for leaf, own in enumerate(held)
                ]
            assert resume.is_covered(new.layers, n, {}, held.__getitem__)
    assert n_checkpoints == 0


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({}, False),
        ({"label": "a"}, True),
        ({"pinned": True}, True),
        ({"expires_ns": 1}, True),
    ],
)
def test_a_wish_makes_a_prompt_special(wish: dict[str, Any], expected: bool) -> None:
    """A label, a pin or a time to live needs a row of its own."""
    capture = take_in(kv(5), 5).capture()
    new = NewSnapshot(Namespace("m"), np.array(tokens(5)), capture, "assistant", **wish)
    assert new.is_special == expected
