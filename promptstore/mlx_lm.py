"""mlx-lm's own generation functions, on a store."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from promptstore.codecs import n_cached
from promptstore.errors import NotCovered
from promptstore.store import PromptStore
from promptstore.tokens import Tokens, as_tokens
from promptstore.types import Match, Namespace

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
        draft_model: A draft model; its layers are stored with the target's.
        kwargs: The options of ``mlx_lm.stream_generate``. *prompt_progress_callback*
            counts the whole prompt; *logits_processors* see all of its tokens. With
            *input_embeddings*, KV is no function of tokens, and the store is not used.

    Yields:
        ``GenerationResponse``; *prompt_tokens* counts the whole prompt and
        *prompt_tps* the tokens that were really prefilled.

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
    match, fresh = _match(store, namespace, tokens, model, draft_model, kwargs)
    if on_match is not None:
        on_match(match)
    cache = match.cache if match.cache is not None else fresh
    _see_whole_prompt(kwargs, tokens, match.n_tokens)
    history = tokens.tolist()
    responses = mlx_lm.stream_generate(
        model, tokenizer, mx.array(tokens[match.n_tokens :]), prompt_cache=cache,
        **kwargs,
    )  # fmt: skip
    try:
        for response in responses:
            history.append(response.token)
            yield dataclasses.replace(response, prompt_tokens=len(tokens))
    finally:
        responses.close()
        _insert(store, namespace, history, cache)


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
) -> None:
    """Compute the KV of *tokens* behind what *cache* holds; its layers are updated.

    Args:
        model: The model.
        tokens: What comes next; may be empty.
        cache: A live cache.
        step_size: Tokens at once, as mlx-lm's *prefill_step_size*.
        progress: Called with the tokens done so far and their total.
    """
    ids = as_tokens(tokens)
    total = len(ids)
    for start in range(0, total, step_size):
        if progress is not None:
            progress(start, total)
        model(mx.array(ids[start : start + step_size])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    if progress is not None:
        progress(total, total)


def _match(
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
    match = store.match(namespace, tokens, like=quantized)
    if match.cache is None and start > 0:
        # Below the start such a run holds plain layers, which it quantizes later.
        match = store.match(namespace, tokens[: start + 1], like=fresh)
    return match, fresh


def _quantized(cache: list[Any], bits: int, group_size: int) -> list[Any]:
    """Return what mlx-lm's ``maybe_quantize_kv_cache`` makes of fresh layers."""
    return [
        QuantizedKVCache(group_size=group_size, bits=bits)
        if hasattr(layer, "to_quantized")
        else layer
        for layer in cache
    ]


def _see_whole_prompt(kwargs: dict[str, Any], tokens: Tokens, n_reused: int) -> None:
    """Make callbacks count and see the tokens that are not prefilled as well."""
    progress: Progress | None = kwargs.get("prompt_progress_callback")
    if progress is not None:
        kwargs["prompt_progress_callback"] = lambda done, total: progress(
            n_reused + done, n_reused + total
        )
    if kwargs.get("logits_processors") and n_reused:
        reused = mx.array(tokens[:n_reused])
        kwargs["logits_processors"] = [
            _with_prefix(processor, reused) for processor in kwargs["logits_processors"]
        ]


def _with_prefix(processor: LogitsProcessor, reused: mx.array) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([reused.astype(tokens.dtype), tokens]), logits)

    return process


def _insert(
    store: PromptStore, namespace: Namespace, history: list[int], cache: list[Any]
) -> None:
    with contextlib.suppress(NotCovered):  # pure state holds what it was given
        history = history[: n_cached(cache)]
    store.insert(namespace, history, cache)
