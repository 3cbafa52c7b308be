"""The server's prompt cache: an `LRUPromptCache` that knows the running model."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from promptstore.counters import cause_of
from promptstore.doctor import check
from promptstore.metrics import Metrics, log_line
from promptstore.mlx_lm.generation import best_match
from promptstore.mlx_lm.lru import LRUPromptCache
from promptstore.serve.batches import FromBatch
from promptstore.serve.last import N_CLOSEST, LastRequest
from promptstore.serve.provider import Provider
from promptstore.store import PromptStore
from promptstore.tokens import Tokens, as_tokens
from promptstore.types import (
    Explanation,
    Kind,
    Match,
    Namespace,
    Reason,
    ReasonKind,
)

_log = logging.getLogger("promptstore")


@dataclass(frozen=True)
class Fetched:
    """What the last request asked for.

    Args:
        key: The model's key.
        tokens: The whole prompt, images as negative ids.
    """

    key: Any
    tokens: Tokens


class ServedCache(LRUPromptCache):
    """mlx_lm.server's prompt cache on a store.

    Args:
        provider: Who knows the running model.
        store: Where prompt caches are kept.
        metrics: What is counted.
        max_size: How many prompts are kept in memory.
        max_bytes: How many bytes of them.
        last: Where to keep the last request and why no more of it was reused, if
            anywhere.
        check_rate: Which share of the hits to compare with a cold run.
    """

    def __init__(
        self,
        provider: Provider,
        store: PromptStore,
        metrics: Metrics,
        *,
        max_size: int,
        max_bytes: int,
        last: LastRequest | None = None,
        check_rate: float = 0.0,
    ) -> None:
        super().__init__(max_size, max_bytes, store=store)
        self._provider = provider
        self._metrics = metrics
        self.fetched: Fetched | None = None
        self.last = last
        self._check_rate = check_rate
        self._random = random.Random()

    def _match(self, model: Any, tokens: Sequence[int]) -> Match:
        began = time.perf_counter()
        ids = as_tokens(tokens)
        self.fetched = Fetched(model, ids)
        namespace, _ = self._resolve(model)
        provider, args = self._provider, self._provider.cli_args
        options = {
            "kv_bits": args.kv_bits,
            "kv_group_size": args.kv_group_size,
            "quantized_kv_start": args.quantized_kv_start,
        }
        match, fresh = best_match(
            self.store, namespace, ids, provider.model, provider.draft_model, options
        )
        seconds = time.perf_counter() - began
        match = self._checked(namespace, ids, match, fresh, seconds)
        self._metrics.matched(match, len(ids), seconds)
        _log.info("%s", log_line(match, len(ids), seconds))
        if self.last is not None:
            like = fresh if args.kv_bits is None else None
            try:
                self.last.note(ids, self._explained(namespace, ids, like, match))
            except Exception as error:  # a place that may: what is told is not needed
                self._refused(error)
        return match

    def _checked(
        self,
        namespace: Namespace,
        ids: Tokens,
        match: Match,
        fresh: list[Any],
        seconds: float,
    ) -> Match:
        """Return a match, of a sample only if it gives the logits of a cold run.

        What does not is dropped from the store, and the request computed anew. With a
        draft model, quantized KV or images nothing is compared.
        """
        provider = self._provider
        if match.cache is None or self._random.random() >= self._check_rate:
            return match
        if provider.draft_model is not None or provider.cli_args.kv_bits is not None:
            return match
        if (ids < 0).any():
            return match
        try:
            found = check(provider.model, ids.tolist(), match, seconds)
        except Exception as error:  # the model's own; the request will tell
            self._metrics.failed(cause_of(error))
            return match
        self._metrics.checked(is_right=found.is_right)
        _log.log(
            logging.INFO if found.is_right else logging.ERROR,
            "check=%s tokens=%d reused=%d max_diff=%.2g tolerance=%.2g saved_s=%.3f",
            "right" if found.is_right else "wrong",
            len(ids),
            match.n_tokens,
            found.max_diff,
            found.tolerance,
            found.saved_s,
        )
        if found.is_right:
            return match
        self.store.forget(namespace, ids, like=fresh)
        return Match(None, 0, "miss", Reason(ReasonKind.DAMAGED, 0, "check"))

    def _explained(
        self, namespace: Namespace, ids: Tokens, like: Any, match: Match
    ) -> Explanation:
        """Return why a match is what it is."""
        found = self.store.explain(namespace, ids, like=like, n_closest=N_CLOSEST)
        n_tokens = match.n_tokens
        if match.source == "memory":  # it may have been handed over
            found = dataclasses.replace(found, n_memory=n_tokens)
        return dataclasses.replace(found, n_tokens=n_tokens, reason=match.reason)

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
        self._metrics.failed(cause_of(error))
