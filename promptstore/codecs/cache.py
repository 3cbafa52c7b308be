"""Whole prompt caches: lists of layers, each with the codec of its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from promptstore.codecs.table import Codec, codec_by_tag, codec_of
from promptstore.errors import NotCovered
from promptstore.layers import Layer, Layers


def _codecs(cache: Sequence[Any]) -> list[Codec]:
    codecs = [codec_of(layer) for layer in cache]
    unknown = sorted(
        {
            type(layer).__name__
            for layer, codec in zip(cache, codecs, strict=True)
            if codec is None
        }
    )
    if unknown:
        raise NotCovered(f"no codec for {', '.join(unknown)}")
    return [codec for codec in codecs if codec is not None]


def has_codecs(cache: Sequence[Any]) -> bool:
    """Whether every layer's class is in the table."""
    return all(codec_of(layer) is not None for layer in cache)


def n_cached(cache: Sequence[Any]) -> int:
    """Return the number of tokens that a prompt cache holds, read from its layers.

    Never compute it from what was generated: mlx-lm runs one token ahead, and a
    draft model may lag behind its target. Layers that disagree hold together what
    the shortest holds.

    Args:
        cache: A prompt cache, as ``mlx_lm.models.cache.make_prompt_cache`` makes it.

    Raises:
        NotCovered: A layer does not say how many tokens it holds.
    """
    lengths = []
    for layer in cache:
        codec = codec_of(layer)
        if codec is not None:
            lengths.append(codec.length(layer))
        elif isinstance(offset := getattr(layer, "offset", None), int):
            lengths.append(offset)
        else:
            raise NotCovered(f"a {type(layer).__name__} does not say what it holds")
    return min(lengths, default=0)


def describe(cache: Sequence[Any]) -> Layers:
    """Return the description of a cache that holds at least one token.

    Raises:
        NotCovered: A class is not in the table.
        ValueError: A layer holds more than one sequence.
    """
    return tuple(
        codec.describe(layer)
        for codec, layer in zip(_codecs(cache), cache, strict=True)
    )


def part_arrays(cache: Sequence[Any]) -> list[mx.array]:
    """Return the row parts of all layers in order, padded as they are."""
    pairs = zip(_codecs(cache), cache, strict=True)
    return [array for codec, layer in pairs for array in codec.arrays(layer)]


def rebuild(layers: Layers, arrays: Sequence[mx.array], n_tokens: int) -> list[Any]:
    """Return a live cache of *n_tokens* on *arrays*, which become its own.

    Args:
        layers: The description; *arrays* are its row parts in order.
        arrays: Evaluated, with room for at least *n_tokens*.
        n_tokens: Tokens that the arrays hold.

    Raises:
        NotCovered: A tag is not in the table.
    """
    cache, at = [], 0
    for layer in layers:
        known = codec_by_tag(layer.tag)
        if known is None:
            raise NotCovered(f"no codec for {layer.tag}")
        codec, cls = known
        own = list(arrays[at : at + len(layer.parts)])
        at += len(layer.parts)
        cache.append(codec.build(cls, layer, own, n_tokens))
    return cache


def clone(cache: Sequence[Any], n_tokens: int) -> list[Any]:
    """Return a cache of *n_tokens* that shares memory, but no object, with *cache*.

    An update of either copies first: mlx writes in place only into memory that one
    array object owns. The arrays are evaluated.
    """
    arrays = [array[...] for array in part_arrays(cache)]
    mx.eval(arrays)
    return rebuild(describe(cache), arrays, n_tokens)


def cut(cache: Sequence[Any], n_tokens: int) -> None:
    """Drop all but the first *n_tokens* of every layer, in place."""
    for codec, layer in zip(_codecs(cache), cache, strict=True):
        codec.cut(layer, n_tokens)


def fits(layers: Layers, like: Sequence[Any]) -> bool:
    """Whether *layers* are of the classes and settings of a cache *like* this one.

    Args:
        layers: The description of a stored cache.
        like: A cache as the model makes it; it may be empty.
    """
    return len(layers) == len(like) and all(
        _fits(layer, live) for layer, live in zip(layers, like, strict=True)
    )


def _fits(layer: Layer, live: Any) -> bool:
    codec = codec_of(live)
    return (
        codec is not None
        and codec.tag == layer.tag
        and codec.settings(live) == dict(layer.settings)
    )
