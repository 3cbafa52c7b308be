"""Open, make and migrate the database file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from promptstore.errors import StoreTooNew, StoreUnavailable
from promptstore.failpoints import reach
from promptstore.migrations import NAMES

_BUSY_S = 5.0
_LOG_PAGES = 100  # the log counts in the budget


def prepare(path: Path, lock: Path) -> None:
    """Make or migrate the database at *path*, one process at a time.

    Args:
        path: The database.
        lock: A file to lock meanwhile.

    Raises:
        StoreTooNew: It has migrations that this version does not know.
        StoreUnavailable: It is not a database.
    """
    with _flock(lock):
        reach("open: lock taken")
        db = connect(path, read_only=False)
        reach("open: index made")
        try:
            refuse_newer(db, path)
            db.execute("pragma journal_mode = wal")
            reach("open: log switched on")
            if set(NAMES) - _applied(db):
                _migrate(db)
        except sqlite3.DatabaseError as error:
            raise _unavailable(path, "cannot be opened", error) from error
        finally:
            db.close()
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(f"{path}{suffix}", 0o600)


def require_known(path: Path, *, read_only: bool) -> None:
    """Raise unless the database at *path* is one that this version can use.

    Only a connection that may write takes its -wal and -shm away with it.

    Raises:
        StoreTooNew: It has migrations that this version does not know.
        StoreUnavailable: It is not a database.
    """
    db = connect(path, read_only=read_only)
    try:
        refuse_newer(db, path)
    finally:
        db.close()


def _unavailable(path: Path, problem: str, error: Exception | None) -> StoreUnavailable:
    return StoreUnavailable(path.parent, f"its {path.name} {problem}: {error}")


def _migrate(db: sqlite3.Connection) -> None:
    # sqlite-utils takes 0.3 s to import, and a current index does not need it.
    from sqlite_utils import Database

    from promptstore.migrations.migrations import index_migrations

    db.execute("begin immediate")
    reach("migrate: begun")
    try:
        index_migrations.apply(Database(db, execute_plugins=False))
        reach("migrate: steps applied")
        db.execute("commit")
        reach("migrate: committed")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("rollback")
        raise


def connect(
    path: Path, *, read_only: bool, full_sync: bool = False
) -> sqlite3.Connection:
    if read_only:
        return _connect_read_only(path)
    try:
        _create(path)
        db = _configure(sqlite3.connect(path, **_OPTIONS))
        if full_sync:
            db.execute("pragma synchronous = full")
            db.execute("pragma fullfsync = on")  # macOS; elsewhere it is the same
    except (OSError, sqlite3.Error) as error:
        raise _unavailable(path, "cannot be opened", error) from error
    return db


def _create(path: Path) -> None:
    """Make the file, for its owner only, if it is not there.

    An existing one must not be opened: closing any descriptor of a file drops all
    the locks that this process holds on it, SQLite's too.
    """
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, 0o600)  # whatever the umask
        os.close(fd)


def _connect_read_only(path: Path) -> sqlite3.Connection:
    modes = ["mode=ro"]
    if not os.access(path.parent, os.W_OK):
        # A WAL database whose directory cannot be written opens only as immutable.
        modes.append("mode=ro&immutable=1")
    error: Exception | None = None
    for mode in modes:
        uri = f"{path.absolute().as_uri()}?{mode}"
        db = None
        try:
            db = _configure(sqlite3.connect(uri, uri=True, **_OPTIONS))
            db.execute("select 1 from sqlite_master").fetchone()
        except sqlite3.Error as failure:
            error = failure
            if db is not None:
                db.close()
            continue
        return db
    raise _unavailable(path, "cannot be read", error)


_OPTIONS: Any = {
    "timeout": _BUSY_S,
    "isolation_level": None,
    "check_same_thread": False,
}


def _configure(db: sqlite3.Connection) -> sqlite3.Connection:
    db.execute("pragma foreign_keys = on")
    db.execute("pragma synchronous = normal")
    db.execute(f"pragma wal_autocheckpoint = {_LOG_PAGES}")
    db.execute("pragma journal_size_limit = 0")
    db.execute("pragma secure_delete = on")  # deleted tokens are overwritten
    db.execute("pragma temp_store = memory")  # and none are written elsewhere
    return db


def refuse_newer(db: sqlite3.Connection, path: Path) -> None:
    try:
        unknown = _applied(db) - set(NAMES)
    except sqlite3.DatabaseError as error:
        raise _unavailable(path, "is not a database", error) from error
    if unknown:
        raise StoreTooNew(path.parent, tuple(sorted(unknown)))


def _applied(db: sqlite3.Connection) -> set[str]:
    query = "select name from sqlite_master where name = '_sqlite_migrations'"
    if db.execute(query).fetchone() is None:
        return set()
    query = (
        "select name from _sqlite_migrations where migration_set = 'promptstore.index'"
    )
    return {name for (name,) in db.execute(query)}


@contextlib.contextmanager
def _flock(path: Path) -> Iterator[None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unavailable(path, "cannot be locked", error) from error
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
