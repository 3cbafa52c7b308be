"""Facts about whose KV the server says that of a loaded model is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fake_weights import safetensors_of
from mlx_lm import server

from promptstore import Namespace
from promptstore.serve.provider import Provider


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(safetensors_of(b"weights"))
    return path


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A provider for which mlx-lm's loads nothing, on one machine."""
    monkeypatch.setattr(
        server.ModelProvider,
        "_load",
        lambda self, *key: setattr(self, "model_key", key),
    )
    provider: Any = Provider.__new__(Provider)
    provider.is_distributed = provider.is_batchable = False
    return provider


def test_files_are_what_a_model_is(provider: Any, model: Path) -> None:
    """What is loaded from files has the namespace of their content."""
    provider._load(str(model), None, None)
    assert provider.is_identified
    assert provider.namespace == Namespace.from_model(model)


def test_a_rank_of_several_is_never_identified(
    provider: Any, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank's KV is not that of the whole model: it stays in memory, as host says."""
    provider.is_distributed = True
    with caplog.at_level(logging.WARNING):
        provider._load(str(model), None, None)
    assert not provider.is_identified
    assert provider.namespace.model.startswith("in memory")
    assert not caplog.records


def test_half_a_download_is_not_identified(
    provider: Any, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be identified is served from memory, and said to be."""
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/")
    provider._load(str(model), None, None)
    assert not provider.is_identified
    assert "cannot be identified" in caplog.text
