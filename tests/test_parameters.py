"""Facts about what a model in memory is, by its parameters."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama, phi3small
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from tiny import CONFIG, save_model

from promptstore import Namespace, Rank, parameters


def make(seed: int = 0, **changes: Any) -> Any:
    """Return a llama of two layers, the same for the same seed and config."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG | changes))
    mx.eval(model.parameters())
    return model


def digest(model: Any) -> bytes:
    return Namespace.of(model).digest


# What is equal


def test_equal_models_are_equal() -> None:
    """Two objects of the same class, arguments and parameters are one model."""
    assert digest(make()) == digest(make())


def test_equal_in_every_process() -> None:
    """Digests are of content alone: not of the process, its seed or its addresses."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:];"
        "from test_parameters import digest, make; print(digest(make()).hex())"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    environ = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        command, env=environ, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == digest(make()).hex()


def test_use_changes_nothing() -> None:
    """A model that computed something, or is set to train, is still the same."""
    model = make()
    before = digest(model)
    mx.eval(model(mx.array([[1, 2, 3]])))
    model.freeze()
    model.train()
    assert digest(model) == before


def test_lazy_parameters_are_equal(tmp_path: Path) -> None:
    """Parameters that were not read yet are evaluated, here and now."""
    path = save_model(tmp_path / "model")
    assert digest(load_model(path, lazy=True)[0]) == digest(load_model(path)[0])


def test_layout_in_memory_is_equal() -> None:
    """The same values with other strides are the same parameters."""
    plain, strided = nn.Linear(24, 8), nn.Linear(24, 8)
    strided.bias = plain.bias
    strided.weight = mx.contiguous(plain.weight.T).T
    mx.eval(strided.weight)
    data: Any = strided.weight
    assert not memoryview(data).c_contiguous
    assert digest(plain) == digest(strided)


def test_strided_parameters_are_hashed_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What must be copied is copied a little at a time, in order."""
    plain = mx.random.normal((7, 5, 3))
    whole = digest_of(plain)
    strided = mx.contiguous(plain.transpose(2, 0, 1)).transpose(1, 2, 0)
    for limit in (1, 40, 100, 1 << 20):
        monkeypatch.setattr(parameters, "_PIECE_BYTES", limit)
        assert digest_of(strided) == whole


def digest_of(array: mx.array) -> bytes:
    module = nn.Module()
    module.weight = array
    return digest(module)


def test_tied_weights_are_one_array_or_two_equal_ones() -> None:
    """An array that stands in two places is what two equal ones are."""
    one, two = nn.Module(), nn.Module()
    one.a = one.b = mx.arange(4)
    two.a, two.b = mx.arange(4), mx.arange(4)
    assert digest(one) == digest(two)


# What differs


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_one_bit_differs(dtype: mx.Dtype) -> None:
    """One bit of one parameter makes another model, of whatever dtype."""
    model = make()
    model.set_dtype(dtype)
    before = digest(model)
    array = model.model.layers[1].mlp.up_proj.weight
    bits = mx.view(array, mx.uint8)
    bits[3, 5] ^= 1
    model.model.layers[1].mlp.up_proj.weight = mx.view(bits, dtype)
    assert digest(model) != before


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-6},
        {"rope_traditional": True},
    ],
)
def test_arguments_differ(change: dict[str, Any]) -> None:
    """Equal parameters under other arguments are another model."""
    one, two = Namespace.of(make()), Namespace.of(make(**change))
    assert one.config != two.config


def test_all_ways_to_change_a_model_differ() -> None:
    """Seeds, dtypes, bits, layers, ties and tenants: no two of them meet."""
    models = [make(), make(1), make(num_hidden_layers=1)]
    models += [make(tie_word_embeddings=False), make().model]
    half = make()
    half.set_dtype(mx.bfloat16)
    models.append(half)
    for bits, group_size in ((8, 32), (4, 32)):
        models.append(make())
        nn.quantize(models[-1], bits=bits, group_size=group_size)
    spaces = [Namespace.of(model) for model in models]
    spaces.append(Namespace.of(models[0], tenant="a"))
    assert len({space.digest for space in spaces}) == len(spaces)


def test_scale_of_an_adapter_differs() -> None:
    """What is neither parameter nor argument, but in a layer, is seen."""
    models = []
    for scale in (10.0, 20.0):
        models.append(make())
        mx.random.seed(1)
        settings = {"rank": 2, "scale": scale, "dropout": 0.0}
        linear_to_lora_layers(models[-1], 1, settings)
    assert len({digest(model) for model in [make(), *models]}) == 3


def test_private_arrays_differ() -> None:
    """Frequencies that a rope keeps are no parameters, and decide over the KV."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make(rope_scaling=scaling)
    before = digest(model)
    rope = model.model.layers[0].self_attn.rope
    rope._freqs = rope._freqs * 2
    assert digest(model) != before


def test_dtypes_and_shapes_of_equal_bytes_differ() -> None:
    """The same bytes read as something else are something else."""
    zeros = mx.zeros((4, 6), mx.uint16)
    arrays = [zeros, zeros.reshape(6, 4), zeros.view(mx.bfloat16), zeros.flatten()]
    arrays += [mx.zeros((0,)), mx.zeros((0, 2)), mx.array(0.0), mx.zeros((1,))]
    arrays += [mx.zeros((2,), mx.bool_), mx.zeros((1,), mx.complex64)]
    assert len({digest_of(array) for array in arrays}) == len(arrays)


@dataclasses.dataclass(slots=True)
class Slots:
    base: float


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 1.0),
        ("1", 1),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"a": "1"}),
        ((), {}),
        (Slots(1.0), Slots(2.0)),
        ({1, 2}, {1}),
        (nn.silu, nn.gelu),
        (mx.float16, mx.bfloat16),
    ],
)
def test_attributes_differ(one: Any, two: Any) -> None:
    """Plain attributes of a module are told apart, by type and by value."""
    modules = nn.Module(), nn.Module()
    modules[0].value, modules[1].value = one, two
    assert digest(modules[0]) != digest(modules[1])


def test_object_that_contains_itself_comes_to_an_end() -> None:
    """A cycle among what a module holds is walked through once."""
    module, value = nn.Module(), SimpleNamespace(base=1.0)
    value.itself = value
    module.value = value
    before = digest(module)
    value.base = 2.0
    assert digest(module) != before


def test_files_of_the_model_differ(tmp_path: Path) -> None:
    """What is known by its files and what by its parameters never meets."""
    path = save_model(tmp_path / "model")
    in_memory = Namespace.of(load_model(path)[0])
    assert in_memory.model != Namespace.from_model(path).model
    assert in_memory.model.startswith("parameters ")


def test_given_config_is_seen(tmp_path: Path) -> None:
    """A rope that only a program's ``model_config`` names is another model."""
    path = save_model(tmp_path / "model")
    other, _ = load_model(path, model_config={"rope_theta": 7.0})
    assert digest(other) != digest(load_model(path)[0])


# What cannot be cut, and what cannot be told


def test_dynamic_rope_is_known() -> None:
    """A model whose angles depend on the length says up to where they do not."""

    class DynamicNTKScalingRoPE(nn.Module):
        pass

    scaling = {"type": "dynamic", "factor": 2.0}
    configs = nn.Module()
    configs.args = {"rope_scaling": scaling, "max_position_embeddings": 64}
    assert Namespace.of(configs).exact_until == "64"
    unknown = nn.Module()
    unknown.rope = DynamicNTKScalingRoPE()
    assert Namespace.of(unknown).exact_until == "0"
    assert Namespace.of(make()).exact_until == ""


def test_chunk_dependent_class_is_known() -> None:
    """Classes of which KV must not be cut are known without a config."""
    model = phi3small.Model.__new__(phi3small.Model)
    nn.Module.__init__(model)
    assert Namespace.of(model).exact_until == "0"


def pipelined() -> Any:
    model = make()
    model.model.pipeline_rank, model.model.pipeline_size = 1, 2
    model.model.start_idx, model.model.end_idx = 0, 1
    return model


def test_part_of_a_model_is_refused() -> None:
    """The parameters of one rank do not tell what the others compute."""
    with pytest.raises(ValueError, match="a part of a model"):
        Namespace.of(pipelined())


def test_rank_of_a_model() -> None:
    """A pipelined model says which part it is; a whole one is all of it."""
    assert Rank.of(pipelined()) == Rank(pipeline=(1, 2), layers=(0, 1))
    assert str(Rank.of(pipelined())) == "pipeline 1/2, layers 0:1"
    assert Rank.of(make()) == Rank()
    assert str(Rank()) == ""


def test_sharded_layer_of_one_is_whole() -> None:
    """Layers that are made to be sharded, on one machine, have all of it."""
    layer = nn.layers.distributed.AllToShardedLinear(4, 4)
    assert Rank.of(layer) == Rank()


@pytest.mark.parametrize("other", [None, "model", {}, object()])
def test_what_is_no_model_is_refused(other: Any) -> None:
    """A path or a dict is no module; nothing is made of its name."""
    with pytest.raises(TypeError, match="Module"):
        Namespace.of(other)
