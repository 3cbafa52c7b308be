"""Why no more was matched: from what was looked up to a reason with its facts.

All of it is at hand when a match is over; nothing is looked up for it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from promptstore import codecs, resume
from promptstore.disk import LookUp
from promptstore.layers import Layers
from promptstore.nearby import Place
from promptstore.types import Difference, Reason, ReasonKind


def of_look_up(look_up: LookUp, n_usable: int, n_memory: int) -> Reason | None:
    """Return why no more than the better of disk and memory can be matched.

    Args:
        look_up: What the disk has.
        n_usable: Tokens that may be matched.
        n_memory: Tokens that memory has.
    """
    found, n_disk = look_up.found, look_up.plan.n_tokens
    n_tokens = max(n_disk, n_memory)
    if n_tokens == n_usable:
        return None
    kind, detail = ReasonKind.NO_ENTRY, ""
    if found.n_tokens > n_tokens:
        kind, detail = ReasonKind.NOT_RESUMABLE, resume.stopping_kind(look_up.layers)
    elif found.n_tokens == n_tokens and found.expired:
        kind = ReasonKind.EXPIRED
    elif found.n_tokens == n_tokens and found.diverges:
        kind = ReasonKind.DIVERGED
    nearest = found.chain[-1].name if found.chain else ""
    n_shared = max(found.n_tokens, n_memory)
    if found.n_tokens < n_memory:
        nearest = ""  # it is in memory only
    return Reason(kind, n_tokens, detail, n_shared=n_shared, nearest=nearest)


def of_memory(
    reason: Reason, n_shared: int, *, diverges: bool, layers: Layers | None
) -> Reason:
    """Return what memory knows better than the disk: that it has more tokens than can
    be resumed, or goes on differently.

    Args:
        reason: What the disk says, at the better position of both.
        n_shared: Tokens that some entry in memory shares.
        diverges: Whether an entry goes on there, but differently.
        layers: Of that entry; ``None`` if their class is unknown.
    """
    kind, detail, position = reason.kind, reason.detail, reason.position
    if n_shared > position:
        kind = ReasonKind.NOT_RESUMABLE
        detail = "unknown" if layers is None else resume.stopping_kind(layers)
    elif n_shared == position and diverges and n_shared:
        kind = ReasonKind.DIVERGED
    else:
        return reason
    return Reason(kind, position, detail, n_shared=n_shared)


def of_layers(misfits: Sequence[Layers], like: Sequence[Any] | None) -> Reason:
    """Return why nothing of a namespace fits: its caches are of other layers, or of
    classes that are not known here."""
    found = None
    if like is not None:
        found = codecs.misfit(misfits[0], like)
    differs = (Difference(*found),) if found is not None else ()
    return Reason(ReasonKind.IDENTITY, 0, "layers", differs=differs)


def of_class(like: Sequence[Any] | None) -> Reason | None:
    """Return that caches of a class without a codec are never on disk, if that is so:
    for a namespace of which nothing is there."""
    unknown = codecs.unknown_classes(like) if like is not None else []
    if not unknown:
        return None
    return Reason(ReasonKind.UNKNOWN_CLASS, 0, "+".join(unknown))


def of_place(place: Place) -> Reason:
    """Return that another namespace has the tokens, and in which fields it differs."""
    return Reason(
        ReasonKind.IDENTITY,
        0,
        "+".join(each.field for each in place.differs),
        n_shared=place.n_shared,
        nearest=place.row.name,
        differs=place.differs,
    )


def inside_image(n_tokens: int) -> Reason:
    """Return that the tokens part inside an image, which is reused whole or not."""
    return Reason(ReasonKind.NOT_RESUMABLE, n_tokens, "image", n_shared=n_tokens)


def at(reason: Reason, position: int) -> Reason:
    """Return a reason at another position."""
    return dataclasses.replace(reason, position=position)
