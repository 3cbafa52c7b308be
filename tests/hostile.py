"""A corpus of hostile files: each is made from a good one by a function."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from promptstore import snapshot
from promptstore.extent import Shape

PAGE = 4096


@dataclass(frozen=True)
class Victim:
    """A snapshot file that is to be harmed, and what lies beside it.

    Args:
        path: The file.
        others: Files of other prompts, namespaces, layouts and stores, by name.
    """

    path: Path
    others: dict[str, Path]

    @property
    def data(self) -> bytearray:
        return bytearray(self.path.read_bytes())

    @property
    def shape(self) -> Shape:
        return snapshot.read_contents(self.path)[0].shape


Harm = Callable[[Victim], object]


def header_of(data: bytes | bytearray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header of a good file, and the facts in it."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header, json.loads(header["__metadata__"]["promptstore"])


def framed(head: bytes, rest: bytes = b"") -> bytes:
    """Return a file of a header, padded as ours are, and what lies behind it."""
    head += b" " * (-(8 + len(head)) % PAGE)
    return len(head).to_bytes(8, "little") + head + rest


def written(header: dict[str, Any], text: str, rest: bytes) -> bytes:
    """Return a file that says *text* of itself, with the checksum of that."""
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    own = {"promptstore": text, "promptstore.checksum": checksum}
    head = json.dumps(header | {"__metadata__": own}, separators=(",", ":"))
    return framed(head.encode(), rest)


def rest_of(data: bytes | bytearray) -> bytes:
    """Return what lies behind the header of a good file."""
    return bytes(data[8 + int.from_bytes(data[:8], "little") :])


def checksums_of(data: bytes) -> bytes:
    """Return what a row would have of a file, by what the file says."""
    size = 8 + int.from_bytes(data[:8], "little")
    own = xxhash.xxh3_128_digest(data[:size])
    try:
        return own + bytes.fromhex(header_of(data)[1]["checksums"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return own


# --------------------------------------------------------------------------- bytes


def flip(section: str) -> Harm:
    """Flip a bit in the middle of a section."""

    def harm(victim: Victim) -> None:
        data, shape = victim.data, victim.shape
        start = len(data) - shape.data_nbytes
        spans = {"length": (0, 8), "header": (8, 300), "padding": (start - 9, start)}
        for chunk in shape.chunks:
            at = start + chunk.offset
            spans[f"chunk {chunk.index}"] = at, at + chunk.nbytes
        at = start + shape.rows_nbytes
        spans["state"] = at, at + shape.state_nbytes
        spans["tokens"] = at + shape.state_nbytes, len(data)
        # A checkpoint has no chunks: any bit of it will do instead.
        lo, hi = spans.get(section, (0, 8))
        data[(lo + hi) // 2 if lo < hi else 0] ^= 16
        victim.path.write_bytes(data)

    return harm


def zero(lo: int, n: int = PAGE) -> Harm:
    """Overwrite pages with zeros."""

    def harm(victim: Victim) -> None:
        data = victim.data
        at = lo % len(data)
        end = min(at + n, len(data))
        data[at:end] = bytes(end - at)
        victim.path.write_bytes(data)

    return harm


def cut(n: int) -> Harm:
    """Truncate to *n* bytes, or by -*n*."""

    def harm(victim: Victim) -> None:
        size = victim.path.stat().st_size
        os.truncate(victim.path, n if n >= 0 else size + n)

    return harm


def grow(more: bytes) -> Harm:
    """Append bytes."""

    def harm(victim: Victim) -> None:
        victim.path.write_bytes(victim.data + more)

    return harm


def length(n: int) -> Harm:
    """Claim a header of *n* bytes."""

    def harm(victim: Victim) -> None:
        data = victim.data
        data[:8] = n.to_bytes(8, "little")
        victim.path.write_bytes(data)

    return harm


def replaced(data: bytes) -> Harm:
    """Put other bytes in its place."""
    return lambda victim: victim.path.write_bytes(data)


# --------------------------------------------------------------------------- files


def copy_of(name: str) -> Harm:
    """Put a good file of something else under its name."""
    return lambda victim: shutil.copyfile(victim.others[name], victim.path)


def swap(victim: Victim) -> None:
    """Swap it with the file of another prompt."""
    other, spare = victim.others["prompt"], victim.path.with_suffix(".spare")
    victim.path.rename(spare)
    other.rename(victim.path)
    spare.rename(other)


def directory(victim: Victim) -> None:
    victim.path.unlink()
    victim.path.mkdir()


def pipe(victim: Victim) -> None:
    victim.path.unlink()
    os.mkfifo(victim.path)


def link(target: str) -> Harm:
    """Put a link in its place: to where the file was moved, or elsewhere."""

    def harm(victim: Victim) -> None:
        victim.path.rename(victim.path.parents[2] / "moved")
        victim.path.symlink_to(target)

    return harm


def linked_folder(victim: Victim) -> None:
    """Move its folder elsewhere, and put a link to it in its place."""
    folder = victim.path.parent
    moved = folder.parents[1] / "moved folder"
    folder.rename(moved)
    folder.symlink_to(moved)


# ---------------------------------------------------------------------------- lies


def lie(**changes: Any) -> Harm:
    """Say something else of itself, with checksums that agree."""

    def harm(victim: Victim) -> None:
        data = victim.data
        header, facts = header_of(data)
        facts = {k: v for k, v in (facts | changes).items() if v is not ...}
        victim.path.write_bytes(written(header, json.dumps(facts), rest_of(data)))

    return harm


def edit(fact: str, old: str, new: str) -> Harm:
    """Replace a part of a fact."""

    def harm(victim: Victim) -> None:
        _, facts = header_of(victim.data)
        lie(**{fact: facts[fact].replace(old, new)})(victim)

    return harm


def says(text: str) -> Harm:
    """Say a text of itself that may be no JSON."""

    def harm(victim: Victim) -> None:
        data = victim.data
        victim.path.write_bytes(written(header_of(data)[0], text, rest_of(data)))

    return harm


def tensor(change: Callable[[dict[str, Any]], object]) -> Harm:
    """Change the description of a tensor."""

    def harm(victim: Victim) -> None:
        data = victim.data
        header, _ = header_of(data)
        change(header[next(name for name in header if name != "__metadata__")])
        head = json.dumps(header, separators=(",", ":")).encode()
        victim.path.write_bytes(framed(head, rest_of(data)))

    return harm


def twice(victim: Victim) -> None:
    """Have a fact two times; two readers may take different ones."""
    data = victim.data
    header, facts = header_of(data)
    text = json.dumps(facts)
    text = '{"end":1,' + text[1:]
    victim.path.write_bytes(written(header, text, rest_of(data)))


def swap_layers(victim: Victim) -> None:
    """Swap halves of the first chunk, and make its checksum that of the result."""
    data, shape = victim.data, victim.shape
    header, facts = header_of(data)
    n = shape.chunks[0].nbytes if shape.chunks else 0
    rest = rest_of(data)
    chunk = rest[n // 2 : n] + rest[: n // 2]
    sums = xxhash.xxh3_128_hexdigest(chunk) + facts["checksums"][32:]
    text = json.dumps(facts | {"checksums": sums}, sort_keys=True)
    victim.path.write_bytes(written(header, text, chunk + rest[n:]))


MANY = 40_000
DEEP = '[["composite/1",[],{},' * 10_000 + "[]" + "]]" * 10_000
HUGE = 1 << 60


def extent(**parts: Any) -> str:
    return json.dumps({"bands": [], "rings": [], "state": []} | parts)


CORPUS: dict[str, Harm] = {
    **{
        f"a flipped bit: {section}": flip(section)
        for section in (
            "length", "header", "padding", "chunk 0", "chunk 1", "state", "tokens",
        )
    },
    "zeros: header": zero(0),
    "zeros: first page": zero(PAGE),
    "zeros: the end": zero(-PAGE),
    "zeros: all": zero(0, 1 << 30),
    **{f"cut: {n}": cut(n) for n in (0, 1, 7, 8, 9, 300, 4095, 4096, 4097, -8, -1)},
    "grown by one": grow(b"\0"),
    "grown by a page": grow(bytes(PAGE)),
    "grown by a file": grow(framed(b"{}")),
    **{f"length: {n}": length(n) for n in (0, 1, 1 << 30, HUGE, (1 << 64) - 1)},
    "swapped files": swap,
    **{
        f"of another {name}": copy_of(name)
        for name in ("prompt", "namespace", "layout", "store")
    },
    "swapped layers": swap_layers,
    "directory": directory,
    "pipe": pipe,
    "link to itself, moved": link("../../moved"),
    "link to nowhere": link("nowhere"),
    "link to a device": link("/dev/zero"),
    "linked folder": linked_folder,
    "text": replaced(b"hello"),
    "spaces": replaced(framed(b" " * PAGE)),
    "brackets": replaced(framed(b"[" * 100_000)),
    "no metadata": replaced(framed(b"{}")),
    "no facts": replaced(framed(b'{"__metadata__":{}}')),
    "lists": replaced(framed(b'{"__metadata__":[' + b"[]," * MANY + b"[]]}")),
    "facts: text": says("hello"),
    "facts: number": says("9" * 10_000),
    "facts: NaN": says("NaN"),
    "facts: brackets": says("[" * 100_000),
    "facts: lists": says("[" + "[]," * MANY + "[]]"),
    "facts: twice": twice,
    "format: later": lie(format="promptstore/2"),
    "format: none": lie(format=...),
    "id: path": lie(id="../../../../../../etc/passwd"),
    "id: other": lie(id="ab" * 16),
    "id: surrogate": lie(id="\ud800" * 32),
    "namespace: other": lie(namespace={"model": "other"}),
    "namespace: lists": lie(namespace={"model": [[]] * MANY}),
    "namespace: unknown": lie(namespace={"model": "m", "new": ""}),
    "parent: path": lie(parent="../../../../../../../etc/passwd"),
    "parent: none": lie(parent=None),
    "parent: other": lie(parent="ab" * 16),
    "start: huge": lie(start=HUGE, end=HUGE),
    "start: negative": lie(start=-1),
    "end: huge": lie(end=HUGE),
    "end: digits": lie(end=10**4000),
    "end: infinite": lie(end=float("inf")),
    "end: text": lie(end="300"),
    "digest: other": lie(end_digest="ab" * 16),
    "kind: other": lie(kind="other"),
    "time: huge": lie(created_ns=10**30),
    "writer: list": lie(writer=[1]),
    "checksums: none": lie(checksums=""),
    "checksums: many": lie(checksums="00" * 16 * 1000),
    "checksums: no digits": lie(checksums="zz"),
    "layers: none": lie(layers="[]"),
    "layers: deep": lie(layers=DEEP),
    "layers: lists": lie(layers="[" + "[]," * MANY + "[]]"),
    "layers: no dtype": edit("layers", "F32", "F99"),
    "layers: dtype": edit("layers", "F32", "I32"),
    "layers: tag": edit("layers", "/1", "/2"),
    "layers: no heads": edit("layers", '"keys",2', '"keys",0'),
    "layers: negative": edit("layers", '"keys",2', '"keys",-2'),
    "layers: huge": edit("layers", '"keys",2,8', f'"keys",{HUGE},{HUGE}'),
    "layers: size": edit("layers", '"size":2', f'"size":{HUGE}'),
    "extent: none": lie(extent="{}"),
    "extent: huge": lie(extent=extent(bands=[[[0, 1], [[0, HUGE]]]]), end=HUGE),
    "extent: leaves": lie(extent=extent(bands=[[[7], [[0, 9]]]])),
    "extent: overlap": lie(
        extent=extent(bands=[[[0, 1], [[0, 9]]], [[1], [[0, 9]]]])
    ),
    "extent: ranges": lie(
        extent=extent(bands=[[[0], [[2 * n, 2 * n + 1] for n in range(9000)]]]),
        end=20_000,
    ),
    "extent: state": lie(extent=extent(state=[[0, "0", "F32", [HUGE, HUGE]]])),
    "extent: ring": lie(extent=extent(rings=[[0, HUGE]])),
    "tensor: offsets": tensor(lambda t: t.update(data_offsets=[4, 8])),
    "tensor: huge": tensor(lambda t: t.update(data_offsets=[0, 1 << 63])),
    "tensor: shape": tensor(lambda t: t.update(shape=[HUGE, HUGE])),
    "tensor: dtype": tensor(lambda t: t.update(dtype="F99")),
}  # fmt: skip
"""Every hostile file, by name."""

FILES = {
    "directory", "pipe", "link to itself, moved", "link to nowhere", "link to a device",
    "linked folder",
}  # fmt: skip
"""Those of which there are no bytes that a row could believe."""
