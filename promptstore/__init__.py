"""A persistent store for the prompt caches (KV caches) of MLX language models."""

from typing import TYPE_CHECKING, Any

from promptstore.errors import (
    DailyLimit,
    IndexDamaged,
    ModelChanged,
    ModelUnreadable,
    NoSpace,
    NotCovered,
    PromptStoreError,
    ServerMoved,
    StoreClosed,
    StoreTooNew,
    StoreUnavailable,
    TooLarge,
    UnknownSnapshot,
    WriteFailed,
)
from promptstore.types import (
    Difference,
    Elsewhere,
    Explanation,
    Finding,
    Match,
    Namespace,
    Neighbour,
    Rank,
    Reason,
    ReasonKind,
    SnapshotInfo,
    StoreStats,
)

if TYPE_CHECKING:
    from promptstore.codecs import n_cached
    from promptstore.store import PromptStore

__version__ = "0.1.0"

__all__ = [
    "DailyLimit",
    "Difference",
    "Elsewhere",
    "Explanation",
    "Finding",
    "IndexDamaged",
    "Match",
    "ModelChanged",
    "ModelUnreadable",
    "Namespace",
    "Neighbour",
    "NoSpace",
    "NotCovered",
    "PromptStore",
    "PromptStoreError",
    "Rank",
    "Reason",
    "ReasonKind",
    "ServerMoved",
    "SnapshotInfo",
    "StoreClosed",
    "StoreStats",
    "StoreTooNew",
    "StoreUnavailable",
    "TooLarge",
    "UnknownSnapshot",
    "WriteFailed",
    "n_cached",
]


def __getattr__(name: str) -> Any:
    # These import mlx, which the command's help has no need of.
    if name == "PromptStore":
        from promptstore.store import PromptStore

        return PromptStore
    if name == "n_cached":
        from promptstore.codecs import n_cached

        return n_cached
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
