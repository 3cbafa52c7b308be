"""Find and load the model that a command names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promptstore.cli.errors import Failure, describe

if TYPE_CHECKING:
    from promptstore import Namespace
    from promptstore.cli.bar import Bar

_HUB_ID_PARTS = 2


def resolve(name: str) -> Path:
    """Return the directory of a model, downloading it if it is only on the hub.

    A model that the hub's cache has is used as it is, without asking the hub.

    Args:
        name: A directory, or an id like ``org/name``.

    Raises:
        Failure: There is no such model.

    Source: mlx-lm 0.32.2 ``utils._download``.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise Failure(f"{path}: a model is a directory, not a file")
    if name.startswith((".", "/", "~")) or name.count("/") >= _HUB_ID_PARTS:
        raise Failure(f"{path}: no such model directory")
    from mlx_lm import utils

    hub: Any = utils  # neither function is typed
    with contextlib.suppress(OSError, ValueError):  # not there, or not whole
        return Path(hub.hf_repo_to_path(name))
    try:
        return Path(hub._download(name))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise Failure(
            f"{name}: neither a model directory nor to be had from the hub: {reason}"
        ) from error


def identify(
    path: Path, adapter_path: Path | None, bar: Bar, tenant: str = ""
) -> Namespace:
    """Return the namespace of a model, with a bar where its files must be read.

    Args:
        path: Its directory.
        adapter_path: Its adapter's, if it has one.
        bar: Shows how far it is.
        tenant: Whose prompts they are.

    Raises:
        ModelUnreadable: A file is missing, damaged or downloaded by half.
    """
    from promptstore import Namespace

    bar.phase("identifying the model (MiB)")
    return Namespace.from_model(
        path,
        adapter_path,
        tenant=tenant,
        progress=lambda done, total: bar.update(done >> 20, total >> 20),
    )


def load_tokenizer(path: Path) -> Any:
    """Return a model's tokenizer; its weights are not read.

    Args:
        path: Its directory.

    Raises:
        Failure: mlx-lm cannot load it.
    """
    from mlx_lm import utils

    loader: Any = utils.load_tokenizer  # it is not typed
    try:
        return loader(str(path))
    except Exception as error:  # a damaged directory raises whatever it trips over
        raise Failure(f"{path}: no tokenizer: {describe(error)}") from error


def load(path: Path, adapter_path: Path | None, *, lazy: bool = False) -> Any:
    """Return a model and its tokenizer.

    Args:
        path: Its directory.
        adapter_path: Its adapter's, if it has one.
        lazy: Read the weights when they are needed.

    Raises:
        Failure: mlx-lm cannot load it.
    """
    import mlx_lm

    adapter = str(adapter_path) if adapter_path else None
    try:
        model, tokenizer, *_ = mlx_lm.load(str(path), adapter_path=adapter, lazy=lazy)
    except Exception as error:  # a damaged directory raises whatever it trips over
        raise Failure(f"{path}: cannot be loaded: {describe(error)}") from error
    return model, tokenizer
