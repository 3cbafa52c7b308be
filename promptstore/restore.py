"""Reads to live caches: buffers with room for the suffix, filled straight from disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from promptstore import buffers, plan, resume
from promptstore.buffers import Rows
from promptstore.codecs import Leaf, codec_by_tag, rebuild
from promptstore.extent import Shape, StateArray
from promptstore.index import Row
from promptstore.layers import Layers, leaves
from promptstore.plan import Plan, Read
from promptstore.ranges import Ranges, union
from promptstore.snapshot import (
    Claims,
    Placed,
    SnapshotFile,
    Stamp,
    copy_rows,
    require_plausible,
    stamp_at,
)

STATE = -1
"""What stands for the state among the numbers of chunks."""

STEP = 256
"""Rows by which mlx-lm grows a buffer."""

N_THREADS = min(4, max(2, os.cpu_count() or 1))

Part = int | tuple[int]
"""A chunk by number, or the state; or the header, as one row describes it."""

Key = tuple[str, Stamp, Part]
"""A part of a file: snapshot, what tells the file from another, which part."""

Verify = Callable[[Key], bool]
"""Whether to compare a part of a file with its checksum."""


@dataclass(frozen=True)
class Source:
    """Where the bytes come from, and how far they are trusted.

    Args:
        path_of: Where the file of a snapshot is.
        verify: Which parts of a file to verify.
        claims_of: What the index says of the snapshot of a name.
        seed: Stands for the namespace and the layers.
    """

    path_of: Callable[[str], Path]
    verify: Verify
    claims_of: Callable[[str], Claims]
    seed: bytes
    verified: set[Key] = field(default_factory=set)
    """What was verified by this restore."""

    def must_verify(self, name: str, stamp: Stamp, part: Part) -> bool:
        """Whether to verify a part of a file now."""
        key = name, stamp, part
        return self.verify(key) and key not in self.verified

    def note(self, name: str, stamp: Stamp, part: Part) -> None:
        """Remember that a part of a file was found to be as it was written."""
        self.verified.add((name, stamp, part))


@dataclass(frozen=True)
class Blank:
    """A cache to be filled: evaluated arrays, and where the tokens' rows go.

    Args:
        leaves: By leaf, its arrays.
        rows: By leaf, the same row parts as bytes.
        state: The state arrays as bytes, in the order of the snapshot's extent.
    """

    leaves: list[Leaf]
    rows: list[list[Placed]]
    state: list[Rows]


def blank(
    layers: Layers,
    n_tokens: int,
    n_total: int,
    rings: Mapping[int, int],
    state: Sequence[StateArray],
) -> Blank:
    """Return unfilled arrays for a cache of *n_tokens*.

    A full buffer would be copied whole at the first update, which costs more than
    the restore; so there is room for the request and one step of answer.

    Args:
        layers: The layers of the cache.
        n_tokens: Tokens to be filled in.
        n_total: Tokens of the whole request.
        rings: By leaf, how its window lies.
        state: The state arrays.
    """
    room = -(-(n_total + STEP) // STEP) * STEP
    places, specs = [], []
    for index, leaf in enumerate(leaves(layers)):
        codec, ring = codec_by_tag(leaf.tag), rings.get(index)
        capacity, runs = codec.place(leaf, n_tokens, room, ring)
        places.append((leaf, ring, runs))
        specs += [
            (part.dtype, (1, part.n_kv_heads, capacity, part.head_dim))
            for part in leaf.parts
        ]
    supply = iter(buffers.empty([*specs, *((s.dtype, s.shape) for s in state)]))
    parts = [[next(supply) for _ in leaf.parts] for leaf, _, _ in places]
    values = list(supply)
    made = Blank([], [], [buffers.plain(value) for value in values])
    for index, (arrays, (_, ring, runs)) in enumerate(zip(parts, places, strict=True)):
        pairs = zip(state, values, strict=True)
        own = {spec.name: value for spec, value in pairs if spec.leaf == index}
        made.leaves.append(Leaf(arrays, runs, ring, own))
        made.rows.append([Placed(buffers.rows(array), runs) for array in arrays])
    return made


def restore(
    plan_: Plan, layers: Layers, n_total: int, source: Source, pool: ThreadPoolExecutor
) -> tuple[list[Any], int]:
    """Return a live cache read from disk, and the bytes read.

    All is read before it returns, so nothing that happens to the files afterwards
    matters, and the arrays are evaluated.

    Args:
        plan_: How to rebuild it.
        layers: The layers of the cache.
        n_total: Tokens of the whole request, for which the buffers have room.
        source: Where the files are, and what of them to verify.
        pool: Threads to read with; they touch no mlx.

    Raises:
        SnapshotError: A file is missing, damaged or unreadable.
        NotCovered: A layer has no codec.
    """
    # What the index says is proven before there are buffers of the sizes it says.
    for row in (piece.row for piece in plan_.pieces):
        shape, path = Shape(layers, row.extent), source.path_of(row.name)
        require_plausible(path, shape, row.nbytes, row.checksums)
    reads = plan.plan_reads(plan_, layers)
    new = [read for read in reads if read.first and _is_new(read, source)]
    list(pool.map(lambda read: _prove(read, source), new))
    state = plan_.state.extent.state if plan_.state is not None else ()
    made = blank(layers, plan_.n_tokens, n_total, plan_.rings, state)
    cleared = pool.map(_clear_padding, made.rows)
    nbytes = sum(pool.map(lambda read: _read(read, made, source), reads))
    list(cleared)
    return rebuild(layers, made.leaves, plan_.n_tokens), nbytes


def copy(
    source: Sequence[Leaf],
    layers: Layers,
    n_tokens: int,
    n_total: int,
    *,
    whole: bool,
) -> list[Any]:
    """Return a live copy of the first *n_tokens* of a cache, with room like `restore`.

    Args:
        source: Its leaves; nobody updates their arrays meanwhile.
        layers: Its layers.
        n_tokens: Tokens to copy.
        n_total: Tokens of the whole request.
        whole: Whether these are all its tokens, so that windows keep their ring.
    """
    rings = rings_of(source) if whole else {}
    state = state_arrays(source)
    made = blank(layers, n_tokens, n_total, rings, state)
    wanted = resume.needs(layers, n_tokens, rings)
    for leaf, target, ranges in zip(source, made.rows, wanted, strict=True):
        _copy_leaf(leaf, target, ranges)
        _clear_padding(target)
    for spec, rows in zip(state, made.state, strict=True):
        rows[:] = buffers.plain(source[spec.leaf].state[spec.name])
    return rebuild(layers, made.leaves, n_tokens)


def rings_of(source: Sequence[Leaf]) -> dict[int, int]:
    """Return, by leaf, how the windows of *source* lie."""
    rings = {index: leaf.ring for index, leaf in enumerate(source)}
    return {index: ring for index, ring in rings.items() if ring is not None}


def state_arrays(source: Sequence[Leaf]) -> list[StateArray]:
    """Return the descriptions of the state arrays of *source*, in order."""
    return [
        StateArray(index, name, buffers.dtype_name(array), tuple(array.shape))
        for index, leaf in enumerate(source)
        for name, array in leaf.state.items()
    ]


def _clear_padding(leaf: Sequence[Placed]) -> None:
    """Zero the rows that no token has: no stale memory must lie in a live cache."""
    for placed in leaf:
        at = 0
        for start, end in union(
            (run.slot, run.slot + run.hi - run.lo) for run in placed.runs
        ):
            placed.rows[:, at:start] = 0
            at = end
        placed.rows[:, at:] = 0


def _copy_leaf(leaf: Leaf, targets: Sequence[Placed], ranges: Ranges) -> None:
    for array, target in zip(leaf.arrays, targets, strict=True):
        copy_rows(Placed(buffers.rows(array), leaf.runs), target, ranges)


def _is_new(read: Read, source: Source) -> bool:
    """Whether it is yet to be verified that a file is the one that its row describes.

    Raises:
        SnapshotError: There is no file of that size.
    """
    name = read.row.name
    stamp = stamp_at(source.path_of(name), read.row.nbytes)
    return source.must_verify(name, stamp, _header(read.row, source.seed))


def _prove(read: Read, source: Source) -> None:
    """Verify that a file is the one that its row describes."""
    with _open(read, source) as file:
        _prove_open(file, read, source)


def _header(row: Row, seed: bytes) -> Part:
    """Return the header as a part to verify, again if the row was edited since."""
    facts = (
        seed, row.parent, row.extent.start, row.extent.end, row.extent.bands,
        tuple(row.extent.rings.items()), row.extent.state, row.nbytes, row.checksums,
        row.tokens.tobytes(),
    )  # fmt: skip
    return (hash(facts),)


def _prove_open(file: SnapshotFile, read: Read, source: Source) -> None:
    file.verify_claims(source.claims_of(read.row.name))
    file.verify_tokens(read.row.tokens)
    source.note(read.row.name, file.stamp, _header(read.row, source.seed))


def _open(read: Read, source: Source) -> SnapshotFile:
    row = read.row
    path = source.path_of(row.name)
    return SnapshotFile(path, read.shape, row.nbytes, row.checksums)


def _read(read: Read, made: Blank, source: Source) -> int:
    name, nbytes = read.row.name, 0
    with _open(read, source) as file:
        header = _header(read.row, source.seed)
        if read.first and source.must_verify(name, file.stamp, header):
            _prove_open(file, read, source)  # it was replaced just now
        for chunk in read.chunks:
            check = source.must_verify(name, file.stamp, chunk.index)
            nbytes += file.read_chunk(chunk, made.rows, read.wanted, verify=check)
            if check:
                source.note(name, file.stamp, chunk.index)
        if read.state:
            check = source.must_verify(name, file.stamp, STATE)
            nbytes += file.read_state(made.state, verify=check)
            if check:
                source.note(name, file.stamp, STATE)
    return nbytes
