"""What of a new prompt a snapshot must hold, given what the chain has already."""

from __future__ import annotations

import math
from dataclasses import dataclass

from promptstore import codecs, resume
from promptstore.capture import Capture
from promptstore.errors import NotCovered
from promptstore.extent import Band, Extent
from promptstore.index import Found
from promptstore.layers import Layers, leaves
from promptstore.plan import held_by, pieces_of
from promptstore.ranges import Ranges, clip, count, intersect, subtract, union
from promptstore.tokens import Tokens
from promptstore.types import Kind, Namespace


@dataclass(frozen=True)
class NewSnapshot:
    """A prompt to be stored: the writer decides which part of it is new.

    Args:
        tokens: All its tokens, ``[0, end)``.
        capture: Its cache, nobody's to change.
    """

    namespace: Namespace
    tokens: Tokens
    capture: Capture
    kind: Kind
    label: str | None = None
    pinned: bool = False
    expires_ns: int | None = None

    @property
    def is_special(self) -> bool:
        """Whether it asks for a row of its own."""
        return self.pinned or self.label is not None or self.expires_ns is not None

    @property
    def until_ns(self) -> float:
        """Until when what it continues must live."""
        return math.inf if self.expires_ns is None else self.expires_ns

    @property
    def text(self) -> str:
        """Its layers as text, which tells its layout from others."""
        return self.capture.text

    @property
    def layers(self) -> Layers:
        """Its layers; only what has codecs comes here."""
        assert self.capture.layers is not None
        return self.capture.layers


def of_rows(new: NewSnapshot, found: Found) -> Extent:
    """Return what a snapshot of the new tokens holds: all rows of full layers, and of
    windows those that the live cache still has."""
    start, end = found.n_tokens, len(new.tokens)
    ranges = [union([*wanted, (start, end)]) for wanted in _missing(new, found)]
    return _extent(new, start, end, ranges, with_state=False)


def of_checkpoint(new: NewSnapshot, found: Found) -> Extent:
    """Return what a snapshot of no tokens holds: the state, and what rows are needed
    to go on from there but are not on the chain."""
    end = len(new.tokens)
    return _extent(new, end, end, _missing(new, found), with_state=True)


def _missing(new: NewSnapshot, found: Found) -> list[Ranges]:
    """Return, by leaf, the tokens below the chain's end whose rows are needed to go on
    from the end of *new*, and which the chain lacks."""
    wanted = resume.needs(new.layers, len(new.tokens), new.capture.rings)
    pieces = pieces_of(found)
    return [
        clip(subtract(ranges, held_by(pieces, leaf)), 0, found.n_tokens)
        for leaf, ranges in enumerate(wanted)
    ]


def _extent(
    new: NewSnapshot, start: int, end: int, ranges: list[Ranges], *, with_state: bool
) -> Extent:
    """Group the leaves by what is held of them, full attention first.

    Raises:
        NotCovered: The capture lacks rows of full attention.
    """
    capture = new.capture
    leaves_by_ranges: dict[Ranges, list[int]] = {}
    for leaf, wanted in enumerate(ranges):
        kind = codecs.codec_by_tag(leaves(new.layers)[leaf].tag).kind
        held = intersect(wanted, capture.held(leaf))
        if kind == "full" and held != wanted:
            raise NotCovered(f"tokens {subtract(wanted, held)} were evicted meanwhile")
        if held:
            leaves_by_ranges.setdefault(held, []).append(leaf)
    bands = tuple(
        Band(tuple(numbers), ranges)
        for ranges, numbers in sorted(
            leaves_by_ranges.items(), key=lambda item: (-count(item[0]), item[0])
        )
    )
    state = capture.state if with_state else ()
    return Extent(start, end, bands, capture.rings, state)
