"""What a model is: the content of the files that mlx-lm computes its KV from.

Names, paths, the tokenizer, the chat template and ``generation_config.json`` are
not looked at: none of them changes the KV of given tokens. Not seen either: a
``model_config`` that a program passes to ``mlx_lm.load``.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from promptstore.errors import ModelUnreadable
from promptstore.filehash import Progress, sha256_of_all
from promptstore.positions import exact_until
from promptstore.reading import read_object
from promptstore.weights import n_layers, require_fit, tensors_of, weight_files

# Where mlx_lm.lora found things and put them, and under which name.
_PLACES = {"model", "adapter_path", "resume_adapter_file", "data", "config"}
_PLACES |= {"project_name", "report_to"}
# What of a hub repository is read here; a snapshot may lack all else.
_FILES = ["*.json", "model*.safetensors", "*.py"]
_ADAPTER = "adapters.safetensors"


@dataclass(frozen=True)
class ModelIdentity:
    """A model by content; equal on every machine and under every path.

    Args:
        weights: Digest over the content of the weight files.
        config: Digest over all else that mlx-lm builds the model from.
        exact_until: Tokens up to which its KV may be cut; ``None`` for all.
    """

    weights: str
    config: str
    exact_until: int | None = None


def directory_of(name: str | Path, revision: str | None = None) -> Path:
    """Return where a model lies that ``mlx_lm.load`` was, or would be, given.

    Args:
        name: A directory, or the hub's id of a model that was downloaded.
        revision: Branch, tag or commit of the latter. A directory has none.

    Raises:
        ModelUnreadable: Neither a directory nor wholly in the hub's cache. Nothing is
            downloaded.

    Source: mlx-lm 0.32.2 ``utils._download``.
    """
    if (path := Path(name)).exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(name),
                revision=revision,
                allow_patterns=_FILES,
                local_files_only=True,
            )
        )
    except (OSError, ValueError) as error:  # what huggingface_hub raises are these
        where = f"revision {revision}" if revision else "no directory"
        reason = f"{where}, nor is it whole in the hub's cache"
        raise ModelUnreadable(path, reason) from error


def of_model(path: Path, progress: Progress | None = None) -> ModelIdentity:
    """Return what the model in a directory is, reading each weight file once.

    Args:
        path: A model directory as ``mlx_lm.load`` takes it; a hub snapshot too.
        progress: Told how many bytes of how many were read, on this thread; not called
            if nothing must be read.

    Returns:
        Its identity. How the weights are split into files is part of it.

    Raises:
        ModelUnreadable: *path* has no weight files; or a file is missing, empty,
            damaged or downloaded by half, or changed meanwhile.

    Source: mlx-lm 0.32.2 ``utils.load_model`` and ``utils.load_config``.
    """
    weights = weight_files(path)
    config = read_object(path / "config.json")
    parts = {}
    if os.path.lexists(quantization := path / "hf_quant_config.json"):
        parts[quantization.name] = quantization
    if (code := config.get("model_file")) is not None:
        parts["model_file"] = path / str(code)
    digests = sha256_of_all(
        [*weights, *parts.values()],
        progress=progress,
        check=lambda file: tensors_of(file) if file in weights else None,
    )
    return ModelIdentity(
        weights=_digest(sorted(digests[file] for file in weights)),
        config=_digest([config, {part: digests[file] for part, file in parts.items()}]),
        exact_until=exact_until(config),
    )


def of_adapter(path: Path, progress: Progress | None = None) -> str:
    """Return what the adapter in a directory is: weights, rank, scale and layers.

    Args:
        path: A directory with ``adapters.safetensors`` and ``adapter_config.json``.
        progress: As for `of_model`.

    Returns:
        64 hexadecimal digits.

    Raises:
        ModelUnreadable: One of the two files is missing or cannot be read.

    Source: mlx-lm 0.32.2 ``tuner.utils.load_adapters``.
    """
    config = read_object(path / "adapter_config.json")
    settings = {key: config[key] for key in config.keys() - _PLACES}
    file = path / _ADAPTER
    sha = sha256_of_all([file], progress=progress, check=tensors_of)[file]
    return _digest([settings, sha])


def require_base(adapter: Path, base: Path, *versions: str) -> None:
    """Refuse an adapter of which the files show that it is for another model.

    Args:
        adapter: The adapter's directory.
        base: The model's directory.
        versions: What the two are: of those that fitted, nothing is read again.

    Raises:
        ModelUnreadable: It does not fit.
    """
    count = n_layers(read_object(base / "config.json"))
    files = tuple(weight_files(base))
    require_fit(adapter / _ADAPTER, files, count, _digest(versions))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
