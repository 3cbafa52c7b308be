"""Open, make and migrate the database file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from promptstore.errors import IndexDamaged, StoreTooNew, StoreUnavailable
from promptstore.failpoints import reach
from promptstore.migrations import NAMES

ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged database can raise: even SQLite's own message may be no text."""
_BUSY_S = 5.0
_LOG_PAGES = 100  # the log counts in the budget
_CHECK_BYTES = 4 << 20  # takes 10 to 30 ms; larger ones are left to `check`
_TABLES = {"namespaces", "layouts", "snapshots", "prefixes"}


def prepare(path: Path) -> None:
    """Make or migrate the database at *path*; the caller holds the store's lock.

    Raises:
        StoreTooNew: It has migrations that this version does not know.
        IndexDamaged: It is not a database.
        StoreUnavailable: The system refused.
    """
    db = connect(path, read_only=False)
    reach("open: index made")
    try:
        refuse_newer(db, path)
        db.execute("pragma journal_mode = wal")
        reach("open: log switched on")
        if set(NAMES) - _applied(db):
            _migrate(db)
    except ERRORS as error:
        raise _trouble(path, "cannot be opened", error) from error
    finally:
        db.close()
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(f"{path}{suffix}", 0o600)


def require_whole(path: Path, *, read_only: bool) -> None:
    """Raise unless the database at *path* is one that this version can use.

    Only a connection that may write takes its -wal and -shm away with it.

    Raises:
        StoreTooNew: It has migrations that this version does not know.
        IndexDamaged: It is damaged, blank, or of another program.
        StoreUnavailable: The system refused; nothing is proven.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise IndexDamaged(path.parent, f"its {path.name} is no file", foreign=True)
    db = connect(path, read_only=read_only)
    try:
        _require_whole(db, path)
    except ERRORS as error:
        raise _trouble(path, "cannot be read", error) from error
    finally:
        db.close()


def _require_whole(db: sqlite3.Connection, path: Path) -> None:
    refuse_newer(db, path)
    query = "select name from sqlite_master where type = 'table'"
    tables = {name for (name,) in db.execute(query)}
    applied = _applied(db)
    if tables and not applied and not tables >= _TABLES:
        raise IndexDamaged(
            path.parent, f"its {path.name} is another program's", foreign=True
        )
    if not applied or not tables >= _TABLES:
        raise IndexDamaged(path.parent, f"its {path.name} holds no index")
    if path.stat().st_size <= _CHECK_BYTES:
        (found,) = db.execute("pragma integrity_check(1)").fetchone()
        if found != "ok":
            raise IndexDamaged(path.parent, f"its {path.name} is damaged: {found}")


def is_damage(error: BaseException) -> bool:
    """Whether an error of SQLite proves that the database is damaged. One that is
    locked, or a disk that is full or refuses, proves nothing."""
    if isinstance(error, UnicodeDecodeError):
        return True
    # A connection that was refused before SQLite was asked has no code.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _trouble(path: Path, problem: str, error: Exception | None) -> StoreUnavailable:
    cls = IndexDamaged if error and is_damage(error) else StoreUnavailable
    return cls(path.parent, f"its {path.name} {problem}: {error}")


def _migrate(db: sqlite3.Connection) -> None:
    # sqlite-utils takes 0.3 s to import, and a current index does not need it.
    from sqlite_utils import Database

    from promptstore.migrations.migrations import index_migrations

    db.execute("begin immediate")
    reach("migrate: begun")
    try:
        is_new = not _applied(db)
        index_migrations.apply(Database(db, execute_plugins=False))
        if is_new:
            _begin_ids(db)
        reach("migrate: steps applied")
        db.execute("commit")
        reach("migrate: committed")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("rollback")
        raise


def _begin_ids(db: sqlite3.Connection) -> None:
    """Let ids begin at random: one that somebody remembers of an index that was here
    before must mean nothing in this one."""
    first = secrets.randbits(48)
    db.execute("insert into sqlite_sequence values ('snapshots', ?)", (first,))


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
    except (OSError, *ERRORS) as error:
        raise _trouble(path, "cannot be opened", error) from error
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
        except ERRORS as failure:
            error = failure
            if db is not None:
                db.close()
            continue
        return db
    raise _trouble(path, "cannot be read", error)


_OPTIONS: Any = {
    "timeout": _BUSY_S,
    "isolation_level": None,
    "check_same_thread": False,
}


def _configure(db: sqlite3.Connection) -> sqlite3.Connection:
    db.text_factory = bytes.decode  # raises UnicodeDecodeError, not an SQL error
    db.execute("pragma foreign_keys = on")
    db.execute("pragma synchronous = normal")
    db.execute(f"pragma wal_autocheckpoint = {_LOG_PAGES}")
    db.execute("pragma journal_size_limit = 0")
    db.execute("pragma secure_delete = on")  # deleted tokens are overwritten
    db.execute("pragma temp_store = memory")  # and none are written elsewhere
    return db


def refuse_newer(db: sqlite3.Connection, path: Path) -> None:
    try:
        applied = _applied(db)
    except ERRORS as error:
        raise _trouble(path, "cannot be read", error) from error
    unknown = applied - set(NAMES)
    if unknown and applied >= set(NAMES):
        raise StoreTooNew(path.parent, tuple(sorted(unknown)))
    if unknown:  # a newer version has all of ours as well
        raise IndexDamaged(path.parent, f"its {path.name} lacks migrations of ours")


def _applied(db: sqlite3.Connection) -> set[str]:
    query = "select name from sqlite_master where name = '_sqlite_migrations'"
    if db.execute(query).fetchone() is None:
        return set()
    query = (
        "select name from _sqlite_migrations where migration_set = 'promptstore.index'"
    )
    return {name for (name,) in db.execute(query)}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a store, which one process at a time has, while it is opened."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _trouble(path, "cannot be locked", error) from error
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        fcntl.flock(fd, fcntl.LOCK_EX)
        reach("open: lock taken")
        yield
    finally:
        os.close(fd)
