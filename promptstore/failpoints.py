"""Named steps of all that changes the disk, at which a test can stop the process.

Each call of `reach` stands right after the step that it names. Nothing happens there
unless a test has set `hook`.
"""

from __future__ import annotations

from collections.abc import Callable

STEPS = (
    "open: root made",
    "open: lock taken",
    "open: index made",
    "open: log switched on",
    "migrate: begun",
    "migrate: steps applied",
    "migrate: committed",
    "rebuild: new index made",
    "rebuild: row added",
    "rebuild: index set aside",
    "rebuild: index in its place",
    "insert: layout made",
    "insert: sighting noted",
    "insert: bytes counted",
    "insert: folder made",
    "insert: file made",
    "insert: rows written",
    "insert: header written",
    "insert: file synced",
    "insert: file renamed",
    "insert: directory synced",
    "insert: row written",
    "insert: row committed",
    "insert: file closed",
    "insert: prompt marked",
    "insert: uses written",
    "insert: old state dropped",
    "evict: row gone",
    "evict: file gone",
    "evict: log truncated",
    "remove: row written",
    "remove: rows gone",
    "remove: file gone",
    "remove: traces gone",
    "remove: index compacted",
    "repair: file gone",
    "sweep: file gone",
    "uses: written",
)
"""Every step, in the order in which a process reaches them."""

hook: Callable[[str], None] | None = None
"""What a test wants to be called with each step."""


def reach(step: str) -> None:
    """Tell the test, if there is one, that *step* is done."""
    if hook is not None:
        hook(step)
