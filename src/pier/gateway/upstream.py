"""Sends a request to a provider and comes back with an answer that has begun, or with why there is none.

Passing faults (429, 5xx, 529, a connection that breaks before the first byte of an answer, an error event before the
first content of a stream) are met here with further attempts, so that agents never see them. An answer that has begun
is never asked for twice. A kept connection that the provider had given up in the meantime is not a fault: the request
is repeated at once on another one.

aiohttp's connector makes the connections (names, TLS, proxies of the environment) and its parser reads the answers.
`ClientSession` would double the processor time of a request: docs/decisions/gateway-http.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Awaitable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar
from urllib.request import getproxies_environment, proxy_bypass

from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientOSError,
    ClientRequest,
    ClientTimeout,
    ConnectionTimeoutError,
    ServerDisconnectedError,
    SocketTimeoutError,
    StreamReader,
    TCPConnector,
)
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from pier.gateway.budget import Limiter, Retry, pause
from pier.gateway.login import LoginRefused
from pier.gateway.logins import Unwrapper
from pier.gateway.providers import Provider
from pier.gateway.request import render
from pier.record.redact import Scrubber, redacted_path
from pier.record.writer import CallRecord
from pier.wire.body import Body, parse
from pier.wire.contract import dump, kind_of_status
from pier.wire.dialects import DIALECTS
from pier.wire.faults import Fault, classify, error_in
from pier.wire.headers import plain_headers
from pier.wire.sse import Framer, MalformedAnswer, data_of, events_of
from pier.wire.turn import DialectName, ErrorKind

MAX_ANSWER = 64 * 1024 * 1024
_MAX_ERROR = 1024 * 1024
"""No larger answer is an error."""
_BEGINNING = 512
"""An answer that is an error says so in its first bytes."""
_MAX_FIELD = 64 * 1024
"""Of a provider's headers."""
_READ_AHEAD = 256 * 1024
KEPT = 60.0
"""Seconds in which an unused connection is kept."""
_SWEEP = 10.0
"""Seconds between two looks at what is late."""
T = TypeVar("T")
_ADDRESSES = 256
"""How many are kept parsed."""
_CONNECT = ClientTimeout(total=None, sock_connect=30)


@dataclass(eq=False)
class UpstreamFailed(Exception):
    """There is no answer. `body` is the provider's own error in its dialect, when it sent one. `passing`: trying again
    may help, after the pause that was `asked` for; `stale`: the provider had given up the kept connection already."""

    status: int
    message: str
    kind: ErrorKind
    body: bytes | None = None
    fault: Fault = "provider"
    passing: bool = False
    asked: float | None = None
    stale: bool = False
    source: Literal["api", "front"] | None = None
    """Who refused: the provider's API in its own words, or maybe a server in front of it; None if nothing did."""

    def __str__(self) -> str:
        return self.message


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
    query: str = ""
    """What the agent added to the path."""
    dropped: tuple[str, ...] = ()
    """The names of the agent's headers and fields that are left out."""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    def without(self, failed: UpstreamFailed) -> Outgoing | None:
        """The same with nothing of the agent's but the fields of the body that it needs, and for a login its client's
        name; None if the failure cannot be due to the rest. An API refuses features, such as betas and tiers of
        service; a server in front of it may refuse anything."""
        if failed.fault == "agent" or failed.source is None:
            return None
        dialect, body, data = DIALECTS[self.dialect], self.body, self.data
        optional = dict.fromkeys(dialect.optional_fields(value := json.loads(data)))  # an agent may send very many
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
    """The connections of one gateway to all providers."""

    retry: Retry = field(default_factory=Retry)
    silence: float = 900.0
    """An upstream is given up after this many seconds without a byte."""
    _limiters: dict[tuple[str, str | None], Limiter] = field(default_factory=dict)
    _proxies: Mapping[str, str] = field(default_factory=dict)
    _connector: TCPConnector | None = None
    _idle: dict[Hashable, list[tuple[Connection, float]]] = field(default_factory=dict)
    """Kept connections by their servers, and when each had served."""
    _waiting: dict[ResponseHandler | StreamReader, float] = field(default_factory=dict)
    """What is waited for since when: one timer looks at all of them."""
    _sweeping: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._proxies = getproxies_environment()
        self._connector = TCPConnector(limit=0, keepalive_timeout=KEPT)
        self._place = lru_cache(_ADDRESSES)(self._find_place)
        self._sweep()

    def _sweep(self) -> None:
        """Give up those who are silent for too long, and connections that were not needed for long."""
        now = time.monotonic()
        for late in [each for each, since in self._waiting.items() if now - since > self.silence]:
            late.set_exception(SocketTimeoutError("Timeout on reading data from socket"))
        for server, kept in list(self._idle.items()):
            while kept and now - kept[0][1] > KEPT:
                kept.pop(0)[0].close()
            if not kept:
                del self._idle[server]
        interval = max(0.01, min(_SWEEP, self.silence / 4))
        self._sweeping = asyncio.get_running_loop().call_later(interval, self._sweep)

    async def close(self) -> None:
        if self._sweeping:
            self._sweeping.cancel()
        for connection, _ in (each for kept in self._idle.values() for each in kept):
            connection.close()
        self._idle.clear()
        if self._connector:
            await self._connector.close()
            self._connector = None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """aiohttp keeps one for the whole process, made from the environment as it was at the import."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _find_place(self, address: str) -> tuple[ClientRequest, Hashable, str]:
        """Where to connect to for an address, as the connector wants to know it, which requests share its connections,
        and the first line of a request."""
        url = URL(address, encoded=True)
        proxy = self._proxies.get(url.scheme) if self._proxies else None
        if proxy is not None and proxy_bypass(url.host or ""):
            proxy = None
        tls = self._tls if url.scheme == "https" else True
        place = ClientRequest("POST", url, proxy=URL(proxy) if proxy else None, ssl=tls)
        target = str(url) if proxy and url.scheme == "http" else url.raw_path_qs
        return place, place.connection_key, f"POST {target} HTTP/1.1"

    async def send(self, address: str, headers: CIMultiDict[str], data: bytes) -> Answer:
        """Send a POST; the beginning of its answer. `NoAnswer` if there is none; a cancelled caller closes the
        connection."""
        assert self._connector is not None, "the gateway is not open"
        connection, reused = None, False
        try:
            place, server, first = self._place(address)
            connection = self._kept(server)
            reused = connection is not None
            if connection is None:
                connection = await self._connector.connect(place, [], _CONNECT)
            protocol, transport = connection.protocol, connection.transport
            assert protocol is not None and transport is not None
            protocol.set_response_params(
                read_until_eof=True,
                read_bufsize=_READ_AHEAD,
                max_line_size=_MAX_FIELD,
                max_field_size=_MAX_FIELD,
            )
            headers.setdefault("Host", place.headers["Host"])
            headers["Accept-Encoding"], headers["Content-Length"] = "identity", str(len(data))
            if proof := place.headers.get("Proxy-Authorization"):
                headers["Proxy-Authorization"] = proof
            transport.write(render(first, headers.items()) + data)
            message, body = await self.patiently(protocol, protocol.read())
            while message.code < 200:
                message, body = await self.patiently(protocol, protocol.read())
        except (ClientError, HttpProcessingError, OSError, ValueError) as error:
            _abort(connection)
            raise NoAnswer(error, reused=reused) from None
        except BaseException:
            _abort(connection)
            raise
        return Answer(self, server, connection, message, body)

    async def patiently(self, source: ResponseHandler | StreamReader, reading: Awaitable[T]) -> T:
        """What `source` gives; `TimeoutError` when it is silent for too long."""
        self._waiting[source] = time.monotonic()
        try:
            return await reading
        finally:
            del self._waiting[source]

    def keep(self, server: Hashable, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end for the next request, if its server does, and has taken
        the whole request: the rest would hold up the next one."""
        protocol, transport = connection.protocol, connection.transport
        if self._connector is None or protocol is None or transport is None or protocol.should_close:
            connection.close()
        elif transport.get_write_buffer_size():
            _abort(connection)
        else:
            self._idle.setdefault(server, []).append((connection, time.monotonic()))

    def _kept(self, server: Hashable) -> Connection | None:
        kept = self._idle.get(server)
        while kept:
            connection, since = kept.pop()
            protocol = connection.protocol
            alive = protocol is not None and protocol.is_connected() and not protocol.should_close
            if alive and time.monotonic() - since <= KEPT:
                return connection
            connection.close()
        return None

    def limiter(self, provider: Provider) -> Limiter:
        place = (provider.url, provider.key)
        if place not in self._limiters:
            self._limiters[place] = Limiter(provider.requests_per_minute, provider.concurrency)
        return self._limiters[place]

    async def ask(self, out: Outgoing, record: CallRecord) -> Answer:
        """The beginning of a good answer (status below 400), as a context manager: leaving early ends the upstream's
        generation."""
        limiter, session = self.limiter(out.provider), record.recorder
        began, attempt, stale = time.monotonic(), 0, False
        while True:
            attempt += not stale
            if limiter.closed_for(session) > 0:
                record.held("rate_limit")
            await limiter.acquire(session)
            try:
                found = await self._try(out, record, attempt, began)
            except BaseException:
                limiter.release()
                raise
            if isinstance(found, Answer):
                found.limiter = limiter
                return found
            failed, wait = found
            stale = failed.stale
            if failed.asked:
                limiter.close_for(session, wait)
            limiter.release()
            if not failed.asked:
                await pause(wait)

    async def _try(
        self, out: Outgoing, record: CallRecord, attempt: int, began: float
    ) -> Answer | tuple[UpstreamFailed, float]:
        """An answer; or a fault that may pass, and how long to wait until the next attempt."""
        try:
            return await self._attempt(out, record)
        except UpstreamFailed as failed:
            wait = 0.0 if failed.stale else None
            if failed.passing and not failed.stale:
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
        """Ask once more, without the agent's headers, query and optional fields: only what is refused then too is the
        provider's fault. With a login some may be needed, so that only an answer counts."""
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
                answer = await self.send(address, headers, out.data)
        except NoAnswer as error:
            words, status = f"{provider.name} cannot be reached: {error}", 502
            if error.timed_out:
                words, status = f"{provider.name} did not answer in time", 504
            raise UpstreamFailed(
                status,
                words,
                kind_of_status(status),
                passing=error.passing,
                stale=error.stale,
                source="front" if error.hung_up else None,
            ) from None
        except LoginRefused as error:
            # 400: some agents take a 401 for a fault that passes, and ask again for minutes
            status = 503 if error.passing else 400
            raise UpstreamFailed(status, str(error), "authentication", passing=error.passing) from None
        if answer.status >= 300:
            raise await _refused(answer, out, record)
        try:
            await _look_ahead(answer, out, record)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _send_with_login(self, out: Outgoing, facts: Mapping[str, Any], record: CallRecord) -> Answer:
        """Send with the user's login. A token that is refused is refreshed once."""
        login, refused = out.provider.login, None
        assert login is not None
        facts = {**facts, "url": login.base, "login": login.title}
        while True:
            try:
                sent = await login.request(self.send, out.target, out.headers, out.data, out.model, refused)
                facts["url"] = redacted_path(sent[0])
            finally:
                record.attempt(facts, out.body)
            answer = await self.send(*sent)
            if answer.status != 401:
                if answer.status < 300:
                    answer.unwrapper = login.unwrapper(stream=_is_stream(answer))
                return answer
            said = await login.refusal(answer)
            if refused is not None:
                raise LoginRefused(f"{said}; run: {login.command}")
            refused = login.tokens.access
            record.failed(said, 0.0, None)


class NoAnswer(Exception):
    """A request got no answer. `passing`: the provider did nothing with it, so it may be sent again; `stale`: it had
    given up the kept connection already."""

    def __init__(self, error: Exception, *, reused: bool) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.timed_out = isinstance(error, TimeoutError)
        lasting = (HttpProcessingError, ClientConnectorCertificateError, ValueError, TimeoutError)
        self.passing = isinstance(error, ConnectionTimeoutError) or not isinstance(error, lasting)
        self.hung_up = isinstance(error, ServerDisconnectedError) and isinstance(error.message, str)
        """The connection was closed without an answer."""
        self.stale = reused and (self.hung_up or isinstance(error, ClientOSError))


class Answer:
    """An answer that has begun. A reader who stops reading stops the provider."""

    def __init__(
        self,
        upstreams: Upstreams,
        server: Hashable,
        connection: Connection,
        message: RawResponseMessage,
        body: StreamReader,
    ) -> None:
        self._upstreams = upstreams
        self._server = server
        self._connection = connection
        self._body = body
        self._ahead = b""
        self.limiter: Limiter | None = None
        """What counts it among the requests that may run at the same time."""
        self.unwrapper: Unwrapper | None = None
        """Takes answers out of what some providers wrap them in."""
        self.status = message.code
        self.headers = message.headers
        self.content_type = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.limiter:
            self.limiter.release()

    @property
    def ended(self) -> bool:
        """Whether all of the body is here and was read."""
        held = self.unwrapper is not None and self.unwrapper.held
        return self._body.at_eof() and not self._ahead and not held

    def unread(self, data: bytes) -> None:
        """Let the next `read` give this."""
        self._ahead = data

    async def read(self) -> bytes:
        """More of the body, as soon as there is some; nothing at its end. `ConnectionError` or `TimeoutError` if the
        rest does not come."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        try:
            while True:
                data = await self._upstreams.patiently(self._body, self._body.readany())
                if self.unwrapper is None:
                    return data
                found = self.unwrapper.feed(data) if data else self.unwrapper.rest()
                if found or not data:
                    return found
        except ClientError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        """Done with it. The connection serves again if the answer was read to its end."""
        if self.ended:
            self._upstreams.keep(self._server, self._connection)
        else:
            _abort(self._connection)


def _abort(connection: Connection | None) -> None:
    """Close without sending the rest of a request."""
    if connection is not None and connection.protocol is not None:  # it is false while it has nothing to read
        connection.protocol.abort()
        connection.close()


async def _refused(answer: Answer, out: Outgoing, record: CallRecord) -> UpstreamFailed:
    """What an error answer means."""
    read = bytearray()
    try:
        while len(read) < MAX_ANSWER and (part := await answer.read()):
            read += part
    except OSError:
        read.clear()
    finally:
        answer.close()
    raw = bytes(read)
    return _failure(answer, raw, _decoded(raw), out, record)


def _failure(answer: Answer, raw: bytes, error: object, out: Outgoing, record: CallRecord) -> UpstreamFailed:
    scrub = Scrubber(*out.provider.secrets)
    raw = scrub(raw)
    record.status("upstream", answer.status, answer.headers, answer.status < 300 and _is_stream(answer))
    record.chunk("upstream", raw)
    status = answer.status if answer.status >= 400 or answer.status < 300 else 502
    failure = classify(status, error, answer.headers, out.data)
    words = scrub(json.dumps(error).encode()) if answer.status < 300 else raw
    message, kind = DIALECTS[out.dialect].parse_error(failure.status, _decoded(words))
    own = raw if isinstance(_decoded(raw), dict) and failure.status == answer.status else None
    said = message or f"{out.provider.name} answered {answer.status}"
    source = "api" if error_in(error) is not None else "front"
    return UpstreamFailed(failure.status, said, kind, own, failure.fault, failure.passing, failure.asked, source=source)


async def _look_ahead(answer: Answer, out: Outgoing, record: CallRecord) -> None:
    """Read until it is certain that a good status does not hide an error; the reader gets all of it again."""
    if _is_stream(answer):
        raw, error = await _read_prelude(answer, out.dialect)
    else:
        raw, error = await _read_error(answer, out.dialect)
    if error is not None:
        raise _failure(answer, raw, {"error": error}, out, record)
    answer.unread(raw)


async def _read_error(answer: Answer, dialect: DialectName) -> tuple[bytes, Mapping[str, Any] | None]:
    """The first bytes of an answer that is not streamed, and the error that it is. All of it is read only if it begins
    like an error."""
    raw = b""
    with contextlib.suppress(OSError):  # the next read fails in the same way
        raw = await answer.read()
        while b'"error"' in raw[:_BEGINNING] and len(raw) <= _MAX_ERROR and (part := await answer.read()):
            raw += part
        if b'"error"' in raw[:_BEGINNING] and len(raw) <= _MAX_ERROR:
            value = _decoded(raw)
            whole = value if isinstance(value, Mapping) and value.get("status") != "failed" else None
            if whole is None or DIALECTS[dialect].missing_in(whole) is not None:
                return raw, error_in(value)
    return raw, None


async def _read_prelude(answer: Answer, dialect: DialectName) -> tuple[bytes, Mapping[str, Any] | None]:
    """The first bytes of a stream, up to its first content, and the error that came instead of content."""
    raw, framer = b"", Framer()
    with contextlib.suppress(OSError, MalformedAnswer):  # the next read fails in the same way
        while len(raw) <= _MAX_ERROR and (part := await answer.read()):
            raw += part
            for event in events_of(framer.feed(part)):
                if (data := data_of(event)) is None:
                    continue
                value = _decoded(data)
                kind = DIALECTS[dialect].first_event(value) if isinstance(value, Mapping) else "content"
                if kind != "prelude":
                    return raw, error_in(value) if kind == "error" else None
    return raw, None


def _is_stream(answer: Answer) -> bool:
    return answer.content_type.startswith("text/event-stream")


async def read_answer(answer: Answer) -> bytes:
    """All of an answer that is not streamed."""
    whole = bytearray()
    try:
        while not answer.ended and (part := await answer.read()):
            whole += part
            if len(whole) > MAX_ANSWER:
                raise UpstreamFailed(502, f"the provider's answer is larger than {MAX_ANSWER} bytes", "server")
    except TimeoutError:
        raise UpstreamFailed(504, "the provider fell silent in the middle of its answer", "timeout") from None
    except OSError as error:
        raise UpstreamFailed(502, f"the provider's answer was cut off: {error}", "server") from None
    return bytes(whole)


def _decoded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
