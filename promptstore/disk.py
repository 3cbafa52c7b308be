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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from promptstore import codecs, prefix, resume, snapshot
from promptstore.capture import Capture
from promptstore.errors import NotCovered, StoreUnavailable, TooLarge
from promptstore.extent import Band, Extent, Shape
from promptstore.index import (
    Duplicate,
    Found,
    Index,
    Layout,
    NewRow,
    ParentGone,
    Row,
    prepare,
)
from promptstore.layers import Layers, from_text, leaves
from promptstore.plan import Plan, held_by, pieces_of, plan
from promptstore.ranges import Ranges, clip, count, intersect, subtract, union
from promptstore.restore import N_THREADS, restore
from promptstore.snapshot import Body, Contents
from promptstore.tokens import Tokens
from promptstore.types import Kind, Namespace

_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp"
_TRIES = 4


@dataclass(frozen=True)
class NewSnapshot:
    """A prompt to be stored: the writer decides which part of it is new.

    Args:
        tokens: All its tokens, ``[0, end)``.
        capture: Its cache, nobody's to change.
    """

    namespace: Namespace
    tokens: Tokens
    capture: Capture
    kind: Kind
    label: str | None = None
    pinned: bool = False
    ttl_s: float | None = None

    @property
    def is_special(self) -> bool:
        """Whether it asks for a row of its own."""
        return self.pinned or self.label is not None or self.ttl_s is not None

    @property
    def layers(self) -> Layers:
        """Its layers; only what has codecs comes here."""
        assert self.capture.layers is not None
        return self.capture.layers


@dataclass(frozen=True)
class LookUp:
    """What the disk tier has of a request, and how far it can be resumed."""

    layers: Layers
    found: Found
    plan: Plan

    @property
    def rank(self) -> tuple[int, int]:
        """What makes one better than another."""
        return self.plan.n_tokens, self.found.n_tokens


class DiskTier:
    """Everything under one directory.

    Args:
        root: The directory; made if it is not there.
        max_bytes: The budget of everything under it.
        verify: ``"first-use"``, ``"always"`` or ``"off"``.
        read_only: Change nothing.
        max_checkpoints: States to keep on one chain.

    Raises:
        StoreUnavailable: The directory cannot be used.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        *,
        verify: str,
        read_only: bool,
        max_checkpoints: int = 16,
    ) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.max_checkpoints = max_checkpoints
        self.bytes_written = 0
        self.bytes_read = 0
        self.n_evicted = 0
        self._verify = verify
        self._verified: set[tuple[str, int]] = set()
        self._uses: dict[int, int] = {}
        self._uses_lock = threading.Lock()
        self._swept = False
        self.read_only = read_only
        if not read_only:
            _make_root(root)
            prepare(root / "index.db", root / "store.lock")
        elif not (root / "index.db").is_file():
            raise StoreUnavailable(root, "holds no store")
        self.index = Index(root / "index.db", read_only=read_only)
        self._writer = self.index
        if not read_only:
            self._writer = Index(root / "index.db")
        self._pool = ThreadPoolExecutor(N_THREADS, "promptstore-reader")

    def close(self) -> None:
        """Close files and connections."""
        self._pool.shutdown()
        self.index.close()
        if self._writer is not self.index:
            self._writer.close()

    # -------------------------------------------------------------- reading

    def look_up(
        self, namespace: Namespace, tokens: Tokens, fits: Callable[[Layers], bool]
    ) -> tuple[LookUp | None, int]:
        """Return what can be resumed deepest over all layouts that fit.

        Returns:
            What was found, and how many layouts did not fit.
        """
        best, n_misfits = None, 0
        for layout in self.index.layouts(namespace):
            layers = from_text(layout.layers)
            if not fits(layers):
                n_misfits += 1
                continue
            found = self.index.find(layout, tokens)
            look_up = LookUp(layers, found, self._plan(self.index, layers, found))
            if best is None or look_up.rank > best.rank:
                best = look_up
        return best, n_misfits

    def n_stored(self, namespace: Namespace, text: str, tokens: Tokens) -> int:
        """Return how many of *tokens* one layout has, resumable or not."""
        for layout in self.index.layouts(namespace):
            if layout.layers == text:
                n_tokens = self.index.find(layout, tokens).n_tokens
                is_useful = n_tokens == len(tokens) or not layout.is_whole
                return n_tokens if is_useful else 0
        return 0

    def _plan(self, index: Index, layers: Layers, found: Found) -> Plan:
        cuttable = resume.is_cuttable(layers)
        return plan(found, layers, [] if cuttable else index.checkpoints(found))

    def load(self, look_up: LookUp, n_total: int) -> list[Any]:
        """Return a live cache of what was found.

        Raises:
            SnapshotError: A file is missing, damaged or unreadable.
            NotCovered: A layer has no codec.
        """
        cache, nbytes = restore(
            look_up.plan,
            look_up.layers,
            n_total,
            path_of=self.path_of,
            verify=self._must_verify,
            pool=self._pool,
        )
        self.bytes_read += nbytes
        return cache

    def read_ahead(self, look_up: LookUp) -> None:
        """Have the reader threads pull what was found into the page cache."""
        for piece in look_up.plan.pieces:
            self._pool.submit(self._read_ahead, piece.row, look_up.layers)

    def path_of(self, name: str) -> Path:
        """Return where the file of a snapshot is."""
        return self.root / "snapshots" / name[:2] / (name + _SUFFIX)

    def _read_ahead(self, row: Row, layers: Layers) -> None:
        with contextlib.suppress(Exception), self.open(row, layers) as file:
            file.read_ahead()

    def open(self, row: Row, layers: Layers) -> snapshot.SnapshotFile:
        """Open the file of a snapshot."""
        path, shape = self.path_of(row.name), Shape(layers, row.extent)
        return snapshot.SnapshotFile(path, shape, row.nbytes, row.checksums)

    def _must_verify(self, name: str, chunk: int) -> bool:
        if self._verify != "first-use":
            return self._verify == "always"
        key = (name, chunk)
        if key in self._verified:
            return False
        self._verified.add(key)
        return True

    def distrust(self, names: Iterable[str]) -> None:
        """Verify these snapshots again at their next use."""
        names = set(names)
        self._verified = {key for key in self._verified if key[0] not in names}

    # -------------------------------------------------------------- writing

    def save(self, new: NewSnapshot) -> None:
        """Store what of *new* is not stored yet. On the writer's thread.

        Raises:
            TooLarge: It does not fit into the budget; nothing was evicted.
            NotCovered: What it continues went away meanwhile.
            OSError, sqlite3.Error: As the system says.
        """
        self._unlink(self._writer.remove_expired())
        layout = self._writer.layout(new.namespace, new.capture.text)
        for _ in range(_TRIES):
            with contextlib.suppress(ParentGone):
                found = self._writer.find(layout, new.tokens)
                if found.n_tokens < len(new.tokens):
                    if layout.is_whole:
                        found = Found()  # nothing of another run is continued
                    extent = self._rows_extent(new, found)
                    self._write(layout, new, found, extent)
                    found = self._writer.find(layout, new.tokens)
                if self._needs_checkpoint(layout, new, found):
                    extent = self._checkpoint_extent(new, found)
                    self._write(layout, new, found, extent)
                    self._thin_out(found)
                self._mark(layout, new, found)
                return
        raise NotCovered("what it continues was evicted again and again")

    def _needs_checkpoint(self, layout: Layout, new: NewSnapshot, found: Found) -> bool:
        """Whether the end of *new* needs a snapshot of no tokens, for its state, for
        rows of windows that the chain lacks, or to bear a label."""
        row = self._writer.row_at(layout, new.tokens)
        if resume.has_state(new.layers):
            return row is None or not row.is_checkpoint
        if row is None and new.is_special:
            return True
        plan_ = self._plan(self._writer, new.layers, found)
        return plan_.n_tokens < len(new.tokens)

    def _rows_extent(self, new: NewSnapshot, found: Found) -> Extent:
        """Return what a snapshot of the new tokens holds: all rows of full layers,
        and of windows those that the live cache still has."""
        start, end = found.n_tokens, len(new.tokens)
        missing = self._missing(new, found)
        ranges = [union([*wanted, (start, end)]) for wanted in missing]
        return _extent(new, start, end, ranges, with_state=False)

    def _checkpoint_extent(self, new: NewSnapshot, found: Found) -> Extent:
        """Return what a snapshot of no tokens holds: the state, and what rows are
        needed to go on from there but are not on the chain."""
        end = len(new.tokens)
        return _extent(new, end, end, self._missing(new, found), with_state=True)

    def _missing(self, new: NewSnapshot, found: Found) -> list[Ranges]:
        """Return, by leaf, the tokens below the chain's end whose rows are needed to
        go on from the end of *new*, and which the chain lacks."""
        wanted = resume.needs(new.layers, len(new.tokens), new.capture.rings)
        pieces = pieces_of(found)
        return [
            clip(subtract(ranges, held_by(pieces, leaf)), 0, found.n_tokens)
            for leaf, ranges in enumerate(wanted)
        ]

    def _mark(self, layout: Layout, new: NewSnapshot, found: Found) -> None:
        """Record the use of a prompt, and give its row what an insert asks for."""
        row = self._writer.row_at(layout, new.tokens)
        if row is not None:
            self._writer.mark(row, label=new.label, pinned=new.pinned, ttl_s=new.ttl_s)
        now = time.time_ns()
        self._writer.touch(((row.id, now) for row in found.chain), n_hits=0)

    def _write(
        self, layout: Layout, new: NewSnapshot, found: Found, extent: Extent
    ) -> None:
        """Write one snapshot and add its row."""
        parent = found.chain[-1] if found.chain else None
        name = secrets.token_hex(16)
        contents = Contents(
            id=name,
            namespace=asdict(new.namespace),
            layers=new.layers,
            parent=parent.name if parent else None,
            extent=extent,
            end_digest=prefix.end_digest(layout.seed, new.tokens).hex(),
            kind=new.kind,
            created_ns=time.time_ns(),
            writer=_writer_tag(),
        )
        body = Body(
            new.capture.parts(),
            new.capture.state_bytes() if extent.state else [],
            new.tokens[extent.start :],
        )
        spare = frozenset(row.id for row in found.chain)
        held = sum(row.nbytes for row in found.chain)
        self._make_room(snapshot.nbytes_of(contents), held, spare)
        with self._new_file(name) as (fd, publish):
            written = snapshot.write(fd, contents, body)
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
                ttl_s=new.ttl_s,
            )
            try:
                self._writer.add(row)
            except Duplicate:
                self.path_of(name).unlink()
                return
            except BaseException:
                self.path_of(name).unlink(missing_ok=True)
                raise
        self.bytes_written += written.nbytes
        self._make_room(0, held, spare | {row.id for row in self._writer.named(name)})

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
                self._unlink([row])

    @contextlib.contextmanager
    def _new_file(self, name: str) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield the descriptor of a new file and what gives it its final name."""
        final = self.path_of(name)
        temporary = final.with_suffix(_TEMPORARY)
        final.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with snapshot.create(temporary) as fd:
                yield fd, lambda: os.rename(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)

    # --------------------------------------------------------------- budget

    def nbytes(self) -> int:
        """Return the bytes of everything under the root."""
        return sum(size for _, size in _files(self.root))

    def files(self) -> list[Path]:
        """Return every file under the root but the index and the lock."""
        own = {"index.db", "index.db-wal", "index.db-shm", "store.lock"}
        return [
            path
            for path, _ in _files(self.root)
            if path.parent != self.root or path.name not in own
        ]

    def is_ours(self, path: Path) -> bool:
        """Whether a file has the place and the name of a snapshot."""
        named = path in (
            self.path_of(path.stem),
            self.path_of(path.stem).with_suffix(_TEMPORARY),
        )
        return named and not path.is_symlink()

    def _make_room(self, nbytes: int, held: int, spare: frozenset[int]) -> None:
        """Bring everything under the root to the budget less *nbytes*.

        Args:
            nbytes: Bytes about to be written.
            held: Bytes of the chain that they continue.
            spare: That chain, which stays.

        Raises:
            TooLarge: They do not fit together; nothing was evicted.
        """
        if held + nbytes > self.max_bytes:
            raise TooLarge(held + nbytes, self.max_bytes)
        if not self._swept:
            self._swept = True
            self.sweep()
        total = self.nbytes() + nbytes
        if total <= self.max_bytes:
            return
        self.sweep()
        self.evict(self.max_bytes - nbytes, spare)
        total = self.nbytes() + nbytes
        if total > self.max_bytes:
            raise TooLarge(total, self.max_bytes)

    def evict(self, max_bytes: int, spare: frozenset[int] = frozenset()) -> None:
        """Evict leaves until everything under the root is within *max_bytes*."""
        total = self.nbytes()
        for row in self._writer.victims(spare):
            if total <= max_bytes:
                return
            if self._writer.remove_leaf(row.id):
                self._unlink([row])
                self.n_evicted += 1
                total -= row.nbytes

    def sweep(self) -> None:
        """Remove files of ours that no row knows and no process is making."""
        known = {self.path_of(name) for name in self._writer.names()}
        for path in self.files():
            # First the lock, which is held until the row is there, then the row.
            if (
                path not in known
                and self.is_ours(path)
                and snapshot.is_abandoned(path)
                and not self.knows(path)
            ):
                path.unlink(missing_ok=True)

    def knows(self, path: Path) -> bool:
        """Whether a row points to the file at *path* by now."""
        return path.suffix == _SUFFIX and self.index.has(path.stem)

    def remove(self, ids: Iterable[int]) -> list[Row]:
        """Remove snapshots and what continues them; return their rows."""
        removed = self._writer.remove(ids)
        self._unlink(removed)
        return removed

    def set_pinned(self, ids: Iterable[int], pinned: bool) -> None:
        """Protect snapshots from eviction, or stop doing so."""
        self._writer.set_pinned(ids, pinned)

    def _unlink(self, removed: Iterable[Row]) -> None:
        for row in removed:
            self.path_of(row.name).unlink(missing_ok=True)

    # ----------------------------------------------------------------- uses

    def note_use(self, chain: Iterable[Row]) -> bool:
        """Note a use for `save_uses`; return whether that must be scheduled."""
        now = time.time_ns()
        with self._uses_lock:
            idle = not self._uses
            self._uses.update((row.id, now) for row in chain)
            return idle and bool(self._uses)

    def save_uses(self) -> None:
        """Record the noted uses. On the writer's thread."""
        with self._uses_lock:
            uses, self._uses = self._uses, {}
        self._writer.touch(uses.items())


def _extent(
    new: NewSnapshot, start: int, end: int, ranges: list[Ranges], *, with_state: bool
) -> Extent:
    """Group the leaves by what is held of them, full attention first.

    Raises:
        NotCovered: The capture lacks rows of full attention.
    """
    capture = new.capture
    leaves_by_ranges: dict[Ranges, list[int]] = {}
    for leaf, wanted in enumerate(ranges):
        kind = codecs.codec_by_tag(leaves(new.layers)[leaf].tag).kind
        held = intersect(wanted, capture.held(leaf))
        if kind == "full" and held != wanted:
            raise NotCovered(f"tokens {subtract(wanted, held)} were evicted meanwhile")
        if held:
            leaves_by_ranges.setdefault(held, []).append(leaf)
    bands = tuple(
        Band(tuple(numbers), ranges)
        for ranges, numbers in sorted(
            leaves_by_ranges.items(), key=lambda item: (-count(item[0]), item[0])
        )
    )
    state = capture.state if with_state else ()
    return Extent(start, end, bands, capture.rings, state)


@functools.cache
def _writer_tag() -> str:
    names = ("mlx-promptstore", "mlx-lm", "mlx")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _make_root(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise StoreUnavailable(root, "is a file, not a directory")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "snapshots").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(
            root, f"cannot be used as a store: {error.strerror}"
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise StoreUnavailable(root, "cannot be written; open it with read_only=True")


def _files(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield every file under *directory* with its size; links are not followed."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield Path(entry.path), entry.stat(follow_symlinks=False).st_size
