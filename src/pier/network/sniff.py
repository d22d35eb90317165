"""What a client says about where it wants to go: the server name of a TLS hello, the hosts of HTTP requests.

Each is compared with the name that the connection was made to. A connection may say nothing (other protocols do not);
it may not say something else.
"""

from __future__ import annotations

import re

from pier.network.rules import normal_name

LIMIT = 64 * 1024
"""A hello or the head of a request is never larger than this; what is, is refused."""
_LINE = 4096

_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([^ \r\n]*) HTTP/(\d)\.(\d)\r?\n")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_METHOD = re.compile(rb"[A-Z][A-Z-]{1,31} ")


class Disagreement(Exception):
    """The client named another host than the one that it connected to, or hid which one it means."""


class Watch:
    """Looks at what a client sends on one connection to `name`. `feed` answers what may be passed on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = bytearray()
        self._looked = 0
        self._wanted = 1
        self._remaining = 0
        self._step = self._begin

    def feed(self, data: bytes) -> bytes:
        """Take what came and give what may go on; raises `Disagreement`."""
        self._held += data
        out = b""
        while len(self._held) >= self._wanted:
            self._wanted = 1
            passed = self._step()
            if not passed:
                if len(self._held) > LIMIT:
                    raise Disagreement("a hello or request head of more than 64 KiB")
                self._wanted = max(self._wanted, len(self._held) + 1)
                break
            out += passed
        return out

    def end(self) -> bytes:
        """What is still held when the client stops sending: too little to say anything."""
        return self._all()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._held[:count])
        del self._held[:count]
        self._looked = 0
        return taken

    def _all(self) -> bytes:
        return self._take(len(self._held))

    def _begin(self) -> bytes:
        held = self._held
        if held[:1] == b"\x16":
            self._step = self._hello
        elif held.startswith(b"PRI "):
            raise Disagreement("HTTP/2 without TLS")
        elif _METHOD.match(held):
            self._step = self._head
        elif len(held) < 33 and re.fullmatch(rb"[A-Z][A-Z-]*", held):
            return b""
        else:
            self._step = self._all
        return self._step()

    def _hello(self) -> bytes:
        name = server_name(self._held)
        if isinstance(name, int):
            self._wanted = name
            return b""
        if name and _host_name(name.encode("latin-1")) != self._name:
            raise Disagreement(f"TLS server name {name}")
        self._step = self._all
        return self._all()

    def _head(self) -> bytes:
        end = _BLANK_LINE.search(self._held, max(0, self._looked - 3))
        if end is None:
            self._looked = len(self._held)
            return b""
        head = bytes(self._held[: end.end()])
        request = _REQUEST.match(head)
        if request is None:
            raise Disagreement("a malformed HTTP request")
        method, target = request[1], request[2]
        fields = _fields(head[request.end() :])
        self._check_hosts(method, target, fields.get(b"host", []))
        self._follow(fields)
        return self._take(end.end())

    def _check_hosts(self, method: bytes, target: bytes, hosts: list[bytes]) -> None:
        if method == b"CONNECT":
            raise Disagreement(f"CONNECT {target.decode(errors='replace')}")
        if len(hosts) > 1:
            raise Disagreement("two Host fields")
        if not target.startswith((b"/", b"*")):
            absolute = re.match(rb"[a-z]+://([^/?#]*)", target, re.IGNORECASE)
            hosts = [*hosts, absolute[1] if absolute else target]
        for host in hosts:
            if host and _host_name(host) != self._name:
                raise Disagreement(f"HTTP host {host.decode(errors='replace')}")

    def _follow(self, fields: dict[bytes, list[bytes]]) -> None:
        """What comes after this head: a body, then the next request."""
        coding = b",".join(fields.get(b"transfer-encoding", [])).lower()
        lengths = set(fields.get(b"content-length", []))
        if b"upgrade" in fields:
            self._step = self._all
        elif coding:
            if coding.strip() != b"chunked" or lengths:
                raise Disagreement("an HTTP body of unclear length")
            self._step = self._chunk
        elif lengths:
            if len(lengths) > 1 or not (length := lengths.pop()).isdigit():
                raise Disagreement("an HTTP body of unclear length")
            self._remaining = int(length)
            self._step = self._body if self._remaining else self._next
        else:
            self._step = self._next

    def _next(self) -> bytes:
        """Between requests: clients may send empty lines."""
        blank = re.match(rb"[\r\n]+", self._held)
        if blank:
            return self._take(blank.end())
        if self._held.startswith(b"PRI "):
            raise Disagreement("HTTP/2 without TLS")
        self._step = self._head
        return self._head()

    def _body(self) -> bytes:
        taken = self._take(self._remaining)
        self._remaining -= len(taken)
        if not self._remaining:
            self._step = self._next
        return taken

    def _chunk(self) -> bytes:
        line = re.match(rb"([0-9A-Fa-f]{1,16})[^\r\n]*\r?\n", self._held)
        if line is None:
            if b"\n" in self._held or len(self._held) > _LINE:
                raise Disagreement("a malformed HTTP chunk")
            return b""
        size = int(line[1], 16)
        if size == 0:
            self._step = self._trailer
            return self._take(line.end())
        self._remaining = size
        self._step = self._chunk_data
        return self._take(line.end())

    def _chunk_data(self) -> bytes:
        taken = self._take(self._remaining)
        self._remaining -= len(taken)
        if not self._remaining:
            self._step = self._chunk_end
        return taken

    def _chunk_end(self) -> bytes:
        end = re.match(rb"\r?\n", self._held)
        if end is None:
            if len(self._held) > 1:
                raise Disagreement("a malformed HTTP chunk")
            return b""
        self._step = self._chunk
        return self._take(end.end())

    def _trailer(self) -> bytes:
        line = re.match(rb"[^\n]*\n", self._held)
        if line is None:
            if len(self._held) > _LINE:
                raise Disagreement("a malformed HTTP trailer")
            return b""
        if not line[0].strip():
            self._step = self._next
        return self._take(line.end())


def _fields(block: bytes) -> dict[bytes, list[bytes]]:
    fields: dict[bytes, list[bytes]] = {}
    for row in block.split(b"\n"):
        if not row.strip():
            continue
        name, colon, value = row.partition(b":")
        if row[:1] in b" \t" or not colon or name != name.strip():
            raise Disagreement("a malformed HTTP field")
        fields.setdefault(name.lower(), []).append(value.strip())
    return fields


def _host_name(host: bytes) -> str | None:
    text = host.rpartition(b"@")[2].decode("latin-1")
    return normal_name(re.sub(r":\d*$", "", text))


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
