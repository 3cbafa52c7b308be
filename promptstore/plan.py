"""What to read for a prefix: a chain of snapshots to a list of reads. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from promptstore import resume
from promptstore.extent import Chunk, Extent, Shape
from promptstore.index import Found, Row
from promptstore.layers import Layers
from promptstore.ranges import Ranges, clip, intersect, subtract, union

_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A snapshot, and up to which token its rows belong to the request."""

    row: Row
    extent: Extent
    hi: int


@dataclass(frozen=True)
class Plan:
    """How to rebuild a cache of *n_tokens*.

    Args:
        n_tokens: The deepest position that can be resumed; 0 if none can.
        pieces: The snapshots, from the root.
        rings: By leaf, how the windows lie there.
        state: The snapshot whose state is taken, if any is needed.
    """

    n_tokens: int = 0
    pieces: tuple[Piece, ...] = ()
    rings: Mapping[int, int] = field(default_factory=dict)
    state: Row | None = None

    def held(self, leaf: int) -> Ranges:
        """Return the tokens of which the pieces hold the rows of a leaf."""
        return held_by(self.pieces, leaf)


@dataclass(frozen=True)
class Read:
    """Neighbouring chunks of one snapshot.

    Args:
        row: The snapshot.
        shape: Where everything lies in it.
        chunks: What to read.
        wanted: By leaf, the tokens whose rows are taken from it.
        state: Whether to read its state as well.
        first: Whether this is the first read of that snapshot.
    """

    row: Row
    shape: Shape
    chunks: tuple[Chunk, ...]
    wanted: tuple[Ranges, ...]
    state: bool
    first: bool


def held_by(pieces: Sequence[Piece], leaf: int) -> Ranges:
    """Return the tokens of which *pieces* hold the rows of a leaf."""
    return union(
        token_range
        for piece in pieces
        for token_range in clip(piece.extent.held(leaf), 0, piece.hi)
    )


def pieces_of(found: Found) -> tuple[Piece, ...]:
    """Return the snapshots of a chain, each up to where the request leaves it."""
    return tuple(Piece(row, row.extent, hi) for row, _, hi in found.pieces)


def plan(found: Found, layers: Layers, checkpoints: Sequence[Row]) -> Plan:
    """Return how to rebuild the deepest position that can be resumed.

    Args:
        found: The chain that holds the request's prefix.
        layers: The layers of its snapshots.
        checkpoints: Snapshots of no tokens on that chain, the deepest first.
    """
    pieces = pieces_of(found)
    best = Plan()
    if not resume.has_state(layers):
        best = _at_end(pieces, layers, found.n_tokens) or Plan(
            resume.deepest(layers, found.n_tokens, lambda x: held_by(pieces, x)), pieces
        )
    for checkpoint in checkpoints:
        if checkpoint.end <= best.n_tokens:
            break
        own = Piece(checkpoint, checkpoint.extent, checkpoint.end)
        whole = (*_upto(pieces, checkpoint.end), own)
        at_end = _at_end(whole, layers, checkpoint.end)
        if at_end is not None:
            return at_end
    return Plan(best.n_tokens, _upto(best.pieces, best.n_tokens), best.rings)


def plan_reads(plan: Plan, layers: Layers) -> list[Read]:
    """Return the reads that give the rows and the state of a plan."""
    left = resume.needs(layers, plan.n_tokens, plan.rings)
    reads: list[Read] = []
    for piece in reversed(plan.pieces):
        wanted = []
        for leaf, ranges in enumerate(left):
            own = intersect(ranges, clip(piece.extent.held(leaf), 0, piece.hi))
            wanted.append(own)
            left[leaf] = subtract(ranges, own)
        state = plan.state is piece.row
        reads += _reads(piece, layers, tuple(wanted), state)
    return reads


def _at_end(pieces: tuple[Piece, ...], layers: Layers, n_tokens: int) -> Plan | None:
    """Return how to resume just where the last piece ends, as it lay there."""
    last = pieces[-1] if pieces else None
    if last is None or last.row.end != n_tokens or last.hi != n_tokens:
        return None
    state = last.row if resume.has_state(layers) else None
    if state is not None and not last.row.is_checkpoint:
        return None
    rings = last.extent.rings
    for known in (rings, {}):
        if resume.is_covered(layers, n_tokens, known, lambda x: held_by(pieces, x)):
            return Plan(n_tokens, pieces, known, state)
    return None


def _upto(pieces: tuple[Piece, ...], n_tokens: int) -> tuple[Piece, ...]:
    # Even one that starts behind may hold rows of windows that lie before.
    return tuple(
        Piece(piece.row, piece.extent, min(piece.hi, n_tokens)) for piece in pieces
    )


def _reads(
    piece: Piece, layers: Layers, wanted: tuple[Ranges, ...], state: bool
) -> Iterator[Read]:
    if not any(wanted) and not state:
        return
    row, shape = piece.row, Shape(layers, piece.extent)
    group: list[Chunk] = []
    first = True
    for chunk in shape.chunks:
        if any(intersect(wanted[leaf], chunk.ranges) for leaf in chunk.band.leaves):
            group.append(chunk)
        if sum(chunk.nbytes for chunk in group) >= _READ_BYTES:
            yield Read(row, shape, tuple(group), wanted, state and first, first)
            group, first = [], False
    if group or (state and first):
        yield Read(row, shape, tuple(group), wanted, state and first, first)
