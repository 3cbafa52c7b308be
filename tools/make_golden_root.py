"""Make the golden root of a format: a small store of every kind of layer.

Run once, with the code that first writes a format, and committed under
``tests/data/roots``; every later version must open it (tests/test_golden.py).

    python tools/make_golden_root.py tests/data/roots/<last migration>
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import builders
import mlx.core as mx
from mlx_lm.models.cache import CacheList

from promptstore import Namespace, PromptStore

_TURNS = (70, 300, 330)


def main() -> None:
    """Make the root that the command line names, and its manifest beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    root = parser.parse_args().root
    with PromptStore.open(root / "store", memory_bytes=0) as store:
        entries = [
            entry
            for number, (name, make) in enumerate(_makers().items())
            for entry in _store_turns(store, name, number, make)
        ]
    (root / "store" / "store.lock").unlink()
    text = json.dumps(entries, indent=1)
    (root / "manifest.json").write_text(text + "\n", encoding="utf-8")


def _makers() -> dict[str, Any]:
    """Return, by the name of a namespace, what makes a cache of so many tokens."""
    small: Any = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 4}
    return {
        "full": lambda n: builders.kv(n, **small),
        "bfloat16": lambda n: builders.kv(n, dtype=mx.bfloat16, **small),
        "quantized": lambda n: builders.quantized(n, n_layers=1, n_kv_heads=1),
        "window": lambda n: builders.rotating(n, **small),
        "chunked": lambda n: builders.chunked(n, **small),
        "state": lambda n: builders.arrays_cache(n, n_layers=1),
        "hybrid": lambda n: [
            CacheList(*builders.kv(n, **small), *builders.arrays_cache(n, n_layers=1))
        ],
    }


def _store_turns(
    store: PromptStore, name: str, number: int, make: Any
) -> list[dict[str, Any]]:
    namespace = Namespace(name, tenant="alice" if number % 2 else "")
    ids = builders.tokens(_TURNS[-1], seed=number)
    entries = []
    for end in _TURNS:
        label = f"{name}-{end}" if end == _TURNS[0] else None
        store.insert(namespace, ids[:end], make(end), label=label, pin=bool(label))
        store.flush()
        cache = store.match(namespace, [*ids[:end], 1]).cache
        assert cache is not None
        entries.append(
            {
                "model": name,
                "tenant": namespace.tenant,
                "seed": number,
                "n_tokens": end,
                "label": label,
                "arrays": builders.fingerprints(cache, end),
            }
        )
    return entries


if __name__ == "__main__":
    main()
