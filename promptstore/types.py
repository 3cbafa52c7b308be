"""The words of the store as frozen dataclasses. No logic beyond their own facts."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from promptstore import identity
from promptstore.filehash import Progress

Source = Literal["memory", "disk", "miss"]
Kind = Literal["system", "user", "assistant"]
KINDS: tuple[Kind, ...] = ("assistant", "user", "system")
"""In the order in which the memory tier lets go of them."""


@dataclass(frozen=True)
class Rank:
    """Which part of a model that runs on several machines one of them has.

    Args:
        tensor: Index and size of its tensor-parallel group.
        pipeline: Index and size of its pipeline.
        layers: The pipeline's layers that it has, ``[start, end)``; needed only where
            they are not split evenly.
    """

    tensor: tuple[int, int] = (0, 1)
    pipeline: tuple[int, int] = (0, 1)
    layers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            index, size = getattr(self, name)
            if not 0 <= index < size:
                raise ValueError(f"{name} must be (index, size), not {(index, size)}")
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers must be (start, end), not {self.layers}")

    def __str__(self) -> str:
        """All that makes it a part; empty if it is the whole model."""
        shares = {"tensor": self.tensor, "pipeline": self.pipeline}
        texts = [f"{name} {i}/{n}" for name, (i, n) in shares.items() if n > 1]
        if self.layers is not None and self.pipeline[1] > 1:
            texts.append("layers {}:{}".format(*self.layers))
        return ", ".join(texts)

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return which part a model is that ``mlx_lm.utils.sharded_load`` returned."""
        from promptstore.parameters import part_of

        return cls(**part_of(model))


@dataclass(frozen=True)
class Namespace:
    """All that must be equal for KV to be reusable.

    Not part of it, since none of them changes the KV of given tokens: the tokenizer and
    the chat template (they change the tokens, and the tokens are the key), sampling,
    names and paths. Precision, window, dtype and layout of the KV are compared for each
    snapshot.

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
        rank: Which part of the model, if it runs on several machines: each has other
            heads or layers. See `Rank`; empty for all of it.
    """

    model: str
    revision: str = ""
    config: str = ""
    adapter: str = ""
    draft: str = ""
    tenant: str = ""
    exact_until: str = ""
    rank: str = ""

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
    def fields(self) -> dict[str, str]:
        """All fields by name, as they are stored and digested."""
        fields: dict[str, str] = dataclasses.asdict(self)
        if not self.rank:  # stores are older than it
            del fields["rank"]
        return fields

    @property
    def digest(self) -> bytes:
        """16 bytes; equal namespaces have equal digests, in every process."""
        # Labelled and escaped, so that no two sets of fields run together.
        text = json.dumps(self.fields, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @classmethod
    def from_model(
        cls,
        model_path: str | Path,
        adapter_path: str | Path | None = None,
        draft_path: str | Path | None = None,
        *,
        tenant: str = "",
        revision: str | None = None,
        rank: Rank | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Return the namespace of a model's files, by their content.

        It is made of all that the model's KV is a function of: the weight files,
        ``config.json``, the adapter and its settings, the draft model likewise. Not of
        the tokenizer and the chat template (they change the tokens, and the tokens are
        the key), sampling, names and paths: the same model is the same everywhere.

        Weight files are hashed with SHA-256 once and remembered by device, inode,
        size and times, unless they changed in the last two seconds; the files of a hub
        snapshot carry their hash in their name and are not read. A ``model_config``
        that a program passes to ``mlx_lm.load`` is not in the files: use `of`.

        Args:
            model_path: What ``mlx_lm.load`` was given: a model directory, or the hub's
                id of a model that was downloaded before. Nothing is downloaded.
            adapter_path: A directory with ``adapters.safetensors``.
            draft_path: The draft model's directory or id.
            tenant: Whose prompts these are.
            revision: Branch, tag or commit of a model that *model_path* names by its
                id, as ``mlx_lm.load`` takes it: which files to look at, and no more.
                Two revisions of equal content are the same model, and a branch that
                moved on is another. A directory has none, and what is given is ignored.
            rank: Which part of the model this process runs, if not all: what its KV is
                depends on the whole, so all files must be here on each machine.
            progress: Called on this thread with the bytes read so far and all that must
                be, for model, adapter and draft in turn; not where nothing is read.

        Raises:
            ModelUnreadable: A file is missing, damaged, downloaded by half, or changed
                while it was read; the adapter is for another model; or there is no
                such model here. Nothing fingerprints to a constant.
        """
        path = identity.directory_of(model_path, revision)
        model = identity.of_model(path, progress)
        adapter = ""
        if adapter_path:
            adapter = identity.of_adapter(Path(adapter_path), progress)
            versions = adapter, model.weights, model.config
            identity.require_base(Path(adapter_path), path, *versions)
        draft = None
        if draft_path:
            draft = identity.of_model(identity.directory_of(draft_path), progress)
        limits = [part.exact_until for part in (model, draft) if part is not None]
        return cls(
            model=model.weights,
            config=model.config,
            adapter=adapter,
            draft=f"{draft.weights}+{draft.config}" if draft else "",
            tenant=tenant,
            exact_until=_least(limits),
            rank=str(rank or ""),
        )

    @classmethod
    def of(cls, model: Any, *, tenant: str = "") -> Self:
        """Return the namespace of a model in memory, by its parameters.

        For models without files: fused, merged, generated, or loaded with a
        ``model_config``. All parameters are hashed each time (about a second a
        gigabyte and core), so keep what is returned; it is of the model as it is now.

        It is another than that of the files that the model may come from, but equal in
        every process. Lazy parameters are evaluated on this thread.

        Args:
            model: Any model of mlx-lm, or another ``mlx.nn.Module``.
            tenant: Whose prompts these are.

        Raises:
            TypeError: *model* is not a module.
            ValueError: It is a rank's part of a model, which does not tell what the
                others compute: use `from_model`.
        """
        from promptstore.parameters import of_object

        found = of_object(model)
        return cls(
            model=found.weights,
            config=found.config,
            tenant=tenant,
            exact_until=_least([found.exact_until]),
        )


def _least(limits: Iterable[int | None]) -> str:
    limit = min((each for each in limits if each is not None), default=None)
    return "" if limit is None else str(limit)


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
