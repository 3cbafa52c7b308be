"""The invariants about disk, as code: what is wrong there, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from promptstore import snapshot
from promptstore.disk import DiskTier
from promptstore.errors import (
    SnapshotCorrupt,
    SnapshotMissing,
    SnapshotUnreadable,
)
from promptstore.index import Row
from promptstore.layers import from_text
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
    findings += [finding for row in rows if (finding := _check_row(disk, row))]
    known = {disk.root.path_of(row.name) for row in rows}
    for path in files:
        if not disk.root.is_ours(path):
            findings.append(
                Finding("foreign", str(path.relative_to(disk.root.path)), "is not ours")
            )
        elif path not in known and snapshot.is_abandoned(path) and not disk.knows(path):
            findings.append(Finding("orphan", path.stem, "a file without a row"))
    return findings


def repair(disk: DiskTier, findings: Iterable[Finding]) -> None:
    """Mend what `check` found: drop rows and files that are proven to be no good.

    Foreign files are left alone. What continues a dropped snapshot goes with it.
    """
    kinds: set[Literal["dangling", "corrupt"]] = {"dangling", "corrupt"}
    names = {finding.name for finding in findings if finding.kind in kinds}
    disk.remove(row.id for name in names for row in disk.index.named(name))
    disk.sweep()


def _check_row(disk: DiskTier, row: Row) -> Finding | None:
    _, text = disk.index.describe(row.layout)
    try:
        with disk.open(row, from_text(text)) as file:
            file.verify_all()
    except SnapshotMissing as error:
        return Finding("dangling", row.name, str(error))
    except SnapshotCorrupt as error:
        return Finding("corrupt", row.name, str(error))
    except SnapshotUnreadable:
        return None  # the system's trouble, not the snapshot's
    return None
