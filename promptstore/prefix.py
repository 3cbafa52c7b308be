"""The digest chain: one digest for each prefix that ends at a block boundary.

Pure functions. A digest identifies a prefix for look-up only; before anything is
served the token ids themselves are compared.
"""

from __future__ import annotations

import numpy as np
import xxhash

from promptstore.tokens import Tokens

BLOCK = 256
"""Tokens to a digest (and rows to a chunk of a snapshot, and mlx-lm's own step)."""


def seed(namespace_digest: bytes, layers: str) -> bytes:
    """Return the digest of the empty prefix: whose KV, and of which layers."""
    text = b"promptstore/1\0" + namespace_digest + layers.encode()
    return xxhash.xxh3_128_digest(text)


def extend(parent: bytes, block: Tokens) -> bytes:
    """Return the digest of a prefix and the *block* of up to 256 ids behind it."""
    return xxhash.xxh3_128_digest(parent + np.ascontiguousarray(block, "<i8").data)


def end_digest(root: bytes, tokens: Tokens) -> bytes:
    """Return the digest of all of *tokens*, whether they end a block or not."""
    return Chain(root, tokens).end()


class Chain:
    """The digests of one token sequence, computed as far as they are asked for."""

    def __init__(self, root: bytes, tokens: Tokens) -> None:
        self._tokens = tokens
        self._digests = [root]

    @property
    def n_blocks(self) -> int:
        """Whole blocks; also the deepest boundary."""
        return len(self._tokens) // BLOCK

    def __getitem__(self, boundary: int) -> bytes:
        """Return the digest of ``tokens[: boundary * 256]``."""
        digests, tokens = self._digests, self._tokens
        while len(digests) <= boundary:
            at = (len(digests) - 1) * BLOCK
            digests.append(extend(digests[-1], tokens[at : at + BLOCK]))
        return digests[boundary]

    def end(self) -> bytes:
        """Return the digest of all the tokens, a last partial block included."""
        last = self[self.n_blocks]
        rest = self._tokens[self.n_blocks * BLOCK :]
        return extend(last, rest) if len(rest) else last
