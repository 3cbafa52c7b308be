"""Models whose KV is not a function of its prefix alone.

With dynamic NTK rope the angle of a token depends on how long the sequence was when
it was computed; a few architectures compute attention otherwise for other chunk sizes.
Such KV is right only as a whole, where it was taken: it must not be cut, nor continued
from another run's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Measured on mlx-lm 0.32.2: prefill in other chunks gives other logits.
_CHUNK_DEPENDENT = frozenset({"phi3small", "plamo3"})


def exact_until(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a prompt may have for its KV to be cut anywhere.

    Args:
        config: A model's ``config.json``.

    Returns:
        ``None`` if there is no limit; 0 if it may never be cut.

    Source: mlx-lm 0.32.2 ``rope_utils.DynamicNTKScalingRoPE`` and the classes of that
    name in ``internlm2`` and ``internlm3``.
    """
    if config.get("model_type") in _CHUNK_DEPENDENT:
        return 0
    limits = [
        limit
        for value in config.values()
        if isinstance(value, Mapping)
        for limit in [exact_until(value)]
        if limit is not None
    ]
    if _is_dynamic(config):
        # internlm3 counts heads for tokens, so the change may come that much sooner.
        n_heads = int(config.get("num_attention_heads") or 0)
        limits.append(max(0, int(config.get("max_position_embeddings") or 0) - n_heads))
    return min(limits, default=None)


def _is_dynamic(config: Mapping[str, Any]) -> bool:
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping) and "dynamic" in (
            rope.get("type"),
            rope.get("rope_type"),
        ):
            return True
    return False
