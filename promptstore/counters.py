"""What the store did, counted; and one warning for each cause of trouble."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter
from typing import Any

from promptstore.errors import (
    IndexDamaged,
    PromptStoreError,
    SnapshotUnreadable,
    StoreTooNew,
    StoreUnavailable,
)
from promptstore.types import Match, Reason, ReasonKind

_SAME = {"SQLITE_FULL": "ENOSPC", "SQLITE_IOERR": "EIO"}
"""What SQLite calls by a name of its own."""

_log = logging.getLogger("promptstore")


class Counters:
    """Thread-safe counts since the store was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._warned: set[str] = set()

    def insert(self) -> None:
        """Count an insert."""
        with self._lock:
            self._counts["n_inserts"] += 1

    def decline(self) -> None:
        """Count a prompt that the disk tier did not admit."""
        with self._lock:
            self._counts["n_declined"] += 1

    def match(self, match: Match, n_asked: int) -> None:
        """Count a match and its reason."""
        name = "misses" if match.source == "miss" else f"hits_{match.source}"
        with self._lock:
            self._counts[name] += 1
            self._counts["tokens_asked"] += n_asked
            self._counts["tokens_reused"] += match.n_tokens
            if match.reason is not None:
                self._reasons[match.reason.kind.value] += 1

    def trouble(self, error: BaseException) -> Reason:
        """Count an error, warn of its cause once, and return it as a reason."""
        cause = cause_of(error)
        self.note(cause, f"{cause}: {error}", exc_info=error)
        return reason_of(error)

    def note(
        self, cause: str, message: str, exc_info: BaseException | None = None
    ) -> None:
        """Count a cause of trouble, and warn at its first appearance."""
        with self._lock:
            self._errors[cause] += 1
            if cause in self._warned:
                return
            self._warned.add(cause)
        _log.warning("%s (further ones are only counted)", message)
        _log.debug("the first %s", cause, exc_info=exc_info)

    def snapshot(self) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
        """Return copies: counts, reasons by kind, errors by cause."""
        with self._lock:
            return dict(self._counts), dict(self._reasons), dict(self._errors)


def reason_of(error: BaseException) -> Reason:
    """Return why an error costs a match what the disk has."""
    return Reason(ReasonKind.UNREADABLE, 0, cause_of(error))


def cause_of(error: BaseException) -> str:
    """Return a short stable name for the cause of *error*.

    One cause has one name, whoever met it: ``ENOSPC`` for a file and for the index.
    """
    inner = error.__cause__
    is_told = isinstance(error, SnapshotUnreadable | StoreUnavailable)
    is_one = isinstance(error, StoreTooNew | IndexDamaged)
    if is_told and not is_one and inner is not None:
        return cause_of(inner)
    if isinstance(error, PromptStoreError):
        return type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, "OSError")
    if isinstance(error, sqlite3.Error):
        name: str = getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"
        primary = "_".join(name.split("_")[:2])
        return _SAME.get(primary, primary)
    return type(error).__name__
