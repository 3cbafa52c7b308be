"""The last request of a server, explained: to its own user on its own machine.

Token ids are text to whoever has the tokenizer. So nothing is kept unless the server
was started with ``--explain-last``, one request at a time, in memory only; and nobody
is answered but who asks over loopback with the key that the user's own directory has:
neither another user of the machine, nor a page in a browser, nor who comes through a
proxy that runs here.
"""

from __future__ import annotations

import hmac
import ipaddress
import json

from promptstore.facts import facts_of
from promptstore.tokens import Tokens
from promptstore.types import Explanation

PATH = "/promptstore/last"
N_CLOSEST = 5

Answer = tuple[int, bytes, str]
"""Status, body, content type."""


class LastRequest:
    """Keeps the last request, and tells it to who has the key.

    Args:
        key: What a client must know.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._last: tuple[Tokens, Explanation] | None = None

    def note(self, tokens: Tokens, found: Explanation) -> None:
        """Keep a request in the place of the one before.

        Args:
            tokens: All its ids, images as negative ones.
            found: What became of it, and why.
        """
        self._last = tokens, found

    def answer(self, client: str, authorization: str | None) -> Answer:
        """Return the answer to a client.

        Args:
            client: Its address.
            authorization: The header of that name.
        """
        wanted = f"Bearer {self._key}".encode()
        given = (authorization or "").encode("utf-8", "replace")
        if not is_loopback(client) or not hmac.compare_digest(wanted, given):
            return 403, b"Forbidden", "text/plain"
        last = self._last
        if last is None:
            return 204, b"", "application/json"
        tokens, found = last
        facts = facts_of(found, len(tokens)) | {"tokens": tokens.tolist()}
        return 200, json.dumps(facts).encode(), "application/json"


def is_loopback(address: str) -> bool:
    """Whether an address is one that only this machine has."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)
