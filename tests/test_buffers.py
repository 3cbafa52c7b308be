"""Facts about allocating mlx arrays and seeing their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from promptstore import buffers
from promptstore.layers import ITEMSIZE_BY_DTYPE, RowPart

DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "C64": mx.complex64,
}


def empty(parts: Sequence[RowPart], capacity: int) -> list[mx.array]:
    """Return unfilled arrays with room for *capacity* rows of each part."""
    return buffers.empty(
        [(part.dtype, (1, part.n_kv_heads, capacity, part.head_dim)) for part in parts]
    )


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_have_the_names_and_sizes_of_safetensors(name: str) -> None:
    """The name of each dtype is the format's, and its size is mlx's."""
    array = mx.zeros((1, 1, 1, 1), DTYPES[name])
    assert name == buffers.dtype_name(array)
    assert array.nbytes == ITEMSIZE_BY_DTYPE[name]


@pytest.mark.parametrize("name", DTYPES)
def test_empty_gives_arrays_of_the_described_shape_and_dtype(name: str) -> None:
    """Each part gets an array with room for the capacity, evaluated and writable."""
    parts = [RowPart("keys", 2, 8, name), RowPart("values", 3, 4, name)]
    arrays = empty(parts, 300)
    expected = [((1, 2, 300, 8), DTYPES[name]), ((1, 3, 300, 4), DTYPES[name])]
    assert expected == [(array.shape, array.dtype) for array in arrays]
    for array, part in zip(arrays, parts, strict=True):
        rows = buffers.rows(array)
        expected_shape = (part.n_kv_heads, 300, part.row_bytes)
        assert expected_shape == rows.shape
        rows[:] = 1
        assert (np.frombuffer(bytes(memoryview(array)), np.uint8) == 1).all()


def test_parts_may_have_different_dtypes() -> None:
    """The parts of a quantized layer lie in one allocation call, of three dtypes."""
    parts = [
        RowPart("packed", 2, 4, "U32"),
        RowPart("scales", 2, 1, "BF16"),
        RowPart("flags", 2, 3, "BOOL"),
    ]
    arrays = empty(parts, 5)
    assert [array.dtype for array in arrays] == [mx.uint32, mx.bfloat16, mx.bool_]
    assert [array.nbytes for array in arrays] == [2 * 5 * 16, 2 * 5 * 2, 2 * 5 * 3]


@pytest.mark.parametrize(
    ("part", "capacity"),
    [
        (RowPart("keys", 2, 0, "F32"), 256),
        (RowPart("keys", 2, 8, "BF16"), 0),
        (RowPart("keys", 0, 8, "F32"), 256),
    ],
    ids=["no width", "no rows", "no heads"],
)
def test_zero_sizes_are_sizes(part: RowPart, capacity: int) -> None:
    """A part without elements has an array and rows without bytes."""
    plain = RowPart("values", 2, 8, "F32")
    before, array, after = empty([plain, part, plain], capacity)
    assert array.shape == (1, part.n_kv_heads, capacity, part.head_dim)
    assert buffers.rows(array).shape == (part.n_kv_heads, capacity, part.row_bytes)
    assert before.shape == after.shape == (1, 2, capacity, 8)


def test_no_parts_are_no_arrays() -> None:
    """A layer without row parts needs nothing."""
    assert empty([], 256) == []


def test_arrays_share_no_memory() -> None:
    """What is written into one array is seen in no other."""
    part = RowPart("keys", 1, 4, "F32")
    arrays = [*empty([part, part], 4), *empty([part], 4)]
    for number, array in enumerate(arrays):
        buffers.rows(array)[:] = number
    for number, array in enumerate(arrays):
        assert set(bytes(memoryview(array))) == {number}


@pytest.mark.parametrize("name", DTYPES)
def test_rows_are_the_bytes_of_an_array(name: str) -> None:
    """Row *i* of head *h* holds the bytes of token *i* in that head."""
    ints = np.arange(2 * 3 * 4).reshape(1, 2, 3, 4) % 2
    array = mx.array(ints).astype(DTYPES[name])
    mx.eval(array)
    rows = buffers.rows(array)
    assert rows.shape == (2, 3, 4 * ITEMSIZE_BY_DTYPE[name])
    for head in range(2):
        for token in range(3):
            one = mx.contiguous(array[0, head, token])
            assert bytes(memoryview(one)) == rows[head, token].tobytes()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32])
def test_rows_are_a_writable_view(dtype: mx.Dtype) -> None:
    """What is written into the rows is the value of the array; nothing is copied."""
    source = mx.arange(2 * 5 * 4).reshape(1, 2, 5, 4).astype(dtype)
    target = mx.zeros((1, 2, 5, 4), dtype)
    mx.eval(source, target)
    assert buffers.rows(target).flags.writeable
    buffers.rows(target)[:, 1:3] = buffers.rows(source)[:, 1:3]
    assert mx.array_equal(target[:, :, 1:3], source[:, :, 1:3])
    assert mx.array_equal(target[:, :, 3:], mx.zeros((1, 2, 2, 4), dtype))


def test_bfloat16_bits_survive() -> None:
    """All 65,536 bit patterns of bfloat16 pass through rows unchanged."""
    bits = mx.arange(65536).astype(mx.uint16).reshape(1, 1, 256, 256)
    array = bits.view(mx.bfloat16)
    (copy,) = empty([RowPart("keys", 1, 256, "BF16")], 256)
    mx.eval(array)
    buffers.rows(copy)[:] = buffers.rows(array)
    assert mx.array_equal(copy.view(mx.uint16), bits)


@pytest.mark.parametrize("how", ["rows", "heads", "columns", "transposed"])
def test_strided_arrays_are_refused(how: str) -> None:
    """An array whose rows do not lie one behind another has no plain bytes."""
    whole = mx.zeros((1, 4, 16, 8))
    mx.eval(whole)
    cuts = {
        "rows": whole[:, :, 2:7],
        "heads": whole[:, ::2],
        "columns": whole[..., :4],
        "transposed": whole.swapaxes(1, 2),
    }
    array = cuts[how]
    mx.eval(array)
    with pytest.raises(ValueError, match="strided"):
        buffers.rows(array)
    assert buffers.rows(mx.contiguous(array)).shape[0] == array.shape[1]


def test_rows_of_a_slice_that_lies_together_are_taken() -> None:
    """A run of whole heads is contiguous and is seen where it lies."""
    whole = mx.arange(4 * 3 * 2).reshape(1, 4, 3, 2)
    part = whole[:, 1:3]
    mx.eval(whole, part)
    expected = bytes(memoryview(mx.contiguous(part)))
    assert expected == buffers.rows(part).tobytes()


@pytest.mark.parametrize("shape", [(3,), (), (2, 0, 5), (1, 2, 3, 4, 5)])
def test_plain_bytes_are_seen_of_any_shape(shape: tuple[int, ...]) -> None:
    """State arrays have any number of dimensions; their bytes are seen, not copied."""
    (array,) = buffers.empty([("I32", shape)])
    assert array.shape == shape
    data = buffers.plain(array)
    assert data.shape == (array.nbytes,)
    assert not data.size or data.flags.writeable
    data[:] = 1
    assert bool((array == 0x01010101).all())


def test_plain_bytes_of_a_strided_array_are_refused() -> None:
    """What does not lie together has no plain bytes."""
    whole = mx.zeros((4, 6))
    part = whole[:, :3]
    mx.eval(whole, part)
    with pytest.raises(ValueError, match="strided"):
        buffers.plain(part)
