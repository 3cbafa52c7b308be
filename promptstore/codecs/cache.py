"""Whole prompt caches: trees of layers, each leaf with the codec of its class."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from promptstore.buffers import dtype_name, empty, plain
from promptstore.codecs.codec import Codec, Leaf
from promptstore.codecs.table import (
    COMPOSITE,
    class_of,
    codec_by_tag,
    codec_of,
    composite_class,
)
from promptstore.errors import NotCovered
from promptstore.layers import DRAFT, Layer, Layers


def leaves_of(cache: Sequence[Any]) -> Iterator[Any]:
    """Yield the live layers that hold arrays themselves, in order."""
    composite = composite_class()
    for layer in cache:
        if composite is not None and type(layer) is composite:
            yield from leaves_of(layer.caches)
        else:
            yield layer


def _codecs(cache: Sequence[Any]) -> list[tuple[Codec, Any]]:
    pairs = [(codec_of(leaf), leaf) for leaf in leaves_of(cache)]
    known = [(codec, leaf) for codec, leaf in pairs if codec is not None]
    if len(known) < len(pairs):
        raise NotCovered(f"no codec for {', '.join(unknown_classes(cache))}")
    return known


def unknown_classes(cache: Sequence[Any]) -> list[str]:
    """Return the names of the classes that are not in the table, sorted."""
    names = {type(x).__qualname__ for x in leaves_of(cache) if codec_of(x) is None}
    return sorted(names)


def n_cached(cache: Sequence[Any]) -> int:
    """Return the number of tokens that a prompt cache holds, read from its layers.

    Never compute it from what was generated: mlx-lm runs one token ahead, and a
    draft model may lag behind its target. Layers that disagree hold together what
    the shortest holds; layers that do not tell hold what the others do.

    Args:
        cache: A prompt cache, as ``mlx_lm.models.cache.make_prompt_cache`` makes it.

    Raises:
        NotCovered: No layer says how many tokens it holds.
    """
    told = lengths(cache)
    if not told and cache:
        names = sorted({type(leaf).__name__ for leaf in leaves_of(cache)})
        raise NotCovered(f"{', '.join(names)} do not say how many tokens they hold")
    return min(told, default=0)


def lengths(cache: Sequence[Any]) -> set[int]:
    """Return how many tokens the layers that tell it hold."""
    found = set()
    for leaf in leaves_of(cache):
        codec = codec_of(leaf)
        length = codec.length(leaf) if codec else getattr(leaf, "offset", None)
        if isinstance(length, int):
            found.add(length)
    return found


def describe(cache: Sequence[Any], n_target: int | None = None) -> Layers:
    """Return the description of a cache that holds at least one token.

    Args:
        cache: A prompt cache.
        n_target: Where a draft model's layers begin, if there are any.

    Raises:
        NotCovered: A class is not in the table.
        ValueError: A layer holds more than one sequence.
    """
    layers = tuple(_describe(layer) for layer in cache)
    if n_target is None or n_target == len(layers):
        return layers
    return (*layers[:n_target], Layer(DRAFT, inner=layers[n_target:]))


def _describe(layer: Any) -> Layer:
    if type(layer) is composite_class():
        return Layer(COMPOSITE, inner=describe(layer.caches))
    ((codec, leaf),) = _codecs([layer])
    return codec.describe(leaf)


def take_apart(cache: Sequence[Any], n_tokens: int) -> list[Leaf]:
    """Return the leaves of *cache* as far as they concern its first *n_tokens*.

    Raises:
        NotCovered: A class is not in the table, or live values make no sense.
    """
    return [
        Leaf(
            codec.arrays(leaf),
            codec.runs(leaf, n_tokens),
            codec.ring(leaf) if codec.length(leaf) == n_tokens else None,
            codec.state(leaf),
        )
        for codec, leaf in _codecs(cache)
    ]


def rebuild(layers: Layers, leaves: Sequence[Leaf], n_tokens: int) -> list[Any]:
    """Return a live cache of *n_tokens* on the arrays of *leaves*, its own from now.

    Raises:
        NotCovered: A tag or its class is not known here.
    """
    supply = iter(leaves)
    return [_rebuild(layer, supply, n_tokens) for layer in in_list(layers)]


def in_list(layers: Layers) -> Layers:
    """Return the layers as they stand in a prompt cache: target's, then draft's."""
    if layers and layers[-1].tag == DRAFT:
        return layers[:-1] + layers[-1].inner
    return layers


def _rebuild(layer: Layer, supply: Iterator[Leaf], n_tokens: int) -> Any:
    if layer.tag == COMPOSITE:
        composite = composite_class()
        if composite is None:
            raise NotCovered("this mlx-lm has no CacheList")
        return composite(*(_rebuild(x, supply, n_tokens) for x in layer.inner))
    codec, leaf = codec_by_tag(layer.tag), next(supply)
    cls = class_of(codec)
    return codec.build(cls, layer, n_tokens, leaf)


def clone(cache: Sequence[Any]) -> list[Any]:
    """Return a cache that shares memory, but no object, with *cache*.

    An update of either copies first: mlx writes in place only into memory that one
    array object owns. State is copied, since it may be a view that keeps something
    far larger alive. The arrays are evaluated and contiguous.
    """
    copies = [_clone(layer) for layer in cache]
    leaves = list(leaves_of(copies))
    mx.eval([codec.arrays(leaf) for codec, leaf in _codecs(leaves)])
    return copies


def _clone(layer: Any) -> Any:
    if type(layer) is composite_class():
        return type(layer)(*(_clone(inner) for inner in layer.caches))
    ((codec, leaf),) = _codecs([layer])
    rows = [mx.contiguous(array) for array in codec.arrays(leaf)]
    twin = copy.copy(leaf)
    codec.attach(twin, Leaf(rows, state=copy_state(codec.state(leaf))))
    return twin


def copy_state(state: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return copies of state arrays in memory of their own, evaluated."""
    whole = {name: mx.contiguous(array) for name, array in state.items()}
    mx.eval(whole)
    made = empty([(dtype_name(array), array.shape) for array in whole.values()])
    for source, target in zip(whole.values(), made, strict=True):
        plain(target)[:] = plain(source)
    return dict(zip(whole, made, strict=True))


def cut(cache: Sequence[Any], n_tokens: int) -> None:
    """Drop all but the first *n_tokens* of a cache of full attention, in place."""
    for codec, leaf in _codecs(cache):
        codec.cut(leaf, n_tokens)


def fits(layers: Layers, like: Sequence[Any]) -> bool:
    """Whether *layers* are of the classes and settings of a cache *like* this one.

    Args:
        layers: The description of a stored cache.
        like: A cache as the model makes it; it may be empty.
    """
    flat = in_list(layers)
    return len(flat) == len(like) and all(
        _fits(layer, live) for layer, live in zip(flat, like, strict=True)
    )


def misfit(layers: Layers, like: Sequence[Any]) -> tuple[str, str, str] | None:
    """Return the first setting in which stored layers differ from a cache.

    Args:
        layers: The description of a stored cache.
        like: A cache as the model makes it; it may be empty.

    Returns:
        Its name, its value in *like* and that in *layers*; ``None`` if they fit.
    """
    return _misfit_of_all(in_list(layers), like, "layer ")


def _misfit_of_all(
    layers: Layers, like: Sequence[Any], where: str
) -> tuple[str, str, str] | None:
    if len(layers) != len(like):
        return f"{where.rstrip(' .')}s", str(len(like)), str(len(layers))
    pairs = enumerate(zip(layers, like, strict=True))
    found = (_misfit(layer, live, f"{where}{n}") for n, (layer, live) in pairs)
    return next((each for each in found if each is not None), None)


def _misfit(layer: Layer, live: Any, where: str) -> tuple[str, str, str] | None:
    if type(live) is composite_class():
        if layer.tag != COMPOSITE:
            return f"{where} class", COMPOSITE, layer.tag
        return _misfit_of_all(layer.inner, live.caches, f"{where}.")
    codec = codec_of(live)
    if codec is None or codec.tag != layer.tag:
        ours = type(live).__name__ if codec is None else codec.tag
        return f"{where} class", ours, layer.tag
    settings = codec.settings(live)
    for name in sorted({*settings, *layer.settings}):
        value, stored = settings.get(name), layer.settings.get(name)
        if value != stored:
            return f"{where} {name}", str(value), str(stored)
    return None


def _fits(layer: Layer, live: Any) -> bool:
    if type(live) is composite_class():
        return layer.tag == COMPOSITE and fits(layer.inner, live.caches)
    codec = codec_of(live)
    return (
        codec is not None
        and codec.tag == layer.tag
        and codec.settings(live) == dict(layer.settings)
    )
