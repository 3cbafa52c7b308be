"""Sliding windows: the live cache forgets old rows, so what is needed may be gone.

A position can be resumed when the rows of its whole window are held. Those that the
live cache has dropped may still lie on disk, in earlier snapshots of the chain.
"""

from __future__ import annotations

from typing import Any

from promptstore.codecs.codec import Leaf, RowsCodec
from promptstore.errors import NotCovered
from promptstore.layers import Layer
from promptstore.ranges import Ranges, Run, union


class RotatingCodec(RowsCodec):
    """``RotatingKVCache``: the first *keep* tokens and the last ones, in a ring.

    After a prefill the rows lie in the order of the tokens, more than the window of
    them; after decoding past the window they lie around ``_idx``. A ring of exactly
    the window is restored as it lay, since attention sums in the order of the rows.

    Source: mlx-lm 0.32.2 ``RotatingKVCache._temporal_order``.
    """

    tag = "rotating/1"
    class_name = "RotatingKVCache"
    kind = "window"

    def length(self, layer: Any) -> int:
        """Return the tokens that *layer* has seen."""
        return 0 if layer.keys is None else int(layer.offset)

    def settings(self, layer: Any) -> dict[str, int]:
        """Return what the class was constructed with."""
        return {"max_size": int(layer.max_size), "keep": int(layer.keep)}

    def runs(self, layer: Any, n_tokens: int) -> tuple[Run, ...]:
        """Return where the rows of tokens below *n_tokens* lie, as far as held."""
        size, index = int(layer.keys.shape[2]), int(layer._idx)
        offset, keep = int(layer.offset), int(layer.keep)
        if index == offset <= size:
            return _below((Run(0, offset, 0),), n_tokens)
        first = offset - (size - keep)  # of the tokens behind the kept ones
        if not keep < index <= size or first < keep:
            raise NotCovered(
                f"a RotatingKVCache of {offset} tokens in {size} rows cannot have its "
                f"index at {index}; was it trimmed past its window?"
            )
        middle = first + size - index
        runs = Run(0, keep, 0), Run(first, middle, index), Run(middle, offset, keep)
        return _below(runs, n_tokens)

    def ring(self, layer: Any) -> int | None:
        """Return ``_idx`` of a full ring."""
        full = layer.offset > layer.max_size == layer.keys.shape[2]
        return int(layer._idx) if full else None

    def needs(self, layer: Layer, n_tokens: int, ring: int | None) -> Ranges:
        """Return the tokens whose rows are needed to go on from *n_tokens*."""
        size, keep = layer.settings["max_size"], layer.settings["keep"]
        if n_tokens <= size:
            return ((0, n_tokens),)
        return union([(0, keep), (n_tokens - (size - keep), n_tokens)])

    def place(
        self, layer: Layer, n_tokens: int, room: int, ring: int | None
    ) -> tuple[int, tuple[Run, ...]]:
        """Return how many rows to allocate, and where the needed ones go."""
        size, keep = layer.settings["max_size"], layer.settings["keep"]
        if n_tokens <= size:
            return n_tokens, (Run(0, n_tokens, 0),)
        first = n_tokens - (size - keep)
        index = size if ring is None else ring
        middle = first + size - index
        runs = Run(0, keep, 0), Run(first, middle, index), Run(middle, n_tokens, keep)
        return size, _below(runs, n_tokens)

    def build(self, cls: type[Any], layer: Layer, n_tokens: int, leaf: Leaf) -> Any:
        """Return a live layer of *n_tokens* on the arrays of *leaf*, now its own."""
        cache = cls(layer.settings["max_size"], layer.settings["keep"])
        self.attach(cache, leaf)
        cache.offset = n_tokens
        full = cache.max_size if leaf.ring is None else leaf.ring
        cache._idx = full if n_tokens > cache.max_size else n_tokens
        return cache


class ChunkedCodec(RowsCodec):
    """``ChunkedKVCache``: the rows from ``start_position`` on.

    Its own ``trim`` stops at ``start_position`` without saying so.

    Source: mlx-lm 0.32.2 ``ChunkedKVCache``.
    """

    tag = "chunked/1"
    class_name = "ChunkedKVCache"
    kind = "window"

    def length(self, layer: Any) -> int:
        """Return the tokens that *layer* has seen."""
        return 0 if layer.keys is None else int(layer.offset)

    def settings(self, layer: Any) -> dict[str, int]:
        """Return what the class was constructed with."""
        return {"chunk_size": int(layer.chunk_size)}

    def runs(self, layer: Any, n_tokens: int) -> tuple[Run, ...]:
        """Return where the rows of tokens below *n_tokens* lie, as far as held."""
        first, last = int(layer.start_position), int(layer.offset)
        if not 0 <= last - first <= layer.keys.shape[2]:
            raise NotCovered(f"a ChunkedKVCache cannot hold tokens [{first}, {last})")
        return _below((Run(first, last, 0),), n_tokens)

    def ring(self, layer: Any) -> int:
        """Return ``start_position``."""
        return int(layer.start_position)

    def needs(self, layer: Layer, n_tokens: int, ring: int | None) -> Ranges:
        """Return the tokens whose rows are needed to go on from *n_tokens*."""
        return union([(self._first(layer, n_tokens, ring), n_tokens)])

    def place(
        self, layer: Layer, n_tokens: int, room: int, ring: int | None
    ) -> tuple[int, tuple[Run, ...]]:
        """Return how many rows to allocate, and where the needed ones go."""
        first = self._first(layer, n_tokens, ring)
        return room - first, (Run(first, n_tokens, 0),)

    def build(self, cls: type[Any], layer: Layer, n_tokens: int, leaf: Leaf) -> Any:
        """Return a live layer of *n_tokens* on the arrays of *leaf*, now its own."""
        cache = cls(layer.settings["chunk_size"])
        self.attach(cache, leaf)
        cache.offset = n_tokens
        cache.start_position = self._first(layer, n_tokens, leaf.ring)
        return cache

    def _first(self, layer: Layer, n_tokens: int, ring: int | None) -> int:
        return max(0, n_tokens - layer.settings["chunk_size"]) if ring is None else ring


def _below(runs: tuple[Run, ...], n_tokens: int) -> tuple[Run, ...]:
    """Return the parts of *runs* that place tokens below *n_tokens*."""
    cut = (Run(lo, min(hi, n_tokens), slot) for lo, hi, slot in runs)
    return tuple(run for run in cut if run.lo < run.hi)
