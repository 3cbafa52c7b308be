"""Facts about verifying in the background: slow, resumable, and in nobody's way."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import kv_of, tokens

from promptstore import (
    Finding,
    Namespace,
    PromptStore,
    SnapshotInfo,
    StoreClosed,
    StoreUnavailable,
)
from promptstore import scrub as scrub_module
from promptstore import store as store_module
from promptstore.index import Row
from promptstore.scrub import Pace
from promptstore.snapshot import left_as_found, pages

NS = Namespace("m")
BASE = tokens(300)
TIP = [*BASE, *tokens(80, seed=1)]
PROMPTS = {"base": BASE, "tip": TIP, "alone": [1001, *BASE[:90]]}
FAST = 1e18
DAY_NS = 86_400 * 10**9


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of three snapshots: one, what continues it, and one alone."""
    root = tmp_path_factory.mktemp("made") / "store"
    with PromptStore.open(root) as store:
        for label, ids in PROMPTS.items():
            store.insert(NS, ids, kv_of(ids), label=label)
            store.flush()
    return root


@pytest.fixture
def root(tmp_path: Path, made: Path) -> Path:
    """A copy of that store."""
    return shutil.copytree(made, tmp_path / "store")


@pytest.fixture
def opened(root: Path) -> Iterator[PromptStore]:
    """The store, open, without a memory tier."""
    with PromptStore.open(root, memory_bytes=0) as store:
        yield store


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the snapshots in the order in which they are read."""
    seen: list[str] = []
    real = scrub_module.verify_row

    def verify_row(disk: Any, row: Row, on_read: Any) -> Finding | None:
        seen.append(row.label or row.name)
        return real(disk, row, on_read)

    monkeypatch.setattr(scrub_module, "verify_row", verify_row)
    return seen


def verify(store: PromptStore, **options: Any) -> list[Finding]:
    return list(store.verify(max_bytes_per_s=FAST, **options))


def by_label(store: PromptStore) -> dict[str, SnapshotInfo]:
    return {info.label or "": info for info in store.snapshots()}


def path_of(root: Path, info: SnapshotInfo) -> Path:
    return root / "snapshots" / info.id[:2] / f"{info.id}.safetensors"


def damage(root: Path, info: SnapshotInfo) -> None:
    """Flip a bit of the rows."""
    path = path_of(root, info)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def set_verified(root: Path, **ns_by_label: int | None) -> None:
    with contextlib.closing(sqlite3.connect(root / "index.db")) as db, db:
        for label, ns in ns_by_label.items():
            query = "update snapshots set verified_ns = ? where label = ?"
            db.execute(query, (ns, label))


# -------------------------------------------------------------------------- the pace


class Clock:
    """Time that passes only when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_the_pace_is_kept_whatever_the_steps() -> None:
    """However a file is cut into steps, reading it takes its bytes over the rate."""
    clock = Clock()
    pace = Pace(1000, clock, clock.sleep)
    for nbytes in (1, 999, 0, 2500, 500):
        pace(nbytes)
    assert clock.now_s == pytest.approx(104)


def test_time_that_reading_took_is_not_slept_again() -> None:
    """A step that took a part of its time waits for the rest of it only."""
    clock = Clock()
    pace = Pace(1000, clock, clock.sleep)
    clock.now_s += 0.75
    pace(1000)
    assert clock.slept == [0.25]


def test_what_a_slow_step_lost_is_not_made_up_for() -> None:
    """After a disk that hung the rate is the same as before, and no burst."""
    clock = Clock()
    pace = Pace(1000, clock, clock.sleep)
    clock.now_s += 60
    pace(1000)
    pace(1000)
    assert clock.slept == [1.0]


def test_every_byte_is_paced(
    opened: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of all files are counted, at the rate that was asked for."""
    counted = []

    class Counting:
        def __init__(self, rate: float) -> None:
            assert rate == 7

        def __call__(self, nbytes: int) -> None:
            counted.append(nbytes)

    monkeypatch.setattr(store_module, "Pace", Counting)
    assert list(opened.verify(max_bytes_per_s=7)) == []
    assert sum(counted) == sum(info.nbytes for info in opened.snapshots())


# ---------------------------------------------------------------------- going on


def test_what_was_verified_is_spared(opened: PromptStore, looked_at: list[str]) -> None:
    """A second run has nothing to do within the age, and all of it at age 0."""
    notes: list[tuple[int, int]] = []
    assert verify(opened, progress=lambda *note: notes.append(note)) == []
    assert notes == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert sorted(looked_at) == sorted(PROMPTS)
    notes.clear()
    assert verify(opened, progress=lambda *note: notes.append(note)) == []
    assert notes == [(0, 0)]
    assert len(looked_at) == 3
    verify(opened, max_age_s=0)
    assert len(looked_at) == 6


@pytest.mark.parametrize("n_done", [0, 1, 2])
def test_an_interrupted_run_is_gone_on_with(
    root: Path, opened: PromptStore, looked_at: list[str], n_done: int
) -> None:
    """Whatever ends a run, the next one reads what is left and nothing twice."""

    def interrupt(n: int, _: int) -> None:
        if n == n_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(opened, progress=interrupt)
    assert len(looked_at) == n_done
    with PromptStore.open(root, memory_bytes=0) as other:
        assert verify(other) == []
    assert sorted(looked_at) == sorted(PROMPTS)


def test_those_not_verified_for_longest_come_first(
    root: Path, opened: PromptStore, looked_at: list[str]
) -> None:
    """First what never was, then by time; the age that is spared is the caller's."""
    set_verified(root, base=2 * DAY_NS, tip=None, alone=DAY_NS)
    verify(opened)
    assert looked_at == ["tip", "alone", "base"]


def test_a_clock_that_was_set_back_spares_nothing(
    root: Path, opened: PromptStore, looked_at: list[str]
) -> None:
    """What was verified in the future is verified again, and then it is well."""
    set_verified(root, base=2**62, tip=2**62, alone=2**62)
    verify(opened)
    verify(opened)
    assert len(looked_at) == 3


# ------------------------------------------------------------------------- damage


@pytest.mark.parametrize("victim", ["base", "tip", "alone"])
def test_damage_is_told_and_dropped(
    root: Path, opened: PromptStore, victim: str
) -> None:
    """Row and file go with what continues them, and nothing else does."""
    infos = by_label(opened)
    damage(root, infos[victim])
    (finding,) = verify(opened)
    assert (finding.kind, finding.name) == ("corrupt", infos[victim].id)
    gone = {"base", "tip"} if victim == "base" else {victim}
    assert by_label(opened).keys() == PROMPTS.keys() - gone
    assert not any(path_of(root, infos[label]).exists() for label in gone)
    assert opened.check() == []


def test_a_missing_file_is_damage(root: Path, opened: PromptStore) -> None:
    """A row without its file is told and dropped."""
    path_of(root, by_label(opened)["alone"]).unlink()
    assert [finding.kind for finding in verify(opened)] == ["dangling"]
    assert by_label(opened).keys() == {"base", "tip"}


@pytest.mark.parametrize("how", ["dry run", "read-only"])
def test_looking_changes_nothing(root: Path, how: str) -> None:
    """Neither a dry run nor a read-only store drops or records anything."""
    with PromptStore.open(root, memory_bytes=0, read_only=how == "read-only") as store:
        before = by_label(store)
        damage(root, before["tip"])
        for _ in range(2):
            findings = verify(store, dry_run=how == "dry run")
            assert [finding.name for finding in findings] == [before["tip"].id]
        assert by_label(store) == before
        assert path_of(root, before["tip"]).exists()


def test_what_the_system_refuses_is_told_and_stays(
    root: Path,
    opened: PromptStore,
    looked_at: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An EIO proves nothing: the snapshot is reported, and looked at the next time."""

    def refuse(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert {finding.kind for finding in verify(opened)} == {"unreadable"}
    assert by_label(opened).keys() == PROMPTS.keys()
    assert verify(opened) == []
    assert len(looked_at) == 6


# -------------------------------------------------------------------- beside others


def test_what_is_deleted_meanwhile_is_no_finding(
    root: Path, opened: PromptStore, looked_at: list[str]
) -> None:
    """Another process may take away what is still to be looked at."""

    def delete(n_done: int, _: int) -> None:
        if n_done == 1:
            with PromptStore.open(root, memory_bytes=0) as other:
                other.delete_tenant("")

    assert verify(opened, progress=delete) == []
    assert len(looked_at) == 1


def test_nobody_waits_for_it(
    root: Path, opened: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a file is read, other stores match, insert and delete on the same root."""
    numbers = itertools.count(2000)

    def meanwhile(_: int) -> None:
        with PromptStore.open(root, memory_bytes=0) as other:
            ids = [next(numbers), *BASE[:70]]
            other.insert(NS, ids, kv_of(ids), label="new")
            other.flush()
            assert other.match(NS, [*ids, 1]).n_tokens == len(ids)
            other.delete("new")

    monkeypatch.setattr(store_module, "Pace", lambda rate: meanwhile)
    assert list(opened.verify()) == []
    assert by_label(opened).keys() == PROMPTS.keys()


def test_closing_the_store_ends_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a thread of its own ends at its next step."""
    store = PromptStore.open(root, memory_bytes=0)
    monkeypatch.setattr(store_module, "Pace", lambda rate: lambda _: store.close())
    with pytest.raises(StoreClosed):
        list(store.verify())
    with pytest.raises(StoreClosed):
        store.verify()


def test_a_directory_that_went_away_has_no_damage(root: Path) -> None:
    """Where the whole store was removed, nothing is proven against its snapshots."""
    with PromptStore.open(root, memory_bytes=0, read_only=True) as store:
        shutil.rmtree(root)
        with pytest.raises(StoreUnavailable):
            verify(store)


def test_an_older_index_can_be_verified(root: Path, looked_at: list[str]) -> None:
    """One that is only read, and cannot say when, is verified from the start."""
    with contextlib.closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("alter table snapshots drop column verified_ns")
    with PromptStore.open(root, memory_bytes=0, read_only=True) as store:
        assert verify(store) == []
    assert len(looked_at) == 3


def test_a_store_without_a_disk_is_whole(tmp_path: Path) -> None:
    """The memory tier has nothing to verify."""
    with PromptStore.open(tmp_path, disk_bytes=0) as store:
        assert verify(store) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes_per_s": 0},
        {"max_bytes_per_s": float("nan")},
        {"max_age_s": -1},
        {"max_age_s": float("inf")},
    ],
)
def test_wrong_arguments_are_refused_at_once(
    opened: PromptStore, options: dict[str, float]
) -> None:
    """Not only when the first snapshot is asked for."""
    with pytest.raises(ValueError, match="max_"):
        opened.verify(**options)


# ------------------------------------------------------------------- the page cache


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked")
@pytest.mark.parametrize("was_cached", [False, True])
def test_the_page_cache_is_left_as_it_was(tmp_path: Path, was_cached: bool) -> None:
    """Pages that only the verification read go; pages that others use stay."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not list(pages._absent(file.fileno())):
            pytest.skip("this file system keeps all pages, or cannot tell")
        if was_cached:
            path.read_bytes()
        for _ in range(50):  # the system may keep pages that it has just read
            with left_as_found(path):
                path.read_bytes()
                assert list(pages._absent(file.fileno())) == []
            if bool(list(pages._absent(file.fileno()))) != was_cached:
                break
        else:
            pytest.fail("its pages are never as they were")


def test_a_file_that_cannot_be_opened_is_left_alone(tmp_path: Path) -> None:
    """What is wrong with it is for others to say."""
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("missing", "link", "."):
        with left_as_found(tmp_path / name):
            pass
