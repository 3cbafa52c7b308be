"""Facts about live caches that are made again: layout, room, padding, equality."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from builders import (
    arrays_cache,
    chunked,
    concatenated,
    grow,
    kv,
    prints,
    quantized,
    rotating,
    tokens,
)
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from promptstore import Namespace, PromptStore, buffers, codecs, restore
from promptstore.capture import take_in
from promptstore.layers import leaves

SPACE = Namespace("m")


def copy_of(cache: list[Any], n: int, n_total: int) -> list[Any]:
    """Return what a match of all *n* tokens hands out, by way of memory."""
    capture = take_in(cache, n).capture()
    assert capture.layers is not None
    return restore.copy(capture.leaves, capture.layers, n, n_total, whole=True)


def from_disk(path: Path, cache: list[Any], n: int) -> list[Any]:
    """Return what a match of all *n* tokens hands out, by way of a file."""
    ids = tokens(n)
    options: Any = {"memory_bytes": 0, "min_tokens": 1}
    with PromptStore.open(path, **options) as store:
        assert store.insert(SPACE, ids, cache) == n
    with PromptStore.open(path, **options) as store:
        match = store.match(SPACE, [*ids, 5000])
        assert (match.n_tokens, match.source) == (n, "disk")
        assert store.check() == []
        return match.cache


def assert_goes_on(live: Any, made: Any, at: int, n: int = 1) -> None:
    """Both attend to the same rows in the same order after *n* more tokens."""
    for a, b in zip(grow(live, at, at + n), grow(made, at, at + n), strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b)


# ------------------------------------------------------------------------- windows


def histories(keep: int, seed: int) -> list[list[int]]:
    """Return sizes of prefills and steps that lead to all kinds of layouts."""
    rng = random.Random(seed)
    found = []
    for _ in range(25):
        sizes: list[int] = []
        for _ in range(rng.randrange(1, 4)):
            sizes.append(rng.choice([1, 2, keep + 1, 15, 16, 17, rng.randrange(1, 60)]))
            sizes += [1] * rng.choice([0, 1, 2, 15, 16, 17, rng.randrange(40)])
        found.append(sizes)
    return found


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_layout_of_a_ring_goes_on_as_it_would_have(keep: int, seed: int) -> None:
    """After any prefills and steps, a restored window attends to the same rows in the
    same order as the live one, at the next step and at the ones behind it."""
    layouts = set()
    for sizes in histories(keep, seed):
        live, n = RotatingKVCache(16, keep), 0
        for size in sizes:
            grow(live, n, n + size)
            n += size
            if (n, live._idx) in layouts:
                continue
            layouts.add((n, live._idx))
            (made,) = copy_of([live], n, n + 10)
            (twin,) = codecs.clone([live])
            assert made.offset == n
            assert (made.max_size, made.keep) == (16, keep)
            for step in range(3):
                assert_goes_on(twin, made, n + step)
                assert made._idx == twin._idx
    assert len(layouts) > 100


@pytest.mark.parametrize("keep", [0, 4])
def test_every_layout_of_a_ring_takes_a_prefill_as_it_would_have(keep: int) -> None:
    """The same where a whole prompt comes next, short or longer than the window."""
    rng = random.Random(50)
    for sizes in histories(keep, 51):
        live = RotatingKVCache(16, keep)
        n = 0
        for size in sizes:
            grow(live, n, n + size)
            n += size
        (made,) = copy_of([live], n, n + 100)
        size = rng.choice([2, 5, 16, 40])
        assert_goes_on(live, made, n, size)
        for step in range(3):
            assert_goes_on(live, made, n + size + step)


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize(
    ("n", "steps"), [(9, 0), (16, 0), (16, 3), (17, 1), (100, 0), (100, 7), (600, 40)]
)
def test_a_ring_goes_on_from_disk_as_it_would_have(
    tmp_path: Path, keep: int, n: int, steps: int
) -> None:
    """The same by way of a file, beside a layer of full attention."""
    live = [*kv(n, n_layers=1), *rotating(n, 16, keep, steps=steps, n_layers=1)]
    made = from_disk(tmp_path / "store", live, n)
    for step in range(20):
        for a, b in zip(live, made, strict=True):
            assert_goes_on(a, b, n + step)


@pytest.mark.parametrize("steps", [1, 5, 40])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_window_is_put_together_from_several_snapshots(
    tmp_path: Path, keep: int, steps: int
) -> None:
    """Each turn writes what its live window still had; the last one is whole."""
    options: Any = {"memory_bytes": 0, "min_tokens": 1}
    live = [*kv(1, n_layers=1), *rotating(1, 16, keep, n_layers=1)]
    ids, n = tokens(400), 1
    with PromptStore.open(tmp_path / "store", **options) as store:
        for _ in range(6):
            for layer in live:
                for at in range(n, n + steps):
                    grow(layer, at, at + 1)
            n += steps
            assert store.insert(SPACE, ids[:n], live) == n
        store.flush()
        match = store.match(SPACE, ids)
        assert (match.n_tokens, match.source) == (n, "disk")
    assert match.cache is not None
    for a, b in zip(live, match.cache, strict=True):
        assert_goes_on(a, b, n)


@pytest.mark.parametrize("seed", range(3))
def test_every_layout_of_a_chunk_goes_on_as_it_would_have(seed: int) -> None:
    """Whatever was trimmed in front before, the rows and where they start agree, and
    the next trim in front takes the same."""
    rng = random.Random(60 + seed)
    for _ in range(25):
        live, n = ChunkedKVCache(16), 0
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.6:
                live.maybe_trim_front()
            size = rng.choice([1, 1, 5, 15, 16, 17, 40, 300])
            grow(live, n, n + size)
            n += size
        if rng.random() < 0.3:
            live.maybe_trim_front()
        (made,) = copy_of([live], n, n + 10)
        assert (made.offset, made.start_position) == (n, live.start_position)
        assert made.chunk_size == 16
        assert prints([live]) == prints([made])
        if rng.random() < 0.5:
            assert_goes_on(live, made, n)
            n += 1
        live.maybe_trim_front()
        made.maybe_trim_front()
        assert made.start_position == live.start_position
        for step in range(3):
            assert_goes_on(live, made, n + step)


@pytest.mark.parametrize(("n", "steps"), [(9, 0), (16, 0), (40, 0), (40, 5), (600, 9)])
def test_a_chunk_goes_on_from_disk_as_it_would_have(
    tmp_path: Path, n: int, steps: int
) -> None:
    """The same by way of a file."""
    live = [*kv(n, n_layers=1), *chunked(n, 16, steps=steps, n_layers=1)]
    made = from_disk(tmp_path / "store", live, n)
    assert live[1].start_position == made[1].start_position
    for step in range(20):
        live[1].maybe_trim_front()
        made[1].maybe_trim_front()
        for a, b in zip(live, made, strict=True):
            assert_goes_on(a, b, n + step)


# --------------------------------------------------------------- room and padding

KINDS: dict[str, Callable[[int], list[Any]]] = {
    "KVCache": kv,
    "ConcatenateKVCache": concatenated,
    "QuantizedKVCache": quantized,
    "RotatingKVCache": lambda n: rotating(n, 64, 4, steps=min(n - 1, 3)),
    "ChunkedKVCache": lambda n: chunked(n, 64),
    "mixed": lambda n: [*kv(n), *rotating(n, 64), *arrays_cache(n)],
}
every_kind = pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)


def soil_memory() -> None:
    """Leave freed memory behind that is full of ones, for the next to be given."""
    for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18):
        held = [mx.full((size,), 255).astype(mx.uint8) for _ in range(20)]
        mx.eval(held)


def padding_of(cache: list[Any], n: int) -> list[np.ndarray]:
    """Return the rows of each layer's arrays that belong to no token."""
    found = []
    for leaf in codecs.take_apart(cache, n):
        for array in leaf.arrays:
            rows = buffers.rows(array)
            free = np.ones(rows.shape[1], bool)
            for run in leaf.runs:
                free[run.slot : run.slot + run.hi - run.lo] = False
            found.append(rows[:, free])
    return found


@every_kind
@pytest.mark.parametrize("n", [1, 63, 64, 65, 256, 300])
@pytest.mark.parametrize("way", ["memory", "disk"])
def test_padding_is_zero(
    tmp_path: Path, build: Callable[[int], list[Any]], n: int, way: str
) -> None:
    """No memory of somebody else's lies in a live cache, where no token is."""
    cache = build(n)
    soil_memory()
    if way == "memory":
        made = copy_of(cache, n, n + 100)
    else:
        made = from_disk(tmp_path / "store", cache, n)
    for rows in padding_of(made, n):
        assert not rows.any()


@pytest.mark.parametrize(
    ("n", "n_total", "room"),
    [(1, 2, 512), (200, 256, 512), (200, 257, 768), (700, 2000, 2304)],
)
def test_there_is_room_for_the_request_and_a_step(
    n: int, n_total: int, room: int
) -> None:
    """A buffer that is full would be copied whole at the first update."""
    for layer in [*copy_of(kv(n), n, n_total)]:
        assert (layer.keys.shape[2], layer.values.shape[2]) == (room, room)
        assert layer.offset == n
    for layer in copy_of(quantized(n), n, n_total):
        assert {array.shape[2] for array in [*layer.keys, *layer.values]} == {room}


@every_kind
@pytest.mark.parametrize("n", [1, 64, 65, 300])
def test_a_copy_is_evaluated_and_of_its_own(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Invariant 3: growing the copy changes the source in nothing, nor the reverse."""
    cache, again = build(n), build(n)
    made, other = copy_of(cache, n, n + 9), copy_of(cache, n, n + 9)
    assert codecs.describe(cache) == codecs.describe(made)
    expected = [array.tobytes() for array in map(buffers.plain, rows_of(other))]
    for layers in (made, cache):
        for layer in codecs.leaves_of(layers):
            if hasattr(layer, "update_and_fetch"):
                width = getattr(layer, "group_size", 8)
                grow(layer, n, n + 2, head_dim=width)
            else:
                layer[0][:] = 99
                mx.eval(layer.cache)
    assert expected == [array.tobytes() for array in map(buffers.plain, rows_of(other))]
    for one, two in zip(again, other, strict=True):
        if hasattr(one, "update_and_fetch"):
            width = getattr(one, "group_size", 8)
            grow(one, n, n + 2, head_dim=width)
            grow(two, n, n + 2, head_dim=width)
        else:
            assert mx.array_equal(one[0], two[0])


def rows_of(cache: list[Any]) -> list[mx.array]:
    """Return all arrays of a cache, rows and state."""
    parts = codecs.take_apart(cache, 10**9)
    return [a for leaf in parts for a in (*leaf.arrays, *leaf.state.values())]


def test_a_copy_of_fewer_tokens_lies_in_order() -> None:
    """Cut to an earlier position, a window of a long prefill starts a new ring."""
    rng = random.Random(70)
    for keep in (0, 4):
        live = rotating(300, 32, keep, n_layers=1)
        capture = take_in(live, 300).capture()
        assert capture.layers is not None
        for _ in range(20):
            n = rng.randrange(1, 300)
            assert capture.resumable(n) == n
            (made,) = restore.copy(
                capture.leaves, capture.layers, n, n + 9, whole=False
            )
            (fresh,) = rotating(n, 32, keep, n_layers=1)
            for step in range(3):
                assert_goes_on(fresh, made, n + step)


def test_blank_arrays_are_those_of_the_description() -> None:
    """Each part and each state array has its dtype and shape; bytes and arrays are one
    memory."""
    cache = [*quantized(9), *rotating(9, 64), *arrays_cache(9, dtype=mx.bfloat16)]
    capture = take_in(cache, 9).capture()
    assert capture.layers is not None
    made = restore.blank(capture.layers, 9, 20, {}, capture.state)
    assert len(made.leaves) == len(leaves(capture.layers)) == 6
    for leaf, blank in zip(capture.leaves, made.leaves, strict=True):
        assert [a.dtype for a in leaf.arrays] == [a.dtype for a in blank.arrays]
        assert leaf.state.keys() == blank.state.keys()
        for name, array in leaf.state.items():
            assert (array.dtype, array.shape) == (
                blank.state[name].dtype,
                blank.state[name].shape,
            )
    for rows in made.state:
        rows[:] = 1
    for leaf in made.leaves:
        for array in leaf.state.values():
            assert set(buffers.plain(array)) == {1}
