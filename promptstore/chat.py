"""Chat prompts as tokens: a whole one, and what every continuation of it shares.

Knows tokenizers, neither models nor the store; imports no mlx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from promptstore.tokens import Tokens, as_tokens, n_common

Message: TypeAlias = Mapping[str, str]
"""A turn: its ``role`` and its ``content``."""

CONTINUATIONS = ("a", "7", "\n\nB", " (c")
"""Beginnings of a user turn that merge with what stands before them differently."""

_SEPARATOR = "\n\n"
_MAX_MORE = 16
"""Tokens that options of a template add to a generation prompt: an empty thought."""


def system(text: str) -> Message:
    """Return the turn of a system prompt."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """Return the turn of a user."""
    return {"role": "user", "content": text}


def prompt_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a whole prompt, up to where the answer begins.

    Args:
        tokenizer: Of Hugging Face, or mlx-lm's wrapper of one. Without a chat
            template the texts are joined by empty lines.
        messages: The turns so far; the last is the user's.
        options: What else the chat template is told, for example ``tools``.

    Raises:
        ValueError: The chat template refuses the messages.
    """
    if not _has_template(tokenizer):
        text = _SEPARATOR.join(message["content"] for message in messages)
        return list(tokenizer.encode(text))
    # jinja2 comes with mlx-lm and is loaded by now; the command's help needs it not.
    from jinja2 import TemplateError

    try:
        return _apply_template(tokenizer, messages, **(options or {}))
    except TemplateError as error:
        if messages[0]["role"] == "system" and _renders(tokenizer, messages[1:]):
            problem = "takes no system message"
        else:
            problem = "refuses these messages"
        raise ValueError(f"the model's chat template {problem}: {error}") from error


def shared_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the tokens that *messages* begin with, whatever the user says next.

    Tokens at a boundary depend on what follows: a template may trim or insert, and
    a tokenizer merges across it. So the prompt is rendered with several next turns,
    and only what they share is kept.

    Args:
        tokenizer: As for `prompt_tokens`.
        messages: Turns that end before a user's; for example the system prompt.

    Raises:
        ValueError: The chat template refuses the messages, leaves the first one out
            or puts it behind the user's.

    Source: mlc-ai/mlc-llm #3179; the precomputed text was no prefix in tokens.
    """
    first, *others = (
        as_tokens(prompt_tokens(tokenizer, [*messages, user(text)]))
        for text in CONTINUATIONS
    )
    shared = first[: min(n_common(first, other) for other in others)]
    blank = [{**messages[0], "content": ""}, *messages[1:], user(CONTINUATIONS[0])]
    if n_common(shared, as_tokens(prompt_tokens(tokenizer, blank))) == len(shared):
        role = messages[0]["role"]
        raise ValueError(
            f"the {role} message is no part of what every prompt of this model begins "
            "with: its chat template leaves it out or puts it behind the user's"
        )
    tokens: list[int] = shared.tolist()
    return tokens


def _has_template(tokenizer: Any) -> bool:
    has_template = getattr(tokenizer, "has_chat_template", None)
    if has_template is None:
        has_template = getattr(tokenizer, "chat_template", None) is not None
    return bool(has_template)


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    turns = [dict(message) for message in messages]
    tokens = tokenizer.apply_chat_template(
        turns, add_generation_prompt=add_generation_prompt, **options
    )
    # Only mlx-lm's wrapper returns plain ids by default.
    return list(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens)


def _renders(tokenizer: Any, messages: Sequence[Message]) -> bool:
    from jinja2 import TemplateError

    try:
        _apply_template(tokenizer, messages)
    except TemplateError:
        return False
    return True


# ------------------------------------------------------------------ where turns end


@dataclass(frozen=True)
class Boundaries:
    """Runs of tokens by which a rendered prompt shows where its parts end.

    Args:
        opener: What stands between a system prompt and the user's first words.
        generation: What is put behind the last turn for the model to go on.
    """

    opener: tuple[int, ...] = ()
    generation: tuple[int, ...] = ()

    def system_end(self, tokens: Tokens) -> int | None:
        """Return where the user's words begin first: the prompts of one system
        message share all tokens before that."""
        n = len(self.opener)
        if not n or len(tokens) < n:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(tokens, n)
        hits = (windows == np.array(self.opener)).all(axis=1)
        first = int(hits.argmax())
        return first + n if hits[first] else None

    def turn_end(self, tokens: Tokens) -> int | None:
        """Return where the last turn ends, before what makes the model go on: the
        next request shares all tokens before that, however it renders the answer."""
        n = len(self.generation)
        tail = tokens[-n - _MAX_MORE :].tolist() if n else []
        for start in range(len(tail) - n, -1, -1):
            if tuple(tail[start : start + n]) == self.generation:
                return len(tokens) - len(tail) + start
        return None


def boundaries(tokenizer: Any) -> Boundaries:
    """Return the boundaries of a tokenizer's chat template, found by rendering.

    Without a template, or if it refuses what it is asked, they are empty.
    """
    if not _has_template(tokenizer):
        return Boundaries()
    from jinja2 import TemplateError

    try:
        return Boundaries(_opener(tokenizer), _generation(tokenizer))
    except (TemplateError, ValueError):
        return Boundaries()


def _opener(tokenizer: Any) -> tuple[int, ...]:
    first, second = (
        shared_tokens(tokenizer, [system(text)])[::-1] for text in ("One.", "Two!\nb")
    )
    n = n_common(as_tokens(first), as_tokens(second))
    return tuple(first[:n][::-1])


def _generation(tokenizer: Any) -> tuple[int, ...]:
    turns = [user("One.")]
    with_, without = (
        _apply_template(tokenizer, turns, add_generation_prompt=add)
        for add in (True, False)
    )
    if with_[: len(without)] != without:
        return ()
    return tuple(with_[len(without) :])
