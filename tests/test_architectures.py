"""Every architecture of the installed mlx-lm, at a tiny size, through a restart."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest

from promptstore import Namespace
from promptstore.doctor import Diagnosis, examine
from promptstore.positions import exact_until

CONFIGS = json.loads((Path(__file__).parent / "data/arch_configs.json").read_text())
WINDOW = 32
N_TOKENS = 84
CANNOT_RUN = {
    "muse_spark": "a Metal-only kernel",
    "olmo": "imports a package that is not mlx-lm's, and ends the process without",
}
"""Those that mlx-lm itself cannot run on a CPU, and why."""


def installed() -> list[str]:
    """Return the architectures of the installed mlx-lm, by what their modules hold."""
    found = []
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0], f"{info.name}.py")
        text = source.read_text() if source.exists() else ""
        if "class Model(" in text and "class ModelArgs(" in text:
            found.append(info.name)
    return found


def variants() -> list[str]:
    """Return all configurations: those with data, and new ones on the base's."""
    return sorted({*CONFIGS["override"], *installed()} - CONFIGS["notes"].keys())


def config_of(name: str) -> dict[str, Any]:
    """Return a tiny configuration, with windows of 32 tokens."""
    override = CONFIGS["override"].get(name, {})
    module = name
    if isinstance(override, list):
        module, override = override
    return _small({**CONFIGS["base"], "model_type": module, **override})


def _small(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _small(v, k) for k, v in value.items()}
    is_window = "window" in key or "chunk" in key
    return WINDOW if is_window and value == 128 else value


def build(config: dict[str, Any]) -> Any:
    """Return a random model of a configuration."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def _plain_bitlinear(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitnet's product of ternary weights, without its Metal kernel."""
    from mlx_lm.models.bitlinear_layers import BitLinear

    def product(self: Any, x: mx.array, packed: mx.array) -> mx.array:
        rows = [((packed >> shift) & 3).astype(x.dtype) - 1 for shift in (0, 2, 4, 6)]
        return x @ mx.concatenate(rows).T * self.weight_scale

    if not mx.metal.is_available():
        monkeypatch.setattr(BitLinear, "execute_matmul_kernel", product)


def diagnose(name: str, tmp_path: Path) -> Diagnosis:
    """Run the doctor on a tiny model."""
    config = config_of(name)
    limit = exact_until(config)
    namespace = Namespace(name, exact_until="" if limit is None else str(limit))
    vocabulary = min(int(config.get("vocab_size", 256)), 256)
    tokens = np.random.default_rng(11).integers(1, vocabulary, N_TOKENS)
    return examine(build(config), namespace, tokens.tolist(), tmp_path)


@pytest.mark.parametrize("name", variants())
def test_architecture_is_restored_exactly(name: str, tmp_path: Path) -> None:
    """A restart changes no logits: bit for bit at a snapshot's end, within the model's
    own noise elsewhere."""
    if name in CANNOT_RUN:
        with pytest.raises((Exception, SystemExit), match=r"."):
            diagnose(name, tmp_path)
        return
    found = diagnose(name, tmp_path)

    assert [trial for trial in found.trials if not trial.is_right] == []
    assert "unknown" not in {layer.kind for layer in found.layers}


def test_all_but_what_mlx_lm_cannot_run_are_tried() -> None:
    """128 of the 131 configurations of mlx-lm 0.32.2 run on a CPU: not those above,
    nor one whose weights must be packed for it."""
    assert len(set(variants()) - set(CANNOT_RUN)) >= 128
    assert "deepseek_v41" in variants()
