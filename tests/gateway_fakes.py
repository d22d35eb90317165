"""A model provider on loopback that says what a test wants it to say, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from pier.gateway.providers import Provider
from pier.wire.dialects import DIALECTS, recognise
from pier.wire.turn import Request, Text, ToolCall, Turn, Usage, stream_turn

Behaviour = Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]

HELLO = Turn((Text("Hello there, friend."),), "end", Usage(11, 7), id="turn_1", model="served")
TOOL = Turn((ToolCall("call_1", "add", '{"a": 1,  "b": 2}'),), "tool_use", Usage(20, 9), id="turn_2", model="served")


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeProvider:
    """Answers with `then`, in order, and with `always` after that."""

    always: Behaviour
    url: str = ""
    then: list[Behaviour] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def provider(self, *dialects: str, **facts: Any) -> Provider:
        return Provider("fake", self.url, dialects or ("chat",), **{"key": "sk-provider-secret", **facts})  # type: ignore

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = [part async for part in request.content.iter_any()]
        raw = b"".join(parts)
        self.asked.append(Asked(request.path_qs, dict(request.headers), raw))
        behaviour = self.then.pop(0) if self.then else self.always
        try:
            return await behaviour(request, raw)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def fake_provider(always: Behaviour | None = None) -> AsyncIterator[FakeProvider]:
    fake = FakeProvider(always or says(HELLO))
    server = web.Server(fake.serve, access_log=None, handler_cancellation=True)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        listening.close()
        await server.shutdown(1)


def says(turn: Turn) -> Behaviour:
    """The turn, in the dialect of the request, streamed if that is asked."""
    return thinks(lambda request: turn)


def thinks(think: Callable[[Request], Turn]) -> Behaviour:
    """What `think` makes of the request, in its dialect, streamed if that is asked."""

    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        route = recognise(request.method, request.path, request.query_string, frozenset(headers))
        dialect, body = DIALECTS[route.dialect], json.loads(raw)
        if route.kind == "count_tokens":
            return web.json_response(dialect.count_tokens_body(4321))
        asked = dialect.parse_request(body, route)
        turn = think(asked)
        if not (asked.stream or route.stream):
            return web.json_response(dialect.render_response(turn, asked))
        renderer = dialect.stream_renderer(asked, route)
        return await streams(*(renderer.render(delta) for delta in stream_turn(turn, 5)))(request, raw)

    return behave


def replies(status: int, body: bytes, headers: dict[str, str] | None = None) -> Behaviour:
    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})})

    return behave


def streams(
    *chunks: bytes, cut: bool = False, wait: asyncio.Event | None = None, kind: str = "text/event-stream"
) -> Behaviour:
    """These chunks; then, with `wait`, nothing until it is set; with `cut` the connection breaks instead of ending."""

    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for chunk in chunks:
            if chunk:
                await response.write(chunk)
                await asyncio.sleep(0)
        if wait:
            await wait.wait()
        if cut:
            assert request.transport
            request.transport.abort()
            return response
        await response.write_eof()
        return response

    return behave


async def post(url: str, path: str, key: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """A plain request; status, headers and body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as http:
        sent = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
        async with http.post(url + path, data=data, headers=sent) as response:
            return response.status, dict(response.headers), await response.read()


PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/gemini-x:generateContent",
}
STREAM_PATHS = {**PATHS, "gemini": "/v1beta/models/gemini-x:streamGenerateContent?alt=sse"}


def request_body(dialect: str, text: str = "hi", *, stream: bool = False) -> dict[str, Any]:
    """The smallest request of a dialect."""
    if dialect == "gemini":
        return {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    body: dict[str, Any] = {"model": "named-by-agent", "stream": stream}
    if dialect == "responses":
        return {**body, "input": [{"role": "user", "content": text}]}
    if dialect == "anthropic":
        body["max_tokens"] = 100
    elif stream:
        body["stream_options"] = {"include_usage": True}
    return {**body, "messages": [{"role": "user", "content": text}]}
