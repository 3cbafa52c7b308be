"""What a model in memory is: its classes, their settings and every array's bytes.

For models without files: fused, merged, generated, or loaded with a ``model_config``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from promptstore.identity import ModelIdentity
from promptstore.positions import exact_until

_N_THREADS = 4
_PIECE_BYTES = 32 << 20
# Whether it trains, and what of it: its KV is the same.
_STATES = {"_training", "_no_grad"}
_DYNAMIC = "DynamicNTKScalingRoPE"

Place = tuple[str | int, ...]
Facts = list[tuple[Place, list[Any]]]


def of_object(model: Module) -> ModelIdentity:
    """Return what a model in memory is now.

    Looked at are the class of every module, its attributes that are plain values
    (config arguments, the scale of an adapter, bits of a quantisation) and its arrays,
    private ones too: names, shapes, dtypes and bytes. What is lazy is evaluated on this
    thread. Needs 32 MiB beside the model.

    Args:
        model: Any module; mlx-lm's models among them.

    Returns:
        Its identity, equal in every process, and another than any of files.

    Raises:
        TypeError: *model* is not a module.
        ValueError: It is one rank's part of a model: what the others have decides over
            its KV as well.
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be an mlx Module, not {type(model).__name__}")
    if part_of(model):
        raise ValueError("a part of a model does not tell what the whole is")
    facts: Facts = []
    arrays = dict(_arrays(model, facts))
    return ModelIdentity(
        weights=f"parameters {_digest(sorted(_hashes(arrays), key=json.dumps))}",
        config=_digest(sorted(facts, key=json.dumps)),
        exact_until=_exact_until(model),
    )


def part_of(model: Module) -> dict[str, tuple[int, int]]:
    """Return which part of a whole a model is that was sharded or pipelined.

    Args:
        model: A model as ``mlx_lm.utils.sharded_load`` returns it.

    Returns:
        ``tensor`` and ``pipeline``: index and size; ``layers``: the first, and one past
        the last. What it is not a part by is left out.

    Source: mlx-lm 0.32.2 ``models.pipeline`` and mlx 0.32.4 ``nn.layers.distributed``.
    """
    part: dict[str, tuple[int, int]] = {}
    for module in _modules(model):
        if getattr(module, "pipeline_size", 1) > 1:
            part["pipeline"] = module.pipeline_rank, module.pipeline_size
            part["layers"] = module.start_idx, module.end_idx
        for value in module.__dict__.values():
            if isinstance(value, mx.distributed.Group) and value.size() > 1:
                part["tensor"] = value.rank(), value.size()
    return part


def _arrays(
    value: Any, facts: Facts, place: Place = (), inside: tuple[int, ...] = ()
) -> Iterator[tuple[Place, mx.array]]:
    """Yield the arrays in an object with their places; append all else to *facts*."""
    if isinstance(value, mx.array):
        yield place, value
        return
    fact, parts = _taken_apart(value)
    facts.append((place, fact))
    if id(value) in inside:  # it contains itself
        return
    for key, part in parts:
        yield from _arrays(part, facts, (*place, key), (*inside, id(value)))


def _taken_apart(value: Any) -> tuple[list[Any], Iterable[tuple[str | int, Any]]]:
    """Return what an object is by itself, and its parts."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return [kind, repr(value)], ()
    if isinstance(value, enum.Enum):
        return [kind, value.name], ()
    if isinstance(value, mx.Dtype):
        return [kind, str(value)], ()
    if isinstance(value, Module):
        return [kind], [*_attributes(value.__dict__), *value.items()]
    if isinstance(value, Mapping):
        return [kind], [(repr(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [kind, len(value)], list(enumerate(value))
    if isinstance(value, set | frozenset):
        return [kind, sorted(map(repr, value))], ()
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return [kind], list(parts.items())
    if isinstance(value, type) or inspect.isroutine(value):
        names = (getattr(value, name, "") for name in ("__module__", "__qualname__"))
        return [kind, *map(str, names)], ()
    if dataclasses.is_dataclass(value):
        return [kind], list(_fields(value).items())
    return [kind], list(_attributes(getattr(value, "__dict__", {})))


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as they are."""
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names}


def _attributes(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        # Private functions may be made at the first call, from what is here anyway.
        is_made = name.startswith("_") and (value is None or _is_function(value))
        if name not in _STATES and not is_made:
            yield name, value


def _is_function(value: object) -> bool:
    # What mx.compile returns is no routine, and has nothing to look into.
    return inspect.isroutine(value) or (
        callable(value) and not hasattr(value, "__dict__")
    )


def _hashes(arrays: Mapping[Place, mx.array]) -> list[list[Any]]:
    """Return place, dtype, shape and SHA-256 of arrays, several hashed at once."""
    with ThreadPoolExecutor(_N_THREADS) as pool:
        tasks = {place: _hashed(array, pool) for place, array in arrays.items()}
        return [
            [place, str(array.dtype), array.shape, tasks[place].result()]
            for place, array in arrays.items()
        ]


def _hashed(array: mx.array, pool: ThreadPoolExecutor) -> Future[str]:
    mx.eval(array)
    data: Any = array
    if not array.size or memoryview(data).c_contiguous:
        return pool.submit(_sha256, [_bytes_of(array)])
    done: Future[str] = Future()
    done.set_result(_sha256(map(_bytes_of, _pieces(array))))
    return done


def _pieces(array: mx.array) -> Iterator[mx.array]:
    """Yield an array's elements in order, in parts that may be copied."""
    if array.nbytes <= _PIECE_BYTES or array.ndim == 0:
        yield array
        return
    n_rows = max(1, _PIECE_BYTES * array.shape[0] // array.nbytes)
    for start in range(0, array.shape[0], n_rows):
        part = array[start : start + n_rows]
        yield from _pieces(part[0]) if n_rows == 1 else [part]


def _bytes_of(array: mx.array) -> memoryview:
    if not array.size:
        return memoryview(b"")
    plain: Any = mx.view(mx.contiguous(array).reshape(-1), mx.uint8)
    mx.eval(plain)
    return memoryview(plain)


def _sha256(parts: Iterable[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _exact_until(model: Module) -> int | None:
    """Return up to where a model's KV may be cut, by its arguments and its classes."""
    kind = type(model).__module__.rpartition(".")[2]
    own = {"model_type": getattr(model, "model_type", kind)}
    configs = [own, *map(_plain, _configs(model))]
    limits = [limit for limit in map(exact_until, configs) if limit is not None]
    names = {type(module).__name__ for module in _modules(model)}
    if not limits and _DYNAMIC in names:
        return 0  # nobody says for how long its angles are those of all lengths
    return min(limits, default=None)


def _configs(model: Module) -> Iterator[object]:
    for module in _modules(model):
        values = (*module.__dict__.values(), *module.values())
        yield from (each for each in values if dataclasses.is_dataclass(each))
        yield from (each for each in values if isinstance(each, Mapping))


def _modules(model: Any) -> list[Module]:
    modules: list[Module] = model.modules()  # not typed
    return modules


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = _fields(value)
    if isinstance(value, Mapping) and not isinstance(value, Module):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
