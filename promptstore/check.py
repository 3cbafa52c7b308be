"""The invariants about disk, as code: what is wrong there, and how to mend it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from promptstore import snapshot
from promptstore.disk import DiskTier
from promptstore.errors import (
    IndexDamaged,
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
    SnapshotUnsupported,
)
from promptstore.failpoints import reach
from promptstore.index import Index, Row
from promptstore.rebuild import is_row_at_fault, is_whole
from promptstore.snapshot import left_as_found, read_contents
from promptstore.types import Finding


def check(disk: DiskTier) -> list[Finding]:
    """Compare the index with the files, every byte of them; change nothing.

    Files that another process is just writing are no findings.
    """
    findings = []
    if not _is_sound(disk):
        findings.append(Finding("index", "index.db", "SQLite finds it damaged"))
    # Files before rows: a row that comes meanwhile must not make its file an orphan.
    files = disk.root.files()
    foreign = [
        Finding("foreign", str(path.relative_to(disk.root.path)), "is not ours")
        for path in files
        if not disk.root.is_ours(path)
    ]
    try:
        return findings + _check_rows(disk, files) + foreign
    except IndexDamaged as error:
        index = Finding("index", "index.db", str(error))
        return [index, *_check_files(disk), *foreign]


def _is_sound(disk: DiskTier) -> bool:
    # On a connection of its own: matches must not wait for a check.
    try:
        with contextlib.closing(Index(disk.root.index, read_only=True)) as index:
            return index.is_sound()
    except IndexDamaged:
        return False


def _check_rows(disk: DiskTier, files: Iterable[Path]) -> list[Finding]:
    """Verify each file against its row, and find those without one."""
    findings = []
    rows = disk.index.rows()
    for row in rows:
        # What cannot be read proves nothing: the system's trouble, or another version.
        with contextlib.suppress(SnapshotUnreadable, SnapshotUnsupported):
            finding = verify_row(disk, row)
            findings += [finding] if finding is not None else []
    known = {disk.root.path_of(row.name) for row in rows}
    for path in files:
        is_lost = disk.root.is_ours(path) and path not in known
        if is_lost and disk.budget.is_orphan(path):
            findings.append(_orphan(disk, path))
    return findings


def _orphan(disk: DiskTier, path: Path) -> Finding:
    """Say what a file without a row is: another version's is left alone."""
    with contextlib.suppress(SnapshotMissing, SnapshotCorrupt, SnapshotUnreadable):
        try:
            read_contents(path)
        except SnapshotUnsupported as error:
            name = str(path.relative_to(disk.root.path))
            return Finding("foreign", name, str(error))
    return Finding("orphan", path.stem, "a file without a row")


def _check_files(disk: DiskTier) -> list[Finding]:
    """Verify each file against itself, where no row can be read."""
    findings = []
    for path in disk.root.snapshots():
        with contextlib.suppress(SnapshotUnreadable, SnapshotUnsupported):
            if not is_whole(path):
                message = "is not what it says of itself"
                findings.append(Finding("corrupt", path.stem, message))
    return findings


def repair(disk: DiskTier, findings: Iterable[Finding]) -> None:
    """Mend what `check` found: drop rows and files that are proven to be no good, make
    a damaged index anew from the files, and give good files without a row theirs.

    Foreign files are left alone. What continues a dropped snapshot goes with it.
    """
    found = list(findings)
    names = {each.name for each in found if each.kind in ("dangling", "corrupt")}
    if any(finding.kind == "index" for finding in found):
        _rebuild(disk, names)
    disk.remove(row.id for row in disk.index.rows() if row.name in names)
    _unlink_damaged(disk, {each.name for each in found if each.kind == "orphan"})
    disk.budget.sweep()


def _rebuild(disk: DiskTier, bad: set[str]) -> None:
    """Make the index anew, without the files of that name that prove to be damaged.

    What the index says of them, and of what continues them, is not to be trusted.
    """
    _unlink_damaged(disk, bad)
    disk.volume.distrust("its index.db was found damaged by a check")
    disk.volume.stay_in_place()


def _unlink_damaged(disk: DiskTier, names: set[str]) -> None:
    """Remove those files of *names* of which not every byte is what was written."""
    for path in disk.root.snapshots():
        if path.stem in names and snapshot.is_abandoned(path):
            with contextlib.suppress(SnapshotUnreadable, SnapshotUnsupported):
                if not is_whole(path):
                    path.unlink(missing_ok=True)
                    reach("repair: file gone")


def verify_row(
    disk: DiskTier, row: Row, on_read: Callable[[int], None] = lambda n: None
) -> Finding | None:
    """Verify a file, and that its row says of it what it says of itself.

    What another process has removed meanwhile is no finding.

    Args:
        disk: Where.
        row: Whose file.
        on_read: Called with the bytes of each step of reading.

    Raises:
        SnapshotUnreadable, SnapshotUnsupported: Nothing is proven.
    """
    finding = None
    try:
        difference = _difference(disk, row, on_read)
        if difference:
            finding = _blame(disk, row, difference)
    except SnapshotMissing as error:
        finding = Finding("dangling", row.name, str(error))
    except SnapshotCorrupt as error:
        finding = _blame(disk, row, str(error))
    return finding if finding is not None and disk.index.has(row.name) else None


def _blame(disk: DiskTier, row: Row, message: str) -> Finding:
    """Say which of a row and its file, which differ, is the damaged one."""
    at_fault = is_row_at_fault(disk.root, row)
    return Finding("index" if at_fault else "corrupt", row.name, message)


def _difference(disk: DiskTier, row: Row, on_read: Callable[[int], None]) -> str:
    """Say in what the row of a whole file differs from the file; empty for nothing."""
    described = disk.index.describe(row.layout)
    if described is None:
        return ""  # the last snapshot of its layout was deleted meanwhile
    namespace, text = described
    layers, path = disk.layers_of(text), disk.root.find(row.name)
    with left_as_found(path), disk.open(row, layers) as file:
        file.verify_all(on_read)
        contents, tokens, written = read_contents(path)
    parent = None if row.parent is None else disk.index.name_of(row.parent)
    digest = disk.index.end_digest(row)
    says = {
        "namespace": (namespace.fields, contents.namespace),
        "layers": (layers, contents.layers),
        "parent": (parent, contents.parent),
        "extent": (row.extent, contents.extent),
        "first token": (row.first_token, int(tokens[0]) if len(tokens) else None),
        "tokens": (row.tokens.tolist(), tokens.tolist()),
        "end digest": (digest, contents.end_digest),
        "checksums": (row.checksums, written.checksums),
    }
    wrong = [name for name, (a, b) in says.items() if a != b]
    return f"its row differs in {', '.join(wrong)}" if wrong else ""
