"""Facts about the store: both tiers, seen through its public methods."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import itertools
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import platformdirs
import pytest
from builders import kv, kv_of, prefill, prints, quantized, tiny_model, tokens
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.llama import Model

from promptstore import (
    Match,
    Namespace,
    PromptStore,
    ReasonKind,
    StoreClosed,
    StoreTooNew,
    StoreUnavailable,
    TooLarge,
    UnknownSnapshot,
    WriteFailed,
    n_cached,
    snapshot,
)

NS = Namespace("m")
BIG = {"n_kv_heads": 8, "head_dim": 64}  # 8 KiB a token in two layers
TOKEN_BYTES = 2 * 2 * 8 * 64 * 4
BUFFER = 256 * TOKEN_BYTES  # what a cache of up to 256 tokens takes in memory
INDEX = 6 << 20  # more than the index and its log grow to in a test
WAIT_S = 30  # how long a test waits for what must come


class Open(Protocol):
    """Opens a store at the test's root, or at *path*."""

    def __call__(self, path: Path | None = None, **options: Any) -> PromptStore: ...


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store is."""
    return tmp_path / "store"


@pytest.fixture
def open_store(root: Path) -> Iterator[Open]:
    """Open stores that are checked and closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_(path: Path | None = None, **options: Any) -> PromptStore:
            store = PromptStore.open(path or root, **options)
            stack.callback(finish, store)
            return store

        yield open_


def finish(store: PromptStore) -> None:
    """Close a store, which must be whole on disk."""
    try:
        with contextlib.suppress(WriteFailed):
            store.flush()
        assert store.check() == []
    except StoreClosed:
        return
    finally:
        store.close()


def reopened(store: PromptStore, open_store: Open, **options: Any) -> PromptStore:
    """Close a store and open it again."""
    store.close()
    return open_store(**options)


class Gate:
    """Holds the writer thread up at its next snapshot until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)


@pytest.fixture
def gate(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A closed gate before each snapshot that is written."""
    gate, real = Gate(), snapshot.write

    def write(*args: Any) -> Any:
        gate.wait()
        return real(*args)

    monkeypatch.setattr(snapshot, "write", write)
    yield gate
    gate.opened.set()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a context in which no snapshot can be written."""

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "write", write)
            yield

    return context


@dataclasses.dataclass
class Clock:
    """How many seconds the store's clock is ahead of the real one."""

    ahead_s: float = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clocks that the store reads."""
    clock, real, steady = Clock(), time.time_ns, time.monotonic
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(clock.ahead_s * 1e9))
    monkeypatch.setattr(time, "monotonic", lambda: steady() + clock.ahead_s)
    return clock


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that are not the test's."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ask(store: PromptStore, ids: Sequence[int], **rows: Any) -> Match:
    """Match a prompt with one more token; whatever is served must be its KV."""
    match = store.match(NS, [*ids, 0])
    if match.cache is None:
        assert (match.n_tokens, match.source) == (0, "miss")
    else:
        assert 0 < match.n_tokens <= len(ids)
        assert n_cached(match.cache) == match.n_tokens
        head = list(ids)[: match.n_tokens]
        assert prints(match.cache) == prints(kv_of(head, **rows))
    return match


def put(store: PromptStore, ids: Sequence[int], **options: Any) -> None:
    """Insert a prompt of large rows."""
    store.insert(NS, ids, kv_of(ids, **BIG), **options)


def n_disk(store: PromptStore, ids: Sequence[int], ns: Namespace = NS) -> int:
    """Return how many tokens of a prompt are on disk; no use of it is noted."""
    return store.explain(ns, [*ids, 0]).n_disk


def n_memory(store: PromptStore, ids: Sequence[int], ns: Namespace = NS) -> int:
    """Return how many tokens of a prompt are in memory."""
    return store.explain(ns, [*ids, 0]).n_memory


def prompts(n: int, length: int = 100) -> list[list[int]]:
    """Return *n* prompts that share no beginning."""
    return [[number, *tokens(length - 1, seed=number)] for number in range(n)]


def files(root: Path) -> list[Path]:
    """Return the snapshot files below a root."""
    return sorted(root.rglob("*.safetensors"))


def listing(root: Path) -> dict[str, bytes]:
    """Return everything below a root, with its content."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in root.rglob("*")
    }


PRELUDE = """
import sys
from pathlib import Path
import mlx.core as mx
from builders import kv_of, prints, tokens
from promptstore import *
NS = Namespace("m")
root = Path(sys.argv[1])
"""


def start(script: str, *args: object) -> subprocess.Popen[str]:
    """Start a script in a process of its own."""
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, *args: object, status: int = 0) -> str:
    """Run a script in a process of its own and return what it prints."""
    with start(script, *args) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    return out


# ---------------------------------------------------------------------------- open


def test_a_store_is_private(root: Path, open_store: Open) -> None:
    """Prompts are nobody else's: 0700 and 0600 whatever the umask (K13)."""
    umask = os.umask(0o022)
    try:
        store = open_store()
        store.insert(NS, tokens(100), kv(100))
        store.flush()
    finally:
        os.umask(umask)
    assert root.stat().st_mode & 0o777 == 0o700
    paths = list(root.rglob("*"))
    assert {path.suffix for path in paths} >= {".db", ".db-wal", ".safetensors"}
    for path in paths:
        mode = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == mode, path


def test_the_default_place_is_the_cache_directory(open_store: Open) -> None:
    """Without a path the store is in the platform's cache directory."""
    place = platformdirs.user_cache_path("promptstore")
    assert not place.exists()
    with PromptStore.open():
        assert (place / "index.db").is_file()


@pytest.mark.parametrize("where", ["a file", "below a file", "snapshots is a file"])
def test_open_refuses_a_path_that_is_no_directory(tmp_path: Path, where: str) -> None:
    """A file in the way is one clear error, and stays what it is."""
    path = file = tmp_path / "path"
    if where == "below a file":
        path = file / "store"
    elif where == "snapshots is a file":
        file = path / "snapshots"
        path.mkdir()
    file.write_text("precious")
    before = listing(tmp_path)
    with pytest.raises(StoreUnavailable) as caught:
        PromptStore.open(path)
    assert caught.value.path == path
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["index.db", "store.lock"],
)
def test_open_refuses_a_directory_in_place_of_a_file(root: Path, name: str) -> None:
    """A directory where the index or the lock belongs is one clear error."""
    (root / name).mkdir(parents=True)
    with pytest.raises(StoreUnavailable):
        PromptStore.open(root)
    assert (root / name).is_dir()


def test_open_refuses_what_cannot_be_written(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the way out: a store may be read all the same."""
    store = open_store()
    store.insert(NS, tokens(100), kv_of(tokens(100)))
    store.close()
    before = listing(root)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreUnavailable, match="read_only=True"):
        PromptStore.open(root)
    assert listing(root) == before
    with PromptStore.open(root, read_only=True) as reader:
        assert ask(reader, tokens(100)).n_tokens == 100


@pytest.mark.parametrize("read_only", [False, True])
def test_open_refuses_a_newer_store(
    root: Path, open_store: Open, read_only: bool
) -> None:
    """An index with unknown migrations is refused by name and left as it is."""
    store = open_store()
    store.insert(NS, tokens(100), kv(100))
    store.close()
    db = sqlite3.connect(root / "index.db")
    with db:
        db.execute(
            "insert into _sqlite_migrations (migration_set, name, applied_at) "
            "values ('promptstore.index', 'm999_future', '2099-01-01')"
        )
    db.close()
    before = listing(root)
    with pytest.raises(StoreTooNew, match="m999_future") as caught:
        PromptStore.open(root, read_only=read_only)
    assert caught.value.unknown == ("m999_future",)
    after = listing(root)
    assert {k: v for k, v in after.items() if k in before} == before
    assert after.keys() - before.keys() <= {"index.db-wal", "index.db-shm"}


def test_a_refused_directory_is_left_as_it_is(root: Path) -> None:
    """Somebody else's index.db is an error, and nothing is put beside it."""
    root.mkdir()
    (root / "index.db").write_text("not a database " * 1000)
    before = listing(root)
    with pytest.raises(StoreUnavailable):
        PromptStore.open(root)
    assert listing(root) == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"write": "sideways"}, ValueError),
        ({"write": None}, ValueError),
        ({"verify": "never"}, ValueError),
        ({"memory_bytes": -1}, ValueError),
        ({"disk_bytes": -1}, ValueError),
        ({"min_tokens": -1}, ValueError),
        ({"queue_bytes": -1}, ValueError),
        ({"memory_bytes": 8e9}, TypeError),
        ({"disk_bytes": "50GB"}, TypeError),
        ({"min_tokens": True}, TypeError),
    ],
)
def test_open_refuses_wrong_options(
    root: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    """An option that is out of range is named, and no directory is made."""
    (name,) = options
    with pytest.raises(error, match=name):
        PromptStore.open(root, **options)
    assert not root.exists()


def test_without_a_disk_tier_nothing_is_written(root: Path, open_store: Open) -> None:
    """``disk_bytes=0`` touches no disk, and memory works."""
    store = open_store(disk_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids), label="x", pin=True)
    store.flush()
    store.prefetch(NS, ids)
    assert ask(store, ids).source == "memory"
    assert list(store.snapshots()) == store.check() == []
    with pytest.raises(UnknownSnapshot):
        store.pin("x")
    assert not root.exists()


def test_without_a_memory_tier_the_disk_serves(open_store: Open) -> None:
    """``memory_bytes=0`` keeps nothing, whatever is inserted or matched."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids), kind="system")
    store.flush()
    for _ in range(2):
        assert ask(store, ids).source == "disk"
    stats = store.stats()
    assert (stats.n_entries, stats.memory_bytes, stats.hits_disk) == (0, 0, 2)


def test_read_only_changes_nothing(root: Path, open_store: Open) -> None:
    """A reader serves from disk, keeps what it is given in memory, writes nothing."""
    ids, other = prompts(2)
    store = open_store()
    store.insert(NS, ids, kv_of(ids))
    store.close()
    before = listing(root)
    reader = open_store(read_only=True)
    assert ask(reader, ids).source == "disk"
    reader.insert(NS, other, kv_of(other), label="x", pin=True)
    assert ask(reader, other).source == "memory"
    reader.evict(to_bytes=0)
    reader.flush()
    assert ask(reader, other).n_tokens == 0
    reader.close()
    after = listing(root)
    assert {k: v for k, v in after.items() if k in before} == before
    assert after.keys() - before.keys() <= {"index.db-wal", "index.db-shm"}


def test_read_only_keeps_even_what_is_damaged(root: Path, open_store: Open) -> None:
    """A reader misses what is damaged, and leaves the repair to others."""
    ids = tokens(100)
    store = open_store()
    store.insert(NS, ids, kv_of(ids))
    store.close()
    (path,) = files(root)
    path.write_bytes(path.read_bytes()[:-1])
    reader = PromptStore.open(root, read_only=True)
    assert reader.match(NS, [*ids, 0]).reason == reason("damaged", 0, path.stem)
    assert path.exists()
    assert len(reader.check()) == 1
    reader.close()
    with open_store() as store:
        store.repair(store.check())


def test_two_stores_share_a_root(open_store: Open) -> None:
    """What one store of a process flushes, another finds, deletes and pins."""
    first, second = open_store(memory_bytes=0), open_store(memory_bytes=0)
    ids, other = prompts(2)
    first.insert(NS, ids, kv_of(ids), label="x")
    first.flush()
    assert ask(second, ids).n_tokens == 100
    second.insert(NS, [*ids, 5, 6], kv_of([*ids, 5, 6]))
    second.insert(NS, other, kv_of(other))
    second.flush()
    assert ask(first, [*ids, 5, 6]).n_tokens == 102
    assert first.delete("x") == 2
    assert ask(second, ids).n_tokens == 0
    assert ask(second, other).n_tokens == 100


# ----------------------------------------------------------------------- bad input

NO_TOKENS = [
    ("text", TypeError),
    (None, TypeError),
    (7, TypeError),
    (iter([1, 2]), TypeError),
    ({1, 2}, TypeError),
    ([1.0, 2.0], TypeError),
    ([1, "2"], TypeError),
    ([1, None], TypeError),
    (np.array([1.0, 2.0]), TypeError),
    (mx.array([1.0, 2.0]), TypeError),
    (np.array([True, False]), TypeError),
    ([[1, 2], [3, 4]], ValueError),
    (np.ones((1, 5), int), ValueError),
    (mx.array(3), ValueError),
    ([1 << 63], ValueError),
    (np.array([1 << 63], np.uint64), ValueError),
]


@pytest.mark.parametrize(("bad", "error"), NO_TOKENS, ids=range(len(NO_TOKENS)))
def test_tokens_must_be_a_run_of_integers(
    store: PromptStore, bad: Any, error: type[Exception]
) -> None:
    """Anything else is refused at the door by every method, by the name tokens."""
    for call in (
        lambda: store.match(NS, bad),
        lambda: store.insert(NS, bad, kv(2)),
        lambda: store.explain(NS, bad),
        lambda: store.prefetch(NS, bad),
    ):
        with pytest.raises(error, match="tokens"):
            call()
    stats = store.stats()
    assert (stats.n_inserts, stats.misses, stats.errors) == (0, 0, {})


@pytest.mark.parametrize(
    ("cache", "error"),
    [
        (None, TypeError),
        ("cache", TypeError),
        (KVCache(), TypeError),
        ([], ValueError),
        ((), ValueError),
    ],
    ids=["None", "str", "layer", "list", "tuple"],
)
def test_a_cache_must_be_a_list_of_layers(
    store: PromptStore, cache: Any, error: type[Exception]
) -> None:
    """What is no prompt cache is refused, by the name cache."""
    with pytest.raises(error, match="cache"):
        store.insert(NS, tokens(10), cache)


def test_a_batch_is_refused(store: PromptStore) -> None:
    """A cache of two sequences is nobody's KV."""
    cache = kv(10)
    for layer in cache:
        layer.keys = mx.concatenate([layer.keys, layer.keys])
        layer.values = mx.concatenate([layer.values, layer.values])
    with pytest.raises(ValueError, match="2 sequences"):
        store.insert(NS, tokens(10), cache)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kind": "tool"}, ValueError),
        ({"kind": None}, ValueError),
        ({"label": ""}, ValueError),
        ({"label": " \n"}, ValueError),
        ({"label": 5}, TypeError),
        ({"ttl_s": "soon"}, TypeError),
        ({"ttl_s": float("nan")}, ValueError),
        ({"ttl_s": float("inf")}, ValueError),
        ({"ttl_s": -1.0}, ValueError),
        ({"ttl_s": 1e300}, ValueError),
    ],
    ids=str,
)
def test_insert_refuses_wrong_options(
    open_store: Open, options: dict[str, Any], error: type[Exception]
) -> None:
    """A wrong option is named at once, on the caller's thread, and nothing stored."""
    store = open_store()
    (name,) = options
    ids = tokens(100)
    with pytest.raises(error, match=name):
        store.insert(NS, ids, kv_of(ids), **options)
    store.flush()
    assert ask(store, ids).n_tokens == 0


@pytest.mark.parametrize("namespace", ["model", None, b"digest"])
def test_a_namespace_must_be_one(store: PromptStore, namespace: Any) -> None:
    """A mistake of the program is no trouble with the store: it is raised."""
    with pytest.raises(TypeError, match="namespace"):
        store.match(namespace, tokens(10))
    with pytest.raises(TypeError, match="namespace"):
        store.insert(namespace, tokens(10), kv(10))


def test_an_empty_prompt_is_nothing(store: PromptStore) -> None:
    """No tokens, or layers that hold none, store nothing; short prompts never hit."""
    assert store.insert(NS, [], kv(5)) == 0
    assert store.insert(NS, tokens(5), make_prompt_cache(tiny_model())) == 0
    assert store.insert(NS, tokens(5), [KVCache(), *kv(5)]) == 0
    assert store.insert(NS, [7], kv_of([7])) == 1
    for ids in ([], [7]):
        match = store.match(NS, ids)
        assert (match.cache, match.n_tokens, match.source) == (None, 0, "miss")
        assert match.reason == reason("too-short", 0)
    assert ask(store, [7]).n_tokens == 1


# ---------------------------------------------------------------------------- keys


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_all_forms_of_the_same_ids_are_one_key(open_store: Open, source: str) -> None:
    """List, tuple and arrays of any integer type are the same prompt (K05)."""
    store = open_store(memory_bytes=0 if source == "disk" else 1 << 30)
    ids = tokens(100)
    forms: list[Callable[[list[int]], Any]] = [
        list,
        tuple,
        mx.array,
        lambda ids: [mx.array(id_) for id_ in ids],
        functools.partial(np.array, dtype=np.int32),
        functools.partial(np.array, dtype=np.uint16),
        lambda ids: np.array(ids)[::-1][::-1],
    ]
    for number, form in enumerate(forms):
        prompt = [number, *ids]
        store.insert(NS, form(prompt), kv_of(prompt), kind="system")
        store.flush()
        for other in forms:
            match = store.match(NS, other([*prompt, 0]))
            assert (match.n_tokens, match.source) == (101, source)
    assert store.stats().n_snapshots == len(forms)


def test_ids_are_64_bits(open_store: Open) -> None:
    """Image ids are kept apart by all their bits, after a restart as well (K06)."""
    ids = [*tokens(90), -855241551491862571, *tokens(20)]
    low = [id_ if id_ >= 0 else id_ & 0xFFFFFFFF for id_ in ids]
    near = [id_ if id_ >= 0 else id_ + (1 << 32) for id_ in ids]
    store = open_store()
    store.insert(NS, ids, kv(len(ids)))
    for _ in range(2):
        assert store.match(NS, [*ids, 0]).n_tokens == len(ids)
        for other in (low, near):
            assert store.match(NS, [*other, 0]).n_tokens == 90
        store = reopened(store, open_store)


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_tokens_do_not_run_together(open_store: Open, source: str) -> None:
    """[1, 23] is not [12, 3], and [1] is not [65537] (K12)."""
    store = open_store(memory_bytes=0 if source == "disk" else 1 << 30, min_tokens=0)
    store.insert(NS, [1, 23], kv(2))
    store.insert(NS, [65537, 4], kv(2))
    store.flush()
    assert store.match(NS, [1, 23, 0]).n_tokens == 2
    for ids in ([12, 3, 0], [123, 0, 0], [1 | 23 << 32, 0, 0], [0, 1, 23]):
        assert store.match(NS, ids).n_tokens == 0


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_namespaces_never_meet(open_store: Open, source: str) -> None:
    """Whatever field differs, however fields run together: nothing is shared (K12)."""
    store = open_store(memory_bytes=0 if source == "disk" else 1 << 30)
    spaces = [
        Namespace("a"),
        Namespace("a", tenant="u1"),
        Namespace("a", tenant="u2"),
        Namespace("a", adapter="b|c"),
        Namespace("a|b", adapter="c"),
        Namespace("a", adapter="None"),
        Namespace("a", revision="u1"),
        Namespace("a", config="u1"),
        Namespace("a", draft="u1"),
        Namespace('a", "tenant": "u1'),
    ]
    ids = tokens(100)
    for number, space in enumerate(spaces):
        assert store.match(space, [*ids, 0]).n_tokens == 0
        store.insert(space, ids, kv_of([*ids[:90], *range(number, number + 10)]))
        store.flush()
    for number, space in enumerate(spaces):
        match = store.match(space, [*ids, 0])
        own = kv_of([*ids[:90], *range(number, number + 10)])
        assert match.source == source
        assert prints(match.cache or []) == prints(own)
        (info,) = store.snapshots(space)
        assert info.namespace == space


@pytest.mark.parametrize(
    "name", ["org/name", "../../x", "x" * 300, "Ä", "nul\0", "..", "a\nb"]
)
def test_names_are_no_paths(
    tmp_path: Path, root: Path, open_store: Open, name: str
) -> None:
    """A model's name may be any text: no path is made of it (K14)."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(Namespace(name, tenant=name), ids, kv_of(ids), label=name)
    store.flush()
    assert set(tmp_path.iterdir()) == {root}
    (path,) = files(root)
    assert path.stem == next(store.snapshots()).id
    assert store.delete(name) == 1


def test_settings_never_meet(open_store: Open) -> None:
    """Caches of other classes, bits or groups are not served, and not lost (K02)."""
    ids = tokens(100)
    settings: list[Callable[..., list[Any]]] = [
        functools.partial(kv, head_dim=64),
        *(
            functools.partial(quantized, bits=bits, group_size=size, head_dim=64)
            for bits, size in ((8, 64), (4, 64), (8, 32))
        ),
    ]
    store = open_store()
    for made in range(len(settings)):
        for number, make in enumerate(settings):
            match = store.match(NS, [*ids, 0], like=make(1))
            assert (match.n_tokens > 0) == (number < made)
            if match.cache is not None:
                assert prints(match.cache) == prints(make(100))
        store.insert(NS, ids, settings[made](100))
        store = reopened(store, open_store)
    for make in settings:
        match = store.match(NS, [*ids, 0], like=make(1))
        assert prints(match.cache or []) == prints(make(100))


# ------------------------------------------------------------------------- reasons


def reason(kind: str, position: int, detail: str = "") -> Any:
    """Return a reason."""
    from promptstore import Reason

    return Reason(ReasonKind(kind), position, detail)


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_every_shortened_match_has_a_reason(open_store: Open, source: str) -> None:
    """Nothing is left but the last token, or the reason says what and where."""
    store = open_store(memory_bytes=0 if source == "disk" else 1 << 30)
    ids = [1, *tokens(299)]
    assert store.match(NS, ids).reason == reason("no-entry", 0)
    store.insert(NS, ids, kv_of(ids), kind="system")
    store.flush()
    assert store.match(NS, [*ids, 0]).reason is None
    assert store.match(NS, ids).reason is None
    assert store.match(NS, ids[:100]).reason is None
    assert store.match(NS, [*ids, 0, 0]).reason == reason("no-entry", 300)
    for position in (1, 255, 256, 299):
        match = store.match(NS, [*ids[:position], 2000, 0])
        assert match.n_tokens == position
        assert match.reason == reason("diverged-at", position)
        assert str(match.reason) == f"diverged-at({position})"
    other = Namespace("m", tenant="other")
    assert store.match(other, ids).reason == reason("no-entry", 0)


def test_other_settings_are_the_reason(open_store: Open) -> None:
    """If only caches of other layers are stored, that is what the reason says."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    match = store.match(NS, [*ids, 0], like=quantized(1))
    assert match.reason == reason("identity-differs", 0, "layers")
    assert store.match(NS, [*ids, 0], like=kv(1, n_layers=3)).reason == match.reason


def test_without_a_disk_tier_the_reason_is_that(open_store: Open) -> None:
    """A miss of a store without disk is not the fault of the prompt."""
    store = open_store(disk_bytes=0)
    assert store.match(NS, tokens(9)).reason == reason("disabled", 0)


def test_expiry_is_a_reason(open_store: Open, clock: Clock) -> None:
    """What has outlived its time is not served, and the reason says so."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.insert(NS, [*ids, 5, 6], kv_of([*ids, 5, 6]), ttl_s=60)
    store.flush()
    clock.ahead_s = 61
    match = ask(store, [*ids, 5, 6])
    assert (match.n_tokens, match.reason) == (100, reason("expired", 100))


def test_an_unreadable_file_is_a_reason_and_stays(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's refusal is a miss that names the cause, and proves nothing (C09)."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    (path,) = files(root)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        match = ask(store, ids)
        assert match.reason == reason("unreadable", 0, "EIO")
        assert store.check() == []
    assert path.exists()
    assert ask(store, ids).n_tokens == 100


class MyKV(KVCache):  # type: ignore[misc]
    """A class of somebody else's."""


def test_an_unknown_class_stays_in_memory(
    root: Path, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served whole from memory, never written, and named in one warning (P07)."""
    store = open_store()
    ids = tokens(100)
    for n in (50, 100):
        cache = [*kv_of(ids[:n], n_layers=1), MyKV()]
        cache[1].update_and_fetch(*kv_of(ids[:n], n_layers=1)[0].keys_and_values())
        assert store.insert(NS, ids[:n], cache) == n
    store.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "MyKV" in caplog.text
    assert store.stats().errors == {"unknown-cache-class": 2}
    assert files(root) == []
    match = store.match(NS, [*ids, 0])
    assert (match.n_tokens, match.source) == (100, "memory")
    assert [type(layer) for layer in match.cache or []] == [KVCache, MyKV]
    # Nothing of it can be cut: a repeat gets the shorter one, or nothing (W13).
    assert store.match(NS, ids).n_tokens == 50
    assert store.match(NS, ids[:50]).n_tokens == 0
    assert store.match(NS, [*ids, 0], like=kv(1)).n_tokens == 0
    store = reopened(store, open_store)
    assert store.match(NS, [*ids, 0]).n_tokens == 0


# ------------------------------------------------------- kinds, labels, pins, times


def test_a_system_prompt_stays_beside_what_continues_it(open_store: Open) -> None:
    """It is a branch point in memory; other prompts give way to longer ones."""
    store = open_store()
    system, ids = tokens(100), tokens(200)
    store.insert(NS, system, kv_of(system), kind="system")
    store.insert(NS, ids[:150], kv_of(ids[:150]), kind="user")
    store.insert(NS, ids, kv_of(ids))
    assert store.stats().n_entries == 2
    store.flush()
    for _ in range(3):
        assert ask(store, ids).n_tokens == 200
        assert ask(store, system).source == "memory"
    assert store.stats().n_snapshots == 3
    kinds = {info.end: info.kind for info in store.snapshots()}
    assert kinds == {100: "system", 150: "user", 200: "assistant"}


def test_a_label_names_one_prompt(open_store: Open) -> None:
    """A label is taken, with its pin, from whoever has it in the same namespace."""
    store = open_store(memory_bytes=0)
    first, second = prompts(2)
    store.insert(NS, first, kv_of(first), label="x", pin=True)
    store.insert(NS, second, kv_of(second), label="x")
    store.insert(Namespace("n"), second, kv_of(second), label="x")
    store.flush()
    infos = store.snapshots()
    assert {(info.namespace.model, info.label, info.pinned) for info in infos} == {
        ("m", None, False),
        ("m", "x", False),
        ("n", "x", False),
    }
    store.pin("x")
    assert sum(info.pinned for info in store.snapshots()) == 2
    assert store.delete("x") == 2
    assert n_disk(store, first) == 100


def test_a_label_on_what_is_stored_marks_it(root: Path, open_store: Open) -> None:
    """The same prompt gets the label; a head of it gets a snapshot without rows."""
    store = open_store()
    ids = tokens(300)
    store.insert(NS, ids, kv_of(ids))
    store.insert(NS, ids, kv_of(ids), label="whole")
    store.flush()
    assert len(files(root)) == 1
    store.insert(NS, ids[:100], kv_of(ids[:100]), label="head", pin=True)
    store.flush()
    infos = {info.label: info for info in store.snapshots()}
    assert (infos["whole"].start, infos["whole"].end) == (0, 300)
    assert (infos["head"].start, infos["head"].end) == (100, 100)
    assert infos["head"].parent == infos["whole"].id
    assert infos["head"].nbytes <= 8192
    store.evict(to_bytes=0)
    assert ask(store, ids).n_tokens == 300
    assert store.delete("head") == 1
    assert n_disk(store, ids) == 300


def test_pins_protect_a_chain_from_eviction(open_store: Open) -> None:
    """What a pinned prompt continues stays with it; the rest goes; unpin ends that."""
    store = open_store()
    ids, other = tokens(300), tokens(200, seed=5)
    for n in (100, 200, 300):
        store.insert(NS, ids[:n], kv_of(ids[:n]), label=f"{n}", pin=n == 200)
    store.insert(NS, other, kv_of(other))
    store.flush()
    store.evict(to_bytes=0)
    assert ask(store, ids).n_tokens == 200
    assert ask(store, other).n_tokens == 0
    (info,) = [info for info in store.snapshots() if info.pinned]
    store.unpin("200")
    store.pin(info.id)
    store.evict(to_bytes=0)
    assert store.stats().n_snapshots == 2
    store.unpin(info.id)
    store.evict(to_bytes=0)
    assert store.stats().n_snapshots == 0


@pytest.mark.parametrize(
    "memory_bytes",
    [0, 1 << 30],
)
def test_a_ttl_forgets_a_prompt_and_what_continues_it(
    open_store: Open, clock: Clock, memory_bytes: int
) -> None:
    """After its time neither tier serves it; what it continues remains, and what
    parts from it and was not given a time."""
    store = open_store(memory_bytes=memory_bytes)
    ids = tokens(200)
    parting = [*ids[:150], *tokens(80, seed=3)]
    store.insert(NS, ids[:100], kv_of(ids[:100]), kind="system")
    store.insert(NS, ids, kv_of(ids), kind="system", ttl_s=60)
    store.insert(NS, parting, kv_of(parting), kind="system")
    store.flush()
    clock.ahead_s = 59
    assert ask(store, ids).n_tokens == 200
    assert ask(store, parting).n_tokens == 230
    clock.ahead_s = 61
    assert ask(store, ids).n_tokens == 150
    assert ask(store, parting).n_tokens == 230
    other = tokens(100, seed=5)
    store.insert(NS, other, kv_of(other))
    store.flush()
    assert sorted(info.end for info in store.snapshots()) == [100, 100, 230]


def test_a_prompt_that_lives_on_is_not_taken_along(
    open_store: Open, clock: Clock
) -> None:
    """One token shared with a prompt that is forgotten does not cost another."""
    store = open_store()
    first, second = [1, *tokens(99, seed=1)], [1, *tokens(99, seed=2)]
    store.insert(NS, first, kv_of(first), ttl_s=60)
    store.insert(NS, second, kv_of(second), label="kept", pin=True)
    store.flush()
    clock.ahead_s = 61
    other = tokens(100, seed=5)
    store.insert(NS, other, kv_of(other))
    store.flush()
    assert n_disk(store, second) == 100
    assert n_disk(store, first) == 1


def test_an_insert_without_ttl_makes_a_prompt_stay(
    open_store: Open, clock: Clock
) -> None:
    """Stored again for good, a prompt with a time to live is kept."""
    store = open_store()
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids), ttl_s=60)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    clock.ahead_s = 61
    assert n_disk(store, ids) == 100
    assert store.stats().n_snapshots == 1


def test_a_ttl_holds_without_a_disk_tier(open_store: Open, clock: Clock) -> None:
    """The promise to forget does not depend on where a prompt is kept."""
    store = open_store(disk_bytes=0)
    store.insert(NS, tokens(100), kv_of(tokens(100)), ttl_s=60)
    clock.ahead_s = 61
    assert ask(store, tokens(100)).n_tokens == 0


def test_a_repeated_insert_renews_the_ttl(open_store: Open, clock: Clock) -> None:
    """The time counts from the last insert that gave one."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids), ttl_s=60)
    store.flush()
    clock.ahead_s = 50
    store.insert(NS, ids, kv_of(ids), ttl_s=60)
    store.flush()
    (info,) = store.snapshots()
    assert info.expires_s == pytest.approx(info.used_s + 60)
    clock.ahead_s = 100
    assert ask(store, ids).n_tokens == 100
    clock.ahead_s = 111
    assert ask(store, ids).n_tokens == 0


def test_who_is_unknown_is_named(store: PromptStore) -> None:
    """pin, unpin and delete of what is not there say what they were asked for."""
    for call in (store.pin, store.unpin, store.delete):
        with pytest.raises(UnknownSnapshot, match="nobody") as caught:
            call("nobody")
        assert caught.value.id_or_label == "nobody"


# -------------------------------------------------------------- deleting, evicting


@pytest.mark.parametrize(
    "memory_bytes",
    [0, 1 << 30],
)
def test_delete_takes_what_continues_it_from_both_tiers(
    root: Path, open_store: Open, memory_bytes: int
) -> None:
    """Pinned or not it is gone; siblings and what it continues remain."""
    store = open_store(memory_bytes=memory_bytes)
    ids, other = tokens(300), tokens(100, seed=5)
    sibling = [*ids[:100], *tokens(50, seed=6)]
    for prompt, label in (
        (ids[:100], "root"),
        (ids[:200], "middle"),
        (ids, "leaf"),
        (sibling, "sibling"),
        (other, "other"),
    ):
        store.insert(NS, prompt, kv_of(prompt), kind="system", label=label, pin=True)
    store.flush()
    (info,) = [info for info in store.snapshots() if info.label == "middle"]
    assert store.delete(info.id) == 2
    assert [ask(store, p).n_tokens for p in (ids, sibling, other)] == [100, 150, 100]
    assert len(files(root)) == 3
    for label in ("root", "other"):
        store.delete(label)
    assert [ask(store, p).n_tokens for p in (ids, sibling, other)] == [0, 0, 0]
    assert files(root) == []
    with pytest.raises(UnknownSnapshot):
        store.delete("leaf")
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    assert ask(store, ids).n_tokens == 300


def test_what_is_queued_is_deleted_as_well(open_store: Open, gate: Gate) -> None:
    """A delete waits for the queue, so that nothing of the prompt comes after it."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    gate.opened.set()
    store.insert(NS, ids, kv_of(ids), label="x")
    store.flush()
    gate.opened.clear()
    gate.reached.clear()
    longer = [*ids, *tokens(100, seed=5)]
    store.insert(NS, longer, kv_of(longer))
    assert gate.reached.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(store.delete, "x")
        gate.opened.set()
        assert deleting.result(WAIT_S) == 2
    store.flush()
    assert n_disk(store, longer) == 0


@pytest.mark.parametrize("how", ["delete", "evict"])
def test_a_failed_write_does_not_stop_a_delete(
    open_store: Open, failing: Callable[[], Any], how: str
) -> None:
    """What the writer met is for flush to tell; the user's prompt is deleted."""
    store = open_store(memory_bytes=0)
    ids, other = prompts(2)
    store.insert(NS, ids, kv_of(ids), label="x")
    store.flush()
    with failing():
        store.insert(NS, other, kv_of(other))
        if how == "delete":
            assert store.delete("x") == 1
        else:
            store.evict(to_bytes=0)
    assert n_disk(store, ids) == 0
    with pytest.raises(WriteFailed):
        store.flush()


def test_evict_is_least_recently_used_first(open_store: Open) -> None:
    """Both tiers shrink to what is asked, and what was used last stays."""
    store = open_store()
    three = prompts(3)
    for ids in three:
        put(store, ids, kind="system")
    store.flush()
    ask(store, three[0], **BIG)
    store.evict(to_bytes=BUFFER)
    assert [n_memory(store, ids) for ids in three] == [100, 0, 0]
    stats = store.stats()
    assert (stats.n_entries, stats.n_evicted_memory) == (1, 2)
    assert stats.memory_bytes <= BUFFER
    assert stats.disk_bytes <= BUFFER
    store.evict(to_bytes=0)
    stats = store.stats()
    assert (stats.n_entries, stats.memory_bytes, stats.n_snapshots) == (0, 0, 0)
    for wrong, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="to_bytes"):
            store.evict(to_bytes=wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------- explaining, prefetch


@pytest.mark.parametrize("tiers", ["both", "memory", "disk"])
@pytest.mark.parametrize(
    "ids",
    [
        [1, *tokens(99), 0],
        [1, *tokens(99)],
        [1, *tokens(99), 0, 0, 0],
        [1, *tokens(50), 2000, 0],
        [2, 3],
        [],
        [1],
    ],
    ids=["one more", "same", "three more", "diverges", "unknown", "none", "one"],
)
def test_explain_says_what_a_match_would_give(
    open_store: Open, tiers: str, ids: list[int]
) -> None:
    """Tokens and reason are those of the match."""
    store = open_store(
        memory_bytes=0 if tiers == "disk" else 1 << 30,
        disk_bytes=0 if tiers == "memory" else 1 << 30,
    )
    stored = [1, *tokens(99)]
    store.insert(NS, stored, kv_of(stored))
    store.flush()
    stored_info = next(store.snapshots(), None)
    explanation = store.explain(NS, ids)
    match = store.match(NS, ids)
    assert explanation.n_tokens == match.n_tokens
    assert explanation.reason == match.reason
    assert explanation.n_tokens == max(explanation.n_memory, explanation.n_disk)
    assert (explanation.n_memory > 0) == (tiers != "disk" and match.n_tokens > 0)
    assert explanation.nearest == (stored_info if match.n_tokens else None)


def test_explain_counts_nothing(open_store: Open) -> None:
    """Asking why changes no figure and no time of use."""
    store = open_store()
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    before = store.stats(), list(store.snapshots())
    for prompt in (ids, ids[:50], [5], [*ids, 0, 0]):
        store.explain(NS, prompt)
        store.explain(NS, prompt, like=kv(1))
    store.flush()
    assert (store.stats(), list(store.snapshots())) == before


def test_explain_is_no_use(open_store: Open) -> None:
    """What was only explained is still the least recently used."""
    store = open_store(disk_bytes=0)
    first, second = prompts(2)
    put(store, first)
    put(store, second)
    store.explain(NS, first)
    store.evict(to_bytes=BUFFER)
    assert [n_memory(store, ids) for ids in (first, second)] == [0, 100]


def test_prefetch_reads_ahead(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what a match will need, on other threads, and counts nothing."""
    store = open_store(memory_bytes=0)
    ids, other = tokens(600), tokens(100, seed=5)
    for prompt in (ids[:300], ids, other):
        store.insert(NS, prompt, kv_of(prompt))
    store.flush()
    before = store.stats()
    read: list[tuple[str, str]] = []
    real = os.preadv

    def preadv(fd: int, *args: Any) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).stem
        read.append((name, threading.current_thread().name))
        return real(fd, *args)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell which file a descriptor is")
    monkeypatch.setattr(os, "preadv", preadv)
    store.prefetch(NS, [*ids, 0])
    store.prefetch(NS, [2000, 1])
    store.prefetch(NS, [])
    assert store.stats() == before
    store._disk._ahead.shutdown()
    store.close()
    needed = {path.stem for path in files(root)} - {
        info.id for info in open_store().snapshots() if info.end == 100
    }
    assert {name for name, _ in read} == needed
    assert threading.current_thread().name not in {thread for _, thread in read}


def test_prefetch_never_fails(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing files and a failing index are not its business."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    for path in files(root):
        path.unlink()
    store.prefetch(NS, [*ids, 0])
    with monkeypatch.context() as patch:
        patch.setattr(type(index_of(store)), "layouts", raise_sqlite)
        store.prefetch(NS, [*ids, 0])
    assert ask(store, ids).n_tokens == 0


def index_of(store: PromptStore) -> Any:
    """Return the connection that reads."""
    assert store._disk is not None
    return store._disk.index


def raise_sqlite(*_: Any) -> Any:
    """Stand for a call of SQLite that fails."""
    raise sqlite3.OperationalError("disk I/O error")


# --------------------------------------------------------------------------- stats


def test_the_figures_are_true(root: Path, open_store: Open) -> None:
    """Reuse, hits, reasons, bytes: each equals what the callers saw (S03)."""
    rng = random.Random(3)
    store = open_store(min_tokens=10)
    seen: dict[str, int] = dict.fromkeys(
        ["memory", "disk", "miss", "asked", "reused", "inserts"], 0
    )
    reasons: dict[str, int] = {}
    for _ in range(60):
        ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        if rng.random() < 0.4:
            store.insert(NS, ids, kv_of(ids) if ids else kv(1))
            store.flush()
            seen["inserts"] += bool(ids)
        else:
            match = store.match(NS, ids)
            seen[match.source] += 1
            seen["asked"] += len(ids)
            seen["reused"] += n_cached(match.cache) if match.cache else 0
            if match.reason is not None:
                kind = match.reason.kind.value
                reasons[kind] = reasons.get(kind, 0) + 1
        if rng.random() < 0.1:
            store.evict(to_bytes=0 if rng.random() < 0.3 else 1 << 16)
    store.flush()
    stats = store.stats()
    assert (stats.hits_memory, stats.hits_disk, stats.misses) == (
        seen["memory"],
        seen["disk"],
        seen["miss"],
    )
    assert min(seen.values()) > 0
    assert (stats.tokens_asked, stats.tokens_reused) == (seen["asked"], seen["reused"])
    assert stats.n_inserts == seen["inserts"]
    assert stats.reasons == reasons
    assert stats.errors == {}
    assert (stats.n_pending, stats.pending_bytes) == (0, 0)
    assert stats.n_snapshots == len(files(root)) == len(list(store.snapshots()))
    assert stats.disk_bytes == sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file()
    )
    assert sum(info.nbytes for info in store.snapshots()) == sum(
        path.stat().st_size for path in files(root)
    )


def test_what_waits_is_counted(open_store: Open, gate: Gate) -> None:
    """Bytes and jobs that wait for the writer are those of what is new."""
    store = open_store()
    ids = tokens(100)
    put(store, ids)
    stats = store.stats()
    assert (stats.n_pending, stats.pending_bytes) == (1, 100 * TOKEN_BYTES)
    gate.opened.set()
    store.flush()
    stats = store.stats()
    assert (stats.n_pending, stats.pending_bytes) == (0, 0)
    assert stats.bytes_written > 100 * TOKEN_BYTES


def test_infos_tell_what_a_snapshot_is(root: Path, open_store: Open) -> None:
    """Everything that was asked for at insert can be read back, newest use first."""
    store = open_store(memory_bytes=0)
    ids = tokens(300)
    earliest = time.time()
    store.insert(NS, ids[:200], kv_of(ids[:200]), kind="system", label="x", pin=True)
    store.insert(NS, ids, kv_of(ids), kind="user", ttl_s=100)
    store.flush()
    tip, base = store.snapshots(NS)
    assert (base.start, base.end, base.parent) == (0, 200, None)
    assert (tip.start, tip.end, tip.parent) == (200, 300, base.id)
    assert (base.kind, base.label, base.pinned, base.expires_s) == (
        "system",
        "x",
        True,
        None,
    )
    assert (tip.kind, tip.label, tip.pinned) == ("user", None, False)
    assert tip.expires_s == pytest.approx(tip.created_s + 100)
    assert earliest <= base.created_s <= tip.created_s <= time.time()
    assert base.layers == tip.layers == "full/1 x2"
    assert {info.id: info.nbytes for info in (tip, base)} == {
        path.stem: path.stat().st_size for path in files(root)
    }
    assert list(store.snapshots(Namespace("other"))) == []
    ask(store, ids[:200])
    store.flush()
    newest, _ = store.snapshots()
    assert newest.id == base.id
    assert newest.used_s > base.used_s


@pytest.mark.parametrize(
    "flushed",
    [True, False],
)
def test_each_hit_of_a_snapshot_counts(
    open_store: Open, gate: Gate, flushed: bool
) -> None:
    """However busy the writer is, no use of a prompt is forgotten."""
    store = open_store(memory_bytes=0)
    ids, other = prompts(2)
    gate.opened.set()
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    if not flushed:
        gate.opened.clear()
        store.insert(NS, other, kv_of(other))
    for _ in range(3):
        ask(store, ids)
        if flushed:
            store.flush()
    gate.opened.set()
    store.flush()
    (info,) = [info for info in store.snapshots() if info.hits]
    assert info.hits == 3


def test_the_log_is_quiet(
    open_store: Open, caplog: pytest.LogCaptureFixture, failing: Callable[[], Any]
) -> None:
    """Ordinary work logs nothing at INFO; trouble warns once for each cause (S03)."""
    caplog.set_level(logging.INFO)
    store = open_store(min_tokens=0)
    for number in range(100):
        ids = [number, 1, 2]
        store.insert(NS, ids, kv_of(ids))
        ask(store, ids)
    store.flush()
    assert caplog.records == []
    with failing():
        for number in range(100, 110):
            store.insert(NS, [number, 1, 2], kv(3))
        with pytest.raises(WriteFailed) as caught:
            store.flush()
    assert caught.value.n_failed == 10
    assert store.stats().errors == {"ENOSPC": 11}  # flush tried one again
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ------------------------------------------------------------- tiers and their size


def test_write_off_reads_but_never_writes(root: Path, open_store: Open) -> None:
    """What others stored is served; what is inserted stays in memory."""
    first, second = prompts(2)
    with PromptStore.open(root) as writer:
        writer.insert(NS, first, kv_of(first))
    store = open_store(write="off")
    assert ask(store, first).source == "disk"
    store.insert(NS, second, kv_of(second), label="x", pin=True)
    store.flush()
    assert ask(store, second).source == "memory"
    assert len(files(root)) == 1
    store.evict(to_bytes=0)
    assert ask(store, second).n_tokens == 0


@pytest.mark.parametrize("when", ["flush", "close", "evict", "pushed out"])
def test_write_back_writes_late(root: Path, open_store: Open, when: str) -> None:
    """Nothing is written before memory evicts, or flush or close is called."""
    store = open_store(write="back", memory_bytes=2 * BUFFER)
    ids, *others = prompts(3)
    put(store, ids)
    put(store, ids[:50])
    assert ask(store, ids, **BIG).source == "memory"
    put(store, ids)
    assert store.stats().n_pending == 0
    assert files(root) == []
    if when == "flush":
        store.flush()
    elif when == "close":
        store = reopened(store, open_store)
    elif when == "evict":
        store._memory.shrink(0)
        assert ask(store, ids, **BIG).n_tokens == 100
    else:
        for other in others:
            put(store, other)
        assert n_memory(store, ids) in (0, 100)
        store._writer.flush()
        assert n_memory(store, ids) == 0
    store.flush()
    assert n_disk(store, ids) == 100
    assert ask(store, ids, **BIG).n_tokens == 100


def test_write_back_evicts_what_is_on_disk_for_free(open_store: Open) -> None:
    """An entry that was written and not changed is not written again."""
    store = open_store(write="back")
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    n_written = store.stats().bytes_written
    store._memory.shrink(0)
    store.flush()
    assert store.stats().bytes_written == n_written
    assert ask(store, ids).source == "disk"


def test_what_is_special_is_written_at_once(open_store: Open) -> None:
    """In write-back a label, a pin or a ttl is not left to memory alone."""
    store = open_store(write="back")
    three = prompts(3)
    options: list[dict[str, Any]] = [{"label": "x"}, {"pin": True}, {"ttl_s": 100}]
    for ids, special in zip(three, options, strict=True):
        store.insert(NS, ids, kv_of(ids), **special)
    store._writer.flush()
    assert [n_disk(store, ids) for ids in three] == [100] * 3


def test_short_prompts_stay_in_memory(open_store: Open) -> None:
    """Below ``min_tokens`` a prompt is not worth a file, and is gone on restart."""
    store = open_store(min_tokens=64)
    short, long = tokens(63, seed=1), tokens(64, seed=2)
    for ids in (short, long):
        store.insert(NS, ids, kv_of(ids))
        assert ask(store, ids).source == "memory"
    store = reopened(store, open_store)
    assert [ask(store, ids).n_tokens for ids in (short, long)] == [0, 64]


@pytest.mark.parametrize("budget", [1, 6 * BUFFER])
def test_an_oversized_entry_pushes_nothing_out_of_memory(
    open_store: Open, budget: int
) -> None:
    """It goes to disk alone; the small ones stay (R02)."""
    store = open_store(memory_bytes=budget)
    small = prompts(5)
    for ids in small:
        put(store, ids)
    n_entries = store.stats().n_entries
    big = tokens(8 * 256)
    put(store, big)
    store.flush()
    assert store.stats().n_entries == n_entries == (0 if budget == 1 else 5)
    assert [n_memory(store, ids) for ids in small] == [20 * n_entries] * 5
    assert ask(store, big, **BIG).source == "disk"


def test_an_oversized_prompt_pushes_nothing_off_the_disk(open_store: Open) -> None:
    """It stays in memory alone, flush says why, and the small ones stay (R02)."""
    store = open_store(disk_bytes=INDEX + 2 * BUFFER)
    small = prompts(5)
    for ids in small:
        put(store, ids)
    big = tokens(1500)
    put(store, big)
    with pytest.raises(WriteFailed) as caught:
        store.flush()
    assert isinstance(caught.value.__cause__, TooLarge)
    assert store.stats().n_evicted_disk == 0
    assert [n_disk(store, ids) for ids in small] == [100] * 5
    assert ask(store, big, **BIG).source == "memory"
    store.flush()


def test_a_disk_budget_of_one_byte_is_no_disk(open_store: Open) -> None:
    """Nothing fits, every insert says so, and memory goes on."""
    store = open_store(disk_bytes=1)
    for ids in prompts(2):
        store.insert(NS, ids, kv_of(ids))
        with pytest.raises(WriteFailed):
            store.flush()
        assert ask(store, ids).source == "memory"
    assert store.stats().errors == {"TooLarge": 2}


def test_the_memory_budget_holds_after_every_insert(open_store: Open) -> None:
    """Bytes in memory never exceed the limit, on any path (R04)."""
    store = open_store(memory_bytes=3 * BUFFER, write="off")
    for number, ids in enumerate(prompts(10)):
        put(store, ids, kind="system" if number % 2 else "user")
        assert store.stats().memory_bytes <= 3 * BUFFER
        ask(store, ids, **BIG)
        assert store.stats().memory_bytes <= 3 * BUFFER
    assert store.stats().n_entries == 3


def test_memory_is_least_recently_used_first(open_store: Open) -> None:
    """A hot prompt stays however old it is (R01)."""
    store = open_store(memory_bytes=2 * BUFFER, write="off")
    hot, cold, new = prompts(3)
    put(store, hot)
    put(store, cold)
    for _ in range(20):
        ask(store, hot, **BIG)
    put(store, new)
    assert [n_memory(store, ids) for ids in (hot, cold, new)] == [100, 0, 100]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "memory_bytes",
    [0, 1 << 30],
)
def test_the_disk_is_least_recently_used_first(
    open_store: Open, memory_bytes: int, restart: bool
) -> None:
    """A hot prompt stays, whichever tier served it, after a restart too (R01)."""
    store = open_store(memory_bytes=memory_bytes)
    hot, cold, new = prompts(3, 250)
    put(store, hot, kind="system")
    put(store, cold)
    store.flush()
    for _ in range(20):
        ask(store, hot, **BIG)
    store.flush()
    budget = store.stats().disk_bytes + BUFFER // 2
    store = reopened(store, open_store, disk_bytes=budget)
    if restart:
        store = reopened(store, open_store, disk_bytes=budget)
    put(store, new)
    store.flush()
    assert [n_disk(store, ids) for ids in (hot, cold, new)] == [250, 0, 250]


def test_a_full_queue_skips_the_disk_and_says_so(open_store: Open, gate: Gate) -> None:
    """After the time given to it an insert leaves the writing to the next flush, and
    counts that."""
    store = open_store(queue_bytes=BUFFER, insert_timeout_s=0.0)
    three = prompts(3, 200)
    for ids in three:
        put(store, ids)
    assert store.stats().errors == {"queue-full": 2}
    assert store.stats().n_pending == 1
    assert [ask(store, ids, **BIG).source for ids in three] == ["memory"] * 3
    gate.opened.set()
    store.flush()
    assert [n_disk(store, ids) for ids in three] == [200] * 3


def test_a_full_queue_pushes_back(
    open_store: Open, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    """An insert waits while there is no room, and goes on when there is."""
    store = open_store(queue_bytes=BUFFER, insert_timeout_s=WAIT_S)
    first, second = prompts(2, 200)
    put(store, first)
    assert gate.reached.wait(WAIT_S)
    insert = pool.submit(put, store, second)
    # The entry is in memory before its write waits for room.
    while not n_memory(store, second):
        assert not insert.done()
    assert not insert.done()
    gate.opened.set()
    insert.result(WAIT_S)
    store.flush()
    assert [n_disk(store, ids) for ids in (first, second)] == [200, 200]
    assert store.stats().errors == {}


def test_one_job_larger_than_the_queue_is_let_in(open_store: Open) -> None:
    """The bound is on what waits, not on what a prompt may be."""
    store = open_store(queue_bytes=1)
    for ids in prompts(3):
        store.insert(NS, ids, kv_of(ids))
    store.flush()
    assert store.stats().n_snapshots == 3


# ----------------------------------------------------------------- flush and close


def test_flush_tells_once_what_the_writer_met(
    open_store: Open, failing: Callable[[], Any]
) -> None:
    """The first cause and how many; what memory still has is tried once more."""
    store = open_store()
    first, second = prompts(2)
    with failing():
        for ids in (first, second):
            assert store.insert(NS, ids, kv_of(ids)) == 100
        with pytest.raises(WriteFailed, match="no space") as caught:
            store.flush()
    assert caught.value.n_failed == 2
    assert isinstance(caught.value.__cause__, OSError)
    assert ask(store, first).source == "memory"
    store.flush()
    assert [n_disk(store, ids) for ids in (first, second)] == [100, 100]


def test_flush_does_not_call_a_lost_use_a_lost_insert(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of use are no one's data: trouble with them is counted, not raised."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(type(index_of(store)), "touch", raise_sqlite)
        ask(store, ids)
        store.flush()
    assert sum(store.stats().errors.values()) == 1


def test_flush_waits_no_longer_than_it_may(open_store: Open, gate: Gate) -> None:
    """It raises TimeoutError, and what waits is still written later."""
    store = open_store()
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    with pytest.raises(TimeoutError, match="1 write"):
        store.flush(timeout_s=0.01)
    gate.opened.set()
    store.flush(timeout_s=WAIT_S)
    assert n_disk(store, ids) == 100


def test_close_waits_no_longer_than_it_may(
    root: Path, open_store: Open, gate: Gate
) -> None:
    """It raises TimeoutError and is closed; the write that runs ends whole."""
    store = PromptStore.open(root)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    with pytest.raises(TimeoutError):
        store.close(timeout_s=0.01)
    with pytest.raises(StoreClosed):
        store.stats()
    gate.opened.set()
    assert store._writer.close(WAIT_S)
    assert store._disk is not None
    store._disk.close()
    assert n_disk(open_store(), ids) == 100


def test_flush_writes_back_everything(
    open_store: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flush waits for room in the queue, or raises: it never says yes to a loss."""
    store = open_store(write="back", queue_bytes=1, insert_timeout_s=0.0)
    three = prompts(3)
    for ids in three:
        store.insert(NS, ids, kv_of(ids))
    real = store._counters.note

    def note(cause: str, *args: Any) -> None:
        gate.opened.set()  # the writer goes on once an entry was skipped
        real(cause, *args)

    monkeypatch.setattr(store._counters, "note", note)
    # Whoever waits for room instead must not wait for this gate.
    monkeypatch.setattr(gate, "wait", lambda: gate.opened.wait(0.5))
    store.flush()
    assert [n_disk(store, ids) for ids in three] == [100] * 3


def test_close_tells_what_was_not_written(
    root: Path, failing: Callable[[], Any]
) -> None:
    """It raises as flush does, and the store is closed all the same."""
    store = PromptStore.open(root)
    store.insert(NS, tokens(100), kv(100))
    with failing(), pytest.raises(WriteFailed):
        store.close()
    with pytest.raises(StoreClosed):
        store.match(NS, [1])
    store.close()


def test_nothing_works_after_close(store: PromptStore) -> None:
    """Every method of a closed store says so; closing again is fine."""
    root = Path(str(index_of(store).path)).parent.parent / "second"
    with PromptStore.open(root) as closed:
        closed.insert(NS, tokens(100), kv(100))
    closed.close()
    calls: list[Callable[[], Any]] = [
        lambda: closed.match(NS, [1, 2]),
        lambda: closed.insert(NS, [1, 2], kv(2)),
        lambda: closed.prefetch(NS, [1, 2]),
        lambda: closed.explain(NS, [1, 2]),
        lambda: list(closed.snapshots()),
        lambda: closed.stats(),
        lambda: closed.flush(),
        lambda: closed.pin("x"),
        lambda: closed.unpin("x"),
        lambda: closed.delete("x"),
        lambda: closed.evict(to_bytes=0),
        lambda: closed.check(),
        lambda: closed.repair([]),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            call()


def test_a_closed_store_lets_go(root: Path, open_store: Open) -> None:
    """No thread, no descriptor and no cache is left behind."""

    def descriptors() -> set[str]:
        links = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.add(os.readlink(f"/proc/self/fd/{fd}"))
        return {link for link in links if link.startswith(str(root))}

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to list descriptors")
    threads = set(threading.enumerate())
    store = open_store()
    ids = tokens(600)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    store.evict(to_bytes=0)
    ask(store, ids)
    assert descriptors()
    store.close()
    assert descriptors() == set()
    assert set(threading.enumerate()) <= threads


def test_exit_without_close_loses_nothing(root: Path, open_store: Open) -> None:
    """What is queued when the interpreter ends is written, whole (S04)."""
    out = run(
        """
        store = PromptStore.open(root, write=sys.argv[2])
        for number in range(20):
            ids = [number, *tokens(400, seed=number)]
            cache = kv_of(ids)
            cache[0].keys = cache[0].keys + 0  # lazy
            store.insert(NS, ids, cache)
        print(store.stats().n_pending)
        """,
        root,
        "back",
    )
    assert out.split() == ["0"]
    store = open_store()
    for number in range(20):
        ids = [number, *tokens(400, seed=number)]
        assert ask(store, ids).n_tokens == 401


def test_a_kill_loses_only_what_was_not_flushed(root: Path, open_store: Open) -> None:
    """SIGTERM in the middle of a write leaves what was flushed, and no half (S04)."""
    run(
        """
        import os, signal, threading
        from promptstore import snapshot
        store = PromptStore.open(root)
        store.insert(NS, tokens(100), kv_of(tokens(100)))
        store.flush()
        def write(fd, *_):
            os.write(fd, bytes(5000))
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        snapshot.write = write
        store.insert(NS, tokens(300), kv_of(tokens(300)))
        store.flush()
        """,
        root,
        status=-signal.SIGTERM,
    )
    assert list(root.rglob("*.tmp")) != []
    store = open_store()
    assert [finding.kind for finding in store.check()] == ["orphan"]
    assert ask(store, tokens(300)).n_tokens == 100
    store.insert(NS, tokens(300), kv_of(tokens(300)))
    store.flush()
    assert list(root.rglob("*.tmp")) == []
    assert n_disk(store, tokens(300)) == 300


# -------------------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file; a negative place counts from its end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def data_start(path: Path) -> int:
    """Return where the rows of a snapshot begin."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def cut(path: Path, at: int) -> None:
    """Cut a file; a negative place counts from its end."""
    os.truncate(path, at if at >= 0 else path.stat().st_size + at)


def zero(path: Path) -> None:
    """Zero the rows of a snapshot."""
    at = data_start(path)
    path.write_bytes(path.read_bytes()[:at] + bytes(path.stat().st_size - at))


def swap_layers(path: Path) -> None:
    """Swap the rows of layer 0 with those of layer 1 in each whole chunk."""
    data, at = path.read_bytes(), data_start(path)
    half = 2 * 256 * 2 * 8 * 4
    path.write_bytes(
        data[:at] + data[at + half : at + 2 * half] + data[at : at + half]
        + data[at + 2 * half :]
    )  # fmt: skip


def link(path: Path) -> None:
    """Have a symbolic link in place of the file."""
    target = path.with_suffix(".moved")
    path.rename(target)
    path.symlink_to(target)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "row flipped": lambda path: flip(path, data_start(path) + 5),
    "last row flipped": lambda path: flip(path, -8 * 300 - 1),
    "header flipped": lambda path: flip(path, 200),
    "padding flipped": lambda path: flip(path, data_start(path) - 1),
    "zeroed": zero,
    "empty": lambda path: cut(path, 0),
    "in the header": lambda path: cut(path, 100),
    "header only": lambda path: cut(path, data_start(path)),
    "half": lambda path: cut(path, path.stat().st_size // 2),
    "last byte": lambda path: cut(path, -1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "layers swapped": swap_layers,
    "text": lambda path: path.write_text("hello"),
    "gone": lambda path: path.unlink(),
    "link": link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_and_is_gone(
    root: Path, open_store: Open, damage: str
) -> None:
    """Row and file are dropped, others untouched, the next insert works (P01, P02)."""
    ids, other = [1, *tokens(299)], [2, *tokens(99)]
    store = open_store()
    for prompt in (other, ids):
        store.insert(NS, prompt, kv_of(prompt))
    store.flush()
    (name,) = [info.id for info in store.snapshots() if info.end == 300]
    store = reopened(store, open_store, memory_bytes=0)
    (path,) = [path for path in files(root) if path.stem == name]
    DAMAGE[damage](path)
    match = ask(store, ids)
    assert (match.n_tokens, match.reason) == (0, reason("damaged", 0, name))
    assert sum(store.stats().errors.values()) == 1
    store.flush()
    assert [info.end for info in store.snapshots()] == [100]
    assert not path.is_file()
    assert ask(store, ids).reason == reason("diverged-at", 0)
    assert ask(store, other).n_tokens == 100
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    assert ask(store, ids).n_tokens == 300
    path.with_suffix(".moved").unlink(missing_ok=True)


@pytest.mark.parametrize("other", ["another prompt", "another model", "other heads"])
def test_a_foreign_snapshot_is_a_miss(
    tmp_path: Path, root: Path, open_store: Open, other: str
) -> None:
    """A whole and sound file that is not the one of the row is not served (W09)."""
    ids = tokens(300)
    rows: dict[str, Any] = {
        "another prompt": {"ids": tokens(300, seed=5)},
        "another model": {"ids": ids, "n_layers": 6},
        "other heads": {"ids": ids, "n_kv_heads": 4, "head_dim": 4},
    }[other]
    with PromptStore.open(tmp_path / "other") as elsewhere:
        elsewhere.insert(NS, rows["ids"], kv(300, **rows))
    store = open_store(memory_bytes=0)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    (path,), (foreign,) = files(root), files(tmp_path / "other")
    shutil.copyfile(foreign, path)
    assert ask(store, ids).reason == reason("damaged", 0, path.stem)
    store.flush()
    assert files(root) == []


def test_damage_in_a_chain_costs_what_stands_on_it(
    root: Path, open_store: Open
) -> None:
    """What continues a damaged snapshot goes with it; what it continues is served."""
    store = open_store(memory_bytes=0)
    ids = tokens(300)
    for n in (100, 200, 300):
        store.insert(NS, ids[:n], kv_of(ids[:n]))
        store.flush()
    (middle,) = [info.id for info in store.snapshots() if info.end == 200]
    (path,) = [path for path in files(root) if path.stem == middle]
    cut(path, -1)
    match = ask(store, ids)
    assert (match.n_tokens, match.source) == (100, "disk")
    assert match.reason == reason("damaged", 100, middle)
    store.flush()
    assert len(files(root)) == 1


def test_damage_on_disk_does_not_cost_memory(root: Path, open_store: Open) -> None:
    """If the longer match turns out damaged, memory's shorter one is served."""
    ids = tokens(300)
    with PromptStore.open(root) as writer:
        writer.insert(NS, ids, kv_of(ids))
    store = open_store()
    store.insert(NS, ids[:80], kv_of(ids[:80]), kind="system")
    store.flush()
    (path,) = files(root)
    cut(path, -1)
    match = ask(store, ids)
    assert (match.n_tokens, match.source) == (80, "memory")
    assert match.reason == reason("damaged", 0, path.stem)


def test_a_failed_read_verifies_nothing(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a read that the system refused, the first use is still to come (P01)."""
    store = open_store(memory_bytes=0)
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids))
    store = reopened(store, open_store, memory_bytes=0)
    (path,) = files(root)
    flip(path, data_start(path) + 5)
    real, failed = os.preadv, []

    def preadv(fd: int, views: Any, offset: int) -> int:
        if offset >= data_start(path) and not failed:
            failed.append(offset)
            raise OSError(errno.EIO, "input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    match = ask(store, ids)  # it may try again at once, but not serve the flipped bit
    monkeypatch.undo()
    assert failed
    if match.reason == reason("unreadable", 0, "EIO"):
        match = ask(store, ids)
    assert match.reason == reason("damaged", 0, path.stem)


def test_a_match_does_not_depend_on_its_file(root: Path, open_store: Open) -> None:
    """All is read before it returns: what then happens to the file is late (P03)."""
    ids = tokens(600)
    store = open_store(memory_bytes=0)
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    matches = []
    for harm in (zero, lambda path: cut(path, 9000), lambda path: path.unlink()):
        good = files(root)[0].read_bytes()
        matches.append(store.match(NS, [*ids, 0]))
        harm(files(root)[0])
        if files(root):
            files(root)[0].write_bytes(good)
    for match in matches:
        assert prints(match.cache or []) == prints(kv_of(ids))
    assert ask(store, ids).n_tokens == 0


def test_descriptors_are_not_taken_for_damage(root: Path, open_store: Open) -> None:
    """Out of descriptors is a miss, then a hit again; many matches hold none
    (C09, R08)."""
    out = run(
        """
        import os, resource
        store = PromptStore.open(root, memory_bytes=0, min_tokens=0)
        for number in range(80):
            ids = [number, *tokens(20, seed=number)]
            store.insert(NS, ids, kv_of(ids))
        store.flush()
        top = max(map(int, os.listdir("/proc/self/fd" if os.path.exists("/proc")
                                      else "/dev/fd")))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 30, hard))
        kept = []
        for number in range(80):
            match = store.match(NS, [number, *tokens(20, seed=number), 0])
            assert match.n_tokens == 21, match
            kept.append(match)
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for number in range(3):
            match = store.match(NS, [number, *tokens(20, seed=number), 0])
            assert match.source == "miss", match
            assert match.reason.kind is ReasonKind.UNREADABLE, match
            ids = [1000 + number, *tokens(20)]
            assert store.insert(NS, ids, kv_of(ids)) == 21
        try:
            store.flush()
        except WriteFailed:
            pass
        for fd in taken:
            os.close(fd)
        for number in range(80):
            match = store.match(NS, [number, *tokens(20, seed=number), 0])
            assert match.n_tokens == 21, match
        for match, number in zip(kept, range(80)):
            ids = [number, *tokens(20, seed=number)]
            assert prints(match.cache) == prints(kv_of(ids))
        print(store.check())
        store.close()
        """,
        root,
    )
    assert out.split() == ["[]"]


def test_a_full_disk_costs_no_more_than_itself(root: Path, open_store: Open) -> None:
    """Inserts return, nothing half is left, and it works when space returns (R11)."""
    out = run(
        """
        import resource, sqlite3
        store = PromptStore.open(root)
        one, two, three = ([n, *tokens(399, seed=n)] for n in range(3))
        store.insert(NS, one, kv_of(one))
        store.flush()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        # Snapshots do not fit; then not even the index's log does.
        for limit in (90_000, (root / "index.db-wal").stat().st_size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            small = [limit, *tokens(63)]
            assert store.insert(NS, two, kv_of(two)) == 400
            assert store.insert(NS, small, kv_of(small)) == 64
            try:
                store.flush()
                print("no error")
            except WriteFailed as error:
                print(isinstance(error.__cause__, (OSError, sqlite3.Error)))
            assert store.match(NS, [*two, 0]).source == "memory"
            assert store.match(NS, [*one, 0]).n_tokens == 400
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            print(len(list(root.rglob("*.tmp"))), store.check())
        store.insert(NS, three, kv_of(three))
        store.insert(NS, two, kv_of(two))
        store.flush()
        store.close()
        """,
        root,
    )
    assert out.splitlines() == ["True", "0 []"] * 2
    store = open_store()
    for number in range(3):
        assert n_disk(store, [number, *tokens(399, seed=number)]) == 400


@pytest.mark.parametrize("what", ["root", "snapshots"])
def test_a_removed_directory_is_no_exception(
    root: Path, open_store: Open, what: str
) -> None:
    """The disk is gone, memory goes on, flush says so, and reopening heals (P12)."""
    store = PromptStore.open(root)
    one, two = prompts(2)
    store.insert(NS, one, kv_of(one))
    store.flush()
    store._memory.clear()
    shutil.rmtree(root if what == "root" else root / "snapshots")
    assert ask(store, one).n_tokens == 0
    for _ in range(2):
        assert store.insert(NS, two, kv_of(two)) == 100
        with contextlib.suppress(WriteFailed):
            store.flush()
        assert ask(store, two).n_tokens == 100
    store.stats()
    with contextlib.suppress(WriteFailed):
        store.close()
    store = open_store()
    store.insert(NS, two, kv_of(two))
    store.flush()
    assert n_disk(store, two) == 100


def test_a_replaced_directory_is_no_false_success(root: Path, open_store: Open) -> None:
    """What flush calls durable is there after a restart, or flush raises (P12, Q06)."""
    store = PromptStore.open(root)
    ids = tokens(100)
    try:
        shutil.rmtree(root)
        PromptStore.open(root).close()
        store.insert(NS, ids, kv_of(ids))
        try:
            store.flush()
        except WriteFailed:
            return
    finally:
        store.close()
    with PromptStore.open(root) as store:
        found = n_disk(store, ids)
        store.repair(store.check())
    assert found == 100


class Trap:
    """Counts calls of the system; one of them raises, or all from there on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.armed = False
        self.n_calls = 0
        self.at = 0
        self.lasting = False

    def arm(self, at: int, lasting: bool) -> None:
        self.n_calls, self.at, self.lasting, self.armed = 0, at, lasting, True

    @property
    def sprung(self) -> bool:
        return self.n_calls >= self.at

    def step(self, error: Exception) -> None:
        with self._lock:
            if not self.armed:
                return
            self.n_calls += 1
            if self.n_calls == self.at or (self.lasting and self.sprung):
                raise error


class Trapped:
    """Stands for a module or a connection of which each call goes over a trap."""

    # Giving up a descriptor or a transaction is not what fails.
    SAFE = ("close", "rollback", "commit")

    def __init__(self, real: Any, trap: Trap, error: Exception) -> None:
        self._real = real
        self._trap = trap
        self._error = error

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value) or isinstance(value, type) or name in self.SAFE:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if not (args and args[0] in self.SAFE):
                self._trap.step(self._error)
            return value(*args, **kwargs)

        return call


@pytest.mark.parametrize("lasting", [False, True])
def test_no_failure_of_the_system_leaves_match_or_insert(
    root: Path, open_store: Open, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Each file operation and each SQL statement raises in turn: a miss, no more; and
    when it works again, so does the store (S01)."""
    store = open_store(memory_bytes=0, min_tokens=0)
    trap = Trap()
    io_error = OSError(errno.EIO, "input/output error")
    for module in ("snapshot.write", "snapshot.read", "root"):
        # Modules, not the functions of those names in their package.
        place = importlib.import_module(f"promptstore.{module}")
        monkeypatch.setattr(place, "os", Trapped(os, trap, io_error))
    for name in ("unlink", "mkdir"):
        real = getattr(Path, name)

        def method(self: Path, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            if self.is_relative_to(root):
                trap.step(io_error)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, name, method)
    assert store._disk is not None
    sql_error = sqlite3.OperationalError("disk I/O error")
    for index in (store._disk.index, store._disk._writer):
        monkeypatch.setattr(index, "_db", Trapped(index._db, trap, sql_error))
    outcomes = set()
    for at in itertools.count(1):
        stored, inserted, later = ([3 * at + n, *range(20)] for n in range(3))
        store.insert(NS, stored, kv_of(stored))
        store.flush()
        trap.arm(at, lasting)
        match = ask(store, stored)
        assert store.insert(NS, inserted, kv_of(inserted)) == 21
        try:
            store.flush()
        except WriteFailed:
            outcomes.add("told")
        trap.armed = False
        outcomes.add(match.source)
        if not trap.sprung:
            break
        ask(store, stored)
        store.insert(NS, later, kv_of(later))
        store.flush()
        assert ask(store, later).n_tokens == 21
        # The walk that counts bytes makes a call for each directory.
        store.repair(store.check())
        store.evict(to_bytes=0)
        for directory in (root / "snapshots").iterdir():
            if not list(directory.iterdir()):
                directory.rmdir()
    assert at > 20
    assert outcomes == {"told", "disk", "miss"}


# ------------------------------------------------------------------------- threads


def test_a_lazy_cache_is_evaluated_by_who_made_it(
    open_store: Open, pool: ThreadPoolExecutor
) -> None:
    """Lazy slices, sums and trims may be inserted; the writer meets none (C01)."""
    store = open_store()
    ids = tokens(300)

    def insert(number: int, *, other_stream: bool) -> None:
        context: Any = contextlib.nullcontext()
        if other_stream:
            context = mx.stream(mx.new_stream(mx.default_device()))
        with context:
            cache = kv_of([number, *ids])
            for layer in cache:
                layer.keys, layer.values = layer.keys + 0, layer.values * 1
                layer.trim(100)
            assert store.insert(NS, [number, *ids], cache) == 201
            assert store.match(NS, [number, *ids]).n_tokens == 201

    insert(1, other_stream=False)
    insert(2, other_stream=True)
    pool.submit(insert, 3, other_stream=True).result(WAIT_S)
    store.flush()
    store.evict(to_bytes=1 << 30)
    for number in (1, 2, 3):
        assert ask(store, [number, *ids[:200]]).n_tokens == 201


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_match_may_be_used_on_another_thread(open_store: Open, source: str) -> None:
    """Nothing lazy is handed over, also when the thread that matched is gone (C01)."""
    store = open_store(memory_bytes=0 if source == "disk" else 1 << 30)
    model, ids = tiny_model(), tokens(300)
    cache, _ = prefill(model, ids)
    store.insert(NS, ids, cache, kind="system")
    store.flush()
    found: list[Match] = []

    def look(n: int) -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            found.append(store.match(NS, [*ids[:n], 1, 2]))

    for n in (300, 257, 100):
        thread = threading.Thread(target=look, args=(n,))
        thread.start()
        thread.join()
        match = found.pop()
        assert (match.n_tokens, match.source) == (n, source)
        _, logits = prefill(model, [1, 2], match.cache)
        _, cold = prefill(model, [*ids[:n], 1, 2])
        assert mx.abs(logits - cold).max().item() < 1e-4


def test_eight_threads_at_once(root: Path, open_store: Open) -> None:
    """No exception, no wrong row, and the counts equal a walk (C03, Q02)."""
    store = open_store(memory_bytes=6 * 2 * 2 * 2 * 256 * 8 * 4, min_tokens=4)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            what = rng.random()
            if what < 0.45:
                kind = rng.choice(["system", "assistant"])
                store.insert(NS, ids, kv_of(ids), kind=kind)
            elif what < 0.9:
                ask(store, ids)
            elif what < 0.94:
                store.evict(to_bytes=rng.choice([0, 1 << 14]))
            else:
                store.explain(NS, ids)
                store.stats()
                list(store.snapshots())

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result(60)
    store.flush()
    stats = store.stats()
    assert stats.errors == {}
    memory = store._memory
    assert stats.memory_bytes == sum(entry.nbytes for entry in memory._entries())
    assert all(entry.readers == 0 for entry in memory._entries())
    assert stats.n_snapshots == len(files(root))
    assert stats.disk_bytes == sum(
        path.stat().st_size for path in root.rglob("*") if path.is_file()
    )


def test_a_slow_read_delays_nobody_else(
    open_store: Open, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One match waits for its file until another's insert has returned (C04)."""
    store = open_store(memory_bytes=0)
    slow, fast, new = prompts(3)
    for ids in (slow, fast):
        store.insert(NS, ids, kv_of(ids))
    store.flush()
    (name,) = (
        info.id
        for info in store.snapshots()
        if info.id == store.explain(NS, [*slow, 0]).nearest.id  # type: ignore[union-attr]
    )
    reached, inserted, real = threading.Event(), threading.Event(), os.open

    def open_(path: Any, *args: Any, **kwargs: Any) -> int:
        if name in str(path):
            reached.set()
            assert inserted.wait(WAIT_S)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    matching = pool.submit(ask, store, slow)
    assert reached.wait(WAIT_S)
    assert ask(store, fast).n_tokens == 100
    store.insert(NS, new, kv_of(new))
    store.flush(WAIT_S)
    assert ask(store, new).n_tokens == 100
    store.stats()
    store.pin(name)
    store.unpin(name)
    assert not matching.done()
    inserted.set()
    assert matching.result(WAIT_S).n_tokens == 100


def test_a_slow_write_delays_nobody(open_store: Open, gate: Gate) -> None:
    """While a snapshot is written, everything but flush goes on (C04)."""
    store = open_store()
    writing, other = prompts(2)
    gate.opened.set()
    store.insert(NS, other, kv_of(other), label="x")
    store.flush()
    store._memory.clear()
    gate.opened.clear()
    gate.reached.clear()
    store.insert(NS, writing, kv_of(writing))
    assert gate.reached.wait(WAIT_S)
    assert ask(store, writing).source == "memory"
    assert ask(store, other).source == "disk"
    store.insert(NS, [5, *other], kv_of([5, *other]))
    store.prefetch(NS, other)
    store.explain(NS, other)
    store.pin("x")
    assert store.stats().n_pending >= 2
    assert len(list(store.snapshots())) == 1
    gate.opened.set()


def test_a_full_queue_does_not_delay_a_match(
    open_store: Open, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    """A hit is served while a prompt larger than the queue is written (C04)."""
    store = open_store(memory_bytes=0, queue_bytes=1)
    ids, other = prompts(2)
    gate.opened.set()
    store.insert(NS, ids, kv_of(ids))
    store.flush()
    gate.opened.clear()
    gate.reached.clear()
    store.insert(NS, other, kv_of(other))
    assert gate.reached.wait(WAIT_S)
    matching: Future[Match] = pool.submit(ask, store, ids)
    try:
        done = not matching.exception(timeout=1)
    except TimeoutError:
        done = False
    gate.opened.set()
    assert matching.result(WAIT_S).n_tokens == 100
    assert done


def test_the_store_keeps_no_model_alive(root: Path) -> None:
    """When caller and store have let go, model and KV are gone (S02)."""
    arguments = tiny_model().args  # it stays for other tests
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model: Any = Model(arguments)
    mx.eval(model.parameters())
    model.custom = bytearray(8)
    alive = weakref.ref(model)
    store = PromptStore.open(root)
    for number in range(4):
        ids = [number, *tokens(300)]
        cache, _ = prefill(model, ids)
        store.insert(NS, ids, cache)
        match = store.match(NS, [*ids, 1])
        prefill(model, [1], match.cache)
    store.flush()
    del model, cache, match, _  # logits are a view of those of the whole prompt
    gc.collect()
    assert alive() is None
    store.evict(to_bytes=0)
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 4096
    store.close()


def test_the_thread_that_opened_may_be_gone(root: Path, open_store: Open) -> None:
    """A store belongs to its process, not to the thread that opened it (Q02)."""
    opened: list[PromptStore] = []
    thread = threading.Thread(target=lambda: opened.append(open_store()))
    thread.start()
    thread.join()
    (store,) = opened
    ids = tokens(100)
    store.insert(NS, ids, kv_of(ids), label="x")
    store.flush()
    store._memory.clear()
    assert ask(store, ids).source == "disk"
    assert store.delete("x") == 1


def test_the_bytes_that_are_counted_are_the_bytes_that_are_held(
    open_store: Open,
) -> None:
    """Many small entries hold what stats says, and not what they are cut of (R10)."""
    store = open_store(write="off")
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    for number in range(20):
        cache = kv_of([number, *tokens(300)])
        for layer in cache:
            layer.trim(290)
        store.insert(NS, [number, *tokens(10)], cache)
    del cache, layer
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory() - before
    counted = store.stats().memory_bytes
    assert counted / 2 <= held <= counted * 2


# ----------------------------------------------------------------------- processes


def test_what_is_flushed_others_see(root: Path, open_store: Open) -> None:
    """Another process that comes and goes does not cut this one off (C02, P12)."""
    script = """
    with PromptStore.open(root, memory_bytes=0) as store:
        print(*(store.match(NS, [n, *tokens(100)]).n_tokens for n in range(3)))
    """
    store = open_store(memory_bytes=0)
    for number in range(3):
        ids = [number, *tokens(99)]
        store.insert(NS, ids, kv_of(ids))
        store.flush()
        seen = [int(word) for word in run(script, root).split()]
        assert seen == [100 if n <= number else 0 for n in range(3)]
