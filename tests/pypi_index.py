"""A package index with packages of the tests' own, for the real `pip`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.package_server import serving


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

    def answer(self, path: str) -> tuple[bytes, str] | None:
        kind, _, rest = path.partition("/")
        if kind == "simple":
            mine = [wheel for wheel in self.wheels if wheel.startswith(f"{rest.replace('-', '_')}-")]
            links = "".join(f'<a href="/files/{wheel}">{wheel}</a>\n' for wheel in mine)
            return links.encode(), "text/html"
        if kind == "files" and rest in self.wheels:
            self.fetched.append(rest)
            return self.wheels[rest], "application/octet-stream"
        return None


@contextmanager
def serve(address: str = "127.0.0.1", port: int = 0, name: str = "") -> Iterator[Index]:
    """Serve packages until the block ends; `name` is how others reach the address."""
    index = Index()
    with serving(index.answer, address, port) as number:
        index.url = f"http://{name or address}:{number}/simple"
        yield index
