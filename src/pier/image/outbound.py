"""HTTP requests that this machine makes on a task's behalf, such as the downloads of `ADD URL`.

Every host is checked before it is dialled, also those that a redirect or an authentication challenge names, and the
addresses that were checked are the ones that are dialled. Proxies of the user's environment are used; what a proxy is
asked for is checked too, as far as this machine can resolve it. Credentials of a `.netrc` are never sent.
"""

from __future__ import annotations

import email.utils
import hashlib
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from pier.errors import ImageError
from pier.network.outside import NoSuchName, Outside, Refused, Targets, Unreachable
from pier.network.policy import Address, NetworkPolicy

Check = Callable[[str, int], Awaitable[list[Address]]]
"""The addresses at which a host may be dialled on a port; raises `Refused` or `Unreachable`."""


class HostRefused(Exception):
    """A request to a host that may not be reached. Nothing was sent to it."""


class _Guard(AbstractResolver):
    """Checks each request, and gives the connector the checked addresses."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._checked: dict[tuple[str, int], list[Address]] = {}

    async def admit(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        host, port = request.url.raw_host or "", request.url.port or 0
        proxy = _proxy_for(request.url)
        try:
            self._checked[host, port] = await self._check(host, port)
        except (NoSuchName, Unreachable) as error:
            if proxy is None:
                raise aiohttp.ClientConnectionError(f"{host}: {error}") from error
        except Refused as error:
            raise HostRefused(f"{host}:{port}: {error}") from error
        if proxy is not None:
            auth = aiohttp.BasicAuth(proxy.user, proxy.password or "") if proxy.user else None
            request.update_proxy(proxy.with_user(None), auth, None)
        return await handler(request)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = self._checked.get((host, port))
        if addresses is None:
            return await aiohttp.ThreadedResolver().resolve(host, port, family)  # a proxy that the user named
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        self._checked.clear()


def _proxy_for(url: URL) -> URL | None:
    found = urllib.request.getproxies().get(url.scheme)
    host = url.raw_host or ""
    return URL(found) if found and not urllib.request.proxy_bypass(f"{host}:{url.port}") else None


@asynccontextmanager
async def open_session(check: Check, *, connect_seconds: float) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose requests all pass `check`; one that does not raises `HostRefused`."""
    guard = _Guard(check)
    connector = aiohttp.TCPConnector(resolver=guard, use_dns_cache=False)
    timeout = aiohttp.ClientTimeout(total=None, connect=connect_seconds, sock_read=120)
    headers = {"User-Agent": "pier"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, middlewares=[guard.admit]
    ) as session:
        yield session


async def download_for_add(url: str, directory: Path, network: NetworkPolicy, checksum: str = "") -> tuple[Path, str]:
    """Fetch `url` into `directory`, as ADD keeps it: mode 600, the time that the server tells. The file and its
    digest. The URL and its redirects reach what RUN would reach under `network`."""
    import aiohttp

    name = Path(unquote(urlsplit(url).path)).name
    name = name if name.strip(".") else "__unnamed__"
    path = directory / name
    digest = hashlib.sha256()
    try:
        check = Targets(network, Outside()).of_host
        async with open_session(check, connect_seconds=60) as session, session.get(url) as answer:
            if answer.status != 200:
                raise ImageError(f"{url} answered {answer.status}", code="download", retryable=answer.status >= 500)
            with path.open("wb") as sink:
                async for chunk in answer.content.iter_chunked(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
            modified = answer.headers.get("Last-Modified", "")
    except HostRefused as error:
        raise ImageError(
            f"cannot fetch {url}: the build's network policy ({network.mode}) refuses {error}",
            code="refused",
            blame="task",
            hint="allow the host in metadata.pier.build_network of task.toml, or COPY the file from the build context",
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ImageError(f"{url} cannot be fetched: {error}", code="download", retryable=True) from error
    found = f"sha256:{digest.hexdigest()}"
    if checksum and checksum != found:
        raise ImageError(f"{url} has the digest {found}, not {checksum}", code="digest", blame="task")
    path.chmod(0o600)
    parsed = email.utils.parsedate_to_datetime(modified).timestamp() if modified else 0.0
    os.utime(path, (parsed, parsed))
    return path, found
