"""Facts about what is counted, and about how often trouble is told."""

from __future__ import annotations

import dataclasses
import errno
import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from promptstore import Match, Reason, ReasonKind, StoreStats, TooLarge
from promptstore.counters import Counters, cause_of
from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
    StoreUnavailable,
)

MISS = Match(None, 0, "miss", Reason(ReasonKind.NO_ENTRY, 0))


def test_nothing_is_counted_at_first() -> None:
    """A store that did nothing has no counts, reasons or errors."""
    assert Counters().snapshot() == ({}, {}, {})


def test_matches_are_counted_by_their_source() -> None:
    """Hits of each tier, misses, tokens asked for and tokens saved."""
    counters = Counters()
    counters.match(Match([], 100, "memory", None), 101)
    counters.match(Match([], 50, "disk", Reason(ReasonKind.DIVERGED, 50)), 200)
    counters.match(Match([], 60, "disk", Reason(ReasonKind.DIVERGED, 60)), 200)
    counters.match(MISS, 10)
    counts, reasons, errors = counters.snapshot()
    assert counts == {
        "hits_memory": 1,
        "hits_disk": 2,
        "misses": 1,
        "tokens_asked": 511,
        "tokens_reused": 210,
    }
    assert reasons == {"diverged-at": 2, "no-entry": 1}
    assert errors == {}


def test_inserts_are_counted() -> None:
    """Each insert counts once."""
    counters = Counters()
    for _ in range(3):
        counters.insert()
    assert counters.snapshot()[0] == {"n_inserts": 3}


def test_counts_have_the_names_of_the_statistics() -> None:
    """Everything that is counted has a place in StoreStats."""
    counters = Counters()
    counters.insert()
    for source in ("memory", "disk", "miss"):
        counters.match(Match(None, 0, source, None), 1)  # type: ignore[arg-type]
    fields = {field.name for field in dataclasses.fields(StoreStats)}
    assert set(counters.snapshot()[0]) <= fields


def test_a_snapshot_is_a_copy() -> None:
    """Counts that were handed out stay as they are, and changing them does nothing."""
    counters = Counters()
    counters.insert()
    counters.match(MISS, 1)
    counters.note("cause", "message")
    first = counters.snapshot()
    for part in first:
        part["n_inserts"] = 99
    assert counters.snapshot()[0]["n_inserts"] == 1
    counters.insert()
    assert first[0]["n_inserts"] == 99


def test_a_cause_is_told_once_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning for each cause, in the first one's words."""
    counters = Counters()
    with caplog.at_level(logging.WARNING, "promptstore"):
        for number in range(5):
            counters.note("queue-full", f"message {number}")
            counters.note("other", f"other message {number}")
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("promptstore", "WARNING", f"{text} 0 (further ones are only counted)")
        for text in ("message", "other message")
    ]
    assert counters.snapshot()[2] == {"queue-full": 5, "other": 5}


def test_a_message_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    """A percent sign in a message, a path for example, is a percent sign."""
    with caplog.at_level(logging.WARNING, "promptstore"):
        Counters().note("cause", "100%s of %d")
    (record,) = caplog.records
    assert record.message.startswith("100%s of %d (")


def test_trouble_is_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    """An error is counted under its cause, told once, and explains the miss."""
    counters = Counters()
    with caplog.at_level(logging.WARNING, "promptstore"):
        reasons = [counters.trouble(OSError(errno.EMFILE, "x")) for _ in range(3)]
    assert reasons == [Reason(ReasonKind.UNREADABLE, 0, "EMFILE")] * 3
    assert counters.snapshot()[2] == {"EMFILE": 3}
    (record,) = caplog.records
    assert record.message.startswith("EMFILE: [Errno 24] x")
    assert record.exc_info is None


def test_the_traceback_is_there_for_who_debugs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning is one line; the traceback comes at the debug level."""
    with caplog.at_level(logging.DEBUG, "promptstore"):
        Counters().trouble(ZeroDivisionError("x"))
    warning, debug = caplog.records
    assert warning.exc_info is None
    assert debug.levelname == "DEBUG"
    assert debug.exc_info is not None
    assert debug.exc_info[0] is ZeroDivisionError


def sqlite_error() -> sqlite3.Error:
    db = sqlite3.connect(":memory:")
    try:
        db.execute("create table t (x check (x = 'a'))")
        db.execute("insert into t values ('b')")
    except sqlite3.Error as error:
        return error
    finally:
        db.close()
    raise AssertionError


def raised(inner: OSError, outer: Callable[[Path, str], Exception]) -> Exception:
    """Return an error of ours that was raised for one of the system."""
    error = outer(Path("a"), "reason")
    error.__cause__ = inner
    return error


def named(name: str) -> sqlite3.Error:
    """Return an error with the name that SQLite gives it."""
    error = sqlite3.OperationalError("as SQLite says")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SQLITE_FULL", "ENOSPC"),
        ("SQLITE_IOERR_WRITE", "EIO"),
        ("SQLITE_IOERR", "EIO"),
        ("SQLITE_BUSY_RECOVERY", "SQLITE_BUSY"),
        ("SQLITE_READONLY_DBMOVED", "SQLITE_READONLY"),
    ],
)
def test_one_cause_has_one_name(name: str, expected: str) -> None:
    """What SQLite tells in detail is counted with what the system says of a file."""
    assert cause_of(named(name)) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SnapshotCorrupt(Path("a"), "reason"), "SnapshotCorrupt"),
        (SnapshotUnreadable(Path("a"), "reason"), "SnapshotUnreadable"),
        (TooLarge(2, 1), "TooLarge"),
        (OSError(errno.ENOSPC, "x"), "ENOSPC"),
        (FileNotFoundError(errno.ENOENT, "x"), "ENOENT"),
        (OSError("no number"), "OSError"),
        (OSError(987654, "no such number"), "OSError"),
        (sqlite_error(), "SQLITE_CONSTRAINT"),
        (sqlite3.OperationalError("made by hand"), "SQLITE_ERROR"),
        (raised(OSError(errno.EMFILE, "x"), SnapshotUnreadable), "EMFILE"),
        (raised(OSError(errno.EROFS, "x"), StoreUnavailable), "EROFS"),
        (raised(FileNotFoundError(2, "x"), SnapshotMissing), "SnapshotMissing"),
        (StoreUnavailable(Path("a"), "reason"), "StoreUnavailable"),
        (ZeroDivisionError("x"), "ZeroDivisionError"),
        (MemoryError(), "MemoryError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cause_has_a_short_stable_name(error: BaseException, expected: str) -> None:
    """No path, number or text that changes is in the name of a cause."""
    assert expected == cause_of(error)


def test_threads_lose_no_count(caplog: pytest.LogCaptureFixture) -> None:
    """Eight threads count together what they count alone, and warn once."""
    counters = Counters()
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait(30)
        for _ in range(500):
            counters.insert()
            counters.match(MISS, 2)
            counters.note("cause", "message")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    counts, reasons, errors = counters.snapshot()
    assert counts == {
        "n_inserts": 4000,
        "misses": 4000,
        "tokens_asked": 8000,
        "tokens_reused": 0,
    }
    assert (reasons, errors) == ({"no-entry": 4000}, {"cause": 4000})
    assert len(caplog.records) == 1
