#!/usr/bin/env python3
"""The main job of promptstore, as a user sees it, on a real model (``make demo``).

A document is precomputed as system prompt, the process is killed with SIGKILL, and
a new process for each question answers from the cache on disk. The same questions
are asked without the store, and both must give the same answers. Only the command
``promptstore`` is used. Exits non-zero if an answer differs or nothing was reused.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TEXT = Path(__file__).parent / "texts" / "constitution.txt"
QUESTIONS = (
    "What are the two parts of Congress?",
    "What is the title of this document?",
)
MIN_TOKENS, MAX_TOKENS = 500, 2000
PREFILL_BUDGET_S = 130  # of three minutes; the rest is start-up and decoding
N_PREFILLS = 1 + len(QUESTIONS)
N_PROBE = 64

console = Console(highlight=False)


class Failure(Exception):
    """The demo could not run, or did not show what it should; one line."""


@dataclass(frozen=True)
class Setup:
    """What every command of the demo is given."""

    model: Path
    system_file: Path
    store: Path
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What ``promptstore ask --json`` prints."""

    answer: str
    n_prompt: int
    n_reused: int
    n_prefilled: int
    source: str
    first_token_s: float


# ---- how long a document


def cut_document(model: Path, n_wanted: int | None) -> tuple[str, int]:
    """Return a leading part of the text and its tokens, by this machine's speed."""
    from mlx_lm import load

    llm, tokenizer, *_ = load(str(model))
    text = TEXT.read_text(encoding="utf-8")
    if n_wanted is None:
        speed = prefill_speed(llm, tokenizer.encode(text))
        n_wanted = affordable_tokens(speed)
        console.print(f"prefill runs at about {speed:.0f} tokens/s here")
    return cut(text, n_wanted, lambda part: len(tokenizer.encode(part)))


def prefill_speed(llm: Any, tokens: list[int]) -> float:
    """Return tokens per second of a second, short prefill (the first warms up)."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    elapsed_s = 0.0
    for start in (0, N_PROBE):
        cache = make_prompt_cache(llm)
        start_s = time.perf_counter()
        mx.eval(llm(mx.array(tokens[start : start + N_PROBE])[None], cache=cache))
        elapsed_s = time.perf_counter() - start_s
    return N_PROBE / elapsed_s


def affordable_tokens(speed: float) -> int:
    """Return the longest document whose prefills fit into the budget.

    Prefill slows down with length; measured with this model on two cores, 1,000
    tokens take about twice as long as a short probe makes one expect.
    """
    steps = range(MIN_TOKENS, MAX_TOKENS + 1, 50)
    cost_s = {n: N_PREFILLS * n / speed * (1 + n / 1000) for n in steps}
    return max((n for n in steps if cost_s[n] <= PREFILL_BUDGET_S), default=MIN_TOKENS)


def cut(text: str, n_wanted: int, count: Callable[[str], int]) -> tuple[str, int]:
    """Return the longest run of whole sentences of at most *n_wanted* tokens.

    If that has fewer than ``MIN_TOKENS``, one sentence more.
    """
    part, n_tokens = "", 0
    for match in re.finditer(r"\.(?=\s)", text):
        longer = text[: match.end()]
        n_longer = count(longer)
        if n_longer > n_wanted and n_tokens >= MIN_TOKENS:
            break
        part, n_tokens = longer, n_longer
        if n_longer > n_wanted:
            break
    return part, n_tokens


# ---- the commands


def promptstore() -> list[str]:
    """Return the command that was installed beside this interpreter."""
    beside = Path(sys.executable).with_name("promptstore")
    found = str(beside) if beside.exists() else shutil.which("promptstore")
    return [found] if found else [sys.executable, "-m", "promptstore"]


def show(arguments: Sequence[str]) -> None:
    line = f"\n$ promptstore {shlex.join(arguments)}"
    console.print(line, style="bold", markup=False, soft_wrap=True)


def precompute_and_kill(setup: Setup) -> float:
    """Precompute in a process that is killed once the prompt is durable.

    Returns:
        Seconds from its start to its ``stored`` line.
    """
    arguments = [
        "precompute",
        *("--model", str(setup.model)),
        *("--system-file", str(setup.system_file)),
        *("--store", str(setup.store)),
        *("--label", "demo", "--pin"),
    ]
    show(arguments)
    start_s = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-u", __file__, "--precompute-child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            wait_for_stored(child)
        finally:
            child.kill()
    if child.returncode != -signal.SIGKILL:
        raise Failure("the precomputing process was not alive when it was killed")
    console.print(f"killed process {child.pid} with SIGKILL")
    return time.perf_counter() - start_s


def wait_for_stored(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        console.print(line.rstrip(), markup=False)
        if line.startswith("stored "):
            return
    raise Failure(f"promptstore precompute stored nothing (exit code {child.wait()})")


def precompute_child(arguments: list[str]) -> None:
    """Run the command, then stay alive until the parent kills this process."""
    from promptstore import cli

    try:
        code = cli.main(arguments, standalone_mode=False)
    except Exception as error:
        sys.exit(f"promptstore precompute: {error}")
    if code:
        sys.exit(code)
    sys.stdin.read()


def ask(setup: Setup, question: str, *options: str) -> Answer:
    """Ask in a new process; its progress and notes go to the terminal."""
    arguments = [
        "ask",
        *("--model", str(setup.model)),
        *("--system-file", str(setup.system_file)),
        *("--store", str(setup.store)),
        *("--max-tokens", str(setup.max_tokens)),
        *("--json", *options, question),
    ]
    show(arguments)
    command = [*promptstore(), *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise Failure(f"promptstore ask ended with exit code {run.returncode}")
    facts = json.loads(run.stdout)
    return Answer(**{field.name: facts[field.name] for field in fields(Answer)})


# ---- the result


def report(questions: Sequence[str], pairs: Sequence[tuple[Answer, Answer]]) -> None:
    table = Table(title="Time to first token, model already loaded")
    table.add_column("question")
    for name in ("prompt", "reused", "cold s", "restored s", "ratio", "equal"):
        table.add_column(name, justify="right")
    for question, (restored, cold) in zip(questions, pairs, strict=True):
        table.add_row(
            question,
            f"{restored.n_prompt:,}",
            f"{restored.n_reused:,}",
            f"{cold.first_token_s:.2f}",
            f"{restored.first_token_s:.2f}",
            f"{cold.first_token_s / restored.first_token_s:.1f}",
            "yes" if restored.answer == cold.answer else "NO",
        )
    console.print()
    console.print(table)
    for question, (restored, cold) in zip(questions, pairs, strict=True):
        console.print(f"\nQ: {question}", markup=False)
        console.print(f"A: {restored.answer.strip()}", markup=False)
        if restored.answer != cold.answer:
            console.print(f"cold: {cold.answer.strip()}", markup=False)


def verify(pairs: Sequence[tuple[Answer, Answer]]) -> None:
    """Raise unless restored answers equal cold ones and came from the disk."""
    for restored, cold in pairs:
        if not restored.n_reused or restored.source != "disk":
            raise Failure("a new process reused nothing from the disk")
        if cold.n_reused:
            raise Failure("a run without the store reused tokens")
        if restored.answer != cold.answer:
            raise Failure("an answer from the restored cache differs from the cold one")


def demo(model: Path, max_tokens: int, n_wanted: int | None) -> None:
    if not (model / "config.json").is_file():
        raise Failure(f"{model} is no model directory; `make model` makes one")
    start_s = time.perf_counter()
    document, n_tokens = cut_document(model, n_wanted)
    console.print(f"the system prompt is {n_tokens:,} tokens of {TEXT.name}")
    with tempfile.TemporaryDirectory(prefix="promptstore-demo-") as temp:
        setup = Setup(model, Path(temp, "system.txt"), Path(temp, "store"), max_tokens)
        setup.system_file.write_text(document, encoding="utf-8")
        stored_s = precompute_and_kill(setup)
        restored = [ask(setup, question) for question in QUESTIONS]
        cold = [ask(setup, question, "--no-store") for question in QUESTIONS]
    pairs = list(zip(restored, cold, strict=True))
    report(QUESTIONS, pairs)
    elapsed_s = time.perf_counter() - start_s
    console.print(f"\nprecomputed in {stored_s:.0f} s; the demo took {elapsed_s:.0f} s")
    verify(pairs)


def main() -> int:
    if sys.argv[1:2] == ["--precompute-child"]:
        precompute_child(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-fp32"))
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--tokens", type=int, help="of the document; default: by speed")
    args = parser.parse_args()
    try:
        demo(args.model, args.max_tokens, args.tokens)
    except Failure as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
