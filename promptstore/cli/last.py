"""Ask a server on this machine for its last request, with the key that both can read.

The key is a file of the user's own; it says nothing of a prompt.
"""

from __future__ import annotations

import json
import os
import secrets
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import platformdirs

from promptstore.cli.errors import Failure

_TIMEOUT_S = 10.0


def make_key() -> str:
    """Return the user's key, made if there is none.

    Raises:
        OSError: The user's directory cannot be written.
    """
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        path.chmod(0o600)
        key = path.read_text().strip()
        if key:
            return key
        path.unlink()  # whoever began it was killed
        return make_key()
    key = secrets.token_hex(32)
    with os.fdopen(fd, "w") as file:
        file.write(key)
    return key


def fetch(port: int) -> dict[str, Any]:
    """Return the last request of a server, explained.

    Args:
        port: Where it listens on this machine.

    Raises:
        Failure: There is no such server, it does not tell, or it had no request.
    """
    try:
        key = _path().read_text().strip()
    except FileNotFoundError:
        raise Failure("no server was started with --explain-last") from None
    # Whatever proxies there are, this machine is asked itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"http://localhost:{port}/promptstore/last",
        headers={"Authorization": f"Bearer {key}"},
    )
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise Failure(
            f"the server on port {port} does not tell ({error.code}); "
            "it must be `promptstore serve --explain-last`, run by you"
        ) from error
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise Failure(f"no server answers on port {port}: {reason}") from error
    if not body:
        raise Failure(f"the server on port {port} has had no request yet")
    try:
        facts: dict[str, Any] = json.loads(body)
    except ValueError as error:
        raise Failure(f"port {port} is another server's") from error
    return facts


def _path() -> Path:
    return platformdirs.user_state_path("promptstore") / "last.key"
