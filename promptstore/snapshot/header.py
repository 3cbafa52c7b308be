"""What a snapshot file says of itself, and its safetensors header."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import xxhash

from promptstore.errors import SnapshotCorrupt, SnapshotUnsupported
from promptstore.extent import Extent, Shape
from promptstore.layers import Layers, from_text, to_text
from promptstore.ranges import count
from promptstore.types import Kind, Namespace

FORMAT = "promptstore/1"
CHECKSUM_BYTES = 16
_PAGE = 4096
_NONSENSE = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError,
    RecursionError, MemoryError,
)  # fmt: skip
T = TypeVar("T")


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
class Written:
    """Facts of a written file that its row must carry."""

    nbytes: int
    checksums: bytes


def nbytes_of(contents: Contents) -> int:
    """Return the size that a file of these contents will have."""
    n_sums = len(contents.shape.chunks) + 2
    header = build(contents, bytes(CHECKSUM_BYTES * n_sums))
    return len(header) + contents.shape.data_nbytes


def build(contents: Contents, sums: bytes) -> bytes:
    """Return the header of a file, padded so that its data start on a page.

    Args:
        contents: What the file says of itself.
        sums: The checksums of each chunk, of the state and of the tokens.
    """
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
    text = json.dumps(facts, sort_keys=True)
    own = {"promptstore": text, "promptstore.checksum": _checksum(text)}
    header: dict[str, Any] = {"__metadata__": own}
    at = 0
    for name, dtype, shape, nbytes in _tensors(contents.shape):
        offsets = [at, at + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-(8 + len(data)) % _PAGE)
    return len(data).to_bytes(8, "little") + data


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


def parse(path: Path, header: bytes) -> tuple[Contents, bytes]:
    """Return what a header says, and the checksums of what lies behind it.

    Raises:
        SnapshotCorrupt: It is not a header that `build` made.
        SnapshotUnsupported: It is of another format.
    """
    try:
        own = json.loads(header[8:])["__metadata__"]
        text = own["promptstore"]
        if own["promptstore.checksum"] != _checksum(text):
            raise SnapshotCorrupt(path, "the checksum of what it says differs")
        facts = json.loads(text)
        if facts["format"] != FORMAT:
            raise SnapshotUnsupported(path, f"is of format {facts['format']!r}")
        contents, sums = _contents(facts), bytes.fromhex(facts["checksums"])
        shape = contents.shape  # may not make sense: inside the try
        is_whole = len(sums) == CHECKSUM_BYTES * (len(shape.chunks) + 2)
        if contents.id != path.stem or not is_whole or build(contents, sums) != header:
            raise SnapshotCorrupt(path, "its header is not the one that was written")
    except _NONSENSE as error:
        raise SnapshotCorrupt(path, f"is no snapshot: {error}") from error
    return contents, sums


def _contents(facts: dict[str, Any]) -> Contents:
    start, end = facts["start"], facts["end"]
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError(f"no range of tokens: [{start}, {end})")
    return Contents(
        id=_of_type(str, facts["id"]),
        namespace=asdict(Namespace(**facts["namespace"])),
        layers=from_text(facts["layers"]),
        parent=None if facts["parent"] is None else _of_type(str, facts["parent"]),
        extent=Extent.from_text(facts["extent"], start, end),
        end_digest=bytes.fromhex(facts["end_digest"]).hex(),
        kind=_kind(facts["kind"]),
        created_ns=_of_type(int, facts["created_ns"]),
        writer=_of_type(str, facts["writer"]),
    )


def _kind(value: Any) -> str:
    if value not in get_args(Kind):
        raise ValueError(f"no kind: {value!r}")
    return str(value)


def _of_type(cls: type[T], value: Any) -> T:
    if type(value) is not cls:
        raise TypeError(f"{value!r} is no {cls.__name__}")
    return value


def _checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
