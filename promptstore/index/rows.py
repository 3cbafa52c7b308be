"""The rows of the index as dataclasses, and how ids lie in a blob."""

from __future__ import annotations

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
    """What ``Index.add`` stores about a snapshot whose file is in its place."""

    name: str
    layout: Layout
    parent: int | None
    extent: Extent
    tokens: Tokens  # of the whole prompt, [0, end)
    nbytes: int
    checksums: bytes
    kind: str
    expires_ns: int | None = None


_FIELDS = tuple(field.name for field in fields(Row))
_COLUMN_BY_FIELD = {"start": "start_token", "end": "end_token"}
_COLUMNS = ", ".join(_COLUMN_BY_FIELD.get(name, name) for name in _FIELDS)


def select(db: sqlite3.Connection, where: str, *args: object) -> list[Row]:
    """Return the snapshots that a condition finds."""
    cursor = db.execute(f"select {_COLUMNS} from snapshots {where}", args)
    return [_row(values) for values in cursor]


def _row(values: tuple[Any, ...]) -> Row:
    named = dict(zip(_FIELDS, values, strict=True))
    named["tokens"] = unpack(named["tokens"], named["end"] - named["start"])
    named["extent"] = Extent.from_text(named["extent"], named["start"], named["end"])
    named["pinned"] = bool(named["pinned"])
    return Row(**named)


def pack(tokens: Tokens) -> bytes:
    """Return ids in 4 bytes each if they fit, else in 8; little-endian."""
    kept = compact(tokens)
    return kept.astype(f"<i{kept.itemsize}").tobytes()


def unpack(blob: bytes, n_tokens: int) -> Tokens:
    dtype = "<i4" if len(blob) == 4 * n_tokens else "<i8"
    return np.frombuffer(blob, dtype)
