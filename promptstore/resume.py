"""Where a cache can be resumed: the deepest position at which every layer can be
rebuilt exactly. Pure: knows descriptions and ranges, no files and no arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from promptstore.codecs import LayerKind, codec_by_tag, has_tag
from promptstore.layers import Layers, leaves
from promptstore.ranges import Ranges, covers

Held = Callable[[int], Ranges]
"""By leaf, the tokens of which rows are at hand."""


def kinds_of(layers: Layers) -> frozenset[LayerKind]:
    """Return the kinds of layers there are."""
    return frozenset(codec_by_tag(leaf.tag).kind for leaf in leaves(layers))


def is_known(layers: Layers) -> bool:
    """Whether there is a codec for every leaf."""
    return all(has_tag(leaf.tag) for leaf in leaves(layers))


def is_cuttable(layers: Layers) -> bool:
    """Whether every position of such a cache can be resumed."""
    return kinds_of(layers) == {"full"}


def has_state(layers: Layers) -> bool:
    """Whether such a cache can be resumed only where a state was taken."""
    return "state" in kinds_of(layers)


def needs(layers: Layers, n_tokens: int, rings: Mapping[int, int]) -> list[Ranges]:
    """Return, by leaf, the tokens whose rows are needed to go on from *n_tokens*."""
    return [
        codec_by_tag(leaf.tag).needs(leaf, n_tokens, rings.get(index))
        for index, leaf in enumerate(leaves(layers))
    ]


def is_covered(
    layers: Layers, n_tokens: int, rings: Mapping[int, int], held: Held
) -> bool:
    """Whether the rows at hand are enough to go on from *n_tokens*."""
    wanted = needs(layers, n_tokens, rings)
    return all(covers(held(leaf), ranges) for leaf, ranges in enumerate(wanted))


def deepest(layers: Layers, limit: int, held: Held) -> int:
    """Return the deepest position up to *limit* that rows alone can resume."""
    position = limit
    windows = [
        index
        for index, leaf in enumerate(leaves(layers))
        if codec_by_tag(leaf.tag).kind == "window"
    ]
    while position:
        best = min(
            (_deepest_of(layers, leaf, position, held(leaf)) for leaf in windows),
            default=position,
        )
        if best == position:
            return position
        position = best
    return 0


def _deepest_of(layers: Layers, index: int, limit: int, held: Ranges) -> int:
    """Return the deepest position up to *limit* that one window can resume.

    Inside one held range, positions become resumable at some point and stay so.
    """
    leaf = leaves(layers)[index]
    codec = codec_by_tag(leaf.tag)
    for lo, hi in reversed(held):
        top = min(hi, limit)
        if top > lo and covers(held, codec.needs(leaf, top, None)):
            return top
    return 0


def stopping_kind(layers: Layers) -> LayerKind:
    """Return the kind that limits such a cache most."""
    kinds = kinds_of(layers)
    order: tuple[LayerKind, ...] = ("state", "window", "full")
    return next(kind for kind in order if kind in kinds)
