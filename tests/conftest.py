"""Fixtures that all tests share."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from promptstore import PromptStore


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every default place for caches is under tmp_path, in child processes too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PROMPTSTORE_DIR", raising=False)
    return tmp_path / "home"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PromptStore]:
    """An open store; whatever a test does to it, it is whole on disk afterwards."""
    store = PromptStore.open(tmp_path / "store")
    try:
        yield store
        store.flush()
        assert store.check() == []
    finally:
        store.close()


@pytest.fixture(scope="session")
def zygote() -> ForkServerContext:
    """Forks processes off one that has imported all and evaluated nothing.

    What such a process calls must stand in a module of the preloaded ones, or be
    imported anew by each.
    """
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        context.set_forkserver_preload(["test_crash", "test_processes"])
        forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The directory of the real model that `make test` makes."""
    path = os.environ.get("PROMPTSTORE_TEST_MODEL")
    if not path or not (Path(path) / "config.json").is_file():
        pytest.skip("PROMPTSTORE_TEST_MODEL names no model; `make test` makes one")
    return Path(path)


@pytest.fixture(scope="session")
def real_model(model_path: Path) -> tuple[Any, Any]:
    """The real model and its tokenizer, loaded once."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(model_path))
    return model, tokenizer
