"""Reads to live caches: buffers with room for the suffix, filled straight from disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from promptstore import buffers
from promptstore.buffers import Rows
from promptstore.codecs import codec_by_tag, part_arrays, rebuild
from promptstore.errors import NotCovered
from promptstore.layers import Layers
from promptstore.plan import Read
from promptstore.snapshot import SnapshotFile

STEP = 256
"""Rows by which mlx-lm grows a buffer."""

N_THREADS = min(4, max(2, os.cpu_count() or 1))

Verify = Callable[[str, int], bool]
"""Whether to compare a chunk, by snapshot and number, with its checksum."""


def restore(
    reads: Sequence[Read],
    layers: Layers,
    n_tokens: int,
    n_total: int,
    *,
    path_of: Callable[[str], Path],
    verify: Verify,
    pool: ThreadPoolExecutor,
) -> tuple[list[Any], int]:
    """Return a live cache of *n_tokens* read from disk, and the bytes read.

    All is read before it returns, so nothing that happens to the files afterwards
    matters, and the arrays are evaluated.

    Args:
        reads: What gives the rows ``[0, n_tokens)``.
        layers: The layers of the cache.
        n_tokens: Tokens to restore.
        n_total: Tokens of the whole request, for which the buffers have room.
        path_of: Where the file of a snapshot is.
        verify: Which chunks to verify.
        pool: Threads to read with; they touch no mlx.

    Raises:
        SnapshotError: A file is missing, damaged or unreadable.
        NotCovered: A layer has no codec.
    """
    arrays = allocate(layers, n_tokens, n_total)
    targets = [buffers.rows(array) for array in arrays]

    def run(read: Read) -> int:
        return _read(read, targets, path_of, verify)

    nbytes = sum(pool.map(run, reads))
    return rebuild(layers, arrays, n_tokens), nbytes


def copy(
    cache: Sequence[Any], layers: Layers, n_tokens: int, n_total: int
) -> list[Any]:
    """Return a live copy of the first *n_tokens* of *cache*, with room like `restore`.

    Args:
        cache: A cache whose arrays nobody updates meanwhile; not changed.
        layers: Its layers.
        n_tokens: Tokens to copy.
        n_total: Tokens of the whole request.
    """
    arrays = allocate(layers, n_tokens, n_total)
    for source, target in zip(part_arrays(cache), arrays, strict=True):
        buffers.rows(target)[:, :n_tokens] = buffers.rows(source)[:, :n_tokens]
    return rebuild(layers, arrays, n_tokens)


def allocate(layers: Layers, n_tokens: int, n_total: int) -> list[Any]:
    """Return unfilled arrays for the row parts of all layers in order.

    A full buffer would be copied whole at the first update, which costs more than
    the restore; so there is room for the request and one step of answer.
    """
    room = -(-(n_total + STEP) // STEP) * STEP
    arrays = []
    for layer in layers:
        known = codec_by_tag(layer.tag)
        if known is None:
            raise NotCovered(f"no codec for {layer.tag}")
        capacity = room if known[0].keeps_room else n_tokens
        arrays += buffers.empty(layer.parts, capacity)
    return arrays


def _read(
    read: Read, targets: Sequence[Rows], path_of: Callable[[str], Path], verify: Verify
) -> int:
    row, nbytes = read.row, 0
    with SnapshotFile(path_of(row.name), read.shape, row.nbytes, row.checksums) as file:
        if read.first and verify(row.name, -1):
            file.verify_header()
        for chunk, lo, hi in read.chunks:
            check = verify(row.name, chunk)
            nbytes += file.read_chunk(chunk, targets, lo, hi, verify=check)
    return nbytes
