"""Facts about which chunks are read for a prefix."""

from __future__ import annotations

import random

import pytest
from builders import row

from promptstore.extent import Band, Extent
from promptstore.index import Found, Row
from promptstore.layers import Layer, Layers, RowPart
from promptstore.plan import Plan, Read, pieces_of, plan, plan_reads
from promptstore.ranges import clip, intersect

LAYERS = (Layer("full/1", (RowPart("keys", 2, 8, "F32"),)),)
WIDE = (Layer("full/1", (RowPart("keys", 2, 512, "F32"),)),)
"""Of these a chunk has 1 MiB, and a read 16 MiB."""


def row_of(id_: int, start: int, end: int) -> Row:
    bands = (Band((0,), ((start, end),)),) if start < end else ()
    return row(id_, Extent(start, end, bands), id_ - 1 if start else None)


def found(n_tokens: int, *ranges: tuple[int, int]) -> Found:
    rows = (row_of(number, *ends) for number, ends in enumerate(ranges, start=1))
    return Found(n_tokens, tuple(rows))


def reads_of(chain: Found, n_tokens: int, layers: Layers = LAYERS) -> list[Read]:
    """Return the reads for *n_tokens*, in the order of the tokens."""
    reads = plan_reads(Plan(n_tokens, pieces_of(chain)), layers)
    return sorted(reads, key=lambda read: read.row.id)


def chunks_of(read: Read) -> tuple[tuple[int, int, int], ...]:
    """Return each chunk's number, and the tokens that are taken of it."""
    return tuple(
        (chunk.index, lo, hi)
        for chunk in read.chunks
        for lo, hi in intersect(read.wanted[0], chunk.ranges)
    )


def listed(reads: list[Read]) -> list[tuple[int, tuple[tuple[int, int, int], ...]]]:
    return [(read.row.id, chunks_of(read)) for read in reads]


def test_a_whole_snapshot_is_read_in_its_chunks() -> None:
    """Chunks are 256 tokens from the start of the snapshot, the last one short."""
    reads = reads_of(found(600, (0, 600)), 600)
    assert listed(reads) == [(1, ((0, 0, 256), (1, 256, 512), (2, 512, 600)))]
    assert reads[0].shape.layers == LAYERS
    assert (reads[0].shape.extent.start, reads[0].shape.extent.end) == (0, 600)


@pytest.mark.parametrize(
    ("n_tokens", "chunks"),
    [
        (1, ((0, 0, 1),)),
        (256, ((0, 0, 256),)),
        (257, ((0, 0, 256), (1, 256, 257))),
        (599, ((0, 0, 256), (1, 256, 512), (2, 512, 599))),
    ],
)
def test_reading_stops_at_the_last_token(
    n_tokens: int, chunks: tuple[tuple[int, int, int], ...]
) -> None:
    """A shorter prefix needs the chunks that it reaches into and no other."""
    reads = reads_of(found(600, (0, 600)), n_tokens)
    assert listed(reads) == [(1, chunks)]


def test_a_snapshot_serves_up_to_where_the_next_one_branches() -> None:
    """Chunks of a continuation are counted from its own start."""
    reads = reads_of(found(700, (0, 600), (300, 700)), 700)
    assert listed(reads) == [
        (1, ((0, 0, 256), (1, 256, 300))),
        (2, ((0, 300, 556), (1, 556, 700))),
    ]


def test_snapshots_behind_the_last_token_are_not_read() -> None:
    """Of a chain that is longer than the request only the head is needed."""
    chain = found(900, (0, 300), (300, 600), (600, 900))
    assert [read.row.id for read in reads_of(chain, 600)] == [1, 2]
    assert [read.row.id for read in reads_of(chain, 300)] == [1]


def test_nothing_is_read_for_no_tokens() -> None:
    """Neither a request of no tokens nor a snapshot of no rows is read."""
    assert reads_of(found(300, (0, 300)), 0) == []
    reads = reads_of(found(400, (0, 300), (300, 300), (300, 400)), 400)
    assert [read.row.id for read in reads] == [1, 3]


def test_a_long_snapshot_is_split_among_threads() -> None:
    """No read has more than 16 MiB, and the first of each snapshot is told."""
    chain = found(40 * 256, (0, 33 * 256), (33 * 256, 40 * 256))
    reads = reads_of(chain, 40 * 256, WIDE)
    assert [len(read.chunks) for read in reads] == [16, 16, 1, 7]
    assert [read.first for read in reads] == [True, False, False, True]


def test_reads_cover_each_token_once() -> None:
    """On random chains every token is read once, in order, from who serves it."""
    rng = random.Random(14)
    for _ in range(300):
        ranges, start = [], 0
        for _ in range(rng.randrange(1, 5)):
            end = start + rng.choice([0, 1, 255, 256, 257, rng.randrange(1, 9000)])
            ranges.append((start, end))
            start = rng.randrange(start, end + 1)
        chain = found(ranges[-1][1], *ranges)
        n_tokens = rng.randrange(chain.n_tokens + 1)
        reads = reads_of(chain, n_tokens, WIDE)
        at = 0
        owner = {lo: row.id for row, lo, hi in chain.pieces if lo < hi}
        serving = 0
        for read in reads:
            assert 0 < len(read.chunks) <= 16
            numbers = [number for number, _, _ in chunks_of(read)]
            assert numbers == [chunk.index for chunk in read.chunks]
            for number, lo, hi in chunks_of(read):
                serving = owner.get(lo, serving)
                ((first, last),) = read.shape.chunks[number].ranges
                assert first <= lo < hi <= last
                assert (at, serving) == (lo, read.row.id)
                at = hi
        assert n_tokens == at
        ids = [read.row.id for read in reads]
        firsts = [read.row.id for read in reads if read.first]
        assert sorted(set(ids)) == firsts


def test_a_plan_of_full_attention_is_all_that_was_found() -> None:
    """Every position can be resumed, so nothing that is stored is left out."""
    rng = random.Random(15)
    for _ in range(100):
        chain = found(600, (0, 400), (300, 700))
        n_tokens = rng.randrange(301, 701)
        chain = Found(n_tokens, chain.chain)
        made = plan(chain, LAYERS, [])
        assert made.n_tokens == n_tokens
        assert made.held(0) == ((0, n_tokens),)
        assert [piece.hi for piece in made.pieces] == [300, n_tokens]
        assert clip(made.held(0), n_tokens, 10**9) == ()
    assert plan(Found(), LAYERS, []).n_tokens == 0
    assert plan_reads(plan(Found(), LAYERS, []), LAYERS) == []
