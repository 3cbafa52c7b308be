"""Tiny models that say what they were taught: tool calls and thoughts, not noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from tiny import CONFIG, N_VOCABULARY, save_model
from tokenizers import Tokenizer

TEMPLATE = (
    "{% if tools %}<s>system\n{{ tools | tojson }}<e>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    '<tool_call>{"name":"{{ tool_call.name }}","arguments":'
    "{{ tool_call.arguments | tojson(separators=(',', ':')) }}}</tool_call>"
    "{% endfor %}<e>{% endfor %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if messages[-1].role != 'tool' and enable_thinking %}<think>{% endif %}"
    "{% endif %}"
)
"""Thinks before it calls, and answers at once what a tool has told."""
CALL = (
    "<tool_call>",
    '{"name":"weather","arguments":',
    '{"city":"Oslo"}}',
    "</tool_call>",
)
THOUGHT = ("<think>", "Looking", "</think>")
ANSWER = ("Sunny", "today")
CHAINS = ((*THOUGHT, *CALL, "<e>"), ("\n", *ANSWER, "<e>"))
PIECES = (*THOUGHT, *CALL, *ANSWER)


def save_parrot(path: Path, chains: Sequence[Sequence[str]] = CHAINS) -> Path:
    """Write a model that goes on as *chains* do, whatever stands before.

    What stands before still moves its logits.
    """
    n_vocabulary = N_VOCABULARY + len(PIECES)
    config = CONFIG | {
        "hidden_size": 64, "vocab_size": n_vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip
    save_model(path, config, template=TEMPLATE, pieces=PIECES)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    weights = mx.load(str(path / "model.safetensors"))
    embeddings = 4 * weights["model.embed_tokens.weight"]
    heads = weights["lm_head.weight"] / 10
    for before, after in {pair for chain in chains for pair in pairwise(chain)}:
        (source,), (target,) = (tokenizer.encode(x).ids for x in (before, after))
        row = embeddings[source]
        heads[target] = heads[target] + 2 * row / mx.linalg.norm(row)
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": heads}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return path
