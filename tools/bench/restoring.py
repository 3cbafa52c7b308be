"""A big state: its restore against a raw read, and against mlx-lm's memory hit."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    LRUPromptCache,
    load_prompt_cache,
    save_prompt_cache,
)

from bench.common import (
    Laps,
    Options,
    Row,
    at_most,
    fact,
    new_root,
    random_arrays,
    random_cache,
    update,
)
from promptstore import Namespace, PromptStore

NAMESPACE = Namespace(model="bench")
N_HEADS, HEAD_DIM, N_TOKENS, N_SUFFIX = 8, 128, 4096, 1000
RESTORE_BAR, SUFFIX_BAR, VERIFY_BAR = 1.6, 1.1, 1.15


@dataclass
class Scene:
    """The reference state on disk, and all ways to get it back.

    32 layers x 8 heads x 128 dims in bfloat16, 4,096 tokens: 512 MiB in one
    snapshot, and in one file of ``save_prompt_cache``.
    """

    root: Path
    n_layers: int
    stack: ExitStack
    prompt: list[int] = field(default_factory=lambda: list(range(N_TOKENS)))
    live: list[Any] = field(default_factory=list)
    stores: dict[str, PromptStore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(4)
        self.live = random_cache(rng, self.n_layers, N_HEADS, N_TOKENS, HEAD_DIM)
        self.suffix = random_arrays(rng, N_HEADS, N_SUFFIX, HEAD_DIM, 2 * self.n_layers)
        self.request = list(range(N_TOKENS + N_SUFFIX))
        with PromptStore.open(self.root / "store") as store:
            store.insert(NAMESPACE, self.prompt, self.live)
        save_prompt_cache(str(self.saved), self.live)
        (self.snapshot,) = (self.root / "store").rglob("*.safetensors")
        self._touched = bytearray(self.snapshot.stat().st_size)
        for verify in ("off", "first-use", "always"):
            self.reopen(verify)

    @property
    def saved(self) -> Path:
        """The file of ``save_prompt_cache``."""
        return self.root / "saved.safetensors"

    def reopen(self, verify: Any) -> None:
        """Open the store anew, as a new process does: nothing is verified yet."""
        if (old := self.stores.pop(verify, None)) is not None:
            old.close()
        store = PromptStore.open(self.root / "store", memory_bytes=0, verify=verify)
        self.stores[verify] = self.stack.enter_context(store)

    def raw_read(self) -> None:
        """Read the bytes of the snapshot into memory that was touched before."""
        with open(self.snapshot, "rb", buffering=0) as file:
            n = file.readinto(self._touched)
        assert n == len(self._touched)

    def restore(self, verify: str) -> list[Any]:
        """Match the prompt and a suffix: from disk, with room for the suffix."""
        match = self.stores[verify].match(NAMESPACE, self.request)
        assert match.cache is not None
        assert (match.source, match.n_tokens) == ("disk", N_TOKENS)
        return match.cache

    def load(self) -> list[Any]:
        """Return what ``load_prompt_cache`` gives, evaluated."""
        cache: list[Any] = load_prompt_cache(str(self.saved))
        mx.eval([(layer.keys, layer.values) for layer in cache])
        return cache

    def with_suffix(self, cache: list[Any]) -> list[Any]:
        """Append the suffix to every layer, evaluated."""
        update(cache, self.suffix)
        return cache

    def check(self) -> None:
        """Compare a restored state with the live one, bit by bit."""
        for restored, live in zip(self.restore("off"), self.live, strict=True):
            for name in ("keys", "values"):
                a, b = (getattr(x, name)[..., :N_TOKENS, :] for x in (restored, live))
                assert mx.array_equal(a.view(mx.uint16), b.view(mx.uint16)).item()


@contextmanager
def _scene(options: Options) -> Iterator[Scene]:
    # On the CPU mlx keeps 32 MiB of freed buffers, on a GPU most of what it had.
    mx.set_cache_limit(4 << 30)
    with new_root(options) as root, ExitStack() as stack:
        yield Scene(root, 4 if options.quick else 32, stack)


def _return_memory() -> None:
    """Give free memory back to the system, so that the next use of it is fresh."""
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _variants(scene: Scene) -> dict[str, Callable[[], object]]:
    return {
        "off": lambda: scene.restore("off"),
        "first use": lambda: scene.restore("first-use"),
        "later use": lambda: scene.restore("first-use"),
        "always": lambda: scene.restore("always"),
    }


def restore_512mib(options: Options) -> list[Row]:
    """Compare the restore of 512 MiB with a raw read of the same bytes.

    `PromptStore.match` without a memory tier, of 4,096 tokens with a suffix of 1,000
    to come, page cache warm, for each way to verify; ``load_prompt_cache`` and an
    evaluation; and one ``readinto`` of the snapshot into touched memory. Recycled
    memory: mlx has buffers of the last lap left. Fresh: all was given back before.
    """
    n_laps = 3 if options.quick else 11
    with _scene(options) as scene:
        scene.check()
        variants = _variants(scene)
        variants["mlx_lm"] = scene.load
        variants["raw"] = scene.raw_read

        def before(name: str) -> None:
            if name == "first use":
                scene.reopen("first-use")

        recycled = Laps(variants, n_laps, before=before)
        some = {name: variants[name] for name in ("off", "mlx_lm", "raw")}
        fresh = Laps(some, n_laps // 2, before=lambda _: _return_memory())
    name = "restore_512MiB"

    def row(variant: str) -> Row:
        ratio, note = recycled.ratio(variant, "raw"), recycled.versus(variant, "raw")
        text = f"verify {variant}: {note}"
        return at_most(f"{name}.{variant.replace(' ', '_')}", ratio, RESTORE_BAR, text)

    return [
        *(row(variant) for variant in ("off", "later use", "first use", "always")),
        at_most(
            f"{name}.verifying",
            recycled.ratio("first use", "off"),
            VERIFY_BAR,
            f"first use to unverified: {recycled.versus('first use', 'off')}",
        ),
        fact(
            f"{name}.mlx_lm",
            recycled.ratio("mlx_lm", "raw"),
            f"load_prompt_cache + eval, no room: {recycled.versus('mlx_lm', 'raw')}",
        ),
        fact(
            f"{name}.off_fresh",
            fresh.ratio("off", "raw"),
            f"verify off, fresh memory: {fresh.versus('off', 'raw')}",
        ),
        fact(
            f"{name}.mlx_lm_fresh",
            fresh.ratio("mlx_lm", "raw"),
            f"load_prompt_cache + eval, fresh memory: {fresh.versus('mlx_lm', 'raw')}",
        ),
    ]


def restore_and_suffix(options: Options) -> list[Row]:
    """Compare a restore and a suffix with mlx-lm's memory hit and the same suffix.

    The restores of `restore_512mib`, then 1,000 random tokens appended to every layer
    and evaluated; against ``LRUPromptCache.fetch_nearest_cache`` (a deepcopy of the
    live cache, whose first update copies it all) with the same update; and
    ``load_prompt_cache`` with the same update. Recycled memory, page cache warm.
    """
    n_laps = 3 if options.quick else 11
    with _scene(options) as scene:
        lru = LRUPromptCache()
        lru.insert_cache("bench", scene.prompt, scene.live)

        def memory_hit() -> list[Any]:
            cache, rest = lru.fetch_nearest_cache("bench", scene.request)
            assert len(rest) == N_SUFFIX
            return list(cache)

        def then_suffix(get: Callable[[], Any]) -> Callable[[], object]:
            return lambda: scene.with_suffix(get())

        plain: dict[str, Callable[[], Any]] = _variants(scene)
        plain |= {"load": scene.load, "hit": memory_hit}
        variants = {name: then_suffix(get) for name, get in plain.items()}

        def before(name: str) -> None:
            if name == "first use":
                scene.reopen("first-use")

        laps = Laps(variants, n_laps, before=before)
    name = "restore_and_suffix"

    def row(variant: str) -> Row:
        text = f"verify {variant}: {laps.versus(variant, 'hit')}"
        figure = laps.ratio(variant, "hit")
        return at_most(f"{name}.{variant.replace(' ', '_')}", figure, SUFFIX_BAR, text)

    return [
        *(row(variant) for variant in ("off", "later use", "first use", "always")),
        fact(
            f"{name}.mlx_lm",
            laps.ratio("load", "hit"),
            f"load_prompt_cache + suffix: {laps.versus('load', 'hit')}",
        ),
    ]
