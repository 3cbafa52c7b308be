"""The rows of the index as dataclasses, and how ids lie in a blob."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from promptstore import layers
from promptstore.extent import Extent
from promptstore.tokens import Tokens, compact


@dataclass(frozen=True)
class Layout:
    """One tree of snapshots: a namespace and a description of layers."""

    id: int
    seed: bytes
    layers: str

    @property
    def is_whole(self) -> bool:
        """Whether its snapshots hold whole prompts, which are not shared or cut."""
        return layers.is_whole(self.layers)


@dataclass(frozen=True)
class Row:
    """One snapshot as the index has it; names as in the table."""

    id: int
    name: str
    layout: int
    parent: int | None
    start: int
    end: int
    first_token: int | None
    tokens: Tokens
    extent: Extent
    nbytes: int
    checksums: bytes
    kind: str
    label: str | None
    pinned: bool
    created_ns: int
    used_ns: int
    expires_ns: int | None
    hits: int

    @property
    def is_checkpoint(self) -> bool:
        """Whether it adds no tokens to its parent."""
        return self.start == self.end


@dataclass(frozen=True)
class NewRow:
    """What ``Index.add`` stores about a snapshot whose file is in its place.

    Args:
        created_ns: When the file was made. Default: now.
    """

    name: str
    layout: Layout
    parent: int | None
    extent: Extent
    tokens: Tokens  # of the whole prompt, [0, end)
    nbytes: int
    checksums: bytes
    kind: str
    expires_ns: int | None = None
    created_ns: int | None = None


class BadRow(ValueError):
    """A row is none that `Index.add` can have written."""


_NAME = re.compile("[0-9a-f]{32}")
_FIELDS = tuple(field.name for field in fields(Row))
_COLUMN_BY_FIELD = {"start": "start_token", "end": "end_token"}
_COLUMNS = ", ".join(_COLUMN_BY_FIELD.get(name, name) for name in _FIELDS)


def select(db: sqlite3.Connection, where: str, *args: object) -> list[Row]:
    """Return the snapshots that a condition finds.

    Raises:
        BadRow: The database is damaged.
    """
    cursor = db.execute(f"select {_COLUMNS} from snapshots {where}", args)
    return [_row(values) for values in cursor]


def _row(values: tuple[Any, ...]) -> Row:
    named = dict(zip(_FIELDS, values, strict=True))
    try:
        start, end = named["start"], named["end"]
        named["tokens"] = unpack(named["tokens"], end - start)
        named["extent"] = Extent.from_text(named["extent"], start, end)
        named["pinned"] = bool(named["pinned"])
        row = Row(**named)
        is_right = _makes_sense(row)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"the row of snapshot {named['id']!r}: {error}") from error
    if not is_right:
        raise BadRow(f"the row of snapshot {named['id']!r} makes no sense")
    return row


def _makes_sense(row: Row) -> bool:
    """Whether a row keeps the rules of the schema, which SQLite checks only when it
    writes; names become paths, and parents that go in a circle would hang a search."""
    numbers = (row.layout, row.nbytes, row.created_ns, row.used_ns, row.hits)
    first = int(row.tokens[0]) if len(row.tokens) else None
    require_name(row.name)
    return (
        0 <= row.start <= row.end
        and (row.parent is None) == (row.start == 0)
        and (row.parent is None or row.parent < row.id)
        and row.first_token == first
        and all(type(number) is int for number in numbers)
        and type(row.expires_ns) in (int, type(None))
        and type(row.kind) is str
        and type(row.label) in (str, type(None))
        and len(row.checksums) % 16 == 0
    )


def require_name(name: Any) -> None:
    """Raise unless a name is one that `Root` makes a path of.

    Raises:
        BadRow: It is not.
    """
    if type(name) is not str or not _NAME.fullmatch(name):
        raise BadRow(f"{name!r} is no snapshot's name")


def pack(tokens: Tokens) -> bytes:
    """Return ids in 4 bytes each if they fit, else in 8; little-endian."""
    kept = compact(tokens)
    return kept.astype(f"<i{kept.itemsize}").tobytes()


def unpack(blob: bytes, n_tokens: int) -> Tokens:
    """Return the ids that `pack` packed.

    Raises:
        ValueError: They are not so many.
    """
    dtype = "<i4" if len(blob) == 4 * n_tokens else "<i8"
    tokens = np.frombuffer(blob, dtype)
    if len(tokens) != n_tokens:
        raise ValueError(f"{len(blob)} bytes are not {n_tokens} ids")
    return tokens
