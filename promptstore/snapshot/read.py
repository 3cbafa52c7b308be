"""Read rows of a snapshot straight into their places, and verify it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from promptstore.errors import SnapshotCorrupt, SnapshotMissing, SnapshotUnreadable
from promptstore.extent import Chunk, Shape
from promptstore.ranges import Ranges, Run, covers, intersect
from promptstore.snapshot import header, pages
from promptstore.snapshot.header import CHECKSUM_BYTES, Claims, Contents, Written
from promptstore.snapshot.rows import Placed, Rows, advance, copy_rows, groups
from promptstore.tokens import Tokens

_STEP_BYTES = 4 << 20

Stamp = tuple[int, int, int]
"""Tells a file from another at its place."""


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
        self._fd = _open(path)
        try:
            info = _regular(path, os.fstat(self._fd))
            self.stamp = stamp_of(info)
            """What the system changes when the file is replaced or written to."""
            _require_size(path, info, nbytes)
            require_plausible(path, shape, nbytes, checksums)
            self._data_start = nbytes - shape.data_nbytes
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

    def verify_header(self) -> Rows:
        """Compare the header with its checksum, and return it.

        Raises:
            SnapshotCorrupt: They differ.
        """
        head = self._read(0, self._data_start)
        self._compare(0, head, "header")
        return head

    def verify_claims(self, claims: Claims) -> None:
        """Compare the header with its checksum, and what it says with the index.

        Raises:
            SnapshotCorrupt: Something differs.
            SnapshotUnsupported: The file is of another format.
        """
        head = self.verify_header()
        size = self._data_start + self._shape.data_nbytes
        try:
            facts = header.facts_of(self.path, head.data, size)
            header.require_claims(self.path, facts, claims)
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotCorrupt(self.path, f"is no snapshot: {error}") from error

    def verify_tokens(self, tokens: Tokens) -> None:
        """Compare the ids at the end with those that the index has.

        Raises:
            SnapshotCorrupt: The file is of other tokens, or damaged.
        """
        shape = self._shape
        at = self._data_start + shape.rows_nbytes + shape.state_nbytes
        data = self._read(at, 8 * shape.n_tokens)
        self._compare(len(shape.chunks) + 2, data, "tokens")
        if not np.array_equal(data.view("<i8"), tokens):
            raise SnapshotCorrupt(self.path, "is of other tokens than its row")

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

    def verify_all(self, on_read: Callable[[int], None] = lambda n: None) -> None:
        """Compare everything in the file with its checksums, in small steps.

        Args:
            on_read: Called with the bytes of each step.

        Raises:
            SnapshotCorrupt: Something differs.
            SnapshotUnreadable: The system refused.
        """
        pages.bypass(self._fd)
        for index, (offset, nbytes, what) in enumerate(self._sections()):
            hasher = xxhash.xxh3_128()
            for lo in range(offset, offset + nbytes, _STEP_BYTES):
                step = self._read(lo, min(_STEP_BYTES, offset + nbytes - lo))
                hasher.update(step.data)
                on_read(len(step))
            self._expect(index, hasher.digest(), what)

    def _sections(self) -> Iterator[tuple[int, int, str]]:
        """Yield offset, bytes and name of all that has a checksum of its own."""
        shape, at = self._shape, self._data_start
        yield 0, at, "header"
        for chunk in shape.chunks:
            yield at + chunk.offset, chunk.nbytes, f"chunk {chunk.index}"
        at += shape.rows_nbytes
        yield at, shape.state_nbytes, "state"
        yield at + shape.state_nbytes, 8 * shape.n_tokens, "tokens"

    def read_ahead(self) -> None:
        """Read all of the file and forget it, for the page cache."""
        end = self._data_start + self._shape.data_nbytes
        for offset in range(0, end, _STEP_BYTES):
            self._read(offset, min(_STEP_BYTES, end - offset))

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
        for group in groups(slabs):
            _readv(self.path, self._fd, offset, group)
            offset += sum(len(view) for view in group)
            if verify:
                for view in group:
                    hasher.update(view)
        return hasher.digest()


def _open(path: Path) -> int:
    # Without O_NONBLOCK a FIFO in a snapshot's place would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError as error:
        raise SnapshotMissing(path, "the file is gone") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SnapshotCorrupt(path, "is a symbolic link") from error
        raise SnapshotUnreadable(path, str(error)) from error


def require_plausible(path: Path, shape: Shape, nbytes: int, checksums: bytes) -> None:
    """Raise unless what a row says of a file makes sense, before any of it is used.

    Raises:
        SnapshotCorrupt: It does not.
    """
    n_sums, rest = divmod(len(checksums), CHECKSUM_BYTES)
    try:
        shape.require_within(nbytes - 8, n_sums - 3)
    except ValueError as error:
        raise SnapshotCorrupt(path, f"its row makes no sense: {error}") from error
    if rest:
        raise SnapshotCorrupt(path, "its row has checksums of another shape")


def stamp_at(path: Path, nbytes: int) -> Stamp:
    """Return what tells a file from another at its place, not opening it.

    Raises:
        SnapshotMissing, SnapshotUnreadable: As the system says.
        SnapshotCorrupt: It is not of the size that was written.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError as error:
        raise SnapshotMissing(path, "the file is gone") from error
    except OSError as error:
        raise SnapshotUnreadable(path, str(error)) from error
    _require_size(path, _regular(path, info), nbytes)
    return stamp_of(info)


def stamp_of(info: os.stat_result) -> Stamp:
    """Return what the system changes when a file is replaced or written to."""
    return info.st_ino, info.st_mtime_ns, info.st_ctime_ns


def _regular(path: Path, info: os.stat_result) -> os.stat_result:
    if stat.S_ISLNK(info.st_mode):
        raise SnapshotCorrupt(path, "is a symbolic link")
    if not stat.S_ISREG(info.st_mode):
        raise SnapshotCorrupt(path, "is not a regular file")
    return info


def _require_size(path: Path, info: os.stat_result, nbytes: int) -> None:
    if info.st_size != nbytes:
        raise SnapshotCorrupt(path, f"has {info.st_size} bytes instead of {nbytes}")


def read_contents(path: Path) -> tuple[Contents, Tokens, Written]:
    """Return what a file says of itself, its tokens, and what its row must carry.

    For rebuilding an index; restoring never parses all of a header. Takes no more
    memory than the file and a constant.

    Raises:
        SnapshotMissing, SnapshotUnreadable: As the system says.
        SnapshotCorrupt: It is no snapshot, or the header does not describe the file.
        SnapshotUnsupported: It is of another format.
    """
    fd = _open(path)
    try:
        head, size = _read_head(path, fd)
        contents, sums = header.parse(path, head.data, size)
        digest = xxhash.xxh3_128_digest(head.data)
        del head
        n_tokens = contents.shape.n_tokens
        ids = _pread(path, fd, 8 * n_tokens, size - 8 * n_tokens)
    finally:
        os.close(fd)
    if xxhash.xxh3_128_digest(ids.data) != sums[-CHECKSUM_BYTES:]:
        raise SnapshotCorrupt(path, "the checksum of its tokens differs")
    tokens = ids.view("<i8").astype(np.int64, copy=False)
    return contents, tokens, Written(size, digest + sums)


def header_checksum(path: Path) -> bytes:
    """Return the checksum of a file's header, whatever it says.

    Raises:
        SnapshotMissing, SnapshotUnreadable: As the system says.
        SnapshotCorrupt: It is no snapshot.
    """
    fd = _open(path)
    try:
        head, _ = _read_head(path, fd)
        return xxhash.xxh3_128_digest(head.data)
    finally:
        os.close(fd)


def _read_head(path: Path, fd: int) -> tuple[Rows, int]:
    """Return the bytes of a file up to its data, and the size of all of it."""
    size = _regular(path, os.fstat(fd)).st_size
    n_header = int.from_bytes(_pread(path, fd, min(size, 8), 0), "little")
    if not 0 < n_header <= size - 8:
        raise SnapshotCorrupt(path, "is no safetensors file")
    return _pread(path, fd, 8 + n_header, 0), size


def _pread(path: Path, fd: int, nbytes: int, offset: int) -> Rows:
    data = np.empty(nbytes, np.uint8)
    _readv(path, fd, offset, [data.data] if nbytes else [])
    return data


def _readv(path: Path, fd: int, offset: int, group: list[memoryview]) -> None:
    while group:
        try:
            n = os.preadv(fd, group, offset)
        except OSError as error:
            raise SnapshotUnreadable(path, str(error)) from error
        if not n:
            raise SnapshotCorrupt(path, "ends before its rows do")
        offset += n
        group = advance(group, n)
