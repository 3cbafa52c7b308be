"""The examples of the documentation, run as they stand there.

An example is the fenced block below a line ``<!-- example: name -->`` of a page.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import httpx
import mlx.core as mx
import mlx_lm
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from tiny import save_model

from promptstore import Namespace, PromptStore

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"^<!-- example: (\S+) -->\n" + BLOCK.pattern[1:], BLOCK.flags)
FOREVER = 1_000_000
"""More tokens than a test has time for: an answer that ends was stopped."""
LIMIT_S = 120.0
"""When a test that waits in vain fails."""

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="no checkout")


def example(page: str, name: str) -> str:
    """Return the code of an example."""
    found = {name: code for name, _, code in MARKED.findall((DOCS / page).read_text())}
    return found[name]


def load(page: str, files: dict[str, str], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the modules that examples of a page make, by the names of the examples.

    Args:
        page: The page's file name.
        files: The name of each example and that of its module, in order of import.
        path: Where they are written.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        for name, module in files.items():
            (path / f"{module}.py").write_text(example(page, name))
        try:
            yield {name: importlib.import_module(file) for name, file in files.items()}
        finally:
            for module in files.values():
                sys.modules.pop(module, None)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_python_of_a_page_compiles(page: Path) -> None:
    """Also what is too short to be run."""
    for language, code in BLOCK.findall(page.read_text()):
        if language == "python":
            compile(code, page.name, "exec")


# --------------------------------------------------------------------- embedding


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers in milliseconds."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The modules of the page."""
    files = {"engine": "engine", "fastapi": "http_app", "grpc": "grpc_server"}
    yield from load("embedding.md", files, tmp_path_factory.mktemp("examples"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a server keeps its prompts; it is sound when the test ends."""
    yield tmp_path / "store"
    with PromptStore.open(tmp_path / "store") as store:
        assert store.check() == []


def question(text: str, max_tokens: int = 8) -> dict[str, Any]:
    """Return a request whose prompt is long enough to be stored."""
    messages = [
        {"role": "system", "content": "We the People of the United States. " * 10},
        {"role": "user", "content": text},
    ]
    return {"messages": messages, "max_tokens": max_tokens}


def answer(model: Path, asked: dict[str, Any]) -> str:
    """Return what mlx-lm itself answers."""
    loaded, tokenizer = mlx_lm.load(str(model))[:2]
    prompt = tokenizer.apply_chat_template(
        asked["messages"], add_generation_prompt=True
    )
    text: str = mlx_lm.generate(
        loaded, tokenizer, prompt, max_tokens=asked["max_tokens"]
    )
    return text


def shown(body: str, name: str) -> dict[str, float]:
    """Return the values of a metric by its label."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.name == f"promptstore_{name}"
    }


def idle(engine: Any) -> None:
    """Wait until the engine has nothing to do."""
    engine._thread.submit(lambda: None).result(LIMIT_S)


def test_what_was_not_evaluated_belongs_to_its_thread() -> None:
    """And what was evaluated may be read by any: why a server has one for the model."""
    lazy, evaluated = mx.ones(3) * 2, mx.ones(3) * 2
    mx.eval(evaluated)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(evaluated.tolist).result() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="There is no Stream"):
            pool.submit(lazy.tolist).result()


# ---- FastAPI


@pytest.fixture
def app(embedding: dict[str, Any], model: Path, root: Path) -> Any:
    return embedding["fastapi"].make_app(str(model), str(root))


@pytest.fixture
def client(app: Any) -> Iterator[httpx.Client]:
    """A client of the app, which is served on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=10)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        url = "http://127.0.0.1:{1}".format(*listening.getsockname())
        try:
            # Who comes before the server listens waits in the socket's backlog.
            with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def post(client: httpx.Client, asked: dict[str, Any]) -> str:
    response = client.post("/chat", json=asked)
    assert response.status_code == 200
    return response.text


def test_http_answer_is_that_of_mlx_lm_also_when_reused(
    client: httpx.Client, model: Path
) -> None:
    """The second answer comes from the store, and is the same."""
    asked = question("Who?")
    assert [post(client, asked) for _ in range(2)] == [answer(model, asked)] * 2
    body = client.get("/metrics").text
    assert sum(shown(body, "hits_total").values()) == 1
    assert sum(shown(body, "misses_total").values()) == 1


def test_http_requests_at_once_do_not_mix(client: httpx.Client, model: Path) -> None:
    """Each client gets the answer to its own question."""
    asked = [question(text) for text in ("Who?", "What?", "When?", "Why?")] * 2
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: post(client, each), asked))
    assert answers == [answer(model, each) for each in asked]


def test_http_client_that_leaves_frees_the_model(
    client: httpx.Client, app: Any
) -> None:
    """Its answer would never end; what was computed of it is kept."""
    asked = question("Who?", FOREVER)
    with client.stream("POST", "/chat", json=asked) as response:
        next(response.iter_raw())
    idle(app.state.engine)
    post(client, question("Who?"))
    prefilled = shown(client.get("/metrics").text, "tokens_prefilled_total")
    reused = shown(client.get("/metrics").text, "tokens_reused_total")
    assert prefilled[""] == reused[""] + 2  # all of one prompt, and one token of two


def test_http_generator_is_closed_where_a_client_does_not_read(
    embedding: dict[str, Any],
) -> None:
    """Also if the server raises out of *send* between two texts."""
    closed = []

    async def texts() -> Any:
        try:
            while True:
                yield "text"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the client is gone")

    async def respond() -> None:
        kept = texts()  # so that no collector closes it
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with contextlib.suppress(Exception):
            await embedding["fastapi"].Answer(kept)(scope, None, send)
        assert closed == [True]

    asyncio.run(respond())


def test_http_error_breaks_the_answer_off(
    client: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can tell a broken answer from a whole one; the next is answered."""
    asked = question("Who?")
    expected = post(client, asked)
    with monkeypatch.context() as patch:
        patch.setattr(app.state.engine, "_tokenizer", None)
        with pytest.raises(httpx.RemoteProtocolError):
            client.post("/chat", json=asked)
    assert post(client, asked) == expected


# ---- gRPC


@pytest.fixture
def engine(embedding: dict[str, Any], model: Path, root: Path) -> Iterator[Any]:
    engine = embedding["engine"].Engine(str(model), str(root))
    yield engine
    engine.close()


@pytest.fixture
def chat(embedding: dict[str, Any], engine: Any) -> Iterator[Callable[..., Any]]:
    """The method of the service, on a client's side."""
    server, port = embedding["grpc"].make_server(engine, "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_stream(
            "/Chat/Answer", lambda asked: json.dumps(asked).encode(), json.loads
        )
    server.stop(grace=10).wait()


def test_grpc_answer_is_that_of_mlx_lm_also_when_reused(
    chat: Callable[..., Any], model: Path, engine: Any
) -> None:
    """The second answer comes from the store, and is the same."""
    asked = question("Who?")
    answers = ["".join(message["text"] for message in chat(asked)) for _ in range(2)]
    assert answers == [answer(model, asked)] * 2
    body = engine.metrics.render()[0].decode()
    assert sum(shown(body, "hits_total").values()) == 1


def test_grpc_client_that_leaves_frees_the_model(
    chat: Callable[..., Any], engine: Any
) -> None:
    """Its answer would never end; what was computed of it is kept."""
    call = chat(question("Who?", FOREVER))
    next(call)
    call.cancel()
    idle(engine)
    list(chat(question("Who?")))
    body = engine.metrics.render()[0].decode()
    reused = shown(body, "tokens_reused_total")
    assert shown(body, "tokens_prefilled_total")[""] == reused[""] + 2


def test_grpc_error_has_a_status(
    chat: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine raised is not taken for the end of an answer."""
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_tokenizer", None)
        with pytest.raises(grpc.RpcError) as caught:
            list(chat(question("Who?")))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


# ---- the engine itself


def test_closing_stops_what_runs_and_drops_what_waits(
    embedding: dict[str, ModuleType], model: Path, root: Path
) -> None:
    """In bounded time; what was computed is on disk."""
    engine = embedding["engine"].Engine(str(model), str(root))
    begun, gone = threading.Event(), threading.Event()
    asked = question("Who?", FOREVER)["messages"]
    running = engine.submit(asked, FOREVER, lambda _: begun.set(), gone)
    waiting = engine.submit(asked, FOREVER, lambda _: None, gone)
    assert begun.wait(LIMIT_S)
    engine.close()
    assert isinstance(running.exception(), embedding["engine"].Stopped)
    assert waiting.cancelled()
    with PromptStore.open(root) as store:
        namespace = Namespace.from_model(model)
        assert [info.namespace for info in store.snapshots()] == [namespace]


def test_who_is_gone_before_its_turn_costs_nothing(engine: Any) -> None:
    """No look-up, no prefill."""
    gone = threading.Event()
    gone.set()
    asked = question("Who?")["messages"]
    future = engine.submit(asked, FOREVER, lambda _: None, gone)
    assert type(future.exception(LIMIT_S)).__name__ == "Stopped"
    assert engine.store.stats().tokens_asked == 0


# ---------------------------------------------------------------- mlx_lm.server


@pytest.mark.server
def test_the_session_of_the_server_page(tmp_path: Path) -> None:
    """The commands as they stand there: the second answer reuses the first's prompt."""
    if not all(shutil.which(name) for name in ("bash", "curl")):
        pytest.skip("no bash, or no curl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(save_model(tmp_path / "model")),
        "PORT": str(port),
        "STORE": str(tmp_path / "store"),
    }
    script = example("server.md", "session")
    command = ["bash", "-c", script]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=LIMIT_S)
    first, second = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("first", "second")
    )
    assert first["choices"] == second["choices"]
    n_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert n_cached == second["usage"]["prompt_tokens"] - 1


def test_the_cache_of_the_server_page(tmp_path: Path) -> None:
    """mlx-lm's class on a store: the same question again reuses its prompt."""
    model = str(save_model(tmp_path / "model"))
    names: dict[str, Any] = {}
    exec(example("server.md", "lru"), names)
    question = "When do you open, and when do you close? " * 3
    (first, cold), (second, warm) = (
        names["answer"](model, str(tmp_path / "store"), question) for _ in range(2)
    )
    assert first == second
    assert cold == 0
    assert warm > len(question)
