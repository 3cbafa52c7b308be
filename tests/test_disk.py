"""Facts about the disk tier alone: files, index and budget, without live caches."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import arrays_cache, cut_to, fingerprints, kv_of, prints, tokens

from promptstore import snapshot
from promptstore.budget import Budget, Limits
from promptstore.capture import take_in
from promptstore.check import check
from promptstore.delta import NewSnapshot
from promptstore.disk import DiskTier, LookUp
from promptstore.errors import (
    NotCovered,
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
    StoreUnavailable,
    TooLarge,
)
from promptstore.index import Found, Index, Row
from promptstore.layers import Layer, RowPart, token_bytes
from promptstore.tokens import as_tokens
from promptstore.types import Namespace

NS = Namespace("m")
HEADS, DIM = 8, 64
PART_KEYS = RowPart("keys", HEADS, DIM, "F32")
PART_VALUES = RowPart("values", HEADS, DIM, "F32")
LAYERS = (Layer("full/1", (PART_KEYS, PART_VALUES)),) * 2
N = 100
UNIT = N * token_bytes(LAYERS)  # much more than what the index grows by


def open_tier(root: Path, **options: Any) -> DiskTier:
    """Open a tier of 1 GiB, unless told else."""
    options = {"max_bytes": 1 << 30, "verify": "first-use", "read_only": False} | (
        options
    )
    return DiskTier(root, Limits(options.pop("max_bytes")), **options)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    """An open tier; whatever a test does, it leaves nothing wrong on disk."""
    tier = open_tier(tmp_path / "store")
    try:
        yield tier
        assert [each for each in check(tier) if each.kind != "foreign"] == []
        assert tier.root.nbytes() == walk(tier.root.path)
    finally:
        tier.close()


def walk(root: Path) -> int:
    """Return the bytes of all files, as somebody else counts them."""
    files = (path for path in root.rglob("*") if path.is_symlink() or path.is_file())
    return sum(path.lstat().st_size for path in files)


def new(ids: Sequence[int], first: int = 0, **fields: Any) -> NewSnapshot:
    """Return a prompt to save, of which the rows from *first* on are given."""
    taken = take_in(kv_of(ids, n_kv_heads=HEADS, head_dim=DIM), len(ids))
    assert taken.layers == LAYERS
    capture = taken.capture_rows(first) if first else taken.capture()
    if (ttl_s := fields.pop("ttl_s", None)) is not None:
        fields["expires_ns"] = time.time_ns() + int(ttl_s * 1e9)
    fields = {"namespace": NS, "kind": "assistant"} | fields
    return NewSnapshot(tokens=as_tokens(list(ids)), capture=capture, **fields)


def look_up(disk: DiskTier, ids: Sequence[int]) -> LookUp | None:
    """Return what the index has of a prompt, in the best of its layouts."""
    found, misfits = disk.look_up(NS, as_tokens(list(ids)), lambda _: True)
    assert misfits == []
    return found


def n_found(disk: DiskTier, ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt the index has."""
    found = look_up(disk, ids)
    return 0 if found is None else found.found.n_tokens


def load(disk: DiskTier, ids: Sequence[int]) -> list[Any]:
    """Load all that is stored of a prompt."""
    found = look_up(disk, ids)
    assert found is not None
    return disk.load(found, len(ids) + 1)


def holds(disk: DiskTier, ids: Sequence[int], n_tokens: int | None = None) -> bool:
    """Whether the first tokens of a prompt are stored with the right rows."""
    n_tokens = len(ids) if n_tokens is None else n_tokens
    assert n_found(disk, ids) == n_tokens
    right = kv_of(ids, n_kv_heads=HEADS, head_dim=DIM)
    return prints(load(disk, ids)) == prints(cut_to(right, n_tokens))


def row_of(disk: DiskTier, ids: Sequence[int]) -> Row:
    """Return the snapshot that ends with a prompt."""
    (row,) = [row for row in disk.index.rows() if row.end == len(ids)
              and disk.index.tokens_of(row).tolist() == list(ids)]  # fmt: skip
    return row


def file_of(disk: DiskTier, ids: Sequence[int]) -> Path:
    """Return the file of that snapshot."""
    return disk.root.path_of(row_of(disk, ids).name)


def prompts(n: int, length: int = N) -> list[list[int]]:
    """Return *n* prompts that share no beginning."""
    return [[number, *tokens(length - 1, seed=number)] for number in range(n)]


def full_for(disk: DiskTier, spare: float) -> None:
    """Set the budget to what is there and *spare* more snapshots of one unit."""
    disk.budget.limits = Limits(disk.root.nbytes() + int(spare * UNIT))


def orphan(disk: DiskTier, nbytes: int, suffix: str = ".safetensors") -> Path:
    """Make a file that has the name and the place of a snapshot, but no row."""
    path = disk.root.path_of(secrets.token_hex(16)).with_suffix(suffix)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(nbytes))
    return path


# ------------------------------------------------------------------------- saving


def test_a_save_is_one_file_and_one_row(disk: DiskTier) -> None:
    """What was saved is found, loads with the right rows, and is counted."""
    ids = tokens(N)
    disk.save(new(ids))
    assert holds(disk, ids)
    (row,) = disk.index.rows()
    assert disk.root.files() == [disk.root.path_of(row.name)]
    assert row.nbytes == disk.root.files()[0].stat().st_size == disk.bytes_written


def test_saving_again_writes_nothing(disk: DiskTier) -> None:
    """The same prompt, or the head of it, is stored once; that is a use of it."""
    ids = tokens(N)
    disk.save(new(ids))
    before, n_written = row_of(disk, ids), disk.bytes_written
    for _ in range(20):
        disk.save(new(ids))
        disk.save(new(ids[:50]))
    assert disk.bytes_written == n_written
    assert len(disk.root.files()) == disk.index.n_snapshots() == 1
    assert row_of(disk, ids).used_ns > before.used_ns


def test_only_what_is_new_is_written(disk: DiskTier) -> None:
    """A longer prompt adds its end, a branch starts where it diverges."""
    ids = tokens(300)
    branch = [*ids[:270], *tokens(40, seed=9)]
    disk.save(new(ids))
    disk.save(new([*ids, *range(20)], first=280))
    disk.save(new(branch))
    longer, other = row_of(disk, [*ids, *range(20)]), row_of(disk, branch)
    assert (longer.start, longer.end) == (300, 320)
    assert (other.start, other.end) == (270, 310)
    assert longer.parent == other.parent == row_of(disk, ids).id
    assert holds(disk, [*ids, *range(20)])
    assert holds(disk, branch)


def test_rows_that_are_not_given_are_not_invented(disk: DiskTier) -> None:
    """If what a delta continues is gone, nothing is written, and that is said."""
    ids = tokens(N)
    with pytest.raises(NotCovered, match=r"\(0, 60\)"):
        disk.save(new(ids, first=60))
    assert disk.root.files() == []
    disk.save(new(ids[:60]))
    disk.save(new(ids, first=60))
    assert holds(disk, ids)


@pytest.mark.parametrize("step", ["write", "rename", "row"])
def test_a_failed_save_leaves_nothing(
    disk: DiskTier, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails there is neither file nor row, and the next save works."""
    ids = tokens(N)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    real = snapshot.write

    def write_half(fd: int, contents: Any, body: Any) -> None:
        real(fd, contents, body)
        os.truncate(fd, os.fstat(fd).st_size // 2)
        fail()

    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr(snapshot, "write", write_half)
        elif step == "rename":
            patch.setattr(os, "rename", fail)
        else:
            patch.setattr(Index, "add", fail)
        with pytest.raises(OSError, match="no space"):
            disk.save(new(ids))
    assert disk.root.files() == []
    assert disk.index.rows() == []
    disk.save(new(ids))
    assert holds(disk, ids)


def test_a_parent_that_goes_meanwhile_is_written_as_well(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process evicts what a save continues: the save starts over, whole."""
    ids = tokens(N)
    disk.save(new(ids[:60]))
    real, other = snapshot.write, open_tier(disk.root.path)

    def write(*args: Any) -> Any:
        if other.index.n_snapshots():
            other.evict(0)
        return real(*args)

    monkeypatch.setattr(snapshot, "write", write)
    try:
        disk.save(new(ids))
    finally:
        other.close()
    assert row_of(disk, ids).start == 0
    assert holds(disk, ids)


@pytest.fixture
def overtaken(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Sequence[int]], None]]:
    """Have another process store a prompt while this one's save is half way."""
    real, other = snapshot.write, open_tier(disk.root.path)
    left: list[Sequence[int]] = []

    def write(*args: Any) -> Any:
        if left:
            other.save(new(left.pop()))
        return real(*args)

    monkeypatch.setattr(snapshot, "write", write)
    yield left.append
    other.close()


def test_two_that_store_one_prompt_end_with_one(
    disk: DiskTier, overtaken: Callable[[Sequence[int]], None]
) -> None:
    """The one that comes second drops its file and keeps the first's row (C02)."""
    ids = tokens(N)
    overtaken(ids)
    disk.save(new(ids))
    assert len(disk.root.files()) == disk.index.n_snapshots() == 1
    assert holds(disk, ids)


@pytest.mark.parametrize("stored", [0, 20])
def test_of_two_that_begin_alike_one_continues_the_other(
    disk: DiskTier, overtaken: Callable[[Sequence[int]], None], stored: int
) -> None:
    """However they race: of two chains side by side a look-up would see one, and what
    only the other holds of a window would be lost."""
    ids = tokens(N)
    other = [*ids[:60], *tokens(N - 60, seed=1)]
    if stored:
        disk.save(new(ids[:stored]))
    overtaken(other)
    disk.save(new(ids))
    assert row_of(disk, ids).start == 60
    assert holds(disk, ids)
    assert holds(disk, other)


@pytest.mark.parametrize("kind", ["full", "state"])
def test_rows_that_came_between_two_looks_are_not_added_to(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another process stores a prompt just after this one missed it: no row comes
    twice, and a state is not kept away by a checkpoint without one."""
    ids = tokens(N)
    cache = kv_of(ids, n_layers=1) if kind == "full" else arrays_cache(N)
    capture = take_in(cache, N).capture()
    prompt = NewSnapshot(NS, as_tokens(ids), capture, "assistant")
    other = open_tier(disk.root.path)
    others = [prompt]
    real = Index.find

    def find(self: Index, *args: Any) -> Found:
        found = real(self, *args)
        if others and self is disk._writer:
            other._save_rows(other._writer.layout(NS, prompt.text), others.pop())
        return found

    monkeypatch.setattr(Index, "find", find)
    disk.save(prompt)
    other.close()
    assert disk.index.n_snapshots() == (1 if kind == "full" else 2)
    assert fingerprints(load(disk, ids), N) == fingerprints(cache, N)


def test_a_state_inside_a_prompt_that_lives_longer_is_stored(disk: DiskTier) -> None:
    """All its rows are there already, in rows of another life; its state is not."""
    ids = tokens(N)
    for n, ttl_s in ((N, 2000.0), (N // 2, 1000.0)):
        capture = take_in(arrays_cache(n), n).capture()
        until_ns = time.time_ns() + int(ttl_s * 1e9)
        prompt = NewSnapshot(
            NS, as_tokens(ids[:n]), capture, "assistant", expires_ns=until_ns
        )
        disk.save(prompt)
        found = load(disk, ids[:n])
        assert fingerprints(found, n) == fingerprints(arrays_cache(n), n)


def test_a_pin_on_what_has_just_gone_is_no_success(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin that was acknowledged is there, whatever another process evicts."""
    ids = tokens(N)
    disk.save(new(ids))
    other = open_tier(disk.root.path)
    real = Index.mark

    def mark(self: Index, *args: Any, **wish: Any) -> None:
        other.evict(0)
        real(self, *args, **wish)

    monkeypatch.setattr(Index, "mark", mark)
    with pytest.raises(NotCovered):
        disk.save(new(ids, pinned=True))
    monkeypatch.setattr(Index, "mark", real)
    disk.save(new(ids, pinned=True))
    other.evict(0)
    other.close()
    assert holds(disk, ids)


def test_a_smaller_budget_does_not_cost_what_was_stored_before(
    disk: DiskTier,
) -> None:
    """An insert that writes nothing removes nothing, though all is too large."""
    ids = tokens(N)
    disk.save(new(ids, pinned=True))
    disk.budget.limits = Limits(UNIT)
    with pytest.raises(TooLarge):
        disk.save(new(ids))
    assert holds(disk, ids)


def test_the_second_still_gets_its_label_and_its_pin(
    disk: DiskTier, overtaken: Callable[[Sequence[int]], None]
) -> None:
    """Whoever loses the race has stored a prompt under its label all the same."""
    ids = tokens(N)
    overtaken(ids)
    disk.save(new(ids, label="mine", pinned=True, ttl_s=1000.0))
    row = row_of(disk, ids)
    assert (row.label, row.pinned) == ("mine", True)
    assert row.expires_ns is None  # the first one's is for good


# ------------------------------------------------------------------------- loading


def test_a_prefix_loads_from_the_chain(disk: DiskTier) -> None:
    """Any number of tokens loads, from one snapshot or from several."""
    ids = tokens(600)
    for end in (100, 300, 600):
        disk.save(new(ids[:end]))
    for n_tokens in (1, 100, 101, 255, 256, 257, 300, 555, 600):
        assert holds(disk, [*ids[:n_tokens], 1000], n_tokens)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("gone", SnapshotMissing),
        ("short", SnapshotCorrupt),
        ("flipped", SnapshotCorrupt),
        ("link", SnapshotCorrupt),
        ("EMFILE", SnapshotUnreadable),
        ("EIO", SnapshotUnreadable),
    ],
)
def test_trouble_with_a_file_has_a_kind(
    disk: DiskTier, trouble: str, error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Missing, damaged and unreadable are told apart: only the first two prove."""
    ids = tokens(N)
    disk.save(new(ids))
    path = file_of(disk, ids)
    good = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(getattr(errno, trouble), trouble)

    if trouble == "EMFILE":
        monkeypatch.setattr(os, "open", fail)
    elif trouble == "EIO":
        monkeypatch.setattr(os, "preadv", fail)
    else:
        path.unlink()
        if trouble == "short":
            path.write_bytes(good[:-1])
        elif trouble == "flipped":
            path.write_bytes(good[:9000] + bytes([good[9000] ^ 1]) + good[9001:])
        elif trouble == "link":
            (disk.root.path / "elsewhere").write_bytes(good)
            path.symlink_to(disk.root.path / "elsewhere")
    with pytest.raises(error) as caught:
        load(disk, ids)
    assert caught.value.path == path  # type: ignore[attr-defined]
    monkeypatch.undo()
    path.unlink(missing_ok=True)
    path.write_bytes(good)
    path.chmod(0o600)
    assert holds(disk, ids)


@pytest.mark.parametrize(
    ("verify", "first", "later"),
    [("first-use", True, True), ("always", True, True), ("off", False, False)],
)
def test_verify_says_when_bytes_are_compared(
    tmp_path: Path, verify: str, first: bool, later: bool
) -> None:
    """A flipped bit is noticed at the first use of the file as it is, at each use, or
    never. The first use of a file that was written to is a first use."""
    ids, noticed = tokens(N), []
    for used_before in (False, True):
        disk = open_tier(tmp_path / str(used_before), verify=verify)
        disk.save(new(ids))
        if used_before:
            load(disk, ids)
        path = file_of(disk, ids)
        data = bytearray(path.read_bytes())
        data[-8 * N - 1] ^= 0x40
        path.write_bytes(data)
        try:
            load(disk, ids)
        except SnapshotCorrupt:
            noticed.append(True)
        else:
            noticed.append(False)
        disk.close()
        if verify == "first-use":  # what one process compared, another has not
            disk = open_tier(tmp_path / str(used_before), verify=verify)
            with pytest.raises(SnapshotCorrupt):
                load(disk, ids)
            disk.close()
    assert noticed == [first, later]


def test_what_was_compared_is_not_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second use of a file that nobody touched costs no checksum."""
    ids, calls = tokens(N), []
    disk = open_tier(tmp_path / "store", verify="first-use")
    disk.save(new(ids))
    real = snapshot.SnapshotFile._expect

    def expect(self: snapshot.SnapshotFile, *args: Any) -> None:
        calls.append(args)
        real(self, *args)

    monkeypatch.setattr(snapshot.SnapshotFile, "_expect", expect)
    load(disk, ids)
    n_first = len(calls)
    load(disk, ids)
    disk.close()
    assert 0 < n_first == len(calls)


def test_size_is_compared_always(tmp_path: Path) -> None:
    """Even unverified, a file of another size is not read."""
    disk = open_tier(tmp_path / "store", verify="off")
    ids = tokens(N)
    disk.save(new(ids))
    with file_of(disk, ids).open("ab") as file:
        file.write(b"x")
    with pytest.raises(SnapshotCorrupt, match="bytes instead of"):
        load(disk, ids)
    disk.close()


def test_read_only_changes_nothing(disk: DiskTier) -> None:
    """A reader finds and loads, and leaves every file and every row as it was."""
    ids = tokens(N)
    disk.save(new(ids))
    rows, files = disk.index.rows(), disk.root.files()
    reader = open_tier(disk.root.path, read_only=True)
    assert holds(reader, ids)
    reader.close()
    assert [row.name for row in disk.index.rows()] == [row.name for row in rows]
    assert disk.index.rows()[0].used_ns == rows[0].used_ns
    assert disk.root.files() == files


def test_read_only_needs_a_store(tmp_path: Path) -> None:
    """A reader makes no store where none is."""
    with pytest.raises(StoreUnavailable, match="holds no store"):
        open_tier(tmp_path / "store", read_only=True)
    assert not (tmp_path / "store").exists()


# -------------------------------------------------------------------------- budget


def test_everything_under_the_root_counts(disk: DiskTier) -> None:
    """Files that nobody knows, at any depth, are part of the budget (R05)."""
    before = disk.root.nbytes()
    deep = disk.root.path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(bytes(1234))
    (disk.root.path / "snapshots" / "x").write_bytes(bytes(1000))
    (disk.root.path / "link").symlink_to("/usr")
    assert disk.root.nbytes() == before + 2234 + len("/usr")


def test_foreign_files_leave_less_room(disk: DiskTier) -> None:
    """Snapshots make room for a foreign file, which itself is left alone."""
    first, second, third = prompts(3)
    disk.save(new(first))
    disk.save(new(second))
    full_for(disk, 1.5)
    foreign = disk.root.path / "foreign"
    foreign.write_bytes(bytes(UNIT))
    disk.save(new(third))
    assert [n_found(disk, ids) for ids in (first, second, third)] == [0, N, N]
    assert foreign.stat().st_size == UNIT
    assert disk.root.nbytes() <= disk.budget.limits.max_bytes


@pytest.mark.parametrize("suffix", [".safetensors", ".tmp"])
def test_orphans_go_before_snapshots(disk: DiskTier, suffix: str) -> None:
    """What a crash left behind is swept up first, so that nothing good goes (R05)."""
    first, second, third = prompts(3)
    disk.save(new(first))
    disk.save(new(second))
    full_for(disk, 1.5)
    left = orphan(disk, UNIT, suffix)
    disk.save(new(third))
    assert not left.exists()
    assert [n_found(disk, ids) for ids in (first, second, third)] == [N, N, N]
    assert disk.budget.n_evicted == 0


def test_a_file_that_was_just_created_is_not_swept_once_it_is_locked(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between creating and locking a file its maker cannot be told from a dead one."""
    name = secrets.token_hex(16)
    with disk.root.new_file(name) as (_, publish):
        path = disk.root.path_of(name).with_suffix(".tmp")
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "_lost", lambda _: [path])
            disk.budget.sweep()
        publish()
    disk.root.unlink(name)


def test_orphans_go_before_snapshots_when_asked_to_evict(disk: DiskTier) -> None:
    """Who asks for room gets that of orphans before anything good goes."""
    ids = prompts(1)[0]
    disk.save(new(ids))
    left = orphan(disk, UNIT)
    disk.evict(disk.root.nbytes() - UNIT // 2)
    assert not left.exists()
    assert n_found(disk, ids) == N


def test_the_first_save_sweeps(disk: DiskTier) -> None:
    """Orphans go even while there is room."""
    left = orphan(disk, 10)
    disk.save(new(tokens(N)))
    assert not left.exists()


def test_what_can_never_fit_evicts_nothing(disk: DiskTier) -> None:
    """A prompt larger than the budget is refused at the door (R02)."""
    small = prompts(5)
    for ids in small:
        disk.save(new(ids))
    disk.budget.limits = Limits(disk.root.nbytes())
    with pytest.raises(TooLarge) as caught:
        disk.save(new([9, *tokens(800)]))
    assert caught.value.budget_bytes == disk.budget.limits.max_bytes
    assert caught.value.nbytes > 8 * UNIT
    assert [n_found(disk, ids) for ids in small] == [N] * 5
    assert disk.budget.n_evicted == 0


def test_what_can_never_fit_beside_its_chain_evicts_nothing(disk: DiskTier) -> None:
    """A delta is small, but what it continues must stay as well."""
    ids, other = [7, *tokens(499)], prompts(1)[0]
    disk.save(new(other))
    disk.save(new(ids[:300]))
    disk.budget.limits = Limits(disk.root.nbytes() - UNIT // 2)
    with pytest.raises(TooLarge):
        disk.save(new(ids, first=300))
    assert n_found(disk, other) == N
    assert n_found(disk, ids) == 300
    assert disk.budget.n_evicted == 0


@pytest.mark.parametrize("obstacle", ["foreign", "pinned"])
def test_what_cannot_fit_beside_what_must_stay_evicts_nothing(
    disk: DiskTier, obstacle: str
) -> None:
    """Foreign files and pinned prompts take room that no eviction can give (R02)."""
    pinned, *others = prompts(4)
    disk.save(new(pinned, pinned=obstacle == "pinned"))
    for ids in others:
        disk.save(new(ids))
    full_for(disk, 0.5)
    big = [9, *tokens(380)]
    if obstacle == "foreign":
        (disk.root.path / "foreign").write_bytes(bytes(UNIT))
    with pytest.raises(TooLarge):
        disk.save(new(big))
    assert [n_found(disk, ids) for ids in others] == [N] * 3


def test_the_least_recently_used_leaf_goes_first(disk: DiskTier) -> None:
    """Leaves go before what they continue; a use is one of the whole chain (R01)."""
    root = [1, *tokens(99)]
    used, unused = [*root, *tokens(50, seed=1)], [*root, *tokens(60, seed=2)]
    alone = [2, *tokens(79)]
    for ids in (root, used, unused, alone):
        disk.save(new(ids))
    found = look_up(disk, used)
    assert found is not None
    assert disk.note_use(row.id for row in found.found.chain)
    disk.save_uses()
    evicted = []
    for n_evicted in range(1, 5):
        before = {row.name: row.end for row in disk.index.rows()}
        disk.evict(disk.root.nbytes() - 1)
        (gone,) = before.keys() - disk.index.names()
        evicted.append(before[gone])
        assert {path.stem for path in disk.root.files()} == disk.index.names()
        assert disk.budget.n_evicted == n_evicted
    assert evicted == [len(unused), len(alone), len(used), len(root)]


def test_pins_stay_and_expired_go_first(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin protects a whole chain; an expired prompt goes, pinned or not."""
    pinned, expired, other = prompts(3)
    disk.save(new(pinned[:50]))
    disk.save(new(pinned, pinned=True))
    disk.save(new(other))
    disk.save(new(expired, pinned=True, ttl_s=5.0))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 6 * 10**9)
    disk.evict(disk.root.nbytes() - 1)
    assert n_found(disk, expired) == 0
    assert [n_found(disk, ids) for ids in (pinned, other)] == [N, N]
    disk.evict(0)
    assert n_found(disk, pinned) == N
    assert disk.index.n_snapshots() == 2
    disk.set_pinned([row_of(disk, pinned).id], False)
    disk.evict(0)
    assert disk.index.rows() == []
    assert disk.root.files() == []


def test_what_a_save_continues_is_spared(disk: DiskTier) -> None:
    """The chain stays while its end is written, though it is the oldest of all."""
    chain, other, newest = [7, *tokens(299)], *prompts(2)
    for ids in (chain[:100], chain[:200], other, newest):
        disk.save(new(ids))
    full_for(disk, 0.5)
    disk.save(new(chain, first=200))
    assert holds(disk, chain)
    assert [n_found(disk, ids) for ids in (other, newest)] == [0, N]


def test_the_sums_are_those_of_the_directory(disk: DiskTier) -> None:
    """After any of it the bytes are within the budget and equal a walk (Q09)."""
    disk.budget.limits = Limits(disk.root.nbytes() + 4 * UNIT)
    for number in range(12):
        disk.save(new([number % 5, *tokens(60 + number, seed=number % 5)]))
        most = disk.budget.limits.max_bytes
        assert disk.root.nbytes() == walk(disk.root.path) <= most
        assert {path.stem for path in disk.root.files()} == disk.index.names()


def test_rows_without_files_do_not_count_as_freed(disk: DiskTier) -> None:
    """A row that points nowhere frees nothing: eviction goes on until there is room."""
    gone, *others, last = prompts(5)
    for ids in (gone, *others):
        disk.save(new(ids))
    file_of(disk, gone).unlink()
    full_for(disk, 0.5)
    disk.save(new(last))
    assert n_found(disk, last) == N
    assert disk.root.nbytes() <= disk.budget.limits.max_bytes


def test_the_index_does_not_eat_the_budget(tmp_path: Path) -> None:
    """In a small budget the log of the index leaves room for prompts, for ever."""
    disk = open_tier(tmp_path / "store", max_bytes=600_000 + UNIT)
    try:
        for number in range(60):
            ids = [number, *tokens(10, seed=number)]
            disk.save(new(ids))
            assert n_found(disk, ids) == len(ids)
            assert disk.root.nbytes() <= disk.budget.limits.max_bytes
    finally:
        disk.close()


# --------------------------------------------------------------------------- sweep


def test_sweep_leaves_what_is_not_ours(disk: DiskTier, tmp_path: Path) -> None:
    """Only files with the name and in the place of a snapshot are ever removed."""
    ids = tokens(N)
    disk.save(new(ids))
    name = secrets.token_hex(16)
    place = disk.root.path_of(name).parent
    place.mkdir(exist_ok=True)
    elsewhere = disk.root.path / "snapshots" / ("00" if name[:2] != "00" else "01")
    elsewhere.mkdir(exist_ok=True)
    target = tmp_path / "target"
    target.write_bytes(b"target")
    foreign = [
        disk.root.path / "notes.txt",
        disk.root.path / f"{name}.safetensors",
        disk.root.path / "snapshots" / f"{name}.safetensors",
        elsewhere / f"{name}.safetensors",
        place / f"{name}.json",
        place / f"{name}.safetensors.part",
    ]
    for path in foreign:
        path.write_bytes(b"foreign")
    link = place / f"{name}.safetensors"
    link.symlink_to(target)
    (place / f"{name}.tmp").mkdir()
    ours = [orphan(disk, 5), orphan(disk, 5, ".tmp")]
    disk.budget.sweep()
    assert all(path.read_bytes() == b"foreign" for path in foreign)
    assert link.is_symlink()
    assert target.read_bytes() == b"target"
    assert (place / f"{name}.tmp").is_dir()
    assert not any(path.exists() for path in ours)
    assert holds(disk, ids)
    assert {each.kind for each in check(disk)} == {"foreign"}


def test_sweep_leaves_what_is_being_written(disk: DiskTier) -> None:
    """A file that some process is just making has no row yet, but a lock."""
    path = orphan(disk, 0, ".tmp")
    path.unlink()
    with snapshot.create(path):
        disk.budget.sweep()
        assert path.exists()
        assert check(disk) == []
        os.rename(path, path.with_suffix(".safetensors"))
        disk.budget.sweep()
        assert path.with_suffix(".safetensors").exists()
    disk.budget.sweep()
    assert not path.with_suffix(".safetensors").exists()


def test_opening_deletes_nothing(disk: DiskTier) -> None:
    """A smaller budget, or another model, costs nothing until something is saved."""
    for ids in prompts(3):
        disk.save(new(ids))
    left = orphan(disk, 10)
    before = set(disk.root.files())
    other = open_tier(disk.root.path, max_bytes=1)
    assert set(other.root.files()) == before
    other.close()
    left.unlink()


def test_uses_are_saved_in_one_go(disk: DiskTier) -> None:
    """The first use asks for a save; later ones join it until it is done."""
    ids = tokens(N)
    disk.save(new(ids))
    before = row_of(disk, ids)
    chain = [before.id]
    assert disk.note_use(chain)
    assert not disk.note_use(chain)
    assert not disk.note_use([])
    disk.save_uses()
    assert row_of(disk, ids).used_ns > before.used_ns
    assert disk.note_use(chain)
    disk.save_uses()
