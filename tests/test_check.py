"""Facts about check and repair: whatever is done to a store on disk, they mend it."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import cut_to, kv_of, prints, sql, tokens

from promptstore import Finding, Namespace, PromptStore, SnapshotInfo, snapshot

NS = Namespace("m")
BASE = [1, *tokens(299)]
TIP = [*BASE, *tokens(100, seed=1)]
BRANCH = [*BASE[:270], *tokens(100, seed=2)]
ALONE = [2, *tokens(99)]
HEAD = BASE[:200]
PROMPTS = {"base": BASE, "tip": TIP, "branch": BRANCH, "alone": ALONE, "head": HEAD}
ON_IT = {
    "base": {"base", "tip", "branch", "head"},
    "tip": {"tip"},
    "branch": {"branch"},
    "alone": {"alone"},
    "head": {"head"},
}
"""What stands on a snapshot, itself included; the head has no rows of its own."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of four prompts, one label without rows, and nothing else."""
    root = tmp_path_factory.mktemp("healthy") / "store"
    with PromptStore.open(root) as store:
        for name in ("base", "tip", "branch", "alone", "head"):
            ids = PROMPTS[name]
            store.insert(NS, ids, kv_of(ids), label=name)
            store.flush()
        assert {info.label for info in store.snapshots()} == PROMPTS.keys()
    return root


@pytest.fixture
def root(tmp_path: Path, healthy: Path) -> Path:
    """A copy of that store."""
    return shutil.copytree(healthy, tmp_path / "store")


@pytest.fixture
def rows(root: Path) -> dict[str, SnapshotInfo]:
    """The snapshots by label."""
    with opened(root) as store:
        return {info.label or "": info for info in store.snapshots()}


@contextlib.contextmanager
def opened(root: Path) -> Iterator[PromptStore]:
    """Open a store that serves from disk alone."""
    with PromptStore.open(root, memory_bytes=0) as store:
        yield store


def path_of(root: Path, info: SnapshotInfo) -> Path:
    """Return the file of a snapshot."""
    return root / "snapshots" / info.id[:2] / f"{info.id}.safetensors"


def mend(store: PromptStore) -> list[Finding]:
    """Check and repair; return what was found. Only foreign files may be left."""
    findings = store.check()
    store.repair(findings)
    left = store.check()
    assert [finding for finding in left if finding.kind != "foreign"] == []
    return findings


def kept(store: PromptStore) -> set[str]:
    """Return which prompts are wholly there; what is there must be right."""
    names = {info.label for info in store.snapshots()}
    found = set()
    for name, ids in PROMPTS.items():
        match = store.match(NS, [*ids, 0])
        if match.cache is not None:
            right = cut_to(kv_of(ids), match.n_tokens)
            assert prints(match.cache) == prints(right)
        if match.n_tokens == len(ids) and name in names:
            found.add(name)
    return found


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def other_file(path: Path) -> None:
    """Put another whole snapshot in place of a file."""
    others = [each for each in path.parents[1].rglob("*.safetensors") if each != path]
    shutil.copyfile(max(others, key=lambda each: each.stat().st_size), path)


def as_link(path: Path) -> None:
    """Put a link to the very same bytes in place of a file."""
    moved = path.parents[2] / "moved"
    path.rename(moved)
    path.symlink_to(moved)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing": ("dangling", lambda path: path.unlink()),
    "empty": ("corrupt", lambda path: os.truncate(path, 0)),
    "half": ("corrupt", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "short by one": ("corrupt", lambda path: os.truncate(path, _size(path) - 1)),
    "longer": ("corrupt", lambda path: os.truncate(path, _size(path) + 4096)),
    "length flipped": ("corrupt", lambda path: flip(path, 0)),
    "header flipped": ("corrupt", lambda path: flip(path, 100)),
    "padding flipped": ("corrupt", lambda path: flip(path, 4095)),
    "foreign": ("corrupt", other_file),
    "text": ("corrupt", lambda path: path.write_text("hello")),
    "link": ("corrupt", as_link),
}


def _size(path: Path) -> int:
    return path.stat().st_size


# ------------------------------------------------------------------------- all is well


def test_a_healthy_store_has_no_findings(root: Path) -> None:
    """Nothing is found, and repairing nothing drops nothing."""
    with opened(root) as store:
        assert mend(store) == []
        assert kept(store) == PROMPTS.keys()


def test_check_changes_nothing(root: Path, rows: dict[str, SnapshotInfo]) -> None:
    """It only looks: damage, orphans and foreign files are where they were."""
    flip(path_of(root, rows["tip"]), -1)
    path_of(root, rows["alone"]).unlink()
    (root / "foreign").write_text("hello")
    with opened(root) as store:
        before = sorted(root.rglob("*")), list(store.snapshots())
        first, second = store.check(), store.check()
        assert first == second
        assert {finding.kind for finding in first} == {"corrupt", "dangling", "foreign"}
        assert (sorted(root.rglob("*")), list(store.snapshots())) == before


# -------------------------------------------------------------------------- the files


@pytest.mark.parametrize("victim", ["base", "tip", "head"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_goes_with_what_stands_on_it(
    root: Path, rows: dict[str, SnapshotInfo], damage: str, victim: str
) -> None:
    """It is found by name and kind, it is dropped, and nothing else is."""
    kind, harm = DAMAGE[damage]
    harm(path_of(root, rows[victim]))
    with opened(root) as store:
        (finding,) = [each for each in store.check() if each.kind != "foreign"]
        assert (finding.kind, finding.name) == (kind, rows[victim].id)
        assert finding.message
        mend(store)
        assert kept(store) == PROMPTS.keys() - ON_IT[victim]
        store.insert(NS, TIP, kv_of(TIP))
        store.flush()
        assert store.match(NS, [*TIP, 0]).n_tokens == len(TIP)
        mend(store)


@pytest.mark.parametrize("place", [4096, -8 * 100 - 1, -8 * 100, -1])
def test_every_byte_is_compared(
    root: Path, rows: dict[str, SnapshotInfo], place: int
) -> None:
    """The first and the last byte of the rows and of the token ids count as well."""
    flip(path_of(root, rows["alone"]), place)
    with opened(root) as store:
        assert [finding.kind for finding in mend(store)] == ["corrupt"]
        assert kept(store) == PROMPTS.keys() - {"alone"}


def test_check_compares_whatever_was_compared_before(
    root: Path, rows: dict[str, SnapshotInfo]
) -> None:
    """That a chunk was verified at its first use saves check nothing."""
    with opened(root) as store:
        assert kept(store) == PROMPTS.keys()
        flip(path_of(root, rows["alone"]), 5000)
        assert [finding.kind for finding in mend(store)] == ["corrupt"]
        assert kept(store) == PROMPTS.keys() - {"alone"}


@pytest.mark.parametrize("to", ["its own directory", "another directory", "the root"])
def test_a_renamed_file_is_missing_and_too_much(
    root: Path, rows: dict[str, SnapshotInfo], to: str
) -> None:
    """Its row dangles; under the name of a snapshot it is an orphan, else foreign."""
    path = path_of(root, rows["alone"])
    name = rows["alone"].id[:2] + secrets.token_hex(15)
    target = {
        "its own directory": path.with_name(f"{name}.safetensors"),
        "another directory": path.parents[1] / "zz" / path.name,
        "the root": root / path.name,
    }[to]
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    kind = "orphan" if to == "its own directory" else "foreign"
    with opened(root) as store:
        assert [finding.kind for finding in mend(store)] == ["dangling", kind]
        assert kept(store) == PROMPTS.keys() - {"alone"}
    assert target.exists() == (kind == "foreign")


def test_foreign_files_are_told_and_left(root: Path) -> None:
    """What is not ours is named with its path, and is never touched."""
    foreign = ["notes.txt", "snapshots/x", "snapshots/ab/y.safetensors", "deep/er/z"]
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    with opened(root) as store:
        findings = mend(store)
        assert {finding.kind for finding in findings} == {"foreign"}
        assert sorted(finding.name for finding in findings) == sorted(foreign)
        assert kept(store) == PROMPTS.keys()
    assert [(root / name).read_text() for name in foreign] == foreign


def test_orphans_are_removed(root: Path, rows: dict[str, SnapshotInfo]) -> None:
    """Files without a row, whole or half, finished or not, go at a repair."""
    source = path_of(root, rows["alone"])
    names = [secrets.token_hex(16) for _ in range(4)]
    orphans = []
    for name, suffix in zip(names, [".safetensors", ".tmp"] * 2, strict=True):
        path = root / "snapshots" / name[:2] / f"{name}{suffix}"
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, path)
        orphans.append(path)
    os.truncate(orphans[2], 100)
    os.truncate(orphans[3], 0)
    with opened(root) as store:
        findings = mend(store)
        assert {(each.kind, each.name) for each in findings} == {
            ("orphan", name) for name in names
        }
        assert kept(store) == PROMPTS.keys()
    assert not any(path.exists() for path in orphans)


def test_what_is_being_written_is_no_finding(root: Path) -> None:
    """A file that has its lock is a write on its way, and repair leaves it."""
    name = secrets.token_hex(16)
    path = root / "snapshots" / name[:2] / f"{name}.tmp"
    path.parent.mkdir(exist_ok=True)
    with opened(root) as store:
        with snapshot.create(path):
            assert mend(store) == []
            assert path.exists()
        assert [finding.kind for finding in mend(store)] == ["orphan"]


def test_what_the_system_refuses_is_no_finding(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error proves nothing about a snapshot: it is neither told nor dropped."""

    def refuse(*_: object) -> None:
        raise OSError(5, "input/output error")

    with opened(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            assert mend(store) == []
        assert kept(store) == PROMPTS.keys()


def test_a_repaired_finding_may_be_old(root: Path) -> None:
    """Findings of another time are harmless: what is fine by now, or gone, stays so."""
    with opened(root) as store:
        store.repair(
            [
                Finding("dangling", secrets.token_hex(16), "of long ago"),
                Finding("orphan", secrets.token_hex(16), "of long ago"),
                Finding("foreign", "../../etc/passwd", "of somebody else"),
                Finding("index", "index.db", "of long ago"),
            ]
        )
        assert kept(store) == PROMPTS.keys()


# --------------------------------------------------------------------------- the rows


@pytest.mark.parametrize(
    "edit",
    [
        "set nbytes = nbytes + 1",
        "set checksums = substr(checksums, 1, 32)",
        "set checksums = cast(substr(checksums, 1, 32) || zeroblob(16) as blob)",
        "set end_token = end_token + 1",
    ],
)
def test_an_edited_row_is_put_right(root: Path, edit: str) -> None:
    """What the row says of a whole file, and the file does not confirm, is found, and
    what the file says takes its place."""
    with sql(root) as db:
        db.execute(f"update snapshots {edit} where label = 'alone'")
    with opened(root) as store:
        assert {finding.kind for finding in mend(store)} == {"index"}
        assert kept(store) == PROMPTS.keys()


@pytest.mark.parametrize("edit", ["zeroblob(32)", "substr(checksums, 17)"])
def test_a_row_of_another_header_goes_with_its_file(root: Path, edit: str) -> None:
    """Who wrote the file is then not known, however whole it is: it is not served."""
    with sql(root) as db:
        db.execute(f"update snapshots set checksums = {edit} where label = 'alone'")
    with opened(root) as store:
        assert {finding.kind for finding in mend(store)} == {"corrupt"}
        assert kept(store) == PROMPTS.keys() - {"alone"}
        store.insert(NS, ALONE, kv_of(ALONE), label="alone")
        store.flush()
        assert kept(store) == PROMPTS.keys()


def test_a_row_of_another_name_goes_and_its_file_gets_a_row(root: Path) -> None:
    """The row points nowhere; the file is whole, and loses no more than its label."""
    with sql(root) as db:
        db.execute(
            "update snapshots set name = lower(hex(randomblob(16))) "
            "where label = 'alone'"
        )
    with opened(root) as store:
        assert {finding.kind for finding in mend(store)} == {"dangling", "orphan"}
        assert kept(store) == PROMPTS.keys() - {"alone"}
        assert store.match(NS, [*ALONE, 0]).n_tokens == len(ALONE)
        store.insert(NS, ALONE, kv_of(ALONE), label="alone")
        store.flush()
        assert kept(store) == PROMPTS.keys()


@pytest.mark.parametrize(
    "edit",
    [
        "set tokens = (select tokens from snapshots where label = 'other')",
        "set end_digest = zeroblob(16)",
        "set first_token = first_token + 1",
        "set layout = (select layout from snapshots where label = 'other')",
        "set (parent, start_token, end_token) = "
        "((select id from snapshots where label = 'base'), 1, 101)",
    ],
)
def test_a_row_that_is_wrong_about_its_tokens_is_put_right(
    root: Path, edit: str
) -> None:
    """A row that gives a file to other tokens, layers or parents must be found: it
    serves wrong KV, or never serves."""
    other = [3, *tokens(99, seed=7)]
    with opened(root) as store:
        store.insert(Namespace("n"), other, kv_of(other), label="other")
    with sql(root) as db:
        db.execute(f"update snapshots {edit} where label = 'alone'")
    with opened(root) as store:
        assert mend(store)
        assert store.match(NS, [*other, 0]).n_tokens == 0
        assert kept(store) == PROMPTS.keys()


def test_rows_without_their_parent_get_it_back(root: Path) -> None:
    """The file of the row that is gone is whole: it loses no more than its label."""
    with sql(root) as db:
        db.execute("delete from snapshots where label = 'base'")
        db.execute("delete from removed")  # a row that is lost was not removed
    with opened(root) as store:
        assert "index" in {finding.kind for finding in mend(store)}
        assert kept(store) == PROMPTS.keys() - {"base"}
        assert store.match(NS, [*BASE, 0]).n_tokens == len(BASE)


def test_lost_digests_cost_no_prompt(root: Path) -> None:
    """Without, or with wrong, digests of boundaries prompts are found all the same."""
    with sql(root) as db:
        db.execute("delete from prefixes")
    with opened(root) as store:
        assert kept(store) == PROMPTS.keys()
    with sql_again(root) as db:
        (owner,) = db.execute("select id from snapshots where label = 'alone'")
        digests = [end_of(ids) for ids in (BASE, TIP, BRANCH)]
        db.executemany(
            "insert or ignore into prefixes values (?, 256, ?)",
            [(digest, *owner) for digest in digests],
        )
    with opened(root) as store:
        for ids in PROMPTS.values():
            match = store.match(NS, [*ids, 0])
            if match.cache is not None:
                right = cut_to(kv_of(ids), match.n_tokens)
                assert prints(match.cache) == prints(right)


@contextlib.contextmanager
def sql_again(root: Path) -> Iterator[sqlite3.Connection]:
    """Edit the index once its guards are gone."""
    db = sqlite3.connect(root / "index.db")
    try:
        with db:
            yield db
    finally:
        db.close()


def end_of(ids: list[int]) -> bytes:
    """Return the digest of the first block of a prompt."""
    from promptstore import codecs, prefix
    from promptstore.layers import to_text
    from promptstore.tokens import as_tokens

    seed = prefix.seed(NS.digest, to_text(codecs.describe(kv_of([1]))))
    return prefix.end_digest(seed, as_tokens(ids[:256]))


# ------------------------------------------------------------------------------ mayhem


@pytest.mark.parametrize("seed", range(6))
def test_mayhem(root: Path, rows: dict[str, SnapshotInfo], seed: int) -> None:
    """Any mixture of damage is mended at once, and all that is left is right."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", seed))
    print(f"PROMPTSTORE_SEED={seed}")
    rng = random.Random(seed)
    lost: set[str] = set()
    with sql(root) as db:
        for victim in rng.sample(sorted(rows), rng.randrange(1, 4)):
            path = path_of(root, rows[victim])
            if rng.random() < 0.3:
                db.execute(
                    "update snapshots set checksums = cast(substr(checksums, 1, 16) || "
                    "zeroblob(length(checksums) - 16) as blob) where name = ?",
                    (rows[victim].id,),
                )
            else:
                lost |= ON_IT[victim]
                DAMAGE[rng.choice(sorted(DAMAGE.keys() - {"foreign", "link"}))][1](path)
    for _ in range(rng.randrange(4)):
        name = secrets.token_hex(16)
        path = root / "snapshots" / name[:2] / rng.choice([f"{name}.tmp", "notes"])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.randbytes(rng.randrange(5000)))
    with opened(root) as store:
        mend(store)
        assert kept(store) == PROMPTS.keys() - lost
        for name, ids in PROMPTS.items():
            store.insert(NS, ids, kv_of(ids), label=name)
            store.flush()
        assert kept(store) == PROMPTS.keys()
        mend(store)
