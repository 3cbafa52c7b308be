"""Weight files that are whole and hold next to nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

SIZES = {"U8": 1, "BF16": 2, "F16": 2, "U32": 4, "F32": 4}


def safetensors_of(content: bytes) -> bytes:
    """Return a safetensors file whose only tensor is made of these bytes."""
    return headed({"a": ("U8", [len(content)])}, content)


def shaped(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return a safetensors file of zeros: dtypes and shapes by name."""
    return headed(tensors, bytes(sum(map(nbytes, tensors.values()))))


def headed(tensors: Mapping[str, tuple[str, Sequence[int]]], content: bytes) -> bytes:
    """Return a safetensors file of a header that says so much, and these bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + nbytes(tensor)
        header[name] = {
            "dtype": tensor[0],
            "shape": list(tensor[1]),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def nbytes(tensor: tuple[str, Sequence[int]]) -> int:
    """Return how many bytes a tensor of a dtype and a shape has."""
    return SIZES[tensor[0]] * math.prod(tensor[1])
