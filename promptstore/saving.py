"""A caller's cache into both tiers: what is kept, what is written, and when."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from promptstore.capture import Capture, Intake, take_in
from promptstore.counters import Counters
from promptstore.delta import NewSnapshot
from promptstore.disk import DiskTier
from promptstore.layers import token_bytes
from promptstore.memory import Entry, MemoryTier
from promptstore.tokens import Tokens, compact
from promptstore.types import Kind, Namespace
from promptstore.writer import Writer, deadline

Write = Literal["through", "back", "off"]
Wish = tuple[Kind, str | None, bool, float | None]
"""What an insert asks for: kind, label, pin, ttl_s."""


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
    ) -> int:
        """Store the KV of *ids* as far as *cache* holds it; return how far that is."""
        taken = take_in(cache, len(ids), n_target=n_target, is_exact=namespace.is_exact)
        if not taken.n_tokens:
            return 0
        try:
            self._insert(taken, namespace, ids[: taken.n_tokens], wish)
        except Exception as error:  # one of five places that may: counted
            self._counters.trouble(error)
            self._writer.fail(error)
        self._counters.insert()
        return taken.n_tokens

    def _insert(
        self, taken: Intake, namespace: Namespace, ids: Tokens, wish: Wish
    ) -> None:
        entry = self._remember(taken, namespace, ids, wish)
        if taken.layers is None:
            self._counters.note(
                "unknown-cache-class", f"{taken.text} stays in memory only"
            )
            return
        kind, label, pin, ttl_s = wish
        expires_ns = None if ttl_s is None else time.time_ns() + int(ttl_s * 1e9)
        # What is not captured yet is asked for by a capture of nothing.
        bare = Capture(taken.layers, taken.text, taken.n_tokens, [], [])
        new = NewSnapshot(namespace, ids, bare, kind, label, pin, expires_ns)
        if self._write == "off":
            return
        if len(ids) < self._min_tokens and not new.is_special:
            return
        if entry is not None:
            if self._write == "through" or new.is_special:
                new = replace(new, capture=entry.capture)
                self._save(new, entry, self._timeout_s)
            return
        start = self._n_on_disk(new)
        # Copies of the little that is new let the caller go on without copying all.
        few = len(ids) - start <= start
        capture = taken.capture_rows(start) if few else taken.capture()
        self._save(replace(new, capture=capture), None, self._timeout_s)

    def _remember(
        self, taken: Intake, namespace: Namespace, ids: Tokens, wish: Wish
    ) -> Entry | None:
        """Put a copy into the memory tier, if that takes one of its size."""
        nbytes, n_arrays = taken.size()
        if not self._memory.admits(nbytes):
            return None
        kind, _, pin, ttl_s = wish
        entry = Entry(
            namespace=namespace,
            tokens=compact(ids),
            capture=taken.capture(),
            nbytes=nbytes,
            n_arrays=n_arrays,
            kind=kind,
            keep=kind == "system" or pin,
            expires_s=math.inf if ttl_s is None else time.monotonic() + ttl_s,
        )
        self._memory.add(entry)
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
        if not self._writer.submit(run, nbytes, timeout_s):
            self._counters.note("queue-full", "the disk is too slow: not written")
            self._writer.fail(TimeoutError("no room in the writer's queue"))
            if entry is not None:
                self._memory.settle(entry, None)

    def _n_on_disk(self, new: NewSnapshot) -> int:
        """Return how many of the tokens are stored. The writer looks again, since
        others write as well."""
        assert self._disk is not None
        return self._disk.n_stored(new)

    def _run_save(self, new: NewSnapshot, entry: Entry | None) -> None:
        """Write one prompt. On the writer's thread."""
        assert self._disk is not None
        rows, declined = None, False
        try:
            rows = self._disk.save(new)
            declined = rows is None
        except Exception as error:
            self._counters.trouble(error)
            raise
        finally:
            if declined:
                self._counters.decline()
            if entry is not None:
                entry.declined = declined
                self._memory.settle(entry, rows)

    def save_evicted(self, entry: Entry) -> None:
        """Write back what memory evicts, on the thread that caused it."""
        if self._write == "back" and entry.must_be_saved:
            self._write_back(entry, self._timeout_s)

    def _write_back(self, entry: Entry, timeout_s: float | None) -> None:
        if entry.capture.layers is None or len(entry.tokens) < self._min_tokens:
            return
        try:
            new = NewSnapshot(entry.namespace, entry.tokens, entry.capture, entry.kind)
            self._save(new, entry, timeout_s)
        except Exception as error:  # one of five places that may: counted
            self._counters.trouble(error)
            self._writer.fail(error)

    def flush(self, timeout_s: float | None) -> None:
        """Write what is not written yet, and wait until it is durable."""
        left = deadline(timeout_s)
        if self._write == "back":
            for entry in self._memory.unsaved():
                self._write_back(entry, left())
        self._writer.flush(left())
