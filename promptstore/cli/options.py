"""Options that several commands share, and the store that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
import platformdirs

from promptstore.cli.errors import Failure

if TYPE_CHECKING:
    from promptstore import PromptStore

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}

store = click.option(
    "--store",
    "root",
    metavar="DIR",
    envvar="PROMPTSTORE_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path),
    default=lambda: platformdirs.user_cache_path("promptstore"),
    help="Directory of the store.  [default: the platform's cache directory]",
)
model = click.option(
    "--model",
    required=True,
    help="A model directory, or the id of a model on the Hugging Face hub.",
)
adapter_path = click.option(
    "--adapter-path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A LoRA adapter as mlx_lm.lora makes it.",
)
tenant = click.option(
    "--tenant",
    default="",
    help="Whose prompts these are. Tenants share nothing.",
)
disk_bytes = click.option(
    "--disk-bytes",
    metavar="SIZE",
    envvar="PROMPTSTORE_DISK_BYTES",
    show_envvar=True,
    default="50GiB",
    show_default=True,
    callback=lambda _, parameter, value: _size(parameter, value),
    help="Budget of everything in the store, for example 800MB or 50GiB.",
)
min_free_bytes = click.option(
    "--min-free-bytes",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    callback=lambda _, parameter, value: _size(parameter, value),
    help="What must remain free on the file system.",
)
daily_write_bytes = click.option(
    "--daily-write-bytes",
    metavar="SIZE",
    callback=lambda _, parameter, value: value and _size(parameter, value),
    help="Bytes that may be written on a day, by all processes together.",
)
rate = click.option(
    "--rate",
    metavar="SIZE",
    default="50MB",
    show_default=True,
    callback=lambda _, parameter, value: _positive(parameter, _size(parameter, value)),
    help="Read no more than this in a second.",
)
max_age = click.option(
    "--max-age",
    metavar="TIME",
    default="7d",
    show_default=True,
    callback=lambda _, parameter, value: _duration_s(parameter, value),
    help="Spare what was verified so recently: 90s, 15min, 12h, 7d; 0 for nothing.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def open_existing(root: Path, *, read_only: bool = True) -> PromptStore | None:
    """Return the store at *root*, or None if there is none; none is made.

    Raises:
        Failure: *root* is not a directory.
        StoreUnavailable: What is there cannot be used.
    """
    from promptstore import PromptStore

    if root.exists() and not root.is_dir():
        raise Failure(f"{root}: is a file, not a directory")
    if not (root / "index.db").exists():
        return None
    return PromptStore.open(root, memory_bytes=0, read_only=read_only)


def _positive(parameter: click.Parameter, size: int) -> int:
    if not size:
        raise click.BadParameter("must be more than nothing", param=parameter)
    return size


def _duration_s(parameter: click.Parameter, text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d)?\s*", text.lower())
    if found is None or (found[2] is None and float(found[1])):
        raise click.BadParameter(f"{text!r} is no time", param=parameter)
    return float(found[1]) * _SECONDS[found[2] or "s"]


def _size(parameter: click.Parameter, text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None:
        raise click.BadParameter(f"{text!r} is no size", param=parameter)
    number, unit, binary = found.groups()
    power = " kmgt".index(unit or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)
