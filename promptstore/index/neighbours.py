"""The stored prompts that begin as a request does: to explain, not to match."""

from __future__ import annotations

import heapq
import sqlite3
from dataclasses import dataclass

from promptstore.index.rows import Layout, Row, select
from promptstore.tokens import Tokens, n_common


@dataclass(frozen=True)
class Near:
    """A stored prompt.

    Args:
        row: The snapshot that ends it.
        n_shared: Leading tokens that it has in common with what was asked for.
    """

    row: Row
    n_shared: int


def neighbours(
    db: sqlite3.Connection, layout: Layout, tokens: Tokens, n: int
) -> list[Near]:
    """Return the *n* prompts that share most tokens, the best first.

    A snapshot is a prompt if it has a label, or if nothing continues it at its end. Of
    those that share as much, labels come first, then what was used last.
    """
    query = (
        "select id, parent, start_token, end_token, first_token, label is not null, "
        "used_ns from snapshots where layout = ? order by id"
    )
    shared: dict[int, int] = {}
    ends: dict[int, int] = {}
    ranks: dict[int, tuple[int, bool, int]] = {}
    # A parent's id is the smaller one, so that it comes first.
    for id_, parent, start, end, first, named, used in db.execute(query, (layout.id,)):
        has_tokens = first is not None
        above_rank = ranks.get(parent)
        continues = has_tokens and ends.get(parent) == start
        if continues and above_rank is not None and not above_rank[1]:
            del ranks[parent]
        above = start if parent is None else min(shared[parent], start)
        if has_tokens and above == start < len(tokens) and first == tokens[start]:
            (row,) = select(db, "where id = ?", id_)
            above += n_common(row.tokens, tokens[start:])
        shared[id_], ends[id_] = above, end
        if above and (has_tokens or named):
            ranks[id_] = above, bool(named), used
    best = heapq.nlargest(n, ranks, key=ranks.__getitem__)
    return [Near(row, shared[i]) for i in best for row in select(db, "where id = ?", i)]
