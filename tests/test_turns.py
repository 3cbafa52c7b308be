"""Conversations of models whose cache cannot be cut: windows, recurrent state, both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from test_architectures import build, config_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from promptstore import Namespace, PromptStore, ReasonKind, chat
from promptstore.mlx_lm import precompute, prefill, stream_generate

NAMESPACE = Namespace("turns")
HYBRIDS = ("qwen3_next", "falcon_h1", "mamba2")
WINDOWS = ("gemma3_text",)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>{% endif %}"
)
"""Opens a thought for the model, and renders its answer without it the next time."""


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    """Bytes as tokens, and a template whose generation prompt is not kept."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(t) for t in ("<s>", "<e>", "<think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<e>")
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(fast)


@pytest.fixture(scope="module", params=[*HYBRIDS, *WINDOWS])
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny random model of each kind, with room for the tokenizer's ids."""
    return build(config_of(request.param) | {"vocab_size": 300})


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a store may be; it is sound when the test ends."""
    yield tmp_path / "store"
    with PromptStore.open(tmp_path / "store") as store:
        assert store.check() == []


def open_store(root: Path, **options: Any) -> PromptStore:
    return PromptStore.open(root, min_tokens=1, **options)


def render(tokenizer: Any, *turns: tuple[str, str]) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return chat.prompt_tokens(tokenizer, messages)


def answer(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return six greedy tokens, by the store if one is given."""
    settings = {"max_tokens": 6, **options}
    run = stream_generate if "store" in options else mlx_lm.stream_generate
    return [response.token for response in run(model, tokenizer, prompt, **settings)]


def logits(model: Any, tokens: list[int], cache: list[Any]) -> mx.array:
    return model(mx.array(tokens)[None], cache=cache)[0, -1]


SYSTEM = ("system", "You know the history of rivers and of the bridges over them.")
USER = ("user", "How old is the oldest one that stands?")


@pytest.mark.parametrize("restart", [False, True])
def test_second_turn_reuses_up_to_the_end_of_the_user_turn(
    model: Any, tokenizer: Any, root: Path, restart: bool
) -> None:
    """A next request that renders the answer otherwise reuses all before it."""
    first = render(tokenizer, SYSTEM, USER)
    second = render(tokenizer, SYSTEM, USER, ("assistant", "Old."), ("user", "Why?"))
    turn_end = chat.boundaries(tokenizer).turn_end(chat.as_tokens(first))
    assert turn_end is not None
    assert first[:turn_end] == second[:turn_end]
    assert first[: turn_end + 12] != second[: turn_end + 12]
    with open_store(root) as store:
        answer(model, tokenizer, first, store=store, namespace=NAMESPACE)
        match = store.explain(NAMESPACE, second)
        if not restart:
            assert match.n_tokens >= turn_end
    with open_store(root) as store:
        found: list[Any] = []
        got = answer(
            model, tokenizer, second, store=store, namespace=NAMESPACE,
            on_match=found.append,
        )  # fmt: skip

    assert found[0].n_tokens >= turn_end
    assert got == answer(model, tokenizer, second)


def test_another_question_reuses_the_system_prompt(
    model: Any, tokenizer: Any, root: Path
) -> None:
    """The end of the system prompt is stored on the way to a first answer."""
    with open_store(root) as store:
        prompt = render(tokenizer, SYSTEM, USER)
        answer(model, tokenizer, prompt, store=store, namespace=NAMESPACE)
    other = render(tokenizer, SYSTEM, ("user", "Which river is longest?"))
    shared = len(chat.shared_tokens(tokenizer, [chat.system(SYSTEM[1])]))
    with open_store(root) as store:
        found: list[Any] = []
        got = answer(
            model, tokenizer, other, store=store, namespace=NAMESPACE,
            on_match=found.append,
        )  # fmt: skip

    assert found[0].n_tokens >= shared
    assert got == answer(model, tokenizer, other)


def test_precomputed_system_prompt_is_reused_whole(
    model: Any, tokenizer: Any, root: Path
) -> None:
    """A precomputed prompt is resumed at its end after a restart."""
    shared = chat.shared_tokens(tokenizer, [chat.system(SYSTEM[1])])
    with open_store(root) as store:
        precompute(model, shared, store=store, namespace=NAMESPACE, label="s", pin=True)
    prompt = render(tokenizer, SYSTEM, USER)
    with open_store(root) as store:
        found: list[Any] = []
        got = answer(
            model, tokenizer, prompt, store=store, namespace=NAMESPACE,
            on_match=found.append,
        )  # fmt: skip

    assert found[0].n_tokens >= len(shared)
    assert found[0].source == "disk"
    assert got == answer(model, tokenizer, prompt)


@pytest.mark.parametrize("n_new", [3, 20, 31])
def test_all_positions_of_a_turn_below_the_window_are_resumable(
    tokenizer: Any, root: Path, n_new: int
) -> None:
    """Two turns that grow by less than the window: every position of the second can
    be resumed after a restart, and gives the logits of a cold run."""
    model = build(config_of("gemma3_text"))
    rng = random.Random(n_new)
    ids = [rng.randrange(256) for _ in range(90 + n_new)]
    cache = make_prompt_cache(model)
    with open_store(root, memory_bytes=0) as store:
        for lo, hi in ((0, 60), (60, 90), (90, 90 + n_new)):
            prefill(model, ids[lo:hi], cache, step_size=7)
            store.insert(NAMESPACE, ids[:hi], cache)
    with open_store(root, memory_bytes=0) as store:
        for position in range(91, 91 + n_new):
            request = [*ids[:position], 7]
            match = store.match(NAMESPACE, request, like=make_prompt_cache(model))
            got = logits(model, [7], match.cache)
            cold = logits(model, request, make_prompt_cache(model))

            assert match.n_tokens == position
            assert mx.abs(got - cold).max().item() < 1e-4


def test_reason_names_the_kind_of_layer_and_the_nearest_position(root: Path) -> None:
    """A match that state has shortened says so, and where it could go on."""
    model = build(config_of("mamba2"))
    ids = list(range(1, 61))
    cache = make_prompt_cache(model)
    with open_store(root) as store:
        for lo, hi in ((0, 20), (20, 60)):
            prefill(model, ids[lo:hi], cache)
            store.insert(NAMESPACE, ids[:hi], cache)
        store.flush()
        match = store.match(NAMESPACE, [*ids[:40], 9, 9])

    assert match.n_tokens == 20
    assert match.reason is not None
    assert match.reason.kind is ReasonKind.NOT_RESUMABLE
    assert (match.reason.position, match.reason.detail) == (20, "state")


def test_checkpoints_of_long_prefills(tokenizer: Any, root: Path) -> None:
    """A long prompt of a model with state is stored every so many tokens."""
    model = build(config_of("mamba2"))
    ids = [i % 250 for i in range(100)]
    with open_store(root) as store:
        precompute(model, ids, store=store, namespace=NAMESPACE, checkpoint_every=30)
        store.flush()
        ends = sorted(x.end for x in store.snapshots() if x.start == x.end)

    assert ends == [30, 60, 90, 100]


def test_states_on_a_chain_are_bounded(root: Path) -> None:
    """The ends of answers go first, then the oldest turns; a system prompt stays."""
    model = build(config_of("mamba2"))
    ids = [i % 250 for i in range(200)]
    cache = make_prompt_cache(model)
    with open_store(root) as store:
        prefill(model, ids[:4], cache)
        store.insert(NAMESPACE, ids[:4], cache, kind="system")
        for end in range(8, 164, 4):
            prefill(model, ids[end - 4 : end], cache)
            kind = "user" if end % 8 == 0 else "assistant"
            store.insert(NAMESPACE, ids[:end], cache, kind=kind)
        store.flush()
        kept = {x.end: x.kind for x in store.snapshots() if x.start == x.end}

    assert len(kept) == 16
    assert kept[4] == "system"
    assert max(kept) == 160
    assert set(kept.values()) == {"system", "user"}


def test_shorter_snapshot_stays_beside_a_longer_that_cannot_be_cut(root: Path) -> None:
    """In memory a prefix goes only when the longer entry can be cut back to it."""
    ids = list(range(1, 61))
    for name, is_kept in (("mamba2", True), ("gemma3_text", True), ("llama", False)):
        model = build(config_of(name))
        namespace = Namespace(name)
        cache = make_prompt_cache(model)
        with open_store(root, write="off") as store:
            prefill(model, ids[:10], cache)
            store.insert(namespace, ids[:10], cache)
            prefill(model, ids[10:], cache, step_size=1)
            store.insert(namespace, ids, cache)

            assert (store.stats().n_entries == 2) is is_kept
            request = [*ids[:10], 99]
            match = store.match(namespace, request)
            got = logits(model, [99], match.cache)
            cold = logits(model, request, make_prompt_cache(model))
            assert match.n_tokens == 10
            assert mx.abs(got - cold).max().item() < 1e-4


def test_prefill_of_a_stateful_model_that_breaks_stores_nothing_wrong(
    root: Path,
) -> None:
    """State that was updated in a step that broke belongs to no tokens."""
    model = build(config_of("qwen3_next"))
    ids = [i % 250 for i in range(50)]

    class Broken(Exception):
        pass

    class Breaks:
        """Runs all layers but raises before the last of the second step is done."""

        n_calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            self.n_calls += 1
            if self.n_calls < 2:
                return model(tokens, cache=cache)
            before = [layer.offset for layer in cache if hasattr(layer, "offset")]
            model(tokens, cache=cache)
            for layer in cache:
                if hasattr(layer, "offset"):
                    layer.offset = before.pop(0)
            raise Broken

    with open_store(root) as store:
        with pytest.raises(Broken):
            precompute(
                Breaks(), ids, store=store, namespace=NAMESPACE, prefill_step_size=20
            )
        match = store.match(NAMESPACE, [*ids[:20], 3])

    assert match.cache is None


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_cache_that_came_out_of_a_batch_is_an_ordinary_one(
    name: str, root: Path
) -> None:
    """What ``extract`` takes out of a batch is stored and goes on like any cache; the
    batch itself is refused."""
    model = build(config_of(name))
    ids = list(range(1, 71))
    single = make_prompt_cache(model)
    prefill(model, ids, single)
    batch = [type(layer).merge([layer, layer]) for layer in single]
    taken = [layer.extract(1) for layer in batch]
    with open_store(root, memory_bytes=0) as store:
        with pytest.raises(ValueError, match="batch"):
            store.insert(NAMESPACE, ids, batch)
        store.insert(NAMESPACE, ids, taken)
        store.flush()
        match = store.match(NAMESPACE, [*ids, 7], like=make_prompt_cache(model))
        got = logits(model, [7], match.cache)

    assert match.n_tokens == 70
    assert mx.abs(got - logits(model, [7], single)).max().item() < 1e-4


class Stop(Exception):
    """What a caller's callback raises."""


@pytest.mark.parametrize("at", [0, 20, 40, 50])
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "llama"])
def test_callback_that_raises_stores_only_what_is_true(
    name: str, at: int, tokenizer: Any, root: Path
) -> None:
    """State belongs to the tokens that were prefilled when the callback raised."""
    model = build(config_of(name) | {"vocab_size": 300})
    ids = [i % 250 for i in range(50)]

    def stop(done: int, total: int) -> None:
        if done >= at:
            raise Stop

    with open_store(root) as store:
        with pytest.raises(Stop):
            answer(
                model, tokenizer, ids, store=store, namespace=NAMESPACE,
                prompt_progress_callback=stop, prefill_step_size=20, checkpoints=(),
            )  # fmt: skip
        store.flush()
        for request in ([*ids, 3], [*ids[:30], 3]):
            match = store.match(NAMESPACE, request, like=make_prompt_cache(model))
            assert match.n_tokens <= at
            if match.cache is not None:
                got = logits(model, request[match.n_tokens :], match.cache)
                cold = logits(model, request, make_prompt_cache(model))
                assert mx.abs(got - cold).max().item() < 1e-4
