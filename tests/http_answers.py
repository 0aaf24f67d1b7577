"""A small HTTP server that gives one answer, for what asks over the network."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def answering(status: int, headers: Mapping[str, str] | None = None, *, path: str = "") -> Iterator[int]:
    """Answer GET and HEAD with `status` and `headers`, without a body; yields the port.

    path: the only one that is answered so, others with 404; empty: all are.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if path and self.path != path:
                self.send_response(404)
            else:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            del args

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
