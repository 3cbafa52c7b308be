"""What broke `promptstore serve` once."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import server as upstream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from servers import Server, cached
from test_architectures import config_of
from tiny import CONFIG, N_VOCABULARY, save_model

from promptstore import PromptStore
from promptstore.metrics import Metrics
from promptstore.serve.cache import ServedCache
from promptstore.serve.generator import Generator
from promptstore.serve.parameters import mend_random_state
from promptstore.serve.provider import Provider

CHAT = [{"role": "user", "content": "a prompt that is long enough " * 4}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of a tiny model, for all tests that leave it as it is."""
    root = tmp_path_factory.mktemp("breakage")
    with Server(save_model(root / "model"), "--store", str(root / "store")) as server:
        yield server


def _error_of(server: Server, body: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post("/v1/chat/completions", body)
    with caught.value as answer:
        return answer.code, json.load(answer)["error"]


def test_bad_parameters_end_no_one_elses_request(server: Server) -> None:
    """Nor do they poison the random state: what is sampled later is answered."""
    never_ends = {"logit_bias": {"256": -1e9, "257": -1e9}}
    answers: list[Any] = []

    def ask() -> None:
        answers.append(server.chat(CHAT, max_tokens=150, **never_ends))

    for bad in (
        {"stop": 5},
        {"stop": [1]},
        {"stop": [["a"]]},
        {"temperature": 1, "top_k": N_VOCABULARY},
        {"temperature": 1, "xtc_probability": 1.0, "xtc_threshold": 0.9},
        {"temperature": 1, "min_p": math.nan},
        {"temperature": 10**400},
        {"presence_penalty": 10**400},
        {"repetition_penalty": 1.1, "repetition_context_size": 10**30},
        {"logit_bias": {str(N_VOCABULARY): 1}},  # a write beyond the logits
        {"logit_bias": {"-1": 1}},
        {"seed": -1},
        {"seed": 1 << 64},
    ):
        other = threading.Thread(target=ask)
        other.start()
        time.sleep(0.05)
        status, error = _error_of(server, {"messages": CHAT} | bad)
        assert (status, bool(error)) == (404, True), bad
        other.join()
        assert len(answers) == 1, bad
        assert answers.pop()["usage"]["completion_tokens"] == 150
        server.chat(CHAT, temperature=1, top_k=3, max_tokens=2)
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b"[" * 100_000, b'{"logit_bias": {"1": null}}']
)
def test_what_the_server_hangs_up_on_is_told(server: Server, body: bytes) -> None:
    """Bytes that are no text, JSON that is too deep, a type that it does not check."""
    status, error = _error_of(server, body)
    assert status == 400
    assert error


def test_a_stream_that_fails_says_so(server: Server) -> None:
    """The server has sent status 200 by then."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"messages": CHAT, "max_tokens": 2, "stream": True, "stream_options": 5}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert "error" in json.loads(events[-2].removeprefix("data: "))


def test_no_bytes_in_memory(tmp_path: Path) -> None:
    """--prompt-cache-bytes 0 is a limit, and not none."""
    options = ("--store", str(tmp_path / "store"), "--prompt-cache-bytes", "0")
    with Server(save_model(tmp_path / "model"), *options) as server:
        server.chat(CHAT)
        assert server.metric("promptstore_entries", tier="memory") == 0
        while server.metric("promptstore_queue_jobs"):
            pass
        assert cached(server.chat(CHAT)) > 0
        assert server.stop(signal.SIGTERM) == 0


# -------------------------------------------------------------- within a process


def _generator(model: Path) -> Generator:
    parser_defaults: dict[str, Any] = {
        "adapter_path": None, "draft_model": None, "trust_remote_code": False,
        "chat_template": "", "use_default_chat_template": False, "pipeline": False,
        "chat_template_args": {}, "decode_concurrency": 32, "prompt_concurrency": 8,
        "prefill_step_size": 2048, "prompt_cache_bytes": None, "kv_bits": None,
        "kv_group_size": 64, "quantized_kv_start": 5000,
    }  # fmt: skip
    provider = Provider(argparse.Namespace(model=str(model), **parser_defaults))
    store = PromptStore.open(disk_bytes=0)
    metrics = Metrics(store)
    cache = ServedCache(provider, store, metrics, max_size=10, max_bytes=1 << 30)
    return Generator(provider, cache, metrics)


def _answer(generator: Generator, prompt: str, n_tokens: int) -> int:
    """Return how many tokens came."""
    no_adapter: Any = None
    args = upstream.GenerationArguments(
        upstream.ModelDescription("default_model", "default_model", no_adapter),
        upstream.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
        upstream.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        [], n_tokens, 3, False, -1, None, None,
    )  # fmt: skip
    generate: Any = generator.generate
    request = upstream.CompletionRequest("text", prompt, [], None, None)
    return len(list(generate(request, args)[1]))


def test_a_step_that_fails_leaves_no_state_ahead_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W05: state does not tell how many tokens it has seen. What was stored before
    the step is served, and is right."""
    model = save_model(
        tmp_path / "model", config_of("mamba2") | {"vocab_size": N_VOCABULARY}
    )
    generator = _generator(model)
    provider: Any = generator.model_provider
    store = generator.cache.store
    try:
        _answer(generator, "so that the model is loaded", 2)
        n_left = 7
        evaluate: Any = mx.async_eval

        def fail_late(*arrays: Any) -> None:
            nonlocal n_left
            n_left -= 1
            if not n_left:
                raise RuntimeError("no memory")
            evaluate(*arrays)

        monkeypatch.setattr(mx, "async_eval", fail_late)
        prompt = "the river and the stone and the lamp"
        with pytest.raises(RuntimeError, match="no memory"):
            _answer(generator, prompt, 40)
        monkeypatch.undo()
        stored = [e for e in store._memory._orders["assistant"] if len(e.tokens) > 30]
        for entry in stored:
            ids = [*entry.tokens.tolist(), 5, 6, 7]
            match = store.match(provider.namespace, ids)
            rest = mx.array([ids[match.n_tokens :]])
            warm = provider.model(rest, cache=match.cache)[0, -1]
            fresh: Any = make_prompt_cache(provider.model)
            cold = provider.model(mx.array([ids]), cache=fresh)[0, -1]
            assert mx.allclose(warm, cold, atol=1e-4)
        assert stored
    finally:
        assert generator.stop(30)


def test_a_load_that_fails_late_is_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server had taken the new model already; under the old one's name its KV
    would be the old one's."""
    old = save_model(tmp_path / "old")
    new = save_model(tmp_path / "new", CONFIG, seed=1)
    provider = Provider(
        argparse.Namespace(
            model=None, adapter_path=None, draft_model=None, pipeline=False,
            trust_remote_code=False, chat_template="", use_default_chat_template=False,
        )
    )  # fmt: skip
    load: Any = provider.load
    load(str(old))
    before = provider.namespace

    def fail(*_: Any) -> None:
        raise ValueError("no such processor")

    monkeypatch.setattr(upstream, "load_processor", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such processor"):
            load(str(new))
        assert provider.namespace != before
        assert not provider.is_identified
    monkeypatch.undo()
    load(str(new))
    after = provider.namespace
    load(str(old))
    assert provider.namespace == before != after


def test_a_random_state_that_a_failure_left_is_mended() -> None:
    """A compiled sampler that raises leaves tracers in it."""
    sampler: Any = make_sampler(1.0, top_k=10)
    with pytest.raises(ValueError, match="top_k"):
        sampler(mx.zeros((1, 10)))
    mend_random_state()
    sampler = make_sampler(1.0, top_k=3)
    assert 0 <= sampler(mx.zeros((1, 10))).item() < 10


# ------------------------------------------------------------------ several ranks


def test_only_the_first_rank_listens(tmp_path: Path) -> None:
    """The others would find the port taken, and their end be the end of all."""
    if not mx.distributed.is_available("ring"):
        pytest.skip("this mlx has no ring")
    model = save_model(tmp_path / "model")
    with socket.socket() as one, socket.socket() as other, socket.socket() as http_:
        ports = []
        for probe in (one, other, http_):
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:2]]))
    command = [
        sys.executable, "-m", "promptstore", "serve", "--model", str(model),
        "--port", str(ports[2]), "--store", str(tmp_path / "store"),
    ]  # fmt: skip
    ranks = []
    try:
        for rank in range(2):
            env = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | env | {"HF_HUB_OFFLINE": "1"},
                    stderr=subprocess.DEVNULL,
                )
            )
        body = json.dumps({"prompt": "hello", "max_tokens": 2})
        until = time.monotonic() + 60
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", ports[2], timeout=30)
            try:
                connection.request("POST", "/v1/completions", body)
                assert connection.getresponse().status == 200
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
                time.sleep(0.1)
            finally:
                connection.close()
        assert [process.poll() for process in ranks] == [None, None]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
