"""Requests that mlx_lm.server serves one at a time, with stops to store on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from promptstore.metrics import Metrics
from promptstore.mlx_lm.generation import Run, stops_of
from promptstore.serve.cache import ServedCache
from promptstore.tokens import as_tokens


class Stopped(RuntimeError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Single:
    """Stands in for ``mlx_lm.stream_generate`` in the server.

    Args:
        cache: The server's prompt cache; it knows the whole prompt of the request.
        metrics: What is counted.
        is_stopping: Whether to give up.
        prompt: Returns the whole prompt as the model reads it: images are a token of
            its own there, and negative ids in the cache's keys.
    """

    def __init__(
        self,
        cache: ServedCache,
        metrics: Metrics,
        is_stopping: Callable[[], bool],
        prompt: Callable[[], Sequence[int]],
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._is_stopping = is_stopping
        self._prompt = prompt

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: Any,
        *,
        prompt_cache: list[Any],
        draft_model: Any = None,
        **options: Any,
    ) -> Generator[Any, None, None]:
        """Yield what ``mlx_lm.stream_generate`` yields."""
        fetched = self._cache.fetched
        assert fetched is not None
        whole = as_tokens(self._prompt())
        n_held = len(whole) - len(prompt)
        options["draft_model"] = draft_model
        options["prompt_progress_callback"] = self._timed(
            options["prompt_progress_callback"], n_held
        )
        if options.get("input_embeddings") is not None:
            yield from mlx_lm.stream_generate(
                model, tokenizer, prompt, prompt_cache=prompt_cache, **options
            )
            return

        def insert(
            tokens: list[int], cache: list[Any], *, kind: Any, n_target: int | None
        ) -> None:
            del n_target  # the cache knows it
            key = [*fetched.tokens.tolist(), *tokens[len(fetched.tokens) :]]
            self._cache.insert_cache(
                fetched.key, key[: len(tokens)], cache, cache_type=kind
            )

        models = [model, draft_model]
        run = Run(insert, whole, prompt_cache, n_held, models, options)
        stops = stops_of(make_prompt_cache(model), tokenizer, whole)
        with contextlib.closing(
            run.generate(tokenizer, stops, insert_end=False)
        ) as responses:
            for response in responses:
                yield response
                if self._is_stopping():
                    responses.throw(Stopped())  # so that what there is is kept

    def _timed(
        self, progress: Callable[[int, int], None], n_before: int
    ) -> Callable[[int, int], None]:
        """Return *progress*, measuring what is prefilled between its calls."""
        last = [n_before, time.perf_counter()]

        def note(done: int, total: int) -> None:
            now = time.perf_counter()
            if done > last[0]:
                self._metrics.prefilled(int(done - last[0]), now - last[1])
            last[:] = [done, now]
            if self._is_stopping():
                raise Stopped
            progress(done, total)

        return note
