"""Many processes on one root: each is served what is right, and none harms another."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest
from promptstore.migrations import NAMES
from test_golden import ROOTS
from test_migrations import applied, modes
from test_store import run
from universe import Prompt, universe

from promptstore import PromptStore, WriteFailed, failpoints
from promptstore.index import database

WAIT_S = 60
N_PROCESSES = 12
TOOLS = Path(__file__).parents[1] / "tools"
ALL = universe(0, n_conversations=1)
ONE = ALL[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "store"


def together(
    zygote: ForkServerContext, act: Callable[..., None], arguments: Sequence[Any]
) -> None:
    """Have a process act on each of *arguments*, all at once; none may fail."""
    barrier = zygote.Barrier(len(arguments))
    processes = [zygote.Process(target=act, args=(barrier, *x)) for x in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def files(root: Path) -> list[Path]:
    """Return the snapshot files below a root."""
    return sorted(root.rglob("*.safetensors"))


# ------------------------------------------------------------------------- opening


def open_and_add(barrier: Barrier, root: Path, number: int) -> None:
    """Open a root that all open at once, and add a prompt. In a process of its own."""
    barrier.wait(WAIT_S)
    with PromptStore.open(root) as store:
        prompt = Prompt("full", (number, *ONE.ids))
        prompt.insert(store)
        store.flush()
        assert prompt.is_served(store)
        assert store.stats().errors == {}


@pytest.mark.parametrize("age", ["fresh", *NAMES[:-1]])
def test_many_processes_open_a_root_at_once(
    zygote: ForkServerContext, root: Path, age: str
) -> None:
    """A new root is made once, and an old one brought up to date once (Q03)."""
    if age != "fresh":
        shutil.copytree(ROOTS / age / "store", root)
    n_before = len(files(root))
    together(zygote, open_and_add, [(root, number) for number in range(N_PROCESSES)])
    with PromptStore.open(root) as store:
        assert store.check() == []
        assert store.stats().n_snapshots == n_before + N_PROCESSES
    assert applied(root / "index.db") == list(NAMES)
    if age == "fresh":
        assert {modes(root)[name] for name in ("index.db", "store.lock")} == {"0o600"}


# ------------------------------------------------------------------- the same prompt


def insert_all(barrier: Barrier, root: Path, number: int) -> None:
    """Insert and match what all the others insert and match, in another order."""
    barrier.wait(WAIT_S)
    mine = ALL[number:] + ALL[:number]
    with PromptStore.open(root, memory_bytes=0) as store:
        for prompt in mine:
            if number % 3:
                prompt.insert(store)
            prompt.match(store)
        store.flush()
        assert store.stats().errors == {}
        if number % 3:
            assert all(prompt.is_served(store) for prompt in ALL)


def test_processes_that_insert_the_same_end_with_one_of_each(
    zygote: ForkServerContext, root: Path
) -> None:
    """No error, no mixture, one row and one file of each thing to store (C02)."""
    together(zygote, insert_all, [(root, number) for number in range(6)])
    with PromptStore.open(root, memory_bytes=0) as store:
        assert all(prompt.is_served(store) for prompt in ALL)
        assert store.check() == []
        rows = [
            (info.namespace.model, info.end, info.start == info.end)
            for info in store.snapshots()
        ]
        assert len(rows) == len(set(rows)) == len(files(root))
        checkpoints = [kind for kind, _, is_checkpoint in rows if is_checkpoint]
        assert checkpoints.count("state") == sum(x.kind == "state" for x in ALL)
        assert "full" not in checkpoints


# --------------------------------------------------------------------- half a prompt


def insert_slowly(root: Path, reached: Any, go_on: Event) -> None:
    """Insert a prompt, stopping at each step. In a process of its own."""
    with PromptStore.open(root) as store:

        def hook(step: str) -> None:
            reached.send(step)
            assert go_on.wait(WAIT_S)
            go_on.clear()

        failpoints.hook = hook
        ONE.insert(store)
        store.flush()
        failpoints.hook = None
    reached.send("")


def test_nobody_sees_half_a_prompt(zygote: ForkServerContext, root: Path) -> None:
    """Until its row is committed a prompt is absent, then it is whole; what is being
    written is no finding, and no sweep takes it (W11)."""
    here, there = zygote.Pipe(duplex=False)
    go_on = zygote.Event()
    writer = zygote.Process(target=insert_slowly, args=(root, there, go_on))
    writer.start()
    seen = {}
    while step := here.recv():
        with PromptStore.open(root, memory_bytes=0) as store:
            assert store.check() == []
            if step != "insert: row written":  # it has the database's write lock
                store.repair([])
            seen[step] = ONE.match(store).n_tokens
        go_on.set()
    writer.join(WAIT_S)
    assert writer.exitcode == 0
    steps = list(seen)
    committed = steps.index("insert: row committed")
    assert {seen[step] for step in steps[:committed]} == {0}
    assert {seen[step] for step in steps[committed:]} == {len(ONE.ids)}


# ---------------------------------------------------------------- evicting a reader's


def read_slowly(root: Path, prompt: Prompt, reading: Event, evicted: Event) -> None:
    """Match with a pause at the first read of rows. In a process of its own."""
    real = os.preadv

    def preadv(*args: Any) -> int:
        reading.set()
        assert evicted.wait(WAIT_S)
        return real(*args)

    # A file that must be verified is opened twice: to be proven, then to be read.
    with PromptStore.open(root, memory_bytes=0, verify="off") as store:
        os.preadv = preadv
        n_tokens = prompt.match(store).n_tokens
        assert n_tokens in (0, len(prompt.ids)), n_tokens
        assert n_tokens or prompt.ids != ONE.ids  # one file, which was open
        assert store.stats().errors == {}
        assert prompt.match(store).n_tokens == 0


@pytest.mark.parametrize("prompt", [ONE, *ALL[2::4]], ids=lambda x: x.label)
def test_a_reader_loses_no_file_under_it(
    zygote: ForkServerContext, root: Path, prompt: Prompt
) -> None:
    """Evicted by another process while it is read: right or a miss, and no error."""
    reading, evicted = zygote.Event(), zygote.Event()
    with PromptStore.open(root) as store:
        for each in ALL:
            each.insert(store)
        store.flush()
        args = (root, prompt, reading, evicted)
        reader: ForkServerProcess = zygote.Process(target=read_slowly, args=args)
        reader.start()
        assert reading.wait(WAIT_S)
        store.evict(to_bytes=0)
        assert files(root) == []
        evicted.set()
        reader.join(WAIT_S)
        assert reader.exitcode == 0


def test_nobody_brings_back_what_is_being_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between row and file of an eviction another's sweep takes the file for no lost
    one; what a process that died has left is found by the next sweep."""
    with PromptStore.open(root) as store, PromptStore.open(root) as other:
        for prompt in ALL:
            prompt.insert(store)
        store.flush()
        names = set()

        def hook(step: str) -> None:
            if step == "evict: row gone":
                other.repair([])
                names.update(info.id for info in other.snapshots())

        before = {info.id for info in store.snapshots()}
        monkeypatch.setattr(failpoints, "hook", hook)
        store.evict(to_bytes=0)
        assert len(names) == len(before) - 1  # each was gone when its row was
        assert list(other.snapshots()) == other.check() == []


# ---------------------------------------------------------------------------- locks


def test_a_lock_that_is_held_for_long_costs_only_the_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another has the write lock a match is served and an insert returns;
    flush says what was not written, and the next insert is (Q04)."""
    monkeypatch.setitem(database._OPTIONS, "timeout", 0.05)
    new = ALL[1]
    with PromptStore.open(root) as store:
        ONE.insert(store)
        store.flush()
        store._memory.clear()
        other = sqlite3.connect(root / "index.db", isolation_level=None)
        other.execute("begin immediate")
        assert ONE.is_served(store)
        new.insert(store)
        assert new.is_served(store)
        with pytest.raises(WriteFailed):
            store.flush(WAIT_S)
        assert store.stats().errors.keys() == {"SQLITE_BUSY"}
        other.execute("rollback")
        other.close()
        new.insert(store)
        store.flush()
        store._memory.clear()
        assert new.is_served(store)
        assert store.check() == []


_LOCKS = (("index.db", 0x40000000 + 2, 510), ("index.db-shm", 128, 1))
"""What every process with an open index holds, from SQLite's file format: the shared
lock on the database, and that on the shared memory of its log."""


def try_locks(root: Path) -> None:
    """Exit with the number of locks that nobody holds. In a process of its own."""
    n_free = 0
    for name, start, length in _LOCKS:
        with open(root / name, "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
                n_free += 1
            except OSError:
                pass
    sys.exit(n_free)


def n_free_locks(zygote: ForkServerContext, root: Path) -> int | None:
    """Return how many of the locks of an open index nobody holds."""
    process = zygote.Process(target=try_locks, args=(root,))
    process.start()
    process.join(WAIT_S)
    return process.exitcode


def test_nothing_drops_the_locks_of_an_open_index(
    zygote: ForkServerContext, root: Path
) -> None:
    """Closing any descriptor of a file drops all POSIX locks that its process has on
    it, and another process would then delete the log: nothing here opens the index
    but SQLite (C08)."""
    store = PromptStore.open(root)
    acts: list[Callable[[], object]] = [
        lambda: ONE.insert(store, label="one"),
        store.flush,
        lambda: ONE.match(store),
        store.stats,
        lambda: list(store.snapshots()),
        store.check,
        lambda: store.repair(store.check()),
        lambda: PromptStore.open(root).close(),
        lambda: PromptStore.open(root, read_only=True).close(),
        lambda: store.delete("one"),
        lambda: store.evict(to_bytes=0),
    ]
    assert n_free_locks(zygote, root) == 0
    for act in acts:
        act()
        assert n_free_locks(zygote, root) == 0
    store.close()
    assert not (root / "index.db-shm").exists()


# ----------------------------------------------------------------------------- fork


@pytest.mark.parametrize("end", ["sys.exit(7)", "del store; gc.collect(); sys.exit(7)"])
def test_a_forked_child_has_no_store(root: Path, end: str) -> None:
    """The child is told so; however it ends, the parent goes on, its locks are held
    and its index is whole (C08)."""
    out = run(
        """
        import fcntl, gc, os, sqlite3, warnings
        from test_processes import try_locks
        store = PromptStore.open(root)
        store.insert(NS, tokens(100), kv_of(tokens(100)))
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            calls = [lambda: store.match(NS, [1, 2]), store.flush, store.stats,
                     store.check, lambda: store.delete("x"),
                     lambda: store.insert(NS, [1], []), lambda: list(store.snapshots())]
            for call in calls:
                try:
                    call()
                except StoreClosed as error:
                    print(error)
            store.close()
            del call, calls
            exec(sys.argv[2])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        child = os.fork()
        if not child:
            try_locks(root)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for n in (200, 300):
            store.insert(NS, tokens(n), kv_of(tokens(n)))
            store.flush()
        print(store.check(), store.match(NS, tokens(301)).n_tokens)
        print(*sqlite3.connect(root / "index.db").execute("pragma integrity_check"))
        """,
        root,
        end,
    )
    lines = out.splitlines()
    assert lines[:7] == [lines[0]] * 7
    assert "parent process" in lines[0]
    assert lines[7:] == ["7", "0", "[] 300", "('ok',)"]
    with PromptStore.open(root) as store:
        assert store.check() == []
        assert store.stats().n_snapshots == 3


# ---------------------------------------------------------------------- descriptors


def keep_many(root: Path) -> None:
    """Restore 300 prompts and keep them, with few descriptors. In a process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    prompts = [Prompt("full", (number, *ONE.ids[:30])) for number in range(300)]
    here = Path("/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd")
    with PromptStore.open(root, memory_bytes=0, min_tokens=0) as store:
        os.fsync = lambda _: None  # 300 of them take seconds, and no power fails
        for prompt in prompts:
            prompt.insert(store)
        store.flush()
        kept = [prompts[0].match(store)]
        n_open = len(list(here.iterdir()))
        kept += [prompt.match(store) for prompt in prompts[1:]]
        assert len(list(here.iterdir())) == n_open
        assert {match.n_tokens for match in kept} == {31}
        assert store.stats().errors == {}


def test_restored_prompts_hold_no_descriptors(
    zygote: ForkServerContext, root: Path
) -> None:
    """300 restored prompts are kept under a limit of 256 (R08)."""
    process = zygote.Process(target=keep_many, args=(root,))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0


# ---------------------------------------------------------------------------- tools


def test_no_kill_loses_what_was_flushed() -> None:
    """60 processes are killed at random moments, alone and four at once (P05)."""
    tool = subprocess.run(
        [sys.executable, TOOLS / "crash_loop.py", "--kills", "60", "--seed", "60"],
        capture_output=True,
        text=True,
    )
    assert tool.returncode == 0, tool.stderr
    assert "60 kills in 24 rounds" in tool.stdout


def test_many_processes_at_random_do_no_harm() -> None:
    """Four write and four read, evict, delete and pin one root; nothing goes wrong."""
    tool = subprocess.run(
        [sys.executable, TOOLS / "stress.py", "--steps", "40", "--seed", "8"],
        capture_output=True,
        text=True,
    )
    assert tool.returncode == 0, tool.stdout + tool.stderr
