"""Prompt caches whose values prove which layer, head and token a row belongs to.

Every element is a small integer, so that each dtype down to bfloat16 holds it
exactly: a row repeats the digits ``position % 128``, ``position // 128``, head,
``2 * layer + part`` (part 0 is keys, 1 is values), and what its tokens tell.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import xxhash
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.llama import Model, ModelArgs

from promptstore import codecs
from promptstore.extent import Extent
from promptstore.index import Row

VOCABULARY = 1000

KEYS, VALUES = 0, 1


def tokens(n: int, seed: int = 0) -> list[int]:
    """Return *n* random ids of the vocabulary; equal seeds give equal beginnings."""
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(n)]


def values(
    lo: int,
    hi: int,
    *,
    layer: int,
    part: int,
    n_kv_heads: int = 2,
    head_dim: int = 8,
    ids: Sequence[int] = (),
) -> npt.NDArray[np.int64]:
    """Return the rows of tokens ``[lo, hi)`` in one part of one layer.

    Args:
        lo: The first token.
        hi: One past the last.
        layer: The layer's number.
        part: `KEYS` or `VALUES`.
        n_kv_heads: Heads.
        head_dim: Elements of a row.
        ids: The whole prompt, if rows shall depend on what stands before them.

    Shape:
        ``(1, n_kv_heads, hi - lo, head_dim)``
    """
    positions = np.arange(lo, hi)
    history = np.array(_history(tuple(ids))[lo:hi] if len(ids) else [0] * (hi - lo))
    rows = np.zeros((1, n_kv_heads, hi - lo, head_dim), np.int64)
    for head in range(n_kv_heads):
        digits: list[Any] = [
            positions % 128,
            positions // 128,
            history % 251,
            head,
            2 * layer + part,
            history // 251,
        ]
        for at in range(head_dim):
            rows[0, head, :, at] = digits[at % len(digits)]
    return rows


@functools.lru_cache(maxsize=8)
def _history(ids: tuple[int, ...]) -> list[int]:
    """Return a number for each prefix of *ids*, as attention would mix them."""
    found, mixed = [], 7
    for id_ in ids:
        mixed = (mixed * 31 + id_ + 1) % (251 * 251)
        found.append(mixed)
    return found


def filled(
    layers: Sequence[Any],
    n: int,
    *,
    n_kv_heads: int = 2,
    head_dim: int = 8,
    dtype: mx.Dtype = mx.float32,
    ids: Sequence[int] = (),
) -> list[Any]:
    """Fill empty *layers* with *n* tokens, through mlx-lm's own update."""
    sizes: Any = {"n_kv_heads": n_kv_heads, "head_dim": head_dim}
    for number, layer in enumerate(layers):
        keys, vals = (
            mx.array(values(0, n, layer=number, part=part, ids=ids, **sizes))
            for part in (KEYS, VALUES)
        )
        layer.update_and_fetch(keys.astype(dtype), vals.astype(dtype))
        mx.eval(layer.keys, layer.values)
    return list(layers)


def kv(n: int, *, n_layers: int = 2, **rows: Any) -> list[KVCache]:
    """Return a cache of *n* tokens, its buffers padded as mlx-lm pads them.

    Args:
        n: Tokens, at least one.
        n_layers: Layers.
        rows: ``n_kv_heads``, ``head_dim``, ``dtype``, ``ids``, as `filled` takes them.
    """
    return filled([KVCache() for _ in range(n_layers)], n, **rows)


def kv_of(ids: Sequence[int], *, n_layers: int = 2, **rows: Any) -> list[KVCache]:
    """Return a cache of *ids*; each row tells all the ids up to its own."""
    return kv(len(ids), n_layers=n_layers, ids=ids, **rows)


def quantized(
    n: int, bits: int = 8, group_size: int = 32, *, n_layers: int = 2, **rows: Any
) -> list[QuantizedKVCache]:
    """Return a quantized cache of *n* tokens; a row is one group unless told else."""
    layers = [QuantizedKVCache(group_size, bits) for _ in range(n_layers)]
    return filled(layers, n, **({"head_dim": group_size} | rows))


def concatenated(n: int, *, n_layers: int = 2, **rows: Any) -> list[ConcatenateKVCache]:
    """Return a cache of *n* tokens whose arrays have no room behind them."""
    return filled([ConcatenateKVCache() for _ in range(n_layers)], n, **rows)


def grow(layer: Any, lo: int, hi: int, *, number: int = 0, **rows: Any) -> Any:
    """Give one layer the tokens ``[lo, hi)``; return what it attends to, evaluated."""
    dtype = rows.pop("dtype", mx.float32)
    keys, vals = (
        mx.array(values(lo, hi, layer=number, part=part, **rows)).astype(dtype)
        for part in (KEYS, VALUES)
    )
    fetched = layer.update_and_fetch(keys, vals)
    mx.eval(fetched, layer.keys, layer.values)
    return fetched


def rotating(
    n: int,
    max_size: int = 64,
    keep: int = 0,
    *,
    n_layers: int = 2,
    steps: int = 0,
    **rows: Any,
) -> list[RotatingKVCache]:
    """Return windows that have seen *n* tokens, the last *steps* of them singly."""
    layers = [RotatingKVCache(max_size, keep) for _ in range(n_layers)]
    for number, layer in enumerate(layers):
        if n > steps:
            grow(layer, 0, n - steps, number=number, **rows)
        for at in range(n - steps, n):
            grow(layer, at, at + 1, number=number, **rows)
    return layers


def chunked(
    n: int, chunk_size: int = 64, *, n_layers: int = 2, steps: int = 0, **rows: Any
) -> list[ChunkedKVCache]:
    """Return chunked layers of *n* tokens, trimmed in front as a model trims them."""
    layers = [ChunkedKVCache(chunk_size) for _ in range(n_layers)]
    for number, layer in enumerate(layers):
        if n > steps:
            grow(layer, 0, n - steps, number=number, **rows)
            layer.maybe_trim_front()
        for at in range(n - steps, n):
            layer.maybe_trim_front()
            grow(layer, at, at + 1, number=number, **rows)
    return layers


def arrays_cache(
    n: int, size: int = 2, *, n_layers: int = 2, dtype: mx.Dtype = mx.float32
) -> list[ArraysCache]:
    """Return states of *n* tokens; each slot tells length, layer and slot."""
    layers = [ArraysCache(size) for _ in range(n_layers)]
    for number, layer in enumerate(layers):
        for slot in range(size):
            shape = (1, 3, 4 + slot)
            layer[slot] = mx.full(shape, n % 128 + number + slot).astype(dtype)
            layer[slot][0, 0, :2] = mx.array([n // 128, number]).astype(dtype)
        mx.eval(layer.cache)
    return layers


def parts(cache: Sequence[Any]) -> list[mx.array]:
    """Return the row parts of all layers in order, padded as they are."""
    return [array for leaf in codecs.take_apart(cache, 10**9) for array in leaf.arrays]


def clone_of(cache: Sequence[Any], n: int) -> list[Any]:
    """Return a clone of a cache of full attention that is cut to *n* tokens."""
    clone = codecs.clone(cache)
    codecs.cut(clone, n)
    return clone


def attended(cache: Sequence[Any]) -> list[mx.array]:
    """Return what a cache attends to: keys and values of each layer, unpadded."""
    arrays: list[mx.array] = []
    for layer in cache:
        for part in layer.keys_and_values():
            arrays += part if isinstance(part, tuple) else [part]
    return arrays


def prints(cache: Sequence[Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return dtype, shape and digest of all that a cache attends to, to compare.

    Equal lists mean caches that are equal bit for bit.
    """
    return [
        (
            str(array.dtype),
            tuple(array.shape),
            xxhash.xxh3_128_hexdigest(bytes(memoryview(mx.contiguous(array)))),
        )
        for array in attended(cache)
    ]


def fingerprints(cache: Sequence[Any], n_tokens: int) -> list[str]:
    """Return a digest of all that a live cache holds, by leaf: rows and state."""
    found = []
    for leaf in codecs.take_apart(cache, n_tokens):
        hasher = xxhash.xxh3_128()
        rows = [
            array[:, :, run.slot : run.slot + run.hi - run.lo]
            for array in leaf.arrays
            for run in sorted(leaf.runs)
        ]
        for array in [*rows, *leaf.state.values()]:
            hasher.update(f"{array.dtype} {array.shape}".encode())
            hasher.update(bytes(memoryview(mx.contiguous(array))))
        found.append(hasher.hexdigest())
    return found


def cut_to(cache: Sequence[Any], n: int) -> list[Any]:
    """Return a copy of *cache* that holds its first *n* tokens only."""
    copies = [copy.deepcopy(layer) for layer in cache]
    for layer in copies:
        if isinstance(layer, ConcatenateKVCache):
            layer.keys, layer.values = layer.keys[:, :, :n], layer.values[:, :, :n]
        layer.offset = n
    return copies


@functools.cache
def tiny_model() -> Model:
    """Return a llama of random weights, always the same; shared, as it has no state."""
    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=3,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            head_dim=16,
            rope_theta=10000.0,
        )
    )
    mx.eval(model.parameters())
    return model


def prefill(
    model: Any, ids: Sequence[int], cache: list[Any] | None = None
) -> tuple[list[Any], mx.array]:
    """Compute the KV of *ids* behind what *cache* holds.

    Returns:
        The cache, a new one if none was given, and the logits of the last token,
        both evaluated.
    """
    cache = cache or make_prompt_cache(model)
    logits = model(mx.array(ids)[None], cache=cache)[:, -1]
    mx.eval(logits, [layer.state for layer in cache])
    return cache, logits


def row(
    id_: int, extent: Extent, parent: int | None = None, name: str | None = None
) -> Row:
    """Return the index's row of a snapshot of *extent*."""
    return Row(
        id=id_,
        name=name or f"{id_:032x}",
        layout=1,
        parent=parent,
        start=extent.start,
        end=extent.end,
        first_token=None,
        tokens=np.arange(extent.start, extent.end),
        extent=extent,
        nbytes=1,
        checksums=b"",
        kind="assistant",
        label=None,
        pinned=False,
        created_ns=0,
        used_ns=0,
        expires_ns=None,
        hits=0,
    )


@contextlib.contextmanager
def sql(root: Path) -> Iterator[sqlite3.Connection]:
    """Edit the index behind everybody's back, without its guards."""
    db = sqlite3.connect(root / "index.db")
    try:
        with db:
            db.execute("pragma foreign_keys = off")
            db.execute("pragma ignore_check_constraints = on")
            db.execute("drop trigger snapshots_are_immutable")
            yield db
    finally:
        db.close()
