"""An index from the snapshots themselves, in place of one that is damaged or gone.

A file says whose KV it holds, of which tokens, and what it continues; all of that is
checked again here. Labels, pins, lives and counts of hits are in the index alone: they
are read out of the old one as far as it can be read, and lost otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from promptstore import layers, prefix, snapshot
from promptstore.errors import (
    IndexDamaged,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    StoreUnavailable,
)
from promptstore.extent import Shape
from promptstore.failpoints import reach
from promptstore.index import (
    DatabaseError,
    Duplicate,
    Gone,
    Index,
    Layout,
    NewRow,
    Remains,
    Row,
    prepare,
    read_remains,
    require_whole,
)
from promptstore.root import INDEX_SUFFIXES, Root, remove_index
from promptstore.snapshot import CHECKSUM_BYTES, Contents, Written
from promptstore.tokens import Tokens
from promptstore.types import Namespace

_MAX_NS = 1 << 62
_FEW_BITS = 16
_NONE: Mapping[str, bytes] = {}


def make_ready(root: Root, damage: IndexDamaged | None) -> IndexDamaged | None:
    """Make, migrate or rebuild the index of a root; the caller holds the lock.

    Args:
        root: The directory.
        damage: What is known to be wrong with the index already.

    Returns:
        What was wrong with the index that was rebuilt.

    Raises:
        StoreUnavailable: The system refused; the index was left alone.
    """
    remove_index(root.new_index)  # of a process that died
    damage = damage or _damage(root)
    if damage is not None:
        if damage.foreign and next(root.snapshots(), None) is None:
            raise damage  # there is no store here, but perhaps another program's
        try:
            _make_anew(root, damage)
        except (OSError, DatabaseError) as error:
            reason = f"its index cannot be made anew: {error}"
            raise StoreUnavailable(root.path, reason) from error
        finally:
            remove_index(root.new_index)
    prepare(root.index)
    if damage is not None:
        # What was written while the files were read; its writer sees the new index
        # and writes again, or it was done before and is found now.
        with contextlib.closing(Index(root.index)) as index:
            adopt(index, root, root.snapshots())
    return damage


def _damage(root: Root) -> IndexDamaged | None:
    """Return what is wrong with an index, if that is proven."""
    try:
        is_blank = not root.index.lstat().st_size
    except FileNotFoundError:
        is_blank = True
    if is_blank:
        if next(root.snapshots(), None) is None:
            return None  # a new store
        return IndexDamaged(root.path, "its index.db is gone or blank")
    try:
        require_whole(root.index, read_only=False)
    except IndexDamaged as error:
        return error
    return None


def _make_anew(root: Root, damage: IndexDamaged) -> None:
    """Build an index beside the old one, and put it into its place."""
    # Without an index a process may have died between the two renames.
    old = root.index if os.path.lexists(root.index) else root.damaged_index
    is_file = old.is_file() and not old.is_symlink()
    remains = read_remains(old) if is_file else Remains()
    prepare(root.new_index)
    reach("rebuild: new index made")
    with contextlib.closing(Index(root.new_index)) as index:
        index.note_removed(remains.removed)
        adopt(index, root, root.snapshots(), remains.checksums)
        index.give(remains.care)
        index.truncate_log()
    root.sync(root.new_index)
    _set_aside(root, damage)
    os.rename(root.new_index, root.index)
    root.sync(root.path)
    reach("rebuild: index in its place")


def _set_aside(root: Root, damage: IndexDamaged) -> None:
    """Rename what is in the index's place, and what SQLite has beside it.

    Of ours one is kept; what is somebody else's is never removed.
    """
    aside = root.damaged_index
    if damage.foreign:
        names = (root.path / f"index.db.foreign-{n}" for n in range(1, 1 << 20))
        aside = next(name for name in names if not os.path.lexists(name))
    elif os.path.lexists(root.index):
        root.remove_damaged_index()
    for suffix in INDEX_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{root.index}{suffix}", f"{aside}{suffix}")
    reach("rebuild: index set aside")


# ------------------------------------------------------------------------ the files


@dataclass(frozen=True)
class _File:
    """A file that has no row, and what it says of itself."""

    path: Path
    contents: Contents
    tokens: Tokens
    written: Written


@dataclass(frozen=True)
class _Place:
    """Where the children of a snapshot go.

    Args:
        id: The snapshot; ``None`` for what continues nothing.
        layout: Its layout.
        start: Its first token.
        tokens: All that its chain holds, to its end.
    """

    id: int | None
    layout: int | None
    start: int
    tokens: Tokens


def adopt(
    index: Index, root: Root, paths: Iterable[Path], former: Mapping[str, bytes] = _NONE
) -> list[Path]:
    """Give files without a row one, from what they say of themselves, parents first.

    Files that a process is still making, or that the system refuses to read, or of
    another format, are left alone.

    Args:
        index: Where.
        root: Where the files are.
        paths: Snapshots; those that have a row are passed over.
        former: Checksums that a former index had of files, by name; files that it
            had others of are removed.

    Returns:
        Those that are no good: damaged, stored twice, removed before, or without what
        they continue. What continues a file that is left alone is not among them.
    """
    known, adopted = index.names(), set()
    bad: list[Path] = []
    left: set[str] = set()
    waiting: dict[str | None, list[_File]] = {}
    for path in paths:
        if path.stem in known:
            continue
        try:
            file = _read_file(path)
        except SnapshotCorrupt:
            bad.append(path)
            continue
        if file is None:
            left.add(path.stem)
        elif _is_another(file.written.checksums, former.get(path.stem, b"")):
            path.unlink(missing_ok=True)
        else:
            waiting.setdefault(file.contents.parent, []).append(file)
    places = _places(index, waiting)
    layout_of = functools.cache(index.layout)
    while places:
        parent, place = places.pop()
        for file in waiting.pop(parent, []):
            with contextlib.suppress(Gone):  # what it continues: the next one decides
                child = _adopt_one(index, root, layout_of, place, file)
                if child is not None:
                    adopted.add(file.path.stem)
                    places.append((file.path.stem, child))
                elif not index.has(file.path.stem):  # by another process meanwhile
                    bad.append(file.path)
    _give_care(index, root, adopted)
    while left:  # what continues a file that is left alone is left alone as well
        left = {file.path.stem for name in left for file in waiting.pop(name, [])}
    return bad + [file.path for files in waiting.values() for file in files]


def _read_file(path: Path) -> _File | None:
    """Return a file and what it says of itself; ``None`` if it is to be left alone.

    Raises:
        SnapshotCorrupt: It is damaged.
    """
    if not snapshot.is_abandoned(path):
        return None
    try:
        return _File(path, *snapshot.read_contents(path))
    except SnapshotCorrupt:
        raise
    except SnapshotError:
        return None


def _give_care(index: Index, root: Root, adopted: set[str]) -> None:
    """Give files that could not be read while the index was made anew what the one
    that was set aside knows of them."""
    aside = root.damaged_index
    if adopted and aside.is_file() and not aside.is_symlink():
        care = read_remains(aside).care
        index.give({name: care[name] for name in adopted & care.keys()})


def _is_another(own: bytes, former: bytes) -> bool:
    """Whether checksums are of another file of the same ids than *former* ones, which
    are themselves those of a file: what is damaged differs in those of the ids too."""
    n = CHECKSUM_BYTES
    return own[-n:] == former[-n:] and not _is_same(own[:n], former[:n])


def _is_same(checksum: bytes, other: bytes) -> bool:
    """Whether two checksums are the same but for a few flipped bits; those of other
    data differ in half of their bits."""
    different = int.from_bytes(checksum, "little") ^ int.from_bytes(other, "little")
    return different.bit_count() <= _FEW_BITS


def _places(
    index: Index, waiting: Iterable[str | None]
) -> list[tuple[str | None, _Place]]:
    """Return where files can go that continue nothing, or what has a row already."""
    places: list[tuple[str | None, _Place]] = []
    for name in waiting:
        if name is None:
            places.append((None, _Place(None, None, 0, np.zeros(0, np.int64))))
            continue
        row = index.row(name)
        if row is not None:
            tokens = index.tokens_of(row)
            places.append((name, _Place(row.id, row.layout, row.start, tokens)))
    return places


def _adopt_one(
    index: Index,
    root: Root,
    layout_of: Callable[[Namespace, str], Layout],
    place: _Place,
    file: _File,
) -> _Place | None:
    """Add a row for a file, if its digest follows from its chain; return the place of
    what continues it.

    Raises:
        Gone: What it continues was removed meanwhile.
        IndexDamaged: The index has the same prompt in a file that is not there.
    """
    contents, extent = file.contents, file.contents.extent
    is_root = place.id is None
    if is_root != (extent.start == 0):
        return None
    if not place.start <= extent.start <= len(place.tokens):
        return None
    tokens = np.concatenate([place.tokens[: extent.start], file.tokens])
    namespace = Namespace(**contents.namespace)
    text = layers.to_text(contents.layers, whole=not namespace.is_exact(extent.end))
    digest = prefix.end_digest(prefix.seed(namespace.digest, text), tokens).hex()
    if digest != contents.end_digest:
        return None
    layout = layout_of(namespace, text)
    if place.layout not in {None, layout.id}:
        return None
    try:
        id_ = index.add(_row_of(file, layout, place.id, tokens), beside=True)
    except Duplicate:
        _require_file(index, root, layout, tokens)
        return None
    reach("rebuild: row added")
    if not file.path.exists():  # removed, and that so long ago that it is forgotten
        index.remove([id_])
        return None
    return _Place(id_, layout.id, extent.start, tokens)


def _require_file(index: Index, root: Root, layout: Layout, tokens: Tokens) -> None:
    """Raise if the snapshot that the index has of a prompt has no file: an older copy,
    or another store's, whose rows would keep good files out.

    Raises:
        IndexDamaged: It has none.
    """
    row = index.row_at(layout, tokens)
    if row is None or os.path.lexists(root.path_of(row.name)):
        return
    if index.has(row.name):  # it was not just evicted
        index.damage = IndexDamaged(root.path, "its index.db has rows of no files")
        raise index.damage


def _row_of(file: _File, layout: Layout, parent: int | None, tokens: Tokens) -> NewRow:
    contents = file.contents
    return NewRow(
        name=contents.id,
        layout=layout,
        parent=parent,
        extent=contents.extent,
        tokens=tokens,
        nbytes=file.written.nbytes,
        checksums=file.written.checksums,
        kind=contents.kind,
        created_ns=min(max(contents.created_ns, 0), _MAX_NS),
    )


def is_row_at_fault(root: Root, row: Row) -> bool:
    """Whether a file and its row differ because the index is damaged.

    That takes a file of which every byte is what it says of itself, and that the row
    has the checksum of that very header: anybody can write a file that is whole.

    Raises:
        SnapshotUnreadable, SnapshotUnsupported: Nothing is proven.
    """
    try:
        path = root.find(row.name)
        header = snapshot.header_checksum(path)
    except (SnapshotCorrupt, SnapshotMissing):
        return False
    return _is_same(header, row.checksums[: len(header)]) and is_whole(path)


def is_whole(path: Path) -> bool:
    """Whether every byte of a file is what the file itself says.

    Raises:
        SnapshotUnreadable, SnapshotUnsupported: Nothing is proven.
    """
    try:
        contents, _, written = snapshot.read_contents(path)
        shape = Shape(contents.layers, contents.extent)
        with snapshot.SnapshotFile(
            path, shape, written.nbytes, written.checksums
        ) as file:
            file.verify_all()
    except (SnapshotCorrupt, SnapshotMissing):
        return False
    return True
