"""Facts about the descriptions of layers and their text."""

from __future__ import annotations

import pytest

from promptstore.layers import (
    ITEMSIZE_BY_DTYPE,
    Layer,
    RowPart,
    from_text,
    summary,
    to_text,
    token_bytes,
)

KEYS = RowPart("keys", 2, 64, "BF16")
VALUES = RowPart("values", 2, 128, "F32")
FULL = Layer("full/1", (KEYS, VALUES))
QUANTIZED = Layer("quantized/1", (KEYS,), {"bits": 4, "group_size": 64})


def test_bytes_of_a_part_are_heads_times_row() -> None:
    """A row is one token in one head; a token is a row in each head."""
    assert (KEYS.row_bytes, KEYS.token_bytes) == (128, 256)
    assert (VALUES.row_bytes, VALUES.token_bytes) == (512, 1024)
    assert RowPart("keys", 2, 0, "F16").token_bytes == 0


def test_bytes_of_a_token_are_those_of_all_parts_of_all_layers() -> None:
    """A token has a row in each part of each layer."""
    assert token_bytes((FULL, QUANTIZED, FULL)) == 2 * (256 + 1024) + 256
    assert token_bytes(()) == 0


@pytest.mark.parametrize("layers", [(), (FULL,), (QUANTIZED, FULL, QUANTIZED)])
def test_text_and_back_gives_equal_layers(layers: tuple[Layer, ...]) -> None:
    """A description survives being written as text."""
    assert layers == from_text(to_text(layers))


def test_equal_layers_have_equal_texts() -> None:
    """The order in which settings were given is not in the text."""
    other = Layer("quantized/1", (KEYS,), {"group_size": 64, "bits": 4})
    assert to_text((QUANTIZED,)) == to_text((other,))


def test_the_text_is_the_golden_one() -> None:
    """The text is part of a digest on users' disks and must never change."""
    expected = (
        '[["full/1",[["keys",2,64,"BF16"],["values",2,128,"F32"]],{}],'
        '["quantized/1",[["keys",2,64,"BF16"]],{"bits":4,"group_size":64}]]'
    )
    assert expected == to_text((FULL, QUANTIZED))


@pytest.mark.parametrize(
    "other",
    [
        Layer("full/2", (KEYS, VALUES)),
        Layer("full/1", (VALUES, KEYS)),
        Layer("full/1", (KEYS,)),
        Layer("full/1", (KEYS, RowPart("values", 1, 256, "F32"))),
        Layer("full/1", (KEYS, RowPart("values", 2, 128, "I32"))),
        Layer("full/1", (KEYS, VALUES), {"bits": 4}),
    ],
)
def test_other_layers_have_other_texts(other: Layer) -> None:
    """Tag, parts, their order, sizes, dtype and settings are all in the text."""
    assert to_text((FULL,)) != to_text((other,))


@pytest.mark.parametrize("dtype", ITEMSIZE_BY_DTYPE)
def test_every_dtype_can_be_described(dtype: str) -> None:
    """Each dtype in the table survives being written as text."""
    layers = (Layer("full/1", (RowPart("keys", 1, 1, dtype),)),)
    assert layers == from_text(to_text(layers))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "full/1",
        "null",
        "5",
        "{}x",
        "[5]",
        "[[]]",
        '[["full/1",5,{}]]',
        '[["full/1",[],[]]]',
        '[["full/1",[["keys",2,64]],{}]]',
        '[["full/1",[["keys","x",64,"F32"]],{}]]',
        '[["full/1",[["keys",null,64,"F32"]],{}]]',
        '[["full/1",[["keys",NaN,64,"F32"]],{}]]',
        '[["full/1",[["keys",2,64,"F99"]],{}]]',
        '[["full/1",[["keys",2,64,["F32"]]],{}]]',
        '[["full/1",[],{"bits":"x"}]]',
        '[["full/1",[],{"bits":8,"bits":8}]]',
        '[["full/1",[],{"bits":8.0}]]',
        '[["full/1",[],{"bits":-8}]]',
        '[["full/1",[],{"bits":4294967296}]]',
        '[["full/1",[["keys",-2,64,"F32"]],{}]]',
        '[["full/1",[["keys",2,-64,"F32"]],{}]]',
        '[["full/1",[["keys",2,1152921504606846976,"F32"]],{}]]',
        '[["full/1",[["keys",true,64,"F32"]],{}]]',
        '[["full/1",[["keys","2",64,"F32"]],{}]]',
        '[["full/1",[["keys",2,64,"F32"],["keys",2,64,"F32"]],{}]]',
        "[[5,[],{}]]",
        '[["composite/1",[],{},[],[]]]',
        '[["composite/1",[["keys",2,64,"F32"]],{},[["full/1",[],{}]]]]',
        '["full/1"]',
        "[[[],[],{}]]",
    ],
)
def test_a_text_that_is_none_is_a_value_or_key_error(text: str) -> None:
    """What was read from a damaged or hostile file cannot raise anything else."""
    with pytest.raises((ValueError, KeyError)):
        from_text(text)


@pytest.mark.parametrize(
    "text",
    [
        '[["full/1",[["keys",1e999,64,"F32"]],{}]]',
        "[" * 100_000,
        '[["composite/1",[],{},' * 10_000 + "[]" + "]]" * 10_000,
        "[" + "[]," * 100_000 + "[]]",
        "9" * 100_000,
    ],
    ids=["infinite", "deep", "deep layers", "many", "long"],
)
def test_a_hostile_text_is_a_value_error(text: str) -> None:
    """An endless number and endless brackets are no descriptions either."""
    with pytest.raises((ValueError, KeyError)):
        from_text(text)


def test_the_summary_groups_neighbours() -> None:
    """Runs of equal tags are counted, in order; what stands alone is not."""
    assert summary((FULL,) * 30) == "full/1 x30"
    expected = "full/1 x2 + quantized/1 + full/1"
    assert expected == summary((FULL, FULL, QUANTIZED, FULL))
    assert summary(()) == ""
