"""A persistent store for the prompt caches (KV caches) of MLX language models."""

from promptstore.codecs import n_cached
from promptstore.errors import (
    ModelUnreadable,
    NotCovered,
    PromptStoreError,
    StoreClosed,
    StoreTooNew,
    StoreUnavailable,
    TooLarge,
    UnknownSnapshot,
    WriteFailed,
)
from promptstore.store import PromptStore
from promptstore.types import (
    Explanation,
    Finding,
    Match,
    Namespace,
    Reason,
    ReasonKind,
    SnapshotInfo,
    StoreStats,
)

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Finding",
    "Match",
    "ModelUnreadable",
    "Namespace",
    "NotCovered",
    "PromptStore",
    "PromptStoreError",
    "Reason",
    "ReasonKind",
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
