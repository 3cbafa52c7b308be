"""Facts about the digest chain.

The literal digests in this file must never change: they are keys in the indexes on
users' disks. A change of the function needs another seed text (``promptstore/2``).
"""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from promptstore import prefix
from promptstore.prefix import BLOCK, Chain
from promptstore.types import Namespace

ROOT = bytes(16)
IMAGE = -855241551491862571

# Never change these values; see above.
GOLDEN_SEED = "dc6ba2774b86408bfc31664c24d5761b"
GOLDEN_NAMESPACE = "60e8f9068a00019a08d858e147245189"
GOLDEN = {
    "empty": ([], "00000000000000000000000000000000"),
    "zero": ([0], "10e45c7ce2292320743df94ee4c78a2a"),
    "one": ([1], "95b8b6cc5ea1c5f51dc4fa5272e0e99d"),
    "60 bits, negative": ([IMAGE], "f8e1b1dd4dab144b52dcf20907bf6aee"),
    "64 bits": ([2**63 - 1, -(2**63)], "93399b62b7c768191d36dac2337e173a"),
    "a block less one": (range(255), "2a7629460f31b65a1ffbc21608dbdd25"),
    "a block": (range(256), "d8a48b0e5caa74eab46b5f6e724da6ee"),
    "a block and one": (range(257), "20641e3f43f53d3c9e2f52632d68f5d5"),
    "two blocks": (range(512), "8fdeeaadb20861be46ef7f133b3c1092"),
    "many": (range(1000), "af4e313fb0c7f33b25727a1d7b433e2b"),
}


def ids(of: object) -> np.ndarray:
    return np.array(list(of), np.int64)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", GOLDEN)
def test_digests_are_the_golden_ones(name: str) -> None:
    """The digest of fixed tokens is a fixed literal, for ever."""
    tokens, expected = GOLDEN[name]
    assert expected == prefix.end_digest(ROOT, ids(tokens)).hex()


def test_the_seed_is_the_golden_one() -> None:
    """The digest of the empty prefix of fixed layers is a fixed literal, for ever."""
    actual = prefix.seed(bytes(range(16)), '[["full/1"]]').hex()
    assert actual == GOLDEN_SEED


def test_the_namespace_digest_is_the_golden_one() -> None:
    """The digest of a fixed namespace is a fixed literal, for ever."""
    assert Namespace("model", "r1").digest.hex() == GOLDEN_NAMESPACE


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 511, 512, 513, 1000])
def test_a_digest_is_xxh3_128_of_parent_and_ids(n: int) -> None:
    """An independent chain of xxh3-128 over little-endian int64 gives the same."""
    tokens = [IMAGE * (i % 5) + i for i in range(n)]
    expected = ROOT
    for at in range(0, n, 256):
        block = tokens[at : at + 256]
        packed = struct.pack(f"<{len(block)}q", *block)
        expected = xxhash.xxh3_128(expected + packed).digest()
    assert expected == prefix.end_digest(ROOT, ids(tokens))


@pytest.mark.parametrize("n", [255, 256, 257, 512, 600])
def test_a_boundary_has_the_digest_of_its_prefix(n: int) -> None:
    """A boundary of a chain is the end digest of the tokens up to it."""
    tokens = ids(range(n))
    chain = Chain(ROOT, tokens)
    assert chain.n_blocks == n // BLOCK
    for boundary in range(chain.n_blocks + 1):
        expected = prefix.end_digest(ROOT, tokens[: boundary * BLOCK])
        assert expected == chain[boundary]
    assert prefix.end_digest(ROOT, tokens) == chain.end()


def test_a_chain_may_be_asked_in_any_order() -> None:
    """The digests do not depend on which of them was asked for first."""
    tokens = ids(range(4 * BLOCK + 9))
    expected = [Chain(ROOT, tokens)[boundary] for boundary in range(5)]
    for order in itertools.permutations(range(5)):
        chain = Chain(ROOT, tokens)
        found = {boundary: chain[boundary] for boundary in order}
        assert expected == [found[boundary] for boundary in range(5)]


def test_a_chain_hashes_only_as_far_as_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking for boundary 3 of a long prompt hashes three blocks, and only once."""
    hashed = []
    plain = prefix.extend

    def extend(parent: bytes, block: np.ndarray) -> bytes:
        hashed.append(len(block))
        return plain(parent, block)

    monkeypatch.setattr(prefix, "extend", extend)
    chain = Chain(ROOT, ids(range(100 * BLOCK)))
    assert hashed == []
    assert chain[3] == chain[3]
    assert hashed == [BLOCK] * 3


def test_the_layout_of_the_array_is_nothing() -> None:
    """Strided and big-endian arrays of the same ids have the same digest."""
    expected = prefix.end_digest(ROOT, ids(range(300)))
    doubled = np.repeat(ids(range(300)), 2)
    assert expected == prefix.end_digest(ROOT, doubled[::2])
    assert expected == prefix.end_digest(ROOT, ids(range(300)).astype(">i8"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 23], [12, 3]),
        ([1], [65537]),
        ([1], [1 + 2**32]),
        ([IMAGE], [IMAGE & 0xFFFFFFFF]),
        ([0], [0, 0]),
        ([1, 2], [2, 1]),
        (range(256), range(257)),
        ([0, *range(300)], [1, *range(300)]),
    ],
)
def test_other_tokens_have_another_digest(one: object, other: object) -> None:
    """Ids do not run together, lose bits or positions."""
    assert prefix.end_digest(ROOT, ids(one)) != prefix.end_digest(ROOT, ids(other))


def test_fields_of_a_namespace_do_not_run_together() -> None:
    """Any two namespaces that differ in one field, or in where it ends, differ."""
    namespaces = [
        Namespace("a", adapter="b|c"),
        Namespace("a|b", adapter="c"),
        Namespace("a|b|c"),
        Namespace("a"),
        Namespace("a", adapter="None"),
        Namespace("a", tenant="None"),
        Namespace("a", revision="b", tenant="c"),
        Namespace("a", revision="c", tenant="b"),
        Namespace("a", draft="b"),
        Namespace("a", config="b"),
        Namespace('a", "revision": "b'),
        Namespace("a\0b"),
        Namespace("Ä"),
        Namespace("A\u0308"),
    ]
    seeds = {prefix.seed(namespace.digest, "[]") for namespace in namespaces}
    assert len(seeds) == len(namespaces)


def test_other_layers_have_another_seed() -> None:
    """The same tokens of the same model in other layers are another tree."""
    digest = Namespace("a").digest
    assert prefix.seed(digest, "[1]") != prefix.seed(digest, "[2]")


def test_digests_are_equal_in_every_process() -> None:
    """Hash randomisation of another process changes no namespace and no prefix."""
    code = (
        "import numpy as np; from promptstore import prefix; "
        "from promptstore.types import Namespace; "
        "seed = prefix.seed(Namespace('m', tenant='t').digest, '[]'); "
        "print(prefix.end_digest(seed, np.arange(300)).hex())"
    )
    seed = prefix.seed(Namespace("m", tenant="t").digest, "[]")
    expected = prefix.end_digest(seed, ids(range(300))).hex()
    actual = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert expected == actual
