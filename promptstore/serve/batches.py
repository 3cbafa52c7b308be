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
        on_close: Called when this is not needed any more.
        metrics: What is counted.
    """

    def __init__(
        self,
        *args: Any,
        keep: Keep,
        on_close: Callable[[], None],
        metrics: Metrics,
        **more: Any,
    ) -> None:
        self._on_close = on_close
        super().__init__(*args, **more)
        self._keep = keep
        self._metrics = metrics
        self._shared: set[int] = set()
        self._n_whole: dict[int, int] | None = None

    def next(self) -> Any:
        """Go on with all requests; see ``BatchGenerator.next``.

        If that raises, some layers may be a step ahead of others, or padded.
        """
        upstream: Any = super()
        self._n_whole = self._n_tokens()
        with self.stats() as stats:
            prompts, answers = upstream.next()
        self._n_whole = None
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
        self._on_close()

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

        Args:
            uids: Which; all that are under way if not given. If a step has raised,
                only what they had before it, of caches that can be cut back to that.
        """
        if uids is None:
            uids = [*self._prompt_batch.uids, *self._generation_batch.uids]
        n_whole = self._n_whole
        if n_whole is not None:
            uids = [uid for uid in uids if n_whole.get(uid)]
        for uid, (cache, tokens) in self.extract_cache(uids).items():
            if n_whole is not None:
                if not is_full(cache):  # what is a step ahead cannot be cut back
                    continue
                tokens = tokens[: n_whole[uid]]
            if tokens:
                self._keep(list(tokens), cache)

    def _n_tokens(self) -> dict[int, int]:
        """Return how many tokens each request has in its cache."""
        uids, tokens = [], []
        for batch in (self._prompt_batch, self._generation_batch):
            uids += batch.uids
            tokens += batch.tokens
        for uid, _, _, _, given, *_ in self._unprocessed_sequences:
            uids.append(uid)
            tokens.append(given)
        return dict(zip(uids, map(len, tokens), strict=True))

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
