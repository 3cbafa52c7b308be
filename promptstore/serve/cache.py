"""The server's prompt cache: an `LRUPromptCache` that knows the running model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from promptstore.metrics import Metrics, log_line
from promptstore.mlx_lm.generation import best_match
from promptstore.mlx_lm.lru import LRUPromptCache
from promptstore.serve.batches import FromBatch
from promptstore.serve.provider import Provider
from promptstore.store import PromptStore
from promptstore.tokens import Tokens, as_tokens
from promptstore.types import Kind, Match, Namespace

_log = logging.getLogger("promptstore")


@dataclass(frozen=True)
class Fetched:
    """What the last request asked for.

    Args:
        key: The model's key.
        tokens: The whole prompt, images as negative ids.
        n_tokens: How many of them were found.
    """

    key: Any
    tokens: Tokens
    n_tokens: int


class ServedCache(LRUPromptCache):
    """mlx_lm.server's prompt cache on a store.

    Args:
        provider: Who knows the running model.
        store: Where prompt caches are kept.
        metrics: What is counted.
        max_size: How many prompts are kept in memory.
        max_bytes: How many bytes of them.
    """

    def __init__(
        self,
        provider: Provider,
        store: PromptStore,
        metrics: Metrics,
        *,
        max_size: int,
        max_bytes: int,
    ) -> None:
        super().__init__(max_size, max_bytes, store=store)
        self._provider = provider
        self._metrics = metrics
        self.fetched: Fetched | None = None

    def _match(self, model: Any, tokens: Sequence[int]) -> Match:
        began = time.perf_counter()
        ids = as_tokens(tokens)
        self.fetched = Fetched(model, ids, 0)
        namespace, _ = self._resolve(model)
        provider, args = self._provider, self._provider.cli_args
        options = {
            "kv_bits": args.kv_bits,
            "kv_group_size": args.kv_group_size,
            "quantized_kv_start": args.quantized_kv_start,
        }
        match, _ = best_match(
            self.store, namespace, ids, provider.model, provider.draft_model, options
        )
        self.fetched = Fetched(model, ids, match.n_tokens)
        seconds = time.perf_counter() - began
        self._metrics.matched(match, len(ids), seconds)
        _log.info("%s", log_line(match, len(ids), seconds))
        return match

    def _insert(
        self, model: Any, tokens: Sequence[int], cache: list[Any], kind: Kind
    ) -> None:
        if isinstance(cache, FromBatch) and not self._provider.trusts(
            shared=cache.shared
        ):
            return
        began = time.perf_counter()
        namespace, is_known = self._resolve(model)
        self.store.insert(
            namespace,
            tokens,
            cache,
            kind=kind,
            n_target=self._provider.n_target,
            to_disk=is_known,
        )
        self._metrics.inserted(time.perf_counter() - began)

    def _resolve(self, model: Any) -> tuple[Namespace, bool]:
        return self._provider.namespace, self._provider.is_identified

    def _refused(self, error: Exception) -> None:
        super()._refused(error)
        self._metrics.failed(type(error).__name__)
