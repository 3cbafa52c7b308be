"""Does the store serve this model rightly? What it stores of each kind of layer, and
whether restored caches give the logits that cold ones give.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from promptstore.codecs import LayerKind, codec_of, leaves_of
from promptstore.mlx_lm import prefill
from promptstore.store import PromptStore
from promptstore.types import Match, Namespace

_WHERE: dict[LayerKind, str] = {
    "full": "every position",
    "window": "where its window is held",
    "state": "checkpoints only",
}
_FLOOR_BY_DTYPE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}
_NOISE_FACTOR = 4.0
_STEP = 2048


@dataclass(frozen=True)
class LayerReport:
    """The layers of one class.

    Args:
        name: The class, or classes of a composite's parts.
        n_layers: How many there are.
        kind: Full, window, state, or ``"unknown"``, which stays in memory only.
        token_bytes: Bytes of a token on disk.
        checkpoint_bytes: Bytes of a checkpoint.
        resumable: Where a prompt can be resumed.
    """

    name: str
    n_layers: int
    kind: str
    token_bytes: int
    checkpoint_bytes: int
    resumable: str


@dataclass(frozen=True)
class Trial:
    """One request that shares a prefix with what is stored.

    Args:
        position: Tokens shared.
        n_tokens: Tokens that the store reused.
        max_diff: The largest difference of the next token's logits to a cold run.
        tolerance: What the model's own prefills in other chunks differ by, with a
            margin; 0 where the cache must be the very same.
    """

    position: int
    n_tokens: int
    max_diff: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.max_diff <= self.tolerance


@dataclass(frozen=True)
class Diagnosis:
    """What `examine` found."""

    layers: tuple[LayerReport, ...]
    trials: tuple[Trial, ...]

    @property
    def is_right(self) -> bool:
        """Whether nothing wrong was served."""
        return all(trial.is_right for trial in self.trials)


@dataclass(frozen=True)
class Comparison:
    """One request, served by a store and computed cold.

    Args:
        n_tokens: Its tokens.
        match: What the store gave; without its cache, which was used up.
        restored_s: Seconds until the next token's logits: look-up, restore, prefill.
        cold_s: The same without the store.
        max_diff: The largest difference of those logits.
        tolerance: As for `Trial`.
    """

    n_tokens: int
    match: Match
    restored_s: float
    cold_s: float
    max_diff: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.max_diff <= self.tolerance

    @property
    def saved_s(self) -> float:
        """What the store saved; negative if it cost more than it saved."""
        return self.cold_s - self.restored_s


def compare(
    model: Any,
    store: PromptStore,
    namespace: Namespace,
    tokens: Sequence[int],
    phase: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Serve a request by a store, compute it cold, and compare the logits.

    Args:
        model: The model.
        store: What is stored; nothing is added.
        namespace: Of the model.
        tokens: The request, at least one token.
        phase: Called with what comes next.
    """
    ids = [int(token) for token in tokens]
    _feed(model, ids[:1], make_prompt_cache(model))  # what is compiled is compiled
    phase("restoring")
    began = time.perf_counter()
    match = store.match(namespace, ids, like=make_prompt_cache(model))
    return _compared(model, ids, match, time.perf_counter() - began, phase)


def check(
    model: Any, tokens: Sequence[int], match: Match, seconds: float
) -> Comparison:
    """Compare what a match gave with a cold run; its cache is left as it is.

    Args:
        model: The model.
        tokens: The request.
        match: What the store gave.
        seconds: How long that took.
    """
    ids = [int(token) for token in tokens]
    copied = dataclasses.replace(match, cache=copy.deepcopy(match.cache))
    return _compared(model, ids, copied, seconds)


def _compared(
    model: Any,
    ids: list[int],
    match: Match,
    seconds: float,
    phase: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Go on from a match, which uses it up, and compute the same cold."""
    began = time.perf_counter()
    cache = match.cache or make_prompt_cache(model)
    got = _run(model, ids[match.n_tokens :], cache)
    restored_s = seconds + time.perf_counter() - began
    phase("prefill")
    began = time.perf_counter()
    cold = _run(model, ids, make_prompt_cache(model))
    cold_s = time.perf_counter() - began
    max_diff = _max_diff(cold, got) if match.n_tokens else 0.0
    tolerance = _FLOOR_BY_DTYPE.get(cold.dtype, 1e-4)
    if max_diff > tolerance:
        phase("prefill in other chunks")
        noise = max(
            _max_diff(cold, _split(model, ids, at))
            for at in {match.n_tokens, len(ids) // 2} - {0}
        )
        tolerance = max(tolerance, _NOISE_FACTOR * noise)
    match = dataclasses.replace(match, cache=None)
    return Comparison(len(ids), match, restored_s, cold_s, max_diff, tolerance)


Feed = Callable[[Sequence[int], list[Any]], mx.array]


def examine(
    model: Any,
    namespace: Namespace,
    tokens: Sequence[int],
    root: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Store a prompt of a model in two turns, restart, and try where it resumes.

    Args:
        model: The model.
        namespace: Its namespace.
        tokens: Any tokens of its vocabulary, at least 24; they are its prompt.
        root: An empty directory for a store of its own.
        progress: Called with the trials done so far and their number.

    Returns:
        What each kind of layer costs, and how each trial went.
    """
    ids = [int(token) for token in tokens]
    ends = len(ids) // 2, len(ids) * 5 // 6, len(ids) - 4
    live = _store_turns(model, namespace, ids, ends, root)
    positions = _positions(ends)
    with PromptStore.open(root, memory_bytes=0, min_tokens=1) as store:
        trials = [_at_end(model, store, namespace, ids[: ends[2] + 1], live)]
        for index, position in enumerate(positions):
            progress(index, len(positions))
            trials.append(_trial(model, store, namespace, ids[:position]))
    progress(len(positions), len(positions))
    return Diagnosis(report_layers(live, ends[2]), tuple(trials))


def report_layers(cache: Sequence[Any], n_tokens: int) -> tuple[LayerReport, ...]:
    """Return what the store keeps of each class of layer, by a cache in use."""
    rows: Counter[tuple[str, str, int, int, str]] = Counter()
    for leaf in leaves_of(cache):
        codec = codec_of(leaf)
        name = type(leaf).__name__
        if codec is None:
            rows[name, "unknown", 0, 0, "in memory, whole"] += 1
            continue
        token_bytes = codec.describe(leaf).token_bytes
        state_bytes = sum(array.nbytes for array in codec.state(leaf).values())
        rows[name, codec.kind, token_bytes, state_bytes, _WHERE[codec.kind]] += 1
    return tuple(
        LayerReport(name, n, kind, token_bytes * n, state_bytes * n, where)
        for (name, kind, token_bytes, state_bytes, where), n in rows.items()
    )


def _store_turns(
    model: Any,
    namespace: Namespace,
    ids: list[int],
    ends: tuple[int, int, int],
    root: Path,
) -> list[Any]:
    """Store a system prompt, a user's turn, and an answer decoded token by token."""
    cache: list[Any] = make_prompt_cache(model)
    with PromptStore.open(root, memory_bytes=0, min_tokens=1) as store:
        prefill(model, ids[: ends[0]], cache)
        store.insert(namespace, ids[: ends[0]], cache, kind="system")
        prefill(model, ids[ends[0] : ends[1]], cache)
        store.insert(namespace, ids[: ends[1]], cache, kind="user")
        prefill(model, ids[ends[1] : ends[2]], cache, step_size=1)
        store.insert(namespace, ids[: ends[2]], cache)
    return cache


def _positions(ends: tuple[int, int, int]) -> list[int]:
    first, second, third = ends
    middle = (first + second) // 2
    near = (first // 4, first - 1, first, first + 1, middle, second, second + 1)
    return sorted({position for position in (*near, third - 1) if position > 0})


def _at_end(
    model: Any,
    store: PromptStore,
    namespace: Namespace,
    ids: list[int],
    live: list[Any],
) -> Trial:
    """Go on from a snapshot's end: the same as the live cache, bit for bit."""
    match = store.match(namespace, ids, like=make_prompt_cache(model))
    wanted = _feed(model, ids[-1:], copy.deepcopy(live))
    if match.cache is None or match.n_tokens != len(ids) - 1:
        return Trial(len(ids) - 1, match.n_tokens, float("inf"), 0.0)
    got = _feed(model, ids[-1:], match.cache)
    return Trial(len(ids) - 1, match.n_tokens, _max_diff(wanted, got), 0.0)


def _trial(
    model: Any, store: PromptStore, namespace: Namespace, shared: list[int]
) -> Trial:
    """Ask for a prompt that parts from the stored one, and compare with a cold run."""
    ids = shared + [(shared[0] + k) % (max(shared) + 1) for k in (1, 2, 3)]
    match = store.match(namespace, ids, like=make_prompt_cache(model))
    cold = _feed(model, ids, make_prompt_cache(model))
    if match.cache is None:
        return Trial(len(shared), 0, 0.0, 0.0)
    got = _feed(model, ids[match.n_tokens :], match.cache)
    noise = max(
        _max_diff(cold, _split(model, ids, at))
        for at in {match.n_tokens, len(ids) // 2, len(ids) - 1}
    )
    floor = _FLOOR_BY_DTYPE.get(cold.dtype, 1e-4)
    tolerance = max(floor, _NOISE_FACTOR * noise)
    return Trial(len(shared), match.n_tokens, _max_diff(cold, got), tolerance)


def _split(model: Any, ids: list[int], at: int) -> mx.array:
    """Return the logits of a cold run in two chunks."""
    cache: list[Any] = make_prompt_cache(model)
    _run(model, ids[:at], cache)
    return _run(model, ids[at:], cache)


def _run(model: Any, ids: list[int], cache: list[Any]) -> mx.array:
    """Return the next token's logits; what is long is fed in steps."""
    steps = range(0, len(ids), _STEP)
    return [_feed(model, ids[at : at + _STEP], cache) for at in steps][-1]


def _feed(model: Any, ids: Sequence[int], cache: list[Any]) -> mx.array:
    """Return the next token's logits; the cache is updated."""
    logits: mx.array = model(mx.array(list(ids))[None], cache=cache)[0, -1]
    mx.eval(logits, [layer.state for layer in cache])
    return logits


def _max_diff(a: mx.array, b: mx.array) -> float:
    # Some models give infinities, or NaN, themselves.
    same = (a == b) | (mx.isnan(a) & mx.isnan(b))
    return float(mx.where(same, 0, mx.abs(a - b).astype(mx.float32)).max())
