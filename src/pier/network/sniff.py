"""What a client says about where it wants to go: the server name of a TLS hello, the hosts of HTTP requests.

Each is compared with the name that the connection was made to. A protocol that is neither TLS nor HTTP passes by that
name, as long as it cannot be taken for HTTP: until the server has answered with something else than HTTP, nothing
passes that a lenient server could read as a request to another of its hosts.
"""

from __future__ import annotations

import re

from pier.network.http_stream import LIMIT, Disagreement, Requests
from pier.network.rules import normal_name

__all__ = ["Disagreement", "Watch", "server_name"]

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_TEXT = rb"[^\x00-\x1f\x7f]"
_LINE = re.compile(_TOKEN + rb"{1,32} " + _TEXT + rb"*\r?\n")
_BEGINNING = re.compile(rb"\r|" + _TOKEN + rb"{1,32}(?: " + _TEXT + rb"*\r?)?")
_METHOD = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|TRACE|PATCH|CONNECT) ")
_VERSION = re.compile(rb"HTTP/\d", re.IGNORECASE)
_BLANK = re.compile(rb"[\x00-\x20\x7f-\xff]+")
_LIKE_HTTP = re.compile(rb"HTTP/\d|\nhost ?:|[ \n]https?://", re.IGNORECASE)
_OLD_HELLO = re.compile(rb"[\x80-\xff].\x01[\x00\x03]", re.DOTALL)
_MEMORY = 64
_FIRST_LINE = 8192
"""Text whose kind only its whole line tells is held up to this length."""


class Watch:
    """Looks at what passes on one connection to `name`. With `nameless_tls` a TLS hello may name no server."""

    def __init__(self, name: str, *, nameless_tls: bool = False) -> None:
        self._name = name
        self._nameless_tls = nameless_tls
        self._held = b""
        self._wanted = 1
        self._requests: Requests | None = None
        self._other: _Other | None = None
        self._first = _FirstAnswer()
        self._passes = self._ended = False

    def feed(self, data: bytes) -> bytes:
        """Take what the client sent, and return what may be passed on; raises `Disagreement`."""
        if self._passes:
            return data
        if self._requests is not None:
            return self._requests.feed(data)
        if self._other is not None:
            return self._other.feed(data)
        self._held += data
        return self._begin() if len(self._held) >= self._wanted else b""

    def heard(self, data: bytes) -> bytes:
        """Take what the server sent, and return what of the client's may be passed on because of it. Raises
        `Disagreement` if the server's words must not be passed on."""
        if self._passes:
            return b""
        if self._requests is not None:
            return self._heard_http(self._requests, data)
        if self._first.is_other(data):
            self._passes = True
            held, self._held = self._held, b""
            return b"" if self._ended else held
        if self._other is not None and self._first.is_http:
            raise Disagreement("an HTTP answer to what is not HTTP")
        return b""

    def _heard_http(self, requests: Requests, data: bytes) -> bytes:
        answers = requests.answers
        waited = answers.switching
        answers.feed(data)
        if answers.switched:
            self._passes = True
        if not waited or (answers.switching and not answers.switched) or self._ended:
            return b""
        return requests.release() if self._passes else requests.feed(b"")

    def end(self) -> bytes:
        """The client stops sending: return what may be passed on of what was held. Half a request is not."""
        self._ended = True
        if self._passes or self._requests or self._other or self._held.startswith(b"\x16"):
            return b""
        held, self._held = self._held, b""
        return _Other().feed(held)

    def _begin(self) -> bytes:
        if self._held.startswith(b"\x16"):
            return self._hello()
        if self._held.startswith(b"\r\n") or self._is_request():
            self._requests = Requests(self._name)
            return self._requests.feed(self._held)
        if _BEGINNING.fullmatch(self._held):
            if len(self._held) > _FIRST_LINE:
                raise Disagreement("a first line of more than 8 KiB")
            return b""
        self._other = _Other()
        held, self._held = self._held, b""
        return self._other.feed(held)

    def _is_request(self) -> bool:
        if _METHOD.match(self._held):
            return True
        line = _LINE.match(self._held)
        return line is not None and _VERSION.search(line[0]) is not None

    def _hello(self) -> bytes:
        name = server_name(self._held)
        if isinstance(name, int):
            if name > LIMIT:
                raise Disagreement("a TLS hello of more than 64 KiB")
            self._wanted = name
            return b""
        if not name and not self._nameless_tls:
            raise Disagreement("TLS without a server name")
        if name and normal_name(re.sub(r":\d+$", "", name)) != self._name:
            raise Disagreement(f"TLS server name {name}")
        self._passes = True
        held, self._held = self._held, b""
        return held


class _FirstAnswer:
    """The first bytes that a server sends, which say whether it speaks HTTP."""

    def __init__(self) -> None:
        self._bytes = b""

    def is_other(self, data: bytes) -> bool:
        self._bytes += data[: 5 - len(self._bytes)]
        return not b"HTTP/".startswith(self._bytes)

    @property
    def is_http(self) -> bool:
        return self._bytes == b"HTTP/"


class _Other:
    """A protocol that is neither TLS nor HTTP, until its server has answered. What servers skip or take for white space
    counts as such, however long it is."""

    def __init__(self) -> None:
        self._start = b""
        self._seen = b""

    def feed(self, data: bytes) -> bytes:
        self._start += data[: 4 - len(self._start)]
        if _OLD_HELLO.match(self._start):
            raise Disagreement("TLS without a server name")
        seen = _BLANK.sub(_as_blank, self._seen + data)
        if _LIKE_HTTP.search(seen):
            raise Disagreement("HTTP in a form that not all servers read alike")
        self._seen = seen[-_MEMORY:]
        return data


def _as_blank(found: re.Match[bytes]) -> bytes:
    return b"\n" if b"\n" in found[0] or b"\r" in found[0] else b" "


def server_name(data: bytes | bytearray) -> str | int:
    """The server name of a TLS client hello, empty if it names none; or how many bytes must be there to tell."""
    hello = b""
    at = 0
    while True:
        if len(data) < at + 5:
            return at + 5
        if data[at] != 0x16:
            raise Disagreement("a malformed TLS hello")
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        if len(data) < at + 5 + size:
            return at + 5 + size
        hello += data[at + 5 : at + 5 + size]
        at += 5 + size
        if len(hello) >= 4 and len(hello) >= 4 + int.from_bytes(hello[1:4], "big"):
            break
    try:
        return _name_in_hello(hello)
    except IndexError:
        raise Disagreement("a malformed TLS hello") from None


def _name_in_hello(hello: bytes) -> str:
    if hello[0] != 1:
        raise Disagreement("a malformed TLS hello")
    at = 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2], "big")
    at += 1 + hello[at]
    if at + 2 > len(hello):
        return ""
    end = at + 2 + int.from_bytes(hello[at : at + 2], "big")
    at += 2
    name = ""
    while at + 4 <= end:
        kind = int.from_bytes(hello[at : at + 2], "big")
        size = int.from_bytes(hello[at + 2 : at + 4], "big")
        if kind == 0:
            if name or size < 5 or at + 4 + size > len(hello):
                raise Disagreement("a malformed TLS server name")
            name = hello[at + 9 : at + 4 + size].decode("latin-1")
        at += 4 + size
    return name
