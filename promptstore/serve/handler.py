"""mlx_lm.server's HTTP handler, and the store's metrics."""

from __future__ import annotations

import json
import logging
from typing import Any

from mlx_lm import server

from promptstore.serve.generator import Generator
from promptstore.serve.last import PATH

_log = logging.getLogger("promptstore")


class Handler(server.APIHandler):
    """Answers what the server answers, errors that it would hang up on, ``GET
    /metrics``, and if it was told to ``GET /promptstore/last`` (see `last`).

    ``GET /health`` is the server's own: 503 once the generation thread is dead.
    """

    response_generator: Generator
    _has_begun = False

    def end_headers(self) -> None:
        """Send the headers."""
        self._has_begun = True
        upstream: Any = super()
        upstream.end_headers()

    def do_POST(self) -> None:
        """Respond to a POST request, also where the server would hang up."""
        upstream: Any = super()
        try:
            upstream.do_POST()
        except ConnectionError:  # the client went away
            raise
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Tell the client of an error that nobody has told."""
        text = str(error) or type(error).__name__
        if self._has_begun:
            event = json.dumps({"error": {"message": text}})
            self.wfile.write(f"data: {event}\n\n".encode())
        else:
            # The server sets status 200 before an answer is computed.
            status = 500 if getattr(self, "_headers_buffer", None) else 400
            self._headers_buffer: list[bytes] = []
            self._set_completion_headers(status)
            self.end_headers()
            self.wfile.write(json.dumps({"error": text}).encode())
        _log.warning("a request failed: %s", type(error).__name__)

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
