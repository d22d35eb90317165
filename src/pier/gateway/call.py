"""One generation in progress: the agent's request (`Caller`), and its answer, recording and budget (`Exchange`).

Promises for every kind of upstream: each call ends once, and its end is recorded before the agent sees the last event;
failures reach the agent in its own dialect, as an error event if the answer has begun; quiet streams are kept alive.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from pier.gateway.budget import Reservation
from pier.gateway.providers import Target
from pier.gateway.request import HttpRequest
from pier.gateway.upstream import Outgoing
from pier.record.writer import CallRecord, Outcome
from pier.wire.body import Body, parse
from pier.wire.dialects import DIALECTS, BadRequest, Dialect, recognise
from pier.wire.faults import Fault, fault_of
from pier.wire.headers import HOP_BY_HOP, passed_headers, passed_query, redacted, redacted_path
from pier.wire.sse import EventRenderer, MalformedAnswer
from pier.wire.turn import Edit, ErrorKind, Request, Turn, TurnBuilder, Usage, cost_of
from pier.wire.values import dump

if TYPE_CHECKING:
    from pier.gateway.session import Session

MAX_BODY = 64 * 1024 * 1024
_ENCODED = re.compile(r"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{4096,}")
"""A picture or file in a request. Without the lookbehind, slightly shorter runs would take quadratic time."""

_NOT_DOWNSTREAM = HOP_BY_HOP | {"content-length", "content-encoding", "set-cookie", "server", "date", "alt-svc"}


def _key(headers: Mapping[str, str], query: str) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or dict(parse_qsl(query)).get("key", "")


class Caller:
    """One request of an agent, through which it is answered."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.headers = redacted(request.headers)
        """Headers for the recording, without secrets and with lower-case names."""
        self.route = recognise(request.method, request.path, request.query_string, tuple(self.headers))
        self.dialect: Dialect = DIALECTS[self.route.dialect]
        self.key = _key(request.headers, request.query_string)
        """The credential, from any of the places that clients use."""
        self.held = self.work = 0
        """The bytes that the body contributes to `LARGEST_HELD` and `LARGEST_WORK`."""

    @property
    def started(self) -> bool:
        return self.request.started

    @property
    def user_agent(self) -> str:
        return self.request.headers.get("User-Agent", "")

    def outgoing(self, target: Target, path: str, body: Body, *, own: bool) -> Outgoing:
        """The request to an upstream of the same dialect. `own`: the body is the agent's, unchanged."""
        headers, dropped = passed_headers(self.dialect, self.request.headers.items())
        query = passed_query(self.dialect, self.request.query_string)
        return Outgoing(
            target.provider,
            self.route.dialect,
            path,
            target.model,
            headers,
            body.encode(),
            None if own else body,
            query,
            dropped,
        )

    def streams(self, body: Body) -> bool:
        return self.route.stream if self.route.stream is not None else bool(body.value.get("stream"))

    def facts(self) -> dict[str, Any]:
        """The recorded facts about the request, without secrets."""
        return {
            "kind": self.route.kind,
            "dialect": self.route.dialect,
            "method": self.request.method,
            "path": redacted_path(self.request.target),
            "headers": self.headers,
        }

    async def read(self, hold: Callable[[int], None]) -> bytes:
        """Read the body, decompressed; `BadMessage` if it has more than `MAX_BODY` bytes or is invalid. `hold` is
        called with its size whenever that changes."""
        return await self.request.read(MAX_BODY, hold)

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, close: bool = False
    ) -> None:
        kept = _kept(headers, ("Content-Type", "application/json"))
        self.request.reply(status, kept, body, close=close)

    async def reply_json(self, value: Mapping[str, Any], status: int = 200) -> None:
        await self.reply(status, dump(value))

    def error_bytes(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return dump(self.dialect.error_body(status, message, kind))

    def start(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.request.start(status, _kept(headers, *_OF_STREAMS))


_OF_STREAMS = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
)


def _kept(headers: Mapping[str, str] | None, *defaults: tuple[str, str]) -> list[tuple[str, str]]:
    """A provider's headers that are passed to an agent, and defaults for missing ones."""
    kept = [(name, value) for name, value in (headers or {}).items() if name.lower() not in _NOT_DOWNSTREAM]
    present = {name.lower() for name, _ in kept}
    return kept + [(name, value) for name, value in defaults if name.lower() not in present]


class CallerGone(Exception):
    """The agent closed its connection."""


class Exchange:
    """The state of a generation, and the ways to answer it."""

    def __init__(self, session: Session, caller: Caller, body: Body, record: CallRecord, turn: Reservation) -> None:
        self.caller = caller
        self.body = body
        self.sampling = session.terms.sampling
        """The session's parameters, which replace the agent's."""
        self.collects = session.terms.on_generation is not None
        """Whether to keep `answer`."""
        self.answer: Turn | None = None
        """The whole turn that the agent receives, with its tokens."""
        self.record = record
        self.turn = turn
        self.upstreams = session.gateway.upstreams
        self.memory = session.memory
        self.stream = caller.streams(body)
        self.target: Target | None = None
        self.version: str | None = None
        """The version of the weights that answer."""
        self.usage: Usage | None = None
        self._received: list[bytes] = []
        """The upstream's answer so far, if tokens or money are limited."""
        self._dialect = caller.dialect
        """The dialect of `_received`."""
        self.error: str | None = None
        self.error_kind: ErrorKind | None = None
        self.answered = False
        """Whether the agent has received part of an answer, other than keep-alives."""
        self.ended = False
        self.outcome: tuple[Outcome, int, Fault | None] | None = None
        """The outcome of the call, its status, and the blame."""
        self.edited = False
        """Whether `body` differs from the agent's."""
        self.keep_alive_bytes: bytes | None = None
        """Bytes to send in a quiet stream; None to use the renderer's."""
        self._keep_alive = session.gateway.keep_alive
        self._request: Request | None = None
        self._renderer: EventRenderer | None = None
        self._last_write = time.monotonic()
        loop = asyncio.get_running_loop()
        self._beat = loop.call_later(self._keep_alive, self._send_keep_alive, loop) if self.stream else None

    @property
    def request(self) -> Request:
        """The request in canonical form; `BadRequest` if the body is not of its dialect."""
        if self._request is None:
            request = self.caller.dialect.parse_request(self.body.value, self.caller.route)
            self._request = replace(request, sampling=request.sampling.overridden_by(self.sampling))
        return self._request

    @property
    def renderer(self) -> EventRenderer:
        """The writer of events for the agent, available even if the body is not of its dialect."""
        if self._renderer is None:
            try:
                request = self.request
            except BadRequest:
                name = str(self.body.value.get("model") or self.caller.route.model)
                request = Request(name, (), stream=True, dialect=self.caller.route.dialect)
            self._renderer = self.caller.dialect.stream_renderer(request, self.caller.route)
        return self._renderer

    def edit(self, value: Mapping[str, Any], edits: list[Edit]) -> None:
        """Replace the agent's body and record the edits."""
        self.body = parse(dump(value))
        self._request = None
        self.edited = True
        self.record.edited([asdict(edit) for edit in edits])

    @property
    def started(self) -> bool:
        return self.caller.started

    def start(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Begin the streamed answer, unless a keep-alive began it already."""
        self._start(status, headers)
        self.answered = True

    def _start(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        if not self.started:
            try:
                self.caller.start(status, headers or {"Content-Type": self.renderer.content_type})
            except ConnectionError:
                raise CallerGone from None

    async def write(self, data: bytes) -> None:
        if data:
            self._last_write = time.monotonic()
            try:
                await self.caller.request.write(data)
            except ConnectionError:
                raise CallerGone from None

    async def finish(self, data: bytes = b"") -> None:
        """Send the last bytes of a streamed answer and its end."""
        try:
            await self.caller.request.finish(data)
        except ConnectionError:
            raise CallerGone from None

    async def end(
        self, outcome: Outcome, status: int = 200, error: str | None = None, fault: Fault | None = None
    ) -> None:
        """Record the end of the call; only the first end counts. If the agent leaves while a fault delays its call, the
        fault is recorded as the cause."""
        if self.ended:
            return
        self.ended = True
        if self._beat:
            self._beat.cancel()
        if outcome == "error":
            fault = fault or fault_of(status, error or "")
        elif outcome == "cancelled":
            fault = self.record.fault
        self.outcome, self.error = (outcome, status, fault), error
        provider, model = (self.target.provider.name, self.target.model) if self.target else ("", None)
        if self.turn.spent:
            self.turn.add(self.usage, cost_of(self.usage, model, provider))
        abandoned = outcome in ("cancelled", "refused") and (self.turn.spent or self.record.is_asked)
        if abandoned and self.turn.counts_tokens:
            self._guess_use(model, provider)
        self.record.end(outcome, status, error=error, usage=self.usage, fault=fault)
        await self.record.recorder.commit()

    def note_received(self, data: bytes, dialect: Dialect) -> None:
        """Keep a piece of the model's answer, to estimate its use if the agent leaves before the usage is known."""
        if self.turn.counts_tokens:
            self._dialect = dialect
            self._received.append(data)

    def _guess_use(self, model: str | None, provider: str) -> None:
        """Estimate the use of an abandoned call, whose usage is unknown, at four characters a token. Pictures are
        ignored."""
        whole = TurnBuilder()
        with suppress(MalformedAnswer):
            parser = self._dialect.stream_parser()
            whole.extend([*parser.feed(b"".join(self._received)), *parser.close()])
        known = self.usage or Usage()
        inputs = known.input_tokens or len(_ENCODED.sub("", self.body.text)) // 4
        parts = (getattr(part, "text", "") or getattr(part, "arguments", "") for part in whole.turn().parts)
        outputs = max(known.output_tokens or 0, sum(map(len, parts)) // 4)
        cost = cost_of(replace(known, input_tokens=inputs, output_tokens=outputs), model, provider) or 0.0
        more = max(0.0, cost - (cost_of(self.usage, model, provider) or 0.0))
        self.turn.guess(inputs - (known.input_tokens or 0), outputs - (known.output_tokens or 0), more)

    async def fail(
        self,
        status: int,
        message: str,
        kind: ErrorKind,
        body: bytes | None = None,
        outcome: Outcome = "error",
        fault: Fault | None = None,
    ) -> None:
        """Report a failure to the agent, as an error event if the answer has begun. Without `fault`, the blame follows
        from the status."""
        self.error_kind = kind
        if self.started:
            data = self.renderer.error(status, message, kind)
            self.record.chunk("added", data)
            await self.end(outcome, status, message, fault)
            await self.write(data)
            return await self.finish()
        data = body or self.caller.error_bytes(status, message, kind)
        self.record.status("delivered", status, {"content-type": "application/json"}, False)
        self.record.chunk("delivered", data)
        await self.end(outcome, status, message, fault)
        return await self.caller.reply(status, data)

    async def reply(self, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer that is recorded already."""
        await self.end("ok")
        return await self.caller.reply(200, body, headers)

    def _send_keep_alive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send a keep-alive if the stream was quiet for too long, and schedule the next check. None is sent while the
        agent has unread bytes."""
        left = self._last_write + self._keep_alive - time.monotonic()
        if left <= 0:
            left = self._keep_alive
            if not self.caller.request.full:
                try:
                    self._start()
                    self.caller.request.send(self.keep_alive_bytes or self.renderer.keep_alive())
                except (CallerGone, ConnectionError):
                    return
                self._last_write = time.monotonic()
        self._beat = loop.call_later(left, self._send_keep_alive, loop)
