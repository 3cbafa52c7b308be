"""A small universe of prompts for tests in which several processes share a root.

Imports everything that a store needs and evaluates nothing: a process that has only
imported this can fork children that use mlx.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builders
import mlx.core as mx
import promptstore.migrations.migrations  # noqa: F401
import psutil  # noqa: F401  a store imports these when it needs them
import sqlite_utils  # noqa: F401
from mlx_lm.models.cache import ArraysCache

from promptstore import Match, Namespace, PromptStore, codecs, n_cached

KINDS = ("full", "window", "state")
TURNS = (70, 110, 310)
BRANCH = 90, 130  # where a turn of its own leaves the conversation, and its end
WINDOW = 64
_ROWS: Any = {"n_kv_heads": 1, "head_dim": 8}


@dataclass(frozen=True)
class Prompt:
    """One prompt, which its kind and its ids tell from all others."""

    kind: str
    ids: tuple[int, ...]

    @property
    def namespace(self) -> Namespace:
        """A namespace of its kind."""
        return Namespace(self.kind)

    @property
    def label(self) -> str:
        """A label of its own."""
        return f"{self.kind} {self.ids[0]} {len(self.ids)} {self.ids[-1]}"

    def insert(self, store: PromptStore, **options: Any) -> None:
        """Insert it into a store."""
        cache = cache_of(self.kind, self.ids)
        store.insert(self.namespace, self.ids, cache, **options)

    def match(self, store: PromptStore) -> Match:
        """Match it with one more token; whatever is served must be right."""
        match = store.match(self.namespace, [*self.ids, 0])
        require_right(self, match)
        return match

    def is_served(self, store: PromptStore) -> bool:
        """Whether a store serves all of it."""
        return self.match(store).n_tokens == len(self.ids)


def conversation(kind: str, seed: int) -> list[Prompt]:
    """Return prompts that continue each other, and one that branches off."""
    ids = (seed, *builders.tokens(TURNS[-1] - 1, seed))
    at, end = BRANCH
    branch = (*ids[:at], 999, *builders.tokens(end - at - 1, seed + 1))
    return [*(Prompt(kind, ids[:n]) for n in TURNS), Prompt(kind, branch)]


def universe(seed: int, n_conversations: int = 2) -> list[Prompt]:
    """Return conversations of each kind."""
    rng = random.Random(seed)
    return [
        prompt
        for kind in KINDS
        for _ in range(n_conversations)
        for prompt in conversation(kind, rng.randrange(1, builders.VOCABULARY - 1))
    ]


def cache_of(kind: str, ids: Sequence[int]) -> list[Any]:
    """Return a cache of *ids*, every value of which tells the ids up to its own."""
    cache: list[Any] = list(builders.kv_of(ids, n_layers=1, **_ROWS))
    if kind == "window":
        # A last token by itself leaves the ring no more rows than the window.
        steps = int(len(ids) > WINDOW)
        cache += builders.rotating(
            len(ids), WINDOW, n_layers=1, steps=steps, ids=ids, **_ROWS
        )
    elif kind == "state":
        cache.append(_state_of(ids))
    return cache


def require_right(prompt: Prompt, match: Match) -> None:
    """Raise AssertionError unless a match is a miss or the KV of a prefix of *prompt*.

    The message names the prompt; nothing else of a killed process is left to ask.
    """
    if match.cache is None:
        assert (match.n_tokens, match.source) == (0, "miss"), (prompt, match)
        return
    n = match.n_tokens
    assert 0 < n <= len(prompt.ids), (prompt, match)
    assert n_cached(match.cache) == n, (prompt, match)
    expected = cache_of(prompt.kind, prompt.ids[:n])
    assert [type(x) for x in match.cache] == [type(x) for x in expected], prompt
    assert _content(match.cache, n) == _content(expected, n), f"wrong: {prompt}[:{n}]"


def _content(cache: Sequence[Any], n_tokens: int) -> list[Any]:
    """Return all values of a cache, the rows in the order of their tokens."""
    found: list[Any] = []
    for leaf in codecs.take_apart(cache, n_tokens):
        for array in leaf.arrays:
            runs = sorted(leaf.runs)
            rows = [array[:, :, r.slot : r.slot + r.hi - r.lo] for r in runs]
            found.append((runs[0].lo, mx.concatenate(rows, axis=2)))
        found += sorted(leaf.state.items())
    return [(name, str(a.dtype), a.shape, a.tolist()) for name, a in found]


def _state_of(ids: Sequence[int]) -> ArraysCache:
    layer = ArraysCache(2)
    mixed = int(builders.values(len(ids) - 1, len(ids), layer=0, part=0, ids=ids).sum())
    for slot in range(2):
        digits = [ids[-1] % 128, ids[-1] // 128, len(ids) % 128, mixed, slot]
        layer[slot] = mx.array([[digits]]).astype(mx.float32)
    mx.eval(layer.cache)
    return layer


class Acks:
    """The prompts that processes say are durable, in a file that no kill can tear.

    Args:
        path: The file, outside of the root.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, *prompts: Prompt) -> None:
        """Note prompts that a flush has acknowledged."""
        lines = "".join(f"{prompt.label}\n" for prompt in prompts)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, lines.encode())
        os.close(fd)

    def of(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return those of *prompts* that were acknowledged."""
        text = self._path.read_text() if self._path.exists() else ""
        labels = set(text.splitlines())
        return [prompt for prompt in prompts if prompt.label in labels]
