"""A caller's cache into both tiers: what is kept, what is written, and when."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from promptstore.capture import Capture, Intake, take_in
from promptstore.counters import Counters
from promptstore.delta import NewSnapshot
from promptstore.disk import DiskTier
from promptstore.errors import DailyLimit, NotCovered, TooLarge
from promptstore.layers import token_bytes
from promptstore.memory import Entry, MemoryTier
from promptstore.tokens import Tokens, compact
from promptstore.types import Kind, Namespace
from promptstore.writer import Writer, deadline

Write = Literal["through", "back", "off"]
Wish = tuple[Kind, str | None, bool, float | None]
"""What an insert asks for: kind, label, pin, ttl_s."""
_FINAL = (TooLarge, DailyLimit, NotCovered)
"""What another try would meet again."""
_Left = Callable[[], float | None]
"""Tells how much is left of the time that an insert may take."""


class Saver:
    """Puts caches into the memory tier and queues what is new for the disk tier.

    Args:
        write: When to write.
        min_tokens: Shorter prompts stay in memory only.
        timeout_s: How long to wait for room in the queue.
    """

    def __init__(
        self,
        memory: MemoryTier,
        disk: DiskTier | None,
        writer: Writer,
        counters: Counters,
        *,
        write: Write,
        min_tokens: int,
        timeout_s: float,
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._writer = writer
        self._counters = counters
        self._write: Write = write if disk and not disk.read_only else "off"
        self._min_tokens = min_tokens
        self._timeout_s = timeout_s

    def insert(
        self,
        namespace: Namespace,
        ids: Tokens,
        cache: Sequence[Any],
        wish: Wish,
        n_target: int | None,
        *,
        to_disk: bool = True,
    ) -> int:
        """Store the KV of *ids* as far as *cache* holds it; return how far that is."""
        taken = take_in(cache, len(ids), n_target=n_target, is_exact=namespace.is_exact)
        if not taken.n_tokens:
            return 0
        try:
            left = deadline(self._timeout_s)
            self._insert(taken, namespace, ids[: taken.n_tokens], wish, left, to_disk)
        except Exception as error:  # a place that may: counted
            self._counters.trouble(error)
            if to_disk:
                self._writer.fail(error)
        self._counters.insert()
        return taken.n_tokens

    def _insert(
        self,
        taken: Intake,
        namespace: Namespace,
        ids: Tokens,
        wish: Wish,
        left: _Left,
        to_disk: bool,
    ) -> None:
        kind, label, pin, ttl_s = wish
        expires_ns = None if ttl_s is None else time.time_ns() + int(ttl_s * 1e9)
        entry = self._remember(taken, namespace, ids, wish, expires_ns, left, to_disk)
        if not to_disk:
            return
        if taken.layers is None:
            if self._write != "off":
                self._counters.note(
                    "unknown-cache-class", f"{taken.text} stays in memory only"
                )
            return
        # What is not captured yet is asked for by a capture of nothing.
        bare = Capture(taken.layers, taken.text, taken.n_tokens, [], [])
        new = NewSnapshot(namespace, ids, bare, kind, label, pin, expires_ns)
        if self._write == "off":
            return
        if len(ids) < self._min_tokens and not new.is_special:
            return
        if entry is not None:
            if self._write == "through" or new.is_special:
                self._save(_new_of(entry), entry, left())
            else:
                with contextlib.suppress(RuntimeError):  # flush tries again
                    self._writer.start()
            return
        start = self._n_on_disk(new)
        # Copies of the little that is new let the caller go on without copying all.
        few = len(ids) - start <= start
        capture = taken.capture_rows(start) if few else taken.capture()
        self._save(replace(new, capture=capture), None, left())

    def _remember(
        self,
        taken: Intake,
        namespace: Namespace,
        ids: Tokens,
        wish: Wish,
        expires_ns: int | None,
        left: _Left,
        to_disk: bool,
    ) -> Entry | None:
        """Put a copy into the memory tier, if that takes one of its size."""
        nbytes, n_arrays = taken.size()
        if not self._memory.admits(nbytes):
            return None
        kind, label, pin, ttl_s = wish
        entry = Entry(
            namespace=namespace,
            tokens=compact(ids),
            capture=taken.capture(),
            nbytes=nbytes,
            n_arrays=n_arrays,
            kind=kind,
            keep=kind == "system" or pin,
            expires_s=math.inf if ttl_s is None else time.monotonic() + ttl_s,
            expires_ns=expires_ns,
            label=label,
            pinned=pin,
            declined=not to_disk,
        )
        self._memory.add(entry, lambda other: self._save_evicted(other, left()))
        return entry

    def _save(
        self, new: NewSnapshot, entry: Entry | None, timeout_s: float | None
    ) -> None:
        """Queue what is new for the disk tier.

        Args:
            new: What to store.
            entry: Its entry in the memory tier.
            timeout_s: How long to wait for room in the queue.
        """
        n_new = len(new.tokens) - self._n_on_disk(new)
        state_bytes = sum(array.nbytes for array in new.capture.state)
        nbytes = n_new * token_bytes(new.layers) + state_bytes
        # What memory has evicted but still holds for the writer counts as queued.
        nbytes += self._memory.pending_bytes
        if entry is not None:
            entry.pending = True
        run = functools.partial(self._run_save, new, entry)
        try:
            if self._writer.submit(run, nbytes, timeout_s):
                return
            error: Exception = TimeoutError("no room in the writer's queue")
            self._counters.note("queue-full", "the disk is too slow: not written")
        except RuntimeError as refused:  # the system gives no thread
            self._counters.trouble(refused)
            error = refused
        self._settle_failed(entry, error)

    def _n_on_disk(self, new: NewSnapshot) -> int:
        """Return how many of the tokens are stored. The writer looks again, since
        others write as well; it also meets what keeps this from an answer."""
        assert self._disk is not None
        try:
            return self._disk.n_stored(new)
        except Exception:  # a place that may: the writer will tell
            return 0

    def _run_save(self, new: NewSnapshot, entry: Entry | None) -> None:
        """Write one prompt. On the writer's thread."""
        assert self._disk is not None
        try:
            rows = self._disk.save(new)
        except Exception as error:  # a place that may: flush raises it
            self._counters.trouble(error)
            self._settle_failed(entry, error)
            return
        if rows is None:
            self._counters.decline()
        if entry is not None:
            entry.declined = rows is None
            self._memory.settle(entry, rows)

    def _settle_failed(self, entry: Entry | None, error: Exception) -> None:
        """Leave what memory still has to the next flush; else it is lost."""
        is_kept = entry is not None and self._memory.settle(entry, None, error)
        if not is_kept or isinstance(error, _FINAL):
            self._writer.fail(error)

    def save_evicted(self, entry: Entry) -> None:
        """Write what memory evicts, on the thread that caused it."""
        self._save_evicted(entry, self._timeout_s)

    def _save_evicted(self, entry: Entry, timeout_s: float | None) -> None:
        if entry.must_be_saved:
            self._write_late(entry, timeout_s)

    def _write_late(self, entry: Entry, timeout_s: float | None) -> None:
        """Queue what was not written at its insert, or could not be."""
        if isinstance(entry.error, _FINAL) or entry.capture.layers is None:
            return
        is_due = self._write == "back" and len(entry.tokens) >= self._min_tokens
        if is_due or entry.error is not None:
            self._save(_new_of(entry), entry, timeout_s)

    def flush(self, timeout_s: float | None) -> None:
        """Write what is not written yet, and wait until it is durable.

        What memory has and could not be written is tried once more.
        """
        left = deadline(timeout_s)
        self._writer.wait(left())  # so that what failed by now is tried as well
        late = self._memory.unsaved()
        is_well = True
        for entry in late:
            if is_well or entry.error is None:
                self._write_late(entry, left())
                self._writer.wait(left())
                is_well = entry.error is None  # else spare the disk the others
        for entry in late:
            if entry.error is not None and not isinstance(entry.error, _FINAL):
                self._writer.fail(entry.error)
        self._writer.flush(left())


def _new_of(entry: Entry) -> NewSnapshot:
    return NewSnapshot(
        entry.namespace,
        entry.tokens,
        entry.capture,
        entry.kind,
        entry.label,
        entry.pinned,
        entry.expires_ns,
    )
