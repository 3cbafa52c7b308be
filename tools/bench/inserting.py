"""What an insert writes and copies, and what its durability costs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from bench.common import (
    Laps,
    Options,
    Row,
    at_most,
    fact,
    new_root,
    peak_growth,
    random_arrays,
    random_cache,
    state_nbytes,
    update,
)
from promptstore import Namespace, PromptStore

N_LAYERS, N_HEADS, HEAD_DIM = 8, 4, 64
NAMESPACE = Namespace(model="bench")
MAX_OVERHEAD = 16 << 10


class Conversation:
    """A conversation whose tokens are all stored, and the caller's live cache of it.

    Nobody else holds that cache: who does makes every update copy it.
    """

    def __init__(self, store: PromptStore, n_tokens: int) -> None:
        rng = np.random.default_rng(3)
        self.store = store
        self.tokens = list(range(n_tokens))
        self.cache = random_cache(rng, N_LAYERS, N_HEADS, n_tokens, HEAD_DIM)
        self.row = random_arrays(rng, N_HEADS, 1, HEAD_DIM, 2 * N_LAYERS)
        self.nbytes = state_nbytes(self.cache)
        self.save()

    def say(self) -> None:
        """Append one token to the caller's live cache."""
        update(self.cache, self.row)
        self.tokens.append(len(self.tokens))

    def save(self) -> None:
        """Insert everything and wait until it is durable."""
        self.store.insert(NAMESPACE, self.tokens, self.cache)
        self.store.flush()

    def turn(self) -> None:
        """Do as a server does: drop the cache, match, append one token, insert."""
        self.cache.clear()
        self.tokens.append(len(self.tokens))
        match = self.store.match(NAMESPACE, self.tokens)
        assert match.cache is not None
        assert match.n_tokens == len(self.tokens) - 1
        self.cache = match.cache
        update(self.cache, self.row)
        self.save()


def insert_one_token(options: Options) -> list[Row]:
    """Compare what an insert of one new token costs with the whole conversation.

    20,000 tokens are stored (write-through, flushed), one more is appended to the
    live cache: bytes written, and by how much memory peaks until it is durable.
    Besides: the peak of the caller's own next update, which has to copy buffers that
    the store shares; and of the turns of a server.
    """
    n_tokens = 2000 if options.quick else 20_000
    with _conversation(options, n_tokens, memory_bytes=8 << 30) as talk:
        talk.say()
        written, on_disk = _written(talk), talk.store.stats().disk_bytes
        growth = peak_growth(talk.save) / talk.nbytes
        n_written = _written(talk) - written
        on_disk = talk.store.stats().disk_bytes - on_disk
        after = peak_growth(talk.say) / talk.nbytes
        talk.save()
        turn = peak_growth(talk.turn) / talk.nbytes
    with _conversation(options, n_tokens, memory_bytes=0) as talk:
        talk.say()
        growth_0 = peak_growth(talk.save) / talk.nbytes
        after_0 = peak_growth(talk.say) / talk.nbytes
    name, state = "insert_one_token", f"of the state's {talk.nbytes >> 20} MiB"
    token = talk.nbytes // n_tokens
    return [
        at_most(
            f"{name}.written",
            n_written,
            MAX_OVERHEAD + token,
            f"bytes of its snapshot, {token:,} of them KV; everything under the root "
            f"grew by {on_disk:,}",
            "B",
        ),
        at_most(f"{name}.peak", 100 * growth, 2, f"memory growth, {state}", "%"),
        at_most(
            f"{name}.peak_no_memory_tier",
            100 * growth_0,
            2,
            f"the same with memory_bytes=0, {state}",
            "%",
        ),
        fact(
            f"{name}.next_update",
            100 * after,
            "memory growth of the caller's next update of the same live cache",
            "%",
        ),
        fact(
            f"{name}.next_update_no_memory_tier",
            100 * after_0,
            "the same with memory_bytes=0",
            "%",
        ),
        fact(
            f"{name}.turn",
            100 * turn,
            "memory growth of match, update and insert, the caller's cache dropped",
            "%",
        ),
    ]


def durability(options: Options) -> list[Row]:
    """Compare durable inserts of 300 new tokens, by what they survive.

    ``normal``: a crash of the process; ``full``: a power cut as well.
    """
    n_tokens, n_laps = 300, 5 if options.quick else 31
    rng = np.random.default_rng(4)
    cache = random_cache(rng, N_LAYERS, N_HEADS, n_tokens, HEAD_DIM)
    count = itertools.count()

    def save(store: PromptStore) -> None:
        store.insert(NAMESPACE, [next(count), *range(1, n_tokens)], cache)
        store.flush()

    with ExitStack() as stack:
        stores = {
            level: stack.enter_context(
                PromptStore.open(
                    stack.enter_context(new_root(options)),
                    memory_bytes=0,
                    durability=level,
                )
            )
            for level in ("normal", "full")
        }
        laps = Laps(
            {name: functools.partial(save, store) for name, store in stores.items()},
            n_laps,
        )
    return [
        fact(
            "durability.full",
            laps.ratio("full", "normal"),
            f"insert + flush to durability normal: {laps.versus('full', 'normal')}",
        )
    ]


def _written(talk: Conversation) -> int:
    return talk.store.stats().bytes_written


@contextmanager
def _conversation(
    options: Options, n_tokens: int, *, memory_bytes: int
) -> Iterator[Conversation]:
    with (
        new_root(options) as root,
        PromptStore.open(root, memory_bytes=memory_bytes) as store,
    ):
        yield Conversation(store, n_tokens)
