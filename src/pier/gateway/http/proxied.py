"""The same as `client`, by way of a proxy that the environment names: rare, so aiohttp does it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from urllib.request import getproxies_environment, proxy_bypass

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from multidict import CIMultiDict
from yarl import URL

from pier.gateway.http.client import Disconnected
from pier.gateway.http.place import place_of


def is_proxied(address: str) -> bool:
    """Whether the environment names a proxy for this address."""
    proxies = getproxies_environment()
    if not proxies:
        return False
    place = place_of(address)
    scheme = "https" if place.secure else "http"
    return scheme in proxies and not proxy_bypass(place.host)


class ProxiedClient:
    """Connections through the environment's proxies."""

    def __init__(self, silence: float) -> None:
        self._http = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=60),
            timeout=ClientTimeout(total=None, sock_connect=30, sock_read=silence),
            read_bufsize=2**18,
            trust_env=True,
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
        )

    async def send(
        self, address: str, headers: Iterable[tuple[str, str]], data: bytes, *, fresh: bool = False
    ) -> ProxiedSent:
        """As `Client.send`; `fresh` has no meaning here, since the connection is the proxy's choice."""
        sending = self._http.post(
            URL(address, encoded=True), data=data, headers=CIMultiDict(headers), allow_redirects=False
        )
        return ProxiedSent(asyncio.ensure_future(sending))

    async def close(self) -> None:
        await self._http.close()


class ProxiedSent:
    stale = False

    def __init__(self, sending: asyncio.Future[ClientResponse]) -> None:
        self._sending = sending

    async def answer(self) -> ProxiedAnswer:
        try:
            return ProxiedAnswer(await self._sending)
        except TimeoutError:
            raise
        except ClientError as error:
            raise Disconnected(str(error) or type(error).__name__) from None
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        self._sending.cancel()
        self._sending.add_done_callback(_hang_up)


class ProxiedAnswer:
    ended = False
    """Never known before a read says so."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers
        self.content_type = response.content_type
        self._ahead = b""

    def unread(self, data: bytes) -> None:
        """As `Answer.unread`."""
        self._ahead = data

    async def read(self) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        try:
            return await self._response.content.readany()
        except TimeoutError:
            raise
        except ClientError as error:
            raise Disconnected(str(error) or type(error).__name__) from None

    def close(self) -> None:
        self._response.release() if self._response.content.at_eof() else self._response.close()


def _hang_up(done: asyncio.Future[ClientResponse]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().close()
