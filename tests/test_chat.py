"""Facts about chat prompts as tokens, on tokenizers of bytes and a few merges."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from promptstore import chat

PACKAGE = Path(chat.__file__).parent
DOCUMENT = "The document: internation"
TURNS = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
THINKING = TURNS + "{% if add_generation_prompt %}<s>assistant\n<think>{% endif %}"
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
JOINING = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REFUSING = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
DEAF = "{{ raise_exception('Conversation roles must alternate') }}"
DROPPING = CHATML.replace("messages %}", "messages if m['role'] != 'system' %}")
USER_FIRST = JOINING.replace("messages %}", "messages | reverse %}")


def make_tokenizer(
    template: str | None = None, *merges: tuple[str, str], wrapped: bool = True
) -> Any:
    """Make a tokenizer of bytes; as in byte-level BPE, a newline is written ``Ċ``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    plain = Tokenizer(models.BPE(vocab, list(merges)))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(text) for text in ("<s>", "<e>", "<think>")])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<e>")
    tokenizer.chat_template = template
    return TokenizerWrapper(tokenizer) if wrapped else tokenizer


def questions() -> list[str]:
    """Return questions that begin with every kind of character, seeded."""
    chance = random.Random(1)
    chars = "aA7 \n(.<é漢"
    return ["".join(chance.choices(chars, k=n)) for n in (1, 1, 1, 2, 5, 9) * 5]


@pytest.mark.parametrize("template", [CHATML, THINKING, TRIMMING, JOINING, None])
def test_shared_tokens_begin_every_prompt(template: str | None) -> None:
    """Whatever the question, the prompt begins with the shared tokens."""
    merges = [("n", "a"), ("n", "Ċ"), ("Ċ", "Ċ"), ("n", "7")]
    tokenizer = make_tokenizer(template, *merges)
    system = chat.system(DOCUMENT)
    shared = chat.shared_tokens(tokenizer, [system])
    for question in questions():
        prompt = chat.prompt_tokens(tokenizer, [system, chat.user(question)])
        assert prompt[: len(shared)] == shared
    assert DOCUMENT[:-1] in tokenizer.decode(shared)


def test_shared_tokens_stop_before_a_merge() -> None:
    """A last letter that some continuations merge with is not shared."""
    tokenizer = make_tokenizer(JOINING, ("n", "a"))
    shared = chat.shared_tokens(tokenizer, [chat.system(DOCUMENT)])
    assert tokenizer.decode(shared) == DOCUMENT[:-1]


def test_shared_tokens_without_a_template_stop_before_a_merge() -> None:
    """Without a chat template, plain text ends at a token that survives as well."""
    tokenizer = make_tokenizer(None, ("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"))
    shared = chat.shared_tokens(tokenizer, [chat.system(DOCUMENT)])
    assert tokenizer.decode(shared) == DOCUMENT


def test_prompt_without_a_template_is_the_texts() -> None:
    """Without a chat template the turns are joined by empty lines."""
    tokens = chat.prompt_tokens(
        tokenizer := make_tokenizer(), [chat.system("one"), chat.user("two")]
    )
    assert tokenizer.decode(tokens) == "one\n\ntwo"


def test_shared_tokens_end_where_the_user_begins() -> None:
    """All of the template up to the user's first character is shared."""
    tokenizer = make_tokenizer(CHATML)
    shared = chat.shared_tokens(tokenizer, [chat.system("x")])
    assert tokenizer.decode(shared) == "<s>system\nx<e><s>user\n"


def test_generation_prompt_is_not_shared() -> None:
    """Tokens that only a generation prompt has are no part of what is shared."""
    tokenizer = make_tokenizer(THINKING)
    turns = [chat.user("q"), {"role": "assistant", "content": "a"}]
    shared = chat.shared_tokens(tokenizer, turns)
    expected = "<s>user\nq<e><s>assistant\na<e><s>user\n"
    assert tokenizer.decode(shared) == expected
    prompt = chat.prompt_tokens(tokenizer, [*turns, chat.user("q")])
    assert tokenizer.decode(prompt) == expected + "q<e><s>assistant\n<think>"


def test_wrapped_or_not_the_tokens_are_equal() -> None:
    """mlx-lm's wrapper and the tokenizer in it give the same tokens."""
    turns = [chat.system(DOCUMENT), chat.user("q")]
    plain = make_tokenizer(CHATML, wrapped=False)
    assert chat.prompt_tokens(plain, turns) == chat.prompt_tokens(
        make_tokenizer(CHATML), turns
    )
    bare = make_tokenizer(None, wrapped=False)
    assert bare.decode(chat.prompt_tokens(bare, turns)) == f"{DOCUMENT}\n\nq"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (REFUSING, "chat template takes no system message: System role not supported"),
        (DEAF, "chat template refuses these messages: Conversation roles must"),
        (DROPPING, "the system message is no part of what every prompt"),
        (USER_FIRST, "the system message is no part of what every prompt"),
    ],
)
def test_useless_template_is_an_error(template: str, message: str) -> None:
    """A template that refuses, drops or moves the system prompt raises one error."""
    with pytest.raises(ValueError, match=message):
        chat.shared_tokens(make_tokenizer(template), [chat.system(DOCUMENT)])


def test_refusing_template_takes_other_messages() -> None:
    """A template that refuses a system message still renders a user's."""
    tokenizer = make_tokenizer(REFUSING)
    tokens = chat.prompt_tokens(tokenizer, [chat.user("q")])
    assert tokenizer.decode(tokens) == "<s>user\nq<e><s>assistant\n"
    assert tokenizer.decode(chat.shared_tokens(tokenizer, [chat.user("q")]))


def test_messages_are_not_changed() -> None:
    """Rendering leaves the caller's messages as they are."""
    turns = [chat.system("one"), chat.user("two")]
    chat.prompt_tokens(make_tokenizer(CHATML), turns)
    assert turns == [chat.system("one"), chat.user("two")]


def test_import_without_mlx() -> None:
    """The module on its own imports neither mlx, nor transformers, nor jinja2."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('promptstore')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['promptstore'] = package\n"
        "import promptstore.chat\n"
        "print({'mlx', 'mlx_lm', 'transformers', 'jinja2'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True
    )
    assert run.stdout == "set()\n", run.stderr
