"""A provider's answer, from its first byte on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pier.gateway.http.coding import BadCoding, Inflater, TooLarge
from pier.gateway.http.message import ResponseHead

if TYPE_CHECKING:
    from pier.gateway.http.client import Sent

_MAX_PIECE = 64 * 1024 * 1024
"""What one piece of a compressed answer may grow to."""


class Answer:
    """An answer that has begun."""

    def __init__(self, connection: Sent, head: ResponseHead) -> None:
        self._connection = connection
        self.status = head.status
        self.headers = head.headers
        coding = head.headers.get("Content-Encoding", "identity").lower()
        self._ahead = b""
        self._inflater = None if coding == "identity" else Inflater(coding)

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def ended(self) -> bool:
        """Whether all of the body is here and was read."""
        return self._connection.ended and not self._ahead

    def unread(self, data: bytes) -> None:
        """Let the next `read` give this."""
        self._ahead = data

    async def read(self) -> bytes:
        """More of the body, as soon as there is some; nothing at its end. `Disconnected`, `TimeoutError` or
        `BadCoding` if the rest does not come."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        while True:
            data = self._connection.take() or await self._connection.more()
            if self._inflater is None:
                return data
            if not data:
                self._inflater.end()
                return data
            try:
                plain = self._inflater.feed(data, _MAX_PIECE)
            except TooLarge:
                raise BadCoding("the answer grows without end") from None
            if plain:
                return plain

    def close(self) -> None:
        """Done with it. The connection serves again if the answer was read to its end."""
        self._connection.release()
