"""Facts about the index: what it finds, compares, keeps, and lets go."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tokens

from promptstore import Namespace, eviction, prefix
from promptstore.extent import Band, Extent, StateArray
from promptstore.index import (
    Duplicate,
    Found,
    Gone,
    Index,
    Layout,
    NewRow,
    Row,
    prepare,
    search,
)
from promptstore.index.rows import pack, unpack
from promptstore.index.search import Search
from promptstore.layers import Layer, RowPart, to_text
from promptstore.tokens import Tokens

NS = Namespace("model")
IMAGE = -855241551491862571
SECOND = 1_000_000_000
EXTENT = Extent(
    300,
    700,
    (Band((0, 2), ((300, 700),)), Band((1,), ((100, 200), (650, 700)))),
    {1: 7},
    (StateArray(3, "0", "F32", (1, 4)),),
)
SHARES = [0, 1, 100, 255, 256, 257, 511, 512, 513, 599, 600]


class Clock:
    """The time that the index sees; it moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", clock)
    return clock


@pytest.fixture(autouse=True, params=[0, 12], ids=["by digest", "from the root"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fact holds whichever way a prompt is looked for."""
    monkeypatch.setattr(search, "_MAX_STEPS", request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    prepare(tmp_path / "index.db")
    return tmp_path / "index.db"


@pytest.fixture
def index(path: Path) -> Iterator[Index]:
    index = Index(path)
    try:
        yield index
        assert index.is_sound()
    finally:
        index.close()


@pytest.fixture
def layout(index: Index) -> Layout:
    return index.layout(NS, "layers")


_numbers = itertools.count()


def ids(of: Sequence[int]) -> Tokens:
    return np.array(list(of), np.int64)


def new_row(
    layout: Layout, prompt: Sequence[int], parent: int | None, start: int, **more: Any
) -> NewRow:
    ttl_s = more.pop("ttl_s", None)
    lives_ns = None if ttl_s is None else int(ttl_s * 1e9)
    return NewRow(
        expires_ns=None if lives_ns is None else time.time_ns() + lives_ns,
        name=f"{next(_numbers):032x}",
        layout=layout,
        parent=parent,
        extent=more.pop("extent", Extent(start, len(prompt))),
        tokens=ids(prompt),
        nbytes=more.pop("nbytes", 4096),
        checksums=more.pop("checksums", bytes(48)),
        kind=more.pop("kind", "assistant"),
        **more,
    )


def add(index: Index, layout: Layout, prompt: Sequence[int], **more: Any) -> Row:
    """Add what is new of *prompt* where it belongs, as the disk tier does."""
    found = index.find(layout, ids(prompt))
    parent = found.chain[-1].id if found.chain else None
    label, pinned = more.pop("label", None), more.pop("pinned", False)
    new = new_row(layout, prompt, parent, found.n_tokens, **more)
    index.add(new)
    (row,) = index.named(new.name)
    if label is not None or pinned:
        index.mark(row, label=label, pinned=pinned)
    (row,) = index.named(new.name)
    return row


def n_found(index: Index, layout: Layout, query: Sequence[int]) -> int:
    """Return how much is found, once it is proven to be of these very tokens."""
    found = index.find(layout, ids(query))
    held: list[int] = []
    for row, lo, hi in found.pieces if found.chain else []:
        assert (row.start, len(held)) == (lo, lo)
        assert lo <= hi <= row.end
        held += row.tokens[: hi - lo].tolist()
    assert list(query[: found.n_tokens]) == held
    return found.n_tokens


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def names(rows: Sequence[Row]) -> list[str]:
    return [row.name for row in rows]


# --------------------------------------------------------------------- finding


def test_an_empty_index_finds_nothing(index: Index, layout: Layout) -> None:
    """A miss has no chain, diverges from nothing and has not expired."""
    for query in ([], [1], tokens(600)):
        assert index.find(layout, ids(query)) == Found()
    assert index.rows() == []
    assert (index.n_snapshots(), index.nbytes(), index.names()) == (0, 0, set())


def test_nothing_found_has_no_pieces() -> None:
    """A miss serves no tokens."""
    assert Found().pieces == []


@pytest.mark.parametrize("n_shared", SHARES)
def test_matching_is_exact_to_the_token(
    index: Index, layout: Layout, n_shared: int
) -> None:
    """A prompt that parts inside a block shares up to its last common token."""
    stored = tokens(600)
    row = add(index, layout, stored)
    found = index.find(layout, ids(stored[:n_shared] + [5000] * 300))
    assert found.n_tokens == n_shared
    assert names(found.chain) == ([row.name] if n_shared else [])
    assert found.diverges == (n_shared < 600)
    assert not found.expired


@pytest.mark.parametrize("n_asked", SHARES[1:])
def test_a_prefix_of_a_prompt_is_found_whole(
    index: Index, layout: Layout, n_asked: int
) -> None:
    """A query that ends inside a stored prompt is found to its end, diverging not."""
    stored = tokens(600)
    add(index, layout, stored)
    found = index.find(layout, ids(stored[:n_asked]))
    assert (found.n_tokens, found.diverges) == (n_asked, False)


@pytest.mark.parametrize("n_stored", [1, 2, 10, 255])
def test_prompts_shorter_than_a_block_are_found(
    index: Index, layout: Layout, n_stored: int
) -> None:
    """No boundary is needed to find a short prompt, longer queries included."""
    stored = tokens(n_stored)
    add(index, layout, stored)
    assert n_found(index, layout, stored) == n_stored
    assert n_found(index, layout, [*stored, 5000]) == n_stored
    assert n_found(index, layout, stored + tokens(600, seed=1)) == n_stored
    assert n_found(index, layout, [*stored[:-1], 5000]) == n_stored - 1


@pytest.mark.parametrize("at", [0, 1, 100, 255, 256, 257, 512, 599, 600])
def test_a_branch_starts_where_it_diverges(
    index: Index, layout: Layout, at: int
) -> None:
    """A branch continues its parent inside the parent's range, and both are found."""
    trunk = tokens(600)
    branch = trunk[:at] + [6000 + i for i in range(700)]
    parent = add(index, layout, trunk)
    child = add(index, layout, branch)
    assert (child.start, child.end) == (at, at + 700)
    assert child.parent == (parent.id if at else None)
    assert child.tokens.tolist() == branch[at:]
    assert index.tokens_of(child).tolist() == branch
    assert n_found(index, layout, branch) == len(branch)
    assert n_found(index, layout, [*trunk, 7]) == 600
    for part in (1, 255, 256, 257, 699):
        assert n_found(index, layout, branch[: at + part] + [8000] * 9) == at + part
    pieces = index.find(layout, ids(branch)).pieces
    expected = [(parent.name, 0, at)] * bool(at) + [(child.name, at, at + 700)]
    assert expected == [(row.name, lo, hi) for row, lo, hi in pieces]


def test_branches_of_branches_are_found(index: Index, layout: Layout) -> None:
    """Branches at one place, and branches inside a branch, are kept apart."""
    trunk = tokens(400)
    prompts = [
        trunk,
        trunk[:300] + [6001] * 300,
        trunk[:300] + [6002] * 300,
        trunk[:300] + [6002] * 150 + [6003] * 300,
        trunk[:100] + [6002] * 20,
        trunk + [6004] * 600,
        trunk + [6004] * 600 + [6005],
    ]
    for prompt in prompts:
        add(index, layout, prompt)
    for prompt in prompts:
        assert n_found(index, layout, [*prompt, 9000]) == len(prompt)
        assert n_found(index, layout, prompt[:-1]) == len(prompt) - 1


@pytest.mark.parametrize(("n_turns", "n_each"), [(40, 7), (12, 300), (5, 256)])
def test_a_deep_chain_is_found(
    index: Index, layout: Layout, n_turns: int, n_each: int
) -> None:
    """Each turn holds only its own tokens; the whole conversation is one chain."""
    talk = tokens(n_turns * n_each)
    rows = [add(index, layout, talk[: n * n_each]) for n in range(1, n_turns + 1)]
    assert [row.start for row in rows] == [n * n_each for n in range(n_turns)]
    found = index.find(layout, ids([*talk, 5000]))
    assert names(rows) == names(found.chain)
    assert index.tokens_of(rows[-1]).tolist() == talk
    for n in (1, n_each, n_each + 1, len(talk) // 2, len(talk) - 1):
        assert n_found(index, layout, talk[:n] + [5000] * 300) == n


def test_a_snapshot_of_no_rows_marks_a_place(index: Index, layout: Layout) -> None:
    """A label inside a stored prompt gets a row of its own, which is no branch."""
    trunk = tokens(600)
    parent = add(index, layout, trunk)
    mark = add(index, layout, trunk[:300], label="here")
    assert (mark.start, mark.end, mark.parent) == (300, 300, parent.id)
    assert mark.tokens.tolist() == []
    assert index.tokens_of(mark).tolist() == trunk[:300]
    found = index.find(layout, ids(trunk[:300] + [5000] * 300))
    assert (found.n_tokens, names(found.chain)) == (300, [parent.name])
    child = add(index, layout, trunk[:300] + [5000] * 300)
    assert child.parent == parent.id
    assert n_found(index, layout, trunk) == 600


def test_a_query_diverges_only_where_something_continues(
    index: Index, layout: Layout
) -> None:
    """The end of what is stored is no divergence; a branch there is."""
    stored = tokens(300)
    add(index, layout, stored)
    assert not index.find(layout, ids([*stored, 1])).diverges
    assert index.find(layout, ids([*stored[:299], 5000])).diverges
    assert index.find(layout, ids([5000])).diverges
    add(index, layout, [*stored, 5000])
    assert index.find(layout, ids([*stored, 5001])).diverges
    assert not index.find(layout, ids(stored)).diverges


@pytest.mark.parametrize("ids_", [[IMAGE], [IMAGE, 7], [2**32 + 5], [2**63 - 1, -1]])
def test_ids_of_more_than_32_bits_are_found(
    index: Index, layout: Layout, ids_: list[int]
) -> None:
    """Ids come back whole, and differ from what they share their low bits with."""
    row = add(index, layout, ids_ * 300)
    assert row.tokens.tolist() == ids_ * 300
    assert n_found(index, layout, ids_ * 300) == 300 * len(ids_)
    low = [id_ & 0x7FFFFFFF for id_ in ids_]
    assert n_found(index, layout, low * 300) == 0
    branch = ids_ * 100 + [IMAGE + 1] * 300
    child = add(index, layout, branch)
    assert child.start == 100 * len(ids_)
    assert n_found(index, layout, branch) == len(branch)
    mixed = ids_ * 100 + [(IMAGE + 1) & 0xFFFFFFFF]
    assert n_found(index, layout, mixed) == 100 * len(ids_)


@pytest.mark.parametrize(
    ("prompt", "n_bytes"),
    [
        ([], 0),
        ([0, 2**31 - 1, -(2**31)], 12),
        ([2**31], 8),
        ([-(2**31) - 1, 5], 16),
        ([IMAGE], 8),
        ([2**32 + 5, 5], 16),
        ([2**63 - 1, -(2**63)], 16),
    ],
)
def test_ids_are_packed_as_narrow_as_they_are(prompt: list[int], n_bytes: int) -> None:
    """Ids of 32 bits take 4 bytes each, others 8, and all come back."""
    blob = pack(ids(prompt))
    assert n_bytes == len(blob)
    assert prompt == unpack(blob, len(prompt)).tolist()


@pytest.mark.parametrize("block", [4, 256])
def test_random_operations_agree_with_a_list_of_prompts(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Whatever was added and removed, the longest shared prefix is found."""
    seed = int(os.environ.get("PROMPTSTORE_SEED", "20240608"))
    print(f"PROMPTSTORE_SEED={seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(prefix, "BLOCK", block)
    stored: dict[int, list[int]] = {}

    def prompt() -> list[int]:
        head = (
            rng.choice(list(stored.values())) if stored and rng.random() < 0.7 else []
        )
        head = head[: rng.randrange(len(head) + 1)]
        return head + [rng.randrange(2) for _ in range(rng.randrange(1, 3 * block))]

    for _ in range(400 if block == 4 else 60):
        new = prompt()
        if rng.random() < 0.6:
            if index.row_at(layout, ids(new)) is None:
                stored[add(index, layout, new).id] = new
        elif stored:
            gone = rng.choice(list(stored))
            if rng.random() < 0.8:
                row = next(row for row in index.rows() if row.id == gone)
                is_leaf = all(other.parent != gone for other in index.rows())
                assert is_leaf == index.remove_leaf(row.id)
                removed = [gone] if is_leaf else []
            else:
                removed = [row.id for row in index.remove([gone])]
            for id_ in removed:
                del stored[id_]
        query = prompt()
        expected = max((n_common(query, held) for held in stored.values()), default=0)
        assert expected == n_found(index, layout, query)
    assert sorted(stored) == sorted(row.id for row in index.rows())
    for row in index.rows():
        assert stored[row.id] == index.tokens_of(row).tolist()


def statements(index: Index, ask: Callable[[], Any]) -> list[str]:
    seen: list[str] = []
    index._db.set_trace_callback(seen.append)
    try:
        ask()
    finally:
        index._db.set_trace_callback(None)
    return seen


@pytest.mark.parametrize("n_shared", [0, 117_964, 131_072])
def test_a_look_up_takes_few_statements(
    index: Index, layout: Layout, n_shared: int
) -> None:
    """131,072 tokens against 10 stored prompts take O(log blocks) statements."""
    rng = np.random.default_rng(11)
    query = rng.integers(0, 150_000, 131_072)
    for _ in range(10):
        rest = rng.integers(150_000, 300_000, 131_072 - n_shared)
        if n_shared < 131_072 or index.n_snapshots() == 0:
            add(index, layout, [*query[:n_shared].tolist(), *rest.tolist()])
    found: list[Found] = []
    seen = statements(index, lambda: found.append(index.find(layout, query)))
    assert found[0].n_tokens == n_shared
    assert len(seen) <= 40


def test_a_long_prompt_adds_no_statement_for_each_block(
    index: Index, layout: Layout
) -> None:
    """Eight times the blocks cost three more steps up and three more down."""
    counts = []
    for n_blocks in (64, 512):
        prompt = tokens(n_blocks * 256, seed=n_blocks)
        add(index, layout, prompt)
        seen = statements(index, lambda p=prompt: index.find(layout, ids([*p, 5000])))
        counts.append(len(seen))
    assert counts[1] - counts[0] <= 6


# ---------------------------------------------------------------- collisions


def test_equal_digests_are_not_equal_tokens(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault W10: with a constant hash the tokens still decide what is served."""
    monkeypatch.setattr(prefix, "extend", lambda parent, block: bytes(16))
    a, b, c = (tokens(600, seed=seed) for seed in (1, 2, 3))
    add(index, layout, a)
    # An equal end digest counts as the same prompt: B is not stored, so it misses.
    with pytest.raises(Duplicate):
        add(index, layout, b)
    assert n_found(index, layout, [*a, 5000]) == 600
    assert n_found(index, layout, a[:300]) == 300
    assert n_found(index, layout, [*b, 5000]) == n_common(a, b)
    assert n_found(index, layout, [*c, 5000]) == n_common(a, c)


@pytest.mark.parametrize("n_bits", [0, 1, 3, 6])
def test_a_weak_hash_never_serves_other_tokens(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch, n_bits: int
) -> None:
    """With digests of a few bits each look-up is right, if not always the longest."""
    plain = prefix.extend

    def weak(parent: bytes, block: Tokens) -> bytes:
        number = int.from_bytes(plain(parent, block), "little")
        return (number % 2**n_bits).to_bytes(16, "little")

    monkeypatch.setattr(prefix, "extend", weak)
    monkeypatch.setattr(prefix, "BLOCK", 4)
    rng = random.Random(12)
    stored: list[list[int]] = []
    for _ in range(200):
        head = rng.choice(stored) if stored else []
        prompt = head[: rng.randrange(len(head) + 1)]
        prompt = prompt + [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        try:
            add(index, layout, prompt)
            stored.append(prompt)
        except Duplicate:
            pass
        query = prompt[: rng.randrange(len(prompt) + 1)] + [rng.randrange(2)] * 5
        best = max(n_common(query, held) for held in stored)
        assert n_found(index, layout, query) <= best


def test_a_collision_does_not_shorten_what_is_found(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault W10: a stored prompt is found whole although a branch has its digest."""
    plain = prefix.extend

    def weak(parent: bytes, block: Tokens) -> bytes:
        return bytes(16) if len(block) == prefix.BLOCK else plain(parent, block)

    trunk = tokens(300)
    add(index, layout, trunk[:200])
    add(index, layout, trunk[:100] + [5000] * 200)
    monkeypatch.setattr(prefix, "extend", weak)
    branch = add(index, layout, trunk[:100] + [6000] * 200)
    assert branch.start == 100
    assert n_found(index, layout, trunk) == 200


def test_a_row_at_some_tokens_has_these_tokens(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 4: a label or a pin never goes to another prompt of equal digest."""
    monkeypatch.setattr(prefix, "extend", lambda parent, block: bytes(16))
    add(index, layout, tokens(600, seed=1))
    assert index.row_at(layout, ids(tokens(600, seed=2))) is None


# ------------------------------------------------------------------- layouts


def test_namespaces_and_layers_are_kept_apart(index: Index) -> None:
    """The same tokens in another namespace, or of other layers, are not found."""
    prompt = tokens(600)
    layouts = [
        index.layout(Namespace("a", adapter="b|c"), "x"),
        index.layout(Namespace("a|b", adapter="c"), "x"),
        index.layout(Namespace("a"), "x"),
        index.layout(Namespace("a", tenant="t"), "x"),
        index.layout(Namespace("a", tenant="None"), "x"),
        index.layout(Namespace("a"), "y"),
    ]
    assert len({layout.id for layout in layouts}) == len(layouts)
    add(index, layouts[0], prompt)
    for layout in layouts[1:]:
        assert index.find(layout, ids(prompt)) == Found()
    for layout in layouts[1:]:
        add(index, layout, prompt)
    for layout in layouts:
        found = index.find(layout, ids(prompt))
        assert (found.n_tokens, found.chain[0].layout) == (600, layout.id)


def test_a_layout_is_made_once(index: Index) -> None:
    """Asked for again it is the same, and it is listed in its namespace only."""
    first = index.layout(NS, "layers")
    assert first == index.layout(NS, "layers")
    assert [first] == index.layouts(NS)
    assert index.layouts(Namespace("other")) == []
    assert index.describe(first.id) == (NS, "layers")
    assert first.seed == prefix.seed(NS.digest, "layers")


def test_a_namespace_comes_back_as_it_was(index: Index) -> None:
    """All fields survive, whatever characters they hold."""
    odd = Namespace('a"\n', "\0", "Ä", "../..", "💾", "x" * 1000)
    layout = index.layout(odd, "layers")
    assert index.describe(layout.id) == (odd, "layers")


# ------------------------------------------------------------------- expiry


def test_what_has_expired_is_not_found(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """From the very moment on, nothing is served from it, and the reason is told."""
    prompt = tokens(600)
    row = add(index, layout, prompt, ttl_s=10)
    assert row.expires_ns is not None
    clock.now = row.expires_ns - 2
    assert n_found(index, layout, prompt) == 600
    clock.now = row.expires_ns - 1
    found = index.find(layout, ids(prompt))
    assert (found.n_tokens, found.chain, found.expired) == (0, (), True)
    assert not index.find(layout, ids([5000])).expired


def test_of_chains_as_deep_the_one_that_ends_there_is_found(
    index: Index, layout: Layout
) -> None:
    """Only where a snapshot ends can all kinds of layers be resumed."""
    long, short = list(range(200)), list(range(150))
    index.add(new_row(layout, long, None, 0, ttl_s=100))
    lasting = new_row(layout, short, None, 0)
    index.add(lasting)
    (row,) = index.find(layout, ids(short)).chain
    assert row.name == lasting.name
    (row,) = index.find(layout, ids(long)).chain
    assert row.end == 200


def test_a_chain_is_not_doubled(index: Index, layout: Layout) -> None:
    """What begins like one that lives as long must continue it; not so what outlives
    it, nor what is added on purpose."""
    index.add(new_row(layout, [1, 2, 3], None, 0, ttl_s=100))
    index.add(new_row(layout, [1, 2, 4], None, 0))
    for ttl_s in (None, 50):
        with pytest.raises(Gone):
            index.add(new_row(layout, [1, 2, 5], None, 0, ttl_s=ttl_s))
    assert index.n_snapshots() == 2
    index.add(new_row(layout, [1, 2, 5], None, 0), beside=True)
    assert index.n_snapshots() == 3


@pytest.mark.parametrize("at", [100, 256, 300, 600])
def test_what_an_expired_snapshot_continues_is_found(
    index: Index, layout: Layout, clock: Clock, at: int
) -> None:
    """Only the tokens of the expired branch are lost, and those behind it."""
    trunk = tokens(600)
    branch = trunk[:at] + [5000] * 300
    parent = add(index, layout, trunk)
    add(index, layout, branch, ttl_s=10)
    add(index, layout, branch + [6000] * 300)
    clock.now += 11 * SECOND
    found = index.find(layout, ids(branch + [6000] * 300))
    assert (found.n_tokens, names(found.chain)) == (at, [parent.name])
    assert found.expired
    assert n_found(index, layout, trunk) == 600
    assert not index.find(layout, ids(trunk)).expired


def test_removing_what_has_expired_takes_what_continues_it(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """KV that needs expired rows is of no use; all else stays."""
    trunk = tokens(300)
    kept = [
        add(index, layout, trunk),
        add(index, layout, tokens(300, seed=1), ttl_s=1000),
    ]
    gone = [
        add(index, layout, trunk + [5000] * 300, ttl_s=10),
        add(index, layout, trunk + [5000] * 600),
        add(index, layout, trunk + [5000] * 100 + [6000] * 9, ttl_s=1000),
    ]
    assert index.remove_expired() == []
    clock.now += 11 * SECOND
    assert sorted(names(gone)) == sorted(names(index.remove_expired()))
    assert sorted(names(kept)) == sorted(index.names())
    assert index.remove_expired() == []


def test_the_same_prompt_can_be_stored_again_after_it_expired(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """Once removed, an expired prompt is no duplicate."""
    add(index, layout, tokens(600), ttl_s=10)
    clock.now += 11 * SECOND
    index.remove_expired()
    add(index, layout, tokens(600))
    assert n_found(index, layout, tokens(600)) == 600


def test_no_time_to_live_expires_at_once(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """0 seconds is a time to live, and not for ever."""
    add(index, layout, tokens(600), ttl_s=0)
    assert n_found(index, layout, tokens(600)) == 0


# --------------------------------------------------------------------- adding


def test_a_row_has_what_it_was_given(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """All facts of a snapshot come back."""
    parent = add(index, layout, tokens(300))
    new = new_row(
        layout,
        tokens(700),
        parent.id,
        300,
        nbytes=12345,
        checksums=bytes(range(64)),
        kind="system",
        extent=EXTENT,
    )
    new = dataclasses.replace(new, expires_ns=clock.now + 1_500_000_000)
    index.add(new)
    now = clock.now
    (row,) = index.named(new.name)
    expected = {
        "name": new.name,
        "layout": layout.id,
        "parent": parent.id,
        "start": 300,
        "end": 700,
        "extent": EXTENT,
        "nbytes": 12345,
        "checksums": bytes(range(64)),
        "kind": "system",
        "label": None,
        "pinned": False,
        "created_ns": now,
        "used_ns": now,
        "expires_ns": new.expires_ns,
        "hits": 0,
    }
    assert expected == {name: getattr(row, name) for name in expected}
    assert row.tokens.tolist() == tokens(700)[300:]
    assert index.nbytes() == 4096 + 12345
    assert index.n_snapshots() == 2
    assert index.names() == {parent.name, row.name}
    assert index.has(row.name)
    assert not index.has("0" * 31)
    assert index.name_of(parent.id) == parent.name
    assert index.name_of(999) is None
    assert names(index.named(row.name)) == [row.name]
    assert index.named("nothing") == []


def test_a_row_is_found_at_its_end_only(index: Index, layout: Layout) -> None:
    """A prompt has a row of its own where a snapshot ends with exactly its tokens."""
    row = add(index, layout, tokens(600))
    found = index.row_at(layout, ids(tokens(600)))
    assert found is not None
    assert found.name == row.name
    for other in (tokens(599), tokens(512), [*tokens(600), 1], tokens(600, seed=1)):
        assert index.row_at(layout, ids(other)) is None
    assert index.row_at(index.layout(NS, "other"), ids(tokens(600))) is None


def test_the_same_prompt_twice_is_a_duplicate(index: Index, layout: Layout) -> None:
    """Who comes second is told, and has changed nothing, labels included."""
    prompt = tokens(600)
    index.add(new_row(layout, prompt, None, 0))
    labelled = add(index, layout, tokens(9, seed=1), label="taken", pinned=True)
    with pytest.raises(Duplicate):
        index.add(new_row(layout, prompt, None, 0))
    (row,) = index.named("taken")
    assert (row.name, row.pinned) == (labelled.name, True)
    assert index.n_snapshots() == 2


def test_a_prompt_stored_from_elsewhere_is_a_duplicate_too(
    index: Index, layout: Layout
) -> None:
    """Two processes may cut the same prompt at different places."""
    prompt = tokens(600)
    add(index, layout, prompt[:300])
    add(index, layout, prompt)
    with pytest.raises(Duplicate):
        index.add(new_row(layout, prompt, None, 0))


@pytest.mark.parametrize("gone", [None, 0, 1])
def test_twin_branches_of_one_beginning_are_found(
    index: Index, layout: Layout, gone: int | None
) -> None:
    """Two roots that share a head, as a rebuild or an older version may leave them,
    are found whole, and either of them is when the other goes."""
    prompts = [tokens(600) + [1] * 300, tokens(600) + [2] * 300]
    rows = []
    for prompt in prompts:
        new = new_row(layout, prompt, None, 0)
        index.add(new, beside=True)
        rows += index.named(new.name)
    if gone is not None:
        assert index.remove_leaf(rows[gone].id)
    for number, prompt in enumerate(prompts):
        assert n_found(index, layout, prompt) == (600 if number == gone else 900)
    assert n_found(index, layout, [*prompts[0][:300], 5000]) == 300


def test_a_parent_that_is_gone_is_told(index: Index, layout: Layout) -> None:
    """Nothing is added that would continue rows which are not there."""
    parent = add(index, layout, tokens(300))
    index.remove([parent.id])
    with pytest.raises(Gone):
        index.add(new_row(layout, tokens(600), parent.id, 300))
    assert index.n_snapshots() == 0


@pytest.mark.parametrize("start", [99, 301])
def test_a_parent_must_reach_the_start(
    index: Index, layout: Layout, start: int
) -> None:
    """A start before or behind the parent's range would leave a gap."""
    add(index, layout, tokens(100))
    parent = add(index, layout, tokens(300))
    with pytest.raises(Gone):
        index.add(new_row(layout, tokens(600), parent.id, start))


def test_a_snapshot_is_immutable(index: Index, layout: Layout) -> None:
    """What a file holds cannot be changed in its row, by nobody."""
    add(index, layout, tokens(300))
    for column in ("tokens", "start_token", "end_digest", "checksums", "name"):
        with pytest.raises(sqlite3.IntegrityError, match="immutable"):
            index._db.execute(f"update snapshots set {column} = {column}")


# ------------------------------------------------------- labels, pins and uses


def test_a_label_moves_with_its_pin(index: Index, layout: Layout) -> None:
    """The newest prompt of a label has it; the old one is an ordinary snapshot."""
    old = add(index, layout, tokens(300), label="a", pinned=True)
    new = add(index, layout, tokens(300, seed=1), label="a")
    rows = {row.name: (row.label, row.pinned) for row in index.rows()}
    assert rows == {old.name: (None, False), new.name: ("a", False)}


def test_a_label_is_one_of_its_layout(index: Index, layout: Layout) -> None:
    """Two models may have a prompt of the same label each."""
    other = index.layout(Namespace("other"), "layers")
    one = add(index, layout, tokens(300), label="a", pinned=True)
    two = add(index, other, tokens(300), label="a")
    assert sorted(names(index.named("a"))) == sorted([one.name, two.name])
    assert index.named(one.name)[0].pinned


def test_labels_are_not_patterns(index: Index, layout: Layout) -> None:
    """A label is compared as it is."""
    add(index, layout, tokens(300), label="100%")
    assert index.named("100") == []
    assert index.named("%") == []
    assert len(index.named("100%")) == 1


def test_mark_gives_what_a_repeated_insert_asks_for(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """Label and pin are added; what is not asked for is kept."""
    row = add(index, layout, tokens(300))
    index.mark(row, label=None, pinned=False)
    assert (row.label, row.pinned) == (None, False)
    index.mark(row, label="a", pinned=True)
    (row,) = index.named("a")
    assert (row.label, row.pinned) == ("a", True)
    index.mark(row, label=None, pinned=False)
    (row,) = index.named("a")
    assert (row.label, row.pinned) == ("a", True)
    assert (row.used_ns, row.hits) == (clock.now, 0)


def test_a_life_is_only_prolonged(index: Index, layout: Layout, clock: Clock) -> None:
    """A snapshot lives as long as the longest-lived prompt that it holds."""
    row = add(index, layout, tokens(300), ttl_s=10)
    kept = add(index, layout, tokens(300, seed=1))
    first_ns, later_ns = row.expires_ns, clock.now + 20 * SECOND
    for expires_ns, expected in (
        (clock.now + 5 * SECOND, first_ns),
        (later_ns, later_ns),
        (None, None),
        (clock.now + 5 * SECOND, None),
    ):
        index.prolong([row, kept], expires_ns)
        assert {r.name: r.expires_ns for r in index.rows()} == {
            row.name: expected,
            kept.name: None,
        }


def test_mark_with_its_own_label_keeps_the_pin(index: Index, layout: Layout) -> None:
    """A label that is asked for again is not taken away from its own prompt."""
    row = add(index, layout, tokens(300), label="a", pinned=True)
    index.mark(row, label="a", pinned=False)
    assert [(r.name, r.pinned) for r in index.named("a")] == [(row.name, True)]


def test_mark_takes_a_label_from_another(index: Index, layout: Layout) -> None:
    """A label that moves to a stored prompt leaves the other without its pin."""
    old = add(index, layout, tokens(300), label="a", pinned=True)
    row = add(index, layout, tokens(300, seed=1), label="b")
    index.mark(row, label="a", pinned=False)
    rows = {r.name: (r.label, r.pinned) for r in index.rows()}
    assert rows == {old.name: (None, False), row.name: ("a", False)}
    assert index.named("b") == []


def test_set_pinned_changes_these_only(index: Index, layout: Layout) -> None:
    """Pins are set and lifted by id; ids that are gone do not matter."""
    rows = [add(index, layout, tokens(300, seed=seed)) for seed in range(3)]
    index.set_pinned([rows[0].id, rows[2].id, 999], True)
    assert {r.name for r in index.rows() if r.pinned} == {rows[0].name, rows[2].name}
    index.set_pinned([rows[0].id], False)
    assert {r.name for r in index.rows() if r.pinned} == {rows[2].name}


def test_touch_never_goes_back_in_time(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """A use counts, and the latest is kept, in whatever order they are recorded."""
    row = add(index, layout, tokens(300))
    later = row.used_ns + 100
    index.touch([(row.id, later, 1), (999, later, 1)])
    index.touch([(row.id, later - 50, 1)])
    (row,) = index.named(row.name)
    assert (row.used_ns, row.hits) == (later, 2)
    index.touch([])


@pytest.mark.parametrize("n_hits", [0, 1, 5])
def test_touch_counts_what_it_is_told(
    index: Index, layout: Layout, clock: Clock, n_hits: int
) -> None:
    """An insert that finds its rows stored is a use, but no hit."""
    row = add(index, layout, tokens(300))
    index.touch([(row.id, row.used_ns + 100, n_hits)])
    (after,) = index.named(row.name)
    assert (after.used_ns, after.hits) == (row.used_ns + 100, n_hits)


def test_rows_come_by_their_last_use(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """The most recently used is listed first."""
    rows = [add(index, layout, tokens(9, seed=seed)) for seed in range(3)]
    index.touch([(rows[0].id, clock.now + 5, 1)])
    expected = [rows[0].name, rows[2].name, rows[1].name]
    assert expected == names(index.rows())


# --------------------------------------------------------- removing, eviction


def test_remove_takes_all_that_continues(index: Index, layout: Layout) -> None:
    """A subtree goes as a whole; its parent and its siblings stay."""
    trunk = tokens(300)
    parent = add(index, layout, trunk)
    sibling = add(index, layout, trunk[:100] + [5000] * 9)
    gone = [add(index, layout, trunk + [6000] * 300)]
    gone.append(add(index, layout, trunk + [6000] * 600))
    gone.append(add(index, layout, trunk + [6000] * 10 + [7000] * 300))
    removed = index.remove([gone[0].id])
    assert sorted(names(gone)) == sorted(names(removed))
    assert removed[0].tokens.tolist() == gone[-1].tokens.tolist()
    assert {parent.name, sibling.name} == index.names()
    assert n_found(index, layout, trunk + [6000] * 600) == 300
    assert n_found(index, layout, trunk[:100] + [5000] * 9) == 109


def test_remove_takes_several_at_once(index: Index, layout: Layout) -> None:
    """Ids that overlap, or are gone, are removed once or not at all."""
    parent = add(index, layout, tokens(300))
    child = add(index, layout, tokens(600))
    other = add(index, layout, tokens(300, seed=1))
    removed = index.remove([child.id, parent.id, other.id, 999])
    expected = sorted([parent.name, child.name, other.name])
    assert expected == sorted(names(removed))
    assert index.remove([parent.id]) == []
    assert index.remove([]) == []
    assert index.n_snapshots() == 0


def test_boundaries_go_with_their_snapshot(index: Index, layout: Layout) -> None:
    """No digest is left that would point nowhere."""
    row = add(index, layout, tokens(1000))
    assert index._all("select count(*) from prefixes") == [(3,)]
    index.remove([row.id])
    assert index._all("select count(*) from prefixes") == [(0,)]


def test_boundaries_belong_to_who_holds_them(index: Index, layout: Layout) -> None:
    """A branch holds the boundaries behind its start, not those before it."""
    parent = add(index, layout, tokens(600))
    child = add(index, layout, tokens(300) + [5000] * 600)
    held = index._all("select snapshot, position from prefixes order by 1, 2")
    assert held == [
        (parent.id, 256),
        (parent.id, 512),
        (child.id, 512),
        (child.id, 768),
    ]


def test_remove_leaf_spares_what_is_continued(index: Index, layout: Layout) -> None:
    """A snapshot that something continues by now stays."""
    parent = add(index, layout, tokens(300))
    child = add(index, layout, tokens(600))
    assert not index.remove_leaf(parent.id)
    assert index.remove_leaf(child.id)
    assert not index.remove_leaf(child.id)
    assert index.remove_leaf(parent.id)
    assert index.n_snapshots() == 0


def evict(index: Index, spare: frozenset[int] = frozenset()) -> list[str]:
    """Remove all victims in turn; return their names."""
    gone = []
    for one in eviction.order(index.candidates(), spare, time.time_ns()):
        assert index.remove_leaf(one.id)
        gone.append(one.name)
    return gone


def test_victims_are_leaves_by_their_last_use(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """The least recently used leaf goes first; a parent when nothing continues it."""
    trunk = tokens(300)
    parent = add(index, layout, trunk)
    child = add(index, layout, trunk + [5000] * 300)
    hot = add(index, layout, tokens(300, seed=1))
    cold = add(index, layout, tokens(300, seed=2))
    index.touch([(hot.id, clock.now + 10, 1), (child.id, clock.now + 5, 1)])
    expected = [cold.name, child.name, parent.name, hot.name]
    assert expected == evict(index)


def test_victims_that_are_equally_old_go_in_order(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie is decided by age."""
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    rows = [add(index, layout, tokens(9, seed=seed)) for seed in range(4)]
    assert names(rows) == evict(index)


def test_pins_spare_a_snapshot_and_what_it_continues(
    index: Index, layout: Layout
) -> None:
    """A pinned leaf keeps its whole chain, until it has expired."""
    trunk = tokens(300)
    chain = [add(index, layout, trunk), add(index, layout, [*trunk, 5000], pinned=True)]
    free = add(index, layout, [*trunk, 6000])
    assert evict(index) == [free.name]
    assert sorted(names(chain)) == sorted(index.names())
    index.set_pinned([chain[1].id], False)
    assert evict(index) == [chain[1].name, chain[0].name]


def test_expired_ones_go_first_pinned_or_not(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """What nobody can use any more makes room before what somebody can."""
    old = add(index, layout, tokens(300))
    expired = add(index, layout, tokens(300, seed=1), ttl_s=10, pinned=True)
    fresh = add(index, layout, tokens(300, seed=2), ttl_s=1000)
    clock.now += 11 * SECOND
    assert evict(index) == [expired.name, old.name, fresh.name]


def test_spared_ones_are_no_victims(index: Index, layout: Layout) -> None:
    """However many are spared, the others are found, and only they."""
    rows = [add(index, layout, tokens(9, seed=seed)) for seed in range(6)]
    spare = frozenset(row.id for row in rows[:4])
    assert evict(index, spare) == names(rows[4:])
    assert evict(index, spare) == []
    assert evict(index) == names(rows[:4])


# ----------------------------------------------------- connections and threads


def test_another_connection_sees_what_was_added(
    index: Index, layout: Layout, path: Path
) -> None:
    """Rows are seen as soon as they are added, and are gone when they are removed."""
    other = Index(path)
    row = add(index, layout, tokens(600))
    assert n_found(other, layout, tokens(600)) == 600
    other.remove([row.id])
    assert n_found(index, layout, tokens(600)) == 0
    other.close()


def test_a_reader_that_then_writes_does_not_fail(
    index: Index, layout: Layout, path: Path
) -> None:
    """Fault Q01: look up, another connection commits, record the use."""
    row = add(index, layout, tokens(600))
    other = Index(path)
    for seed in range(1, 4):
        found = index.find(layout, ids(tokens(600)))
        add(other, layout, tokens(300, seed=seed))
        index.touch([(found.chain[0].id, row.used_ns + seed, 1)])
        add(other, layout, tokens(300, seed=seed + 10))
    assert index.named(row.name)[0].hits == 3
    other.close()


def test_a_reader_is_served_while_another_writes(
    index: Index, layout: Layout, path: Path
) -> None:
    """Fault Q04: an open write of another connection blocks no look-up."""
    add(index, layout, tokens(600))
    other = Index(path)
    with other.transaction():
        other._db.execute("update snapshots set hits = 7")
        assert n_found(index, layout, tokens(600)) == 600
        assert index.rows()[0].hits == 0
    assert index.rows()[0].hits == 7
    other.close()


def test_a_look_up_sees_one_state(
    index: Index, layout: Layout, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another connection removes between two steps is still there in this one."""
    add(index, layout, tokens(300))
    leaf = add(index, layout, tokens(600))
    other = Index(path)
    ancestors = search.ancestors

    def remove_then_go_on(db: sqlite3.Connection, id_: int) -> list[Row]:
        other.remove([leaf.id])
        return ancestors(db, id_)

    with monkeypatch.context() as patch:
        patch.setattr(search, "_MAX_STEPS", 0)
        patch.setattr(search, "ancestors", remove_then_go_on)
        assert n_found(index, layout, tokens(600)) == 600
    assert n_found(index, layout, tokens(600)) == 300
    other.close()


def test_an_error_in_a_look_up_leaves_no_transaction(
    index: Index, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection can be used again at once."""
    add(index, layout, tokens(600))
    with monkeypatch.context() as patch:
        patch.setattr(Search, "run", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            index.find(layout, ids(tokens(600)))
    assert n_found(index, layout, tokens(600)) == 600
    add(index, layout, tokens(300, seed=1))


def test_an_error_in_a_change_leaves_no_trace(index: Index, layout: Layout) -> None:
    """A transaction that fails is rolled back whole, and the next one works."""
    row = add(index, layout, tokens(600))

    def half_a_change() -> None:
        with index.transaction():
            index._db.execute("delete from snapshots")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half_a_change()
    assert names(index.rows()) == [row.name]
    index.touch([(row.id, row.used_ns + 1, 1)])


def run(task: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=task)
    thread.start()
    return thread


def test_a_connection_may_be_used_by_other_threads(path: Path) -> None:
    """Fault Q02: also after the thread that opened it has ended."""
    opened: list[Index] = []
    run(lambda: opened.append(Index(path))).join()
    (index,) = opened
    layout = index.layout(NS, "layers")
    run(lambda: add(index, layout, tokens(600)) and None).join()
    assert n_found(index, layout, tokens(600)) == 600
    run(index.close).join()


def test_threads_share_a_connection(index: Index, layout: Layout) -> None:
    """Calls of several threads on one connection do not mix."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            barrier.wait()
            for number in range(15):
                prompt = tokens(300, seed=1000 * seed + number)
                row = add(index, layout, prompt)
                assert n_found(index, layout, prompt) == 300
                index.touch([(row.id, row.used_ns + 1, 1)])
                if number % 3 == 0:
                    assert index.remove_leaf(row.id)
        except BaseException as error:
            failures.append(error)

    threads = [run(lambda seed=seed: work(seed)) for seed in range(4)]
    for thread in threads:
        thread.join()
    assert failures == []
    assert index.n_snapshots() == 4 * 10


def test_a_read_only_connection_changes_nothing(
    index: Index, layout: Layout, path: Path
) -> None:
    """It finds what there is, and SQLite refuses its writes."""
    row = add(index, layout, tokens(600))
    reader = Index(path, read_only=True)
    assert n_found(reader, layout, tokens(600)) == 600
    assert reader.layouts(NS) == [layout]
    for change in (
        lambda: reader.touch([(row.id, 1, 1)]),
        lambda: reader.remove([row.id]),
        lambda: add(reader, layout, tokens(9, seed=1)),
    ):
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            change()
    assert names(index.rows()) == [row.name]
    reader.close()


def test_a_damaged_index_is_not_sound(path: Path) -> None:
    """Garbage in the middle of the file is noticed, and raises nothing."""
    index = Index(path)
    layout = index.layout(NS, "layers")
    for seed in range(50):
        add(index, layout, tokens(600, seed=seed))
    assert index.is_sound()
    index.close()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3000] = random.Random(13).randbytes(3000)
    path.write_bytes(data)
    damaged = Index(path)
    assert not damaged.is_sound()
    damaged.close()


# ------------------------------------------------------------------ whole prompts


@pytest.fixture
def whole(index: Index) -> Layout:
    layers = (Layer("full/1", (RowPart("keys", 2, 8, "F32"),)),)
    layout = index.layout(NS, to_text(layers, whole=True))
    assert layout.is_whole
    assert not index.layout(NS, to_text(layers)).is_whole
    return layout


def add_whole(index: Index, layout: Layout, prompt: Sequence[int], **more: Any) -> Row:
    """Add a prompt that continues nothing, as the disk tier does."""
    new = new_row(layout, prompt, None, 0, **more)
    index.add(new)
    (row,) = index.named(new.name)
    return row


@pytest.mark.parametrize("n", [1, 255, 256, 257, 600])
def test_a_whole_prompt_is_found_as_a_whole_only(
    index: Index, whole: Layout, n: int
) -> None:
    """KV that depends on the length of its prompt is not cut, and not shared."""
    prompt = tokens(n)
    row = add_whole(index, whole, prompt)
    for query in (prompt, [*prompt, 5000], prompt + tokens(600, seed=1)):
        found = index.find(whole, ids(query))
        assert (found.n_tokens, names(found.chain)) == (n, [row.name])
        assert found.pieces[0][1:] == (0, n)
    for query in (prompt[:-1], [*prompt[:-1], 5000], [*prompt[:-1], 5000, 5001], []):
        assert index.find(whole, ids(query)) == Found()


def test_the_longest_whole_prompt_is_found(index: Index, whole: Layout) -> None:
    """Of several that begin a request the longest is served, each from itself alone."""
    prompt = tokens(700)
    rows = [add_whole(index, whole, prompt[:n]) for n in (300, 100, 600, 256)]
    add_whole(index, whole, [*prompt[:650], 5000])
    for n, number in ((700, 2), (600, 2), (599, 0), (299, 3), (100, 1)):
        found = index.find(whole, ids(prompt[:n]))
        assert names(found.chain) == [rows[number].name]
        assert found.n_tokens == rows[number].end
    assert index.find(whole, ids(prompt[:99])) == Found()


def test_random_whole_prompts_agree_with_a_list(
    index: Index, whole: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is stored, the longest prompt that is a prefix is found, no other."""
    monkeypatch.setattr(prefix, "BLOCK", 4)
    rng = random.Random(16)
    stored: list[list[int]] = []
    for _ in range(150):
        head = rng.choice(stored) if stored and rng.random() < 0.7 else []
        prompt = head[: rng.randrange(len(head) + 1)]
        prompt = prompt + [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        if prompt not in stored:
            add_whole(index, whole, prompt)
            stored.append(prompt)
        query = prompt[: rng.randrange(len(prompt) + 1)] + [rng.randrange(2)] * 5
        expected = max(
            (len(held) for held in stored if query[: len(held)] == held), default=0
        )
        assert expected == n_found(index, whole, query)


def test_a_whole_prompt_holds_no_boundaries(index: Index, whole: Layout) -> None:
    """It is found by its end alone, and nothing is found inside it."""
    add_whole(index, whole, tokens(1000))
    assert index._all("select count(*) from prefixes") == [(0,)]
    with pytest.raises(Duplicate):
        add_whole(index, whole, tokens(1000))


def test_a_whole_prompt_that_has_expired_is_not_found(
    index: Index, whole: Layout, clock: Clock
) -> None:
    """A shorter one that lives is found in its place."""
    row = add_whole(index, whole, tokens(300))
    add_whole(index, whole, tokens(600), ttl_s=10)
    assert n_found(index, whole, tokens(600)) == 600
    clock.now += 11 * SECOND
    assert names(index.find(whole, ids(tokens(600))).chain) == [row.name]


def test_whole_prompts_of_equal_digests_are_compared(
    index: Index, whole: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault W10: with a constant hash the tokens still decide."""
    monkeypatch.setattr(prefix, "extend", lambda parent, block: bytes(16))
    add_whole(index, whole, tokens(600, seed=1))
    assert n_found(index, whole, tokens(700, seed=1)) == 600
    assert n_found(index, whole, tokens(700, seed=2)) == 0


# -------------------------------------------------------------------- checkpoints


def add_checkpoint(
    index: Index, layout: Layout, prompt: Sequence[int], **more: Any
) -> Row:
    """Add a checkpoint at the end of a prompt that is stored already."""
    found = index.find(layout, ids(prompt))
    assert found.n_tokens == len(prompt)
    n = len(prompt)
    new = new_row(layout, prompt, found.chain[-1].id, n, **more)
    index.add(new)
    (row,) = index.named(new.name)
    assert row.is_checkpoint
    return row


def test_checkpoints_of_a_chain_come_deepest_first(
    index: Index, layout: Layout
) -> None:
    """Those inside and at the end of each snapshot, as far as the request goes."""
    talk = tokens(900)
    for n in (300, 600, 900):
        add(index, layout, talk[:n])
    marks = [add_checkpoint(index, layout, talk[:n]) for n in (600, 100, 300, 750)]
    by_end = {row.end: row.name for row in marks}
    for n in (900, 750, 749, 600, 300, 299, 100, 99):
        found = index.find(layout, ids(talk[:n]))
        expected = [by_end[end] for end in (750, 600, 300, 100) if end <= n]
        assert expected == names(index.checkpoints(found))
    assert index.checkpoints(Found()) == []


def test_checkpoints_of_a_branch_are_not_those_of_its_trunk(
    index: Index, layout: Layout
) -> None:
    """Behind where a branch leaves it, the trunk's states are of other tokens."""
    trunk = tokens(600)
    branch = trunk[:300] + [5000] * 300
    add(index, layout, trunk)
    add(index, layout, branch)
    shared = add_checkpoint(index, layout, trunk[:300])
    add_checkpoint(index, layout, trunk[:301])
    add_checkpoint(index, layout, trunk)
    own = add_checkpoint(index, layout, branch)
    found = index.find(layout, ids(branch))
    assert names(index.checkpoints(found)) == [own.name, shared.name]


def test_a_checkpoint_is_no_step_of_a_chain(index: Index, layout: Layout) -> None:
    """A look-up finds the same rows with it as without it."""
    talk = tokens(600)
    for n in (300, 600):
        add(index, layout, talk[:n])
    before = index.find(layout, ids([*talk, 5000]))
    add_checkpoint(index, layout, talk[:300])
    add_checkpoint(index, layout, talk)
    after = index.find(layout, ids([*talk, 5000]))
    assert names(before.chain) == names(after.chain)
    assert (before.n_tokens, before.diverges) == (after.n_tokens, after.diverges)


def test_rows_and_a_checkpoint_may_end_at_one_place(
    index: Index, layout: Layout
) -> None:
    """One of each, never two; the checkpoint is what stands at the prompt."""
    talk = tokens(600)
    rows = add(index, layout, talk)
    held = index.row_at(layout, ids(talk))
    assert held is not None
    assert held.name == rows.name
    mark = add_checkpoint(index, layout, talk)
    held = index.row_at(layout, ids(talk))
    assert held is not None
    assert held.name == mark.name
    with pytest.raises(Duplicate):
        add_checkpoint(index, layout, talk)
    with pytest.raises(Duplicate):
        index.add(new_row(layout, talk, None, 0))
    assert index.n_snapshots() == 2


def test_a_checkpoint_that_has_expired_is_not_listed(
    index: Index, layout: Layout, clock: Clock
) -> None:
    """Its rows' chain is served on."""
    talk = tokens(600)
    add(index, layout, talk)
    kept = add_checkpoint(index, layout, talk[:300])
    add_checkpoint(index, layout, talk, ttl_s=10)
    clock.now += 11 * SECOND
    found = index.find(layout, ids(talk))
    assert (found.n_tokens, found.expired) == (600, False)
    assert names(index.checkpoints(found)) == [kept.name]


def test_a_checkpoint_goes_with_what_it_continues(index: Index, layout: Layout) -> None:
    """It is a leaf of its parent: evicted before it, removed with it."""
    talk = tokens(600)
    rows = add(index, layout, talk)
    mark = add_checkpoint(index, layout, talk)
    assert not index.remove_leaf(rows.id)
    assert evict(index) == [mark.name, rows.name]
