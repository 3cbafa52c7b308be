"""Which prompts are worth a place on disk: all of them, or what was seen before."""

from __future__ import annotations

from typing import Literal

from promptstore import prefix
from promptstore.delta import NewSnapshot
from promptstore.index import Index, Layout

Admission = Literal["always", "second-use"]


def is_seen(index: Index, layout: Layout, new: NewSnapshot) -> bool:
    """Whether at least half of a prompt was stored or inserted before; note it.

    So a conversation is written from its second turn on, and a system prompt at its
    second use; what has a clock at its head never is.
    """
    n_tokens = len(new.tokens)
    n_stored = index.find(layout, new.tokens).n_tokens
    end_by_digest = _ends(layout, new)
    seen = index.seen(end_by_digest.keys())
    index.note_seen(end_by_digest.keys())
    n_seen = max((end_by_digest[digest] for digest in seen), default=0)
    return 2 * max(n_stored, n_seen) >= n_tokens


def _ends(layout: Layout, new: NewSnapshot) -> dict[bytes, int]:
    """Return where each block of a prompt ends, and the prompt itself, by digest."""
    chain = prefix.Chain(layout.seed, new.tokens)
    ends = {chain[n]: n * prefix.BLOCK for n in range(1, chain.n_blocks + 1)}
    return ends | {chain.end(): len(new.tokens)}
