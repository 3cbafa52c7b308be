"""Tiny models on disk: random ones whose tokens are bytes, with a chat template."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
N_VOCABULARY = 258
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": N_VOCABULARY,
    "tie_word_embeddings": True,
}


def save_model(
    path: Path,
    config: dict[str, Any] = CONFIG,
    seed: int = 0,
    *,
    template: str = TEMPLATE,
    pieces: Sequence[str] = (),
) -> Path:
    """Write a model, the same for the same seed, to a directory; return that.

    Args:
        path: The directory; made if it is not there.
        config: As ``config.json``, for `N_VOCABULARY` tokens and *pieces*.
        seed: Of the weights.
        template: The chat template.
        pieces: Strings that are one token each.
    """
    path.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    (path / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("<e>")])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(path / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<e>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    return path
