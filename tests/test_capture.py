"""Facts about a caller's cache on its way in: what is taken, refused and copied."""

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
    cut_to,
    grow,
    kv,
    prints,
    quantized,
    rotating,
    tokens,
)
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from promptstore import Namespace, PromptStore, buffers, codecs, restore
from promptstore.capture import Capture, take_in
from promptstore.layers import DRAFT, is_whole, leaves
from promptstore.ranges import count


def copy_of(capture: Capture, n_total: int | None = None) -> list[Any]:
    """Return a live copy of all that a capture holds, as a match hands it out."""
    assert capture.layers is not None
    n = capture.n_tokens
    return restore.copy(capture.leaves, capture.layers, n, n_total or n, whole=True)


class MyCache(KVCache):
    """A class that has no codec."""


# ------------------------------------------------------------------------ windows


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize(("steps", "n_trimmed"), [(10, 11), (10, 20), (1, 40)])
def test_a_ring_trimmed_past_its_window_is_refused(
    keep: int, steps: int, n_trimmed: int
) -> None:
    """Fault W03: rows of it belong to other tokens, so nothing of it is stored."""
    cache = rotating(100, 64, keep, steps=steps)
    for layer in cache:
        layer.trim(n_trimmed)
    with pytest.raises(ValueError, match="trimmed past its window"):
        take_in(cache, 100 - n_trimmed)


@pytest.mark.parametrize("keep", [0, 4])
def test_a_ring_trimmed_to_its_first_slot_is_refused(keep: int) -> None:
    """Fault W03: a step moves on from the slot it wrote, so no ring stands at keep."""
    cache = rotating(100, 64, keep, steps=20)
    for layer in cache:
        layer.trim(20)
        assert (layer.offset, layer._idx) == (80, keep)
    with pytest.raises(ValueError, match="RotatingKVCache"):
        take_in(cache, 80)


def test_a_window_that_has_not_wrapped_may_be_trimmed() -> None:
    """All of its rows are there; what was trimmed is not attended to."""
    cache = rotating(50, 64)
    for layer in cache:
        layer.trim(20)
    capture = take_in(cache, 30).capture()
    assert capture.held(0) == ((0, 30),)
    assert prints(rotating(30, 64)) == prints(copy_of(capture))


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize(("n", "steps"), [(100, 1), (100, 36), (300, 64)])
def test_a_wrapped_window_longer_than_its_key_is_refused(
    keep: int, n: int, steps: int
) -> None:
    """The rows of the window before its end are gone; the message says how many."""
    cache = [*kv(n), *rotating(n, 64, keep, steps=steps)]
    with pytest.raises(ValueError, match=f"cache holds {n} tokens, tokens has {n - 9}"):
        take_in(cache, n - 9)


def test_a_long_prefill_still_has_an_earlier_window() -> None:
    """Right after a prefill all rows are there, so a shorter key can be had."""
    cache = [*kv(300, n_layers=1), *rotating(300, 64, n_layers=1)]
    capture = take_in(cache, 250).capture()
    assert (capture.n_tokens, capture.held(1)) == (250, ((0, 250),))
    expected = [*kv(250, n_layers=1), *rotating(250, 64, n_layers=1)]
    actual = copy_of(capture)
    for one, two in zip(expected, actual, strict=True):
        for a, b in zip(grow(one, 250, 251), grow(two, 250, 251), strict=True):
            assert mx.array_equal(a, b)


def test_a_chunk_longer_than_its_key_is_refused() -> None:
    """Rows before the chunk are gone; those inside it do not suffice."""
    with pytest.raises(ValueError, match="window layer"):
        take_in(chunked(200, 64), 190)


LONGER: dict[str, Callable[[int], list[Any]]] = {
    "rotating": lambda n: rotating(n, 64),
    "chunked": lambda n: chunked(n, 64),
    "mixed": lambda n: [*kv(n), *rotating(n, 64, 4)],
}


@pytest.mark.parametrize("build", LONGER.values(), ids=LONGER)
def test_a_window_longer_than_its_key_is_copied_as_far_as_the_key(
    build: Callable[[int], list[Any]],
) -> None:
    """Inside the window nothing is lost yet: the copy holds the key's tokens only."""
    capture = take_in(build(40), 30).capture()
    assert capture.n_tokens == 30
    copies = copy_of(capture)
    assert [layer.offset for layer in copies] == [30] * len(copies)
    for one, two in zip(build(30), copies, strict=True):
        for a, b in zip(grow(one, 30, 31), grow(two, 30, 31), strict=True):
            assert mx.array_equal(a, b)


@pytest.mark.parametrize("build", LONGER.values(), ids=LONGER)
def test_a_live_copy_holds_no_more_than_its_key(
    build: Callable[[int], list[Any]],
) -> None:
    """What is handed over in the end must not attend to tokens behind the key."""
    capture = take_in(build(40), 30).capture()
    assert [layer.offset for layer in capture.cache] in ([], [30, 30])


@pytest.mark.parametrize("build", LONGER.values(), ids=LONGER)
def test_a_match_never_gives_more_than_it_says(
    build: Callable[[int], list[Any]], tmp_path: Path
) -> None:
    """A cache of 40 tokens stored under 30 comes back as a cache of 30."""
    space, ids = Namespace("m"), tokens(30)
    with PromptStore.open(tmp_path / "store", min_tokens=1) as store:
        assert store.insert(space, ids, build(40)) == 30
        store.flush()
        match = store.match(space, [*ids, 5000])
        assert match.n_tokens == 30
        assert match.cache is not None
        assert [layer.offset for layer in match.cache] == [30] * len(match.cache)


# ----------------------------------------------------------------- full attention


FULL: dict[str, Callable[[int], list[Any]]] = {
    "KVCache": kv,
    "ConcatenateKVCache": concatenated,
    "QuantizedKVCache": quantized,
}


@pytest.mark.parametrize("build", FULL.values(), ids=FULL)
@pytest.mark.parametrize("n", [1, 256, 500, 699, 700])
def test_a_cache_longer_than_its_key_is_cut(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """The store's own copy holds the key's tokens; the caller's cache is as it was."""
    cache = build(700)
    capture = take_in(cache, n).capture()
    expected = prints(cut_to(build(700), n))
    assert capture.n_tokens == n
    assert expected == prints(capture.cache)
    assert expected == prints(copy_of(capture))
    assert prints(build(700)) == prints(cache)


def test_a_cache_shorter_than_its_key_counts_as_it_is() -> None:
    """mlx-lm runs one token ahead: what the cache holds is what is stored."""
    taken = take_in([*kv(10), *kv(8)], 12)
    assert taken.n_tokens == 8
    assert [layer.offset for layer in taken.capture().cache] == [8] * 4
    assert take_in([KVCache(), KVCache()], 12).n_tokens == 0


def test_rows_are_copied_compactly_from_a_token_on() -> None:
    """What is on disk already is not copied, what is to be written is."""
    cache = kv(700)
    capture = take_in(cache, 600).capture_rows(550)
    assert capture.cache == []
    assert [capture.held(leaf) for leaf in range(2)] == [((550, 600),)] * 2
    for placed, full in zip(capture.parts(), cache, strict=True):
        for part, array in zip(placed, [full.keys, full.values], strict=True):
            assert np.array_equal(buffers.rows(array)[:, 550:600], part.rows)


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("steps", [0, 1, 30])
def test_all_rows_of_a_window_are_copied(keep: int, steps: int) -> None:
    """Those of tokens before the first one too: the disk may lack them."""
    cache = rotating(300, 64, keep, steps=steps)
    whole, rows = take_in(cache, 300).capture(), take_in(cache, 300).capture_rows(290)
    assert whole.held(0) == rows.held(0)
    assert whole.rings == rows.rings
    assert count(rows.held(0)) >= 64
    for a, b in zip(whole.leaves, rows.leaves, strict=True):
        assert sum(run.hi - run.lo for run in b.runs) == b.arrays[0].shape[2]
        one = restore.copy([a], whole.layers[:1], 300, 300, whole=True)
        two = restore.copy([b], whole.layers[:1], 300, 300, whole=True)
        assert prints(one) == prints(two)


# ------------------------------------------------------------ batches and unknown


@pytest.mark.parametrize(
    "layer",
    [BatchKVCache([0, 0]), BatchRotatingKVCache(8, [0, 0])],
    ids=["kv", "rotating"],
)
def test_a_batch_cache_is_refused(layer: Any) -> None:
    """It belongs to no one prompt; the message names it and says what to do."""
    for cache in ([layer], [*kv(5), layer], [CacheList(*kv(5), layer)]):
        with pytest.raises(ValueError, match=f"{type(layer).__name__} holds a batch"):
            take_in(cache, 5)


def test_several_sequences_are_refused() -> None:
    """Also in the classes of one sequence; the message says how many there are."""
    full, ring, state = KVCache(), RotatingKVCache(8), ArraysCache(1)
    for layer in (full, ring):
        layer.update_and_fetch(mx.zeros((3, 2, 5, 8)), mx.zeros((3, 2, 5, 8)))
    state[0] = mx.zeros((3, 4))
    for layer in (full, ring, state):
        with pytest.raises(ValueError, match="of 3 sequences cannot be stored"):
            take_in([layer, *kv(5)], 5)


@pytest.mark.parametrize("cache", [None, 5, "cache", {}, iter([]), kv(3)[0]])
def test_what_is_no_list_is_a_type_error(cache: Any) -> None:
    """A list or a tuple of layers, nothing else."""
    with pytest.raises(TypeError, match="cache must be a list"):
        take_in(cache, 3)


def test_no_layers_are_refused() -> None:
    """An empty list is a mistake."""
    with pytest.raises(ValueError, match="no layers"):
        take_in([], 3)


def test_an_unknown_class_is_taken_whole() -> None:
    """It is copied, named, and never cut."""
    layer = MyCache()
    grow(layer, 0, 5)
    taken = take_in([layer, *kv(5)], 5)
    assert (taken.layers, taken.text, taken.n_tokens) == (None, "unknown: MyCache", 5)
    capture = taken.capture()
    assert capture.is_whole
    assert not capture.is_cuttable
    assert [capture.resumable(n) for n in (4, 5, 9)] == [0, 5, 5]
    expected = prints(capture.cache)
    grow(layer, 5, 9)
    assert expected == prints(capture.cache)
    with pytest.raises(ValueError, match="MyCache cannot be cut"):
        take_in([layer], 5)


def test_length_dependent_kv_is_taken_whole() -> None:
    """Its layout meets no other, it is resumed at its end only, and never cut."""
    limit: Any = {"is_exact": lambda n: n <= 100}
    taken = take_in(kv(101), 101, **limit)
    assert is_whole(taken.text)
    capture = taken.capture()
    assert [capture.resumable(n) for n in (100, 101)] == [0, 101]
    assert not capture.is_cuttable
    assert not is_whole(take_in(kv(100), 100, **limit).text)
    with pytest.raises(ValueError, match="length-dependent rope"):
        take_in(kv(101), 50, **limit)


# ------------------------------------------------------------------- draft models


def test_a_draft_models_layers_are_marked() -> None:
    """The same layers without a draft are another layout; both come back flat."""
    cache = [*kv(8), *kv(8, n_layers=1, head_dim=4)]
    taken, plain = take_in(cache, 8, n_target=2), take_in(cache, 8)
    assert taken.layers is not None
    assert taken.layers[-1].tag == DRAFT
    assert taken.layers[:2] == plain.layers[:2]
    assert leaves(taken.layers) == leaves(plain.layers)
    assert taken.text != plain.text
    assert take_in(cache, 8, n_target=3) == plain
    assert codecs.fits(taken.layers, [KVCache(), KVCache(), KVCache()])
    assert not codecs.fits(taken.layers, [KVCache(), KVCache()])
    capture = taken.capture()
    assert prints(cache) == prints(copy_of(capture))
    assert len(capture.cache) == 3


def test_a_draft_that_lags_decides_how_far_is_stored() -> None:
    """Its target is cut to what both hold."""
    cache = [*kv(300), *kv(297, n_layers=1)]
    capture = take_in(cache, 300, n_target=2).capture()
    assert capture.n_tokens == 297
    assert [layer.offset for layer in copy_of(capture)] == [297] * 3


@pytest.mark.parametrize(
    "n_target",
    [n for n in (-1, 0, 3)],
)
def test_a_draft_begins_inside_the_cache(n_target: int) -> None:
    """A number of target layers that the cache does not have is a ValueError."""
    with pytest.raises(ValueError, match="n_target"):
        take_in(kv(5), 5, n_target=n_target)


# -------------------------------------------------------------------------- state


def test_state_is_taken_with_empty_slots_and_padding() -> None:
    """Slots that a model left empty stay empty; lengths and padding come along."""
    layer = ArraysCache(3, left_padding=[2])
    layer[1] = mx.arange(6).reshape(1, 2, 3)
    layer.prepare(lengths=[5])
    capture = take_in([layer], 5).capture()
    assert list(capture.leaves[0].state) == ["1", "left_padding", "lengths"]
    assert [array.name for array in capture.state] == ["1", "left_padding", "lengths"]
    for (copy,) in (copy_of(capture), capture.cache):
        assert type(copy) is ArraysCache
        assert (copy[0], copy[2]) == (None, None)
        assert mx.array_equal(copy[1], layer[1])
        assert copy.left_padding.tolist() == [2]
        assert copy.lengths.tolist() == [5]


def test_a_state_of_empty_slots_is_a_state() -> None:
    """A layer that holds no array at all comes back as one."""
    capture = take_in([ArraysCache(2), *kv(5)], 5).capture()
    copy, *_ = copy_of(capture)
    assert (copy.cache, copy.left_padding, copy.lengths) == ([None, None], None, None)


def test_state_alone_is_believed_to_be_of_its_key() -> None:
    """It does not tell how many tokens it has seen: the caller vouches."""
    assert take_in(arrays_cache(9), 17).n_tokens == 17


@pytest.mark.parametrize("build", [kv, rotating])
def test_state_longer_than_its_key_is_refused(
    build: Callable[[int], list[Any]],
) -> None:
    """A state cannot be cut; other layers tell that it is of more tokens."""
    cache = [*build(40), *arrays_cache(40)]
    with pytest.raises(ValueError, match="state layer"):
        take_in(cache, 39)
    assert take_in(cache, 40).n_tokens == 40
    with pytest.raises(ValueError, match="state layer"):
        take_in([*build(40), *build(39), *arrays_cache(40)], 40)


@pytest.mark.parametrize("how", ["capture", "capture_rows"])
def test_state_is_copied_into_memory_of_its_own(how: str) -> None:
    """Fault R10: a slice of a large array would keep all of it alive."""
    large = mx.arange(100_000).astype(mx.float32).reshape(1, 1000, 100)
    layer = ArraysCache(2)
    layer[0], layer[1] = large[:, 10:13], large[:, 999:, :5]
    mx.eval(large, layer.cache)
    taken = take_in([layer], 5)
    capture = taken.capture() if how == "capture" else taken.capture_rows(0)
    start = buffers.plain(large).ctypes.data
    for name, array in capture.leaves[0].state.items():
        assert not start <= buffers.plain(array).ctypes.data < start + large.nbytes
        assert mx.array_equal(array, layer[int(name)])
    assert capture.state_bytes()[0].nbytes == 3 * 100 * 4
    for live in capture.cache:
        for array in live.cache:
            assert not start <= buffers.plain(array).ctypes.data < start + large.nbytes


@pytest.mark.parametrize("how", ["capture", "capture_rows"])
def test_a_state_changed_afterwards_changes_nothing(how: str) -> None:
    """Invariant 3: neither assignment nor an update in place reaches the copy."""
    cache = arrays_cache(9)
    taken = take_in(cache, 9)
    capture = taken.capture() if how == "capture" else taken.capture_rows(0)
    expected = [bytes(rows) for rows in capture.state_bytes()]
    for layer in cache:
        layer[0][:] = 77
        layer[1] = layer[1] + 1
        mx.eval(layer.cache)
    assert expected == [bytes(rows) for rows in capture.state_bytes()]


# --------------------------------------------------------------------- composites


def test_composites_are_taken_apart_and_made_again() -> None:
    """Lists inside lists, of every kind of layer, come back as they were."""
    ring = rotating(300, 64, 4, steps=7, n_layers=1)
    inner = CacheList(*ring, *arrays_cache(300, n_layers=1))
    cache = [CacheList(*kv(300, n_layers=1), inner), *kv(300, n_layers=1)]
    taken = take_in(cache, 300)
    assert taken.layers is not None
    tags = [leaf.tag for leaf in leaves(taken.layers)]
    assert tags == ["full/1", "rotating/1", "arrays/1", "full/1"]
    capture = taken.capture()
    for made in (copy_of(capture), capture.cache):
        assert [type(layer) for layer in made] == [CacheList, KVCache]
        assert type(made[0].caches[1]) is CacheList
        ours, theirs = (list(codecs.leaves_of(c)) for c in (made, cache))
        assert [type(leaf) for leaf in ours] == [type(leaf) for leaf in theirs]
        assert mx.array_equal(ours[2][1], theirs[2][1])
        assert prints([ours[0], ours[3]]) == prints([theirs[0], theirs[3]])
        assert codecs.describe(made) == taken.layers
    fresh, live = copy_of(capture)[0].caches[1].caches[0], ring[0]
    for a, b in zip(grow(fresh, 300, 301), grow(live, 300, 301), strict=True):
        assert mx.array_equal(a, b)


def test_a_composite_fits_its_own_kind_only() -> None:
    """Number, order and kind of what is inside must agree."""
    layers = codecs.describe([CacheList(*kv(5, n_layers=1), *rotating(5, 64))])
    ring = RotatingKVCache(64, 0)
    assert codecs.fits(layers, [CacheList(KVCache(), ring, ring)])
    assert not codecs.fits(layers, [CacheList(KVCache(), ring)])
    assert not codecs.fits(layers, [CacheList(ring, KVCache(), ring)])
    assert not codecs.fits(layers, [KVCache(), ring, ring])
    other = RotatingKVCache(32, 0)
    assert not codecs.fits(layers, [CacheList(KVCache(), ring, other)])


# ----------------------------------------------------------------------- resuming


def test_a_capture_is_resumed_where_its_rows_suffice() -> None:
    """A position is resumable when the rows of its window are in the live cache."""
    rng = random.Random(40)
    for _ in range(100):
        keep = rng.choice([0, 4])
        n = rng.randrange(1, 200)
        cache = rotating(n, 32, keep, steps=rng.randrange(min(n, 50)), n_layers=1)
        capture = take_in(cache, n).capture()
        held = {at for lo, hi in capture.held(0) for at in range(lo, hi)}
        for limit in (0, n // 2, n - 1, n):
            expected = 0
            for p in range(limit + 1):
                first = 0 if p <= 32 else p - (32 - keep)
                if {*range(min(keep, p)), *range(first, p)} <= held:
                    expected = p
            expected = n if limit == n else expected
            assert capture.resumable(limit) == expected
    state = take_in([*kv(9), *arrays_cache(9)], 9).capture()
    assert [state.resumable(n) for n in (0, 8, 9)] == [0, 0, 9]
    assert not state.is_cuttable
    full = take_in(kv(9), 9).capture()
    assert [full.resumable(n) for n in (0, 8, 9)] == [0, 8, 9]
    assert full.is_cuttable


def test_sizes_are_those_of_all_arrays() -> None:
    """Padding and state are counted, in composites too."""
    cache = [*kv(5), CacheList(*rotating(5, 64, n_layers=1), *arrays_cache(5))]
    nbytes, n_arrays = take_in(cache, 5).size()
    assert n_arrays == 2 * 2 + 2 + 2 * 2
    rows = 2 * 2 * 256 + 2 * 5  # of two full layers, padded, and of a window
    assert nbytes == rows * 2 * 8 * 4 + 2 * (12 + 15) * 4
