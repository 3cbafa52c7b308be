"""Facts about the radix tree, which is compared with a plain dict."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from promptstore.radix import RadixTree
from promptstore.tokens import Tokens

IMAGE = -855241551491862571

Key = tuple[int, ...]


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int64)


def tree_of(*keys: Key) -> RadixTree[Key]:
    tree: RadixTree[Key] = RadixTree()
    for key in keys:
        tree.set(ids(*key), key)
    return tree


def nodes(tree: RadixTree[Any]) -> Iterator[Any]:
    stack = [tree._root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def assert_tidy(tree: RadixTree[Any]) -> None:
    """Nodes know their parents, and none is there without need."""
    for node in nodes(tree):
        for first, child in node.children.items():
            assert child.parent is node
            assert first == child.edge[0]
        if node.parent is not None:
            assert len(node.edge) > 0
            assert node.value is not None or len(node.children) > 1
            assert node.edge.base is None  # a view would keep a whole prompt alive


def test_an_empty_tree_finds_nothing() -> None:
    """Nothing is stored, shared or continued in a new tree."""
    tree = tree_of()
    assert not tree
    for query in (ids(), ids(1, 2)):
        assert tree.get(query) is None
        assert tree.prefixes(query) == []
        assert tree.longest(query)[0] == 0
        assert list(tree.longest(query)[1]) == []
        assert not tree.has_branches(query)


def test_get_is_exact() -> None:
    """Neither a prefix nor a continuation of a stored sequence has its value."""
    tree = tree_of((1, 2, 3))
    assert tree
    assert tree.get(ids(1, 2, 3)) == (1, 2, 3)
    for other in ((), (1,), (1, 2), (1, 2, 3, 4), (1, 2, 4), (2, 2, 3)):
        assert tree.get(ids(*other)) is None


def test_set_again_replaces_the_value() -> None:
    """A sequence has one value, the last that was set."""
    tree: RadixTree[str] = RadixTree()
    tree.set(ids(1, 2), "old")
    tree.set(ids(1, 2), "new")
    assert tree.get(ids(1, 2)) == "new"
    assert [value for _, value in tree.prefixes(ids(1, 2))] == ["new"]


def test_a_sequence_may_end_inside_an_edge() -> None:
    """Storing a prefix of a stored sequence keeps both, in either order."""
    for keys in (((1, 2, 3, 4), (1, 2)), ((1, 2), (1, 2, 3, 4))):
        tree = tree_of(*keys)
        assert tree.prefixes(ids(1, 2, 3, 4, 5)) == [(2, (1, 2)), (4, (1, 2, 3, 4))]
        assert_tidy(tree)


def test_the_empty_sequence_is_a_sequence() -> None:
    """It can be stored, is a prefix of everything, and can be removed."""
    tree = tree_of((), (1,))
    assert tree.get(ids()) == ()
    assert tree.prefixes(ids(1)) == [(0, ()), (1, (1,))]
    tree.remove(ids())
    assert tree.prefixes(ids(1)) == [(1, (1,))]


def test_longest_tells_who_shares_the_deepest_position() -> None:
    """Values come from the sequences that run through it, one that ends there first."""
    tree = tree_of((1, 2, 3, 4), (1, 2, 3, 5), (1, 9), (1, 2, 3))
    n_tokens, found = tree.longest(ids(1, 2, 3, 7))
    first, *rest = found
    assert (n_tokens, first) == (3, (1, 2, 3))
    assert sorted(rest) == [(1, 2, 3, 4), (1, 2, 3, 5)]
    n_tokens, found = tree.longest(ids(1, 2))
    assert n_tokens == 2
    assert sorted(found) == [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5)]
    n_tokens, found = tree.longest(ids(7))
    assert (n_tokens, list(found)) == (0, [])


def test_has_branches_tells_what_continues_a_sequence() -> None:
    """Only a longer stored sequence is a branch, not the sequence itself."""
    tree = tree_of((1, 2, 3), (1, 2, 4, 5))
    assert tree.has_branches(ids(1))
    assert tree.has_branches(ids(1, 2))
    assert not tree.has_branches(ids(1, 2, 3))
    assert tree.has_branches(ids(1, 2, 4))
    assert not tree.has_branches(ids(1, 2, 4, 5))
    assert not tree.has_branches(ids(1, 2, 9))


def test_remove_of_what_is_not_stored_changes_nothing() -> None:
    """Removing a prefix, a continuation or a stranger is no error."""
    tree = tree_of((1, 2, 3), (1, 2, 4))
    for other in ((), (1,), (1, 2), (1, 2, 3, 4), (9,)):
        tree.remove(ids(*other))
    assert tree.get(ids(1, 2, 3)) == (1, 2, 3)
    assert tree.get(ids(1, 2, 4)) == (1, 2, 4)
    assert_tidy(tree)


def test_removing_everything_leaves_nothing() -> None:
    """A tree from which all was removed has no node but its root."""
    keys = [(1, 2, 3), (1, 2, 4), (1,), (1, 2, 3, 9), (5,)]
    tree = tree_of(*keys)
    for key in keys:
        tree.remove(ids(*key))
        assert_tidy(tree)
    assert not tree
    assert len(list(nodes(tree))) == 1


def test_the_tree_keeps_ids_of_its_own() -> None:
    """Changing an array that was stored changes nothing in the tree."""
    key = ids(1, 2, 3)
    tree: RadixTree[str] = RadixTree()
    tree.set(key, "value")
    key[:] = 9
    assert tree.get(ids(1, 2, 3)) == "value"
    assert tree.get(ids(9, 9, 9)) is None


def test_ids_of_more_than_32_bits_are_kept_apart() -> None:
    """Ids that are equal in their low 32 bits lead to different values."""
    tree = tree_of((1, IMAGE, 2), (1, IMAGE & 0xFFFFFFFF, 2), (1, 2**32 + 5), (1, 5))
    for key in ((1, IMAGE, 2), (1, IMAGE & 0xFFFFFFFF, 2), (1, 2**32 + 5), (1, 5)):
        assert key == tree.get(ids(*key))
    assert tree.longest(ids(1, IMAGE, 3))[0] == 2


def n_common(a: Key, b: Key) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def assert_equal(tree: RadixTree[int], model: dict[Key, int], query: Key) -> None:
    """Everything that can be asked of the tree is what the dict says."""
    assert model.get(query) == tree.get(ids(*query))
    prefixes = [(n, model[query[:n]]) for n in range(len(query) + 1)
                if query[:n] in model]  # fmt: skip
    assert prefixes == tree.prefixes(ids(*query))
    n_shared = max((n_common(key, query) for key in model), default=0)
    actual, found = tree.longest(ids(*query))
    assert n_shared == actual
    runs = [v for k, v in model.items() if n_common(k, query) == n_shared > 0]
    assert sorted(runs) == sorted(found)
    longer = any(len(k) > len(query) == n_common(k, query) for k in model)
    assert longer == tree.has_branches(ids(*query))


@pytest.mark.parametrize("n_ids", [2, 3])
def test_random_operations_agree_with_a_dict(n_ids: int) -> None:
    """After any sets and removals the tree says what a dict of tuples says."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", "20240607")) + n_ids
    print(f"PROMPTSTORE_SEED={seed - n_ids}")
    rng = random.Random(seed)

    def key() -> Key:
        return tuple(rng.randrange(n_ids) for _ in range(rng.randrange(8)))

    tree: RadixTree[int] = RadixTree()
    model: dict[Key, int] = {}
    for step in range(3000):
        fill = 0.7 if step // 500 % 2 == 0 else 0.3
        if rng.random() < fill:
            stored = key()
            tree.set(ids(*stored), step)
            model[stored] = step
        elif model:
            gone = rng.choice([key(), *list(model)[:2]])
            tree.remove(ids(*gone))
            model.pop(gone, None)
        assert_equal(tree, model, key())
        if step % 100 == 0:
            assert_tidy(tree)
    assert bool(model) == bool(tree)


def size_of(tree: RadixTree[Any]) -> int:
    return sum(
        sys.getsizeof(node) + sys.getsizeof(node.edge) + sys.getsizeof(node.children)
        for node in nodes(tree)
    )


@pytest.mark.parametrize(
    ("n_prompts", "n_each", "n_head"), [(1, 100_000, 0), (100, 990, 1_000)]
)
def test_a_cached_token_costs_at_most_12_bytes(
    n_prompts: int, n_each: int, n_head: int
) -> None:
    """100,000 unique tokens, of one prompt or of many with one head, take 8 to 12."""
    rng = np.random.default_rng(3)
    head = rng.integers(0, 150_000, n_head)
    tree: RadixTree[int] = RadixTree()
    for number in range(n_prompts):
        tree.set(np.concatenate([head, rng.integers(0, 150_000, n_each)]), number)
    n_unique = n_head + n_prompts * n_each
    assert n_unique == 100_000
    assert size_of(tree) / n_unique <= 12


def test_a_long_conversation_costs_at_most_12_bytes_a_token() -> None:
    """So do 100,000 tokens that came turn by turn, 400 at a time."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 150_000, 100_000)
    tree: RadixTree[int] = RadixTree()
    for end in range(400, len(tokens) + 1, 400):
        tree.set(tokens[:end], end)
    assert size_of(tree) / len(tokens) <= 12
    for end in range(400, len(tokens), 400):
        tree.remove(tokens[:end])
    assert size_of(tree) / len(tokens) <= 8.1
