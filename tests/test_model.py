"""Random operations on a store, against a plain set of token tuples.

``PROMPTSTORE_SEED=n`` runs another sequence; a failure prints the one that it had.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from builders import KEYS, VALUES, kv_of, prints, tokens, values

from promptstore import Namespace, PromptStore, TooLarge, WriteFailed, n_cached

NS = Namespace("m")
ALPHABET = 3  # so that prefixes collide
LABELS = ["a", "b", "c"]
SMALL = {"n_kv_heads": 1, "head_dim": 6}
LARGE = {"n_kv_heads": 8, "head_dim": 64}  # 8 KiB a token, 2 MiB a buffer
HEADS = [tuple(tokens(n, seed=n)) for n in (0, 0, 0, 250, 510)]

Ids = tuple[int, ...]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def longest(stored: Iterable[Sequence[int]], ids: Sequence[int]) -> int:
    """Return the longest prefix of *ids* that any stored prompt begins with."""
    return max((shared(prompt, ids) for prompt in stored), default=0)


class Driver:
    """One store, what it must hold, and the operations on both.

    Args:
        root: Where the store is.
        seed: Which sequence.
        tight: Whether budgets make it forget.
        options: How the store is opened.
    """

    def __init__(
        self, root: Path, seed: str, tight: bool, options: dict[str, Any]
    ) -> None:
        self.rng = random.Random(seed)
        self.root = root
        self.tight = tight
        self.options: dict[str, Any] = {"min_tokens": 0, **options}
        self.rows: dict[str, Any] = LARGE if tight else SMALL
        self.stored: set[Ids] = set()
        self.labels: dict[str, Ids] = {}
        self.pinned: set[Ids] = set()
        self.store = self.open()

    def open(self) -> PromptStore:
        return PromptStore.open(self.root, **self.options)

    # ------------------------------------------------------------ what there is

    def on_disk(self) -> set[Ids]:
        """Return the prompts that the index has, whatever the model thinks."""
        assert self.store._disk is not None
        index = self.store._disk.index
        return {tuple(index.tokens_of(row).tolist()) for row in index.rows()}

    def in_memory(self) -> set[Ids]:
        """Return the prompts that the memory tier has."""
        return {tuple(e.tokens.tolist()) for e in self.store._memory._entries()}

    def prompt(self) -> Ids:
        """Return a prompt that collides with others, now and then a stored one."""
        if self.stored and self.rng.random() < 0.5:
            base = self.rng.choice(sorted(self.stored))
            base = base[: self.rng.randrange(len(base) + 1)]
        else:
            base = () if self.tight else self.rng.choice(HEADS)
        n = self.rng.randrange(1, 12)
        return (*base, *(self.rng.randrange(ALPHABET) for _ in range(n)))

    @contextlib.contextmanager
    def unless_too_large(self) -> Iterator[None]:
        """Only a tight budget may be in the way of a write."""
        try:
            yield
        except WriteFailed as error:
            if not self.tight or not isinstance(error.__cause__, TooLarge):
                raise

    def flush(self) -> None:
        """Flush."""
        with self.unless_too_large():
            self.store.flush()

    # --------------------------------------------------------------- operations

    def insert(self) -> None:
        """Insert a prompt with a cache made for it."""
        ids = self.prompt()
        self.put(ids, kv_of(ids, **self.rows))

    def put(self, ids: Ids, cache: list[Any]) -> None:
        label = self.rng.choice([*LABELS, None, None, None])
        pin = self.rng.random() < 0.1 and not self.tight
        kind: Any = self.rng.choice(["system", "user", "assistant"])
        n_tokens = self.store.insert(NS, ids, cache, kind=kind, label=label, pin=pin)
        assert n_tokens == min(len(ids), n_cached(cache))
        if not n_tokens:
            return
        ids = ids[:n_tokens]
        self.stored.add(ids)
        if label is not None:
            if self.labels.get(label, ids) != ids:
                self.pinned.discard(self.labels[label])
            self.labels = {k: v for k, v in self.labels.items() if v != ids}
            self.labels[label] = ids
        if pin:
            self.pinned.add(ids)
        self.flush()
        if self.tight:
            self.labels = {k: v for k, v in self.labels.items() if k in self.names()}
        else:
            self.look(ids)

    def look(self, ids: Ids) -> list[Any] | None:
        """Match a prompt with one more token and verify every row of the answer."""
        expected = longest(self.stored, ids)
        held = longest(self.on_disk() | self.in_memory(), ids)
        match = self.store.match(NS, [*ids, 0], like=kv_of([0], **self.rows))
        if self.tight:
            assert match.n_tokens == held <= expected
        else:
            assert match.n_tokens == expected
        if match.cache is None:
            return None
        assert n_cached(match.cache) == match.n_tokens
        right = kv_of(ids[: match.n_tokens], **self.rows)
        assert prints(match.cache) == prints(right)
        return match.cache

    def match(self) -> None:
        """Look up any prompt, and throw the answer away."""
        self.look(self.prompt())

    def extend(self) -> None:
        """Match, compute the rest, and insert what is then there: a turn."""
        ids = self.prompt()
        cache = self.look(ids)
        if cache is None:
            return
        start = n_cached(cache)
        for layer, live in enumerate(cache):
            rows = [
                mx.array(
                    values(
                        start, len(ids), layer=layer, part=part, ids=ids, **self.rows
                    )
                ).astype(mx.float32)
                for part in (KEYS, VALUES)
            ]
            if start < len(ids):
                live.update_and_fetch(*rows)
        self.put(ids, cache)

    def trim(self) -> None:
        """Match, trim what came, and insert it under the whole key."""
        ids = self.prompt()
        cache = self.look(ids)
        if cache is None:
            return
        n_cut = self.rng.randrange(n_cached(cache) + 1)
        for layer in cache:
            layer.trim(n_cut)
        self.put(ids, cache)

    def names(self) -> set[str | None]:
        return {info.label for info in self.store.snapshots()}

    def delete(self) -> None:
        """Delete by label: what shares more than its parent's part goes."""
        if not self.labels:
            return
        label = self.rng.choice(sorted(self.labels))
        ids = self.labels[label]
        (info,) = [info for info in self.store.snapshots() if info.label == label]
        assert info.end == len(ids)
        assert self.store.delete(label) >= 1
        self.forget(ids)
        for prompt in list(self.stored):
            if shared(prompt, ids) > info.start:
                self.forget(prompt)
                self.stored.remove(prompt)
                self.stored.add(prompt[: info.start])
        self.stored.discard(())

    def forget(self, ids: Ids) -> None:
        """Neither label nor pin is on a prompt any more."""
        self.pinned.discard(ids)
        self.labels = {k: v for k, v in self.labels.items() if v != ids}

    def pin(self) -> None:
        """Pin or unpin by label."""
        if not self.labels or self.tight:
            return
        label = self.rng.choice(sorted(self.labels))
        if self.rng.random() < 0.5:
            self.store.pin(label)
            self.pinned.add(self.labels[label])
        else:
            self.store.unpin(label)
            self.pinned.discard(self.labels[label])

    def evict(self) -> None:
        """Evict all; pinned prompts stay, with what they continue."""
        if self.rng.random() < 0.5:
            return
        self.store.evict(to_bytes=0)
        self.flush()
        left = self.on_disk()
        assert self.pinned <= left
        assert all(longest(self.stored, prompt) == len(prompt) for prompt in left)
        assert not left or self.pinned
        self.stored = left
        self.labels = {k: v for k, v in self.labels.items() if k in self.names()}
        assert self.store.stats().n_entries == 0

    def reopen(self) -> None:
        """Close and open: nothing is lost that fits."""
        with self.unless_too_large():
            self.store.close()
        self.store = self.open()

    def step(self) -> None:
        """Do one thing and check the figures."""
        operations = {
            self.insert: 8,
            self.match: 6,
            self.extend: 6,
            self.trim: 3,
            self.pin: 2,
            self.delete: 2,
            self.flush: 1,
            self.reopen: 1,
            self.evict: 1,
        }
        self.rng.choices(list(operations), list(operations.values()))[0]()
        stats = self.store.stats()
        assert stats.memory_bytes <= self.options["memory_bytes"]
        assert set(stats.errors) <= ({"TooLarge"} if self.tight else set())
        if stats.n_pending == 0:
            files = [path for path in self.root.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            assert size <= self.options["disk_bytes"]


TIGHT = {"memory_bytes": 3 * (2 << 20), "disk_bytes": (5 << 20) + (1 << 20)}
WIDE = {"memory_bytes": 1 << 30, "disk_bytes": 1 << 30}


@pytest.mark.parametrize(
    ("tight", "options"),
    [
        pytest.param(False, WIDE, id="both tiers"),
        pytest.param(False, WIDE | {"memory_bytes": 0}, id="disk"),
        pytest.param(False, WIDE | {"write": "back"}, id="write-back"),
        pytest.param(True, TIGHT, id="tight"),
        pytest.param(True, TIGHT | {"memory_bytes": 0}, id="tight disk"),
    ],
)
def test_a_store_is_a_set_of_prompts(
    tmp_path: Path, tight: bool, options: dict[str, Any]
) -> None:
    """Whatever happens in whatever order, a match is the longest common prefix with
    what was inserted and not deleted, and each of its rows is the right one."""
    seed = os.environ.get("PROMPTSTORE_SEED", "1")
    print(f"PROMPTSTORE_SEED={seed}")
    driver = Driver(tmp_path / "store", f"{seed} {tight} {options}", tight, options)
    try:
        for _ in range(150):
            driver.step()
        driver.flush()
        assert driver.store.check() == []
    finally:
        with contextlib.suppress(WriteFailed):
            driver.store.close()
