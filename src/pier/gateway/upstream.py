"""Sends a request to a provider and comes back with an answer that has begun, or with why there is none.

Passing faults (429, 5xx, 529, a connection that breaks before the first byte of an answer) are met here with further
attempts, so that agents never see them. An answer that has begun is never asked for twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp import ServerTimeoutError as AioTimeout
from multidict import CIMultiDict
from yarl import URL

from pier.gateway.body import Body
from pier.gateway.canonical import DialectName, ErrorKind
from pier.gateway.dialect import DIALECTS
from pier.gateway.limiter import RETRY_STATUSES, Limiter, Retry, retry_after
from pier.gateway.providers import Provider
from pier.gateway.recorder import CallRecord
from pier.gateway.redact import Scrubber, redacted_path

MAX_ANSWER = 64 * 1024 * 1024
_RECORD_FIRST = 32 * 1024
"""Bodies below this size are recorded before they are sent: that is quicker than doing two things at once."""


class UpstreamFailed(Exception):
    """There is no answer. `body` is the provider's own error in its dialect, when it sent one."""

    def __init__(self, status: int, message: str, kind: ErrorKind, body: bytes | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind: ErrorKind = kind
        self.body = body


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
    """After so many seconds without a byte an upstream is given up."""
    _http: ClientSession | None = None
    _limiters: dict[tuple[str, str | None], Limiter] = field(default_factory=dict)

    def open(self) -> None:
        timeout = ClientTimeout(total=None, sock_connect=30, sock_read=self.silence)
        connector = TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=300)
        proxied = any(name.lower().endswith("_proxy") for name in os.environ)
        self._http = ClientSession(
            connector=connector,
            timeout=timeout,
            read_bufsize=2**18,
            trust_env=proxied,
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
        )

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    def limiter(self, provider: Provider) -> Limiter:
        place = (provider.url, provider.key)
        if place not in self._limiters:
            self._limiters[place] = Limiter(provider.requests_per_minute, provider.concurrency)
        return self._limiters[place]

    @asynccontextmanager
    async def ask(self, out: Outgoing, record: CallRecord) -> AsyncIterator[ClientResponse]:
        """The beginning of a good answer (status below 400). Leaving early ends the upstream's generation."""
        limiter = self.limiter(out.provider)
        async with limiter.slot():
            response = await self._attempts(out, record, limiter)
            try:
                yield response
            finally:
                response.close() if not response.content.at_eof() else response.release()

    async def _attempts(self, out: Outgoing, record: CallRecord, limiter: Limiter) -> ClientResponse:
        began, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            await limiter.pass_gate()
            try:
                return await self._attempt(out, record)
            except _Fault as fault:
                wait = None
                if fault.passing:
                    wait = self.retry.pause(attempt, time.monotonic() - began, fault.asked)
                record.failed(fault.failed.message, wait)
                if wait is None:
                    raise fault.failed from None
                if fault.asked:
                    limiter.close_for(wait)
                else:
                    await asyncio.sleep(wait)

    async def _attempt(self, out: Outgoing, record: CallRecord) -> ClientResponse:
        assert self._http is not None, "the gateway is not open"
        provider = out.provider
        address = provider.address(out.path)
        facts = {"provider": provider.name, "dialect": out.dialect, "url": redacted_path(address), "model": out.model}
        headers = CIMultiDict(out.headers)
        headers.update(provider.credentials(out.dialect))
        headers["Accept-Encoding"] = "identity"
        if small := len(out.data) < _RECORD_FIRST:
            record.attempt(facts, out.body)
        sending = self._http.post(_url(address), data=out.data, headers=headers, allow_redirects=False)
        if not small:
            sending = await _record_meanwhile(asyncio.ensure_future(sending), record, facts, out.body)
        try:
            response = await sending
        except (ClientError, OSError, TimeoutError, ValueError) as error:
            raise _Fault(_unreachable(error, provider), passing=_is_passing(error)) from None
        if response.status >= 300:
            await _refused(response, out, record)
        return response


@dataclass
class _Fault(Exception):
    failed: UpstreamFailed
    passing: bool
    asked: float | None = None


async def _refused(response: ClientResponse, out: Outgoing, record: CallRecord) -> NoReturn:
    """Read an error answer and raise it."""
    try:
        raw = await response.content.read(MAX_ANSWER)
    except (ClientError, OSError, TimeoutError):
        raw = b""
    finally:
        response.close()
    raw = Scrubber(out.provider.key)(raw)
    record.status("upstream", response.status, response.headers, False)
    record.chunk("upstream", raw)
    status = response.status if response.status >= 400 else 502
    message, kind = DIALECTS[out.dialect].parse_error(status, _decoded(raw))
    passing = status in RETRY_STATUSES and b"insufficient_quota" not in raw
    own = raw if _is_object(raw) and status == response.status else None
    failed = UpstreamFailed(status, message or f"{out.provider.name} answered {response.status}", kind, own)
    raise _Fault(failed, passing, retry_after(response.headers))


@lru_cache(512)
def _url(address: str) -> URL:
    return URL(address, encoded=True)


async def _record_meanwhile(
    sending: asyncio.Future[ClientResponse], record: CallRecord, facts: Mapping[str, Any], body: Body | None
) -> asyncio.Future[ClientResponse]:
    """A big body takes a while to take apart, so that is done once it is on its way."""

    def hang_up(done: asyncio.Future[ClientResponse]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    try:
        await asyncio.sleep(0)
        record.attempt(facts, body)
    except BaseException:
        sending.cancel()
        sending.add_done_callback(hang_up)
        raise
    return sending


def _decoded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _is_object(raw: bytes) -> bool:
    return isinstance(_decoded(raw), dict)


def _unreachable(error: Exception, provider: Provider) -> UpstreamFailed:
    if isinstance(error, TimeoutError | AioTimeout):
        return UpstreamFailed(504, f"{provider.name} did not answer in time", "timeout")
    words = str(error) or type(error).__name__
    return UpstreamFailed(502, f"{provider.name} cannot be reached: {words}", "server")


def _is_passing(error: Exception) -> bool:
    """A provider that was silent for very long is not asked again: it may well be generating."""
    if isinstance(error, ClientConnectorError):
        return True
    return isinstance(error, ClientError | OSError) and not isinstance(error, TimeoutError | ValueError)
