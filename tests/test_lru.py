"""Facts about mlx-lm's prompt cache on a store: what upstream does, and more."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import mlx.core as mx
import numpy as np
import pytest
from builders import (
    chunked,
    clone_of,
    concatenated,
    grow,
    kv,
    kv_of,
    prints,
    rotating,
    tokens,
)
from fake_weights import safetensors_of
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache
from mlx_lm.models.cache import LRUPromptCache as Upstream

from promptstore import Namespace, PromptStore
from promptstore.mlx_lm import LRUPromptCache

NS = Namespace("lru")
P = [1, 2, 3, 4, 5]


class Fake:
    """A layer of a class that the store does not know. It holds ids, not KV."""

    alive: ClassVar[weakref.WeakSet[Fake]] = weakref.WeakSet()

    def __init__(
        self, ids: Sequence[int], nbytes: int = 10, *, trimmable: bool = True
    ) -> None:
        self.ids = list(ids)
        self.nbytes = nbytes
        self.trimmable = trimmable
        self.alive.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.alive.add(self)

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n_tokens: int) -> int:
        del self.ids[len(self.ids) - n_tokens :]
        return n_tokens


class Exact(Fake):
    """One that says how many tokens it holds."""

    @property
    def offset(self) -> int:
        return len(self.ids)


class Locked(Fake):
    """One that cannot be copied."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self.lock = threading.Lock()


@pytest.fixture
def lru() -> LRUPromptCache:
    """One without a disk."""
    return LRUPromptCache()


def fill(lru: Any, *prompts: Sequence[int], kind: str = "assistant") -> None:
    for ids in prompts:
        lru.insert_cache("m", list(ids), [Fake(ids)], cache_type=kind)


def fetch(lru: Any, ids: Sequence[int], model: Any = "m") -> tuple[Any, list[int]]:
    """Return the ids that the fetched layer holds, and the rest."""
    cache, rest = lru.fetch_nearest_cache(model, list(ids))
    return cache and cache[0].ids, rest


def make_model(path: Path, content: bytes = b"weights") -> Path:
    """Make a directory that is a model by its files' names, and no more."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").unlink(missing_ok=True)
    (path / "model.safetensors").write_bytes(safetensors_of(content))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory."""
    return make_model(tmp_path / "model")


def files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*.safetensors")}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ------------------------------------------------------------------- what is found


def test_an_exact_hit_leaves_its_last_token(lru: LRUPromptCache) -> None:
    """Fault K01: an empty rest kills the generation of mlx_lm.server."""
    fill(lru, P)
    assert fetch(lru, P) == (P[:-1], P[-1:])


def test_an_exact_hit_leaves_nothing_if_told_so() -> None:
    """Upstream's own answer, for hosts that know how to go on from it."""
    lru = LRUPromptCache(leave_last=False)
    fill(lru, P)
    assert fetch(lru, P) == (P, [])


def test_a_shorter_prompt_is_found_whole(lru: LRUPromptCache) -> None:
    """What is asked beyond it is the rest."""
    fill(lru, P)
    assert fetch(lru, [*P, 6, 7]) == (P, [6, 7])


@pytest.mark.parametrize("leave_last", [True, False])
def test_a_longer_prompt_is_trimmed(leave_last: bool) -> None:
    """It serves as far as it is shared."""
    lru = LRUPromptCache(leave_last=leave_last)
    fill(lru, P)
    assert fetch(lru, [1, 2, 3, 9, 9]) == ([1, 2, 3], [9, 9])


def test_the_longer_of_two_hits_wins(lru: LRUPromptCache) -> None:
    """A longer prompt that shares more is better than a shorter one that is whole."""
    fill(lru, [1, 2, 8], P)
    assert fetch(lru, [1, 2, 3, 4, 9]) == ([1, 2, 3, 4], [9])
    assert fetch(lru, [1, 2, 8, 4, 9]) == ([1, 2, 8], [4, 9])


def test_what_cannot_be_trimmed_serves_whole_only(lru: LRUPromptCache) -> None:
    """Of such layers a shorter prompt serves, a longer or an equal one does not."""
    lru.insert_cache("m", [1, 2], [Fake([1, 2], trimmable=False)])
    lru.insert_cache("m", P, [Fake(P, trimmable=False)])
    assert fetch(lru, [*P, 6]) == (P, [6])
    assert fetch(lru, P) == ([1, 2], [3, 4, 5])
    assert fetch(lru, [1, 2, 3, 9]) == ([1, 2], [3, 9])
    assert fetch(lru, [1, 9]) == (None, [1, 9])


def test_a_miss_returns_the_tokens_as_they_are(lru: LRUPromptCache) -> None:
    """Nothing shared, nothing asked, or another model: all is left to prefill."""
    fill(lru, P)
    assert fetch(lru, [9, 1]) == (None, [9, 1])
    assert fetch(lru, []) == (None, [])
    assert fetch(lru, P, model="other") == (None, P)
    ids = (1, 9)
    assert lru.fetch_nearest_cache("other", ids)[1] is ids


def test_real_layers_are_cut_by_the_store(lru: LRUPromptCache) -> None:
    """A KVCache comes back bit for bit, as long as it is shared."""
    ids = tokens(100)
    cache = kv_of(ids)
    lru.insert_cache("m", ids, cache)
    found, rest = lru.fetch_nearest_cache("m", [*ids[:40], 1000])
    assert rest == [1000]
    assert found is not None
    assert prints(found) == prints(clone_of(cache, 40))


@pytest.mark.parametrize("form", [tuple, np.array, mx.array])
def test_forms_of_tokens_are_one_key(lru: LRUPromptCache, form: Any) -> None:
    """Fault K05: lists, tuples and arrays; the rest is of the form that was asked."""
    lru.insert_cache("m", form(P), [Fake(P)])
    cache, rest = lru.fetch_nearest_cache("m", form([*P, 6]))
    assert cache is not None
    assert type(rest) is type(form([6]))
    assert list(map(int, rest)) == [6]
    assert fetch(lru, P)[0] == P[:-1]


def test_negative_ids_are_ids(lru: LRUPromptCache) -> None:
    """Fault K06: mlx_lm.server keys images by them, and none is cut."""
    image = -855241551491862571
    ids = [1, *[image] * 3, 2]
    fill(lru, ids)
    assert fetch(lru, [*ids, 3]) == (ids, [3])
    assert fetch(lru, [1, image, image]) == ([1], [image, image])
    assert fetch(lru, [1, *[image - (1 << 32)] * 3, 2])[0] == [1]


@pytest.mark.parametrize("key", ["", "x/y", ("",), ("m", None, None), 7, None, b"m"])
def test_any_hashable_key_will_do(lru: LRUPromptCache, key: Any) -> None:
    """Upstream takes any; what names no model's files is kept in memory."""
    lru.insert_cache(key, P, [Fake(P)])
    assert fetch(lru, [*P, 6], model=key) == (P, [6])
    assert fetch(lru, [*P, 6]) == (None, [*P, 6])


# --------------------------------------------------------------------- what is kept


def test_what_is_kept_is_nobody_elses(lru: LRUPromptCache) -> None:
    """Fault W04: nothing that is done to a cache later changes what is served."""
    ids, cache = list(P), [Fake(P)]
    lru.insert_cache("m", ids, cache)
    cache[0].trim(3)
    cache.clear()
    ids.clear()
    for _ in range(2):
        found, _ = lru.fetch_nearest_cache("m", [*P, 6])
        assert found is not None
        assert found[0].ids == P
        found[0].trim(2)
        found.append(Fake([]))


def test_a_live_cache_goes_on_by_itself(lru: LRUPromptCache) -> None:
    """Fault W04, with arrays: both go on in place, and what is stored stays."""
    cache = kv(80)
    before = prints(cache)
    lru.insert_cache("m", tokens(80), cache)
    for _ in range(2):
        found, _ = lru.fetch_nearest_cache("m", [*tokens(80), 1])
        assert found is not None
        assert prints(found) == before
        for number, layer in enumerate([*cache, *found]):
            grow(layer, 200, 205, number=number)


def test_half_a_prefill_is_kept_under_what_it_covers(lru: LRUPromptCache) -> None:
    """Faults W05 and W07: the layers tell, not the key."""
    ids = tokens(60)
    lru.insert_cache("m", ids, kv_of(ids[:32]))
    lru.insert_cache("f", P, [Exact(P[:3])])
    assert lru.fetch_nearest_cache("m", [*ids, 3, 4])[1] == [*ids[32:], 3, 4]
    assert fetch(lru, P, model="f") == (P[:3], P[3:])


def test_more_than_its_key_is_cut(lru: LRUPromptCache) -> None:
    """Full attention that holds the next tokens as well is kept without them."""
    ids = tokens(60)
    lru.insert_cache("m", ids[:50], kv_of(ids))
    cache, rest = lru.fetch_nearest_cache("m", [*ids, 1])
    assert rest == [*ids[50:], 1]
    assert cache is not None
    assert prints(cache) == prints(clone_of(kv_of(ids), 50))


@pytest.mark.parametrize(
    "cache",
    [
        rotating(121, 64, steps=64),
        [Exact(range(121))],
        [Exact(range(61)), Exact(range(62))],
    ],
    ids=["window", "unknown", "unequal"],
)
def test_more_than_its_key_is_refused(
    lru: LRUPromptCache, cache: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Fault W06: what cannot be cut belongs to no key; one line says so."""
    for _ in range(3):
        lru.insert_cache("m", list(range(61)), cache)
    assert len(lru) == 0
    assert lru.fetch_nearest_cache("m", list(range(62)))[0] is None
    assert len(warnings(caplog)) == 1


def test_the_same_prompt_is_kept_once(lru: LRUPromptCache) -> None:
    """Fault Q09: replaced, it counts once, under its last kind."""
    for nbytes in (10, 30):
        lru.insert_cache("m", P, [Fake(P, nbytes)])
    lru.insert_cache("m", P, [Fake(P, 20)], cache_type="user")
    assert (len(lru), lru.nbytes) == (1, 20)
    assert lru.stats_by_type()["user"] == {"n_sequences": 1, "n_bytes": 20}


def test_a_longer_prompt_stands_in_for_its_prefixes(lru: LRUPromptCache) -> None:
    """What can be trimmed to them is all that is needed, but for system prompts."""
    fill(lru, [1], kind="system")
    fill(lru, [1, 2], [1, 2, 3], P)
    assert len(lru) == 2
    assert fetch(lru, [1, 2, 9]) == ([1, 2], [9])


def test_prefixes_of_what_cannot_be_trimmed_stay(lru: LRUPromptCache) -> None:
    """Fault T04: nothing stands in for them."""
    for n in (2, 3, 5):
        lru.insert_cache("m", P[:n], [Fake(P[:n], trimmable=False)])
    assert len(lru) == 3


def test_there_are_three_kinds(lru: LRUPromptCache) -> None:
    """A kind that nobody knows is the caller's mistake, and the only error."""
    with pytest.raises(ValueError, match="cache_type must be one of"):
        lru.insert_cache("m", P, [Fake(P)], cache_type="tool")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what goes


def test_the_oldest_goes_first() -> None:
    """Of prompts that nobody used, in the order in which they came."""
    lru = LRUPromptCache(max_size=2)
    fill(lru, [1, 1], [2, 2], [3, 3])
    assert len(lru) == 2
    assert fetch(lru, [1, 1, 1])[0] is None
    assert fetch(lru, [2, 2, 2])[0] == [2, 2]


def test_a_use_keeps_it() -> None:
    """Fault R01: upstream forgets what every request uses."""
    lru = LRUPromptCache(max_size=2)
    fill(lru, [1, 1], [2, 2])
    for _ in range(50):
        fetch(lru, [1, 1, 1])
    fill(lru, [3, 3])
    assert fetch(lru, [1, 1, 1])[0] == [1, 1]
    assert fetch(lru, [2, 2, 2])[0] is None


def test_answers_go_before_turns_and_those_before_system_prompts() -> None:
    """A kind goes while there are as many of it as of the next."""
    lru = LRUPromptCache(max_size=6)
    fill(lru, [1, 1], [1, 2], kind="system")
    fill(lru, [2, 1], [2, 2], kind="user")
    fill(lru, [3, 1], [3, 2])
    counts = []
    for n in range(5, -1, -1):
        lru.trim_to(n_sequences=n)
        counts.append([s["n_sequences"] for s in lru.stats_by_type().values()])
    assert counts == [
        [1, 2, 2], [1, 1, 2], [0, 1, 2], [0, 1, 1], [0, 0, 1], [0, 0, 0],
    ]  # fmt: skip


def test_statistics_tell_prompts_and_bytes_by_kind(lru: LRUPromptCache) -> None:
    """In the order in which mlx-lm lists them, and their sums are the totals."""
    fill(lru, [1, 1], [2, 2])
    lru.insert_cache("m", [3, 3], [Fake([3, 3], 7)], cache_type="system")
    stats = lru.stats_by_type()
    assert list(stats) == ["assistant", "user", "system"]
    assert list(stats["system"].values()) == [1, 7]
    assert (len(lru), lru.nbytes) == (3, 27)


def test_bytes_are_bounded_at_every_insert() -> None:
    """Fault R04: the limit holds whatever comes."""
    lru = LRUPromptCache(max_size=100, max_bytes=100)
    rng = random.Random(1)
    for number in range(200):
        ids = [number, rng.randrange(3)]
        lru.insert_cache("m", ids, [Fake(ids, rng.randrange(60)) for _ in range(2)])
        assert lru.nbytes <= 100


def test_real_layers_count_with_their_padding(lru: LRUPromptCache) -> None:
    """The bytes of a KVCache are those of its buffers, as upstream counts them."""
    cache = kv(10)
    lru.insert_cache("m", tokens(10), cache)
    assert lru.nbytes == sum(layer.nbytes for layer in cache)


def test_what_is_larger_than_all_is_refused() -> None:
    """Fault R02: nothing is dropped for what can never fit."""
    lru = LRUPromptCache(max_bytes=50)
    fill(lru, *([n, n] for n in range(5)))
    lru.insert_cache("m", [9, 9], [Fake([9, 9], 51)])
    assert (len(lru), lru.nbytes) == (5, 50)
    assert fetch(lru, [9, 9, 9])[0] is None


def test_trim_to_evicts_the_oldest(lru: LRUPromptCache) -> None:
    """Down to so many prompts, or so many bytes; less than none is none."""
    fill(lru, *([n, n] for n in range(6)))
    lru.trim_to(n_sequences=5)
    assert fetch(lru, [0, 0, 0])[0] is None
    lru.trim_to(n_bytes=25)
    assert (len(lru), lru.nbytes) == (2, 20)
    assert fetch(lru, [5, 5, 5])[0] == [5, 5]
    lru.trim_to()
    assert len(lru) == 2
    lru.trim_to(n_bytes=-1, n_sequences=-1)
    assert (len(lru), lru.nbytes) == (0, 0)


def test_limits_may_change(lru: LRUPromptCache) -> None:
    """They are attributes, as upstream's; a lower one holds at once."""
    fill(lru, *([n, n] for n in range(6)))
    lru.max_size = 4
    assert len(lru) == 4
    lru.max_bytes = 30
    assert len(lru) == 3
    lru.max_size = -1
    fill(lru, P)
    assert (len(lru), lru.max_size, lru.max_bytes) == (0, -1, 30)


def test_a_limit_that_nobody_set_leaves_the_stores_own() -> None:
    """Fault R04: mlx_lm.server without a limit takes none off the store."""
    with PromptStore.open(memory_bytes=25, disk_bytes=0) as store:
        lru = LRUPromptCache(store=store)
        fill(lru, *([n, n] for n in range(6)))
        assert lru.nbytes == 20


def test_what_was_evicted_is_let_go(lru: LRUPromptCache) -> None:
    """Fault S02: no copy of it is alive anywhere."""
    Fake.alive.clear()
    fill(lru, *([n, n] for n in range(6)))
    fetch(lru, [1, 1, 1])
    lru.trim_to(n_sequences=0)
    gc.collect()
    assert len(Fake.alive) == 0


# ------------------------------------------------------------------- beside upstream


def random_prompts(rng: random.Random, n: int) -> Iterator[list[int]]:
    for _ in range(n):
        yield [rng.randrange(3) for _ in range(rng.randrange(2, 9))]


@pytest.mark.parametrize("trimmable", [True, False])
def test_hits_are_no_shorter_than_upstreams(trimmable: bool) -> None:
    """Nothing being evicted, the same inserts give the same prompts and bytes, and
    each fetch at least upstream's tokens, which are those that were asked for."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", "1"))
    print(f"PROMPTSTORE_SEED={seed}")
    rng = random.Random(seed)
    ours, theirs = LRUPromptCache(max_size=10**6, leave_last=False), Upstream(10**6)
    n_better = 0
    for ids in random_prompts(rng, 400):
        if rng.random() < 0.4:
            kind, nbytes = rng.choice(["assistant", "user"]), rng.randrange(1, 99)
            for lru in (ours, theirs):
                cache = [Fake(ids, nbytes, trimmable=trimmable)]
                lru.insert_cache("m", list(ids), cache, cache_type=kind)
            assert ours.stats_by_type() == theirs.stats_by_type()
            assert (len(ours), ours.nbytes) == (len(theirs), theirs.nbytes)
        else:
            (own, rest), (other, other_rest) = fetch(ours, ids), fetch(theirs, ids)
            assert (own or []) + rest == ids
            assert (other or []) + other_rest == ids
            assert len(rest) <= len(other_rest)
            n_better += len(rest) < len(other_rest)
    assert (n_better > 0) == trimmable


def test_evictions_are_upstreams_where_nothing_is_used() -> None:
    """Without a fetch the least recently used is the oldest: both keep the same."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", "1"))
    print(f"PROMPTSTORE_SEED={seed}")
    rng = random.Random(seed)
    for _ in range(20):
        size, nbytes = rng.randrange(1, 9), rng.randrange(30, 200)
        ours, theirs = LRUPromptCache(size, nbytes), Upstream(size, nbytes)
        prompts = list(random_prompts(rng, 30))
        for ids in prompts:
            n = rng.randrange(1, 30)
            for lru in (ours, theirs):
                lru.insert_cache("m", list(ids), [Fake(ids, n, trimmable=False)])
            assert (len(ours), ours.nbytes) == (len(theirs), theirs.nbytes)
        size = rng.randrange(4)
        for lru in (ours, theirs):
            lru.trim_to(n_sequences=size, n_bytes=60)
        assert (len(ours), ours.nbytes) == (len(theirs), theirs.nbytes)
        for ids in prompts:
            assert fetch(ours, [*ids, 9]) == fetch(theirs, [*ids, 9])


# --------------------------------------------------------- layers of unknown classes


class Reluctant(Exact):
    """One that does not trim what it says."""

    def trim(self, n_tokens: int) -> int:
        super().trim(n_tokens - 1)
        return n_tokens


def test_every_layer_must_have_been_trimmed(lru: LRUPromptCache) -> None:
    """Fault T01: that the first layer was is not enough."""
    lru.insert_cache("m", P, [Exact(P), Reluctant(P)])
    assert fetch(lru, [1, 2, 9]) == (None, [1, 2, 9])
    assert fetch(lru, [*P, 6]) == (P, [6])


@pytest.mark.parametrize("asked", [10, 70, 99])
def test_a_window_beside_an_unknown_layer_serves_whole(
    lru: LRUPromptCache, asked: int
) -> None:
    """Faults W01 and W03: its trim does not tell whether the rows are still there."""

    class Mine(ChunkedKVCache):
        pass

    mine = Mine(32)
    grow(mine, 0, 100)
    mine.maybe_trim_front()
    for model, layer in (("a", mine), ("b", chunked(100, 32, n_layers=1)[0])):
        lru.insert_cache(model, list(range(100)), [Exact(range(100)), layer])
        assert lru.fetch_nearest_cache(model, [*range(asked), 7])[0] is None
        assert lru.fetch_nearest_cache(model, [*range(100), 7])[1] == [7]


def test_a_trim_that_comes_undone_is_not_trusted(lru: LRUPromptCache) -> None:
    """Fault T02: such a layer beside an unknown one, or a subclass, serves whole."""

    class Mine(ConcatenateKVCache):
        pass

    mine = Mine()
    grow(mine, 0, 8)
    for model, layer in (("a", mine), ("b", concatenated(8, n_layers=1)[0])):
        lru.insert_cache(model, tokens(8), [Exact(tokens(8)), layer])
        assert lru.fetch_nearest_cache(model, [*tokens(8)[:3], 9])[0] is None
        assert lru.fetch_nearest_cache(model, [*tokens(8), 9])[1] == [9]


def trim_all(layers: list[Any], n_tokens: int) -> None:
    for layer in layers:
        layer.trim(n_tokens)


def test_a_window_is_not_left_to_a_trim_of_ones_own() -> None:
    """Fault W01: of 100 tokens the last 32 are there, so after 70 nothing goes on."""
    lru = LRUPromptCache(can_trim=lambda layers: True, trim=trim_all)
    layers = [Exact(range(100)), chunked(100, 32, n_layers=1)[0]]
    lru.insert_cache("m", list(range(100)), layers)
    assert lru.fetch_nearest_cache("m", [*range(70), 7])[0] is None


def test_a_trim_of_ones_own_is_made_good() -> None:
    """Fault T02: layers that the store knows are cut by it, whoever trims."""
    lru = LRUPromptCache(can_trim=lambda layers: True, trim=trim_all)
    layers = [Exact(range(8)), concatenated(8, n_layers=1)[0]]
    lru.insert_cache("m", list(range(8)), layers)
    cache, _ = lru.fetch_nearest_cache("m", [0, 1, 2, 9])
    assert cache is not None
    assert grow(cache[1], 3, 4)[0].shape[2] == 4


def test_what_cannot_be_copied_is_not_kept(
    lru: LRUPromptCache, caplog: pytest.LogCaptureFixture
) -> None:
    """An object that holds a lock is no cache to keep; nothing is raised."""
    for _ in range(3):
        lru.insert_cache("m", P, [Locked(P)])
    assert len(lru) == 0
    assert fetch(lru, [*P, 6]) == (None, [*P, 6])
    assert len(warnings(caplog)) == 1


def test_an_opaque_subclass_goes_on(lru: LRUPromptCache) -> None:
    """A class of a host's own is kept alive, and each fetch is a copy of it."""

    class Mine(KVCache):
        pass

    layers = [Mine()]
    grow(layers[0], 0, 70)
    lru.insert_cache("m", tokens(70), layers)
    for _ in range(2):
        cache, rest = lru.fetch_nearest_cache("m", [*tokens(70)[:50], 1])
        assert cache is not None
        assert type(cache[0]) is Mine
        assert (cache[0].offset, rest) == (50, [1])
        grow(cache[0], 300, 310)


# ------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("method", ["match", "insert"])
def test_trouble_with_the_store_is_a_miss(
    lru: LRUPromptCache,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault S01: nothing is raised into the generation; one line tells the cause."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(5, "no disk today")

    monkeypatch.setattr(lru.store, method, fail)
    for _ in range(3):
        fill(lru, P)
        assert (fetch(lru, P) == (None, P)) or method == "insert"
    assert fetch(lru, P) == (None, P)
    assert len(warnings(caplog)) == 1
    assert "EIO" in caplog.text


@pytest.mark.parametrize("cache", [None, [], 7, [None, 1]])
@pytest.mark.parametrize("ids", [P, None, ["a"], [[1]]])
def test_nothing_is_raised_for_nonsense(
    lru: LRUPromptCache, cache: Any, ids: Any
) -> None:
    """Fault S01: whatever a host hands in, its request goes on."""
    lru.insert_cache("m", ids, cache)
    lru.insert_cache(["unhashable"], ids, cache)
    lru.fetch_nearest_cache("m", ids)
    assert lru.fetch_nearest_cache(["unhashable"], P) == (None, P)


def test_a_closed_store_is_a_miss(lru: LRUPromptCache) -> None:
    """A request that comes after the end is answered without a cache."""
    fill(lru, P)
    lru.store.close()
    fill(lru, P)
    assert fetch(lru, P) == (None, P)


# --------------------------------------------------------------------------- on disk


def test_prompts_survive_a_restart(store: PromptStore, model: Path) -> None:
    """Under mlx_lm.server's own key, however it is written."""
    ids = tokens(100)
    key = (str(model), None, None)
    LRUPromptCache(store=store).insert_cache(key, ids, kv_of(ids))
    store.flush()
    lru = LRUPromptCache(store=store)
    lru.trim_to(n_sequences=0)
    for same in (key, str(model), model, Namespace.from_model(model)):
        cache, rest = lru.fetch_nearest_cache(same, [*ids, 1])
        assert rest == [1]
        assert cache is not None
        assert prints(cache) == prints(kv_of(ids))
    assert lru.fetch_nearest_cache((str(model), None, str(model)), ids)[0] is None


def test_restarted_means_another_process(tmp_path: Path, model: Path) -> None:
    """All that is carried over is the directory."""
    ids = tokens(100)
    with PromptStore.open(tmp_path / "store") as store:
        LRUPromptCache(store=store).insert_cache(str(model), ids, kv_of(ids))
    with PromptStore.open(tmp_path / "store") as store:
        lru = LRUPromptCache(store=store)
        assert len(lru) == 0
        assert lru.fetch_nearest_cache(str(model), ids)[1] == ids[-1:]


def test_a_name_that_says_nothing_stays_in_memory(
    store: PromptStore, tmp_path: Path
) -> None:
    """Nobody could tell after a restart whose KV it was: no file is written."""
    lru = LRUPromptCache(store=store)
    ids = tokens(100)
    for key in ("no-such-model", ("a", "b", "c", "d"), 7):
        lru.insert_cache(key, ids, kv_of(ids))
        assert lru.fetch_nearest_cache(key, [*ids, 1])[1] == [1]
    lru.trim_to(n_sequences=0)
    store.flush()
    assert files(tmp_path / "store") == set()


def test_a_host_may_tell_whose_kv_it_is(store: PromptStore, tmp_path: Path) -> None:
    """Its own function goes before what keys look like; ``None`` says nobody knows."""
    lru = LRUPromptCache(store=store, namespace={"a": NS, "b": None}.__getitem__)
    ids = tokens(100)
    lru.insert_cache("b", ids, kv_of(ids))
    store.flush()
    assert files(tmp_path / "store") == set()
    lru.insert_cache("a", ids, kv_of(ids))
    store.flush()
    assert len(files(tmp_path / "store")) == 1
    assert store.match(NS, [*ids, 1]).n_tokens == 100
    assert lru.fetch_nearest_cache("c", ids)[0] is None


def test_a_model_that_changes_in_use_is_nobodys(
    store: PromptStore, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault K03: whether the old or the new one runs nobody knows; said once."""
    lru = LRUPromptCache(store=store)
    ids, others = tokens(100), tokens(100, seed=1)
    key = (str(model), None, None)
    lru.insert_cache(key, ids, kv_of(ids))
    make_model(model, b"WEIGHTS")
    for _ in range(3):
        assert lru.fetch_nearest_cache(key, ids) == (None, ids)
        lru.insert_cache(key, others, kv_of(others))
    store.flush()
    assert [s.end for s in store.snapshots()] == [100]
    assert [w for w in warnings(caplog) if "changed while it was in use" in w] == (
        warnings(caplog)
    )
    assert len(warnings(caplog)) == 1
    new = LRUPromptCache(store=store)
    assert new.fetch_nearest_cache(key, ids)[0] is None
    make_model(model)
    assert lru.fetch_nearest_cache(key, ids)[1] == ids[-1:]
    assert lru.fetch_nearest_cache(key, others)[0] is None


def test_model_files_that_are_gone_are_a_miss(store: PromptStore, model: Path) -> None:
    """As long as they are: what was stored is found again when they are back."""
    lru = LRUPromptCache(store=store)
    ids = tokens(100)
    lru.insert_cache(str(model), ids, kv_of(ids))
    away = model.rename(model.with_name("away"))
    assert lru.fetch_nearest_cache(str(model), ids)[0] is None
    away.rename(model)
    assert lru.fetch_nearest_cache(str(model), ids)[0] is not None


# ------------------------------------------------------------------- several of them


def test_unknown_names_of_two_caches_do_not_meet() -> None:
    """On one store, each numbering its own: nobody knows that they are the same."""
    with PromptStore.open(disk_bytes=0) as store:
        first, second = LRUPromptCache(store=store), LRUPromptCache(store=store)
        first.insert_cache("a", P, [Fake(P)])
        second.insert_cache("b", [1, 2, 9], [Fake([1, 2, 9])])
        assert fetch(second, [*P, 6], model="b") == ([1, 2], [3, 4, 5, 6])
        assert fetch(second, [*P, 6], model="a") == (None, [*P, 6])


def test_unknown_names_of_many_threads_do_not_meet() -> None:
    """Each model has its own prompts, though all are met for the first time at once."""
    lru = LRUPromptCache(max_size=1000)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        lru.insert_cache(f"m{number}", P, [Fake([number] * 5)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for number in range(8):
        assert fetch(lru, [*P, 6], model=f"m{number}")[0] == [number] * 5


def test_several_on_one_store_from_many_threads(store: PromptStore) -> None:
    """Fault C03: no error, no mixture, and the counts are those of a walk."""
    lrus = [LRUPromptCache(20, store=store) for _ in range(4)]

    def work(number: int) -> list[str]:
        rng = random.Random(number)
        lru, wrong = lrus[number % 4], []
        for _ in range(60):
            ids = [number % 3, *(rng.randrange(3) for _ in range(rng.randrange(2, 9)))]
            if rng.random() < 0.5:
                lru.insert_cache(NS, ids, [Exact(ids)])
            else:
                found, rest = fetch(lru, ids, model=NS)
                if (found or []) + rest != ids:
                    wrong.append(f"{ids}: {found} and {rest}")
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert [wrong for found in pool.map(work, range(8)) for wrong in found] == []
    assert len(lrus[0]) <= 20
    stats = lrus[0].stats_by_type().values()
    assert lrus[0].nbytes == sum(s["n_bytes"] for s in stats) == 10 * len(lrus[0])
    assert store.stats().errors.keys() <= {"unknown-cache-class"}
