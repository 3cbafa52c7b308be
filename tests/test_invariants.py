"""The invariants of the design, section 4, each by its number."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from builders import (
    attended,
    concatenated,
    cut_to,
    kv,
    kv_of,
    prefill,
    prints,
    quantized,
    tiny_model,
    tokens,
)
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from promptstore import (
    Match,
    Namespace,
    PromptStore,
    StoreClosed,
    TooLarge,
    WriteFailed,
    n_cached,
    prefix,
    snapshot,
)
from promptstore.index import Index

NS = Namespace("tiny")
WAIT_S = 30
TIERS = ["memory", "disk"]


class Open(Protocol):
    """Opens the test's store."""

    def __call__(self, **options: Any) -> PromptStore: ...


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "store"


@pytest.fixture
def open_store(root: Path) -> Iterator[Open]:
    """Open stores that are flushed, checked and closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_(**options: Any) -> PromptStore:
            store = PromptStore.open(root, **{"min_tokens": 0, **options})
            stack.callback(finish, store)
            return store

        yield open_


def finish(store: PromptStore) -> None:
    """Close a store, which must be whole on disk."""
    try:
        with contextlib.suppress(WriteFailed):
            store.flush()
        assert [each for each in store.check() if each.kind != "foreign"] == []
    except StoreClosed:
        return
    finally:
        store.close()


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    """The tier that serves."""
    return str(request.param)


@pytest.fixture
def store(open_store: Open, tier: str) -> PromptStore:
    """A store that serves from one tier; not the shared fixture, which has both."""
    if tier == "memory":
        return open_store(write="off")
    return open_store(memory_bytes=0)


def put(store: PromptStore, ids: Sequence[int], cache: Any, **options: Any) -> int:
    """Insert and wait until it is where it will stay."""
    n_tokens = store.insert(NS, ids, cache, **options)
    store.flush()
    return n_tokens


def cold(ids: Sequence[int]) -> mx.array:
    """Return the logits behind a prompt, computed from nothing."""
    return prefill(tiny_model(), ids)[1]


@functools.cache
def prefilled(n: int) -> list[Any]:
    """Return the KV of the first tokens of the one prompt; insert leaves it alone."""
    return prefill(tiny_model(), tokens(n))[0]


def passes(match: Match, ids: Sequence[int]) -> bool:
    """The reference check: prefill the rest and compare with a cold prefill."""
    _, logits = prefill(tiny_model(), ids[match.n_tokens :], match.cache)
    return mx.abs(logits - cold(ids)).max().item() < 1e-4


# ------------------------------------------------------------- 1: the right logits


@pytest.mark.parametrize(
    "n_shared", [1, 2, 100, 255, 256, 257, 299, 300, 511, 512, 513, 599, 600]
)
def test_invariant_1_a_match_continues_like_a_cold_prefill(
    store: PromptStore, tier: str, n_shared: int
) -> None:
    """At any position, inside a snapshot, a block or a chain, the reference check
    passes."""
    ids = tokens(600)
    for n in (300, 512, 600):
        put(store, ids[:n], prefilled(n))
    asked = [*ids[:n_shared], 999, 2, 3]
    match = store.match(NS, asked)
    assert (match.n_tokens, match.source) == (n_shared, tier)
    assert n_cached(match.cache or []) == n_shared
    assert passes(match, asked)


def test_invariant_1_bit_equal_where_the_steps_are_equal(
    store: PromptStore, tier: str
) -> None:
    """A conversation through the store equals one in a live cache, bit for bit."""
    model, live, ids = tiny_model(), make_prompt_cache(tiny_model()), []
    for turn in range(6):
        new = tokens(50 + 40 * turn, seed=turn)
        ids += new
        match = store.match(NS, [*ids, 0])
        assert match.n_tokens == len(ids) - len(new)
        cache, logits = prefill(model, new, match.cache)
        live, reference = prefill(model, new, live)
        assert mx.array_equal(logits, reference)
        assert prints(cache) == prints(live)
        put(store, ids, cache)


# -------------------------------------------------------- 2: a token left to prefill


@pytest.mark.parametrize("n", [2, 3, 255, 256, 257, 400])
def test_invariant_2_one_token_is_left(
    store: PromptStore, open_store: Open, tier: str, n: int
) -> None:
    """A repeat, and the head of a longer prompt, leave the last token (K01)."""
    ids = tokens(400)
    put(store, ids, prefill(tiny_model(), ids)[0], kind="system")
    for _ in range(2):
        match = store.match(NS, ids[:n])
        assert (match.n_tokens, match.reason) == (n - 1, None)
        assert passes(match, ids[:n])
        if tier == "disk":
            store = open_store(memory_bytes=0)


def test_invariant_2_nothing_is_left_of_one_token(store: PromptStore) -> None:
    """A prompt of one token is a miss, though it is stored."""
    put(store, [7], kv_of([7]))
    put(store, [7, 8], kv_of([7, 8]))
    for ids in ([7], []):
        assert store.match(NS, ids).cache is None


class Uncuttable(KVCache):  # type: ignore[misc]
    """Of a class that the store does not know how to cut."""


def test_invariant_2_what_cannot_be_cut_is_not_replayed(open_store: Open) -> None:
    """A repeat is served from a shorter entry or not at all (W13)."""
    store, ids = open_store(), tokens(100)
    for n in (60, 100):
        cache = [Uncuttable() for _ in tiny_model().layers]
        prefill(tiny_model(), ids[:n], cache)
        store.insert(NS, ids[:n], cache)
    match = store.match(NS, ids)
    assert match.n_tokens == 60
    assert passes(match, ids)
    assert store.match(NS, ids[:60]).cache is None
    match = store.match(NS, [*ids, 1, 2])
    assert match.n_tokens == 100
    assert passes(match, [*ids, 1, 2])


def test_invariant_2_a_repeated_prompt_does_not_drift(store: PromptStore) -> None:
    """Who prefills what is left and inserts the result can do so for ever (W06)."""
    ids = tokens(100)
    logits = []
    for _ in range(4):
        match = store.match(NS, ids)
        cache, last = prefill(tiny_model(), ids[match.n_tokens :], match.cache)
        assert n_cached(cache) == len(ids)
        logits.append(last)
        put(store, ids, cache)
    assert all(mx.abs(each - logits[0]).max().item() < 1e-4 for each in logits)


# --------------------------------------------------------------- 3: nothing is shared


def overwrite(cache: list[Any]) -> None:
    """Write zeros over all that a cache holds, in place."""
    for layer in cache:
        for part in (layer.keys, layer.values):
            for array in part if isinstance(part, tuple) else [part]:
                array[...] = 0
                mx.eval(array)


def decode(cache: list[Any], first: int = 5) -> None:
    """Generate four tokens with a cache."""
    for token in range(first, first + 4):
        prefill(tiny_model(), [token], cache)


HARM: dict[str, Callable[[list[Any]], object]] = {
    "decode": decode,
    "overwrite": overwrite,
    "trim": lambda cache: [layer.trim(30) for layer in cache],
    "trim and decode": lambda cache: ([c.trim(30) for c in cache], decode(cache, 70)),
    "pop": lambda cache: cache.pop(),
    "append": lambda cache: cache.append(KVCache()),
    "swap": lambda cache: cache.reverse(),
}


@pytest.mark.parametrize("harm", HARM)
def test_invariant_3_what_is_done_after_insert_changes_nothing(
    store: PromptStore, harm: str
) -> None:
    """The caller's cache, its list and the list of tokens remain the caller's (W04)."""
    ids = tokens(100)
    cache, _ = prefill(tiny_model(), ids)
    right, own = prints(cache), list(ids)
    store.insert(NS, own, cache, kind="system")
    HARM[harm](cache)
    own[50:] = [7] * 50
    store.flush()
    match = store.match(NS, [*ids, 1, 2])
    assert match.n_tokens == 100
    assert prints(match.cache or []) == right
    assert passes(match, [*ids, 1, 2])


@pytest.mark.parametrize("harm", HARM)
def test_invariant_3_what_is_done_to_a_match_changes_nothing(
    store: PromptStore, harm: str
) -> None:
    """Two matches of one prompt are two caches, and a third is right (W04)."""
    ids = tokens(100)
    cache, _ = prefill(tiny_model(), ids)
    right = prints(cache)
    put(store, ids, cache, kind="system")
    first, second = (store.match(NS, [*ids, 1, 2]) for _ in range(2))
    assert first.cache is not None
    HARM[harm](first.cache)
    assert prints(second.cache or []) == right
    decode(second.cache or [], 90)
    third = store.match(NS, [*ids, 1, 2])
    assert prints(third.cache or []) == right
    assert passes(third, [*ids, 1, 2])


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("extends", [False, True])
def test_invariant_3_what_is_done_before_the_write_changes_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, harm: str, memory_bytes: int,
    extends: bool,
) -> None:  # fmt: skip
    """A queued prompt is written as it was when it was inserted (W04)."""
    store, ids = open_store(memory_bytes=memory_bytes), tokens(100)
    cache, _ = prefill(tiny_model(), ids)
    if extends:
        put(store, ids[:80], cut_to(cache, 80))
    right = prints(cache)
    gate, real = threading.Event(), snapshot.write

    def write(*args: Any) -> Any:
        assert gate.wait(WAIT_S)
        return real(*args)

    monkeypatch.setattr(snapshot, "write", write)
    store.insert(NS, ids, cache)
    HARM[harm](cache)
    if memory_bytes:
        match = store.match(NS, [*ids, 1])
        assert match.source == "memory"
        HARM[harm](match.cache or [])
    gate.set()
    store.flush()
    store._memory.clear()
    match = store.match(NS, [*ids, 1])
    assert match.source == "disk"
    assert prints(match.cache or []) == right


def test_invariant_3_a_handed_over_tip_is_not_kept(open_store: Open) -> None:
    """What was handed over in memory is served from disk to the next, unharmed."""
    store, ids = open_store(), tokens(100)
    put(store, ids, kv_of(ids))
    first = store.match(NS, [*ids, 1])
    assert first.source == "memory"
    overwrite(first.cache or [])
    second = store.match(NS, [*ids, 1])
    assert second.source == "disk"
    assert prints(second.cache or []) == prints(kv_of(ids))


# -------------------------------------------------------------- 4: tokens are compared


@pytest.mark.parametrize("n", [100, 300, 700])
def test_invariant_4_equal_digests_are_not_enough(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """With a hash that returns a constant, everybody gets their own or nothing, also
    after a restart (W10)."""
    monkeypatch.setattr(prefix, "extend", lambda *_: bytes(16))
    first, second, third = ([number, *tokens(n, seed=number)] for number in range(3))
    head = first[: n // 2]
    store = open_store()
    put(store, first, kv_of(first))
    with contextlib.suppress(WriteFailed):  # nothing, and that is said
        put(store, second, kv_of(second))
    for _ in range(2):
        for ids in (first, second, third, [*head, *third]):
            match = store.match(NS, [*ids, 0])
            if match.cache is not None:
                assert match.n_tokens <= len(ids)
                right = kv_of(ids[: match.n_tokens])
                assert prints(match.cache) == prints(right)
        assert store.match(NS, [*first, 0]).n_tokens == len(first)
        assert store.match(NS, [*head, *third]).n_tokens == len(head)
        assert store.match(NS, third).n_tokens == 0
        store = open_store(memory_bytes=0)


def test_invariant_4_a_label_is_for_tokens_not_for_a_digest(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose digest collides does not give its label to another prompt."""
    monkeypatch.setattr(prefix, "extend", lambda *_: bytes(16))
    store, ids = open_store(memory_bytes=0), tokens(100)
    put(store, ids, kv_of(ids))
    with contextlib.suppress(WriteFailed):
        put(store, ids[:50], kv_of(ids[:50]), label="head", pin=True)
    assert {info.end for info in store.snapshots() if info.label == "head"} <= {50}


# --------------------------------------------------- 5: what the cache really holds


def test_invariant_5_shorter_kv_is_stored_under_what_it_covers(
    store: PromptStore,
) -> None:
    """Half a prefill under the whole prompt's key counts as the half (W05)."""
    ids = tokens(60)
    assert put(store, ids, prefill(tiny_model(), ids[:32])[0]) == 32
    match = store.match(NS, [*ids, 3, 4])
    assert match.n_tokens == 32
    assert passes(match, [*ids, 3, 4])


def test_invariant_5_longer_kv_is_cut(store: PromptStore) -> None:
    """A cache that ran ahead of its key is stored up to the key (W07)."""
    ids = tokens(60)
    cache, _ = prefill(tiny_model(), [*ids, 8, 9])
    assert put(store, ids, cache, kind="system") == 60
    assert n_cached(cache) == 62
    match = store.match(NS, [*ids, 3, 4])
    assert match.n_tokens == 60
    assert passes(match, [*ids, 3, 4])
    assert store.match(NS, [*ids, 8, 9, 1]).n_tokens == 60


def test_invariant_5_layers_that_disagree_hold_what_the_shortest_holds(
    store: PromptStore,
) -> None:
    """One layer behind, as a draft model's may be, cuts them all (W07, W09)."""
    ids = tokens(60)
    cache, _ = prefill(tiny_model(), ids)
    cache[1].trim(3)
    assert put(store, ids, cache) == 57
    match = store.match(NS, [*ids, 3])
    assert match.n_tokens == 57
    assert passes(match, [*ids, 3])
    cache[2].trim(60)
    assert put(store, tokens(60, seed=5), cache) == 0
    empty = [*kv(10, n_layers=1), KVCache()]
    assert put(store, tokens(10, seed=6), empty) == 0


def test_invariant_5_an_offset_that_lies_is_not_believed(store: PromptStore) -> None:
    """A layer cannot hold more tokens than its buffer has rows."""
    ids = tokens(300)
    cache = kv_of(ids)
    for layer in cache:
        layer.keys = mx.contiguous(layer.keys[:, :, :100])
        layer.values = mx.contiguous(layer.values[:, :, :100])
    assert put(store, ids, cache) == 100
    assert store.match(NS, [*ids, 3]).n_tokens == 100


def test_invariant_5_longer_kv_that_cannot_be_cut_is_refused(
    store: PromptStore,
) -> None:
    """It is no trouble with the store but a wrong argument, and says the lengths."""
    cache = [Uncuttable() for _ in tiny_model().layers]
    prefill(tiny_model(), tokens(62), cache)
    with pytest.raises(ValueError, match="holds 62 tokens, tokens has 60"):
        store.insert(NS, tokens(60), cache)
    assert store.match(NS, tokens(60)).n_tokens == 0
    assert store.insert(NS, tokens(70), cache) == 62


# ------------------------------------------------- 6: file before row before unlink


def test_invariant_6_file_before_row(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a row appears, its file is whole, synced and in place, and the row has its
    size and the checksum of every byte."""
    store, synced, real_sync, real_add = open_store(), [], os.fsync, Index.add
    seen = []

    def fsync(fd: int) -> None:
        real_sync(fd)
        synced.append(os.fstat(fd).st_ino)

    def add(self: Index, row: Any) -> int:
        path = root / "snapshots" / row.name[:2] / f"{row.name}.safetensors"
        data = path.read_bytes()
        assert path.stat().st_ino in synced
        assert len(data) == row.nbytes
        n_header = 8 + int.from_bytes(data[:8], "little")
        assert row.checksums[:16] == xxhash.xxh3_128_digest(data[:n_header])
        n_tokens = len(row.tokens) - row.extent.start
        ids = xxhash.xxh3_128_digest(data[-8 * n_tokens :])
        assert row.checksums[-16:] == ids
        n_chunks = -(-n_tokens // 256)
        assert len(row.checksums) == 16 * (1 + n_chunks + 2)  # header, state, tokens
        seen.append(row.name)
        return real_add(self, row)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Index, "add", add)
    for n in (100, 700):
        put(store, tokens(n), kv_of(tokens(n)))
    assert len(seen) == 2


def test_invariant_6_row_before_unlink(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever removes a file, by then no row knows it."""
    store, ids = open_store(memory_bytes=0), tokens(100)
    index, real, unlinked = Index(store._disk.index.path), Path.unlink, []  # type: ignore[union-attr]

    def unlink(self: Path, **options: Any) -> None:
        if self.suffix == ".safetensors":
            assert not index.has(self.stem)
            unlinked.append(self)
        real(self, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    try:
        for remove in (
            lambda: store.delete("x"),
            lambda: store.evict(to_bytes=0),
            lambda: store.match(NS, [*ids, 0]),
        ):
            put(store, ids, kv_of(ids), label="x")
            if len(unlinked) == 2:
                (path,) = store._disk.root.files()  # type: ignore[union-attr]
                os.truncate(path, 100)
            remove()
            store.flush()
        assert len(unlinked) == 3
    finally:
        index.close()


def test_invariant_6_a_snapshot_never_changes(root: Path, open_store: Open) -> None:
    """Extending, labelling, pinning, using: no byte of an existing file changes."""
    store, ids = open_store(memory_bytes=0), tokens(300)
    put(store, ids[:100], kv_of(ids[:100]))
    (path,) = root.rglob("*.safetensors")
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino
    put(store, ids, kv_of(ids))
    put(store, ids[:100], kv_of(ids[:100]), label="x", pin=True, ttl_s=100.0)
    store.match(NS, [*ids, 0])
    store.unpin("x")
    store.repair(store.check())
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before


@pytest.mark.parametrize("step", ["half a file", "before the row"])
def test_invariant_6_a_crash_leaves_an_orphan(
    root: Path, open_store: Open, step: str
) -> None:
    """A process that dies in a save leaves a file without a row, never the reverse."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from builders import kv_of, tokens
from promptstore import Namespace, PromptStore, snapshot
from promptstore.index import Index
store = PromptStore.open(sys.argv[1])
ids = tokens(300)
store.insert(Namespace("tiny"), ids[:100], kv_of(ids[:100]))
store.flush()
def die(fd, *_):
    if isinstance(fd, int):
        os.write(fd, bytes(5000))
    os._exit(9)
if {step == "half a file"}:
    snapshot.write = die
else:
    Index.add = die
store.insert(Namespace("tiny"), ids, kv_of(ids))
store.flush()
"""
    done = subprocess.run([sys.executable, "-c", code, root], check=False, timeout=60)
    assert done.returncode == 9
    store, ids = open_store(memory_bytes=0), tokens(300)
    (orphan,) = store.check()
    assert orphan.kind == "orphan"
    assert store.match(NS, [*ids, 0]).n_tokens == 100
    put(store, ids, kv_of(ids))
    assert store.check() == []
    assert store.match(NS, [*ids, 0]).n_tokens == 300


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_invariant_6_a_write_that_fails_half_way_is_not_visible(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    """No row, no file; a miss, or memory serves; the next insert works (W11)."""
    store, ids, real = open_store(memory_bytes=memory_bytes), tokens(600), os.writev
    calls = []

    def writev(fd: int, views: Any) -> int:
        calls.append(fd)
        if len(calls) >= 2:
            raise OSError(28, "no space left on device")
        return real(fd, views)

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", writev)
        assert store.insert(NS, ids, kv_of(ids)) == 600
        with pytest.raises(WriteFailed, match="no space"):
            store.flush()
    assert list(root.rglob("*.safetensors")) == list(root.rglob("*.tmp")) == []
    assert list(store.snapshots()) == []
    source = "memory" if memory_bytes else "miss"
    assert store.match(NS, [*ids, 0]).source == source
    put(store, ids, kv_of(ids))
    assert len(list(store.snapshots())) == 1


def test_invariant_6_what_is_half_written_is_not_found(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another thread nor another store sees a half-written prompt (W11)."""
    store, other, ids = open_store(), open_store(memory_bytes=0), tokens(600)
    half, gate, real = threading.Event(), threading.Event(), os.writev
    calls = []

    def writev(fd: int, views: Any) -> int:
        calls.append(fd)
        if len(calls) == 2:
            half.set()
            assert gate.wait(WAIT_S)
        return real(fd, views)

    monkeypatch.setattr(os, "writev", writev)
    store.insert(NS, ids, kv_of(ids))
    assert half.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        match = pool.submit(other.match, NS, [*ids, 0]).result(WAIT_S)
    assert match.source == "miss"
    assert other.check() == []
    other.repair(other.check())
    gate.set()
    store.flush()
    match = other.match(NS, [*ids, 0])
    assert prints(match.cache or []) == prints(kv_of(ids))


# -------------------------------------------------------- 7: trouble costs a miss


@pytest.mark.parametrize("seed", range(3))
def test_invariant_7_any_damage_is_a_miss_and_no_more(
    root: Path, open_store: Open, seed: int
) -> None:
    """Random damage to random files: no exception, nothing wrong, and it heals."""
    rng = random.Random(seed)
    store = open_store(memory_bytes=0)
    prompts = [[n, *tokens(99 + 60 * n, seed=n)] for n in range(6)]
    for ids in prompts:
        put(store, ids, kv_of(ids))
    for path in rng.sample(sorted(root.rglob("*.safetensors")), 4):
        what, size = rng.randrange(4), path.stat().st_size
        if what == 0:
            path.unlink()
        elif what == 1:
            os.truncate(path, rng.randrange(size))
        else:
            data = bytearray(path.read_bytes())
            at = rng.randrange(size)
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data if what == 2 else data + rng.randbytes(100))
    n_missed = 0
    for ids in prompts:
        match = store.match(NS, [*ids, 0])
        if match.cache is None:
            n_missed += 1
            put(store, ids, kv_of(ids))
            match = store.match(NS, [*ids, 0])
        assert match.n_tokens == len(ids)
        assert prints(match.cache or []) == prints(kv_of(ids))
    assert n_missed <= 4
    store.repair(store.check())  # flipped token ids harm no match: check finds them


@pytest.mark.parametrize("number", [5, 13, 23, 24])
def test_invariant_7_only_proven_damage_deletes(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EIO, EACCES, ENFILE, EMFILE: a miss while it lasts, then a hit again (C09)."""
    store, ids, real = open_store(memory_bytes=0), tokens(100), os.open
    put(store, ids, kv_of(ids))

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert store.match(NS, [*ids, 0]).n_tokens == 0
        assert store.check() == []
        store.repair(store.check())
    assert len(list(root.rglob("*.safetensors"))) == 1
    assert store.match(NS, [*ids, 0]).n_tokens == 100


# --------------------------------------------------------------------- 8: the budget

BIG = {"n_kv_heads": 8, "head_dim": 64}
UNIT = 100 * 2 * 2 * 8 * 64 * 4  # bytes of the rows of 100 tokens


def walk(root: Path) -> int:
    """Return the bytes of everything below a root."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_invariant_8_the_budget_holds_after_each_insert(
    root: Path, open_store: Open
) -> None:
    """Whatever comes, everything under the root is within it, and the newest is
    there (R04, R05)."""
    budget = 6_000_000 + 3 * UNIT
    store, rng = open_store(disk_bytes=budget, memory_bytes=0), random.Random(8)
    for number in range(16):
        ids = [number % 5, *tokens(rng.randrange(60, 120), seed=rng.randrange(5))]
        put(store, ids, kv_of(ids, **BIG))
        assert walk(root) <= budget
        assert store.explain(NS, [*ids, 0]).n_disk == len(ids)
    assert store.stats().errors == {}


def test_invariant_8_foreign_files_and_orphans_count(
    root: Path, open_store: Open
) -> None:
    """Orphans are collected before anything is evicted, foreign files are not
    touched but leave less room (R05)."""
    store = open_store(memory_bytes=0)
    prompts = [[n, *tokens(99, seed=n)] for n in range(4)]
    for ids in prompts[:3]:
        put(store, ids, kv_of(ids, **BIG))
    budget = walk(root) + UNIT // 2
    store.close()
    store = open_store(memory_bytes=0, disk_bytes=budget + UNIT)
    name = "ab" + "0" * 30
    (root / "snapshots" / "ab").mkdir(exist_ok=True)
    orphan = root / "snapshots" / "ab" / f"{name}.safetensors"
    orphan.write_bytes(bytes(UNIT))
    foreign = root / "snapshots" / "model.gguf"
    foreign.write_bytes(bytes(UNIT))
    put(store, prompts[3], kv_of(prompts[3], **BIG))
    found = [store.explain(NS, [*ids, 0]).n_disk for ids in prompts]
    assert found == [0, 100, 100, 100]
    assert not orphan.exists()
    assert foreign.exists()
    assert walk(root) <= budget + UNIT


@pytest.mark.parametrize(
    "obstacle",
    ["nothing", "pins"],
)
def test_invariant_8_what_is_too_large_evicts_nothing(
    open_store: Open, obstacle: str
) -> None:
    """What cannot fit, alone or beside what must stay, costs no other prompt (R02)."""
    store = open_store(memory_bytes=0)
    prompts = [[n, *tokens(99, seed=n)] for n in range(5)]
    for ids in prompts:
        pin = obstacle == "pins" and ids is prompts[0]
        put(store, ids, kv_of(ids, **BIG), pin=pin)
    budget = store.stats().disk_bytes
    store.close()
    store = open_store(memory_bytes=0, disk_bytes=budget)
    big = tokens(470 if obstacle == "pins" else 800, seed=9)
    store.insert(NS, big, kv_of(big, **BIG))
    with pytest.raises(WriteFailed) as caught:
        store.flush()
    assert isinstance(caught.value.__cause__, TooLarge)
    assert store.stats().n_evicted_disk == 0
    assert all(store.explain(NS, [*ids, 0]).n_disk == 100 for ids in prompts)


# ---------------------------------------------------------------- 9: bits and dtypes


def noise(cache: list[Any], rng: np.random.Generator) -> list[Any]:
    """Replace all that a cache holds by random bits, NaNs and infinities included."""

    def bits(array: mx.array) -> mx.array:
        raw = rng.integers(0, 256, array.nbytes, np.uint8)
        return mx.array(raw).view(array.dtype).reshape(array.shape)

    for layer in cache:
        for name in ("keys", "values"):
            part = getattr(layer, name)
            isa = isinstance(part, tuple)
            setattr(layer, name, tuple(map(bits, part)) if isa else bits(part))
        mx.eval(layer.keys, layer.values)
    return cache


@pytest.mark.parametrize(
    "make",
    [
        lambda: kv(600),
        lambda: kv(600, dtype=mx.float16),
        lambda: kv(600, dtype=mx.bfloat16),
        lambda: kv(600, n_kv_heads=1, head_dim=1, dtype=mx.bfloat16),
        lambda: quantized(600, 8, 32),
        lambda: quantized(600, 8, 64, dtype=mx.bfloat16),
        lambda: quantized(600, 4, 32, dtype=mx.float16),
        lambda: quantized(600, 4, 64),
        lambda: quantized(600, 4, 128, head_dim=128),
        lambda: concatenated(600, dtype=mx.bfloat16),
        lambda: [*kv(600, dtype=mx.bfloat16), *quantized(600, 4, 64), *kv(600)],
    ],
    ids=[
        "fp32", "fp16", "bf16", "bf16 of one", "8 bits", "8 bits bf16", "4 bits fp16",
        "4 bits", "4 bits group 128", "concatenated", "mixed",
    ],
)  # fmt: skip
def test_invariant_9_what_is_restored_is_bit_equal(
    store: PromptStore, tier: str, make: Callable[[], list[Any]]
) -> None:
    """Every bit, dtype, class and setting is that of what was saved (P13)."""
    cache, ids = noise(make(), np.random.default_rng(9)), tokens(600)
    put(store, ids, cache, kind="system")
    for n in (600, 511, 3):
        match = store.match(NS, [*ids[:n], 2000, 2001], like=cache)
        assert (match.n_tokens, match.source) == (n, tier)
        found = match.cache or []
        assert prints(found) == prints(cut_to(cache, n))
        assert [type(layer) for layer in found] == [type(layer) for layer in cache]
        for layer, saved in zip(found, cache, strict=True):
            if isinstance(saved, QuantizedKVCache):
                own = (layer.bits, layer.group_size)
                assert own == (saved.bits, saved.group_size)


@pytest.mark.parametrize("how", ["slice", "transposed", "broadcast"])
def test_invariant_9_however_the_arrays_lie_in_memory(
    store: PromptStore, tier: str, how: str
) -> None:
    """Slices of larger arrays and transposed views are caches like any other."""
    ids = tokens(100)
    cache = kv_of(ids)
    for layer in cache:
        for name in ("keys", "values"):
            part = getattr(layer, name)
            if how == "slice":
                part = mx.concatenate([part, part], axis=3)[..., : part.shape[3]]
            elif how == "transposed":
                part = mx.contiguous(part.swapaxes(1, 2)).swapaxes(1, 2)
            else:
                part = mx.broadcast_to(part[:, :1], part.shape)
            setattr(layer, name, part)
        mx.eval(layer.keys, layer.values)
    right = prints(cache)
    put(store, ids, cache, kind="system")
    match = store.match(NS, [*ids, 0])
    assert (match.n_tokens, match.source) == (100, tier)
    assert prints(match.cache or []) == right


def test_invariant_9_a_match_has_room_for_the_rest(store: PromptStore) -> None:
    """Prefilling the rest and a step of answer needs no new buffer."""
    ids = tokens(300)
    put(store, ids, kv_of(ids), kind="system")
    for n_rest in (1, 256, 1000):
        match = store.match(NS, [*ids, *range(n_rest)])
        assert match.cache is not None
        assert match.cache[0].keys.shape[2] >= 300 + n_rest + 256


# ------------------------------------------------------------- 10: lazy arrays stay


def test_invariant_10_the_writer_meets_evaluated_arrays(open_store: Open) -> None:
    """What was inserted lazily on a thread that is gone is written (C01)."""
    store, ids = open_store(memory_bytes=0), tokens(300)

    def insert(number: int) -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            cache = kv_of([number, *ids])
            for layer in cache:
                layer.keys, layer.values = layer.keys + 0, layer.values + 0
            store.insert(NS, [number, *ids], cache)

    for number in range(3):
        thread = threading.Thread(target=insert, args=(number,))
        thread.start()
        thread.join()
    store.flush()
    for number in range(3):
        match = store.match(NS, [number, *ids, 0])
        assert prints(match.cache or []) == prints(kv_of([number, *ids]))


def test_invariant_10_a_match_is_evaluated(store: PromptStore) -> None:
    """What a thread with a stream of its own matched is used in another (C01)."""
    ids, found = tokens(300), []
    put(store, ids, prefill(tiny_model(), ids)[0], kind="system")

    def look() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            found.append(store.match(NS, [*ids[:277], 1, 2]))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    attended(found[0].cache)
    assert passes(found[0], [*ids[:277], 1, 2])


# ----------------------------------------------------- 11: no lock across slow work


@pytest.mark.parametrize("slow", ["open", "preadv", "writev", "fsync"])
def test_invariant_11_no_lock_is_held_across_files(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """While one file operation hangs, everything about other prompts goes on (C04)."""
    store = open_store()
    ids, other, new = ([n, *tokens(99, seed=n)] for n in range(3))
    for prompt in (ids, other):
        put(store, prompt, kv_of(prompt), label=str(prompt[0]))
    store._memory.clear()
    reached, gate, real = threading.Event(), threading.Event(), getattr(os, slow)
    slow_threads = ("promptstore-writer", "slow")

    def wait(*args: Any, **kwargs: Any) -> Any:
        name = threading.current_thread().name
        mine = name.startswith(slow_threads) or slow == "preadv"
        if mine and not reached.is_set() and "index" not in str(args[0]):
            reached.set()
            assert gate.wait(WAIT_S)
        return real(*args, **kwargs)

    writes = slow in ("writev", "fsync")
    monkeypatch.setattr(os, slow, wait)
    with ThreadPoolExecutor(1, "slow") as pool:
        if writes or slow == "open":
            job = pool.submit(put, store, new, kv_of(new))
        else:
            job = pool.submit(store.match, NS, [*ids, 0])
        try:
            assert reached.wait(WAIT_S)
            match = store.match(NS, [*other, 0])
            assert match.source == "disk"
            store.insert(NS, [7, *other], kv_of([7, *other]))
            assert store.match(NS, [7, *other, 0]).source == "memory"
            store.explain(NS, ids)
            store.stats()
            store.pin("1")
            assert len(list(store.snapshots())) >= 2
            assert not job.done()
        finally:
            gate.set()
        job.result(WAIT_S)


def test_invariant_11_no_lock_is_held_across_mlx(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread copies or evaluates, others match and insert (C04)."""
    store = open_store(write="off")
    ids, other = ([n, *tokens(99, seed=n)] for n in range(2))
    for prompt in (ids, other):
        put(store, prompt, kv_of(prompt), kind="system")
    reached, gate, real = threading.Event(), threading.Event(), mx.eval

    def evaluate(*arrays: Any) -> None:
        if threading.current_thread().name.startswith("slow"):
            reached.set()
            assert gate.wait(WAIT_S)
        real(*arrays)

    monkeypatch.setattr(mx, "eval", evaluate)
    for job in (
        lambda: store.match(NS, [*ids, 0]),
        lambda: store.insert(NS, ids, kv_of(ids)),
    ):
        reached.clear()
        gate.clear()
        with ThreadPoolExecutor(1, "slow") as pool:
            slow = pool.submit(job)
            try:
                assert reached.wait(WAIT_S)
                assert store.match(NS, [*other, 0]).n_tokens == 100
                store.insert(NS, [5, *other], kv_of([5, *other]))
                store.stats()
                assert not slow.done()
            finally:
                gate.set()
            slow.result(WAIT_S)


# ------------------------------------------------------------ 12: rows and no more


def test_invariant_12_a_file_holds_the_rows_of_its_range(
    root: Path, open_store: Open
) -> None:
    """Not the padding, not what was trimmed, not what the parent has: each file is
    its header, its rows and its token ids."""
    store, sizes = open_store(memory_bytes=0), {}
    ids, branch = tokens(700), [*tokens(300), *tokens(60, seed=4)]
    for prompt in (ids[:1], ids[:300], ids, branch):
        cache = kv_of([*prompt, *range(200)])
        for layer in cache:
            layer.trim(200)
        put(store, prompt, cache)
    token_bytes = 2 * 2 * 2 * 8 * 4
    for info in store.snapshots():
        path = root / "snapshots" / info.id[:2] / f"{info.id}.safetensors"
        n_header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        rows = (info.end - info.start) * (token_bytes + 8)
        assert path.stat().st_size == info.nbytes == n_header + rows
        sizes[info.start, info.end] = rows
    assert sizes.keys() == {(0, 1), (1, 300), (300, 700), (300, 360)}


@pytest.mark.parametrize("make", [kv, quantized, concatenated])
def test_invariant_12_what_was_trimmed_is_not_written(
    root: Path, open_store: Open, make: Callable[..., list[Any]]
) -> None:
    """The rows and the ids of a removed conversation are in no file (P09)."""
    store, ids = open_store(memory_bytes=0), tokens(205)
    cache = noise(make(205), np.random.default_rng(12))
    removed = [bytes(mx.contiguous(a[:, :1, 5:6])) for a in attended(cache)]
    secret = np.array(ids[5:], "<i8").tobytes()
    put(store, ids[:5], cut_to(cache, 5))
    for layer in cache:
        layer.trim(200)
    put(store, [9, *ids[1:5]], cache)
    written = b"".join(path.read_bytes() for path in root.rglob("*.safetensors"))
    assert len(written) > 0
    assert secret not in written
    assert not any(rows in written for rows in removed)


def test_invariant_12_a_turn_writes_its_turn(root: Path, open_store: Open) -> None:
    """Twenty turns cost the bytes of their tokens once, within five in a hundred."""
    store, ids = open_store(), []
    for turn in range(20):
        ids += tokens(110, seed=turn)
        match = store.match(NS, [*ids, 0])
        assert match.n_tokens == len(ids) - 110
        put(store, ids, kv_of(ids, **BIG))
    unique = len(ids) * 2 * 2 * 8 * 64 * 4
    written = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
    assert written == store.stats().bytes_written
    assert unique <= written <= 1.05 * unique
