"""Sends a request to a provider and comes back with an answer that has begun, or with why there is none.

Passing faults (429, 5xx, 529, a connection that breaks before the first byte of an answer, an error event before the
first content of a stream) are met here with further attempts, so that agents never see them. An answer that has begun
is never asked for twice. A kept connection that the provider had given up in the meantime is not a fault: the request
is repeated at once on a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from pier.gateway.budget import Limiter, Retry, pause
from pier.gateway.http.answer import Answer
from pier.gateway.http.client import BadAnswer, Client
from pier.gateway.http.coding import BadCoding
from pier.gateway.providers import Provider
from pier.record.redact import Scrubber, redacted_path
from pier.record.writer import CallRecord
from pier.wire.body import Body
from pier.wire.dialects import DIALECTS
from pier.wire.faults import Fault, classify, error_in
from pier.wire.relayed import error_instead, progress_of
from pier.wire.sse import Framer, MalformedAnswer, data_of, events_of
from pier.wire.turn import DialectName, ErrorKind

if TYPE_CHECKING:
    from pier.gateway.http.proxied import ProxiedAnswer, ProxiedClient

    AnyAnswer = Answer | ProxiedAnswer

MAX_ANSWER = 64 * 1024 * 1024
_MAX_ERROR = 1024 * 1024
"""No larger answer is an error."""
_BEGINNING = 512
"""An answer that is an error says so in its first bytes."""


class UpstreamFailed(Exception):
    """There is no answer. `body` is the provider's own error in its dialect, when it sent one."""

    def __init__(
        self, status: int, message: str, kind: ErrorKind, body: bytes | None = None, fault: Fault = "provider"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind: ErrorKind = kind
        self.body = body
        self.fault: Fault = fault


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to a provider. `body` is None when it is the agent's own, which is `data` then too."""

    provider: Provider
    dialect: DialectName
    path: str
    model: str
    headers: Mapping[str, str]
    data: bytes
    body: Body | None = None


@dataclass
class Upstreams:
    """The connections of one gateway to all providers."""

    retry: Retry = field(default_factory=Retry)
    silence: float = 900.0
    """An upstream is given up after this many seconds without a byte."""
    _may_be_proxied: bool = False
    _direct: Client | None = None
    _proxied: ProxiedClient | None = None
    _limiters: dict[tuple[str, str | None], Limiter] = field(default_factory=dict)

    def open(self) -> None:
        self._direct = Client(self.silence)
        self._may_be_proxied = any(name.lower().endswith("_proxy") for name in os.environ)

    async def close(self) -> None:
        for client in (self._direct, self._proxied):
            if client:
                await client.close()
        self._direct = self._proxied = None

    def _client(self, address: str) -> Client | ProxiedClient:
        assert self._direct is not None, "the gateway is not open"
        if not self._may_be_proxied:
            return self._direct
        from pier.gateway.http.proxied import ProxiedClient, is_proxied

        if not is_proxied(address):
            return self._direct
        if self._proxied is None:
            self._proxied = ProxiedClient(self.silence)
        return self._proxied

    def limiter(self, provider: Provider) -> Limiter:
        place = (provider.url, provider.key)
        if place not in self._limiters:
            self._limiters[place] = Limiter(provider.requests_per_minute, provider.concurrency)
        return self._limiters[place]

    def ask(self, out: Outgoing, record: CallRecord) -> Asking:
        """The beginning of a good answer (status below 400), as an async context manager. Leaving early ends the
        upstream's generation."""
        return Asking(self, out, record)

    async def attempts(self, out: Outgoing, record: CallRecord, limiter: Limiter) -> AnyAnswer:
        began, attempt, fresh = time.monotonic(), 0, False
        while True:
            attempt += not fresh
            if limiter.is_closed:
                record.held("rate_limit")
            await limiter.pass_gate()
            try:
                return await self._attempt(out, record, fresh)
            except _Fault as fault:
                fresh = fault.stale
                wait = 0.0 if fresh else None
                if fault.passing and not fresh:
                    limited = fault.failed.fault == "rate_limit"
                    wait = self.retry.pause(attempt, time.monotonic() - began, fault.asked, limited=limited)
                record.failed(fault.failed.message, wait, None if fresh else fault.failed.fault)
                if wait is None:
                    raise fault.failed from None
                if fault.asked:
                    limiter.close_for(wait)
                else:
                    await pause(wait)

    async def _attempt(self, out: Outgoing, record: CallRecord, fresh: bool) -> AnyAnswer:
        """Taking a body apart for the recording is done once it is on its way."""
        provider = out.provider
        address = provider.address(out.path)
        facts = {"provider": provider.name, "dialect": out.dialect, "url": redacted_path(address), "model": out.model}
        headers = CIMultiDict(out.headers)
        headers.update(provider.credentials(out.dialect))
        headers["Accept-Encoding"] = "identity"
        try:
            sent = await self._client(address).send(address, headers.items(), out.data, fresh=fresh)
        except (OSError, ValueError) as error:
            record.attempt(facts, out.body)
            lasting = not isinstance(error, OSError) or isinstance(error, ssl.SSLCertVerificationError)
            raise _Fault(_unreachable(error, provider), passing=not lasting) from None
        try:
            record.attempt(facts, out.body)
        except BaseException:
            sent.abort()
            raise
        try:
            answer = await sent.answer()
        except OSError as error:
            passing = not isinstance(error, TimeoutError | BadAnswer)
            raise _Fault(_unreachable(error, provider), passing, stale=passing and sent.stale) from None
        if answer.status >= 300:
            raise await _refused(answer, out, record)
        try:
            await _look_ahead(answer, out, record)
        except BaseException:
            answer.close()
            raise
        return answer


class Asking:
    """A request to a provider while it runs."""

    def __init__(self, upstreams: Upstreams, out: Outgoing, record: CallRecord) -> None:
        self._upstreams = upstreams
        self._out = out
        self._record = record
        self._limiter = upstreams.limiter(out.provider)
        self._answer: AnyAnswer | None = None

    async def __aenter__(self) -> AnyAnswer:
        await self._limiter.enter()
        try:
            self._answer = await self._upstreams.attempts(self._out, self._record, self._limiter)
        except BaseException:
            self._limiter.leave()
            raise
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        self._limiter.leave()
        if self._answer:
            self._answer.close()


@dataclass
class _Fault(Exception):
    failed: UpstreamFailed
    passing: bool
    asked: float | None = None
    stale: bool = False


async def _refused(answer: AnyAnswer, out: Outgoing, record: CallRecord) -> _Fault:
    """What an error answer means."""
    raw = b""
    try:
        while len(raw) < MAX_ANSWER and (part := await answer.read()):
            raw += part
    except (OSError, BadCoding):
        raw = b""
    finally:
        answer.close()
    return _fault(answer, raw, _decoded(raw), out, record)


def _fault(answer: AnyAnswer, raw: bytes, error: object, out: Outgoing, record: CallRecord) -> _Fault:
    scrub = Scrubber(*out.provider.secrets)
    raw = scrub(raw)
    record.status("upstream", answer.status, answer.headers, answer.status < 300 and _is_stream(answer))
    record.chunk("upstream", raw)
    status = answer.status if answer.status >= 400 or answer.status < 300 else 502
    failure = classify(status, error, answer.headers, out.data)
    words = scrub(json.dumps(error).encode()) if answer.status < 300 else raw
    message, kind = DIALECTS[out.dialect].parse_error(failure.status, _decoded(words))
    own = raw if _is_object(raw) and failure.status == answer.status else None
    said = message or f"{out.provider.name} answered {answer.status}"
    failed = UpstreamFailed(failure.status, said, kind, own, failure.fault)
    return _Fault(failed, failure.passing, failure.asked)


async def _look_ahead(answer: AnyAnswer, out: Outgoing, record: CallRecord) -> None:
    """Read until it is certain that a good status does not hide an error; the reader gets all of it again."""
    if _is_stream(answer):
        raw, error = await _read_prelude(answer, out.dialect)
    else:
        raw, error = await _read_error(answer, out.dialect)
    if error is not None:
        raise _fault(answer, raw, {"error": error}, out, record)
    answer.unread(raw)


async def _read_error(answer: AnyAnswer, dialect: DialectName) -> tuple[bytes, Mapping[str, Any] | None]:
    """The first bytes of an answer that is not streamed, and the error that it is. All of it is read only if it begins
    like an error."""
    raw = b""
    with contextlib.suppress(OSError, BadCoding):  # the next read fails in the same way
        raw = await answer.read()
        while b'"error"' in raw[:_BEGINNING] and len(raw) <= _MAX_ERROR and (part := await answer.read()):
            raw += part
        if b'"error"' in raw[:_BEGINNING] and len(raw) <= _MAX_ERROR:
            return raw, error_instead(dialect, _decoded(raw))
    return raw, None


async def _read_prelude(answer: AnyAnswer, dialect: DialectName) -> tuple[bytes, Mapping[str, Any] | None]:
    """The first bytes of a stream, up to its first content, and the error that came instead of content."""
    raw, framer = b"", Framer()
    with contextlib.suppress(OSError, BadCoding, MalformedAnswer):  # the next read fails in the same way
        while part := await answer.read():
            raw += part
            for event in events_of(framer.feed(part)):
                if (data := data_of(event)) is None:
                    continue
                value = _decoded(data)
                match progress_of(dialect, value):
                    case "error":
                        return raw, error_in(value)
                    case "content":
                        return raw, None
                    case _:
                        pass
    return raw, None


def _is_stream(answer: AnyAnswer) -> bool:
    return answer.content_type.startswith("text/event-stream")


async def read_answer(answer: AnyAnswer) -> bytes:
    """All of an answer that is not streamed."""
    parts, size = [], 0
    try:
        while part := await answer.read():
            size += len(part)
            if size > MAX_ANSWER:
                raise UpstreamFailed(502, f"the provider's answer is larger than {MAX_ANSWER} bytes", "server")
            parts.append(part)
    except TimeoutError:
        raise UpstreamFailed(504, "the provider fell silent in the middle of its answer", "timeout") from None
    except (OSError, BadCoding) as error:
        raise UpstreamFailed(502, f"the provider's answer was cut off: {error}", "server") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decoded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _is_object(raw: bytes) -> bool:
    return isinstance(_decoded(raw), dict)


def _unreachable(error: Exception, provider: Provider) -> UpstreamFailed:
    """One that was silent for very long, or answered in no HTTP, is not asked again: it may well have generated."""
    if isinstance(error, TimeoutError):
        return UpstreamFailed(504, f"{provider.name} did not answer in time", "timeout")
    words = str(error) or type(error).__name__
    return UpstreamFailed(502, f"{provider.name} cannot be reached: {words}", "server")
