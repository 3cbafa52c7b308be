"""``promptstore doctor``: does the store serve this model rightly?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from promptstore.cli import models, options
from promptstore.cli.bar import Bar
from promptstore.cli.errors import Failure

if TYPE_CHECKING:
    from promptstore.doctor import Diagnosis

_SEED = 0


@click.command()
@options.model
@options.adapter_path
@click.option(
    "--tokens",
    "n_tokens",
    default=320,
    show_default=True,
    type=click.IntRange(min=24),
    help="Length of the prompt to try; more than a window shows that it wraps.",
)
@options.as_json
def doctor(model: str, adapter_path: Path | None, n_tokens: int, as_json: bool) -> None:
    """Try the store on a model: what it keeps of each kind of layer, what that
    costs, and whether restored caches give the logits that cold ones give.

    Uses a store of its own in a temporary directory. Exits 1 if anything is wrong.
    """
    path = models.resolve(model)
    with Bar() as bar, tempfile.TemporaryDirectory() as scratch:
        namespace = models.identify(path, adapter_path, bar)
        bar.phase("loading the model")
        llm, tokenizer = models.load(path, adapter_path)
        bar.phase("storing and restoring")
        from promptstore.doctor import examine

        tokens = _tokens(len(tokenizer), n_tokens)
        found = examine(llm, namespace, tokens, Path(scratch), bar.update)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"is_right": found.is_right}))
    else:
        _print(found)
    if not found.is_right:
        raise Failure("restored caches give other logits; do not store this model")


def _tokens(vocabulary: int, n_tokens: int) -> list[int]:
    import numpy as np

    rng = np.random.default_rng(_SEED)
    tokens: list[int] = rng.integers(0, vocabulary, n_tokens).tolist()
    return tokens


def _print(found: Diagnosis) -> None:
    console = Console()
    layers = Table(title="Layers")
    for column in ("class", "layers", "kind"):
        layers.add_column(column)
    for column in ("bytes a token", "bytes a checkpoint"):
        layers.add_column(column, justify="right")
    layers.add_column("resumable")
    for layer in found.layers:
        costs = f"{layer.token_bytes:,}", f"{layer.checkpoint_bytes:,}"
        layers.add_row(
            layer.name, str(layer.n_layers), layer.kind, *costs, layer.resumable
        )
    console.print(layers)
    trials = Table(title="After a restart")
    for column in ("tokens shared", "reused", "largest difference", "tolerance", ""):
        trials.add_column(column, justify="right")
    for trial in found.trials:
        trials.add_row(
            str(trial.position),
            str(trial.n_tokens),
            f"{trial.max_diff:.2g}",
            f"{trial.tolerance:.2g}",
            "right" if trial.is_right else "WRONG",
        )
    console.print(trials)


COMMANDS: Sequence[click.Command] = (doctor,)
