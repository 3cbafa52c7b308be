"""Facts about how the index file is made, kept up to date, and refused."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from promptstore.migrations import NAMES, migrations
from sqlite_utils import Database, Migrations

from promptstore import PromptStore, StoreTooNew, StoreUnavailable
from promptstore.index import Index, database, locked, prepare

# Append only: an index that was made by a released version has these names in it.
RELEASED = ("m001_snapshots", "m002_care")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def path(root: Path) -> Path:
    make(root)
    return root / "index.db"


def make(root: Path) -> None:
    with locked(root / "store.lock"):
        prepare(root / "index.db")


def query(path: Path, sql: str, *args: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(sql, args).fetchall()


def schema(path: Path) -> list[tuple[Any, ...]]:
    return query(path, "select type, name, sql from sqlite_master order by 1, 2")


def applied(path: Path) -> list[str]:
    return [name for (name,) in query(path, "select name from _sqlite_migrations")]


def contents(root: Path) -> dict[str, str]:
    """The name and the digest of every file under *root*."""
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def modes(root: Path) -> dict[str, str]:
    return {
        file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in root.iterdir()
    }


# ----------------------------------------------------------------------- names


def test_names_are_append_only() -> None:
    """Every released migration is still there, first and in order."""
    assert NAMES[: len(RELEASED)] == RELEASED


def test_names_are_numbered_without_gaps() -> None:
    """Names sort as they are applied: m001, m002, and so on."""
    numbers = []
    for name in NAMES:
        found = re.fullmatch(r"m(\d{3})_[a-z_]+", name)
        assert found is not None
        numbers.append(int(found[1]))
    assert numbers == list(range(1, len(NAMES) + 1))


def test_what_is_registered_is_what_is_known(path: Path) -> None:
    """The names that are refused or not are those that are applied."""
    assert list(NAMES) == applied(path)
    registered = migrations.index_migrations.applied(Database(path))
    assert list(NAMES) == [migration.name for migration in registered]
    assert list(migrations.index_migrations.pending(Database(path))) == []


# ------------------------------------------------------------------- from blank


def test_an_index_is_made_from_nothing(path: Path) -> None:
    """A blank file gets all tables, strict, and is in WAL mode."""
    tables = query(
        path,
        "select name, strict from pragma_table_list where schema = 'main' "
        "and name not like 'sqlite_%' and name not like '_sqlite_%' order by 1",
    )
    assert tables == [
        ("layouts", 1),
        ("namespaces", 1),
        ("prefixes", 1),
        ("removed", 1),
        ("sightings", 1),
        ("snapshots", 1),
        ("writes", 1),
    ]
    assert query(path, "pragma journal_mode") == [("wal",)]
    assert query(path, "pragma integrity_check") == [("ok",)]


def test_an_empty_file_is_a_blank_index(root: Path) -> None:
    """A file that a crash left without a byte is filled."""
    (root / "index.db").touch()
    make(root)
    assert list(NAMES) == applied(root / "index.db")


def test_making_it_again_changes_nothing(path: Path) -> None:
    """A current index is left as it is."""
    expected = contents(path.parent)
    make(path.parent)
    assert expected == contents(path.parent)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_files_are_their_owners(root: Path, umask: int) -> None:
    """Index, log, shared memory and lock are 0600 whatever the umask."""
    before = os.umask(umask)
    try:
        make(root)
        index = Index(root / "index.db")
        with index.transaction():
            index._db.execute("insert into namespaces values (1, zeroblob(16), '{}')")
        assert modes(root) == dict.fromkeys(
            ["index.db", "index.db-shm", "index.db-wal", "store.lock"], "0o600"
        )
        index.close()
    finally:
        os.umask(before)


def test_a_file_that_all_could_read_is_closed_to_them(path: Path) -> None:
    """An index whose mode somebody widened gets its mode back."""
    path.chmod(0o644)
    make(path.parent)
    assert modes(path.parent)["index.db"] == "0o600"


@pytest.mark.parametrize("umask", [0, 0o022])
def test_directories_of_a_store_are_their_owners(tmp_path: Path, umask: int) -> None:
    """A fresh root and what is under it are 0700 whatever the umask."""
    before = os.umask(umask)
    try:
        PromptStore.open(tmp_path / "store").close()
    finally:
        os.umask(before)
    found = [tmp_path / "store", tmp_path / "store" / "snapshots"]
    assert [stat.S_IMODE(at.stat().st_mode) for at in found] == [0o700, 0o700]


# ---------------------------------------------------------------------- newer


@pytest.fixture
def newer(path: Path) -> Iterator[Path]:
    sql = "insert into _sqlite_migrations values (?, 'promptstore.index', ?, '2099')"
    columns = query(path, "select name from pragma_table_info('_sqlite_migrations')")
    assert [name for (name,) in columns][1:3] == ["migration_set", "name"]
    query(path, sql, 1000, "m999_from_the_future")
    return path


def test_a_newer_index_is_refused_and_left_alone(newer: Path) -> None:
    """The error names what is unknown, and not a byte of the directory changes."""
    expected = contents(newer.parent)
    for ask in (lambda: make(newer.parent), lambda: Index(newer)):
        with pytest.raises(StoreTooNew, match="newer promptstore") as caught:
            ask()
        assert caught.value.unknown == ("m999_from_the_future",)
    assert expected == contents(newer.parent)


def test_a_newer_store_does_not_open(newer: Path) -> None:
    """`open` gives the one clear error, and changes nothing."""
    expected = contents(newer.parent)
    with pytest.raises(StoreTooNew, match="m999_from_the_future"):
        PromptStore.open(newer.parent)
    assert expected == contents(newer.parent)


def test_a_newer_store_does_not_open_for_reading(newer: Path) -> None:
    """Reading it is refused as well. SQLite may leave its two companions, empty."""
    expected = contents(newer.parent)
    with pytest.raises(StoreTooNew, match="m999_from_the_future"):
        PromptStore.open(newer.parent, read_only=True)
    after = contents(newer.parent)
    assert expected == {name: after[name] for name in expected}
    assert set(after) - set(expected) <= {"index.db-wal", "index.db-shm"}
    assert set(modes(newer.parent).values()) == {"0o600"}


def test_another_programs_migrations_are_none_of_ours(path: Path) -> None:
    """Names of another set in the same table are no newer version."""
    sql = "insert into _sqlite_migrations values (1000, 'other.set', 'm999_x', '2099')"
    query(path, sql)
    make(path.parent)
    Index(path).close()


# -------------------------------------------------------------- failing steps


def with_step(monkeypatch: pytest.MonkeyPatch, name: str, sql: str) -> None:
    """Add one more migration to those that this version has."""
    steps = Migrations("promptstore.index")
    folder = Path(migrations.__file__).parent
    for known in NAMES:
        text = (folder / f"{known}.sql").read_text()
        steps(name=known)(lambda db, text=text: db.executescript(text))
    steps(name=name)(lambda db: db.executescript(sql))
    monkeypatch.setattr(migrations, "index_migrations", steps)
    monkeypatch.setattr(database, "NAMES", (*NAMES, name))


HALF = "create table half (id integer); create index x on half (id); select nonsense;"


def test_a_failing_step_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a blank file the earlier, good steps are undone as well; it can be retried."""
    with monkeypatch.context() as patch:
        with_step(patch, "m002_bad", HALF)
        with pytest.raises(StoreUnavailable, match="nonsense"):
            make(root)
    assert schema(root / "index.db") == []
    make(root)
    assert list(NAMES) == applied(root / "index.db")


def test_a_failing_step_leaves_an_older_index_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, rows and names are those from before; the old version still opens it."""
    query(path, "insert into namespaces values (1, zeroblob(16), '{}')")
    before = schema(path)
    with monkeypatch.context() as patch:
        with_step(patch, "m002_bad", "delete from namespaces;" + HALF)
        with pytest.raises(StoreUnavailable, match="nonsense"):
            make(path.parent)
    assert before == schema(path)
    assert list(NAMES) == applied(path)
    assert query(path, "select id from namespaces") == [(1,)]
    make(path.parent)
    Index(path).close()


def test_a_good_step_is_applied_to_an_older_index(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stay, the new name is in the table, and older programs then refuse it."""
    query(path, "insert into namespaces values (1, zeroblob(16), '{}')")
    with monkeypatch.context() as patch:
        with_step(patch, "m002_good", "create table more (id integer) strict;")
        make(path.parent)
        Index(path).close()
    assert applied(path) == [*NAMES, "m002_good"]
    assert query(path, "select id from namespaces") == [(1,)]
    with pytest.raises(StoreTooNew):
        make(path.parent)


def test_the_lock_is_let_go_after_a_failure(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or another try, does not wait for one that failed."""
    with monkeypatch.context() as patch:
        with_step(patch, "m002_bad", HALF)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                make(root)
    thread = threading.Thread(target=make, args=(root,))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert list(NAMES) == applied(root / "index.db")


# ------------------------------------------------------------------- bad places


@pytest.mark.parametrize(
    "data", [b"hello\n" * 100, bytes(4096) + b"x", b"SQLite format 3\0" + b"\xff" * 984]
)
def test_what_is_no_database_is_refused_and_left_alone(root: Path, data: bytes) -> None:
    """One clear error from `open`; the file is not overwritten."""
    (root / "index.db").write_bytes(data)
    for read_only in (False, True):
        with pytest.raises(StoreUnavailable):
            PromptStore.open(root, read_only=read_only)
    assert (root / "index.db").read_bytes() == data


@pytest.mark.parametrize("name", ["index.db", "snapshots"])
def test_a_thing_of_another_kind_is_refused(root: Path, name: str) -> None:
    """A directory for the index, or a file for the snapshots, is one clear error."""
    if name == "index.db":
        (root / name).mkdir()
    else:
        (root / name).touch()
    with pytest.raises(StoreUnavailable):
        PromptStore.open(root)


def test_a_directory_for_the_lock_is_refused(root: Path) -> None:
    """The same for the lock."""
    (root / "store.lock").mkdir()
    with pytest.raises(StoreUnavailable):
        PromptStore.open(root)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """One clear error, and the file is as it was."""
    root = tmp_path / "file"
    root.write_bytes(b"precious")
    for path in (root, root / "below"):
        with pytest.raises(StoreUnavailable):
            PromptStore.open(path)
    assert root.read_bytes() == b"precious"


def test_nothing_to_read_is_refused(root: Path) -> None:
    """Read-only, an index is not made."""
    with pytest.raises(StoreUnavailable):
        PromptStore.open(root, read_only=True)
    with pytest.raises(StoreUnavailable):
        Index(root / "index.db", read_only=True)
    assert contents(root) == {}
