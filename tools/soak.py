#!/usr/bin/env python3
"""Send 10,000 mixed requests to `promptstore serve` and compare every answer.

Conversations that grow, repeats, branches, text completions, seeds (which the server
serves one at a time), streams, clients that go away, and bad requests come from eight
clients at once, in an order of the seed. Each answer must be the one that mlx-lm gives
to the prompt alone, without any cache. In the end the memory of the server must be
what it was after the first tenth, no thread may have died, and the store must be whole.

    python tools/soak.py                     # about ten minutes
    python tools/soak.py --requests 500 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers import Server, text_of
from test_architectures import config_of
from tiny import N_VOCABULARY, save_model

from promptstore import PromptStore

N_CLIENTS = 8
N_TOKENS = 8
N_ENTRIES = 20
GROWTH = 1.1
"""How much more memory than after the first tenth there may ever be."""

_WORDS = [
    "river",
    "stone",
    "lamp",
    "seven",
    "orchard",
    "quiet",
    "engine",
    "salt",
    "window",
    "paper",
]


@dataclass(frozen=True)
class Case:
    """A prompt of the pool: turns of a chat, or a text."""

    turns: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def body(self) -> dict[str, Any]:
        """Return it as a request."""
        options: dict[str, Any] = {"temperature": 0, "max_tokens": N_TOKENS}
        if self.text:
            return options | {"prompt": self.text}
        turns = [{"role": role, "content": content} for role, content in self.turns]
        return options | {"messages": turns}

    @property
    def path(self) -> str:
        """Where it is sent."""
        return "/v1/completions" if self.text else "/v1/chat/completions"


def pool(rng: random.Random) -> list[Case]:
    """Return prompts that share prefixes: chats that grow and branch, and texts."""
    cases = []
    for _ in range(6):
        system = _sentence(rng, 30)
        for _ in range(4):
            turns = [("system", system)]
            for _ in range(5):
                turns.append(("user", _sentence(rng, 6)))
                cases.append(Case(tuple(turns)))
                turns.append(("assistant", _sentence(rng, 4)))
    texts = [_sentence(rng, 40) for _ in range(5)]
    cases += [Case(text=text[:n]) for text in texts for n in (60, 150, 220)]
    return cases


def _sentence(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(n_words))


class Cold:
    """What mlx-lm answers without a cache."""

    def __init__(self, model_path: Path) -> None:
        self._model, self._tokenizer, *_ = mlx_lm.load(str(model_path))

    def answer(self, case: Case) -> str:
        """Return the greedy answer to a prompt."""
        if case.text:
            prompt = self._tokenizer.encode(case.text)
        else:
            prompt = self._tokenizer.apply_chat_template(
                case.body()["messages"], add_generation_prompt=True
            )
        text = ""
        for response in mlx_lm.stream_generate(
            self._model, self._tokenizer, prompt, max_tokens=N_TOKENS
        ):
            if response.finish_reason != "stop":
                text += response.text
        return text


class Client:
    """Sends requests of every sort and counts what came back."""

    def __init__(self, server: Server, right: dict[Case, str], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server = server
        self._right = right
        self._cases = list(right)
        self._seed = seed
        self._lock = threading.Lock()

    def send(self, number: int) -> None:
        """Send one request, the same one for the same number and seed."""
        rng = random.Random(f"{self._seed} {number}")
        case = rng.choice(self._cases)
        sorts = ("plain", "seeded", "streamed", "left", "bad")
        sort = rng.choices(sorts, (70, 10, 10, 7, 3))[0]
        getattr(self, f"_{sort}")(case, rng)
        with self._lock:
            self.counts[sort] += 1

    def _plain(self, case: Case, _: random.Random) -> None:
        self._compare(case, text_of(self._server.post(case.path, case.body())))

    def _seeded(self, case: Case, rng: random.Random) -> None:
        body = case.body() | {"seed": rng.randrange(100)}
        self._compare(case, text_of(self._server.post(case.path, body)))

    def _streamed(self, case: Case, _: random.Random) -> None:
        text = ""
        with self._stream(case) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    delta = choice.get("delta", choice)
                    text += delta.get("content") or delta.get("text") or ""
        self._compare(case, text)

    def _left(self, case: Case, rng: random.Random) -> None:
        """Go away after a line or none."""
        with self._stream(case) as response:
            if rng.random() < 0.5:
                response.readline()

    def _bad(self, case: Case, rng: random.Random) -> None:
        body = rng.choice([
            b"{", b"[]", {}, {"messages": "x"}, {"prompt": ""},
            case.body() | {"temperature": -1}, case.body() | {"max_tokens": 0},
            case.body() | {"model": "no/such-model-anywhere-on-this-disk"},
        ])  # fmt: skip
        with contextlib.suppress(urllib.error.HTTPError):
            self._server.post(case.path, body)
            if body != b"{":
                self._note(f"bad request was answered: {body!r}")

    def _stream(self, case: Case) -> Any:
        data = json.dumps(case.body() | {"stream": True}).encode()
        request = urllib.request.Request(self._server.url + case.path, data=data)
        return urllib.request.urlopen(request, timeout=120)

    def _compare(self, case: Case, answer: str | None) -> None:
        if (answer or "") != self._right[case]:
            self._note(f"{case}: {answer!r} instead of {self._right[case]!r}")

    def _note(self, message: str) -> None:
        with self._lock:
            self.wrong.append(message)


def main() -> int:
    """Run it and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--architecture", default="llama")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.requests} requests, {args.architecture}")
    with tempfile.TemporaryDirectory(prefix="promptstore-soak-") as scratch:
        return _soak(Path(scratch), args)


def _soak(scratch: Path, args: argparse.Namespace) -> int:
    config = config_of(args.architecture) | {"vocab_size": N_VOCABULARY}
    model = save_model(scratch / "model", config)
    cases, cold = pool(random.Random(args.seed)), Cold(model)
    right = {case: cold.answer(case) for case in cases}
    store = scratch / "store"
    entry_bytes = _entry_bytes(cold, cases)
    options = [
        "--store", str(store), "--prompt-cache-size", "1000000",
        "--prompt-cache-bytes", str(N_ENTRIES * entry_bytes), "--log-level", "WARNING",
    ]  # fmt: skip
    start = time.perf_counter()
    with Server(model, *options) as server:
        process = psutil.Process(server.process.pid)
        client = Client(server, right, args.seed)
        tenth = max(1, args.requests // 10)
        sizes = []
        for first in range(0, args.requests, tenth):
            with ThreadPoolExecutor(N_CLIENTS) as threads:
                list(threads.map(client.send, range(first, first + tenth)))
            sizes.append((process.memory_info().rss, process.num_threads()))
            print(f"{first + tenth:6} requests, {sizes[-1][0] / 1e6:.0f} MB")
        healthy = server.get("/health")[0] == 200
        memory_bytes = server.metric("promptstore_stored_bytes", tier="memory")
        reused = server.metric("promptstore_tokens_reused_total")
        asked = server.metric("promptstore_tokens_asked_total")
        code = server.stop()
    with PromptStore.open(store, memory_bytes=0) as reopened:
        findings = reopened.check()
    growth = max(size for size, _ in sizes) / sizes[0][0]
    print(f"{time.perf_counter() - start:.0f} s; {dict(client.counts)}")
    print(f"reused {reused / asked:.0%} of {asked:,.0f} tokens")
    print(f"memory at most {growth:.3f} of that after the first tenth, in the end")
    print(f"{sizes[-1][0] / sizes[0][0]:.3f}; {sizes[-1][1]} threads")
    failures = client.wrong[:10]
    failures += [] if healthy else ["the generation thread died"]
    failures += [] if code == 0 else [f"exit code {code}"]
    failures += [f"found on disk: {finding}" for finding in findings]
    if growth > GROWTH:
        failures.append(f"memory grew to {growth:.3f}")
    if memory_bytes > N_ENTRIES * entry_bytes:
        failures.append(f"{memory_bytes} bytes in memory")
    for failure in failures:
        print("FAILED", failure)
    print(f"{len(client.wrong)} wrong answers" if failures else "all answers right")
    return bool(failures)


def _entry_bytes(cold: Cold, cases: list[Case]) -> int:
    """Return the bytes of a prompt cache of usual length."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: Any = make_prompt_cache(cold._model)
    case = cases[len(cases) // 2]
    tokens = cold._tokenizer.apply_chat_template(case.body()["messages"])
    for _ in mlx_lm.stream_generate(
        cold._model, cold._tokenizer, tokens, max_tokens=1, prompt_cache=caches
    ):
        pass
    return sum(layer.nbytes for layer in caches)


if __name__ == "__main__":
    sys.exit(main())
