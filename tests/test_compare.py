"""Facts about `promptstore probe`: what is stored against a cold run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from builders import kv
from click.testing import CliRunner, Result
from local_servers import local
from servers import cached, text_of
from test_architectures import config_of
from tiny import CONFIG, N_VOCABULARY, save_model

from promptstore import Namespace, PromptStore, UnknownSnapshot, chat
from promptstore.cli import main
from promptstore.doctor import compare
from promptstore.mlx_lm import precompute

TURNS = [
    {"role": "system", "content": "You know the history of bridges. " * 4},
    {"role": "user", "content": "How old is the oldest?"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a store may be; the package's logger is left as it was."""
    yield tmp_path / "store"
    logging.getLogger("promptstore").handlers.clear()


def save(root: Path, path: Path, *, wrong: bool = False) -> list[int]:
    """Store the prompt of a request; return its tokens."""
    model, tokenizer = mlx_lm.load(str(path))[:2]
    ids = chat.prompt_tokens(tokenizer, TURNS)
    with PromptStore.open(root, memory_bytes=0) as store:
        namespace = Namespace.from_model(path)
        if wrong:
            store.insert(namespace, ids, kv(len(ids), head_dim=8))
        else:
            precompute(model, ids, store=store, namespace=namespace)
    return ids


def run(root: Path, model: Path, *more: object, code: int = 0) -> Result:
    """Run the command in this process and expect an exit code."""
    texts = ["probe", "--store", root, "--model", model, *more]
    result = CliRunner().invoke(main, [str(text) for text in texts])
    assert result.exit_code == code, result.output
    return result


def test_what_was_used_last_is_compared(root: Path, model: Path) -> None:
    """All of it is reused, and gives the logits of a cold run."""
    ids = save(root, model)
    facts = json.loads(run(root, model, "--json").stdout)
    assert (facts["n_reused"], facts["n_tokens"]) == (len(ids), len(ids) + 1)
    assert facts["is_right"] is True
    assert facts["max_diff"] <= facts["tolerance"] == 1e-4
    assert facts["saved_s"] == facts["cold_s"] - facts["restored_s"]


def test_a_request_is_compared(root: Path, model: Path, tmp_path: Path) -> None:
    """As far as it is stored; the rest is computed."""
    save(root, model)
    turns = [TURNS[0], {"role": "user", "content": "Which one stands?"}]
    (tmp_path / "m.json").write_text(json.dumps(turns))
    out = run(root, model, "--messages", tmp_path / "m.json").stdout
    assert "diverged-at(" in out
    assert ": right\n" in out


def test_wrong_kv_is_found(root: Path, model: Path) -> None:
    """Other logits are a failure, in one line."""
    save(root, model, wrong=True)
    result = run(root, model, code=1)
    assert ": WRONG\n" in result.stdout
    assert "gives other logits" in result.stderr
    assert result.stderr.count("\n") == 1


def test_nothing_is_changed(root: Path, model: Path) -> None:
    """Not even the time of use."""
    save(root, model)
    before = (root / "index.db").read_bytes()
    run(root, model)
    assert (root / "index.db").read_bytes() == before


def test_nothing_stored_is_a_failure(root: Path, model: Path, tmp_path: Path) -> None:
    """No store, or nothing of the model."""
    assert "no store in" in run(root, model, code=1).stderr
    save(root, model)
    other = save_model(tmp_path / "other", seed=1)
    assert "nothing of this model" in run(root, other, code=1).stderr


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_miss_is_right_and_saves_nothing(
    root: Path, name: str, tmp_path: Path
) -> None:
    """There is nothing to be wrong."""
    plain: dict[str, Any] = CONFIG if name == "llama" else config_of(name)
    path = save_model(tmp_path / name, plain | {"vocab_size": N_VOCABULARY})
    loaded = mlx_lm.load(str(path))[0]
    with PromptStore.open(root) as store:
        found = compare(loaded, store, Namespace("m"), [1, 2, 3])
    assert (found.match.n_tokens, found.max_diff, found.is_right) == (0, 0.0, True)


def test_the_tokens_of_a_snapshot(root: Path, model: Path) -> None:
    """All of its chain, by id or label."""
    ids = list(range(100))
    with PromptStore.open(root, memory_bytes=0) as store:
        for n in (60, 100):
            store.insert(Namespace("m"), ids[:n], kv(n), label=f"of {n}")
        store.flush()
        assert store.tokens("of 100") == ids
        assert store.tokens("of 60") == ids[:60]
        with pytest.raises(UnknownSnapshot):
            store.tokens("none")


# ----------------------------------------------------------------------- in a server


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_a_server_checks_a_sample(root: Path, model: Path) -> None:
    """All, of a share of one; a hit that is right is served."""
    save(root, model)
    with local(model, root=root, check_rate=1.0) as server:
        assert cached(server.chat(TURNS)) > 0
        assert server.metric("promptstore_checks_total", result="right") == 1
        assert server.metric("promptstore_checks_total", result="wrong") == 0


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_a_server_drops_what_is_wrong(root: Path, model: Path) -> None:
    """The request is answered as if nothing had been stored, and the next ones too."""
    save(root, model, wrong=True)
    with local(model, root=root.parent / "fresh") as server:
        wanted = text_of(server.chat(TURNS))
    with local(model, root=root, check_rate=1.0) as server:
        answer = server.chat(TURNS)
        assert (cached(answer), text_of(answer)) == (0, wanted)
        assert server.metric("promptstore_checks_total", result="wrong") == 1
        assert server.metric("promptstore_misses_total", reason="damaged") == 1
        again = server.chat(TURNS)
        assert cached(again) > 0
        assert text_of(again) == wanted


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_a_server_checks_nothing_by_itself(root: Path, model: Path) -> None:
    """It would cost every such request its cold run."""
    save(root, model)
    with local(model, root=root) as server:
        assert cached(server.chat(TURNS)) > 0
        assert server.metric("promptstore_checks_total") == 0
