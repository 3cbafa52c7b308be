"""Signals: the first one asks to end within a bound, the second one ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

_NUMBERS = signal.SIGTERM, signal.SIGINT


class Shutdown:
    """Turns SIGTERM and SIGINT into one ``KeyboardInterrupt`` in the main thread.

    Args:
        timeout_s: How long ending may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_s: float | None = None

    def install(self) -> None:
        """Begin to listen; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                signal.signal(number, self._on_signal)

    def hold(self) -> None:
        """Let signals wait for `release`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)

    def release(self) -> None:
        """Act on signals again; on one that waits, at once."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)

    def left_s(self) -> float:
        """Return how much of the time is left; it begins now if no signal came."""
        now = time.monotonic()
        if self._ends_s is None:
            self._ends_s = now + self._timeout_s
        return max(0.0, self._ends_s - now)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._ends_s is not None:
            os._exit(128 + number)
        self.left_s()
        raise KeyboardInterrupt
