"""Reads from a connection's first bytes which host the client wants, and follows plain HTTP/1 from there on.

The server name of a TLS hello and the hosts of HTTP requests are compared with the name that the connection was made
to. A protocol that is neither passes by that name, as long as it cannot be taken for HTTP: until the server has
answered with something else than HTTP, nothing passes that a lenient server could read as a request to
another of its hosts.

HTTP is parsed strictly: a request is passed on when all of its head was read, its Host is the one that is allowed and
every server must agree on where it ends. Bare line feeds, folded fields, repeated or conflicting lengths and anything
else that servers read differently are refused. Answers are followed too, because a connection ends being HTTP only with
the answer 101 to a request that asked for a WebSocket.
"""

from __future__ import annotations

import re
from collections import deque

from pier.network.hello import LIMIT, Disagreement, Hellos

_LONGEST_LINE = 4096
"""The line before a chunk, or a line of a trailer, is never longer than this."""

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb"{1,32}) ([!-~\x80-\xff]+) HTTP/1\.([01])")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb"++:" + _VALUE + rb"*+\r\n)*+\r\n")
_FIELD = re.compile(rb"(" + _TOKEN + rb"++):[ \t]*+(" + _VALUE + rb"*+)\r\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;" + _VALUE + rb"*+)?\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)(?: [^\r\n]*)?\r\n")
_HOST = re.compile(rb"([0-9A-Za-z._-]+)(?::[0-9]{1,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(?:[/?#].*)?", re.IGNORECASE)
_NOT_IN_TRAILERS = (b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade")
_SWITCHES = (b"upgrade", b"http2-settings")
_NEVER_DROPPED = {b"host", b"content-length", b"transfer-encoding"}
"""A proxy drops the fields that `Connection` names, and passes on a request without them."""
_CHUNKED = -1

Fields = list[tuple[bytes, bytes]]


class HttpBody:
    """How far the body of a message goes. `length` is `_CHUNKED` if its chunks say so."""

    def __init__(self, length: int) -> None:
        self._chunked = length == _CHUNKED
        self._left = max(length, 0)
        self._at_end_of_chunk = self._in_trailer = False
        self.done = length == 0

    def take(self, data: bytes, at: int) -> int:
        """The place in `data` behind what belongs to the body; a line that is not whole yet is left for later."""
        while at < len(data) and not self.done:
            if self._left:
                step = min(self._left, len(data) - at)
                at += step
                self._left -= step
                self.done = not self._left and not self._chunked
                continue
            end = data.find(b"\n", at) + 1
            if not end:
                if len(data) - at > _LONGEST_LINE:
                    raise Disagreement("an HTTP chunk without an end")
                break
            self._take_line(data[at:end])
            at = end
        return at

    def _take_line(self, line: bytes) -> None:
        if self._at_end_of_chunk:
            if line != b"\r\n":
                raise Disagreement("a malformed HTTP chunk")
            self._at_end_of_chunk = False
        elif self._in_trailer:
            field = _FIELD.fullmatch(line)
            if line != b"\r\n" and (field is None or field[1].lower() in _NOT_IN_TRAILERS):
                raise Disagreement("a malformed HTTP trailer")
            self.done = line == b"\r\n"
        else:
            size = _CHUNK.fullmatch(line)
            if size is None:
                raise Disagreement("a malformed HTTP chunk")
            self._left = int(size[1], 16)
            self._at_end_of_chunk, self._in_trailer = self._left > 0, self._left == 0


class Requests:
    """The requests of one connection to `name`. `feed` returns what may be passed on to the server."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = b""
        self._body: HttpBody | None = None
        self._line_checked = False
        self.answers = Answers()

    def feed(self, data: bytes) -> bytes:
        if self._held:
            data, self._held = self._held + data, b""
        at, passed = 0, list[bytes]()
        while at < len(data) and not self.answers.switching:
            if self._body is not None:
                end = self._body.take(data, at)
                passed.append(data[at:end])
                at = end
                if self._body.done:
                    self._body = None
                elif end < len(data):
                    break
            elif data.startswith(b"\r\n", at):
                at += 2
            else:
                end = data.find(b"\r\n\r\n", at) + 4
                if end < 4:
                    self._check_beginning(data, at)
                    break
                passed.append(self._take_head(data[at:end]))
                at = end
        self._held = data[at:]
        if len(self._held) > LIMIT:
            raise Disagreement("an HTTP head of more than 64 KiB")
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def release(self) -> bytes:
        """What was held, now that the connection is not HTTP any more."""
        held, self._held = self._held, b""
        return held

    def _check_beginning(self, data: bytes, at: int) -> None:
        """Refuse at once what would else be held for ever."""
        if data.count(b"\n", at) != data.count(b"\r\n", at):
            raise Disagreement("an HTTP line without a carriage return")
        if not self._line_checked and (end := data.find(b"\r\n", at)) >= 0:
            self._line_checked = True
            if not _REQUEST_LINE.fullmatch(data, at, end):
                raise Disagreement("a malformed HTTP request")

    def _take_head(self, head: bytes) -> bytes:
        self._line_checked = False
        first, _, lines = head.partition(b"\r\n")
        request = _REQUEST_LINE.fullmatch(first)
        if request is None or not _FIELDS.fullmatch(lines):
            raise Disagreement("HTTP/2 without TLS" if head.startswith(b"PRI ") else "a malformed HTTP request")
        method, target, minor = request.groups()
        lines = lines.removesuffix(b"\r\n")
        fields: Fields = [(name.lower(), value.rstrip(b" \t")) for name, value in _FIELD.findall(lines)]
        hosts = [value for name, value in fields if name == b"host"]
        self._check_hosts(method, target, hosts, minor)
        dropped = {
            each.strip().lower() for name, value in fields if name == b"connection" for each in value.split(b",")
        }
        if dropped & _NEVER_DROPPED:
            raise Disagreement("an HTTP field that a proxy must drop and a server needs")
        if not hosts:
            lines += b"Host: " + self._name.encode() + b"\r\n"
        length = _request_length(fields, minor)
        self._body = HttpBody(length) if length else None
        asked = {name for name, _ in fields} & set(_SWITCHES)
        switches = asked == {b"upgrade"} and method == b"GET" and not length and _wants_websocket(fields)
        if asked and not switches:
            lines = b"".join(line for line in lines.splitlines(keepends=True) if not _is_switch(line))
        self.answers.expect(method, switches)
        return first + b"\r\n" + lines + b"\r\n"

    def _check_hosts(self, method: bytes, target: bytes, hosts: list[bytes], minor: bytes) -> None:
        if method == b"CONNECT":
            raise Disagreement(f"CONNECT {target.decode(errors='replace')}")
        if len(hosts) > 1 or (not hosts and minor == b"1"):
            raise Disagreement("two Host fields" if hosts else "an HTTP request without a Host")
        if not target.startswith(b"/") and (method, target) != (b"OPTIONS", b"*"):
            absolute = _ABSOLUTE.fullmatch(target)
            hosts = [*hosts, absolute[1] if absolute else target]
        for host in hosts:
            named = _HOST.fullmatch(host)
            if named is None or named[1].decode().lower() != self._name:
                raise Disagreement(f"HTTP host {host.decode(errors='replace')}")


def _request_length(fields: Fields, minor: bytes) -> int:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if codings:
        if codings != [b"chunked"] or lengths or minor == b"0":
            raise Disagreement("an HTTP body of unclear length")
        return _CHUNKED
    if len(lengths) > 1 or any(not value.isdigit() or len(value) > 15 for value in lengths):
        raise Disagreement("an HTTP body of unclear length")
    return int(lengths[0]) if lengths else 0


def _wants_websocket(fields: Fields) -> bool:
    return [value.lower() for name, value in fields if name == b"upgrade"] == [b"websocket"]


def _is_switch(line: bytes) -> bool:
    return line.partition(b":")[0].lower() in _SWITCHES


class Answers:
    """The answers to `Requests`. They all pass; what matters is when the connection stops being HTTP.

    An answer that cannot be followed is not an error, but then no request to switch protocols is passed on any more.
    """

    def __init__(self) -> None:
        self._methods: deque[bytes] = deque()
        self._held = b""
        self._body: HttpBody | None = None
        self._lost = False
        self.switching = False
        """Whether a request to switch protocols waits for its answer; what the client sends next is held."""
        self.switched = False

    def expect(self, method: bytes, switches: bool) -> None:
        if switches and (self._methods or self._body or self._held or self._lost):
            raise Disagreement("an HTTP upgrade while earlier answers are due")
        self._methods.append(method)
        self.switching = switches

    def feed(self, data: bytes) -> None:
        """Take what the server sent."""
        if self._lost:
            return
        try:
            self._follow(data)
        except Disagreement:
            self._lost = True
            self._held = b""

    def _follow(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        at = 0
        while at < len(data) and not self._lost and not self.switched:
            if self._body is not None:
                end = self._body.take(data, at)
                at = end
                if self._body.done:
                    self._body = None
                elif end < len(data):
                    break
            else:
                end = data.find(b"\r\n\r\n", at) + 4
                if end < 4:
                    break
                self._take_head(data[at:end])
                at = end
        self._held = data[at:]
        if len(self._held) > LIMIT:
            raise Disagreement("an answer with a long head")

    def _take_head(self, head: bytes) -> None:
        status = _STATUS.match(head)
        if status is None or not self._methods:
            raise Disagreement("not an HTTP answer")
        code = int(status[1])
        if 100 <= code < 200 and code != 101:
            return
        method = self._methods.popleft()
        if code == 101:
            self.switched = self.switching
            self._lost = not self.switched
            return
        self.switching = False
        if method != b"HEAD" and code not in (204, 304):
            length = _answer_length(head[status.end() :])
            self._body = HttpBody(length) if length else None


def _answer_length(lines: bytes) -> int:
    fields = [
        (name.lower(), value.strip().lower())
        for name, _, value in (row.partition(b":") for row in lines.split(b"\r\n"))
    ]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    lengths = [value for name, value in fields if name == b"content-length"]
    if codings == [b"chunked"]:
        return _CHUNKED
    if codings or len(lengths) != 1 or not lengths[0].isdigit():
        raise Disagreement("an answer that ends with its connection")
    return int(lengths[0])


__all__ = ["Disagreement", "Sniffer"]

_TEXT = rb"[^\x00-\x1f\x7f]"
_LINE = re.compile(_TOKEN + rb"{1,32} " + _TEXT + rb"*\r?\n")
_BEGINNING = re.compile(rb"\r|" + _TOKEN + rb"{1,32}(?: " + _TEXT + rb"*\r?)?")
_METHOD = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|TRACE|PATCH|CONNECT) ")
_VERSION = re.compile(rb"HTTP/\d", re.IGNORECASE)
_BLANK = re.compile(rb"[\x00-\x20\x7f-\xff]+")
_LIKE_HTTP = re.compile(rb"HTTP/\d|\nhost ?:|[ \n]https?://|[ \n]GET ?/", re.IGNORECASE)
"""Also the requests of HTTP/0.9, which end with their target and have no host."""
_SETTINGS = re.compile(rb"\0(?:\0(?:.(?:\x04\0?)?)?)?", re.DOTALL)
"""How the first frame of a server of HTTP/2 begins."""
_OLD_HELLO = re.compile(rb"[\x80-\xff].\x01[\x00\x03]", re.DOTALL)
_RECORD = re.compile(rb"[\x14-\x18]\x03")
_HELLO = re.compile(rb"\x16\x03[\x00-\x04]..\x01", re.DOTALL)
_HELLO_SIZE = 6
_MEMORY = 64
_FIRST_LINE = 8192
"""Text whose kind only its whole line tells is held up to this length."""


class Sniffer:
    """Looks at what passes on one connection to `name`. With `nameless_tls` a TLS hello may name no server."""

    def __init__(self, name: str, *, nameless_tls: bool = False) -> None:
        self._name = name
        self._nameless_tls = nameless_tls
        self._held = b""
        self._tls: Hellos | None = None
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
        if self._tls is not None:
            passed = self._tls.feed(data)
            self._passes = self._tls.done
            return passed
        self._held += data
        return self._begin()

    def heard(self, data: bytes) -> bytes:
        """Take what the server sent, and return what of the client's may be passed on because of it. Raises
        `Disagreement` if the server's words must not be passed on."""
        if self._passes:
            return b""
        if self._requests is not None:
            return self._heard_http(self._requests, data)
        if self._tls is not None:
            freed = self._tls.heard(data)
            self._passes = self._tls.done
            return b"" if self._ended else freed
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
        if self._passes or self._requests or self._other or self._tls:
            return b""
        held, self._held = self._held, b""
        return _Other().feed(held)

    def _begin(self) -> bytes:
        if self._held.startswith(b"\x16"):
            self._tls = Hellos(self._check_name)
            return self._tls.feed(self._held)
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

    def _check_name(self, name: str) -> None:
        if not name and not self._nameless_tls:
            raise Disagreement("TLS without a server name")
        # A client in Go (hey) adds the port to the name.
        if name and re.sub(r":\d{1,5}$", "", name).lower() != self._name:
            raise Disagreement(f"TLS server name {name}")


class _FirstAnswer:
    """The first bytes that a server sends, which say whether it speaks HTTP. One of HTTP/2 may speak first."""

    def __init__(self) -> None:
        self._bytes = b""

    def is_other(self, data: bytes) -> bool:
        self._bytes += data[: 5 - len(self._bytes)]
        return not b"HTTP/".startswith(self._bytes) and not _SETTINGS.fullmatch(self._bytes)

    @property
    def is_http(self) -> bool:
        return len(self._bytes) == 5 and not self.is_other(b"")


class _Other:
    """A protocol that is neither TLS nor HTTP, until its server has answered. What servers skip or take for white space
    counts as such, however long it is. Some servers also skip what comes before a TLS hello, such as an alert."""

    def __init__(self) -> None:
        self._start = b""
        self._seen = b"\n"
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        self._start += data[: 4 - len(self._start)]
        if _OLD_HELLO.match(self._start):
            raise Disagreement("TLS without a server name")
        raw = self._last + data
        if _RECORD.match(self._start) or _HELLO.search(raw):
            raise Disagreement("a TLS hello behind something else")
        self._last = raw[1 - _HELLO_SIZE :]
        seen = _BLANK.sub(_as_blank, self._seen + data)
        if _LIKE_HTTP.search(seen):
            raise Disagreement("HTTP in a form that not all servers read alike")
        self._seen = seen[-_MEMORY:]
        return data


def _as_blank(found: re.Match[bytes]) -> bytes:
    return b"\n" if b"\n" in found[0] or b"\r" in found[0] else b" "
