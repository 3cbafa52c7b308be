"""What the layers of a prompt cache look like: descriptions only, no arrays.

A prompt cache is a list of layers. A layer holds *row parts*, arrays with one row a
token; or state, arrays that depend on all tokens; or inner layers. Two caches with
equal descriptions can continue each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from promptstore.strict_json import parse

ITEMSIZE_BY_DTYPE: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element, by safetensors' name of the dtype."""


@dataclass(frozen=True)
class RowPart:
    """One array of a layer with a row a token.

    Shape: ``(1, n_kv_heads, n_tokens, head_dim)``.
    """

    name: str
    n_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one head."""
        return self.head_dim * ITEMSIZE_BY_DTYPE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all heads."""
        return self.n_kv_heads * self.row_bytes


@dataclass(frozen=True)
class Layer:
    """One layer: the codec's tag, its settings, its row parts or its inner layers."""

    tag: str
    parts: tuple[RowPart, ...] = ()
    settings: Mapping[str, int] = field(default_factory=dict)
    inner: tuple[Layer, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all its own parts."""
        return sum(part.token_bytes for part in self.parts)


Layers = tuple[Layer, ...]

DRAFT = "draft/1"
"""The tag of what stands for a draft model's layers behind the target's."""

MAX_SIZE = (1 << 31) - 1
"""The largest dimension of an mlx array."""

_WHOLE = "whole "


def leaves(layers: Layers) -> Layers:
    """Return the layers that hold arrays themselves, in order."""
    found: list[Layer] = []
    for layer in layers:
        found += leaves(layer.inner) if layer.inner else (layer,)
    return tuple(found)


def token_bytes(layers: Layers) -> int:
    """Return the bytes of one token in all layers."""
    return sum(layer.token_bytes for layer in leaves(layers))


def to_text(layers: Layers, *, whole: bool = False) -> str:
    """Return the canonical text of *layers*; equal layers have equal texts.

    Args:
        whole: Mark caches that can be used only whole, which never meet others.
    """
    text = json.dumps(_to_json(layers), sort_keys=True, separators=(",", ":"))
    return _WHOLE + text if whole else text


def is_whole(text: str) -> bool:
    """Whether a text is of caches that can be used only whole."""
    return text.startswith(_WHOLE)


def from_text(text: str) -> Layers:
    """Return the layers of a canonical text.

    Raises:
        ValueError: It is not one.
    """
    try:
        layers = _from_json(parse(text.removeprefix(_WHOLE)))
        _require_sense(layers)
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a description of layers: {error}") from error
    return layers


def summary(layers: Layers) -> str:
    """Return a short text for people, for example ``full/1 x30``."""
    names = [
        f"{layer.tag}({summary(layer.inner)})" if layer.inner else layer.tag
        for layer in layers
    ]
    groups = ((name, len(list(group))) for name, group in itertools.groupby(names))
    return " + ".join(name if n == 1 else f"{name} x{n}" for name, n in groups)


def _to_json(layers: Layers) -> list[list[Any]]:
    rows = []
    for layer in layers:
        parts = [[p.name, p.n_kv_heads, p.head_dim, p.dtype] for p in layer.parts]
        row = [layer.tag, parts, dict(layer.settings)]
        rows.append([*row, _to_json(layer.inner)] if layer.inner else row)
    return rows


def _from_json(rows: Any) -> Layers:
    layers = []
    for tag, parts, settings, *inner in rows:
        own = tuple(RowPart(n, h, d, t) for n, h, d, t in parts)
        (inside,) = inner or ([],)
        layers.append(Layer(tag, own, dict(settings.items()), _from_json(inside)))
    return tuple(layers)


def _require_sense(layers: Layers) -> None:
    """Raise unless these are layers that a cache can have."""
    for layer in layers:
        names = [part.name for part in layer.parts]
        sizes = [n for part in layer.parts for n in (part.n_kv_heads, part.head_dim)]
        if {type(name) for name in (layer.tag, *names)} != {str}:
            raise ValueError(f"not a description of a layer: {layer}")
        if len(set(names)) != len(names) or (layer.parts and layer.inner):
            raise ValueError(f"not a description of a layer: {layer}")
        if not are_sizes([*sizes, *layer.settings.values()]):
            raise ValueError(f"not sizes of a layer: {layer}")
        if any(part.dtype not in ITEMSIZE_BY_DTYPE for part in layer.parts):
            raise ValueError(f"not dtypes of a layer: {layer}")
        _require_sense(layer.inner)


def are_sizes(values: Iterable[Any]) -> bool:
    """Whether all values are numbers that an array can have as a dimension."""
    return all(type(n) is int and 0 <= n <= MAX_SIZE for n in values)
