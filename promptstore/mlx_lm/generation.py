"""mlx-lm's own generation functions, on a store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from promptstore import chat
from promptstore.codecs import codec_of, leaves_of, n_cached
from promptstore.errors import NotCovered
from promptstore.store import PromptStore
from promptstore.tokens import Tokens, as_tokens
from promptstore.types import Kind, Match, Namespace

CHECKPOINT_EVERY = 8192
"""Tokens between checkpoints of models with state."""

Progress = Callable[[int, int], None]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    *,
    store: PromptStore,
    namespace: Namespace,
    on_match: Callable[[Match], None] | None = None,
    checkpoints: Sequence[int] | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
    draft_model: Any = None,
    **kwargs: Any,
) -> Generator[Any, None, None]:
    """Yield what ``mlx_lm.stream_generate`` yields, prefilling only what is new.

    The longest stored prefix of the prompt is restored, the rest is prefilled, and
    what the cache holds in the end is inserted: also when the caller stops early, or
    something raises, then under the tokens that the KV really covers.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompt: The whole prompt, as text or tokens.
        store: Where prompt caches are kept.
        namespace: Of the model, with *draft_model* and adapter if there are any.
        on_match: Called with the match before the prefill begins.
        checkpoints: Positions in the prompt to store on the way, for models with
            sliding windows or recurrent state, whose cache cannot be cut later.
            Default: the end of the system prompt and of the last turn, by the
            tokenizer's chat template.
        checkpoint_every: Tokens between further checkpoints of models with state;
            0 for none. Each holds the whole state.
        draft_model: A draft model; its layers are stored with the target's.
        kwargs: The options of ``mlx_lm.stream_generate``. *prompt_progress_callback*
            counts the whole prompt; *logits_processors* see all of its tokens. With
            *input_embeddings*, KV is no function of tokens, and the store is not used.

    Yields:
        ``GenerationResponse``; *prompt_tokens* counts the whole prompt and
        *prompt_tps* the tokens that were prefilled last.

    Raises:
        ValueError: The prompt is empty, or *prompt_cache* is given.

    Source: mlx-lm 0.32.2 ``stream_generate``.
    """
    if kwargs.get("prompt_cache") is not None:
        raise ValueError("prompt_cache is the store's to give; leave it out")
    if draft_model is not None:
        kwargs["draft_model"] = draft_model
    if kwargs.get("input_embeddings") is not None:
        plain: Any = prompt
        yield from mlx_lm.stream_generate(model, tokenizer, plain, **kwargs)
        return
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = as_tokens(encode(tokenizer, prompt), "prompt")
    if not len(tokens):
        raise ValueError("prompt is empty")
    match, fresh = best_match(store, namespace, tokens, model, draft_model, kwargs)
    if on_match is not None:
        on_match(match)
    models = [model, draft_model]
    run = _run_of(store, namespace, tokens, match, fresh, models, kwargs)
    stops = stops_of(fresh, tokenizer, tokens, checkpoints, checkpoint_every)
    yield from run.generate(tokenizer, stops)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int],
    verbose: bool = False,
    *,
    store: PromptStore,
    namespace: Namespace,
    **kwargs: Any,
) -> str:
    """Return the whole answer; otherwise as `stream_generate`.

    Args:
        verbose: Print the text as it comes, and the reuse at the end.

    Source: mlx-lm 0.32.2 ``generate``.
    """
    matches: list[Match] = []
    text = ""
    for response in stream_generate(
        model, tokenizer, prompt, store=store, namespace=namespace,
        on_match=matches.append, **kwargs,
    ):  # fmt: skip
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        n_reused, source = matches[0].n_tokens, matches[0].source
        print(f"\n{n_reused} of {response.prompt_tokens} tokens reused ({source})")
    return text


def precompute(
    model: Any,
    tokens: Sequence[int] | Tokens,
    *,
    store: PromptStore,
    namespace: Namespace,
    kind: Kind = "system",
    label: str | None = None,
    pin: bool = False,
    ttl_s: float | None = None,
    on_match: Callable[[Match], None] | None = None,
    progress: Progress | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
    draft_model: Any = None,
    prefill_step_size: int = 2048,
) -> Match:
    """Compute the KV of *tokens*, as far as it is not stored, and insert it.

    If something raises on the way, what was computed is inserted, without label and
    pin, so that another run goes on from there.

    Args:
        model: The model.
        tokens: A prompt that later ones begin with.
        store: Where prompt caches are kept.
        namespace: Of the model, with *draft_model* and adapter if there are any.
        kind: What the tokens end with.
        label: A name for the prompt.
        pin: Protect it from eviction.
        ttl_s: Forget it after this many seconds.
        on_match: Called with what was stored before the prefill begins.
        progress: Called with the tokens done so far and their total.
        checkpoint_every: As for `stream_generate`.
        draft_model: As for `stream_generate`.
        prefill_step_size: Tokens at once.

    Returns:
        What was stored already.

    Raises:
        ValueError: *tokens* is empty.
    """
    ids = as_tokens(tokens)
    if not len(ids):
        raise ValueError("tokens is empty")
    options = {
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": progress,
    }
    # A match leaves one token to prefill: here one that is not of the prompt.
    request = np.append(ids, 0)
    match, fresh = best_match(store, namespace, request, model, draft_model, options)
    if on_match is not None:
        on_match(match)
    models = [model, draft_model]
    run = _run_of(store, namespace, ids, match, fresh, models, options)
    stops = _every(fresh, ids, checkpoint_every)
    run.precompute(stops, kind, label=label, pin=pin, ttl_s=ttl_s)
    return match


def encode(tokenizer: Any, prompt: str | mx.array | Sequence[int]) -> Any:
    """Return the tokens of a prompt, as mlx-lm encodes it.

    Source: mlx-lm 0.32.2 ``stream_generate``.
    """
    if not isinstance(prompt, str):
        return prompt
    bos = tokenizer.bos_token
    return tokenizer.encode(
        prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
    )


def prefill(
    model: Any,
    tokens: Sequence[int] | Tokens,
    cache: list[Any],
    *,
    step_size: int = 2048,
    progress: Progress | None = None,
    quantize: Callable[[list[Any]], None] | None = None,
) -> None:
    """Compute the KV of *tokens* behind what *cache* holds; its layers are updated.

    Args:
        model: The model.
        tokens: What comes next; may be empty.
        cache: A live cache.
        step_size: Tokens at once, as mlx-lm's *prefill_step_size*.
        progress: Called with the tokens done so far and their total.
        quantize: Called with the cache after each step.
    """
    ids = as_tokens(tokens)
    total = len(ids)
    for start in range(0, total, step_size):
        if progress is not None:
            progress(start, total)
        model(mx.array(ids[start : start + step_size])[None], cache=cache)
        if quantize is not None:
            quantize(cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    if progress is not None:
        progress(total, total)


class Run:
    """One generation: how many tokens the live cache covers, at every moment.

    Args:
        insert: Stores tokens and a cache, as `PromptStore.insert` does.
        tokens: The whole prompt.
        cache: The live cache to go on with, the draft model's layers last.
        n_tokens: How many tokens it holds.
        models: The model, and the draft model or ``None``.
        kwargs: The options of ``mlx_lm.stream_generate``.

    *n_held* is that number, or ``None`` while the model runs, when layers may
    disagree; *n_safe* is what all layers had when it last did not run.
    """

    def __init__(
        self,
        insert: Callable[..., object],
        tokens: Tokens,
        cache: list[Any],
        n_tokens: int,
        models: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._insert_into_store = insert
        self._tokens = tokens
        self._cache = cache
        self._models = [model for model in models if model is not None]
        self._kwargs = kwargs
        self._history: list[int] = tokens.tolist()
        self._n_done = self._n_safe = n_tokens
        self._n_held: int | None = n_tokens
        self._n_target = len(make_prompt_cache(models[0], kwargs.get("max_kv_size")))
        self._progress: Progress = (
            kwargs.get("prompt_progress_callback") or _no_progress
        )

    def generate(
        self, tokenizer: Any, stops: dict[int, Kind], *, insert_end: bool = True
    ) -> Generator[Any, None, None]:
        """Prefill with stops to store on the way, generate, insert in the end.

        Args:
            tokenizer: The model's.
            stops: Where to store on the way, and what the prompt ends with there.
            insert_end: Whether to insert the whole in the end; if not, the caller
                does, unless something is raised.
        """
        try:
            self._stop_at(stops)
            yield from self._generate(tokenizer)
        except Exception:
            insert_end = True
            raise
        finally:
            if insert_end:
                self._insert_what_is_sure()

    def precompute(self, stops: dict[int, Kind], kind: Kind, **marks: Any) -> None:
        """Prefill with stops to store on the way, and insert all."""
        try:
            self._stop_at(stops)
            self._prefill_to(len(self._tokens))
        except BaseException:
            self._insert_what_is_sure()
            raise
        self._insert(len(self._tokens), kind, **marks)

    def _stop_at(self, stops: dict[int, Kind]) -> None:
        for position in sorted(stops):
            if self._n_done < position < len(self._tokens):
                self._prefill_to(position)
                self._insert(position, stops[position])

    def _generate(self, tokenizer: Any) -> Generator[Any, None, None]:
        rest = mx.array(self._tokens[self._n_done :])
        if len(self._models) == 1:  # with a draft mlx-lm shows no whole prompt
            _see_whole_prompt(self._kwargs, self._tokens[: self._n_done])
        self._kwargs["prompt_progress_callback"] = self._note
        responses = mlx_lm.stream_generate(
            self._models[0], tokenizer, rest, prompt_cache=self._cache, **self._kwargs
        )
        try:
            self._n_held = None
            for response in responses:
                self._history.append(response.token)
                self._n_held = self._n_safe = len(self._history)
                yield dataclasses.replace(response, prompt_tokens=len(self._tokens))
                self._n_held = None
            self._n_held = self._n_safe
        finally:
            responses.close()

    def _prefill_to(self, position: int) -> None:
        rest = self._tokens[self._n_done : position]
        target, draft = self._cache[: self._n_target], self._cache[self._n_target :]
        parts = [target, draft] if draft else [self._cache]
        step_size = self._kwargs.get("prefill_step_size") or 2048
        self._n_held = None
        for part, model in zip(parts, self._models, strict=True):
            note = self._note if part is parts[-1] else None
            prefill(model, rest, part, step_size=step_size, progress=note,
                    quantize=self._quantize)  # fmt: skip
        self._cache[:] = [layer for part in parts for layer in part]
        self._n_done = self._n_safe = self._n_held = position

    def _quantize(self, cache: list[Any]) -> None:
        """Do to a cache what mlx-lm does after each step."""
        bits = self._kwargs.get("kv_bits")
        start = self._kwargs.get("quantized_kv_start", 5000)
        group_size = self._kwargs.get("kv_group_size", 64)
        quantize: Any = maybe_quantize_kv_cache
        quantize(cache, start, group_size, bits)

    def _note(self, done: int, total: int) -> None:
        """Count the whole prompt for the caller's callback, which may raise."""
        n_tokens = self._n_done + done
        if done < total:  # in the end mlx-lm is one token ahead already
            self._n_safe = max(self._n_safe, n_tokens)
            self._n_held = n_tokens
        self._progress(n_tokens, len(self._tokens))
        self._n_held = None

    def _insert(self, n_tokens: int, kind: Kind, **marks: Any) -> None:
        has_draft = self._n_target < len(self._cache)
        # A draft that lags behind a target that cannot be cut is no error of anyone.
        errors: tuple[type[Exception], ...] = (ValueError,) if has_draft else ()
        with contextlib.suppress(*errors):
            self._insert_into_store(
                self._history[:n_tokens],
                self._cache,
                kind=kind,
                n_target=self._n_target if has_draft else None,
                **marks,
            )

    def _insert_what_is_sure(self) -> None:
        """Insert all that the cache holds; if the model was stopped in the middle of
        a step, only what was whole before, which needs layers that can be cut."""
        if self._n_held is not None:
            n_tokens = self._n_held
            with contextlib.suppress(NotCovered):  # pure state holds what it was given
                n_tokens = min(n_tokens, n_cached(self._cache))
            self._insert(n_tokens, "assistant")
        elif is_full(self._cache):
            self._insert(self._n_safe, "assistant")


def _run_of(
    store: PromptStore,
    namespace: Namespace,
    tokens: Tokens,
    match: Match,
    fresh: list[Any],
    models: list[Any],
    kwargs: dict[str, Any],
) -> Run:
    """Return a run that goes on with what was matched."""
    insert = functools.partial(store.insert, namespace)
    cache = fresh if match.cache is None else match.cache
    return Run(insert, tokens, cache, match.n_tokens, models, kwargs)


def _no_progress(done: int, total: int) -> None:
    return


def is_full(cache: list[Any]) -> bool:
    """Whether all layers are of full attention, which can be cut anywhere."""
    kinds = [codec.kind if codec else None for codec in map(codec_of, leaves_of(cache))]
    return all(kind == "full" for kind in kinds)


def _has_state(cache: list[Any]) -> bool:
    codecs = [codec_of(leaf) for leaf in leaves_of(cache)]
    return any(codec is not None and codec.kind == "state" for codec in codecs)


def stops_of(
    fresh: list[Any],
    tokenizer: Any,
    tokens: Tokens,
    checkpoints: Sequence[int] | None = None,
    every: int = CHECKPOINT_EVERY,
) -> dict[int, Kind]:
    """Return where to store on the way, and what the prompt ends with there.

    Args:
        fresh: A cache as the model makes it.
        tokenizer: The model's.
        tokens: The whole prompt.
        checkpoints: Where, if the caller knows better than the chat template.
        every: Tokens between further checkpoints of models with state.
    """
    if is_full(fresh):
        return {}
    stops = _every(fresh, tokens, every)
    if checkpoints is not None:
        return stops | dict.fromkeys(checkpoints, "user")
    found = _boundaries(tokenizer)
    turn_end, system_end = found.turn_end(tokens), found.system_end(tokens)
    if turn_end is not None:
        stops[turn_end] = "user"
    if system_end is not None:
        stops[system_end] = "system"
    return stops


def _every(fresh: list[Any], tokens: Tokens, n: int) -> dict[int, Kind]:
    """Return every *n*th position if the cache has state, which cannot be cut."""
    if not n or not _has_state(fresh):
        return {}
    return dict.fromkeys(range(n, len(tokens), n), "user")


_BOUNDARIES: weakref.WeakKeyDictionary[Any, chat.Boundaries] = (
    weakref.WeakKeyDictionary()
)


def _boundaries(tokenizer: TokenizerWrapper) -> chat.Boundaries:
    """Return the boundaries of a chat template, found once for each tokenizer."""
    inner = tokenizer._tokenizer
    if inner not in _BOUNDARIES:
        _BOUNDARIES[inner] = chat.boundaries(tokenizer)
    return _BOUNDARIES[inner]


def best_match(
    store: PromptStore,
    namespace: Namespace,
    tokens: Tokens,
    model: Any,
    draft_model: Any,
    kwargs: dict[str, Any],
) -> tuple[Match, list[Any]]:
    """Return the best match of the layers that this run can go on with, and a fresh
    cache for a miss."""
    fresh = make_prompt_cache(model, kwargs.get("max_kv_size"))
    if draft_model is not None:
        fresh += make_prompt_cache(draft_model)
    bits, start = kwargs.get("kv_bits"), kwargs.get("quantized_kv_start", 5000)
    if bits is None:
        return store.match(namespace, tokens, like=fresh), fresh
    quantized = _quantized(fresh, bits, kwargs.get("kv_group_size", 64))
    if not start or (
        len(tokens) > start
        and _reaches_deeper(store, namespace, tokens, quantized, fresh, start)
    ):
        return store.match(namespace, tokens, like=quantized), fresh
    # Up to the start such a run holds plain layers, which it quantizes later.
    return store.match(namespace, tokens, like=fresh, max_tokens=start), fresh


def _reaches_deeper(
    store: PromptStore,
    namespace: Namespace,
    tokens: Tokens,
    quantized: list[Any],
    fresh: list[Any],
    start: int,
) -> bool:
    """Whether more is stored quantized than plain below the start."""
    try:
        n_quantized = store.explain(namespace, tokens, like=quantized).n_tokens
        n_plain = store.explain(namespace, tokens, like=fresh).n_tokens
    except Exception:  # the match counts what is wrong
        return False
    return n_quantized > min(n_plain, start)


def _quantized(cache: list[Any], bits: int, group_size: int) -> list[Any]:
    """Return what mlx-lm's ``maybe_quantize_kv_cache`` makes of fresh layers."""
    return [
        QuantizedKVCache(group_size=group_size, bits=bits)
        if hasattr(layer, "to_quantized")
        else layer
        for layer in cache
    ]


def _see_whole_prompt(kwargs: dict[str, Any], reused: Tokens) -> None:
    """Make logits processors see the tokens that are not fed to the model again."""
    if kwargs.get("logits_processors") and len(reused):
        kwargs["logits_processors"] = [
            _with_prefix(processor, mx.array(reused))
            for processor in kwargs["logits_processors"]
        ]


def _with_prefix(processor: LogitsProcessor, reused: mx.array) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([reused.astype(tokens.dtype), tokens]), logits)

    return process
