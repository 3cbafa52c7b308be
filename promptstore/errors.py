"""The exception tree. Wrong arguments are ``TypeError`` and ``ValueError``.

::

    PromptStoreError
    ├── StoreClosed            used after close(), or in a forked child
    ├── StoreUnavailable       the directory cannot be used as a store
    │   ├── StoreTooNew        written by a newer version of promptstore
    │   └── IndexDamaged       index.db is proven to be damaged, or not ours
    ├── SnapshotError          one snapshot file cannot be used
    │   ├── SnapshotMissing    a row without a file
    │   ├── SnapshotCorrupt    proven damage: checksum, size or header is wrong
    │   ├── SnapshotUnreadable the system refused to read it; proves nothing
    │   └── SnapshotUnsupported  unknown format number or cache class
    ├── NotCovered             a cache cannot give the asked range of tokens
    ├── TooLarge               one thing exceeds a budget; nothing was evicted
    ├── NoSpace                too little is free on the file system
    ├── DailyLimit             today's bytes are written
    ├── ModelUnreadable        a model directory cannot be identified
    │   └── ModelChanged       its files changed while it was in use
    ├── ServerMoved            mlx_lm.server is not the one that this version knows
    ├── UnknownSnapshot        no snapshot has that id or label
    └── WriteFailed            what the writer thread met; raised by flush()
"""

from __future__ import annotations

from pathlib import Path


class PromptStoreError(Exception):
    """The base of all errors that promptstore raises on its own account."""


class StoreClosed(PromptStoreError):
    """The store was closed, or belongs to the parent of this forked process."""


class StoreUnavailable(PromptStoreError):
    """The directory cannot be used as a store.

    Attributes:
        path: The directory that was asked for.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class StoreTooNew(StoreUnavailable):
    """The index was written by a newer promptstore; it was left as it is.

    Attributes:
        unknown: Names of the migrations that this version does not know.
    """

    def __init__(self, path: Path, unknown: tuple[str, ...]) -> None:
        super().__init__(
            path,
            f"written by a newer promptstore (unknown: {', '.join(unknown)}); "
            "upgrade mlx-promptstore or use another directory",
        )
        self.unknown = unknown


class IndexDamaged(StoreUnavailable):
    """The index is proven to be damaged, gone, or not one of ours.

    A store that may write sets it aside and makes it anew from the snapshots.

    Attributes:
        foreign: Whether it is somebody else's, which is never removed.
    """

    def __init__(self, path: Path, reason: str, *, foreign: bool = False) -> None:
        super().__init__(path, reason)
        self.foreign = foreign


class SnapshotError(PromptStoreError):
    """One snapshot file cannot be used.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path.name}: {reason}")
        self.path = path


class SnapshotMissing(SnapshotError):
    """The index has a row for a file that is gone."""


class SnapshotCorrupt(SnapshotError):
    """The bytes are proven not to be those that were written."""


class SnapshotUnreadable(SnapshotError):
    """The system refused to read the file (too many open files, I/O error)."""


class SnapshotUnsupported(SnapshotError):
    """The file has a format number or a cache class that this version lacks."""


class NotCovered(PromptStoreError):
    """A cache cannot give the asked range of tokens."""


class TooLarge(PromptStoreError):
    """One thing is larger than the whole budget; nothing was evicted for it.

    Attributes:
        nbytes: Its size.
        budget_bytes: The budget.
    """

    def __init__(self, nbytes: int, budget_bytes: int) -> None:
        super().__init__(f"{nbytes} bytes do not fit into {budget_bytes} bytes")
        self.nbytes = nbytes
        self.budget_bytes = budget_bytes


class NoSpace(PromptStoreError):
    """Writing would leave less free than ``min_free_bytes``; nothing was evicted.

    Attributes:
        nbytes: The size of what was to be written.
        free_bytes: What is free now.
        min_free_bytes: What must remain free.
    """

    def __init__(self, nbytes: int, free_bytes: int, min_free_bytes: int) -> None:
        super().__init__(
            f"{nbytes} bytes would not leave {min_free_bytes} bytes free on the file "
            f"system, of {free_bytes} that are; free some, or lower min_free_bytes"
        )
        self.nbytes = nbytes
        self.free_bytes = free_bytes
        self.min_free_bytes = min_free_bytes


class DailyLimit(PromptStoreError):
    """Writing would exceed ``daily_write_bytes``; it works again tomorrow (UTC).

    Attributes:
        nbytes: The size of what was to be written.
        max_bytes: What a day may have.
    """

    def __init__(self, nbytes: int, max_bytes: int) -> None:
        super().__init__(
            f"{nbytes} bytes more would exceed the {max_bytes} bytes of a day; raise "
            "daily_write_bytes, or wait until tomorrow (UTC)"
        )
        self.nbytes = nbytes
        self.max_bytes = max_bytes


class ModelUnreadable(PromptStoreError):
    """A model directory cannot be identified by its content.

    Attributes:
        path: The file or directory that is missing or unreadable.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class ModelChanged(ModelUnreadable):
    """A model's files changed while it was in use; its KV belongs to nobody."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, "the model's files changed while it was in use; load it anew"
        )


class ServerMoved(PromptStoreError):
    """The installed mlx_lm.server is not the one that this version knows.

    Attributes:
        missing: What was looked for in it and not found.
    """

    def __init__(self, version: str, missing: list[str]) -> None:
        super().__init__(
            f"mlx_lm.server {version} has moved what the store stands in for "
            f"({'; '.join(missing)}): upgrade mlx-promptstore, or use mlx-lm 0.32"
        )
        self.missing = missing


class UnknownSnapshot(PromptStoreError):
    """No snapshot has that id or label.

    Attributes:
        id_or_label: What was asked for.
    """

    def __init__(self, id_or_label: str) -> None:
        super().__init__(f"no snapshot has the id or label {id_or_label!r}")
        self.id_or_label = id_or_label


class WriteFailed(PromptStoreError):
    """Something that was inserted did not reach the disk.

    Attributes:
        n_failed: Inserts that failed since the last flush; the cause of the
            first one is ``__cause__``.
    """

    def __init__(self, n_failed: int, first: BaseException) -> None:
        super().__init__(f"{n_failed} insert(s) did not reach the disk: {first}")
        self.n_failed = n_failed
