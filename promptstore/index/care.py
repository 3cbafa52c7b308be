"""What the index alone knows of a snapshot, read from one that may be damaged."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from promptstore.errors import StoreUnavailable
from promptstore.index.database import ERRORS, connect


@dataclass(frozen=True)
class Care:
    """What users and uses made of a snapshot; names as in the table."""

    label: str | None
    pinned: int
    used_ns: int
    expires_ns: int | None
    hits: int
    verified_ns: int | None


@dataclass(frozen=True)
class Remains:
    """What can still be read of an index, by the names of snapshots.

    Args:
        care: What the index alone knew.
        checksums: Those of their files.
        removed: Those that were removed of late.
    """

    care: dict[str, Care] = field(default_factory=dict)
    checksums: dict[str, bytes] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)


_COLUMNS = tuple(each.name for each in fields(Care))


def read_remains(path: Path) -> Remains:
    """Return what can still be read of a database in whatever state.

    Nothing of it is taken for who a snapshot is, or which tokens it holds.
    """
    found = Remains()
    with contextlib.suppress(StoreUnavailable, *ERRORS):
        db = connect(path, read_only=True)
        try:
            _read(db, found)
        finally:
            db.close()
    return found


def _read(db: sqlite3.Connection, found: Remains) -> None:
    """Read the rows from both ends, each time up to the first that is damaged."""
    table = "select 1 from sqlite_master where type = 'table' and name = 'snapshots'"
    if db.execute(table).fetchone() is None:
        return
    has = {
        name
        for (name,) in db.execute(
            "select name from pragma_table_info(?)", ("snapshots",)
        )
    }
    with contextlib.suppress(*ERRORS):  # an older index has no such table
        for (name,) in db.execute("select name from removed"):
            if type(name) is str:
                found.removed.add(name)
    columns = ", ".join(name if name in has else "null" for name in _COLUMNS)
    for order in ("asc", "desc"):
        with contextlib.suppress(*ERRORS):
            query = (
                f"select name, checksums, {columns} from snapshots order by id {order}"
            )
            for name, sums, *values in db.execute(query):
                if type(sums) is bytes:
                    found.checksums[name] = sums
                if _is_right(name, *values):
                    found.care[name] = Care(*values)


def _is_right(
    name: Any,
    label: Any,
    pinned: Any,
    used_ns: Any,
    expires_ns: Any,
    hits: Any,
    verified_ns: Any,
) -> bool:
    """Whether values have the types that the schema gives them."""
    return (
        type(name) is str
        and (label is None or (type(label) is str and bool(label.strip())))
        and pinned in (0, 1)
        and all(type(n) is int and n >= 0 for n in (used_ns, hits))
        and all(n is None or type(n) is int for n in (expires_ns, verified_ns))
    )
