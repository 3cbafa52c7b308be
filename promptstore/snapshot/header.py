"""What a snapshot file says of itself, and its safetensors header."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import xxhash

from promptstore.errors import NotCovered, SnapshotCorrupt, SnapshotUnsupported
from promptstore.extent import Extent, Shape
from promptstore.layers import Layers, from_text, to_text
from promptstore.ranges import count
from promptstore.strict_json import MAX_CHARS, parse_strings, string_at
from promptstore.types import Kind, Namespace

FORMAT = "promptstore/1"
CHECKSUM_BYTES = 16
_PAGE = 4096
_MAX_METADATA = 2 << 20
"""Besides one eighth of the file, which its checksums may take."""
_MAX_STRUCTURE = 4096
_NAME = re.compile("[0-9a-f]{32}")
_OPENING = '{"__metadata__":{"promptstore":'
_BETWEEN = ',"promptstore.checksum":'
_NONSENSE = ValueError, KeyError, TypeError, AttributeError
T = TypeVar("T")


@dataclass(frozen=True)
class Claims:
    """What the index says of a snapshot, for its file to say the same.

    Args:
        namespace: Whose KV.
        layers: Of which layers.
        parent: The name of what it continues.
        extent: What it holds of which tokens.
        end_digest: Of all the tokens up to its end, those that it continues included.
    """

    namespace: Namespace
    layers: Layers
    parent: str | None
    extent: Extent
    end_digest: str


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

    Raises:
        NotCovered: The layers are too many to describe.
    """
    data = "".join(_pieces(contents, sums)).encode()
    data += b" " * (-(8 + len(data)) % _PAGE)
    return len(data).to_bytes(8, "little") + data


def _pieces(contents: Contents, sums: bytes) -> Iterator[str]:
    """Yield the header's text: what the file says of itself, then tensor by tensor."""
    extent = contents.extent
    layers, extent_text = to_text(contents.layers), extent.to_text()
    facts = {
        "format": FORMAT,
        "id": contents.id,
        "namespace": contents.namespace,
        "layers": layers,
        "parent": contents.parent,
        "start": extent.start,
        "end": extent.end,
        "extent": extent_text,
        "end_digest": contents.end_digest,
        "kind": contents.kind,
        "created_ns": contents.created_ns,
        "writer": contents.writer,
        "checksums": sums.hex(),
    }
    if max(len(layers), len(extent_text)) > MAX_CHARS:
        raise NotCovered("what there is to say of it is too long for a header")
    text = json.dumps(facts, sort_keys=True)
    yield f"{_OPENING}{json.dumps(text)}{_BETWEEN}{json.dumps(_checksum(text))}}}"
    at = 0
    for name, dtype, shape, nbytes in _tensors(contents.shape):
        dims = ",".join(map(str, shape))
        value = (
            f'"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{at},{at + nbytes}]'
        )
        yield f",{json.dumps(name)}:{{{value}}}"
        at += nbytes
    yield "}"


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


def parse(path: Path, head: memoryview, nbytes: int) -> tuple[Contents, bytes]:
    """Return what a header says, and the checksums of what lies behind it.

    Takes little more memory than the header, whatever that claims.

    Args:
        path: The file.
        head: Its bytes up to the data.
        nbytes: The size of all of it.

    Raises:
        SnapshotCorrupt: It is not a header that `build` made, or not of this file.
        SnapshotUnsupported: It is of another format.
    """
    try:
        facts = facts_of(path, head, nbytes)
        contents, sums = _contents(facts), bytes.fromhex(facts["checksums"])
        shape = contents.shape
        n_sums, rest = divmod(len(sums), CHECKSUM_BYTES)
        shape.require_within(nbytes - len(head), n_sums - 2)
        if nbytes != len(head) + shape.data_nbytes:
            raise SnapshotCorrupt(path, "is not of the size that its header says")
        if rest or contents.id != path.stem or not _is_built(head, contents, sums):
            raise SnapshotCorrupt(path, "its header is not the one that was written")
    except _NONSENSE as error:
        raise SnapshotCorrupt(path, f"is no snapshot: {error}") from error
    return contents, sums


def facts_of(path: Path, head: memoryview, nbytes: int) -> dict[str, Any]:
    """Return the facts in a header, as they stand there; nothing else is parsed.

    Raises:
        SnapshotCorrupt: Their checksum differs.
        SnapshotUnsupported: They are of another format.
        ValueError, KeyError, TypeError: They are none.
    """
    limit = _MAX_METADATA + nbytes // 8
    text = str(head[8 : 8 + limit], "ascii")
    if not text.startswith(_OPENING):
        raise ValueError("its header begins otherwise")
    said, at = string_at(text, len(_OPENING))
    if not text.startswith(_BETWEEN, at):
        raise ValueError("its metadata end early")
    checksum, at = string_at(text, at + len(_BETWEEN))
    if checksum != _checksum(said) or not text.startswith("}", at):
        raise SnapshotCorrupt(path, "the checksum of what it says differs")
    facts = parse_strings(said, limit, _MAX_STRUCTURE)
    if facts["format"] != FORMAT:
        raise SnapshotUnsupported(path, f"is of format {facts['format']!r}")
    return _of_type(dict, facts)


def require_claims(path: Path, facts: dict[str, Any], claims: Claims) -> None:
    """Compare what a file says of itself with what the index says of it.

    Raises:
        SnapshotCorrupt: They differ.
        KeyError, TypeError, ValueError: The file lacks a fact.
    """
    extent = claims.extent
    says = {
        "namespace": (Namespace(**facts["namespace"]), claims.namespace),
        "layers": (facts["layers"], to_text(claims.layers)),
        "parent": (facts["parent"], claims.parent),
        "start": (facts["start"], extent.start),
        "end": (facts["end"], extent.end),
        "extent": (facts["extent"], extent.to_text()),
        "end_digest": (facts["end_digest"], claims.end_digest),
    }
    wrong = [name for name, (own, row) in says.items() if own != row]
    if wrong:
        raise SnapshotCorrupt(path, f"its row differs in {', '.join(wrong)}")


def _is_built(head: memoryview, contents: Contents, sums: bytes) -> bool:
    """Whether `build` gives that header, which ends with the first difference."""
    at = 8
    for piece in _pieces(contents, sums):
        data = piece.encode()
        if head[at : at + len(data)] != data:
            return False
        at += len(data)
    n_spaces = -at % _PAGE
    return len(head) == at + n_spaces and head[at:] == b" " * n_spaces


def _contents(facts: dict[str, Any]) -> Contents:
    start, end = _of_type(int, facts["start"]), _of_type(int, facts["end"])
    parent = facts["parent"]
    if not 0 <= start <= end or (parent is None) != (start == 0):
        raise ValueError(f"no range of tokens: [{start}, {end}) behind {parent}")
    created_ns = _of_type(int, facts["created_ns"])
    if abs(created_ns) >= 1 << 63:
        raise ValueError(f"no time: {created_ns}")
    return Contents(
        id=_hex(facts["id"]),
        namespace=Namespace(**facts["namespace"]).fields,
        layers=from_text(facts["layers"]),
        parent=None if parent is None else _hex(parent),
        extent=Extent.from_text(facts["extent"], start, end),
        end_digest=_hex(facts["end_digest"]),
        kind=_kind(facts["kind"]),
        created_ns=created_ns,
        writer=_of_type(str, facts["writer"]),
    )


def _hex(value: Any) -> str:
    if type(value) is not str or not _NAME.fullmatch(value):
        raise ValueError(f"not 32 hexadecimal digits: {value!r}")
    return value


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
