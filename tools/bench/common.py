"""What the measures share: rows, clocks, medians, states and processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What every measure is given.

    Args:
        model: A model directory.
        dir: Where to put stores; they are removed again.
        quick: Small sizes, to see that it runs; the figures say nothing.
    """

    model: Path
    dir: Path
    quick: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: The measure, a dot, and the variant if there are several.
        figure: What came out; ``None`` if nothing did.
        bar: What it is held against, as text; empty for a figure without one.
        ok: Whether it meets its bar; ``None`` without one.
        unit: Of the figure; ``x`` is a ratio.
        note: What was compared, and the figures behind it.
    """

    name: str
    figure: float | None
    bar: str
    ok: bool | None
    unit: str = "x"
    note: str = ""


def at_most(name: str, figure: float, bar: float, note: str, unit: str = "x") -> Row:
    """Return a row whose figure must not be above its bar."""
    return Row(name, figure, f"<= {bar:g}", figure <= bar, unit, note)


def at_least(name: str, figure: float, bar: float, note: str, unit: str = "x") -> Row:
    """Return a row whose figure must not be below its bar."""
    return Row(name, figure, f">= {bar:g}", figure >= bar, unit, note)


def fact(name: str, figure: float, note: str, unit: str = "x") -> Row:
    """Return a row that is only reported."""
    return Row(name, figure, "", None, unit, note)


def text_of(figure: float) -> str:
    """Return a figure to three digits, or whole."""
    return f"{figure:,.3g}" if abs(figure) < 1000 else f"{figure:,.0f}"


class Laps:
    """Times of variants that ran in turn in one process.

    Args:
        variants: What to time, by name. A variant may return arrays that it wants
            dropped before the next one starts.
        before: Called before each, not timed.
    """

    def __init__(
        self,
        variants: dict[str, Callable[[], object]],
        n_laps: int,
        *,
        n_warm: int = 1,
        before: Callable[[str], object] | None = None,
    ) -> None:
        self._times: dict[str, list[float]] = {name: [] for name in variants}
        gc.collect()
        gc.freeze()  # what was set up is not to be walked through again and again
        for lap in range(-n_warm, n_laps):
            for name, run in variants.items():
                if before is not None:
                    before(name)
                start = time.perf_counter()
                result = run()
                elapsed = time.perf_counter() - start
                del result
                if lap >= 0:
                    self._times[name].append(elapsed)

    def median_ms(self, name: str) -> float:
        """Return the median time of a variant."""
        return 1e3 * statistics.median(self._times[name])

    def ratio(self, name: str, base: str) -> float:
        """Return the median over the laps of one variant's time to another's."""
        pairs = zip(self._times[name], self._times[base], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def versus(self, name: str, base: str) -> str:
        """Return the two medians as text."""
        ours, theirs = text_of(self.median_ms(name)), text_of(self.median_ms(base))
        return f"{ours} ms / {base} {theirs} ms"


@contextmanager
def new_root(options: Options) -> Iterator[Path]:
    """Yield a directory for a store; it is removed in the end."""
    root = Path(tempfile.mkdtemp(prefix="promptstore-bench-", dir=options.dir))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def in_new_process(run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function of a module returns in a new process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(run, *args, **kwargs).result()


def random_arrays(
    rng: np.random.Generator, n_heads: int, n_tokens: int, head_dim: int, n: int
) -> list[mx.array]:
    """Return *n* evaluated bfloat16 arrays of random bits, shaped as keys are."""
    shape = (1, n_heads, n_tokens, head_dim)
    arrays = [
        mx.array(rng.integers(0, 1 << 16, shape, np.uint16)).view(mx.bfloat16)
        for _ in range(n)
    ]
    mx.eval(arrays)
    return arrays


def random_cache(
    rng: np.random.Generator, n_layers: int, n_heads: int, n_tokens: int, head_dim: int
) -> list[Any]:
    """Return a live cache of ``KVCache`` layers, filled as a prefill fills it."""
    from mlx_lm.models.cache import KVCache

    cache: list[Any] = [KVCache() for _ in range(n_layers)]
    for layer in cache:
        update([layer], random_arrays(rng, n_heads, n_tokens, head_dim, 2))
    return cache


def update(cache: Sequence[Any], rows: Sequence[mx.array]) -> None:
    """Append *rows*, keys and values of each layer in turn, and evaluate the cache."""
    for layer, keys, values in zip(cache, rows[::2], rows[1::2], strict=True):
        layer.update_and_fetch(keys, values)
    mx.eval([(layer.keys, layer.values) for layer in cache])


def state_nbytes(cache: Sequence[Any]) -> int:
    """Return the bytes of the tokens that ``KVCache`` layers hold, without padding."""
    return sum(
        layer.offset * array.shape[1] * array.shape[3] * array.itemsize
        for layer in cache
        for array in (layer.keys, layer.values)
    )


def reset_peak() -> None:
    """Start to measure the peak of this process's memory anew."""
    mx.reset_peak_memory()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_growth(run: Callable[[], object]) -> int:
    """Return by how many bytes the process peaks above where it stood.

    The larger of what mlx counts (its buffers) and, on Linux, what the system counts
    (everything, once it is touched).
    """
    gc.collect()
    mx.clear_cache()  # so that new buffers are new memory to the system as well
    reset_peak()
    active, resident = mx.get_active_memory(), _resident("VmRSS")
    run()
    growth = max(mx.get_peak_memory() - active, _resident("VmHWM") - resident)
    return max(0, growth)


def _resident(field: str) -> int:
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])
