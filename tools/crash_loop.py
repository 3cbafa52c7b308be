#!/usr/bin/env python3
"""Kill processes that use a store, at random moments, and look at what is left.

Rounds of one worker and of four on one root take turns. The workers insert, flush
and note what was acknowledged outside of the root; match; check and repair; reopen;
in some rounds they evict or delete as well. Each is killed with SIGKILL at a moment
of its own, the others going on. After each round a new process opens the root: it
must find nothing worse than files without a row, all that was acknowledged served
and right (what is pinned, if there was eviction; nothing, if there was deletion), all
else right or absent; saving works, and no temporary file is left.

    python tools/crash_loop.py                      # 1,000 kills
    python tools/crash_loop.py --kills 60 --seed 7

The seed gives the same choices and delays again; the moments differ a little from run
to run. Exits with 1 at the first failure, says in which round, and leaves the root.

A kill takes the process and leaves the kernel: what was written, synced or not, is
still there. This shows nothing about power cuts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from workers import (
    DELETING,
    EVICTING,
    FORK,
    REPAIRING,
    Acks,
    Prompt,
    PromptStore,
    Worker,
    prompts_of,
)

ROUNDS_A_ROOT = 8
MAX_STEPS = 8
DELAY_S = 0.1
MODES = {"keep": REPAIRING, "evict": EVICTING, "delete": DELETING}


class Failed(Exception):
    """Something acknowledged was lost, or something wrong was found."""


@dataclass
class Root:
    """A store's directory, and what is known to be there."""

    place: Path
    prompts: list[Prompt]
    kept: list[Prompt] = field(default_factory=list)
    pinned: list[Prompt] = field(default_factory=list)

    @property
    def store(self) -> Path:
        """Where the store is."""
        return self.place / "store"


@dataclass
class Totals:
    """What happened in all rounds."""

    kills: int = 0
    rounds: int = 0
    acknowledged: int = 0
    orphans: int = 0


def work(
    root: Path,
    prompts: list[Prompt],
    seed: int,
    weights: Mapping[str, int],
    acks: Acks,
    pinned: Acks,
    progress: Connection,
) -> None:
    """Use the store until killed, or the parent is. In a process of its own."""
    parent = os.getppid()
    worker = Worker(root, prompts, seed, weights, acks, pinned)
    while os.getppid() == parent:
        progress.send_bytes(b"step")
        worker.step()


def inspect(
    root: Path, prompts: Sequence[Prompt], due: Sequence[Prompt], answer: Connection
) -> None:
    """Look at what is left; answer with what is served. In a process of its own."""
    with PromptStore.open(root, memory_bytes=0) as store:
        before = _served(store, prompts, due)
        findings = store.check()
        assert {finding.kind for finding in findings} <= {"orphan"}, findings
        store.repair(findings)
        assert (left := store.check()) == [], left
        # A repair may give whole files a row again, and takes nothing away.
        served = _served(store, prompts, [*due, *before])
        probe = Prompt("full", (0, *range(1, 200)))
        probe.insert(store, label="probe")
        store.flush()
        assert probe.is_served(store)
        store.delete("probe")
        assert (left := store.check()) == [], left
    temporary = list(root.rglob("*.tmp"))
    assert temporary == [], temporary
    answer.send((served, len(findings)))


def _served(
    store: PromptStore, prompts: Sequence[Prompt], due: Sequence[Prompt]
) -> list[Prompt]:
    served = [prompt for prompt in prompts if prompt.is_served(store)]
    lost = [prompt.label for prompt in due if prompt not in served]
    assert lost == [], f"lost: {lost}"
    return served


def one_round(root: Root, mode: str, n_workers: int, rng: random.Random) -> Totals:
    """Have workers use the root, kill them, and look at it.

    Raises:
        Failed: What is left is not right.
    """
    acks, pinned = (Acks(root.place / name) for name in ("acks", "pinned"))
    for name in ("acks", "pinned"):
        (root.place / name).unlink(missing_ok=True)
    workers = []
    for _ in range(n_workers):
        here, there = FORK.Pipe(duplex=False)
        seed, weights = rng.getrandbits(32), MODES[mode]
        args = (root.store, root.prompts, seed, weights, acks, pinned, there)
        process = FORK.Process(target=work, args=args)
        process.start()
        there.close()
        workers.append((process, here))
    try:
        for process, progress in workers:
            _kill(process, progress, rng)
    finally:
        for process, _ in workers:
            process.kill()
    acknowledged = acks.of(root.prompts)
    root.pinned += pinned.of(root.prompts)
    if mode == "delete":  # it also takes pins away
        root.pinned = []
    due = [*root.kept, *acknowledged] if mode == "keep" else root.pinned
    root.kept, n_orphans = _inspect(root, due)
    return Totals(n_workers, 1, len(acknowledged), n_orphans)


def _kill(process: ForkProcess, progress: Connection, rng: random.Random) -> None:
    """Kill a worker at a random moment after so many steps; none is while it opens."""
    with contextlib.suppress(EOFError):  # it ended by itself
        for _ in range(rng.randrange(MAX_STEPS)):
            progress.recv_bytes()
    time.sleep(rng.uniform(0, DELAY_S))
    process.kill()
    process.join()
    progress.close()
    if process.exitcode != -signal.SIGKILL:
        raise Failed(f"a worker ended by itself, with {process.exitcode}")


def _inspect(root: Root, due: Sequence[Prompt]) -> tuple[list[Prompt], int]:
    here, there = FORK.Pipe(duplex=False)
    args = (root.store, root.prompts, due, there)
    process = FORK.Process(target=inspect, args=args)
    process.start()
    there.close()
    try:
        served, n_orphans = here.recv()
    except EOFError:
        raise Failed("what was left is not right") from None
    finally:
        here.close()
        process.join()
    return served, n_orphans


def run(kills: int, seed: int, place: Path) -> Totals:
    """Kill so many processes; return what happened.

    Raises:
        Failed: What a round left is not right; the message says which.
    """
    rng, totals = random.Random(seed), Totals()
    root = _fresh(place, rng)
    while totals.kills < kills:
        if totals.rounds and totals.rounds % ROUNDS_A_ROOT == 0:
            shutil.rmtree(root.place)
            root = _fresh(place, rng)
        mode = rng.choice(["keep", "keep", "evict", "delete"])
        n_workers = 4 if totals.rounds % 2 else 1
        try:
            done = one_round(root, mode, n_workers, rng)
        except Failed as failed:
            message = f"round {totals.rounds} ({mode}, {n_workers} processes): {failed}"
            raise Failed(f"{message}; see {root.store}") from failed
        totals.kills += done.kills
        totals.rounds += done.rounds
        totals.acknowledged += done.acknowledged
        totals.orphans += done.orphans
    return totals


def _fresh(place: Path, rng: random.Random) -> Root:
    seed = rng.getrandbits(32)
    made = place / f"{seed:08x}"
    made.mkdir()
    return Root(made, prompts_of(seed))


def main() -> int:
    """Run the loop; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="promptstore-crash-"))
    start = time.monotonic()
    try:
        totals = run(options.kills, options.seed, place)
    except Failed as failed:
        print(f"FAILED with seed {options.seed} in {failed}", file=sys.stderr)
        return 1
    shutil.rmtree(place)
    print(
        f"{totals.kills} kills in {totals.rounds} rounds: {totals.acknowledged} "
        f"acknowledged prompts right, {totals.orphans} orphans swept, nothing lost "
        f"({time.monotonic() - start:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
