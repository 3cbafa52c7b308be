"""What the layers of a prompt cache look like: descriptions only, no arrays.

A prompt cache is a list of layers; a layer holds *row parts*, arrays with one row a
token. Two caches with equal descriptions can continue each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """One layer: the codec's tag, its settings, its row parts."""

    tag: str
    parts: tuple[RowPart, ...]
    settings: Mapping[str, int] = field(default_factory=dict)


Layers = tuple[Layer, ...]


def token_bytes(layers: Layers) -> int:
    """Return the bytes of one token in all layers."""
    return sum(part.token_bytes for layer in layers for part in layer.parts)


def to_text(layers: Layers) -> str:
    """Return the canonical text of *layers*; equal layers have equal texts."""
    rows = [
        [
            layer.tag,
            [[p.name, p.n_kv_heads, p.head_dim, p.dtype] for p in layer.parts],
            dict(layer.settings),
        ]
        for layer in layers
    ]
    return json.dumps(rows, sort_keys=True, separators=(",", ":"))


def from_text(text: str) -> Layers:
    """Return the layers of a canonical text.

    Raises:
        ValueError: It is not one (also ``KeyError`` for an unknown dtype).
    """
    try:
        layers = tuple(
            Layer(
                str(tag),
                tuple(RowPart(str(n), int(h), int(d), str(t)) for n, h, d, t in parts),
                {str(k): int(v) for k, v in settings.items()},
            )
            for tag, parts, settings in json.loads(text)
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a description of layers: {error}") from error
    token_bytes(layers)
    return layers


def summary(layers: Layers) -> str:
    """Return a short text for people, for example ``full/1 x30``."""
    groups = itertools.groupby(layer.tag for layer in layers)
    return " + ".join(f"{tag} x{len(list(group))}" for tag, group in groups)
