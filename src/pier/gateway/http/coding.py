"""Bodies that come compressed, with a limit on what they may grow to."""

from __future__ import annotations

import zlib

_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class BadCoding(Exception):
    """The body is not of the coding that it claims, or of one that is not understood."""


class TooLarge(Exception):
    """The body is over the limit."""


class Inflater:
    """Undoes a `Content-Encoding` piece by piece."""

    def __init__(self, coding: str) -> None:
        self._coding = coding.strip().lower()
        if self._coding not in _WINDOWS:
            raise BadCoding(f"no other Content-Encoding than gzip and deflate is understood, not {self._coding!r}")
        self._inflate = zlib.decompressobj(_WINDOWS[self._coding])
        self._fresh = True

    def feed(self, data: bytes, limit: int) -> bytes:
        """More of the plain body; `TooLarge` if that is more than `limit` bytes."""
        try:
            plain = self._inflate.decompress(data, limit + 1)
        except zlib.error as error:
            if not (self._fresh and self._coding == "deflate"):
                raise BadCoding(f"the body is not {self._coding}: {error}") from None
            self._inflate = zlib.decompressobj(-15)
            self._fresh = False
            return self.feed(data, limit)
        self._fresh = False
        if len(plain) > limit:
            raise TooLarge
        if self._inflate.unused_data:
            raise BadCoding(f"the body is not {self._coding}: there is more after its end")
        return plain

    def end(self) -> None:
        """No more comes; `BadCoding` if the body is not whole."""
        if not self._inflate.eof:
            raise BadCoding(f"the body is not {self._coding}: its end is missing")


def inflate(data: bytes, coding: str, limit: int) -> bytes:
    """A whole body without its coding, of at most `limit` bytes."""
    inflater = Inflater(coding)
    plain = inflater.feed(data, limit)
    inflater.end()
    return plain
