"""What one snapshot holds of each layer: rows of which tokens, and which state.

A *band* is a group of leaf layers of which the same tokens' rows are held. Full
attention layers are held over all of ``[start, end)``; of a window only the rows that
the live cache still had, which may also lie before *start*.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from promptstore.layers import (
    ITEMSIZE_BY_DTYPE,
    Layers,
    RowPart,
    are_sizes,
    leaves,
)
from promptstore.ranges import Range, Ranges, clip, count, union
from promptstore.strict_json import parse

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
            value = parse(text)
            bands = tuple(
                Band(tuple(numbers), tuple((lo, hi) for lo, hi in ranges))
                for numbers, ranges in value["bands"]
            )
            rings = tuple((leaf, ring) for leaf, ring in value["rings"])
            state = tuple(
                StateArray(leaf, name, dtype, tuple(shape))
                for leaf, name, dtype, shape in value["state"]
            )
            extent = cls(start, end, bands, dict(rings), state)
            extent._require_sense()
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not an extent: {error}") from error
        if len(rings) != len(extent.rings):
            raise ValueError("not an extent: a ring twice")
        return extent

    def _require_sense(self) -> None:
        """Raise if bands or shapes are none that a snapshot can have."""
        found = [leaf for band in self.bands for leaf in band.leaves]
        if not are_sizes(found) or len(set(found)) != len(found):
            raise ValueError("not an extent: leaves that are none, or in two bands")
        for band in self.bands:
            numbers = [n for token_range in band.ranges for n in token_range]
            if any(type(n) is not int for n in numbers):
                raise ValueError("not an extent: ranges that are none")
            if clip(union(band.ranges), 0, self.end) != band.ranges:
                raise ValueError("not an extent: ranges that are none of its tokens")
        if not are_sizes([*self.rings, *self.rings.values()]):
            raise ValueError("not an extent: rings that are none")
        for array in self.state:
            is_named = type(array.name) is str and array.dtype in ITEMSIZE_BY_DTYPE
            if not is_named or not are_sizes([array.leaf, *array.shape]):
                raise ValueError(f"not an extent: {array}")
        if len({(array.leaf, array.name) for array in self.state}) != len(self.state):
            raise ValueError("not an extent: a state twice")


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
            row_bytes = self._row_bytes(band)
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
    def n_chunks(self) -> int:
        """How many chunks there are."""
        return sum(_n_pieces(band.ranges) for band in self.extent.bands)

    @functools.cached_property
    def rows_nbytes(self) -> int:
        """Bytes of all chunks."""
        bands = self.extent.bands
        return sum(count(band.ranges) * self._row_bytes(band) for band in bands)

    @property
    def state_nbytes(self) -> int:
        """Bytes of all state arrays."""
        return sum(array.nbytes for array in self.extent.state)

    @property
    def data_nbytes(self) -> int:
        """Bytes behind the header."""
        return self.rows_nbytes + self.state_nbytes + 8 * self.n_tokens

    def require_within(self, nbytes: int, n_chunks: int) -> None:
        """Raise unless a file of so many bytes and chunks can hold this.

        Costs nothing, whatever is claimed: for descriptions that are not proven yet.

        Raises:
            ValueError: It cannot.
        """
        extent, n_leaves = self.extent, len(self.leaves)
        named = [leaf for band in extent.bands for leaf in band.leaves]
        named += [*extent.rings, *(array.leaf for array in extent.state)]
        if any(leaf >= n_leaves for leaf in named):
            raise ValueError(f"there are only {n_leaves} leaves")
        if not all(self._row_bytes(band) for band in extent.bands):
            raise ValueError("there are rows of no bytes")
        if self.n_chunks != n_chunks:
            raise ValueError(f"{self.n_chunks} chunks have {n_chunks} checksums")
        if self.data_nbytes > nbytes:
            raise ValueError(f"{self.data_nbytes} bytes are more than {nbytes}")

    def _row_bytes(self, band: Band) -> int:
        return sum(self.leaves[leaf].token_bytes for leaf in band.leaves)


def _split(ranges: Ranges) -> list[Ranges]:
    """Return *ranges* in pieces of 256 tokens, counted from the first."""
    pieces: list[list[Range]] = []
    last = -1
    for lo, hi in ranges:
        while lo < hi:
            number = (lo - ranges[0][0]) // CHUNK
            edge = min(hi, ranges[0][0] + (number + 1) * CHUNK)
            if number != last:
                pieces.append([])
            pieces[-1].append((lo, edge))
            lo, last = edge, number
    return [tuple(piece) for piece in pieces]


def _n_pieces(ranges: Ranges) -> int:
    """Return how many pieces `_split` gives."""
    n, last = 0, -1
    for lo, hi in ranges:
        first = (lo - ranges[0][0]) // CHUNK
        n += (hi - 1 - ranges[0][0]) // CHUNK - first + (first != last)
        last = (hi - 1 - ranges[0][0]) // CHUNK
    return n
