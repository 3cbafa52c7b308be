"""A caller's cache on its way in: what it holds, and a clone that is the store's.

The caller's arrays are evaluated here, on the caller's thread; nothing of it is
changed and no array object of it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from promptstore import buffers, codecs
from promptstore.errors import NotCovered
from promptstore.layers import Layers, to_text
from promptstore.snapshot import RowSource


@dataclass(frozen=True)
class Intake:
    """A prompt cache as it was handed in.

    Args:
        cache: The caller's layers.
        layers: Their description, or ``None`` if a class has no codec.
        text: What tells this layout from others.
        n_tokens: Tokens to store.
    """

    cache: Sequence[Any]
    layers: Layers | None
    text: str
    n_tokens: int

    def clone(self) -> list[Any]:
        """Return a live cache that shares memory, but no object, with the caller's."""
        if self.layers is not None:
            return codecs.clone(self.cache, self.n_tokens)
        mx.eval(_arrays(self.cache))
        own = copy.deepcopy(list(self.cache))
        mx.eval(_arrays(own))
        return own

    def rows(self, first: int) -> list[RowSource]:
        """Return compact copies of the rows from token *first* on."""
        parts = codecs.part_arrays(self.cache)
        arrays = [mx.contiguous(a[:, :, first : self.n_tokens]) for a in parts]
        mx.eval(arrays)
        return [RowSource(buffers.rows(array), first) for array in arrays]


def rows_of(cache: Sequence[Any]) -> list[RowSource]:
    """Return the rows of a clone where they lie, without a copy."""
    arrays = codecs.part_arrays(cache)
    return [RowSource(buffers.rows(array)) for array in arrays]


def size_of(cache: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of a cache, padding included, and how many arrays it has."""
    arrays = _arrays(cache)
    return sum(array.nbytes for array in arrays), len(arrays)


def take_in(cache: Sequence[Any], n_asked: int) -> Intake:
    """Return what *cache* really holds of the *n_asked* tokens of its key.

    Raises:
        TypeError: It is no list of layers.
        ValueError: It holds more tokens and cannot be cut, holds several sequences,
            or is empty of layers.
    """
    if not isinstance(cache, list | tuple):
        raise TypeError(f"cache must be a list, not {type(cache).__name__}")
    if not cache:
        raise ValueError("cache has no layers")
    n_held = _n_held(cache, n_asked)
    if codecs.has_codecs(cache):
        layers = codecs.describe(cache) if n_held else ()
        return Intake(cache, layers, to_text(layers), min(n_held, n_asked))
    if n_held > n_asked:
        raise ValueError(
            f"cache holds {n_held} tokens, tokens has {n_asked}, and a cache with a "
            f"{_unknown(cache)} cannot be cut"
        )
    return Intake(cache, None, f"unknown: {_unknown(cache)}", n_held)


def _n_held(cache: Sequence[Any], n_asked: int) -> int:
    try:
        return codecs.n_cached(cache)
    except NotCovered:
        return n_asked  # a pure state does not tell; the caller vouches


def _unknown(cache: Sequence[Any]) -> str:
    known = codecs.codec_of
    return ", ".join(sorted({type(c).__qualname__ for c in cache if known(c) is None}))


def _arrays(cache: Sequence[Any]) -> list[mx.array]:
    if codecs.has_codecs(cache):
        return codecs.part_arrays(cache)
    states = [getattr(layer, "state", None) for layer in cache]
    leaves: Any = tree_flatten(states)
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
