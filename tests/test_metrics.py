"""Facts about what a server shows of a store."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import kv, tokens
from prometheus_client.parser import text_string_to_metric_families

from promptstore import Match, Namespace, PromptStore, Reason, ReasonKind
from promptstore.metrics import RATE_TOKENS, Metrics, log_line

NAMESPACE = Namespace("metrics")
MISS = Match(None, 0, "miss", Reason(ReasonKind.NO_ENTRY, 0))
WHOLE = Match([], 100, "memory", None)
SHORTENED = Match([], 50, "disk", Reason(ReasonKind.DIVERGED, 50))


def shown(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return what a scrape shows: the name and the values of labels to the value."""
    body, _ = metrics.render()
    return {
        (
            sample.name.removeprefix("promptstore_"),
            *sample.labels.values(),
        ): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def saved(metrics: Metrics) -> float:
    return shown(metrics)[("saved_seconds",)]


def test_all_names_are_of_promptstore(store: PromptStore) -> None:
    """Beside the metrics of others, these are told apart."""
    body, _ = Metrics(store).render()
    families = list(text_string_to_metric_families(body.decode()))
    assert families
    assert all(family.name.startswith("promptstore_") for family in families)


def test_each_metric_says_what_it_is(store: PromptStore) -> None:
    """Help for each, also for those that have no sample yet."""
    body, _ = Metrics(store).render()
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation, family.name


def test_content_type_is_that_of_prometheus() -> None:
    """The text format, with its version."""
    assert Metrics(None).render()[1].startswith("text/plain; version=")


def test_two_in_one_process_do_not_meet() -> None:
    """Each has a registry of its own, and none is the global one."""
    one, other = Metrics(None), Metrics(None)
    one.matched(WHOLE, 101, 0.0)
    assert shown(one)[("hits_total", "memory")] == 1
    assert shown(other)[("hits_total", "memory")] == 0


# ---------------------------------------------------------------------- requests


def test_hits_are_counted_by_tier() -> None:
    """One for each request that a tier served."""
    metrics = Metrics(None)
    for match in (WHOLE, SHORTENED, SHORTENED, MISS):
        metrics.matched(match, 101, 0.0)
    found = shown(metrics)
    assert found[("hits_total", "memory")] == 1
    assert found[("hits_total", "disk")] == 2


def test_misses_and_shortened_matches_are_told_apart_by_reason() -> None:
    """The same reason may cost all or a part."""
    metrics = Metrics(None)
    metrics.matched(Match(None, 0, "miss", SHORTENED.reason), 200, 0.0)
    metrics.matched(SHORTENED, 200, 0.0)
    metrics.matched(SHORTENED, 200, 0.0)
    found = shown(metrics)
    assert found[("misses_total", "diverged-at")] == 1
    assert found[("shortened_total", "diverged-at")] == 2


def test_a_miss_without_a_reason_is_counted() -> None:
    """Hits and misses add up to the requests."""
    metrics = Metrics(None)
    metrics.matched(Match(None, 0, "miss", None), 1, 0.0)
    assert shown(metrics)[("misses_total", "none")] == 1


@pytest.mark.parametrize("name", ["misses_total", "shortened_total"])
def test_every_reason_is_shown_from_the_start(name: str) -> None:
    """A series that begins at 1 has no rate."""
    found = shown(Metrics(None))
    reasons = {labels[0] for (each, *labels) in found if each == name}
    assert reasons == {kind.value for kind in ReasonKind}


def test_where_a_match_ended_is_not_shown() -> None:
    """Position and detail of a reason would be a new series for each request."""
    metrics = Metrics(None)
    before = shown(metrics).keys()
    for at in range(10):
        reason = Reason(ReasonKind.DIVERGED, at, f"detail-{at}")
        metrics.matched(Match([], at, "disk", reason), 200, 0.0)
    assert shown(metrics).keys() == before


def test_tokens_are_counted() -> None:
    """Those asked for, those reused and those prefilled."""
    metrics = Metrics(None)
    metrics.matched(SHORTENED, 200, 0.0)
    metrics.prefilled(150, 3.0)
    found = shown(metrics)
    assert found[("tokens_asked_total",)] == 200
    assert found[("tokens_reused_total",)] == 50
    assert found[("tokens_prefilled_total",)] == 150
    assert found[("prefill_seconds_total",)] == 3


def test_restores_are_timed_by_source() -> None:
    """A look-up that found nothing restored nothing."""
    metrics = Metrics(None)
    metrics.matched(WHOLE, 101, 0.0004)
    metrics.matched(SHORTENED, 200, 0.02)
    metrics.matched(MISS, 200, 5.0)
    found = shown(metrics)
    assert found[("restore_seconds_bucket", "0.0005", "memory")] == 1
    assert found[("restore_seconds_bucket", "0.01", "disk")] == 0
    assert found[("restore_seconds_bucket", "0.025", "disk")] == 1
    assert ("restore_seconds_count", "miss") not in found


def test_inserts_are_timed() -> None:
    """Also one that is beyond all buckets."""
    metrics = Metrics(None)
    metrics.inserted(0.2)
    metrics.inserted(60.0)
    found = shown(metrics)
    assert found[("insert_seconds_bucket", "10.0")] == 1
    assert found[("insert_seconds_count",)] == 2
    assert found[("insert_seconds_sum",)] == pytest.approx(60.2)


# ----------------------------------------------------------------- seconds saved


def test_nothing_is_saved_before_a_rate_is_known() -> None:
    """Neither gain nor cost is guessed."""
    metrics = Metrics(None)
    metrics.matched(WHOLE, 101, 0.5)
    assert saved(metrics) == 0


def test_tokens_reused_are_worth_their_prefill_less_the_look_up() -> None:
    """100 tokens at 1000 a second, found in 20 ms."""
    metrics = Metrics(None)
    metrics.prefilled(1000, 0.5)
    metrics.prefilled(1000, 1.5)
    metrics.matched(WHOLE, 101, 0.02)
    assert saved(metrics) == pytest.approx(0.08)


def test_a_look_up_in_vain_takes_off_what_it_cost() -> None:
    """The estimate may go down, below zero too."""
    metrics = Metrics(None)
    metrics.prefilled(1000, 1.0)
    metrics.matched(MISS, 200, 0.02)
    assert saved(metrics) == pytest.approx(-0.02)


def test_a_later_rate_does_not_change_what_was_saved() -> None:
    """What an hour added can be told from two scrapes."""
    metrics = Metrics(None)
    metrics.prefilled(1000, 1.0)
    metrics.matched(WHOLE, 101, 0.0)
    metrics.prefilled(1000, 9.0)
    assert saved(metrics) == pytest.approx(0.1)


def test_a_short_prefill_tells_no_rate() -> None:
    """One token takes about as long as many: it would make each worth too much."""
    metrics = Metrics(None)
    metrics.prefilled(RATE_TOKENS - 1, 100.0)
    metrics.matched(WHOLE, 101, 0.0)
    assert saved(metrics) == 0


# ------------------------------------------------------------------------- store


def test_a_scrape_shows_what_the_store_holds(store: PromptStore) -> None:
    """Bytes and entries of both tiers, and what was written, at that moment."""
    metrics = Metrics(store)
    store.insert(NAMESPACE, tokens(300), kv(300))
    store.flush()
    stats, found = store.stats(), shown(metrics)
    assert found[("up",)] == 1
    assert found[("stored_bytes", "memory")] == stats.memory_bytes > 0
    assert found[("stored_bytes", "disk")] == stats.disk_bytes > 0
    assert found[("entries", "memory")] == found[("entries", "disk")] == 1
    assert found[("inserts_total",)] == 1
    assert found[("written_bytes_total",)] == stats.bytes_written > 0


def test_what_waits_for_the_writer_is_shown(store: PromptStore) -> None:
    """The depth of the queue, in jobs and in bytes."""
    metrics, blocked, go_on = Metrics(store), threading.Event(), threading.Event()

    def wait() -> None:
        blocked.set()
        go_on.wait()

    store._writer.submit(wait, 7)
    try:
        blocked.wait()
        found = shown(metrics)
    finally:
        go_on.set()
    assert found[("queue_jobs",)] == 1
    assert found[("queue_bytes",)] == 7


def test_evictions_are_counted_by_tier(store: PromptStore) -> None:
    """Each tier evicts for itself."""
    store.insert(NAMESPACE, tokens(300), kv(300))
    store.flush()
    store.evict(to_bytes=0)
    found = shown(Metrics(store))
    assert found[("evictions_total", "memory")] == 1
    assert found[("evictions_total", "disk")] == 1


def test_bytes_read_and_prompts_declined_are_shown(tmp_path: Path) -> None:
    """From a tier that admits at second use, and has something to read."""
    with PromptStore.open(tmp_path / "root") as store:
        store.insert(NAMESPACE, tokens(300), kv(300))
    with PromptStore.open(tmp_path / "root", admission="second-use") as store:
        store.match(NAMESPACE, tokens(300))
        store.insert(NAMESPACE, tokens(300, seed=1), kv(300))
        store.flush()
        found = shown(Metrics(store))
    assert found[("read_bytes_total",)] > 0
    assert found[("declined_total",)] == 1


def test_errors_of_store_and_host_are_counted_by_cause(store: PromptStore) -> None:
    """Who met it is told, so that neither goes back when the other is gone."""
    metrics = Metrics(store)
    store._counters.trouble(OSError(5, "no"))
    for _ in range(2):
        metrics.failed("EIO")
    found = shown(metrics)
    assert found[("errors_total", "EIO", "store")] == 1
    assert found[("errors_total", "EIO", "host")] == 2


def test_without_a_store_only_requests_are_shown() -> None:
    """No zeros that look like an empty store."""
    found = shown(Metrics(None))
    assert ("tokens_asked_total",) in found
    assert ("up",) not in found
    assert ("stored_bytes", "disk") not in found


def test_a_closed_store_is_down_and_the_rest_is_shown(tmp_path: Path) -> None:
    """A scrape at shutdown is no error."""
    store = PromptStore.open(tmp_path / "root")
    metrics = Metrics(store)
    metrics.matched(WHOLE, 101, 0.0)
    metrics.failed("EIO")
    store.close()
    found = shown(metrics)
    assert found[("up",)] == 0
    assert found[("hits_total", "memory")] == 1
    assert found[("errors_total", "EIO", "host")] == 1
    assert ("stored_bytes", "disk") not in found


def test_a_disk_that_cannot_be_asked_costs_its_sizes_only(
    store: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory tier is shown, and the cause of the trouble."""
    store.insert(NAMESPACE, tokens(300), kv(300))
    store.flush()

    def refuse() -> int:
        raise sqlite3.OperationalError("disk I/O error")

    assert store._disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(store._disk.index, "n_snapshots", refuse)
        found = shown(Metrics(store))
    assert found[("up",)] == 1
    assert found[("entries", "memory")] == 1
    assert found[("entries", "disk")] == 0
    assert found[("errors_total", "SQLITE_ERROR", "store")] == 1


def test_a_store_that_fails_otherwise_is_down_and_counted(
    store: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a store does, a scrape is answered."""
    metrics = Metrics(store)

    def fail() -> None:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store, "stats", fail)
        found = shown(metrics)
    assert found[("up",)] == 0
    assert found[("errors_total", "EMFILE", "host")] == 1


def test_nothing_is_lost_between_threads(store: PromptStore) -> None:
    """Requests of several threads, and scrapes beside them."""
    metrics = Metrics(store)
    metrics.prefilled(1000, 1.0)
    start = threading.Barrier(5)

    def ask() -> None:
        start.wait()
        for _ in range(200):
            metrics.matched(WHOLE, 101, 0.0)
            metrics.failed("EIO")

    def scrape() -> None:
        start.wait()
        for _ in range(20):
            metrics.render()

    run([ask] * 4 + [scrape])
    found = shown(metrics)
    assert found[("hits_total", "memory")] == 800
    assert found[("errors_total", "EIO", "host")] == 800
    assert found[("saved_seconds",)] == pytest.approx(80)


def run(tasks: list[Callable[[], None]]) -> None:
    """Run each on a thread of its own; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# ---------------------------------------------------------------------- log line


@pytest.mark.parametrize(
    ("match", "line"),
    [
        (WHOLE, "tokens=101 reused=100 source=memory reason=none ms=1.25"),
        (SHORTENED, "tokens=101 reused=50 source=disk reason=diverged-at(50) ms=1.25"),
        (MISS, "tokens=101 reused=0 source=miss reason=no-entry(0) ms=1.25"),
    ],
)
def test_log_line_tells_a_request(match: Match, line: str) -> None:
    """Tokens, reuse, tier, reason and time, under names that stay."""
    assert log_line(match, 101, 0.00125) == line


@pytest.mark.parametrize("detail", ["state", "a b\nc=d"])
def test_log_line_is_one_line_of_five_words(detail: str) -> None:
    """Whatever a reason says, who splits at spaces finds key=value."""
    match = Match([], 5, "disk", Reason(ReasonKind.NOT_RESUMABLE, 5, detail))
    words: Any = [word.split("=", 1) for word in log_line(match, 9, 0.0).split(" ")]
    assert [key for key, _ in words] == ["tokens", "reused", "source", "reason", "ms"]
