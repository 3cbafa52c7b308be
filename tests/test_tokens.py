"""Facts about token ids as they come in, and about what two sequences share."""

from __future__ import annotations

import array
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from promptstore.tokens import as_tokens, n_common

IDS = [0, 1, 7, 128_009, 2**31 - 1]
IMAGE = -855241551491862571  # of the size that mlx_lm.server keys images by
LOW, HIGH = -(2**63), 2**63 - 1

FORMS = {
    "list": list,
    "tuple": tuple,
    "int32": lambda ids: np.array(ids, np.int32),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big-endian": lambda ids: np.array(ids, ">i8"),
    "strided": lambda ids: np.repeat(np.array(ids), 2)[::2],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), np.int64),
    "mx int32": lambda ids: mx.array(ids, mx.int32),
    "mx int64": lambda ids: mx.array(ids, mx.int64),
    "mx uint32": lambda ids: mx.array(ids, mx.uint32),
    "list of mx": lambda ids: list(mx.array(ids, mx.int64)),
    "list of numpy": lambda ids: list(np.array(ids)),
    "list of 0-d numpy": lambda ids: [np.array(id_) for id_ in ids],
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_the_same_ids_are_the_same_key(form: str) -> None:
    """Every container and integer type of the same ids gives the same array."""
    actual = as_tokens(FORMS[form](IDS))
    assert (np.dtype(np.int64), IDS) == (actual.dtype, actual.tolist())


@pytest.mark.parametrize(
    "form", ["list", "tuple", "int64", "mx int64", "list of mx", "list of numpy"]
)
@pytest.mark.parametrize("ids", [[IMAGE, 5], [5, IMAGE], [2**32, 2**32 + 5], [-1]])
def test_ids_outside_32_bits_keep_all_their_bits(form: str, ids: list[int]) -> None:
    """Negative ids and ids of up to 60 bits are neither refused nor shortened."""
    assert ids == as_tokens(FORMS[form](ids)).tolist()


def test_ids_that_are_equal_in_their_low_32_bits_are_different_keys() -> None:
    """No form drops the high bits of an id."""
    assert as_tokens([5, 2**32 + 5]).tolist() == [5, 2**32 + 5]
    assert n_common(as_tokens([5]), as_tokens([2**32 + 5])) == 0


def test_the_whole_range_of_signed_64_bits_is_taken() -> None:
    """The smallest and the largest id of 64 bits are ids."""
    expected = [LOW, HIGH]
    assert expected == as_tokens(expected).tolist()
    assert expected == as_tokens(np.array(expected)).tolist()
    assert expected == as_tokens([np.int64(LOW), np.int64(HIGH)]).tolist()


@pytest.mark.parametrize(
    "empty", [[], (), np.array([], np.int64), mx.array([], mx.int32)]
)
def test_no_tokens_are_an_empty_key(empty: Any) -> None:
    """An empty container of integers is an empty int64 array."""
    actual = as_tokens(empty)
    assert (np.dtype(np.int64), []) == (actual.dtype, actual.tolist())


@pytest.mark.parametrize("form", ["list", "int32", "int64", "mx int64"])
def test_the_array_is_the_stores_own(form: str) -> None:
    """Changing what was passed in changes nothing."""
    given: Any = FORMS[form](IDS)
    actual = as_tokens(given)
    given[0] = 99
    assert actual.tolist() == IDS


@pytest.mark.parametrize("form", FORMS)
def test_the_array_can_be_changed(form: str) -> None:
    """No form gives a view of read-only memory."""
    assert as_tokens(FORMS[form](IDS)).flags.writeable


@pytest.mark.parametrize(
    "bad",
    [
        None,
        3,
        "abc",
        b"abc",
        range(3),
        {1, 2},
        {1: 2},
        iter([1]),
        array.array("i", [1]),
        [1.0],
        [1, "a"],
        [None],
        [np.float64(1)],
        [mx.array(1.5)],
        [np.True_],
        [mx.array(True)],
        np.array([1.0]),
        np.array([True]),
        np.array(["a"]),
        np.array([1], object),
        mx.array([1.0]),
        mx.array([True]),
    ],
    ids=lambda bad: repr(bad).partition(" object at ")[0],
)
def test_what_holds_no_integers_is_a_type_error(bad: Any) -> None:
    """A key of anything but integers is refused, and the argument is named."""
    with pytest.raises(TypeError, match="prompt"):
        as_tokens(bad, "prompt")


@pytest.mark.parametrize(
    "bad",
    [
        [True, False],
        (True,),
        [1, True],
        pytest.param(
            [-1, False],
        ),
        pytest.param(
            [2**40, True],
        ),
    ],
)
def test_a_list_of_truth_values_is_a_type_error(bad: Any) -> None:
    """A bool is no id, whatever container it is in."""
    with pytest.raises(TypeError, match="prompt"):
        as_tokens(bad, "prompt")


def test_bfloat16_is_a_type_error() -> None:
    """An array of a dtype that numpy lacks is refused like any other of no integers."""
    with pytest.raises(TypeError, match="prompt"):
        as_tokens(mx.array([1.0], mx.bfloat16), "prompt")


@pytest.mark.parametrize(
    "bad",
    [
        [[1, 2], [3, 4]],
        [(1,)],
        [1, [2]],
        [np.array([5])],
        [mx.array([5])],
        np.array([[1, 2]]),
        np.array(3),
        np.int64(3),
        mx.array([[1]]),
        mx.array(3),
    ],
    ids=repr,
)
def test_what_is_not_one_dimensional_is_a_value_error(bad: Any) -> None:
    """A batch, or a single number, is no prompt, and the argument is named."""
    with pytest.raises(ValueError, match="prompt must be one-dimensional"):
        as_tokens(bad, "prompt")


@pytest.mark.parametrize(
    "bad",
    [
        [HIGH + 1],
        [LOW - 1],
        [1, 2**80],
        [np.uint64(HIGH + 1)],
        np.array([HIGH + 1], np.uint64),
        mx.array(np.array([HIGH + 1], np.uint64)),
    ],
    ids=repr,
)
def test_an_id_of_more_than_64_bits_is_a_value_error(bad: Any) -> None:
    """An id that would lose bits is refused, and the argument is named."""
    with pytest.raises(ValueError, match="prompt holds an id of more than 64"):
        as_tokens(bad, "prompt")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [1], 1),
        ([1], [2], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3, 4], [1, 2, 9, 4], 2),
        ([1, 23], [12, 3], 0),
        ([1], [65537], 0),
        ([IMAGE], [IMAGE & 0xFFFFFFFF], 0),
    ],
)
def test_n_common_counts_the_leading_equal_ids(
    a: list[int], b: list[int], expected: int
) -> None:
    """Only whole ids count, from the first on, and the order of the two is nothing."""
    assert expected == n_common(as_tokens(a), as_tokens(b))
    assert expected == n_common(as_tokens(b), as_tokens(a))


def test_n_common_agrees_with_a_plain_loop() -> None:
    """On random sequences of few ids it counts what a loop counts."""
    rng = random.Random(1)
    for _ in range(500):
        a, b = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in "ab")
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1
        assert expected == n_common(as_tokens(a), as_tokens(b))
