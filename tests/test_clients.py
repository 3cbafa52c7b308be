"""Facts about what clients see: what mlx_lm.server serves, served on a store.

Each answer is asked twice of ours, cold and warm, and compared with mlx_lm.server's.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from openai import OpenAI
from parrots import save_parrot
from servers import UPSTREAM, Server
from tiny import save_model

ORIGINS = ("--allowed-origins", "http://one.example,http://two.example")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Clients:
    """The same client of two servers of one model: ours and mlx-lm's.

    Attributes:
        n_cold: How many tokens the last chat's first request reused.
    """

    def __init__(self, ours: Server, theirs: Server) -> None:
        self.ours, self.theirs = ours, theirs
        self.n_cold = 0
        self._http = httpx.Client(trust_env=False, timeout=60)
        self._clients = [
            OpenAI(
                base_url=server.url + "/v1",
                api_key="none",
                max_retries=0,
                http_client=self._http,
            )
            for server in (ours, theirs)
        ]

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def chat(self, content: str | list[Any], **options: Any) -> dict[str, Any]:
        """Ask both servers, ours twice; return the answer, if all are the same."""
        cold, warm, other = self._ask(
            lambda client, more: client.chat.completions.create(**more),
            content,
            options,
        )
        self.n_cold = cached(cold)
        assert self.n_cold <= cached(warm) == warm["usage"]["prompt_tokens"] - 1
        assert plain(cold) == plain(warm) == plain(other)
        return warm

    def chunks(self, content: str, **options: Any) -> list[dict[str, Any]]:
        """As `chat`, but streamed."""

        def ask(client: OpenAI, more: dict[str, Any]) -> Any:
            with client.chat.completions.create(stream=True, **more) as stream:
                return Chunks(stream)

        cold, warm, other = self._ask(ask, content, options)
        assert plain(cold) == plain(warm) == plain(other)
        chunks: list[dict[str, Any]] = warm["chunks"]
        return chunks

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """As `chat`, but a completion of plain text."""
        cold, warm, other = self._ask(
            lambda client, more: client.completions.create(prompt=prompt, **more),
            None,
            options,
        )
        assert cached(cold) < cached(warm)
        assert plain(cold) == plain(warm) == plain(other)
        return warm

    def _ask(self, ask: Any, content: Any, options: dict[str, Any]) -> list[Any]:
        more = {"model": "default_model", "temperature": 0, "max_tokens": 12} | options
        if content is not None:
            turns = [{"role": "user", "content": content}]
            more["messages"] = turns if isinstance(content, str) else content
        ours, theirs = self._clients
        return [ask(client, more).model_dump() for client in (ours, ours, theirs)]


class Chunks:
    """A stream that was read to its end."""

    def __init__(self, stream: Any) -> None:
        self._chunks = [chunk.model_dump() for chunk in stream]

    def model_dump(self) -> dict[str, Any]:
        """Return all chunks."""
        return {"chunks": self._chunks}


def cached(response: dict[str, Any]) -> int:
    """Return how many tokens were reused."""
    n_tokens: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n_tokens


def plain(value: Any) -> Any:
    """Return a response without what no two answers share, logprobs as approximate."""
    if isinstance(value, dict):
        return {
            key: plain(x)
            for key, x in value.items()
            if key not in ("created", "prompt_tokens_details")
            and not (key == "id" and isinstance(x, str))  # a token's is a number
        }
    if isinstance(value, list):
        return [plain(x) for x in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A parrot that calls tools and thinks, and a model that says random things."""
    root = tmp_path_factory.mktemp("models")
    return {
        "parrot": save_parrot(root / "parrot"),
        "random": save_model(root / "random"),
    }


@pytest.fixture(scope="module")
def clients(
    made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clients]:
    """Both servers, for all tests of this module; theirs keeps nothing."""
    home = tmp_path_factory.mktemp("home")
    (home / "hub").mkdir()
    env = {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    ours = ("--store", str(home / "store"), "--log-level", "DEBUG", *ORIGINS)
    theirs = ("--prompt-cache-size", "0", *ORIGINS)
    with ExitStack() as stack:
        both = [
            stack.enter_context(Server(made["parrot"], *options, env=env, **more))
            for options, more in ((ours, {}), (theirs, {"module": UPSTREAM}))
        ]
        found = Clients(*both)
        stack.callback(found.close)
        yield found


# ------------------------------------------------------------------------- chats


def test_a_thought_is_no_part_of_the_answer(clients: Clients) -> None:
    """The thinking of a model that thinks is told apart, and its call as a call."""
    response = clients.chat("How is the weather?", tools=[WEATHER])
    (choice,) = response["choices"]
    assert choice["message"]["reasoning"] == "Looking"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"


def test_a_tool_tells_its_result(clients: Clients) -> None:
    """The turn after a call leaves the thought out: all up to it is reused."""
    asked = [{"role": "user", "content": "Is it warm in Oslo?"}]
    first = clients.chat(asked, tools=[WEATHER])
    call = first["choices"][0]["message"]["tool_calls"][0]
    told = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "23 degrees"},
    ]
    assert message(clients.chat(told, tools=[WEATHER])) == "Sunnytoday"
    assert clients.n_cold == first["usage"]["prompt_tokens"] - 1


def test_thinking_can_be_switched_off(clients: Clients) -> None:
    """Arguments of the chat template of one request are another prompt."""
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    response = clients.chat("Do not think.", extra_body=options)
    assert response["choices"][0]["message"]["content"] == "Sunnytoday"


def test_a_stream_tells_its_usage(clients: Clients) -> None:
    """The last chunk has the usage, and the tokens that were really reused."""
    options = {"stream_options": {"include_usage": True}, "tools": [WEATHER]}
    chunks = clients.chunks("Stream the weather of Oslo.", **options)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Looking"
    (call,) = (call for delta in deltas for call in delta.get("tool_calls") or [])
    assert call["function"]["arguments"] == '{"city": "Oslo"}'
    assert cached(chunks[-1]) == chunks[-1]["usage"]["prompt_tokens"] - 1


def test_logprobs(clients: Clients, made: dict[str, Path]) -> None:
    """They are those of a cold run, alone and with those of other tokens."""
    model = str(made["random"])
    response = clients.chat("Count.", model=model, logprobs=True)
    assert len(response["choices"][0]["logprobs"]["content"]) == 12
    response = clients.chat("Count all.", model=model, logprobs=True, top_logprobs=3)
    content = response["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [3] * 12


def test_stop_words(clients: Clients, made: dict[str, Path]) -> None:
    """The answer ends before the word."""
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    response = clients.chat("Say a word.", stop=["today"], extra_body=options)
    (choice,) = response["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Sunny", "stop")


def test_logit_bias(clients: Clients, made: dict[str, Path]) -> None:
    """It makes an answer of one letter."""
    response = clients.chat(
        "Say x.", model=str(made["random"]), logit_bias={"87": 1000.0}
    )
    assert response["choices"][0]["message"]["content"] == "x" * 12


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.7, "repetition_context_size": 400},
        {"presence_penalty": 1.5, "presence_context_size": 300},
        {"frequency_penalty": 0.9, "frequency_context_size": 300},
    ],
)
@pytest.mark.parametrize("seed", [None, 5])
def test_penalties_see_the_whole_prompt(
    penalty: dict[str, Any], seed: int | None, clients: Clients, made: dict[str, Path]
) -> None:
    """Also the part of it that is not fed to the model again, batched or alone."""
    text = f"{penalty} {seed} " + "what was said before counts as well " * 6
    options = {"model": str(made["random"]), "seed": seed, "max_tokens": 32}
    penalised = clients.chat(text, extra_body=penalty, **options)
    free = clients._clients[1].chat.completions.create(
        messages=[{"role": "user", "content": text}], temperature=0, **options
    )
    assert free.choices[0].message.content != message(penalised)


def test_a_seed_tells_the_answer(clients: Clients, made: dict[str, Path]) -> None:
    """Such requests are served one at a time; the cache takes no random number."""
    options = {"model": str(made["random"]), "temperature": 1.0}
    first, second = (
        message(clients.chat(f"Roll dice, {seed}.", seed=seed, **options))
        for seed in (1, 2)
    )
    assert first != second


def test_completions(clients: Clients, made: dict[str, Path]) -> None:
    """Plain text is completed, and streamed."""
    response = clients.complete("Once upon a time", model=str(made["random"]))
    with clients._clients[0].completions.create(
        prompt="Once upon a time", model=str(made["random"]), temperature=0,
        max_tokens=12, stream=True,
    ) as stream:  # fmt: skip
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == response["choices"][0]["text"]


def message(response: dict[str, Any]) -> str:
    """Return what was answered."""
    text: str = response["choices"][0]["message"]["content"]
    return text


# ---------------------------------------------------------------------- adapters


def save_adapter(path: Path, model: Path, seed: int) -> Path:
    """Write a random adapter, the same for the same seed."""
    path.mkdir(exist_ok=True)
    facts = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    loaded, _ = mlx_lm.load(str(model))
    linear_to_lora_layers(loaded, 2, facts)
    mx.random.seed(seed)
    weights = {
        name: mx.random.normal(array.shape)
        for name, array in tree_flatten(loaded.parameters())
        if "lora" in name
    }
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": facts}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_an_adapter_finds_only_its_own(
    clients: Clients, made: dict[str, Path], tmp_path: Path
) -> None:
    """K04: without, with one, with another, and with the first one retrained in its
    place: four that never meet, and each finds its own again."""
    model = made["random"]
    first, second = (
        save_adapter(tmp_path / f"adapter-{seed}", model, seed) for seed in (1, 2)
    )

    def ask(adapter: Path | None) -> str:
        more = {"adapters": None if adapter is None else str(adapter)}
        return message(clients.chat("Who are you?", model=str(model), extra_body=more))

    answers = [ask(None)]
    for adapter in (first, second):
        answers.append(ask(adapter))
        assert clients.n_cold == 0
    for adapter, answer in zip((None, first, second), answers, strict=True):
        assert ask(adapter) == answer
        assert clients.n_cold > len("Who are you?")
    save_adapter(first, model, 3)
    answers.append(ask(first))
    assert clients.n_cold == 0
    assert len(set(answers)) == 4


# -------------------------------------------------------------- what is no answer


def test_the_models_are_listed(clients: Clients) -> None:
    """The one that is served, by its path."""
    ours, theirs = (client.models.list().model_dump() for client in clients._clients)
    assert [model["id"] for model in ours["data"]] == [x["id"] for x in theirs["data"]]
    assert len(ours["data"]) == 1


@pytest.mark.parametrize("origin", ["http://two.example", "http://three.example"])
def test_other_origins(origin: str, clients: Clients) -> None:
    """A browser is told the same, whether it may ask or not."""
    told = [headers(s, Origin=origin) for s in (clients.ours, clients.theirs)]
    assert told[0] == told[1]
    allowed = told[0].get("Access-Control-Allow-Origin")
    assert allowed == (origin if "two" in origin else None)


def headers(server: Server, **asked: str) -> dict[str, str]:
    """Return what a server tells of who may ask, but for when."""
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", method="OPTIONS", headers=asked
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 204
        return {
            k: v for k, v in response.headers.items() if k not in ("Date", "Server")
        }
