"""Removes secrets from files that leave this machine, and counts them.

Trials are written without the secrets that pier knows. What is shared is looked at once more: for values of this
machine's variables, and for anything that has the form of a key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import IO

from pier.redact import REDACTED, Redactor

_MARK = REDACTED.encode()
_BLOCK = 4 * 1024 * 1024
_LONGEST_KEY = 16 * 1024
"""Bytes of a private key."""

FORMS: dict[str, re.Pattern[bytes]] = {
    "private key": re.compile(
        rb"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----.{0,16384}?-----END [A-Z ]{0,20}PRIVATE KEY-----",
        re.DOTALL,
    ),
    "Anthropic key": re.compile(rb"\bsk-ant-[A-Za-z0-9_-]{16,}"),
    "OpenAI key": re.compile(rb"\bsk-(?!ant-)(?:[a-z]{2,10}-)?[A-Za-z0-9_-]{20,}"),
    "GitHub token": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})"),
    "GitLab token": re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}"),
    "AWS key": re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "Google key": re.compile(rb"\b(?:AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z._-]{20,}|GOCSPX-[0-9A-Za-z_-]{20,})"),
    "Hugging Face token": re.compile(rb"\bhf_[A-Za-z0-9]{30,}"),
    "Slack token": re.compile(rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}"),
    "package registry token": re.compile(rb"\b(?:npm_[A-Za-z0-9]{36}|pypi-AgE[A-Za-z0-9_-]{50,})"),
    "JSON web token": re.compile(rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    "bearer token": re.compile(rb"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{20,}=*"),
    "password in a URL": re.compile(rb"(?<=://)[^/?#@\s\"'\\]{1,200}:[^/?#@\s\"'\\]{1,200}(?=@)"),
}
"""What has the form of a secret, by its name in reports."""


class Scrubbing:
    """Cleans one file after another and counts what it removed, by kind."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self.found: Counter[str] = Counter()

    def __call__(self, data: bytes) -> bytes:
        for kind, form in FORMS.items():
            data, count = form.subn(_MARK, data)
            if count:
                self.found[kind] += count
        if self._redactor:
            before = data.count(_MARK)
            data = self._redactor.data(data)
            if more := data.count(_MARK) - before:
                self.found["value of a secret variable"] += more
        return data

    def parts(self, stream: IO[bytes]) -> Iterator[bytes]:
        """A file without secrets, piece by piece. Pieces end at lines, and never inside of a private key."""
        rest = b""
        while chunk := stream.read(_BLOCK):
            rest += chunk
            end = rest.rfind(b"\n") + 1
            begun = rest.rfind(b"-----BEGIN ", max(0, end - _LONGEST_KEY), end)
            if begun >= 0 and rest.find(b"-----END ", begun, end) < 0:
                end = begun
            if not end and len(rest) < 16 * _BLOCK:
                continue
            end = end or len(rest)
            yield self(rest[:end])
            rest = rest[end:]
        if rest:
            yield self(rest)
