"""The real model: first token after a restart, disk bytes of a conversation."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

import promptstore.mlx_lm
from bench.common import (
    Options,
    Row,
    at_least,
    at_most,
    fact,
    in_new_process,
    new_root,
    state_nbytes,
)
from promptstore import Namespace, PromptStore

TEXT = Path(__file__).parents[1] / "texts" / "constitution.txt"
QUESTION = "What are the two parts of Congress?"
N_ANSWER = 16


@dataclass(frozen=True)
class Run:
    """One answer: seconds to its first token, its tokens, and what was reused."""

    first_token_s: float
    answer: tuple[int, ...]
    n_reused: int
    source: str


# ---- restart_first_token


def restart_first_token(options: Options) -> list[Row]:
    """Compare the first token of a cold run with one that restores its system prompt.

    One process prefills the system prompt, inserts it and ends. A new one then runs
    in turn: cold (``mlx_lm.stream_generate``), and restored (the model's identity, a
    new `PromptStore` on that root, `promptstore.mlx_lm.stream_generate`). Both have
    loaded the model before; neither pays for that.
    """
    with new_root(options) as root:
        in_new_process(_precompute, options, root)
        n_prompt, pairs = in_new_process(_ask, options, root)
    ratio = statistics.median(c.first_token_s / r.first_token_s for c, r in pairs)
    cold = statistics.median(c.first_token_s for c, _ in pairs)
    restored = statistics.median(r.first_token_s for _, r in pairs)
    equal = all(c.answer == r.answer for c, r in pairs)
    first = pairs[0][1]
    note = (
        f"cold {cold:.2f} s / restored {restored:.3f} s (in the new process's first "
        f"request {first.first_token_s:.3f} s), {n_prompt} tokens, {first.n_reused} "
        f"restored from {first.source}"
    )
    same = f"greedy answers of {N_ANSWER} tokens, cold against restored"
    return [
        at_least("restart_first_token", ratio, 10, note),
        at_least("restart_first_token.answers_equal", float(equal), 1, same, "yes"),
    ]


def _precompute(options: Options, root: Path) -> None:
    model, tokenizer, *_ = mlx_lm.load(str(options.model))
    prompt, n_system = _prompt(tokenizer, options)
    cache = make_prompt_cache(model)
    promptstore.mlx_lm.prefill(model, prompt[:n_system], cache)
    namespace = Namespace.from_model(options.model)
    with PromptStore.open(root) as store:
        store.insert(namespace, prompt[:n_system], cache, kind="system")


def _ask(options: Options, root: Path) -> tuple[int, list[tuple[Run, Run]]]:
    model, tokenizer, *_ = mlx_lm.load(str(options.model))
    prompt, _ = _prompt(tokenizer, options)
    for _ in mlx_lm.stream_generate(model, tokenizer, prompt[:16], max_tokens=2):
        pass  # the first run of a process pays for threads and kernels
    pairs = []
    for _ in range(1 if options.quick else 3):
        restored = _restored(options, root, model, tokenizer, prompt)
        pairs.append((_cold(model, tokenizer, prompt), restored))
    return len(prompt), pairs


def _cold(model: Any, tokenizer: Any, prompt: list[int]) -> Run:
    start = time.perf_counter()
    responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=N_ANSWER)
    tokens = [next(responses).token]
    first_token_s = time.perf_counter() - start
    tokens += [response.token for response in responses]
    return Run(first_token_s, tuple(tokens), 0, "")


def _restored(
    options: Options, root: Path, model: Any, tokenizer: Any, prompt: list[int]
) -> Run:
    matches: list[Any] = []
    start = time.perf_counter()
    namespace = Namespace.from_model(options.model)
    with PromptStore.open(root, write="off") as store:
        responses = promptstore.mlx_lm.stream_generate(
            model,
            tokenizer,
            prompt,
            store=store,
            namespace=namespace,
            max_tokens=N_ANSWER,
            on_match=matches.append,
        )
        tokens = [next(responses).token]
        first_token_s = time.perf_counter() - start
        tokens += [response.token for response in responses]
    return Run(first_token_s, tuple(tokens), matches[0].n_tokens, matches[0].source)


def _prompt(tokenizer: Any, options: Options) -> tuple[list[int], int]:
    """Return a prompt of up to 1,000 tokens, and how many of them are the system's."""
    n_wanted = 200 if options.quick else 1000
    words = TEXT.read_text(encoding="utf-8").split(" ")
    low, high = 0, len(words)
    while high - low > 1:  # the most words that fit
        middle = (low + high) // 2
        if len(_render(tokenizer, words[:middle], QUESTION)) <= n_wanted:
            low = middle
        else:
            high = middle
    prompt = _render(tokenizer, words[:low], QUESTION)
    other = _render(tokenizer, words[:low], "Or not?")
    pairs = enumerate(zip(prompt, other, strict=False))
    return prompt, next(i for i, (a, b) in pairs if a != b)


def _render(tokenizer: Any, system: list[str], question: str) -> list[int]:
    messages = [
        {"role": "system", "content": " ".join(system)},
        {"role": "user", "content": question},
    ]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


# ---- disk_bytes_conversation


def disk_bytes_conversation(options: Options) -> list[Row]:
    """Compare the disk bytes of a conversation with the KV bytes of its tokens.

    Twenty turns of 40 to 60 tokens: each is matched, its new tokens are prefilled by
    the real model, and the whole is inserted. The tokens of all turns come from a
    text, so that the measure does not depend on what the model would answer.
    """
    model, tokenizer, *_ = mlx_lm.load(str(options.model))
    n_turns = 4 if options.quick else 20
    rng = random.Random(1)
    ends = [0]
    for _ in range(n_turns):
        ends.append(ends[-1] + rng.randint(40, 60))
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: ends[-1]]
    namespace = Namespace.from_model(options.model)
    with new_root(options) as root:
        with PromptStore.open(root) as store:
            for end in ends[1:]:
                match = store.match(namespace, tokens[:end])
                cache = match.cache or make_prompt_cache(model)
                promptstore.mlx_lm.prefill(model, tokens[match.n_tokens : end], cache)
                store.insert(namespace, tokens[:end], cache)
            kv = state_nbytes(cache)
            store.flush()
            open_bytes = _nbytes(root)
        snapshots = _nbytes(root / "snapshots")
        blocks = _nbytes(root, allocated=True)
        n_files = sum(1 for path in root.rglob("*.safetensors"))
    note = (
        f"snapshot files {snapshots:,} B ({n_files} of them) / KV of {ends[-1]} tokens "
        f"{kv:,} B, {n_turns} turns"
    )
    everything = "everything under the root / the same KV bytes"
    return [
        at_most("disk_bytes_conversation", snapshots / kv, 1.05, note),
        fact(
            "disk_bytes_conversation.all",
            blocks / kv,
            f"{everything}; closed, as blocks on disk",
        ),
        fact(
            "disk_bytes_conversation.all_open",
            open_bytes / kv,
            f"{everything}; open, with SQLite's log",
        ),
    ]


def _nbytes(directory: Path, *, allocated: bool = False) -> int:
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(s.st_blocks * 512 if allocated else s.st_size for s in stats)
