"""Full attention: one row a token, every position resumable.

The first ``offset`` rows are the whole truth about such a layer: what lies behind
them is padding, or rows that were trimmed away, and is neither stored nor copied.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from promptstore.codecs.codec import Leaf, RowsCodec
from promptstore.layers import Layer
from promptstore.ranges import Ranges, Run


class FullCodec(RowsCodec):
    """``KVCache``: keys and values in a buffer that grows by steps of 256.

    Source: mlx-lm 0.32.2 ``KVCache``; ``state`` is the padded buffer since mlx-lm
    PR #1778, so rows are taken by ``offset``.
    """

    tag = "full/1"
    class_name = "KVCache"
    kind = "full"

    def length(self, layer: Any) -> int:
        """Return the tokens that *layer* holds."""
        if layer.keys is None:
            return 0
        return min(int(layer.offset), int(self.arrays(layer)[0].shape[2]))

    def cut(self, layer: Any, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* of *layer*."""
        layer.offset = n_tokens

    def runs(self, layer: Any, n_tokens: int) -> tuple[Run, ...]:
        """Return where the rows of tokens below *n_tokens* lie."""
        return (Run(0, min(n_tokens, self.length(layer)), 0),)

    def needs(self, layer: Layer, n_tokens: int, ring: int | None) -> Ranges:
        """Return the tokens whose rows are needed to go on from *n_tokens*."""
        return ((0, n_tokens),)

    def place(
        self, layer: Layer, n_tokens: int, room: int, ring: int | None
    ) -> tuple[int, tuple[Run, ...]]:
        """Return how many rows to allocate, and where the needed ones go."""
        return room, (Run(0, n_tokens, 0),)

    def build(self, cls: type[Any], layer: Layer, n_tokens: int, leaf: Leaf) -> Any:
        """Return a live layer of *n_tokens* on the arrays of *leaf*, now its own."""
        cache = cls(**layer.settings)
        self.attach(cache, leaf)
        self.cut(cache, n_tokens)
        return cache


class ConcatenateCodec(FullCodec):
    """``ConcatenateKVCache``: exact arrays without room.

    Its own ``trim`` moves the offset only and comes undone at the next update, so a
    layer is always built on arrays of exactly its tokens.

    Source: mlx-lm 0.32.2 ``ConcatenateKVCache``.
    """

    tag = "concatenate/1"
    class_name = "ConcatenateKVCache"

    def place(
        self, layer: Layer, n_tokens: int, room: int, ring: int | None
    ) -> tuple[int, tuple[Run, ...]]:
        """Return how many rows to allocate, and where the needed ones go."""
        return n_tokens, (Run(0, n_tokens, 0),)

    def cut(self, layer: Any, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* of *layer*."""
        if layer.keys.shape[2] != n_tokens:
            layer.keys = mx.contiguous(layer.keys[:, :, :n_tokens])
            layer.values = mx.contiguous(layer.values[:, :, :n_tokens])
            mx.eval(layer.keys, layer.values)
        layer.offset = n_tokens


class QuantizedCodec(FullCodec):
    """``QuantizedKVCache``: packed values, scales and biases of keys and values.

    Source: mlx-lm 0.32.2 ``QuantizedKVCache``.
    """

    tag = "quantized/1"
    class_name = "QuantizedKVCache"
    part_names = (
        "keys.packed",
        "keys.scales",
        "keys.biases",
        "values.packed",
        "values.scales",
        "values.biases",
    )

    def arrays(self, layer: Any) -> list[mx.array]:
        """Return the row parts of *layer*, padded as they are."""
        return [*layer.keys, *layer.values]

    def settings(self, layer: Any) -> dict[str, int]:
        """Return what the class was constructed with."""
        return {"bits": int(layer.bits), "group_size": int(layer.group_size)}

    def attach(self, layer: Any, leaf: Leaf) -> None:
        """Give a live layer the row parts of *leaf* for its own."""
        layer.keys, layer.values = tuple(leaf.arrays[:3]), tuple(leaf.arrays[3:])
