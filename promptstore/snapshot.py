"""One snapshot file: write it, read rows of it, verify it.

Knows bytes and descriptions, not caches and not the index. A file is plain
safetensors: the rows lie in chunks of 256 tokens, all layers of a band contiguous,
so that a prefix of the tokens is a prefix of the band; state and token ids come last.
The header is padded with spaces so that the rows start on a page.

::

    8 bytes   header length, little-endian
    header    JSON, spaces up to a multiple of 4096
    chunk 0   rows [start, start + 256) of layer 0 part 0, of layer 0 part 1, …
    chunk 1   …
    state     the arrays of recurrent layers
    tokens    int64, little-endian
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
    SnapshotUnsupported,
)
from promptstore.extent import Chunk, Extent, Shape
from promptstore.layers import Layers, from_text, to_text
from promptstore.ranges import Ranges, Run, count, covers, intersect
from promptstore.tokens import Tokens

FORMAT = "promptstore/1"
CHECKSUM_BYTES = 16
_PAGE = 4096
_MAX_HEADER = 1 << 30
_GROUP_BYTES = 4 << 20  # read and hash in pieces that stay in the processor's cache
_IOV_MAX = os.sysconf("SC_IOV_MAX")

Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Contents:
    """What a snapshot file says of itself, enough to index it again."""

    id: str
    namespace: dict[str, str]
    layers: Layers
    parent: str | None
    extent: Extent
    end_digest: str
    kind: str
    created_ns: int
    writer: str

    @functools.cached_property
    def shape(self) -> Shape:
        """Where everything lies."""
        return Shape(self.layers, self.extent)


@dataclass(frozen=True)
class Placed:
    """Rows of one part in memory, and which tokens they belong to.

    Shape: rows ``(n_kv_heads, n_rows, row_bytes)``.
    """

    rows: Rows
    runs: tuple[Run, ...]

    def slabs(self, ranges: Ranges) -> Iterator[Rows]:
        """Yield the bytes of the tokens of *ranges*, head by head."""
        slots = [slot for lo, hi in ranges for slot in self._slots(lo, hi)]
        for head in self.rows:
            for first, last in slots:
                yield head[first:last]

    def _slots(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of tokens ``[lo, hi)`` in the order of the tokens."""
        while lo < hi:
            run = next(run for run in self.runs if run.lo <= lo < run.hi)
            end = min(hi, run.hi)
            yield lo - run.lo + run.slot, end - run.lo + run.slot
            lo = end


@dataclass(frozen=True)
class Body:
    """The bytes of a snapshot in memory.

    Args:
        parts: By leaf, its row parts.
        state: The state arrays, each as plain bytes.
        tokens: The ids of ``[start, end)``.
    """

    parts: Sequence[Sequence[Placed]]
    state: Sequence[Rows]
    tokens: Tokens


@dataclass(frozen=True)
class Written:
    """Facts of a written file that its row must carry."""

    nbytes: int
    checksums: bytes


# ---------------------------------------------------------------------- writing


@contextmanager
def create(path: Path) -> Iterator[int]:
    """Create *path* and yield its descriptor, locked until the block ends.

    The lock tells other processes that the file, whatever its name by then, is
    still being made: see `is_abandoned`.

    Raises:
        OSError: As the system says.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "was swept up at once", str(path))
        yield fd
    finally:
        os.close(fd)


def is_abandoned(path: Path) -> bool:
    """Whether no process is still making the file at *path*."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def write(fd: int, contents: Contents, body: Body) -> Written:
    """Write and sync one snapshot.

    Args:
        fd: An empty file.
        contents: What the file says of itself.
        body: What it holds.

    Raises:
        OSError: As the system says; the file is then of no use.
    """
    shape = contents.shape
    data_start = nbytes_of(contents) - shape.data_nbytes
    os.lseek(fd, data_start, os.SEEK_SET)
    sums = [_write_slabs(fd, _chunk_slabs(chunk, body)) for chunk in shape.chunks]
    sums.append(_write_slabs(fd, body.state))
    ids = np.ascontiguousarray(body.tokens, "<i8").view(np.uint8)
    sums.append(_write_slabs(fd, [ids]))
    header = _header(contents, b"".join(sums))
    assert len(header) == data_start
    _write_all(fd, header)
    os.fsync(fd)
    checksums = xxhash.xxh3_128_digest(header) + b"".join(sums)
    return Written(data_start + shape.data_nbytes, checksums)


def nbytes_of(contents: Contents) -> int:
    """Return the size that a file of these contents will have."""
    n_sums = len(contents.shape.chunks) + 2
    header = _header(contents, bytes(CHECKSUM_BYTES * n_sums))
    return len(header) + contents.shape.data_nbytes


def _chunk_slabs(chunk: Chunk, body: Body) -> Iterator[Rows]:
    for leaf in chunk.band.leaves:
        for placed in body.parts[leaf]:
            yield from placed.slabs(chunk.ranges)


def _write_slabs(fd: int, slabs: Iterable[Rows]) -> bytes:
    hasher = xxhash.xxh3_128()
    for group in _groups(slabs):
        for slab in group:
            hasher.update(slab)
        _writev_all(fd, group)
    return hasher.digest()


def _writev_all(fd: int, group: list[memoryview]) -> None:
    left = sum(len(view) for view in group)
    while left:
        n = os.writev(fd, group)
        left -= n
        group = _advance(group, n)


def _write_all(fd: int, header: bytes) -> None:
    at = 0
    while at < len(header):
        at += os.pwrite(fd, header[at:], at)


def _groups(slabs: Iterable[Rows]) -> Iterator[list[memoryview]]:
    """Yield plain byte views in groups that one vectored call takes."""
    group: list[memoryview] = []
    nbytes = 0
    for slab in slabs:
        if not slab.size:
            continue
        if len(group) == _IOV_MAX or nbytes >= _GROUP_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(slab.reshape(-1).data)
        nbytes += slab.nbytes
    if group:
        yield group


def _advance(group: list[memoryview], n: int) -> list[memoryview]:
    """Return what is left of *group* once its first *n* bytes are done."""
    for index, view in enumerate(group):
        if n < len(view):
            return [view[n:], *group[index + 1 :]]
        n -= len(view)
    return []


def _header(contents: Contents, sums: bytes) -> bytes:
    extent = contents.extent
    facts = {
        "format": FORMAT,
        "id": contents.id,
        "namespace": contents.namespace,
        "layers": to_text(contents.layers),
        "parent": contents.parent,
        "start": extent.start,
        "end": extent.end,
        "extent": extent.to_text(),
        "end_digest": contents.end_digest,
        "kind": contents.kind,
        "created_ns": contents.created_ns,
        "writer": contents.writer,
        "checksums": sums.hex(),
    }
    header: dict[str, Any] = {"__metadata__": {"promptstore": json.dumps(facts)}}
    at = 0
    for name, dtype, shape, nbytes in _tensors(contents.shape):
        offsets = [at, at + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


def _tensors(shape: Shape) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and bytes of each tensor in the order of the file."""
    for chunk in shape.chunks:
        n_rows = count(chunk.ranges)
        for leaf, part in shape.parts(chunk.band):
            name = f"{chunk.index:06}.{leaf:04}.{part.name}"
            dims = [1, part.n_kv_heads, n_rows, part.head_dim]
            yield name, part.dtype, dims, n_rows * part.token_bytes
    for array in shape.extent.state:
        name = f"state.{array.leaf:04}.{array.name}"
        yield name, array.dtype, list(array.shape), array.nbytes
    yield "tokens", "I64", [shape.n_tokens], 8 * shape.n_tokens


# ---------------------------------------------------------------------- reading


class SnapshotFile:
    """An open snapshot, of which rows are read straight into their places.

    Args:
        path: The file.
        shape: Where everything lies, as the index says.
        nbytes: Its size, as the index says.
        checksums: Of the header, of each chunk, of the state, of the tokens; 16
            bytes each.

    Raises:
        SnapshotMissing: There is no such file.
        SnapshotCorrupt: It is not of the size that was written.
        SnapshotUnreadable: The system refused; nothing is proven.
    """

    def __init__(self, path: Path, shape: Shape, nbytes: int, checksums: bytes) -> None:
        self.path = path
        self._shape = shape
        self._checksums = checksums
        self._data_start = nbytes - shape.data_nbytes
        self._fd = _open(path)
        try:
            size = os.fstat(self._fd).st_size
            if size != nbytes or self._data_start < 8:
                raise SnapshotCorrupt(path, f"has {size} bytes instead of {nbytes}")
            if len(checksums) != CHECKSUM_BYTES * (len(shape.chunks) + 3):
                raise SnapshotCorrupt(path, "its row has checksums of another shape")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def verify_header(self) -> None:
        """Compare the header with its checksum.

        Raises:
            SnapshotCorrupt: They differ.
        """
        self._compare(0, self._read(0, self._data_start), "header")

    def read_chunk(
        self,
        chunk: Chunk,
        targets: Sequence[Sequence[Placed]],
        wanted: Sequence[Ranges],
        *,
        verify: bool,
    ) -> int:
        """Read rows of one chunk into their places.

        Args:
            chunk: One of the shape's.
            targets: By leaf, where the rows of its parts go.
            wanted: By leaf, the tokens whose rows are wanted; others are not touched.
            verify: Compare the chunk with its checksum.

        Returns:
            Bytes read.

        Raises:
            SnapshotCorrupt: The file is shorter, or the checksum differs.
            SnapshotUnreadable: The system refused.
        """
        offset = self._data_start + chunk.offset
        if all(covers(wanted[leaf], chunk.ranges) for leaf in chunk.band.leaves):
            slabs = (
                slab
                for leaf in chunk.band.leaves
                for target in targets[leaf]
                for slab in target.slabs(chunk.ranges)
            )
            digest = self._scatter(offset, slabs, verify=verify)
            if verify:
                self._expect(chunk.index + 1, digest, f"chunk {chunk.index}")
            return chunk.nbytes
        data = self._read(offset, chunk.nbytes)
        if verify:
            self._compare(chunk.index + 1, data, f"chunk {chunk.index}")
        self._place(chunk, data, targets, wanted)
        return chunk.nbytes

    def _place(
        self,
        chunk: Chunk,
        data: Rows,
        targets: Sequence[Sequence[Placed]],
        wanted: Sequence[Ranges],
    ) -> None:
        """Copy what is wanted of a chunk that was read whole."""
        runs, n_rows = [], 0
        for lo, hi in chunk.ranges:
            runs.append(Run(lo, hi, n_rows))
            n_rows += hi - lo
        at = 0
        for leaf in chunk.band.leaves:
            ranges = intersect(wanted[leaf], chunk.ranges)
            for target in targets[leaf]:
                heads, _, row_bytes = target.rows.shape
                size = heads * n_rows * row_bytes
                part = data[at : at + size].reshape(heads, n_rows, row_bytes)
                copy_rows(Placed(part, tuple(runs)), target, ranges)
                at += size

    def read_state(self, targets: Sequence[Rows], *, verify: bool) -> int:
        """Read the state arrays, as `read_chunk` reads rows; return the bytes read."""
        offset = self._data_start + self._shape.rows_nbytes
        digest = self._scatter(offset, targets, verify=verify)
        if verify:
            self._expect(len(self._shape.chunks) + 1, digest, "state")
        return self._shape.state_nbytes

    def verify_all(self) -> None:
        """Compare everything in the file with its checksums.

        Raises:
            SnapshotCorrupt: Something differs.
            SnapshotUnreadable: The system refused.
        """
        self.verify_header()
        shape = self._shape
        sections = [
            (chunk.offset, chunk.nbytes, f"chunk {chunk.index}")
            for chunk in shape.chunks
        ]
        sections.append((shape.rows_nbytes, shape.state_nbytes, "state"))
        tokens_at = shape.rows_nbytes + shape.state_nbytes
        sections.append((tokens_at, 8 * shape.n_tokens, "tokens"))
        for index, (offset, nbytes, what) in enumerate(sections):
            data = self._read(self._data_start + offset, nbytes)
            self._compare(index + 1, data, what)

    def read_ahead(self) -> None:
        """Read all of the file and forget it, for the page cache."""
        end = self._data_start + self._shape.data_nbytes
        for offset in range(0, end, _GROUP_BYTES):
            self._read(offset, min(_GROUP_BYTES, end - offset))

    def _compare(self, index: int, data: Rows, what: str) -> None:
        self._expect(index, xxhash.xxh3_128_digest(data.data), what)

    def _expect(self, index: int, digest: bytes, what: str) -> None:
        at = index * CHECKSUM_BYTES
        if digest != self._checksums[at : at + CHECKSUM_BYTES]:
            raise SnapshotCorrupt(self.path, f"the checksum of its {what} differs")

    def _read(self, offset: int, nbytes: int) -> Rows:
        data = np.empty(nbytes, np.uint8)
        self._scatter(offset, [data], verify=False)
        return data

    def _scatter(self, offset: int, slabs: Iterable[Rows], *, verify: bool) -> bytes:
        hasher = xxhash.xxh3_128()
        for group in _groups(slabs):
            self._readv(offset, group)
            offset += sum(len(view) for view in group)
            if verify:
                for view in group:
                    hasher.update(view)
        return hasher.digest()

    def _readv(self, offset: int, group: list[memoryview]) -> None:
        while group:
            try:
                n = os.preadv(self._fd, group, offset)
            except OSError as error:
                raise SnapshotUnreadable(self.path, str(error)) from error
            if not n:
                raise SnapshotCorrupt(self.path, "ends before its rows do")
            offset += n
            group = _advance(group, n)


def copy_rows(source: Placed, target: Placed, ranges: Ranges) -> None:
    """Copy the rows of the tokens of *ranges* from one place to another."""
    for lo, hi in ranges:
        for at, to, n in _steps(source, target, lo, hi):
            target.rows[:, to : to + n] = source.rows[:, at : at + n]


def _steps(
    source: Placed, target: Placed, lo: int, hi: int
) -> Iterator[tuple[int, int, int]]:
    """Yield source row, target row and length of each piece that both have whole."""
    while lo < hi:
        a = next(run for run in source.runs if run.lo <= lo < run.hi)
        b = next(run for run in target.runs if run.lo <= lo < run.hi)
        end = min(hi, a.hi, b.hi)
        yield lo - a.lo + a.slot, lo - b.lo + b.slot, end - lo
        lo = end


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SnapshotMissing(path, "the file is gone") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SnapshotCorrupt(path, "is a symbolic link") from error
        raise SnapshotUnreadable(path, str(error)) from error


def read_contents(path: Path) -> tuple[Contents, Tokens, Written]:
    """Return what a file says of itself, its tokens, and what its row must carry.

    For rebuilding an index; restoring never parses a header.

    Raises:
        SnapshotMissing, SnapshotUnreadable: As the system says.
        SnapshotCorrupt: It is no snapshot, or the header does not describe the file.
        SnapshotUnsupported: It is of another format.
    """
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        n_header = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 0 < n_header <= min(size - 8, _MAX_HEADER):
            raise SnapshotCorrupt(path, "is no safetensors file")
        header = os.pread(fd, 8 + n_header, 0)
        contents, sums = _parse(path, header)
        shape = contents.shape
        if size != len(header) + shape.data_nbytes:
            raise SnapshotCorrupt(path, "is not of the size that its header says")
        if header != _header(contents, sums):
            raise SnapshotCorrupt(path, "its header is not the one that was written")
        at = len(header) + shape.rows_nbytes + shape.state_nbytes
        ids = os.pread(fd, 8 * shape.n_tokens, at)
    except OSError as error:
        raise SnapshotUnreadable(path, str(error)) from error
    finally:
        os.close(fd)
    tokens = np.frombuffer(ids, "<i8").astype(np.int64)
    return contents, tokens, Written(size, xxhash.xxh3_128_digest(header) + sums)


def _parse(path: Path, header: bytes) -> tuple[Contents, bytes]:
    try:
        facts = json.loads(json.loads(header[8:])["__metadata__"]["promptstore"])
        if facts.pop("format") != FORMAT:
            raise SnapshotUnsupported(path, "is of another format")
        sums = bytes.fromhex(facts.pop("checksums"))
        facts["layers"] = from_text(facts["layers"])
        start, end = facts.pop("start"), facts.pop("end")
        facts["extent"] = Extent.from_text(facts["extent"], start, end)
        return Contents(**facts), sums
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotCorrupt(path, f"is no snapshot: {error}") from error
