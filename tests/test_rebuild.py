"""An index that is damaged, gone or not ours is set aside and made anew."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import arrays_cache, cut_to, fingerprints, kv_of, prints, tokens

from promptstore import (
    Namespace,
    PromptStore,
    StoreTooNew,
    StoreUnavailable,
    UnknownSnapshot,
    WriteFailed,
)
from promptstore.errors import IndexDamaged
from promptstore.index import Index, database
from promptstore.rebuild import adopt
from promptstore.root import Root
from promptstore.snapshot import header, read_contents

NS = Namespace("m")
BASE = [1, *tokens(599)]
TIP = [*BASE, *tokens(100, seed=1)]
BRANCH = [*BASE[:270], *tokens(100, seed=2)]
ALONE = [2, -855241551491862571, *tokens(98)]
PROMPTS = {"base": BASE, "tip": TIP, "branch": BRANCH, "alone": ALONE}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of four labelled prompts, one of them pinned."""
    root = tmp_path_factory.mktemp("healthy") / "store"
    with PromptStore.open(root) as store:
        fill(store)
    return root


def fill(store: PromptStore) -> None:
    for name, ids in PROMPTS.items():
        store.insert(NS, ids, kv_of(ids), label=name, pin=name == "alone")
        store.flush()


@pytest.fixture
def root(tmp_path: Path, healthy: Path) -> Path:
    """A copy of that store."""
    return shutil.copytree(healthy, tmp_path / "store")


@contextlib.contextmanager
def opened(root: Path, **options: Any) -> Iterator[PromptStore]:
    """Open a store that serves from disk alone."""
    with PromptStore.open(root, **{"memory_bytes": 0} | options) as store:
        yield store


def served(store: PromptStore) -> dict[str, int]:
    """Return how much of each prompt is served; all of that is right, bit for bit."""
    found = {}
    for name, ids in PROMPTS.items():
        match = store.match(NS, [*ids, 0])
        if match.cache is not None:
            right = cut_to(kv_of(ids), match.n_tokens)
            assert prints(match.cache) == prints(right)
        found[name] = match.n_tokens
    return found


ALL = {name: len(ids) for name, ids in PROMPTS.items()}


def care(store: PromptStore) -> dict[str | None, bool]:
    """Return the labels, and what is pinned."""
    return {info.label: info.pinned for info in store.snapshots()}


def files(root: Path) -> dict[str, bytes]:
    """Return the snapshots."""
    return {path.name: path.read_bytes() for path in root.rglob("*.safetensors")}


def assert_all_is_well(root: Path, *, store: PromptStore) -> None:
    """All is served, nothing is found, and saving works."""
    assert served(store) == ALL
    assert {finding.kind for finding in store.check()} <= {"foreign"}
    more = [9, *tokens(200, seed=9)]
    store.insert(NS, more, kv_of(more))
    store.flush()
    assert store.match(NS, [*more, 0]).n_tokens == len(more)
    assert not list(root.glob("index.db.new*"))


# ------------------------------------------------------------------------- the damage


def zero_the_first_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:4096] = bytes(4096)
    path.write_bytes(data)


def spoil_the_middle(path: Path) -> None:
    """Put 3,000 random bytes where the rows are (Q05)."""
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as db:
        ((page,),) = db.execute(
            "select rootpage from sqlite_master where name = 'snapshots'"
        )
    at = (page - 1) * 4096
    data[at : at + 3000] = random.Random(5).randbytes(3000)
    path.write_bytes(data)


def put_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "precious").write_text("precious")


def put_a_link(path: Path) -> None:
    target = path.parents[1] / "target.db"
    path.rename(target)
    path.symlink_to(target)


def put_another_programs(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("create table snapshots (id integer primary key, photo blob)")
        db.execute("insert into snapshots values (1, 'precious')")


def lose_the_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("drop table prefixes")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first page zeroed": zero_the_first_page,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "no bytes": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("no database " * 1000),
    "little text": lambda path: path.write_text("no"),
    "garbage in the middle": spoil_the_middle,
    "a directory": put_a_directory,
    "a link": put_a_link,
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "deleted": lambda path: path.unlink(),
    "another program's": put_another_programs,
    "without its tables": lose_the_tables,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_is_made_anew(root: Path, damage: str) -> None:
    """Whatever is in its place, every prompt is served as before, with one warning."""
    before = files(root)
    DAMAGE[damage](root / "index.db")
    with opened(root) as store:
        assert store.stats().errors == {"IndexDamaged": 1}
        assert served(store) == ALL
        assert files(root) == before
        assert_all_is_well(root, store=store)
    with opened(root) as store:
        assert store.stats().errors == {}
        assert served(store) == ALL


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_reader_changes_nothing(root: Path, damage: str) -> None:
    """Read-only it is an error that names the next step; nothing is renamed."""
    DAMAGE[damage](root / "index.db")
    before = sorted(root.rglob("*"))
    with pytest.raises(IndexDamaged, match="open it for writing once") as caught:
        PromptStore.open(root, read_only=True)
    assert caught.value.path == root
    new = set(root.rglob("*")) - set(before)
    assert {path.name for path in new} <= {"index.db-wal", "index.db-shm"}


@pytest.mark.parametrize("damage", ["garbage in the middle", "without its tables"])
def test_what_can_be_read_of_the_old_index_is_kept(root: Path, damage: str) -> None:
    """Labels and pins come from the rows that SQLite still gives."""
    DAMAGE[damage](root / "index.db")
    with opened(root) as store:
        found = care(store)
    if damage == "without its tables":
        assert found == {name: name == "alone" for name in PROMPTS}
    assert found.keys() <= {*PROMPTS, None}


def test_lives_and_hits_survive(root: Path) -> None:
    """When a prompt expires, was used and how often are not in its file."""
    with opened(root) as store:
        assert store.match(NS, [*ALONE, 0]).n_tokens == len(ALONE)
        store.insert(NS, [3, *tokens(99)], kv_of([3, *tokens(99)]), ttl_s=1e6)
        store.flush()
        before = sorted(store.snapshots(), key=lambda info: info.id)
    lose_the_tables(root / "index.db")
    with opened(root) as store:
        assert sorted(store.snapshots(), key=lambda info: info.id) == before


def test_what_is_in_the_log_is_kept(root: Path) -> None:
    """The log goes with the database that is set aside, and is read with it."""
    store = PromptStore.open(root)
    store.insert(NS, [3, *tokens(99)], kv_of([3, *tokens(99)]), label="late")
    store.flush()
    copy = shutil.copytree(root, root.parent / "copy")
    store.close()
    assert (copy / "index.db-wal").stat().st_size
    with closing(Index(copy / "index.db")) as index:
        with index.transaction():
            index._db.execute("drop table prefixes")
        shutil.copytree(copy, root.parent / "killed")
    with opened(root.parent / "killed") as store:
        assert "late" in care(store)


def test_pages_without_a_row_are_no_rows(root: Path) -> None:
    """A label of a wrong type, or none that could be inserted, is not taken over."""
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("pragma ignore_check_constraints = on")
        db.execute("update snapshots set label = '  ' where label = 'tip'")
        db.execute("update snapshots set pinned = 7 where label = 'base'")
        db.execute("drop table prefixes")
    with opened(root) as store:
        assert care(store).keys() == {"branch", "alone", None}
        assert served(store) == ALL


def test_every_kind_of_chain_comes_back(tmp_path: Path) -> None:
    """States with their checkpoints, prompts that are only whole, and tenants."""
    whole = Namespace("n", exact_until="50")
    tenants = [Namespace("m", tenant=name) for name in ("a", "b")]
    ids = tokens(300)
    with opened(tmp_path, min_tokens=1) as store:
        for end in (100, 300):
            store.insert(NS, ids[:end], arrays_cache(end))
        for end in (40, 300):
            store.insert(whole, ids[:end], kv_of(ids[:end]))
        for number, tenant in enumerate(tenants):
            store.insert(tenant, [number, *ids], kv_of([number, *ids]))
        store.flush()
        before = {(i.id, i.parent, i.start, i.end, i.nbytes) for i in store.snapshots()}
    (tmp_path / "index.db").unlink()
    with opened(tmp_path, min_tokens=1) as store:
        after = {(i.id, i.parent, i.start, i.end, i.nbytes) for i in store.snapshots()}
        assert after == before
        for end in (100, 300):
            match = store.match(NS, [*ids[:end], 0])
            assert match.cache is not None
            expected = fingerprints(arrays_cache(end), end)
            assert fingerprints(match.cache, end) == expected
        assert store.match(whole, [*ids, 0]).n_tokens == 300
        assert store.match(whole, [*ids[:200], 0]).n_tokens == 40
        for number, tenant in enumerate(tenants):
            assert store.match(tenant, [number, *ids, 0]).n_tokens == 301
            assert store.match(tenant, [1 - number, *ids, 0]).n_tokens == 0
        assert store.check() == []


# --------------------------------------------------------------- what is set aside


def test_one_damaged_index_is_kept(root: Path) -> None:
    """The one that was set aside is replaced by the next: they cannot fill the disk."""
    for text in ("first " * 1000, "second " * 1000):
        (root / "index.db").write_text(text)
        opened(root).__enter__().close()
        assert (root / "index.db.damaged").read_text() == text
    assert len(list(root.glob("index.db.*"))) == 1


@pytest.mark.parametrize("damage", ["a directory", "a link", "another program's"])
def test_what_is_somebody_elses_is_never_removed(root: Path, damage: str) -> None:
    """It is renamed with all that is in it, however often, and counts in the budget."""
    for _ in range(2):
        DAMAGE[damage](root / "index.db")
        with opened(root) as store:
            store.repair(store.check())
    with opened(root) as store:
        store.evict(to_bytes=0)
    aside = [root / f"index.db.foreign-{n}" for n in (1, 2)]
    assert all(os.path.lexists(path) for path in aside)
    if damage == "a directory":
        assert [(path / "precious").read_text() for path in aside] == ["precious"] * 2
    if damage == "a link":
        assert [path.is_symlink() for path in aside] == [True, True]
        assert (root.parent / "target.db").is_file()


@pytest.mark.parametrize("damage", ["a directory", "a link", "another program's"])
def test_without_snapshots_of_ours_it_is_left_where_it_is(
    tmp_path: Path, damage: str
) -> None:
    """The directory may be another program's, which has its database open."""
    root = tmp_path / "root"
    PromptStore.open(root).close()
    DAMAGE[damage](root / "index.db")
    with pytest.raises(StoreUnavailable):
        PromptStore.open(root)
    assert not list(root.glob("index.db.foreign*"))


def test_an_older_copy_of_the_index_costs_no_file(root: Path) -> None:
    """Its rows without files keep no files without rows from being found: it is made
    anew (a backup that was put back, or another store's index)."""
    old = (root / "index.db").read_bytes()
    with opened(root) as store:
        for name in list(ALL):
            with contextlib.suppress(UnknownSnapshot):
                store.delete(name)
        assert files(root) == {}
        fill(store)
    n_files = len(files(root))
    (root / "index.db").write_bytes(old)
    with opened(root) as store:
        more = [9, *tokens(99, seed=9)]
        store.insert(NS, more, kv_of(more))
        store.flush()
        assert len(files(root)) == n_files + 1
        assert served(store) == ALL
        assert store.check() == []


def test_our_index_without_its_list_of_migrations_is_ours(root: Path) -> None:
    """It tells of prompts: a deletion removes it too."""
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("delete from _sqlite_migrations")
    with opened(root) as store:
        assert (root / "index.db.damaged").exists()
        store.delete("alone")
    assert not list(root.glob("index.db.*"))


def test_it_counts_and_goes_first(root: Path) -> None:
    """Nothing good is evicted while a damaged index lies there."""
    (root / "index.db").write_bytes(bytes(1 << 20))
    with opened(root) as store:
        total = store.stats().disk_bytes
        assert total > 1 << 20
        store.evict(to_bytes=total - 1)
        assert served(store) == ALL
        assert not (root / "index.db.damaged").exists()


def test_delete_reaches_it(root: Path) -> None:
    """A damaged index tells of the prompt as well."""
    lose_the_tables(root / "index.db")
    with opened(root) as store:
        assert (root / "index.db.damaged").exists()
        store.delete("alone")
        assert not (root / "index.db.damaged").exists()


def test_a_directory_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    """Where there never was a store, a file of that name is somebody else's."""
    with closing(sqlite3.connect(tmp_path / "index.db")) as db, db:
        db.execute("create table photos (id integer)")
    before = (tmp_path / "index.db").read_bytes()
    with pytest.raises(StoreUnavailable, match="another program's"):
        PromptStore.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.db"]
    assert (tmp_path / "index.db").read_bytes() == before


# --------------------------------------------------------- healthy, and in trouble


def test_an_index_that_is_locked_is_left_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock proves nothing: the error says so, and it opens once the lock is gone."""
    monkeypatch.setitem(database._OPTIONS, "timeout", 0.0)
    inode = (root / "index.db").stat().st_ino
    with closing(sqlite3.connect(root / "index.db", isolation_level=None)) as db:
        db.execute("pragma locking_mode = exclusive")
        db.execute("begin exclusive")
        with pytest.raises(StoreUnavailable, match="locked") as caught:
            PromptStore.open(root)
        assert not isinstance(caught.value, IndexDamaged)
        db.execute("rollback")
    with opened(root) as store:
        assert (root / "index.db").stat().st_ino == inode
        assert care(store) == {name: name == "alone" for name in PROMPTS}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (sqlite3.SQLITE_FULL, "database or disk is full"),
        (sqlite3.SQLITE_IOERR, "disk I/O error"),
        (sqlite3.SQLITE_CANTOPEN, "unable to open database file"),
        (sqlite3.SQLITE_READONLY, "attempt to write a readonly database"),
        (sqlite3.SQLITE_BUSY, "database is locked"),
    ],
)
def test_what_the_system_refuses_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    """At the opening it is an error, later a miss; the index is where it was."""
    inode = (root / "index.db").stat().st_ino

    def refuse(*_: object) -> None:
        error = sqlite3.OperationalError(message)
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(database, "_applied", refuse)
        with pytest.raises(StoreUnavailable, match=message) as caught:
            PromptStore.open(root)
        assert not isinstance(caught.value, IndexDamaged)
    with opened(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr("promptstore.index.search.Search.run", refuse)
            assert set(served(store).values()) == {0}
        assert served(store) == ALL
    assert (root / "index.db").stat().st_ino == inode


FULL = """
import resource, sys
from pathlib import Path
from promptstore import PromptStore, StoreUnavailable
from promptstore.errors import IndexDamaged
root = Path(sys.argv[1])
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    PromptStore.open(root).close()
    print("opened")
except StoreUnavailable as error:
    print("refused", isinstance(error, IndexDamaged))
"""


@pytest.mark.parametrize(
    ("is_damaged", "limit"), [(False, 0), (True, 0), (True, 40_000), (True, 80_000)]
)
def test_a_disk_that_is_full_costs_no_index(
    root: Path, is_damaged: bool, limit: int
) -> None:
    """A healthy index stays; a damaged one is not set aside before there is another."""
    if is_damaged:
        zero_the_first_page(root / "index.db")
    before = (root / "index.db").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(root), str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "refused False\n"
    assert not list(root.glob("index.db.*"))
    assert (root / "index.db").read_bytes() == before
    with opened(root) as store:
        assert_all_is_well(root, store=store)


def test_a_newer_index_is_never_rebuilt(root: Path) -> None:
    """It is refused before anything is asked of it, at run time as well."""
    sql = "insert into _sqlite_migrations values (99, 'promptstore.index', 'm999', '')"
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute(sql)
        db.execute("drop table prefixes")
    inode = (root / "index.db").stat().st_ino
    with pytest.raises(StoreTooNew):
        PromptStore.open(root)
    assert (root / "index.db").stat().st_ino == inode
    assert not list(root.glob("index.db.*"))


def test_a_migration_whose_name_is_spoilt_is_not_a_newer_one(root: Path) -> None:
    """A newer version has all that this one has, and more."""
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute(
            "update _sqlite_migrations set name = 'm001_snarshots' "
            "where name = 'm001_snapshots'"
        )
    with opened(root) as store:
        assert_all_is_well(root, store=store)


# -------------------------------------------------------------- an index that lies


def test_the_index_of_another_store_loses_nothing(root: Path, tmp_path: Path) -> None:
    """Rows without files go, files without rows get theirs, at the first save."""
    other = tmp_path / "other"
    ids = [5, *tokens(99)]
    with opened(other) as store:
        store.insert(NS, ids, kv_of(ids))
    shutil.copyfile(other / "index.db", root / "index.db")
    with opened(root) as store:
        assert store.match(NS, [*ids, 0]).n_tokens == 0
        assert_all_is_well_after_a_save(root, store)


def assert_all_is_well_after_a_save(root: Path, store: PromptStore) -> None:
    before = files(root)
    more = [9, *tokens(200, seed=9)]
    store.insert(NS, more, kv_of(more))
    store.flush()
    assert served(store) == ALL
    after = files(root)
    assert {name: after[name] for name in before} == before
    assert store.check() == []


@pytest.mark.parametrize("mend", ["save", "repair", "evict"])
def test_a_lost_log_loses_nothing(root: Path, mend: str) -> None:
    """Files whose rows were in the log are good, and get rows again (Q07)."""
    other = [5, *tokens(299)]
    store = PromptStore.open(root)
    store.insert(NS, other, kv_of(other))
    store.flush()
    copy = shutil.copytree(root, root.parent / "copy")
    store.close()
    (copy / "index.db-wal").unlink()
    with opened(copy) as store:
        assert store.match(NS, [*other, 0]).n_tokens == 0
        if mend == "save":
            assert_all_is_well_after_a_save(copy, store)
        elif mend == "repair":
            findings = store.check()
            assert [finding.kind for finding in findings] == ["orphan"]
            store.repair(findings)
        else:
            store.evict(to_bytes=store.stats().disk_bytes)
        assert store.match(NS, [*other, 0]).n_tokens == len(other)
        assert store.check() == []


def test_a_row_whose_name_is_a_path_touches_nothing_outside(root: Path) -> None:
    """It is no row of ours: the index is made anew, and the file out there stays."""
    name = ("../" * 8 + "outside")[-32:].rjust(32, "/")
    outside = root.parent / "outside.safetensors"
    outside.write_text("precious")
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("drop trigger snapshots_are_immutable")
        db.execute("update snapshots set name = ? where label = 'alone'", (name,))
    with opened(root) as store:
        findings = store.check()
        assert "index" in {finding.kind for finding in findings}
        store.repair(findings)
        store.evict(to_bytes=store.stats().disk_bytes - 1)
        assert store.check() == []
    assert outside.read_text() == "precious"
    with opened(root) as store:
        assert {len(info.id) for info in store.snapshots()} == {32}
        assert not any("/" in info.id for info in store.snapshots())


def test_eviction_makes_no_path_of_a_name_that_is_none(root: Path) -> None:
    """Whoever evicts finds such a row before a file is touched; all can be evicted."""
    name = ("../" * 8 + "outside")[-32:].rjust(32, "/")
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("drop trigger snapshots_are_immutable")
        db.execute("update snapshots set name = ? where label = 'tip'", (name,))
    with opened(root) as store:
        store.unpin("alone")
        store.evict(to_bytes=0)
        assert store.stats().errors == {"IndexDamaged": 1}
        assert files(root) == {}
        assert store.check() == []


# ------------------------------------------------- files that come and go meanwhile


def test_a_file_that_goes_while_it_is_adopted_gets_no_row(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may just be removing it: no row must point nowhere."""
    with opened(root) as store:
        gone = [info.id for info in store.snapshots() if info.label == "alone"]

    def remove(step: str) -> None:
        if step == "rebuild: row added":
            Root(root).unlink(gone[0])

    (root / "index.db").unlink()
    monkeypatch.setattr("promptstore.failpoints.hook", remove)
    with opened(root) as store:
        assert store.check() == []
        assert served(store) == ALL | {"alone": 0}


def test_a_file_that_is_adopted_while_it_is_removed_goes_for_good(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its row and itself: what was removed gets no row again."""
    with opened(root) as store, closing(Index(root / "index.db")) as other:
        real = Root.unlink

        def adopted_first(self: Root, name: str) -> int:
            adopt(other, self, self.snapshots())
            return real(self, name)

        monkeypatch.setattr(Root, "unlink", adopted_first)
        store.delete("alone")
        store.delete("base")
        assert list(store.snapshots()) == store.check() == []
        assert files(root) == {}


def test_what_was_removed_stays_so_in_an_index_that_is_made_anew(root: Path) -> None:
    """A deletion that was killed before the file went is not undone by a rebuild."""
    kept = {path: path.read_bytes() for path in Root(root).snapshots()}
    with opened(root) as store:
        store.delete("alone")
    for path, data in kept.items():
        path.write_bytes(data)
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("drop trigger snapshots_are_immutable")
        db.execute("update snapshots set tokens = x'00' where label = 'tip'")
    with opened(root) as store:
        assert served(store) == ALL | {"alone": 0}
        assert store.stats().errors == {"IndexDamaged": 1}
        store.repair(store.check())
        assert store.check() == []
        assert served(store) == ALL | {"alone": 0}


def test_a_deletion_outlives_an_index_that_is_made_anew_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process put in the index's place knows nothing of it: once more."""
    path = root / "index.db"
    old = path.read_bytes()
    done: list[str] = []

    def replace_index(step: str) -> None:
        if step == "remove: rows gone" and not done:
            done.append(step)
            for suffix in ("", "-wal", "-shm"):
                os.rename(f"{path}{suffix}", f"{path}.damaged{suffix}")
            path.write_bytes(old)

    with opened(root) as store:
        monkeypatch.setattr("promptstore.failpoints.hook", replace_index)
        assert store.delete("alone") == 2
        assert done
        assert served(store) == ALL | {"alone": 0}
        assert store.check() == []
    assert not list(root.glob("index.db.*"))


def test_what_continues_an_unreadable_file_is_left_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sweep takes it for lost: it is adopted once all can be read (C09)."""
    with opened(root) as store:
        (base,) = [info.id for info in store.snapshots() if info.label == "base"]
    n_files = len(files(root))
    (root / "index.db").unlink()
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if Path(os.fspath(path)).stem == base:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **options)

    more = [9, *tokens(99, seed=9)]
    with opened(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            store.insert(NS, more, kv_of(more))
            store.flush()
        assert len(files(root)) == n_files + 1
        store.repair(store.check())
        assert store.check() == []
        assert served(store) == ALL


def test_a_file_that_is_being_made_is_not_adopted(root: Path) -> None:
    """Whoever makes it adds its row, or removes it again."""
    with opened(root) as store:
        (name,) = [info.id for info in store.snapshots() if info.label == "alone"]
    (root / "index.db").unlink()
    with Root(root).path_of(name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with opened(root) as store:
            assert served(store) == ALL | {"alone": 0}
            assert store.check() == []
    with opened(root) as store:
        store.repair(store.check())
        assert served(store) == ALL


EDITS = [
    "checksums = cast(substr(checksums, 1, 32) || zeroblob(32) as blob)",
    "checksums = substr(checksums, 1, 32)",
    "nbytes = nbytes + 1",
    "extent = '{}'",
    "extent = '[[[[]]]]'",
    "tokens = x'00'",
    "tokens = zeroblob(length(tokens))",
    "first_token = 77",
    "name = replace(name, substr(name, 1, 1), 'Z')",
    "parent = id",
    "end_digest = zeroblob(16)",
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_row_that_lies_is_put_right_by_repair(root: Path, edit: str) -> None:
    """Every file is whole, so nothing is dropped whatever its row says."""
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("pragma ignore_check_constraints = on")
        db.execute("drop trigger snapshots_are_immutable")
        db.execute(f"update snapshots set {edit} where label = 'base'")
    before = files(root)
    with opened(root) as store:
        findings = store.check()
        assert findings or store.stats().errors  # SQLite may find it at the opening
        store.repair(findings)
        assert served(store) == ALL
        assert files(root) == before
        assert store.check() == []


@pytest.mark.parametrize("edit", EDITS[:4])
def test_a_file_that_contradicts_its_row_is_not_dropped(root: Path, edit: str) -> None:
    """A match that meets such a row takes it for the index's fault, not the file's."""
    with closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("drop trigger snapshots_are_immutable")
        db.execute(f"update snapshots set {edit} where label = 'base'")
    before = files(root)
    with opened(root) as store:
        served(store)
        assert served(store) == ALL
        assert files(root) == before
        assert store.stats().errors["IndexDamaged"] == 1
        assert care(store) == {name: name == "alone" for name in PROMPTS}


def test_a_damaged_file_is_dropped_whatever_the_index(root: Path) -> None:
    """Rebuilding does not bring back what does not verify, or what continued it."""
    with opened(root) as store:
        (info,) = [each for each in store.snapshots() if each.label == "base"]
    path = Root(root).path_of(info.id)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    zero_the_first_page(root / "index.db")
    with opened(root) as store:
        store.repair(store.check())
        assert store.check() == []
        assert served(store) == ALL | {"base": 0, "tip": 0, "branch": 0}
        assert len(files(root)) == 1


def test_a_whole_file_that_the_old_index_did_not_know_so_is_dropped(root: Path) -> None:
    """Anybody can write a file that is whole; the row had another header's checksum."""
    with opened(root) as store:
        (name,) = [info.id for info in store.snapshots() if info.label == "alone"]
    path = Root(root).path_of(name)
    contents, _, written = read_contents(path)
    head = header.build(replace(contents, writer="else"), written.checksums[16:])
    data = path.read_bytes()
    path.write_bytes(head + data[-contents.shape.data_nbytes :])
    read_contents(path)
    lose_the_tables(root / "index.db")
    with opened(root) as store:
        assert served(store) == ALL | {"alone": 0}
        assert not path.exists()
        assert store.check() == []


def test_a_file_that_lies_about_its_tokens_gets_no_row(root: Path) -> None:
    """A digest that does not follow from the chain is that of another prompt."""
    with opened(root) as store:
        names = {info.label: info.id for info in store.snapshots()}
    tip = Root(root).path_of(names["tip"])
    base = Root(root).path_of(names["base"])
    base.unlink()  # and the tip, whole as it is, continues nothing
    (root / "index.db").unlink()
    with opened(root) as store:
        assert served(store) == ALL | {"base": 0, "tip": 0, "branch": 0}
        assert tip.exists()  # an orphan until the first save
        assert {finding.kind for finding in store.check()} == {"orphan"}
        store.repair(store.check())
        assert store.check() == []


# ------------------------------------------------------------------- while it is open


def break_while_open(path: Path) -> None:
    """Spoil every page but the first of a database that others have open."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(4096)
        file.write(random.Random(3).randbytes(size - 4096))


@pytest.mark.parametrize("damage", ["spoilt", "deleted", "replaced", "text"])
def test_damage_while_the_store_is_open(
    root: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The operation that meets it goes on with a new index, or the next one does."""
    path = root / "index.db"
    with opened(root) as store:
        assert served(store) == ALL
        if damage == "spoilt":
            break_while_open(path)
            # What SQLite has read already must be read again.
            store._disk.index._db.execute("pragma shrink_memory")  # type: ignore
            store._disk.volume.writer._db.execute("pragma shrink_memory")  # type: ignore
        elif damage == "deleted":
            path.unlink()
        else:
            path.unlink()
            path.write_text("text " * (1000 if damage == "text" else 0))
        with caplog.at_level(logging.WARNING):
            served(store)
            assert served(store) == ALL
            assert_all_is_well(root, store=store)
        assert store.stats().errors == {"IndexDamaged": 1}
        assert len(caplog.records) == 1


def test_an_insert_that_meets_damage_is_durable(root: Path) -> None:
    """The writer makes the index anew and writes again; flush raises nothing."""
    more = [7, *tokens(200, seed=7)]
    with opened(root) as store:
        (root / "index.db").unlink()
        store.insert(NS, more, kv_of(more))
        store.flush()
        assert_all_is_well(root, store=store)
    with opened(root) as store:
        assert store.match(NS, [*more, 0]).n_tokens == len(more)


def test_other_connections_open_anew(root: Path) -> None:
    """A store that rebuilds is followed by those that are open beside it."""
    more = [7, *tokens(200, seed=7)]
    with opened(root) as first, opened(root) as second:
        (root / "index.db").unlink()
        assert served(first) == ALL
        first.insert(NS, more, kv_of(more))
        first.flush()
        assert served(second) == ALL
        assert second.match(NS, [*more, 0]).n_tokens == len(more)
        assert second.stats().errors == {}
        other = [8, *tokens(200, seed=8)]
        second.insert(NS, other, kv_of(other))
        second.flush()
        assert first.match(NS, [*other, 0]).n_tokens == len(other)
        assert first.check() == second.check() == []


BESIDE = """
import sys
from builders import kv_of
from test_rebuild import ALL, NS, opened, served, tokens
from pathlib import Path

with opened(Path(sys.argv[1])) as store:
    assert served(store) == ALL
    print("ready", flush=True)
    sys.stdin.readline()
    more = [7, *tokens(200, seed=7)]
    store.insert(NS, more, kv_of(more))
    store.flush()
    served(store)
    assert served(store) == ALL, served(store)
    assert store.check() == []
    print("done", flush=True)
    sys.stdin.readline()
"""


def child(code: str, *args: object) -> subprocess.Popen[str]:
    """Start a process that can import the tests."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


@pytest.mark.parametrize("damage", ["deleted", "text"])
def test_damage_while_another_process_has_it_open(root: Path, damage: str) -> None:
    """Both end in one new index, and each finds what the other stores."""
    with child(BESIDE, root) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with opened(root) as store:
            (root / "index.db").unlink()
            if damage == "text":
                (root / "index.db").write_text("text")
            other.stdin.write("go\n")
            other.stdin.flush()
            served(store)
            assert served(store) == ALL
            assert other.stdout.readline() == "done\n"
            assert store.match(NS, [7, *tokens(200, seed=7), 0]).n_tokens == 201
            assert store.check() == []
        other.stdin.close()
    assert other.returncode == 0


def test_many_threads_meet_damage_at_once(root: Path) -> None:
    """One opens anew, the others wait for it; it is told once."""
    with opened(root) as store:
        assert store._disk is not None
        (root / "index.db").unlink()
        barrier = threading.Barrier(8)
        trouble: list[BaseException] = []

        def ask() -> None:
            barrier.wait()
            try:
                store.explain(NS, [*TIP, 0])
            except BaseException as error:
                trouble.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert trouble == []
        assert store.stats().errors == {"IndexDamaged": 1}
        assert served(store) == ALL


def test_no_lock_is_held_while_it_is_opened_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 11: the volume's own lock is free while files are read."""
    with opened(root) as store:
        assert store._disk is not None
        volume = store._disk.volume
        real, held = volume._open, []

        def watch(*args: Any) -> None:
            held.append(volume._lock.locked())
            real(*args)

        monkeypatch.setattr(volume, "_open", watch)
        (root / "index.db").unlink()
        assert served(store) == ALL
        assert held == [False]


def test_a_rebuild_that_fails_slowly_rests(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk in trouble does not cost every request a rebuild, and is tried again."""
    now = [0.0]
    monkeypatch.setattr("promptstore.volume.time.monotonic", lambda: now[0])
    with opened(root) as store:
        assert store._disk is not None
        n_tries = 0

        def fail(*_: Any) -> None:
            nonlocal n_tries
            n_tries += 1
            now[0] += 1.0
            raise StoreUnavailable(root, "no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store._disk.volume, "_open", fail)
            (root / "index.db").unlink()
            assert set(served(store).values()) == {0}
        assert n_tries == 1
        assert set(served(store).values()) == {0}
        now[0] += 10.0
        assert served(store) == ALL


def test_what_is_remembered_of_an_old_index_means_nothing(root: Path) -> None:
    """No id of a snapshot or a layout is in both: a use that was noted, or a removal
    that was on its way, meets no other snapshot."""
    path = root / "index.db"
    ids = []
    for _ in range(2):
        with closing(Index(path)) as index:
            rows = index.rows()
            ids.append({row.id for row in rows} | {row.layout for row in rows})
        path.unlink()
        opened(root).__enter__().close()
    assert not ids[0] & ids[1]


# ------------------------------------------------------------------------ crashes

CRASH = """
import os, sys
from pathlib import Path
from promptstore import PromptStore, failpoints

root, step, n_more = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def stop(name):
    global n_more
    if name == step:
        n_more -= 1
        if n_more < 0:
            os._exit(42)

failpoints.hook = stop
PromptStore.open(root)
"""


@pytest.mark.parametrize(
    "damage", ["garbage in the middle", "deleted", "without its tables"]
)
@pytest.mark.parametrize(
    ("step", "n_more"),
    [
        ("open: lock taken", 0),
        ("open: index made", 0),
        ("migrate: begun", 0),
        ("migrate: committed", 0),
        ("rebuild: new index made", 0),
        ("rebuild: row added", 0),
        ("rebuild: row added", 3),
        ("rebuild: index set aside", 0),
        ("rebuild: index in its place", 0),
        ("open: log switched on", 1),
    ],
)
def test_a_crash_in_a_rebuild(root: Path, damage: str, step: str, n_more: int) -> None:
    """Whoever opens it next finds the old state or the new one, and no remains."""
    DAMAGE[damage](root / "index.db")
    code = [sys.executable, "-c", CRASH, str(root), step, str(n_more)]
    assert subprocess.run(code, check=False).returncode == 42
    with opened(root) as store:
        assert_all_is_well(root, store=store)
        if damage == "without its tables":
            expected = {name: name == "alone" for name in PROMPTS}
            assert expected.items() <= care(store).items()


# -------------------------------------------------------------------------- mayhem


def spoil(path: Path, rng: random.Random) -> None:
    """Do to a file what disks and people do: bits, pages, its end, or another's."""
    data = bytearray(path.read_bytes())
    way = rng.randrange(5) if len(data) > 4096 else 0
    if way == 0:
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == 1:
        at, n = rng.randrange(len(data)), rng.choice([1, 16, 3000, 4096])
        data[at : at + n] = rng.randbytes(len(data[at : at + n]))
    elif way == 2:
        at = rng.randrange(len(data) // 4096) * 4096
        data[at : at + 4096] = bytes(4096)
    elif way == 3:
        data = data[: rng.randrange(1, len(data))]
    else:
        first, second = (rng.randrange(len(data) // 4096) * 4096 for _ in range(2))
        data[first : first + 4096] = data[second : second + 4096]
    with path.open("r+b") as file:  # the same inode: others may have it open
        file.write(data)
        file.truncate(len(data))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_mayhem(root: Path, seed: int, is_open: bool) -> None:
    """Whatever is done to the index, nothing wrong is served and no file is lost."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", seed))
    print(f"PROMPTSTORE_SEED={seed}")
    rng = random.Random(seed)
    before = files(root)
    with opened(root) if is_open else contextlib.nullcontext() as store:
        if store is not None and rng.random() < 0.5:
            served(store)
        for _ in range(rng.randrange(1, 3)):
            spoil(root / "index.db", rng)
        if store is not None:
            served(store)
            store.insert(NS, ALONE, kv_of(ALONE))
            with contextlib.suppress(WriteFailed):
                store.flush()
    with opened(root) as store:
        served(store)
        store.repair(store.check())
        assert store.check() == []
        assert served(store) == ALL
        if not is_open:  # else one may have been stored twice, and is there once now
            assert files(root) == before
        assert_all_is_well(root, store=store)
