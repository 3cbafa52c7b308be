"""Facts about damaged and hostile files: none is served, none raises, none is believed
to be larger than it is; and what is beside them stays (P01, P02, P03, W09, K14)."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import secrets
import shutil
import sqlite3
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from builders import arrays_cache, fingerprints, kv_of, sql, tokens
from hostile import (
    CORPUS,
    FILES,
    HUGE,
    Victim,
    checksums_of,
    extent,
    framed,
    header_of,
    written,
)

from promptstore import (
    Namespace,
    PromptStore,
    StoreUnavailable,
    WriteFailed,
    snapshot,
)
from promptstore.errors import SnapshotCorrupt, SnapshotUnsupported
from promptstore.root import Root

NS, OTHER = Namespace("m", tenant="a"), Namespace("m", tenant="b")
BASE = [1, *tokens(299)]
TIP = [*BASE, *tokens(300, seed=1)]
BRANCH = [*BASE[:270], *tokens(100, seed=2)]
ALONE = [2, *tokens(99)]
PROMPTS = {"base": BASE, "tip": TIP, "branch": BRANCH, "alone": ALONE}
ON_IT = {"tip": {"tip"}, "base": {"base", "tip", "branch"}, "state": {"state"}}
"""What stands on a snapshot, itself included."""
STATE = [3, *tokens(40)]

SPARE_BYTES = 16 << 20
"""What may be taken besides twice the file, to read its descriptions."""


def cache_of(name: str, n: int | None = None, salt: int = 0) -> list[Any]:
    """Return the cache of a prompt, or of its first *n* tokens."""
    if name == "state":
        return arrays_cache(len(STATE))
    ids = PROMPTS[name][:n]
    return kv_of([salt, *ids[1:]])


def ids_of(name: str) -> list[int]:
    return STATE if name == "state" else PROMPTS[name]


@contextlib.contextmanager
def opened(root: Path) -> Iterator[PromptStore]:
    """Open a store that serves from disk alone."""
    with PromptStore.open(root, memory_bytes=0, min_tokens=1) as store:
        yield store


def names_apart(first: int, last: int) -> Any:
    """Have new files lie in folders ``[first, last)`` in turn: what is done to the
    folder of one must not reach another."""
    numbers, plain = itertools.cycle(range(first, last)), secrets.token_hex

    def name(nbytes: int) -> str:
        return f"{next(numbers):02x}{plain(nbytes - 1)}"

    return mock.patch("secrets.token_hex", name)


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """No test's new files lie in the folders of those that were there."""
    with names_apart(16, 256):
        yield


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one tenant's prompts, another's, and a state; and another store."""
    root = tmp_path_factory.mktemp("healthy")
    with names_apart(0, 16):
        fill(root)
    return root


def fill(root: Path) -> None:
    with opened(root / "store") as store:
        for name in (*PROMPTS, "state"):
            store.insert(NS, ids_of(name), cache_of(name), label=name)
            store.flush()
        store.insert(OTHER, ALONE, cache_of("alone", salt=7), label="theirs")
        store.insert(NS, ALONE, kv_of(ALONE, n_layers=3), label="three layers")
    with opened(root / "another") as store:
        store.insert(NS, BASE, cache_of("base", salt=9), label="elsewhere")


@pytest.fixture
def root(tmp_path: Path, healthy: Path) -> Path:
    """A copy of that store, with the other one beside it."""
    shutil.copytree(healthy, tmp_path / "roots")
    return tmp_path / "roots" / "store"


def paths(root: Path) -> dict[str, Path]:
    """Return the files of a store by label; a state's checkpoint is labelled."""
    with opened(root) as store:
        where = Root(root).path_of
        return {info.label or "": where(info.id) for info in store.snapshots()}


def victim_of(root: Path, name: str) -> Victim:
    own = paths(root)
    others = {
        "prompt": own["alone"],
        "namespace": own["theirs"],
        "layout": own["three layers"],
        "store": paths(root.parent / "another")["elsewhere"],
    }
    return Victim(own[name], others)


def ask(store: PromptStore, name: str) -> int:
    """Match a prompt; what is served must be right. Return how much that is."""
    ids = ids_of(name)
    match = store.match(NS, [*ids, -1], like=cache_of(name))
    if match.cache is not None:
        n = match.n_tokens
        if name == "state":
            assert n == len(ids)
        assert fingerprints(match.cache, n) == fingerprints(_expected(name, n), n)
    return match.n_tokens


def _expected(name: str, n: int) -> list[Any]:
    # The first id is the salt: that of the namespace NS is 0.
    return cache_of(name, n)


def served(store: PromptStore) -> set[str]:
    """Return the prompts that are served whole; nothing else may be wrong."""
    names = {*PROMPTS, "state"}
    return {name for name in names if ask(store, name) == len(ids_of(name))}


def believe(root: Path, path: Path) -> None:
    """Let the index have of a file what the file says of itself."""
    data = path.read_bytes()
    with sql(root) as db:
        db.execute(
            "update snapshots set checksums = ?, nbytes = ? where name = ?",
            (checksums_of(data), max(len(data), 1), path.stem),
        )


# ----------------------------------------------------------------------- the corpus


@pytest.mark.parametrize("name", ["tip", "state"])
@pytest.mark.parametrize("harm", CORPUS)
def test_a_hostile_file_is_never_served(root: Path, harm: str, name: str) -> None:
    """A match misses or is right, the other prompts are served, and the same prompt
    can be saved again."""
    CORPUS[harm](victim_of(root, name))
    with opened(root) as store:
        lost = {*PROMPTS, "state"} - served(store)
        assert lost <= ON_IT[name] | ({"alone"} if harm == "swapped files" else set())
        store.insert(NS, ids_of(name), cache_of(name))
        store.flush()
        assert ask(store, name) == len(ids_of(name))


@pytest.mark.parametrize("name", ["base", "state"])
@pytest.mark.parametrize("harm", CORPUS)
def test_check_tells_a_hostile_file_and_repair_drops_it(
    root: Path, harm: str, name: str
) -> None:
    """What stands on it goes with it, and nothing else."""
    victim = victim_of(root, name)
    before = victim.path.read_bytes()
    CORPUS[harm](victim)
    if harm not in FILES and victim.path.read_bytes() == before:
        pytest.skip("this file has nothing of the kind")
    with opened(root) as store:
        findings = store.check()
        told = {finding.name for finding in findings}
        assert victim.path.stem in told or harm == "format: later"
        store.repair(findings)
        assert {finding.kind for finding in store.check()} <= {"foreign"}
        lost = {*PROMPTS, "state"} - served(store)
        assert lost <= ON_IT[name] | ({"alone"} if harm == "swapped files" else set())


@pytest.mark.parametrize("harm", [harm for harm in CORPUS if harm not in FILES])
def test_a_lie_that_the_index_believes_is_never_served(root: Path, harm: str) -> None:
    """Where checksums agree, what the file says of itself still must be what the row
    says, and its rows those of its tokens."""
    victim = victim_of(root, "tip")
    CORPUS[harm](victim)
    if harm in {"swapped layers", "zeros: all"} or "flipped" in harm:
        pytest.skip("whoever can make both agree can store what they like")
    believe(root, victim.path)
    with opened(root) as store:
        served(store)
        store.repair(store.check())
        assert {finding.kind for finding in store.check()} <= {"foreign"}


@pytest.mark.parametrize("harm", [harm for harm in CORPUS if harm != "swapped files"])
def test_a_file_that_becomes_hostile_after_its_first_use(root: Path, harm: str) -> None:
    """What was verified is verified again once the file is another."""
    victim = victim_of(root, "tip")
    with opened(root) as store:
        assert ask(store, "tip") == len(TIP)
        CORPUS[harm](victim)
        assert served(store) >= {"base", "branch", "alone", "state"}


def test_a_later_format_is_left_alone(root: Path) -> None:
    """It may be of use to a later version: it is no match, and no damage."""
    victim = victim_of(root, "tip")
    CORPUS["format: later"](victim)
    with pytest.raises(SnapshotUnsupported):
        snapshot.read_contents(victim.path)


def test_a_later_format_outlives_the_index(root: Path) -> None:
    """An index that is made anew has no row for it; it is told, and stays."""
    victim = victim_of(root, "tip")
    CORPUS["format: later"](victim)
    for path in root.glob("index.db*"):
        path.unlink()
    with opened(root) as store:
        findings = store.check()
        assert [finding.kind for finding in findings] == ["foreign"]
        assert "promptstore/2" in findings[0].message
        store.repair(findings)
    assert victim.path.exists()


# ------------------------------------------------------------------------ the index


def move_to_our_layout(db: sqlite3.Connection) -> None:
    db.execute("delete from snapshots where label = 'alone'")
    db.execute(
        "update snapshots set label = 'alone', layout = "
        "(select layout from snapshots where label = 'base') where label = 'theirs'"
    )


def other_parent(db: sqlite3.Connection) -> None:
    db.execute(
        "update snapshots set parent = (select id from snapshots where label = 'alone')"
        ", start_token = 100, first_token = 777 where label = 'tip'"
    )


EDITS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "a tenant's row in another's tree": move_to_our_layout,
    "another parent": other_parent,
    "another name": lambda db: db.execute(
        "update snapshots set name = replace(name, substr(name, 1, 1), 'f') "
        "where label = 'tip'"
    ),
    "a path": lambda db: db.execute(
        "update snapshots set name = '../../../../../../../../../outside' "
        "where label = 'tip'"
    ),
    "a shorter start": lambda db: db.execute(
        "update snapshots set start_token = start_token - 1 where label = 'tip'"
    ),
    "another end": lambda db: db.execute(
        "update snapshots set end_token = 1 << 60 where label = 'tip'"
    ),
    "another extent": lambda db: db.execute(
        "update snapshots set extent = (select extent from snapshots "
        "where label = 'alone') where label = 'tip'"
    ),
    "an extent of more layers": lambda db: db.execute(
        "update snapshots set extent = (select extent from snapshots "
        "where label = 'three layers') where label = 'alone'"
    ),
    "a huge extent": lambda db: db.execute(
        "update snapshots set extent = ?, end_token = 1 << 60 where label = 'tip'",
        (extent(bands=[[[0, 1], [[300, HUGE]]]]),),
    ),
    "a huge state": lambda db: db.execute(
        "update snapshots set extent = ? where label = 'state'",
        (extent(state=[[0, "0", "F32", [1 << 30, 1 << 30]]]),),
    ),
    "a huge size": lambda db: db.execute(
        "update snapshots set nbytes = 1 << 60 where label = 'tip'"
    ),
    "no checksums": lambda db: db.execute(
        "update snapshots set checksums = x'' where label = 'tip'"
    ),
    "other tokens": lambda db: db.execute(
        "update snapshots set tokens = zeroblob(length(tokens)), first_token = 0 "
        "where label = 'tip'"
    ),
    "other layers": lambda db: db.execute(
        "update layouts set layers = replace(layers, '\"keys\",2,8', '\"keys\",8,2')"
    ),
    "huge layers": lambda db: db.execute(
        "update layouts set layers = replace(layers, '\"keys\",2', "
        "'\"keys\",2000000000')"
    ),
    "no layers": lambda db: db.execute("update layouts set layers = '[[' || layers"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_row_that_lies_is_never_served(root: Path, edit: str) -> None:
    """Whatever the index says of a good file, no other tokens' KV is served."""
    before = Path(root / ".." / "outside.safetensors")
    before.write_text("precious")
    with sql(root) as db:
        EDITS[edit](db)
    with opened(root) as store:
        for name in (*PROMPTS, "state"):
            ask(store, name)
            _ask_without_like(store, name)
        store.repair(store.check())
        assert {finding.kind for finding in store.check()} <= {"foreign"}
    assert before.read_text() == "precious"


@pytest.mark.parametrize("edit", EDITS)
def test_a_row_that_begins_to_lie_is_never_served(root: Path, edit: str) -> None:
    """Also if the file was verified before, by the row as it was."""
    with opened(root) as store:
        served(store)
        with sql(root) as db:
            EDITS[edit](db)
        for name in (*PROMPTS, "state"):
            ask(store, name)


def _ask_without_like(store: PromptStore, name: str) -> None:
    ids = ids_of(name)
    match = store.match(NS, [*ids, -1])
    n = match.n_tokens
    if match.cache is not None and n and len(match.cache) == 2:
        assert fingerprints(match.cache, n) == fingerprints(_expected(name, n), n)


def test_tokens_that_are_not_read_are_proven_by_the_digest(tmp_path: Path) -> None:
    """A window needs no rows of the snapshot before it; a row that lies about the
    tokens there is found by the digest of the end."""
    from builders import rotating

    ids = [1, *tokens(599)]
    with opened(tmp_path) as store:
        store.insert(NS, ids[:300], rotating(300))
        store.flush()
        store.insert(NS, ids, rotating(600))
        store.flush()
        assert store.match(NS, [*ids, -1]).n_tokens == 600
    wrong = [ids[0], *tokens(299, seed=9), *ids[300:]]
    with sql(tmp_path) as db:
        (blob,) = db.execute(
            "select tokens from snapshots where start_token = 0"
        ).fetchone()
        size = len(blob) // 300
        packed = b"".join(n.to_bytes(size, "little") for n in wrong[:300])
        db.execute("update snapshots set tokens = ? where start_token = 0", (packed,))
        db.execute("delete from prefixes")
    with opened(tmp_path) as store:
        assert store.match(NS, [*wrong, -1]).n_tokens < 600


# -------------------------------------------------------------------- names, links


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../../etc/passwd", "/etc/passwd", "a" * 31, "a" * 33,
        "A" * 32, "g" * 32, "a" * 31 + "\n", "a" * 32 + "\n", "a" * 31 + "\0",
        "../" * 10 + "aa", "aa/" * 10 + "aa", "Ä" * 32, "\ud800" * 32, "٣" * 32,
    ],
)  # fmt: skip
def test_what_is_no_name_leads_nowhere(tmp_path: Path, name: str) -> None:
    """Names are 32 hexadecimal digits, whatever an index or a file says (K14)."""
    root = Root(tmp_path)
    with pytest.raises(SnapshotCorrupt, match="is no name of a snapshot"):
        root.path_of(name)
    with pytest.raises(SnapshotCorrupt, match="is no name of a snapshot"):
        root.find(name)
    assert root.unlink(name) == 0


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    """Caches are moved to another disk: all is served, saved and removed there."""
    (tmp_path / "link").symlink_to(root)
    with opened(tmp_path / "link") as store:
        assert served(store) == {*PROMPTS, "state"}
        store.insert(NS, [5, *ALONE], kv_of([5, *ALONE]))
        store.flush()
        store.delete("alone")
        assert store.check() == []


def test_a_store_whose_folder_is_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    """It says what to do instead, and changes nothing behind the link."""
    (root / "snapshots").rename(tmp_path / "moved")
    (root / "snapshots").symlink_to(tmp_path / "moved")
    before = sorted((tmp_path / "moved").rglob("*"))
    with pytest.raises(StoreUnavailable, match="link the whole directory"):
        PromptStore.open(root)
    assert sorted((tmp_path / "moved").rglob("*")) == before


def test_nothing_behind_a_link_is_read_written_or_removed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linked folder is foreign: its rows go, its files stay, a write there fails
    with a reason, and the others go on."""
    victim = victim_of(root, "tip")
    folder = victim.path.parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    before = {path: path.read_bytes() for path in (tmp_path / "moved").iterdir()}
    monkeypatch.setattr("secrets.token_hex", lambda n: folder.name + "0" * 30)
    with opened(root) as store:
        assert ask(store, "tip") == len(BASE)
        store.insert(NS, TIP, cache_of("tip"))
        with pytest.raises(WriteFailed, match="not followed"):
            store.flush()
        assert store.stats().errors["ELOOP"] == 1
        store.evict(to_bytes=0)
    assert {p: p.read_bytes() for p in (tmp_path / "moved").iterdir()} == before
    assert folder.is_symlink()


def test_a_folder_that_becomes_a_link_while_open(root: Path, tmp_path: Path) -> None:
    """No file behind it is read, although they were verified before."""
    with opened(root) as store:
        assert ask(store, "tip") == len(TIP)
        (root / "snapshots").rename(tmp_path / "moved")
        (root / "snapshots").symlink_to(tmp_path / "moved")
        assert ask(store, "tip") == 0
        assert len(list((tmp_path / "moved").rglob("*.safetensors"))) > 5


# --------------------------------------------------------------------- at random


@pytest.fixture(scope="module")
def mutate() -> Iterator[Any]:
    """The mutator, which is a tool."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    try:
        yield importlib.import_module("mutate")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def pristine(mutate: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of every kind of layer."""
    root = tmp_path_factory.mktemp("pristine") / "store"
    mutate.make_store(root)
    return root


@pytest.mark.parametrize("seed", range(1000, 1200, 25))
def test_random_damage_is_never_served(
    tmp_path: Path, mutate: Any, pristine: Path, seed: int
) -> None:
    """Some damaged stores of every kind of layer; `make mutate` tries 10,000."""
    report = mutate.Report()
    mutate.run(pristine, tmp_path, seed, 25, report)
    assert report.n_rounds == 25
    assert report.n_tokens > 50_000


# --------------------------------------------------------------------------- memory


def lists(n: int) -> str:
    return "[" + "[]," * n + "[]]"


def with_facts(good: bytes, **changes: Any) -> bytes:
    header, facts = header_of(good)
    return written(header, json.dumps(facts | changes), b"")


def of_checksums(good: bytes) -> bytes:
    """A file that is nearly all checksums, of chunks that have no bytes."""
    header, facts = header_of(good)
    facts["layers"] = '[["arrays/1",[],{"size":1}]]'
    facts |= {"start": 0, "parent": None, "end": 1 << 25, "checksums": "00" * (2 << 20)}
    facts["extent"] = extent(bands=[[[0], [[0, 1 << 25]]]])
    return written(header, json.dumps(facts), b"")


BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "spaces": lambda _: framed(b" " * (8 << 20)),
    "a string": lambda _: framed(
        b'{"__metadata__":{"promptstore":"' + b"x" * (8 << 20)
    ),
    "lists": lambda _: framed(lists(2 << 20).encode()),
    "metadata of lists": lambda _: framed(
        b'{"__metadata__":' + lists(2 << 20).encode() + b"}"
    ),
    "facts of lists": lambda good: written(header_of(good)[0], lists(300_000), b""),
    "facts of objects": lambda good: written(
        header_of(good)[0], lists(300_000).replace("[]", "{}"), b""
    ),
    "facts of strings": lambda good: with_facts(good, namespace=["x"] * 200_000),
    "facts of a string": lambda good: with_facts(good, writer="x" * (2 << 20)),
    "facts of wide characters": lambda good: with_facts(good, writer="\U0001f600" * 99),
    "facts of digits": lambda good: written(header_of(good)[0], "9" * 2_000_000, b""),
    "layers": lambda good: with_facts(good, layers=lists(80_000)),
    "extent": lambda good: with_facts(
        good,
        extent=extent(bands=[[[0], [[2 * n, 2 * n + 1] for n in range(13_000)]]]),
        end=1 << 60,
    ),
    "rings": lambda good: with_facts(
        good, extent=extent(rings=[[n, 0] for n in range(25_000)])
    ),
    "state": lambda good: with_facts(
        good, extent=extent(state=[[0, str(n), "F32", [1]] for n in range(10_000)])
    ),
    "checksums": of_checksums,
    "tensors behind": lambda good: framed(
        good[8:][: int.from_bytes(good[:8], "little")].rstrip(b" ")[:-1]
        + b',"x":[]' * (1 << 20)
        + b"}"
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_file_takes_more_than_twice_its_size(root: Path, bomb: str) -> None:
    """Whatever it claims, reading it is bounded by its bytes and a constant."""
    path = victim_of(root, "tip").path
    path.write_bytes(BOMBS[bomb](path.read_bytes()))
    size = path.stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotCorrupt):
            snapshot.read_contents(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2 * size + SPARE_BYTES


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_file_that_is_believed_takes_more_than_twice_its_size(
    root: Path, bomb: str
) -> None:
    """The same of a match, where the index agrees with the file."""
    path = victim_of(root, "tip").path
    path.write_bytes(BOMBS[bomb](path.read_bytes()))
    believe(root, path)
    size = path.stat().st_size
    with opened(root) as store:
        mx.reset_peak_memory()
        tracemalloc.start()
        try:
            n_tokens = ask(store, "tip")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert n_tokens < len(TIP)
        assert peak + mx.get_peak_memory() <= 2 * size + SPARE_BYTES


def test_a_good_file_is_read_within_its_size(tmp_path: Path) -> None:
    """A large one too: its header is compared piece by piece, its rows not read."""
    ids = tokens(4096)
    with opened(tmp_path) as store:
        store.insert(NS, ids, kv_of(ids, n_layers=8, n_kv_heads=2, head_dim=8))
    (path,) = tmp_path.rglob("*.safetensors")
    tracemalloc.start()
    try:
        snapshot.read_contents(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= path.stat().st_size
    assert os.stat(path).st_size > 4 << 20
