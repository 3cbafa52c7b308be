"""Caches of classes that the store does not know, as one layer that it can hold.

Such a cache never reaches the disk. In memory it is cut only by its own methods, and
only if its owner says that they can be trusted: who puts it in here says so.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from promptstore import codecs
from promptstore.codecs import Codec
from promptstore.errors import NotCovered

CanTrim = Callable[[list[Any]], object]
"""Tells whether tokens at the end of some layers can be dropped."""
Trim = Callable[[list[Any], int], object]
"""Drops tokens at the end of layers, and returns how many; or ``None`` for all."""


@dataclass(eq=False)
class Opaque:
    """The layers of one prompt, which may be any Python objects.

    Args:
        layers: The layers.
        n_tokens: Tokens that they hold, if they do not say it themselves.
        is_cuttable: Whether tokens at the end can be dropped.
        trim: Drops them.
    """

    layers: list[Any]
    n_tokens: int
    is_cuttable: bool
    trim: Trim

    def __deepcopy__(self, memo: dict[int, Any]) -> Opaque:
        return dataclasses.replace(self, layers=copy.deepcopy(self.layers, memo))

    @property
    def offset(self) -> int:
        """How many tokens are held."""
        return min(codecs.lengths(self.layers), default=self.n_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes, as the layers say themselves; at least one."""
        return max(1, sum(getattr(layer, "nbytes", 0) for layer in self.layers))

    def cut(self, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* tokens.

        Raises:
            NotCovered: Something else was dropped, of any layer.
        """
        n_extra = self.offset - n_tokens
        n_dropped = self.trim(self.layers, n_extra)
        self.n_tokens = n_tokens
        _cut_known(self.layers, n_tokens)
        is_right = not isinstance(n_dropped, int) or n_dropped == n_extra
        if not is_right or codecs.lengths(self.layers) - {n_tokens}:
            raise NotCovered(f"trimming {n_extra} tokens did not leave {n_tokens}")


def wrap(cache: list[Any], n_tokens: int, can_trim: CanTrim, trim: Trim) -> list[Any]:
    """Return *cache* if the store knows its layers, else an opaque one of them."""
    if cache and codecs.unknown_classes(cache):
        layers = list(cache)
        is_cuttable = bool(can_trim(layers)) and _is_known_part_full(layers)
        return [Opaque(layers, n_tokens, is_cuttable, trim)]
    return cache


def unwrap(cache: Sequence[Any]) -> Sequence[Any]:
    """Return the layers that `wrap` was given."""
    if len(cache) == 1 and isinstance(cache[0], Opaque):
        return cache[0].layers
    return cache


def _is_known_part_full(layers: Sequence[Any]) -> bool:
    """Whether what has a codec is full attention: no trim may cut into a window."""
    return all(codec.kind == "full" for codec, _ in _known(layers))


def _cut_known(layers: Sequence[Any], n_tokens: int) -> None:
    """Cut for good what has a codec: a trim by mlx-lm's own method may come undone."""
    for codec, leaf in _known(layers):
        codec.cut(leaf, n_tokens)


def _known(layers: Sequence[Any]) -> Iterator[tuple[Codec, Any]]:
    for leaf in codecs.leaves_of(layers):
        codec = codecs.codec_of(leaf)
        if codec is not None:
            yield codec, leaf
