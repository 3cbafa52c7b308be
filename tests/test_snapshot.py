"""Facts about one snapshot file: what is written, read, proven and refused."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import random
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors
import xxhash
from builders import (
    KEYS,
    arrays_cache,
    attended,
    clone_of,
    concatenated,
    kv,
    parts,
    prints,
    quantized,
    rotating,
    tokens,
    values,
)
from mlx_lm.models.cache import ConcatenateKVCache, QuantizedKVCache

from promptstore import Namespace, buffers, codecs, snapshot
from promptstore.capture import Capture, take_in
from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
    SnapshotUnsupported,
)
from promptstore.extent import Band, Extent, Shape
from promptstore.layers import Layers, from_text, leaves, token_bytes
from promptstore.ranges import Ranges, Run, count, intersect
from promptstore.restore import blank
from promptstore.snapshot import Body, Contents, Placed, SnapshotFile, Written, rows
from promptstore.snapshot import header as header_

PAGE = 4096
ID, PARENT = "ab" * 16, "cd" * 16

BUILDERS: dict[str, Callable[[int], list[Any]]] = {
    "float32": kv,
    "float16": lambda n: kv(n, dtype=mx.float16),
    "bfloat16": lambda n: kv(n, dtype=mx.bfloat16),
    "concatenated": concatenated,
    "quantized 8/32": lambda n: quantized(n, 8, 32),
    "quantized 4/64": lambda n: quantized(n, 4, 64),
    "quantized bfloat16": lambda n: quantized(n, 4, 32, dtype=mx.bfloat16),
    "mixed": lambda n: [*quantized(n), *kv(n, dtype=mx.bfloat16), *concatenated(n)],
}
every_kind = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@dataclass(frozen=True)
class Saved:
    """A file, and what the index would know of it."""

    path: Path
    contents: Contents
    tokens: Sequence[int]
    written: Written

    @property
    def shape(self) -> Shape:
        return self.contents.shape

    @property
    def data_start(self) -> int:
        return self.written.nbytes - self.shape.data_nbytes

    def open(self) -> SnapshotFile:
        known = self.written
        return SnapshotFile(self.path, self.shape, known.nbytes, known.checksums)

    def regions(self) -> dict[str, tuple[int, int]]:
        """The bytes ``[lo, hi)`` of each region that has a checksum."""
        found = {"header": (0, self.data_start)}
        for chunk in self.shape.chunks:
            lo = self.data_start + chunk.offset
            found[f"chunk {chunk.index}"] = lo, lo + chunk.nbytes
        rows_end = self.data_start + self.shape.rows_nbytes
        tokens_at = rows_end + self.shape.state_nbytes
        if rows_end < tokens_at:
            found["state"] = rows_end, tokens_at
        return found | {"tokens": (tokens_at, self.written.nbytes)}


def extent_of(layers: Layers, start: int, end: int) -> Extent:
    """Return the extent of all rows of all layers."""
    every = tuple(range(len(leaves(layers))))
    bands = (Band(every, ((start, end),)),) if start < end else ()
    return Extent(start, end, bands)


def save(
    directory: Path,
    cache: Sequence[Any],
    start: int = 0,
    capture: Capture | None = None,
    extent: Extent | None = None,
    end: int | None = None,
) -> Saved:
    """Write the rows of *cache* from token *start* on, as the store would.

    Args:
        directory: Where.
        cache: What.
        start: The first token.
        capture: The store's own copy, if not one of all of *cache*.
        extent: What to write, if not all rows from *start* on and no state.
        end: One past the last token, if the layers do not tell.
    """
    end = codecs.n_cached(cache) if end is None else end
    layers = codecs.describe(cache)
    contents = Contents(
        id=ID,
        namespace=Namespace("weights-a", tenant="Ä\n").fields,
        layers=layers,
        parent=PARENT if start else None,
        extent=extent_of(layers, start, end) if extent is None else extent,
        end_digest="00" * 16,
        kind="assistant",
        created_ns=1_700_000_000_000_000_000,
        writer="test",
    )
    ids = tokens(end)
    if capture is None:
        capture = take_in(cache, end).capture()
    state = capture.state_bytes() if contents.extent.state else []
    body = Body(capture.parts(), state, np.array(ids[start:], np.int64))
    path = directory / f"{ID}.safetensors"
    with snapshot.create(path) as fd:
        written = snapshot.write(fd, contents, body)
    return Saved(path, contents, ids[start:], written)


def load(saved: Saved, lo: int, hi: int, *, verify: bool = True) -> list[Any]:
    """Return a live cache whose rows ``[lo, hi)`` were read, the others being 0."""
    layers = saved.contents.layers
    made = blank(layers, hi, hi, {}, ())
    for target in itertools.chain(*made.rows):
        target.rows[:] = 0
    wanted = [((lo, hi),)] * len(made.rows)
    with saved.open() as file:
        for chunk in saved.shape.chunks:
            if intersect(((lo, hi),), chunk.ranges):
                file.read_chunk(chunk, made.rows, wanted, verify=verify)
    return codecs.rebuild(layers, made.leaves, hi)


def blanks(saved: Saved) -> list[list[Placed]]:
    """Return zeros to read all rows of two layers of float32 into, by leaf."""
    n = saved.contents.extent.end
    return [
        [Placed(np.zeros((2, n, 32), np.uint8), (Run(0, n, 0),)) for _ in range(2)]
        for _ in range(2)
    ]


def ranges(lo: int, hi: int) -> list[Ranges]:
    """Return, by leaf, what to take: the same of two layers."""
    return [((lo, hi),)] * 2


def zeroed(cache: Sequence[Any], lo: int, hi: int) -> list[Any]:
    """Return a copy of the first *hi* rows of *cache* with 0 before row *lo*."""
    clone = clone_of(cache, hi)
    supply = []
    for array in parts(clone):
        kept = mx.contiguous(array[:, :, :hi])
        kept[:, :, :lo] = 0
        supply.append(kept)
    mx.eval(supply)
    arrays = iter(supply)
    layers = codecs.describe(cache)
    made = [
        codecs.Leaf([next(arrays) for _ in leaf.parts], (), None, {})
        for leaf in leaves(layers)
    ]
    return codecs.rebuild(layers, made, hi)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# ---------------------------------------------------------------------- shape


@pytest.mark.parametrize(
    ("start", "end", "spans"),
    [
        (0, 1, [(0, 1)]),
        (0, 256, [(0, 256)]),
        (0, 257, [(0, 256), (256, 257)]),
        (100, 400, [(100, 356), (356, 400)]),
        (300, 300, []),
    ],
)
def test_chunks_are_256_tokens_counted_from_the_start(
    start: int, end: int, spans: list[tuple[int, int]]
) -> None:
    """Each chunk but the last has 256 tokens, and lies behind the one before it."""
    layers = codecs.describe(kv(1))
    shape = Shape(layers, extent_of(layers, start, end))
    assert [(span,) for span in spans] == [chunk.ranges for chunk in shape.chunks]
    assert [chunk.index for chunk in shape.chunks] == list(range(len(spans)))
    bytes_a_token = token_bytes(shape.layers)
    expected = [(lo - start) * bytes_a_token for lo, _ in spans]
    assert expected == [chunk.offset for chunk in shape.chunks]
    assert shape.rows_nbytes == (end - start) * bytes_a_token
    assert shape.data_nbytes == (end - start) * (bytes_a_token + 8)


# ----------------------------------------------------------------- round trip


@every_kind
@pytest.mark.parametrize("n", [1, 255, 256, 257, 600])
def test_what_is_read_is_what_was_written(
    tmp_path: Path, build: Callable[[int], list[Any]], n: int
) -> None:
    """Invariant 9: every class and dtype comes back bit for bit, and verifies."""
    cache = build(n)
    saved = save(tmp_path, cache)
    with saved.open() as file:
        file.verify_header()
        file.verify_all()
    restored = load(saved, 0, n)
    assert [type(layer) for layer in cache] == [type(layer) for layer in restored]
    assert prints(cache) == prints(restored)


@every_kind
@pytest.mark.parametrize("start", [1, 100, 256, 257, 599])
def test_a_delta_holds_the_rows_from_its_start_on(
    tmp_path: Path, build: Callable[[int], list[Any]], start: int
) -> None:
    """Rows [start, end) are written, from a whole cache or from a compact copy."""
    cache = build(600)
    copies = take_in(cache, 600).capture_rows(start)
    for part in itertools.chain(*copies.parts()):
        assert part.rows.shape[1] == 600 - start
    paths = {}
    for name, capture in (("whole", None), ("copy", copies)):
        (tmp_path / name).mkdir()
        saved = save(tmp_path / name, cache, start, capture)
        paths[name] = saved.path
        expected = zeroed(cache, start, 600)
        assert prints(expected) == prints(load(saved, start, 600))
        assert saved.shape.data_nbytes == (600 - start) * (
            token_bytes(saved.contents.layers) + 8
        )
    assert paths["whole"].read_bytes() == paths["copy"].read_bytes()


@pytest.mark.parametrize("build", [kv, concatenated, BUILDERS["mixed"]])
@pytest.mark.parametrize(
    ("lo", "hi"),
    [(0, 1), (0, 256), (0, 300), (5, 6), (255, 257), (256, 512), (500, 560), (3, 599)],
)
def test_any_range_can_be_read(
    tmp_path: Path, build: Callable[[int], list[Any]], lo: int, hi: int
) -> None:
    """A part of a chunk is read into its place, and no other row is touched."""
    cache = build(600)
    saved = save(tmp_path, cache)
    for verify in (True, False):
        assert prints(zeroed(cache, lo, hi)) == prints(
            load(saved, lo, hi, verify=verify)
        )


def test_a_range_lands_in_a_buffer_with_room(tmp_path: Path) -> None:
    """Rows behind the range keep what was there: a buffer may be longer."""
    saved = save(tmp_path, kv(300))
    arrays = [mx.full((1, 2, 512, 8), 9.0) for _ in range(4)]
    mx.eval(arrays)
    placed = [Placed(buffers.rows(array), (Run(0, 300, 0),)) for array in arrays]
    targets = [placed[:2], placed[2:]]
    with saved.open() as file:
        first, second = saved.shape.chunks
        n_read = file.read_chunk(first, targets, ranges(0, 256), verify=True)
        n_read += file.read_chunk(second, targets, ranges(256, 300), verify=True)
    assert n_read == saved.shape.rows_nbytes
    for number, array in enumerate(arrays):
        rows = values(0, 300, layer=number // 2, part=number % 2)
        assert np.array_equal(rows, np.array(array[:, :, :300]))
        assert bool((array[:, :, 300:] == 9).all())


def test_no_rows_are_a_snapshot(tmp_path: Path) -> None:
    """A snapshot may only mark a place: start == end."""
    saved = save(tmp_path, kv(300), start=300)
    with saved.open() as file:
        file.verify_all()
        file.read_ahead()
    contents, ids, written = snapshot.read_contents(saved.path)
    assert (contents, ids.tolist(), written) == (saved.contents, [], saved.written)
    assert list(mx.load(str(saved.path))) == ["tokens"]


def test_parts_of_no_width_take_no_bytes(tmp_path: Path) -> None:
    """A model without values of its own (head_dim 0) round-trips."""
    layer = ConcatenateKVCache()
    layer.update_and_fetch(mx.ones((1, 2, 300, 8)), mx.zeros((1, 2, 300, 0)))
    saved = save(tmp_path, [layer])
    assert saved.shape.rows_nbytes == 2 * 300 * 8 * 4
    assert prints([layer]) == prints(load(saved, 0, 300))
    assert mx.load(str(saved.path))["000001.0000.values"].shape == (1, 2, 44, 0)


def test_ids_of_more_than_32_bits_are_in_the_file(tmp_path: Path) -> None:
    """The ids come back as they were, negative ones of 60 bits too."""
    cache, ids = kv(3), np.array([-855241551491862571, 2**32 + 5, 5])
    contents = save(tmp_path, cache).contents
    path = tmp_path / f"{ID}.safetensors"
    path.unlink()
    body = Body(take_in(cache, 3).capture().parts(), [], ids)
    with snapshot.create(path) as fd:
        snapshot.write(fd, contents, body)
    _, actual, _ = snapshot.read_contents(path)
    assert ids.tolist() == actual.tolist()
    assert ids.tolist() == mx.load(str(path))["tokens"].tolist()


# ---------------------------------------------------------------- the file


@every_kind
def test_the_file_is_plain_safetensors(
    tmp_path: Path, build: Callable[[int], list[Any]]
) -> None:
    """mx.load and safetensors read it; its chunks, joined, are the attended rows."""
    cache = build(600)
    saved = save(tmp_path, cache)
    loaded: Any = mx.load(str(saved.path))
    assert list(saved.tokens) == loaded["tokens"].tolist()
    joined = []
    for index, layer in enumerate(saved.contents.layers):
        for part in layer.parts:
            names = [f"{chunk:06}.{index:04}.{part.name}" for chunk in range(3)]
            joined.append(mx.concatenate([loaded.pop(name) for name in names], axis=2))
    assert list(loaded) == ["tokens"]
    assert len(joined) == len(parts(cache))
    for whole, array in zip(parts(cache), joined, strict=True):
        assert mx.array_equal(whole[:, :, :600], array)
        assert whole.dtype == array.dtype
    with safetensors.safe_open(saved.path, "np") as file:
        assert sorted(file.metadata()) == ["promptstore", "promptstore.checksum"]
        assert len(list(file.keys())) == 3 * len(joined) + 1
        assert list(saved.tokens) == file.get_tensor("tokens").tolist()


def test_numpy_readers_see_the_rows(tmp_path: Path) -> None:
    """safetensors' own reader gives the rows of each chunk."""
    saved = save(tmp_path, kv(600))
    with safetensors.safe_open(saved.path, "np") as file:
        actual = file.get_tensor("000002.0001.values")
    assert np.array_equal(values(512, 600, layer=1, part=1), actual)


def test_rows_start_on_a_page_and_tokens_come_last(tmp_path: Path) -> None:
    """The header is padded with spaces; chunk follows chunk, layer follows layer."""
    saved = save(tmp_path, kv(600))
    data = saved.path.read_bytes()
    assert saved.data_start % PAGE == 0
    assert saved.data_start == 8 + int.from_bytes(data[:8], "little")
    assert data[saved.data_start - 1 :][:1] == b" "
    assert np.frombuffer(data[-8 * 600 :], "<i8").tolist() == saved.tokens
    at = saved.data_start
    for chunk, layer, part in itertools.product(range(3), range(2), range(2)):
        ((lo, hi),) = saved.shape.chunks[chunk].ranges
        expected = values(lo, hi, layer=layer, part=part).astype("<f4").tobytes()
        assert expected == data[at : at + len(expected)]
        at += len(expected)
    assert at == len(data) - 8 * 600


@every_kind
@pytest.mark.parametrize("n", [1, 256, 257])
def test_the_size_is_known_before(
    tmp_path: Path, build: Callable[[int], list[Any]], n: int
) -> None:
    """A budget can be kept since the size is computed, and it is the file's."""
    saved = save(tmp_path, build(n))
    assert snapshot.nbytes_of(saved.contents) == saved.path.stat().st_size
    assert saved.written.nbytes == saved.path.stat().st_size
    assert len(saved.written.checksums) == 16 * (len(saved.shape.chunks) + 3)


def random_rows(cache: Sequence[Any], n: int) -> list[bytes]:
    """Give a cache *n* tokens of random rows; return the bytes of each wide row."""
    rng = np.random.default_rng(6)
    held = codecs.n_cached(cache)
    found = []
    for layer in cache:
        wide = layer.group_size if isinstance(layer, QuantizedKVCache) else 8
        rows = mx.array(rng.normal(size=(1, 2, n, wide)).astype(np.float32))
        dtype = attended([layer])[1].dtype
        layer.update_and_fetch(rows.astype(dtype), rows.astype(dtype))
    mx.eval(parts(cache))
    for array in parts(cache):
        for head in buffers.rows(array):
            found += [row.tobytes() for row in head[held : held + n] if row.size >= 8]
    return found


@every_kind
def test_what_was_removed_is_not_in_the_file(
    tmp_path: Path, build: Callable[[int], list[Any]]
) -> None:
    """Fault P09, invariant 12: 200 of 205 tokens trimmed leave 5 rows in the file."""
    cache = build(5)
    removed = random_rows(cache, 200)
    (tmp_path / "before").mkdir()
    before = save(tmp_path / "before", cache).path.read_bytes()
    assert all(row in before for row in removed)
    for layer in cache:
        layer.trim(200)
    saved = save(tmp_path, cache)
    after = saved.path.read_bytes()
    assert not [row for row in removed if row in after]
    assert len(after) - saved.data_start == 5 * (token_bytes(saved.contents.layers) + 8)


@every_kind
def test_the_file_does_not_depend_on_history(
    tmp_path: Path, build: Callable[[int], list[Any]]
) -> None:
    """A cache that was longer once gives the same bytes as one that never was."""
    for name in ("trimmed", "fresh"):
        (tmp_path / name).mkdir()
    cache = build(5)
    random_rows(cache, 300)
    for layer in cache:
        layer.trim(300)
    trimmed = save(tmp_path / "trimmed", cache)
    fresh = save(tmp_path / "fresh", build(5))
    assert fresh.written == trimmed.written
    assert fresh.path.read_bytes() == trimmed.path.read_bytes()


# ------------------------------------------------------------- bands and state


def random_ranges(rng: random.Random, end: int) -> Ranges:
    """Return a few ranges of tokens below *end* with gaps between them."""
    edges = sorted(rng.sample(range(end + 1), 2 * rng.randrange(1, 4)))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def test_a_band_holds_the_rows_of_its_ranges(tmp_path: Path) -> None:
    """Of each layer just the tokens of its band are written, also before the start,
    and come back into their places; no other row is touched."""
    rng = random.Random(17)
    for number in range(30):
        directory = tmp_path / str(number)
        directory.mkdir()
        n = rng.choice([7, 300, 600])
        cache = [*kv(n, n_layers=2), *kv(n, n_layers=1, head_dim=4)]
        bands = (
            Band((2, 0), random_ranges(rng, n)),
            Band((1,), random_ranges(rng, n)),
        )
        saved = save(directory, cache, n // 2, extent=Extent(n // 2, n, bands))
        layers = saved.contents.layers
        assert saved.shape.rows_nbytes == sum(
            count(band.ranges) * sum(layers[leaf].token_bytes for leaf in band.leaves)
            for band in bands
        )
        held = [saved.contents.extent.held(leaf) for leaf in range(3)]
        lo, hi = sorted(rng.sample(range(n + 1), 2))
        wanted = [intersect(own, ((lo, hi),)) for own in held]
        made = blank(layers, n, n, {}, ())
        for target in itertools.chain(*made.rows):
            target.rows[:] = 255
        with saved.open() as file:
            file.verify_all()
            for chunk in saved.shape.chunks:
                file.read_chunk(chunk, made.rows, wanted, verify=True)
        for leaf, layer in enumerate(cache):
            has = np.zeros(n, bool)
            for first, last in wanted[leaf]:
                has[first:last] = True
            for target, array in zip(
                made.rows[leaf], [layer.keys, layer.values], strict=True
            ):
                expected = buffers.rows(array)[:, :n]
                assert np.array_equal(expected[:, has], target.rows[:, :n][:, has])
                assert (target.rows[:, :n][:, ~has] == 255).all()


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize(("n", "steps"), [(100, 0), (100, 30), (40, 5), (300, 64)])
def test_a_ring_is_written_in_the_order_of_its_tokens(
    tmp_path: Path, keep: int, n: int, steps: int
) -> None:
    """However a window lay, its file is the rows that it attends to, in order."""
    cache = rotating(n, 64, keep, steps=steps)
    capture = take_in(cache, n).capture()
    held = capture.held(0)
    extent = Extent(0, n, (Band((0, 1), held),))
    saved = save(tmp_path, cache, extent=extent, capture=capture)
    loaded: Any = mx.load(str(saved.path))
    for leaf, (part, name) in itertools.product(
        range(2), enumerate(["keys", "values"])
    ):
        arrays = [
            loaded[f"{chunk.index:06}.{leaf:04}.{name}"] for chunk in saved.shape.chunks
        ]
        rows = [values(lo, hi, layer=leaf, part=part) for lo, hi in held]
        actual = np.array(mx.concatenate(arrays, axis=2))
        assert np.array_equal(np.concatenate(rows, axis=2), actual)


def save_state(directory: Path, n: int = 300) -> tuple[Saved, Capture]:
    """Write a cache of one full layer and two of state, as a checkpoint with rows."""
    cache = [*kv(n, n_layers=1), *arrays_cache(n, dtype=mx.bfloat16)]
    capture = take_in(cache, n).capture()
    bands = (Band((0,), ((0, n),)),)
    extent = Extent(0, n, bands, {}, capture.state)
    return save(directory, cache, capture=capture, extent=extent), capture


def test_state_comes_back(tmp_path: Path) -> None:
    """Arrays of any shape and dtype lie behind the rows, and are read as they were."""
    saved, capture = save_state(tmp_path)
    assert len(saved.contents.extent.state) == 4
    made = blank(saved.contents.layers, 300, 300, {}, saved.contents.extent.state)
    with saved.open() as file:
        file.verify_all()
        n_read = file.read_state(made.state, verify=True)
    assert n_read == saved.shape.state_nbytes == sum(map(len, made.state))
    loaded: Any = mx.load(str(saved.path))
    for spec, actual in zip(saved.contents.extent.state, made.state, strict=True):
        source = capture.leaves[spec.leaf].state[spec.name]
        assert buffers.plain(source).tobytes() == actual.tobytes()
        assert mx.array_equal(source, made.leaves[spec.leaf].state[spec.name])
        assert mx.array_equal(source, loaded[f"state.{spec.leaf:04}.{spec.name}"])
    contents, ids, written = snapshot.read_contents(saved.path)
    assert (contents, ids.tolist()) == (saved.contents, list(saved.tokens))
    assert written == saved.written


def test_a_flipped_bit_of_the_state_is_found(tmp_path: Path) -> None:
    """Fault P01: damage in the state region is found, and told by name."""
    saved, _ = save_state(tmp_path)
    whole = saved.path.read_bytes()
    lo, hi = saved.regions()["state"]
    state = [np.empty(array.nbytes, np.uint8) for array in saved.contents.extent.state]
    rng = random.Random(18)
    for at in [lo, hi - 1, *(rng.randrange(lo, hi) for _ in range(20))]:
        flip(saved.path, at, rng.randrange(8))
        with saved.open() as file:
            file.verify_header()
            with pytest.raises(SnapshotCorrupt, match="state"):
                file.verify_all()
            with pytest.raises(SnapshotCorrupt, match="state"):
                file.read_state(state, verify=True)
            file.read_state(state, verify=False)
        saved.path.write_bytes(whole)
    with saved.open() as file:
        file.read_state(state, verify=True)


def test_a_state_that_ends_early_is_corrupt(tmp_path: Path) -> None:
    """Bytes that are gone when they are read are never taken for zeros."""
    saved, _ = save_state(tmp_path)
    state = [np.empty(array.nbytes, np.uint8) for array in saved.contents.extent.state]
    with saved.open() as file:
        os.truncate(saved.path, saved.regions()["state"][1] - 1)
        with pytest.raises(SnapshotCorrupt, match="ends before"):
            file.read_state(state, verify=False)


@pytest.mark.parametrize(
    "extent",
    [
        "[]",
        "5",
        "{}",
        '{"bands":[],"rings":[]}',
        '{"bands":[[[0],[[0,300]]]],"rings":[],"state":[[0,"x","F99",[1]]]}',
        '{"bands":[[[0],[[0,300]]]],"rings":[],"state":[[0,"x","F32",[1e999]]]}',
        '{"bands":[[[9],[[0,300]]]],"rings":[],"state":[]}',
        '{"bands":[[[0,1],[[0,299]]]],"rings":[],"state":[]}',
        '{"bands":[[[0,1],[[0]]]],"rings":[],"state":[]}',
        '{"bands":[[[0,1],[[0,1e999]]]],"rings":[],"state":[]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_extents_that_do_not_describe_the_file_are_corrupt(
    tmp_path: Path, extent: str
) -> None:
    """What a header says it holds must be what is there."""
    saved = save(tmp_path, kv(300))
    with_facts(saved, extent=extent)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


# ------------------------------------------------------------------ making it


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_file_is_its_owners(tmp_path: Path, umask: int) -> None:
    """KV is made from text: the mode is 0600 whatever the umask."""
    before = os.umask(umask)
    try:
        path = save(tmp_path, kv(3)).path
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_being_made_is_not_abandoned(tmp_path: Path) -> None:
    """The lock holds until the block ends, and follows the file to its last name."""
    made, final = tmp_path / "a.tmp", tmp_path / "a.safetensors"
    with snapshot.create(made):
        assert not snapshot.is_abandoned(made)
        os.rename(made, final)
        assert not snapshot.is_abandoned(final)
    assert snapshot.is_abandoned(final)
    assert snapshot.is_abandoned(final)
    assert not snapshot.is_abandoned(made)


def test_a_file_is_abandoned_when_making_it_failed(tmp_path: Path) -> None:
    """An error inside the block lets go of the lock."""
    path = tmp_path / "a.tmp"
    with pytest.raises(ZeroDivisionError), snapshot.create(path):
        raise ZeroDivisionError
    assert snapshot.is_abandoned(path)


def test_what_cannot_be_opened_is_not_abandoned(tmp_path: Path) -> None:
    """A link is left alone: what it leads to is none of ours."""
    target = tmp_path / "target"
    target.write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(target)
    assert not snapshot.is_abandoned(link)
    assert not snapshot.is_abandoned(tmp_path / "nothing")


def test_a_file_is_never_made_twice(tmp_path: Path) -> None:
    """A path that is there, also as a link to nowhere, is not overwritten."""
    path = tmp_path / "a.tmp"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError), snapshot.create(path):
        pass
    assert path.read_bytes() == b"precious"
    link = tmp_path / "b.tmp"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError), snapshot.create(link):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_was_swept_before_it_was_locked_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may collect it between open and lock: then it is not used."""
    path = tmp_path / "a.tmp"
    plain = fcntl.flock

    def sweep_then_lock(fd: int, operation: int) -> None:
        path.unlink()
        plain(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_then_lock)
    with pytest.raises(FileNotFoundError), snapshot.create(path):
        pass


def test_the_header_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all rows are written there is no header, so half a file is no file."""
    steps: list[str] = []

    def note(name: str) -> None:
        plain = getattr(os, name)

        def call(*args: Any) -> Any:
            steps.append(name)
            return plain(*args)

        monkeypatch.setattr(os, name, call)

    for name in ("writev", "pwrite"):
        note(name)
    save(tmp_path, kv(600))
    assert [step for step, _ in itertools.groupby(steps)] == ["writev", "pwrite"]


@pytest.mark.parametrize("call", ["writev", "pwrite"])
def test_a_failed_write_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A full disk travels as it is; without its header the file is no snapshot."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path, kv(600))
    (path,) = tmp_path.iterdir()
    assert snapshot.is_abandoned(path)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(path)


# ------------------------------------------------------------ vectored calls


def cut_short(views: list[memoryview], n: int) -> list[memoryview]:
    kept = []
    for view in views:
        kept.append(view[:n])
        n -= len(kept[-1])
        if not n:
            break
    return kept


def test_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that writes a few bytes at a time writes the same file."""
    (tmp_path / "plain").mkdir()
    expected = save(tmp_path / "plain", kv(300)).path.read_bytes()
    rng = random.Random(7)
    writev, pwrite = os.writev, os.pwrite

    def short_writev(fd: int, views: list[memoryview]) -> int:
        return writev(fd, cut_short(views, rng.choice([1, 100, 5000])))

    def short_pwrite(fd: int, data: bytes, at: int) -> int:
        return pwrite(fd, data[: rng.choice([1, 100, 5000])], at)

    monkeypatch.setattr(os, "writev", short_writev)
    monkeypatch.setattr(os, "pwrite", short_pwrite)
    assert expected == save(tmp_path, kv(300)).path.read_bytes()


@pytest.mark.parametrize("ends", [(0, 300), (3, 290)])
def test_short_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, int]
) -> None:
    """A system that reads a few bytes at a time reads the same rows."""
    cache = kv(300)
    saved = save(tmp_path, cache)
    rng = random.Random(8)
    preadv = os.preadv

    def short(fd: int, views: list[memoryview], at: int) -> int:
        return preadv(fd, cut_short(views, rng.choice([1, 100, 5000])), at)

    monkeypatch.setattr(os, "preadv", short)
    assert prints(zeroed(cache, *ends)) == prints(load(saved, *ends))
    with saved.open() as file:
        file.verify_all()


def test_short_reads_of_the_contents_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a header in pieces gives the same contents and tokens."""
    saved = save(tmp_path, kv(300))
    rng = random.Random(8)
    preadv = os.preadv

    def short(fd: int, views: list[memoryview], at: int) -> int:
        return preadv(fd, cut_short(views, rng.choice([1, 100, 5000])), at)

    monkeypatch.setattr(os, "preadv", short)
    contents, ids, _ = snapshot.read_contents(saved.path)
    assert (contents, ids.tolist()) == (saved.contents, saved.tokens)


def test_more_slabs_than_a_vectored_call_takes_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 1,200 slabs is written and read in calls within the limit."""
    limit = os.sysconf("SC_IOV_MAX")
    cache = kv(2, n_layers=300, n_kv_heads=limit // 512, head_dim=4)
    n_slabs = 300 * 2 * (limit // 512)
    assert n_slabs > limit
    counts: dict[str, list[int]] = {"writev": [], "preadv": []}

    def note(name: str) -> None:
        plain = getattr(os, name)

        def call(fd: int, views: list[memoryview], *at: int) -> int:
            counts[name].append(len(views))
            return int(plain(fd, views, *at))

        monkeypatch.setattr(os, name, call)

    note("writev")
    note("preadv")
    saved = save(tmp_path, cache)
    assert counts["writev"] == [limit, n_slabs - limit, 1]
    assert prints(cache) == prints(load(saved, 0, 2))
    assert counts["preadv"] == [limit, n_slabs - limit]


def test_more_bytes_than_a_group_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of many megabytes goes in several calls, and verifies as one."""
    monkeypatch.setattr(rows, "_GROUP_BYTES", 10_000)
    cache = kv(600)
    saved = save(tmp_path, cache)
    monkeypatch.setattr(rows, "_GROUP_BYTES", 1_000)
    assert prints(cache) == prints(load(saved, 0, 600))
    monkeypatch.undo()
    assert prints(cache) == prints(load(saved, 0, 600))
    with saved.open() as file:
        file.verify_all()


@pytest.mark.parametrize("step", [1000, 4096, 4 << 20])
def test_read_ahead_reads_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """All of the file passes through memory, in steps, and nothing twice."""
    saved = save(tmp_path, kv(600))
    touched: list[tuple[int, int]] = []
    preadv = os.preadv

    def note(fd: int, views: list[memoryview], at: int) -> int:
        touched.append((at, at + sum(map(len, views))))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", note)
    monkeypatch.setattr("promptstore.snapshot.read._STEP_BYTES", step)
    with saved.open() as file:
        file.read_ahead()
    assert [lo for lo, _ in touched] == [0, *(hi for _, hi in touched[:-1])]
    assert touched[-1][1] == saved.written.nbytes
    assert max(hi - lo for lo, hi in touched) <= step


# ---------------------------------------------------------------------- damage


def test_a_file_of_another_size_is_corrupt(tmp_path: Path) -> None:
    """Fault P02: cut anywhere, or grown, a file does not open."""
    saved = save(tmp_path, kv(300))
    whole = saved.path.read_bytes()
    size, start = len(whole), saved.data_start
    cuts = [0, 1, 7, 8, 9, 500, start - 1, start, start + 1, size // 2, size - 1]
    damaged = [whole[:cut] for cut in cuts] + [whole + b"\0", whole * 2]
    for data in damaged:
        saved.path.write_bytes(data)
        with pytest.raises(SnapshotCorrupt, match=f"has {len(data)} bytes"):
            saved.open()
        with pytest.raises(SnapshotCorrupt):
            snapshot.read_contents(saved.path)
    saved.path.write_bytes(whole)
    with saved.open() as file:
        file.verify_all()


def test_a_file_that_is_cut_while_it_is_open_is_corrupt(tmp_path: Path) -> None:
    """Rows that are gone when they are read are never taken for zeros."""
    saved = save(tmp_path, kv(600))
    targets = blanks(saved)
    with saved.open() as file:
        first, second, _ = saved.shape.chunks
        os.truncate(saved.path, saved.data_start + second.offset + 5)
        file.read_chunk(first, targets, ranges(0, 256), verify=True)
        for verify, ends in ((True, (256, 512)), (False, (256, 300))):
            with pytest.raises(SnapshotCorrupt, match="ends before"):
                file.read_chunk(second, targets, ranges(*ends), verify=verify)
        with pytest.raises(SnapshotCorrupt):
            file.verify_all()


@pytest.mark.parametrize(
    "region", ["header", "chunk 0", "chunk 1", "chunk 2", "tokens"]
)
def test_one_flipped_bit_is_found(tmp_path: Path, region: str) -> None:
    """Fault P01: a bit anywhere fails its region, by name, and no other."""
    saved = save(tmp_path, kv(600))
    whole = saved.path.read_bytes()
    lo, hi = saved.regions()[region]
    rng = random.Random(9)
    places = [lo, hi - 1, *(rng.randrange(lo, hi) for _ in range(10))]
    for at in places:
        flip(saved.path, at, rng.randrange(8))
        with saved.open() as file, pytest.raises(SnapshotCorrupt, match=region):
            file.verify_all()
        # A restore takes the ids from the index; it does not read these.
        assert failing(saved) == ([] if region == "tokens" else [region])
        saved.path.write_bytes(whole)
    assert failing(saved) == []


def failing(saved: Saved) -> list[str]:
    """Return which regions a restore of everything would find damaged."""
    targets = blanks(saved)
    found = []
    with saved.open() as file:
        try:
            file.verify_header()
        except SnapshotCorrupt:
            found.append("header")
        for chunk in saved.shape.chunks:
            (ends,) = chunk.ranges
            for lo, hi in (ends, (ends[0], ends[0] + 1), (ends[1] - 1, ends[1])):
                try:
                    file.read_chunk(chunk, targets, ranges(lo, hi), verify=True)
                except SnapshotCorrupt:
                    found.append(f"chunk {chunk.index}")
    return sorted(set(found))


def test_zeroed_rows_are_found(tmp_path: Path) -> None:
    """Fault P01: a page of zeros where rows were is no snapshot."""
    saved = save(tmp_path, kv(600))
    data = bytearray(saved.path.read_bytes())
    data[saved.data_start : saved.data_start + PAGE] = bytes(PAGE)
    saved.path.write_bytes(data)
    assert failing(saved) == ["chunk 0"]


def test_swapped_chunks_are_found(tmp_path: Path) -> None:
    """Rows that are whole, but not in their place, fail the checksum of the place."""
    saved = save(tmp_path, kv(512))
    data = saved.path.read_bytes()
    (a, b), (_, c) = saved.regions()["chunk 0"], saved.regions()["chunk 1"]
    saved.path.write_bytes(data[:a] + data[b:c] + data[a:b] + data[c:])
    assert failing(saved) == ["chunk 0", "chunk 1"]


def test_another_snapshot_under_the_name_is_found(tmp_path: Path) -> None:
    """Fault P03: a file of the same size with other rows is not served."""
    saved = save(tmp_path, kv(600))
    (tmp_path / "other").mkdir()
    other = kv(600)
    for layer in other:
        layer.keys = layer.keys + 1
    os.replace(save(tmp_path / "other", other).path, saved.path)
    assert failing(saved) == ["chunk 0", "chunk 1", "chunk 2", "header"]


def test_a_file_that_is_replaced_while_it_is_open_is_read_as_it_was(
    tmp_path: Path,
) -> None:
    """Fault P03: neither unlink nor replace changes what an open file gives."""
    cache = kv(300)
    saved = save(tmp_path, cache)
    targets = blanks(saved)
    with saved.open() as file:
        saved.path.unlink()
        saved.path.write_bytes(b"other")
        first = saved.shape.chunks[0]
        file.read_chunk(first, targets, ranges(0, 256), verify=True)
        file.verify_all()
    expected = values(0, 256, layer=0, part=KEYS)[0]
    assert np.array_equal(expected, targets[0][0].rows.view(np.float32)[:, :256])


def test_checksums_of_another_file_are_found(tmp_path: Path) -> None:
    """A row whose checksums are damaged, short or long proves the pair bad."""
    saved = save(tmp_path, kv(600))
    good = saved.written.checksums
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        row = dataclasses.replace(saved, written=Written(saved.written.nbytes, bad))
        with row.open() as file, pytest.raises(SnapshotCorrupt, match="checksum"):
            file.verify_all()
    for bad in (b"", good[:-16], good + bytes(16)):
        row = dataclasses.replace(saved, written=Written(saved.written.nbytes, bad))
        with pytest.raises(SnapshotCorrupt, match="checksums"):
            row.open()


def test_a_file_that_is_gone_is_missing(tmp_path: Path) -> None:
    """A row without a file is told from damage."""
    saved = save(tmp_path, kv(3))
    saved.path.unlink()
    with pytest.raises(SnapshotMissing):
        saved.open()
    with pytest.raises(SnapshotMissing):
        snapshot.read_contents(saved.path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A symbolic link in the place of a snapshot is damage, even to a good file."""
    saved = save(tmp_path, kv(3))
    target = tmp_path / "elsewhere"
    saved.path.rename(target)
    saved.path.symlink_to(target)
    with pytest.raises(SnapshotCorrupt, match="symbolic link"):
        saved.open()
    with pytest.raises(SnapshotCorrupt, match="symbolic link"):
        snapshot.read_contents(saved.path)


def test_a_pipe_is_not_a_snapshot(tmp_path: Path) -> None:
    """A FIFO in the place of a snapshot is damage, and nobody waits for a writer."""
    saved = save(tmp_path, kv(3))
    saved.path.unlink()
    os.mkfifo(saved.path)
    before = n_descriptors()
    with pytest.raises(SnapshotCorrupt):
        saved.open()
    assert snapshot.is_abandoned(saved.path)
    assert before == n_descriptors()


def test_a_pipe_says_nothing_of_itself(tmp_path: Path) -> None:
    """An index that is rebuilt from files takes a FIFO for damage as well."""
    saved = save(tmp_path, kv(3))
    saved.path.unlink()
    os.mkfifo(saved.path)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


def test_a_directory_is_not_a_snapshot(tmp_path: Path) -> None:
    """A directory in the place of a snapshot is refused, and nothing stays open."""
    saved = save(tmp_path, kv(3))
    saved.path.unlink()
    saved.path.mkdir()
    with pytest.raises((SnapshotCorrupt, SnapshotUnreadable)):
        saved.open()
    with pytest.raises((SnapshotCorrupt, SnapshotUnreadable)):
        snapshot.read_contents(saved.path)


def n_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    """After each success and each refusal as many files are open as before."""
    saved = save(tmp_path, kv(300))
    before = n_descriptors()
    load(saved, 0, 300)
    snapshot.read_contents(saved.path)
    snapshot.is_abandoned(saved.path)
    saved.path.write_bytes(b"no snapshot")
    for ask in (saved.open, lambda: snapshot.read_contents(saved.path)):
        with pytest.raises(SnapshotCorrupt):
            ask()
    assert before == n_descriptors()


@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO, errno.ESTALE]
)
def test_what_the_system_refuses_to_open_is_not_proven_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Fault C09: too many open files is trouble, but no damage."""
    saved = save(tmp_path, kv(3))

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(SnapshotUnreadable):
            saved.open()
        with pytest.raises(SnapshotUnreadable):
            snapshot.read_contents(saved.path)
    with saved.open() as file:
        file.verify_all()


def test_what_the_system_refuses_to_read_is_not_proven_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error is SnapshotUnreadable, wherever it comes, and passes again."""
    saved = save(tmp_path, kv(600))
    targets, chunks = blanks(saved), saved.shape.chunks

    def refuse(*_: Any) -> int:
        raise OSError(errno.EIO, "I/O error")

    with saved.open() as file, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        asks: list[Callable[[], Any]] = [
            file.verify_header,
            file.verify_all,
            file.read_ahead,
            lambda: file.read_chunk(chunks[0], targets, ranges(0, 256), verify=True),
            lambda: file.read_chunk(chunks[2], targets, ranges(513, 514), verify=False),
            lambda: snapshot.read_contents(saved.path),
        ]
        for ask in asks:
            with pytest.raises(SnapshotUnreadable, match="I/O error"):
                ask()
    assert failing(saved) == []


# ----------------------------------------------------------- what it says of itself


@every_kind
@pytest.mark.parametrize(("n", "start"), [(1, 0), (256, 0), (600, 0), (600, 257)])
def test_a_file_says_all_that_its_row_needs(
    tmp_path: Path, build: Callable[[int], list[Any]], n: int, start: int
) -> None:
    """An index can be made again: contents, tokens, size and checksums come back."""
    saved = save(tmp_path, build(n), start)
    contents, ids, written = snapshot.read_contents(saved.path)
    assert saved.contents == contents
    assert (np.dtype(np.int64), saved.tokens) == (ids.dtype, ids.tolist())
    assert saved.written == written
    Namespace(**contents.namespace)


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(
        data[8 : 8 + int.from_bytes(data[:8], "little")]
    )
    return header


def with_header(saved: Saved, header: bytes, length: int | None = None) -> None:
    """Give a file another header, padded like a real one, before its old data."""
    data = saved.path.read_bytes()[saved.data_start :]
    header += b" " * (-(8 + len(header)) % PAGE)
    size = len(header) if length is None else length
    saved.path.write_bytes(size.to_bytes(8, "little") + header + data)


def with_facts(saved: Saved, **changes: Any) -> None:
    """Let a file say something else of itself, the rest of its header agreeing."""
    header = header_of(saved.path)
    facts = json.loads(header["__metadata__"]["promptstore"]) | changes
    facts = {key: value for key, value in facts.items() if value is not ...}
    with contextlib.suppress(Exception):
        header = tensors_of(facts) | {"__metadata__": header["__metadata__"]}
    with_text(saved, header, json.dumps(facts))


def with_text(saved: Saved, header: dict[str, Any], text: str) -> None:
    """Let a file say *text* of itself, with the checksum of that."""
    header["__metadata__"]["promptstore"] = text
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    header["__metadata__"]["promptstore.checksum"] = checksum
    with_header(saved, json.dumps(header, separators=(",", ":")).encode())


def tensors_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the header that a file of these facts would have."""
    names = [field.name for field in dataclasses.fields(Contents)]
    own = {name: facts[name] for name in names if name != "extent"}
    extent = Extent.from_text(facts["extent"], facts["start"], facts["end"])
    contents = Contents(
        **own | {"layers": from_text(facts["layers"]), "extent": extent}
    )
    assert contents.shape.n_tokens < 10_000
    tensors: dict[str, Any] = json.loads(header_.build(contents, b"")[8:])
    return {"__metadata__": None} | tensors


@pytest.mark.parametrize(
    "length", [0, 1, 2**30, 2**31, 2**32, 2**60, 2**63, 2**64 - 1], ids=hex
)
def test_a_header_length_that_lies_is_corrupt(tmp_path: Path, length: int) -> None:
    """No length, however large, makes it read or allocate what is not there."""
    saved = save(tmp_path, kv(300))
    header = saved.path.read_bytes()[8 : saved.data_start]
    with_header(saved, header, length)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b" ",
        b"not JSON",
        b"{",
        b"\xff\xfe",
        b"null",
        b"5",
        b"[]",
        b"{}",
        b'{"__metadata__":5}',
        b'{"__metadata__":{}}',
        b'{"__metadata__":{"promptstore":5}}',
        b'{"__metadata__":{"promptstore":"5"}}',
        b'{"__metadata__":{"promptstore":"[]"}}',
        b'{"__metadata__":{"promptstore":"{}"}}',
        b'{"__metadata__":{"promptstore":"nope"}}',
        b'{"__metadata__":{"format":"mlx"},"w":{"dtype":"F32","shape":[1],'
        b'"data_offsets":[0,4]}}',
    ],
)
def test_a_header_that_is_not_ours_is_corrupt(tmp_path: Path, header: bytes) -> None:
    """Neither garbage nor another program's safetensors is a snapshot."""
    saved = save(tmp_path, kv(300))
    with_header(saved, header)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize("text", ["promptstore/2", "promptstore/0", "", None, 1])
def test_another_format_is_unsupported(tmp_path: Path, text: Any) -> None:
    """A file of a later version is told from damage: it is not to be deleted."""
    saved = save(tmp_path, kv(300))
    with_facts(saved, format=text)
    with pytest.raises(SnapshotUnsupported):
        snapshot.read_contents(saved.path)


FACTS: list[dict[str, Any]] = [
    {"format": ...},
    {"checksums": ...},
    {"id": ...},
    {"start": ...},
    {"layers": ...},
    {"extra": 1},
    {"checksums": 5},
    {"checksums": "zz"},
    {"layers": "full/1"},
    {"layers": 5},
    {"layers": "[]"},
    {"layers": '[["full/1",[["keys",2,8,"F99"]],{}]]'},
    {"layers": '[["full/1",[["keys",-2,8,"F32"],["values",2,8,"F32"]],{}]]'},
    {"layers": '[["full/1",[["keys",5,8,"F32"],["values",5,8,"F32"]],{}]]'},
    {"start": 1},
    {"start": 10**30},
    {"end": 0},
    {"end": 299},
    {"end": 301},
    {"end": 2**60},
    {"end": float("nan")},
    {"end": float("inf")},
    {"start": -(10**30)},
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_facts_that_do_not_describe_the_file_are_corrupt(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    """Fields missing, of a wrong kind, or of another size than the file."""
    saved = save(tmp_path, kv(300))
    with_facts(saved, **facts)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize(
    "facts",
    [
        {"end": "300"},
        {"start": None},
        {"end": [300]},
        {"end": 300.0},
        {"start": 0.0},
        {"layers": '[["full/1",[["keys",1e999,8,"F32"]],{}]]'},
        {"layers": "[" * 100_000},
    ],
    ids=lambda facts: str(facts)[:50],
)
def test_facts_of_wrong_types_are_corrupt(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    """Whatever JSON a field holds, no other error comes out."""
    saved = save(tmp_path, kv(300))
    with_facts(saved, **facts)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize(
    "facts",
    [
        {"checksums": ""},
        {"checksums": "00" * 16 * 9},
        {"start": -1, "end": 299},
        {"start": True, "end": 301},
        {"id": 5},
        {"id": "../../escape"},
        {"namespace": "model"},
        {"namespace": {"model": 5}},
        pytest.param(
            {"namespace": {"unknown": "x"}},
        ),
        {"parent": 7},
        pytest.param(
            {"kind": "other"},
        ),
        {"created_ns": "yesterday"},
        {"end_digest": "zz"},
    ],
    ids=lambda facts: str(facts)[:50],
)
def test_facts_that_no_row_can_take_are_corrupt(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    """What an index would stumble over is refused where it is read, and as damage."""
    saved = save(tmp_path, kv(300))
    with_facts(saved, **facts)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


def test_endless_brackets_are_corrupt(tmp_path: Path) -> None:
    """A header that is nested without end is not JSON for us."""
    saved = save(tmp_path, kv(300))
    with_header(saved, b"[" * 100_000)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize("key", ["__metadata__", "tokens", "000000.0000.keys"])
def test_keys_that_come_twice_are_corrupt(tmp_path: Path, key: str) -> None:
    """Two readers could take different ones: such a header was not written here."""
    saved = save(tmp_path, kv(300))
    header = header_of(saved.path)
    again = json.dumps({key: header[key]}, separators=(",", ":"))[1:]
    text = json.dumps(header, separators=(",", ":"))[:-1] + "," + again
    assert json.loads(text) == header
    with_header(saved, text.encode())
    with pytest.raises(SnapshotCorrupt, match="not the one that was written"):
        snapshot.read_contents(saved.path)


def test_facts_that_come_twice_are_corrupt(tmp_path: Path) -> None:
    """The same inside our own metadata."""
    saved = save(tmp_path, kv(300))
    header = header_of(saved.path)
    facts = header["__metadata__"]["promptstore"]
    with_text(saved, header, '{"id":"other",' + facts[1:])
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 8]},
        {"data_offsets": [4, 16388]},
        {"data_offsets": [-16384, 0]},
        {"data_offsets": [0, 2**63]},
        {"data_offsets": None},
        {"shape": [1, 2, 257, 8]},
        {"shape": [1, 2, 8, 256]},
        {"shape": []},
        {"dtype": "F16"},
        {"dtype": "F99"},
        {"dtype": 5},
    ],
    ids=str,
)
def test_tensors_that_lie_are_corrupt(tmp_path: Path, change: dict[str, Any]) -> None:
    """Offsets, shapes and dtypes must be those that the layers imply."""
    saved = save(tmp_path, kv(300))
    header = header_of(saved.path)
    header["000000.0000.keys"] |= change
    with_header(saved, json.dumps(header, separators=(",", ":")).encode())
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


@pytest.mark.parametrize("how", ["more", "fewer", "swapped", "renamed"])
def test_other_tensors_are_corrupt(tmp_path: Path, how: str) -> None:
    """A tensor added, dropped, out of its order or renamed is found."""
    saved = save(tmp_path, kv(300))
    header = header_of(saved.path)
    if how == "more":
        header["more"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif how == "fewer":
        del header["000001.0001.values"]
    elif how == "swapped":
        header["000000.0000.keys"] = header.pop("000000.0000.keys")
    else:
        header["000000.0000.k"] = header.pop("000000.0000.keys")
    with_header(saved, json.dumps(header, separators=(",", ":")).encode())
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)


def test_random_damage_to_a_header_raises_nothing_else(tmp_path: Path) -> None:
    """Damaged headers give SnapshotCorrupt, or contents that then fail."""
    saved = save(tmp_path, kv(20))
    whole = saved.path.read_bytes()
    used = len(whole[: saved.data_start].rstrip(b" "))
    rng = random.Random(10)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(used)
            data[at] = rng.choice([data[at] ^ (1 << rng.randrange(8)), *b'0"9,{}[]'])
        saved.path.write_bytes(data)
        with contextlib.suppress(SnapshotCorrupt, SnapshotUnsupported):
            snapshot.read_contents(saved.path)
        if bytes(data) != whole:
            with saved.open() as file, pytest.raises(SnapshotCorrupt):
                file.verify_header()


def test_one_flipped_bit_of_the_facts_is_found_without_the_row(tmp_path: Path) -> None:
    """An index is rebuilt from files: KV must not come into another namespace."""
    saved = save(tmp_path, kv(20))
    at = saved.path.read_bytes().index(b"weights-a")
    flip(saved.path, at)
    with pytest.raises(SnapshotCorrupt):
        snapshot.read_contents(saved.path)
