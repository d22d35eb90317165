"""A package index with packages of the tests' own, for the real `pip`."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Index:
    """A running index. `fetched` are the wheels that were asked for, in order."""

    url: str = ""
    wheels: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, files: Mapping[str, str]) -> None:
        """Publish a pure Python package: contents by path."""
        module = name.replace("-", "_")
        info = f"{module}-{version}.dist-info"
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        content = {**files, f"{info}/METADATA": about, f"{info}/WHEEL": wheel}
        content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path, text in content.items():
                archive.writestr(path, text)
        self.wheels[f"{module}-{version}-py3-none-any.whl"] = buffer.getvalue()


@contextmanager
def serve(address: str = "127.0.0.1", port: int = 0, name: str = "") -> Iterator[Index]:
    """Serve packages until the block ends; `name` is how others reach the address."""
    index = Index()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, _, rest = self.path.strip("/").partition("/")
            if kind == "simple":
                mine = [wheel for wheel in index.wheels if wheel.startswith(f"{rest.replace('-', '_')}-")]
                links = "".join(f'<a href="/files/{wheel}">{wheel}</a>\n' for wheel in mine)
                self._send(links.encode(), "text/html")
            elif kind == "files" and rest in index.wheels:
                index.fetched.append(rest)
                self._send(index.wheels[rest], "application/octet-stream")
            else:
                self.send_error(404)

        def _send(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((address, port), Answer)
    server.daemon_threads = True
    index.url = f"http://{name or address}:{server.server_address[1]}/simple"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
