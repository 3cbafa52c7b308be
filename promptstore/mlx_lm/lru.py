"""mlx-lm's ``LRUPromptCache``, on a store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    can_trim_prompt_cache,
)
from mlx_lm.utils import hf_repo_to_path

from promptstore.counters import Counters
from promptstore.errors import ModelChanged, ModelUnreadable
from promptstore.opaque import CanTrim, Trim, unwrap, wrap
from promptstore.store import PromptStore
from promptstore.tokens import as_tokens
from promptstore.types import KINDS, Kind, Match, Namespace

NamespaceOf = Callable[[Any], Namespace | None]
"""Tells whose KV the caches of a model key are; ``None`` if nobody can tell."""
LikeOf = Callable[[Any], list[Any] | None]
"""Returns a cache as the model of a key makes it; ``None`` if any will do."""

_UNTRUE = (ChunkedKVCache, ConcatenateKVCache)
"""They, and what inherits from them, trim more than they can, or not for good."""
NO_LIMIT = 1 << 63
"""Bytes: mlx-lm's own default."""


def _can_trim(layers: list[Any]) -> bool:
    """Whether the layers of unknown classes say that they can be cut, and it holds."""
    if not all(hasattr(layer, "is_trimmable") for layer in layers):
        return False
    if any(isinstance(layer, _UNTRUE) for layer in layers):
        return False
    return bool(can_trim_prompt_cache(layers))


def _trim(layers: list[Any], n_tokens: int) -> object:
    """Cut all layers, and return what the most reluctant one dropped."""
    dropped = [layer.trim(n_tokens) for layer in layers]
    return min((n for n in dropped if isinstance(n, int)), default=None)


class LRUPromptCache:
    """A drop-in for mlx-lm's class: the same methods, on a store.

    Differences, each for a reason: an exact hit leaves one token, since an empty rest
    kills the generation of mlx_lm.server 0.32.2; a use makes an entry the most
    recently used; byte limits hold at every insert; a cache larger than *max_bytes*
    is not kept in memory, rather than all others dropped for it; trouble with a cache
    or the disk is logged once and costs a miss, never an exception; with no prompt that
    ends with a user's turn, answers are weighed against system prompts, and what was
    just inserted is not evicted.

    Call `fetch_nearest_cache` and `insert_cache` on the thread that runs the model.

    Args:
        max_size: How many prompts are kept in memory.
        max_bytes: How many bytes of them. Default: what *store* may keep, if given.
        store: Where they are kept: its memory tier takes on these limits. Without one,
            in memory only.
        leave_last: Whether an exact hit leaves its last token to prefill. If not, it
            returns ``(cache, [])``.
        namespace: Tells whose KV the caches of a model key are. Default: keys are
            `Namespace`, a model's directory, or mlx_lm.server's tuples of the
            directories of model, adapter and draft model. What a key of another form
            owns stays in memory, and is this object's alone.
        can_trim: Whether tokens at the end of layers of classes that the store does
            not know can be dropped. Default: what their methods say.
        trim: Drops them. Default: their own methods.
        like: Tells which classes and settings of layers the model of a key has now:
            stored caches of others are not used. Default: any are.

    Source: mlx-lm 0.32.2 ``models.cache.LRUPromptCache``.
    """

    def __init__(
        self,
        max_size: int = 10,
        max_bytes: int = NO_LIMIT,
        *,
        store: PromptStore | None = None,
        leave_last: bool = True,
        namespace: NamespaceOf | None = None,
        can_trim: CanTrim = _can_trim,
        trim: Trim = _trim,
        like: LikeOf = lambda model: None,
    ) -> None:
        if store is None:
            store = PromptStore.open(disk_bytes=0, memory_bytes=NO_LIMIT)
        self.store = store
        self._leave_last = leave_last
        self._namespace_of = namespace or Identities()
        self._nameless: dict[Hashable, Namespace] = {}
        self._can_trim = can_trim
        self._trim = trim
        self._like = like
        self._counters = Counters()
        self.max_size = max_size
        if max_bytes < NO_LIMIT:
            self.max_bytes = max_bytes
        else:
            self._max_bytes = max_bytes

    def __len__(self) -> int:
        """Prompts in memory."""
        return sum(n for n, _ in self.store.memory_by_kind().values())

    @property
    def max_size(self) -> int:
        """How many prompts are kept in memory; a new limit holds at once."""
        return self._max_size

    @max_size.setter
    def max_size(self, n_prompts: int) -> None:
        self._max_size = n_prompts
        self.store.limit_memory(to_entries=max(0, n_prompts))

    @property
    def max_bytes(self) -> int:
        """How many bytes of them; a new limit holds at once."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, nbytes: int) -> None:
        self._max_bytes = nbytes
        self.store.limit_memory(to_bytes=max(0, nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(nbytes for _, nbytes in self.store.memory_by_kind().values())

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """Return a live cache of the longest usable prefix, and the tokens left.

        The cache is the caller's own.

        Args:
            model: The model's key.
            tokens: The whole prompt.

        Returns:
            ``(None, tokens)`` if nothing can be used.
        """
        try:
            match = self._match(model, tokens)
        except Exception as error:  # a place that may: a miss
            self._refused(error)
            return None, tokens
        if match.cache is None:
            return None, tokens
        return list(unwrap(match.cache)), tokens[match.n_tokens :]

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: Kind = "assistant",
    ) -> None:
        """Keep the cache of *tokens*, in memory and on disk.

        It is kept under the tokens that it really covers. One that holds more than
        *tokens* and cannot be cut is refused.

        Args:
            model: The model's key.
            tokens: The tokens that the cache was computed from.
            prompt_cache: The cache. It remains the caller's.
            cache_type: ``"system"``, ``"user"`` or ``"assistant"``: what they end with.

        Raises:
            ValueError: There is no such *cache_type*.
        """
        if cache_type not in get_args(Kind):
            raise ValueError(f"cache_type must be one of {KINDS}, not {cache_type!r}")
        try:
            self._insert(model, tokens, prompt_cache, cache_type)
        except Exception as error:  # a place that may: not kept
            self._refused(error)

    def trim_to(
        self, *, n_sequences: int | None = None, n_bytes: int | None = None
    ) -> None:
        """Evict from memory until no more than these are left; on disk they stay.

        Args:
            n_sequences: How many prompts; below zero is zero.
            n_bytes: How many bytes of them; below zero is zero.
        """
        sizes = [None if n is None else max(0, n) for n in (n_bytes, n_sequences)]
        self.store.shrink_memory(to_bytes=sizes[0], to_entries=sizes[1])

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return the prompts in memory and their bytes, by what they end with."""
        by_kind = self.store.memory_by_kind()
        return {
            kind: {"n_sequences": by_kind[kind][0], "n_bytes": by_kind[kind][1]}
            for kind in KINDS
        }

    def _match(self, model: Any, tokens: Sequence[int]) -> Match:
        namespace, _ = self._resolve(model)
        like = self._like(model)
        if like is not None:
            like = self._wrap(like, 0)
        return self.store.match(namespace, self._request(tokens), like=like)

    def _request(self, tokens: Sequence[int]) -> Any:
        """Return what a match must be asked for, as it always leaves one token."""
        ids = as_tokens(tokens)
        return ids if self._leave_last else np.append(ids, 0)

    def _insert(
        self, model: Any, tokens: Sequence[int], cache: list[Any], kind: Kind
    ) -> None:
        namespace, is_known = self._resolve(model)
        own = self._wrap(cache, len(tokens))
        self.store.insert(namespace, tokens, own, kind=kind, to_disk=is_known)

    def _wrap(self, cache: list[Any], n_tokens: int) -> list[Any]:
        return wrap(cache, n_tokens, self._can_trim, self._trim)

    def _resolve(self, model: Any) -> tuple[Namespace, bool]:
        """Return whose KV a key's caches are, and whether another process knows."""
        namespace = self._namespace_of(model)
        if namespace is not None:
            return namespace, True
        # No two keys may meet, nor may equal ones of two objects on one store.
        own = Namespace(f"in memory, {secrets.token_hex(16)}")
        return self._nameless.setdefault(model, own), False

    def _refused(self, error: Exception) -> None:
        self._counters.trouble(error)


class Identities:
    """Namespaces of models by the paths in their keys."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ModelFiles | None] = {}

    def __call__(self, key: Any) -> Namespace | None:
        """Return the namespace of a key; ``None`` if it names no model's files.

        Raises:
            ModelChanged: The files are not what they were: nobody can tell whether
                the model that runs is the old one or the new one.
            ModelUnreadable: They cannot be read any more.
        """
        if isinstance(key, Namespace):
            return key
        if key not in self._known:
            self._known[key] = files_of(key)
        known = self._known[key]
        if known is None:
            return None
        if known.identify() != known.namespace:
            raise ModelChanged(known.model)
        return known.namespace


class ModelFiles:
    """Where the parts of a model lie, and what they were at first."""

    def __init__(self, model: Path, *others: Path | None) -> None:
        self.model = model
        self._others = others
        self.namespace = self.identify()

    def identify(self) -> Namespace:
        """Return what they are now."""
        return Namespace.from_model(self.model, *self._others)


def files_of(key: Any) -> ModelFiles | None:
    """Return the files that a key names, if it does.

    Args:
        key: A model's directory or hub id, or a tuple of those of a model, its
            adapter and its draft model.
    """
    names = key if isinstance(key, tuple) else (key,)
    if not 1 <= len(names) <= 3 or not names[0]:
        return None
    if not all(isinstance(name, str | Path | None) for name in names):
        return None
    try:
        model, *others = (_directory(name) if name else None for name in names)
        assert model is not None
        return ModelFiles(model, *others)
    except (ModelUnreadable, OSError, ValueError, RuntimeError):  # no home
        return None


def _directory(name: str | Path) -> Path:
    """Return where a model lies that was loaded by its path or its hub id."""
    path = Path(name).expanduser()
    find: Any = hf_repo_to_path  # not typed
    return path if path.is_dir() else Path(find(str(name)))
