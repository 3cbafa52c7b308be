"""The bytes of mlx arrays: allocate without filling, view without copying.

mlx's own operations are not enough here: ``mx.zeros`` touches all memory that a
restore overwrites at once, and a slice can neither be written to a file nor read
into. Knows nothing of caches and files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from promptstore.layers import ITEMSIZE_BY_DTYPE, RowPart

Rows: TypeAlias = npt.NDArray[np.uint8]
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


def empty(parts: Sequence[RowPart], capacity: int) -> list[mx.array]:
    """Return evaluated arrays with room for *capacity* tokens, not filled.

    Shape:
        ``(1, n_kv_heads, capacity, head_dim)``, one for each part.

    Source: mlx 0.32.4 ``mx.load`` of a file object reads straight into the array's
    own memory; a reader that writes nothing leaves it as allocated.
    """
    header: dict[str, Any] = {}
    end = 0
    for index, part in enumerate(parts):
        shape = [1, part.n_kv_heads, capacity, part.head_dim]
        start, end = end, end + part.token_bytes * capacity
        header[str(index)] = {
            "dtype": part.dtype,
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    reader: Any = _Unfilled(len(text).to_bytes(8, "little") + text, end)
    loaded: Any = mx.load(reader, format="safetensors")
    arrays = [loaded[str(index)] for index in range(len(parts))]
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


def rows(array: mx.array) -> Rows:
    """Return the bytes of an evaluated row part, writable and not copied.

    Args:
        array: Shape ``(1, n_kv_heads, n_rows, head_dim)``, evaluated. Whoever reads
            the view must keep the array from being updated in place, by holding an
            array object of its own.

    Raises:
        ValueError: The array is not contiguous in memory.
    """
    data: Any = array
    if not memoryview(data).c_contiguous:
        raise ValueError("a strided array has no plain rows of bytes")
    _, heads, n_rows, head_dim = array.shape
    row_bytes = head_dim * ITEMSIZE_BY_DTYPE[dtype_name(array)]
    if not array.size:
        return np.empty((heads, n_rows, row_bytes), np.uint8)
    # np.asarray has no bfloat16; frombuffer takes any array's bytes.
    return np.frombuffer(data, np.uint8).reshape(heads, n_rows, row_bytes)
