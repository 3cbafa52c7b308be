"""Facts about `promptstore serve` that are told from inside its process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from local_servers import Local, local
from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from parrots import save_parrot
from servers import Server, cached, text_of
from test_architectures import config_of
from tiny import CONFIG, N_VOCABULARY, save_model

from promptstore import Namespace, PromptStore, n_cached
from promptstore.cli import main
from promptstore.errors import ServerMoved
from promptstore.metrics import Metrics
from promptstore.probe import BatchedPath
from promptstore.serve import upstream
from promptstore.serve.batches import Batches, FromBatch
from promptstore.serve.cache import ServedCache
from promptstore.serve.shutdown import Shutdown
from promptstore.serve.single import Single

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

WIDE = CONFIG | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 64 numbers, which can be quantized."""
PLAIN = {"llama": CONFIG, "wide": WIDE, "one": CONFIG | {"num_hidden_layers": 1}}
TEXT = "A long story of a fox, a hen and a farmer who was rarely at home. " * 4
CLOSED = urllib.error.HTTPError

Make = Callable[..., Path]
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make tiny models on disk, each one once."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str = "llama", seed: int = 0) -> Path:
        path = root / f"{name}-{seed}"
        if name == "parrot":
            return save_parrot(path)
        plain = {
            "llama": CONFIG,
            "wide": WIDE,
            "one": CONFIG | {"num_hidden_layers": 1},
        }
        config = plain[name] if name in plain else config_of(name)
        return save_model(path, config | {"vocab_size": N_VOCABULARY}, seed)

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers one after another on one store; in the end it must be whole."""
    root = tmp_path / "store"
    yield functools.partial(local, root=root)
    if root.exists():
        with PromptStore.open(root, memory_bytes=0) as store:
            assert store.check() == []


@functools.cache
def loaded(path: Path) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    model, tokenizer, *_ = mlx_lm.load(str(path))
    return model, tokenizer


def ids_of(path: Path, text: str) -> list[int]:
    """Return the tokens of a completion's prompt."""
    ids: list[int] = loaded(path)[1].encode(text)
    return ids


def plainly(
    path: Path, tokens: list[int], n: int = 8, **options: Any
) -> list[tuple[int, Any]]:
    """Return the tokens that mlx-lm itself generates, and their logprobs."""
    model, tokenizer = loaded(path)
    responses = mlx_lm.stream_generate(model, tokenizer, tokens, n, **options)
    return [
        (x.token, pytest.approx(x.logprobs[x.token].item(), abs=1e-3))
        for x in responses
    ]


def ask(client: Local, prompt: str, n: int = 8, **options: Any) -> Any:
    """Complete a text; return the response."""
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": True}
    return client.post("/v1/completions", body | options)


def told(response: Any) -> list[tuple[int, float]]:
    """Return the tokens of an answer, and their logprobs."""
    content = response["choices"][0]["logprobs"]["content"]
    return [(token["id"], token["logprob"]) for token in content]


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize("start_at", [0, 100])
def test_quantized_kv(start_at: int, start: Start, make: Make) -> None:
    """Turns are answered as by mlx-lm with one quantized cache that lives on, whether
    it is quantized from the start or from somewhere in the first prompt."""
    path = make("wide")
    options = ("--kv-bits", "8", "--quantized-kv-start", str(start_at))
    settings = {"kv_bits": 8, "quantized_kv_start": start_at}
    cache = make_prompt_cache(loaded(path)[0])
    first = ids_of(path, TEXT)
    with start(path, *options) as client:
        answer = ask(client, TEXT)
        assert told(answer) == plainly(path, first, prompt_cache=cache, **settings)
    second = TEXT + text_of(answer) + " And then?"
    with start(path, *options) as client:
        again = ask(client, second)
        tokens = ids_of(path, second)
        assert cached(again) >= len(first)
        trim_prompt_cache(cache, cache[0].offset - cached(again))
        assert told(again) == plainly(
            path, tokens[cached(again) :], prompt_cache=cache, **settings
        )


def test_kv_settings_never_mix(start: Start, make: Make) -> None:
    """K02: after a restart with other settings nothing is found, and after one with
    the old ones all is."""
    path = make("wide")
    n_left = len(ids_of(path, TEXT)) - 1
    answers: dict[tuple[str, ...], Any] = {}
    whole, start_at = (), ("--quantized-kv-start", "0", "--kv-bits")
    fine, coarse = (*start_at, "8"), (*start_at, "4")
    small = (*fine, "--kv-group-size", "32")
    for options in (whole, fine, coarse, small, whole, small, coarse, fine):
        with start(path, *options) as client:
            response = ask(client, TEXT)
        assert cached(response) == (n_left if options in answers else 0)
        expected = answers.setdefault(options, told(response))
        assert [x[0] for x in told(response)] == [x[0] for x in expected]


@pytest.mark.parametrize("pair", [("parrot", "parrot"), ("llama", "one")])
def test_a_draft_model(pair: tuple[str, str], start: Start, make: Make) -> None:
    """W07: however many drafts are right, and wherever an answer ends, the answers are
    those without a draft model, and the next turn finds this one."""
    path, draft = make(pair[0]), make(pair[1], seed=3)
    options = ("--draft-model", str(draft), "--num-draft-tokens", "3")
    asked = []
    with start(path, *options) as client:
        for n in (1, 2, 4, 7):
            prompt = f"{n} {TEXT}"
            first = ask(client, prompt, n)
            asked.append(prompt + text_of(first) + "\n")
            second = ask(client, asked[-1])
            assert told(first) == plainly(path, ids_of(path, prompt), n)
            assert told(second) == plainly(path, ids_of(path, asked[-1]))
            assert cached(second) >= first["usage"]["prompt_tokens"]
    with start(path, *options) as client:
        for prompt in asked:
            third = ask(client, prompt)
            assert cached(third) == third["usage"]["prompt_tokens"] - 1
            assert told(third) == plainly(path, ids_of(path, prompt))
    with start(path) as client:
        assert cached(ask(client, asked[0])) == 0


def test_a_draft_model_of_quantized_kv(start: Start, make: Make) -> None:
    """Both together are right, whatever is found again."""
    path = make("wide")
    options = ("--draft-model", str(make("wide", seed=3)))
    quantized = ("--kv-bits", "8", "--quantized-kv-start", "0")
    with start(path, *options, *quantized) as client:
        first, second = (ask(client, TEXT) for _ in range(2))
    assert told(first) == [(x, pytest.approx(p, abs=0.05)) for x, p in told(second)]


def test_options_of_the_server(start: Start, make: Make) -> None:
    """Defaults of the command line reach a request, and few slots serve many."""
    path = make("parrot")
    turns = [{"role": "user", "content": TEXT}]
    with start(path) as client:
        n_plain = client.chat(turns)["usage"]["prompt_tokens"]
    options = ("--chat-template-args", '{"loud": true, "enable_thinking": false}')
    with start(
        path, *options, "--max-tokens", "1", "--decode-concurrency", "1",
        "--prompt-concurrency", "1",
    ) as client:  # fmt: skip
        with ThreadPoolExecutor(3) as clients:
            body = {"messages": turns}
            futures = [
                clients.submit(client.post, "/v1/chat/completions", body)
                for _ in range(3)
            ]
        responses = [future.result() for future in futures]
    assert [text_of(response) for response in responses] == ["Sunny"] * 3
    usage = responses[0]["usage"]
    assert usage["prompt_tokens"] == n_plain  # a "!" more, no <think>


@pytest.mark.parametrize("architecture", ["parrot", "qwen3_next"])
def test_a_thought_does_not_cost_the_turn(
    architecture: str, start: Start, make: Make
) -> None:
    """K09: the next turn, whose history has neither the generation prompt nor the
    thought, finds all before them, also where a cache cannot be cut."""
    path = make(architecture)
    turns = [{"role": "user", "content": TEXT}]
    with start(path) as client:
        response = client.chat(turns)
        n_prompt = response["usage"]["prompt_tokens"]
        turns += [
            {"role": "assistant", "content": "I say something else."},
            {"role": "user", "content": "And now?"},
        ]
        assert cached(client.chat(turns)) >= n_prompt - len("assistant\n") - 2


# ------------------------------------------------------------------------ images


class Known:
    """A provider of one model, as the cache knows it."""

    def __init__(self, path: Path, batched: BatchedPath | None = None) -> None:
        self.model, _ = loaded(path)
        self.draft_model = None
        self.n_target = None
        self.namespace = Namespace(str(path))
        self.is_identified = True
        self.batched = batched or BatchedPath(True, True)
        self.cli_args = SimpleNamespace(
            kv_bits=None, kv_group_size=64, quantized_kv_start=5000
        )

    def trusts(self, *, shared: bool) -> bool:
        """As the real one."""
        return self.batched.shared if shared else self.batched.alone


def served(known: Known, store: PromptStore) -> ServedCache:
    """Return the prompt cache of a server of that model."""
    provider: Any = known
    return ServedCache(provider, store, Metrics(store), max_size=10, max_bytes=1 << 30)


def kv(known: Known, n: int) -> list[Any]:
    """Return a cache of some *n* tokens."""
    cache = make_prompt_cache(known.model)
    known.model(mx.arange(n)[None] % 200, cache=cache)
    return cache


def test_images_are_told_apart(make: Make, tmp_path: Path) -> None:
    """K06: patches are keyed by negative ids of 60 bits. Another image, and one that is
    the same in 32 bits, share what stands before; no match ends inside an image."""
    known = Known(make())
    image, other = -855241551491862571, -855241551491862572
    twin = image - (5 << 32)
    before, after = [*range(80)], [*range(100, 140)]
    key = before + [image] * 16 + after
    with PromptStore.open(tmp_path / "store") as store:
        cache = served(known, store)
        cache.insert_cache("key", key, kv(known, len(key)))
    with PromptStore.open(tmp_path / "store") as store:
        cache = served(known, store)
        for asked, n_reused in (
            (key, len(key) - 1),
            (before + [image] * 16 + [7] * 9, len(before) + 16),
            (before + [other] * 16 + after, len(before)),
            (before + [twin] * 16 + after, len(before)),
            (before + [image] * 9 + [7] * 9, len(before)),
            (before + [image] * 16, len(before)),
            (before + [image] * 20 + after, len(before)),
        ):
            found, rest = cache.fetch_nearest_cache("key", asked)
            assert found is not None
            assert len(asked) - len(rest) == n_reused == n_cached(found)
            assert cache.fetched is not None
            assert cache.fetched.tokens.tolist() == asked
        assert store.check() == []


def test_processors_see_no_ids_of_images(make: Make, store: PromptStore) -> None:
    """When all images of a prompt are reused, what a penalty counts are the tokens of
    the prompt; the keys of its patches are none. What is stored has the keys."""
    path = make()
    model, tokenizer = loaded(path)
    cache = served(Known(path), store)
    shown = prompt(60)
    key = [-(1 << 59) if 20 <= i < 30 else token for i, token in enumerate(shown)]
    cache.insert_cache("key", key[:50], kv(Known(path), 50))
    found, rest = cache.fetch_nearest_cache("key", key)
    assert (found is not None, len(rest)) == (True, 10)
    seen = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        if len(seen) == 3:
            raise Broken
        return logits

    single = Single(cache, Metrics(None), lambda: False, lambda: shown)
    responses = single(
        model, tokenizer, shown[50:], prompt_cache=found, logits_processors=[process],
        prompt_progress_callback=lambda *_: None, max_tokens=9,
    )  # fmt: skip
    with pytest.raises(Broken):
        list(responses)
    assert seen[0] == shown
    assert [len(tokens) for tokens in seen] == [60, 61, 62]
    _, rest = cache.fetch_nearest_cache("key", [*key, 1, 2])
    assert len(rest) <= 3


# ----------------------------------------------------------------------- batches


Kept = list[tuple[list[int], Any]]
ARCHITECTURES = ["llama", "gemma3_text", "qwen3_next", "mamba2"]


def batches_of(path: Path) -> tuple[Batches, Kept]:
    """Return batches of a model, which prefill 16 tokens a step, and what they keep."""
    kept: Kept = []
    batches = Batches(
        loaded(path)[0],
        keep=lambda tokens, cache: kept.append((tokens, cache)),
        on_close=lambda batches: None,
        metrics=Metrics(None),
        prefill_step_size=16,
        max_tokens=50,
    )
    return batches, kept


def prompt(n: int, seed: int = 0) -> list[int]:
    """Return some tokens."""
    return [(i * i + 7 * seed + i) % 250 for i in range(n)]


def is_right(path: Path, tokens: list[int], cache: list[Any]) -> bool:
    """Whether a cache gives the logits of a cold prefill of these tokens."""
    model, _ = loaded(path)
    cold = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cold)
    warm, fresh = (model(mx.array([[9, 8]]), cache=x) for x in (cache, cold))
    return bool(mx.allclose(warm, fresh, atol=1e-3).item())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n_steps", [1, 2, 4, 7, 9])
def test_a_removed_request_leaves_what_it_had(
    n_steps: int, architecture: str, make: Make
) -> None:
    """In the middle of the prefill, at its end, and in the middle of the answer."""
    path = make(architecture)
    batches, kept = batches_of(path)
    (uid,) = batches.insert([prompt(40)])
    for _ in range(n_steps):
        batches.next()
    batches.remove([uid, uid])
    ((tokens, cache),) = kept
    assert tokens[:40] == prompt(40)[: len(tokens)]
    assert len(tokens) == [16, 32, 40, 43, 45][[1, 2, 4, 7, 9].index(n_steps)]
    assert is_right(path, tokens, cache)
    assert not cache.shared
    assert batches.next() == ([], [])
    batches.remove([uid])
    assert len(kept) == 1


def test_a_request_that_was_not_begun_leaves_what_it_was_given(make: Make) -> None:
    """That is nothing, or the prefix that was found for it."""
    path = make()
    batches, kept = batches_of(path)
    model, _ = loaded(path)
    cache = make_prompt_cache(model)
    model(mx.array([prompt(24)]), cache=cache)
    uids = batches.insert(
        [prompt(40), prompt(40)[24:]],
        caches=[None, cache],
        all_tokens=[[], prompt(24)],
    )
    batches.remove(uids)
    ((tokens, left),) = kept
    assert tokens == prompt(24)
    assert is_right(path, tokens, left)


@pytest.mark.parametrize("n_steps", [1, 2, 6])
def test_one_of_two_goes_away(n_steps: int, make: Make) -> None:
    """What is left of it is right and was shared; the other one goes on as if alone."""
    path = make()
    batches, kept = batches_of(path)
    first, second = batches.insert([prompt(40), prompt(23, seed=1)], max_tokens=[50, 8])
    for _ in range(n_steps):
        batches.next()
    batches.remove([first])
    ((tokens, cache),) = kept
    assert cache.shared
    assert is_right(path, tokens, cache)
    last = None
    while last is None or last.finish_reason is None:
        _, answers = batches.next()
        last = answers[0] if answers else None
    assert last.uid == second
    assert last.prompt_cache.shared
    n_prompt = len(prompt(23))
    assert last.all_tokens[n_prompt:] == [
        token for token, _ in plainly(path, prompt(23, seed=1))
    ]
    assert is_right(path, last.all_tokens, last.prompt_cache)


def test_only_company_makes_shared(make: Make) -> None:
    """A request that is over before the next one begins was alone, and so is that."""
    batches, _ = batches_of(make())
    for _ in range(2):
        batches.insert([prompt(20)], max_tokens=[3])
        ends = []
        while not ends:
            _, answers = batches.next()
            ends = [answer for answer in answers if answer.prompt_cache is not None]
        assert not ends[0].prompt_cache.shared
    batches.insert([prompt(20)], max_tokens=[9])
    for _ in range(3):
        batches.next()
    batches.insert([prompt(20)], max_tokens=[2])
    shared = []
    while len(shared) < 2:
        _, answers = batches.next()
        shared += [x.prompt_cache.shared for x in answers if x.prompt_cache is not None]
    assert shared == [True, True]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_what_a_batch_leaves_is_stored_if_it_is_trusted(
    shared: bool, alone: bool, make: Make, store: PromptStore
) -> None:
    """In no tier otherwise; what comes out of no batch is."""
    known = Known(make(), BatchedPath(alone=alone, shared=shared))
    cache = served(known, store)
    own, n_stored = kv(known, 80), 0
    for first, company, is_kept in (
        (300, True, shared), (301, False, alone), (302, None, True),
    ):  # fmt: skip
        key = [first, *range(79)]
        cache.insert_cache("key", key, own if company is None else tagged(own, company))
        store.flush()
        n_stored += is_kept
        assert (cache.fetch_nearest_cache("key", key)[0] is not None) == is_kept
        assert len([*store.snapshots()]) == n_stored


def tagged(cache: list[Any], shared: bool) -> FromBatch:
    """Return a cache as it comes out of a batch."""
    own = FromBatch(cache)
    own.shared = shared
    return own


def test_a_server_stores_only_what_it_trusts(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shared a batch is stored nowhere, and what was alone is."""
    trusted = BatchedPath(alone=True, shared=False)
    monkeypatch.setattr("promptstore.serve.provider.batched_path", lambda _: trusted)
    with start(make()) as client:
        for texts, is_kept in (("ab", False), ("c", True)):
            prompts = [f"{text} {TEXT * 4}" for text in texts]
            together(client, prompts)
            assert (cached(ask(client, prompts[0], 1)) > 0) == is_kept


def together(client: Local, prompts: list[str]) -> None:
    """Ask all prompts, so that they are in one batch."""
    generator, is_held, gate = client.generator, threading.Event(), threading.Event()
    take: Any = generator._next_request

    def wait_and_take(timeout: float | None = None) -> Any:
        is_held.set()
        gate.wait()
        return take(timeout)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as clients:
        patch.setattr(generator, "_next_request", wait_and_take)
        is_held.wait()
        asked = [clients.submit(ask, client, prompt, 40) for prompt in prompts]
        while generator.requests.qsize() < len(prompts):
            pass
        gate.set()
        for answer in asked:
            answer.result()


# ---------------------------------------------------------------------- failures


class Broken(RuntimeError):
    """What a test makes a model raise."""


class Breaking:
    """Makes the last layer of a model raise once.

    Args:
        layer: The layer.
        patch: What undoes it.
    """

    def __init__(self, layer: Any, patch: pytest.MonkeyPatch) -> None:
        self.n_left = 0
        real = type(layer).__call__

        def call(this: Any, *args: Any, **more: Any) -> Any:
            if this is layer and self.n_left:
                self.n_left -= 1
                if not self.n_left:
                    raise Broken
            return real(this, *args, **more)

        patch.setattr(type(layer), "__call__", call)


PROMPT = TEXT[:200]
STEPS = ("--prefill-step-size", "64")


@pytest.mark.parametrize("architecture", ["llama", "mamba2"])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("n_calls", [3, 6])
def test_a_failure_costs_one_answer(
    n_calls: int,
    seed: int | None,
    architecture: str,
    start: Start,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the prefill or in the answer, batched or alone: the client gets no answer, the
    server stays healthy, and the next request is right, with what was surely whole."""
    path = make(architecture)
    expected = plainly(path, ids_of(path, PROMPT))
    with start(path, *STEPS) as client:
        ask(client, "warm up", 1, seed=seed)
        model = client.generator.model_provider.model
        breaking = Breaking(model.layers[-1], monkeypatch)
        breaking.n_left = n_calls
        with pytest.raises(CLOSED):
            ask(client, PROMPT, seed=seed)
        assert breaking.n_left == 0
        assert client.get("/health")[0] == 200
        again = ask(client, PROMPT, seed=seed)
        assert told(again) == expected
        if architecture == "llama":
            assert cached(again) == (128 if n_calls == 3 else 199)
        assert told(ask(client, PROMPT, seed=seed)) == expected
        assert client.get("/health")[0] == 200


@contextlib.contextmanager
def streaming(client: Local, **options: Any) -> Iterator[Any]:
    """Begin a long answer; yield its stream once there is something of it."""
    body = {"prompt": PROMPT, "max_tokens": 1_000_000, "stream": True} | options
    request = urllib.request.Request(
        client.url + "/v1/completions", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as response:
        while b"data:" not in response.readline():
            pass
        yield response


@pytest.mark.parametrize("seed", [None, 3])
def test_a_stop_in_the_middle_of_an_answer_keeps_it(
    seed: int | None, start: Start, make: Make
) -> None:
    """Batched or alone: the next server finds the whole prompt."""
    path = make()
    with contextlib.ExitStack() as stack, start(path, *STEPS) as client:
        stack.enter_context(streaming(client, seed=seed))
    with start(path, *STEPS) as client:
        n_prompt = len(ids_of(path, PROMPT))
        assert cached(ask(client, PROMPT)) == n_prompt - 1


def test_clients_that_left_are_let_go(start: Start, make: Make) -> None:
    """Nothing of their answers remains."""
    with start(make(), *STEPS) as client:
        for _ in range(3):
            with streaming(client):
                pass
        ask(client, "the last one", 1)
        while client.generator._batches and client.generator._batches._find_uids([2]):
            ask(client, "the last one", 1)
        ask(client, "the last one", 1)
        assert len(client.generator._replies) <= 1


def test_a_failure_costs_all_answers_of_the_batch(
    start: Start, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client is told, and what each had is kept."""
    path = make()
    prompts = [f"{number} {PROMPT}" for number in range(3)]
    with start(path, *STEPS) as client:
        ask(client, "warm up", 1)
        breaking = Breaking(
            client.generator.model_provider.model.layers[-1], monkeypatch
        )
        breaking.n_left = 8
        with pytest.raises(CLOSED):
            together(client, prompts)
        for prompt in prompts:
            again = ask(client, prompt)
            assert cached(again) == 201
            assert told(again) == plainly(path, ids_of(path, prompt))
        assert client.metric("promptstore_errors_total", cause="Broken") >= 1


def test_a_failure_while_a_padded_prompt_is_prefilled(
    make: Make, store: PromptStore
) -> None:
    """Prompts of several lengths are padded on the right until a step is over: what
    is kept of them is what they had before it."""
    path = make()
    known = Known(path)
    cache = served(known, store)
    prompts = [prompt(40), prompt(23, seed=1), prompt(70, seed=2)]
    batches, kept = batches_of(path)
    batches.insert(prompts)
    tear(batches, known.model, 2)
    assert [len(tokens) for tokens, _ in kept] == [16, 16, 16]
    for (tokens, layers), asked in zip(kept, prompts, strict=True):
        cache.insert_cache("key", tokens, layers)
        found, _ = cache.fetch_nearest_cache("key", asked)
        assert found is not None
        assert is_right(path, asked[:16], found)


def tear(batches: Batches, model: Any, n_steps: int) -> None:
    """Make the last layer raise in a step, and keep what is left."""
    with pytest.MonkeyPatch.context() as patch:
        Breaking(model.layers[-1], patch).n_left = n_steps
        with contextlib.suppress(Broken):
            while True:
                batches.next()
        batches.keep()


@pytest.mark.parametrize("n_steps", [1, 2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_kept_of_a_torn_step_is_right(
    architecture: str, n_steps: int, make: Make, store: PromptStore
) -> None:
    """If a layer raises, those before it are a step ahead: layers that cannot be cut
    back are not kept at all."""
    path = make(architecture)
    known = Known(path)
    cache = served(known, store)
    batches, _ = batches_of(path)
    batches._keep = lambda tokens, layers: cache.insert_cache("key", tokens, layers)
    batches.insert([prompt(40)])
    tear(batches, known.model, n_steps)
    found, rest = cache.fetch_nearest_cache("key", [*prompt(40), 1, 2, 3])
    n_whole = {1: 0, 2: 16, 3: 32}[n_steps]
    if found is not None:
        assert 43 - len(rest) <= n_whole
        assert is_right(path, prompt(40)[: 43 - len(rest)], found)
    assert (found is not None) == (architecture == "llama" and n_whole > 0)


# -------------------------------------------------------------- mlx-lm's server


def test_the_installed_server_is_known() -> None:
    """All that is replaced is where it was."""
    upstream.require()


MOVED = [(path, name) for path, names in upstream._LOOKED_UP.items() for name in names]
PARAMETERS = [
    (path, name) for path, names in upstream._PARAMETERS.items() for name in names
]


def holder_of(path: str) -> tuple[Any, str]:
    """Return what holds a function of the server, and its name there."""
    *holders, name = path.split(".")
    return functools.reduce(getattr, holders, server), name


@pytest.mark.parametrize(("path", "name"), MOVED)
def test_a_name_that_is_not_looked_up_is_told(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that uses another name would run without the store."""
    holder, function_name = holder_of(path)
    real = getattr(holder, function_name)

    def without(code: Any) -> Any:
        consts = [without(x) if inspect.iscode(x) else x for x in code.co_consts]
        names = [x + "_" if x == name else x for x in code.co_names]
        return code.replace(co_consts=tuple(consts), co_names=tuple(names))

    moved = type(real)(
        without(real.__code__), real.__globals__, closure=real.__closure__
    )
    moved.__defaults__ = real.__defaults__
    monkeypatch.setattr(holder, function_name, moved)
    with pytest.raises(ServerMoved) as caught:
        upstream.require()
    assert caught.value.missing == [f"{path} uses no {name}"]


@pytest.mark.parametrize(("path", "name"), PARAMETERS)
def test_a_parameter_that_is_renamed_is_told(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be given, and not taken."""
    holder, function_name = holder_of(path)
    real = getattr(holder, function_name)
    signature = inspect.signature(real)
    parameters = [
        x.replace(name=x.name + "_" if x.name == name else x.name)
        for x in signature.parameters.values()
    ]
    monkeypatch.setattr(
        real, "__signature__", signature.replace(parameters=parameters), raising=False
    )
    with pytest.raises(ServerMoved) as caught:
        upstream.require()
    assert caught.value.missing == [f"{path} takes no {name}"]


@pytest.mark.parametrize("path", [*upstream._LOOKED_UP, *upstream._PARAMETERS])
def test_a_function_that_is_gone_is_told(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it would have is told at once."""
    holder, name = holder_of(path)
    monkeypatch.delattr(holder, name)
    with pytest.raises(ServerMoved) as caught:
        upstream.require()
    assert any(text.startswith(path) for text in caught.value.missing)


def test_a_moved_server_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of the command line, with its exit code; no store is made."""
    monkeypatch.delattr(server.ResponseGenerator, "_serve_single")
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    store = tmp_path / "store"
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--store", str(store), "--model", "x"], prog_name="promptstore")
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("promptstore: error: mlx_lm.server ")
    assert "ResponseGenerator._serve_single uses no stream_generate" in line
    assert not store.exists()


# ----------------------------------------------------------------------- the end


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals are put back."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_two_signals(first: int, second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one asks, once; the second one ends, with the code of its kind."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    shutdown = Shutdown(60)
    shutdown.install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(first)
    assert codes == []
    with pytest.raises(KeyboardInterrupt):  # since this _exit returns
        signal.raise_signal(second)
    assert codes == [128 + second]


def test_the_time_left_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the first question and never falls below nothing."""
    now = [100.0]
    monkeypatch.setattr("promptstore.serve.shutdown.time.monotonic", lambda: now[0])
    shutdown = Shutdown(15)
    now[0] = 200.0
    left = []
    for now[0] in (200.0, 206.0, 214.0, 215.0, 300.0):
        left.append(shutdown.left_s())
    assert left == [15.0, 9.0, 1.0, 0.0, 0.0]


def test_only_the_main_thread_listens() -> None:
    """Elsewhere signals are left to whoever has them."""
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=Shutdown(1).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


BLOCKED = """
import threading
from promptstore import failpoints
from promptstore.cli import main
def wait(step):
    if step == "insert: file made":
        threading.Event().wait()
failpoints.hook = wait
main(prog_name="promptstore")
"""


def test_a_writer_that_hangs_does_not_keep_the_process(
    make: Make, tmp_path: Path
) -> None:
    """It ends within its bound, and tells what it leaves behind."""
    (tmp_path / "blocked.py").write_text(BLOCKED)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    store = ("--store", str(tmp_path / "store"), "--shutdown-s", "0.5")
    with Server(
        make(), *store, module=("blocked", "serve"),
        env={"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:  # fmt: skip
        process.post("/v1/completions", {"prompt": TEXT, "max_tokens": 2})
        assert process.stop(signal.SIGTERM) == 1
        assert re.search("not written in time: [1-9] prompts", process.log)
        assert "Traceback" not in process.log
    with PromptStore.open(tmp_path / "store") as left:
        assert [*left.snapshots()] == []
