"""mlx_lm.server's HTTP handler, and the store's metrics."""

from __future__ import annotations

from typing import Any

from mlx_lm import server

from promptstore.serve.generator import Generator
from promptstore.serve.last import PATH


class Handler(server.APIHandler):
    """Answers what the server answers, ``GET /metrics``, and if it was told to
    ``GET /promptstore/last`` (see `last`).

    ``GET /health`` is the server's own: 503 once the generation thread is dead.
    """

    response_generator: Generator

    def do_GET(self) -> None:
        """Respond to a GET request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, *self.response_generator.metrics.render())
        elif path == PATH and (last := self.response_generator.cache.last) is not None:
            authorization = self.headers.get("Authorization")
            self._send(*last.answer(self.client_address[0], authorization))
        else:
            upstream: Any = super()
            upstream.do_GET()

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)
