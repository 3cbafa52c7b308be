"""The same answers with and without the store, on tiny models and on a real one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from builders import prefill, prints, tokens
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from promptstore import (
    Match,
    Namespace,
    PromptStore,
    StoreClosed,
    WriteFailed,
    n_cached,
)
from promptstore import mlx_lm as host

NS = Namespace("tiny")
VOCABULARY = 1000
N_ANSWER = 8
EOS = VOCABULARY  # a word that the model does not know, unless told else


class Open(Protocol):
    """Opens the test's store."""

    def __call__(self, **options: Any) -> PromptStore: ...


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Open stores on one root that are checked and closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_(**options: Any) -> PromptStore:
            options = {"min_tokens": 0, **options}
            store = PromptStore.open(tmp_path / "store", **options)
            stack.callback(finish, store)
            return store

        yield open_


def finish(store: PromptStore) -> None:
    """Close a store, which must be whole on disk."""
    try:
        store.flush()
        assert store.check() == []
    except StoreClosed:
        return
    finally:
        store.close()


@pytest.fixture
def store(open_store: Open) -> PromptStore:
    """A store that keeps prompts of any length; the shared fixture's has a minimum."""
    return open_store()


def reopened(store: PromptStore, open_store: Open) -> PromptStore:
    """Close a store and open it again."""
    store.close()
    return open_store()


@functools.cache
def tiny(dtype: mx.Dtype = mx.float32, n_layers: int = 3, seed: int = 0) -> Model:
    """Return a llama of random weights whose heads can be quantized."""
    mx.random.seed(seed)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=n_layers,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            head_dim=64,
            rope_theta=10000.0,
            tie_word_embeddings=False,  # tied, random models repeat themselves
        )
    )
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


@functools.cache
def words(eos: int = EOS) -> TokenizerWrapper:
    """Return a tokenizer of the words ``w0`` to ``w999``; one of them ends answers."""
    model = WordLevel({f"w{n}": n for n in range(EOS + 1)}, unk_token="w0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{eos}")
    return TokenizerWrapper(fast)


Answer = tuple[list[int], list[mx.array]]


def answer(responses: Any) -> Answer:
    """Return the tokens and the log probabilities of a generation."""
    found = [(response.token, response.logprobs) for response in responses]
    return [token for token, _ in found], [logprobs for _, logprobs in found]


def cold(prompt: Any, model: Any = None, **options: Any) -> Answer:
    """Answer with mlx-lm alone."""
    options = {"max_tokens": N_ANSWER, **options}
    return answer(mlx_lm.stream_generate(model or tiny(), words(), prompt, **options))


def warm(
    store: PromptStore, prompt: Any, model: Any = None, **options: Any
) -> tuple[Answer, Match]:
    """Answer with the store; return what it matched, too."""
    matches: list[Match] = []
    options = {"max_tokens": N_ANSWER, **options}
    found = answer(
        host.stream_generate(
            model or tiny(), words(), prompt, store=store, namespace=NS,
            on_match=matches.append, **options,
        )
    )  # fmt: skip
    store.flush()
    (match,) = matches
    return found, match


def equal(first: Answer, second: Answer, tolerance: float = 0.0) -> bool:
    """Whether two answers have the same tokens and as good as the same logits."""
    assert first[0] == second[0]
    gaps = [
        mx.abs(a - b).max().item() for a, b in zip(first[1], second[1], strict=True)
    ]
    return max(gaps) <= tolerance


def holds(store: PromptStore, ids: Sequence[int], n_tokens: int) -> None:
    """Demand that so much of a prompt is stored, and passes the reference check."""
    match = store.match(NS, [*ids, 3])
    assert match.n_tokens == n_tokens
    rest = [*ids[n_tokens:], 3]
    _, logits = prefill(tiny(), rest, match.cache)
    _, reference = prefill(tiny(), [*ids, 3])
    assert mx.abs(logits - reference).max().item() < 1e-4


# --------------------------------------------------------------------- conversations

SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": mx.bfloat16},
    {"dtype": mx.float16},
    {"kv_bits": 8, "quantized_kv_start": 0, "kv_group_size": 64},
    {"kv_bits": 4, "quantized_kv_start": 0, "kv_group_size": 32},
    {"kv_bits": 8, "quantized_kv_start": 150, "dtype": mx.bfloat16},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: str(sorted(each)))
@pytest.mark.parametrize("restart", [False, True])
def test_a_conversation_equals_one_in_a_live_cache(
    open_store: Open, settings: dict[str, Any], restart: bool
) -> None:
    """Turn for turn the tokens and the logits are, bit for bit, those of mlx-lm with
    a cache that was never let go, whatever its dtype and its bits (P13)."""
    options = dict(settings)
    model = tiny(options.pop("dtype", mx.float32))
    store, live, ids = open_store(), make_prompt_cache(model), []
    for turn in range(3):
        new = tokens(90, seed=turn)
        n_expected = len(ids)
        ids += new
        reference = cold(mx.array(new), model, prompt_cache=live, **options)
        found, match = warm(store, ids, model, **options)
        assert match.n_tokens == n_expected
        assert match.source == ("miss" if not turn else "disk" if restart else "memory")
        assert equal(found, reference)
        ids += reference[0]
        assert n_cached(live) == len(ids)
        if restart:
            store = reopened(store, open_store)


@pytest.mark.parametrize("n_shared", [1, 100, 255, 256, 257, 399])
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_prompt_that_shares_its_beginning_is_answered_as_if_cold(
    open_store: Open, n_shared: int, source: str
) -> None:
    """Wherever two prompts part, the second gets the answer of a cold run."""
    store = open_store(memory_bytes=0 if source == "disk" else 1 << 30)
    first = tokens(400)
    second = [*first[:n_shared], *(998 - id_ for id_ in tokens(40, seed=4))]
    warm(store, first)
    found, match = warm(store, second)
    assert (match.n_tokens, match.source) == (n_shared, source)
    assert equal(found, cold(second), 1e-4)
    holds(store, second, len(second))


def test_a_repeated_prompt_is_answered_the_same_for_ever(
    store: PromptStore, open_store: Open
) -> None:
    """Nothing drifts: the last token is computed again, nothing else (K01, W06)."""
    ids = tokens(100)
    reference = cold(ids)
    for turn in range(4):
        found, match = warm(store, ids)
        assert match.n_tokens == (99 if turn else 0)
        assert equal(found, reference, 1e-4)
        if turn == 2:
            store = reopened(store, open_store)


def test_settings_never_meet(store: PromptStore, open_store: Open) -> None:
    """A run goes on with KV of its own bits and groups, or with none (K02)."""
    ids = tokens(100)
    settings: list[dict[str, Any]] = [
        {},
        {"kv_bits": 8},
        {"kv_bits": 4},
        {"kv_bits": 8, "kv_group_size": 32},
    ]
    for options in settings:
        options.setdefault("quantized_kv_start", 0)
        _, match = warm(store, ids, **options)
        assert match.n_tokens == 0
        store = reopened(store, open_store)
    for options in settings:
        _, match = warm(store, [*ids, 5, 6], **options)
        assert match.n_tokens == 100
        kinds = {type(layer) for layer in match.cache or []}
        assert kinds == {QuantizedKVCache if "kv_bits" in options else KVCache}


def test_below_its_start_a_quantized_run_takes_plain_kv(store: PromptStore) -> None:
    """Up to ``quantized_kv_start`` such a run holds plain layers; beyond it none."""
    ids = tokens(300)
    warm(store, ids)
    options: dict[str, Any] = {"kv_bits": 8, "quantized_kv_start": 200}
    _, match = warm(store, [*ids[:150], 5, 6, 7], **options)
    assert match.n_tokens == 150
    _, match = warm(store, [*ids[:290], 5, 6, 7], **options)
    assert match.n_tokens <= 200


def test_a_request_is_counted_once(store: PromptStore) -> None:
    """However the host looks, one prompt is one hit or one miss (S03)."""
    ids = tokens(100)
    for _ in range(2):
        warm(store, ids, kv_bits=8, quantized_kv_start=50)
    stats = store.stats()
    assert stats.tokens_asked == 200
    assert stats.hits_memory + stats.hits_disk + stats.misses == 2


# -------------------------------------------------------------------- draft models


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("n_draft", [1, 2, 5])
def test_a_draft_model_changes_no_answer(
    store: PromptStore, open_store: Open, same: bool, n_draft: int
) -> None:
    """Target and draft are restored together, under the tokens that both cover; the
    answer is the one without a draft, without a store (W07)."""
    draft = tiny() if same else tiny(n_layers=1, seed=5)
    ids = tokens(60)
    for turn in range(3):
        options = {"draft_model": draft, "num_draft_tokens": n_draft}
        found, match = warm(store, ids, max_tokens=7 + turn, **options)
        reference = cold(ids, max_tokens=7 + turn)
        assert equal(found, reference, 1e-4)
        if turn:
            # Either model may lawfully lag behind what was yielded.
            assert len(ids) - 20 - 2 * n_draft <= match.n_tokens <= len(ids) - 20
        ids += reference[0]
        both = store.match(NS, [*ids, 3])
        check_draft(both, draft, ids)
        ids += tokens(20, seed=turn)
        store = reopened(store, open_store)


def check_draft(match: Match, draft: Any, ids: Sequence[int]) -> None:
    """Both halves of a target and draft cache pass the reference check."""
    assert match.cache is not None
    n_target = len(tiny().layers)
    for model, half in (
        (tiny(), match.cache[:n_target]),
        (draft, match.cache[n_target:]),
    ):
        _, logits = prefill(model, [*ids[match.n_tokens :], 3], half)
        _, reference = prefill(model, [*ids, 3])
        assert mx.abs(logits - reference).max().item() < 1e-4


def test_a_draft_stopped_anywhere_is_stored_right(store: PromptStore) -> None:
    """However far the draft ran ahead when the caller stopped, keys fit KV (W07)."""
    draft = tiny(n_layers=1, seed=5)
    for n_taken in range(1, 7):
        ids = [n_taken, *tokens(40)]
        run = host.stream_generate(
            tiny(), words(), ids, store=store, namespace=NS, draft_model=draft,
            num_draft_tokens=3, max_tokens=20,
        )  # fmt: skip
        taken = [next(run).token for _ in range(n_taken)]
        run.close()
        store.flush()
        match = store.match(NS, [*ids, *taken, 3])
        assert match.n_tokens >= len(ids) - 1
        check_draft(match, draft, [*ids, *taken])


# ---------------------------------------------------------------- logits processors


def penalties() -> list[Any]:
    """Return processors whose effect depends on what stands before."""
    return make_logits_processors(repetition_penalty=1.5, repetition_context_size=64)


@pytest.mark.parametrize("n_shared", [30, 100, 139])
def test_a_repetition_penalty_sees_what_was_not_prefilled(
    store: PromptStore, n_shared: int
) -> None:
    """A processor decides by all the tokens, reused or not: answers stay equal."""
    ids = tokens(140)
    warm(store, ids[:n_shared])
    found, match = warm(store, ids, logits_processors=penalties())
    assert match.n_tokens == n_shared
    reference = cold(ids, logits_processors=penalties())
    assert reference[0] != cold(ids)[0]
    assert equal(found, reference, 1e-4)


@pytest.mark.parametrize("draft", [False, True])
def test_a_processor_sees_what_it_sees_without_the_store(
    store: PromptStore, draft: bool
) -> None:
    """Call for call a processor gets the tokens that a cold run shows it."""
    ids = tokens(100)
    seen: list[list[list[int]]] = []

    def record(shown: mx.array, logits: mx.array) -> mx.array:
        seen[-1].append(shown.tolist())
        return logits

    options: dict[str, Any] = {"logits_processors": [record], "prefill_step_size": 32}
    if draft:
        options["draft_model"] = tiny(n_layers=1, seed=5)
    seen.append([])
    cold(ids, **options)
    warm(store, ids[:60], **{"draft_model": options.get("draft_model")})
    seen.append([])
    _, match = warm(store, ids, **options)
    assert match.n_tokens > 50
    assert seen[0] == seen[1]


def test_processors_given_are_not_changed(store: PromptStore) -> None:
    """The caller's list of processors is the caller's, for the next call as well."""
    processors = penalties()
    before = list(processors)
    for _ in range(2):
        warm(store, tokens(50), logits_processors=processors)
    assert processors == before


# ------------------------------------------------------------- stopped and interrupted


class Stop(Exception):
    """What the caller's code raises."""


@pytest.mark.parametrize("n_taken", [1, 2, 5])
def test_a_generation_that_is_closed_is_stored(
    store: PromptStore, n_taken: int
) -> None:
    """Who takes some tokens and leaves has stored what the KV covers (W05, W07)."""
    ids = tokens(80)
    run = host.stream_generate(
        tiny(), words(), ids, store=store, namespace=NS, max_tokens=20
    )
    taken = [next(run).token for _ in range(n_taken)]
    run.close()
    store.flush()
    holds(store, [*ids, *taken], 80 + n_taken)


def test_a_generation_that_was_never_begun_stores_nothing(store: PromptStore) -> None:
    """A generator that is thrown away at once has matched and computed nothing."""
    host.stream_generate(tiny(), words(), tokens(80), store=store, namespace=NS).close()
    assert store.stats().n_inserts == store.stats().misses == 0


@pytest.mark.parametrize(("n_calls", "n_stored"), [(1, 0), (2, 32), (3, 64), (4, 79)])
@pytest.mark.parametrize("reuse", [False, True])
def test_an_exception_in_the_progress_callback(
    store: PromptStore, n_calls: int, n_stored: int, reuse: bool
) -> None:
    """It reaches the caller as it is, and what was prefilled by then is stored."""
    head = tokens(50, seed=5) if reuse else []
    if reuse:
        warm(store, head, max_tokens=1)
    ids = [*head, *tokens(80)]
    calls = []

    def progress(*args: int) -> None:
        calls.append(args)
        if len(calls) == n_calls:
            raise Stop

    with pytest.raises(Stop):
        warm(store, ids, prompt_progress_callback=progress, prefill_step_size=32)
    store.flush()
    holds(store, ids, len(head) + n_stored)


def test_an_exception_in_the_middle_of_a_generation(store: PromptStore) -> None:
    """The tokens that were yielded and the KV that is there agree."""
    ids, taken = tokens(80), []

    def fail(shown: mx.array, logits: mx.array) -> mx.array:
        if len(shown) > 84:
            raise Stop
        return logits

    run = host.stream_generate(
        tiny(), words(), ids, store=store, namespace=NS, logits_processors=[fail]
    )

    def consume() -> None:
        for response in run:
            taken.append(response.token)

    with pytest.raises(Stop):
        consume()
    store.flush()
    assert taken
    match = store.match(NS, [*ids, *taken, 3])
    assert 80 <= match.n_tokens <= 80 + len(taken)
    holds(store, [*ids, *taken], match.n_tokens)


def test_the_end_of_an_answer_is_stored(store: PromptStore) -> None:
    """The token that ends an answer is part of the KV and of the key (W07)."""
    ids = tokens(80)
    plain, _ = cold(ids, logits_processors=penalties())
    end = next(n for n, token in enumerate(plain) if token not in plain[:n] and n > 1)
    run = host.stream_generate(
        tiny(), words(plain[end]), ids, store=store, namespace=NS,
        max_tokens=N_ANSWER, logits_processors=penalties(),
    )  # fmt: skip
    responses = list(run)
    store.flush()
    assert responses[-1].finish_reason == "stop"
    assert [response.token for response in responses] == plain[: end + 1]
    holds(store, [*ids, *plain[: end + 1]], 80 + end + 1)


# ------------------------------------------------------------- arguments and responses


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        mx.array,
        functools.partial(np.array, dtype=np.int32),
        lambda ids: " ".join(f"w{id_}" for id_ in ids),
    ],
    ids=["list", "tuple", "mx", "numpy", "str"],
)
def test_a_prompt_may_have_any_form(
    store: PromptStore, form: Callable[[list[int]], Any]
) -> None:
    """Text, list, tuple and arrays of the same ids are the same prompt (K05)."""
    ids = tokens(90)
    first, match = warm(store, form(ids))
    assert match.n_tokens == 0
    second, match = warm(store, ids)
    assert match.n_tokens == 89
    third, match = warm(store, form(ids))
    assert match.n_tokens == 89
    assert first[0] == second[0] == third[0] == cold(ids)[0]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ("", {}, "prompt is empty"),
        ([[1, 2]], {}, "prompt must be one-dimensional"),
        ([1, 2], {"prompt_cache": [KVCache()]}, "prompt_cache"),
    ],
)
def test_wrong_arguments_are_named(
    store: PromptStore, prompt: Any, options: dict[str, Any], message: str
) -> None:
    """What cannot work is refused before the model is asked for anything."""
    with pytest.raises(ValueError, match=message):
        warm(store, prompt, **options)
    assert store.stats().misses == 0


def test_progress_counts_the_whole_prompt(store: PromptStore) -> None:
    """Cold it is mlx-lm's own; with reuse it begins where the reuse ends."""
    ids = tokens(100)
    calls: list[list[tuple[int, int]]] = []

    def options() -> dict[str, Any]:
        calls.append([])
        own = calls[-1]
        return {
            "prompt_progress_callback": lambda done, total: own.append((done, total)),
            "prefill_step_size": 32,
        }

    cold(ids, **options())
    warm(store, ids, **options())
    assert calls[0] == calls[1]
    warm(store, [*ids, *tokens(50, seed=5)], **options())
    assert calls[2] == [(100, 150), (132, 150), (149, 150), (150, 150)]
    warm(store, [*ids, *tokens(50, seed=5)], **options())
    assert calls[3] == [(149, 150), (150, 150)]


def test_responses_are_those_of_mlx_lm(store: PromptStore) -> None:
    """Number, text, reasons and counts are equal, with reuse as well."""
    ids = tokens(60)

    def facts(responses: Any) -> list[tuple[Any, ...]]:
        return [
            (r.text, r.token, r.from_draft, r.prompt_tokens, r.generation_tokens,
             r.finish_reason)
            for r in responses
        ]  # fmt: skip

    reference = facts(mlx_lm.stream_generate(tiny(), words(), ids, max_tokens=5))
    for _ in range(2):
        run = host.stream_generate(
            tiny(), words(), ids, store=store, namespace=NS, max_tokens=5
        )
        assert facts(run) == reference


def test_the_match_is_told_before_the_prefill(store: PromptStore) -> None:
    """A caller can show what was reused while the rest is computed."""
    events: list[str] = []
    ids = tokens(60)
    run = host.stream_generate(
        tiny(), words(), ids, store=store, namespace=NS, max_tokens=2,
        on_match=lambda match: events.append(match.source),
        prompt_progress_callback=lambda *_: events.append("progress"),
    )  # fmt: skip
    list(run)
    assert events[:2] == ["miss", "progress"]


def test_a_bare_tokenizer_will_do(store: PromptStore) -> None:
    """A tokenizer that is not wrapped is wrapped, as mlx-lm does."""
    bare = words()._tokenizer
    run = host.stream_generate(
        tiny(), bare, "w5 w6 w7", store=store, namespace=NS, max_tokens=3
    )
    assert [response.token for response in run] == cold([5, 6, 7], max_tokens=3)[0]


def test_embeddings_leave_the_store_alone(store: PromptStore) -> None:
    """KV of embeddings is no function of tokens: it is neither used nor stored."""
    ids = tokens(40)
    warm(store, ids)
    before = store.stats()
    embeddings = tiny().model.embed_tokens(mx.array(tokens(40, seed=5)))
    options = {"max_tokens": 3, "input_embeddings": embeddings}
    run = host.stream_generate(
        tiny(), words(), mx.array(ids), store=store, namespace=NS, **options
    )
    reference = cold(mx.array(ids), **options)
    assert equal(answer(run), reference)
    assert store.stats() == before


def test_the_store_is_not_needed_to_answer(
    store: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing can be stored or looked up, the answer is the cold one, and the next
    flush tells that something was not stored."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is on fire")

    ids = tokens(80)
    monkeypatch.setattr(store._matcher, "match", fail)
    monkeypatch.setattr(store._saver, "_insert", fail)
    matches: list[Match] = []
    run = host.stream_generate(
        tiny(), words(), ids, store=store, namespace=NS, max_tokens=N_ANSWER,
        on_match=matches.append,
    )  # fmt: skip
    found = answer(run)
    assert [match.source for match in matches] == ["miss"]
    assert equal(found, cold(ids))
    with pytest.raises(WriteFailed, match="on fire"):
        store.flush()


# ------------------------------------------------------------------------- generate


def test_generate_returns_the_text_of_mlx_lm(
    store: PromptStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is that of ``mlx_lm.generate``, cold, reused, and across forms."""
    prompt = " ".join(f"w{id_}" for id_ in tokens(50))
    reference = mlx_lm.generate(tiny(), words(), prompt, max_tokens=6)
    assert reference
    for given in (prompt, prompt, tokens(50)):
        found = host.generate(
            tiny(), words(), given, store=store, namespace=NS, max_tokens=6
        )
        assert found == reference
    assert capsys.readouterr() == ("", "")
    assert store.stats().tokens_reused == 2 * 49


def test_verbose_generate_prints_text_and_reuse(
    store: PromptStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text as it comes, then one line on what was reused, from where."""
    for line in ("0 of 50 tokens reused (miss)", "49 of 50 tokens reused (memory)"):
        text = host.generate(
            tiny(), words(), tokens(50), True, store=store, namespace=NS, max_tokens=6
        )
        assert capsys.readouterr().out == f"{text}\n{line}\n"


@pytest.mark.parametrize("step_size", [1, 7, 64, 2048])
def test_prefill_computes_what_one_step_computes(step_size: int) -> None:
    """In steps of any size, behind any cache, and progress tells each of them."""
    ids, calls = tokens(50), []
    cache = make_prompt_cache(tiny())
    host.prefill(tiny(), ids[:20], cache, step_size=step_size)
    host.prefill(
        tiny(), ids[20:], cache, step_size=step_size,
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    host.prefill(tiny(), [], cache)
    assert n_cached(cache) == 50
    assert calls == [(n, 30) for n in range(0, 30, step_size)] + [(30, 30)]
    _, logits = prefill(tiny(), [3], cache)
    _, reference = prefill(tiny(), [*ids, 3])
    assert mx.abs(logits - reference).max().item() < 1e-4


# ------------------------------------------------------------------------ a real model

DOCUMENT = (
    "You answer in one short sentence. The lighthouse of Ar-Men stands on a rock in "
    "the Atlantic, off the island of Sein in Brittany. Work began in 1867 and took "
    "fourteen years, as the rock is under water most of the time. In the first year "
    "the workers had eight hours on it in all. The keepers called it the hell of "
    "hells. It has been automatic since 1990."
)


@pytest.mark.real_model
def test_a_real_model_answers_the_same(
    store: PromptStore, open_store: Open, real_model: tuple[Any, Any]
) -> None:
    """A question about a stored document, after a restart: the very tokens of a cold
    run, and only the question is prefilled."""
    model, tokenizer = real_model

    def ask(question: str) -> list[int]:
        messages = [
            {"role": "system", "content": DOCUMENT},
            {"role": "user", "content": question},
        ]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(ids)

    first, second = ask("When did work begin?"), ask("What did the keepers call it?")
    options: dict[str, Any] = {"max_tokens": 8}
    answers = []
    for prompt, n_least in ((first, 0), (second, 90), (first, len(first) - 1)):
        matches: list[Match] = []
        run = host.stream_generate(
            model, tokenizer, prompt, store=store, namespace=NS,
            on_match=matches.append, **options,
        )  # fmt: skip
        answers.append(answer(run))
        assert matches[0].n_tokens >= n_least
        store = reopened(store, open_store)
    for prompt, found in ((first, answers[0]), (second, answers[1])):
        run = mlx_lm.stream_generate(model, tokenizer, prompt, **options)
        assert equal(found, answer(run), 1e-2)
    assert answers[2][0] == answers[0][0]


@pytest.mark.real_model
def test_a_real_cache_survives_bit_for_bit(
    store: PromptStore, open_store: Open, real_model: tuple[Any, Any]
) -> None:
    """Thirty layers of a real model come back from disk as they went, and quantized
    ones too."""
    model, tokenizer = real_model
    ids = tokenizer.encode(DOCUMENT)[:64]
    cache, _ = prefill(model, ids)
    packed = [layer.to_quantized(group_size=64, bits=8) for layer in cache]
    for layer in packed:
        layer.keys, layer.values = tuple(layer.keys), tuple(layer.values)
    for made in (cache, packed):
        store.insert(NS, ids, made)
    store = reopened(store, open_store)
    for made in (cache, packed):
        match = store.match(NS, [*ids, 3], like=made)
        assert (match.n_tokens, match.source) == (64, "disk")
        assert prints(match.cache or []) == prints(made)
