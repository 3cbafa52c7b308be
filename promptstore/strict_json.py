"""JSON from files that may be damaged or hostile: bounded, and read in one way only."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

MAX_CHARS = 1 << 18
"""Characters of a description. A value takes up to 25 times the memory of its text,
and the largest models take a few tens of thousands."""

_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_PLAIN = json.JSONDecoder()


def parse(text: str, max_chars: int = MAX_CHARS) -> Any:
    """Return the value of a text that `json.dumps` may have given.

    Raises:
        ValueError: It is none, or has a key twice, a number that is no integer, or
            more characters or brackets than there may be.
    """
    if type(text) is not str:
        raise ValueError(f"a {type(text).__name__} is no JSON text")
    if len(text) > max_chars:
        raise ValueError(f"a text of {len(text)} characters is too long")
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("is nested without end") from error


def parse_strings(text: str, max_chars: int, max_rest: int) -> Any:
    """Return the value of a text that is long only for the strings in it.

    Args:
        text: The text.
        max_chars: Characters of all of it.
        max_rest: Characters of it without its strings.

    Raises:
        ValueError: As `parse`, or there is more beside its strings.
    """
    if len(text) <= max_chars and len(_STRINGS.sub("", text)) > max_rest:
        raise ValueError("has more to say than there is to say of a snapshot")
    return parse(text, max_chars)


def string_at(text: str, at: int) -> tuple[str, int]:
    """Return the string that begins at a place of a JSON text, and where it ends.

    Raises:
        ValueError: None begins there.
    """
    if text[at : at + 1] != '"':
        raise ValueError(f"no string at {at}")
    return _PLAIN.raw_decode(text, at)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("has a key twice")
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no integer")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse
)
