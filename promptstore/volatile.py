"""Does what differs look as if it differs every time? Texts only; knows no tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sept?|oct|nov|dec)[a-z]*\.?"
_ID_OF = r"(?:request|req|trace|span|session|correlation|conversation|message|run)"

PATTERNS: dict[str, tuple[str, ...]] = {
    "billing header": (r"[\w-]*billing[-_]header[^\n]*",),
    "UUID": (r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",),
    "date": (
        r"\b(?:19|20)\d\d[-/.]\d{1,2}[-/.]\d{1,2}",
        r"\b\d{1,2}[-/.]\d{1,2}[-/.](?:19|20)?\d\d\b",
        r"\b20\d\d(?:0\d|1[0-2])(?:[0-2]\d|3[01])(?!\d)",
        rf"\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b",
        rf"\b\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})?",
        r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b",
    ),
    "clock": (
        r"\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s*[ap]\.?m\b\.?|Z|[+-]\d\d:?\d\d)?",
        r"(?<=\d)T\d{6}Z?",
        r"\b1[5-9]\d{8}(?:\d{3}|\d{6}|\.\d+)?\b",
    ),
    "request id": (
        r"\b(?:req|chatcmpl|cmpl|resp|call|toolu|msg|sess|session|conv|trace|run)"
        r"[-_](?=[\w-]*\d)[\w-]{6,}",
        rf"\b(?:x-)?{_ID_OF}[-_ ]?id\W{{1,4}}[\w-]{{4,}}",
    ),
    "hash": (
        r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,128}\b",
        r"\bsha\d+[-:=][\w+/=-]{16,}",
    ),
}
"""By kind, what its texts look like; the first kind that fits both sides is taken."""

_COMPILED = {
    kind: [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    for kind, patterns in PATTERNS.items()
}


@dataclass(frozen=True)
class Volatile:
    """Two texts of one kind, of which each request may have another.

    Args:
        kind: A key of `PATTERNS`.
        ours: The one text.
        theirs: The other.
    """

    kind: str
    ours: str
    theirs: str


def volatile(ours: str, theirs: str) -> Volatile | None:
    """Return what of a volatile kind stands where two texts begin to differ, if on
    both sides it is of the same kind.

    Args:
        ours: A text, beginning some way before the place.
        theirs: Another with the same beginning.
    """
    at = n_alike(ours, theirs)
    for kind, patterns in _COMPILED.items():
        for mine in _around(patterns, ours, at):
            for other in _around(patterns, theirs, at):
                if at < max(mine.end(), other.end()):
                    return Volatile(kind, mine[0], other[0])
    return None


def n_alike(a: str, b: str) -> int:
    """Return how many leading characters two texts share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def _around(patterns: list[re.Pattern[str]], text: str, at: int) -> list[re.Match[str]]:
    """Return the matches that touch a place."""
    return [
        found
        for pattern in patterns
        for found in pattern.finditer(text)
        if found.start() <= at <= found.end()
    ]
