"""Does mlx-lm's own batching leave a sequence the KV that its single path leaves?

Some architectures let the padding of a batch into their state, or mask a batch as if
it were one sequence. What they computed in a batch must not be kept for later. Which
ones these are is found out on the model itself, with a few short sequences.

Not seen is what shows only past a window, or in a batch of some certain size.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from promptstore.codecs import clone, codec_of, leaves_of, take_apart, unknown_classes

# Relative, for one array: what rounding may do to the cache of a model of that dtype.
_FLOOR_BY_DTYPE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 1.5e-2}
_NOISE_FACTOR = 4.0
# Chunkings that differ by more do not differ by rounding.
_CEILING = 0.25

_CHUNKS = 3, 1, 2, 2, 1, 1
_N_IDS = sum(_CHUNKS)
_N_OTHER = 8
# Noise may, rarely, send a token to another expert; a fault is there in every draw.
_SEEDS = 7, 8

_Caches = dict[int, list[Any]]
"""Prompt caches by the tokens they hold, all of one sequence."""


@dataclass(frozen=True)
class BatchedPath:
    """What may be kept of that which a model computes in a batch.

    Args:
        alone: A sequence alone in a ``BatchGenerator`` ends with the single path's
            state.
        shared: So does one that shares the batch with others.
        error: What the batched path raised, alone or shared; ``""`` if all ran.
    """

    alone: bool
    shared: bool
    error: str = ""


def batched_path(model: Any) -> BatchedPath:
    """Run a loaded model a few tokens alone and in batches, and compare the caches.

    Costs 57 tokens in 16 forward passes, and the double where a difference is found.
    Runs on the calling thread and its default stream; no array stays alive,
    nor is mlx's random state read or changed.

    Args:
        model: The model, as ``mlx_lm.load`` returns it.

    Returns:
        Whether the state of a sequence is the single path's, up to rounding. Caches
        of classes without a codec cannot be compared: then it is not.

    Raises:
        Exception: What the model raises where no batch is involved.

    Source: mlx-lm 0.32.2 ``generate.BatchGenerator``.
    """
    if unknown_classes(make_prompt_cache(model)):
        return BatchedPath(False, False)
    n_ids, may_share = n_vocabulary(model), not _cuts_slots(model)
    found = BatchedPath(False, False)
    for seed in _SEEDS:
        draw = random.Random(seed)
        ids = [draw.randrange(1, n_ids) for _ in range(_N_IDS + _N_OTHER)]
        now = _Trial(model, ids[:_N_IDS], ids[_N_IDS:]).run(may_share)
        found = BatchedPath(found.alone or now.alone, now.shared, now.error)
        if found.error or (found.shared if may_share else found.alone):
            break
    mx.clear_cache()
    return found


def n_vocabulary(model: Any) -> int:
    """Return how many ids there are; the logits have their shape unevaluated."""
    logits = model(mx.array([[1]]), cache=make_prompt_cache(model))
    return int(logits.shape[-1])


def _cuts_slots(model: Any) -> bool:
    """Whether attention picks blocks of the buffer's slots, padding counted.

    Such blocks hold other tokens in a batch; it shows only in prompts of more blocks
    than are picked, thousands of tokens.

    Source: mlx-lm 0.32.2 ``minimax_m3_vl.Attention._block_mask``.
    """
    return any(hasattr(module, "index_topk_blocks") for module in model.modules())


class _Trial:
    """One sequence, on the single path and in batches.

    Args:
        model: The model.
        ids: The sequence.
        other: Another one, longer than what *ids* begins with in a batch.
    """

    def __init__(self, model: Any, ids: list[int], other: list[int]) -> None:
        self._model = model
        self._ids = ids
        self._other = other
        self._single = self._in_chunks(_CHUNKS)
        wanted = _arrays(self._single[_N_IDS], _N_IDS)
        at_once = _arrays(self._in_chunks([_N_IDS])[_N_IDS], _N_IDS)
        floor = max(_FLOOR_BY_DTYPE.get(array.dtype, 1e-4) for array in wanted)
        # Noise grows from layer to layer; one that has less by luck gets no less.
        noise = itertools.accumulate(_differences(at_once, wanted), max)
        self._tolerances = [
            min(max(floor, _NOISE_FACTOR * each), _CEILING) for each in noise
        ]

    def run(self, may_share: bool) -> BatchedPath:
        """Return what is found; what shares only if it may and one alone is right."""
        alone = shared = False
        try:
            alone = self._are_right(self._alone())
            shared = alone and may_share and self._are_right(self._shared())
        except Exception as error:
            return BatchedPath(alone, False, f"{type(error).__name__}: {error}")
        return BatchedPath(alone, shared)

    def _in_chunks(self, chunks: Sequence[int]) -> _Caches:
        """Return the caches of the single path after each chunk."""
        caches: _Caches = {}
        cache: list[Any] = make_prompt_cache(self._model)
        for start, end in itertools.pairwise(itertools.accumulate(chunks, initial=0)):
            self._model(mx.array([self._ids[start:end]]), cache=cache)
            mx.eval([layer.state for layer in cache])  # the logits are not computed
            caches[end] = clone(cache)
        return caches

    def _alone(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the caches of a sequence alone: of its first turn, and of the next."""
        ids, generator = self._ids, _generator(self._model)
        try:
            (uid,) = generator.insert([ids[:4]])
            generator.next()  # prefills 3
            generator.next()  # decodes 1
            cache = generator.remove([uid], return_prompt_caches=True)[uid][0]
            yield 4, cache
            (uid,) = generator.insert([ids[4:7]], caches=[cache])
            generator.next()  # prefills 2
            yield 6, generator.remove([uid], return_prompt_caches=True)[uid][0]
        finally:
            generator.close()

    def _shared(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the caches of sequences that come and go as on a server.

        Two new ones are prefilled, the shorter padded; while they decode, two with
        histories of 6 and 4 tokens join, the shorter history with more to prefill.
        """
        ids, generator = self._ids, _generator(self._model)
        try:
            generator.insert([self._other], max_tokens=[1], samplers=[_says([1])])
            uids = generator.insert([ids[:4]], [2], samplers=[_says(ids[4:])])
            generator.next()
            uids += generator.insert(
                [ids[6:9], ids[4:9]],
                [1, 1],
                caches=[clone(self._single[6]), clone(self._single[4])],
                samplers=[_says(ids[9:]), _says(ids[9:])],
            )
            ended = {}
            for _ in range(3):
                for response in generator.next()[1]:
                    if response.finish_reason is not None:
                        ended[response.uid] = response.prompt_cache
        finally:
            generator.close()
        yield from zip((6, _N_IDS, _N_IDS), (ended[uid] for uid in uids), strict=True)

    def _are_right(self, caches: Iterator[tuple[int, list[Any]]]) -> bool:
        """Whether all of them are what the single path leaves."""
        return all(
            difference <= tolerance
            for n_tokens, cache in caches
            for difference, tolerance in zip(
                _differences(
                    _arrays(cache, n_tokens), _arrays(self._single[n_tokens], n_tokens)
                ),
                self._tolerances,
                strict=True,
            )
        )


def _generator(model: Any) -> Any:
    stream = mx.default_stream(mx.default_device())
    return BatchGenerator(model, stream=stream)


def _says(ids: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """Return a sampler that ignores the model; it is asked once too often."""
    upcoming = iter(ids)
    return lambda logprobs: mx.array([next(upcoming, 0)], mx.uint32)


def _arrays(cache: Sequence[Any], n_tokens: int) -> list[mx.array]:
    """Return what it takes to go on from *n_tokens*, however it lies in a cache.

    Raises:
        NotCovered: A class is not in the table.
        ValueError: The cache holds other tokens than those.
    """
    found = []
    leaves = list(leaves_of(cache))
    for live, leaf in zip(leaves, take_apart(leaves, n_tokens), strict=True):
        codec: Any = codec_of(live)  # in the table, or it would not be taken apart
        slots = {lo + i: slot + i for lo, hi, slot in leaf.runs for i in range(hi - lo)}
        needed = codec.needs(codec.describe(live), n_tokens, leaf.ring)
        tokens = [token for lo, hi in needed for token in range(lo, hi)]
        if codec.length(live) not in (None, n_tokens) or not slots.keys() >= {*tokens}:
            raise ValueError(f"a {type(live).__name__} does not hold {n_tokens} tokens")
        rows = mx.array([slots[token] for token in tokens], mx.int32)
        found += [mx.take(array, rows, axis=2) for array in leaf.arrays]
        found += [array for _, array in sorted(leaf.state.items())]
    return found


def _differences(arrays: list[mx.array], wanted: list[mx.array]) -> list[float]:
    """Return for each array by how much of its norm it differs."""
    if [array.shape for array in arrays] != [array.shape for array in wanted]:
        return [float("inf")] * len(wanted)
    norms = [_norms(a, b) for a, b in zip(arrays, wanted, strict=True)]
    mx.eval(norms)
    return [
        float(off) / max(float(norm), 1e-30) if float(off) else 0.0
        for off, norm in norms
    ]


def _norms(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    # Some models give infinities, or NaN, themselves.
    same = (a == b) | (mx.isnan(a) & mx.isnan(b))
    off = mx.where(same, 0, a - b)
    norm = mx.where(mx.isfinite(b), b, 0)
    return mx.sqrt(mx.square(off).sum()), mx.sqrt(mx.square(norm).sum())
