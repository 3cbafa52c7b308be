"""Full attention: one row a token, every position resumable.

The first ``offset`` rows are the whole truth about such a layer: what lies behind
them is padding, or rows that were trimmed away, and is neither stored nor copied.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from promptstore.buffers import dtype_name
from promptstore.layers import Layer, RowPart


class FullCodec:
    """``KVCache``: keys and values in a buffer that grows by steps of 256.

    Source: mlx-lm 0.32.2 ``KVCache``; ``state`` is the padded buffer since mlx-lm
    PR #1778, so rows are taken by ``offset``.
    """

    tag = "full/1"
    class_name = "KVCache"
    keeps_room = True
    part_names: tuple[str, ...] = ("keys", "values")

    def length(self, layer: Any) -> int:
        """Return the tokens that *layer* holds."""
        if layer.keys is None:
            return 0
        return min(int(layer.offset), int(self.arrays(layer)[0].shape[2]))

    def arrays(self, layer: Any) -> list[mx.array]:
        """Return the row parts of *layer*, padded as they are."""
        return [layer.keys, layer.values]

    def settings(self, layer: Any) -> dict[str, int]:
        """Return what the class was constructed with."""
        return {}

    def describe(self, layer: Any) -> Layer:
        """Return the description of a *layer* that holds at least one token.

        Raises:
            ValueError: It holds more than one sequence.
        """
        arrays = self.arrays(layer)
        if any(array.shape[0] != 1 for array in arrays):
            raise ValueError(
                f"a {self.class_name} of {arrays[0].shape[0]} sequences cannot be "
                "stored; extract one sequence from the batch first"
            )
        parts = (
            RowPart(name, array.shape[1], array.shape[3], dtype_name(array))
            for name, array in zip(self.part_names, arrays, strict=True)
        )
        return Layer(self.tag, tuple(parts), self.settings(layer))

    def cut(self, layer: Any, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* of *layer*, in place."""
        layer.offset = n_tokens

    def build(
        self, cls: type[Any], layer: Layer, arrays: list[mx.array], n_tokens: int
    ) -> Any:
        """Return a live layer of *n_tokens* on *arrays*, which become its own."""
        cache = cls()
        cache.keys, cache.values = arrays
        cache.offset = n_tokens
        return cache


class ConcatenateCodec(FullCodec):
    """``ConcatenateKVCache``: exact arrays without room.

    Its own ``trim`` moves the offset only and comes undone at the next update, so a
    cut here takes the rows away.

    Source: mlx-lm 0.32.2 ``ConcatenateKVCache``.
    """

    tag = "concatenate/1"
    class_name = "ConcatenateKVCache"
    keeps_room = False

    def cut(self, layer: Any, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* of *layer*, in place."""
        layer.keys = mx.contiguous(layer.keys[:, :, :n_tokens])
        layer.values = mx.contiguous(layer.values[:, :, :n_tokens])
        layer.offset = n_tokens

    def build(
        self, cls: type[Any], layer: Layer, arrays: list[mx.array], n_tokens: int
    ) -> Any:
        """Return a live layer of *n_tokens* on *arrays*, which become its own."""
        cache = super().build(cls, layer, arrays, n_tokens)
        if arrays[0].shape[2] != n_tokens:
            self.cut(cache, n_tokens)
        return cache


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

    def build(
        self, cls: type[Any], layer: Layer, arrays: list[mx.array], n_tokens: int
    ) -> Any:
        """Return a live layer of *n_tokens* on *arrays*, which become its own."""
        cache = cls(**layer.settings)
        cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])
        cache.offset = n_tokens
        return cache
