"""Facts about `promptstore why`, on a tiny random model whose tokens are bytes."""

from __future__ import annotations

import json
import logging
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import kv_of
from click.testing import CliRunner, Result
from local_servers import local
from mlx_lm import utils
from tiny import save_model

from promptstore import Explanation, Namespace, PromptStore, Reason, ReasonKind, chat
from promptstore.cli import last as last_request
from promptstore.cli import main
from promptstore.serve import Settings
from promptstore.serve.last import LastRequest, is_loopback

SYSTEM = "You are the clerk of a small library. Today is 2026-11-30. You are polite."
LATER = SYSTEM.replace("11-30", "12-01")
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    """The model's tokenizer."""
    return utils.load_tokenizer(str(model))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a store may be; the package's logger is left as it was."""
    yield tmp_path / "store"
    logging.getLogger("promptstore").handlers.clear()


def turns(system: str, question: str = "When do you open?") -> list[dict[str, str]]:
    """Return the messages of a request."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
    ]


def write(path: Path, value: Any) -> Path:
    """Return a JSON file."""
    path.write_text(json.dumps(value))
    return path


def save(root: Path, namespace: Namespace, ids: list[int], **options: Any) -> None:
    """Store any KV of a prompt."""
    with PromptStore.open(root, memory_bytes=0) as store:
        store.insert(namespace, ids, kv_of(ids), **options)


@pytest.fixture
def stored(root: Path, model: Path, tokenizer: Any) -> Path:
    """A store that has the request of one day."""
    ids = chat.prompt_tokens(tokenizer, turns(SYSTEM))
    save(root, Namespace.from_model(model), ids, label="desk")
    return root


def run(*arguments: object, code: int = 0, stdin: str | None = None) -> Result:
    """Run the command in this process and expect an exit code."""
    texts = ["why", *(str(argument) for argument in arguments)]
    result = CliRunner().invoke(main, texts, input=stdin)
    assert result.exit_code == code, result.output
    return result


def ask(root: Path, model: Path, *more: object, stdin: str | None = None) -> Any:
    """Return the JSON of an answer."""
    arguments = ("--store", root, "--model", model, "--json", *more)
    return json.loads(run(*arguments, stdin=stdin).stdout)


# ---------------------------------------------------------------------- a request


def test_it_shows_where_a_request_parts(stored: Path, model: Path) -> None:
    """The stored prompt, the tokens shared, the texts on both sides, and a date."""
    request = write(stored.parent / "m.json", turns(LATER))
    facts = ask(stored, model, "--messages", request)
    at = len("ssystem\n") + SYSTEM.index("1-30")
    assert facts["reason"]["text"] == f"diverged-at({at})"
    assert (facts["n_reused"], facts["n_asked"]) == (at, len(facts["tokens"]))
    (closest,) = facts["closest"]
    assert (closest["n_shared"], closest["snapshot"]["label"]) == (at, "desk")
    parting = closest["parting"]
    assert parting["shared"].endswith("Today is 2026-1")
    assert parting["asked"].startswith("2-01. You")
    assert parting["stored"].startswith("1-30. You")
    assert parting["volatile"] == {
        "kind": "date",
        "ours": "2026-12-01",
        "theirs": "2026-11-30",
    }


def test_it_prints_one_screen(stored: Path, model: Path) -> None:
    """What a user needs: how much, which prompt, where, and what to do."""
    text = json.dumps(turns(LATER))
    out = run("--store", stored, "--model", model, stdin=text).stdout
    for words in ("reused", "desk", "Today is 2026-1|", "|2-01.", "|1-30.", "a date"):
        assert words in out
    assert out.count("\n") <= 24
    assert max(map(len, out.splitlines())) <= 100


def test_it_changes_nothing_and_loads_no_weights(
    stored: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are what they were; mlx-lm is not asked for a model."""
    monkeypatch.setattr("mlx_lm.load", None)
    monkeypatch.setattr("mlx_lm.utils.load_model", None)
    index = (stored / "index.db").read_bytes()
    ask(stored, model, stdin=json.dumps(turns(LATER)))
    assert (stored / "index.db").read_bytes() == index


def test_a_terminal_is_not_told_what_to_do(
    root: Path, model: Path, tokenizer: Any
) -> None:
    """Escapes in a stored prompt are shown, not sent."""
    ids = tokenizer.encode("One prompt\x1b[2J and its end")
    save(root, Namespace.from_model(model), ids * 4)
    out = run("--store", root, "--model", model, stdin="One prompt that parts").stdout
    assert "\x1b" not in out
    assert "\\x1b" in out


@pytest.mark.parametrize(
    "wrap",
    [
        lambda turns: turns,
        lambda turns: {"model": "m", "messages": turns, "max_tokens": 4},
        lambda turns: [
            turn | {"content": [{"type": "text", "text": turn["content"]}]}
            for turn in turns
        ],
    ],
    ids=["messages", "body", "parts"],
)
def test_a_request_may_be_messages_or_a_body(
    stored: Path, model: Path, wrap: Any
) -> None:
    """As a file or on stdin."""
    value = wrap(turns(SYSTEM))
    path = write(stored.parent / "m.json", value)
    for facts in (
        ask(stored, model, "--messages", path),
        ask(stored, model, "--messages", "-", stdin=json.dumps(value)),
        ask(stored, model, stdin=json.dumps(value)),
    ):
        assert facts["reason"] is None
        assert facts["n_reused"] == facts["n_asked"] - 1


def test_a_prompt_is_taken_as_it_is(
    root: Path, model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Without the chat template, from a file or from stdin."""
    text = "A prompt of a completion. " * 4
    save(root, Namespace.from_model(model), tokenizer.encode(text))
    (tmp_path / "p.txt").write_text(text + "More.")
    for facts in (
        ask(root, model, "--prompt", tmp_path / "p.txt"),
        ask(root, model, stdin=text + "More."),
    ):
        assert facts["n_reused"] == len(text)
        assert facts["reason"]["kind"] == "no-entry"
        assert facts["closest"][0]["parting"]["asked"] == "More."
        assert facts["closest"][0]["parting"]["stored"] == ""


def test_another_model_with_the_same_tokens_is_named(
    stored: Path, model: Path, tmp_path: Path
) -> None:
    """Weights that were replaced: which field differs, and both values."""
    other = save_model(tmp_path / "other", seed=1)
    facts = ask(stored, other, stdin=json.dumps(turns(SYSTEM)))
    assert facts["reason"]["text"] == "identity-differs(model, 0)"
    (place,) = facts["elsewhere"]
    (differs,) = place["differs"]
    assert differs["theirs"] == Namespace.from_model(model).model
    assert differs["ours"] == Namespace.from_model(other).model
    out = run("--store", stored, "--model", other, stdin=json.dumps(turns(SYSTEM)))
    assert "with another\n  model: " in out.stdout


def test_another_tenant_is_not_told(stored: Path, model: Path) -> None:
    """Whoever asks in a tenant's name learns of that tenant's prompts only."""
    facts = ask(stored, model, "--tenant", "ann", stdin=json.dumps(turns(SYSTEM)))
    assert facts["reason"]["text"] == "no-entry(0)"
    assert (facts["closest"], facts["elsewhere"]) == ([], [])


def test_images_are_only_named(root: Path, model: Path, tokenizer: Any) -> None:
    """Their ids are negative, and no text."""
    from promptstore.cli.why import _decode

    ids = [*tokenizer.encode("a"), -7, -7, -(1 << 59), *tokenizer.encode("b")]
    assert _decode(tokenizer, ids) == "a<image>b"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("--messages", "-"), "[]", "neither a list of messages"),
        (("--messages", "-"), '{"messages": [1]}', "neither a list of messages"),
        (("--messages", "-"), "{", "neither a list of messages"),
        (("--prompt", "-"), " \n", "stdin: empty"),
        (("--messages", "none.json"), None, "none.json: No such file"),
        (
            ("--messages", "-"),
            '[{"role": "user", "content": [{"type": "image_url"}]}]',
            "only text",
        ),
    ],
)
def test_wrong_requests_are_one_line(
    stored: Path, model: Path, arguments: Any, stdin: str | None, message: str
) -> None:
    """Which file, and what is wrong with it."""
    result = run("--store", stored, "--model", model, *arguments, code=1, stdin=stdin)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_wrong_use(stored: Path, model: Path, tmp_path: Path) -> None:
    """Two requests at once; no store; no tokenizer."""
    common = ("--model", model, "--store")
    run(*common, stored, "--last", "--prompt", "-", code=2)
    none = run(*common, tmp_path / "none", stdin="a", code=1)
    assert "no store in" in none.stderr
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        broken = run(*common, stored, stdin="a", code=1)
    finally:
        (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")
    assert "no tokenizer" in broken.stderr


# ----------------------------------------------------------------- the last request


FOUND = Explanation(0, 7, 7, Reason(ReasonKind.DIVERGED, 7), None)


def test_only_who_has_the_key_and_is_here_is_told() -> None:
    """Not another user, nor a proxy's client, nor who comes from elsewhere."""
    kept = LastRequest("key")
    kept.note(np.arange(9), FOUND)
    assert kept.answer("127.0.0.1", "Bearer key")[0] == 200
    for client, given in (
        ("127.0.0.1", None),
        ("127.0.0.1", "Bearer other"),
        ("127.0.0.1", "key"),
        ("192.168.0.7", "Bearer key"),
        ("::ffff:10.0.0.1", "Bearer key"),
        ("not an address", "Bearer key"),
    ):
        assert kept.answer(client, given) == (403, b"Forbidden", "text/plain")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"]
)
def test_loopback_has_several_addresses(address: str) -> None:
    """Also as servers that listen on both see them."""
    assert is_loopback(address)


def test_one_request_is_kept() -> None:
    """None at first, then the newest."""
    kept = LastRequest("key")
    assert kept.answer("::1", "Bearer key")[:2] == (204, b"")
    for n in (8, 9):
        kept.note(np.arange(n), FOUND)
    status, body, _ = kept.answer("::1", "Bearer key")
    told = json.loads(body)
    assert (status, told["tokens"]) == (200, list(range(9)))
    assert told["reason"]["text"] == "diverged-at(7)"


def test_the_key_is_the_user_s_own() -> None:
    """Made once, random, and for the owner's eyes."""
    key = last_request.make_key()
    assert last_request.make_key() == key
    assert len(key) == 64
    assert stat.S_IMODE(last_request._path().stat().st_mode) == 0o600


class _Other(BaseHTTPRequestHandler):
    """A server that knows nothing of this."""

    def do_GET(self) -> None:
        """Answer what such servers answer."""
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def test_why_last_says_what_is_missing(model: Path) -> None:
    """A key, a server, or that the server was told to."""
    arguments = ("--model", model, "--last", "--port")
    assert "--explain-last" in run(*arguments, 1, code=1).stderr
    last_request.make_key()
    assert "no server answers on port 1" in run(*arguments, 1, code=1).stderr
    with HTTPServer(("127.0.0.1", 0), _Other) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        told = run(*arguments, server.server_port, code=1).stderr
        server.shutdown()
        thread.join(LIMIT_S)
    assert "does not tell (404)" in told


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_a_server_explains_its_last_request(model: Path, root: Path) -> None:
    """Over HTTP, as it was when it was asked; and nothing of it is on disk."""
    with local(model, root=root, last_key=last_request.make_key()) as server:
        arguments = ("--last", "--port", server.port)
        early = run("--model", model, *arguments, code=1).stderr
        server.chat(turns(SYSTEM), max_tokens=1)
        while server.metric("promptstore_queue_jobs"):
            pass
        server.chat(turns(LATER), max_tokens=1)
        facts = ask(root, model, *arguments)
        assert server.get("/promptstore/last")[0] == 403
    assert "no request yet" in early
    assert facts["reason"]["kind"] == "diverged-at"
    assert facts["n_reused"] == len("ssystem\n") + SYSTEM.index("1-30")
    assert facts["closest"][0]["parting"]["volatile"]["kind"] == "date"
    assert not [*root.rglob("*last*")]


@pytest.mark.parametrize("options", [(), ("--explain-last",)])
def test_serve_is_told_to(
    root: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by default; else the server gets the user's key."""
    told: list[Settings] = []
    monkeypatch.setattr(
        "promptstore.serve.serve", lambda _, settings: told.append(settings)
    )
    CliRunner().invoke(main, ["serve", "--store", str(root), *options])
    (settings,) = told
    assert settings.last_key == (last_request.make_key() if options else "")
