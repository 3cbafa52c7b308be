"""The writer thread: runs queued work in order, within a bound of bytes.

Knows nothing of what it runs. The work touches no mlx: it reads bytes of evaluated
arrays and does file and index I/O.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from promptstore.errors import WriteFailed


@dataclass(frozen=True)
class _Job:
    run: Callable[[], None]
    nbytes: int


class Writer:
    """One long-lived thread and its queue.

    Args:
        max_bytes: Bytes that may wait. A larger job waits until the queue is empty.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._nbytes = 0
        self._n_submitted = self._n_done = 0
        self._n_failed = 0
        self._first: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are queued or being written."""
        return self._nbytes

    @property
    def n_jobs(self) -> int:
        """Jobs that are queued or running."""
        return self._n_submitted - self._n_done

    def submit(
        self, run: Callable[[], None], nbytes: int = 0, timeout_s: float | None = None
    ) -> bool:
        """Queue work; wait while the queue is full.

        Args:
            run: What to do, on the writer's thread.
            nbytes: Bytes that it keeps alive.
            timeout_s: How long to wait for room.

        Returns:
            Whether it was queued.

        Raises:
            RuntimeError: The system gives no thread to do it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(nbytes), timeout_s):
                return False
            if self._closed:
                return False
            self._start()
            self._jobs.append(_Job(run, nbytes))
            self._nbytes += nbytes
            self._n_submitted += 1
            self._changed.notify_all()
            return True

    def start(self) -> None:
        """Have a thread ready: none can be started while the interpreter ends.

        Raises:
            RuntimeError: The system gives no thread.
        """
        with self._changed:
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=self._loop, name="promptstore-writer", daemon=True
            )
            thread.start()  # raises if the system gives no thread; the next try may
            self._thread = thread

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was queued is done.

        Raises:
            WriteFailed: Some of it failed since the last flush.
            TimeoutError: It takes longer than *timeout_s*.
        """
        self.wait(timeout_s)
        with self._changed:
            first, n_failed = self._first, self._n_failed
            self._first, self._n_failed = None, 0
        if first is not None:
            raise WriteFailed(n_failed, first) from first

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all that was queued is done, whether it failed or not.

        Raises:
            TimeoutError: It takes longer than *timeout_s*.
        """
        with self._changed:
            until = self._n_submitted  # what comes later is not waited for
            if not self._changed.wait_for(lambda: self._n_done >= until, timeout_s):
                raise TimeoutError(
                    f"{until - self._n_done} write(s) are not done after {timeout_s} s"
                )

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the thread finish what is queued and end; further work is refused.

        Returns:
            Whether it has ended within *timeout_s*.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Note an error for the next flush to raise."""
        _let_go(error)
        with self._changed:
            self._n_failed += 1
            self._first = self._first or error

    def _has_room(self, nbytes: int) -> bool:
        is_small = not nbytes or self._nbytes + nbytes <= self._max_bytes
        return self._closed or not self._nbytes or is_small

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except Exception as error:  # a place that may: flush raises it
                self.fail(error)
            done, job = job.nbytes, None  # drop what the job kept alive first
            with self._changed:
                self._nbytes -= done
                self._n_done += 1
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs.popleft() if self._jobs else None


def _let_go(error: BaseException) -> None:
    """Drop what the frames of an error keep alive: the arrays of a prompt."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def deadline(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function that tells how much of *timeout_s* is left."""
    if timeout_s is None:
        return lambda: None
    end = time.monotonic() + timeout_s
    return lambda: max(0.0, end - time.monotonic())
