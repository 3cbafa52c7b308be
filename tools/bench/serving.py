"""Servers over HTTP: ours against mlx_lm.server, each in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.common import Options, Row, at_least, at_most, fact, new_root
from bench.conversation import TEXT

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from servers import OURS, UPSTREAM, Server
from tiny import N_VOCABULARY, save_model

from promptstore import PromptStore

Message = dict[str, str]
N_ANSWER = 16
N_CLIENTS = 8
_WIDE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
    "intermediate_size": 64, "num_attention_heads": 64, "num_key_value_heads": 64,
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
"""A model of little work and 64 KiB of KV a token."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer: when it began, when it ended, its text."""

    first_token_s: float
    total_s: float
    text: str


# ---- serving_restart


def serving_restart(options: Options) -> list[Row]:
    """Compare the first token of a second turn after each server's restart.

    Both serve a first turn with a history of 1,000 tokens, are ended by SIGTERM and
    started anew. A short request of another text waits for the model to be loaded.
    """
    document = TEXT.read_text()[: 400 if options.quick else 4400]
    turns = [
        {"role": "system", "content": document},
        {"role": "user", "content": "What are the two parts of Congress?"},
    ]
    with new_root(options) as root:
        results = {
            module: _around_restart(options, module, root, turns)
            for module in (UPSTREAM, OURS)
        }
    (theirs, _, _), (ours, n_cached, n_prompt) = results[UPSTREAM], results[OURS]
    note = (
        f"mlx_lm.server {theirs.first_token_s:.2f} s / ours {ours.first_token_s:.3f} s,"
        f" {n_cached} of {n_prompt} tokens reused"
    )
    ratio = theirs.first_token_s / ours.first_token_s
    equal = float(theirs.text == ours.text)
    same = f"greedy answers of {N_ANSWER} tokens after the restart"
    return [
        at_least("serving_restart", ratio, 8, note),
        at_least("serving_restart.answers_equal", equal, 1, same, "yes"),
    ]


def _around_restart(
    options: Options, module: tuple[str, ...], root: Path, turns: list[Message]
) -> tuple[Answer, int, int]:
    with _server(options, module, root) as server:
        answer = ask(server, turns)
        server.stop(signal.SIGTERM if module == OURS else signal.SIGINT)
    next_turn = {"role": "user", "content": "And who presides over the Senate?"}
    turns = [*turns, {"role": "assistant", "content": answer.text}, next_turn]
    with _server(options, module, root) as server:
        server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
        again = ask(server, turns)
        usage = server.chat(turns, max_tokens=1)["usage"]
        n_cached = int(server.metric("promptstore_tokens_reused_total"))
        n_cached -= usage["prompt_tokens"] - 1 if module == OURS else 0
    return again, n_cached, usage["prompt_tokens"]


# ---- serving_steady


def serving_steady(options: Options) -> list[Row]:
    """Compare both servers without a restart: conversations of short turns.

    Both run at once and answer the same requests, each request one server after the
    other, which goes first in turn. Then eight clients ask each at once.
    """
    n_talks, n_turns = (1, 2) if options.quick else (4, 5)
    pairs: list[tuple[Answer, Answer]] = []
    with (
        new_root(options) as root,
        _server(options, UPSTREAM, root) as theirs,
        _server(options, OURS, root) as ours,
    ):
        for talk in range(-1, n_talks):  # the first is to warm up
            found = list(_talk(theirs, ours, talk, n_turns))
            pairs += found if talk >= 0 else []
        rounds = [_together(theirs, ours, i) for i in range(1 if options.quick else 5)]
    throughput = statistics.median(rounds[1:] or rounds)
    first = statistics.median(o.first_token_s / t.first_token_s for t, o in pairs)
    total = statistics.median(o.total_s / t.total_s for t, o in pairs)
    equal = sum(t.text == o.text for t, o in pairs) / len(pairs)
    times = "mlx_lm.server {:.3f} s / ours {:.3f} s, medians of {} turns"
    return [
        at_most(
            "serving_steady.first_token", first, 1.03,
            times.format(*_medians(pairs, "first_token_s"), len(pairs)),
        ),
        at_most(
            "serving_steady.whole_answer", total, 1.03,
            times.format(*_medians(pairs, "total_s"), len(pairs)),
        ),
        at_least(
            "serving_steady.throughput", throughput, 0.97,
            f"tokens a second of {N_CLIENTS} clients at once, to mlx_lm.server's",
        ),
        at_least("serving_steady.answers_equal", equal, 1, "greedy answers", "share"),
    ]  # fmt: skip


def _talk(
    theirs: Server, ours: Server, talk: int, n_turns: int
) -> Iterator[tuple[Answer, Answer]]:
    document = TEXT.read_text()[2000 * (talk + 1) :][:1200]
    turns = [{"role": "system", "content": document}]
    for turn in range(n_turns):
        question = f"Say in a few words what part {turn + 1} of this is about."
        turns.append({"role": "user", "content": question})
        order = (theirs, ours) if (talk + turn) % 2 else (ours, theirs)
        answers = {server: ask(server, turns) for server in order}
        yield answers[theirs], answers[ours]
        turns.append({"role": "assistant", "content": answers[theirs].text})


def _together(theirs: Server, ours: Server, number: int) -> float:
    """Return how much faster ours answers clients that ask at once."""
    seconds = {}
    for server in (theirs, ours) if number % 2 else (ours, theirs):
        talks = [
            [{"role": "user", "content": f"Round {number}, client {i}: what is law?"}]
            for i in range(N_CLIENTS)
        ]
        start = time.perf_counter()
        with ThreadPoolExecutor(N_CLIENTS) as clients:
            list(clients.map(functools.partial(ask, server), talks))
        seconds[server] = time.perf_counter() - start
    return seconds[theirs] / seconds[ours]


def _medians(pairs: list[tuple[Answer, Answer]], name: str) -> tuple[float, float]:
    theirs, ours = (
        statistics.median(getattr(answer, name) for answer in side)
        for side in zip(*pairs, strict=True)
    )
    return theirs, ours


# ---- serving_shutdown


def serving_shutdown(options: Options) -> list[Row]:
    """Time SIGTERM with 1 GB of KV that was not written yet."""
    n_prompts, n_tokens = (2, 100) if options.quick else (8, 2000)
    nbytes = n_prompts * n_tokens * (64 << 10)
    config = _WIDE | {"vocab_size": N_VOCABULARY}
    with new_root(options) as root:
        model = save_model(root / "model", config)
        store = str(root / "store")
        # Nothing is written before memory evicts, or the end.
        with Server(model, "--store", store, "--write", "back") as server:
            for i in range(n_prompts):
                prompt = (f"{i} " * n_tokens)[:n_tokens]
                server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            start = time.perf_counter()
            code = server.stop()
            seconds = time.perf_counter() - start
        with PromptStore.open(store) as reopened:
            written = sum(info.nbytes for info in reopened.snapshots())
    note = f"{nbytes / 1e9:.2f} GB in {n_prompts} prompts; exit code {code}"
    share = written / nbytes
    return [
        at_most("serving_shutdown", seconds, 10, note, "s"),
        at_least("serving_shutdown.written", share, 0.99, "of the bytes", "share"),
        fact("serving_shutdown.rate", written / seconds / 1e6, "all included", "MB/s"),
    ]


# ---- what they share


def ask(server: Server, turns: list[Message]) -> Answer:
    """Return the streamed, greedy answer to a chat."""
    body = {
        "messages": turns, "stream": True, "temperature": 0, "max_tokens": N_ANSWER
    }  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", data=json.dumps(body).encode()
    )
    start, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if delta and not first:
                first = time.perf_counter() - start
            text += delta
    return Answer(first, time.perf_counter() - start, text)


@contextlib.contextmanager
def _server(options: Options, module: tuple[str, ...], root: Path) -> Iterator[Server]:
    more = ("--store", str(root / "store")) if module == OURS else ()
    with Server(options.model, *more, module=module) as server:
        yield server
