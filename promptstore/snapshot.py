"""One snapshot file: write it, read rows of it, verify it.

Knows bytes and descriptions, not caches and not the index. A file is plain
safetensors: the rows lie in chunks of 256 tokens, all layers of a chunk contiguous,
so that a prefix of the tokens is a prefix of the file; the token ids come last. The
header is padded with spaces so that the rows start on a page.

::

    8 bytes   header length, little-endian
    header    JSON, spaces up to a multiple of 4096
    chunk 0   rows [start, start + 256) of layer 0 part 0, of layer 0 part 1, …
    chunk 1   …
    tokens    int64, little-endian
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from promptstore.layers import Layers, from_text, to_text, token_bytes
from promptstore.tokens import Tokens

FORMAT = "promptstore/1"
CHUNK = 256
CHECKSUM_BYTES = 16
_PAGE = 4096
_MAX_HEADER = 1 << 30
_GROUP_BYTES = 4 << 20  # read and hash in pieces that stay in the processor's cache
_IOV_MAX = os.sysconf("SC_IOV_MAX")

Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """Where everything lies in a snapshot of *layers* over ``[start, end)``."""

    layers: Layers
    start: int
    end: int

    @property
    def n_tokens(self) -> int:
        """Rows of each part."""
        return self.end - self.start

    @property
    def n_chunks(self) -> int:
        """Chunks, of which the last may be short."""
        return -(-self.n_tokens // CHUNK)

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all chunks."""
        return self.n_tokens * token_bytes(self.layers)

    @property
    def data_nbytes(self) -> int:
        """Bytes behind the header."""
        return self.rows_nbytes + 8 * self.n_tokens

    def span(self, chunk: int) -> tuple[int, int]:
        """Return the tokens of a chunk, ``[lo, hi)`` in the prompt."""
        lo = self.start + chunk * CHUNK
        return lo, min(lo + CHUNK, self.end)

    def offset(self, chunk: int) -> int:
        """Return where a chunk starts, counted from the end of the header."""
        return chunk * CHUNK * token_bytes(self.layers)


@dataclass(frozen=True)
class Contents:
    """What a snapshot file says of itself, enough to index it again."""

    id: str
    namespace: dict[str, str]
    layers: Layers
    parent: str | None
    start: int
    end: int
    end_digest: str
    kind: str
    created_ns: int
    writer: str

    @property
    def shape(self) -> Shape:
        """Where everything lies."""
        return Shape(self.layers, self.start, self.end)


@dataclass(frozen=True)
class RowSource:
    """Rows of one part in memory: ``rows[head, i]`` belongs to token ``first + i``.

    Shape: rows ``(n_kv_heads, n_rows, row_bytes)``.
    """

    rows: Rows
    first: int = 0

    def slabs(self, lo: int, hi: int) -> Iterator[Rows]:
        """Yield the bytes of tokens ``[lo, hi)``, one piece a head."""
        for head in self.rows:
            yield head[lo - self.first : hi - self.first]


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


def write(
    fd: int, contents: Contents, tokens: Tokens, sources: Sequence[RowSource]
) -> Written:
    """Write and sync one snapshot.

    Args:
        fd: An empty file.
        contents: What the file says of itself.
        tokens: The ids of ``[start, end)``.
        sources: The row parts of all layers in order; each covers ``[start, end)``.

    Raises:
        OSError: As the system says; the file is then of no use.
    """
    shape = contents.shape
    data_start = nbytes_of(contents) - shape.data_nbytes
    os.lseek(fd, data_start, os.SEEK_SET)
    sums = [
        _write_slabs(fd, _chunk_slabs(sources, *shape.span(chunk)))
        for chunk in range(shape.n_chunks)
    ]
    ids = np.ascontiguousarray(tokens, "<i8").view(np.uint8)
    sums.append(_write_slabs(fd, [ids]))
    header = _header(contents, b"".join(sums))
    assert len(header) == data_start
    _write_all(fd, header)
    os.fsync(fd)
    checksums = xxhash.xxh3_128_digest(header) + b"".join(sums)
    return Written(data_start + shape.data_nbytes, checksums)


def nbytes_of(contents: Contents) -> int:
    """Return the size that a file of these contents will have."""
    n_sums = contents.shape.n_chunks + 1
    header = _header(contents, bytes(CHECKSUM_BYTES * n_sums))
    return len(header) + contents.shape.data_nbytes


def _chunk_slabs(sources: Sequence[RowSource], lo: int, hi: int) -> Iterator[Rows]:
    for source in sources:
        yield from source.slabs(lo, hi)


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
    facts = asdict(contents) | {"layers": to_text(contents.layers)}
    facts |= {"format": FORMAT, "checksums": sums.hex()}
    header: dict[str, Any] = {"__metadata__": {"promptstore": json.dumps(facts)}}
    shape = contents.shape
    at = 0
    for chunk in range(shape.n_chunks):
        lo, hi = shape.span(chunk)
        for index, layer in enumerate(contents.layers):
            for part in layer.parts:
                end = at + (hi - lo) * part.token_bytes
                header[f"{chunk:06}.{index:04}.{part.name}"] = {
                    "dtype": part.dtype,
                    "shape": [1, part.n_kv_heads, hi - lo, part.head_dim],
                    "data_offsets": [at, end],
                }
                at = end
    header["tokens"] = {
        "dtype": "I64",
        "shape": [shape.n_tokens],
        "data_offsets": [at, at + 8 * shape.n_tokens],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


# ---------------------------------------------------------------------- reading


class SnapshotFile:
    """An open snapshot, of which rows are read straight into their places.

    Args:
        path: The file.
        shape: Where everything lies, as the index says.
        nbytes: Its size, as the index says.
        checksums: Of the header, of each chunk, of the tokens; 16 bytes each.

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
            if len(checksums) != CHECKSUM_BYTES * (shape.n_chunks + 2):
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
        self, chunk: int, targets: Sequence[Rows], lo: int, hi: int, *, verify: bool
    ) -> int:
        """Read the rows of tokens ``[lo, hi)`` of one chunk into their places.

        Args:
            chunk: Its number.
            targets: For each row part a view of bytes in which row *i* is token *i*.
                Shape ``(n_kv_heads, n_rows, row_bytes)``.
            lo: The first token wanted.
            hi: One past the last; ``[lo, hi)`` lies inside the chunk.
            verify: Compare the chunk with its checksum.

        Returns:
            Bytes read.

        Raises:
            SnapshotCorrupt: The file is shorter, or the checksum differs.
            SnapshotUnreadable: The system refused.
        """
        first, last = self._shape.span(chunk)
        offset = self._data_start + self._shape.offset(chunk)
        if (lo, hi) == (first, last):
            slabs = (head[lo:hi] for target in targets for head in target)
            digest = self._scatter(offset, slabs, verify=verify)
            if verify:
                self._expect(chunk + 1, digest, f"chunk {chunk}")
            return (hi - lo) * token_bytes(self._shape.layers)
        nbytes = (last - first) * token_bytes(self._shape.layers)
        data = self._read(offset, nbytes)
        if verify:
            self._compare(chunk + 1, data, f"chunk {chunk}")
        at = 0
        for target in targets:
            heads, _, row_bytes = target.shape
            size = heads * (last - first) * row_bytes
            part = data[at : at + size].reshape(heads, last - first, row_bytes)
            target[:, lo:hi] = part[:, lo - first : hi - first]
            at += size
        return nbytes

    def verify_all(self) -> None:
        """Compare everything in the file with its checksums.

        Raises:
            SnapshotCorrupt: Something differs.
            SnapshotUnreadable: The system refused.
        """
        self.verify_header()
        shape = self._shape
        for chunk in range(shape.n_chunks):
            lo, hi = shape.span(chunk)
            offset = self._data_start + shape.offset(chunk)
            data = self._read(offset, (hi - lo) * token_bytes(shape.layers))
            self._compare(chunk + 1, data, f"chunk {chunk}")
        data = self._read(self._data_start + shape.rows_nbytes, 8 * shape.n_tokens)
        self._compare(shape.n_chunks + 1, data, "tokens")

    def read_ahead(self, hi: int) -> None:
        """Read the rows up to token *hi* and forget them, for the page cache."""
        last = -(-(min(hi, self._shape.end) - self._shape.start) // CHUNK)
        end = self._data_start + min(self._shape.offset(last), self._shape.rows_nbytes)
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
        ids = os.pread(fd, 8 * shape.n_tokens, len(header) + shape.rows_nbytes)
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
        return Contents(**facts), sums
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotCorrupt(path, f"is no snapshot: {error}") from error
