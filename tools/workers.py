"""Processes that use one root at random: what `crash_loop` and `stress` share.

The parent has imported everything and must evaluate nothing with mlx, so that what it
forks can.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from universe import Acks, Prompt, require_right, universe

from promptstore import PromptStore, UnknownSnapshot, WriteFailed
from promptstore.counters import cause_of

# What others cause is looked at in stats().errors, which are complete.
logging.getLogger("promptstore").setLevel(logging.ERROR)

FORK: ForkContext = multiprocessing.get_context("fork")
N_CONVERSATIONS = 4
SMALL_BYTES = 400_000
"""A budget into which about half of a universe fits."""

READING = {"match": 6, "look": 1, "check": 1, "use": 1}
WRITING = {"insert": 8, "match": 3, "look": 1, "check": 1, "reopen": 1}
REPAIRING = WRITING | {"repair": 1}
EVICTING = WRITING | {"evict": 3, "pin": 1}
DELETING = WRITING | {"delete": 3, "pin": 1, "unpin": 1}
STRESSING = WRITING | EVICTING | DELETING

LAWFUL = frozenset({"NotCovered", "TooLarge"})
"""Errors that others may cause: what a prompt continues was evicted again and again
while it was being written, or pinned prompts leave no room for it."""


class Worker:
    """One process's use of a store.

    Args:
        root: The store's directory.
        prompts: What it may insert and match.
        seed: Of its choices.
        weights: How often it does what.
        acks: Where it notes what was flushed.
        pinned: Where it notes what was flushed with a pin.
    """

    def __init__(
        self,
        root: Path,
        prompts: list[Prompt],
        seed: int,
        weights: Mapping[str, int],
        acks: Acks,
        pinned: Acks,
    ) -> None:
        self._root, self._prompts = root, prompts
        self._weights = weights
        self._acks, self._pinned = acks, pinned
        self._rng = random.Random(seed)
        self._lawful = LAWFUL if {"evict", "delete"} & weights.keys() else frozenset()
        self._store = self._open()
        self._do: dict[str, Callable[[], object]] = {
            "insert": self._insert,
            "match": self._match,
            "use": self._use,
            "look": self._look,
            "check": self._check,
            "repair": self._repair,
            "reopen": self._reopen,
            "evict": self._evict,
            "delete": lambda: self._named(self._store.delete),
            "pin": lambda: self._named(self._store.pin),
            "unpin": lambda: self._named(self._store.unpin),
        }

    def step(self) -> None:
        """Do one thing at random."""
        names, weights = zip(*self._weights.items(), strict=True)
        (name,) = self._rng.choices(names, weights)
        self._do[name]()
        errors = self._store.stats().errors
        assert errors.keys() <= self._lawful, errors

    def close(self) -> None:
        """Write what is queued and close the store."""
        self._flush()
        self._store.close()

    def _open(self) -> PromptStore:
        rng = self._rng
        options: dict[str, Any] = {
            "memory_bytes": rng.choice([0, 200_000, 1 << 30]),
            "write": rng.choice(["through", "back"]),
            "verify": rng.choice(["first-use", "always"]),
        }
        if "evict" in self._weights:
            options["disk_bytes"] = rng.choice([SMALL_BYTES, 2 * SMALL_BYTES])
        return PromptStore.open(self._root, **options)

    def _reopen(self) -> None:
        self.close()
        self._store = self._open()

    def _insert(self) -> None:
        chosen = self._rng.sample(self._prompts, self._rng.randrange(1, 4))
        pins = [prompt for prompt in chosen if prompt in self._prompts[::9]]
        for prompt in chosen:
            label = prompt.label if self._rng.random() < 0.3 else None
            prompt.insert(self._store, label=label, pin=prompt in pins)
        if self._flush():
            self._acks.add(*chosen)
            self._pinned.add(*pins)

    def _flush(self) -> bool:
        try:
            self._store.flush()
        except WriteFailed as failed:
            if cause_of(failed.__cause__ or failed) in self._lawful:
                return False
            raise
        return True

    def _match(self) -> None:
        for prompt in self._rng.sample(self._prompts, 4):
            prompt.match(self._store)

    def _use(self) -> None:
        """Keep what was matched until the others went on, then look at it."""
        chosen = self._rng.sample(self._prompts, 4)
        held = [(x, self._store.match(x.namespace, [*x.ids, 0])) for x in chosen]
        self._check()
        for prompt, match in held:
            require_right(prompt, match)

    def _look(self) -> None:
        prompt = self._rng.choice(self._prompts)
        self._store.explain(prompt.namespace, prompt.ids)
        self._store.prefetch(prompt.namespace, prompt.ids)
        assert all(info.end > 0 for info in self._store.snapshots())

    def _check(self) -> None:
        """Others are at work: only a file that was left behind may be found."""
        kinds = {finding.kind for finding in self._store.check()}
        assert kinds <= {"orphan"}, kinds

    def _repair(self) -> None:
        self._store.repair(self._store.check())

    def _evict(self) -> None:
        self._store.evict(to_bytes=self._rng.randrange(SMALL_BYTES))

    def _named(self, act: Callable[[str], object]) -> None:
        infos = list(self._store.snapshots())
        if infos:
            info = self._rng.choice(infos)
            with contextlib.suppress(UnknownSnapshot):  # another process was faster
                act(info.label or info.id)


def prompts_of(seed: int) -> list[Prompt]:
    """Return the prompts that workers of one root share."""
    return universe(seed, N_CONVERSATIONS)
