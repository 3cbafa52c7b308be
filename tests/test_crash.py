"""A process may die at any step that changes the disk: nothing acknowledged is lost,
nothing wrong is served, and the next process goes on.

This shows what a crash of the process leaves, not what a power cut does.
"""

from __future__ import annotations

import ast
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import builders
import pytest
from test_golden import ROOTS
from universe import Acks, Prompt, universe

import promptstore
from promptstore import Namespace, PromptStore, failpoints

DIED = 77
WAIT_S = 60
TOOLS = Path(__file__).parents[1] / "tools"

ALL = universe(0, n_conversations=1)
FULL, WINDOW, STATE = (
    [prompt for prompt in ALL if prompt.kind == kind]
    for kind in ("full", "window", "state")
)
NEW = [prompt for prompt in universe(1, 1) if prompt.kind == "full"]
STATES = [Prompt("state", STATE[-2].ids[:n]) for n in range(70, 88)]
PINNED = [FULL[0], STATE[1]]


@dataclass(frozen=True)
class Scenario:
    """What a process does when it dies.

    Args:
        act: What the child does, step by step; it notes what it has flushed.
        steps: The steps that it reaches, and a later time at which to die there too.
        stored: What is there before.
        lasting: What of that must be there afterwards.
        inserted: What the child inserts.
        prepare: What is done to the root before, once *stored* is there.
    """

    act: Callable[[Path, Acks], None]
    steps: dict[str, int]
    stored: Sequence[Prompt] = ()
    lasting: Sequence[Prompt] = ()
    inserted: Sequence[Prompt] = ()
    prepare: Callable[[Path], object] = field(default=lambda _: None)


# -------------------------------------------------------------------- what they do


def opening(root: Path, acks: Acks) -> None:
    """Open a store and close it."""
    PromptStore.open(root).close()


def inserting(
    prompts: Sequence[Prompt], **options: Any
) -> Callable[[Path, Acks], None]:
    """Return what inserts *prompts*, each made durable by itself."""

    def act(root: Path, acks: Acks) -> None:
        with PromptStore.open(root, **options) as store:
            for prompt in prompts:
                prompt.insert(store)
                store.flush()
                acks.add(prompt)

    return act


def making_room(root: Path, acks: Acks) -> None:
    """Insert into a store that is full."""
    n_free = 20_000  # for the log, but not for the prompts
    inserting(NEW[:2], disk_bytes=nbytes_of(root) + n_free)(root, acks)


def evicting(root: Path, acks: Acks) -> None:
    """Evict what is over half of the bytes."""
    with PromptStore.open(root) as store:
        store.evict(to_bytes=nbytes_of(root) // 2)


def deleting(root: Path, acks: Acks) -> None:
    """Delete a conversation by its first prompt."""
    with PromptStore.open(root) as store:
        store.delete(FULL[0].label)


def repairing(root: Path, acks: Acks) -> None:
    """Mend what is wrong."""
    with PromptStore.open(root) as store:
        store.repair(store.check())


def matching(root: Path, acks: Acks) -> None:
    """Use prompts, so that their use is recorded."""
    with PromptStore.open(root, memory_bytes=0) as store:
        for prompt in ALL:
            assert prompt.is_served(store)
            store.flush()


def nbytes_of(root: Path) -> int:
    """Return the bytes of all files below a root."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def old_root(root: Path) -> None:
    """Have a root of the first format."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(ROOTS / "m001_snapshots" / "store", root)


def expire(root: Path) -> None:
    """Let the life of a conversation end."""
    db = sqlite3.connect(root / "index.db")
    with db:
        db.execute("update snapshots set expires_ns = 1 where label = ?",
                   (WINDOW[0].label,))  # fmt: skip
    db.close()


def leave_orphans(root: Path) -> None:
    """Have files without a row, whole and half."""
    good = next(root.rglob("*.safetensors")).read_bytes()
    for suffix in (".safetensors", ".tmp"):
        name = secrets.token_hex(16)
        path = root / "snapshots" / name[:2] / (name + suffix)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(good[:9000])


def damage(root: Path) -> None:
    """Flip a bit of one file, remove another, and leave orphans."""
    with PromptStore.open(root, read_only=True) as store:
        names = {info.label: info.id for info in store.snapshots()}
    paths = {path.stem: path for path in root.rglob("*.safetensors")}
    flipped, removed = (paths[names[x.label]] for x in (FULL[0], WINDOW[0]))
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    removed.unlink()
    leave_orphans(root)


def damage_index(root: Path) -> None:
    """Zero the first page of the index."""
    with open(root / "index.db", "r+b") as file:
        file.write(bytes(4096))


# ------------------------------------------------------------------------ the table

_OPEN = {"open: lock taken": 1, "open: index made": 1, "open: log switched on": 1}
_MIGRATE = {
    "migrate: begun": 1,
    "migrate: steps applied": 1,
    "migrate: committed": 1,
}
_REMOVE = {"remove: row written": 2, "remove: rows gone": 1, "remove: file gone": 2}


_SOMETIMES = {"insert: old state dropped", "insert: sighting noted"}


def _inserted(nth: int) -> dict[str, int]:
    names = [name for name in failpoints.STEPS if name.startswith("insert: ")]
    # Names are random: two files may share a folder.
    return {name: nth for name in names if name not in _SOMETIMES} | {
        "insert: folder made": 1
    }


SCENARIOS = {
    "open": Scenario(opening, {"open: root made": 1} | _OPEN | _MIGRATE),
    "migrate": Scenario(opening, _OPEN | _MIGRATE, prepare=old_root),
    "insert roots": Scenario(
        inserting([FULL[0], WINDOW[2]]),
        _inserted(2),
        inserted=[FULL[0], WINDOW[2]],
    ),
    "insert deltas": Scenario(
        inserting([FULL[2], FULL[3], WINDOW[1], WINDOW[3]]),
        _inserted(4),
        stored=[FULL[0], WINDOW[0], STATE[0]],
        lasting=[FULL[0], WINDOW[0], STATE[0]],
        inserted=[FULL[2], FULL[3], WINDOW[1], WINDOW[3]],
    ),
    "insert states": Scenario(
        inserting(STATE[:2]),
        _inserted(2),  # the second file of a prompt is that of its state
        inserted=STATE[:2],
    ),
    "insert what makes others go": Scenario(
        inserting(STATES[-2:]),
        {"insert: old state dropped": 2},
        stored=STATES[:-2],
        lasting=STATES[:1],
        inserted=STATES[-2:],
    ),
    "insert into a full store": Scenario(
        making_room,
        {"evict: row gone": 2, "evict: file gone": 2, "evict: log truncated": 2},
        stored=ALL,
        lasting=PINNED,
        inserted=NEW[:2],
    ),
    "insert when something has expired": Scenario(
        inserting(NEW[:1]),
        _REMOVE,
        stored=ALL,
        lasting=FULL + STATE,
        inserted=NEW[:1],
        prepare=expire,
    ),
    "insert what was seen before": Scenario(
        inserting(FULL[1:3], admission="second-use"),
        {"insert: sighting noted": 2},
        stored=FULL[:1],
        lasting=FULL[:1],
        inserted=FULL[1:3],
    ),
    "insert beside orphans": Scenario(
        inserting(NEW[:1]),
        {"sweep: file gone": 2},
        stored=ALL,
        lasting=ALL,
        inserted=NEW[:1],
        prepare=leave_orphans,
    ),
    "evict": Scenario(
        evicting,
        {"evict: row gone": 3, "evict: file gone": 3},
        stored=ALL,
        lasting=PINNED,
    ),
    "delete": Scenario(
        deleting,
        _REMOVE
        | {
            "remove: traces gone": 1,
            "remove: index compacted": 1,
            "evict: log truncated": 1,
        },
        stored=ALL,
        lasting=WINDOW + STATE,
    ),
    "repair": Scenario(
        repairing,
        _REMOVE | {"repair: file gone": 1, "sweep: file gone": 1},
        stored=ALL,
        lasting=STATE,
        prepare=damage,
    ),
    "rebuild": Scenario(
        opening,
        {
            "rebuild: new index made": 1,
            "rebuild: row added": 5,
            "rebuild: index set aside": 1,
            "rebuild: index in its place": 1,
        },
        stored=ALL,
        lasting=ALL,
        prepare=damage_index,
    ),
    "match": Scenario(matching, {"uses: written": 2}, stored=ALL, lasting=ALL),
}
"""What a process was doing when it died."""

CASES = [
    (name, step, nth)
    for name, scenario in SCENARIOS.items()
    for step, last in scenario.steps.items()
    for nth in sorted({1, last})
]


# ------------------------------------------------------------------------ the tests


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "store"


def die(name: str, step: str, nth: int, root: Path, acks: Acks) -> None:
    """Act until *step* is reached for the *nth* time. In a child."""
    left = nth

    def hook(reached: str) -> None:
        nonlocal left
        left -= reached == step
        if not left:
            os._exit(DIED)

    failpoints.hook = hook
    SCENARIOS[name].act(root, acks)


def prepared(scenario: Scenario, root: Path) -> None:
    """Make the root in which a scenario begins."""
    if scenario.stored:
        with PromptStore.open(root) as store:
            for prompt in scenario.stored:
                label = prompt.label if prompt in ALL else None
                prompt.insert(store, label=label, pin=prompt in PINNED)
    scenario.prepare(root)


def require_served(store: PromptStore, prompts: Sequence[Prompt]) -> None:
    """Raise AssertionError unless *prompts* are served, and others right or absent."""
    assert [x for x in prompts if not x.is_served(store)] == []
    for prompt in [*ALL, *NEW, *STATES]:
        prompt.match(store)


@pytest.mark.parametrize(("name", "step", "nth"), CASES)
def test_a_process_may_die_at_any_step(
    zygote: ForkServerContext,
    root: Path,
    tmp_path: Path,
    name: str,
    step: str,
    nth: int,
) -> None:
    """Whatever the step, nothing flushed is lost and nothing is served wrong (P05)."""
    scenario, acks = SCENARIOS[name], Acks(tmp_path / "acks")
    prepared(scenario, root)
    child = zygote.Process(target=die, args=(name, step, nth, root, acks))
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == DIED

    lasting = [*scenario.lasting, *acks.of(scenario.inserted)]
    with PromptStore.open(root, memory_bytes=0) as store:
        require_served(store, lasting)
        store.repair(store.check())
        assert store.check() == []
        require_served(store, lasting)
        for prompt in scenario.inserted:
            prompt.insert(store)
            store.flush()
        require_served(store, [*lasting, *scenario.inserted])
        assert store.check() == []
    assert list(root.rglob("*.tmp")) == []


@pytest.mark.parametrize("step", _OPEN | _MIGRATE)
def test_a_death_in_a_migration_costs_nothing(
    zygote: ForkServerContext, root: Path, tmp_path: Path, step: str
) -> None:
    """What an older version stored is served after a crash at any step of opening."""
    old_root(root)
    child = zygote.Process(target=die, args=("migrate", step, 1, root, Acks(tmp_path)))
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == DIED
    manifest = ROOTS / "m001_snapshots" / "manifest.json"
    with PromptStore.open(root, memory_bytes=0) as store:
        for entry in json.loads(manifest.read_text()):
            namespace = Namespace(entry["model"], tenant=entry["tenant"])
            n_tokens = entry["n_tokens"]
            ids = [*builders.tokens(n_tokens, entry["seed"]), 1]
            cache = store.match(namespace, ids).cache
            assert cache is not None
            assert builders.fingerprints(cache, n_tokens) == entry["arrays"]
        assert store.check() == []


def reached_in_code() -> set[str]:
    """Return the steps that the package names to `reach`."""
    found = set()
    for path in Path(promptstore.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "reach":
                (step,) = node.args
                assert isinstance(step, ast.Constant), path
                found.add(step.value)
    return found


def test_the_list_of_steps_is_that_of_the_code() -> None:
    """Each step that code reaches is listed, and nothing else."""
    assert len(set(failpoints.STEPS)) == len(failpoints.STEPS) >= 20
    assert reached_in_code() == set(failpoints.STEPS)


def test_a_process_dies_at_every_step() -> None:
    """No step is left out of the scenarios."""
    covered = {step for scenario in SCENARIOS.values() for step in scenario.steps}
    assert covered == reached_in_code()
