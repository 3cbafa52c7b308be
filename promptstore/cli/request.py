"""The request that a user asks about: messages or a text, from a file or stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from promptstore.cli.errors import Failure


@dataclass(frozen=True)
class Request:
    """A prompt before it is tokens.

    Args:
        messages: The turns of a chat, for the chat template; or
        text: The prompt as it is.
        options: What else the template is told: tools, for example.
    """

    messages: list[dict[str, Any]] | None = None
    text: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, tokenizer: Any) -> list[int]:
        """Return the tokens, as a server makes them.

        Raises:
            ValueError: The chat template refuses the messages.
        """
        if self.messages is None:
            from promptstore.mlx_lm.generation import encode

            return list(encode(tokenizer, self.text))
        from promptstore import chat

        return chat.prompt_tokens(tokenizer, self.messages, self.options)


def read_messages(path: Path) -> Request:
    """Return the request of a JSON file: messages, or the whole body of a request.

    Raises:
        Failure: It is neither.
        OSError: As the system says.
    """
    content, name = _read(path)
    request = _of_json(content)
    if request is None:
        raise Failure(f"{name}: neither a list of messages nor a request with them")
    return request


def read_prompt(path: Path) -> Request:
    """Return the request whose prompt is the text of a file, without chat template.

    Raises:
        Failure: It is empty or not UTF-8.
        OSError: As the system says.
    """
    return Request(text=_read(path)[0])


def read_stdin() -> Request:
    """Return the request on stdin: messages if it is JSON of such, else a text."""
    text = _read(Path("-"))[0]
    return _of_json(text) or Request(text=text)


def _read(path: Path) -> tuple[str, str]:
    is_stdin = str(path) == "-"
    name = "stdin" if is_stdin else str(path)
    content = sys.stdin.buffer.read() if is_stdin else path.read_bytes()
    return decode(content, name), name


def decode(content: bytes, name: str) -> str:
    """Return the text that a user has given.

    Args:
        content: Its bytes.
        name: What to call it in an error.

    Raises:
        Failure: It is empty or not UTF-8.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Failure(f"{name}: not UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise Failure(f"{name}: empty")
    return text


def _of_json(text: str) -> Request | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    body = value if isinstance(value, dict) else {"messages": value}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    if not all(isinstance(each, dict) and "role" in each for each in messages):
        return None
    options = dict(body.get("chat_template_kwargs") or {})
    if body.get("tools"):
        options["tools"] = body["tools"]
    turns = [each | {"content": _text_of(each.get("content"))} for each in messages]
    return Request(messages=turns, options=options)


def _text_of(content: Any) -> str:
    """Return the text of a message, which may stand in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise Failure("only text can be explained; for images ask a server, --last")
    return "".join(str(part.get("text", "")) for part in parts)
