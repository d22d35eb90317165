"""The grammar of HTTP/1.1: heads, and how a body is delimited.

Strict on purpose. A bare line feed, a folded header, a length next to chunks, a repeated length, a chunk that does not
end where it said: each is refused rather than guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

from multidict import CIMultiDict

MAX_HEAD = 64 * 1024
MAX_FIELDS = 200
_REMEMBERED = 4096
"""Heads of at most this size are read once."""
_MAX_LINE = 1024
"""Of a chunk's size with its extension, and of a trailer."""

Headers = CIMultiDict[str]

_REQUEST_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([!-~\x80-\U0010ffff]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_FIELDS = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+\r\n")
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[^\x00-\x08\x0a-\x1f\x7f]*")
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class BadMessage(Exception):
    """What came is not HTTP/1.1, or not safely so. `status` is the answer to the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request. Several requests may share it, or its headers, so they are never changed."""

    method: str
    target: str
    minor: int
    """Of the version: 0 or 1."""
    headers: Headers
    same: bytes | None = None
    """The head without its length, which is all that requests of one client mostly differ in; None of a long one."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    minor: int
    headers: Headers


class Length:
    """A body of a known length."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.done = size == 0

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """What of `data` is body, and what comes after the body."""
        body, rest = (data, b"") if len(data) <= self.left else (data[: self.left], data[self.left :])
        self.left -= len(body)
        self.done = self.left == 0
        return body, rest


class UntilClose:
    """A body that ends with the connection."""

    done = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        return data, b""


class Chunked:
    """A body in chunks, and the trailers after it, which are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        self._at_end_of_chunk = self._trailing = False
        self._trailers = 0
        self.done = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """What of `data` is body, and what comes after the body."""
        data = self._rest + data if self._rest else data
        at, parts = 0, []
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                self._at_end_of_chunk = not self._left
                continue
            end = data.find(b"\r\n", at, at + _MAX_LINE)
            if end < 0:
                if len(data) - at >= _MAX_LINE or (self._at_end_of_chunk and data[at:] != b"\r"):
                    raise BadMessage("a chunk does not end where it said")
                break
            line, at = data[at:end], end + 2
            if not (self._at_end_of_chunk or self._trailing):
                size = _size_of(line)
                if size and data.startswith(b"\r\n", at + size):  # all of a chunk, as most come
                    parts.append(data[at : at + size])
                    at += size + 2
                    continue
            if self._line(line):
                self._rest = b""
                return b"".join(parts), data[at:]
        self._rest = data[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts), b""

    def _line(self, line: bytes) -> bool:
        """Whether this line is the last of the body."""
        if self._at_end_of_chunk:
            if line:
                raise BadMessage("a chunk does not end where it said")
            self._at_end_of_chunk = False
        elif self._trailing:
            self.done = not line
            self._trailers += 1
            if line and (self._trailers > MAX_FIELDS or not _TRAILER.fullmatch(line)):
                raise BadMessage("a trailer cannot be read")
        else:
            self._left = _size_of(line)
            self._trailing = not self._left
        return self.done


@lru_cache(1024)
def _size_of(line: bytes) -> int:
    """Chunks of a stream are much alike."""
    found = _SIZE.fullmatch(line)
    if found is None:
        raise BadMessage("the size of a chunk cannot be read")
    return int(found[1], 16)


Framing = Length | Chunked | UntilClose


def find_head(data: bytes) -> int:
    """Where the head in `data` ends, after its empty line; 0 while it is not all there."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end >= 0:
        return end + 4
    if len(data) >= MAX_HEAD:
        raise BadMessage(f"the head is larger than {MAX_HEAD} bytes", 431)
    if data.count(b"\n") != data.count(b"\r\n"):
        raise BadMessage("a line ends without a carriage return")
    return 0


def parse_request(head: bytes) -> RequestHead:
    """The head of a request, up to and with its empty line."""
    if len(head) > _REMEMBERED:
        return _parse_request(head)
    found = _LENGTH.search(head)
    if found is None:
        return _known_request(head)
    known = _known_request(head[: found.start() + 2] + head[found.end() :])
    if "Content-Length" in known.headers or "Transfer-Encoding" in known.headers:
        return _parse_request(head)
    headers = known.headers.copy()
    headers.add("Content-Length", found[1].decode())
    return RequestHead(known.method, known.target, known.minor, headers, known.same)


@lru_cache(512)
def _known_request(head: bytes) -> RequestHead:
    return _parse_request(head, head)


def _parse_request(head: bytes, same: bytes | None = None) -> RequestHead:
    first, headers = _parse(head)
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        old = first.endswith(("HTTP/1.0", "HTTP/1.1"))
        raise BadMessage("the request line cannot be read", 400 if old or "HTTP/" not in first else 505)
    hosts = headers.getall("Host", ())
    if len(hosts) > 1 or (not hosts and found[3] == "1"):
        raise BadMessage("a request needs exactly one Host")
    return RequestHead(found[1], found[2], int(found[3]), headers, same)


def parse_response(head: bytes) -> ResponseHead:
    first, headers = _parse(head)
    found = _STATUS_LINE.fullmatch(first)
    if found is None:
        raise BadMessage("the status line cannot be read")
    return ResponseHead(int(found[2]), int(found[1]), headers)


def _parse(head: bytes) -> tuple[str, Headers]:
    text = head.decode(errors="surrogateescape")
    first, _, fields = text.partition("\r\n")
    if not _FIELDS.fullmatch(fields):
        raise BadMessage("a header cannot be read")
    lines = fields.split("\r\n")
    if len(lines) > MAX_FIELDS:
        raise BadMessage(f"there are more than {MAX_FIELDS} headers", 431)
    pairs = []
    for line in lines[:-2]:
        name, _, value = line.partition(":")
        pairs.append((name, value.strip(" \t")))
    return first, Headers(pairs)


def framing(headers: Headers, minor: int) -> Length | Chunked | None:
    """How the body is delimited; None if the head does not say so."""
    codings = headers.getall("Transfer-Encoding", None)
    lengths = headers.getall("Content-Length", None)
    if codings is not None:
        if lengths is not None:
            raise BadMessage("a message has either a Content-Length or a Transfer-Encoding")
        if minor == 0 or len(codings) != 1 or codings[0].lower() != "chunked":
            raise BadMessage("no other Transfer-Encoding than chunked is understood", 501)
        return Chunked()
    if lengths is None:
        return None
    text = lengths[0]
    if len(lengths) != 1 or not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise BadMessage("the Content-Length cannot be read")
    return Length(int(text))


def stays_open(headers: Headers, minor: int) -> bool:
    """Whether the connection may be used again after this message."""
    if minor == 0:
        return False
    return not any("close" in value.lower() for value in headers.getall("Connection", ()))


def render(first: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """A head as bytes. `ValueError` if a field would break out of its line."""
    lines = [first, *(f"{name}: {value}" for name, value in fields), "", ""]
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a header has a line break in it")
    return text.encode(errors="surrogateescape")


def status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"
