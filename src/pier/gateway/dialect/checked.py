"""A dialect whose readers give sound values or say what is wrong, whatever the bytes were.

The readers of a dialect take a body as its specification has it. Agents, providers and models may send anything else:
a list where there should be text, a number where there should be an object. Here that becomes an error with words, of
the client or of the upstream, and never an unexpected exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pier.gateway.canonical import Delta, DialectName, Request, StreamError, Turn
from pier.gateway.dialect.contract import BadRequest, BadResponse, Dialect, Route, StreamParser
from pier.gateway.soundness import fault

_WRONG = (TypeError, AttributeError, LookupError, ValueError, RecursionError)
"""What reading a value as something that it is not may raise."""


class Checked:
    """`inner`, with checks around what it reads; everything else is its own."""

    def __init__(self, inner: Dialect) -> None:
        self.name: DialectName = inner.name
        self.match = inner.match
        self.request_path = inner.request_path
        self.render_response = inner.render_response
        self.stream_renderer = inner.stream_renderer
        self.error_body = inner.error_body
        self.parse_error = inner.parse_error
        self.models_body = inner.models_body
        self.model_body = inner.model_body
        self.count_tokens_body = inner.count_tokens_body
        self._inner = inner

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        try:
            request = self._inner.parse_request(body, route)
        except BadRequest:
            raise
        except _WRONG as error:
            raise BadRequest(f"the body is not of the {self.name} dialect: {error}") from error
        if problem := fault(request):
            raise BadRequest(f"the body is not of the {self.name} dialect: {problem}")
        return request

    def render_request(self, request: Request) -> dict[str, Any]:
        try:
            return self._inner.render_request(request)
        except _WRONG as error:
            raise BadRequest(f"the request cannot be said in the {self.name} dialect: {error}") from error

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        try:
            turn = self._inner.parse_response(body)
        except BadResponse:
            raise
        except (BadRequest, *_WRONG) as error:
            raise BadResponse(f"the provider's answer is not of the {self.name} dialect: {error}") from error
        if problem := fault(turn):
            raise BadResponse(f"the provider's answer is not of the {self.name} dialect: {problem}")
        return turn

    def stream_parser(self) -> StreamParser:
        return CheckedParser(self._inner.stream_parser(), self.name)


class CheckedParser:
    """A stream's parser that ends in an error when an event makes no sense, and is silent from then on."""

    def __init__(self, inner: StreamParser, name: str) -> None:
        self._inner = inner
        self._name = name
        self._failed = False

    def feed(self, data: bytes) -> list[Delta]:
        return self._checked(lambda: self._inner.feed(data))

    def close(self) -> list[Delta]:
        return self._checked(self._inner.close)

    def _checked(self, read: Any) -> list[Delta]:
        if self._failed:
            return []
        sound: list[Delta] = []
        try:
            for delta in read():
                if problem := fault(delta):
                    return [*sound, self._fail(problem)]
                sound.append(delta)
        except (BadRequest, BadResponse, *_WRONG) as error:
            return [*sound, self._fail(str(error))]
        return sound

    def _fail(self, problem: str) -> StreamError:
        self._failed = True
        return StreamError(f"the provider sent an event that is not of the {self._name} dialect: {problem}")
