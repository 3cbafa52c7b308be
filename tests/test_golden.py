"""Every format that was ever released opens, and gives what was stored in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import fingerprints, tokens
from test_migrations import RELEASED

from promptstore import Namespace, PromptStore

ROOTS = Path(__file__).parent / "data" / "roots"


@pytest.fixture(params=RELEASED)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A copy of the root of one format, and what was stored in it."""
    source = ROOTS / request.param
    if not source.exists():
        pytest.skip("no snapshot format came with this migration")
    shutil.copytree(source / "store", tmp_path / "store")
    return tmp_path / "store", json.loads((source / "manifest.json").read_text())


def test_every_entry_is_served_as_it_was(golden: tuple[Path, Any]) -> None:
    """Restored arrays are those that the old version stored, bit for bit."""
    root, entries = golden
    with PromptStore.open(root, memory_bytes=0) as store:
        for entry in entries:
            namespace = Namespace(entry["model"], tenant=entry["tenant"])
            n_tokens = entry["n_tokens"]
            match = store.match(namespace, [*tokens(n_tokens, entry["seed"]), 1])

            assert (match.source, match.n_tokens) == ("disk", n_tokens)
            assert match.cache is not None
            assert fingerprints(match.cache, n_tokens) == entry["arrays"]
        labels = {info.label for info in store.snapshots() if info.pinned}
        assert labels == {entry["label"] for entry in entries} - {None}
        assert store.check() == []


def test_an_old_root_is_gone_on_with(golden: tuple[Path, Any]) -> None:
    """New prompts continue old ones, and the whole is sound."""
    root, entries = golden
    entry = max(entries, key=lambda e: (e["model"] == "full", e["n_tokens"]))
    namespace = Namespace(entry["model"], tenant=entry["tenant"])
    n_tokens = entry["n_tokens"]
    ids = [*tokens(n_tokens, entry["seed"]), *range(50)]
    with PromptStore.open(root, memory_bytes=0) as store:
        cache = store.match(namespace, ids).cache
        assert cache is not None
        n_before = store.stats().n_snapshots
        for layer in cache:
            layer.update_and_fetch(layer.keys[:, :, :50], layer.values[:, :, :50])
        store.insert(namespace, ids, cache)
        store.flush()

        assert store.stats().n_snapshots == n_before + 1
        assert store.match(namespace, [*ids, 1]).n_tokens == len(ids)
        assert store.check() == []
