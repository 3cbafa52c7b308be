"""Facts about what a store takes of a disk: space, free space, and wear."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import arrays_cache, kv_of, prints, tokens
from test_disk import UNIT, file_of, holds, load, n_found, new, open_tier, prompts, walk

from promptstore import (
    DailyLimit,
    Namespace,
    NoSpace,
    PromptStore,
    TooLarge,
    WriteFailed,
    restore,
)
from promptstore.budget import Limits
from promptstore.disk import DiskTier
from promptstore.root import Root

NS = Namespace("budget")
DAY_NS = 86_400 * 10**9


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    """An open tier."""
    tier = open_tier(tmp_path / "store")
    yield tier
    tier.close()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[DiskTier, int], None]:
    """What sets how much of a file system the store's bytes leave free."""

    def set_free(disk: DiskTier, nbytes: int) -> None:
        total = walk(disk.root.path) + nbytes
        monkeypatch.setattr(
            Root, "free_bytes", lambda root: total - walk(disk.root.path)
        )

    return set_free


# -------------------------------------------------------------------- free space


def test_what_must_stay_free_stays_free(disk: DiskTier, free: Any) -> None:
    """The least recently used goes so that enough remains free."""
    ids = prompts(6)
    for one in ids[:4]:
        disk.save(new(one))
    free(disk, 3 * UNIT)
    disk.budget.limits = Limits(1 << 40, min_free_bytes=5 * UNIT // 2)
    for one in ids[4:]:
        disk.save(new(one))
        assert disk.root.free_bytes() >= 5 * UNIT // 2
    assert [n_found(disk, one) for one in ids] == [0, 0, 100, 100, 100, 100]


def test_nothing_goes_if_it_would_not_be_enough(disk: DiskTier, free: Any) -> None:
    """Somebody else filled the disk: the store keeps what it has and writes nothing."""
    ids = prompts(3)
    for one in ids[:2]:
        disk.save(new(one))
    free(disk, UNIT)
    disk.budget.limits = Limits(1 << 40, min_free_bytes=10 * UNIT)
    with pytest.raises(NoSpace) as caught:
        disk.save(new(ids[2]))
    assert caught.value.min_free_bytes == 10 * UNIT
    assert [n_found(disk, one) for one in ids] == [100, 100, 0]
    assert disk.budget.n_evicted == 0


def test_the_floor_is_a_gibibyte(tmp_path: Path, monkeypatch: Any) -> None:
    """Unless told else, a store stops before the disk is full; later it goes on."""
    ids = tokens(100)
    with PromptStore.open(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Root, "free_bytes", lambda _: (1 << 30) - 1)
            store.insert(NS, ids, kv_of(ids))
            with pytest.raises(WriteFailed, match="min_free_bytes"):
                store.flush()
        assert store.match(NS, [*ids, 1]).source == "memory"
        assert store.stats().errors == {"NoSpace": 2}
        store.insert(NS, ids, kv_of(ids))
        store.flush()
        assert store.stats().n_snapshots == 1


# ------------------------------------------------------------------------- wear


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What sets the clock forward by so many nanoseconds."""
    start = 20_000 * DAY_NS

    def forward(by_ns: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: start + by_ns)

    forward(0)
    return forward


def test_bytes_are_counted_by_day(tmp_path: Path, clock: Callable[[int], None]) -> None:
    """Snapshots of all processes, by the day on which they were written."""
    one, two, three = ([n, *tokens(99, seed=n)] for n in range(3))
    with PromptStore.open(tmp_path) as store:
        store.insert(NS, one, kv_of(one))
        store.flush()
        size = store.stats().bytes_written
    clock(DAY_NS)
    with PromptStore.open(tmp_path) as store:
        for ids in (two, three):
            store.insert(NS, ids, kv_of(ids))
        store.flush()
        days = store.stats().written_by_day
        assert days == {"2024-10-04": size, "2024-10-05": 2 * size}
        assert sum(info.nbytes for info in store.snapshots()) == 3 * size


def test_a_day_has_its_limit(tmp_path: Path, clock: Callable[[int], None]) -> None:
    """What exceeds it is not written, counted and told; tomorrow it works again."""
    prompts = [[n, *tokens(99, seed=n)] for n in range(4)]
    with PromptStore.open(tmp_path / "other") as store:
        store.insert(NS, prompts[0], kv_of(prompts[0]))
        store.flush()
        size = store.stats().bytes_written
    with PromptStore.open(tmp_path / "store", daily_write_bytes=2 * size) as store:
        for ids in prompts[:3]:
            store.insert(NS, ids, kv_of(ids))
        with pytest.raises(WriteFailed) as caught:
            store.flush()
        assert isinstance(caught.value.__cause__, DailyLimit)
        assert store.match(NS, [*prompts[2], 1]).source == "memory"
        stats = store.stats()
        assert (stats.n_snapshots, stats.errors) == (2, {"DailyLimit": 1})
        assert stats.written_by_day == {"2024-10-04": 2 * size}
        clock(DAY_NS)
        store.insert(NS, prompts[3], kv_of(prompts[3]))
        store.flush()
        assert store.stats().n_snapshots == 3


def test_the_limit_is_one_for_all_processes(tmp_path: Path, clock: Any) -> None:
    """The count is in the index: whoever opens the store anew goes on with it."""
    one, two = ([n, *tokens(99, seed=n)] for n in range(2))
    with PromptStore.open(tmp_path) as store:
        store.insert(NS, one, kv_of(one))
        store.flush()
        size = store.stats().bytes_written
    with PromptStore.open(tmp_path, daily_write_bytes=size) as store:
        store.insert(NS, two, kv_of(two))
        with pytest.raises(WriteFailed, match="daily_write_bytes"):
            store.flush()


# -------------------------------------------------------------------- admission


def stored(store: PromptStore) -> list[int]:
    """Return where the snapshots on disk end, once all is written."""
    store.flush()
    return sorted(info.end for info in store.snapshots())


def insert(store: PromptStore, ids: list[int], **wishes: Any) -> None:
    store.insert(NS, ids, kv_of(ids), **wishes)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("length", [70, 256, 700])
def test_second_use_writes_at_the_second_insert(
    tmp_path: Path, memory_bytes: int, length: int
) -> None:
    """The first one is in memory only, and is no failure; a restart does not matter."""
    ids = tokens(length)
    options: Any = {"memory_bytes": memory_bytes, "admission": "second-use"}
    with PromptStore.open(tmp_path, **options) as store:
        insert(store, ids)
        assert stored(store) == []
        assert (store.stats().n_declined, store.stats().errors) == (1, {})
    with PromptStore.open(tmp_path, **options) as store:
        insert(store, ids)
        assert stored(store) == [length]
        assert store.stats().n_declined == 0
    with PromptStore.open(tmp_path, memory_bytes=0) as store:
        match = store.match(NS, [*ids, 1])
        assert match.cache is not None
        assert prints(match.cache) == prints(kv_of(ids))


def test_second_use_writes_a_conversation_from_its_second_turn(tmp_path: Path) -> None:
    """At least half of the prompt was inserted before; then the whole is written."""
    ids = tokens(1200)
    with PromptStore.open(tmp_path, admission="second-use") as store:
        insert(store, ids[:600])
        assert stored(store) == []
        insert(store, ids[:900])
        assert stored(store) == [900]
        insert(store, ids)
        assert stored(store) == [900, 1200]


def test_second_use_never_writes_what_has_a_clock_at_its_head(tmp_path: Path) -> None:
    """Prompts that share 13 tokens of 400 are one-shot prompts."""
    with PromptStore.open(tmp_path, admission="second-use") as store:
        for number in range(20):
            insert(store, [*tokens(13), number, *tokens(386, seed=1)])
        assert stored(store) == []
        assert store.stats().n_declined == 20


@pytest.mark.parametrize("wish", [{"label": "a"}, {"pin": True}, {"ttl_s": 60.0}])
def test_second_use_writes_what_is_asked_for(
    tmp_path: Path, wish: dict[str, Any]
) -> None:
    """A label, a pin or a time to live says that it will be used."""
    with PromptStore.open(tmp_path, admission="second-use") as store:
        insert(store, tokens(100), **wish)
        assert stored(store) == [100]


def test_second_use_holds_for_states(tmp_path: Path) -> None:
    """A recurrent state is written at the second insert of its prompt."""
    ids = tokens(100)
    with PromptStore.open(tmp_path, admission="second-use") as store:
        for expected in ([], [100, 100]):
            store.insert(NS, ids, arrays_cache(100))
            assert stored(store) == expected


def test_flushing_again_is_no_second_use(tmp_path: Path) -> None:
    """In write-back a prompt is asked about once, however often is flushed."""
    options: Any = {"admission": "second-use", "write": "back"}
    with PromptStore.open(tmp_path, **options) as store:
        insert(store, tokens(100))
        assert [stored(store), stored(store), stored(store)] == [[], [], []]
        store.evict(to_bytes=0)
        assert stored(store) == []
        assert store.stats().n_declined == 1


def test_what_was_seen_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    """The memory of prompts that were not admitted forgets the oldest."""
    monkeypatch.setattr("promptstore.index.index._MAX_SIGHTINGS", 3)
    with PromptStore.open(tmp_path, admission="second-use") as store:
        for number in (0, 1, 2, 3, 0, 3):
            insert(store, [number, *tokens(99)])
        assert [info.end for info in store.snapshots()] == []
        store.flush()
        assert stored(store) == [100]
        assert store.stats().n_declined == 5


# ------------------------------------------------------------------------ floods


def test_one_shot_prompts_push_out_themselves(disk: DiskTier) -> None:
    """200 prompts that share 13 tokens leave what is reused where it is."""
    reused = prompts(3)
    for ids in reused:
        disk.save(new(ids))
        load(disk, ids)
        disk.note_use([disk.index.rows()[0].id])
    disk.save_uses()
    disk.budget.limits = Limits(disk.root.nbytes() + 4 * UNIT)
    head = [7, *tokens(12, seed=9)]
    for number in range(200):
        disk.save(new([*head, number, *tokens(86, seed=number)]))
    assert all(holds(disk, ids) for ids in reused)
    assert disk.budget.n_evicted > 190


def test_a_few_tokens_in_common_are_no_reuse(tmp_path: Path) -> None:
    """Prompts that share 13 tokens do not make each other look reused."""
    head = tokens(13)
    with PromptStore.open(tmp_path, memory_bytes=0) as store:
        long = [*head, 0, *tokens(386, seed=1)]
        insert(store, long)
        store.flush()
        assert store.match(NS, [*head, 1, 2]).n_tokens == 13
        store.flush()
        assert [info.hits for info in store.snapshots()] == [0]
        assert store.match(NS, [*long[:100], 1]).n_tokens == 100
        store.flush()
        assert [info.hits for info in store.snapshots()] == [1]


# ------------------------------------------------------------------------ leases


def test_what_is_being_read_is_no_victim(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest prompt stays while a match reads it, and goes afterwards."""
    old, young, third = prompts(3)
    for ids in (old, young):
        disk.save(new(ids))
    reads, go_on = threading.Event(), threading.Event()
    real = restore._read

    def wait(*args: Any) -> int:
        reads.set()
        go_on.wait()
        return real(*args)

    monkeypatch.setattr(restore, "_read", wait)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(load(disk, old)))
    reader.start()
    reads.wait()
    disk.budget.limits = Limits(disk.root.nbytes() + UNIT // 2)
    disk.save(new(third))
    go_on.set()
    reader.join()
    monkeypatch.undo()
    assert [n_found(disk, ids) for ids in (old, young, third)] == [100, 0, 100]
    disk.save(new(young))
    assert [n_found(disk, ids) for ids in (old, young, third)] == [0, 100, 100]


def test_a_lease_ends_with_a_failed_read(disk: DiskTier) -> None:
    """What could not be read may be evicted."""
    one, two = prompts(2)
    disk.save(new(one))
    path = file_of(disk, one)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(Exception, match="the file is gone"):
        load(disk, one)
    path.with_suffix(".away").rename(path)
    disk.budget.limits = Limits(disk.root.nbytes() + UNIT // 2)
    disk.save(new(two))
    assert [n_found(disk, ids) for ids in (one, two)] == [0, 100]


# ------------------------------------------------------------------------ strays


def test_strays_are_looked_for_only_when_there_are_more(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save walks the directory once for a process, and again for a new stray."""
    sweeps: list[int] = []
    real = disk.budget.sweep
    monkeypatch.setattr(disk.budget, "sweep", lambda: (sweeps.append(1), real()))
    for ids in prompts(4):
        disk.save(new(ids))
    assert len(sweeps) == 1
    stray = disk.root.path_of("f" * 32)
    stray.parent.mkdir()
    stray.write_bytes(bytes(1000))
    disk.save(new(prompts(5)[4]))
    assert (len(sweeps), stray.exists()) == (2, False)


def test_what_is_too_large_names_the_bound(disk: DiskTier) -> None:
    """The error says how much there may be."""
    disk.budget.limits = Limits(1000)
    with pytest.raises(TooLarge) as caught:
        disk.save(new(tokens(100)))
    assert caught.value.budget_bytes == 1000


# -------------------------------------------------------------------- durability


@pytest.mark.parametrize(("level", "expected"), [("normal", 1), ("full", 2)])
def test_durability_is_the_commits_own_sync(
    tmp_path: Path, level: Any, expected: int
) -> None:
    """SQLite's synchronous is normal (1) or full (2) on the writer's connection."""
    with PromptStore.open(tmp_path, durability=level) as store:
        assert store._disk is not None
        writer = store._disk.volume.writer
        assert writer._all("pragma synchronous") == [(expected,)]


@pytest.mark.parametrize("option", ["durability", "admission", "write", "verify"])
def test_an_unknown_level_is_refused(tmp_path: Path, option: str) -> None:
    """With the words that there are."""
    wrong: Any = {option: "sometimes"}
    with pytest.raises(ValueError, match=f"{option} must be one of .*'sometimes'"):
        PromptStore.open(tmp_path / "store", **wrong)
    assert not (tmp_path / "store").exists()
