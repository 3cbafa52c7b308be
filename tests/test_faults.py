"""Faults of the system: they cost what only the disk has, and end when they end.

Every file operation and every SQL call fails in turn, with each errno that matters;
then the same with real ones: a full file system, no descriptors, a stuck writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import kv_of, prints, tokens

from promptstore import Namespace, PromptStore, ReasonKind, WriteFailed
from promptstore.root import Root
from promptstore.tokens import as_tokens

NS = Namespace("faults")
LONG_S = 30.0  # longer than anything takes; reached only by a test that fails
STORED, NEW, LATER = ([n, *tokens(99, seed=n)] for n in (1, 2, 3))

FILE_CALLS = (
    "open", "close", "lseek", "writev", "pwrite", "preadv", "fsync", "fstat", "fchmod",
    "rename", "unlink", "mkdir", "scandir", "stat", "statvfs",
)  # fmt: skip
SQL_ERRORS = {
    "SQLITE_BUSY": "SQLITE_BUSY",
    "SQLITE_FULL": "ENOSPC",
    "SQLITE_IOERR_WRITE": "EIO",
    "SQLITE_READONLY": "SQLITE_READONLY",
    "SQLITE_CANTOPEN": "SQLITE_CANTOPEN",
}


class Trap:
    """Makes calls fail: the one with number `at`, or all from there on."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.at = 0
        self.lasts = False
        self.error: Callable[[], Exception] = Exception
        self._lock = threading.Lock()

    def set(self, at: int, error: Callable[[], Exception], *, lasts: bool) -> None:
        self.n_calls, self.at, self.error, self.lasts = 0, at, error, lasts

    def lift(self) -> bool:
        """Let all calls pass; return whether one has failed."""
        sprung, self.at = 0 < self.at <= self.n_calls, 0
        return sprung

    def step(self) -> None:
        with self._lock:
            if not self.at:
                return
            self.n_calls += 1
            if self.n_calls == self.at or (self.lasts and self.n_calls > self.at):
                raise self.error()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "store"


@pytest.fixture
def file_trap(root: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A trap for every file operation on what lies under the root."""
    trap, fds = Trap(), set()

    def is_ours(target: object) -> bool:
        if isinstance(target, int):
            return target in fds
        return isinstance(target, str | Path) and Path(target).is_relative_to(root)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_ours(target):
                return real(target, *args, **kwargs)
            if name == "close":  # what it fails with, the descriptor is gone
                fds.discard(target)
                return real(target)
            trap.step()
            result = real(target, *args, **kwargs)
            if name == "open":
                fds.add(result)
            return result

        return call

    for name in FILE_CALLS:
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    monkeypatch.setattr(fcntl, "flock", wrap("flock", fcntl.flock))
    return trap


@pytest.fixture
def sql_trap(monkeypatch: pytest.MonkeyPatch) -> Trap:
    """A trap for every SQL call."""
    trap, real = Trap(), sqlite3.connect

    class Connection(sqlite3.Connection):
        def execute(self, *args: Any) -> Any:
            trap.step()
            return super().execute(*args)

        def executemany(self, *args: Any) -> Any:
            trap.step()
            return super().executemany(*args)

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        return real(*args, **kwargs, factory=Connection)

    monkeypatch.setattr(sqlite3, "connect", connect)
    return trap


def served(store: PromptStore, ids: list[int]) -> str:
    """Match one more token than *ids*; what is served must be right bit for bit.

    Returns:
        The tier, or the cause of the miss.
    """
    match = store.match(NS, [*ids, 0])
    if match.cache is not None:
        assert match.n_tokens == len(ids)
        assert prints(match.cache) == prints(kv_of(ids))
        return match.source
    assert (match.n_tokens, match.source) == (0, "miss")
    assert match.reason is not None
    if match.reason.kind is ReasonKind.UNREADABLE:
        return match.reason.detail
    return match.reason.kind.value


def put(store: PromptStore, ids: list[int]) -> str:
    """Insert and flush a prompt; return what flush raised, or nothing."""
    assert store.insert(NS, ids, kv_of(ids)) == len(ids)
    try:
        store.flush(LONG_S)
    except WriteFailed as error:
        return str(error)
    return ""


def require_well(store: PromptStore, root: Path) -> None:
    """Whatever it went through, without being opened anew the store must be whole, have
    what it had, and take and serve what is new."""
    store._memory.clear()
    assert put(store, LATER) == ""
    store._memory.clear()
    for ids in (STORED, NEW, LATER):
        assert served(store, ids) == "disk"
    store.flush(LONG_S)
    assert store.check() == []
    assert list(root.rglob("*.tmp")) == []


def go_through(store: PromptStore) -> None:
    """Match what is stored, store something new, match that, and ask for figures."""
    served(store, STORED)
    put(store, NEW)
    found = served(store, NEW)
    assert found == "memory" or not store._memory.max_bytes
    served(store, NEW)  # from disk, if it is there: memory has handed it over
    store.explain(NS, [*STORED, 0])
    store.prefetch(NS, STORED)
    assert store.stats().n_inserts == 1


def one_each(records: list[logging.LogRecord], errors: dict[str, int]) -> bool:
    """Whether each cause was told once."""
    told = [record for record in records if record.levelno == logging.WARNING]
    return len(told) == len(errors)


def sweep(
    root: Path,
    trap: Trap,
    error: Callable[[], Exception],
    caplog: pytest.LogCaptureFixture,
    *,
    lasts: bool,
    memory_bytes: int,
    stride: int = 1,
) -> set[str]:
    """Have call after call fail until the scenario does without the next; return the
    causes that were counted."""
    causes: set[str] = set()
    ready, at = root.parent / "ready", 1
    with PromptStore.open(ready) as store:
        assert put(store, STORED) == ""
    while True:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(ready, root)
        caplog.clear()
        with PromptStore.open(root, memory_bytes=memory_bytes) as store:
            trap.set(at, error, lasts=lasts)
            go_through(store)
            sprung = trap.lift()
            errors = store.stats().errors
            assert one_each(caplog.records, errors), (at, errors)
            causes |= set(errors)
            # Without a memory tier a write that failed is lost, and flush has told.
            if not memory_bytes:
                assert put(store, NEW) == ""
            store.flush(LONG_S)
            require_well(store, root)
        if not sprung:
            assert at > 20
            return causes
        at += stride


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("lasts", [False, True])
def test_any_file_operation_may_fail(
    root: Path,
    file_trap: Trap,
    caplog: pytest.LogCaptureFixture,
    lasts: bool,
    memory_bytes: int,
) -> None:
    """One after the other, once or from there on; then all goes on by itself (S01)."""
    causes = sweep(
        root,
        file_trap,
        lambda: OSError(errno.EIO, "input/output error"),
        caplog,
        lasts=lasts,
        memory_bytes=memory_bytes,
        stride=5 if lasts or not memory_bytes else 1,
    )
    assert causes <= {"EIO", "StoreUnavailable"}
    assert "EIO" in causes


@pytest.mark.parametrize("name", ["ENOSPC", "EMFILE", "EACCES", "EROFS", "ENOMEM"])
def test_each_errno_is_a_cause_of_its_own(
    root: Path, file_trap: Trap, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Whatever fails is counted by that name, and proves no damage (R11, C09)."""
    number = getattr(errno, name)
    causes = sweep(
        root,
        file_trap,
        lambda: OSError(number, os.strerror(number)),
        caplog,
        lasts=True,
        memory_bytes=1 << 30,
        stride=9,
    )
    assert name in causes
    assert causes <= {name, "StoreUnavailable"}


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("name", SQL_ERRORS)
def test_any_sql_call_may_fail(
    root: Path,
    sql_trap: Trap,
    caplog: pytest.LogCaptureFixture,
    name: str,
    lasts: bool,
) -> None:
    """One after the other, commit and rollback too; then all goes on (S01, Q07)."""

    def error() -> sqlite3.Error:
        error = sqlite3.OperationalError(f"as SQLite says {name}")
        error.sqlite_errorname = name
        return error

    causes = sweep(
        root, sql_trap, error, caplog, lasts=lasts, memory_bytes=1 << 30, stride=7
    )
    assert causes == {SQL_ERRORS[name]}


# -------------------------------------------------------------------- real ones


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Leave no byte free on a file system."""
    path = place / "ballast"
    with path.open("wb", 0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


@pytest.mark.parametrize("free", [0, 1 << 14])
def test_a_full_disk_is_told_and_survived(
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
) -> None:
    """Neither a snapshot nor a row fits, memory serves; later flush writes it (R11)."""
    root = small_disk / "store"
    with PromptStore.open(root, min_free_bytes=0) as store:
        assert put(store, STORED) == ""
        # Another fills it after the store has looked how much is free.
        monkeypatch.setattr(Root, "free_bytes", lambda _: 1 << 40)
        ballast = fill(small_disk)
        os.truncate(ballast, ballast.stat().st_size - free)
        assert put(store, NEW) != ""
        assert served(store, NEW) == "memory"
        store._memory.remove(NS, as_tokens(STORED), 0)
        assert served(store, STORED) == "disk"
        errors = store.stats().errors
        assert set(errors) == {"ENOSPC"}
        assert one_each(caplog.records, errors)
        ballast.unlink()
        store.flush(LONG_S)
        require_well(store, root)


def test_no_descriptors_are_a_cause(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """EMFILE by its name: nothing is dropped, and it works when some are free (C09)."""
    with PromptStore.open(root) as store:
        assert put(store, STORED) == ""
        store._memory.clear()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(int(fd) for fd in os.listdir("/dev/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 8, hard))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            assert served(store, STORED) == "EMFILE"
            assert "Too many open files" in put(store, NEW)
            assert served(store, NEW) == "memory"
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        errors = store.stats().errors
        assert set(errors) == {"EMFILE"}
        assert one_each(caplog.records, errors)
        store.flush(LONG_S)
        require_well(store, root)


def test_a_removed_directory_comes_back(root: Path) -> None:
    """Without being opened anew, the store makes it again and goes on (P12)."""
    with PromptStore.open(root) as store:
        assert put(store, STORED) == ""
        shutil.rmtree(root)
        assert served(store, STORED) == "memory"
        store._memory.clear()
        assert served(store, STORED) != "disk"
        for ids in (STORED, NEW):
            assert put(store, ids) == ""
        require_well(store, root)


def test_a_clock_that_goes_back_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year back, everything is served, stored and sound."""
    with PromptStore.open(root) as store:
        assert put(store, STORED) == ""
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() - 365 * 86400 * 10**9)
        assert put(store, NEW) == ""
        require_well(store, root)
        assert store.stats().errors == {}


# -------------------------------------------------------------------- a hung disk


def in_time(work: Callable[[], Any]) -> Any:
    """Return what *work* returns on a thread of its own; fail if it does not."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert results, "it waits for the disk"
    return results[0]


@pytest.fixture
def fifo(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Have the writer's next sync wait on a FIFO; the fixture's value lets it go."""
    path = root.parent / "fifo"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)
    real = os.fsync

    def fsync(fd: int) -> None:
        if (
            threading.current_thread().name == "promptstore-writer"
            and not gone.is_set()
        ):
            os.read(keep, 1)
        real(fd)

    gone = threading.Event()

    def let_go() -> None:
        gone.set()
        os.write(keep, b"x" * 100)

    monkeypatch.setattr(os, "fsync", fsync)
    yield let_go
    let_go()
    os.close(keep)


def test_a_hung_disk_hangs_nobody(root: Path, fifo: Callable[[], None]) -> None:
    """While the writer is stuck, insert, match and stats return, flush and close end in
    their time; then all is written."""
    store = PromptStore.open(root, insert_timeout_s=0.0, queue_bytes=1)
    for ids in (STORED, NEW, LATER):  # the first is stuck, the others find no room
        assert in_time(lambda ids=ids: store.insert(NS, ids, kv_of(ids))) == 100
    for ids in (STORED, NEW, LATER):
        assert in_time(lambda ids=ids: served(store, ids)) == "memory"
    stats = in_time(store.stats)
    assert (stats.n_pending >= 1, stats.errors) == (True, {"queue-full": 2})
    in_time(lambda: store.explain(NS, [*NEW, 0]))
    with pytest.raises(TimeoutError):
        store.flush(0.0)
    fifo()
    store.flush(LONG_S)
    require_well(store, root)
    store.close()


def test_a_close_on_a_hung_disk_ends(root: Path, fifo: Callable[[], None]) -> None:
    """It raises TimeoutError; what was stuck is then written whole or not at all."""
    store = PromptStore.open(root)
    store.insert(NS, NEW, kv_of(NEW))
    with pytest.raises(TimeoutError):
        store.close(0.0)
    fifo()
    assert store._writer.close(LONG_S)
    assert store._disk is not None
    store._disk.close()
    with PromptStore.open(root) as store:
        assert served(store, NEW) == "disk"
        assert store.check() == []


def test_evictions_of_one_insert_wait_together(
    root: Path, fifo: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An insert that evicts many has one bound, not one for each of them."""
    store = PromptStore.open(root, write="back", queue_bytes=1, insert_timeout_s=5.0)
    many = [[100 + n, *tokens(99, seed=n)] for n in range(5)]
    for ids in many:
        store.insert(NS, ids, kv_of(ids))
    now, waits = [0.0], []
    real = store._writer.submit

    def submit(run: Any, nbytes: int = 0, timeout_s: float | None = None) -> bool:
        waits.append(timeout_s)
        now[0] += timeout_s or 0.0  # as if it had waited in vain
        return real(run, nbytes, 0.0)

    monkeypatch.setattr(store._writer, "submit", submit)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store._memory.max_bytes = 1 << 17
    store.insert(NS, NEW, kv_of(NEW))
    monkeypatch.undo()
    assert len(waits) > 2
    assert sum(wait or 0.0 for wait in waits) <= 5.0
    fifo()
    with contextlib.suppress(WriteFailed):
        store.close()


def test_a_held_write_lock_delays_no_match(root: Path) -> None:
    """Another process writes for long: matches are served, also when they find damage,
    and what could not be written is written later (Q04)."""
    with PromptStore.open(root) as store:
        for ids in (STORED, NEW):
            assert put(store, ids) == ""
        store._memory.clear()
        (bad,) = (i.id for i in store.snapshots() if store.explain(
            NS, [*NEW, 0]).nearest.id == i.id)  # fmt: skip
        os.truncate(root / "snapshots" / bad[:2] / f"{bad}.safetensors", 100)
        other = sqlite3.connect(root / "index.db", isolation_level=None)
        other.execute("begin immediate")
        try:
            assert in_time(lambda: served(store, STORED)) == "disk"
            assert in_time(lambda: served(store, NEW)) == "damaged"
            assert in_time(lambda: store.insert(NS, LATER, kv_of(LATER))) == 100
            in_time(store.stats)
        finally:
            other.execute("rollback")
            other.close()
        store.flush(LONG_S)
        assert store.check() == []
        assert put(store, NEW) == ""
        require_well(store, root)


def test_no_thread_is_a_fault_like_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that gives no thread costs the disk for as long as that lasts."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with PromptStore.open(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert "new thread" in put(store, NEW)
            assert served(store, NEW) == "memory"
        store.flush(LONG_S)
        assert put(store, STORED) == ""
        require_well(store, root)


def test_a_prompt_that_is_written_late_keeps_what_was_asked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its label, its pin and its time to live, not only its tokens."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with PromptStore.open(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", refuse)
            store.insert(NS, NEW, kv_of(NEW), label="x", pin=True, ttl_s=1000.0)
            # A longer prompt does not make its label superfluous.
            store.insert(NS, [*NEW, 5], kv_of([*NEW, 5]))
            with pytest.raises(WriteFailed, match="2 insert"):
                store.flush(LONG_S)
        store.flush(LONG_S)
        (info,) = (info for info in store.snapshots() if info.label == "x")
        assert (info.end, info.pinned) == (100, True)
        assert info.expires_s is not None


def test_what_the_writer_holds_counts(root: Path, fifo: Callable[[], None]) -> None:
    """Entries that were replaced while the writer is stuck use up the queue: a hung
    disk does not make memory grow without bound."""
    with PromptStore.open(
        root, min_tokens=1, insert_timeout_s=0.0, queue_bytes=1 << 20
    ) as store:
        for n in range(50):
            store.insert(NS, NEW[: 50 + n], kv_of(NEW[: 50 + n]))
        stats = store.stats()
        assert stats.errors["queue-full"] > 30
        fifo()
