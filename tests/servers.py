"""Servers as processes of their own, and what their clients ask."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

UPSTREAM = ("mlx_lm", "server")
OURS = ("promptstore", "serve")
_START_S = 120.0


class Client:
    """What asks a server on a port of loopback."""

    port: int

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, timeout_s: float = 120) -> Any:
        """Return the JSON that answers JSON.

        Raises:
            urllib.error.HTTPError: The status is an error's.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            body = io.BytesIO(error.read())
            error.close()
            raise urllib.error.HTTPError(
                self.url + path, error.code, error.msg, error.headers, body
            ) from None

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def chat(self, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        """Return the whole response to a chat, greedy and short if not told else."""
        body = {"messages": messages, "temperature": 0, "max_tokens": 8} | options
        answer: dict[str, Any] = self.post("/v1/chat/completions", body)
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, summed over labels that are not given."""
        _, text = self.get("/metrics")
        values = []
        for line in text.splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found is None or found[1] != name:
                continue
            has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= has.items():
                values.append(float(found[3]))
        assert values, f"no metric {name} with {labels}"
        return sum(values)


class Server(Client):
    """A server in a process of its own on a free port.

    Args:
        model: The model's directory.
        options: More options.
        module: What to run, and its first argument: `OURS` or `UPSTREAM`.
        env: Further environment variables.
    """

    def __init__(
        self,
        model: Path,
        *options: str,
        module: tuple[str, ...] = OURS,
        env: dict[str, str] | None = None,
    ) -> None:
        self.port = _free_port()
        self.lines: list[str] = []
        command = [
            sys.executable, "-m", *module, "--model", str(model),
            "--port", str(self.port), *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {}),
        )
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(_START_S) or self.process.poll() is not None:
            self.kill()
            raise RuntimeError(f"the server did not start:\n{self.log}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return "".join(self.lines)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "is not recommended" in line:  # said once it listens, at any level
                self._started.set()
        self.process.wait()
        self._started.set()


def text_of(response: dict[str, Any]) -> str:
    """Return what was answered."""
    choice = response["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def cached(response: dict[str, Any]) -> int:
    """Return how many tokens were reused."""
    n_tokens: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n_tokens


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
