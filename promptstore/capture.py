"""A caller's cache on its way in: what it holds, and a copy that is the store's own.

The caller's arrays are evaluated here, on the caller's thread; nothing of the cache is
changed, and no array object of it is kept.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from promptstore import buffers, codecs, resume
from promptstore.codecs import Leaf
from promptstore.errors import NotCovered
from promptstore.extent import StateArray
from promptstore.layers import Layers, is_whole, to_text
from promptstore.layers import leaves as leaf_layers
from promptstore.opaque import Opaque, unwrap
from promptstore.ranges import Ranges, Run, clip, of_runs
from promptstore.restore import rings_of, state_arrays
from promptstore.snapshot import Placed, Rows


@dataclass(frozen=True, eq=False)
class Capture:
    """The store's own copy of a cache. Nobody updates it while it is here.

    Args:
        layers: Its layers, or ``None`` if a class has no codec: such a cache can only
            be used whole.
        text: What tells this layout from others.
        n_tokens: Tokens of it that count.
        cache: Its layers, alive; empty if there are only rows to copy.
        leaves: The same, taken apart.
    """

    layers: Layers | None
    text: str
    n_tokens: int
    cache: list[Any]
    leaves: list[Leaf]

    @property
    def is_whole(self) -> bool:
        """Whether it can be used only whole."""
        return self.layers is None or is_whole(self.text)

    @property
    def opaque(self) -> Opaque | None:
        """Layers of unknown classes that can be cut by themselves, if it has such."""
        first = self.cache[0] if self.cache else None
        return first if isinstance(first, Opaque) else None

    def held(self, leaf: int) -> Ranges:
        """Return the tokens of which the rows of a leaf are held."""
        return of_runs(self.leaves[leaf].runs)

    @functools.cached_property
    def rings(self) -> dict[int, int]:
        """By leaf, how its window lies."""
        return rings_of(self.leaves)

    @functools.cached_property
    def state(self) -> tuple[StateArray, ...]:
        """The state arrays."""
        return tuple(state_arrays(self.leaves))

    @functools.cached_property
    def is_cuttable(self) -> bool:
        """Whether every position can be resumed."""
        if self.layers is None or self.is_whole:
            return False
        return resume.is_cuttable(self.layers)

    def resumable(self, limit: int) -> int:
        """Return the deepest position up to *limit* that can be resumed."""
        if limit >= self.n_tokens:
            return self.n_tokens
        if self.opaque is not None and self.opaque.is_cuttable:
            return limit
        if self.layers is None or self.is_whole or resume.has_state(self.layers):
            return 0
        return resume.deepest(self.layers, limit, self.held)

    def parts(self) -> list[list[Placed]]:
        """Return, by leaf, the row parts as bytes, without a copy."""
        return [
            [Placed(buffers.rows(array), leaf.runs) for array in leaf.arrays]
            for leaf in self.leaves
        ]

    def state_bytes(self) -> list[Rows]:
        """Return the state arrays as bytes, without a copy."""
        return [buffers.plain(self.leaves[a.leaf].state[a.name]) for a in self.state]


@dataclass(frozen=True)
class Intake:
    """A caller's cache that was looked at, before anything of it is taken.

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

    def size(self) -> tuple[int, int]:
        """Return the bytes of the cache, padding included, and its arrays."""
        arrays = _arrays(self.cache)
        if len(self.cache) == 1 and isinstance(self.cache[0], Opaque):
            return self.cache[0].nbytes, len(arrays)
        return sum(array.nbytes for array in arrays), len(arrays)

    def capture(self) -> Capture:
        """Return a copy that shares the memory of the rows, but no object.

        The caller's next update copies the rows; until then they cost nothing.
        """
        if self.layers is None:
            mx.eval(_arrays(self.cache))
            own = copy.deepcopy(list(self.cache))
            mx.eval(_arrays(own))
            return Capture(None, self.text, self.n_tokens, own, [])
        own = codecs.clone(self.cache)
        leaves = codecs.take_apart(own, self.n_tokens)
        if resume.is_cuttable(self.layers):
            codecs.cut(own, self.n_tokens)
        elif set(_lengths(own)) - {self.n_tokens}:
            own = []  # alive it holds more than its tokens: only rows can be copied
        return self._capture(own, leaves)

    def capture_rows(self, first: int) -> Capture:
        """Return compact copies of the rows from token *first* on, and the state.

        The caller's next update copies nothing. Rows of windows before *first* are
        taken as well: they are few, and the disk may lack them.
        """
        assert self.layers is not None
        leaves = codecs.take_apart(self.cache, self.n_tokens)
        kinds = [
            codecs.codec_by_tag(layer.tag).kind for layer in leaf_layers(self.layers)
        ]
        own = [
            _compact(leaf, first if kind == "full" else 0)
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        return self._capture([], own)

    def _capture(self, cache: list[Any], leaves: list[Leaf]) -> Capture:
        return Capture(self.layers, self.text, self.n_tokens, cache, leaves)


def take_in(
    cache: Sequence[Any],
    n_asked: int,
    *,
    n_target: int | None = None,
    is_exact: Callable[[int], bool] = lambda _: True,
) -> Intake:
    """Look at what *cache* really holds of the *n_asked* tokens of its key.

    Args:
        cache: The caller's layers.
        n_asked: Tokens of its key.
        n_target: Where a draft model's layers begin.
        is_exact: Whether the KV of so many tokens is a function of its prefix.

    Raises:
        TypeError: It is no list of layers.
        ValueError: It holds more tokens and cannot be cut, holds several sequences,
            has no layers, or contradicts itself.
    """
    if not isinstance(cache, list | tuple):
        raise TypeError(f"cache must be a list, not {type(cache).__name__}")
    if not cache:
        raise ValueError("cache has no layers")
    if n_target is not None and not 0 < n_target <= len(cache):
        raise ValueError(f"n_target must be in [1, {len(cache)}], not {n_target}")
    unknown = codecs.unknown_classes(unwrap(cache))
    batches = [name for name in unknown if name.startswith("Batch")]
    if batches:
        raise ValueError(
            f"a {batches[0]} holds a batch; extract one sequence from it first"
        )
    n_held = _n_held(cache, n_asked)
    n_tokens = min(n_held, n_asked)
    if unknown:
        names = ", ".join(unknown)
        if n_held > n_asked:
            raise ValueError(_too_long(n_held, n_asked, names))
        # What holds more would meet tokens twice.
        if len(codecs.lengths(unwrap(cache))) > 1:
            raise ValueError(f"layers hold unequal numbers of tokens, beside {names}")
        return Intake(cache, None, f"unknown: {names}", n_tokens)
    if not n_tokens:
        return Intake(cache, (), "[]", 0)
    layers = codecs.describe(cache, n_target)
    whole = not is_exact(max([n_held, *_lengths(cache)]))
    if whole and n_held > n_asked:
        raise ValueError(_too_long(n_held, n_asked, "length-dependent rope"))
    _require_resumable(cache, layers, n_tokens, n_asked)
    return Intake(cache, layers, to_text(layers, whole=whole), n_tokens)


def _require_resumable(
    cache: Sequence[Any], layers: Layers, n_tokens: int, n_asked: int
) -> None:
    """Refuse a cache that cannot be gone on with after *n_tokens*."""
    try:
        leaves = codecs.take_apart(cache, n_tokens)
    except NotCovered as error:
        raise ValueError(str(error)) from error
    if resume.is_cuttable(layers):
        return
    lengths = _lengths(cache)
    exact = all(length == n_tokens for length in lengths)
    if exact:
        return
    held = [of_runs(leaf.runs) for leaf in leaves]
    if resume.has_state(layers) or not resume.is_covered(
        layers, n_tokens, {}, held.__getitem__
    ):
        kind = resume.stopping_kind(layers)
        raise ValueError(_too_long(max(lengths), n_asked, f"{kind} layer"))


def _too_long(n_held: int, n_asked: int, what: str) -> str:
    return (
        f"cache holds {n_held} tokens, tokens has {n_asked}, and a cache with a "
        f"{what} cannot be cut there"
    )


def _compact(leaf: Leaf, first: int) -> Leaf:
    """Return a leaf of copies, with the rows of tokens from *first* on only."""
    runs, slots, at = [], [], 0
    for lo, hi, slot in leaf.runs:
        for start, end in clip(((lo, hi),), first, hi):
            runs.append(Run(start, end, at))
            slots.append((slot + start - lo, slot + end - lo))
            at += end - start
    arrays = [_gather(array, slots) for array in leaf.arrays]
    return Leaf(arrays, tuple(runs), leaf.ring, codecs.copy_state(leaf.state))


def _gather(array: mx.array, slots: list[tuple[int, int]]) -> mx.array:
    pieces = [array[:, :, lo:hi] for lo, hi in slots] or [array[:, :, :0]]
    whole = mx.contiguous(mx.concatenate(pieces, axis=2))
    mx.eval(whole)
    return whole


def _lengths(cache: Sequence[Any]) -> list[int]:
    found = [(codecs.codec_of(leaf), leaf) for leaf in codecs.leaves_of(cache)]
    lengths = [codec.length(leaf) for codec, leaf in found if codec is not None]
    return [length for length in lengths if length is not None]


def _n_held(cache: Sequence[Any], n_asked: int) -> int:
    try:
        return codecs.n_cached(cache)
    except NotCovered:
        return n_asked  # a pure state does not tell; the caller vouches


def _arrays(cache: Sequence[Any]) -> list[mx.array]:
    inner = [
        layer
        for outer in cache
        for layer in (outer.layers if isinstance(outer, Opaque) else [outer])
    ]
    states = [getattr(leaf, "state", None) for leaf in codecs.leaves_of(inner)]
    leaves: Any = tree_flatten(states)
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
