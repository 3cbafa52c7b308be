"""Facts about `promptstore serve`, told by clients over HTTP."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import UPSTREAM, Server, cached, text_of
from test_architectures import config_of
from tiny import CONFIG, N_VOCABULARY, save_model

from promptstore import PromptStore

SYSTEM = "You are a careful assistant. " * 6
FRANCE = [
    {"role": "system", "content": "You answer in one short sentence. " * 8},
    {"role": "user", "content": "What is the capital of France?"},
]

pytestmark = pytest.mark.server

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make tiny models on disk, each one once."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str = "llama", seed: int = 0) -> Path:
        path = root / f"{name}-{seed}"
        if not path.exists():
            plain = CONFIG if name == "llama" else config_of(name)
            save_model(path, plain | {"vocab_size": N_VOCABULARY}, seed)
        return path

    return make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers on one store; in the end it must be whole."""
    servers: list[Server] = []

    def start(model: Path, *options: str, **more: Any) -> Server:
        store = ("--store", str(tmp_path / "store"))
        servers.append(Server(model, *store, *options, **more))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()
        server.kill()
    if (tmp_path / "store").exists():
        with PromptStore.open(tmp_path / "store", memory_bytes=0) as store:
            assert store.check() == []


@pytest.fixture(scope="module")
def smollm(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server of the real model, for all tests that leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        with Server(model_path, "--store", str(home / "store")) as server:
            yield server


def wait_until_written(server: Server) -> None:
    """Return when nothing waits for the writer any more."""
    while server.metric("promptstore_queue_jobs"):
        pass


# ------------------------------------------------------------------ conversations


@dataclass(frozen=True)
class Turn:
    """What was asked, and how it was answered."""

    turns: list[dict[str, str]]
    n_prompt: int
    n_cached: int
    answer: str


def talk(start: Callable[[], Server], system: str, **options: Any) -> list[Turn]:
    """Have a conversation of ten turns; kill the server before the sixth one, when
    all is written, and go on with a new one."""
    server = start()
    turns, told = [{"role": "system", "content": system}], []
    for number in range(10):
        if number == 5:
            wait_until_written(server)
            server.kill()
            server = start()
        turns.append({"role": "user", "content": f"Question {number} of this talk?"})
        response = server.chat(turns, **options)
        answer = text_of(response) or ""
        n_prompt = response["usage"]["prompt_tokens"]
        told.append(Turn(turns[:], n_prompt, cached(response), answer))
        turns.append({"role": "assistant", "content": answer})
    return told


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_a_conversation_survives_a_kill(
    architecture: str, models: Callable[..., Path], serve: Serve, tmp_path: Path
) -> None:
    """Full attention, sliding windows, recurrent state: turn 6 reuses all up to the
    end of turn 5's question, and all is answered as by a server that kept nothing."""
    model = models(architecture)
    told = talk(lambda: serve(model), SYSTEM, max_tokens=8)
    n_generation = len("assistant\n") + 1
    assert told[5].n_cached >= told[4].n_prompt - n_generation
    assert all(turn.n_cached > 0 for turn in told[1:])
    with Server(model, "--prompt-cache-size", "0", module=UPSTREAM) as cold:
        answers = [text_of(cold.chat(turn.turns, max_tokens=8)) for turn in told]
    assert [turn.answer for turn in told] == [answer or "" for answer in answers]


@pytest.mark.real_model
def test_a_conversation_with_the_real_model_survives_a_kill(
    model_path: Path, serve: Serve, smollm: Server
) -> None:
    """As with the tiny ones; its generation prompt has three tokens."""
    told = talk(lambda: serve(model_path), "Be brief.", max_tokens=4)
    assert told[5].n_cached >= told[4].n_prompt - 3
    for turn in (told[5], told[9]):
        response = smollm.chat(turn.turns, max_tokens=4)
        assert cached(response) < turn.n_cached
        assert text_of(response) == turn.answer


# ------------------------------------------------------------------ real clients


@pytest.mark.real_model
def test_two_identical_requests_of_curl(smollm: Server) -> None:
    """mlx-lm #1215: the second one of these killed mlx_lm.server 0.32.2."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    body = json.dumps({"messages": FRANCE, "temperature": 0, "max_tokens": 12})
    command = ["curl", "-s", smollm.url + "/v1/chat/completions", "-d", body]
    first, second = (
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(2)
    )
    assert text_of(first) == text_of(second) == "The capital of France is Paris."
    assert cached(second) == second["usage"]["prompt_tokens"] - 1
    assert smollm.get("/health")[0] == 200


@pytest.mark.real_model
def test_an_exact_hit_by_completions(smollm: Server) -> None:
    """A completion whose prompt is a stored prompt with its answer is answered."""
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    answer = text_of(smollm.post("/v1/completions", body))
    again = body | {"prompt": body["prompt"] + answer}
    for _ in range(2):
        response = smollm.post("/v1/completions", again)
        assert cached(response) > 0
    assert smollm.get("/health")[0] == 200


# -------------------------------------------------------------- what must not mix


def test_two_models_in_turn(models: Callable[..., Path], serve: Serve) -> None:
    """Each finds its own prompts again, and never the other's."""
    first, second = models(), models(seed=1)
    server = serve(first)
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]
    cold = {m: server.chat(turns, model=str(m)) for m in (first, second)}
    assert [cached(response) for response in cold.values()] == [0, 0]
    for model in (first, second):
        again = server.chat(turns, model=str(model))
        assert cached(again) == again["usage"]["prompt_tokens"] - 1
        assert text_of(again) == text_of(cold[model])


def test_replaced_weights_are_another_model(
    models: Callable[..., Path], serve: Serve, tmp_path: Path
) -> None:
    """K03: the same path with other weights finds nothing of the old ones."""
    model = tmp_path / "model"
    shutil.copytree(models(), model)
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]
    before = serve(model)
    before.chat(turns)
    assert before.stop() == 0
    shutil.copy(models(seed=1) / "model.safetensors", model)
    after = serve(model)
    response = after.chat(turns)
    assert cached(response) == 0
    with Server(models(seed=1), "--store", str(tmp_path / "other")) as fresh:
        assert text_of(fresh.chat(turns)) == text_of(response)


# ------------------------------------------------------------------- bad input


def test_bad_requests_get_errors_and_kill_nothing(
    models: Callable[..., Path], serve: Serve
) -> None:
    """Whatever is sent, there is an answer, and then the next one is right."""
    server = serve(models())
    bad = [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", {}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "max_tokens": 0},
            400,
        ),
        ("/v1/completions", {"prompt": "", "max_tokens": 2}, 404),
        ("/v1/completions", {"prompt": 7, "max_tokens": 2}, 404),
        ("/v1/completions", {"prompt": "x", "stop": [5]}, 404),
        ("/v1/completions", {"prompt": "x", "model": "no/such/model"}, 404),
        ("/v1/nothing", {"prompt": "x"}, 404),
    ]
    for path, body, status in bad:
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post(path, body)
        assert (path, body, caught.value.code) == (path, body, status)
        caught.value.close()
    odd = {"prompt": "hello", "max_tokens": 2, "no_such_field": [1], "seed": None}
    assert "choices" in server.post("/v1/completions", odd)
    assert server.get("/health")[0] == 200


def test_a_prompt_beyond_the_context_is_answered_as_upstream_does(
    models: Callable[..., Path], serve: Serve
) -> None:
    """The server does not look at the model's context, and neither do we."""
    server = serve(models())
    body = {"prompt": "a long text " * 100, "max_tokens": 2}
    assert server.post("/v1/completions", body)["usage"]["prompt_tokens"] == 1200


def test_a_client_that_goes_away_leaves_what_was_computed(
    models: Callable[..., Path], serve: Serve
) -> None:
    """A prefill that nobody waits for any more is stopped, and what it had is kept."""
    server = serve(models(), "--prefill-step-size", "64")
    text = "a long text of many words " * 2000
    body = json.dumps({"prompt": text, "max_tokens": 2, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"\r\n" + body)
        while b"keepalive" not in client.recv(4096):
            pass
        # So that the server's next write fails at once.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    while not server.metric("promptstore_inserts_total"):
        assert server.get("/health")[0] == 200
    response = server.post("/v1/completions", {"prompt": text[:2000], "max_tokens": 2})
    assert cached(response) > 0


def test_a_store_that_cannot_be_opened(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    """It is one error, unless the store is optional: then memory alone serves."""
    (tmp_path / "file").write_text("no directory")
    store = ("--store", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="did not start") as caught:
        Server(models(), *store)
    assert str(caught.value).count("promptstore: error:") == 1
    assert "Traceback" not in str(caught.value)
    with Server(models(), *store, "--store-optional") as server:
        turns = [{"role": "user", "content": SYSTEM}]
        server.chat(turns)
        assert cached(server.chat(turns)) > 0
        assert "serving without a store on disk" in server.log


# -------------------------------------------------------- health, metrics, the end


def test_health_is_false_without_a_model(serve: Serve, tmp_path: Path) -> None:
    """The generation thread is dead; its server says so."""
    (tmp_path / "empty").mkdir()
    server = serve(tmp_path / "empty")
    server._reader.join(0)
    while server.get("/health")[0] == 200:
        pass
    assert json.loads(server.get("/health")[1]) == {"status": "unavailable"}


def test_the_last_request_is_told_to_nobody_unasked(smollm: Server) -> None:
    """A server that was not started with --explain-last has no such page."""
    assert smollm.get("/promptstore/last")[0] == 404


def test_metrics_and_log_tell_of_each_request(
    models: Callable[..., Path], serve: Serve
) -> None:
    """One line and one count a request, of what was really reused."""
    server = serve(models())
    turns = [{"role": "user", "content": SYSTEM}]
    n_prompt = server.chat(turns)["usage"]["prompt_tokens"]
    n_cached = cached(server.chat(turns))
    assert server.metric("promptstore_tokens_reused_total") == n_cached == n_prompt - 1
    assert server.metric("promptstore_misses_total") == 1
    assert server.metric("promptstore_hits_total") == 1
    lines = [line for line in server.log.splitlines() if " reused=" in line]
    assert len(lines) == 2
    assert f"tokens={n_prompt} reused={n_cached} source=" in lines[1]
    assert SYSTEM[:20] not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_what_is_queued(
    number: int, models: Callable[..., Path], serve: Serve
) -> None:
    """Nothing was written before; after the end a new server finds all of it."""
    server = serve(models(), "--write", "back")
    turns = [{"role": "user", "content": SYSTEM}]
    n_prompt = server.chat(turns)["usage"]["prompt_tokens"]
    assert server.metric("promptstore_entries", tier="disk") == 0
    assert server.stop(number) == 0
    assert cached(serve(models()).chat(turns)) == n_prompt - 1


def test_a_taken_port_is_one_error(models: Callable[..., Path], tmp_path: Path) -> None:
    """The process ends; mlx_lm.server's would go on without a socket."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(RuntimeError) as caught:
            Server(models(), "--store", str(tmp_path / "store"), "--port", port)
    assert "Address already in use" in str(caught.value)


def test_eight_clients_at_once(models: Callable[..., Path], serve: Serve) -> None:
    """What they are told together is what each is told alone."""
    server = serve(models())
    chats = [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{i} " * (3 * i + 1)},
        ]
        for i in range(8)
    ]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(server.chat, chats * 3))
    with Server(models(), module=UPSTREAM) as upstream:
        alone = [text_of(upstream.chat(chat)) for chat in chats]
    assert [text_of(response) for response in together] == alone * 3
    assert sum(cached(response) > 0 for response in together) >= 16
