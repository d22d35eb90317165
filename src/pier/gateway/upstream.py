"""Sends requests to providers and returns answers that have begun, or the reasons why there are none.

Transient faults (429, 5xx, 529, a connection that breaks before the first byte of an answer, an error event before the
first content of a stream) are retried, so that agents never see them. A request whose answer has begun is not retried.
A kept connection that the provider had closed is not a fault: the request is repeated at once on another one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from multidict import CIMultiDict

from pier.gateway.budget import Limiter, Retry, pause
from pier.gateway.login import LoginRefused
from pier.gateway.pool import Answer, ConnectionPool, NoAnswer
from pier.gateway.providers import Provider
from pier.record.writer import CallRecord, Recorder
from pier.wire.body import Body, parse
from pier.wire.dialects import DIALECTS
from pier.wire.faults import Fault, classify, error_in
from pier.wire.headers import Scrubber, plain_headers, redacted_path
from pier.wire.sse import Framer, MalformedAnswer, data_of, events_of
from pier.wire.turn import DialectName, ErrorKind
from pier.wire.values import dump, kind_of_status, load

MAX_ANSWER = 64 * 1024 * 1024
_MAX_ERROR = 1024 * 1024
"""Larger answers are not examined for errors."""
_BEGINNING = 512
"""The first bytes of an answer, in which an error is recognised."""


@dataclass(eq=False)
class UpstreamFailed(Exception):
    """There is no answer. `body` is the provider's error in its dialect, if it sent one. `retryable`: a retry may help,
    after the pause that was `asked` for; `stale`: the provider had closed the kept connection already."""

    status: int
    message: str
    kind: ErrorKind
    body: bytes | None = None
    fault: Fault = "provider"
    retryable: bool = False
    asked: float | None = None
    stale: bool = False
    source: Literal["api", "front"] | None = None
    """The origin of a refusal: the provider's API, or maybe a server in front of it; None for other failures."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to a provider. `body` is None if `data` is the agent's body, unchanged."""

    provider: Provider
    dialect: DialectName
    path: str
    model: str
    headers: Mapping[str, str]
    data: bytes
    body: Body | None = None
    query: str = ""
    """The agent's query parameters."""
    dropped: tuple[str, ...] = ()
    """Names of the agent's headers and fields that are not sent."""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    def without(self, failed: UpstreamFailed) -> Outgoing | None:
        """The request without the agent's headers, query and optional fields, except a login's client name; None if the
        failure cannot be due to these. An API refuses features, such as betas and service tiers; a server in front of
        it may refuse anything."""
        if failed.fault == "agent" or failed.source is None:
            return None
        dialect, body, data = DIALECTS[self.dialect], self.body, self.data
        optional = dict.fromkeys(dialect.optional_fields(value := json.loads(data)))  # a dict: there may be many
        asks_for_features = self.query or optional or any(map(dialect.is_client_header, self.headers))
        if failed.source == "api" and not asks_for_features:
            return None
        if optional:
            body = parse(data := dump({name: each for name, each in value.items() if name not in optional}))
        headers = plain_headers(dialect)
        if self.provider.login and (name := CIMultiDict(self.headers).get("User-Agent")):
            headers["User-Agent"] = name
        lost = set(self.headers.items()) - set(headers.items())
        dropped = (*self.dropped, *sorted(name.lower() for name, _ in lost), *optional)
        if not (lost or self.query or optional):
            return None
        return replace(self, headers=headers, query="", dropped=dropped, body=body, data=data)


@dataclass
class Upstreams:
    retry: Retry = field(default_factory=Retry)
    silence: float = 900.0
    """Seconds without a byte after which a read from an upstream times out."""
    _limiters: dict[tuple[str, str | None], Limiter] = field(default_factory=dict)

    @cached_property
    def pool(self) -> ConnectionPool:
        return ConnectionPool(self.silence)

    def limiter(self, provider: Provider) -> Limiter:
        place = (provider.url, provider.key)
        if place not in self._limiters:
            self._limiters[place] = Limiter(provider.requests_per_minute, provider.concurrency)
        return self._limiters[place]

    def forget(self, session: Recorder) -> None:
        """Remove an ended session from the limiters."""
        for limiter in self._limiters.values():
            limiter.forget(session)

    async def ask(self, out: Outgoing, record: CallRecord) -> Answer:
        """Send a request until it gets a good answer (status below 300) and return its beginning, a context manager:
        leaving it early ends the upstream's generation."""
        limiter, session = self.limiter(out.provider), record.recorder
        began, attempt, stale = time.monotonic(), 0, False
        while True:
            attempt += not stale
            began += await limiter.acquire(session, lambda: record.held("rate_limit"))
            try:
                outcome = await self._try(out, record, attempt, began)
            except BaseException:
                limiter.release()
                raise
            if isinstance(outcome, Answer):
                outcome.limiter = limiter
                return outcome
            failed, wait = outcome
            stale = failed.stale
            if failed.asked:
                limiter.close_for(session, wait)
            limiter.release()
            if not failed.asked:
                await pause(wait)

    async def _try(
        self, out: Outgoing, record: CallRecord, attempt: int, began: float
    ) -> Answer | tuple[UpstreamFailed, float]:
        """An answer; or a transient fault and the seconds to wait until the next attempt."""
        try:
            return await self._attempt(out, record)
        except UpstreamFailed as failed:
            wait = 0.0 if failed.stale else None
            if failed.retryable and not failed.stale:
                limited = failed.fault == "rate_limit"
                wait = self.retry.pause(attempt, time.monotonic() - began, failed.asked, limited=limited)
            plain = out.without(failed) if wait is None else None
            record.failed(failed.message, 0.0 if plain else wait, None if failed.stale else failed.fault)
            if plain is not None:
                return await self._ask_plainly(plain, record, failed)
            if wait is None:
                raise
            return failed, wait

    async def _ask_plainly(self, plain: Outgoing, record: CallRecord, failed: UpstreamFailed) -> Answer:
        """Retry once without the agent's headers, query and optional fields: the failure is the provider's fault only
        if that is refused too. With a login some of these may be required, so then only an answer counts."""
        try:
            return await self._attempt(plain, record)
        except UpstreamFailed as again:
            decided = again if again.fault == "agent" and not plain.provider.login else failed
            record.failed(again.message, None, decided.fault)
            raise decided from None

    async def _attempt(self, out: Outgoing, record: CallRecord) -> Answer:
        provider = out.provider
        facts: dict[str, Any] = {"provider": provider.name, "dialect": out.dialect, "model": out.model}
        if out.dropped:
            facts["dropped"] = out.dropped
        try:
            if provider.login:
                answer = await self._send_with_login(out, facts, record)
            else:
                address = provider.address(out.target)
                headers = CIMultiDict(out.headers)
                headers.update(provider.credentials(out.dialect))
                record.attempt({**facts, "url": redacted_path(address)}, out.body)
                answer = await self.pool.send(address, headers, out.data)
        except NoAnswer as error:
            message, status = f"{provider.name} cannot be reached: {error}", 502
            if error.timed_out:
                message, status = f"{provider.name} did not answer in time", 504
            raise UpstreamFailed(
                status,
                message,
                kind_of_status(status),
                retryable=error.retryable,
                stale=error.stale,
                source="front" if error.hung_up else None,
            ) from None
        except LoginRefused as error:
            # 400, since some agents treat 401 as transient and retry for minutes
            status = 503 if error.retryable else 400
            raise UpstreamFailed(status, str(error), "authentication", retryable=error.retryable) from None
        if answer.status >= 300:
            raw = await answer.read_short(MAX_ANSWER)
            raise _failure(answer, raw, _decoded(raw), out, record)
        try:
            await _look_ahead(answer, out, record)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _send_with_login(self, out: Outgoing, facts: Mapping[str, Any], record: CallRecord) -> Answer:
        """Send with the user's login. A refused token is refreshed once."""
        login, refused = out.provider.login, None
        assert login is not None
        facts = {**facts, "url": login.base, "login": login.title}
        while True:
            try:
                sent = await login.request(self.pool.send, out.target, out.headers, out.data, out.model, refused)
                facts["url"] = redacted_path(sent[0])
            finally:
                record.attempt(facts, out.body)
            answer = await self.pool.send(*sent)
            if answer.status != 401:
                if answer.status < 300:
                    answer.unwrapper = login.unwrapper(stream=answer.is_stream)
                return answer
            reason = await login.refusal(answer)
            if refused is not None:
                raise LoginRefused(f"{reason}; run: {login.command}")
            refused = login.tokens.access
            record.failed(reason, 0.0, None)


def _failure(answer: Answer, raw: bytes, error: object, out: Outgoing, record: CallRecord) -> UpstreamFailed:
    scrub = Scrubber(*out.provider.secrets)
    raw = scrub(raw)
    record.status("upstream", answer.status, answer.headers, answer.status < 300 and answer.is_stream)
    record.chunk("upstream", raw)
    status = answer.status if answer.status >= 400 or answer.status < 300 else 502
    failure = classify(status, error, answer.headers, out.data)
    text = scrub(json.dumps(error).encode()) if answer.status < 300 else raw
    message, kind = DIALECTS[out.dialect].parse_error(failure.status, _decoded(text))
    message = message or f"{out.provider.name} answered {answer.status}"
    body = raw if isinstance(_decoded(raw), dict) and failure.status == answer.status else None
    source = "api" if error_in(error) is not None else "front"
    retryable, asked = failure.retryable, failure.asked
    return UpstreamFailed(failure.status, message, kind, body, failure.fault, retryable, asked, source=source)


async def _look_ahead(answer: Answer, out: Outgoing, record: CallRecord) -> None:
    """Read ahead to find an error in an answer with a good status; the bytes are returned by later reads."""
    if answer.is_stream:
        raw, error = await _read_prelude(answer, out.dialect)
    else:
        raw, error = await _read_error(answer, out.dialect)
    if error is not None:
        raise _failure(answer, raw, {"error": error}, out, record)
    answer.unread(raw)


async def _read_error(answer: Answer, dialect: DialectName) -> tuple[bytes, Mapping[str, Any] | None]:
    """The first bytes of an answer that is not streamed, and the error in it, if any. The whole answer is read only if
    it begins like an error."""
    raw = bytearray()
    with contextlib.suppress(OSError):  # the next read fails in the same way
        raw += await answer.read()
        while b'"error"' in raw[:_BEGINNING] and len(raw) <= _MAX_ERROR and (part := await answer.read()):
            raw += part
        if b'"error"' in raw[:_BEGINNING] and len(raw) <= _MAX_ERROR:
            value = _decoded(bytes(raw))
            whole = value if isinstance(value, Mapping) and value.get("status") != "failed" else None
            if whole is None or DIALECTS[dialect].missing_in(whole) is not None:
                return bytes(raw), error_in(value)
    return bytes(raw), None


async def _read_prelude(answer: Answer, dialect: DialectName) -> tuple[bytes, Mapping[str, Any] | None]:
    """The first bytes of a stream, up to its first content, and the error in place of content, if any."""
    raw, framer = bytearray(), Framer()
    with contextlib.suppress(OSError, MalformedAnswer):  # the next read fails in the same way
        while len(raw) <= _MAX_ERROR and (part := await answer.read()):
            raw += part
            for event in events_of(framer.feed(part)):
                if (data := data_of(event)) is None:
                    continue
                value = _decoded(data)
                kind = DIALECTS[dialect].first_event(value) if isinstance(value, Mapping) else "content"
                if kind != "prelude":
                    return bytes(raw), error_in(value) if kind == "error" else None
    return bytes(raw), None


async def read_answer(answer: Answer, hear: Callable[[bytes], None] | None = None) -> bytes:
    """Read a whole answer that is not streamed; `hear` is called with each piece."""
    whole = bytearray()
    try:
        while not answer.ended and (part := await answer.read()):
            whole += part
            if hear is not None:
                hear(part)
            if len(whole) > MAX_ANSWER:
                raise UpstreamFailed(502, f"the provider's answer is larger than {MAX_ANSWER} bytes", "server")
    except TimeoutError:
        raise UpstreamFailed(504, "the provider was silent in the middle of its answer", "timeout") from None
    except OSError as error:
        raise UpstreamFailed(502, f"the provider's answer was cut off: {error}", "server") from None
    return bytes(whole)


def _decoded(raw: bytes) -> object:
    try:
        return load(raw)
    except ValueError:
        return raw.decode(errors="replace")
