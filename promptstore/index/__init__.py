"""The index: which snapshot holds which tokens. The only package with SQL.

Snapshots form a radix tree for each layout: a child continues its parent at
``start``, inside the parent's range or at its end. Digests of block boundaries find
the place in that tree in O(log blocks); the token ids on the way are then compared.
"""

from sqlite3 import Error as DatabaseError

from promptstore.index.care import Remains, read_remains
from promptstore.index.database import locked, prepare, require_whole
from promptstore.index.index import Duplicate, Gone, Index
from promptstore.index.neighbours import Near
from promptstore.index.rows import Layout, NewRow, Row
from promptstore.index.search import Found

__all__ = [
    "DatabaseError",
    "Duplicate",
    "Found",
    "Gone",
    "Index",
    "Layout",
    "Near",
    "NewRow",
    "Remains",
    "Row",
    "locked",
    "prepare",
    "read_remains",
    "require_whole",
]
