"""What a server tells of its use of a store: metrics for Prometheus, and a log line.

The host reports each request; what the store holds is asked of it at each scrape.
Labels are tiers, kinds of reason and causes of trouble: nothing of a prompt.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from promptstore.counters import cause_of
from promptstore.errors import StoreClosed
from promptstore.store import PromptStore
from promptstore.types import Match, ReasonKind, StoreStats

TIERS = ("memory", "disk")

BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip

RATE_TOKENS = 256
"""Shorter prefills cost about what one token costs, and tell no rate."""

_ID_CHARS = 8
_VALUE_CHARS = 16

_SAVED = (
    "Estimate of the prefill seconds spared: tokens reused, at the rate of the "
    f"prefills measured so far (those of {RATE_TOKENS} tokens or more), less the "
    "seconds of all look-ups. May fall."
)

_Family = GaugeMetricFamily | CounterMetricFamily


class Metrics:
    """What a server shows of a store at ``GET /metrics``.

    May be called from any thread; has a registry of its own, so that several in one
    process do not meet.

    Args:
        store: Asked for what it holds at each scrape; without one only the requests
            are shown.
    """

    def __init__(self, store: PromptStore | None) -> None:
        self._registry = CollectorRegistry()
        self._saved = _Saved()
        self._errors = _Errors()
        counter, histogram = self._counter, self._histogram
        self._hits = counter("hits", "Requests that a tier served.", "tier")
        self._misses = counter("misses", "Requests that reused nothing.", "reason")
        self._shortened = counter(
            "shortened", "Hits that reused less than the whole request.", "reason"
        )
        self._asked = counter("tokens_asked", "Tokens of all requests.")
        self._reused = counter("tokens_reused", "Tokens not prefilled again.")
        self._prefilled = counter("tokens_prefilled", "Tokens prefilled.")
        self._prefill_s = counter("prefill_seconds", "Seconds spent in prefill.")
        self._restores = histogram(
            "restore_seconds", "Seconds from asking to a live cache, hits.", "source"
        )
        self._inserts = histogram(
            "insert_seconds", "Seconds that inserts kept the model's thread."
        )
        self._checks = counter("checks", "Hits compared with a cold run.", "result")
        self._registry.register(_Scrape(store, self._saved, self._errors))
        self._show_zeros()

    def matched(self, match: Match, n_asked: int, seconds: float) -> None:
        """Count one request's look-up.

        Args:
            match: What was found.
            n_asked: Tokens of the request.
            seconds: How long the look-up took, with the restore.
        """
        self._asked.inc(n_asked)
        self._reused.inc(match.n_tokens)
        reason = match.reason.kind.value if match.reason is not None else None
        if match.source == "miss":
            self._misses.labels(reason or "none").inc()
        else:
            self._hits.labels(match.source).inc()
            self._restores.labels(match.source).observe(seconds)
            if reason is not None:
                self._shortened.labels(reason).inc()
        self._saved.matched(match.n_tokens, seconds)

    def inserted(self, seconds: float) -> None:
        """Count an insert that took the model's thread for *seconds*."""
        self._inserts.observe(seconds)

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Count a prefill that was measured.

        Args:
            n_tokens: Tokens whose KV was computed.
            seconds: How long that took, evaluation included.
        """
        self._prefilled.inc(n_tokens)
        self._prefill_s.inc(seconds)
        self._saved.prefilled(n_tokens, seconds)

    def checked(self, *, is_right: bool) -> None:
        """Count a hit that was compared with a cold run."""
        self._checks.labels("right" if is_right else "wrong").inc()

    def failed(self, cause: str) -> None:
        """Count trouble that the host itself met.

        Args:
            cause: A short stable name as `counters.cause_of` gives it; each becomes
                a time series, so nothing of a request.
        """
        self._errors.add(cause)

    def render(self) -> tuple[bytes, str]:
        """Return the body and the content type of an answer; never raises for the
        store: one that is closed or in trouble is left out."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"promptstore_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        name = f"promptstore_{name}"
        return Histogram(name, text, labels, registry=self._registry, buckets=BUCKETS_S)

    def _show_zeros(self) -> None:
        """Make every series be there from the start: a rate needs two samples."""
        for tier in TIERS:
            self._hits.labels(tier)
            self._restores.labels(tier)
        for result in ("right", "wrong"):
            self._checks.labels(result)
        for kind in ReasonKind:
            self._misses.labels(kind.value)
            self._shortened.labels(kind.value)


def log_line(match: Match, n_asked: int, seconds: float) -> str:
    """Return what became of one request, as ``key=value``, without its content.

    Five words; then those facts of the reason that there are: ``nearest`` and
    ``shared``, and for each field that differs ``ours`` and ``theirs``, cut short.

    Args:
        match: What was found.
        n_asked: Tokens of the request.
        seconds: How long the look-up took, with the restore.
    """
    reason = _word(match.reason) if match.reason else "none"
    words = [
        f"tokens={n_asked} reused={match.n_tokens} source={match.source} "
        f"reason={reason} ms={seconds * 1e3:.2f}"
    ]
    if match.reason is not None and match.reason.nearest:
        nearest = match.reason.nearest[:_ID_CHARS]
        words.append(f"nearest={nearest} shared={match.reason.n_shared}")
    for each in match.reason.differs if match.reason is not None else ():
        ours, theirs = _word(each.ours), _word(each.theirs)
        words.append(f"ours={ours[:_VALUE_CHARS]} theirs={theirs[:_VALUE_CHARS]}")
    return " ".join(words)


def _word(value: object) -> str:
    return "".join(str(value).split())


class _Saved:
    """Seconds of prefill that reuse spared: an estimate.

    Each match is worth its tokens at the rate of the prefills measured before it,
    less the seconds of its look-up. Until there is a rate, nothing is counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_tokens = 0
        self._prefill_s = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The estimate so far; it falls when look-ups cost more than they spare."""
        return self._seconds

    def matched(self, n_tokens: int, seconds: float) -> None:
        """Count *n_tokens* reused by a look-up of *seconds*."""
        with self._lock:
            if self._n_tokens:
                s_per_token = self._prefill_s / self._n_tokens
                self._seconds += n_tokens * s_per_token - seconds

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Take a prefill into the rate, if it is long enough to tell one."""
        if n_tokens >= RATE_TOKENS:
            with self._lock:
                self._n_tokens += n_tokens
                self._prefill_s += seconds


class _Errors:
    """Trouble that the host met, by cause."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, cause: str) -> None:
        """Count one."""
        with self._lock:
            self._counts[cause] += 1

    def counts(self) -> dict[str, int]:
        """Return a copy."""
        with self._lock:
            return dict(self._counts)


class _Scrape(Collector):
    """What is read at each scrape: the store, if it answers, and the host's own."""

    def __init__(
        self, store: PromptStore | None, saved: _Saved, errors: _Errors
    ) -> None:
        self._store = store
        self._saved = saved
        self._errors = errors

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry."""
        stats = self._stats()
        if self._store is not None:
            up = int(stats is not None)
            yield _one(GaugeMetricFamily, "up", "1 if the store answers, 0 if not.", up)
        if stats is not None:
            yield from _of_store(stats)
        yield _one(GaugeMetricFamily, "saved_seconds", _SAVED, self._saved.seconds)
        yield _of_errors(stats.errors if stats else {}, self._errors.counts())

    def _stats(self) -> StoreStats | None:
        try:
            return self._store.stats() if self._store is not None else None
        except StoreClosed:
            return None
        except Exception as error:  # a place that may: counted
            self._errors.add(cause_of(error))
            return None


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    """Yield what the store holds, and what it did since it was opened."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    held = stats.memory_bytes, stats.disk_bytes
    entries = stats.n_entries, stats.n_snapshots
    evicted = stats.n_evicted_memory, stats.n_evicted_disk
    yield _by_tier(gauge, "stored_bytes", "Bytes held; 0 if it cannot be asked.", held)
    yield _by_tier(gauge, "entries", "Caches in memory, snapshots on disk.", entries)
    yield _by_tier(counter, "evictions", "Entries evicted by policy.", evicted)
    yield _one(gauge, "queue_jobs", "Writes that wait or run.", stats.n_pending)
    yield _one(
        gauge, "queue_bytes", "Bytes waiting to be written.", stats.pending_bytes
    )
    yield _one(counter, "inserts", "Prompts inserted.", stats.n_inserts)
    yield _one(
        counter, "declined", "Prompts not admitted to the disk.", stats.n_declined
    )
    yield _one(counter, "written_bytes", "Bytes written to disk.", stats.bytes_written)
    yield _one(counter, "read_bytes", "Bytes read from disk.", stats.bytes_read)


def _of_errors(store: dict[str, int], host: dict[str, int]) -> Metric:
    text = "Trouble by its cause, met by the store or by the host."
    family = CounterMetricFamily("promptstore_errors", text, labels=["cause", "origin"])
    for origin, counts in (("store", store), ("host", host)):
        for cause, n in counts.items():
            family.add_metric([cause, origin], n)
    return family


def _one(kind: type[_Family], name: str, text: str, value: float) -> Metric:
    return kind(f"promptstore_{name}", text, value=value)


def _by_tier(
    kind: type[_Family], name: str, text: str, values: tuple[int, int]
) -> Metric:
    family = kind(f"promptstore_{name}", text, labels=["tier"])
    for tier, value in zip(TIERS, values, strict=True):
        family.add_metric([tier], value)
    return family
