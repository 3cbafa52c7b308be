"""mlx_lm.server's generation thread, that outlives the failure of a request."""

from __future__ import annotations

import contextlib
import functools
import logging
from queue import Queue
from typing import Any

from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache

from promptstore.counters import cause_of
from promptstore.metrics import Metrics
from promptstore.mlx_lm.generation import stops_of
from promptstore.serve.batches import Batches
from promptstore.serve.cache import ServedCache
from promptstore.serve.parameters import mend_random_state, try_out
from promptstore.serve.provider import Provider
from promptstore.serve.single import Single
from promptstore.serve.upstream import replaced
from promptstore.tokens import as_tokens
from promptstore.types import Kind

_FEW_TOKENS = 32

_log = logging.getLogger("promptstore")


class Reply:
    """The queue of one request's answer, that knows whether its end was told."""

    def __init__(self, queue: Queue[Any]) -> None:
        self._queue = queue
        self._has_ended = False
        self._context: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the end was told, or nobody waits for it any more."""
        is_left = self._context is not None and self._context._should_stop
        return self._has_ended or is_left

    def put(self, item: Any) -> None:
        """Tell the client's thread something; ``None`` or an error is the end."""
        if isinstance(item, server.GenerationContext):
            self._context = item
        if item is None or isinstance(item, Exception):
            self._has_ended = True
        self._queue.put(item)


class Generator(server.ResponseGenerator):
    """Serves requests as the server does, and keeps what an unfinished one computed.

    Args:
        provider: The models.
        cache: The prompt cache.
        metrics: What is counted, and shown at ``/metrics``.
    """

    def __init__(
        self, provider: Provider, cache: ServedCache, metrics: Metrics
    ) -> None:
        self.metrics = metrics
        self.cache = cache
        self._batches: Batches | None = None
        self._replies: list[Reply] = []
        self._prompt: list[int] = []
        prompt_cache: Any = cache
        super().__init__(provider, prompt_cache)

    def stop_and_join(self) -> None:
        """Stop serving; who called the server waits, with a bound (see `stop`)."""
        self._stop = True

    def stand_by(self) -> None:
        """Return when the thread has ended."""
        self._generation_thread.join()

    def stop(self, timeout_s: float) -> bool:
        """Stop serving; return whether the thread ended in time."""
        self.stop_and_join()
        self._generation_thread.join(timeout_s)
        return not self._generation_thread.is_alive()

    def _run_generate(self) -> None:
        single = Single(
            self.cache, self.metrics, lambda: self._stop, lambda: self._prompt
        )
        names = {"BatchGenerator": self._make_batches, "stream_generate": single}
        generate: Any = self._generate
        with replaced(**names):
            while not self._stop:
                try:
                    generate()
                except Exception as error:  # a place that may: told, and goes on
                    _log.exception("the generation thread met an error")
                    self.metrics.failed(cause_of(error))
                    self._keep_all()
                    mend_random_state()
                    # Other ranks are in the middle of what this one has left.
                    if not self._fail(error) or self._is_distributed:
                        _log.error("the generation thread died")
                        self._generation_failed = True
                        return
        self._keep_all()
        self._fail(RuntimeError("the server is shutting down"))

    def _make_batches(self, *args: Any, **more: Any) -> Batches:
        key = self.model_provider.model_key
        keep = functools.partial(self._keep, key)
        batches = Batches(
            *args, keep=keep, on_close=self._forget, metrics=self.metrics, **more
        )
        self._batches = batches
        return batches

    def _forget(self, batches: Batches) -> None:
        """Let go of a batch that is drained, and so of its model.

        One that failed is closed when it is collected, with another one under way.
        """
        if self._batches is batches:
            self._batches = None

    def _keep(self, key: Any, tokens: list[int], cache: list[Any]) -> None:
        self.cache.insert_cache(key, tokens, cache)

    def _keep_all(self) -> None:
        """Keep what all requests under way have computed, as far as it can be read."""
        batches, self._batches = self._batches, None
        if batches is not None:
            with contextlib.suppress(Exception):  # a place that may: not kept
                batches.keep()
            batches.close()  # here, and not where it is collected

    def _fail(self, error: Exception) -> bool:
        """Tell all requests under way; return whether there were any.

        Without the traceback, by which clients' threads would hold a model's arrays.
        """
        replies = [reply for reply in self._replies if not reply.is_over]
        self._replies.clear()
        for reply in replies:
            reply.put(RuntimeError(f"{type(error).__name__}: {error}"))
        return bool(replies)

    def _next_request(self, timeout: float | None = None) -> Any:
        next_request: Any = super()._next_request
        request = next_request(timeout)
        if request is None:
            return None
        self._replies = [reply for reply in self._replies if not reply.is_over]
        self._replies.append(Reply(request[0]))
        return self._replies[-1], *request[1:]

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        tokenize: Any = super()._tokenize
        prompt, segments, kinds, state, vision = tokenize(tokenizer, request, args)
        if not prompt:
            raise ValueError("the prompt is empty")
        # What cannot be served must fail here, where it fails alone.
        provider: Any = self.model_provider
        make_stops: Any = self._make_state_machine
        make_stops(provider.model_key, tokenizer, args.stop_words)
        try_out(args, tokenizer, prompt, provider.n_vocabulary)
        self._prompt = prompt
        if vision is None:
            segments, kinds = self._cut(tokenizer, prompt, segments, kinds)
        return prompt, segments, kinds, state, vision

    def _cut(
        self,
        tokenizer: Any,
        prompt: list[int],
        segments: list[list[int]],
        kinds: list[Kind],
    ) -> tuple[list[list[int]], list[Kind]]:
        """Cut the prompt also where models whose cache cannot be cut must be stored."""
        fresh = make_prompt_cache(self.model_provider.model)
        stops = stops_of(fresh, tokenizer, as_tokens(prompt))
        if not stops:
            return segments, kinds
        at = 0
        for segment, kind in zip(segments, kinds, strict=True):
            at += len(segment)
            stops[at] = kind
        ends = sorted(end for end in stops if 0 < end <= len(prompt))
        starts = [0, *ends[:-1]]
        cut = [prompt[lo:hi] for lo, hi in zip(starts, ends, strict=True)]
        kinds = [stops[end] for end in ends]
        # The server stores after each segment that has a kind, one token early after
        # the last: a whole state more, for a few tokens.
        is_near = len(cut) > 1 and len(cut[-1]) <= _FEW_TOKENS
        return cut, kinds[:-1] if is_near else kinds
