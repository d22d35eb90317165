"""Keeps secrets out of every file of a trial.

A value is secret when the name of its variable looks like one (KEY, SECRET, TOKEN, PASSWORD, CREDENTIAL, AUTH) or when
the caller says so. It is replaced wherever it stands: as it is, in base64, quoted for a URL or escaped for JSON.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, quote_plus

from pier.tree import Tree

REDACTED = "[REDACTED]"
HIDDEN = "****"
_SENSITIVE = re.compile(r"KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_SHORTEST = 6
_CHUNK = 1024 * 1024


def looks_secret(name: str) -> bool:
    return _SENSITIVE.search(name) is not None


def secret_values(env: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    """The values that `env` holds, or its templates stand for, that are secret by the name of either variable."""
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        real = environ.get(match[1], match[2] or "") if match else value
        if looks_secret(name) or (match and looks_secret(match[1])):
            yield real


def env_on_disk(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """`env` as it may be written down: templates stay, a secret literal becomes a template or is hidden."""
    return {name: _on_disk(name, value, environ) for name, value in env.items()}


def _on_disk(name: str, value: str, environ: Mapping[str, str]) -> str:
    if not looks_secret(name) or _TEMPLATE.fullmatch(value) or not value:
        return value
    return f"${{{name}}}" if environ.get(name) == value else HIDDEN


class Redactor:
    """Replaces secrets in text, bytes, nested values and files."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets if len(secret) >= _SHORTEST for form in _forms(secret)}
        self._texts = sorted(forms, key=len, reverse=True)
        self._bytes = [form.encode() for form in self._texts]
        self.longest = max((len(form) for form in self._bytes), default=0)

    def text(self, text: str) -> str:
        """`text` without secrets, and without what cannot be written as UTF-8: names of files need not be text."""
        if not text.isascii():
            text = text.encode(errors="backslashreplace").decode()
        for form in self._texts:
            text = text.replace(form, REDACTED)
        return text

    def data(self, data: bytes) -> bytes:
        for form in self._bytes:
            if form in data:
                data = data.replace(form, REDACTED.encode())
        return data

    def value(self, value: Any) -> Any:
        """The same for all texts in lists and dicts, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return value

    def tree(self, root: Path) -> None:
        """Rewrite those regular files below the directory `root` that hold a secret. No link is followed. One that
        cannot be rewritten is removed, and its error is raised in the end."""
        if not self.longest:
            return
        failed: OSError | None = None
        with Tree(root) as tree:
            for path in [entry.path for entry in tree.entries(limit=sys.maxsize) if entry.kind == "file"]:
                try:
                    self._file(tree, path)
                except OSError as error:
                    failed = error
                    tree.unlink(path)
        if failed is not None:
            raise failed

    def _file(self, tree: Tree, path: str) -> None:
        with tree.open(path) as stream:
            if self._holds_secret(stream):
                stream.seek(0)
                tree.write(path, self._clean(stream), stat.S_IMODE(os.fstat(stream.fileno()).st_mode))

    def _holds_secret(self, stream: IO[bytes]) -> bool:
        tail = b""
        while chunk := stream.read(_CHUNK):
            window = tail + chunk
            if self.data(window) != window:
                return True
            tail = window[-self.longest :]
        return False

    def _clean(self, stream: IO[bytes]) -> Iterator[bytes]:
        """The content of a file without secrets, piece by piece; the last bytes of each wait for what follows them."""
        held = b""
        while chunk := stream.read(_CHUNK):
            clean = self.data(held + chunk)
            cut = max(0, len(clean) - self.longest + 1)
            held = clean[cut:]
            yield clean[:cut]
        yield held


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield quote(secret, safe="")
    yield quote_plus(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    raw = secret.encode()
    for pad in range(3):
        encoded = base64.b64encode(b"\0" * pad + raw).decode()
        inner = encoded[(0, 2, 3)[pad] : len(encoded) - (4 if (pad + len(raw)) % 3 else 0)]
        if len(inner) >= _SHORTEST:
            yield inner
            yield inner.replace("+", "-").replace("/", "_")
