"""mlx-lm's own generation functions and its prompt cache, on a store."""

from promptstore.mlx_lm.generation import (
    encode,
    generate,
    precompute,
    prefill,
    stream_generate,
)
from promptstore.mlx_lm.lru import LRUPromptCache

__all__ = [
    "LRUPromptCache",
    "encode",
    "generate",
    "precompute",
    "prefill",
    "stream_generate",
]
