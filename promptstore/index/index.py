"""One connection to the index, and everything that is asked of it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from promptstore import prefix
from promptstore.errors import IndexDamaged
from promptstore.eviction import Candidate
from promptstore.failpoints import reach
from promptstore.index.care import Care
from promptstore.index.database import ERRORS, connect, is_damage, refuse_newer
from promptstore.index.neighbours import Near, neighbours
from promptstore.index.rows import (
    BadRow,
    Layout,
    NewRow,
    Row,
    pack,
    require_name,
    select,
)
from promptstore.index.search import Found, Search, ancestors
from promptstore.tokens import Tokens
from promptstore.types import Namespace

_DAY_NS = 86_400 * 10**9
_MOST = 2**63 - 1
_MAX_SIGHTINGS = 20_000


class Gone(Exception):
    """A snapshot or a layout was evicted or deleted meanwhile; look again."""


class Duplicate(Exception):
    """Another process stored the same prompt meanwhile."""


class Index:
    """One connection to ``index.db``, usable from any thread, one call at a time.

    Args:
        path: The database.
        read_only: Change nothing, not even to migrate.
        full_sync: Have each commit survive a power cut.

    Attributes:
        damage: What proved that it is damaged, once it is. Any call may raise it.
    """

    def __init__(
        self, path: Path, *, read_only: bool = False, full_sync: bool = False
    ) -> None:
        self.path = path
        self.damage: IndexDamaged | None = None
        self._lock = threading.Lock()
        self._db = connect(path, read_only=read_only, full_sync=full_sync)
        try:
            refuse_newer(self._db, path)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._db.close()

    # ------------------------------------------------------------- looking up

    def layouts(self, namespace: Namespace) -> list[Layout]:
        """Return the layouts stored in a namespace."""
        rows = self._all(
            "select layouts.id, layers from layouts join namespaces "
            "on namespaces.id = namespace where digest = ?",
            namespace.digest,
        )
        digest = namespace.digest
        return [Layout(id_, prefix.seed(digest, text), text) for id_, text in rows]

    def find(
        self, layout: Layout, tokens: Tokens, until_ns: float | None = None
    ) -> Found:
        """Return the longest stored prefix of *tokens*, compared id by id.

        Args:
            layout: In which tree.
            tokens: The ids.
            until_ns: Until when the snapshots must live. Default: now.
        """
        until_ns = time.time_ns() if until_ns is None else until_ns
        with self._transaction("begin"):  # one view of the tree for all its steps
            search = Search(self._db, layout, tokens, until_ns)
            return search.run_whole() if layout.is_whole else search.run()

    def namespaces(self, tenant: str) -> list[Namespace]:
        """Return the namespaces of a tenant, the newest first."""
        with self._asking():
            query = "select digest, fields from namespaces order by id desc"
            found = self._db.execute(query)
            return [
                namespace
                for namespace in (_namespace(*values) for values in found)
                if namespace.tenant == tenant
            ]

    def neighbours(self, layout: Layout, tokens: Tokens, n: int) -> list[Near]:
        """Return the *n* stored prompts that share most of *tokens*, the best first.

        Reads of every row of a layout where it stands, and the ids of those that share
        any: nothing for a match.
        """
        with self._transaction("begin"):
            return neighbours(self._db, layout, tokens, n)

    def row_at(self, layout: Layout, tokens: Tokens) -> Row | None:
        """Return the snapshot that ends with exactly *tokens*, a checkpoint first."""
        rows = self._rows(
            "where layout = ? and end_digest = ? order by start_token desc",
            layout.id,
            prefix.end_digest(layout.seed, tokens),
        )
        same = (row for row in rows if np.array_equal(self.tokens_of(row), tokens))
        return next(same, None)

    def checkpoints(self, found: Found) -> list[Row]:
        """Return the checkpoints on a chain, the deepest first."""
        rows: list[Row] = []
        now = time.time_ns()
        for row, _, hi in found.pieces:
            rows += self._rows(
                "where parent = ? and first_token is null and start_token <= ? "
                "and (expires_ns is null or expires_ns > ?)",
                row.id,
                hi,
                now,
            )
        return sorted(rows, key=lambda row: row.end, reverse=True)

    def rows(self) -> list[Row]:
        """Return all snapshots, the most recently used first."""
        return self._rows("order by used_ns desc, id desc")

    def named(self, id_or_label: str) -> list[Row]:
        """Return the snapshots of that name or label."""
        return self._rows("where name = ?1 or label = ?1", id_or_label)

    def row(self, name: str) -> Row | None:
        """Return a snapshot, if it is still there."""
        found = self._rows("where name = ?", name)
        return found[0] if found else None

    def name_of(self, id_: int) -> str | None:
        """Return the name of a snapshot."""
        found = self._all("select name from snapshots where id = ?", id_)
        return str(found[0][0]) if found else None

    def tokens_of(self, row: Row) -> Tokens:
        """Return all the tokens ``[0, end)`` that the chain of a snapshot holds.

        Shorter if what it continues has gone meanwhile.
        """
        with self._asking():
            chain = ancestors(self._db, row.id)
        if not chain:
            return row.tokens[:0]
        ends = [above.start for above in chain[1:]] + [row.end]
        parts = [r.tokens[: hi - r.start] for r, hi in zip(chain, ends, strict=True)]
        return np.concatenate(parts)

    def end_digest(self, row: Row) -> str:
        """Return the digest of a snapshot's end, in hexadecimal."""
        query = "select end_digest from snapshots where id = ?"
        found = self._all(query, row.id)
        return bytes(found[0][0]).hex() if found else ""

    def protected_nbytes(self, spare: frozenset[int]) -> int:
        """Return the bytes of what no eviction takes: pinned snapshots and those to
        spare, with all that they continue."""
        marks = ", ".join("?" * len(spare))
        query = (
            "with recursive up (id) as (select id from snapshots where "
            f"(pinned = 1 and coalesce(expires_ns > ?, 1)) or id in ({marks}) "
            "union select parent from snapshots join up using (id) "
            "where parent is not null) "
            "select coalesce(sum(nbytes), 0) from snapshots join up using (id)"
        )
        return int(self._all(query, time.time_ns(), *spare)[0][0])

    def prompt_of(self, row: Row) -> int:
        """Return the snapshot whose removal removes the prompt that ends with *row*."""
        above = self._rows("where id = ?", row.parent) if row.is_checkpoint else []
        return above[0].id if above and above[0].end == row.end else row.id

    def names(self) -> set[str]:
        """Return the names of all snapshots."""
        # From the rows themselves: what an index of SQLite's has lost must not pass for
        # a file without a row.
        query = "select name from snapshots not indexed"
        return {name for (name,) in self._all(query)}

    def has(self, name: str) -> bool:
        """Whether a snapshot has that name."""
        return bool(self._all("select 1 from snapshots where name = ?", name))

    def describe(self, layout: int) -> tuple[Namespace, str] | None:
        """Return the namespace and the layers of a layout, if it is still there."""
        with self._asking():
            found = self._db.execute(
                "select digest, fields, layers from layouts join namespaces "
                "on namespaces.id = namespace where layouts.id = ?",
                (layout,),
            ).fetchone()
            if found is None:
                return None
            digest, fields, layers = found
            return _namespace(digest, fields), layers

    def ids_of_tenant(self, tenant: str) -> list[int]:
        """Return the snapshots of all namespaces of a tenant."""
        with self._asking():
            found = self._db.execute(
                "select snapshots.id, digest, fields from snapshots "
                "join layouts on layouts.id = layout "
                "join namespaces on namespaces.id = namespace"
            )
            return [
                id_
                for id_, digest, fields in found
                if _namespace(digest, fields).tenant == tenant
            ]

    def unverified(self, since_ns: int, now_ns: int) -> list[str]:
        """Return the names of snapshots not verified in ``(since_ns, now_ns]``, those
        that it is longest ago for first."""
        if not self._has_column("verified_ns"):
            return [name for (name,) in self._all("select name from snapshots")]
        query = (
            "select name from snapshots where verified_ns is null "
            "or verified_ns <= ?1 or verified_ns > ?2 order by verified_ns, id"
        )
        return [name for (name,) in self._all(query, since_ns, now_ns)]

    def nbytes(self) -> int:
        """Return the bytes of all snapshots."""
        return int(self._all("select coalesce(sum(nbytes), 0) from snapshots")[0][0])

    def n_snapshots(self) -> int:
        """Return how many snapshots there are."""
        return int(self._all("select count(*) from snapshots")[0][0])

    def is_sound(self) -> bool:
        """Whether SQLite finds the database whole."""
        try:
            whole = self._all("pragma integrity_check(1)") == [("ok",)]
            return whole and not self._all("pragma foreign_key_check")
        except IndexDamaged:
            return False

    # --------------------------------------------------------------- changing

    def layout(self, namespace: Namespace, layers: str) -> Layout:
        """Return a layout, made if it is new."""
        digest = namespace.digest
        fields = json.dumps(namespace.fields, sort_keys=True)
        with self.transaction():
            self._db.execute(
                "insert into namespaces (digest, fields) values (?, ?) "
                "on conflict do nothing",
                (digest, fields),
            )
            # Random ids are never given anew: who still has that of a layout that was
            # deleted must not meet another tenant's under it.
            self._db.execute(
                "insert into layouts (id, namespace, layers) "
                "select random() & 0x7fffffffffffffff, id, ? from namespaces "
                "where digest = ? on conflict do nothing",
                (layers, digest),
            )
            (id_,) = self._db.execute(
                "select layouts.id from layouts join namespaces "
                "on namespaces.id = namespace where digest = ? and layers = ?",
                (digest, layers),
            ).fetchone()
        reach("insert: layout made")
        return Layout(id_, prefix.seed(digest, layers), layers)

    def add(self, new: NewRow, *, beside: bool = False) -> int:
        """Add a snapshot whose file is whole, synced and in its place; return its id.

        Args:
            new: The snapshot.
            beside: Add it also beside one that begins alike and lives as long.

        Raises:
            Gone: The parent, or the layout, is no longer there; or it is no longer the
                one to continue, since one that begins alike was added meanwhile.
            Duplicate: The same prompt is there already, or this snapshot was removed.
        """
        created_ns = time.time_ns() if new.created_ns is None else new.created_ns
        end = len(new.tokens)
        start = new.extent.start
        own = new.tokens[start:]
        chain = prefix.Chain(new.layout.seed, new.tokens)
        with self.transaction():
            if self._was_removed(new.name):
                raise Duplicate
            if not self._can_continue(new.layout.id, new.parent, start):
                raise Gone
            done = self._db.execute(
                "insert into snapshots (name, layout, parent, start_token, end_token, "
                "first_token, tokens, extent, end_digest, nbytes, checksums, kind, "
                "created_ns, used_ns, expires_ns) "
                "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "on conflict do nothing",
                (
                    new.name,
                    new.layout.id,
                    new.parent,
                    start,
                    end,
                    int(own[0]) if len(own) else None,
                    pack(own),
                    new.extent.to_text(),
                    chain.end(),
                    new.nbytes,
                    new.checksums,
                    new.kind,
                    created_ns,
                    created_ns,
                    new.expires_ns,
                ),
            )
            if not done.rowcount:
                raise Duplicate
            reach("insert: row written")
            id_ = int(done.lastrowid or 0)
            if new.layout.is_whole:
                return id_  # found by its end alone
            if len(own) and not beside and self._has_twin(id_, new):
                raise Gone
            boundaries = range(start // prefix.BLOCK + 1, end // prefix.BLOCK + 1)
            self._db.executemany(
                "insert into prefixes values (?, ?, ?) on conflict do nothing",
                [(chain[b], b * prefix.BLOCK, id_) for b in boundaries],
            )
        return id_

    def give(self, care: Mapping[str, Care]) -> None:
        """Give snapshots, by name, back what a former index knew of them."""
        with self.transaction():
            for name, each in care.items():
                self._db.execute(
                    "update or ignore snapshots set label = ?, pinned = ?, "
                    "used_ns = ?, expires_ns = ?, hits = ?, verified_ns = ? "
                    "where name = ?",
                    (*astuple(each), name),
                )

    def note_removed(self, names: Iterable[str]) -> None:
        """Have the files of snapshots that a former index removed stay without row."""
        with self.transaction():
            self._db.executemany(
                "insert or ignore into removed (name) values (?)",
                [(name,) for name in names],
            )

    def mark(self, row: Row, *, label: str | None, pinned: bool) -> None:
        """Give an existing snapshot what a repeated insert asks for.

        Raises:
            Gone: It is no longer there.
        """
        with self.transaction():
            if label is not None:
                self._release_label(row, label)
            done = self._db.execute(
                "update snapshots set label = coalesce(?, label), "
                "pinned = max(pinned, ?) where id = ?",
                (label, pinned, row.id),
            )
            if not done.rowcount:
                raise Gone

    def prolong(self, rows: Iterable[Row], expires_ns: int | None) -> None:
        """Let snapshots live at least until then; ``None`` for good."""
        with self.transaction():
            self._db.executemany(
                "update snapshots set expires_ns = case when ?1 is null then null "
                "else max(expires_ns, ?1) end where id = ?2 and expires_ns is not null",
                [(expires_ns, row.id) for row in rows],
            )

    def set_pinned(self, ids: Iterable[int], pinned: bool) -> None:
        """Protect snapshots from eviction, or stop doing so."""
        with self.transaction():
            self._db.executemany(
                "update snapshots set pinned = ? where id = ?",
                [(pinned, id_) for id_ in ids],
            )

    def remove_expired(self) -> list[Row]:
        """Remove what has outlived its time, and all that continues it."""
        now = time.time_ns()
        query = "select id from snapshots where expires_ns <= ?"
        if not self._all(query + " limit 1", now):
            return []
        with self.transaction():  # nobody prolongs them meanwhile
            ids = self._db.execute(query, (now,)).fetchall()
            # Each row by itself: SQLite's own index of lives may be what is damaged.
            rows = [row for id_ in ids for row in self._select("where id = ?", *id_)]
            if any(row.expires_ns is None or row.expires_ns > now for row in rows):
                raise BadRow("its order by expiry contradicts its rows")
            removed = self._remove(row.id for row in rows)
        reach("remove: rows gone")
        return removed

    def touch(self, uses: Iterable[tuple[int, int, int]]) -> None:
        """Record uses: a snapshot, the time in nanoseconds, and how many hits."""
        with self.transaction():
            self._db.executemany(
                "update snapshots set used_ns = max(used_ns, ?2), hits = hits + ?3 "
                "where id = ?1",
                list(uses),
            )

    def candidates(self) -> list[Candidate]:
        """Return what eviction needs to know of every snapshot."""
        columns = "id, name, parent, layout, nbytes, used_ns, hits, pinned, expires_ns"
        with self._asking():
            rows = self._db.execute(f"select {columns} from snapshots").fetchall()
            for _, name, *_ in rows:
                require_name(name)
        return [Candidate(*row) for row in rows]

    def remove(self, ids: Iterable[int]) -> list[Row]:
        """Remove snapshots and all that continue them; return what was removed."""
        with self.transaction():
            removed = self._remove(ids)
        reach("remove: rows gone")
        return removed

    def _remove(self, ids: Iterable[int]) -> list[Row]:
        removed: dict[int, Row] = {}
        for id_ in ids:
            for row in self._select(
                "where id in (with recursive tree (id) as (select ? union "
                "select snapshots.id from snapshots join tree "
                "on parent = tree.id) select id from tree) order by id desc",
                id_,
            ):
                removed[row.id] = row
        # Children have later ids than their parents, so leaves go first.
        for id_ in sorted(removed, reverse=True):
            self._db.execute("delete from snapshots where id = ?", (id_,))
            reach("remove: row written")
        return list(removed.values())

    def forget_removed(self, names: Collection[str]) -> None:
        """Let snapshots whose files were missing have rows again once they are back."""
        if not names:
            return
        with self.transaction():
            self._db.executemany(
                "delete from removed where name = ?", [(name,) for name in names]
            )

    def remove_traces(self) -> None:
        """Remove what is of no snapshot, but tells of deleted ones: the names of
        tenants and models, and digests by which a guess could be confirmed."""
        with self.transaction():
            self._db.execute(
                "delete from layouts where not exists "
                "(select 1 from snapshots where layout = layouts.id)"
            )
            self._db.execute(
                "delete from namespaces where not exists "
                "(select 1 from layouts where namespace = namespaces.id)"
            )
            self._db.execute("delete from sightings")
        reach("remove: traces gone")

    def compact(self) -> None:
        """Write the database anew without what was deleted from it; empty the log.

        What is deleted is overwritten (`secure_delete`), but not the copies of it that
        SQLite leaves in a page when it moves rows. Where another process stands in the
        way, the next one does it.
        """
        with self._asking(), contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("vacuum")
        reach("remove: index compacted")
        self.truncate_log()

    def remove_leaf(self, id_: int) -> bool:
        """Remove one snapshot if by now nothing continues it and no pin protects it."""
        with self.transaction():
            done = self._db.execute(
                "delete from snapshots where id = ?1 "
                "and (pinned = 0 or coalesce(expires_ns <= ?2, 0)) "
                "and not exists (select 1 from snapshots where parent = ?1)",
                (id_, time.time_ns()),
            )
            return bool(done.rowcount)

    # ------------------------------------------------------------------- wear

    def reserve(self, nbytes: int, max_bytes: int | None) -> bool:
        """Count bytes that are about to be written, unless today's would be too many.

        Args:
            nbytes: How many.
            max_bytes: How many a day may have, all processes together.
        """
        day = time.time_ns() // _DAY_NS
        with self.transaction():
            done = self._db.execute(
                "insert into writes (day, nbytes) select ?1, ?2 where ?2 <= ?3 "
                "on conflict (day) do update set nbytes = nbytes + ?2 "
                "where nbytes + ?2 <= ?3",
                (day, nbytes, _MOST if max_bytes is None else max_bytes),
            )
        reach("insert: bytes counted")
        return bool(done.rowcount)

    def written_by_day(self) -> dict[str, int]:
        """Return the bytes of snapshot files that were written, by day (UTC)."""
        query = "select date(day * 86400, 'unixepoch'), nbytes from writes order by day"
        return dict(self._all(query)) if self._has_table("writes") else {}

    def seen(self, digests: Collection[bytes]) -> set[bytes]:
        """Return which of *digests* were noted by `note_seen`."""
        marks = ", ".join("?" * len(digests))
        query = f"select digest from sightings where digest in ({marks})"
        return {digest for (digest,) in self._all(query, *digests)}

    def note_seen(self, digests: Collection[bytes]) -> None:
        """Remember *digests*, and forget the oldest of too many."""
        now = time.time_ns()
        with self.transaction():
            self._db.executemany(
                "insert into sightings values (?, ?) "
                "on conflict (digest) do update set seen_ns = excluded.seen_ns",
                [(digest, now) for digest in digests],
            )
            self._db.execute(
                "delete from sightings where digest in (select digest from sightings "
                "order by seen_ns desc limit -1 offset ?)",
                (_MAX_SIGHTINGS,),
            )
        reach("insert: sighting noted")

    # -------------------------------------------------------------- verifying

    def set_verified(self, id_: int, now_ns: int) -> None:
        """Record that a snapshot is as it was written, if the system lets us."""
        # What is not recorded is verified once more, that is all.
        with contextlib.suppress(sqlite3.OperationalError), self.transaction():
            self._db.execute(
                "update snapshots set verified_ns = ? where id = ?", (now_ns, id_)
            )

    def truncate_log(self) -> None:
        """Move what is in the write-ahead log into the database, and empty the log.

        Where the system or another process stands in the way, a later one does it.
        """
        with self._asking(), contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("pragma wal_checkpoint(truncate)").fetchall()
        reach("evict: log truncated")

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Hold the write lock of the database; commit, or roll back on an error."""
        # A deferred BEGIN that reads first fails at once when another writes.
        return self._transaction("begin immediate")

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._asking():
            if self._db.in_transaction:  # the last one could not even be rolled back
                self._db.execute("rollback")
            self._db.execute(begin)
            try:
                yield
                self._db.execute("commit")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("rollback")
                raise

    def _has_table(self, name: str) -> bool:
        """Whether there is a table; an older index that is only read may lack it."""
        query = "select 1 from sqlite_master where type = 'table' and name = ?"
        return bool(self._all(query, name))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Hold the connection, and note what proves that the database is damaged.

        Raises:
            IndexDamaged: It is.
        """
        try:
            with self._lock:
                yield
        except (*ERRORS, BadRow) as error:
            if not isinstance(error, BadRow) and not is_damage(error):
                raise
            reason = f"its {self.path.name} is damaged: {error}"
            self.damage = IndexDamaged(self.path.parent, reason)
            raise self.damage from error

    def _was_removed(self, name: str) -> bool:
        query = "select 1 from removed where name = ?"
        return self._db.execute(query, (name,)).fetchone() is not None

    def _can_continue(self, layout: int, parent: int | None, start: int) -> bool:
        """Whether a layout is there, and in it a parent that holds *start*."""
        if parent is None:
            found = self._db.execute("select 1 from layouts where id = ?", (layout,))
        else:
            found = self._db.execute(
                "select 1 from snapshots where layout = ? and id = ? "
                "and start_token <= ? and end_token >= ?",
                (layout, parent, start, start),
            )
        return found.fetchone() is not None

    def _has_column(self, name: str) -> bool:
        """Whether snapshots have a column; an older index that is only read may lack
        it."""
        query = "select 1 from pragma_table_info('snapshots') where name = ?"
        return bool(self._all(query, name))

    def _has_twin(self, id_: int, new: NewRow) -> bool:
        """Whether another snapshot continues the same, begins alike, and lives as long:
        of two such chains a look-up would see one."""
        query = (
            "select 1 from snapshots where layout = ? and parent is ? "
            "and start_token = ? and first_token = ? and id != ? "
            "and (expires_ns is null or expires_ns > ?) limit 1"
        )
        start = new.extent.start
        until_ns = _MOST if new.expires_ns is None else new.expires_ns
        args = new.layout.id, new.parent, start, int(new.tokens[start]), id_, until_ns
        return self._db.execute(query, args).fetchone() is not None

    def _release_label(self, row: Row, label: str) -> None:
        """Take a label, and the pin that came with it, from whoever else has it."""
        self._db.execute(
            "update snapshots set label = null, pinned = 0 "
            "where layout = ? and label = ? and id != ?",
            (row.layout, label, row.id),
        )

    def _all(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        with self._asking():
            return self._db.execute(sql, args).fetchall()

    def _rows(self, where: str, *args: object) -> list[Row]:
        with self._asking():
            return self._select(where, *args)

    def _select(self, where: str, *args: object) -> list[Row]:
        return select(self._db, where, *args)


def _namespace(digest: bytes, fields: str) -> Namespace:
    try:
        namespace = Namespace(**json.loads(fields))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"the row of a namespace: {error}") from error
    if namespace.digest != digest:
        raise BadRow("the digest of a namespace differs from its fields")
    return namespace
