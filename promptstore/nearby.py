"""What is stored near a request, on disk: read-only, and never across tenants.

Another tenant's namespaces are left out before any token is compared, so that neither
an answer nor the time that it takes tells what they hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from promptstore import codecs, resume
from promptstore.disk import DiskTier
from promptstore.index import Near, Row
from promptstore.tokens import Tokens
from promptstore.types import Difference, Namespace

_MAX_FOLLOWING = 64
_MAX_NAMESPACES = 8


@dataclass(frozen=True)
class Place:
    """Where tokens of a request are that it cannot use: in which snapshot, how many of
    them, and what differs."""

    row: Row
    n_shared: int
    differs: tuple[Difference, ...]


def differences(ours: Namespace, theirs: Namespace) -> tuple[Difference, ...]:
    """Return the fields in which two namespaces of one tenant differ.

    Raises:
        ValueError: They are of two tenants, who are not told of each other.
    """
    if ours.tenant != theirs.tenant:
        raise ValueError("namespaces of two tenants are not compared")
    pairs = (
        Difference(each.name, getattr(ours, each.name), getattr(theirs, each.name))
        for each in dataclasses.fields(Namespace)
    )
    return tuple(pair for pair in pairs if pair.ours != pair.theirs)


def in_other_namespaces(
    disk: DiskTier,
    namespace: Namespace,
    tokens: Tokens,
    max_namespaces: int = _MAX_NAMESPACES,
) -> list[Place]:
    """Return where other namespaces of the tenant hold *tokens*, the best first.

    Args:
        disk: Where to look.
        namespace: Whose request it is.
        tokens: What it asks for.
        max_namespaces: Look into the newest ones only, so many.
    """
    return disk.ask(lambda: _others(disk, namespace, tokens, max_namespaces))


def _others(
    disk: DiskTier, namespace: Namespace, tokens: Tokens, n: int
) -> list[Place]:
    all_ = disk.index.namespaces(namespace.tenant)
    places = [
        place
        for other in [each for each in all_ if each != namespace][:n]
        if (place := _place(disk, other, tokens, differences(namespace, other)))
    ]
    return sorted(places, key=lambda place: place.n_shared, reverse=True)


def _place(
    disk: DiskTier,
    namespace: Namespace,
    tokens: Tokens,
    differs: tuple[Difference, ...],
) -> Place | None:
    index = disk.index
    found = [index.find(layout, tokens) for layout in index.layouts(namespace)]
    best = max(found, key=lambda each: each.n_tokens, default=None)
    if best is None or not best.n_tokens:
        return None
    return Place(best.chain[-1], best.n_tokens, differs)


def in_other_layers(
    disk: DiskTier, namespace: Namespace, tokens: Tokens, like: Sequence[Any]
) -> list[Place]:
    """Return where caches of layers that do not fit hold *tokens*, the best first.

    Args:
        disk: Where to look.
        namespace: Whose request it is.
        tokens: What it asks for.
        like: A cache as the model makes it.
    """
    return disk.ask(lambda: _misfits(disk, namespace, tokens, like))


def _misfits(
    disk: DiskTier, namespace: Namespace, tokens: Tokens, like: Sequence[Any]
) -> list[Place]:
    places = []
    for layout in disk.index.layouts(namespace):
        layers = disk.layers_of(layout.layers)
        differs = codecs.misfit(layers, like) if resume.is_known(layers) else None
        found = disk.index.find(layout, tokens)
        if differs is not None and found.n_tokens:
            difference = Difference(*differs)
            places.append(Place(found.chain[-1], found.n_tokens, (difference,)))
    return sorted(places, key=lambda place: place.n_shared, reverse=True)


def closest(
    disk: DiskTier, namespace: Namespace, tokens: Tokens, n: int
) -> list[tuple[Near, tuple[int, ...]]]:
    """Return the *n* stored prompts that share most of *tokens*, the best first, and
    with which ids each goes on there.

    Args:
        disk: Where to look.
        namespace: Whose prompts.
        tokens: What is asked for.
        n: How many at most.
    """
    return disk.ask(lambda: _closest(disk, namespace, tokens, n))


def _closest(
    disk: DiskTier, namespace: Namespace, tokens: Tokens, n: int
) -> list[tuple[Near, tuple[int, ...]]]:
    index = disk.index
    near = [
        each
        for layout in index.layouts(namespace)
        for each in index.neighbours(layout, tokens, n)
    ]
    near.sort(key=lambda each: each.n_shared, reverse=True)
    return [(each, _following(disk, each)) for each in near[:n]]


def _following(disk: DiskTier, near: Near) -> tuple[int, ...]:
    lo = near.n_shared
    ids: list[int] = disk.index.tokens_of(near.row)[lo : lo + _MAX_FOLLOWING].tolist()
    return tuple(ids)
