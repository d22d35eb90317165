"""A package registry on loopback with packages of the tests' own, for the real `npm`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.package_server import serving


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

    def answer(self, path: str) -> tuple[bytes, str] | None:
        if path.startswith("-/"):
            name, _, version = path[2:].rpartition("/")
            self.fetched.append(name)
            return self.packages[name][version.removesuffix(".tgz")], "application/octet-stream"
        if path in self.packages:
            return json.dumps(self.describe(path)).encode(), "application/json"
        return None


@contextmanager
def serve(address: str = "127.0.0.1", port: int = 0, name: str = "") -> Iterator[Registry]:
    """Serve packages until the block ends; `name` is how others reach the address."""
    registry = Registry()
    with serving(registry.answer, address, port) as number:
        registry.url = f"http://{name or address}:{number}"
        yield registry
