"""What to read for a prefix: a chain of snapshots to a list of reads. Read-only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from promptstore.index import Found, Row
from promptstore.layers import Layers
from promptstore.snapshot import CHUNK, Shape

_READ_CHUNKS = 16


@dataclass(frozen=True)
class Read:
    """Neighbouring chunks of one snapshot.

    Args:
        row: The snapshot.
        shape: Where everything lies in it.
        chunks: For each chunk its number and the tokens ``[lo, hi)`` wanted.
        first: Whether this is the first read of that snapshot.
    """

    row: Row
    shape: Shape
    chunks: tuple[tuple[int, int, int], ...]
    first: bool


def plan_reads(found: Found, layers: Layers, n_tokens: int) -> list[Read]:
    """Return the reads that give the rows of tokens ``[0, n_tokens)``.

    Args:
        found: What holds at least *n_tokens*.
        layers: The layers of its snapshots.
        n_tokens: Where to stop.
    """
    reads = []
    for row, lo, hi in found.pieces:
        shape = Shape(layers, row.start, row.end)
        chunks = list(_chunks(shape, lo, min(hi, n_tokens)))
        for at in range(0, len(chunks), _READ_CHUNKS):
            group = tuple(chunks[at : at + _READ_CHUNKS])
            reads.append(Read(row, shape, group, first=at == 0))
    return reads


def _chunks(shape: Shape, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    if lo >= hi:
        return
    first_chunk, last_chunk = ((at - shape.start) // CHUNK for at in (lo, hi - 1))
    for chunk in range(first_chunk, last_chunk + 1):
        first, last = shape.span(chunk)
        yield chunk, max(lo, first), min(hi, last)
