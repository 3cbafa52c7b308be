"""The words of the store as frozen dataclasses. No logic beyond their own facts."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from promptstore import identity

Source = Literal["memory", "disk", "miss"]
Kind = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Namespace:
    """All that must be equal for KV to be reusable.

    The tokenizer and the chat template are not part of it: they change the
    tokens, and the tokens are the key.

    Args:
        model: The model's weights: a content digest, or any name that the caller
            vouches for.
        revision: Which version of them, if *model* is a name.
        config: The model's configuration.
        adapter: Its adapter, weights and settings; empty without one.
        draft: The draft model, whose layers are stored with the target's.
        tenant: Whose prompts these are. Tenants never share KV.
        exact_until: Tokens up to which the model's KV is a function of its prefix
            alone, as a number; empty if it always is. Longer prompts are stored
            whole and served only whole (see `positions`).
    """

    model: str
    revision: str = ""
    config: str = ""
    adapter: str = ""
    draft: str = ""
    tenant: str = ""
    exact_until: str = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, str):
                raise TypeError(
                    f"{item.name} must be a str, not {type(value).__name__}"
                )
        if not self.model:
            raise ValueError("model must not be empty")
        if self.exact_until and not self.exact_until.isdecimal():
            raise ValueError("exact_until must be a number in decimal digits, or empty")

    def is_exact(self, n_tokens: int) -> bool:
        """Whether the KV of a prompt of *n_tokens* is a function of its prefix."""
        return not self.exact_until or n_tokens <= int(self.exact_until)

    @property
    def digest(self) -> bytes:
        """16 bytes; equal namespaces have equal digests, in every process."""
        # Labelled and escaped, so that no two sets of fields run together.
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @classmethod
    def from_model(
        cls,
        model_path: str | Path,
        adapter_path: str | Path | None = None,
        draft_path: str | Path | None = None,
        *,
        tenant: str = "",
    ) -> Self:
        """Return the namespace of a model directory, by content.

        Weight files are hashed with SHA-256 once and remembered by device, inode,
        size and times; the files of a hub snapshot carry their hash in their name.
        Paths and names are not part of the identity.

        Args:
            model_path: A model directory as ``mlx_lm.load`` takes it.
            adapter_path: A directory with ``adapters.safetensors``.
            draft_path: The draft model's directory.
            tenant: Whose prompts these are.

        Raises:
            ModelUnreadable: A file is missing or cannot be read; nothing
                fingerprints to a constant.
        """
        model = identity.of_model(Path(model_path))
        draft = identity.of_model(Path(draft_path)) if draft_path else None
        limits = [part.exact_until for part in (model, draft) if part is not None]
        limit = min((x for x in limits if x is not None), default=None)
        return cls(
            model=model.weights,
            config=model.config,
            adapter=identity.of_adapter(Path(adapter_path)) if adapter_path else "",
            draft=f"{draft.weights}+{draft.config}" if draft else "",
            tenant=tenant,
            exact_until="" if limit is None else str(limit),
        )


class ReasonKind(enum.Enum):
    """Why no more was matched (one enum for matches, logs and metrics)."""

    NO_ENTRY = "no-entry"
    DIVERGED = "diverged-at"
    IDENTITY = "identity-differs"
    NOT_RESUMABLE = "not-resumable"
    TOO_SHORT = "too-short"
    EXPIRED = "expired"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    UNKNOWN_CLASS = "unknown-cache-class"
    DISABLED = "disabled"


@dataclass(frozen=True)
class Difference:
    """What sets stored KV apart from what a request could use.

    Args:
        field: A field of `Namespace`, or a setting: ``"layer 3 bits"``.
        ours: Its value in the request.
        theirs: Its value in what is stored.
    """

    field: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class Reason:
    """Why no more was matched, and where.

    Equal are reasons of the same kind, position and detail: who happens to be nearest
    is no part of the cause.

    Args:
        kind: The reason.
        position: The first token that could not be reused. If a layer kind cannot be
            resumed where the tokens part, the nearest position that can.
        detail: The fields, the layer kind, the file or the cause that is to blame.
        n_shared: Tokens that the nearest stored prompt shares: where it diverges.
        nearest: The snapshot that holds the last of them; empty if it is in memory
            only, or if there is none.
        differs: What keeps KV from being used that is there, with both values.
    """

    kind: ReasonKind
    position: int = 0
    detail: str = ""
    n_shared: int = field(default=0, compare=False)
    nearest: str = field(default="", compare=False)
    differs: tuple[Difference, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        facts = f"{self.detail}, {self.position}" if self.detail else self.position
        return f"{self.kind.value}({facts})"


@dataclass(frozen=True)
class Match:
    """The longest usable prefix of a request.

    Args:
        cache: Live caches, the caller's own; ``None`` on a miss.
        n_tokens: Tokens saved, ``0 <= n_tokens < len(tokens)``. Prefill the rest.
        source: Which tier served it.
        reason: Why no more was matched; ``None`` if only the last token is left.
    """

    cache: list[Any] | None
    n_tokens: int
    source: Source
    reason: Reason | None


@dataclass(frozen=True)
class Explanation:
    """What a match would give, without giving it.

    Args:
        n_memory: Tokens that the memory tier could save.
        n_disk: Tokens that the disk tier could save.
        n_tokens: The better of both, at least one token being left to prefill.
        reason: Why no more; ``None`` if only the last token is left.
        nearest: The deepest snapshot on disk that shares tokens, if any.
        closest: The stored prompts that share most, the best first, if asked for.
        elsewhere: Where else the same tokens are, if asked for, the best first.
    """

    n_memory: int
    n_disk: int
    n_tokens: int
    reason: Reason | None
    nearest: SnapshotInfo | None
    closest: tuple[Neighbour, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


@dataclass(frozen=True)
class Neighbour:
    """A stored prompt that begins as a request does.

    Args:
        snapshot: The last one of its chain, which holds ``snapshot.end`` tokens.
        n_shared: Leading tokens that both have.
        follows: The ids with which it goes on there, up to 64; none if it ends.
    """

    snapshot: SnapshotInfo
    n_shared: int
    follows: tuple[int, ...]


@dataclass(frozen=True)
class Elsewhere:
    """The tokens of a request, stored where it cannot use them.

    It is always of the same tenant: nobody is told what another tenant has, nor that
    there is one.

    Args:
        snapshot: The deepest one that shares tokens.
        n_shared: Leading tokens that it shares.
        differs: What keeps it from being used; never empty.
    """

    snapshot: SnapshotInfo
    n_shared: int
    differs: tuple[Difference, ...]


@dataclass(frozen=True)
class SnapshotInfo:
    """One snapshot on disk. Times are seconds since the epoch.

    Args:
        id: Its name, 32 hexadecimal digits.
        namespace: Its namespace.
        start: The first token whose KV it holds, ``[start, end)``.
        end: One past the last; also the tokens that its chain holds.
        parent: The snapshot that it continues, or ``None`` for a root.
        nbytes: Size of its file.
        layers: Its layers, for example ``"full/1 x30"``.
    """

    id: str
    namespace: Namespace
    start: int
    end: int
    parent: str | None
    nbytes: int
    layers: str
    kind: str
    label: str | None
    pinned: bool
    created_s: float
    used_s: float
    expires_s: float | None
    hits: int


@dataclass(frozen=True)
class Finding:
    """One thing that ``check`` or ``verify`` found wrong on disk.

    Args:
        kind: ``"orphan"`` (a file without a row), ``"dangling"`` (a row without a
            file), ``"corrupt"``, ``"foreign"``, ``"index"``, or ``"unreadable"``
            (the system refused, which proves nothing; only ``verify`` tells).
        name: The snapshot or the file.
        message: What is wrong, in a sentence.
    """

    kind: Literal["orphan", "dangling", "corrupt", "foreign", "index", "unreadable"]
    name: str
    message: str


@dataclass(frozen=True)
class StoreStats:
    """What the store holds, and what it did since it was opened.

    Args:
        n_declined: Prompts that ``admission`` kept off the disk.
        written_by_day: Bytes of snapshots that all processes wrote on each day
            (UTC), as ``"2026-11-30"``.
        reasons: Matches that were no more, by the kind of their reason.
        errors: Trouble, by its cause.
    """

    n_entries: int = 0
    n_snapshots: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    pending_bytes: int = 0
    n_pending: int = 0
    hits_memory: int = 0
    hits_disk: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    n_inserts: int = 0
    n_declined: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    n_evicted_memory: int = 0
    n_evicted_disk: int = 0
    written_by_day: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
