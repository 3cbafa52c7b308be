"""Facts about models whose KV is not a function of its prefix alone."""

from __future__ import annotations

from typing import Any

import pytest

from promptstore import Namespace
from promptstore.positions import exact_until

DYNAMIC = {"type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama", "max_position_embeddings": 100},
        {"rope_scaling": None, "max_position_embeddings": 100},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3"}, "max_position_embeddings": 100},
        {"rope_scaling": "dynamic", "max_position_embeddings": 100},
        {"text_config": {"rope_scaling": {"type": "yarn"}}},
        {"model_type": "phi3"},
    ],
)
def test_most_models_have_no_limit(config: dict[str, Any]) -> None:
    """Rope that does not look at the length may be cut anywhere."""
    assert exact_until(config) is None


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_dynamic_rope_is_exact_up_to_its_length(name: str, key: str) -> None:
    """Less the heads, which one class counts for tokens; under either name."""
    config = {
        name: {key: "dynamic"},
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
    }
    assert exact_until(config) == 2016
    assert exact_until({**config, "num_attention_heads": 4096}) == 0
    assert exact_until({name: {key: "dynamic"}, "max_position_embeddings": 9}) == 9


def test_dynamic_rope_of_unknown_length_is_never_exact() -> None:
    """What is not said is taken for the worst."""
    assert exact_until({"rope_scaling": DYNAMIC}) == 0
    config = {"rope_scaling": DYNAMIC, "max_position_embeddings": None}
    assert exact_until(config) == 0


def test_a_config_inside_a_config_counts() -> None:
    """Multimodal models keep their text model's settings one level down or more."""
    text = {"rope_scaling": DYNAMIC, "max_position_embeddings": 500}
    assert exact_until({"model_type": "x", "text_config": text}) == 500
    assert exact_until({"a": {"b": {"c": text}}}) == 500
    assert exact_until({"max_position_embeddings": 7, "text_config": text}) == 500


def test_the_smallest_limit_counts() -> None:
    """Of several parts the one that is exact for the fewest tokens decides."""
    small = {"rope_scaling": DYNAMIC, "max_position_embeddings": 100}
    large = {"rope_scaling": DYNAMIC, "max_position_embeddings": 900}
    assert exact_until({"a": large, "b": small}) == 100
    assert exact_until({"a": small, **large}) == 100
    assert exact_until({"a": small, "b": {"model_type": "phi3small"}}) == 0


@pytest.mark.parametrize("model_type", ["phi3small", "plamo3"])
def test_models_that_depend_on_the_chunks_are_never_exact(model_type: str) -> None:
    """Their logits were measured to differ with the chunks of the prefill."""
    assert exact_until({"model_type": model_type}) == 0
    assert exact_until({"text_config": {"model_type": model_type}}) == 0


@pytest.mark.parametrize(
    ("limit", "n_tokens", "expected"),
    [
        ("", 10**9, True),
        ("0", 1, False),
        ("0", 0, True),
        ("500", 500, True),
        ("500", 501, False),
    ],
)
def test_a_namespace_knows_how_far_it_is_exact(
    limit: str, n_tokens: int, expected: bool
) -> None:
    """Up to the limit, itself included."""
    assert Namespace("m", exact_until=limit).is_exact(n_tokens) == expected


@pytest.mark.parametrize("limit", ["-1", "1.5", "many", " 5"])
def test_a_limit_is_a_number(limit: str) -> None:
    """Anything else would be a limit that nobody keeps."""
    with pytest.raises(ValueError, match="exact_until"):
        Namespace("m", exact_until=limit)
