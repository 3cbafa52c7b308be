"""The progress bar, for waits of more than a second; on terminals only."""

from __future__ import annotations

import threading
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

DELAY_S = 1.0


class Bar:
    """One bar on stderr for a wait of several phases; gone when it ends.

    Args:
        console: Where to draw. Default: stderr. Nothing is drawn on what is not a
            terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("", total=None)
        self._lock = threading.Lock()
        self._is_closed = not console.is_terminal
        self._timer = threading.Timer(DELAY_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if not self._is_closed:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, description: str) -> None:
        """Begin something whose length is not known yet."""
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(description, total=None)

    def update(self, done: int, total: int) -> None:
        """Say how much of the phase is done."""
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """End the wait; closing twice is fine."""
        self._timer.cancel()
        with self._lock:
            if not self._is_closed:
                self._progress.stop()
            self._is_closed = True

    def _show(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._progress.start()
