"""The one table from class to codec and from tag to codec.

A class is known by being the very class of the installed mlx-lm, never by a name
that was read from a file; a subclass may behave otherwise and is unknown.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from promptstore.codecs.codec import Codec
from promptstore.codecs.full import ConcatenateCodec, FullCodec, QuantizedCodec
from promptstore.codecs.state import ArraysCodec, CompressedCodec
from promptstore.codecs.window import ChunkedCodec, RotatingCodec
from promptstore.errors import NotCovered

COMPOSITE = "composite/1"
"""The tag of mlx-lm's ``CacheList``, which holds layers and nothing else."""

CODECS: tuple[Codec, ...] = (
    FullCodec(),
    ConcatenateCodec(),
    QuantizedCodec(),
    RotatingCodec(),
    ChunkedCodec(),
    ArraysCodec(),
    CompressedCodec(),
)
_CODEC_BY_TAG = {codec.tag: codec for codec in CODECS}
_CODEC_BY_NAME = {(codec.module, codec.class_name): codec for codec in CODECS}


@functools.cache
def live_class(module: str, name: str) -> type[Any] | None:
    """Return a class of the installed mlx-lm, or ``None`` if it has none such."""
    # Importing mlx_lm takes seconds; whoever has a live cache has paid already.
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def composite_class() -> type[Any] | None:
    """Return mlx-lm's ``CacheList``."""
    return live_class("mlx_lm.models.cache", "CacheList")


def codec_of(layer: Any) -> Codec | None:
    """Return the codec of a live leaf layer, or ``None`` for a class not known."""
    cls = type(layer)
    codec = _CODEC_BY_NAME.get((cls.__module__, cls.__qualname__))
    if codec is None or live_class(codec.module, codec.class_name) is not cls:
        return None
    return codec


def has_tag(tag: str) -> bool:
    """Whether a *tag* read from a file has a codec."""
    return tag in _CODEC_BY_TAG


def codec_by_tag(tag: str) -> Codec:
    """Return the codec of a *tag* read from a file.

    Raises:
        NotCovered: There is none.
    """
    codec = _CODEC_BY_TAG.get(tag)
    if codec is None:
        raise NotCovered(f"no codec for {tag}")
    return codec


def class_of(codec: Codec) -> type[Any]:
    """Return the live class of a codec.

    Raises:
        NotCovered: The installed mlx-lm does not have it.
    """
    cls = live_class(codec.module, codec.class_name)
    if cls is None:
        raise NotCovered(f"this mlx-lm has no {codec.module}.{codec.class_name}")
    return cls
