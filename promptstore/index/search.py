"""The look-up: the longest stored prefix of a token sequence."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from promptstore import prefix
from promptstore.index.rows import Layout, Row, select
from promptstore.tokens import Tokens, n_common


@dataclass(frozen=True)
class Found:
    """The longest stored prefix of a token sequence.

    Args:
        n_tokens: Its length.
        chain: The snapshots that hold it, from the root. Each serves from its own
            start to the start of the next, the last one to *n_tokens*.
        diverges: Whether stored prompts continue it, but differently.
        expired: Whether it ends where a snapshot has expired.
    """

    n_tokens: int = 0
    chain: tuple[Row, ...] = ()
    diverges: bool = False
    expired: bool = False

    @property
    def pieces(self) -> list[tuple[Row, int, int]]:
        """Each snapshot with the tokens ``[lo, hi)`` that it serves."""
        if not self.chain:
            return []
        ends = [row.start for row in self.chain[1:]] + [self.n_tokens]
        return [(row, row.start, hi) for row, hi in zip(self.chain, ends, strict=True)]


_Way = tuple[list[Row], int, bool]
_MAX_STEPS = 12


class Search:
    """One look-up: down from the root if the tree is shallow there; else the deepest
    boundary by its digest, its ancestors, and down from there."""

    def __init__(
        self, db: sqlite3.Connection, layout: Layout, tokens: Tokens, until_ns: float
    ) -> None:
        self._db = db
        self._layout = layout
        self._tokens = tokens
        self._until_ns = until_ns

    def run(self) -> Found:
        if self._has_mortals():  # prompts that begin alike may stand side by side
            return self._descend([], 0, False)
        # Few steps from the root cost less than hashing the prompt.
        shallow = self._deepest([], 0, _MAX_STEPS)
        if shallow is not None:
            return self._found(*shallow)
        owner = self._deepest_owner()
        chain = ancestors(self._db, owner) if owner is not None else []
        position, expired = 0, False
        for index, row in enumerate(chain):
            hi = chain[index + 1].start if index + 1 < len(chain) else row.end
            expired = self._is_expired(row)
            shared = 0 if expired else self._shared(row, hi)
            position = row.start + shared
            if position < hi:
                chain = chain[: index + (shared > 0)]
                break
        return self._descend(chain, position, expired)

    def run_whole(self) -> Found:
        """Return the longest stored prompt that is a prefix as a whole."""
        ends = self._db.execute(
            "select distinct end_token from snapshots where layout = ? "
            "and end_token <= ? and first_token is not null order by end_token desc",
            (self._layout.id, len(self._tokens)),
        ).fetchall()
        for (end,) in ends:
            digest = prefix.end_digest(self._layout.seed, self._tokens[:end])
            for row in select(
                self._db,
                "where layout = ? and end_digest = ? and start_token = 0",
                self._layout.id,
                digest,
            ):
                if self._shared(row, end) == end and not self._is_expired(row):
                    return Found(end, (row,))
        return Found()

    def _has_mortals(self) -> bool:
        # The plus keeps SQLite from reading all rows of the layout for it: few are
        # mortal, and those have an index.
        query = (
            "select 1 from snapshots where +layout = ? "
            "and expires_ns is not null limit 1"
        )
        return self._db.execute(query, (self._layout.id,)).fetchone() is not None

    def _descend(self, chain: list[Row], position: int, expired: bool) -> Found:
        if chain and not expired:  # the last one may go on where its child did not
            position = chain[-1].start + self._shared(chain[-1], chain[-1].end)
        if not expired:
            way = self._deepest(chain, position)
            assert way is not None
            chain, position, expired = way
        return self._found(chain, position, expired)

    def _found(self, chain: list[Row], position: int, expired: bool) -> Found:
        diverges = position < len(self._tokens) and self._continues(chain, position)
        return Found(position, tuple(chain), diverges, expired)

    def _deepest(
        self, chain: list[Row], position: int, max_steps: int | None = None
    ) -> _Way | None:
        """Return the chain that goes on deepest from a position, how deep, and whether
        only what has expired would go on there; ``None`` if it takes too many steps.

        There is more than one way only where lives differ, or after a rebuild.
        """
        while position < len(self._tokens):
            children = self._children(chain[-1].id if chain else None, position)
            alive = [row for row in children if not self._is_expired(row)]
            if not alive:
                return chain, position, bool(children)
            if len(alive) > 1:
                ways = [self._deepest(*self._step(chain, row)) for row in alive]
                return max((way for way in ways if way is not None), key=_rank)
            if len(chain) == max_steps:
                return None
            chain, position = self._step(chain, alive[0])
        return chain, position, False

    def _step(self, chain: list[Row], row: Row) -> tuple[list[Row], int]:
        return [*chain, row], row.start + self._shared(row, row.end)

    def _deepest_owner(self) -> int | None:
        """Return who holds the deepest stored boundary: gallop, then bisect.

        A stored boundary's ancestors are stored, since eviction takes leaves first.
        """
        chain = prefix.Chain(self._layout.seed, self._tokens)
        owner, low, step = None, 0, 1
        high = chain.n_blocks + 1
        while low + step < high:
            found = self._owner(chain, low + step)
            if found is None:
                high = low + step
                break
            owner, low, step = found, low + step, step * 2
        while high - low > 1:
            middle = (low + high) // 2
            found = self._owner(chain, middle)
            if found is None:
                high = middle
            else:
                owner, low = found, middle
        return owner

    def _owner(self, chain: prefix.Chain, boundary: int) -> int | None:
        found = self._db.execute(
            "select snapshot from prefixes where digest = ? and position = ?",
            (chain[boundary], boundary * prefix.BLOCK),
        ).fetchone()
        return found[0] if found else None

    def _children(self, parent: int | None, position: int) -> list[Row]:
        return select(
            self._db,
            "where layout = ? and parent is ? and start_token = ? and first_token = ?",
            self._layout.id,
            parent,
            position,
            int(self._tokens[position]),
        )

    def _continues(self, chain: list[Row], position: int) -> bool:
        last = chain[-1] if chain else None
        if last is not None and last.end > position:
            return True
        return bool(
            self._db.execute(
                "select 1 from snapshots where layout = ? and parent is ? "
                "and start_token = ? and first_token is not null limit 1",
                (self._layout.id, last.id if last else None, position),
            ).fetchone()
        )

    def _shared(self, row: Row, hi: int) -> int:
        own = row.tokens[: hi - row.start]
        return n_common(own, self._tokens[row.start :])

    def _is_expired(self, row: Row) -> bool:
        return row.expires_ns is not None and row.expires_ns <= self._until_ns


def _rank(way: _Way) -> tuple[int, bool]:
    """Return what makes one way better than another: how deep it goes, and that a
    snapshot ends there, where also windows can be resumed."""
    chain, position, _ = way
    return position, bool(chain) and chain[-1].end == position


def ancestors(db: sqlite3.Connection, id_: int) -> list[Row]:
    """Return a snapshot and all that it continues, from the root."""
    rows = select(
        db,
        "where id in (with recursive up (id) as (select ? union "
        "select parent from snapshots join up using (id) where parent is not null) "
        "select id from up)",
        id_,
    )
    return sorted(rows, key=lambda row: row.id)  # a parent's id is the smaller
