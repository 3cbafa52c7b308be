"""PromptStore: a memory tier over a disk tier. The only module that knows both."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import platformdirs

from promptstore import codecs, restore, resume
from promptstore.capture import Intake, take_in
from promptstore.check import check, repair
from promptstore.counters import Counters
from promptstore.disk import DiskTier, LookUp, NewSnapshot
from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    StoreClosed,
    UnknownSnapshot,
)
from promptstore.index import Row
from promptstore.layers import from_text, summary, token_bytes
from promptstore.memory import Entry, MemoryTier
from promptstore.tokens import Tokens, as_tokens, run_start
from promptstore.types import (
    Explanation,
    Finding,
    Kind,
    Match,
    Namespace,
    Reason,
    ReasonKind,
    SnapshotInfo,
    StoreStats,
)
from promptstore.writer import Writer, deadline

Write = Literal["through", "back", "off"]
Verify = Literal["first-use", "always", "off"]

_Wish = tuple[Kind, str | None, bool, float | None]
"""What an insert asks for: kind, label, pin, ttl_s."""

_AT_EXIT_S = 60.0
_FIND_TRIES = 3


class PromptStore:
    """A store for prompt caches that survives the process. Made by `open`.

    Call `match` and `insert` on the thread that runs the model: they make mlx
    arrays. Everything else may be called from any thread.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        *,
        memory_bytes: int,
        write: Write,
        min_tokens: int,
        queue_bytes: int,
        insert_timeout_s: float,
    ) -> None:
        self._disk = disk
        self._write: Write = write if disk and not disk.read_only else "off"
        self._min_tokens = min_tokens
        self._insert_timeout_s = insert_timeout_s
        self._memory = MemoryTier(memory_bytes, self._save_evicted)
        self._writer = Writer(queue_bytes)
        self._counters = Counters()
        self._pid = os.getpid()
        self._closed = False
        # A daemon thread dies with the interpreter; what is queued must not.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        memory_bytes: int = 8 << 30,
        disk_bytes: int = 50 << 30,
        write: Write = "through",
        min_tokens: int = 64,
        verify: Verify = "first-use",
        read_only: bool = False,
        queue_bytes: int = 1 << 30,
        insert_timeout_s: float = 5.0,
    ) -> Self:
        """Open a store, and make it if it is not there.

        Args:
            path: The directory. Default: ``promptstore`` in the platform's cache
                directory.
            memory_bytes: Budget of the memory tier; 0 for none.
            disk_bytes: Budget of everything under *path*; 0 for no disk tier.
            write: ``"through"`` writes at insert, ``"back"`` when memory evicts and
                at `flush` and `close`, ``"off"`` never.
            min_tokens: Shorter prompts stay in memory only.
            verify: When the bytes of a snapshot are compared with their checksums.
            read_only: Change nothing on disk.
            queue_bytes: Bytes that may wait for the writer.
            insert_timeout_s: How long `insert` waits for room in that queue; then
                the prompt is not written, and counted as ``queue-full``.

        Raises:
            StoreUnavailable: The directory cannot be used (`StoreTooNew`: a newer
                version wrote it); nothing on disk was changed.
            ValueError: An argument is out of its range.
        """
        _check_options(write, verify)
        _check_sizes(
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            min_tokens=min_tokens,
            queue_bytes=queue_bytes,
        )
        disk = None
        if disk_bytes:
            root = Path(path) if path else platformdirs.user_cache_path("promptstore")
            disk = DiskTier(root, disk_bytes, verify=verify, read_only=read_only)
        return cls(
            disk,
            memory_bytes=memory_bytes,
            write=write,
            min_tokens=min_tokens,
            queue_bytes=queue_bytes,
            insert_timeout_s=insert_timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ match

    def match(
        self, namespace: Namespace, tokens: Any, *, like: Sequence[Any] | None = None
    ) -> Match:
        """Return a live cache of the longest usable prefix of *tokens*.

        At least one token is left to prefill. The cache is the caller's own, and has
        room for the rest of *tokens*. Trouble with the store is a miss with a reason.

        Args:
            namespace: Whose KV.
            tokens: The whole request; a list, tuple or array of integers.
            like: A cache as the model makes it (it may be empty): only stored caches
                of the same classes and settings are used. Without it any are.

        Raises:
            TypeError, ValueError: *tokens* is no one-dimensional run of integers.
            StoreClosed: The store was closed.
        """
        self._require_open()
        ids = as_tokens(tokens)
        try:
            match = self._match(namespace, ids, like)
        except Exception as error:  # one of three places that may: a counted miss
            match = Match(None, 0, "miss", self._counters.trouble(error))
        self._counters.match(match, len(ids))
        return match

    def _match(
        self, namespace: Namespace, ids: Tokens, like: Sequence[Any] | None
    ) -> Match:
        usable = self._before_images(namespace, ids[:-1], like)
        if not len(usable):
            return Match(None, 0, "miss", Reason(ReasonKind.TOO_SHORT, 0))
        n_memory, entry = self._memory.best(
            namespace, usable, lambda entry: _entry_fits(entry, like)
        )
        try:
            reason = None
            if n_memory < len(usable):
                match = self._match_disk(namespace, usable, n_memory, like)
                if match.cache is not None:
                    return match
                reason = match.reason
            if entry is None:
                return Match(None, 0, "miss", reason)
            cache = self._from_memory(entry, n_memory, len(ids))
            return Match(cache, n_memory, "memory", reason)
        finally:
            if entry is not None:
                self._memory.release(entry)

    def _before_images(
        self, namespace: Namespace, usable: Tokens, like: Sequence[Any] | None
    ) -> Tokens:
        """Shorten a request so that no match of it ends inside an image.

        mlx_lm.server keys the patches of an image by one negative id; what a model
        computes of a part of an image need not be what it computes of the whole.
        """
        while (usable < 0).any():
            best = self._explain(namespace, usable, like)
            start = run_start(usable, best.n_tokens)
            if start == best.n_tokens:
                break
            usable = usable[:start]
        return usable

    def _from_memory(self, entry: Entry, n_tokens: int, n_total: int) -> list[Any]:
        own = entry.capture
        if own.layers is None:
            return copy.deepcopy(own.cache)
        whole = n_tokens == len(entry.tokens)
        if not self._memory.take(entry, n_tokens):
            return restore.copy(own.leaves, own.layers, n_tokens, n_total, whole=whole)
        if not whole:
            codecs.cut(own.cache, n_tokens)
        return own.cache

    def _match_disk(
        self,
        namespace: Namespace,
        usable: Tokens,
        n_memory: int,
        like: Sequence[Any] | None,
    ) -> Match:
        """Return a match longer than the memory tier's, or a miss that says why."""
        if self._disk is None:
            kind = ReasonKind.NO_ENTRY if n_memory else ReasonKind.DISABLED
            return Match(None, 0, "miss", Reason(kind, n_memory))
        trouble: Reason | None = None
        for _ in range(_FIND_TRIES):
            look_up, reason = self._look_up(namespace, usable, n_memory, like)
            if look_up is None or look_up.plan.n_tokens <= n_memory:
                return Match(None, 0, "miss", trouble or reason)
            try:
                cache = self._disk.load(look_up, len(usable) + 1)
            except SnapshotError as error:
                trouble = self._blame(look_up, error)
                continue
            self._note_use(piece.row for piece in look_up.plan.pieces)
            n_tokens = look_up.plan.n_tokens
            return Match(cache, n_tokens, "disk", trouble or reason)
        return Match(None, 0, "miss", trouble)

    def _look_up(
        self,
        namespace: Namespace,
        usable: Tokens,
        n_memory: int,
        like: Sequence[Any] | None,
    ) -> tuple[LookUp | None, Reason | None]:
        """Look in the index; say why not more, given what memory has."""
        assert self._disk is not None
        best, n_misfits = self._disk.look_up(
            namespace, usable, lambda layers: like is None or codecs.fits(layers, like)
        )
        if best is None:
            kind = ReasonKind.IDENTITY if n_misfits else ReasonKind.NO_ENTRY
            if n_misfits and not n_memory:
                return None, Reason(kind, 0, "layers")
            return None, Reason(ReasonKind.NO_ENTRY, n_memory)
        return best, _why(best, len(usable), n_memory)

    def _blame(self, look_up: LookUp, error: SnapshotError) -> Reason:
        """Count a bad snapshot; drop it if it is proven to be bad."""
        assert self._disk is not None
        rows = [piece.row for piece in look_up.plan.pieces]
        row = next(row for row in rows if row.name == error.path.stem)
        if not isinstance(error, SnapshotCorrupt | SnapshotMissing):
            self._counters.trouble(error)
            return Reason(ReasonKind.UNREADABLE, row.start, row.name)
        # A file that another process has just evicted is missing with its row.
        if self._disk.index.has(row.name):
            self._counters.trouble(error)
            if not self._disk.read_only:
                self._disk.remove([row.id])
        return Reason(ReasonKind.DAMAGED, row.start, row.name)

    def _note_use(self, chain: Iterable[Row]) -> None:
        disk = self._disk
        if disk is not None and not disk.read_only and disk.note_use(chain):
            self._writer.submit(disk.save_uses)

    # ----------------------------------------------------------------- insert

    def insert(
        self,
        namespace: Namespace,
        tokens: Any,
        cache: Sequence[Any],
        *,
        kind: Kind = "assistant",
        label: str | None = None,
        pin: bool = False,
        ttl_s: float | None = None,
        n_target: int | None = None,
    ) -> int:
        """Store the KV of *tokens*; only what is new is copied or written.

        The cache remains the caller's: nothing done to it later changes what is
        stored. It is evaluated. What the cache really holds counts: if that is less
        than *tokens*, it is stored under the tokens that it covers; if more, it is
        cut. Trouble with the disk is counted and logged, not raised; `flush` tells.

        Args:
            namespace: Whose KV.
            tokens: The tokens that the cache was computed from, in order.
            cache: A prompt cache of one sequence.
            kind: What the prompt ends with. A ``"system"`` prompt is a branch point:
                it stays in memory beside longer prompts that begin with it.
            label: A name for the prompt. Whoever has it in this namespace loses it,
                and the pin with it.
            pin: Protect it from eviction.
            ttl_s: Forget it, and all that continues it, after this many seconds.
            n_target: Where in *cache* a draft model's layers begin, if it has any.

        Returns:
            How many tokens are covered.

        Raises:
            TypeError, ValueError: An argument is no good, or *cache* holds more
                tokens than *tokens* and cannot be cut exactly.
            StoreClosed: The store was closed.
        """
        self._require_open()
        if kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, not {kind!r}")
        if label is not None and not label.strip():
            raise ValueError("label must not be empty")
        ids = as_tokens(tokens)
        taken = take_in(cache, len(ids), n_target=n_target, is_exact=namespace.is_exact)
        if not taken.n_tokens:
            return 0
        try:
            self._insert(
                taken, namespace, ids[: taken.n_tokens], (kind, label, pin, ttl_s)
            )
        except Exception as error:  # one of three places that may: counted
            self._counters.trouble(error)
        self._counters.insert()
        return taken.n_tokens

    def _insert(
        self, taken: Intake, namespace: Namespace, ids: Tokens, wish: _Wish
    ) -> None:
        entry = self._remember(taken, namespace, ids, wish)
        if taken.layers is None:
            self._counters.note(
                "unknown-cache-class", f"{taken.text} stays in memory only"
            )
            return
        if self._write == "off" or len(ids) < self._min_tokens:
            return
        if entry is not None:
            new = NewSnapshot(namespace, ids, entry.capture, *wish)
            if self._write == "through" or new.is_special:
                self._save(new, entry)
            return
        start = self._n_on_disk(namespace, taken.text, ids)
        # Copies of the little that is new let the caller go on without copying all.
        few = len(ids) - start <= start
        capture = taken.capture_rows(start) if few else taken.capture()
        self._save(NewSnapshot(namespace, ids, capture, *wish), None)

    def _remember(
        self, taken: Intake, namespace: Namespace, ids: Tokens, wish: _Wish
    ) -> Entry | None:
        """Put a copy into the memory tier, if that takes one of its size."""
        nbytes, n_arrays = taken.size()
        if not self._memory.admits(nbytes):
            return None
        kind, _, pin, _ = wish
        entry = Entry(
            namespace=namespace,
            tokens=ids,
            capture=taken.capture(),
            nbytes=nbytes,
            n_arrays=n_arrays,
            kind=kind,
            keep=kind == "system" or pin,
        )
        self._memory.add(entry)
        return entry

    def _save(self, new: NewSnapshot, entry: Entry | None) -> None:
        """Queue what is new for the disk tier."""
        n_new = len(new.tokens) - self._n_on_disk(
            new.namespace, new.capture.text, new.tokens
        )
        state_bytes = sum(array.nbytes for array in new.capture.state)
        nbytes = n_new * token_bytes(new.layers) + state_bytes
        if entry is not None:
            entry.pending = True
        run = functools.partial(self._run_save, new, entry)
        if not self._writer.submit(run, nbytes, self._insert_timeout_s):
            self._counters.note("queue-full", "the disk is too slow: not written")
            if entry is not None:
                self._memory.settle(entry, durable=False)

    def _n_on_disk(self, namespace: Namespace, text: str, ids: Tokens) -> int:
        """Return how many of the tokens are stored. The writer looks again, since
        others write as well."""
        assert self._disk is not None
        return self._disk.n_stored(namespace, text, ids)

    def _run_save(self, new: NewSnapshot, entry: Entry | None) -> None:
        """Write one prompt. On the writer's thread."""
        assert self._disk is not None
        durable = False
        try:
            self._disk.save(new)
            durable = True
        except Exception as error:
            self._counters.trouble(error)
            raise
        finally:
            if entry is not None:
                self._memory.settle(entry, durable=durable)

    def _save_evicted(self, entry: Entry) -> None:
        """Write back what memory evicts, on the thread that caused it."""
        if self._write == "back" and not entry.pending:
            self._write_back(entry)

    def _write_back(self, entry: Entry) -> None:
        if entry.capture.layers is None or len(entry.tokens) < self._min_tokens:
            return
        try:
            new = NewSnapshot(entry.namespace, entry.tokens, entry.capture, entry.kind)
            self._save(new, entry)
        except Exception as error:  # one of three places that may: counted
            self._counters.trouble(error)

    # ------------------------------------------------------------------- wait

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything inserted is durable.

        Raises:
            WriteFailed: Something was not written since the last flush, and why.
            TimeoutError: It takes longer than *timeout_s*.
        """
        self._require_open()
        self._flush(timeout_s)

    def _flush(self, timeout_s: float | None) -> None:
        if self._write == "back":
            for entry in self._memory.unsaved():
                self._write_back(entry)
        self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Write what is queued, then let go of everything. Closing twice is fine.

        Args:
            timeout_s: How long to wait for the writer; what is then unwritten is
                lost, but nothing is left half-written.

        Raises:
            WriteFailed, TimeoutError: As `flush`; the store is closed all the same.
        """
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        left = deadline(timeout_s)
        try:
            self._flush(timeout_s)
        finally:
            ended = self._writer.close(left())
            self._memory.clear()
            if self._disk is not None and ended:
                self._disk.close()

    # -------------------------------------------------------------- looking on

    def prefetch(self, namespace: Namespace, tokens: Any) -> None:
        """Begin to read what a match of *tokens* will need into the page cache.

        Returns at once; the reading goes on behind.
        """
        self._require_open()
        ids = as_tokens(tokens)
        if self._disk is None:
            return
        with contextlib.suppress(Exception):
            look_up, _ = self._disk.look_up(namespace, ids[:-1], lambda _: True)
            if look_up is not None:
                self._disk.read_ahead(look_up)

    def explain(
        self, namespace: Namespace, tokens: Any, *, like: Sequence[Any] | None = None
    ) -> Explanation:
        """Say what a match would give, and why no more; changes nothing."""
        self._require_open()
        return self._explain(namespace, as_tokens(tokens)[:-1], like)

    def _explain(
        self, namespace: Namespace, usable: Tokens, like: Sequence[Any] | None
    ) -> Explanation:
        n_memory, entry = self._memory.best(
            namespace, usable, lambda entry: _entry_fits(entry, like)
        )
        if entry is not None:
            self._memory.release(entry)
        if self._disk is None:
            reason = Reason(ReasonKind.NO_ENTRY, n_memory)
            left = n_memory < len(usable)
            return Explanation(n_memory, 0, n_memory, reason if left else None, None)
        look_up, reason_ = self._look_up(namespace, usable, n_memory, like)
        chain = look_up.found.chain if look_up is not None else ()
        nearest = self._info(chain[-1]) if chain else None
        n_disk = look_up.plan.n_tokens if look_up is not None else 0
        return Explanation(n_memory, n_disk, max(n_memory, n_disk), reason_, nearest)

    def snapshots(self, namespace: Namespace | None = None) -> Iterator[SnapshotInfo]:
        """Yield what is on disk, the most recently used first.

        Args:
            namespace: Only this one's.
        """
        self._require_open()
        if self._disk is None:
            return
        for row in self._disk.index.rows():
            info = self._info(row)
            if namespace is None or info.namespace == namespace:
                yield info

    def _info(self, row: Row) -> SnapshotInfo:
        assert self._disk is not None
        index = self._disk.index
        namespace, text = index.describe(row.layout)
        return SnapshotInfo(
            id=row.name,
            namespace=namespace,
            start=row.start,
            end=row.end,
            parent=index.name_of(row.parent) if row.parent is not None else None,
            nbytes=row.nbytes,
            layers=summary(from_text(text)),
            kind=row.kind,
            label=row.label,
            pinned=row.pinned,
            created_s=row.created_ns / 1e9,
            used_s=row.used_ns / 1e9,
            expires_s=row.expires_ns / 1e9 if row.expires_ns is not None else None,
            hits=row.hits,
        )

    def stats(self) -> StoreStats:
        """Return what the store holds, and what it did since it was opened."""
        self._require_open()
        counts, reasons, errors = self._counters.snapshot()
        memory, writer, disk = self._memory, self._writer, self._disk
        stats = StoreStats(
            n_entries=len(memory),
            memory_bytes=memory.nbytes,
            n_evicted_memory=memory.n_evicted,
            pending_bytes=writer.nbytes,
            n_pending=writer.n_jobs,
            reasons=reasons,
            errors=errors,
            **counts,
        )
        if disk is None:
            return stats
        return dataclasses.replace(
            stats,
            n_snapshots=disk.index.n_snapshots(),
            disk_bytes=disk.nbytes(),
            bytes_written=disk.bytes_written,
            bytes_read=disk.bytes_read,
            n_evicted_disk=disk.n_evicted,
        )

    # ---------------------------------------------------------------- managing

    def pin(self, id_or_label: str) -> None:
        """Protect a snapshot, and what it continues, from eviction.

        Raises:
            UnknownSnapshot: None has that id or label.
        """
        disk, rows = self._named(id_or_label)
        disk.set_pinned([row.id for row in rows], True)

    def unpin(self, id_or_label: str) -> None:
        """End the protection that `pin` gave.

        Raises:
            UnknownSnapshot: None has that id or label.
        """
        disk, rows = self._named(id_or_label)
        disk.set_pinned([row.id for row in rows], False)

    def delete(self, id_or_label: str) -> int:
        """Delete a snapshot and all that continues it, from both tiers.

        Pins do not protect from this. What it shares with other prompts stays.

        Returns:
            How many snapshots were deleted.

        Raises:
            UnknownSnapshot: None has that id or label.
        """
        disk, rows = self._named(id_or_label)
        self._writer.wait()
        for row in rows:
            namespace, _ = disk.index.describe(row.layout)
            self._memory.remove(namespace, disk.index.tokens_of(row), row.start)
        return len(disk.remove(row.id for row in rows))

    def forget(self, namespace: Namespace, tokens: Any) -> int:
        """Drop from both tiers what a match of *tokens* would use in the end.

        For a caller that found a cache to be no good: the next match misses, or is
        shorter.

        Returns:
            How many snapshots were deleted.
        """
        self._require_open()
        usable = as_tokens(tokens)[:-1]
        self._writer.wait()
        row = None
        if self._disk is not None and not self._disk.read_only:
            look_up, _ = self._disk.look_up(namespace, usable, lambda _: True)
            if look_up is not None and look_up.plan.pieces:
                row = look_up.plan.pieces[-1].row
        self._memory.remove(namespace, usable, row.start if row is not None else 0)
        return len(self._disk.remove([row.id])) if self._disk and row else 0

    def evict(self, *, to_bytes: int) -> None:
        """Evict, least recently used first, until each tier is within *to_bytes*."""
        self._require_open()
        _check_sizes(to_bytes=to_bytes)
        self._memory.shrink(to_bytes)
        if self._disk is not None and not self._disk.read_only:
            self._writer.wait()
            self._disk.evict(to_bytes)

    def check(self) -> list[Finding]:
        """Compare the index with the files, every byte; return what is wrong."""
        self._require_open()
        return check(self._disk) if self._disk is not None else []

    def repair(self, findings: Iterable[Finding]) -> None:
        """Mend what `check` found; proven damage is dropped."""
        self._require_open()
        if self._disk is not None:
            repair(self._disk, findings)

    def _named(self, id_or_label: str) -> tuple[DiskTier, list[Row]]:
        self._require_open()
        rows = self._disk.index.named(id_or_label) if self._disk is not None else []
        if self._disk is None or not rows:
            raise UnknownSnapshot(id_or_label)
        return self._disk, rows

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed("this store belongs to the parent process; open your own")
        if self._closed:
            raise StoreClosed("the store is closed")


def _entry_fits(entry: Entry, like: Sequence[Any] | None) -> bool:
    if like is None:
        return True
    if entry.capture.layers is not None:
        return codecs.fits(entry.capture.layers, like)
    return [type(x) for x in entry.capture.cache] == [type(x) for x in like]


def _why(look_up: LookUp, n_usable: int, n_memory: int) -> Reason | None:
    """Say why no more than this can be matched, given what memory has."""
    found, n_disk = look_up.found, look_up.plan.n_tokens
    n_tokens = max(n_disk, n_memory)
    if n_tokens == n_usable:
        return None
    if found.n_tokens > n_tokens:
        kind = resume.stopping_kind(look_up.layers)
        return Reason(ReasonKind.NOT_RESUMABLE, n_tokens, kind)
    if found.n_tokens == n_tokens and found.expired:
        return Reason(ReasonKind.EXPIRED, n_tokens)
    if found.n_tokens == n_tokens and found.diverges:
        return Reason(ReasonKind.DIVERGED, n_tokens)
    return Reason(ReasonKind.NO_ENTRY, n_tokens)


def _check_options(write: str, verify: str) -> None:
    for name, value, allowed in (
        ("write", write, get_args(Write)),
        ("verify", verify, get_args(Verify)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, not {value!r}")


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        if value < 0:
            raise ValueError(f"{name} must not be negative")


def _close_at_exit(ref: weakref.ref[PromptStore]) -> None:
    store = ref()
    if store is not None:
        with contextlib.suppress(Exception):
            store.close(_AT_EXIT_S)
