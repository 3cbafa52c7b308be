"""Servers in the process of a test, which start at once and can be broken."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import server
from servers import Client

from promptstore.serve import Settings, host, serve
from promptstore.serve.generator import Generator


class Local(Client):
    """A server in this process, on a thread of its own; only one at a time.

    Attributes:
        generator: What generates its answers.
        code: The exit code, once it has ended.
    """

    httpd: ThreadingHTTPServer
    generator: Generator
    code: int | None = None


@contextlib.contextmanager
def local(model: Path, *options: str, root: Path, **settings: Any) -> Iterator[Local]:
    """Run `serve` on a store while the block runs.

    Args:
        model: The model's directory.
        options: More options of mlx_lm.server.
        root: The store's directory.
        settings: Further ones of `Settings`.
    """
    found, ready = Local(), threading.Event()

    class Http(ThreadingHTTPServer):
        def serve_forever(self, poll_interval: float = 0.01) -> None:
            found.port, found.httpd = self.server_address[1], self
            ready.set()
            super().serve_forever(poll_interval)

        def handle_error(self, *_: Any) -> None:
            """Say nothing of clients that get no answer."""

    class Seen(Generator):
        def __init__(self, *args: Any) -> None:
            found.generator = self
            super().__init__(*args)

    def run() -> None:
        argv = ["--model", str(model), "--port", "0", *options]
        try:
            found.code = serve(argv, Settings(root, **settings))
        finally:
            ready.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "Generator", Seen)
        patch.setattr(
            server._run_http_server, "__defaults__", (Http, server.APIHandler)
        )
        patch.setattr(sys, "argv", sys.argv[:])
        thread = threading.Thread(target=run)
        thread.start()
        ready.wait()
        try:
            yield found
        finally:
            found.httpd.shutdown()
            found.httpd.server_close()
            thread.join()
