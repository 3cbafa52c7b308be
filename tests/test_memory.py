"""Facts about the memory tier alone: its caches are dummies, its sizes are chosen."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from promptstore import memory
from promptstore.capture import Capture
from promptstore.layers import Layer, Layers, RowPart
from promptstore.memory import Entry, MemoryTier
from promptstore.tokens import as_tokens
from promptstore.types import Namespace

NS = Namespace("m")
FULL: Layers = (Layer("full/1", (RowPart("keys", 1, 8, "F32"),)),)


class Evicted(list[Entry]):
    """What the tier passed to its callback, in order."""

    def __call__(self, entry: Entry) -> None:
        self.append(entry)


@pytest.fixture
def evicted() -> Evicted:
    """The entries that were evicted before they were durable."""
    return Evicted()


@pytest.fixture
def tier(evicted: Evicted) -> MemoryTier:
    """A tier of 100 bytes."""
    return MemoryTier(100, evicted)


def entry(ids: Sequence[int], nbytes: int = 10, **fields: Any) -> Entry:
    """Return an entry of a class with a codec, unless told else."""
    fields = {"namespace": NS, "text": "full", "layers": FULL, "n_arrays": 1} | fields
    layers, text = fields.pop("layers"), fields.pop("text")
    capture = Capture(layers, text, len(ids), [object()], [])
    return Entry(tokens=as_tokens(list(ids)), capture=capture, nbytes=nbytes, **fields)


def whole(ids: Sequence[int], nbytes: int = 10, **fields: Any) -> Entry:
    """Return an entry of an unknown class, of which nothing can be cut."""
    return entry(ids, nbytes, **({"text": "unknown: X", "layers": None} | fields))


def best(tier: MemoryTier, ids: Sequence[int]) -> tuple[int, Entry | None]:
    """Look up without keeping the lease."""
    n_tokens, found = tier.best(NS, as_tokens(list(ids)), lambda _: True)
    if found is not None:
        tier.release(found)
    return n_tokens, found


def lease(tier: MemoryTier, ids: Sequence[int]) -> Entry:
    """Look up and keep the lease."""
    _, found = tier.best(NS, as_tokens(list(ids)), lambda _: True)
    assert found is not None
    return found


def n_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share, as a plain loop."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


# --------------------------------------------------------------------- looking up


def test_best_is_the_longest_shared_prefix(tier: MemoryTier) -> None:
    """A look-up finds the entry that shares most, also inside its tokens."""
    short, long = entry([1, 2, 9]), entry([1, 2, 3, 4, 5])
    tier.add(short)
    tier.add(long)
    assert best(tier, [1, 2, 3, 4, 5, 6]) == (5, long)
    assert best(tier, [1, 2, 3, 7]) == (3, long)
    assert best(tier, [1, 2, 9, 9]) == (3, short)
    assert best(tier, [1, 2])[0] == 2
    assert best(tier, [7, 2]) == (0, None)
    assert best(tier, []) == (0, None)


def test_namespaces_do_not_meet(tier: MemoryTier) -> None:
    """An entry of another namespace is no candidate."""
    tier.add(entry([1, 2, 3], namespace=Namespace("other")))
    assert best(tier, [1, 2, 3]) == (0, None)


def test_only_entries_that_fit_are_found(tier: MemoryTier) -> None:
    """The longest entry that the caller can use wins, not the longest of all."""
    fits, longer = entry([1, 2, 3], text="a"), entry([1, 2, 3, 4], text="b")
    tier.add(fits)
    tier.add(longer)
    ids = as_tokens([1, 2, 3, 4, 5])
    n_tokens, found = tier.best(NS, ids, lambda e: e.capture.text == "a")
    assert (n_tokens, found) == (3, fits)
    assert tier.best(NS, ids, lambda e: False) == (0, None)


def test_what_cannot_be_cut_is_found_whole_only(tier: MemoryTier) -> None:
    """Of a class without a codec only entries that are prefixes as a whole match."""
    short, long = whole([1, 2]), whole([1, 2, 3, 4])
    tier.add(short)
    tier.add(long)
    assert best(tier, [1, 2, 3, 4, 5]) == (4, long)
    assert best(tier, [1, 2, 3, 4]) == (4, long)
    assert best(tier, [1, 2, 3]) == (2, short)
    assert best(tier, [1]) == (0, None)


# ------------------------------------------------------------------------- adding


def test_a_longer_entry_stands_in_for_its_prefixes(tier: MemoryTier) -> None:
    """Adding a longer entry drops those that it covers, but for branch points."""
    point = entry([1, 2], keep=True)
    tier.add(point)
    tier.add(entry([1, 2, 3]))
    tier.add(entry([1, 2, 3, 4], nbytes=30))
    assert len(tier) == 2
    assert tier.nbytes == 40
    assert best(tier, [1, 2]) == (2, point)


def test_what_cannot_be_cut_stands_in_for_nothing(tier: MemoryTier) -> None:
    """A longer entry that cannot be cut back leaves its prefixes alone (T04)."""
    tier.add(whole([1, 2]))
    tier.add(whole([1, 2, 3]))
    assert len(tier) == 2
    assert best(tier, [1, 2, 8])[0] == 2


def test_the_same_tokens_are_replaced(tier: MemoryTier) -> None:
    """One sequence has one entry, and its bytes are counted once (Q09)."""
    for nbytes in range(1, 50):
        tier.add(entry([1, 2, 3], nbytes))
        tier.add(whole([1, 2, 3], nbytes))
    assert len(tier) == 2
    assert tier.nbytes == 2 * 49


def test_a_branch_point_remains_one(tier: MemoryTier) -> None:
    """An entry that replaces a branch point of the same tokens is one as well."""
    tier.add(entry([1, 2], keep=True))
    again = entry([1, 2])
    tier.add(again)
    tier.add(entry([1, 2, 3]))
    assert again.keep
    assert best(tier, [1, 2]) == (2, again)


def test_one_entry_larger_than_the_budget_is_not_admitted(tier: MemoryTier) -> None:
    """What can never fit is refused at the door; nothing has no size (R02)."""
    assert tier.admits(100)
    assert not tier.admits(101)
    assert not tier.admits(0)
    assert not MemoryTier(0, lambda _: None).admits(1)


# ----------------------------------------------------------------------- evicting


def test_the_least_recently_used_goes_first(tier: MemoryTier, evicted: Evicted) -> None:
    """A look-up is a use: what was looked up stays, what was not goes (R01)."""
    hot, cold = entry([1, 1], 50), entry([2, 2], 50)
    tier.add(hot)
    tier.add(cold)
    for _ in range(50):
        best(tier, [1, 1, 1])
    tier.add(entry([3, 3], 50))
    assert evicted == [cold]
    assert best(tier, [1, 1]) == (2, hot)
    assert best(tier, [2, 2]) == (0, None)
    assert (len(tier), tier.nbytes, tier.n_evicted) == (2, 100, 1)


def test_the_newest_is_never_its_own_victim(tier: MemoryTier) -> None:
    """Room is made by others: an entry as large as the budget stays alone."""
    for number in range(5):
        tier.add(entry([number], 20))
    big = entry([9], 100)
    tier.add(big)
    assert (len(tier), tier.nbytes) == (1, 100)
    assert best(tier, [9]) == (1, big)


def test_no_other_thread_sees_more_than_the_budget(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the lock is free the budget holds, also amid an add (fault C03)."""
    lock, sizes = threading.Lock(), []

    class Watched:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            sizes.append(tier.nbytes)
            lock.release()

    monkeypatch.setattr(tier, "_lock", Watched())
    for number in range(9):
        tier.add(entry([number], 30))
    assert max(sizes) <= 100


def test_shrink_evicts_down_to_what_is_asked(
    tier: MemoryTier, evicted: Evicted
) -> None:
    """Shrinking to a size evicts the oldest, to 0 all."""
    entries = [entry([number], 20) for number in range(5)]
    for each in entries:
        tier.add(each)
    tier.shrink(50)
    assert evicted == entries[:3]
    assert tier.nbytes == 40
    tier.shrink(0)
    assert (len(tier), tier.nbytes) == (0, 0)
    assert best(tier, [4]) == (0, None)


def test_durable_entries_leave_without_a_word(
    tier: MemoryTier, evicted: Evicted
) -> None:
    """The callback is for what would be lost, not for what the disk tier has."""
    tier.add(entry([1], durable=True))
    tier.shrink(0)
    assert evicted == []
    assert best(tier, [1]) == (0, None)


def test_a_pending_entry_matches_until_it_is_settled(
    tier: MemoryTier, evicted: Evicted
) -> None:
    """Evicted while a write is queued it costs no budget, but can still be found."""
    pending = entry([1, 2], pending=True)
    tier.add(pending)
    tier.shrink(0)
    assert (len(tier), tier.nbytes) == (0, 0)
    assert evicted == [pending]
    assert best(tier, [1, 2, 3]) == (2, pending)
    tier.settle(pending, (7,))
    assert best(tier, [1, 2, 3]) == (0, None)


def test_a_callback_that_queues_keeps_the_entry(evicted: Evicted) -> None:
    """Write-back: the callback may mark the entry pending, and it stays matchable."""

    def queue(entry: Entry) -> None:
        entry.pending = True
        evicted(entry)

    tier = MemoryTier(100, queue)
    tier.add(entry([1, 2]))
    tier.shrink(0)
    assert best(tier, [1, 2, 3]) == (2, evicted[0])
    tier.settle(evicted[0], None)
    assert best(tier, [1, 2, 3]) == (0, None)


def test_settling_an_old_entry_leaves_its_successor(tier: MemoryTier) -> None:
    """The end of a write does not drop what has taken the place meanwhile."""
    old, new = entry([1, 2], pending=True), entry([1, 2])
    tier.add(old)
    tier.shrink(0)
    tier.add(new)
    tier.settle(old, (7,))
    assert best(tier, [1, 2]) == (2, new)
    assert len(tier) == 1


def test_settling_records_what_was_written(tier: MemoryTier) -> None:
    """An entry is unsaved until a write of it has succeeded."""
    first, second = entry([1]), entry([2])
    tier.add(first)
    tier.add(second)
    first.pending = True
    assert tier.unsaved() == [second]
    tier.settle(first, None)
    assert tier.unsaved() == [first, second]
    tier.settle(first, (7,))
    tier.settle(first, None)
    assert tier.unsaved() == [second]
    assert first.rows == (7,)


def test_the_callback_runs_without_the_lock() -> None:
    """Whoever is told of an eviction may use the tier at once (invariant 11)."""
    seen: list[int] = []

    def look(_: Entry) -> None:
        seen.append(best(tier, [2, 2])[0])
        tier.settle(_, None)

    tier = MemoryTier(20, look)
    tier.add(entry([1, 1]))
    tier.add(entry([2, 2]))
    tier.add(entry([3, 3]))
    assert seen == [2]


def test_the_number_of_arrays_is_bounded(
    tier: MemoryTier, evicted: Evicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small entries go before the process has too many live buffers (R10)."""
    monkeypatch.setattr(memory, "_MAX_ARRAYS", 10)
    for number in range(8):
        tier.add(entry([number], 1, n_arrays=4))
    assert len(tier) == 2
    assert [int(each.tokens[0]) for each in evicted] == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------- handing over


def test_a_durable_tip_is_handed_over(tier: MemoryTier) -> None:
    """A conversation's end that the disk tier has is the caller's, and gone here."""
    tip = entry([1, 2, 3], durable=True)
    tier.add(tip)
    assert tier.take(lease(tier, [1, 2, 3, 4]), 3)
    assert (len(tier), tier.nbytes, tier.n_evicted) == (0, 0, 0)
    assert best(tier, [1, 2, 3]) == (0, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"durable": False},
        {"durable": True, "keep": True},
        {"durable": True, "layers": None, "text": "unknown: X"},
    ],
    ids=["not-durable", "branch-point", "unknown-class"],
)
def test_what_is_not_handed_over(tier: MemoryTier, fields: dict[str, Any]) -> None:
    """What would be lost, what others come back to, what cannot be cut: it stays."""
    tier.add(entry([1, 2, 3], **fields))
    assert not tier.take(lease(tier, [1, 2, 3, 4]), 3)
    assert best(tier, [1, 2, 3])[0] == 3
    assert tier.nbytes == 10


def test_nothing_is_handed_over_from_under_a_reader(tier: MemoryTier) -> None:
    """While two copy from one entry, neither gets it; after that one may."""
    tier.add(entry([1, 2, 3], durable=True))
    first, second = lease(tier, [1, 2, 3]), lease(tier, [1, 2, 3])
    assert first is second
    assert not tier.take(second, 3)
    tier.release(first)
    assert tier.take(second, 3)


def test_an_entry_that_others_continue_is_not_handed_over(tier: MemoryTier) -> None:
    """A branch point is also what has branches, whatever its kind."""
    point = entry([1, 2], durable=True, keep=True)
    tier.add(point)
    tier.add(entry([1, 2, 3], durable=True))
    point.keep = False
    assert not tier.take(lease(tier, [1, 2]), 2)


@pytest.mark.parametrize(("n_cut", "handed_over"), [(0, 1), (256, 1), (257, 0)])
def test_far_back_it_is_copied(tier: MemoryTier, n_cut: int, handed_over: bool) -> None:
    """Who needs only the beginning of a long entry does not take its end away."""
    tier.add(entry(range(600), durable=True))
    assert tier.take(lease(tier, range(600 - n_cut)), 600 - n_cut) == handed_over


def test_an_evicted_entry_is_not_handed_over(tier: MemoryTier) -> None:
    """The writer still reads what it was given: the caller gets a copy."""
    tier.add(entry([1, 2], durable=True, pending=True))
    found = lease(tier, [1, 2])
    found.durable = False
    tier.shrink(0)
    found.durable = True
    assert not tier.take(found, 2)


def test_a_dropped_entry_is_not_handed_over(tier: MemoryTier) -> None:
    """What was replaced between look-up and hand-over stays with its readers."""
    tier.add(entry([1, 2], durable=True))
    found = lease(tier, [1, 2])
    tier.add(entry([1, 2, 3], durable=True))
    assert not tier.take(found, 2)
    assert len(tier) == 1


# ----------------------------------------------------------------------- removing


def test_remove_drops_all_that_shares_more(tier: MemoryTier) -> None:
    """Removing a part of a prompt takes whatever holds that part, and no sibling."""
    tier.add(entry([1, 2], keep=True))
    tier.add(entry([1, 2, 3, 4]))
    tier.add(entry([1, 2, 3, 5]))
    tier.add(entry([1, 2, 9]))
    tier.remove(NS, as_tokens([1, 2, 3, 4]), 2)
    assert best(tier, [1, 2, 3, 4, 5])[0] == 2
    assert best(tier, [1, 2, 9])[0] == 3
    assert (len(tier), tier.nbytes) == (2, 20)
    tier.remove(Namespace("other"), as_tokens([1, 2]), 0)
    assert len(tier) == 2


def test_remove_may_empty_the_tier(tier: MemoryTier) -> None:
    """The last entry of a layout, and of a namespace, can be removed like any."""
    tier.add(entry([1, 2]))
    tier.add(whole([1, 2, 3]))
    tier.remove(NS, as_tokens([1, 2, 3]), 0)
    assert (len(tier), tier.nbytes) == (0, 0)
    assert best(tier, [1, 2]) == (0, None)


def test_clear_drops_everything(tier: MemoryTier) -> None:
    """After clear nothing is found or counted, and the end of a write is harmless."""
    pending = entry([1, 2], pending=True)
    tier.add(pending)
    tier.clear()
    tier.settle(pending, (7,))
    assert best(tier, [1, 2]) == (0, None)
    assert (len(tier), tier.nbytes) == (0, 0)


# ------------------------------------------------------------------------ at random


def test_random_operations_keep_the_counts(evicted: Evicted) -> None:
    """Whatever happens, counts equal a walk and look-ups equal a search of all."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", "1"))
    print(f"PROMPTSTORE_SEED={seed}")
    rng = random.Random(seed)
    tier = MemoryTier(120, evicted)
    alive: dict[tuple[int, ...], Entry] = {}

    def ids() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(1, 9))]

    for _ in range(2000):
        what = rng.random()
        if what < 0.5:
            tokens = ids()
            new = entry(tokens, rng.randrange(1, 40), keep=rng.random() < 0.3)
            for key in [key for key in alive if key == tuple(tokens[: len(key)])]:
                if not alive[key].keep or key == tuple(tokens):
                    del alive[key]
            alive[tuple(tokens)] = new
            tier.add(new)
        elif what < 0.9:
            tokens = ids()
            shared = max((n_shared(key, tokens) for key in alive), default=0)
            n_tokens, found = tier.best(NS, as_tokens(tokens), lambda _: True)
            assert n_tokens == shared
            if found is not None:
                assert list(found.tokens[:n_tokens]) == tokens[:n_tokens]
                found.durable = rng.random() < 0.5
                if tier.take(found, n_tokens):
                    del alive[tuple(found.tokens.tolist())]
                tier.release(found)
        else:
            tier.shrink(rng.randrange(120))
        gone = [key for key, each in alive.items() if each.evicted]
        for key in gone:
            del alive[key]
        assert tier.nbytes == sum(each.nbytes for each in alive.values()) <= 120
        assert len(tier) == len(alive)
