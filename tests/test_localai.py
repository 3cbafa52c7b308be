"""Facts about LocalAI's prompt cache on a store, and the page that tells of it."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from builders import kv_of, prefill, prints, rotating, tiny_model, tokens
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)
from test_lru import Fake, files, make_model, warnings

from promptstore import PromptStore, n_cached
from promptstore.localai import PromptCache, ThreadSafeLRUPromptCache

PAGE = Path(__file__).parents[1] / "docs" / "localai.md"
P = [1, 2, 3, 4, 5]


def drop_last(cache: list[Any], n_tokens: int) -> None:
    """Trim a list of strings, as LocalAI's own tests have them."""
    cache.append(f"less {n_tokens}")


def with_trim(**options: Any) -> ThreadSafeLRUPromptCache:
    options = {"can_trim_fn": lambda cache: True, "trim_fn": drop_last} | options
    return ThreadSafeLRUPromptCache(**options)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model's directory."""
    return str(make_model(tmp_path / "model"))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where prompts may be; what is there is sound when the test ends."""
    yield tmp_path / "prompts"
    if (tmp_path / "prompts").is_dir():
        with PromptStore.open(tmp_path / "prompts") as store:
            assert store.check() == []


@pytest.fixture
def open_cache() -> Iterator[Callable[..., ThreadSafeLRUPromptCache]]:
    """Opens caches that are closed when the test ends."""
    opened = []

    def open_(**options: Any) -> ThreadSafeLRUPromptCache:
        opened.append(ThreadSafeLRUPromptCache(**options))
        return opened[-1]

    yield open_
    for cache in opened:
        cache.close()


Open = Callable[..., ThreadSafeLRUPromptCache]


def request(path: Path | str = "", **fields: Any) -> Any:
    """Return what of a ``PredictOptions`` concerns the cache."""
    return SimpleNamespace(PromptCachePath=str(path), **fields)


# --------------------------------------------------------- as LocalAI's own class does


def test_a_longer_request_gets_all_that_is_kept() -> None:
    """And the tokens that follow, as a list."""
    cache = ThreadSafeLRUPromptCache()
    cache.insert_cache("m", P, ["kv"])
    assert cache.fetch_nearest_cache("m", [*P, 6, 7]) == (["kv"], [6, 7])
    assert cache.fetch_nearest_cache("m", (*P, 6)) == (["kv"], [6])


def test_one_token_is_kept_as_well() -> None:
    """LocalAI's class never serves a prompt of one token; there is no reason why."""
    cache = ThreadSafeLRUPromptCache()
    cache.insert_cache("m", [1], ["kv"])
    assert cache.fetch_nearest_cache("m", [1, 2, 3]) == (["kv"], [2, 3])


def test_an_exact_request_leaves_its_last_token() -> None:
    """Fault W06: LocalAI's class leaves nothing, and the backend feeds all again."""
    cache = with_trim()
    cache.insert_cache("m", P, ["kv"])
    assert cache.fetch_nearest_cache("m", P) == (["kv", "less 1"], [5])


def test_a_shorter_request_gets_a_trimmed_copy() -> None:
    """By the functions of the caller, for what the store does not know."""
    cache = with_trim()
    cache.insert_cache("m", P, ["kv"])
    assert cache.fetch_nearest_cache("m", [1, 2, 9]) == (["kv", "less 3"], [9])
    assert cache.fetch_nearest_cache("m", [*P, 6]) == (["kv"], [6])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"can_trim_fn": lambda cache: False, "trim_fn": drop_last},
        {"can_trim_fn": lambda cache: True},
        {"trim_fn": drop_last},
        {"can_trim_fn": can_trim_prompt_cache, "trim_fn": trim_prompt_cache},
    ],
    ids=["none", "no", "no-trim", "no-can-trim", "of-mlx-lm"],
)
def test_what_cannot_be_trimmed_is_no_match(options: dict[str, Any]) -> None:
    """Neither for a shorter request, nor for an equal one: no token would be left."""
    cache = ThreadSafeLRUPromptCache(**options)
    cache.insert_cache("m", P, ["kv"])
    assert len(cache) == 1
    for ids in (P, P[:3], [1, 2, 9]):
        assert cache.fetch_nearest_cache("m", ids) == (None, ids)


def test_nothing_shared_is_no_match() -> None:
    """All tokens are left, in a list of the caller's own."""
    cache = ThreadSafeLRUPromptCache()
    assert cache.fetch_nearest_cache("m", P) == (None, P)
    cache.insert_cache("m", P, ["kv"])
    found, rest = cache.fetch_nearest_cache("m", ids := [4, 5, 6])
    rest.append(7)
    assert (found, ids) == (None, [4, 5, 6])


def test_models_do_not_meet() -> None:
    """Equal tokens of two models are two prompts."""
    cache = ThreadSafeLRUPromptCache()
    for name in ("a", "b"):
        cache.insert_cache(name, P, [name])
    assert len(cache) == 2
    for name in ("a", "b"):
        assert cache.fetch_nearest_cache(name, [*P, 6])[0] == [name]
    assert cache.fetch_nearest_cache("c", [*P, 6])[0] is None


def test_the_least_recently_used_goes() -> None:
    """Whatever the model; a fetch is a use, without an insert after it."""
    cache = ThreadSafeLRUPromptCache(max_size=3)
    for name, first in (("a", 1), ("b", 2), ("a", 3)):
        cache.insert_cache(name, [first, 0], [first])
    cache.fetch_nearest_cache("a", [1, 0, 0])
    cache.insert_cache("b", [4, 0], [4])
    assert len(cache) == 3
    assert cache.fetch_nearest_cache("a", [1, 0, 0])[0] == [1]
    assert cache.fetch_nearest_cache("b", [2, 0, 0])[0] is None


def test_a_fetch_leaves_the_prompt() -> None:
    """LocalAI's class gives each insert away once; here each fetch is a deep copy."""
    cache = ThreadSafeLRUPromptCache()
    cache.insert_cache("m", P, [{"nested": "data"}])
    for _ in range(3):
        found, _ = cache.fetch_nearest_cache("m", [*P, 6])
        assert found == [{"nested": "data"}]
        found[0]["nested"] = "changed"
    assert len(cache) == 1


def test_the_same_prompt_again_is_one() -> None:
    """Inserting it often does not count often."""
    cache = ThreadSafeLRUPromptCache()
    for number in range(3):
        cache.insert_cache("m", P, [number])
    assert len(cache) == 1
    assert cache.fetch_nearest_cache("m", [*P, 6])[0] == [2]


def test_clear_forgets_all() -> None:
    """And new prompts are kept as before."""
    cache = ThreadSafeLRUPromptCache()
    for name in ("a", "b"):
        cache.insert_cache(name, P, [name])
    cache.clear()
    assert len(cache) == 0
    assert cache.fetch_nearest_cache("a", [*P, 6])[0] is None
    cache.insert_cache("a", P, ["new"])
    assert cache.fetch_nearest_cache("a", [*P, 6])[0] == ["new"]


def test_cleared_prompts_are_let_go() -> None:
    """Fault S02: a backend frees its memory by it."""
    Fake.alive.clear()
    cache = ThreadSafeLRUPromptCache()
    cache.insert_cache("m", P, [Fake(P)])
    cache.fetch_nearest_cache("m", [*P, 6])
    cache.clear()
    gc.collect()
    assert len(Fake.alive) == 0


@pytest.mark.parametrize(("max_size", "n_kept"), [(2.0, 2), (0, 0), (-1, 0)])
def test_sizes_are_what_a_backend_makes_of_its_options(
    max_size: float, n_kept: int
) -> None:
    """Of a number it makes a float; none at all, or less, keeps nothing."""
    cache = ThreadSafeLRUPromptCache(max_size)
    for first in range(4):
        cache.insert_cache("m", [first, 0], ["kv"])
    assert len(cache) == n_kept
    assert cache.max_size == max_size


def test_a_size_may_change() -> None:
    """A backend's own tests set it."""
    cache = ThreadSafeLRUPromptCache(3)
    for first in range(3):
        cache.insert_cache("m", [first, 0], ["kv"])
    cache.max_size = 0
    assert len(cache) == 0


def test_a_reusable_prompt_stays_beside_longer_ones() -> None:
    """As newer backends insert the system prompts of models that cannot be trimmed."""
    cache = with_trim()
    cache.insert_cache("m", P[:2], ["system"], reusable=True)
    cache.insert_cache("m", P, ["answer"])
    assert len(cache) == 2
    found = cache.fetch_nearest_cache("m", [1, 2], prefix_only=True)
    assert found == (["system", "less 1"], [2])
    found = cache.fetch_nearest_cache("m", [1, 2, 9], prefix_only=True)
    assert found == (["system"], [9])


@pytest.mark.parametrize("fails", ["can_trim_fn", "trim_fn"])
def test_functions_that_fail_cost_a_miss(fails: str) -> None:
    """Fault S01: a request goes on without the cache."""

    def fail(*_: object) -> None:
        raise KeyError("no such layer")

    cache = with_trim(**{fails: fail})
    cache.insert_cache("m", P, ["kv"])
    assert cache.fetch_nearest_cache("m", [1, 2, 9]) == (None, [1, 2, 9])
    assert cache.fetch_nearest_cache("m", [*P, 6])[0] == ["kv"]


def test_known_layers_are_cut_by_the_store() -> None:
    """The functions are not asked about them."""
    cache = with_trim(can_trim_fn=lambda cache: pytest.fail("asked"))
    ids = tokens(80)
    cache.insert_cache("m", ids, kv_of(ids))
    found, rest = cache.fetch_nearest_cache("m", [*ids[:50], 1])
    assert rest == [1]
    assert found is not None
    assert n_cached(found) == 50


def test_a_wrapped_window_is_never_trimmed() -> None:
    """Fault W03: whatever the functions would say."""
    cache = with_trim()
    cache.insert_cache("m", tokens(200), rotating(200, 64, steps=80))
    ids = [*tokens(200)[:150], 1]
    assert cache.fetch_nearest_cache("m", ids) == (None, ids)


# ------------------------------------------------------------------ a backend's loop


def predict(
    cache: PromptCache, ids: list[int], n_answer: int = 6, *, stop_after: int = 99
) -> tuple[list[int], int, Any]:
    """Answer greedily, as LocalAI's servicer does; also if the client goes away.

    Returns:
        The answer, how many tokens were fed, and the cache.
    """
    model = tiny_model()
    key = list(ids)
    prompt_cache, remaining = cache.fetch_nearest_cache("tiny", key)
    if prompt_cache is None:
        prompt_cache, remaining = make_prompt_cache(model), key
    fed = mx.array(remaining if remaining else key)
    steps = generate_step(fed, model, max_tokens=n_answer, prompt_cache=prompt_cache)
    try:
        for n, (token, _) in enumerate(steps):
            key.append(int(token))
            if n + 1 == stop_after:
                break
    finally:
        cache.insert_cache("tiny", key, prompt_cache)
    assert n_cached(prompt_cache) <= len(key)
    return key[len(ids) :], fed.size, prompt_cache


def test_a_repeated_prompt_has_the_same_answer() -> None:
    """Fault W06: each repetition feeds one token, not the prompt once more."""
    cache = ThreadSafeLRUPromptCache(10, can_trim_prompt_cache, trim_prompt_cache)
    ids = tokens(50)
    runs = [predict(cache, ids) for _ in range(5)]
    assert all(answer == runs[0][0] for answer, _, _ in runs)
    assert [n_fed for _, n_fed, _ in runs] == [50, 1, 1, 1, 1]
    assert len({n_cached(kv) for _, _, kv in runs}) == 1


@pytest.mark.parametrize("stop_after", [1, 3])
def test_an_interrupted_request_spoils_nothing(stop_after: int) -> None:
    """Fault W05: what comes after it answers as if it were the first."""
    ids = tokens(50)
    expected, _, _ = predict(ThreadSafeLRUPromptCache(), ids)
    cache = ThreadSafeLRUPromptCache()
    predict(cache, ids, stop_after=stop_after)
    answer, n_fed, _ = predict(cache, ids)
    assert (answer, n_fed) == (expected, 1)
    longer = [*ids, *expected, 1, 2]
    assert predict(cache, longer)[0] == predict(ThreadSafeLRUPromptCache(), longer)[0]


def test_requests_that_take_turns_do_not_meet(
    open_cache: Open, path: Path, model: str
) -> None:
    """Streams of one prompt on one thread, as coroutines are: each goes on by itself,
    whether it got its cache from memory or from disk."""
    cache, ids = open_cache(path=path), tokens(80)

    def stream() -> Iterator[int]:
        key = list(ids)
        kv, rest = cache.fetch_nearest_cache(model, key)
        kv = kv or make_prompt_cache(tiny_model())
        try:
            for token, _ in generate_step(
                mx.array(rest), tiny_model(), max_tokens=6, prompt_cache=kv
            ):
                key.append(int(token))
                yield int(token)
        finally:
            cache.insert_cache(model, key, kv)

    expected, _, _ = predict(ThreadSafeLRUPromptCache(), ids)
    for _ in range(3):
        turns = list(zip(stream(), stream(), stream(), strict=True))
        assert turns == [(token, token, token) for token in expected]
        cache.clear()


def test_a_prefill_that_broke_off_is_kept_as_far_as_it_came() -> None:
    """Fault W05: the key is whole, the KV is not."""
    cache, ids = ThreadSafeLRUPromptCache(), tokens(50)
    kv, _ = prefill(tiny_model(), ids[:20])
    cache.insert_cache("tiny", ids, kv)
    expected, _, _ = predict(ThreadSafeLRUPromptCache(), ids)
    assert predict(cache, ids)[:2] == (expected, 30)


def test_more_kv_than_the_key_has_is_cut_or_left() -> None:
    """Fault W06: what an older backend did of a prompt that it fed twice."""
    cache, ids = ThreadSafeLRUPromptCache(), tokens(30)
    kv, _ = prefill(tiny_model(), [*ids, *ids])
    cache.insert_cache("tiny", ids, kv)
    expected, _, _ = predict(ThreadSafeLRUPromptCache(), ids)
    assert predict(cache, ids)[:2] == (expected, 1)
    cache.insert_cache("window", ids[:20], rotating(90, 64, steps=80))
    assert cache.fetch_nearest_cache("window", ids)[0] is None


# --------------------------------------------------------------------------- on disk


def test_prompts_survive_a_restart(open_cache: Open, path: Path, model: str) -> None:
    """With a path, under the model's directory."""
    ids = tokens(100)
    cache = open_cache(path=path)
    cache.insert_cache(model, ids, kv_of(ids))
    cache.close()
    cache = open_cache(path=path)
    assert (len(cache), cache.path) == (0, path)
    found, rest = cache.fetch_nearest_cache(model, [*ids, 1])
    assert rest == [1]
    assert found is not None
    assert prints(found) == prints(kv_of(ids))


def test_clear_leaves_what_is_on_disk(open_cache: Open, path: Path, model: str) -> None:
    """A backend clears when it frees the model, and never closes: all is written."""
    ids = tokens(100)
    cache = open_cache(path=path)
    cache.insert_cache(model, ids, kv_of(ids))
    cache.clear()
    assert len(cache) == 0
    assert len(files(path)) == 1
    assert cache.fetch_nearest_cache(model, ids)[1] == ids[-1:]


def test_read_only_writes_nothing(open_cache: Open, path: Path, model: str) -> None:
    """What is there serves; what is new is kept in memory."""
    old, new = tokens(100), tokens(100, seed=1)
    writer = open_cache(path=path)
    writer.insert_cache(model, old, kv_of(old))
    writer.close()
    before = {each: each.read_bytes() for each in path.rglob("*.safetensors")}
    cache = open_cache(path=path, read_only=True)
    for ids in (old, new):
        cache.insert_cache(model, ids, kv_of(ids))
        assert cache.fetch_nearest_cache(model, [*ids, 1])[1] == [1]
    cache.close()
    after = {each: each.read_bytes() for each in path.rglob("*.safetensors")}
    assert after == before


def test_without_a_path_nothing_is_written(
    open_cache: Open, model: str, home: Path, tmp_path: Path
) -> None:
    """Not even where a store would be by default."""
    ids = tokens(100)
    cache = open_cache()
    cache.insert_cache(model, ids, kv_of(ids))
    cache.clear()
    assert cache.path is None
    assert files(tmp_path) == {"model.safetensors"}


def test_a_name_that_says_nothing_stays_in_memory(open_cache: Open, path: Path) -> None:
    """Nobody could tell after a restart whose KV it was."""
    cache, ids = open_cache(path=path), tokens(100)
    cache.insert_cache("org/unknown", ids, kv_of(ids))
    assert cache.fetch_nearest_cache("org/unknown", [*ids, 1])[1] == [1]
    cache.clear()
    assert files(path) == set()


def test_other_settings_are_another_cache(
    open_cache: Open, path: Path, model: str
) -> None:
    """Fault K02: after max_kv_size was changed the old prompts rest, and come back."""
    ids = tokens(100)
    full, window = [KVCache()] * 2, [RotatingKVCache(64)] * 2
    first = open_cache(path=path, like=full)
    first.insert_cache(model, ids, kv_of(ids))
    first.close()
    second = open_cache(path=path, like=window)
    assert second.fetch_nearest_cache(model, ids)[0] is None
    second.insert_cache(model, ids, rotating(100, 64))
    assert second.fetch_nearest_cache(model, [*ids, 1])[1] == [1]
    second.close()
    found, _ = open_cache(path=path, like=full).fetch_nearest_cache(model, [*ids, 1])
    assert found is not None
    assert type(found[0]) is KVCache


def test_settings_of_unknown_classes_are_compared_as_well(open_cache: Open) -> None:
    """A model whose layers the store does not know has its prompts in memory."""
    cache = open_cache(like=[Fake([])])
    cache.insert_cache("m", P, [Fake(P)])
    assert cache.fetch_nearest_cache("m", [*P, 6])[1] == [6]
    other = open_cache(like=[KVCache()])
    other.insert_cache("m", P, [Fake(P)])
    assert other.fetch_nearest_cache("m", [*P, 6])[0] is None


# ----------------------------------------------------------------------- by request


def test_a_request_tells_where(open_cache: Open, path: Path, model: str) -> None:
    """Each path is a place of its own, the same for the same path."""
    cache, ids = open_cache(), tokens(100)
    place = cache.for_request(request(path, PromptCacheRO=False))
    assert place.path == path
    assert cache.for_request(request(path)) is place
    place.insert_cache(model, ids, kv_of(ids))
    assert (len(place), len(cache)) == (1, 0)
    other = cache.for_request(request(path.with_name("other")))
    assert other.fetch_nearest_cache(model, ids)[0] is None
    cache.close()
    again = open_cache().for_request(request(path))
    assert again.fetch_nearest_cache(model, ids)[1] == ids[-1:]


@pytest.mark.parametrize("asked", [request(), SimpleNamespace(), None])
def test_a_request_without_a_path_gets_the_cache_itself(
    open_cache: Open, asked: Any
) -> None:
    """An unset field of a message is an empty string; older ones lack it."""
    cache = open_cache()
    assert cache.for_request(asked) is cache


def test_a_request_for_the_caches_own_path_gets_it(
    open_cache: Open, path: Path
) -> None:
    """One directory is opened once, unless to read only."""
    cache = open_cache(path=path)
    assert cache.for_request(request(path)) is cache
    assert cache.for_request(request(path, PromptCacheRO=True)) is not cache


def test_a_request_may_forbid_writing(open_cache: Open, path: Path, model: str) -> None:
    """What other requests wrote serves it all the same."""
    cache, old, new = open_cache(), tokens(100), tokens(100, seed=1)
    cache.for_request(request(path)).insert_cache(model, old, kv_of(old))
    cache.clear()
    reader = cache.for_request(request(path, PromptCacheRO=True))
    assert reader.fetch_nearest_cache(model, old)[1] == old[-1:]
    reader.insert_cache(model, new, kv_of(new))
    cache.clear()
    assert len(files(path)) == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_a_place_that_cannot_be_used_costs_no_request(
    open_cache: Open, tmp_path: Path, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp's cache is a file: it is left alone, said once, and memory serves."""
    (tmp_path / "file").write_bytes(b"another's")
    cache = open_cache(path=tmp_path / "file", read_only=read_only)
    assert cache.path is None
    asked = request(tmp_path / "file", PromptCacheRO=read_only)
    for _ in range(3):
        place = cache.for_request(asked)
        place.insert_cache("m", P, ["kv"])
        assert place.fetch_nearest_cache("m", [*P, 6])[0] == ["kv"]
    assert (tmp_path / "file").read_bytes() == b"another's"
    assert len(warnings(caplog)) == 1


def test_a_place_is_used_as_soon_as_it_can_be(
    open_cache: Open, path: Path, model: str
) -> None:
    """One that others make later serves then; a failure is not remembered."""
    cache, asked = open_cache(), request(path, PromptCacheRO=True)
    assert cache.for_request(asked) is cache
    assert not path.exists()
    writer, ids = open_cache(path=path), tokens(100)
    writer.insert_cache(model, ids, kv_of(ids))
    writer.clear()
    reader = cache.for_request(asked)
    assert reader.fetch_nearest_cache(model, ids)[1] == ids[-1:]


def test_after_close_all_is_a_miss(open_cache: Open, path: Path, model: str) -> None:
    """Requests that are still under way end without a cache, and without an error."""
    cache, ids = open_cache(path=path), tokens(100)
    place = cache.for_request(request(path.with_name("other")))
    for _ in range(2):
        cache.close()
    late = cache.for_request(request(path.with_name("late")))
    for each in (cache, place, late):
        each.insert_cache(model, ids, kv_of(ids))
        assert each.fetch_nearest_cache(model, ids) == (None, ids)
        each.clear()


# -------------------------------------------------------------------------- threads


def test_what_another_thread_left_lazy_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault C01: nothing is kept, nothing raised; evaluated it is welcome."""
    cache, ids = ThreadSafeLRUPromptCache(), tokens(100)
    made: list[KVCache] = []

    def compute() -> None:
        for _ in range(2):
            made.append(KVCache())
            rows = mx.random.normal((1, 2, 100, 8)) * 2
            made[-1].update_and_fetch(rows, rows + 1)
        mx.eval(made[1].state)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    cache.insert_cache("m", ids, made[:1])
    assert len(cache) == 0
    assert len(warnings(caplog)) == 1
    cache.insert_cache("m", ids, made[1:])
    assert cache.fetch_nearest_cache("m", [*ids, 1])[1] == [1]


def test_many_threads_make_no_mixture(open_cache: Open, path: Path, model: str) -> None:
    """Fault C03: each gets KV of its own tokens, from memory and from disk, and no
    more prompts are kept than may be."""
    cache = open_cache(max_size=5, path=path)
    trunk, n_wrong, sizes = tokens(70), [], []

    def work(number: int) -> None:
        rng = random.Random(number)
        where = path if number % 2 else path.with_name("other")
        place = cache.for_request(request(where))
        for _ in range(12):
            ids = [*trunk, *(rng.randrange(3) for _ in range(rng.randrange(5)))]
            found, rest = place.fetch_nearest_cache(model, ids)
            n_found = len(ids) - len(rest)
            if found and prints(found) != prints(kv_of(ids[:n_found])):
                n_wrong.append(ids)
            place.insert_cache(model, ids, kv_of(ids))
            sizes.append(len(place))

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    assert n_wrong == []
    assert max(sizes) <= 5


def test_one_path_is_opened_once_for_many_threads(open_cache: Open, path: Path) -> None:
    """However many requests are the first."""
    cache, start = open_cache(), threading.Barrier(8)

    def ask(_: int) -> PromptCache:
        start.wait()
        return cache.for_request(request(path))

    with ThreadPoolExecutor(8) as pool:
        assert len({id(place) for place in pool.map(ask, range(8))}) == 1


def test_a_slow_place_delays_no_other(
    open_cache: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 11: while one directory is being opened, others are used."""
    cache = open_cache()
    opening, go_on = threading.Event(), threading.Event()
    really_open = PromptStore.open

    def open_slowly(*args: Any, **options: Any) -> PromptStore:
        opening.set()
        assert go_on.wait(60)
        return really_open(*args, **options)

    ready = cache.for_request(request(path.with_name("ready")))
    monkeypatch.setattr(PromptStore, "open", open_slowly)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.for_request, request(path))
        assert opening.wait(60)
        assert cache.for_request(request(path.with_name("ready"))) is ready
        ready.insert_cache("m", P, ["kv"])
        go_on.set()
        assert slow.result().path == path


# ------------------------------------------------------------------------- the page


@pytest.mark.real_model
def test_the_example_runs(
    real_model: tuple[Any, Any],
    model_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it stands; what is printed is what the page says."""
    if not PAGE.is_file():
        pytest.skip("no checkout")
    text = PAGE.read_text()
    _, marker, rest = text.partition("<!-- example: localai -->\n```python\n")
    assert marker
    monkeypatch.setenv("MODEL", str(model_path))
    monkeypatch.setenv("PROMPT_CACHE_PATH", str(path))
    monkeypatch.setattr(mlx_lm, "load", lambda name: real_model)
    exec(compile(rest.partition("```")[0], "docs/localai.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    found = [re.match(r"prefilled (\d+) of (\d+) tokens: (.*)", x) for x in lines]
    counts = [(int(m[1]), int(m[2])) for m in found if m]
    answers = [m[3] for m in found if m]
    n_first, n_second = counts[0][1], counts[2][1]
    assert counts == [
        (n_first, n_first), (1, n_first), counts[2], (1, n_second),
    ]  # fmt: skip
    assert counts[2][0] < 12
    assert answers[0] == answers[1] != ""
    assert answers[2] == answers[3] != ""
