"""The disk tier: snapshot files, their index, and the budget of everything there.

Reads on the caller's thread, writes on the writer's; each has a connection of its
own. File before row, row before unlink: a crash leaves an orphan file, never a row
that points nowhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from promptstore import access, delta, prefix, rebuild, resume, snapshot
from promptstore.admission import Admission, is_seen
from promptstore.budget import Budget, Limits
from promptstore.delta import NewSnapshot
from promptstore.errors import (
    IndexDamaged,
    NoSpace,
    NotCovered,
    SnapshotCorrupt,
    TooLarge,
)
from promptstore.extent import Extent, Shape
from promptstore.failpoints import reach
from promptstore.index import (
    Duplicate,
    Found,
    Gone,
    Index,
    Layout,
    NewRow,
    Row,
)
from promptstore.layers import Layers, from_text
from promptstore.plan import Plan, plan
from promptstore.restore import N_THREADS, Key, Source, restore
from promptstore.root import Root
from promptstore.snapshot import Body, Claims, Contents
from promptstore.tokens import Tokens
from promptstore.types import Namespace
from promptstore.volume import Volume

T = TypeVar("T")
_TRIES = 8  # each begins deeper, or after an eviction
_MAX_CHECKPOINTS = 16
_MIN_REUSED = 64  # tokens


@dataclass(frozen=True)
class LookUp:
    """What the disk tier has of a request, and how far it can be resumed."""

    namespace: Namespace
    layout: Layout
    layers: Layers
    found: Found
    plan: Plan

    @property
    def rank(self) -> tuple[int, int]:
        """What makes one better than another."""
        return self.plan.n_tokens, self.found.n_tokens

    @property
    def reused(self) -> list[int]:
        """The snapshots that serve so much of it that this is a use of them: what only
        begins alike does not keep a prompt from eviction."""
        return [
            piece.row.id
            for piece in self.plan.pieces
            if piece.hi - piece.row.start
            >= min(_MIN_REUSED, piece.row.end - piece.row.start)
        ]

    def claims_of(self, name: str) -> Claims:
        """Return what the index says of one of the plan's snapshots.

        Raises:
            SnapshotCorrupt: What it continues is not what it was found behind.
        """
        rows = {piece.row.id: piece.row for piece in self.plan.pieces}
        row = next(row for row in rows.values() if row.name == name)
        above, parts = row, [row.tokens]
        while above.parent is not None:
            start, parent = above.start, rows.get(above.parent)
            if parent is None or parent.id >= above.id:
                raise SnapshotCorrupt(Path(name), "its row continues another")
            parts.append(parent.tokens[: start - parent.start])
            above = parent
        tokens = np.concatenate(parts[::-1])
        return Claims(
            namespace=self.namespace,
            layers=self.layers,
            parent=None if row.parent is None else rows[row.parent].name,
            extent=row.extent,
            end_digest=prefix.end_digest(self.layout.seed, tokens).hex(),
        )


class DiskTier:
    """Everything under one directory.

    Args:
        path: The directory; made if it is not there.
        limits: What may be taken of the disk.
        verify: ``"first-use"``, ``"always"`` or ``"off"``.
        read_only: Change nothing.
        admission: Which prompts are written.
        full_sync: Have what is committed survive a power cut.
        allow_network: Use a network file system, whatever comes of it.
        max_checkpoints: States to keep on one chain.

    Raises:
        StoreUnavailable: The directory cannot be used.
    """

    def __init__(
        self,
        path: Path,
        limits: Limits,
        *,
        verify: str,
        read_only: bool,
        admission: Admission = "always",
        full_sync: bool = False,
        allow_network: bool = False,
        max_checkpoints: int = _MAX_CHECKPOINTS,
    ) -> None:
        access.require_own(path)
        if not allow_network:
            access.require_local(path)
        self.volume = Volume(path, read_only=read_only, full_sync=full_sync)
        self.volume.on_replaced = self._forget
        self.budget = Budget(self.volume, limits)
        self._admission = admission
        self.max_checkpoints = max_checkpoints
        self.read_only = read_only
        self.bytes_written = 0
        self.bytes_read = 0
        self.on_replaced: Callable[[], None] = lambda: None
        self._verify = verify
        self._verified: set[Key] = set()
        self._uses: dict[int, tuple[int, int]] = {}
        self._condemned: dict[int, Row] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(N_THREADS, "promptstore-reader")
        self._ahead = ThreadPoolExecutor(1, "promptstore-prefetch")

    @property
    def root(self) -> Root:
        """The directory."""
        return self.volume.root

    @property
    def index(self) -> Index:
        """The connection for reading; another one once the index was replaced."""
        return self.volume.index

    @property
    def _writer(self) -> Index:
        return self.volume.writer

    def _forget(self) -> None:
        """Forget what was known of a directory that is gone."""
        self._uses.clear()
        self._condemned.clear()
        self._verified.clear()
        self.budget.forget()
        self.on_replaced()

    def close(self) -> None:
        """Close files and connections."""
        self._ahead.shutdown(cancel_futures=True)
        self._pool.shutdown()
        self.volume.close()

    # -------------------------------------------------------------- reading

    def look_up(
        self,
        namespace: Namespace,
        tokens: Tokens,
        fits: Callable[[Layers], bool],
        without: frozenset[int] = frozenset(),
    ) -> tuple[LookUp | None, list[Layers]]:
        """Return what can be resumed deepest over all layouts that fit.

        Args:
            namespace: Whose KV.
            tokens: What may be matched.
            fits: Whether the caller can use caches of such layers.
            without: Checkpoints not to use.

        Returns:
            What was found, and the layers of the layouts that did not fit.
        """
        return self.ask(lambda: self._look_up(namespace, tokens, fits, without))

    def _look_up(
        self,
        namespace: Namespace,
        tokens: Tokens,
        fits: Callable[[Layers], bool],
        without: frozenset[int],
    ) -> tuple[LookUp | None, list[Layers]]:
        best: LookUp | None = None
        misfits: list[Layers] = []
        index = self.index  # another thread may put a new one in its place
        for layout in index.layouts(namespace):
            layers = self.layers_of(layout.layers)
            if not resume.is_known(layers) or not fits(layers):
                misfits.append(layers)
                continue
            found = index.find(layout, tokens)
            how = _plan(index, layers, found, without)
            look_up = LookUp(namespace, layout, layers, found, how)
            if best is None or look_up.rank > best.rank:
                best = look_up
        return best, misfits

    def layers_of(self, text: str) -> Layers:
        """Return the layers that a row of the index tells.

        Raises:
            IndexDamaged: It tells none.
        """
        try:
            return from_text(text)
        except ValueError as error:
            reason = f"its index.db is wrong about a layout: {error}"
            raise self.volume.distrust(reason) from error

    def ask(self, question: Callable[[], T]) -> T:
        """Return the answer of the index that is in place; if it proves to be damaged,
        that of the one that is made in its place."""
        self.volume.stay_in_place()
        try:
            return question()
        except IndexDamaged:
            if self.read_only:
                raise
            self.volume.stay_in_place()
            return question()

    def row(self, name: str) -> Row | None:
        """Return a snapshot, if it is still there."""
        return self.ask(lambda: self.index.row(name))

    def n_stored(self, new: NewSnapshot) -> int:
        """Return how much of a prompt is stored, in snapshots that live as long."""
        return self.ask(lambda: self._n_stored(new))

    def _n_stored(self, new: NewSnapshot) -> int:
        index = self.index
        for layout in index.layouts(new.namespace):
            if layout.layers == new.text:
                found = index.find(layout, new.tokens, new.until_ns)
                bad = [r.start for r in found.chain if r.id in self._condemned]
                n_tokens = min([found.n_tokens, *bad])
                is_all = n_tokens == len(new.tokens)
                return n_tokens if is_all or not layout.is_whole else 0
        return 0

    def load(self, look_up: LookUp, n_total: int) -> list[Any]:
        """Return a live cache of what was found.

        Args:
            look_up: What to restore.
            n_total: Tokens of the whole request.

        Raises:
            SnapshotError: A file is missing, damaged or unreadable.
            NotCovered: A layer has no codec.
        """
        claims_of, seed = look_up.claims_of, look_up.layout.seed
        source = Source(self.root.find, self._must_verify, claims_of, seed)
        plan, layers = look_up.plan, look_up.layers
        with self.budget.lease(piece.row.id for piece in plan.pieces):
            cache, nbytes = restore(plan, layers, n_total, source, self._pool)
        self.bytes_read += nbytes
        if self._verify == "first-use":
            self._verified |= source.verified
        return cache

    def read_ahead(self, look_up: LookUp) -> None:
        """Have the reader threads pull what was found into the page cache."""
        for piece in look_up.plan.pieces:
            self._ahead.submit(self._read_ahead, piece.row, look_up.layers)

    def _read_ahead(self, row: Row, layers: Layers) -> None:
        with contextlib.suppress(Exception), self.open(row, layers) as file:
            file.read_ahead()

    def open(self, row: Row, layers: Layers) -> snapshot.SnapshotFile:
        """Open the file of a snapshot."""
        path, shape = self.root.find(row.name), Shape(layers, row.extent)
        return snapshot.SnapshotFile(path, shape, row.nbytes, row.checksums)

    def _must_verify(self, key: Key) -> bool:
        if self._verify != "first-use":
            return self._verify == "always"
        return key not in self._verified

    # -------------------------------------------------------------- writing

    def save(self, new: NewSnapshot) -> tuple[int, ...] | None:
        """Store what of *new* is not stored yet. On the writer's thread.

        Returns:
            The snapshots that hold it; ``None`` if it was not admitted.

        Raises:
            TooLarge, NoSpace, DailyLimit: It is beyond the limits; nothing was evicted.
            NotCovered: What it continues went away meanwhile.
            OSError, sqlite3.Error: As the system says.
        """
        try:
            if not self.ask(lambda: self._admits(new)):
                return None
            return self._save(new)
        except BaseException:
            self.budget.expect_strays()
            raise

    def _save(self, new: NewSnapshot) -> tuple[int, ...]:
        n_before = self.bytes_written
        for _ in range(_TRIES):
            with contextlib.suppress(Gone):
                ids = self.ask(lambda: self._save_once(new, n_before))
                if self.volume.is_in_place():
                    return ids  # else it may be in an index that was replaced
        raise NotCovered("what it continues was evicted again and again")

    def _admits(self, new: NewSnapshot) -> bool:
        """Whether a prompt is worth writing, asked once for each insert."""
        if self._admission == "always" or new.is_special:
            return True
        layout = self._writer.layout(new.namespace, new.text)
        return is_seen(self._writer, layout, new)

    def _save_once(self, new: NewSnapshot, n_before: int) -> tuple[int, ...]:
        layout = self._writer.layout(new.namespace, new.text)
        self.volume.unlink(self._writer.remove_expired())
        found = self._save_rows(layout, new)
        if found.n_tokens < len(new.tokens):
            return ()  # it did not live longer than its own writing
        if self._needs_checkpoint(layout, new, found):
            self._write(layout, new, found, delta.of_checkpoint(new, found))
            self._thin_out(found)
        ids = self._mark(layout, new, found)
        self._keep_budget(ids, is_new=self.bytes_written > n_before)
        return ids

    def _save_rows(self, layout: Layout, new: NewSnapshot) -> Found:
        """Write the rows that the chain lacks; return the chain that has them all.

        What dies sooner is not continued: it would take the new prompt with it.
        """
        found = self._writer.find(layout, new.tokens)
        if self._has_all(layout, new, found):
            self._writer.prolong(found.chain, new.expires_ns)
            return found
        found = self._writer.find(layout, new.tokens, new.until_ns)
        if layout.is_whole:
            found = Found()  # nothing of another run is continued
        if found.n_tokens == len(new.tokens):
            return found  # another process has just stored them
        extent = delta.of_rows(new, found)
        is_new = self._write(layout, new, found, extent)
        found = self._writer.find(layout, new.tokens)
        if found.n_tokens == len(new.tokens) or (found.expired and new.expires_ns):
            return found
        if is_new:
            raise Gone  # evicted by another process, or expired, at once
        raise NotCovered("another prompt has the same digest")

    def _has_all(self, layout: Layout, new: NewSnapshot, found: Found) -> bool:
        """Whether a chain has all rows of *new*, and may live as long as it does."""
        if found.n_tokens < len(new.tokens):
            return False
        is_mortal = any(row.expires_ns is not None for row in found.chain)
        return not is_mortal or self._writer.row_at(layout, new.tokens) is not None

    def _needs_checkpoint(self, layout: Layout, new: NewSnapshot, found: Found) -> bool:
        """Whether the end of *new* needs a snapshot of no tokens: for its state, for
        rows of windows that the chain lacks, or to bear a label."""
        row = self._writer.row_at(layout, new.tokens)
        if resume.has_state(new.layers):
            return row is None or not row.is_checkpoint
        if row is None and new.is_special:
            return True
        return _plan(self._writer, new.layers, found).n_tokens < len(new.tokens)

    def _mark(self, layout: Layout, new: NewSnapshot, found: Found) -> tuple[int, ...]:
        """Record the use of a prompt, and give its row what an insert asks for."""
        row = self._writer.row_at(layout, new.tokens)
        rows = dict.fromkeys(row.id for row in found.chain)
        if row is not None:
            self._writer.prolong([row], new.expires_ns)
            rows[row.id] = None
        if new.pinned or new.label is not None:
            if row is None:
                raise Gone  # evicted by another process before it was protected
            self._writer.mark(row, label=new.label, pinned=new.pinned)
        now = time.time_ns()
        reach("insert: prompt marked")
        self._writer.touch((id_, now, 0) for id_ in rows)
        reach("insert: uses written")
        return tuple(rows)

    def _write(
        self,
        layout: Layout,
        new: NewSnapshot,
        found: Found,
        extent: Extent,
    ) -> bool:
        """Write one snapshot and add its row; return whether it is a new one."""
        parent = found.chain[-1] if found.chain else None
        contents = _contents(layout, new, parent, extent)
        name = contents.id
        self.budget.require_fit(snapshot.nbytes_of(contents), found.chain)
        with self.root.new_file(name) as (fd, publish):
            written = snapshot.write(fd, contents, _body(new, extent))
            publish()
            row = NewRow(
                name=name,
                layout=layout,
                parent=parent.id if parent else None,
                extent=extent,
                tokens=new.tokens,
                nbytes=written.nbytes,
                checksums=written.checksums,
                kind=new.kind,
                expires_ns=new.expires_ns,
                created_ns=contents.created_ns,
            )
            try:
                self._writer.add(row)
                reach("insert: row committed")
            except Duplicate:
                self.root.unlink(name)
                return False
            except BaseException:
                self.root.unlink(name)
                raise
        self.bytes_written += written.nbytes
        return True

    def _keep_budget(self, ids: tuple[int, ...], *, is_new: bool) -> None:
        """Evict what is over the budget now that the index has grown as well.

        Raises:
            TooLarge, NoSpace: Only without what was just stored; it was removed.
        """
        try:
            self.budget.make_room(0, frozenset(ids))
        except (TooLarge, NoSpace):
            if is_new:
                self.remove(ids[-1:])
            raise

    def _thin_out(self, found: Found) -> None:
        """Keep the number of states on one chain within its bound.

        The ends of answers go first, since the next turn is often rendered otherwise;
        then the oldest ends of turns. What is pinned or a system prompt stays.
        """
        states = [row for row in self._writer.checkpoints(found) if row.extent.state]
        n_over = len(states) - self.max_checkpoints
        if n_over <= 0:
            return
        order = {"assistant": 0, "user": 1}
        loose = [
            row
            for row in states[1:]
            if row.kind in order and not row.pinned and row.label is None
        ]
        loose.sort(key=lambda row: (order[row.kind], row.end))
        for row in loose[:n_over]:
            if self._writer.remove_leaf(row.id):
                reach("insert: old state dropped")
                self.volume.unlink([row])

    # ------------------------------------------------------------- removing

    def evict(self, max_bytes: int) -> None:
        """Evict leaves until everything under the root is within *max_bytes*."""
        self.ask(lambda: self.budget.evict(max_bytes))

    def remove_prompts(self, names: Collection[str]) -> list[Row]:
        """Remove prompts, by the names of their snapshots, and what continues them;
        return their rows.

        A checkpoint goes with the rows that end where it stands: they are one prompt.
        Nothing of them is left in the index.
        """
        return self._erase(
            lambda index: [
                index.prompt_of(row)
                for name in names
                if (row := index.row(name)) is not None
            ]
        )

    def remove_tenant(self, tenant: str) -> list[Row]:
        """Remove all snapshots of a tenant, as `remove_prompts` does."""
        return self._erase(lambda index: index.ids_of_tenant(tenant))

    def _erase(self, find: Callable[[Index], Iterable[int]]) -> list[Row]:
        """Remove what is found, and its traces, from the index that is in place in the
        end: another process may be making it anew."""
        removed: list[Row] = []

        def erase() -> None:
            rows = self._writer.remove(find(self._writer))
            removed.extend(rows)
            self.volume.unlink(rows)
            self.budget.sweep()  # what a deletion has left that was killed
            self._writer.remove_traces()
            self._writer.compact()

        self.ask(erase)
        while not self.volume.is_in_place():
            self.ask(erase)
        self.volume.remove_set_aside()  # which tells of them as well
        return removed

    def remove(self, ids: Iterable[int]) -> list[Row]:
        """Remove snapshots that are no good, and what continues them; return their
        rows. Those whose files are missing are adopted again if these come back."""
        removed = self._writer.remove(ids)
        missing = [
            row.name
            for row in removed
            if not os.path.lexists(self.root.path_of(row.name))
        ]
        self.volume.unlink(removed)
        self._writer.forget_removed(missing)
        return removed

    def drop(self, row: Row) -> None:
        """Drop a snapshot whose file is not what its row says, with what continues it.

        If the row is at fault, the index is damaged, and is rebuilt.

        Raises:
            SnapshotUnreadable: The system refused; nothing is proven.
        """
        if rebuild.is_row_at_fault(self.root, row):
            self.volume.distrust(f"its index.db is wrong about snapshot {row.name}")
        else:
            self.remove([row.id])

    def note_verified(self, id_: int) -> None:
        """Record that a snapshot is as it was written."""
        self._writer.set_verified(id_, time.time_ns())

    def set_pinned(self, ids: Iterable[int], pinned: bool) -> None:
        """Protect snapshots from eviction, or stop doing so."""
        self._writer.set_pinned(ids, pinned)

    def condemn(self, row: Row) -> bool:
        """Note a snapshot that is proven bad; return whether `drop_condemned` must be
        scheduled. A match must not wait for the lock that removing takes."""
        with self._lock:
            is_new = row.id not in self._condemned
            self._condemned[row.id] = row
            return is_new

    def drop_condemned(self) -> None:
        """Drop what was noted as bad. On the writer's thread."""
        with self._lock:
            condemned = list(self._condemned.values())
        try:
            for row in condemned:
                self.drop(row)
        finally:
            with self._lock:
                for row in condemned:
                    self._condemned.pop(row.id, None)

    # ----------------------------------------------------------------- uses

    def note_use(self, ids: Iterable[int]) -> bool:
        """Note a use for `save_uses`; return whether that must be scheduled."""
        now = time.time_ns()
        with self._lock:
            idle = not self._uses
            for id_ in ids:
                _, n_hits = self._uses.get(id_, (now, 0))
                self._uses[id_] = now, n_hits + 1
            return idle and bool(self._uses)

    def save_uses(self) -> None:
        """Record the noted uses. On the writer's thread."""
        with self._lock:
            noted, self._uses = self._uses, {}
        uses = [(id_, now, n_hits) for id_, (now, n_hits) in noted.items()]
        self.ask(lambda: self._writer.touch(uses))
        reach("uses: written")


def _plan(
    index: Index, layers: Layers, found: Found, without: frozenset[int] = frozenset()
) -> Plan:
    """Return how far a chain can be resumed; only some layers need checkpoints."""
    if resume.is_cuttable(layers):
        return plan(found, layers, [])
    rows = [row for row in index.checkpoints(found) if row.id not in without]
    return plan(found, layers, rows)


def _contents(
    layout: Layout, new: NewSnapshot, parent: Row | None, extent: Extent
) -> Contents:
    return Contents(
        id=secrets.token_hex(16),
        namespace=new.namespace.fields,
        layers=new.layers,
        parent=parent.name if parent else None,
        extent=extent,
        end_digest=prefix.end_digest(layout.seed, new.tokens).hex(),
        kind=new.kind,
        created_ns=time.time_ns(),
        writer=_writer_tag(),
    )


def _body(new: NewSnapshot, extent: Extent) -> Body:
    state = new.capture.state_bytes() if extent.state else []
    return Body(new.capture.parts(), state, new.tokens[extent.start :])


@functools.cache
def _writer_tag() -> str:
    names = ("mlx-promptstore", "mlx-lm", "mlx")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)
