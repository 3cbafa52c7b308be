"""A disk in trouble costs what only it has, and no more."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import kv_of, tokens
from mlx_lm.models.cache import make_prompt_cache
from test_architectures import build, config_of

from promptstore import Namespace, PromptStore, ReasonKind, snapshot
from promptstore.mlx_lm import prefill
from promptstore.snapshot import read

NS = Namespace("trouble")


def recurrent(store: PromptStore, ends: tuple[int, ...]) -> list[int]:
    """Store a prompt of a recurrent model with a checkpoint at each end."""
    model = build(config_of("mamba2"))
    ids = [i % 250 for i in range(ends[-1])]
    cache = make_prompt_cache(model)
    start = 0
    for end in ends:
        prefill(model, ids[start:end], cache)
        store.insert(NS, ids[:end], cache, label=str(end))
        start = end
    store.flush()
    return ids


def test_an_unreadable_checkpoint_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that cannot be read is done without, not tried again and again."""
    with PromptStore.open(tmp_path, memory_bytes=0, min_tokens=1) as store:
        ids = recurrent(store, (20, 40))
        (bad,) = [info.id for info in store.snapshots() if info.label == "40"]
        real = read._open

        def refuse(path: Path) -> int:
            if path.stem == bad:
                raise snapshot.read.SnapshotUnreadable(path, "Input/output error")
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(read, "_open", refuse)
            match = store.match(NS, [*ids, 7])
        assert match.n_tokens == 20
        assert match.reason is not None
        assert match.reason.kind is ReasonKind.UNREADABLE
        assert store.match(NS, [*ids, 7]).n_tokens == 40


def test_a_layout_of_a_later_version_does_not_fit(tmp_path: Path) -> None:
    """A tag that is not known here spoils no other prompt of its namespace."""
    ids = tokens(100)
    with PromptStore.open(tmp_path) as store:
        store.insert(NS, ids, kv_of(ids))
    db = sqlite3.connect(tmp_path / "index.db")
    with db:
        db.execute(
            "insert into layouts (namespace, layers) select namespace, "
            "replace(layers, 'full/1', 'full/2') from layouts"
        )
    db.close()
    with PromptStore.open(tmp_path) as store:
        assert store.match(NS, [*ids, 7]).n_tokens == 100
        assert store.explain(NS, [*ids, 7]).n_tokens == 100


def test_a_broken_index_does_not_cost_an_image_its_memory_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look for a place between images asks the disk, but does not need it."""
    ids = [*tokens(60), *[-7] * 10, *tokens(30, seed=1)]
    with PromptStore.open(tmp_path) as store:
        store.insert(NS, ids, kv_of(ids))
        store.flush()

        def broken(*_: Any) -> Any:
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr("promptstore.index.Index.layouts", broken)
            match = store.match(NS, [*ids, 7])
        assert (match.source, match.n_tokens) == ("memory", 100)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_no_match_ends_inside_an_image(tmp_path: Path, memory_bytes: int) -> None:
    """A run of one negative id is reused whole or not at all (K06)."""
    ids = [*tokens(60), *[-7] * 10, *tokens(30, seed=1)]
    with PromptStore.open(tmp_path, memory_bytes=memory_bytes) as store:
        store.insert(NS, ids, kv_of(ids))
        store.flush()
        for n_shared in (60, 61, 64, 69, 70, 75):
            match = store.match(NS, [*ids[:n_shared], -8, 7])
            assert match.n_tokens == (60 if 60 < n_shared < 70 else n_shared)


def test_a_flush_keeps_its_deadline_in_write_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs costs the time that was given, however many must be written."""
    hang = threading.Event()
    real = snapshot.write

    def wait(*args: Any) -> Any:
        hang.wait()
        return real(*args)

    monkeypatch.setattr(snapshot, "write", wait)
    store = PromptStore.open(tmp_path, write="back", queue_bytes=1)
    for seed in range(5):
        store.insert(NS, [seed, *tokens(99, seed)], kv_of([seed, *tokens(99, seed)]))
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        store.flush(0.2)
    assert time.monotonic() - start < 60
    hang.set()
    store.close()
    with PromptStore.open(tmp_path) as store:
        assert store.stats().n_snapshots == 5


def test_delete_reaches_what_memory_has_of_it_and_no_more(tmp_path: Path) -> None:
    """A checkpoint's state goes, and a prompt that only begins alike stays."""
    with PromptStore.open(tmp_path, min_tokens=1) as store:
        ids = recurrent(store, (20, 40))
        short = [ids[0], *tokens(30, seed=3)]
        store.insert(NS, short, kv_of(short))
        store.flush()
        store.delete("40")

        assert store.match(NS, [*ids, 7]).n_tokens == 20
        assert store.match(NS, [*short, 7]).n_tokens == 31


@pytest.mark.parametrize("first_ttl_s", [None, 60.0])
def test_lives_in_memory_are_apart(
    monkeypatch: pytest.MonkeyPatch, first_ttl_s: float | None
) -> None:
    """A prompt that is forgotten takes no other with it, longer or shorter."""
    ids = tokens(100)
    second_ttl_s = 60.0 if first_ttl_s is None else None
    with PromptStore.open(disk_bytes=0) as store:
        store.insert(NS, ids[:50], kv_of(ids[:50]), ttl_s=first_ttl_s)
        store.insert(NS, ids, kv_of(ids), ttl_s=second_ttl_s)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)

        expected = 50 if first_ttl_s is None else 100
        assert store.match(NS, [*ids, 7]).n_tokens == expected


def test_a_state_that_is_stored_again_for_good_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer life is that of the rows and of the checkpoint alike."""
    model = build(config_of("mamba2"))
    ids = [i % 250 for i in range(40)]
    cache = make_prompt_cache(model)
    prefill(model, ids, cache)
    with PromptStore.open(tmp_path, memory_bytes=0, min_tokens=1) as store:
        store.insert(NS, ids, cache, ttl_s=60.0)
        store.insert(NS, ids, cache)
        store.flush()
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now + 61 * 10**9)

        assert store.match(NS, [*ids, 7]).n_tokens == 40


def test_a_label_on_a_short_prompt_is_a_wish_to_keep_it(tmp_path: Path) -> None:
    """What is named or pinned is stored, however short."""
    ids = tokens(5)
    with PromptStore.open(tmp_path) as store:
        store.insert(NS, ids, kv_of(ids), label="short")
        store.insert(NS, tokens(6, 1), kv_of(tokens(6, 1)))
        store.flush()

        assert [info.label for info in store.snapshots()] == ["short"]


def test_a_clock_that_was_set_back_does_not_keep_old_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses in what is now the future count as of now: the older prompt goes first."""
    first, second = ([n, *tokens(99, n)] for n in (1, 2))
    with PromptStore.open(tmp_path, memory_bytes=0) as store:
        store.insert(NS, first, kv_of(first))
        store.flush()
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)
        store.insert(NS, second, kv_of(second))
        store.flush()
        store.evict(to_bytes=store.stats().disk_bytes - 1)

        assert [info.end for info in store.snapshots()] == [100]
        assert store.explain(NS, [*second, 7]).n_disk == 100
