"""A request to a live cache: which tier has most, and why not more."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from promptstore import codecs, nearby, reasons, restore
from promptstore.counters import Counters, reason_of
from promptstore.disk import DiskTier, LookUp
from promptstore.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from promptstore.index import Row
from promptstore.memory import Entry, MemoryTier
from promptstore.tokens import Tokens, run_start
from promptstore.types import Match, Namespace, Reason, ReasonKind
from promptstore.writer import Writer

_MAX_TRIES = 4


class Matcher:
    """Looks in both tiers; a disk in trouble costs what only it has, no more."""

    def __init__(
        self,
        memory: MemoryTier,
        disk: DiskTier | None,
        writer: Writer,
        counters: Counters,
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._writer = writer
        self._counters = counters

    def match(
        self,
        namespace: Namespace,
        ids: Tokens,
        like: Sequence[Any] | None,
        max_tokens: int | None = None,
    ) -> Match:
        """Return the longest usable prefix of *ids*, at least one token being left."""
        usable = wanted = ids[:-1][:max_tokens]
        while True:
            usable = self._before_images(namespace, ids, usable, like)
            if not len(usable):
                return Match(None, 0, "miss", _no_room(wanted))
            match = self._match(namespace, usable, len(ids), like)
            # The disk may have given less than it promised.
            start = run_start(ids, match.n_tokens)
            if start == match.n_tokens:
                break
            usable = usable[:start]
        if match.reason is None and len(usable) < len(wanted):
            reason = reasons.inside_image(match.n_tokens)
            return dataclasses.replace(match, reason=reason)
        return match

    def _match(
        self,
        namespace: Namespace,
        usable: Tokens,
        n_total: int,
        like: Sequence[Any] | None,
    ) -> Match:
        n_memory, entry = self._best_entry(namespace, usable, like)
        try:
            reason = None
            if n_memory < len(usable):
                match = self._match_disk(namespace, usable, n_memory, n_total, like)
                if match.cache is not None:
                    return match
                reason = match.reason
            if entry is None:
                return Match(None, 0, "miss", reason)
            cache = self._from_memory(entry, n_memory, n_total)
            self._note_use(entry.rows)
            return Match(cache, n_memory, "memory", reason)
        finally:
            if entry is not None:
                self._memory.release(entry)

    def explain(
        self, namespace: Namespace, ids: Tokens, like: Sequence[Any] | None
    ) -> tuple[int, LookUp | None, Reason | None]:
        """Return what memory has of *ids*, what the disk has, and why not more."""
        wanted = ids[:-1]
        usable = self._before_images(namespace, ids, wanted, like)
        if not len(usable):
            return 0, None, _no_room(wanted)
        n_memory, entry = self._best_entry(namespace, usable, like, touch=False)
        if entry is not None:
            self._memory.release(entry)
        try:
            look_up, reason = self._look_up(
                namespace, usable, n_memory, len(usable), like
            )
        except Exception as error:  # a place that may: the reason
            return n_memory, None, reason_of(error)
        if reason is None and len(usable) < len(wanted):
            reason = reasons.inside_image(len(usable))
        return n_memory, look_up, reason

    def _best_entry(
        self,
        namespace: Namespace,
        usable: Tokens,
        like: Sequence[Any] | None,
        *,
        touch: bool = True,
    ) -> tuple[int, Entry | None]:
        return self._memory.best(
            namespace, usable, lambda entry: _entry_fits(entry, like), touch=touch
        )

    def _before_images(
        self,
        namespace: Namespace,
        ids: Tokens,
        usable: Tokens,
        like: Sequence[Any] | None,
    ) -> Tokens:
        """Return what of *usable* may be matched for no match to end inside an image.

        mlx_lm.server keys the patches of an image by one negative id; what a model
        computes of a part of an image need not be what it computes of the whole.
        """
        while (usable < 0).any():
            n_tokens, follows = self._n_matchable(namespace, usable, like)
            start = run_start(ids, n_tokens, follows)
            if start == n_tokens:
                break
            usable = usable[:start]
        return usable

    def _n_matchable(
        self, namespace: Namespace, usable: Tokens, like: Sequence[Any] | None
    ) -> tuple[int, int | None]:
        """Return how much of *usable* can be matched, and which id follows there in
        what is stored."""
        n_memory, entry = self._best_entry(namespace, usable, like, touch=False)
        follows = None
        if entry is not None:
            self._memory.release(entry)
            follows = _id_at(entry.tokens, n_memory)
        try:
            look_up, _ = self._look_up(namespace, usable, n_memory, len(usable), like)
        except Exception as error:  # a place that may: counted
            self._counters.trouble(error)
            return n_memory, follows
        if look_up is None or look_up.plan.n_tokens <= n_memory:
            return n_memory, follows
        n_disk, last = look_up.plan.n_tokens, look_up.found.chain[-1]
        return n_disk, _id_at(last.tokens, n_disk - last.start)

    def _from_memory(self, entry: Entry, n_tokens: int, n_total: int) -> list[Any]:
        own = entry.capture
        whole = n_tokens == len(entry.tokens)
        if own.layers is None:
            cache = copy.deepcopy(own.cache)
            if not whole:
                cache[0].cut(n_tokens)
            return cache
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
        n_total: int,
        like: Sequence[Any] | None,
    ) -> Match:
        """Return a match longer than the memory tier's, or a miss that says why."""
        trouble: Reason | None = None
        n_usable = len(usable)
        bad: set[int] = set()
        try:
            for _ in range(_MAX_TRIES):
                look_up, reason = self._look_up(
                    namespace, usable, n_memory, n_usable, like, frozenset(bad)
                )
                if look_up is None or look_up.plan.n_tokens <= n_memory:
                    return Match(None, 0, "miss", trouble or reason)
                assert self._disk is not None
                try:
                    cache = self._disk.load(look_up, n_total)
                except SnapshotError as error:
                    trouble, row = self._blame(look_up, error)
                    # Do without that one from here on.
                    bad.add(row.id)
                    if not row.is_checkpoint:
                        usable = usable[: row.start]
                    continue
                self._note_use(look_up.reused)
                n_tokens = look_up.plan.n_tokens
                return Match(cache, n_tokens, "disk", trouble or reason)
        except Exception as error:  # a place that may: counted
            trouble = self._counters.trouble(error)
        return Match(None, 0, "miss", trouble)

    def _look_up(
        self,
        namespace: Namespace,
        usable: Tokens,
        n_memory: int,
        n_usable: int,
        like: Sequence[Any] | None,
        without: frozenset[int] = frozenset(),
    ) -> tuple[LookUp | None, Reason | None]:
        """Look in the index; say why not all of *n_usable*, given what memory has."""
        if self._disk is None:
            kind = ReasonKind.NO_ENTRY if n_memory else ReasonKind.DISABLED
            reason = Reason(kind, n_memory, n_shared=n_memory)
            return None, self._refined(namespace, usable, n_usable, reason)
        best, misfits = self._disk.look_up(
            namespace,
            usable,
            lambda layers: like is None or codecs.fits(layers, like),
            without,
        )
        told: Reason | None
        if best is not None:
            told = reasons.of_look_up(best, n_usable, n_memory)
        elif misfits and not n_memory:
            told = reasons.of_layers(misfits, like)
        else:
            told = Reason(ReasonKind.NO_ENTRY, n_memory, n_shared=n_memory)
        told = told and self._refined(namespace, usable, n_usable, told)
        if told is None or best is not None or misfits:
            return best, told
        return None, self._of_strangers(namespace, usable, like, told)

    def _refined(
        self, namespace: Namespace, usable: Tokens, n_usable: int, reason: Reason
    ) -> Reason | None:
        """Return a reason with what only memory knows; ``None`` if none is needed."""
        if reason.position == n_usable:
            return None
        if reason.kind not in (ReasonKind.NO_ENTRY, ReasonKind.DISABLED):
            return reason
        stop = self._memory.stop(namespace, usable)
        return reasons.of_memory(
            reason, stop.n_shared, diverges=stop.diverges, layers=stop.layers
        )

    def _of_strangers(
        self,
        namespace: Namespace,
        usable: Tokens,
        like: Sequence[Any] | None,
        reason: Reason,
    ) -> Reason:
        """Return why a namespace has nothing on disk: so it is when a model changed, or
        if its caches are of a class that never goes there."""
        assert self._disk is not None
        if reason.kind is not ReasonKind.NO_ENTRY:
            return reason
        unknown = reasons.of_class(like)
        if unknown is not None:
            return reasons.at(unknown, reason.position)
        if reason.position:
            return reason
        places = nearby.in_other_namespaces(self._disk, namespace, usable)
        return reasons.of_place(places[0]) if places else reason

    def _blame(self, look_up: LookUp, error: SnapshotError) -> tuple[Reason, Row]:
        """Count a bad snapshot; drop it if it is proven to be bad."""
        assert self._disk is not None
        rows = [piece.row for piece in look_up.plan.pieces]
        row = next(row for row in rows if row.name == error.path.stem)
        if not isinstance(error, SnapshotCorrupt | SnapshotMissing):
            cause = self._counters.trouble(error).detail
            return Reason(ReasonKind.UNREADABLE, row.start, cause), row
        # A file that another process has just evicted is missing with its row.
        if self._disk.index.has(row.name):
            self._counters.trouble(error)
            if not self._disk.read_only and self._disk.condemn(row):
                self._later(self._disk.drop_condemned)
        return Reason(ReasonKind.DAMAGED, row.start, row.name), row

    def _note_use(self, ids: Iterable[int]) -> None:
        disk = self._disk
        if disk is not None and not disk.read_only and disk.note_use(ids):
            self._later(disk.save_uses)

    def _later(self, work: Callable[[], None]) -> None:
        """Have the writer's thread do something that a match does not wait for.

        If that fails nothing that was inserted is lost.
        """

        def run() -> None:
            try:
                work()
            except Exception as error:  # a place that may: counted
                self._counters.trouble(error)

        try:
            self._writer.submit(run)
        except RuntimeError as error:  # the system gives no thread
            self._counters.trouble(error)


def _no_room(wanted: Tokens) -> Reason:
    """Return why no token may be matched, of those that are wanted."""
    if len(wanted):
        return reasons.inside_image(0)
    return Reason(ReasonKind.TOO_SHORT, 0)


def _id_at(tokens: Tokens, position: int) -> int | None:
    return int(tokens[position]) if 0 <= position < len(tokens) else None


def _entry_fits(entry: Entry, like: Sequence[Any] | None) -> bool:
    if like is None:
        return True
    if entry.capture.layers is not None:
        return codecs.fits(entry.capture.layers, like)
    return [type(x) for x in entry.capture.cache] == [type(x) for x in like]
