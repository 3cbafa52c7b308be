"""Facts about the command, as its user sees them; mostly on a tiny random model."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import KVCache
from rich.console import Console
from tiny import CONFIG, TEMPLATE, save_model

import promptstore
import promptstore.mlx_lm.generation
from promptstore import Namespace, PromptStore, SnapshotInfo
from promptstore.cli import bar, errors, main, output, snapshots
from promptstore.cli.bar import Bar
from promptstore.disk import DiskTier

COMMANDS = ("ask", "check", "doctor", "ls", "precompute", "probe", "rm",
            "serve", "stats", "verify", "why")  # fmt: skip
DOCUMENT = "We the People of the United States, in Order to form a more perfect Union."
QUESTION = "Who?"
N_SHARED = len("s") + len("system\n") + len(DOCUMENT) + len("es") + len("user\n")
N_PROMPT = N_SHARED + len(QUESTION) + len("es") + len("assistant\n")


@pytest.fixture(scope="module")
def cli_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama whose tokens are bytes, with a chat template."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cli_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees or changes the user's caches, or the logger of the package."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PROMPTSTORE_DIR", raising=False)
    logger = logging.getLogger("promptstore")
    yield
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def cli_root(tmp_path: Path) -> Iterator[Path]:
    """Where a test's store may be; it is whole when the test ends."""
    root = tmp_path / "store"
    yield root
    if (root / "index.db").exists():
        with PromptStore.open(root) as store:
            assert store.check() == []


@pytest.fixture
def cli_prompt(tmp_path: Path) -> Path:
    """A file with the system prompt."""
    path = tmp_path / "system.txt"
    path.write_text(DOCUMENT)
    return path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def run(*arguments: object, code: int = 0, stdin: str | bytes | None = None) -> Result:
    """Run the command in this process and expect an exit code."""
    texts = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, texts, input=stdin)
    assert result.exit_code == code, result.output
    return result


def fail(*arguments: object, code: int = 1, stdin: bytes | None = None) -> str:
    """Run the command, expect an error and nothing else, and return its line."""
    result = run(*arguments, code=code, stdin=stdin)
    assert result.stdout == ""
    assert result.stderr.startswith("promptstore: error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("promptstore: error: ").strip()


def run_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "promptstore", *(str(arg) for arg in arguments)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True)


def precompute(root: Path, model: Path, prompt: Path, *options: object) -> str:
    """Precompute, and return the line that says so."""
    arguments = ("--store", root, "--model", model, "--system-file", prompt)
    result = run("precompute", *arguments, *options)
    assert result.stdout.startswith("stored ")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    return result.stdout.strip()


def ask(root: Path, model: Path, *options: object, question: str = QUESTION) -> Any:
    """Ask for six tokens, and return the object that is printed."""
    arguments = ("--store", root, "--model", model, "--max-tokens", 6, "--json")
    result = run("ask", *arguments, *options, question)
    return json.loads(result.stdout)


def infos(root: Path) -> list[SnapshotInfo]:
    with PromptStore.open(root, read_only=True) as store:
        return list(store.snapshots())


def make_cache(n_tokens: int) -> list[KVCache]:
    """Make a cache of one layer, all zeros."""
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, n_tokens, 4)), mx.zeros((1, 1, n_tokens, 4)))
    return [layer]


def fill(root: Path, *prompts: Sequence[int], **options: Any) -> list[str]:
    """Store prompts; return their ids in order."""
    ids = []
    with PromptStore.open(root, min_tokens=1) as store:
        for tokens in prompts:
            before = {info.id for info in store.snapshots()}
            cache = make_cache(len(tokens))
            store.insert(Namespace("m" * 64), tokens, cache, **options)
            store.flush()
            (new,) = {info.id for info in store.snapshots()} - before
            ids.append(new)
    return ids


# ---------------------------------------------------------------- the command itself


def test_version() -> None:
    """``--version`` names the program and the version of the package."""
    assert (
        run("--version").stdout == f"promptstore, version {promptstore.__version__}\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    """Every command has a help text and all of its options have one."""
    text = run(command, "--help").stdout
    assert text.startswith(f"Usage: promptstore {command} ")
    found = main.commands[command]
    assert found.help
    for option in found.params:
        assert not isinstance(option, click.Option) or option.help


def test_all_commands_are_there() -> None:
    """The group has these commands and no others."""
    assert sorted(main.commands) == list(COMMANDS)


def test_import_is_light() -> None:
    """Importing the command imports nothing that is slow to import."""
    code = (
        "import sys\n"
        "import promptstore.cli\n"
        "slow = {'mlx', 'mlx.core', 'mlx_lm', 'numpy', 'transformers', "
        "'huggingface_hub', 'sqlite_utils'}\n"
        "print(slow & set(sys.modules))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True
    )
    assert process.stdout == "set()\n", process.stderr


def test_doctor_finds_nothing_wrong(cli_model: Path) -> None:
    """The doctor says what each kind of layer costs, and tries it after a restart."""
    result = run("doctor", "--model", cli_model, "--tokens", 48)
    assert "KVCache" in result.stdout
    assert "every position" in result.stdout
    assert "WRONG" not in result.stdout
    found = json.loads(run("doctor", "--model", cli_model, "--json").stdout)
    assert found["is_right"] is True
    assert [layer["kind"] for layer in found["layers"]] == ["full"]
    assert found["trials"][0]["max_diff"] == 0.0


def test_doctor_exits_with_1_when_something_is_wrong(
    cli_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that the store would serve wrongly is a failure, in one line."""
    monkeypatch.setattr(
        "promptstore.doctor.Trial.is_right", property(lambda trial: False)
    )
    result = run("doctor", "--model", cli_model, "--tokens", 24, code=1)
    assert "WRONG" in result.stdout
    assert result.stderr.startswith("promptstore: error: restored caches give other")


def test_disk_bytes_takes_sizes(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """A budget in words is one in bytes; a prompt that does not fit is a failure."""
    arguments = ("--store", cli_root, "--model", cli_model, "--system-file", cli_prompt)
    result = run("precompute", *arguments, "--disk-bytes", "2kB", code=1)
    assert "do not fit into 2000 bytes" in result.stderr
    run("precompute", *arguments, "--disk-bytes", "1.5 GiB")
    fail("precompute", *arguments, "--disk-bytes", "much", code=2)


def test_module_runs_the_command() -> None:
    """``python -m promptstore`` is the command under its own name."""
    process = run_process("ls", "--help")
    assert process.stdout.startswith("Usage: promptstore ls ")
    assert process.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["ls", "--nonsense"],
        ["ask", "--model", "m"],
        ["ask", "question"],
        ["ask", "--model", "m", ""],
        ["ask", "--model", "m", "--max-tokens", "0", "question"],
        ["ask", "--model", "m", "--temp", "-1", "question"],
        ["precompute", "--model", "m"],
        ["precompute", "--model", "m", "--system-file", "f", "--ttl", "0"],
        ["precompute", "--model", "m", "--system-file", "f", "--label", " "],
        ["rm"],
        ["rm", "--tenant", "t", "name"],
        ["verify", "--rate", "0"],
        ["verify", "--rate", "fast"],
        ["verify", "--max-age", "7"],
        ["verify", "--max-age", "old"],
    ],
)
def test_wrong_use(arguments: list[str]) -> None:
    """Wrong use is exit code 2, one line, and where to find help."""
    assert fail(*arguments, code=2).endswith("--help'.")


def test_no_arguments_show_the_help() -> None:
    """Without arguments the command shows its help, and that is wrong use."""
    assert "Usage: " in run(code=2).stderr


def test_errors_reach_a_program(tmp_path: Path) -> None:
    """A program that calls the command gets errors as exceptions."""
    arguments = ["ls", "--store", __file__]
    with pytest.raises(click.ClickException, match="is a file"):
        main.main(arguments, standalone_mode=False)
    with pytest.raises(click.ClickException):
        main.main(["nonsense"], standalone_mode=False)
    assert not main.main(["ls", "--store", str(tmp_path)], standalone_mode=False)


def test_unexpected_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody expects is one line that names its class."""

    def stumble(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(snapshots, "_infos", stumble)
    assert fail("ls") == "KeyError: 'x'; --debug shows where"


def test_debug_lets_errors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--debug`` shows the traceback of the first cause."""

    def stumble(*_: object, **__: object) -> None:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise errors.Failure("trouble") from error

    monkeypatch.setattr(snapshots, "_infos", stumble)
    assert isinstance(run("--debug", "ls", code=1).exception, KeyError)
    assert fail("ls") == "trouble"


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt is exit code 130, without a word."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshots, "_infos", interrupt)
    assert run("ls", code=130).output == ""


def test_long_errors_are_cut() -> None:
    """What went wrong is said in a line that fits a screen."""
    text = errors.Failure("missing: \n" + "weight " * 1000).message
    assert len(text) <= 500
    assert "\n" not in text


def test_closed_pipe_is_quiet(cli_root: Path) -> None:
    """A reader that goes away ends the command without a traceback."""
    fill(cli_root, *([i] * 3 for i in range(30)))
    command = [sys.executable, "-m", "promptstore", "ls", "--json", "--store", cli_root]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.stderr == ""
    assert process.returncode == 1


# ----------------------------------------------------------------------- precompute


def test_precompute_then_new_process(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """A new process reuses from disk what was precomputed, and answers as without."""
    arguments = ("--model", cli_model, "--system-file", cli_prompt, "--store", cli_root)
    process = run_process("precompute", *arguments, "--label", "law")
    line = f"stored {N_SHARED} tokens as law: 0 reused, {N_SHARED} prefilled\n"
    assert (process.stdout, process.stderr) == (line, "")
    options = ("--max-tokens", 6, "--json", QUESTION)
    warm = run_process("ask", *arguments, *options)
    cold = run_process("ask", *arguments, "--no-store", *options)
    facts = json.loads(warm.stdout)
    assert facts["answer"] == json.loads(cold.stdout)["answer"]
    assert (facts["n_prompt"], facts["n_reused"]) == (N_PROMPT, N_SHARED)
    assert facts["source"] == "disk"


def test_precompute_twice(cli_model: Path, cli_root: Path, cli_prompt: Path) -> None:
    """What is stored already is not computed again, and the line says so."""
    precompute(cli_root, cli_model, cli_prompt)
    (info,) = infos(cli_root)
    line = precompute(cli_root, cli_model, cli_prompt)
    assert line == f"stored {N_SHARED} tokens as {info.id[:8]}: all were there"
    assert [i.id for i in infos(cli_root)] == [info.id]


def test_precompute_marks(cli_model: Path, cli_root: Path, cli_prompt: Path) -> None:
    """A label, a pin and a time to live are stored with the prompt."""
    marks = ("--label", "law", "--pin", "--ttl", 3600)
    assert "as law:" in precompute(cli_root, cli_model, cli_prompt, *marks)
    (info,) = infos(cli_root)
    assert (info.label, info.pinned, info.kind) == ("law", True, "system")
    assert info.expires_s is not None
    assert 3500 < info.expires_s - time.time() <= 3600


def test_precompute_marks_later(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """Marks are given to a prompt that is stored already, and the pin is taken."""
    precompute(cli_root, cli_model, cli_prompt)
    precompute(cli_root, cli_model, cli_prompt, "--label", "law", "--pin")
    (info,) = infos(cli_root)
    assert (info.label, info.pinned) == ("law", True)
    precompute(cli_root, cli_model, cli_prompt)
    assert infos(cli_root)[0].pinned
    precompute(cli_root, cli_model, cli_prompt, "--no-pin")
    (info,) = infos(cli_root)
    assert (info.label, info.pinned) == ("law", False)


def test_precompute_inside_a_conversation(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """A prompt that a longer one begins with is there; marks get their own row."""
    ask(cli_root, cli_model, "--system-file", cli_prompt)
    (whole,) = infos(cli_root)
    line = precompute(cli_root, cli_model, cli_prompt)
    assert line == f"stored {N_SHARED} tokens as {whole.id[:8]}: all were there"
    precompute(cli_root, cli_model, cli_prompt, "--label", "law", "--pin")
    own = next(info for info in infos(cli_root) if info.label == "law")
    assert (own.start, own.end, own.parent) == (N_SHARED, N_SHARED, whole.id)
    line = precompute(cli_root, cli_model, cli_prompt, "--no-pin")
    assert line == f"stored {N_SHARED} tokens as {own.id[:8]}: all were there"
    assert not any(info.pinned for info in infos(cli_root))


def test_precompute_continues_what_is_there(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """Of a prompt that begins like a stored one, only the rest is computed."""
    precompute(cli_root, cli_model, cli_prompt)
    cli_prompt.write_text(DOCUMENT + " More.")
    line = precompute(cli_root, cli_model, cli_prompt)
    n_common, n_all = len("ssystem\n" + DOCUMENT), N_SHARED + len(" More.")
    assert line.endswith(f"{n_common} reused, {n_all - n_common} prefilled")
    assert sum(info.end - info.start for info in infos(cli_root)) == (
        N_SHARED + n_all - n_common
    )


def test_precompute_a_short_prompt(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """A prompt of a few tokens is stored as well, since it was asked for."""
    cli_prompt.write_text("Be kind.")
    precompute(cli_root, cli_model, cli_prompt)
    assert infos(cli_root)[0].end == N_SHARED - len(DOCUMENT) + len("Be kind.")


def test_precompute_interrupted(
    cli_model: Path,
    cli_root: Path,
    cli_prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted run stores what it has computed; the next one goes on there."""
    prefill = promptstore.mlx_lm.prefill

    def interrupt(*args: Any, progress: Callable[[int, int], None], **_: Any) -> None:
        def note(done: int, total: int) -> None:
            progress(done, total)
            if done == 50:
                raise KeyboardInterrupt

        prefill(*args, step_size=50, progress=note)

    arguments = ("--store", cli_root, "--model", cli_model, "--system-file", cli_prompt)
    with monkeypatch.context() as patch:
        patch.setattr(promptstore.mlx_lm.generation, "prefill", interrupt)
        result = run("precompute", *arguments, "--label", "law", code=130)
    assert result.output == ""
    assert [(info.end, info.label) for info in infos(cli_root)] == [(50, None)]
    line = precompute(cli_root, cli_model, cli_prompt)
    assert line.endswith(f"50 reused, {N_SHARED - 50} prefilled")


def test_precompute_on_a_full_disk(
    cli_model: Path,
    cli_root: Path,
    cli_prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that was not written is a failure, and no ``stored`` is printed."""
    monkeypatch.setattr(DiskTier, "save", no_space)
    arguments = ("--store", cli_root, "--model", cli_model, "--system-file", cli_prompt)
    result = run("precompute", *arguments, code=1)
    assert result.stdout == ""
    assert "promptstore: error: 1 insert(s) did not reach the disk" in result.stderr


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_precompute_of_an_unknown_cache(
    cli_model: Path,
    cli_root: Path,
    cli_prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model whose cache the disk cannot take is a failure that says so."""

    class Odd(KVCache):
        pass

    for module in (mlx_cache, promptstore.mlx_lm.generation):
        monkeypatch.setattr(module, "make_prompt_cache", lambda *_: [Odd(), Odd()])
    arguments = ("--store", cli_root, "--model", cli_model, "--system-file", cli_prompt)
    result = run("precompute", *arguments, code=1)
    assert result.stdout == ""
    error = "promptstore: error: the prompt was not stored: unknown-cache-class\n"
    assert result.stderr.endswith(error)


def test_tenants_share_nothing(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """What one tenant precomputed is reused by that tenant only."""
    precompute(cli_root, cli_model, cli_prompt, "--tenant", "ann")
    system = ("--system-file", cli_prompt)
    assert ask(cli_root, cli_model, *system, "--tenant", "ann")["n_reused"] == N_SHARED
    assert ask(cli_root, cli_model, *system)["n_reused"] == 0


def test_adapter_is_part_of_the_identity(
    cli_model: Path, cli_root: Path, cli_prompt: Path, tmp_path: Path
) -> None:
    """What was precomputed with an adapter is reused with that adapter only."""
    adapter = make_adapter(cli_model, tmp_path / "adapter")
    options = ("--adapter-path", adapter)
    precompute(cli_root, cli_model, cli_prompt, *options)
    system = ("--system-file", cli_prompt)
    warm = ask(cli_root, cli_model, *system, *options)
    cold = ask(cli_root, cli_model, *system, *options, "--no-store")
    plain = ask(cli_root, cli_model, *system)
    assert (warm["n_reused"], plain["n_reused"]) == (N_SHARED, 0)
    assert warm["answer"] == cold["answer"]


def make_adapter(model_path: Path, path: Path) -> Path:
    """Make a LoRA adapter of random weights."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    settings = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    model, _ = utils.load_model(model_path)
    linear_to_lora_layers(model, 2, settings)
    names = [name for name, _ in tree_flatten(model.parameters()) if "lora" in name]
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    path.mkdir()
    weights = {name: mx.random.normal(shapes[name]) for name in names}
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    facts = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    write_json(path / "adapter_config.json", facts)
    return path


# ------------------------------------------------------------------------------ ask


def test_ask_prints_the_answer(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """The answer is all there is on stdout; one line on stderr tells of the reuse."""
    precompute(cli_root, cli_model, cli_prompt)
    arguments = ("--store", cli_root, "--model", cli_model, "--system-file", cli_prompt)
    result = run("ask", *arguments, "--max-tokens", 6, QUESTION)
    cold = ask(cli_root, cli_model, "--system-file", cli_prompt, "--no-store")
    assert result.stdout == cold["answer"] + "\n"
    n_new = N_PROMPT - N_SHARED
    line = (
        f"{N_PROMPT} tokens: {N_SHARED} reused (disk), {n_new} prefilled, first token"
    )
    assert result.stderr.startswith(line)
    assert result.stderr.endswith(f" s, no-entry({N_SHARED})\n")


def test_ask_json(cli_model: Path, cli_root: Path, cli_prompt: Path) -> None:
    """``--json`` prints one object of exactly these fields."""
    facts = ask(cli_root, cli_model, "--system-file", cli_prompt)
    answer, first_token_s = facts.pop("answer"), facts.pop("first_token_s")
    assert isinstance(answer, str)
    assert first_token_s > 0
    assert facts == {
        "n_prompt": N_PROMPT,
        "n_reused": 0,
        "n_prefilled": N_PROMPT,
        "source": "miss",
        "reason": "no-entry(0)",
    }


def test_ask_again(cli_model: Path, cli_root: Path) -> None:
    """The same question again reuses all but its last token, and says the same."""
    first, second = (
        ask(cli_root, cli_model, question="Who are the people?" * 4) for _ in range(2)
    )
    assert first["answer"] == second["answer"]
    assert (second["n_prefilled"], second["reason"]) == (1, None)


def test_ask_without_store(cli_model: Path, cli_root: Path) -> None:
    """``--no-store`` neither makes nor reads a store."""
    facts = ask(cli_root, cli_model, "--no-store")
    assert not cli_root.exists()
    assert (facts["n_reused"], facts["source"]) == (0, "miss")
    assert facts["reason"] == "disabled(0)"


def test_ask_from_stdin(cli_model: Path, cli_root: Path) -> None:
    """The question ``-`` is read from stdin."""
    arguments = ("--store", cli_root, "--model", cli_model, "--json", "--max-tokens", 6)
    result = run("ask", *arguments, "-", stdin="Who écrit?")
    expected = ask(cli_root, cli_model, "--no-store", question="Who écrit?")
    assert json.loads(result.stdout)["answer"] == expected["answer"]


def test_ask_with_temperature(cli_model: Path, cli_root: Path) -> None:
    """A temperature makes an answer differ from the greedy one."""
    greedy = ask(cli_root, cli_model, "--no-store", "--max-tokens", 30)
    warm = ask(cli_root, cli_model, "--no-store", "--max-tokens", 30, "--temp", 5)
    assert greedy["answer"] != warm["answer"]


def test_ask_interrupted(
    cli_model: Path, cli_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is interrupted is stored as far as it came."""
    plain = click.echo

    def interrupt(message: object = None, **options: Any) -> None:
        if options.get("nl") is False:
            raise KeyboardInterrupt
        plain(message, **options)

    monkeypatch.setattr(click, "echo", interrupt)
    question = "Who are the people?" * 4
    result = run("ask", "--store", cli_root, "--model", cli_model, question, code=130)
    assert result.output == ""
    monkeypatch.undo()
    assert ask(cli_root, cli_model, question=question)["n_prefilled"] == 1


def test_ask_on_a_full_disk(
    cli_model: Path, cli_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that cannot be stored is still an answer, with one warning."""
    expected = ask(cli_root, cli_model, "--no-store", question="x" * 80)
    monkeypatch.setattr(DiskTier, "save", no_space)
    arguments = ("--store", cli_root, "--model", cli_model, "--max-tokens", 6)
    result = run("ask", *arguments, "x" * 80)
    assert result.stdout == expected["answer"] + "\n"
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("promptstore: warning: ENOSPC: ")


def test_damaged_snapshot_costs_a_miss(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """A damaged file is a miss with a warning, and the answer is the cold one."""
    precompute(cli_root, cli_model, cli_prompt)
    damage(cli_root)
    facts = ask(cli_root, cli_model, "--system-file", cli_prompt)
    cold = ask(cli_root, cli_model, "--system-file", cli_prompt, "--no-store")
    assert (facts["n_reused"], facts["answer"]) == (0, cold["answer"])


def damage(root: Path) -> None:
    """Flip a byte of the rows of every snapshot."""
    for file in root.glob("snapshots/*/*.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


# ------------------------------------------------------------------------ bad input


def test_prompt_file_that_is_no_good(
    cli_model: Path, cli_root: Path, tmp_path: Path
) -> None:
    """A prompt file that is missing, empty or not UTF-8 is named; nothing is made."""
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b" \n")
    for name, problem in (
        ("latin", "not UTF-8 (byte 3)"),
        ("empty", "empty"),
        ("missing", "No such file or directory"),
        ("", "Is a directory"),
    ):
        file = tmp_path / name
        arguments = ("--store", cli_root, "--model", cli_model, "--system-file", file)
        assert fail("precompute", *arguments) == f"{file}: {problem}"
        assert fail("ask", *arguments, QUESTION) == f"{file}: {problem}"
    assert not cli_root.exists()


def test_byte_order_mark_is_no_text(
    cli_model: Path, cli_root: Path, cli_prompt: Path
) -> None:
    """A byte order mark at the beginning of a prompt file is left out."""
    precompute(cli_root, cli_model, cli_prompt)
    cli_prompt.write_bytes(b"\xef\xbb\xbf" + DOCUMENT.encode())
    assert "all were there" in precompute(cli_root, cli_model, cli_prompt)


def test_question_on_stdin_that_is_no_good(cli_model: Path) -> None:
    """A question on stdin that is empty or not UTF-8 is a one-line error."""
    arguments = ("ask", "--model", cli_model, "-")
    assert fail(*arguments, stdin=b" ") == "the question on stdin: empty"
    error = "the question on stdin: not UTF-8 (byte 0)"
    assert fail(*arguments, stdin=b"\xff") == error


@pytest.mark.parametrize("option", ["--no-store", "--tenant=x"])
def test_model_that_is_no_good(
    option: str, cli_model: Path, cli_root: Path, tmp_path: Path
) -> None:
    """A model directory that is missing, empty or damaged is a one-line error."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    copy_model(cli_model, tmp_path / "untyped", config={})
    copy_model(cli_model, tmp_path / "unknown", config={"model_type": "perceptron"})
    copy_model(cli_model, tmp_path / "garbage", weights=b"garbage")
    copy_model(cli_model, tmp_path / "other", config=CONFIG | {"hidden_size": 64})
    for name in ("missing", "file", "empty", "untyped", "unknown", "garbage", "other"):
        arguments = ("--store", cli_root, "--model", tmp_path / name, option, QUESTION)
        assert str(tmp_path / name) in fail("ask", *arguments)


def copy_model(
    model: Path, path: Path, config: Any = CONFIG, weights: bytes | None = None
) -> None:
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    write_json(path / "config.json", config)
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)


def test_adapter_that_is_missing(
    cli_model: Path, cli_root: Path, tmp_path: Path
) -> None:
    """An adapter that is not there is a one-line error, with and without a store."""
    arguments = ("--store", cli_root, "--model", cli_model, "--adapter-path")
    for options in ((), ("--no-store",)):
        error = fail("ask", *arguments, tmp_path / "none", *options, QUESTION)
        assert str(tmp_path / "none") in error


def test_template_that_refuses(
    cli_model: Path, cli_root: Path, cli_prompt: Path, tmp_path: Path
) -> None:
    """A chat template that takes no system message is a one-line error."""
    copy_model(cli_model, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    refusal = "{% if m['role'] == 'system' %}{{ raise_exception('No.') }}{% endif %}"
    template = TEMPLATE.replace("<s>", refusal + "<s>", 1)
    facts = json.loads(file.read_text())
    write_json(file, facts | {"chat_template": template})
    arguments = ("--model", tmp_path / "model", "--system-file", cli_prompt)
    for command in (("precompute",), ("ask", QUESTION)):
        error = fail(*command, "--store", cli_root, *arguments)
        assert error == "the model's chat template takes no system message: No."


def test_store_that_is_no_good(
    cli_model: Path, cli_prompt: Path, tmp_path: Path
) -> None:
    """A store's path that is a file, or no store's index, is a one-line error."""
    file = tmp_path / "file"
    file.write_text("precious")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.db").write_text("no database " * 1000)
    run_model = ("--model", cli_model, "--system-file", cli_prompt)
    for command in (
        ("ls",),
        ("stats",),
        ("check",),
        ("check", "--repair"),
        ("rm", "x"),
        ("precompute", *run_model),
        ("ask", *run_model, QUESTION),
    ):
        for path in (file, tmp_path / "index"):
            assert str(path) in fail(*command, "--store", path)
    assert file.read_text() == "precious"


# --------------------------------------------------------------------------- models


def test_hub_id_is_looked_up_here_first(
    cli_model: Path, cli_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that the hub's cache holds is used without asking the hub."""
    set_hub(monkeypatch, cached=cli_model)
    assert ask(cli_root, Path("org/tiny"))["n_prompt"]


def test_hub_id_is_downloaded(
    cli_model: Path, cli_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not here is downloaded as mlx-lm does it."""
    set_hub(monkeypatch, remote=cli_model)
    assert ask(cli_root, Path("org/tiny"))["n_prompt"]


def test_hub_id_that_is_unknown(
    cli_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is neither here nor on the hub is a one-line error."""
    set_hub(monkeypatch)
    error = fail("ask", "--store", cli_root, "--model", "org/tiny", QUESTION)
    assert error == (
        "org/tiny: neither a model directory nor to be had from the hub: no network"
    )


def set_hub(
    monkeypatch: pytest.MonkeyPatch,
    cached: Path | None = None,
    remote: Path | None = None,
) -> None:
    """Make ``org/tiny`` a model of the hub that is cached here, or only there."""
    plain = utils._download

    def find(found: Path | None) -> Path:
        if found is None:
            raise OSError("no network\nand much more about it")
        return found

    def download(name: str, **options: Any) -> Path:
        return find(remote) if name == "org/tiny" else plain(name, **options)

    monkeypatch.setattr(utils, "hf_repo_to_path", lambda _: find(cached))
    monkeypatch.setattr(utils, "_download", download)


# ------------------------------------------------------------------ ls, stats, check


@pytest.mark.parametrize("command", ["ls", "stats", "check", "verify"])
def test_looking_makes_no_store(command: str, cli_root: Path) -> None:
    """Where there is no store, looking says so, succeeds and makes none."""
    assert str(cli_root) in run(command, "--store", cli_root).stdout
    cli_root.mkdir()
    assert str(cli_root) in run(command, "--store", cli_root).stdout
    assert list(cli_root.iterdir()) == []
    json.loads(run(command, "--json", "--store", cli_root).stdout)


@pytest.mark.parametrize("command", ["ls", "stats", "check"])
def test_looking_changes_nothing(command: str, cli_root: Path) -> None:
    """Looking leaves the files of a store as they are."""
    fill(cli_root, [1, 2, 3], label="x", ttl_s=0.001)
    before = contents(cli_root)
    run(command, "--store", cli_root)
    assert contents(cli_root) == before


def contents(root: Path) -> dict[Path, bytes]:
    """Return all files but those that SQLite keeps while a reader is there."""
    files = [file for file in root.rglob("*") if file.is_file()]
    passing = (".db-shm", ".db-wal")
    return {f: f.read_bytes() for f in files if not f.name.endswith(passing)}


def test_ls(cli_root: Path) -> None:
    """``ls`` shows of each snapshot what a user needs to choose among them."""
    long, longer = [1] * 300, [1] * 300 + [2] * 1000
    first, second = fill(cli_root, long, longer)
    fill(cli_root, [3] * 5, label="[red]\tlaw", pin=True, kind="system")
    lines = run("ls", "--store", cli_root).stdout.splitlines()
    words = {line.split()[0]: line for line in lines if line.split()}
    assert words[first[:8]].split()[:4] == [first[:8], "mmmmmmmm", "300", "300"]
    assert words[second[:8]].split()[:4] == [second[:8], "mmmmmmmm", "1,300", "1,000"]
    (law,) = (line for line in lines if "[red]" in line)
    assert {"system", "pin", "now"} <= set(law.split())


def test_ls_names_adapter_and_tenant(cli_root: Path) -> None:
    """Namespaces that differ by adapter or tenant look different."""
    with PromptStore.open(cli_root, min_tokens=1) as store:
        for namespace in (
            Namespace("m" * 64, adapter="a" * 64),
            Namespace("m" * 64, tenant="ann"),
        ):
            store.insert(namespace, [1, 2], make_cache(2))
    text = run("ls", "--store", cli_root).stdout
    assert "mmmmmmmm+aaaa" in text
    assert "mmmmmmmm@ann" in text


def test_ls_json(cli_root: Path) -> None:
    """``ls --json`` prints all that the store knows of its snapshots."""
    fill(cli_root, [1, 2, 3], [1, 2, 4], label="é", ttl_s=1000)
    listed = json.loads(run("ls", "--json", "--store", cli_root).stdout)
    assert listed == [asdict(info) for info in infos(cli_root)]


def test_ages() -> None:
    """Ages are told in the largest unit that is not zero."""
    ages = [output.age(s) for s in (-1, 59, 60, 7200, 90_000, 9e6)]
    assert ages[:2] == ["just now", "just now"]
    assert ages[2:] == ["1 min ago", "2 h ago", "1 d ago", "104 d ago"]


def test_stats(cli_root: Path) -> None:
    """``stats`` sums up what is on disk."""
    fill(cli_root, [1, 2, 3], [1, 2, 4], [5], pin=True)
    stats = json.loads(run("stats", "--json", "--store", cli_root).stdout)

    def files() -> Iterator[Path]:
        return cli_root.glob("snapshots/*/*")

    assert stats.pop("snapshot_bytes") == sum(file.stat().st_size for file in files())
    assert stats.pop("disk_bytes") > 0
    written = stats.pop("written_today_bytes"), stats.pop("written_30_days_bytes")
    assert max(written) == sum(file.stat().st_size for file in files())
    assert stats == {
        "store": str(cli_root),
        "n_snapshots": 3,
        "n_namespaces": 1,
        "n_tokens": 5,
        "n_pinned": 3,
        "hits": stats["hits"],
    }
    text = run("stats", "--store", cli_root).stdout
    assert ["snapshots", "3"] in [line.split() for line in text.splitlines()]


def test_stats_count_the_bytes_of_thirty_days() -> None:
    """Today counts, and so do the 29 days before; a day in the future does not."""
    days = {"2026-01-29": 1, "2026-01-30": 2, "2026-02-28": 4, "2026-03-01": 8}
    assert snapshots._written(days, date(2026, 2, 28)) == (4, 6)
    assert snapshots._written(days, date(2026, 2, 27)) == (0, 3)
    assert snapshots._written({}, date(2026, 2, 28)) == (0, 0)


def test_store_by_environment(cli_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PROMPTSTORE_DIR`` names the store, and ``--store`` overrides it."""
    fill(cli_root, [1, 2, 3])
    monkeypatch.setenv("PROMPTSTORE_DIR", str(cli_root))
    assert len(json.loads(run("ls", "--json").stdout)) == 1
    other = ("--store", cli_root / "other")
    assert json.loads(run("ls", "--json", *other).stdout) == []


def test_default_store(tmp_path: Path) -> None:
    """Without a choice the store is where `PromptStore.open` puts it."""
    with PromptStore.open(min_tokens=1) as store:
        store.insert(Namespace("m"), [1, 2], make_cache(2))
    assert len(json.loads(run("ls", "--json").stdout)) == 1


def test_check_finds_and_repairs(cli_root: Path) -> None:
    """``check`` fails while anything is wrong; ``--repair`` drops what is damaged."""
    (id_,) = fill(cli_root, list(range(600)))
    assert run("check", "--store", cli_root).stdout == "nothing is wrong\n"
    damage(cli_root)
    found = run("check", "--store", cli_root, code=1).stdout
    assert found.startswith(f"corrupt {id_}: ")
    (finding,) = json.loads(run("check", "--json", "--store", cli_root, code=1).stdout)
    assert (finding["kind"], finding["name"]) == ("corrupt", id_)
    repaired = run("check", "--repair", "--store", cli_root)
    assert repaired.stdout == "1 finding repaired\n"
    assert infos(cli_root) == []


def test_check_leaves_foreign_files(tmp_path: Path) -> None:
    """A file that is not the store's is reported, and stays even when repairing."""
    fill(tmp_path, [1, 2, 3])
    note = tmp_path / "snapshots" / "note.txt"
    note.write_text("precious")
    text = run("check", "--repair", "--store", tmp_path).stdout
    assert text == "foreign snapshots/note.txt: is not ours\n"
    assert note.read_text() == "precious"


# --------------------------------------------------------------------------- verify


def verify(root: Path, *options: object, code: int = 0) -> str:
    return run("verify", "--store", root, "--rate", "1TB", *options, code=code).stdout


def test_verify_goes_over_all_once(cli_root: Path) -> None:
    """It says how many it verified; within the age there is nothing more to do."""
    fill(cli_root, [1, 2], [3, 4])
    assert verify(cli_root) == "verified 2 snapshots; nothing is wrong\n"
    assert verify(cli_root) == "verified 0 snapshots; nothing is wrong\n"
    for age, n in (("300s", 0), ("5min", 0), ("0.5h", 0), ("1d", 0), ("0", 2)):
        found = json.loads(verify(cli_root, "--max-age", age, "--json"))
        assert found == {
            "n_done": n,
            "n_total": n,
            "interrupted": False,
            "findings": [],
        }


def test_verify_drops_what_is_damaged(cli_root: Path) -> None:
    """Damage is told, dropped and exit code 1; a dry run drops nothing."""
    (id_,) = fill(cli_root, list(range(600)))
    damage(cli_root)
    before = contents(cli_root)
    for _ in range(2):
        told = verify(cli_root, "--dry-run", code=1)
        assert told.startswith(f"corrupt {id_}: ")
        assert told.endswith("\nlooked at 1 snapshot; 1 not as written\n")
    assert contents(cli_root) == before
    (finding,) = json.loads(verify(cli_root, "--json", code=1))["findings"]
    assert (finding["kind"], finding["name"]) == ("corrupt", id_)
    assert infos(cli_root) == []
    assert verify(cli_root) == "verified 0 snapshots; nothing is wrong\n"


def test_verify_interrupted(cli_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt says how far it came, and the next run does the rest."""
    fill(cli_root, [1, 2], [3, 4], [5, 6])
    real = PromptStore.verify

    def interrupted(store: PromptStore, *, progress: Any, **options: Any) -> Any:
        def note(n_done: int, n_total: int) -> None:
            progress(n_done, n_total)
            if n_done == 2:
                raise KeyboardInterrupt

        return real(store, progress=note, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PromptStore, "verify", interrupted)
        told = verify(cli_root, code=130)
    assert told == "verified 2 of 3 snapshots; run it again to go on\n"
    assert verify(cli_root) == "verified 1 snapshot; nothing is wrong\n"


def test_verify_beside_a_server(cli_root: Path) -> None:
    """Another process verifies while this one has the store open, and goes on."""
    fill(cli_root, [1, 2])
    with PromptStore.open(cli_root, min_tokens=1) as store:
        process = run_process("verify", "--store", cli_root)
        assert process.stdout == "verified 1 snapshot; nothing is wrong\n"
        assert (process.returncode, process.stderr) == (0, "")
        store.insert(Namespace("m"), [7, 8], make_cache(2))
        store.flush()
        assert len(list(store.snapshots())) == 2


# ------------------------------------------------------------------------------- rm


def remaining(root: Path) -> set[str]:
    return {info.id for info in infos(root)}


def test_rm_by_label_and_by_id(cli_root: Path) -> None:
    """Snapshots are deleted by label, by id and by its beginning."""
    (labelled,) = fill(cli_root, [9, 9], label="law", pin=True)
    ids = fill(cli_root, [1, 1], [2, 2], [3, 3])
    names = ("law", ids[0], ids[1][:6])
    sizes = {info.id: info.nbytes for info in infos(cli_root)}
    text = run("rm", "--store", cli_root, *names).stdout
    assert remaining(cli_root) == {ids[2]}
    size = sum(sizes[id_] for id_ in (labelled, *ids[:2]))
    assert text == f"deleted 3 snapshots, {size / 1000:.1f} kB\n"


def test_rm_of_the_same_twice(cli_root: Path) -> None:
    """A snapshot that is named twice is deleted once."""
    (id_,) = fill(cli_root, [1, 1], label="law")
    text = run("rm", "--store", cli_root, "law", id_, id_[:6]).stdout
    assert text.startswith("deleted 1 snapshot, ")


def test_rm_of_nothing(cli_root: Path) -> None:
    """A name that is unknown or too short deletes nothing, nor what is named too."""
    (id_,) = fill(cli_root, [1, 1])
    for name in ("law", id_[:5], "f" * 32):
        error = fail("rm", "--store", cli_root, id_, name)
        assert error == f"no snapshot has the id or label {name!r}"
    assert remaining(cli_root) == {id_}
    assert fail("rm", "--store", cli_root / "no", id_) == f"no store in {cli_root}/no"
    assert not (cli_root / "no").exists()


def test_rm_of_an_ambiguous_id(cli_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning that several ids have deletes none of them."""
    ids = iter(["ab" * 16, "ab" * 15 + "cd"])
    secrets = SimpleNamespace(token_hex=lambda _: next(ids))
    monkeypatch.setattr("promptstore.disk.secrets", secrets)
    fill(cli_root, [1, 1], [2, 2])
    assert fail("rm", "--store", cli_root, "abab" * 2) == "2 ids begin with 'abababab'"
    assert len(remaining(cli_root)) == 2


def test_rm_asks_when_more_would_go(
    cli_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more would go than was named, a yes is needed; descendants go with it."""
    root, child, _ = fill(cli_root, [1], [1, 2], [1, 2, 3])
    (other,) = fill(cli_root, [4])
    arguments = ("rm", "--store", cli_root, root, child)
    question = "3 snapshots would go, 1 more than you named"
    assert fail(*arguments) == f"{question}; --yes deletes them all"
    monkeypatch.setattr(snapshots, "_is_interactive", lambda: True)
    assert run(*arguments, stdin="n\n").stdout == "nothing was deleted\n"
    assert len(remaining(cli_root)) == 4
    answered = run(*arguments, stdin="y\n")
    assert question in answered.stderr
    assert answered.stdout.startswith("deleted 3 snapshots, ")
    assert remaining(cli_root) == {other}


def test_rm_with_yes_does_not_ask(cli_root: Path) -> None:
    """``--yes`` deletes descendants without a question."""
    root, *_ = fill(cli_root, [1], [1, 2], [1, 2, 3])
    assert run("rm", "--store", cli_root, "--yes", root).stderr == ""
    assert remaining(cli_root) == set()


def test_rm_of_a_whole_branch_does_not_ask(cli_root: Path) -> None:
    """Where all that goes was named, nothing is asked."""
    ids = fill(cli_root, [1], [1, 2], [1, 2, 3])
    run("rm", "--store", cli_root, *ids)
    assert remaining(cli_root) == set()


def test_rm_of_a_label_of_several_models(cli_root: Path) -> None:
    """A label that several models' prompts bear is more than was named."""
    with PromptStore.open(cli_root, min_tokens=1) as store:
        for model in ("one", "two"):
            store.insert(Namespace(model), [1, 2], make_cache(2), label="law")
    assert fail("rm", "--store", cli_root, "law").startswith("2 snapshots would go")
    run("rm", "--store", cli_root, "--yes", "law")
    assert remaining(cli_root) == set()


@pytest.fixture
def tenants(cli_root: Path) -> Path:
    """A store in which three tenants, one without a name, have two prompts each."""
    with PromptStore.open(cli_root, min_tokens=1) as store:
        for tenant in ("", "ann", "bob"):
            for model in ("one", "two"):
                namespace = Namespace(model, tenant=tenant)
                store.insert(namespace, [1, 2], make_cache(2), label="law")
    return cli_root


@pytest.mark.parametrize(
    ("tenant", "whose"), [("ann", "of tenant 'ann'"), ("", "of no tenant")]
)
def test_rm_of_a_tenant_asks(
    tenants: Path, monkeypatch: pytest.MonkeyPatch, tenant: str, whose: str
) -> None:
    """All prompts of a tenant go after a yes, and nobody else's."""
    arguments = ("rm", "--store", tenants, "--tenant", tenant)
    question = f"2 snapshots {whose} would go"
    assert fail(*arguments) == f"{question}; --yes deletes them all"
    monkeypatch.setattr(snapshots, "_is_interactive", lambda: True)
    assert run(*arguments, stdin="n\n").stdout == "nothing was deleted\n"
    assert len(remaining(tenants)) == 6
    answered = run(*arguments, stdin="y\n")
    assert question in answered.stderr
    assert answered.stdout.startswith("deleted 2 snapshots, ")
    left = {info.namespace.tenant for info in infos(tenants)}
    assert left == {"", "ann", "bob"} - {tenant}


def test_rm_of_a_tenant_with_yes(tenants: Path) -> None:
    """``--yes`` asks nothing; of a tenant that has nothing, nothing is deleted."""
    arguments = ("rm", "--store", tenants, "--yes", "--tenant", "bob")
    assert run(*arguments).stderr == ""
    assert len(remaining(tenants)) == 4
    assert run(*arguments).stdout == "deleted 0 snapshots, 0 bytes\n"


# ------------------------------------------------------------------------- progress


@pytest.mark.parametrize(
    ("is_terminal", "delay_s"), [(True, 0.01), (True, 60), (False, 0.01)]
)
def test_bar(
    is_terminal: bool, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar is drawn after its delay, on a terminal, and is gone when it ends."""
    monkeypatch.setattr(bar, "DELAY_S", delay_s)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100)
    with Bar(console) as drawn:
        drawn.phase("prefill")
        drawn.update(256, 1000)
        end_s = time.monotonic() + (5 if is_terminal and delay_s < 1 else 0.1)
        while "256/1000" not in file.getvalue() and time.monotonic() < end_s:
            time.sleep(0.01)
    assert ("256/1000" in file.getvalue()) == (is_terminal and delay_s < 1)
    length = len(file.getvalue())
    drawn.update(512, 1000)
    drawn.close()
    time.sleep(0.05)
    assert len(file.getvalue()) == length


# ------------------------------------------------------------------- the real model


@pytest.mark.real_model
def test_real_model_answers_the_same(cli_root: Path, cli_prompt: Path) -> None:
    """On a real model, an answer in a new process from disk equals the cold one."""
    model = os.environ.get("PROMPTSTORE_TEST_MODEL", "")
    if not Path(model, "config.json").is_file():
        pytest.skip("PROMPTSTORE_TEST_MODEL names no model; `make test` makes one")
    cli_prompt.write_text(DOCUMENT * 6)
    arguments = ("--model", model, "--system-file", cli_prompt, "--store", cli_root)
    stored = run_process("precompute", *arguments)
    assert stored.stdout.startswith("stored "), stored.stderr
    n_stored = int(stored.stdout.split()[1])
    options = ("--max-tokens", 12, "--json", "What do the people want to form?")
    warm, cold = (
        json.loads(run_process("ask", *arguments, *extra, *options).stdout)
        for extra in ((), ("--no-store",))
    )
    assert (warm["n_reused"], warm["source"]) == (n_stored, "disk")
    assert warm["answer"] == cold["answer"] != ""
    assert cold["n_reused"] == 0
