"""A small HTTP server for registries of the tests' own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import unquote

Answer = Callable[[str], tuple[bytes, str] | None]
"""The body and content type for a path; None if there is nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without asking a resolver for a name, which may not be there yet."""
        TCPServer.server_bind(self)


@contextmanager
def serving(answer: Answer, address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Serve what `answer` gives until the block ends; the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(unquote(self.path).strip("/"))
            if found is None:
                self.send_error(404)
                return
            data, kind = found
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _Server((address, port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
