"""What of mlx_lm.server is replaced, and whether it is still where it was.

No code of the server is copied: these names are looked up by it when it runs, and get
another value meanwhile.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import mlx_lm
from mlx_lm import server

from promptstore.errors import ServerMoved

_LOOKED_UP: dict[str, tuple[str, ...]] = {
    "main": ("ModelProvider", "run"),
    "ResponseGenerator._generate": (
        "BatchGenerator", "insert_segments", "extract_cache", "remove", "next",
        "fetch_nearest_cache", "insert_cache", "_tokenize", "_next_request",
        "_make_state_machine", "_make_sampler", "_make_logits_processors",
    ),
    "ResponseGenerator._serve_single": (
        "stream_generate", "fetch_nearest_cache", "insert_cache", "_tokenize",
        "kv_bits", "kv_group_size", "quantized_kv_start",
    ),
    "ResponseGenerator.__init__": ("_run_generate",),
    "ResponseGenerator._run_generate": ("_generate",),
    "BatchGenerator.__init__": (
        "_prompt_batch", "_generation_batch", "_unprocessed_sequences",
    ),
    "BatchGenerator.extract_cache": ("_unprocessed_sequences", "tokens"),
    "ModelProvider.load": ("_load",),
    "APIHandler.handle_health_check": ("is_healthy",),
    "_run_http_server": ("stop_and_join",),
}  # fmt: skip
"""By function of the server, the names that it must look up."""

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "run": ("host", "port", "model_provider"),
    "_run_http_server": ("host", "port", "response_generator", "handler_class"),
    "ResponseGenerator.__init__": ("model_provider", "prompt_cache"),
    "ResponseGenerator._tokenize": ("tokenizer", "request", "args"),
    "ModelProvider._load": ("model_path", "adapter_path", "draft_model_path"),
    "BatchGenerator.remove": ("uids", "return_prompt_caches"),
    "APIHandler._set_completion_headers": ("status_code",),
}
"""By function of the server, the parameters that it must have."""


def require() -> None:
    """Check that everything that is replaced is still used where it was.

    Raises:
        ServerMoved: Something is not; running would mean running without the store.
    """
    missing = []
    for path, names in _LOOKED_UP.items():
        code = getattr(_find(path), "__code__", None)
        known = _names(code) if code else set()
        missing += [f"{path} uses no {name}" for name in names if name not in known]
    for path, names in _PARAMETERS.items():
        function = _find(path)
        parameters = inspect.signature(function).parameters if function else {}
        missing += [f"{path} takes no {x}" for x in names if x not in parameters]
    if missing:
        raise ServerMoved(mlx_lm.__version__, missing)


@contextlib.contextmanager
def replaced(**names: Any) -> Iterator[None]:
    """Give names of mlx_lm.server other values while the block runs."""
    before = {name: getattr(server, name) for name in names}
    for name, value in names.items():
        setattr(server, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(server, name, value)


def _find(path: str) -> Any:
    found: Any = server
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _names(code: CodeType) -> set[str]:
    """Return the names that a function looks up, also in functions inside it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
