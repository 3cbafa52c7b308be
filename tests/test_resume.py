"""Facts about where a cache can be resumed, against a brute force over positions."""

from __future__ import annotations

import random

import pytest
from builders import row

from promptstore import resume
from promptstore.extent import Band, Extent, StateArray
from promptstore.index import Found, Row
from promptstore.layers import Layer, Layers, RowPart, leaves
from promptstore.plan import Plan, plan, plan_reads
from promptstore.ranges import Ranges, clip, covers, intersect, union

KEYS = (RowPart("keys", 1, 8, "F32"),)
FULL = Layer("full/1", KEYS)
STATE = Layer("arrays/1", (), {"size": 1})


def ring(size: int, keep: int = 0) -> Layer:
    return Layer("rotating/1", KEYS, {"max_size": size, "keep": keep})


def chunk(size: int) -> Layer:
    return Layer("chunked/1", KEYS, {"chunk_size": size})


def needed(leaf: Layer, n: int) -> set[int]:
    """Return the tokens whose rows a model looks at behind *n*, told independently."""
    if leaf.tag == "full/1":
        return set(range(n))
    if leaf.tag == "chunked/1":
        return set(range(max(0, n - leaf.settings["chunk_size"]), n))
    if leaf.tag == "rotating/1":
        size, keep = leaf.settings["max_size"], leaf.settings["keep"]
        if n <= size:
            return set(range(n))
        return set(range(keep)) | set(range(n - (size - keep), n))
    return set()


def members(ranges: Ranges) -> set[int]:
    return {at for lo, hi in ranges for at in range(lo, hi)}


def random_window(rng: random.Random) -> Layer:
    size = rng.choice([1, 2, 5, 8, 20])
    return rng.choice([chunk(size), ring(size), ring(size + 3, 3)])


def random_ranges(rng: random.Random, end: int) -> Ranges:
    found = union(
        (lo, lo + rng.randrange(1, 30))
        for lo in rng.choices(range(end), k=rng.randrange(1, 5))
    )
    return clip(found, 0, end)


def test_needs_are_what_a_model_looks_at() -> None:
    """For each kind of layer and each length, told independently."""
    layers = (FULL, ring(8), ring(8, 3), chunk(8), STATE)
    for n in range(40):
        for leaf, ranges in zip(layers, resume.needs(layers, n, {}), strict=True):
            assert members(ranges) == needed(leaf, n)


def test_a_chunk_that_began_earlier_needs_what_it_held() -> None:
    """What a live layer attended to is restored, if that was more."""
    layers = (chunk(8),)
    assert resume.needs(layers, 30, {0: 5}) == [((5, 30),)]
    assert resume.needs(layers, 30, {0: 30}) == [()]


def test_the_deepest_position_is_that_of_a_brute_force() -> None:
    """Windows of all kinds, alone, together and beside full attention, over rows with
    gaps: the deepest position at which all rows are there, and no deeper."""
    rng = random.Random(80)
    n_inner = 0
    for _ in range(1500):
        end = rng.randrange(1, 80)
        windows = [random_window(rng) for _ in range(rng.randrange(4))]
        layers: Layers = (*windows, FULL)
        if rng.random() < 0.3:
            layers = (Layer("composite/1", inner=layers), FULL)
        flat = leaves(layers)
        held = [
            ((0, end),) if leaf is FULL else random_ranges(rng, end) for leaf in flat
        ]
        limit = rng.randrange(end + 1)
        expected = max(
            n
            for n in range(limit + 1)
            if all(
                needed(leaf, n) <= members(own)
                for leaf, own in zip(flat, held, strict=True)
            )
        )
        assert resume.deepest(layers, limit, held.__getitem__) == expected
        assert resume.is_covered(layers, expected, {}, held.__getitem__)
        n_inner += 0 < expected < limit
    assert n_inner > 50


def test_kinds_are_told_of_what_is_inside() -> None:
    """A window or a state anywhere, in a composite or a draft, counts."""
    draft = Layer("draft/1", inner=(ring(8),))
    nested = Layer("composite/1", inner=(FULL, Layer("composite/1", inner=(STATE,))))
    assert resume.is_cuttable((FULL, FULL))
    assert not resume.is_cuttable((FULL, draft))
    assert not resume.is_cuttable((nested,))
    assert resume.has_state((FULL, nested))
    assert not resume.has_state((FULL, draft))
    kinds = [resume.stopping_kind(x) for x in ((FULL,), (FULL, draft), (draft, nested))]
    assert kinds == ["full", "window", "state"]


# --------------------------------------------------------------------------- plans


def random_chain(rng: random.Random, layers: Layers) -> tuple[Found, list[Row]]:
    """Return a chain of snapshots and the checkpoints on it, deepest first."""
    flat = leaves(layers)
    rows: list[Row] = []
    start = 0
    for id_ in range(1, rng.randrange(2, 5)):
        end = start + rng.randrange(1, 40)
        bands = []
        for index, leaf in enumerate(flat):
            if leaf.tag == "full/1":
                ranges: Ranges = ((start, end),)
            elif leaf.tag == "arrays/1":
                continue
            else:
                n_held = rng.randrange(1, 40)
                ranges = union([(max(start, end - n_held), end)])
            bands.append(Band((index,), ranges))
        extent = Extent(start, end, tuple(bands))
        rows.append(row(id_, extent, id_ - 1 or None))
        start = rng.randrange(start + 1, end + 1)
    n_tokens = rng.randrange(rows[-1].start + 1, rows[-1].end + 1)
    checkpoints = []
    for number in range(rng.randrange(4)):
        at = rng.randrange(1, n_tokens + 1)
        bands = [
            Band((index,), ranges)
            for index, leaf in enumerate(flat)
            if leaf.tag not in ("full/1", "arrays/1")
            for ranges in [clip(random_ranges(rng, 90), 0, at)]
            if ranges
        ]
        state = (StateArray(len(flat) - 1, "0", "F32", (1, 2)),)
        kept = state if flat[-1] is STATE else ()
        extent = Extent(at, at, tuple(bands), {}, kept)
        checkpoints.append(row(100 + number, extent, 1))
    checkpoints.sort(key=lambda row: row.end, reverse=True)
    return Found(n_tokens, tuple(rows)), checkpoints


def at_hand(found: Found, leaf: int, extra: Row | None = None) -> set[int]:
    """Return the tokens below the chain's end of which rows of a leaf are stored."""
    held: set[int] = set()
    for piece, _, hi in found.pieces:
        held |= {at for at in members(piece.extent.held(leaf)) if at < hi}
    return held | (members(extra.extent.held(leaf)) if extra is not None else set())


@pytest.mark.parametrize("with_state", [False, True])
def test_a_plan_is_the_deepest_that_rows_and_states_allow(with_state: bool) -> None:
    """With state only checkpoints are resumed, else also what rows alone allow."""
    rng = random.Random(90 + with_state)
    seen = set()
    for _ in range(800):
        windows = [random_window(rng) for _ in range(rng.randrange(3))]
        layers: Layers = (FULL, *windows, *([STATE] if with_state else []))
        found, checkpoints = random_chain(rng, layers)
        flat = leaves(layers)
        best = 0
        for n in range(found.n_tokens + 1):
            extras: list[Row | None] = [x for x in checkpoints if x.end == n]
            if not with_state:
                extras.append(None)
            for extra in extras:
                if all(
                    needed(leaf, n) <= at_hand(found, index, extra)
                    for index, leaf in enumerate(flat)
                ):
                    best = n
        made = plan(found, layers, checkpoints)
        assert made.n_tokens == best
        assert (made.state is not None) == (with_state and best > 0)
        if made.state is not None:
            assert made.state.end == best
        for index, leaf in enumerate(flat):
            assert needed(leaf, best) <= members(made.held(index))
        assert_reads(made, layers)
        seen.add(0 if not best else 1 if best < found.n_tokens else 2)
    assert seen == {0, 1, 2}


def assert_reads(made: Plan, layers: Layers) -> None:
    """Each needed row is read once, of tokens that its snapshot serves."""
    read: list[list[int]] = [[] for _ in leaves(layers)]
    n_states = 0
    for step in plan_reads(made, layers):
        own = next(piece for piece in made.pieces if piece.row is step.row)
        n_states += step.state
        for part in step.chunks:
            for leaf in part.band.leaves:
                taken = intersect(step.wanted[leaf], part.ranges)
                assert covers(part.ranges, taken)
                assert all(at < own.hi for at in members(taken))
                read[leaf] += sorted(members(taken))
    for leaf, positions in zip(leaves(layers), read, strict=True):
        assert len(positions) == len(set(positions))
        assert set(positions) == needed(leaf, made.n_tokens)
    assert n_states == (made.state is not None)


def test_a_plan_keeps_the_ring_only_where_it_was_taken() -> None:
    """Cut anywhere else the rows lie in order, and no old ring is believed."""
    layers = (FULL, ring(8))
    extent = Extent(0, 30, (Band((0,), ((0, 30),)), Band((1,), ((5, 30),))), {1: 3})
    only = row(1, extent, None)
    assert plan(Found(30, (only,)), layers, []).rings == {1: 3}
    for n in range(13, 30):
        made = plan(Found(n, (only,)), layers, [])
        assert (made.n_tokens, made.rings) == (n, {})


def test_rows_that_a_plan_counts_on_are_in_its_pieces() -> None:
    """A snapshot may hold rows of a window from before its start; a plan that ends
    before that start, but counted on them, must read them."""
    first = row(
        1, Extent(0, 20, (Band((0,), ((0, 20),)), Band((1,), ((0, 10),)))), None
    )
    second = row(
        2,
        Extent(20, 60, (Band((0,), ((20, 60),)), Band((1,), ((10, 15), (50, 60))))),
        1,
    )
    layers = (FULL, ring(8))
    made = plan(Found(40, (first, second)), layers, [])
    assert needed(layers[1], made.n_tokens) <= members(made.held(1))
