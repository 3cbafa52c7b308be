"""A radix tree over token ids: for each stored sequence one value.

Edges are arrays of 4 bytes an id where ids fit, and a search is a few array
comparisons. Knows nothing of caches. Not thread-safe: the owner locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from promptstore.tokens import Tokens, compact, n_common

V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Node(Generic[V]):
    edge: Tokens
    parent: _Node[V] | None
    value: V | None = None
    children: dict[int, _Node[V]] = field(default_factory=dict)


class RadixTree(Generic[V]):
    """Values by token sequence, and the longest shared prefix of a query."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(np.empty(0, np.int64), None)

    def __bool__(self) -> bool:
        """Whether anything is stored."""
        return self._root.value is not None or bool(self._root.children)

    def get(self, tokens: Tokens) -> V | None:
        """Return the value stored under exactly *tokens*."""
        node, depth, inside = self._walk(tokens)
        return node.value if depth == len(tokens) and inside == len(node.edge) else None

    def set(self, tokens: Tokens, value: V) -> None:
        """Store *value* under *tokens*; the tree keeps copies of the ids."""
        node, depth, inside = self._walk(tokens)
        if inside < len(node.edge):
            node = self._split(node, inside)
        if depth < len(tokens):
            leaf = _Node(compact(tokens[depth:]), node)
            node.children[int(tokens[depth])] = leaf
            node = leaf
        node.value = value

    def remove(self, tokens: Tokens) -> None:
        """Forget what is stored under exactly *tokens*, if anything is."""
        node, depth, inside = self._walk(tokens)
        if depth < len(tokens) or inside < len(node.edge):
            return
        node.value = None
        self._prune(node)

    def prefixes(self, tokens: Tokens) -> list[tuple[int, V]]:
        """Return ``(n_tokens, value)`` of each stored prefix, shortest first."""
        node, _, inside = self._walk(tokens)
        at: _Node[V] | None = node if inside == len(node.edge) else node.parent
        path = []
        while at is not None:
            path.append(at)
            at = at.parent
        found, depth = [], 0
        for step in reversed(path):
            depth += len(step.edge)
            if step.value is not None:
                found.append((depth, step.value))
        return found

    def longest(self, tokens: Tokens) -> tuple[int, Iterator[V]]:
        """Return how many tokens any stored sequence shares, and which ones do.

        The values are those of the sequences that run through the deepest shared
        position; one that ends there comes first.
        """
        node, depth, _ = self._walk(tokens)
        return depth, self._values(node) if depth else iter(())

    def has_branches(self, tokens: Tokens) -> bool:
        """Whether other stored sequences continue *tokens*."""
        node, depth, inside = self._walk(tokens)
        if depth < len(tokens):
            return False
        return inside < len(node.edge) or bool(node.children)

    def _walk(self, tokens: Tokens) -> tuple[_Node[V], int, int]:
        """Return the deepest node that shares tokens, the depth, and how far the
        depth reaches into that node's edge."""
        node, depth, inside = self._root, 0, 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            inside = n_common(child.edge, tokens[depth:])
            node, depth = child, depth + inside
            if inside < len(child.edge):
                break
        return node, depth, inside

    def _split(self, node: _Node[V], at: int) -> _Node[V]:
        assert node.parent is not None
        upper: _Node[V] = _Node(node.edge[:at].copy(), node.parent)
        node.parent.children[int(upper.edge[0])] = upper
        node.edge = node.edge[at:].copy()
        node.parent = upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _prune(self, node: _Node[V]) -> None:
        """Drop nodes without a value: leaves go, an only child is merged."""
        while node.parent is not None and node.value is None:
            parent = node.parent
            if len(node.children) > 1:
                return
            first = int(node.edge[0])
            if node.children:
                (child,) = node.children.values()
                child.edge = np.concatenate([node.edge, child.edge])
                child.parent = parent
                parent.children[first] = child
                return
            del parent.children[first]
            node = parent

    def _values(self, node: _Node[V]) -> Iterator[V]:
        stack = [node]
        while stack:
            node = stack.pop()
            if node.value is not None:
                yield node.value
            stack.extend(node.children.values())
