"""Weight files: which a model directory has, whether they are whole, and their shapes.

A download that stopped half way must not be taken for a model.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptstore.errors import ModelUnreadable
from promptstore.reading import read_object, reading

_INDEX = "model.safetensors.index.json"
_PATTERN = "model*.safetensors"
_LFS_POINTER = b"version "
_N_LENGTH = 8
_SHARD = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Tensor:
    """What a safetensors header says of one tensor.

    Args:
        dtype: Its name, as ``"BF16"``.
        shape: Its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]


def weight_files(path: Path) -> list[Path]:
    """Return the files that ``mlx_lm.load`` takes the weights of a directory from.

    Args:
        path: A model directory.

    Raises:
        ModelUnreadable: There are none; or a shard is missing, or downloaded by half,
            or mlx-lm would load one that the index does not name.

    Source: mlx-lm 0.32.2 ``utils.load_model``.
    """
    with reading(path):
        names = sorted(os.listdir(path))
    for name in fnmatch.filter(names, f"{_PATTERN}*.incomplete"):
        raise ModelUnreadable(path / name, "half a download")
    found = fnmatch.filter(names, _PATTERN)
    if not found:
        raise _without_weights(path)
    if _INDEX in names:
        _require_named(path / _INDEX, found)
    _require_counted(path, found)
    return [path / name for name in found]


def _without_weights(path: Path) -> ModelUnreadable:
    # Where huggingface_hub keeps what it has of a file of a local_dir.
    downloads = path / ".cache" / "huggingface" / "download"
    for half in sorted(downloads.glob("*.incomplete")):
        return ModelUnreadable(half, "half a download")
    return ModelUnreadable(path, f"no {_PATTERN} in it")


def _require_named(index: Path, found: Iterable[str]) -> None:
    """Refuse files that an index names and are not there, and the reverse."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelUnreadable(index, "weight_map is not an object")
    named = {str(name) for name in shards.values()}
    for name in sorted(named):
        if not os.path.isfile(file := index.parent / name):
            raise ModelUnreadable(file, f"missing, but {index.name} names it")
    for name in found:
        if name not in named:
            reason = f"{index.name} does not name it, but mlx-lm loads it"
            raise ModelUnreadable(index.parent / name, reason)


def _require_counted(path: Path, found: Iterable[str]) -> None:
    """Refuse files that the names of the others count and are not there."""
    for shard in filter(None, map(_SHARD.fullmatch, found)):
        start, number, of, count, end = shard.groups()
        for index in range(1, min(int(count), 10 ** len(number))):
            name = f"{start}{index:0{len(number)}}{of}{count}{end}"
            if not os.path.exists(path / name):
                raise ModelUnreadable(path / name, f"missing, but there is {shard[0]}")


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return what is in a safetensors file, by its header.

    Args:
        path: The file; of its data only the size is looked at.

    Raises:
        ModelUnreadable: It is cut short, or no safetensors; a Git LFS pointer is one
            of the latter.
    """
    with reading(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(_N_LENGTH)
        if length == _LFS_POINTER:
            raise ModelUnreadable(path, "a Git LFS pointer: git lfs pull fetches it")
        start = _N_LENGTH + int.from_bytes(length, "little")
        if len(length) < _N_LENGTH or start > size:
            raise ModelUnreadable(path, "cut short, or not safetensors")
        header = json.loads(file.read(start - _N_LENGTH))
    try:
        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(entry["dtype"], tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelUnreadable(path, "its header is no safetensors header") from error
    if (whole := start + max(ends, default=0)) > size:
        raise ModelUnreadable(path, f"cut short: {size} of {whole} bytes")
    return tensors


# Adapters


@functools.lru_cache(16)
def require_fit(
    adapter: Path, base: tuple[Path, ...], n_layers: int, version: str
) -> None:
    """Refuse an adapter that was trained on another model, as far as files tell.

    Looked at are the numbers of its layers, and its shapes where the model has weights
    of the same name; a model class may rename others, and mlx-lm tells when it loads.

    Args:
        adapter: Its weights.
        base: The model's weight files.
        n_layers: How many layers the model has; 0 if nobody knows.
        version: What all of these are, since what fitted is remembered.

    Raises:
        ModelUnreadable: It does not fit; or a header cannot be read.

    Source: mlx-lm 0.32.2 ``tuner.utils.load_adapters`` and ``tuner.lora``.
    """
    known = dict(itertools.chain(*(tensors_of(file).items() for file in base)))
    tensors = tensors_of(adapter)
    for name, tensor in tensors.items():
        layer = _LAYER.search(name)
        if layer and n_layers and int(layer[1]) >= n_layers:
            reason = f"for another model: {name}, but this one has {n_layers} layers"
            raise ModelUnreadable(adapter, reason)
        stem, _, leaf = name.rpartition(".")
        if leaf == "lora_a" and f"{stem}.lora_b" in tensors:
            weight = f"{stem}.weight"
            fits = _low_rank_fits(tensor, tensors[f"{stem}.lora_b"], known, stem)
        else:
            weight = name
            fits = _whole_fits(tensor, known.get(name))
        if not fits:
            reason = f"for another model: {name} has the shape {tensor.shape}, "
            reason += f"but this one's {weight} has {known[weight].shape}"
            raise ModelUnreadable(adapter, reason)


def _low_rank_fits(
    a: Tensor, b: Tensor, known: Mapping[str, Tensor], stem: str
) -> bool:
    """Whether two factors can belong to a linear layer or an embedding."""
    weight, scales = known.get(f"{stem}.weight"), known.get(f"{stem}.scales")
    if weight is None or {len(a.shape), len(b.shape), len(weight.shape)} != {2}:
        return True  # renamed, or of experts: unknown
    n_in, n_out = a.shape[0], b.shape[1]
    if scales is None:
        n_rows, n_columns = weight.shape
        if weight.dtype not in _FLOATS:  # packed by somebody else
            return True
        return (n_rows, n_columns) in ((n_out, n_in), (n_in, n_out))
    n_rows, n_groups = scales.shape
    return (n_rows == n_out and n_in % n_groups == 0) or (
        n_rows == n_in and n_out % n_groups == 0
    )


def _whole_fits(tensor: Tensor, weight: Tensor | None) -> bool:
    """Whether a tensor can stand for a weight of the same name, if there is one."""
    if weight is None or not {tensor.dtype, weight.dtype} <= _FLOATS:
        return True
    return sorted(tensor.shape) == sorted(weight.shape)


def n_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers a ``config.json`` tells of, 0 if it does not."""
    nested = (n_layers(each) for each in config.values() if isinstance(each, Mapping))
    own = config.get("num_hidden_layers")
    return max([own if isinstance(own, int) else 0, *nested])
