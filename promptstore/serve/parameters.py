"""A request's parameters, tried out before they can harm the requests of others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm import server

_SEEDS = 1 << 64


def try_out(
    args: Any, tokenizer: Any, prompt: Sequence[int], n_vocabulary: int
) -> None:
    """Raise now what these would raise in the middle of a batch.

    Args:
        args: The server's ``GenerationArguments``.
        tokenizer: The model's.
        prompt: The tokens of the request.
        n_vocabulary: How many ids the model knows; 0 if that is not known.

    Raises:
        ValueError: They cannot be used.
    """
    if args.seed is not None and not 0 <= args.seed < _SEEDS:
        raise ValueError("seed must be from 0 to 2**64 - 1")
    bias = args.logits.logit_bias or {}
    # mlx does not look: such an id is a write to memory that is another's.
    if n_vocabulary and not all(0 <= id_ < n_vocabulary for id_ in bias):
        raise ValueError(f"logit_bias must name ids from 0 to {n_vocabulary - 1}")
    upstream: Any = server  # not typed
    try:
        processors = upstream._make_logits_processors(args)
        sampler = upstream._make_sampler(args, tokenizer)
        if not n_vocabulary or not (processors or args.sampling.temperature):
            return
        with random_state_kept():
            logits = mx.zeros((1, n_vocabulary))
            for processor in processors:
                logits = processor(mx.array(list(prompt[-1:])), logits)
            sampler(logits)
    except Exception as error:
        raise ValueError(f"these parameters cannot be used: {error}") from error


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put mlx's random state back as it was.

    mlx-lm's samplers are compiled. One that raises while it is traced leaves its
    tracers in the state, and from then on all sampling fails.
    """
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


def mend_random_state() -> None:
    """Begin anew with a random state that a failure has left unusable."""
    state: Any = mx.random.state
    try:
        mx.eval(state[0])
    except RuntimeError:
        mx.random.seed(0)
