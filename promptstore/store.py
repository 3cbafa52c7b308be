"""PromptStore: a memory tier over a disk tier. The only module that knows both."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import platformdirs

from promptstore import nearby
from promptstore.admission import Admission
from promptstore.budget import Limits
from promptstore.check import check, repair
from promptstore.counters import Counters
from promptstore.disk import DiskTier
from promptstore.errors import StoreClosed, StoreUnavailable, UnknownSnapshot
from promptstore.index import Row
from promptstore.layers import from_text, summary
from promptstore.matching import Matcher
from promptstore.memory import MemoryTier
from promptstore.saving import Saver, Write
from promptstore.scrub import Pace, scrub
from promptstore.tokens import Tokens, as_tokens
from promptstore.types import (
    Elsewhere,
    Explanation,
    Finding,
    Kind,
    Match,
    Namespace,
    Neighbour,
    SnapshotInfo,
    StoreStats,
)
from promptstore.writer import Writer, deadline

Verify = Literal["first-use", "always", "off"]
Durability = Literal["normal", "full"]

_AT_EXIT_S = 60.0
_FORGET_S = 10.0
_VERIFY_BYTES_PER_S = 50e6
_VERIFY_AGE_S = 7 * 86_400.0
_MAX_ELSEWHERE = 100
_MAX_TTL_S = 3.2e9  # a century


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
        self._writer = writer = Writer(queue_bytes)
        self._counters = counters = Counters()
        self._memory = memory = MemoryTier(memory_bytes)
        self._matcher = Matcher(memory, disk, writer, counters)
        self._saver = Saver(
            memory,
            disk,
            writer,
            counters,
            write=write,
            min_tokens=min_tokens,
            timeout_s=insert_timeout_s,
        )
        memory.on_evict = self._saver.save_evicted
        if disk is not None:
            disk.on_replaced = memory.forget_disk
            disk.volume.hear_of_damage(counters.trouble)
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
        durability: Durability = "normal",
        min_free_bytes: int = 1 << 30,
        daily_write_bytes: int | None = None,
        admission: Admission = "always",
        allow_network: bool = False,
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
            durability: What `flush` has acknowledged survives a crash of the process
                (``"normal"``) or a power cut as well (``"full"``, which syncs the
                index at every commit).
            min_free_bytes: What must remain free on the file system: snapshots are
                evicted for it, and nothing is written that would take it.
            daily_write_bytes: Bytes of snapshots that may be written on a day (UTC),
                by all processes together; ``None`` for no limit.
            admission: ``"always"``, or ``"second-use"``: a prompt is written when at
                least half of it was inserted before. What has a label, a pin or a
                time to live always is.
            allow_network: Use a network file system, where SQLite's locks do not
                work: only if no other process ever uses the store.
            queue_bytes: Bytes that may wait for the writer.
            insert_timeout_s: How long `insert` waits for room in that queue; then
                the prompt is not written, and counted as ``queue-full``.

        Raises:
            StoreUnavailable: The directory cannot be used (`StoreTooNew`: a newer
                version wrote it); nothing on disk was changed.
            ValueError: An argument is out of its range.
        """
        _check_options(
            write=(write, Write),
            verify=(verify, Verify),
            durability=(durability, Durability),
            admission=(admission, Admission),
        )
        _check_sizes(
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            min_tokens=min_tokens,
            queue_bytes=queue_bytes,
            min_free_bytes=min_free_bytes,
            daily_write_bytes=daily_write_bytes or 0,
        )
        disk = None
        if disk_bytes:
            root = Path(path) if path else platformdirs.user_cache_path("promptstore")
            disk = DiskTier(
                root,
                Limits(disk_bytes, min_free_bytes, daily_write_bytes),
                verify=verify,
                read_only=read_only,
                admission=admission,
                full_sync=durability == "full",
                allow_network=allow_network,
            )
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
        self,
        namespace: Namespace,
        tokens: Any,
        *,
        like: Sequence[Any] | None = None,
        max_tokens: int | None = None,
    ) -> Match:
        """Return a live cache of the longest usable prefix of *tokens*.

        At least one token is left to prefill. The cache is the caller's own, and has
        room for the rest of *tokens*. Trouble with the store is a miss with a reason.

        Args:
            namespace: Whose KV.
            tokens: The whole request; a list, tuple or array of integers.
            like: A cache as the model makes it (it may be empty): only stored caches
                of the same classes and settings are used. Without it any are.
            max_tokens: Match no more than so many.

        Raises:
            TypeError, ValueError: *tokens* is no one-dimensional run of integers.
            StoreClosed: The store was closed.
        """
        self._require_open()
        _check_namespace(namespace)
        ids = as_tokens(tokens)
        try:
            match = self._matcher.match(namespace, ids, like, max_tokens)
        except Exception as error:  # a place that may: a miss
            match = Match(None, 0, "miss", self._counters.trouble(error))
        self._counters.match(match, len(ids))
        return match

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
        to_disk: bool = True,
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
            ttl_s: Forget it after this many seconds. If it is stored already, the
                longer life counts; what continues it and has none lives on.
            n_target: Where in *cache* a draft model's layers begin, if it has any.
            to_disk: Whether it may be written. If not, it stays in memory only.

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
        _check_namespace(namespace)
        _check_wish(label, ttl_s)
        ids, wish = as_tokens(tokens), (kind, label, pin, ttl_s)
        return self._saver.insert(
            namespace, ids, cache, wish, n_target, to_disk=to_disk
        )

    # ------------------------------------------------------------------- wait

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything inserted is durable.

        Raises:
            WriteFailed: Something was not written since the last flush, and why.
            TimeoutError: It takes longer than *timeout_s*.
        """
        self._require_open()
        self._saver.flush(timeout_s)

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
            self._saver.flush(timeout_s)
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
        self,
        namespace: Namespace,
        tokens: Any,
        *,
        like: Sequence[Any] | None = None,
        n_closest: int = 0,
    ) -> Explanation:
        """Say what a match would give, and why no more; changes nothing.

        Nothing is told of other tenants, not even that there are any.

        Args:
            namespace: Whose KV.
            tokens: The whole request.
            like: As for `match`.
            n_closest: Compare with so many stored prompts, and look into the other
                namespaces and layers of the tenant: takes longer the more is stored.

        Raises:
            TypeError, ValueError: *tokens* is no one-dimensional run of integers.
            StoreClosed: The store was closed.
        """
        self._require_open()
        ids = as_tokens(tokens)
        n_memory, look_up, reason = self._matcher.explain(namespace, ids, like)
        nearest = None
        if look_up is not None and look_up.found.chain:
            with contextlib.suppress(Exception):  # the disk is in trouble since
                nearest = self._info(look_up.found.chain[-1])
        n_disk = look_up.plan.n_tokens if look_up is not None else 0
        best = max(n_memory, n_disk)
        found = Explanation(n_memory, n_disk, best, reason, nearest)
        if not n_closest or self._disk is None:
            return found
        try:
            return dataclasses.replace(
                found,
                closest=self._closest(self._disk, namespace, ids, n_closest),
                elsewhere=self._elsewhere(self._disk, namespace, ids, like),
            )
        except Exception as error:  # a place that may: counted
            self._counters.trouble(error)
            return found

    def _closest(
        self, disk: DiskTier, namespace: Namespace, ids: Tokens, n: int
    ) -> tuple[Neighbour, ...]:
        found = nearby.closest(disk, namespace, ids, n)
        infos = [(self._info(near.row), near, follows) for near, follows in found]
        return tuple(
            Neighbour(info, near.n_shared, follows)
            for info, near, follows in infos
            if info is not None
        )

    def _elsewhere(
        self,
        disk: DiskTier,
        namespace: Namespace,
        ids: Tokens,
        like: Sequence[Any] | None,
    ) -> tuple[Elsewhere, ...]:
        places = nearby.in_other_namespaces(disk, namespace, ids, _MAX_ELSEWHERE)
        if like is not None:
            places += nearby.in_other_layers(disk, namespace, ids, like)
        places.sort(key=lambda place: place.n_shared, reverse=True)
        infos = [(self._info(place.row), place) for place in places]
        return tuple(
            Elsewhere(info, place.n_shared, place.differs)
            for info, place in infos
            if info is not None
        )

    def snapshots(self, namespace: Namespace | None = None) -> Iterator[SnapshotInfo]:
        """Yield what is on disk, the most recently used first.

        Args:
            namespace: Only this one's.
        """
        self._require_open()
        disk = self._disk
        if disk is None:
            return
        for row in disk.ask(lambda: disk.index.rows()):
            info = self._info(row)
            if info is not None and (namespace is None or info.namespace == namespace):
                yield info

    def tokens(self, id_or_label: str) -> list[int]:
        """Return all the ids that a snapshot and what it continues hold.

        Raises:
            UnknownSnapshot: None has that id or label.
        """
        self._require_open()
        disk = self._disk
        rows = disk.ask(lambda: disk.index.named(id_or_label)) if disk else []
        if disk is None or not rows:
            raise UnknownSnapshot(id_or_label)
        row = max(rows, key=lambda row: row.end)
        ids: list[int] = disk.ask(lambda: disk.index.tokens_of(row)).tolist()
        return ids

    def _info(self, row: Row) -> SnapshotInfo | None:
        """Return what is known of a snapshot, unless it was deleted meanwhile."""
        assert self._disk is not None
        index = self._disk.index
        described = index.describe(row.layout)
        if described is None:
            return None
        namespace, text = described
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
        """Return what the store holds, and what it did since it was opened.

        While the disk cannot be asked, what it holds is 0 and `errors` says why.
        """
        self._require_open()
        memory, writer, disk = self._memory, self._writer, self._disk
        on_disk = self._on_disk(disk) if disk is not None else {}
        counts, reasons, errors = self._counters.snapshot()
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
            **on_disk,
            bytes_written=disk.bytes_written,
            bytes_read=disk.bytes_read,
            n_evicted_disk=disk.budget.n_evicted,
        )

    def _on_disk(self, disk: DiskTier) -> dict[str, Any]:
        try:
            return {
                "n_snapshots": disk.index.n_snapshots(),
                "disk_bytes": disk.root.nbytes(),
                "written_by_day": disk.index.written_by_day(),
            }
        except Exception as error:  # a place that may: counted
            self._counters.trouble(error)
            return {}

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

        That includes prompts that only begin like it and were stored after it, since
        they hold no more than what they add. Pins do not protect from this. Their
        tokens are overwritten in the index, and their files unlinked.

        Returns:
            How many snapshots were deleted.

        Raises:
            UnknownSnapshot: None has that id or label.
        """
        self._require_open()
        self._writer.wait()
        disk, rows = self._named(id_or_label)
        for row in rows:
            described = disk.index.describe(row.layout)
            if described is not None:
                tokens = disk.index.tokens_of(row)
                self._memory.remove(described[0], tokens, row.end - 1)
        return len(disk.remove_prompts([row.name for row in rows]))

    def delete_tenant(self, tenant: str) -> int:
        """Delete all that belongs to a tenant, from both tiers, as `delete` does.

        Its name goes as well. Prompts that are inserted meanwhile may stay.

        Args:
            tenant: The name; empty for the prompts of no tenant.

        Returns:
            How many snapshots were deleted.
        """
        self._require_open()
        if not isinstance(tenant, str):
            raise TypeError(f"tenant must be a str, not {type(tenant).__name__}")
        if self._disk is not None:
            self._require_writable(self._disk)
        self._writer.wait()
        self._memory.remove_tenant(tenant)
        return len(self._disk.remove_tenant(tenant)) if self._disk is not None else 0

    def forget(
        self, namespace: Namespace, tokens: Any, *, like: Sequence[Any] | None = None
    ) -> int:
        """Drop from both tiers what a match of *tokens* would use in the end.

        For a caller that found a cache to be no good: the next match misses, or is
        shorter. A store that was opened read-only drops from memory only.

        Args:
            namespace: Whose KV.
            tokens: The whole request.
            like: As for the match that gave the cache.

        Returns:
            How many snapshots were deleted.

        Raises:
            TimeoutError: The writer is busy for long; nothing was dropped.
        """
        self._require_open()
        ids = as_tokens(tokens)
        self._writer.wait(_FORGET_S)
        n_memory, look_up, _ = self._matcher.explain(namespace, ids, like)
        n_disk = look_up.plan.n_tokens if look_up is not None else 0
        self._memory.remove(namespace, ids, max(n_memory, n_disk) - 1)
        if self._disk is None or self._disk.read_only or look_up is None or not n_disk:
            return 0
        return len(self._disk.remove([look_up.plan.pieces[-1].row.id]))

    def evict(self, *, to_bytes: int) -> None:
        """Evict, least recently used first, until each tier is within *to_bytes*."""
        self._require_open()
        _check_sizes(to_bytes=to_bytes)
        self._memory.shrink(to_bytes)
        if self._disk is not None and not self._disk.read_only:
            self._writer.wait()
            self._disk.evict(to_bytes)

    def memory_by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Return the prompts in memory and their bytes, by what they end with."""
        return self._memory.by_kind()

    def limit_memory(
        self, *, to_bytes: int | None = None, to_entries: int | None = None
    ) -> None:
        """Keep no more than this in the memory tier from now on.

        Args:
            to_bytes: Its budget, in place of *memory_bytes*.
            to_entries: How many prompts at most.
        """
        self._require_open()
        _check_sizes(to_bytes=to_bytes or 0, to_entries=to_entries or 0)
        if to_bytes is not None:
            self._memory.max_bytes = to_bytes
        if to_entries is not None:
            self._memory.max_entries = to_entries
        self._memory.shrink()

    def shrink_memory(
        self, *, to_bytes: int | None = None, to_entries: int | None = None
    ) -> None:
        """Evict from the memory tier until it is within these, this once.

        Args:
            to_bytes: Bytes that may stay.
            to_entries: Prompts that may stay.
        """
        self._require_open()
        _check_sizes(to_bytes=to_bytes or 0, to_entries=to_entries or 0)
        self._memory.shrink(to_bytes, to_entries)

    def check(self) -> list[Finding]:
        """Compare the index with the files, every byte; return what is wrong."""
        self._require_open()
        self._writer.wait()  # what a match has found is being dropped
        return check(self._disk) if self._disk is not None else []

    def repair(self, findings: Iterable[Finding]) -> None:
        """Mend what `check` found; proven damage is dropped."""
        self._require_open()
        if self._disk is not None:
            self._require_writable(self._disk)
            repair(self._disk, findings)

    def verify(
        self,
        *,
        max_bytes_per_s: float = _VERIFY_BYTES_PER_S,
        max_age_s: float = _VERIFY_AGE_S,
        dry_run: bool = False,
        progress: Callable[[int, int], None] = lambda n_done, n_total: None,
    ) -> Iterator[Finding]:
        """Yield damage as it is found, reading every snapshot slowly.

        Those that were not verified for longest come first, and each that is whole is
        recorded as verified: stop at any time, the next call goes on from there. What
        is proven to be damaged is dropped, with what continues it. May run on a
        thread, or in a process, beside others that use the store.

        Args:
            max_bytes_per_s: How fast to read.
            max_age_s: Spare snapshots that were verified so recently.
            dry_run: Change nothing: neither drop nor record.
            progress: Called with the number of snapshots done and of all to be done.

        Raises:
            StoreClosed: The store was closed, perhaps meanwhile.
        """
        self._require_open()
        if not max_bytes_per_s > 0:
            raise ValueError(f"max_bytes_per_s must be positive, not {max_bytes_per_s}")
        if not 0 <= max_age_s < _MAX_TTL_S:
            raise ValueError(f"max_age_s must be in [0, {_MAX_TTL_S:.0f})")
        if self._disk is None:
            return iter(())
        pace = Pace(max_bytes_per_s)

        def on_read(nbytes: int) -> None:
            pace(nbytes)
            self._require_open()

        return scrub(
            self._disk,
            max_age_s=max_age_s,
            dry_run=dry_run,
            on_read=on_read,
            progress=progress,
        )

    def _named(self, id_or_label: str) -> tuple[DiskTier, list[Row]]:
        self._require_open()
        if self._disk is not None:
            self._require_writable(self._disk)
        disk = self._disk
        rows = disk.ask(lambda: disk.index.named(id_or_label)) if disk else []
        if disk is None or not rows:
            raise UnknownSnapshot(id_or_label)
        return disk, rows

    def _require_writable(self, disk: DiskTier) -> None:
        if disk.read_only:
            raise StoreUnavailable(disk.root.path, "was opened read-only")

    def _require_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed("this store belongs to the parent process; open your own")
        if self._closed:
            raise StoreClosed("the store is closed")


def _check_namespace(namespace: object) -> None:
    if not isinstance(namespace, Namespace):
        raise TypeError(
            f"namespace must be a Namespace, not {type(namespace).__name__}"
        )


def _check_wish(label: object, ttl_s: object) -> None:
    if label is not None and not isinstance(label, str):
        raise TypeError(f"label must be a str, not {type(label).__name__}")
    if isinstance(label, str) and not label.strip():
        raise ValueError("label must not be empty")
    if ttl_s is None:
        return
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
        raise TypeError(f"ttl_s must be a number, not {type(ttl_s).__name__}")
    if not 0 < ttl_s < _MAX_TTL_S:
        raise ValueError(f"ttl_s must be in (0, {_MAX_TTL_S:.0f}), not {ttl_s}")


def _check_options(**options: tuple[str, Any]) -> None:
    for name, (value, allowed) in options.items():
        if value not in get_args(allowed):
            words = get_args(allowed)
            raise ValueError(f"{name} must be one of {words}, not {value!r}")


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
