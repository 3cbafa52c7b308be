"""Facts about taking prompt caches apart and putting them together again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from builders import (
    KEYS,
    VALUES,
    arrays_cache,
    attended,
    chunked,
    clone_of,
    concatenated,
    cut_to,
    grow,
    kv,
    parts,
    prefill,
    prints,
    quantized,
    rotating,
    tiny_model,
    tokens,
    values,
)
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from promptstore import NotCovered, buffers, codecs
from promptstore.capture import take_in
from promptstore.codecs.table import CODECS, class_of
from promptstore.layers import DRAFT, Layer, Layers, RowPart
from promptstore.layers import leaves as leaf_layers

BUILDERS: dict[str, Callable[[int], list[Any]]] = {
    "KVCache": kv,
    "KVCache bfloat16": lambda n: kv(n, dtype=mx.bfloat16),
    "KVCache float16": lambda n: kv(n, dtype=mx.float16),
    "ConcatenateKVCache": concatenated,
    "QuantizedKVCache 8/32": lambda n: quantized(n, 8, 32),
    "QuantizedKVCache 4/64": lambda n: quantized(n, 4, 64),
    "QuantizedKVCache bfloat16": lambda n: quantized(n, 4, 32, dtype=mx.bfloat16),
    "mixed": lambda n: [*quantized(n), *kv(n), *concatenated(n)],
}
SIZES = [1, 3, 255, 256, 257, 700]

every_class = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def offsets(cache: list[Any]) -> list[int]:
    return [layer.offset for layer in cache]


def append(cache: list[Any], n: int = 1) -> None:
    """Give every layer *n* more tokens, of values that no builder makes."""
    for layer in cache:
        wide = layer.group_size if isinstance(layer, QuantizedKVCache) else 8
        array = layer.keys[1] if isinstance(layer.keys, tuple) else layer.keys
        rows = mx.full((1, array.shape[1], n, wide), 250).astype(array.dtype)
        layer.update_and_fetch(rows, rows)
        mx.eval(attended([layer]))


def rebuild(layers: Layers, arrays: list[mx.array], n: int) -> list[Any]:
    """Return a live cache on the row parts of its layers in order."""
    supply = iter(arrays)
    leaves = [
        codecs.Leaf([next(supply) for _ in leaf.parts], (), None, {})
        for leaf in leaf_layers(layers)
    ]
    return codecs.rebuild(layers, leaves, n)


class MyKVCache(KVCache):
    """A subclass may keep more than its parent: it is not its parent."""


class MyRotatingKVCache(RotatingKVCache):
    """The same for a window."""


# ------------------------------------------------------------------ describe


def test_full_attention_is_described_by_heads_width_and_dtype() -> None:
    """Padding and length are not part of a description."""
    expected = Layer(
        "full/1", (RowPart("keys", 2, 8, "BF16"), RowPart("values", 2, 8, "BF16"))
    )
    for n in (1, 256, 300):
        assert (expected,) * 2 == codecs.describe(kv(n, dtype=mx.bfloat16))


def test_concatenated_attention_has_a_tag_of_its_own() -> None:
    """Two classes are two kinds, even where their rows look alike."""
    expected = Layer(
        "concatenate/1", (RowPart("keys", 2, 8, "F32"), RowPart("values", 2, 8, "F32"))
    )
    assert (expected,) * 2 == codecs.describe(concatenated(5))


def test_quantized_attention_is_described_by_six_parts_and_its_settings() -> None:
    """Packed values, scales and biases, the bits and the group size."""
    (layer,) = codecs.describe(quantized(5, 4, 64, n_layers=1, dtype=mx.float16))
    expected = Layer(
        "quantized/1",
        tuple(
            RowPart(f"{part}.{name}", 2, width, dtype)
            for part in ("keys", "values")
            for name, width, dtype in (
                ("packed", 8, "U32"),
                ("scales", 1, "F16"),
                ("biases", 1, "F16"),
            )
        ),
        {"bits": 4, "group_size": 64},
    )
    assert expected == layer


def test_keys_and_values_may_differ_in_width() -> None:
    """Models with values narrower than keys, or of no width, are described so."""
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 0)))
    (described,) = codecs.describe([layer])
    assert [part.head_dim for part in described.parts] == [8, 0]
    (clone,) = clone_of([layer], 3)
    assert [array.shape[3] for array in attended([clone])] == [8, 0]


@pytest.mark.parametrize("make", [KVCache, ConcatenateKVCache, QuantizedKVCache])
def test_a_batch_of_two_is_refused(make: type[Any]) -> None:
    """A cache of several sequences belongs to no one prompt; the error says so."""
    layer = make()
    layer.update_and_fetch(mx.zeros((2, 2, 3, 64)), mx.zeros((2, 2, 3, 64)))
    for ask in (codecs.describe, lambda cache: take_in(cache, 3)):
        with pytest.raises(ValueError, match=f"{make.__name__} of 2 sequences"):
            ask([layer])


# ------------------------------------------------------------------ n_cached


@every_class
@pytest.mark.parametrize("n", SIZES)
def test_n_cached_is_what_the_layers_hold(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """The length is read from the layers, padding not counted."""
    assert n == codecs.n_cached(build(n))


@every_class
def test_n_cached_follows_a_trim(build: Callable[[int], list[Any]]) -> None:
    """What mlx-lm trimmed away is no longer held, whatever the arrays still show."""
    cache = build(8)
    for layer in cache:
        layer.trim(5)
    assert codecs.n_cached(cache) == 3


def test_layers_that_disagree_hold_what_the_shortest_holds() -> None:
    """One lagging layer, or one never used, decides."""
    assert codecs.n_cached([*kv(8), *kv(5), *quantized(9)]) == 5
    assert codecs.n_cached([*kv(8), KVCache()]) == 0
    assert codecs.n_cached([*kv(8), ConcatenateKVCache()]) == 0
    assert codecs.n_cached([*kv(8), QuantizedKVCache()]) == 0


def test_a_cache_without_layers_or_tokens_holds_nothing() -> None:
    """Neither empty layers nor no layers hold a token."""
    assert codecs.n_cached([]) == 0
    assert codecs.n_cached([KVCache(), QuantizedKVCache(), ConcatenateKVCache()]) == 0


def test_an_offset_beyond_the_rows_is_not_believed() -> None:
    """A layer holds no more tokens than it has rows."""
    (layer,) = concatenated(8, n_layers=1)
    layer.offset = 12
    assert codecs.n_cached([layer]) == 8


def test_a_class_without_codec_holds_what_its_offset_says() -> None:
    """A ring that wrapped says how many tokens it saw."""
    for ring in (MyRotatingKVCache(max_size=4), RotatingKVCache(max_size=4)):
        for _ in range(9):
            ring.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
        assert codecs.n_cached([ring]) == 9
        assert codecs.n_cached([ring, *kv(5)]) == 5


@pytest.mark.parametrize("layer", [ArraysCache(2), BatchKVCache([0]), object()])
def test_a_class_that_does_not_say_its_length_is_not_covered(layer: Any) -> None:
    """Nothing is guessed; the class is named. Beside others they tell for it."""
    for cache in ([layer], [CacheList(layer)]):
        with pytest.raises(NotCovered, match=type(layer).__name__):
            codecs.n_cached(cache)
    assert codecs.n_cached([*kv(5), layer]) == 5


def test_a_composite_holds_what_its_layers_hold() -> None:
    """The shortest inside decides, and one inside that is empty holds nothing."""
    assert codecs.n_cached([CacheList(*kv(8)), CacheList(*kv(5), *kv(9))]) == 5
    assert codecs.n_cached([*kv(8), CacheList(KVCache())]) == 0
    assert codecs.n_cached([CacheList(ArraysCache(2), *kv(7, n_layers=1))]) == 7


# --------------------------------------------------------------------- clone


@every_class
@pytest.mark.parametrize("n", SIZES)
def test_a_clone_is_equal_bit_for_bit(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Classes, settings, offsets, dtypes and all attended rows are the same."""
    cache = build(n)
    clone = clone_of(cache, n)
    assert [type(layer) for layer in cache] == [type(layer) for layer in clone]
    assert [n] * len(cache) == offsets(clone)
    assert prints(cache) == prints(clone)
    assert codecs.describe(cache) == codecs.describe(clone)


@every_class
@pytest.mark.parametrize("n", SIZES)
def test_updating_the_original_leaves_a_clone_alone(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Invariant 3: nothing that a caller does afterwards changes what is stored."""
    cache = build(n)
    expected = prints(cache)
    clone = clone_of(cache, n)
    append(cache)
    append(cache, 2)
    for layer in cache:
        layer.trim(n)
    append(cache)
    assert expected == prints(clone)
    assert [n] * len(clone) == offsets(clone)


@every_class
@pytest.mark.parametrize("n", SIZES)
def test_updating_a_clone_leaves_the_original_alone(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Invariant 3, the other way: what was handed out changes nothing here."""
    cache = build(n)
    expected = prints(cache)
    clone = clone_of(cache, n)
    append(clone)
    append(clone, 2)
    codecs.cut(clone, 1)
    append(clone)
    assert expected == prints(cache)
    assert [n] * len(cache) == offsets(cache)


@every_class
def test_overwriting_rows_in_place_leaves_a_clone_alone(
    build: Callable[[int], list[Any]],
) -> None:
    """Even rows that both hold are copied before one of them is overwritten."""
    cache = build(8)
    expected = prints(cache)
    clone = clone_of(cache, 8)
    for layer in cache:
        if isinstance(layer, ConcatenateKVCache):
            layer.keys[..., :4, :] = 250
        else:
            layer.trim(8)
    append([c for c in cache if not isinstance(c, ConcatenateKVCache)], 4)
    mx.eval(parts(cache))
    assert expected == prints(clone)


def test_clones_of_one_cache_are_independent() -> None:
    """Two that begin with the same rows continue them differently."""
    cache = kv(5)
    first, second = clone_of(cache, 5), clone_of(cache, 5)
    append(first, 3)
    expected = prints(first)
    append(second, 4)
    assert expected == prints(first)
    assert offsets(second) == [9, 9]


def test_bytes_seen_through_a_clone_stay_while_the_original_grows() -> None:
    """The writer may read a clone's memory while the caller generates on."""
    cache = kv(8)
    clone = clone_of(cache, 8)
    views = [buffers.rows(array) for array in parts(clone)]
    expected = [view.tobytes() for view in views]
    append(cache)
    append(cache)
    assert expected == [view.tobytes() for view in views]


@pytest.mark.parametrize("build", [kv, quantized, concatenated])
def test_a_clone_shares_memory(build: Callable[[int], list[Any]]) -> None:
    """A clone costs no bytes until one of the two is updated."""
    cache = build(300)
    clone = clone_of(cache, 300)
    expected, actual = (
        [buffers.rows(array).ctypes.data for array in parts(c)] for c in (cache, clone)
    )
    assert expected == actual


@every_class
@pytest.mark.parametrize("n", [1, 256, 280, 512, 699])
def test_a_shorter_clone_is_cut_in_every_layer(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """A clone of the first tokens attends to exactly these, and goes on from there."""
    cache = build(700)
    expected = prints(cut_to(cache, n))
    clone = clone_of(cache, n)
    assert [n] * len(cache) == offsets(clone)
    assert expected == prints(clone)
    append(clone)
    assert [n + 1] * len(cache) == offsets(clone)
    assert {n + 1} == {array.shape[2] for array in attended(clone)}
    assert prints(build(700)) == prints(cache)


def test_a_clone_of_layers_that_disagree_is_as_long_as_the_shortest() -> None:
    """Cut to what all layers hold, no layer keeps a token of its own."""
    cache = [*kv(8), *kv(5), *concatenated(9)]
    clone = clone_of(cache, codecs.n_cached(cache))
    assert offsets(clone) == [5] * 6
    assert {array.shape[2] for array in attended(clone)} == {5}


def test_a_clone_is_evaluated() -> None:
    """Invariant 10: another thread may read a clone of a cache that was lazy."""
    cache = kv(5)
    for layer in cache:
        layer.keys = layer.keys + 1
    clone = clone_of(cache, 5)
    expected = [
        values(0, 5, layer=number, part=part) + (part == KEYS)
        for number in range(2)
        for part in (KEYS, VALUES)
    ]
    actual = [buffers.rows(array) for array in parts(clone)]
    for want, rows in zip(expected, actual, strict=True):
        assert np.array_equal(want[0], rows.view(np.float32)[:, :5])


# ------------------------------------------------------------------------ cut


@every_class
@pytest.mark.parametrize("n", [1, 255, 256, 280, 512, 699])
def test_a_cut_is_made_in_every_layer_and_lasts(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """After a cut and one more token a layer attends to n + 1, not to all."""
    cache = build(700)
    expected = prints(cut_to(cache, n))
    codecs.cut(cache, n)
    assert expected == prints(cache)
    append(cache)
    assert [n + 1] * len(cache) == offsets(cache)
    assert {n + 1} == {array.shape[2] for array in attended(cache)}
    for layer in cache:
        layer.trim(1)
    assert codecs.n_cached(cache) == n


def test_what_a_trim_took_from_a_concatenated_cache_stays_away() -> None:
    """Fault T02: 8 tokens, 5 trimmed; a clone holds 3 rows and attends to 3 + 1."""
    cache = concatenated(8)
    for layer in cache:
        layer.trim(5)
    clone = clone_of(cache, codecs.n_cached(cache))
    assert [array.shape[2] for array in parts(clone)] == [3] * 4
    assert prints(concatenated(3)) == prints(clone)
    append(clone)
    assert offsets(clone) == [4, 4]
    for number, layer in enumerate(clone):
        keys, _ = layer.keys_and_values()
        assert keys.shape[2] == 4
        before = values(0, 3, layer=number, part=KEYS)
        assert np.array_equal(before, np.array(keys[:, :, :3]))
        assert (np.array(keys[:, :, 3]) == 250).all()


@pytest.mark.parametrize("build", [kv, quantized])
def test_what_a_trim_took_is_not_attended_in_a_clone(
    build: Callable[[int], list[Any]],
) -> None:
    """Of 8 tokens with 5 trimmed a clone attends to 3, and then to 3 + 1."""
    cache = build(8)
    for layer in cache:
        layer.trim(5)
    clone = clone_of(cache, codecs.n_cached(cache))
    assert prints(build(3)) == prints(clone)
    append(clone)
    assert {array.shape[2] for array in attended(clone)} == {4}


# -------------------------------------------------------------------- rebuild


@every_class
@pytest.mark.parametrize("n", SIZES)
def test_description_and_arrays_make_the_cache_again(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """A cache rebuilt from copies of its parts is equal bit for bit and goes on."""
    cache = build(n)
    arrays = [mx.contiguous(array[:, :, :n]) for array in parts(cache)]
    mx.eval(arrays)
    rebuilt = rebuild(codecs.describe(cache), arrays, n)
    assert [type(layer) for layer in cache] == [type(layer) for layer in rebuilt]
    assert prints(cache) == prints(rebuilt)
    append(cache)
    append(rebuilt)
    assert prints(cache) == prints(rebuilt)


def test_settings_come_back() -> None:
    """A rebuilt quantized layer has the bits and the group size of its original."""
    cache = quantized(5, 4, 64)
    rebuilt = rebuild(codecs.describe(cache), parts(cache), 5)
    assert [(layer.bits, layer.group_size) for layer in rebuilt] == [(4, 64)] * 2


@pytest.mark.parametrize(
    "tag", ["", "full/2", "KVCache", "rotating/2", "__class__", "mlx.core/1"]
)
def test_a_tag_that_is_not_in_the_table_is_not_covered(tag: str) -> None:
    """No class is looked up by a name from a file, and no later format is guessed."""
    with pytest.raises(NotCovered, match="no codec"):
        codecs.codec_by_tag(tag)
    layer = Layer(tag, codecs.describe(kv(3))[0].parts)
    with pytest.raises(NotCovered, match="no codec"):
        rebuild((layer,), parts(kv(3, n_layers=1)), 3)


def test_each_tag_in_the_table_names_its_class() -> None:
    """From class to tag and back leads to the same class."""
    makes = {KVCache: KVCache(), ConcatenateKVCache: ConcatenateKVCache()}
    makes |= {QuantizedKVCache: QuantizedKVCache(), ArraysCache: ArraysCache(2)}
    makes |= {RotatingKVCache: RotatingKVCache(8), ChunkedKVCache: ChunkedKVCache(8)}
    makes |= {LayerCache: LayerCache(8)}
    for make, layer in makes.items():
        codec = codecs.codec_of(layer)
        assert codec is not None
        assert codecs.codec_by_tag(codec.tag) is codec
        assert class_of(codec) is make
    assert len(makes) == len(CODECS)


# --------------------------------------------------------------- unknown, fits


@pytest.mark.parametrize(
    "layer",
    [
        MyKVCache(),
        MyRotatingKVCache(8),
        BatchKVCache([0]),
        object(),
        None,
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_class_that_is_not_in_the_table_is_not_covered(layer: Any) -> None:
    """One unknown layer, a subclass included, and the cache has no description."""
    inside = CacheList(*kv(5, n_layers=1), layer)
    for cache in ([*kv(5), layer], [*kv(5), inside]):
        assert codecs.unknown_classes(cache) == [type(layer).__name__]
        assert codecs.codec_of(layer) is None
        asks = codecs.describe, codecs.clone, lambda c: codecs.take_apart(c, 5)
        for ask in asks:
            with pytest.raises(NotCovered, match=type(layer).__name__):
                ask(cache)
        assert not codecs.fits(codecs.describe(kv(5, n_layers=3)), cache)


def test_known_classes_are_known_wherever_they_stand() -> None:
    """A mixture of known classes has codecs, filled or empty, inside others too."""
    filled = [*kv(5), *quantized(5), *concatenated(5), *rotating(5), *chunked(5)]
    empty = [KVCache(), QuantizedKVCache(), ConcatenateKVCache(), ArraysCache(2)]
    empty += [RotatingKVCache(8), ChunkedKVCache(8), LayerCache(8)]
    for cache in (filled, empty, [CacheList(*empty)], [CacheList(CacheList(*empty))]):
        assert codecs.unknown_classes(cache) == []


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        ([QuantizedKVCache(32, 4), KVCache()], True),
        ([QuantizedKVCache(32, 8), KVCache()], False),
        ([QuantizedKVCache(64, 4), KVCache()], False),
        ([KVCache(), KVCache()], False),
        ([KVCache(), QuantizedKVCache(32, 4)], False),
        ([QuantizedKVCache(32, 4)], False),
        ([QuantizedKVCache(32, 4), KVCache(), KVCache()], False),
        ([QuantizedKVCache(32, 4), ConcatenateKVCache()], False),
        ([QuantizedKVCache(32, 4), MyKVCache()], False),
        ([], False),
    ],
)
def test_a_cache_fits_only_its_own_classes_and_settings(
    like: list[Any], expected: bool
) -> None:
    """Number, order, class, bits and group size must all be those of the model."""
    layers = codecs.describe(
        [*quantized(5, 4, 32, n_layers=1), *kv(5, n_layers=1)],
    )
    assert expected == codecs.fits(layers, like)


def test_a_filled_cache_fits_like_an_empty_one() -> None:
    """What a cache holds does not matter to what fits it."""
    assert codecs.fits(codecs.describe(kv(5)), kv(700))


# ------------------------------------------------------------------ with a model


@pytest.mark.parametrize("make", [KVCache, ConcatenateKVCache])
@pytest.mark.parametrize("n", [1, 200, 256, 299])
def test_a_model_goes_on_from_a_cut_clone_as_from_cold(make: type[Any], n: int) -> None:
    """The logits behind a clone that was cut are those of a cold prefill."""
    model, ids = tiny_model(), tokens(300, seed=5)
    cold = [make() for _ in range(3)]
    _, expected = prefill(model, ids, cold)
    full, _ = prefill(model, tokens(400, seed=5), [make() for _ in range(3)])
    clone = clone_of(full, n)
    _, actual = prefill(model, ids[n:], clone)
    assert float(mx.abs(expected - actual).max()) < 1e-4
    again = copy.deepcopy(full)
    codecs.cut(again, n)
    _, actual = prefill(model, ids[n:], again)
    assert float(mx.abs(expected - actual).max()) < 1e-4


# ----------------------------------------------------------------------- windows


WINDOWS: dict[str, Callable[[int], list[Any]]] = {
    "rotating": lambda n: rotating(n, 64),
    "rotating keep": lambda n: rotating(n, 64, 4),
    "rotating steps": lambda n: rotating(n, 64, steps=min(n - 1, 30)),
    "rotating keep steps": lambda n: rotating(n, 64, 4, steps=min(n - 1, 70)),
    "rotating bfloat16": lambda n: rotating(n, 64, 4, dtype=mx.bfloat16),
    "chunked": lambda n: chunked(n, 64),
    "chunked steps": lambda n: chunked(n, 64, steps=min(n - 1, 30)),
}
every_window = pytest.mark.parametrize("build", WINDOWS.values(), ids=WINDOWS)
WINDOW_SIZES = [1, 3, 63, 64, 65, 128, 256, 257, 700]


def test_windows_are_described_by_their_settings() -> None:
    """Size, kept tokens and chunk are part of a description, what lies where is not."""
    parts = RowPart("keys", 2, 8, "BF16"), RowPart("values", 2, 8, "BF16")
    expected = Layer("rotating/1", parts, {"max_size": 64, "keep": 4})
    for n, steps in ((1, 0), (64, 3), (300, 0), (300, 50)):
        cache = rotating(n, 64, 4, steps=steps, n_layers=1, dtype=mx.bfloat16)
        assert (expected,) == codecs.describe(cache)
    expected = Layer("chunked/1", parts, {"chunk_size": 64})
    for n in (1, 300):
        cache = chunked(n, 64, n_layers=1, dtype=mx.bfloat16)
        assert (expected,) == codecs.describe(cache)


@every_window
@pytest.mark.parametrize("n", WINDOW_SIZES)
def test_a_window_has_seen_what_it_says(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Also the tokens whose rows it has forgotten count."""
    assert codecs.n_cached(build(n)) == n


@every_window
@pytest.mark.parametrize("n", WINDOW_SIZES)
def test_runs_tell_where_the_rows_of_a_window_lie(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Each row that a run names is that of its token, no token comes twice, and all
    that the next step looks at are there."""
    for number, leaf in enumerate(codecs.take_apart(build(n), n)):
        seen: list[int] = []
        for lo, hi, slot in leaf.runs:
            assert lo < hi
            seen += range(lo, hi)
            for part, array in enumerate(leaf.arrays):
                expected = values(lo, hi, layer=number, part=part)
                actual = array[:, :, slot : slot + hi - lo].astype(mx.float32)
                assert np.array_equal(expected, np.array(actual))
        assert len(seen) == len(set(seen))
        assert set(range(max(0, n - 60), n)) <= set(seen)


@every_window
@pytest.mark.parametrize("n", WINDOW_SIZES)
def test_runs_of_fewer_tokens_are_a_part(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Taken apart up to an earlier token, what lies behind it is left out."""
    cache = build(n)
    for m in {0, 1, n // 2, max(0, n - 1)}:
        for whole, part in zip(
            codecs.take_apart(cache, n), codecs.take_apart(cache, m), strict=True
        ):
            held = {at for lo, hi, _ in whole.runs for at in range(lo, hi)}
            less = {at for lo, hi, _ in part.runs for at in range(lo, hi)}
            assert less == {at for at in held if at < m}
            assert part.ring is None or m == n


@every_window
@pytest.mark.parametrize("n", WINDOW_SIZES)
def test_a_clone_of_a_window_is_independent(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """Invariant 3: it is equal, and neither of the two changes the other."""
    cache = build(n)
    clone, again = codecs.clone(cache), build(n)
    assert codecs.describe(cache) == codecs.describe(clone)
    before = [prints_of(layer) for layer in clone]
    assert before == [prints_of(layer) for layer in cache]
    append_rows(cache, n, 3)
    assert before == [prints_of(layer) for layer in clone]
    append_rows(again, n, 3)
    append_rows(clone, n, 3)
    for one, two in zip(again, clone, strict=True):
        assert prints_of(one) == prints_of(two)


def append_rows(cache: list[Any], n: int, n_steps: int) -> None:
    """Give every layer single tokens, in its own dtype."""
    for number, layer in enumerate(cache):
        for at in range(n, n + n_steps):
            grow(layer, at, at + 1, number=number, dtype=layer.keys.dtype)


def prints_of(layer: Any) -> list[Any]:
    arrays = [mx.contiguous(array) for array in (layer.keys, layer.values)]
    mx.eval(arrays)
    return [bytes(memoryview(array)) for array in arrays]


@every_window
@pytest.mark.parametrize("n", WINDOW_SIZES)
def test_a_window_is_rebuilt_from_its_own_parts(
    build: Callable[[int], list[Any]], n: int
) -> None:
    """What was taken apart right after a step goes on alike."""
    cache = build(n)
    append_rows(cache, n, 1)
    leaves = codecs.take_apart(codecs.clone(cache), n + 1)
    rebuilt = codecs.rebuild(codecs.describe(cache), leaves, n + 1)
    append_rows(cache, n + 1, 3)
    append_rows(rebuilt, n + 1, 3)
    for one, two in zip(cache, rebuilt, strict=True):
        assert prints_of(one) == prints_of(two)
        assert one.offset == two.offset


@pytest.mark.parametrize(
    ("offset", "start", "n_rows"), [(10, 11, 64), (100, 10, 64), (10, -1, 64)]
)
def test_a_chunk_that_contradicts_itself_is_not_covered(
    offset: int, start: int, n_rows: int
) -> None:
    """More tokens than rows, or fewer than none, are not believed."""
    (layer,) = chunked(n_rows, n_rows, n_layers=1)
    layer.keys, layer.values = layer.keys[:, :, :n_rows], layer.values[:, :, :n_rows]
    layer.offset, layer.start_position = offset, start
    if start == -1:
        layer.offset = 64
    with pytest.raises(NotCovered, match="ChunkedKVCache"):
        codecs.take_apart([layer], offset)


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        ([RotatingKVCache(64, 4)], True),
        ([RotatingKVCache(64, 0)], False),
        ([RotatingKVCache(32, 4)], False),
        ([ChunkedKVCache(64)], False),
        ([KVCache()], False),
        ([MyRotatingKVCache(64, 4)], False),
    ],
)
def test_a_window_fits_its_own_settings_only(like: list[Any], expected: bool) -> None:
    """A window of another size or another head is another layer."""
    layers = codecs.describe(rotating(9, 64, 4, n_layers=1))
    assert expected == codecs.fits(layers, like)


# ------------------------------------------------------------------------- state


def layer_cache(n: int, *, window: int = 8) -> LayerCache:
    """Return a layer of deepseek_v41 that has seen *n* tokens."""
    layer = LayerCache(window)
    layer.update_window(mx.arange(n * 4).reshape(1, n, 4).astype(mx.float32))
    layer.compress_kv = mx.full((1, n // 4, 3), float(n))
    layer.pending_gate = mx.full((1, n % 4, 2), 7).astype(mx.bfloat16)
    mx.eval(layer.window, layer.compress_kv, layer.pending_gate)
    return layer


def test_state_is_described_by_its_slots_only() -> None:
    """Shapes and dtypes of state are facts of a snapshot, not of a layout."""
    expected = Layer("arrays/1", settings={"size": 3})
    for n in (1, 300):
        for dtype in (mx.float32, mx.bfloat16):
            cache = arrays_cache(n, 3, n_layers=1, dtype=dtype)
            assert (expected,) == codecs.describe(cache)
    assert (expected,) == codecs.describe([ArraysCache(3)])
    expected = Layer("compressed/1", settings={"window_size": 8})
    assert (expected,) == codecs.describe([layer_cache(9)])


def test_state_has_no_rows() -> None:
    """All of it is named arrays; what is not there has no name."""
    (leaf,) = codecs.take_apart(arrays_cache(9, 3, n_layers=1), 9)
    assert (leaf.arrays, leaf.runs, leaf.ring) == ([], (), None)
    assert list(leaf.state) == ["0", "1", "2"]
    (leaf,) = codecs.take_apart([layer_cache(9)], 9)
    assert (leaf.arrays, leaf.runs, leaf.ring) == ([], (), None)
    assert list(leaf.state) == ["window", "compress_kv", "pending_gate"]


def test_state_is_rebuilt_as_it_was() -> None:
    """Slots, dtypes, shapes, and of deepseek's layer how many tokens it has seen."""
    cache = [*arrays_cache(9, 3, dtype=mx.bfloat16), layer_cache(9)]
    cache[0][1] = None
    leaves = codecs.take_apart(codecs.clone(cache), 9)
    made = codecs.rebuild(codecs.describe(cache), leaves, 9)
    assert [type(layer) for layer in made] == [ArraysCache, ArraysCache, LayerCache]
    for one, two in zip(cache[:2], made[:2], strict=True):
        for a, b in zip(one.cache, two.cache, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and mx.array_equal(a, b))
    assert (made[2].offset, made[2].window_size) == (9, 8)
    assert (made[2].index_k, made[2].pending_kv) == (None, None)
    for name in ("window", "compress_kv", "pending_gate"):
        assert mx.array_equal(getattr(cache[2], name), getattr(made[2], name))
    rows = mx.ones((1, 2, 4))
    assert mx.array_equal(cache[2].update_window(rows), made[2].update_window(rows))


def test_a_clone_of_a_state_is_independent() -> None:
    """Invariant 3: an update in place of either is not seen in the other."""
    cache = [*arrays_cache(9), layer_cache(9)]
    clone = codecs.clone(cache)
    cache[0][0][:] = 50
    clone[1][0][:] = 60
    cache[2].update_window(mx.ones((1, 3, 4)))
    again = [*arrays_cache(9), layer_cache(9)]
    assert mx.array_equal(clone[0][0], again[0][0])
    assert mx.array_equal(cache[1][0], again[1][0])
    assert mx.array_equal(clone[2].window, again[2].window)
    assert clone[2].offset == 9


def test_a_copy_of_state_does_not_keep_its_parent_alive() -> None:
    """Fault R10: a slice of a large array is copied into memory of its own size."""
    large = mx.zeros((1, 1 << 20))
    part = large[:, 5:9]
    mx.eval(large, part)
    copied = codecs.copy_state({"0": part})["0"]
    start = buffers.plain(large).ctypes.data
    assert not start <= buffers.plain(copied).ctypes.data < start + large.nbytes
    assert mx.array_equal(copied, part)
    assert codecs.copy_state({}) == {}


def test_several_sequences_of_state_are_refused() -> None:
    """A state of a batch belongs to no one prompt."""
    arrays, layer = ArraysCache(2), LayerCache(8)
    arrays[1] = mx.zeros((2, 3))
    layer.update_window(mx.zeros((2, 3, 4)))
    for cache in ([arrays], [layer]):
        with pytest.raises(ValueError, match="of 2 sequences"):
            codecs.describe(cache)


def test_a_draft_is_marked_in_a_description() -> None:
    """What stands behind the target's layers comes back in its place."""
    cache = [*kv(5), *rotating(5, 64, n_layers=1)]
    layers = codecs.describe(cache, 2)
    assert layers[-1] == Layer(DRAFT, inner=codecs.describe(cache)[2:])
    assert codecs.describe(cache, 3) == codecs.describe(cache, None)
    leaves = codecs.take_apart(codecs.clone(cache), 5)
    rebuilt = codecs.rebuild(layers, leaves, 5)
    assert [type(layer) for layer in rebuilt] == [KVCache, KVCache, RotatingKVCache]
