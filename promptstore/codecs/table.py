"""The one table from class to codec and from tag to codec.

A class is known by being the very class of the installed mlx-lm, never by a name
that was read from a file; a subclass may behave otherwise and is unknown.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import mlx.core as mx

from promptstore.codecs.full import ConcatenateCodec, FullCodec, QuantizedCodec
from promptstore.layers import Layer


class Codec(Protocol):
    """How one kind of layer is taken apart and put together again.

    Attributes:
        tag: The kind and its format number, as files carry it.
        class_name: Its class in ``mlx_lm.models.cache``.
        keeps_room: Whether its buffers may have rows behind the last token.
    """

    tag: str
    class_name: str
    keeps_room: bool

    def length(self, layer: Any) -> int: ...
    def arrays(self, layer: Any) -> list[mx.array]: ...
    def settings(self, layer: Any) -> dict[str, int]: ...
    def describe(self, layer: Any) -> Layer: ...
    def cut(self, layer: Any, n_tokens: int) -> None: ...
    def build(
        self, cls: type[Any], layer: Layer, arrays: list[mx.array], n_tokens: int
    ) -> Any: ...


CODECS: tuple[Codec, ...] = (FullCodec(), ConcatenateCodec(), QuantizedCodec())
_CODEC_BY_TAG = {codec.tag: codec for codec in CODECS}


@functools.cache
def _codec_by_class() -> dict[type[Any], Codec]:
    # Importing mlx_lm takes seconds; whoever has a live cache has paid already.
    from mlx_lm.models import cache

    return {getattr(cache, codec.class_name): codec for codec in CODECS}


def codec_of(layer: Any) -> Codec | None:
    """Return the codec of a live *layer*, or ``None`` for a class not in the table."""
    return _codec_by_class().get(type(layer))


def codec_by_tag(tag: str) -> tuple[Codec, type[Any]] | None:
    """Return the codec and the live class of a *tag* read from a file, if known."""
    codec = _CODEC_BY_TAG.get(tag)
    if codec is None:
        return None
    (cls,) = [cls for cls, known in _codec_by_class().items() if known is codec]
    return codec, cls
