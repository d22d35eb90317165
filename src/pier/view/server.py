"""Serves the pages over HTTP, for people on this machine.

Requests must have the server's exact `Host`, so that no web page reaches the server under another name (DNS rebinding);
requests that change something also need the server's `Origin`. A server that listens beyond the loopback requires a
token, from the URL that it prints at first and from a cookie afterwards. Pages load nothing from other origins and run
no inline script. The server writes notes and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import mimetypes
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from aiohttp import web

from pier.errors import PierError, UsageError
from pier.tree import Tree, TreeError
from pier.view.files import PICTURES
from pier.view.index import Index
from pier.view.library import Library, NotFoundError
from pier.view.live import IndexWatcher, follow
from pier.view.notes import add_note, remove_note
from pier.view.pages import Page, Pages
from pier.view.render import STATIC, Links, render

PORTS = range(8080, 8180)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")
_COOKIE = "pier-view"
_POLICY = (
    "default-src 'none'; script-src 'self'{more}; style-src 'self'; img-src 'self' data:; connect-src 'self'{data}; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
POLICY = _POLICY.format(more="", data="")
PLAYER_POLICY = _POLICY.format(more=" 'wasm-unsafe-eval'", data=" data:")
"""The terminal player's script contains WebAssembly."""
_FILE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
_TEXT_TYPES = frozenset(
    (".txt", ".log", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".diff", ".patch", ".cast")
)
_CHUNK = 1 << 20

Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class Viewer:
    """A running viewer. `token` is None on the loopback."""

    pages: Pages
    watcher: IndexWatcher
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    links: Links = field(default_factory=Links)

    @property
    def origin(self) -> str:
        name = socket.gethostname() if self.host in EVERYWHERE else self.host
        host = f"[{name}]" if ":" in name else name
        return f"http://{host}:{self.port}"

    @property
    def address(self) -> str:
        """The URL to open in a browser, with the token."""
        start = self.pages.library.start
        return f"{self.origin}{start}" + (f"?token={self.token}" if self.token else "")

    def app(self) -> web.Application:
        made = web.Application(middlewares=[self._guard], client_max_size=1 << 20)
        made.router.add_get("/static/{name}", self._static)
        made.router.add_get("/files/{job}/{trial}/{path:.+}", self._file)
        made.router.add_get("/live", self._live)
        made.router.add_post("/jobs/{job}/{trial}/notes", self._add_note)
        made.router.add_delete("/jobs/{job}/{trial}/notes/{id}", self._remove_note)
        made.router.add_get("/{path:.*}", self._page)
        return made

    @web.middleware
    async def _guard(self, request: web.Request, handler: Respond) -> web.StreamResponse:
        """Refuse requests from other origins, and set the security headers on every response."""
        try:
            self._check(request)
            response = await handler(request)
        except web.HTTPException as error:
            _protect(error)
            raise
        except PierError as error:
            response = self._error(request, error)
        if not response.prepared:
            _protect(response)
        return response

    def _check(self, request: web.Request) -> None:
        hosts = self._hosts(urlsplit(f"//{request.headers.get('Host', '')}").hostname or "")
        if request.headers.get("Host", "").lower() not in hosts:
            raise web.HTTPForbidden(text=f"wrong Host: open {self.origin}\n")
        origin = request.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            raise web.HTTPForbidden(text="wrong Origin\n")
        if request.method not in ("GET", "HEAD") and origin is None:
            raise web.HTTPForbidden(text=f"missing Origin: {request.method} requests need one\n")
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise web.HTTPForbidden(text="cross-site request refused\n")
        if self.token is None:
            return
        given = request.query.get("token", "")
        if given and hmac.compare_digest(given.encode(), self.token.encode()):
            redirect = web.HTTPFound(request.rel_url.without_query_params("token"))
            redirect.set_cookie(_COOKIE, self.token, httponly=True, samesite="Strict", path="/")
            raise redirect
        if not hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), self.token.encode()):
            raise web.HTTPUnauthorized(text="missing token: open the URL that `pier view` printed\n")

    def _hosts(self, asked: str) -> set[str]:
        """The accepted values of `Host`. A server that listens on all interfaces also accepts any IP address, `asked`:
        an attacker who rebinds DNS has a name there, never an address."""
        names = {*LOOPBACK} if self.host in LOOPBACK else {self.host}
        if self.host in EVERYWHERE:
            names |= {*LOOPBACK, socket.gethostname().lower()} | ({asked} if _is_address(asked) else set())
        return {f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}" for name in names}

    def _error(self, request: web.Request, error: PierError) -> web.Response:
        status = 404 if isinstance(error, NotFoundError) else 400
        title = "Not found" if status == 404 else "Error"
        if _wants_json(request) or request.method != "GET":
            return web.json_response({"error": str(error), "code": error.code}, status=status)
        page = Page("error.html", title, {"message": str(error)})
        return web.Response(text=render(page, self.links), status=status, content_type="text/html")

    async def _page(self, request: web.Request) -> web.Response:
        await self.watcher.ready()
        query = {key: value for key, value in request.query.items() if value}
        several = {key: [value for value in request.query.getall(key) if value] for key in request.query}

        def make() -> tuple[Page, str]:
            page = self.pages.get(request.rel_url.raw_path, query, several)
            if _wants_json(request):
                return page, ""
            return page, render(page, self.links, indexing=self.watcher.indexing)

        page, html = await asyncio.to_thread(make)
        if not html:
            return web.json_response(page.data)
        headers = {"Content-Security-Policy": PLAYER_POLICY} if page.tab == "terminal" else {}
        return web.Response(text=html, content_type="text/html", headers=headers)

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            with Tree(STATIC) as tree:
                data = tree.read(name, 4 << 20)
        except (OSError, TreeError):
            raise web.HTTPNotFound(text="not found\n") from None
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return web.Response(body=data, content_type=kind, headers={"Cache-Control": "no-cache"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """A file of a trial: text and pictures are shown, other types are downloaded."""
        job, trial, path = (request.match_info[name] for name in ("job", "trial", "path"))
        view = self.pages.library.trial(job, trial, known=True)
        suffix = PurePosixPath(path).suffix.lower()
        kind = PICTURES.get(suffix) or ("text/plain" if suffix in _TEXT_TYPES else "application/octet-stream")
        headers = {**_HEADERS, "Content-Security-Policy": _FILE_POLICY}
        if kind == "application/octet-stream":
            headers["Content-Disposition"] = "attachment"
        try:
            with Tree(view.directory.resolve()) as tree, tree.open(path) as stream:
                size = stream.seek(0, 2)
                stream.seek(0)
                response = web.StreamResponse(headers=headers)
                response.content_type = kind
                if kind == "text/plain":
                    response.charset = "utf-8"
                response.content_length = size
                await response.prepare(request)
                while chunk := await asyncio.to_thread(stream.read, min(_CHUNK, size)):
                    await response.write(chunk)
                    size -= len(chunk)
        except (OSError, TreeError) as error:
            raise NotFoundError(f"{trial} has no file {path}") from error
        return response

    async def _live(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        job, trial = request.query.get("job"), request.query.get("trial")
        with contextlib.suppress(ConnectionResetError):  # the page was closed
            async for event in follow(self.watcher, self.pages, job, trial):
                await response.write(event.encode())
        return response

    async def _add_note(self, request: web.Request) -> web.Response:
        directory = self._trial_directory(request)
        value = await request.json()
        if not isinstance(value, dict):
            raise UsageError("invalid note: expected a JSON object")
        note = await asyncio.to_thread(add_note, directory, value)
        return web.json_response({"id": note.id}, status=201)

    async def _remove_note(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(remove_note, self._trial_directory(request), request.match_info["id"])
        return web.json_response({})

    def _trial_directory(self, request: web.Request) -> Path:
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="expected JSON\n")
        job, trial = request.match_info["job"], request.match_info["trial"]
        return self.pages.library.trial(job, trial, known=True).directory


def _protect(response: web.StreamResponse) -> None:
    for name, value in {**_HEADERS, "Content-Security-Policy": POLICY}.items():
        response.headers.setdefault(name, value)


def _wants_json(request: web.Request) -> bool:
    return "application/json" in request.headers.get("Accept", "")


def _listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on `port`, or on the first free port of `PORTS`."""
    family, reason = socket.AF_INET6 if ":" in host else socket.AF_INET, ""
    for number in (port,) if port is not None else (*PORTS, 0):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, number))
            sock.listen(128)
            return sock
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
    place = host if port is None else f"{host}:{port}"
    raise UsageError(f"cannot listen on {place}: {reason}", hint="pier view --port 0")


@asynccontextmanager
async def serve(library: Library, host: str = "127.0.0.1", port: int | None = None) -> AsyncIterator[Viewer]:
    """Serve a library for the duration of the context."""
    sock = _listen(host, port)
    number = sock.getsockname()[1]
    token = None if host in LOOPBACK else secrets.token_urlsafe(24)
    index = await asyncio.to_thread(Index.open, library)
    viewer = Viewer(Pages(library, index), IndexWatcher(index), host, number, token)
    runner = web.AppRunner(viewer.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        async with viewer.watcher.running():
            await web.SockSite(runner, sock).start()
            yield viewer
    finally:
        await runner.cleanup()
        await asyncio.to_thread(index.close)
