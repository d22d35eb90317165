"""A package registry on loopback with packages of the tests' own, for the real `npm`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Registry:
    """A running registry. `fetched` are the packages whose archives were asked for, in order."""

    url: str = ""
    packages: dict[str, dict[str, bytes]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, files: Mapping[str, tuple[bytes, int]], **fields: object) -> None:
        """Publish a package: contents and modes by path."""
        manifest = json.dumps({"name": name, "version": version, **fields}).encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, (data, mode) in {"package.json": (manifest, 0o644), **files}.items():
                entry = tarfile.TarInfo(f"package/{path}")
                entry.size, entry.mode = len(data), mode
                archive.addfile(entry, io.BytesIO(data))
        self.packages.setdefault(name, {})[version] = buffer.getvalue()

    def describe(self, name: str) -> dict[str, object]:
        versions = {}
        for version, data in self.packages[name].items():
            digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
            archive = {"tarball": f"{self.url}/-/{name}/{version}.tgz", "integrity": f"sha512-{digest}"}
            versions[version] = {"name": name, "version": version, "dist": archive}
        return {"name": name, "dist-tags": {"latest": max(versions)}, "versions": versions}


@contextmanager
def serve(address: str = "127.0.0.1", port: int = 0, name: str = "") -> Iterator[Registry]:
    """Serve packages until the block ends; `name` is how others reach the address."""
    registry = Registry()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path).lstrip("/")
            if path.startswith("-/"):
                name, _, version = path[2:].rpartition("/")
                registry.fetched.append(name)
                self._send(registry.packages[name][version.removesuffix(".tgz")], "application/octet-stream")
            elif path in registry.packages:
                self._send(json.dumps(registry.describe(path)).encode(), "application/json")
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
    registry.url = f"http://{name or address}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
