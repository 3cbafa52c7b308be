"""An explanation as plain data, for JSON: what a command prints, and a server tells."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from promptstore.types import Elsewhere, Explanation, Neighbour, Reason


def facts_of(found: Explanation, n_asked: int) -> dict[str, Any]:
    """Return what became of a request, and why.

    Args:
        found: What was found out.
        n_asked: Tokens of the request.
    """
    return {
        "n_asked": n_asked,
        "n_reused": found.n_tokens,
        "n_memory": found.n_memory,
        "n_disk": found.n_disk,
        "reason": None if found.reason is None else _of_reason(found.reason),
        "closest": [_of_neighbour(each) for each in found.closest],
        "elsewhere": [_of_place(each) for each in found.elsewhere],
    }


def _of_reason(reason: Reason) -> dict[str, Any]:
    facts = asdict(reason)
    return facts | {"kind": reason.kind.value, "text": str(reason)}


def _of_neighbour(each: Neighbour) -> dict[str, Any]:
    return asdict(each) | {"follows": list(each.follows)}


def _of_place(each: Elsewhere) -> dict[str, Any]:
    return asdict(each) | {"differs": [asdict(one) for one in each.differs]}
