"""Recurrent state: arrays that are a function of all tokens, resumable where taken."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from promptstore.codecs.codec import Codec, Leaf
from promptstore.layers import Layer

_ATTENDED = ("left_padding", "lengths")


class ArraysCodec(Codec):
    """``ArraysCache``: slots that a model fills as it likes; some may stay empty.

    Does not tell how many tokens it has seen: other layers of the cache, or the
    caller, must.

    Source: mlx-lm 0.32.2 ``ArraysCache``.
    """

    tag = "arrays/1"
    class_name = "ArraysCache"
    kind = "state"

    def length(self, layer: Any) -> None:
        """Return ``None``: the state does not tell."""
        return

    def settings(self, layer: Any) -> dict[str, int]:
        """Return how many slots there are."""
        return {"size": len(layer.cache)}

    def describe(self, layer: Any) -> Layer:
        """Return the description of a *layer*.

        Raises:
            ValueError: It holds more than one sequence.
        """
        if layer.batch_size != 1:
            raise ValueError(
                f"an ArraysCache of {layer.batch_size} sequences cannot be stored; "
                "extract one sequence from the batch first"
            )
        return Layer(self.tag, settings=self.settings(layer))

    def state(self, layer: Any) -> dict[str, mx.array]:
        """Return the filled slots by number, and the padding if there is any."""
        slots = {str(i): a for i, a in enumerate(layer.cache) if a is not None}
        extra = {name: getattr(layer, name) for name in _ATTENDED}
        return slots | {name: a for name, a in extra.items() if a is not None}

    def build(self, cls: type[Any], layer: Layer, n_tokens: int, leaf: Leaf) -> Any:
        """Return a live layer with that state."""
        cache = cls(layer.settings["size"])
        self.attach(cache, leaf)
        return cache

    def attach(self, layer: Any, leaf: Leaf) -> None:
        """Give a live layer the state of *leaf* for its own."""
        layer.cache = [leaf.state.get(str(slot)) for slot in range(len(layer.cache))]
        for name in _ATTENDED:
            setattr(layer, name, leaf.state.get(name))


class CompressedCodec(Codec):
    """``LayerCache`` of deepseek_v41: a window, compressed groups, an open group.

    Its ``state`` lacks ``window_size``, so mlx-lm saves but cannot load it.

    Source: mlx-lm 0.32.2 ``deepseek_v41.LayerCache``.
    """

    tag = "compressed/1"
    class_name = "LayerCache"
    module = "mlx_lm.models.deepseek_v41"
    kind = "state"
    names = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")

    def length(self, layer: Any) -> int:
        """Return the tokens that *layer* has seen."""
        return int(layer.offset)

    def settings(self, layer: Any) -> dict[str, int]:
        """Return what the class was constructed with."""
        return {"window_size": int(layer.window_size)}

    def describe(self, layer: Any) -> Layer:
        """Return the description of a *layer*.

        Raises:
            ValueError: It holds more than one sequence.
        """
        if layer.window is not None and layer.window.shape[0] != 1:
            raise ValueError(
                f"a LayerCache of {layer.window.shape[0]} sequences cannot be stored"
            )
        return Layer(self.tag, settings=self.settings(layer))

    def state(self, layer: Any) -> dict[str, mx.array]:
        """Return the arrays that are there."""
        found = {name: getattr(layer, name) for name in self.names}
        return {name: array for name, array in found.items() if array is not None}

    def build(self, cls: type[Any], layer: Layer, n_tokens: int, leaf: Leaf) -> Any:
        """Return a live layer with that state."""
        cache = cls(layer.settings["window_size"])
        cache.offset = n_tokens
        self.attach(cache, leaf)
        return cache

    def attach(self, layer: Any, leaf: Leaf) -> None:
        """Give a live layer the state of *leaf* for its own."""
        for name in self.names:
            setattr(layer, name, leaf.state.get(name))
