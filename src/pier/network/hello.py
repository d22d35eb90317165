"""Reads the server names of a TLS connection from the client's hellos.

A server that wants another key than the client offers answers the first hello with a request for a second one, and
serves the host that this one names. So nothing but the hello passes until the server has answered, and after such a
request nothing but alerts and the like, until the second hello has been read as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable

LIMIT = 64 * 1024
"""The head of a message is never larger than this."""
_HEADER = 5
"""Bytes before the content of a record: its type, the version and the length."""
_HANDSHAKE = 0x16
_RETRY = re.compile(
    rb"\x16\x03...\x02...\x03\x03"
    + re.escape(bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")),
    re.DOTALL,
)
"""How the request for a second hello begins: with the random number that RFC 8446 gives it."""
_RETRY_SIZE = 43


class Disagreement(Exception):
    """The client named another host than the one that it connected to, or hid which one it means."""


class Hellos:
    """The beginning of a TLS connection. `check` is called with the name in each hello, and may raise."""

    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check
        self._held = b""
        self._answer = b""
        self._is_due = True
        self._is_second = False
        self.done = False
        """Whether no further hello can come, so that everything may pass."""

    def feed(self, data: bytes) -> bytes:
        """Take what the client sent, and return what may be passed on."""
        self._held += data
        passed = self._read_hello() if self._is_due else b""
        if self.done:
            return passed + self._release()
        if len(self._held) > LIMIT:
            raise Disagreement("more than 64 KiB before the end of a TLS hello, or before its answer")
        return passed

    def heard(self, data: bytes) -> bytes:
        """Take what the server sent, and return what of the client's may be passed on because of it."""
        if self._is_due or self.done:
            return b""
        self._answer += data
        while self._answer[:1] in (b"\x14", b"\x15") and len(self._answer) >= (size := _record_size(self._answer)):
            self._answer = self._answer[size:]
        if len(self._answer) < _RETRY_SIZE and self._answer[:1] in (b"", b"\x14", b"\x15", b"\x16"):
            return b""
        self._is_due = self._is_second = _RETRY.match(self._answer) is not None
        self.done = not self._is_due
        return self._release() if self.done else self.feed(b"")

    def _read_hello(self) -> bytes:
        """Pass a hello once it is whole, and the records that may come before a second one."""
        at = 0
        while self._is_second and len(self._held) > at and self._held[at] != _HANDSHAKE:
            size = _record_size(self._held[at:])
            if len(self._held) < at + size:
                break
            at += size
        passed, self._held = self._held[:at], self._held[at:]
        if self._held[:1] != bytes([_HANDSHAKE]) or isinstance(found := server_name(self._held), int):
            return passed
        name, end = found
        self._check(name)
        self._is_due, self.done = False, self._is_second
        passed, self._held = passed + self._held[:end], self._held[end:]
        return passed

    def _release(self) -> bytes:
        held, self._held = self._held, b""
        return held


def _record_size(data: bytes) -> int:
    """The length of the record that `data` begins with; of one without a whole header, a length that is never met."""
    return _HEADER + int.from_bytes(data[3:_HEADER], "big") if len(data) >= _HEADER else LIMIT * 2


def server_name(data: bytes | bytearray) -> tuple[str, int] | int:
    """The server name of a TLS client hello, empty if it names none, and the length of its records; or how many bytes
    must be there to tell."""
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
    if len(hello) > 4 + int.from_bytes(hello[1:4], "big"):
        raise Disagreement("a malformed TLS hello")
    try:
        return _name_in_hello(hello), at
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
    if end != len(hello):
        raise Disagreement("a malformed TLS hello")
    at += 2
    name = ""
    while at + 4 <= end:
        kind = int.from_bytes(hello[at : at + 2], "big")
        size = int.from_bytes(hello[at + 2 : at + 4], "big")
        if kind == 0:
            if name or at + 4 + size > len(hello):
                raise Disagreement("a malformed TLS server name")
            name = _only_name(hello[at + 4 : at + 4 + size])
        at += 4 + size
    return name


def _only_name(names: bytes) -> str:
    """The host in the list of server names of a hello. Servers skip entries of other kinds than host names."""
    size = len(names) - 5
    if size < 1 or names[:5] != (size + 3).to_bytes(2, "big") + b"\0" + size.to_bytes(2, "big"):
        raise Disagreement("a malformed TLS server name")
    return names[5:].decode("latin-1")
