#!/usr/bin/env python3
"""Have many processes use one root at once, half of them writing.

The writers insert, match, evict, delete, pin, check and reopen at random; the others
match, hold what they matched while the rest goes on, and check. Every match must be
right, no process may count an error but those that others lawfully cause (see
`workers.LAWFUL`), and at the end nothing is wrong on disk, without a repair.

    python tools/stress.py                                  # 8 processes, 60 s
    python tools/stress.py --processes 4 --seconds 5 --seed 7

The seed gives each process the same choices again. Exits with 1 on a failure and
leaves the root.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workers import FORK, READING, STRESSING, Acks, PromptStore, Worker, prompts_of


def work(place: Path, number: int, seed: int, goes_on: Callable[[int], bool]) -> None:
    """Use the store as long as *goes_on* says so, given how many steps are done.

    In a process of its own.
    """
    weights = READING if number % 2 else STRESSING
    acks, pinned = Acks(place / "acks"), Acks(place / "pinned")
    prompts = prompts_of(seed)
    worker = Worker(place / "store", prompts, seed + number, weights, acks, pinned)
    n_steps = 0
    while goes_on(n_steps):
        worker.step()
        n_steps += 1
    worker.close()
    print(f"process {number}: {n_steps} steps\n", end="", flush=True)


def run(
    place: Path, n_processes: int, seed: int, goes_on: Callable[[int], bool]
) -> list[str]:
    """Have processes use one root below *place*; return what went wrong."""
    processes = [
        FORK.Process(target=work, args=(place, number, seed, goes_on))
        for number in range(n_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    wrong = [
        f"process {number} ended with {process.exitcode}"
        for number, process in enumerate(processes)
        if process.exitcode
    ]
    with PromptStore.open(place / "store") as store:
        return wrong + [str(finding) for finding in store.check()]


def main() -> int:
    """Run the stress; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, help="steps a process instead of seconds")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    end = time.monotonic() + options.seconds

    def goes_on(n_steps: int) -> bool:
        if options.steps is not None:
            return n_steps < options.steps
        return time.monotonic() < end

    place = Path(tempfile.mkdtemp(prefix="promptstore-stress-"))
    wrong = run(place, options.processes, options.seed, goes_on)
    if wrong:
        print(f"FAILED with seed {options.seed}; see {place}", *wrong, sep="\n")
        return 1
    shutil.rmtree(place)
    print("no error, and nothing wrong on disk")
    return 0


if __name__ == "__main__":
    sys.exit(main())
