"""Facts about reasons: what a match says, and what an explanation adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import arrays_cache, kv, kv_of, quantized, rotating, tokens
from mlx_lm.models.cache import CacheList, KVCache

from promptstore import (
    Difference,
    Explanation,
    Match,
    Namespace,
    PromptStore,
    Reason,
    ReasonKind,
    codecs,
    nearby,
)
from promptstore.metrics import log_line

NS = Namespace("m", config="c")
IDS = [1, *tokens(299)]
DISK = {"memory_bytes": 0}
MEMORY = {"disk_bytes": 0}

Open = Callable[..., PromptStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Open stores that are closed after the test."""
    stores: list[PromptStore] = []

    def open_(**options: Any) -> PromptStore:
        stores.append(PromptStore.open(tmp_path / "store", **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def save(
    store: PromptStore, ids: list[int], ns: Namespace = NS, **options: Any
) -> None:
    """Insert KV and wait until it is durable."""
    store.insert(ns, ids, kv_of(ids), **options)
    store.flush()


def reason_of(found: Match | Explanation) -> Reason:
    """Return a reason that there must be."""
    assert found.reason is not None
    return found.reason


def state(n: int) -> list[Any]:
    """Return a cache of which one layer is a state."""
    return [*kv(n, n_layers=1), *arrays_cache(n, n_layers=1)]


# ------------------------------------------------------------------- with a match


def test_a_reason_names_the_nearest_snapshot(open_store: Open) -> None:
    """And how many tokens it shares."""
    store = open_store(**DISK)
    save(store, IDS)
    (info,) = store.snapshots()
    for ask in (store.match, store.explain):
        reason = reason_of(ask(NS, [*IDS[:200], 2000, 0]))
        assert (reason.nearest, reason.n_shared) == (info.id, 200)


def test_who_is_nearest_makes_no_other_reason() -> None:
    """Reasons are compared and counted by their cause."""
    near = Reason(ReasonKind.DIVERGED, 7, nearest="a", n_shared=7)
    assert near == Reason(ReasonKind.DIVERGED, 7)
    assert str(near) == "diverged-at(7)"


def test_a_reason_tells_where_it_diverges_and_where_it_resumes(
    open_store: Open,
) -> None:
    """State resumes at a checkpoint; the tokens part behind it."""
    store = open_store(min_tokens=1, **DISK)
    for n in (20, 60):
        store.insert(NS, IDS[:n], state(n))
    store.flush()
    reason = reason_of(store.match(NS, [*IDS[:40], 2000, 0]))
    assert str(reason) == "not-resumable(state, 20)"
    assert reason.n_shared == 40


@pytest.mark.parametrize("options", [MEMORY, {"write": "off"}], ids=str)
def test_memory_tells_where_it_diverges(
    open_store: Open, options: dict[str, Any]
) -> None:
    """Also if nothing of the prompt is on disk."""
    store = open_store(**options)
    store.insert(NS, IDS, kv_of(IDS))
    for ask in (store.explain, store.match):
        reason = reason_of(ask(NS, [*IDS[:200], 2000, 0]))
        assert str(reason) == "diverged-at(200)"
        assert (reason.n_shared, reason.nearest) == (200, "")


def test_memory_tells_what_cannot_resume(open_store: Open) -> None:
    """A state that has gone on is no use for a prompt that parts before its end."""
    store = open_store(**MEMORY)
    store.insert(NS, IDS[:60], state(60))
    reason = reason_of(store.match(NS, [*IDS[:40], 2000, 0]))
    assert str(reason) == "not-resumable(state, 0)"
    assert reason.n_shared == 40


@pytest.mark.parametrize("options", [DISK, MEMORY], ids=str)
@pytest.mark.parametrize("n_before", [0, 60])
def test_an_image_is_a_reason(
    open_store: Open, options: dict[str, Any], n_before: int
) -> None:
    """It is reused whole or not at all, and what stops there says so."""
    store = open_store(**options)
    ids = [*tokens(n_before), *[-7] * 10, *tokens(90, seed=1)]
    save(store, ids)
    query = [*ids[: n_before + 4], 5, 6]
    wanted = Reason(ReasonKind.NOT_RESUMABLE, n_before, "image")
    assert store.explain(NS, query).reason == wanted
    assert store.match(NS, query).reason == wanted


# ---------------------------------------------------------------------- identity


@pytest.mark.parametrize(
    ("other", "detail"),
    [
        (Namespace("n", config="c"), "model"),
        (Namespace("m", "r", "c"), "revision"),
        (Namespace("m", config="d"), "config"),
        (Namespace("m", config="c", adapter="a"), "adapter"),
        (Namespace("m", config="c", draft="x"), "draft"),
        (Namespace("m", config="c", exact_until="4096"), "exact_until"),
        (Namespace("n", config="d"), "model+config"),
    ],
    ids=str,
)
def test_a_namespace_without_anything_says_who_has_it(
    open_store: Open, other: Namespace, detail: str
) -> None:
    """The field that differs, both values, the snapshot, and the tokens it shares."""
    store = open_store(**DISK)
    save(store, IDS)
    (info,) = store.snapshots()
    reason = reason_of(store.match(other, [*IDS[:200], 5, 6]))
    assert str(reason) == f"identity-differs({detail}, 0)"
    assert (reason.n_shared, reason.nearest) == (200, info.id)
    for each in reason.differs:
        assert each.ours == getattr(other, each.field)
        assert each.theirs == getattr(NS, each.field)


def test_a_namespace_with_prompts_explains_who_else_has_it(open_store: Open) -> None:
    """A match does not look there any more; who asks is told."""
    store = open_store(**DISK)
    other = Namespace("n", config="c")
    save(store, IDS)
    save(store, [*IDS[:5], *tokens(95, seed=2)], other)
    query = [*IDS, 7]
    assert str(store.match(other, query).reason) == "diverged-at(5)"
    (found,) = store.explain(other, query, n_closest=1).elsewhere
    assert (found.n_shared, found.snapshot.namespace) == (300, NS)
    assert found.differs == (Difference("model", "n", "m"),)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_no_tenant_is_told_of_another(open_store: Open, memory_bytes: int) -> None:
    """Not that it has the tokens, nor that it is there; even if the model differs."""
    store = open_store(memory_bytes=memory_bytes)
    save(store, IDS, Namespace("m", config="c", tenant="ann"), label="of ann")
    for other in (NS, Namespace("n", tenant="bob"), Namespace("n")):
        for query in ([*IDS, 7], IDS[:100]):
            assert str(store.match(other, query).reason) == "no-entry(0)"
            told = store.explain(other, query, n_closest=9)
            assert (told.closest, told.elsewhere, told.nearest) == ((), (), None)


def test_two_tenants_are_not_compared() -> None:
    """The one function that compares refuses to."""
    with pytest.raises(ValueError, match="two tenants"):
        nearby.differences(NS, Namespace("m", config="c", tenant="ann"))


def test_within_a_tenant_all_is_told(open_store: Open) -> None:
    """The same tenant's other model is named."""
    store = open_store(**DISK)
    save(store, IDS, Namespace("m", tenant="ann"))
    match = store.match(Namespace("n", tenant="ann"), [*IDS, 7])
    assert str(match.reason) == "identity-differs(model, 0)"


# ------------------------------------------------------------------------ layers


LIKES: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: kv(1),
    "three layers": lambda: kv(1, n_layers=3),
    "8 bits": lambda: quantized(1),
    "4 bits": lambda: quantized(1, 4),
    "group of 64": lambda: quantized(1, group_size=64),
    "window of 8": lambda: rotating(1, 8),
    "window of 16": lambda: rotating(1, 16),
    "keeps 4": lambda: rotating(1, 8, 4),
    "state": lambda: state(1),
    "composite": lambda: [CacheList(*kv(1)), CacheList(*kv(1))],
    "composite with a window": lambda: [
        CacheList(*kv(1, n_layers=1), *rotating(1, 8, n_layers=1)) for _ in range(2)
    ],
}


@pytest.mark.parametrize("stored", LIKES)
def test_layers_fit_or_say_what_does_not(stored: str) -> None:
    """For all pairs the two functions agree, and what differs has two values."""
    layers = codecs.describe(LIKES[stored]())
    for name, make in LIKES.items():
        found = codecs.misfit(layers, make())
        assert (found is None) == codecs.fits(layers, make()) == (name == stored)
        assert found is None or found[1] != found[2]


@pytest.mark.parametrize(
    ("like", "difference"),
    [
        ("three layers", ("layers", "3", "2")),
        ("full", ("layer 0 class", "full/1", "quantized/1")),
        ("4 bits", ("layer 0 bits", "4", "8")),
        ("group of 64", ("layer 0 group_size", "64", "32")),
    ],
)
def test_a_reason_says_which_setting_differs(
    open_store: Open, like: str, difference: tuple[str, str, str]
) -> None:
    """Which layer, which setting, both values."""
    store = open_store(**DISK)
    store.insert(NS, IDS[:100], quantized(100))
    store.flush()
    live = LIKES[like]()
    reason = reason_of(store.match(NS, [*IDS[:100], 7], like=live))
    assert str(reason) == "identity-differs(layers, 0)"
    assert reason.differs == (Difference(*difference),)
    (found,) = store.explain(NS, [*IDS[:100], 7], like=live, n_closest=1).elsewhere
    assert (found.n_shared, found.differs) == (100, reason.differs)


class _Unknown(KVCache):
    """A class that has no codec."""


def test_a_class_without_a_codec_is_a_reason(open_store: Open) -> None:
    """Its caches are never on disk, so that a restart finds nothing."""
    store = open_store(**DISK)
    reason = store.match(NS, IDS, like=[_Unknown()]).reason
    assert reason == Reason(ReasonKind.UNKNOWN_CLASS, 0, "_Unknown")


# ----------------------------------------------------------------------- closest


def test_the_closest_prompts_come_best_first(open_store: Open) -> None:
    """With what each shares, and how it goes on."""
    store = open_store(**DISK)
    for n_shared in (10, 250, 100):
        save(store, [*IDS[:n_shared], 2000 + n_shared, *tokens(99, seed=n_shared)])
    found = store.explain(NS, IDS, n_closest=2).closest
    assert [each.n_shared for each in found] == [250, 100]
    assert [each.follows[0] for each in found] == [2250, 2100]
    assert [each.follows[1:] for each in found] == [
        tuple(tokens(63, seed=250)),
        tuple(tokens(63, seed=100)),
    ]
    assert [each.snapshot.end for each in found] == [350, 200]


def test_a_prompt_that_goes_on_is_not_listed_twice(open_store: Open) -> None:
    """Unless its beginning has a name."""
    store = open_store(**DISK)
    save(store, IDS[:100], label="head")
    for n in (200, 300):
        save(store, IDS[:n])
    found = store.explain(NS, IDS[:250], n_closest=5).closest
    ends = [(each.n_shared, each.snapshot.end, each.snapshot.label) for each in found]
    assert ends == [(250, 300, None), (100, 100, "head")]
    assert [each.follows[:2] for each in found] == [tuple(IDS[250:252]), ()]


def test_a_prompt_that_shares_nothing_is_not_close(open_store: Open) -> None:
    """Nor is anything that only continues it."""
    store = open_store(**DISK)
    save(store, IDS[:100])
    save(store, IDS)
    assert store.explain(NS, [2000, *IDS], n_closest=5).closest == ()


def test_nothing_is_compared_unless_asked_for(open_store: Open) -> None:
    """An explanation costs what a look-up costs."""
    store = open_store(**DISK)
    save(store, IDS)
    found = store.explain(NS, [*IDS, 7])
    assert (found.closest, found.elsewhere) == ((), ())


# ---------------------------------------------------------------------- the line


def test_the_log_line_has_the_facts_of_a_reason() -> None:
    """Behind the words that are always there; an id and values cut short."""
    differs = (Difference("model", "a b" * 20, "c" * 20),)
    reason = Reason(
        ReasonKind.IDENTITY, 0, "model", n_shared=9, nearest="f" * 32, differs=differs
    )
    line = log_line(Match(None, 0, "miss", reason), 50, 0.001)
    assert line == (
        "tokens=50 reused=0 source=miss reason=identity-differs(model,0) ms=1.00 "
        "nearest=ffffffff shared=9 ours=abababababababab theirs=cccccccccccccccc"
    )


def test_prompts_that_part_at_one_end_are_all_told(store: PromptStore) -> None:
    """Two that continue the same prompt, and one whose parent shares nothing."""
    for extra in ([], [500, 501], [600, 601]):
        ids = [*IDS[:100], *extra]
        store.insert(NS, ids, kv_of(ids))
    store.flush()
    found = store.explain(NS, [*IDS[:100], 700], n_closest=5).closest
    assert [near.n_shared for near in found] == [100, 100]
    assert store.explain(NS, [999_999, *IDS[:100]], n_closest=5).closest == ()
    assert store.stats().errors == {}
