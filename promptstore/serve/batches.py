"""mlx-lm's batches, watched: who shared one, what is left of a cancelled request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlx_lm.generate import BatchGenerator

from promptstore.metrics import Metrics
from promptstore.mlx_lm.generation import is_full

Keep = Callable[[list[int], list[Any]], None]
"""Stores tokens and the cache of a request that was not finished."""


class FromBatch(list[Any]):
    """The layers of one sequence that came out of a batch.

    Attributes:
        shared: Whether others were in the batch as well.
    """

    shared: bool = False


class Batches(BatchGenerator):
    """A ``BatchGenerator`` that tells what its caches have been through.

    Args:
        keep: Called with what a removed request had computed.
        on_close: Called with this when it is not needed any more.
        metrics: What is counted.
    """

    def __init__(
        self,
        *args: Any,
        keep: Keep,
        on_close: Callable[[Batches], None],
        metrics: Metrics,
        **more: Any,
    ) -> None:
        self._on_close = on_close
        super().__init__(*args, **more)
        self._keep = keep
        self._metrics = metrics
        self._shared: set[int] = set()
        self._is_whole = True

    def next(self) -> Any:
        """Go on with all requests; see ``BatchGenerator.next``."""
        upstream: Any = super()
        self._is_whole = False
        with self.stats() as stats:
            prompts, answers = upstream.next()
        self._is_whole = True
        if stats.prompt_tokens:
            self._metrics.prefilled(stats.prompt_tokens, stats.prompt_time)
        self._note_company(prompts, answers)
        for answer in answers:
            if answer.prompt_cache is not None:
                answer.prompt_cache = self._tag(answer.uid, answer.prompt_cache)
                self._shared.discard(answer.uid)
        return prompts, answers

    def close(self) -> None:
        """Let go of what mlx was told; see ``BatchGenerator``."""
        upstream: Any = super()
        upstream.close()
        self._on_close(self)

    def extract_cache(self, uids: Iterable[int]) -> Any:
        """Return caches and tokens by request; see ``BatchGenerator``."""
        upstream: Any = super()
        found = upstream.extract_cache(uids)
        return {
            uid: (self._tag(uid, cache or []), tokens)
            for uid, (cache, tokens) in found.items()
        }

    def remove(self, uids: Iterable[int], *args: Any, **more: Any) -> Any:
        """Give up requests, but keep what they had computed."""
        uids = list(uids)
        self.keep(uids)
        self._shared.difference_update(uids)
        upstream: Any = super()
        return upstream.remove(uids, *args, **more)

    def keep(self, uids: Iterable[int] | None = None) -> None:
        """Hand what requests have computed so far to be kept.

        A step that failed may leave layers ahead of the tokens, or tokens ahead of
        layers; state does not tell, so then only what does is kept.

        Args:
            uids: Which; all that are under way if not given.
        """
        if uids is None:
            uids = [*self._prompt_batch.uids, *self._generation_batch.uids]
        for cache, tokens in self.extract_cache(uids).values():
            if tokens and (self._is_whole or is_full(cache)):
                self._keep(list(tokens), cache)

    def _note_company(self, prompts: list[Any], answers: list[Any]) -> None:
        for uids in (
            {response.uid for response in prompts},
            {*(response.uid for response in answers), *self._generation_batch.uids},
        ):
            if len(uids) > 1:
                self._shared |= uids

    def _tag(self, uid: int, cache: Iterable[Any]) -> FromBatch:
        tagged = FromBatch(cache)
        tagged.shared = uid in self._shared
        return tagged
