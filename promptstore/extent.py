"""What one snapshot holds of each layer: rows of which tokens, and which state.

A *band* is a group of leaf layers of which the same tokens' rows are held. Full
attention layers are held over all of ``[start, end)``; of a window only the rows that
the live cache still had, which may also lie before *start*.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from promptstore.layers import ITEMSIZE_BY_DTYPE, Layers, RowPart, leaves
from promptstore.ranges import Ranges, clip, count, union

CHUNK = 256
"""Tokens to a chunk: mlx-lm's own step."""


@dataclass(frozen=True)
class StateArray:
    """One array of a layer that is a function of all tokens before *end*."""

    leaf: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * ITEMSIZE_BY_DTYPE[self.dtype]


@dataclass(frozen=True)
class Band:
    """Leaf layers, by number, of which the same tokens' rows are held."""

    leaves: tuple[int, ...]
    ranges: Ranges


@dataclass(frozen=True)
class Extent:
    """What a snapshot of ``[start, end)`` holds.

    Args:
        bands: Rows.
        rings: By leaf, how the live cache's window lay at *end*.
        state: Arrays at *end*.
    """

    start: int
    end: int
    bands: tuple[Band, ...] = ()
    rings: Mapping[int, int] = field(default_factory=dict)
    state: tuple[StateArray, ...] = ()

    def held(self, leaf: int) -> Ranges:
        """Return the tokens of which the rows of a leaf are held."""
        for band in self.bands:
            if leaf in band.leaves:
                return band.ranges
        return ()

    def to_text(self) -> str:
        """Return it as JSON."""
        value = {
            "bands": [[band.leaves, band.ranges] for band in self.bands],
            "rings": sorted(self.rings.items()),
            "state": [[a.leaf, a.name, a.dtype, a.shape] for a in self.state],
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str, start: int, end: int) -> Extent:
        """Return the extent that `to_text` gave.

        Raises:
            ValueError: It is not one.
        """
        try:
            value = json.loads(text)
            bands = tuple(
                Band(_ints(leaves), tuple((int(lo), int(hi)) for lo, hi in ranges))
                for leaves, ranges in value["bands"]
            )
            rings = {int(leaf): int(ring) for leaf, ring in value["rings"]}
            state = tuple(
                StateArray(int(leaf), str(name), str(dtype), _ints(shape))
                for leaf, name, dtype, shape in value["state"]
            )
            extent = cls(start, end, bands, rings, state)
            extent._require_sense()
        except (
            TypeError, KeyError, AttributeError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise ValueError(f"not an extent: {error}") from error
        return extent

    def _require_sense(self) -> None:
        """Raise if bands or shapes are none that a snapshot can have."""
        for band in self.bands:
            inside = clip(union(band.ranges), 0, self.end)
            if inside != band.ranges or any(leaf < 0 for leaf in band.leaves):
                raise ValueError(f"not an extent: {band}")
        for array in self.state:
            if array.leaf < 0 or any(n < 0 for n in array.shape) or array.nbytes < 0:
                raise ValueError(f"not an extent: {array}")


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of a band, contiguous in the file.

    Args:
        index: Its number among all chunks of the file.
        band: Its band.
        ranges: Its tokens.
        offset: Where it starts, counted from the end of the header.
        nbytes: Its size.
    """

    index: int
    band: Band
    ranges: Ranges
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shape:
    """Where everything lies in a snapshot file.

    ::

        chunks of band 0 | of band 1 | … | state arrays | tokens
    """

    layers: Layers
    extent: Extent

    @functools.cached_property
    def leaves(self) -> Layers:
        """The leaf layers."""
        return leaves(self.layers)

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks in the order of the file."""
        found: list[Chunk] = []
        offset = 0
        for band in self.extent.bands:
            row_bytes = sum(self.leaves[leaf].token_bytes for leaf in band.leaves)
            for ranges in _split(band.ranges):
                nbytes = count(ranges) * row_bytes
                found.append(Chunk(len(found), band, ranges, offset, nbytes))
                offset += nbytes
        return tuple(found)

    def parts(self, band: Band) -> list[tuple[int, RowPart]]:
        """Return the row parts of a band in the order of a chunk, with their leaf."""
        of = self.leaves
        return [(leaf, part) for leaf in band.leaves for part in of[leaf].parts]

    @property
    def n_tokens(self) -> int:
        """Ids at the end of the file."""
        return self.extent.end - self.extent.start

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def state_nbytes(self) -> int:
        """Bytes of all state arrays."""
        return sum(array.nbytes for array in self.extent.state)

    @property
    def data_nbytes(self) -> int:
        """Bytes behind the header."""
        return self.rows_nbytes + self.state_nbytes + 8 * self.n_tokens


def _split(ranges: Ranges) -> list[Ranges]:
    """Return *ranges* in pieces of 256 tokens, counted from the first."""
    if not ranges:
        return []
    first, last = ranges[0][0], ranges[-1][1]
    edges = itertools.chain(range(first, last, CHUNK), [last])
    pieces = (clip(ranges, lo, hi) for lo, hi in itertools.pairwise(edges))
    return [piece for piece in pieces if piece]


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
