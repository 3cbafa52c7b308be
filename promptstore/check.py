"""The invariants about disk, as code: what is wrong there, and how to mend it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Literal

from promptstore.disk import DiskTier
from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
    SnapshotUnsupported,
)
from promptstore.index import Row
from promptstore.layers import from_text
from promptstore.root import is_name
from promptstore.snapshot import left_as_found, read_contents
from promptstore.types import Finding


def check(disk: DiskTier) -> list[Finding]:
    """Compare the index with the files, every byte of them; change nothing.

    Files that another process is just writing are no findings.
    """
    findings = []
    if not disk.index.is_sound():
        findings.append(Finding("index", "index.db", "SQLite finds it damaged"))
    # Files before rows: a row that comes meanwhile must not make its file an orphan.
    files = disk.root.files()
    rows = disk.index.rows()
    for row in rows:
        # What cannot be read proves nothing: the system's trouble, or another version.
        with contextlib.suppress(SnapshotUnreadable, SnapshotUnsupported):
            finding = verify_row(disk, row)
            findings += [finding] if finding is not None else []
    known = {disk.root.path_of(row.name) for row in rows if is_name(row.name)}
    for path in files:
        if not disk.root.is_ours(path):
            findings.append(
                Finding("foreign", str(path.relative_to(disk.root.path)), "is not ours")
            )
        elif path not in known and disk.budget.is_orphan(path):
            findings.append(Finding("orphan", path.stem, "a file without a row"))
    return findings


def repair(disk: DiskTier, findings: Iterable[Finding]) -> None:
    """Mend what `check` found: drop rows and files that are proven to be no good.

    Foreign files are left alone. What continues a dropped snapshot goes with it.
    """
    kinds: set[Literal["dangling", "corrupt"]] = {"dangling", "corrupt"}
    names = {finding.name for finding in findings if finding.kind in kinds}
    rows = {row.id: row for row in disk.index.rows()}
    bad = {row.id for row in rows.values() if row.name in names}
    bad |= {row.id for row in rows.values() if row.parent not in {None, *rows}}
    disk.remove(bad)
    disk.forget_lost_prefixes()
    disk.budget.sweep()


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
            finding = Finding("corrupt", row.name, difference)
    except SnapshotMissing as error:
        finding = Finding("dangling", row.name, str(error))
    except SnapshotCorrupt as error:
        finding = Finding("corrupt", row.name, str(error))
    return finding if finding is not None and disk.index.has(row.name) else None


def _difference(disk: DiskTier, row: Row, on_read: Callable[[int], None]) -> str:
    """Say in what the row of a whole file differs from the file; empty for nothing."""
    described = disk.index.describe(row.layout)
    if described is None:
        return ""  # the last snapshot of its layout was deleted meanwhile
    namespace, text = described
    path = disk.root.find(row.name)
    with left_as_found(path), disk.open(row, from_text(text)) as file:
        file.verify_all(on_read)
        contents, tokens, written = read_contents(path)
    parent = None if row.parent is None else disk.index.name_of(row.parent)
    digest = disk.index.end_digest(row)
    says = {
        "namespace": (asdict(namespace), contents.namespace),
        "layers": (from_text(text), contents.layers),
        "parent": (parent, contents.parent),
        "extent": (row.extent, contents.extent),
        "first token": (row.first_token, int(tokens[0]) if len(tokens) else None),
        "tokens": (row.tokens.tolist(), tokens.tolist()),
        "end digest": (digest, contents.end_digest),
        "checksums": (row.checksums, written.checksums),
    }
    wrong = [name for name, (a, b) in says.items() if a != b]
    return f"its row differs in {', '.join(wrong)}" if wrong else ""
