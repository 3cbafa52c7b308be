"""LocalAI's prompt cache for its MLX backends, on a store.

Source: LocalAI ``backend/python/mlx/mlx_cache.py`` (its signatures) and ``backend.py``
(how they are called); ``backend/backend.proto``, message ``PredictOptions``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from promptstore.counters import Counters
from promptstore.mlx_lm import LRUPromptCache
from promptstore.opaque import CanTrim, Trim
from promptstore.store import PromptStore
from promptstore.types import Kind

_CLEAR_S = 60.0


class PromptCache:
    """LocalAI's methods on one store: what a request uses.

    Each may be called from any thread. A cache that was fetched may be used on the
    thread that fetched it, and on others. One that is inserted must have been computed
    on the inserting thread, or be evaluated: mlx refuses to evaluate what another
    thread left lazy, and then it is not kept. Nothing is raised for trouble with a
    cache or the disk: it is logged once and costs a miss.

    Args:
        lru: Where the prompts are.
        path: Their directory; ``None`` if they are in memory only.
        counters: Where trouble is noted.
    """

    def __init__(
        self, lru: LRUPromptCache, path: Path | None, counters: Counters
    ) -> None:
        self._lru = lru
        self.path = path
        self._counters = counters

    def __len__(self) -> int:
        """Prompts in memory. One whose end is on disk leaves it when it is fetched."""
        return len(self._lru)

    @property
    def max_size(self) -> int:
        """How many prompts are kept in memory; a new limit holds at once."""
        return self._lru.max_size

    @max_size.setter
    def max_size(self, n_prompts: float) -> None:
        self._lru.max_size = int(n_prompts)

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int], *, prefix_only: bool = False
    ) -> tuple[list[Any] | None, list[int]]:
        """Return a live cache of the longest usable prefix, and the tokens left.

        The cache is the caller's own; the prompt remains for the next request. At
        least one token is left, since a backend answers an empty rest by feeding the
        whole prompt once more. What cannot be cut back to there is not used.

        Args:
            model: What ``mlx_lm.load`` was given: a directory or a hub id. Prompts of
                any other key stay in memory.
            tokens: The whole prompt.
            prefix_only: Taken for newer backends, which ask for it where a cache
                cannot be trimmed. That is looked at in any case.

        Returns:
            ``(None, tokens)`` if nothing can be used.
        """
        cache, rest = self._lru.fetch_nearest_cache(model, tokens)
        return cache, list(rest)

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        reusable: bool = False,
    ) -> None:
        """Keep the cache of *tokens* under those of them that it really covers.

        So it may be called after an interruption. A cache that holds more than
        *tokens* and cannot be cut is not kept.

        Args:
            model: The model's key.
            tokens: The tokens that the cache was computed from.
            prompt_cache: The cache. It remains the caller's.
            reusable: Whether other prompts will branch off here: it stays beside
                longer ones.
        """
        kind: Kind = "system" if reusable else "assistant"
        self._lru.insert_cache(model, tokens, prompt_cache, cache_type=kind)

    def clear(self) -> None:
        """Forget what is in memory. What is on disk stays, and what is on its way
        there is waited for."""
        store = self._lru.store
        with _quietly(self._counters):
            store.flush(_CLEAR_S)
        with _quietly(self._counters):
            store.shrink_memory(to_bytes=0, to_entries=0)

    def close(self) -> None:
        """Write what is queued, then let go of everything. Afterwards all is a miss.

        A program that ends without it writes what is queued as well.
        """
        with _quietly(self._counters):
            self._lru.store.close()


class ThreadSafeLRUPromptCache(PromptCache):
    """A drop-in for LocalAI's class: the same methods, on a store.

    Differences, each for a reason: a fetch leaves at least one token, and the prompt
    for the next one; a cache is kept under what it covers; and with *path*, prompts
    survive a restart.

    Args:
        max_size: How many prompts are kept in memory; a backend's options are floats.
        can_trim_fn: Tells whether tokens at the end of a cache can be dropped.
        trim_fn: Drops them. Both are asked only about layers of classes that the store
            does not know; mlx-lm's own layers are cut by the store.
        path: The directory of the prompts; made if it is not there. Without one, or if
            it cannot be used, they are kept in memory only.
        read_only: Whether nothing is written there.
        disk_bytes: Budget of everything under *path*.
        memory_bytes: Budget of the prompts in memory.
        like: A cache as the model makes it (it may be empty): only stored caches of
            the same classes and settings are used. Without it any are.
    """

    def __init__(
        self,
        max_size: float = 10,
        can_trim_fn: CanTrim | None = None,
        trim_fn: Trim | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        read_only: bool = False,
        disk_bytes: int = 50 << 30,
        memory_bytes: int = 8 << 30,
        like: Sequence[Any] | None = None,
    ) -> None:
        self._can_trim, self._trim = _both(can_trim_fn, trim_fn)
        self._disk_bytes, self._memory_bytes = disk_bytes, memory_bytes
        self._like = list(like) if like is not None else None
        self._counters = Counters()
        self._lock = threading.Lock()
        self._places: dict[tuple[Path, bool], PromptCache] = {}
        self._closed = False
        place = Path(path).absolute() if path else None
        store = self._open(place, read_only) if place else None
        if store is None:
            place = None
            store = PromptStore.open(disk_bytes=0, memory_bytes=memory_bytes)
        super().__init__(self._lru_on(store, int(max_size)), place, self._counters)
        if place is not None:
            self._places[place, read_only] = self

    def for_request(self, request: Any) -> PromptCache:
        """Return the cache that a ``PredictOptions`` asks for.

        Each ``PromptCachePath`` is a place of its own, on disk and in memory, opened
        at its first request. If ``PromptCacheRO``, nothing is written there. Without a
        path, or if it cannot be used now, this cache itself is returned.
        ``PromptCacheAll`` is not looked at: answers are stored as well.

        Args:
            request: An object with these attributes; what it lacks is unset.
        """
        name = getattr(request, "PromptCachePath", "")
        if not name:
            return self
        path = Path(name).absolute()
        read_only = bool(getattr(request, "PromptCacheRO", False))
        with self._lock:
            found = self._places.get((path, read_only))
        return found if found is not None else self._add_place(path, read_only)

    def clear(self) -> None:
        """Do so in all places."""
        super().clear()
        for place in self._others():
            place.clear()

    def close(self) -> None:
        """Do so in all places."""
        with self._lock:
            self._closed = True
        super().close()
        for place in self._others():
            place.close()

    def _others(self) -> list[PromptCache]:
        with self._lock:
            return [place for place in self._places.values() if place is not self]

    def _add_place(self, path: Path, read_only: bool) -> PromptCache:
        store = self._open(path, read_only)  # which takes a while: not under the lock
        if store is None:
            return self
        made = PromptCache(self._lru_on(store, self.max_size), path, self._counters)
        with self._lock:
            found = self._places.setdefault((path, read_only), made)
            is_needed = found is made and not self._closed
        if not is_needed:
            made.close()
        return found

    def _open(self, path: Path, read_only: bool) -> PromptStore | None:
        try:
            return PromptStore.open(
                path,
                read_only=read_only,
                disk_bytes=self._disk_bytes,
                memory_bytes=self._memory_bytes,
            )
        except Exception as error:  # a place that may: memory only
            self._counters.trouble(error)
            return None

    def _lru_on(self, store: PromptStore, max_size: int) -> LRUPromptCache:
        return LRUPromptCache(
            max_size,
            store=store,
            can_trim=self._can_trim,
            trim=self._trim,
            like=lambda model: self._like,
        )


@contextlib.contextmanager
def _quietly(counters: Counters) -> Iterator[None]:
    """Log what is raised, once, instead of raising it into a request."""
    try:
        yield
    except Exception as error:  # a place that may: logged
        counters.trouble(error)


def _both(can_trim_fn: CanTrim | None, trim_fn: Trim | None) -> tuple[CanTrim, Trim]:
    """Return functions of which the first says no where the second would not do."""

    def can_trim(layers: list[Any]) -> bool:
        if can_trim_fn is None or trim_fn is None:
            return False
        with contextlib.suppress(Exception):  # it knows no such object
            return bool(can_trim_fn(layers))
        return False

    return can_trim, trim_fn or (lambda layers, n_tokens: None)
