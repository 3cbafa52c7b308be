"""Caches of classes that the store does not know, as one layer that it can hold.

Such a cache never reaches the disk. In memory it is cut only by its own methods, and
only if its owner says that they can be trusted: who puts it in here says so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from promptstore import codecs
from promptstore.errors import NotCovered


@dataclass(eq=False)
class Opaque:
    """The layers of one prompt, which may be any Python objects.

    Args:
        layers: The layers.
        n_tokens: Tokens that they hold, if they do not say it themselves.
        can_trim: Whether tokens at the end of such layers can be dropped.
        trim: Drops so many tokens at the end, and returns how many it dropped; or
            ``None`` if it does not say.
    """

    layers: list[Any]
    n_tokens: int
    can_trim: Callable[[list[Any]], bool]
    trim: Callable[[list[Any], int], object]

    def __deepcopy__(self, memo: dict[int, Any]) -> Opaque:
        return dataclasses.replace(self, layers=copy.deepcopy(self.layers, memo))

    @property
    def offset(self) -> int:
        """How many tokens are held."""
        with contextlib.suppress(NotCovered):
            return codecs.n_cached(self.layers)
        return self.n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes, as the layers say themselves; at least one."""
        return max(1, sum(getattr(layer, "nbytes", 0) for layer in self.layers))

    @property
    def is_cuttable(self) -> bool:
        """Whether tokens at the end can be dropped."""
        return bool(self.can_trim(self.layers))

    def cut(self, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* tokens.

        Raises:
            NotCovered: Something else was dropped.
        """
        n_extra = self.offset - n_tokens
        n_dropped = self.trim(self.layers, n_extra)
        self.n_tokens = n_tokens
        is_right = not isinstance(n_dropped, int) or n_dropped == n_extra
        if not is_right or self.offset != n_tokens:
            raise NotCovered(f"trimming {n_extra} tokens did not leave {n_tokens}")


def wrap(
    cache: list[Any],
    n_tokens: int,
    can_trim: Callable[[list[Any]], bool],
    trim: Callable[[list[Any], int], object],
) -> list[Any]:
    """Return *cache* if the store knows its layers, else an opaque one of them."""
    if cache and codecs.unknown_classes(cache):
        return [Opaque(list(cache), n_tokens, can_trim, trim)]
    return cache


def unwrap(cache: Sequence[Any]) -> Sequence[Any]:
    """Return the layers that `wrap` was given."""
    if len(cache) == 1 and isinstance(cache[0], Opaque):
        return cache[0].layers
    return cache
