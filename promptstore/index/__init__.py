"""The index: which snapshot holds which tokens. The only package with SQL.

Snapshots form a radix tree for each layout: a child continues its parent at
``start``, inside the parent's range or at its end. Digests of block boundaries find
the place in that tree in O(log blocks); the token ids on the way are then compared.
"""

from promptstore.index.database import prepare, require_known
from promptstore.index.index import Duplicate, Gone, Index
from promptstore.index.rows import Layout, NewRow, Row
from promptstore.index.search import Found

__all__ = [
    "Duplicate",
    "Found",
    "Gone",
    "Index",
    "Layout",
    "NewRow",
    "Row",
    "prepare",
    "require_known",
]
