"""Facts about what looks volatile, as tables of texts."""

from __future__ import annotations

import pytest

from promptstore.volatile import PATTERNS, volatile

UUID = "7d444840-9dc0-11d1-b245-5ffdce74fad2"

CHANGING = [
    ("date", "Today is 2026-11-30.", "Today is 2026-12-01."),
    ("date", "Today is 2026/11/30.", "Today is 2026/11/29."),
    ("date", "on 30.11.2026 and", "on 1.12.2026 and"),
    ("date", "on 11/30/26 and", "on 12/01/26 and"),
    ("date", "log-20261130.txt", "log-20261201.txt"),
    ("date", "It is November 30, 2026 now", "It is November 29, 2026 now"),
    ("date", "It is Nov 30th now", "It is Dec 1st now"),
    ("date", "It is 30 November 2026 now", "It is 1 December 2026 now"),
    ("date", "It is Monday.", "It is Tuesday."),
    ("date", "2026-11-30T12:34:56Z", "2026-11-29T12:34:56Z"),
    ("clock", "2026-11-30T12:34:56Z", "2026-11-30T12:34:57Z"),
    ("clock", "at 12:34 the", "at 12:35 the"),
    ("clock", "at 9:05 pm the", "at 10:05 pm the"),
    ("clock", "at 12:34 the", "at 12:34:56 the"),
    ("clock", "20261130T123456Z", "20261130T123457Z"),
    ("clock", "now=1764500000", "now=1764500017"),
    ("clock", "now=1764500000123", "now=1764500017456"),
    ("clock", "now=1764500000.123", "now=1764500000.456"),
    ("UUID", f"id {UUID}", f"id 8{UUID[1:]}"),
    ("UUID", f"id {UUID.upper()}", f"id {UUID[:-1].upper()}0"),
    ("request id", "req_011CSHoEeqs5C35K2UUq", "req_011CSHoEeqs5C35K2UUz"),
    ("request id", "chatcmpl-9nYAG9UPNonX8dA", "chatcmpl-AnYAG9UPNonX8dB"),
    ("request id", "X-Request-Id: a1b2c3", "X-Request-Id: zzzzzz"),
    ("request id", '"session_id": "abcd-1"', '"session_id": "wxyz-2"'),
    ("hash", "commit 0a1e5fd here", "commit bf928f1 here"),
    ("hash", "d41d8cd98f00b204e9800998ecf8427e", "d41d8cd98f00b204e9800998ecf8427f"),
    (
        "hash",
        "sha256-47DEQpj8HBSa+/TImW+5JCeuQeR",
        "sha256-57DEQpj8HBSa+/TImW+5JCeuQeR",
    ),
    (
        "billing header",
        "x-anthropic-billing-header: cc_version=2.1.36; cch=39d3d;\nYou are",
        "x-anthropic-billing-header: cc_version=2.1.36; cch=a01bf;\nYou are",
    ),
]

STAYING = [
    ("You are a pirate.", "You are a parrot."),
    ("On 2026-11-30.", "On 2026-11-30,"),
    ("On 2026-11-30 we", "On 2026-11-30 you"),
    ("Version 2 of it", "Version 3 of it"),
    ("It costs 1200.", "It costs 1300."),
    ("in 2026 or", "in 2025 or"),
    ("On 2026-11-30", "On the first day"),
    ("Monday", "Mondrian"),
    ("the facade of", "the facet of"),
    ("It is 30 degrees", "It is 31 degrees"),
    ("The end", "The end"),
    ("", "2026-11-30"),
]


@pytest.mark.parametrize(("kind", "ours", "theirs"), CHANGING)
def test_what_changes_has_a_kind(kind: str, ours: str, theirs: str) -> None:
    """In either direction, and with text on both sides."""
    for one, other in ((ours, theirs), (theirs, ours)):
        for head, tail in (("", ""), ("Before. ", " After.")):
            found = volatile(f"{head}{one}{tail}", f"{head}{other}{tail}")
            assert found is not None
            assert found.kind == kind
            assert found.ours in one
            assert found.theirs in other
            assert found.ours != found.theirs


@pytest.mark.parametrize(("ours", "theirs"), STAYING)
def test_what_is_only_different_has_none(ours: str, theirs: str) -> None:
    """Words, amounts, and what follows a date."""
    assert volatile(ours, theirs) is None
    assert volatile(theirs, ours) is None


def test_the_place_counts_not_the_text() -> None:
    """A date before or behind the place does not make it volatile."""
    ours = "2026-11-30: you are a cook. It is 12:30."
    theirs = "2026-11-30: you are a poet. It is 12:31."
    assert volatile(ours, theirs) is None


def test_every_kind_is_in_the_table() -> None:
    """No pattern without an example."""
    assert {kind for kind, _, _ in CHANGING} == set(PATTERNS)
