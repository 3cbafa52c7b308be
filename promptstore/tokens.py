"""Token ids of any container as one array, and what two of them share."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Ids, shape ``(n_tokens,)``: int64, or int32 where they are kept."""


def as_tokens(tokens: Any, name: str = "tokens") -> Tokens:
    """Return *tokens* as an int64 array of the store's own; a copy is made.

    All forms of the same ids give equal arrays. Ids are signed 64-bit, since
    mlx_lm.server keys images by negative ids of up to 60 bits.

    Args:
        tokens: A list, tuple, or one-dimensional numpy or mlx array of integers.
        name: What to call it in an error.

    Returns:
        Shape ``(n_tokens,)``.

    Raises:
        TypeError: *tokens* is not a sequence of integers.
        ValueError: It is not one-dimensional, or an id needs more than 64 bits.
    """
    if isinstance(tokens, list | tuple):
        return _from_sequence(tokens, name)
    if not isinstance(tokens, np.ndarray):
        if not hasattr(tokens, "__array__") or not hasattr(tokens, "shape"):
            raise TypeError(
                f"{name} must be a list, tuple or array of integers, "
                f"not {type(tokens).__name__}"
            )
        try:
            tokens = np.asarray(tokens)
        except ValueError:  # numpy has no bfloat16
            raise TypeError(f"{name} must hold integers, not {tokens.dtype}") from None
    if tokens.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not {tokens.ndim}-d")
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {tokens.dtype}")
    if tokens.dtype == np.uint64 and tokens.size and tokens.max() >= 1 << 63:
        raise ValueError(f"{name} holds an id of more than 64 signed bits")
    return np.array(tokens, dtype=np.int64)


def _from_sequence(tokens: list[Any] | tuple[Any, ...], name: str) -> Tokens:
    # array() takes a third of the time of np.array() for a list of ints.
    try:
        try:
            ids = np.frombuffer(array("I", tokens), np.uint32).astype(np.int64)
        except OverflowError:
            ids = np.frombuffer(array("q", tokens), np.int64).copy()
    except OverflowError:
        raise ValueError(f"{name} holds an id of more than 64 signed bits") from None
    except TypeError:
        return _from_objects(tokens, name)
    # array() takes a bool for 0 or 1.
    if any(type(tokens[i]) is bool for i in np.flatnonzero(ids.view(np.uint64) < 2)):
        return _from_objects(tokens, name)
    return ids


def _from_objects(tokens: list[Any] | tuple[Any, ...], name: str) -> Tokens:
    """Take a list of zero-dimensional arrays, which mlx users write by accident."""
    ids = []
    for index, token in enumerate(tokens):
        if getattr(token, "ndim", None) == 0 and hasattr(token, "item"):
            token = token.item()
        if isinstance(token, list | tuple) or getattr(token, "ndim", None):
            raise ValueError(f"{name} must be one-dimensional; see {name}[{index}]")
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(
                f"{name} must hold integers, but {name}[{index}] is "
                f"{type(token).__name__}"
            )
        ids.append(int(token))
    return _from_sequence(ids, name)


def compact(tokens: Tokens) -> Tokens:
    """Return a copy to keep: of 4 bytes an id if they fit, else of 8."""
    narrow = tokens.astype(np.int32)
    return narrow if (narrow == tokens).all() else tokens.astype(np.int64)


def n_common(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens *a* and *b* share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def run_start(tokens: Tokens, position: int, follows: int | None = None) -> int:
    """Return where the run of one negative id that *position* cuts begins.

    A position that cuts none is returned as it is.

    Args:
        tokens: The ids.
        position: Where they are cut.
        follows: An id that stands there in another sequence with the same beginning.
    """
    last = int(tokens[position - 1]) if position else 0
    after = {follows, *tokens[position : position + 1].tolist()}
    if last >= 0 or last not in after:
        return position
    before = np.flatnonzero(tokens[:position] != last)
    return int(before[-1]) + 1 if len(before) else 0
