"""The memory tier: live caches in a radix tree, the least recently used goes first.

Branch points outlive what branches off them: answers go before user turns, and those
before system prompts, as long as there are as many of them.

Holds what it is given and hands it out under rules; copies nothing itself, so that
no lock is held across mlx work. Every method is thread-safe.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from promptstore.capture import Capture
from promptstore.layers import Layers
from promptstore.radix import RadixTree
from promptstore.tokens import Tokens
from promptstore.types import KINDS, Kind, Namespace

_MAX_ARRAYS = 100_000  # Metal allows 499,000 live buffers in a process
_HAND_OVER_TOKENS = 256
_MAX_TRIED = 8  # entries that share a prefix and might be cut to it


@dataclass(eq=False, slots=True)
class Entry:
    """One live cache that belongs to the store.

    Args:
        namespace: Its namespace.
        tokens: The tokens that it holds.
        capture: The cache. Nobody updates it while it is here.
        nbytes: Bytes of its arrays, padding included.
        n_arrays: How many arrays those are.
        kind: What its prompt ends with.
        keep: Whether it is a branch point: never handed over, nor dropped because
            a longer entry covers it.
        durable: Whether the disk tier has all its tokens.
        pending: Whether a write is queued.
        declined: Whether the disk tier did not admit it.
        evicted: Evicted while pending; leaves when the write is done.
        readers: How many are copying from it.
        rows: The snapshots that hold it on disk, once it is durable.
        expires_s: When it must not be used any more, by ``time.monotonic``.
        expires_ns: The same by ``time.time_ns``; ``None`` for never.
        label: The name that its insert gave it.
        pinned: Whether its insert pinned it.
        error: Why its last write failed; the next flush tries again.
    """

    namespace: Namespace
    tokens: Tokens
    capture: Capture
    nbytes: int
    n_arrays: int
    kind: Kind = "assistant"
    keep: bool = False
    durable: bool = False
    pending: bool = False
    declined: bool = False
    evicted: bool = False
    readers: int = 0
    rows: tuple[int, ...] = ()
    expires_s: float = math.inf
    expires_ns: int | None = None
    label: str | None = None
    pinned: bool = False
    error: BaseException | None = None

    @property
    def must_be_saved(self) -> bool:
        """Whether the disk tier has yet to be asked to take it."""
        return not (self.durable or self.pending or self.declined)


@dataclass(frozen=True)
class Stop:
    """Where what entries share with a request ends.

    Args:
        n_shared: After how many tokens.
        diverges: Whether an entry goes on there, but differently.
        layers: Of an entry that shares them; ``None`` if their class is unknown.
    """

    n_shared: int
    diverges: bool
    layers: Layers | None


class MemoryTier:
    """An LRU of live caches within a budget of bytes and of entries.

    Args:
        max_bytes: The budget; 0 keeps nothing.
        max_entries: How many entries at most.
        on_evict: Called with each evicted entry that is not durable, without lock.
    """

    def __init__(
        self,
        max_bytes: int,
        on_evict: Callable[[Entry], None] = lambda entry: None,
        max_entries: int = sys.maxsize,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.on_evict = on_evict
        self.n_evicted = 0
        self._lock = threading.Lock()
        self._trees: dict[bytes, dict[str, RadixTree[Entry]]] = {}
        self._orders: dict[Kind, OrderedDict[Entry, None]] = {
            kind: OrderedDict() for kind in KINDS
        }
        self._mortal: set[Entry] = set()
        self._leaving: set[Entry] = set()
        self._nbytes = 0
        self._n_arrays = 0

    def __len__(self) -> int:
        """Entries that count against the budget."""
        return sum(map(len, self._orders.values()))

    @property
    def nbytes(self) -> int:
        """Bytes that count against the budget."""
        return self._nbytes

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Return by kind the entries that count against the budget, and their bytes."""
        with self._lock:
            return {
                kind: (len(order), sum(entry.nbytes for entry in order))
                for kind, order in self._orders.items()
            }

    @property
    def pending_bytes(self) -> int:
        """Bytes of entries that left the budget and wait to be written."""
        with self._lock:
            return sum(entry.nbytes for entry in self._leaving)

    def admits(self, nbytes: int) -> bool:
        """Whether a thing of that size fits at all."""
        return 0 < nbytes <= self.max_bytes and self.max_entries > 0

    def add(
        self, entry: Entry, on_evict: Callable[[Entry], None] | None = None
    ) -> None:
        """Keep *entry*, drop what it stands in for, and evict down to the budget.

        Args:
            entry: What to keep.
            on_evict: What to call instead of `on_evict` this time.
        """
        with self._lock:
            trees = self._trees.setdefault(entry.namespace.digest, {})
            tree = trees.setdefault(entry.capture.text, RadixTree())
            for n_tokens, other in tree.prefixes(entry.tokens):
                same = n_tokens == len(entry.tokens)
                stands_in = (
                    entry.capture.resumable(n_tokens) == n_tokens
                    and entry.expires_s >= other.expires_s
                )
                # A label that is not on disk yet is on nothing else.
                keep = other.keep or (other.label is not None and not other.durable)
                if same or (stands_in and not keep):
                    entry.keep = entry.keep or (same and other.keep)
                    self._drop(other)
            tree.set(entry.tokens, entry)
            # Dropping the last entry of a tree has dropped the tree.
            self._trees[entry.namespace.digest] = trees
            trees[entry.capture.text] = tree
            self._orders[entry.kind][entry] = None
            if entry.expires_s < math.inf:
                self._mortal.add(entry)
            self._nbytes += entry.nbytes
            self._n_arrays += entry.n_arrays
            evicted = self._evict(self.max_bytes, self.max_entries, spare=entry)
        self._let_go(evicted, on_evict or self.on_evict)

    def best(
        self,
        namespace: Namespace,
        tokens: Tokens,
        fits: Callable[[Entry], bool],
        *,
        touch: bool = True,
    ) -> tuple[int, Entry | None]:
        """Return the longest usable prefix and the entry that has it, leased.

        Args:
            namespace: Whose KV.
            tokens: What may be matched.
            fits: Whether the caller can use an entry.
            touch: Whether this is a use.

        Returns:
            The entry must be given back with `release`, or taken with `take`.
        """
        with self._lock:
            self._drop_expired()
            best, entry = 0, None
            for tree in self._trees.get(namespace.digest, {}).values():
                n_tokens, found = _usable(tree, tokens)
                if found is not None and n_tokens > best and fits(found):
                    best, entry = n_tokens, found
            if entry is not None:
                entry.readers += 1
                if touch and not entry.evicted:
                    self._orders[entry.kind].move_to_end(entry)
            return best, entry

    def stop(self, namespace: Namespace, tokens: Tokens) -> Stop:
        """Return how much of *tokens* any entry shares, resumable there or not."""
        with self._lock:
            best = Stop(0, False, None)
            for tree in self._trees.get(namespace.digest, {}).values():
                n_shared, entries = tree.longest(tokens)
                if n_shared > best.n_shared:
                    found = list(itertools.islice(entries, _MAX_TRIED))
                    goes_on = any(len(entry.tokens) > n_shared for entry in found)
                    best = Stop(
                        n_shared,
                        goes_on and n_shared < len(tokens),
                        found[0].capture.layers if found else None,
                    )
            return best

    def release(self, entry: Entry) -> None:
        """End the lease that `best` began."""
        with self._lock:
            entry.readers -= 1

    def take(self, entry: Entry, n_tokens: int) -> bool:
        """Remove a leased entry for good if it may be handed over to one caller.

        A conversation's tip that is durable and that nobody else reads goes; a
        branch point stays and is copied.
        """
        with self._lock:
            if (
                not entry.durable
                or entry.keep
                or entry.evicted
                or entry.readers > 1
                or not self._can_cut(entry, n_tokens)
                or not self._counts(entry)
                or self._tree(entry).has_branches(entry.tokens)
            ):
                return False
            self._drop(entry)
            return True

    def _can_cut(self, entry: Entry, n_tokens: int) -> bool:
        """Whether the live cache itself can become one of *n_tokens* cheaply."""
        n_extra = len(entry.tokens) - n_tokens
        if entry.capture.layers is None or not entry.capture.cache:
            return False
        return not n_extra or (
            entry.capture.is_cuttable and n_extra <= _HAND_OVER_TOKENS
        )

    def settle(
        self,
        entry: Entry,
        rows: tuple[int, ...] | None,
        error: BaseException | None = None,
    ) -> bool:
        """Record that the write of *entry* is over.

        Args:
            entry: What was to be written.
            rows: Which snapshots hold it; ``None`` if it was not written.
            error: Why not.

        Returns:
            Whether it is still here, to be tried again.
        """
        with self._lock:
            entry.pending = False
            entry.error = error
            if rows is not None:
                entry.durable, entry.rows = True, rows
            if entry in self._leaving:
                self._leaving.remove(entry)
                self._forget(entry)
            return self._counts(entry)

    def forget_disk(self) -> None:
        """Record that nothing is durable any more: the directory was replaced."""
        with self._lock:
            for entry in self._entries():
                entry.durable, entry.rows = False, ()

    def shrink(
        self, max_bytes: int | None = None, max_entries: int | None = None
    ) -> None:
        """Evict the least recently used entries down to a size.

        Args:
            max_bytes: How many bytes may stay; the budget if not given.
            max_entries: How many entries may stay; the budget if not given.
        """
        max_bytes = self.max_bytes if max_bytes is None else max_bytes
        max_entries = self.max_entries if max_entries is None else max_entries
        with self._lock:
            evicted = self._evict(max_bytes, max_entries)
        self._let_go(evicted, self.on_evict)

    def _evict(
        self, max_bytes: int, max_entries: int, *, spare: Entry | None = None
    ) -> list[Entry]:
        """Uncount entries down to a size, but *spare*; return those not durable."""
        evicted = []
        while (
            self._nbytes > max_bytes
            or len(self) > max_entries
            or self._n_arrays > _MAX_ARRAYS
        ):
            entry = self._next_to_go(spare)
            if entry is None:
                break
            self._uncount(entry)
            self.n_evicted += 1
            entry.evicted = True
            if entry.durable:
                self._forget(entry)
            else:
                self._leaving.add(entry)
                evicted.append(entry)
        return evicted

    def _let_go(self, evicted: list[Entry], on_evict: Callable[[Entry], None]) -> None:
        """Have what was evicted be saved, or forget it."""
        for entry in evicted:
            on_evict(entry)
            if not entry.pending:
                self.settle(entry, None)

    def remove(self, namespace: Namespace, tokens: Tokens, n_shared: int) -> None:
        """Drop all entries that share more than *n_shared* tokens with *tokens*."""
        with self._lock:
            for tree in list(self._trees.get(namespace.digest, {}).values()):
                while True:
                    n_tokens, entries = tree.longest(tokens)
                    entry = next(entries, None)
                    if entry is None or n_tokens <= n_shared:
                        break
                    self._drop(entry)

    def remove_tenant(self, tenant: str) -> None:
        """Drop all entries of a tenant."""
        with self._lock:
            entries = [*self._entries(), *self._leaving]
            for entry in [e for e in entries if e.namespace.tenant == tenant]:
                self._drop(entry)

    def unsaved(self) -> list[Entry]:
        """Return the entries that are not durable, nor on their way, nor declined."""
        with self._lock:
            return [entry for entry in self._entries() if entry.must_be_saved]

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._trees.clear()
            for order in self._orders.values():
                order.clear()
            self._mortal.clear()
            self._nbytes = self._n_arrays = 0

    def _entries(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(self._orders.values())

    def _counts(self, entry: Entry) -> bool:
        return entry in self._orders[entry.kind]

    def _next_to_go(self, spare: Entry | None) -> Entry | None:
        """Return the least recently used entry of the kind that can spare one."""
        counts = {
            kind: len(order) - (spare in order) for kind, order in self._orders.items()
        }
        kinds = [kind for kind in KINDS if counts[kind]]
        for kind, next_kind in itertools.zip_longest(kinds, kinds[1:]):
            if next_kind is None or counts[kind] >= counts[next_kind]:
                return next(e for e in self._orders[kind] if e is not spare)
        return None

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for entry in [e for e in self._mortal if e.expires_s <= now]:
            self._drop(entry)

    def _tree(self, entry: Entry) -> RadixTree[Entry]:
        return self._trees[entry.namespace.digest][entry.capture.text]

    def _drop(self, entry: Entry) -> None:
        if self._counts(entry):
            self._uncount(entry)
            if entry.pending:  # the writer keeps its arrays alive
                self._leaving.add(entry)
        self._forget(entry)

    def _uncount(self, entry: Entry) -> None:
        del self._orders[entry.kind][entry]
        self._nbytes -= entry.nbytes
        self._n_arrays -= entry.n_arrays

    def _forget(self, entry: Entry) -> None:
        """Take *entry* out of its tree, unless another has its place already."""
        self._mortal.discard(entry)
        trees = self._trees.get(entry.namespace.digest, {})
        tree = trees.get(entry.capture.text)
        if tree is None or tree.get(entry.tokens) is not entry:
            return
        tree.remove(entry.tokens)
        if not tree:
            del trees[entry.capture.text]
        if not trees:
            del self._trees[entry.namespace.digest]


def _usable(tree: RadixTree[Entry], tokens: Tokens) -> tuple[int, Entry | None]:
    """Return the deepest position of *tokens* that an entry can be resumed at."""
    n_shared, entries = tree.longest(tokens)
    best, entry = 0, None
    for found in itertools.islice(entries, _MAX_TRIED):
        n_tokens = found.capture.resumable(n_shared)
        if best < n_tokens <= n_shared:
            best, entry = n_tokens, found
    for n_tokens, found in reversed(tree.prefixes(tokens)):
        if n_tokens > best:
            return n_tokens, found
    return best, entry
