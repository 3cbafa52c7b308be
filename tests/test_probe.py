"""Facts about mlx-lm's batched path, found out on the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from test_architectures import (
    CANNOT_RUN,
    _plain_bitlinear,  # noqa: F401  a fixture for all tests
    build,
    config_of,
    variants,
)

from promptstore import probe
from promptstore.probe import BatchedPath, batched_path

NOT_SHARED = {
    "baichuan_m1": "padding enters the state",
    "bailing_moe_linear": "padding enters the state",
    "gemma2": "the batch's mask meets the heads' axis",
    "gpt_bigcode": "positions of one sequence only",
    "internlm2+dynamic-ntk": "positions of one sequence only",
    "internlm3+dynamic-ntk": "positions of one sequence only",
    "jamba": "padding enters the state",
    "llama+dynamic-ntk": "positions of one sequence only",
    "longcat_flash_ngram": "padding enters the state",
    "mamba": "padding enters the state",
    "minimax_m3_vl": "blocks are cut with the padding",
    "nemotron_h": "padding enters the state",
    "olmo_hybrid": "padding enters the state",
    "phi3small": "the batch's mask meets the heads' axis",
    "recurrent_gemma": "padding enters the state",
    "rwkv7": "padding enters the state",
}
"""What mlx-lm 0.32.2 does not compute in a batch of several as it does alone."""

RAISES = {
    "deepseek_v41",
    "gemma2",
    "gpt_bigcode",
    "internlm2+dynamic-ntk",
    "internlm3+dynamic-ntk",
    "llama+dynamic-ntk",
    "llama4",
    "phi3small",
}
NEVER_BATCHED = {"deepseek_v41", "llama4"}
"""Their caches cannot be merged, and mlx-lm's server knows."""

BFLOAT16 = {
    "baichuan_m1", "falcon_h1", "gemma3_text", "llama", "mamba", "mamba2", "nemotron_h",
    "olmo_hybrid", "plamo2", "recurrent_gemma", "rwkv7",
}  # fmt: skip
QUANTIZED = "bailing_moe_v3", "kimi_linear", "nemotron_h", "qwen3_next"


def tiny(name: str) -> Any:
    """Return a tiny model; what starts as zeros could hide what it is multiplied by."""
    model = build(config_of(name))
    mx.random.seed(3)
    model.update(tree_map(_not_zero, model.parameters()))
    mx.eval(model.parameters())
    return model


def _not_zero(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating) or mx.any(array != 0):
        return array
    return (mx.random.normal(array.shape) * 0.3).astype(array.dtype)


def expected(name: str) -> tuple[bool, bool]:
    """Return what is known of an architecture: alone, shared."""
    alone = name not in NEVER_BATCHED
    return alone, alone and name not in NOT_SHARED


@pytest.fixture
def llama() -> Any:
    """A model that is batched rightly."""
    return tiny("llama")


@pytest.fixture
def mamba() -> Any:
    """A model that is not."""
    return tiny("mamba")


@pytest.mark.parametrize("name", sorted({*variants()} - {*CANNOT_RUN}))
def test_architecture_is_known_by_its_batches(name: str) -> None:
    """What is unsafe is found, nothing else is, and what raises is told."""
    found = batched_path(tiny(name))

    assert (found.alone, found.shared) == expected(name)
    assert bool(found.error) == (name in RAISES)


@pytest.mark.parametrize("name", sorted(BFLOAT16))
def test_rounding_to_bfloat16_is_no_fault(name: str) -> None:
    """The same is found where rounding is 60,000 times coarser."""
    model = tiny(name)
    model.set_dtype(mx.bfloat16)

    found = batched_path(model)

    assert (found.alone, found.shared) == expected(name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_model_is_judged_by_its_activations(name: str) -> None:
    """Four-bit weights, bfloat16 activations, on paths that differ for one token."""
    model = tiny(name)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)

    found = batched_path(model)

    assert (found.alone, found.shared) == expected(name)


@pytest.mark.real_model
def test_a_real_model_is_batched_rightly(real_model: tuple[Any, Any]) -> None:
    """SmolLM2's rows are the same from a batch."""
    assert batched_path(real_model[0]) == BatchedPath(True, True)


@pytest.mark.parametrize("fixture", ["llama", "mamba"])
def test_the_probe_is_cheap(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It feeds less than 150 tokens, padding counted, even if it must look twice."""
    model = request.getfixturevalue(fixture)
    fed = list(_record(model, monkeypatch, lambda: batched_path(model)))

    assert sum(ids.size for ids in fed) < 150


def test_tokens_are_of_the_vocabulary(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx reads whatever lies behind the embeddings, and says nothing."""
    fed = list(_record(llama, monkeypatch, lambda: batched_path(llama)))

    assert all(0 <= ids.min().item() <= ids.max().item() < 256 for ids in fed)


def _record(
    model: Any, monkeypatch: pytest.MonkeyPatch, action: Any
) -> Iterator[mx.array]:
    """Yield what is fed to a model by an action."""
    fed = []
    call = type(model).__call__

    def recorded(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        fed.append(ids)
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", recorded)
    action()
    yield from fed


def test_random_state_is_left_alone(llama: Any) -> None:
    """A host's seeded sampling goes on as if nothing had happened."""
    mx.random.seed(5)
    before = [state.tolist() for state in mx.random.state]
    batched_path(llama)

    assert [state.tolist() for state in mx.random.state] == before


def test_nothing_stays_in_memory(llama: Any) -> None:
    """All arrays die with the probe, and their buffers are given back."""
    batched_path(llama)  # what mlx keeps for good is made the first time
    before = mx.get_active_memory()
    batched_path(llama)

    assert (mx.get_active_memory(), mx.get_cache_memory()) == (before, 0)


def test_one_unlike_draw_is_no_fault(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding may send one token to another expert; it does not do so each time."""
    answers = iter([BatchedPath(True, False), BatchedPath(True, True)])
    monkeypatch.setattr(probe._Trial, "run", lambda self, may_share: next(answers))

    assert batched_path(llama) == BatchedPath(True, True)


def test_a_cache_of_another_kind_is_not_vouched_for(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be compared is not said to be right."""
    from mlx_lm.models.cache import KVCache

    class Foreign(KVCache):
        pass

    monkeypatch.setattr(
        type(llama), "make_cache", lambda self: [Foreign()] * 4, raising=False
    )

    found = batched_path(llama)

    assert (found.alone, found.shared) == (False, False)
    assert found.error == ""


def test_a_model_that_cannot_run_raises(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a batch, it is not the batched path's error."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(type(llama), "__call__", broken)

    with pytest.raises(RuntimeError, match="no kernel"):
        batched_path(llama)
