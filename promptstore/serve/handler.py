"""mlx_lm.server's HTTP handler, and the store's metrics."""

from __future__ import annotations

from typing import Any

from mlx_lm import server

from promptstore.serve.generator import Generator


class Handler(server.APIHandler):
    """Answers what the server answers, and ``GET /metrics``.

    ``GET /health`` is the server's own: 503 once the generation thread is dead.
    """

    response_generator: Generator

    def do_GET(self) -> None:
        """Respond to a GET request."""
        if self.path.partition("?")[0] != "/metrics":
            upstream: Any = super()
            upstream.do_GET()
            return
        body, content_type = self.response_generator.metrics.render()
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
