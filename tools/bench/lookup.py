"""Long prompts: bytes of the memory tier's index, time to find a prefix."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, LRUPromptCache, PromptTrie

from bench.common import Laps, Options, Row, at_most, fact, new_root
from promptstore import Namespace, PromptStore
from promptstore.radix import RadixTree
from promptstore.tokens import as_tokens

N_ENTRIES = 10
N_VOCABULARY = 150_000
NAMESPACE = Namespace(model="bench")


def tiny_cache(n_tokens: int) -> list[Any]:
    """Return a live cache of 32 bytes a token: one layer, one head of 8, float16."""
    layer = KVCache()
    layer.keys, layer.values = (mx.zeros((1, 1, n_tokens, 8), mx.float16),) * 2
    layer.offset = n_tokens
    mx.eval(layer.keys)
    return [layer]


def random_prompts(
    rng: np.random.Generator, n_prompts: int, n_tokens: int, n_shared: int = 0
) -> list[list[int]]:
    """Return lists of ints that share their first *n_shared* tokens, and no more."""
    ids = rng.integers(0, N_VOCABULARY, (n_prompts, n_tokens))
    ids[:, :n_shared] = ids[0, :n_shared]
    prompts: list[list[int]] = ids.tolist()
    return prompts


# ---- memory_index_bytes_per_token


def memory_index_bytes_per_token(options: Options) -> list[Row]:
    """Count what the memory tier keeps for each cached token besides its KV.

    All Python and numpy memory (tracemalloc) that inserts into a store without disk
    leave behind; KV lies in mlx buffers and is not seen by it. Beside it the radix
    tree alone, and mlx-lm's ``PromptTrie`` with fewer tokens.
    """
    n_tokens = 4096 if options.quick else 131_072
    n_trie = n_tokens // 4
    rng = np.random.default_rng(1)
    apart = random_prompts(rng, N_ENTRIES, n_tokens)
    shared = random_prompts(rng, N_ENTRIES, n_tokens, n_tokens * 3 // 4)
    n_unique = n_tokens * 3 // 4 + N_ENTRIES * (n_tokens - n_tokens * 3 // 4)
    total = N_ENTRIES * n_tokens
    tier = _left_behind(lambda: _tier_of(apart)) / total
    tier_shared = _left_behind(lambda: _tier_of(shared)) / n_unique
    tree = _left_behind(lambda: _tree_of(apart)) / total
    trie = _left_behind(lambda: _trie_of([apart[0][:n_trie]])) / n_trie
    name, size = "memory_index_bytes_per_token", f"{N_ENTRIES} x {n_tokens:,} tokens"
    return [
        at_most(
            name,
            tier,
            12,
            f"all that the store keeps besides KV, {size}; mlx-lm's trie {trie:.0f} B",
            "B",
        ),
        fact(
            f"{name}.shared",
            tier_shared,
            "the same for each different token, prompts sharing 75 %",
            "B",
        ),
        fact(f"{name}.tree", tree, f"RadixTree alone, {size}", "B"),
        fact(f"{name}.mlx_lm", trie, f"PromptTrie, {n_trie:,} tokens", "B"),
    ]


def _left_behind(make: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del made
    return nbytes


def _tier_of(prompts: list[list[int]]) -> PromptStore:
    store = PromptStore.open(disk_bytes=0)
    for prompt in prompts:
        store.insert(NAMESPACE, prompt, tiny_cache(len(prompt)))
    assert store.stats().n_entries == len(prompts)
    return store


def _tree_of(prompts: list[list[int]]) -> RadixTree[int]:
    tree: RadixTree[int] = RadixTree()
    for index, prompt in enumerate(prompts):
        tree.set(as_tokens(prompt), index)
    return tree


def _trie_of(prompts: list[list[int]]) -> PromptTrie:
    trie = PromptTrie()
    for prompt in prompts:
        trie.add("bench", prompt, 0)
    return trie


# ---- match_131072


def match_131072(options: Options) -> list[Row]:
    """Time to find the longest stored prefix of a prompt that parts at 90 %.

    Ten different prompts are stored; the request is a Python list of ints that
    shares 90 % of one of them. `PromptStore.explain` is a match without its restore:
    on a store of memory alone, of disk alone, and of both (where a match looks into
    both). Against them ``LRUPromptCache``: its search alone, also in turn.
    """
    n_tokens = 8192 if options.quick else 131_072
    rng = np.random.default_rng(2)
    prompts = random_prompts(rng, N_ENTRIES, n_tokens)
    n_shared = n_tokens * 9 // 10
    query = prompts[4][:n_shared] + random_prompts(rng, 1, n_tokens - n_shared)[0]
    lru = LRUPromptCache(max_size=N_ENTRIES)
    for prompt in prompts:
        lru.insert_cache("bench", prompt, tiny_cache(len(prompt)))
    with ExitStack() as stack:
        root = stack.enter_context(new_root(options))
        both = stack.enter_context(PromptStore.open(root))
        for prompt in prompts:
            both.insert(NAMESPACE, prompt, tiny_cache(len(prompt)))
        both.flush()
        disk = stack.enter_context(PromptStore.open(root, memory_bytes=0))
        memory = stack.enter_context(PromptStore.open(disk_bytes=0))
        for prompt in prompts:
            memory.insert(NAMESPACE, prompt, tiny_cache(len(prompt)))
        assert memory.explain(NAMESPACE, query).n_memory == n_shared
        assert disk.explain(NAMESPACE, query).n_disk == n_shared
        assert disk.match(NAMESPACE, query).n_tokens == n_shared
        trie: Any = lru._trie
        assert trie.search("bench", query).common_prefix == n_shared
        request = query.copy()
        ids = as_tokens(query)

        def fresh(_: str) -> None:
            # mlx-lm's search walks through 350 MB of dicts and leaves all else cold.
            request[:] = ids.tolist()

        laps = Laps(
            {
                "memory": lambda: memory.explain(NAMESPACE, request),
                "disk": lambda: disk.explain(NAMESPACE, request),
                "both": lambda: both.explain(NAMESPACE, request),
                "whole": lambda: disk.match(NAMESPACE, request),
                "tokens": lambda: as_tokens(request),
                "mlx_lm": lambda: trie.search("bench", request),
            },
            5 if options.quick else 21,
            n_warm=3,
            before=fresh,
        )

    def row(variant: str) -> Row:
        note = (
            f"store of {variant}; {laps.ratio(variant, 'tokens'):.1f} x the mere list "
            f"to array ({laps.median_ms('tokens'):.2f} ms); mlx-lm's search takes "
            f"{laps.ratio('mlx_lm', variant):.0f} x as long"
        )
        return at_most(
            f"match_131072.{variant}", laps.median_ms(variant), 3, note, "ms"
        )

    return [
        row("memory"),
        row("disk"),
        row("both"),
        fact(
            "match_131072.with_restore",
            laps.median_ms("whole"),
            f"match from disk with its restore of {32 * n_shared >> 10:,} KiB",
            "ms",
        ),
        fact(
            "match_131072.mlx_lm",
            laps.median_ms("mlx_lm"),
            "LRUPromptCache's search",
            "ms",
        ),
    ]
