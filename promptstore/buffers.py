"""The bytes of mlx arrays: allocate without filling, view without copying.

mlx's own operations are not enough here: ``mx.zeros`` touches all memory that a
restore overwrites at once, and a slice can neither be written to a file nor read
into. Knows nothing of caches and files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from promptstore.layers import ITEMSIZE_BY_DTYPE

Bytes: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = Bytes
"""Bytes of a row part, shape ``(n_kv_heads, n_rows, row_bytes)``, a view."""

_NAME_BY_DTYPE = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
    mx.complex64: "C64",
}


def dtype_name(array: mx.array) -> str:
    """Return safetensors' name of the dtype of *array*."""
    return _NAME_BY_DTYPE[array.dtype]


def empty(specs: Sequence[tuple[str, Sequence[int]]]) -> list[mx.array]:
    """Return evaluated arrays that are not filled.

    Args:
        specs: For each array safetensors' name of its dtype, and its shape.

    Source: mlx 0.32.4 ``mx.load`` of a file object reads straight into the array's
    own memory; a reader that writes nothing leaves it as allocated.
    """
    if not specs:
        return []
    header: dict[str, Any] = {}
    end = 0
    for index, (dtype, shape) in enumerate(specs):
        start, end = end, end + math.prod(shape) * ITEMSIZE_BY_DTYPE[dtype]
        header[str(index)] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    reader: Any = _Unfilled(len(text).to_bytes(8, "little") + text, end)
    loaded: Any = mx.load(reader, format="safetensors")
    arrays = [loaded[str(index)] for index in range(len(specs))]
    mx.eval(arrays)
    return arrays


class _Unfilled:
    """A file that has a header and claims, but never delivers, its data."""

    def __init__(self, header: bytes, n_data: int) -> None:
        self._header = header
        self._size = len(header) + n_data
        self._at = 0
        self.closed = False

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        head = self._header[self._at : self._at + len(buffer)]
        buffer[: len(head)] = head
        self._at += len(buffer)
        return len(buffer)


def plain(array: mx.array) -> Bytes:
    """Return all bytes of an evaluated array, writable and not copied.

    Shape: ``(nbytes,)``.

    Raises:
        ValueError: The array is not contiguous in memory.
    """
    data: Any = array
    if not memoryview(data).c_contiguous:
        raise ValueError("a strided array has no plain bytes")
    if not array.size:
        return np.empty(0, np.uint8)
    # np.asarray has no bfloat16; frombuffer takes any array's bytes.
    return np.frombuffer(data, np.uint8)


def rows(array: mx.array) -> Rows:
    """Return the bytes of an evaluated row part, writable and not copied.

    Args:
        array: Shape ``(1, n_kv_heads, n_rows, head_dim)``, evaluated. Whoever reads
            the view must keep the array from being updated in place, by holding an
            array object of its own.

    Raises:
        ValueError: The array is not contiguous in memory.
    """
    _, heads, n_rows, head_dim = array.shape
    row_bytes = head_dim * ITEMSIZE_BY_DTYPE[dtype_name(array)]
    if not array.size:
        return np.empty((heads, n_rows, row_bytes), np.uint8)
    return plain(array).reshape(heads, n_rows, row_bytes)
