"""Facts about who can read what: no code in files, no tenant in another's, nothing
left of what was deleted, and nobody but the owner in the directory."""

from __future__ import annotations

import ast
import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from builders import kv_of, prints

import promptstore
from promptstore import Namespace, PromptStore
from promptstore.extent import Extent
from promptstore.index import Index, Layout, NewRow, prepare

PACKAGE = Path(promptstore.__file__).parent
ANN, BOB = Namespace("m", tenant="ann-the-first"), Namespace("m", tenant="bob-b-bob")
EVERYBODY = (Namespace("m"), ANN, BOB)


def secret(seed: int, n: int = 300) -> list[int]:
    """Return ids that no chance and no other prompt brings about."""
    rng = np.random.default_rng(seed)
    return [int(id_) for id_ in rng.integers(1 << 20, 1 << 30, n)]


def save(
    store: PromptStore, namespace: Namespace, ids: Sequence[int], **more: Any
) -> None:
    store.insert(namespace, ids, kv_of(ids), **more)
    store.flush()


def everything(root: Path) -> bytes:
    """Return the bytes of every file under the root, and the names of them all."""
    paths = sorted(root.rglob("*"))
    data = [path.read_bytes() for path in paths if path.is_file()]
    return b"\n".join([*data, *(os.fsencode(path.name) for path in paths)])


def traces(root: Path, ids: Sequence[int], *names: str) -> set[str]:
    """Return in which form something of a prompt is still under the root.

    Three ids in a row are enough, in 4 or 8 bytes each, or any of the names. Of a
    long prompt some forty places are tried.
    """
    data = everything(root)
    found = {name for name in names if name.encode() in data}
    for dtype in ("<i4", "<i8"):
        width = np.dtype(dtype).itemsize
        text = np.array(ids).astype(dtype).tobytes()
        step = width * max(1, len(ids) // 40)
        runs = (text[at : at + 3 * width] for at in range(0, len(text), step))
        if any(run in data for run in runs if len(run) == 3 * width):
            found.add(dtype)
    return found


# ------------------------------------------------------------- nothing is executed


FORBIDDEN_MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "code",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "globals", "locals", "vars", "__import__"}
FORBIDDEN_NAMES = {"globals", "__import__", "load_prompt_cache", "allow_pickle"}
READERS = {"codecs", "snapshot", "index", "migrations"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def nodes(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield name, node


def test_nothing_is_read_that_can_run() -> None:
    """No format that holds code is imported anywhere, not even by a function."""
    found = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {(name, each.name.split(".")[0]) for each in node.names}
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add((name, node.module.split(".")[0]))
    assert {each for each in found if each[1] in FORBIDDEN_MODULES} == set()


def test_nothing_is_evaluated() -> None:
    """No text becomes code, and no name is looked up among all names."""
    called = {
        (name, node.func.id)
        for name, node in nodes(ast.Call)
        if isinstance(node.func, ast.Name)
    }
    used = {(name, node.id) for name, node in nodes(ast.Name)}
    used |= {(name, node.attr) for name, node in nodes(ast.Attribute)}
    used |= {(name, each.name) for name, node in nodes(ast.ImportFrom)
             for each in node.names}  # fmt: skip
    assert {each for each in called if each[1] in FORBIDDEN_CALLS} == set()
    assert {each for each in used if each[1] in FORBIDDEN_NAMES} == set()


def test_numpy_reads_no_files() -> None:
    """`numpy.load` can unpickle; bytes become arrays by `frombuffer` alone."""
    numpys = {
        (name, node.func.attr)
        for name, node in nodes(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "np"
    }
    assert {each for each in numpys if "load" in each[1]} == set()


def test_one_place_imports_by_name_and_the_names_are_the_table_s() -> None:
    """A class is found through the codec of its tag, never by what a file says."""
    importing = [
        name for name, node in nodes(ast.Attribute) if node.attr == "import_module"
    ]
    assert importing == [os.path.join("codecs", "table.py")]
    asked = [
        tuple(ast.unparse(argument) for argument in node.args)
        for _, node in nodes(ast.Call)
        if ast.unparse(node.func).endswith("live_class")
    ]
    assert asked
    for module, name in asked:
        assert module.endswith(".module") or module.startswith("'mlx_lm."), asked
        assert name.endswith(".class_name") or name.startswith("'"), asked


def test_readers_look_no_attribute_up_by_a_text() -> None:
    """Where files are read, `getattr` is called with names that stand in the code."""
    allowed = {
        "getattr(importlib.import_module(module), name, None)",  # the test above
        "getattr(layer, name)",  # names of a codec, of a layer that is there
        "setattr(layer, name, leaf.state.get(name))",  # the same
    }
    found = {
        ast.unparse(node)
        for name, node in nodes(ast.Call)
        if name.split(os.sep)[0] in READERS
        and ast.unparse(node.func) in {"getattr", "setattr"}
        and not isinstance(node.args[1], ast.Constant)
    }
    assert found <= allowed


# ------------------------------------------------------------------ tenants never meet


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_tenants_never_meet(tmp_path: Path, memory_bytes: int) -> None:
    """The same tokens of another tenant are a miss in either tier, and show nothing."""
    ids = secret(0)
    with PromptStore.open(tmp_path / "store", memory_bytes=memory_bytes) as store:
        save(store, ANN, ids, label="of ann")
        for other in (BOB, Namespace("m"), Namespace("m", tenant="ANN-the-first")):
            for query in ([*ids, 1], ids[:100], ids[:257]):
                match = store.match(other, query)
                assert (match.cache, match.n_tokens) == (None, 0)
                told = store.explain(other, query)
                assert (told.n_memory, told.n_disk, told.nearest) == (0, 0, None)
                assert str(told.reason) == str(store.explain(other, [7] * 99).reason)
            assert list(store.snapshots(other)) == []
        assert store.match(ANN, [*ids, 1]).n_tokens == len(ids)


def test_a_namespace_that_is_gone_is_not_given_anew(tmp_path: Path) -> None:
    """Who still looks in a tenant's tree that was deleted does not find the next
    tenant there, nor puts a prompt into it."""
    ids = secret(1)
    with PromptStore.open(tmp_path / "store", memory_bytes=0) as store:
        assert store._disk is not None
        index = store._disk.index
        save(store, ANN, ids)
        (stale,) = index.layouts(ANN)
        store.delete_tenant(ANN.tenant)
        save(store, BOB, ids)
        assert index.find(stale, np.array(ids)).n_tokens == 0
        assert index.layouts(BOB)[0].id != stale.id


def test_an_insert_survives_that_its_namespace_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making the namespace and adding to it, another process may delete it."""
    root, ids = tmp_path / "store", secret(2)
    with PromptStore.open(root, memory_bytes=0) as store:
        save(store, ANN, secret(3))
        assert store._disk is not None
        writer = store._disk.volume.writer
        add, n_calls = writer.add, []

        def late(new: Any) -> int:
            n_calls.append(None)
            if len(n_calls) == 1:
                with PromptStore.open(root, memory_bytes=0) as other:
                    other.delete_tenant(BOB.tenant)
            return add(new)

        monkeypatch.setattr(writer, "add", late)
        save(store, BOB, ids)
        assert len(n_calls) == 2
        assert prints(store.match(BOB, [*ids, 1]).cache or []) == prints(kv_of(ids))
        assert store.check() == []


# -------------------------------------------------------------- deleted means deleted


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A closed store in which each tenant has the same prompt and one of its own."""
    root = tmp_path / "store"
    with PromptStore.open(root, memory_bytes=0) as store:
        for number, namespace in enumerate(EVERYBODY):
            save(store, namespace, secret(100))
            save(store, namespace, secret(number), label=f"label-{number}-x", pin=True)
            save(store, namespace, [*secret(number), *secret(50 + number)])
    return root


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_deleted_tenant_leaves_nothing(shared: Path, victim: int) -> None:
    """Tokens, label and name are in no file, as long as the store is open and after;
    the other tenants have what they had."""
    gone = EVERYBODY[victim]
    names = [name for name in (gone.tenant, f"label-{victim}-x") if name]
    mine = [*secret(victim), *secret(50 + victim)]
    assert traces(shared, mine, *names) == {"<i4", "<i8", *names}
    with PromptStore.open(shared) as store:
        for each in EVERYBODY:
            assert store.match(each, [*secret(100), 1]).n_tokens == 300
            save(store, each, [*secret(100), 5], kind="user")
        assert store.delete_tenant(gone.tenant) == 4
        assert traces(shared, mine, *names) == set()
        assert store.match(gone, [*secret(100), 1]).n_tokens == 0
        assert {info.namespace for info in store.snapshots()} == {*EVERYBODY} - {gone}
        for number, each in enumerate(EVERYBODY):
            if each != gone:
                ids = [*secret(number), *secret(50 + number)]
                assert prints(store.match(each, [*ids, 1]).cache or []) == prints(
                    kv_of(ids)
                )
        assert store.delete_tenant(gone.tenant) == 0
        assert store.check() == []
    assert traces(shared, mine, *names) == set()


def test_a_deleted_prompt_leaves_nothing(shared: Path) -> None:
    """Nor does the last prompt leave the name of its tenant behind."""
    with PromptStore.open(shared, memory_bytes=0) as store:
        store.delete("label-1-x")
        assert traces(shared, [*secret(1), *secret(51)], "label-1-x") == set()
        assert ANN.tenant.encode() in everything(shared)
        for info in list(store.snapshots(ANN)):
            store.delete(info.id)
        assert traces(shared, secret(1), ANN.tenant) == set()
        assert traces(shared, secret(2)) == {"<i4", "<i8"}
        assert len(list(store.snapshots())) == 6


@pytest.mark.parametrize("seed", [0, 12, 17])
def test_rows_that_were_moved_leave_no_copies(tmp_path: Path, seed: int) -> None:
    """SQLite leaves copies where it moves rows from page to page, and with these seeds
    some are of rows that are deleted later: they go when the index is compacted."""
    prepare(tmp_path / "index.db")
    rng = np.random.default_rng(seed)
    with contextlib.closing(Index(tmp_path / "index.db")) as index:
        layout = index.layout(Namespace("m", tenant="zorro"), "[]")
        prompts = []
        for number in range(150):
            ids = rng.integers(1 << 20, 1 << 30, rng.choice([3, 50, 300, 900]))
            label = f"label-{number:04}-x"
            index.add(_new_row(f"{number:032x}", layout, ids))
            row = index.row(f"{number:032x}")
            assert row is not None
            index.mark(row, label=label, pinned=False)
            prompts.append((row.id, ids, label))
        gone = [prompt for prompt in prompts if rng.random() < 0.5]
        for id_, _, _ in gone:
            index.remove([id_])
        index.compact()
        assert index.n_snapshots() == len(prompts) - len(gone)
        for _, ids, label in gone:
            assert traces(tmp_path, ids[:3].tolist(), label) == set()


def _new_row(name: str, layout: Layout, ids: npt.NDArray[np.int64]) -> NewRow:
    extent = Extent.from_text('{"bands": [], "rings": [], "state": []}', 0, len(ids))
    return NewRow(name, layout, None, extent, ids, 5, b"", "user")


def test_what_was_seen_is_forgotten_with_what_was_deleted(tmp_path: Path) -> None:
    """A digest of a prompt would confirm a guess at it."""
    root = tmp_path / "store"
    with PromptStore.open(root, memory_bytes=0) as store:
        save(store, ANN, secret(0), label="x")
        with contextlib.closing(sqlite3.connect(root / "index.db")) as db, db:
            db.execute("insert into sightings values (?, 1)", (b"0123456789abcdef",))
        store.delete("x")
        with contextlib.closing(sqlite3.connect(root / "index.db")) as db:
            for table in ("sightings", "prefixes", "layouts", "namespaces"):
                assert db.execute(f"select count(*) from {table}").fetchone() == (0,)


def test_a_deletion_that_was_killed_is_finished_by_the_next(shared: Path) -> None:
    """A file whose row was removed gets none again: it goes, at the latest now."""
    with PromptStore.open(shared, memory_bytes=0) as store:
        files = [
            shared / "snapshots" / info.id[:2] / f"{info.id}.safetensors"
            for info in store.snapshots(ANN)
        ]
        kept = {path: path.read_bytes() for path in files}
        store.delete_tenant(ANN.tenant)
        for path, data in kept.items():
            path.write_bytes(data)
        assert store.delete_tenant(ANN.tenant) == 0
        assert not any(path.exists() for path in files)
        assert traces(shared, secret(1), ANN.tenant) == set()


def test_a_deletion_does_not_wait_for_a_reader_for_good(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that keeps the log from being emptied is no error; closing does it."""
    monkeypatch.setattr("promptstore.index.database._OPTIONS", _IMPATIENT)
    with contextlib.closing(sqlite3.connect(shared / "index.db")) as reader:
        with PromptStore.open(shared, memory_bytes=0) as store:
            reader.execute("begin")
            reader.execute("select count(*) from snapshots").fetchone()
            store.delete_tenant(ANN.tenant)
            assert list(store.snapshots(ANN)) == []
            reader.execute("commit")
        assert traces(shared, secret(1), ANN.tenant) == set()


_IMPATIENT: Any = {"timeout": 0.01, "isolation_level": None, "check_same_thread": False}


def test_the_log_is_emptied_at_the_latest_at_close(shared: Path) -> None:
    """What was evicted is overwritten; other processes may keep the index open."""
    with contextlib.closing(sqlite3.connect(shared / "index.db")) as other:
        other.execute("select count(*) from snapshots").fetchone()
        with PromptStore.open(shared, memory_bytes=0) as store:
            for namespace in EVERYBODY:
                for info in store.snapshots(namespace):
                    with contextlib.suppress(promptstore.UnknownSnapshot):
                        store.unpin(info.id)
            store.evict(to_bytes=0)
            assert list(store.snapshots()) == []
        assert (shared / "index.db-wal").stat().st_size == 0
        assert traces(shared, [*secret(1), *secret(51)], "label-1-x") == set()


def test_memory_forgets_a_tenant_too(tmp_path: Path) -> None:
    """Without a disk tier, and with one that nothing was written to yet."""
    for options in ({"disk_bytes": 0}, {"write": "back"}):
        options_any: dict[str, Any] = dict(options)
        with PromptStore.open(tmp_path / "store", **options_any) as store:
            ids = secret(0)
            store.insert(ANN, ids, kv_of(ids))
            store.insert(BOB, ids, kv_of(ids))
            assert store.delete_tenant(ANN.tenant) == 0
            assert store.match(ANN, [*ids, 1]).n_tokens == 0
            assert store.match(BOB, [*ids, 1]).n_tokens == len(ids)


def test_who_may_not_delete_deletes_nothing(shared: Path) -> None:
    """A store that is only read refuses, and so does one that is closed."""
    with PromptStore.open(shared, read_only=True) as store:
        with pytest.raises(promptstore.StoreUnavailable):
            store.delete_tenant(ANN.tenant)
        with pytest.raises(promptstore.StoreUnavailable):
            store.delete_tenant("nobody")
    with pytest.raises(promptstore.StoreClosed):
        store.delete_tenant(ANN.tenant)
    with PromptStore.open(shared) as store, pytest.raises(TypeError):
        store.delete_tenant(None)  # type: ignore[arg-type]


# ----------------------------------------------------------------- the owner's alone


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Set the umask; it is as it was when the test ends."""
    before = os.umask(0o022)
    try:
        yield os.umask
    finally:
        os.umask(before)


def modes(root: Path) -> set[tuple[str, int]]:
    """Return what is under the root, itself included, and is not its owner's alone."""
    found = set()
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found.add((path.name, mode))
    return found


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_all_is_the_owner_s_alone(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    """Whatever the umask: directories are 0700 and files 0600, also SQLite's own."""
    root = tmp_path / "store"
    umask(mask)
    with PromptStore.open(root, memory_bytes=0) as store:
        assert modes(root) == set()
        for seed in range(3):
            save(store, ANN, secret(seed))
            assert modes(root) == set()
        assert {"index.db-wal", "index.db-shm"} <= {
            path.name for path in root.iterdir()
        }
        assert list(store.verify(max_bytes_per_s=1e18)) == []
        store.evict(to_bytes=root.stat().st_size)
        store.delete_tenant(ANN.tenant)
        save(store, BOB, secret(9))
        assert modes(root) == set()
    assert modes(root) == set()


@pytest.mark.parametrize("mask", [0, 0o777])
def test_a_migration_keeps_it_so(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    """An index that an older version made is migrated, and stays the owner's."""
    root = tmp_path / "store"
    with PromptStore.open(root, memory_bytes=0) as store:
        save(store, ANN, secret(0))
    with contextlib.closing(sqlite3.connect(root / "index.db")) as db, db:
        db.execute("alter table snapshots drop column verified_ns")
        db.execute("drop table writes")
        db.execute("drop table sightings")
        db.execute("drop trigger snapshots_are_removed")
        db.execute("drop table removed")
        db.execute("delete from _sqlite_migrations where name like '%care%'")
    umask(mask)
    with PromptStore.open(root, memory_bytes=0) as store:
        assert modes(root) == set()
        assert store.match(ANN, [*secret(0), 1]).n_tokens == 300
