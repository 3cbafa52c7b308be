"""Facts about what a snapshot holds: its text, its chunks and where they lie."""

from __future__ import annotations

import json
import random

import pytest

from promptstore.extent import CHUNK, Band, Extent, Shape, StateArray
from promptstore.layers import ITEMSIZE_BY_DTYPE, Layer, RowPart
from promptstore.ranges import Ranges, count, intersect, union

KEYS, VALUES = RowPart("keys", 2, 8, "F32"), RowPart("values", 2, 4, "BF16")
FULL = Layer("full/1", (KEYS, VALUES))
WINDOW = Layer("rotating/1", (KEYS,), {"max_size": 64, "keep": 0})
STATE = Layer("arrays/1", (), {"size": 2})
LAYERS = (FULL, Layer("composite/1", inner=(WINDOW, STATE)), FULL)


def random_ranges(rng: random.Random) -> Ranges:
    edges = sorted(rng.sample(range(1000), 2 * rng.randrange(1, 5)))
    return union(zip(edges[::2], edges[1::2], strict=True))


def random_extent(rng: random.Random) -> Extent:
    state = tuple(
        StateArray(2, str(slot), rng.choice(list(ITEMSIZE_BY_DTYPE)), (1, 3, slot))
        for slot in range(rng.randrange(4))
    )
    bands = tuple(
        Band(leaves, random_ranges(rng))
        for leaves in rng.choice(
            [[], [(0, 3), (1,)], [(1,), (3, 0)], [(0,)], [(3,), (0,)]]
        )
    )
    rings = {leaf: rng.randrange(64) for leaf in rng.sample(range(4), 2)}
    return Extent(rng.randrange(1000), 1000 + rng.randrange(9), bands, rings, state)


def test_an_extent_survives_its_text() -> None:
    """Bands, rings and state come back as they were, as tuples."""
    rng = random.Random(30)
    for _ in range(300):
        extent = random_extent(rng)
        text = extent.to_text()
        assert extent == Extent.from_text(text, extent.start, extent.end)
        assert text == Extent.from_text(text, extent.start, extent.end).to_text()


def test_the_text_is_the_golden_one() -> None:
    """The text lies in files and in the index, and must never change."""
    extent = Extent(
        0,
        300,
        (Band((0, 3), ((0, 300),)), Band((1,), ((0, 4), (240, 300)))),
        {1: 7},
        (StateArray(2, "0", "F32", (1, 3)),),
    )
    assert extent.to_text() == (
        '{"bands":[[[0,3],[[0,300]]],[[1],[[0,4],[240,300]]]],'
        '"rings":[[1,7]],"state":[[2,"0","F32",[1,3]]]}'
    )


def test_each_leaf_holds_what_its_band_holds() -> None:
    """A leaf that is in no band holds no rows."""
    extent = Extent(0, 9, (Band((0, 3), ((0, 9),)), Band((1,), ((5, 9),))))
    assert [extent.held(leaf) for leaf in range(5)] == [
        ((0, 9),),
        ((5, 9),),
        (),
        ((0, 9),),
        (),
    ]


def test_chunks_hold_each_row_once_in_order() -> None:
    """Chunks of a band span 256 tokens from its first, and lie one behind another."""
    rng = random.Random(31)
    leaf_bytes = [2 * 32 + 2 * 8, 2 * 32, 0, 2 * 32 + 2 * 8]
    for _ in range(300):
        extent = random_extent(rng)
        shape = Shape(LAYERS, extent)
        at, numbers = 0, []
        for band in extent.bands:
            own = [chunk for chunk in shape.chunks if chunk.band is band]
            row_bytes = sum(leaf_bytes[leaf] for leaf in band.leaves)
            first = band.ranges[0][0]
            for chunk in own:
                (lo, _), (_, hi) = chunk.ranges[0], chunk.ranges[-1]
                assert (lo - first) // CHUNK == (hi - 1 - first) // CHUNK
                assert chunk.offset == at
                assert chunk.nbytes == count(chunk.ranges) * row_bytes
                assert intersect(chunk.ranges, band.ranges) == chunk.ranges
                at += chunk.nbytes
                numbers.append(chunk.index)
            assert union(r for chunk in own for r in chunk.ranges) == band.ranges
            assert sum(count(chunk.ranges) for chunk in own) == count(band.ranges)
        assert numbers == list(range(len(shape.chunks)))
        assert shape.rows_nbytes == at
        assert shape.n_tokens == extent.end - extent.start
        assert shape.data_nbytes == at + shape.state_nbytes + 8 * shape.n_tokens


def test_a_gap_of_many_chunks_makes_none() -> None:
    """Where no rows are held there is no chunk, and what is behind keeps its edges."""
    shape = Shape(LAYERS, Extent(0, 2000, (Band((0,), ((0, 4), (1000, 1100))),)))
    assert [chunk.ranges for chunk in shape.chunks] == [
        ((0, 4),),
        ((1000, 1024),),
        ((1024, 1100),),
    ]
    shape = Shape(LAYERS, Extent(0, 300, (Band((0,), ((10, 20), (30, 300))),)))
    assert [chunk.ranges for chunk in shape.chunks] == [
        ((10, 20), (30, 266)),
        ((266, 300),),
    ]


def test_parts_are_those_of_the_leaves_inside_too() -> None:
    """Leaves are counted through composites; state has no row parts."""
    band = Band((0, 1, 2), ((0, 9),))
    shape = Shape(LAYERS, Extent(0, 9, (band,)))
    assert shape.leaves == (FULL, WINDOW, STATE, FULL)
    assert shape.parts(band) == [(0, KEYS), (0, VALUES), (1, KEYS)]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3, 5)])
def test_bytes_of_state_are_those_of_its_elements(shape: tuple[int, ...]) -> None:
    """A scalar is one element, and a shape with a 0 none."""
    n = 1
    for size in shape:
        n *= size
    for dtype, itemsize in ITEMSIZE_BY_DTYPE.items():
        assert StateArray(0, "x", dtype, shape).nbytes == n * itemsize


HOSTILE = [
    "",
    "x",
    "null",
    "5",
    "[]",
    "{}",
    '"bands"',
    '{"bands":[],"rings":[]}',
    '{"bands":5,"rings":[],"state":[]}',
    '{"bands":[5],"rings":[],"state":[]}',
    '{"bands":[[[0]]],"rings":[],"state":[]}',
    '{"bands":[[[0],[[0,1,2]]]],"rings":[],"state":[]}',
    '{"bands":[[[null],[[0,1]]]],"rings":[],"state":[]}',
    '{"bands":[[["x"],[[0,1]]]],"rings":[],"state":[]}',
    '{"bands":[[[0],[[0,1e999]]]],"rings":[],"state":[]}',
    '{"bands":[[[0],[[0,NaN]]]],"rings":[],"state":[]}',
    '{"bands":[],"rings":[[0]],"state":[]}',
    '{"bands":[],"rings":{"a":1},"state":[]}',
    '{"bands":[],"rings":[],"state":[[0,"x","F99",[1]]]}',
    '{"bands":[],"rings":[],"state":[[0,"x",["F32"],[1]]]}',
    '{"bands":[],"rings":[],"state":[[0,"x","F32",5]]}',
    '{"bands":[],"rings":[],"state":[[0,"x","F32",[-1e999]]]}',
    "[" * 100_000,
]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            text,
            id=text[:60],
        )
        for text in HOSTILE
    ],
)
def test_a_hostile_text_is_a_value_error(text: str) -> None:
    """Whatever was read from a damaged or hostile file, no other error comes out."""
    with pytest.raises(ValueError):  # noqa: PT011
        Extent.from_text(text, 0, 9)


@pytest.mark.parametrize(
    "text",
    [
        '{"bands":[[[0],[[5,2]]]],"rings":[],"state":[]}',
        '{"bands":[[[0],[[-5,2]]]],"rings":[],"state":[]}',
        '{"bands":[[[0],[[4,6],[0,2]]]],"rings":[],"state":[]}',
        '{"bands":[[[0],[[0,6],[4,8]]]],"rings":[],"state":[]}',
        '{"bands":[[[0],[[0,90]]]],"rings":[],"state":[]}',
        '{"bands":[[[-1],[[0,9]]]],"rings":[],"state":[]}',
        '{"bands":[],"rings":[],"state":[[0,"x","F32",[-4]]]}',
        '{"bands":[[[0,1],[[0,9]]],[[1],[[0,2]]]],"rings":[],"state":[]}',
        '{"bands":[[[0,0],[[0,9]]]],"rings":[],"state":[]}',
        '{"bands":[[["0"],[[0,9]]]],"rings":[],"state":[]}',
        '{"bands":[[[0],[[false,9]]]],"rings":[],"state":[]}',
        '{"bands":[],"rings":[[0,1],[0,2]],"state":[]}',
        '{"bands":[],"rings":[[0,-1]],"state":[]}',
        '{"bands":[],"rings":[],"state":[[0,"x","F32",[4294967296]]]}',
        '{"bands":[],"rings":[],"state":[[0,5,"F32",[4]]]}',
        '{"bands":[],"rings":[],"state":[[0,"x","F32",[]],[0,"x","F32",[]]]}',
    ],
)
def test_positions_that_no_snapshot_has_are_a_value_error(text: str) -> None:
    """Ranges are sorted, apart, not empty and below the end; sizes not negative."""
    with pytest.raises(ValueError, match="extent"):
        Extent.from_text(text, 0, 9)


@pytest.mark.parametrize("key", ["bands", "rings", "state"])
def test_a_key_that_comes_twice_is_a_value_error(key: str) -> None:
    """Two readers could take different ones."""
    text = f'{{"bands":[],"rings":[],"state":[],"{key}":[]}}'
    with pytest.raises(ValueError, match="twice"):
        Extent.from_text(text, 0, 9)


def test_what_is_claimed_is_measured_without_making_it() -> None:
    """A snapshot of 2**60 tokens is refused by the size of its file, at once."""
    end = 1 << 60
    shape = Shape(LAYERS, Extent(0, end, (Band((0,), ((0, end),)),)))
    assert shape.n_chunks == end // CHUNK
    assert shape.data_nbytes > end
    with pytest.raises(ValueError, match="checksums"):
        shape.require_within(1 << 40, 4)
    with pytest.raises(ValueError, match="are more than"):
        shape.require_within(1 << 40, end // CHUNK)


def test_chunks_are_counted_as_they_are_made() -> None:
    """The number of chunks and their bytes are known before there are any."""
    rng = random.Random(33)
    for _ in range(300):
        shape = Shape(LAYERS, random_extent(rng))
        assert shape.n_chunks == len(shape.chunks)
        assert shape.rows_nbytes == sum(chunk.nbytes for chunk in shape.chunks)


@pytest.mark.parametrize(
    ("extent", "reason"),
    [
        (Extent(0, 9, (Band((4,), ((0, 9),)),)), "only 4 leaves"),
        (Extent(0, 9, rings={9: 1}), "only 4 leaves"),
        (Extent(0, 9, state=(StateArray(4, "0", "F32", (1,)),)), "only 4 leaves"),
        (Extent(0, 9, (Band((2,), ((0, 9),)),)), "no bytes"),
    ],
)
def test_an_extent_of_other_layers_is_refused(extent: Extent, reason: str) -> None:
    """Leaves that are not there, and rows of layers that have none."""
    with pytest.raises(ValueError, match=reason):
        Shape(LAYERS, extent).require_within(1 << 40, 1)


def test_random_damage_raises_nothing_else() -> None:
    """A damaged text is an extent or a ValueError."""
    rng = random.Random(32)
    whole = random_extent(random.Random(5)).to_text()
    for _ in range(2000):
        text = list(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            text[rng.randrange(len(text))] = rng.choice('[]{},:"0-e.x')
        try:
            extent = Extent.from_text("".join(text), 0, 9)
        except ValueError:
            continue
        assert json.loads(extent.to_text())
