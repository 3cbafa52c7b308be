"""Facts about the writer thread: order, bound, failures, end. Nothing sleeps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from promptstore import WriteFailed
from promptstore.writer import Writer, deadline

LONG_S = 30.0  # longer than anything takes; reached only by a test that fails


class Gate:
    """A job that has begun when `begun` is set, and ends when it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._go.wait(LONG_S)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let_go()


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer(max_bytes=10)
    yield writer
    assert writer.close(LONG_S)


def block(writer: Writer, gate: Gate, nbytes: int = 0) -> None:
    """Have the writer's thread stand in a job until *gate* is let go."""
    assert writer.submit(gate, nbytes)
    assert gate.begun.wait(LONG_S)


def fail() -> None:
    raise OSError("no space left")


def thread_name() -> str:
    return threading.current_thread().name


def background(task: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(task()))
    thread.start()
    return thread, results


class Waiting(threading.Condition):
    """A condition that tells when somebody waits on it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if thread_name() != "promptstore-writer":
            self.waits.set()
        return super().wait(timeout)


def test_jobs_run_in_order_on_one_thread(writer: Writer) -> None:
    """What was queued first is done first, and never on the caller's thread."""
    done: list[tuple[int, str]] = []
    for number in range(50):
        assert writer.submit(lambda n=number: done.append((n, thread_name())))
    writer.flush(LONG_S)
    assert done == [(number, "promptstore-writer") for number in range(50)]


def test_there_is_no_thread_without_work(writer: Writer) -> None:
    """A store that never writes has no writer thread, and flushes and closes."""
    writer.flush()
    assert writer.close()
    assert writer._thread is None


def test_bytes_and_jobs_count_until_they_are_done(writer: Writer, gate: Gate) -> None:
    """A job that is running is still pending."""
    block(writer, gate, 4)
    writer.submit(lambda: None, 5)
    assert (writer.nbytes, writer.n_jobs) == (9, 2)
    gate.let_go()
    writer.flush(LONG_S)
    assert (writer.nbytes, writer.n_jobs) == (0, 0)


def test_the_queue_is_bounded_in_bytes(writer: Writer, gate: Gate) -> None:
    """A job that does not fit is not queued; one that does is, up to the last byte."""
    ran: list[str] = []
    block(writer, gate, 6)
    assert not writer.submit(lambda: ran.append("too much"), 5, timeout_s=0)
    assert writer.submit(lambda: ran.append("fits"), 4, timeout_s=0)
    assert not writer.submit(lambda: ran.append("one more"), 1, timeout_s=0)
    assert writer.submit(lambda: ran.append("nothing"), 0, timeout_s=0)
    assert (writer.nbytes, writer.n_jobs) == (10, 3)
    gate.let_go()
    writer.flush(LONG_S)
    assert ran == ["fits", "nothing"]


def test_submit_waits_for_room(writer: Writer, gate: Gate) -> None:
    """A caller stands in a full queue until a job is done, and is then served."""
    waiting = writer._changed = Waiting()
    block(writer, gate, 10)
    thread, results = background(lambda: writer.submit(lambda: None, 10, LONG_S))
    assert waiting.waits.wait(LONG_S)
    assert results == []
    gate.let_go()
    thread.join(LONG_S)
    assert results == [True]
    writer.flush(LONG_S)


def test_a_job_larger_than_the_queue_is_taken_alone(writer: Writer) -> None:
    """It waits until nothing is pending, and nothing else fits beside it."""
    first, large = Gate(), Gate()
    waiting = writer._changed = Waiting()
    block(writer, first, 1)
    assert not writer.submit(large, 1000, timeout_s=0)
    thread, results = background(lambda: writer.submit(large, 1000, LONG_S))
    assert waiting.waits.wait(LONG_S)
    assert results == []
    first.let_go()
    thread.join(LONG_S)
    assert results == [True]
    assert large.begun.wait(LONG_S)
    assert not writer.submit(lambda: None, 1, timeout_s=0)
    large.let_go()
    writer.flush(LONG_S)


def test_a_job_of_no_bytes_always_has_room(writer: Writer, gate: Gate) -> None:
    """`match` records its uses so: it must not wait for a large write to end."""
    block(writer, gate, 1000)
    assert writer.submit(lambda: None, 0, timeout_s=0)


def test_flush_waits_until_all_is_done(writer: Writer, gate: Gate) -> None:
    """When it returns, everything that was queued before has run."""
    waiting = writer._changed = Waiting()
    done: list[int] = []
    block(writer, gate)
    for number in range(5):
        writer.submit(lambda n=number: done.append(n))
    thread, results = background(lambda: writer.flush(LONG_S))
    assert waiting.waits.wait(LONG_S)
    assert (done, results) == ([], [])
    gate.let_go()
    thread.join(LONG_S)
    assert (done, results) == ([0, 1, 2, 3, 4], [None])


def test_flush_raises_what_the_writer_met(writer: Writer) -> None:
    """The count of failures, and the first of them as the cause; then it is told."""
    error = ValueError("first")

    def first() -> None:
        raise error

    for job in (lambda: None, first, fail, lambda: None, fail):
        writer.submit(job)
    with pytest.raises(WriteFailed, match=r"3 insert\(s\).*first") as caught:
        writer.flush(LONG_S)
    assert caught.value.n_failed == 3
    assert caught.value.__cause__ is error
    writer.flush(LONG_S)


def test_a_failure_stops_nothing(writer: Writer) -> None:
    """Jobs behind one that failed run, now and after it was told."""
    done: list[int] = []
    writer.submit(fail, 10)
    writer.submit(lambda: done.append(1), 10)
    with pytest.raises(WriteFailed, match="no space left"):
        writer.flush(LONG_S)
    writer.submit(lambda: done.append(2), 10)
    writer.flush(LONG_S)
    assert (done, writer.nbytes, writer.n_jobs) == ([1, 2], 0, 0)


def test_an_error_from_elsewhere_is_told_too(writer: Writer) -> None:
    """What could not even be queued can be noted for the next flush."""
    errors = [OSError("one"), OSError("two")]
    for error in errors:
        writer.fail(error)
    with pytest.raises(WriteFailed) as caught:
        writer.flush(LONG_S)
    assert (caught.value.n_failed, caught.value.__cause__) == (2, errors[0])


def test_flush_gives_up_in_time(writer: Writer, gate: Gate) -> None:
    """It says how many writes are not done; they are done later all the same."""
    done: list[int] = []
    block(writer, gate)
    writer.submit(lambda: done.append(1))
    with pytest.raises(TimeoutError, match=r"2 write\(s\) are not done"):
        writer.flush(0)
    gate.let_go()
    writer.flush(LONG_S)
    assert done == [1]


def test_a_timeout_does_not_forget_failures(writer: Writer, gate: Gate) -> None:
    """A flush that gives up leaves the failures for the next one."""
    writer.submit(fail)
    block(writer, gate)
    with pytest.raises(TimeoutError):
        writer.flush(0)
    gate.let_go()
    with pytest.raises(WriteFailed, match="no space left"):
        writer.flush(LONG_S)


def test_close_finishes_what_is_queued(writer: Writer, gate: Gate) -> None:
    """No job is lost at the end, and the thread is gone."""
    done: list[int] = []
    block(writer, gate)
    for number in range(20):
        writer.submit(lambda n=number: done.append(n))
    gate.let_go()
    assert writer.close(LONG_S)
    assert done == list(range(20))
    assert writer._thread is not None
    assert not writer._thread.is_alive()


def test_a_closed_writer_takes_nothing(writer: Writer) -> None:
    """Work after the end is refused and not run; closing again is fine."""
    done: list[int] = []
    writer.submit(lambda: done.append(1))
    assert writer.close(LONG_S)
    assert not writer.submit(lambda: done.append(2))
    assert not writer.submit(lambda: done.append(3), 1000, timeout_s=0)
    assert writer.close(0)
    writer.flush(0)
    assert done == [1]


def test_close_gives_up_in_time(writer: Writer, gate: Gate) -> None:
    """It says that the thread has not ended; it ends when its job does."""
    block(writer, gate)
    assert not writer.close(0)
    gate.let_go()
    assert writer.close(LONG_S)


def test_closing_turns_away_who_waits_for_room(writer: Writer, gate: Gate) -> None:
    """A caller in a full queue is told that its work was not taken."""
    waiting = writer._changed = Waiting()
    ran: list[int] = []
    block(writer, gate, 10)
    thread, results = background(lambda: writer.submit(lambda: ran.append(1), 10))
    assert waiting.waits.wait(LONG_S)
    assert not writer.close(0)
    thread.join(LONG_S)
    assert results == [False]
    gate.let_go()
    assert writer.close(LONG_S)
    assert ran == []


def test_failures_before_the_end_can_be_told_after_it(writer: Writer) -> None:
    """Closing does not swallow what failed."""
    writer.submit(fail)
    assert writer.close(LONG_S)
    with pytest.raises(WriteFailed, match="no space left"):
        writer.flush(LONG_S)


def test_no_job_of_many_threads_is_lost(writer: Writer) -> None:
    """Through a narrow queue every job of every thread runs once, each in order."""
    done: list[tuple[int, int]] = []
    barrier = threading.Barrier(8)

    def work(thread: int) -> None:
        barrier.wait(LONG_S)
        for number in range(100):
            job = (thread, number)
            assert writer.submit(lambda job=job: done.append(job), number % 13, LONG_S)
            assert writer.nbytes <= 12

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    writer.flush(LONG_S)
    assert sorted(done) == [(t, n) for t in range(8) for n in range(100)]
    for thread_number in range(8):
        own = [n for t, n in done if t == thread_number]
        assert own == list(range(100))
    assert (writer.nbytes, writer.n_jobs) == (0, 0)


class Payload:
    """Something that a job keeps alive."""

    def touch(self) -> None:
        pass


def test_a_job_that_is_done_keeps_nothing_alive(writer: Writer) -> None:
    """When flush returns, the arrays of a job are free, though the thread waits on."""
    payload = Payload()
    gone = weakref.ref(payload)
    writer.submit(payload.touch, 10)
    del payload
    writer.flush(LONG_S)
    gc.collect()
    assert gone() is None


def test_a_deadline_counts_down_and_stops_at_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No time limit stays none; a limit shrinks as time passes, never below zero."""
    assert deadline(None)() is None
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    left = deadline(5.0)
    seen = []
    for now[0] in (100.0, 102.0, 105.0, 200.0):
        seen.append(left())
    assert seen == [5.0, 3.0, 0.0, 0.0]
