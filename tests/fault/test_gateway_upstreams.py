"""Providers that misbehave: each ends in a clean failure of the agent's own dialect, recorded, with no double call."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from pier.gateway import Gateway
from pier.gateway.budget import Retry
from pier.gateway.call import Exchange
from pier.record import reader
from pier.record.reader import Call
from pier.wire.dialects import DIALECTS
from pier.wire.turn import TurnBuilder, stream_turn
from tests.gateway_fakes import (
    HELLO,
    PATHS,
    STREAM_PATHS,
    Behaviour,
    FakeProvider,
    fake_provider,
    post,
    replies,
    request_body,
    says,
    streams,
)

NAMES = ["chat", "responses", "anthropic", "gemini"]
QUICK = Retry(first=0.01, longest=0.02)
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


def events(dialect: str) -> list[bytes]:
    """A good answer, event by event."""
    route = DIALECTS[dialect].match("POST", STREAM_PATHS[dialect].partition("?")[0], {"alt": "sse"})
    request = DIALECTS[dialect].parse_request(request_body(dialect, stream=True), route)
    renderer = DIALECTS[dialect].stream_renderer(request, route)
    rendered = b"".join(renderer.render(delta) for delta in stream_turn(HELLO, 5))
    return [event + b"\n\n" for event in rendered.split(b"\n\n") if event]


class Case:
    """One agent in front of one provider."""

    def __init__(
        self, gateway: Gateway, url: str, fake: FakeProvider, folder: Path, client: str, upstream: str
    ) -> None:
        self.gateway, self.url, self.fake, self.folder, self.client = gateway, url, fake, folder, client
        self.session = gateway.session("m", upstream=fake.provider(upstream), recording=folder / "calls.jsonl")

    async def ask(self, stream: bool) -> tuple[int, dict[str, str], bytes]:
        path = (STREAM_PATHS if stream else PATHS)[self.client]
        return await post(self.url, path, self.session.key, request_body(self.client, stream=stream))

    def call(self) -> Call:
        return reader.read(self.folder).generations()[-1]

    def check_failure(self, stream: bool, answer: tuple[int, dict[str, str], bytes], words: str) -> None:
        """A status with an error body, or a stream that ends in an error event."""
        status, headers, raw = answer
        if status == 200:
            assert stream
            parser = DIALECTS[self.client].stream_parser()
            built = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
            assert built.error, raw
            assert words in built.error.message
        else:
            assert headers["Content-Type"].startswith("application/json")
            assert words in DIALECTS[self.client].parse_error(status, json.loads(raw))[0]
        assert self.call().outcome == "error"
        assert words in (self.call().error or "")


async def run(
    tmp_path: Path, client: str, upstream: str, stream: bool, behaviour: Behaviour, words: str, **options: Any
) -> tuple[Case, tuple[int, dict[str, str], bytes]]:
    async with fake_provider(behaviour) as fake, Gateway(retry=QUICK, **options) as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, upstream)
        answer = await case.ask(stream)
        case.check_failure(stream, answer, words)
        return case, answer


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("same", [True, False])
async def test_a_stream_cut_in_the_middle_of_an_event(client: str, same: bool, tmp_path: Path) -> None:
    upstream = client if same else "anthropic" if client != "anthropic" else "chat"
    good = events(upstream)
    behaviour = streams(*good[:3], good[3][:9], cut=True)
    case, answer = await run(tmp_path, client, upstream, True, behaviour, "")
    assert answer[0] == 200
    assert len(case.fake.asked) == 1
    assert case.session.meter.turns == 1


@pytest.mark.parametrize("client", NAMES)
async def test_a_stream_that_ends_too_early(client: str, tmp_path: Path) -> None:
    good = events(client)
    case, _ = await run(tmp_path, client, client, True, streams(*good[:2]), "before the turn was over")
    assert len(case.fake.asked) == 1


@pytest.mark.parametrize("client", NAMES)
async def test_an_event_that_is_not_json(client: str, tmp_path: Path) -> None:
    good = events(client)
    case, answer = await run(
        tmp_path, client, client, True, streams(good[0], b"data: {nope\n\n", *good[1:]), "not JSON"
    )
    assert answer[2].startswith(good[0])
    assert b"nope" not in answer[2]
    assert len(case.fake.asked) == 1


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("same", [True, False])
async def test_a_page_instead_of_an_answer(client: str, stream: bool, same: bool, tmp_path: Path) -> None:
    upstream = client if same else "chat" if client != "chat" else "anthropic"
    page = replies(200, HTML, {"Content-Type": "text/html"})
    case, answer = await run(tmp_path, client, upstream, stream, page, "")
    assert answer[0] == 502
    assert b"<html" not in answer[2][:20]
    assert len(case.fake.asked) == 1


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_page_is_retried_and_then_an_error(client: str, stream: bool, tmp_path: Path) -> None:
    page = replies(502, HTML, {"Content-Type": "text/html"})
    case, answer = await run(tmp_path, client, client, stream, page, "")
    assert answer[0] == 502
    assert len(case.fake.asked) == QUICK.attempts + 1
    assert [asked.headers["User-Agent"] == "pier" for asked in case.fake.asked] == [False] * 6 + [True]
    assert [attempt.wait is None for attempt in case.call().attempts] == [False] * 6 + [True]
    assert case.session.meter.turns == 0


@pytest.mark.parametrize("client", NAMES)
async def test_cut_json(client: str, tmp_path: Path) -> None:
    case, answer = await run(tmp_path, client, client, False, replies(200, b'{"id": "x", "cho'), "not JSON")
    assert answer[0] == 502
    assert len(case.fake.asked) == 1


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {}), (429, {"Retry-After": "0"}), (429, {"retry-after-ms": "5"}), (529, {}), (503, {})],
)
async def test_passing_faults_are_never_seen(
    client: str, stream: bool, status: int, headers: dict[str, str], tmp_path: Path
) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway(retry=QUICK) as gateway:
        fake.then = [replies(status, b'{"error": {"message": "later"}}', headers)] * 2
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, client)
        assert (await case.ask(stream))[0] == 200
        assert len(fake.asked) == 3
        assert case.session.meter.turns == 1
        assert [attempt.answer.status for attempt in case.call().attempts if attempt.answer] == [status, status, 200]
        assert case.call().outcome == "ok"


@pytest.mark.parametrize("client", NAMES)
async def test_a_connection_that_breaks_before_an_answer_is_retried(client: str, tmp_path: Path) -> None:
    async def hang_up(request: Any, raw: bytes) -> Any:
        request.transport.abort()
        await asyncio.sleep(60)

    async with fake_provider(says(HELLO)) as fake, Gateway(retry=QUICK) as gateway:
        fake.then = [hang_up]
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, client)
        assert (await case.ask(True))[0] == 200
        assert len(fake.asked) == 2


async def test_a_provider_that_is_not_there(tmp_path: Path) -> None:
    async with fake_provider() as fake:
        pass
    async with Gateway(retry=QUICK) as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, "chat", "chat")
        case.check_failure(False, await case.ask(False), "cannot be reached")


async def test_a_quota_that_is_used_up_is_not_retried(tmp_path: Path) -> None:
    body = b'{"error":{"message":"You exceeded your quota","type":"insufficient_quota","code":"insufficient_quota"}}'
    case, answer = await run(tmp_path, "chat", "chat", False, replies(429, body), "exceeded your quota")
    assert (answer[0], answer[2]) == (429, body)
    assert len(case.fake.asked) == 1


async def test_a_wait_beyond_patience_is_not_waited_for(tmp_path: Path) -> None:
    later = replies(429, b'{"error":{"message":"tomorrow"}}', {"Retry-After": "86400"})
    case, answer = await run(tmp_path, "chat", "chat", False, later, "tomorrow")
    assert answer[0] == 429
    assert len(case.fake.asked) == 1


@pytest.mark.parametrize("client", NAMES)
async def test_the_providers_own_errors_pass(client: str, tmp_path: Path) -> None:
    body = json.dumps(DIALECTS[client].error_body(400, "the prompt is too long", "context_length")).encode()
    case, answer = await run(tmp_path, client, client, True, replies(400, body), "the prompt is too long")
    assert (answer[0], answer[2]) == (400, body)
    assert len(case.fake.asked) == 1


@pytest.mark.parametrize("client", ["chat", "anthropic"])
@pytest.mark.parametrize("same", [True, False])
async def test_an_event_of_sixteen_mebibytes(client: str, same: bool, tmp_path: Path) -> None:
    from dataclasses import replace

    from pier.wire.turn import Text

    upstream = client if same else "chat" if client == "anthropic" else "anthropic"
    huge = replace(HELLO, parts=(Text("x" * (16 * 1024 * 1024)),))
    route = DIALECTS[upstream].match("POST", PATHS[upstream], {})
    renderer = DIALECTS[upstream].stream_renderer(
        DIALECTS[upstream].parse_request(request_body(upstream, stream=True), route), route
    )
    chunks = [renderer.render(delta) for delta in stream_turn(huge, 2**30)]
    async with fake_provider(streams(*chunks)) as fake, Gateway() as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, upstream)
        status, _, raw = await case.ask(True)
        parser = DIALECTS[client].stream_parser()
        built = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
        assert (status, len(built.turn().text), built.error) == (200, 16 * 1024 * 1024, None)
        assert case.call().outcome == "ok"


@pytest.mark.parametrize("client", NAMES)
async def test_a_slow_drip_arrives_whole(client: str, tmp_path: Path) -> None:
    drops = [bytes([byte]) for byte in b"".join(events(client))]
    async with fake_provider(streams(*drops)) as fake, Gateway() as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, client)
        status, _, raw = await case.ask(True)
        assert (status, raw) == (200, b"".join(drops))
        assert case.call().answer
        assert case.call().outcome == "ok"


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_silent_provider_is_kept_alive_for(client: str, same: bool, begun: bool, tmp_path: Path) -> None:
    upstream = client if same else "chat" if client != "chat" else "anthropic"
    good, go_on = events(upstream), asyncio.Event()

    async def slow(request: Any, raw: bytes) -> Any:
        if not begun:
            await go_on.wait()
            return await streams(*good)(request, raw)
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(good[:2]))
        await go_on.wait()
        await response.write(b"".join(good[2:]))
        await response.write_eof()
        return response

    async with fake_provider(slow) as fake, Gateway(keep_alive=0.05) as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, upstream)
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {case.session.key}"}
            body = request_body(client, stream=True)
            async with http.post(case.url + STREAM_PATHS[client], json=body, headers=headers) as response:
                raw = b""
                signs = 0
                while signs < 4:
                    part = await asyncio.wait_for(response.content.readany(), 60)
                    assert part
                    raw += part
                    signs += 1
                go_on.set()
                raw += await response.read()
        parser = DIALECTS[client].stream_parser()
        built = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
        assert built.error is None
        assert built.turn().text == HELLO.text
        assert client == "gemini" or b"\n\n\n" not in raw
        assert case.call().outcome == "ok"


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("upstream", ["chat", "anthropic"])
async def test_an_agent_that_goes_away_ends_the_generation(begun: bool, upstream: str, tmp_path: Path) -> None:
    never = asyncio.Event()
    good = events(upstream)

    async def hang(request: Any, raw: bytes) -> Any:
        if begun:
            return await streams(*good[:2], wait=never)(request, raw)
        return await never.wait()

    async with fake_provider(hang) as fake, Gateway() as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, "chat", upstream)
        asking = asyncio.create_task(case.ask(True))
        while not fake.asked:
            await asyncio.sleep(0.01)
        if begun:
            while not (case.call().upstream or case.call()).answer:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(fake.cancelled.wait(), 60)
        while case.call().outcome == "interrupted":
            await asyncio.sleep(0.01)
        assert case.call().outcome == "cancelled"
        assert case.session.meter.turns == (1 if begun else 0)


async def test_a_pause_holds_all_sessions_once_most_were_asked_for_it() -> None:
    from pier.gateway.budget import Limiter

    limiter, clock = Limiter(), asyncio.get_running_loop().time
    sessions = ("one", "two", "three")
    for session in sessions:
        await limiter.acquire(session)
    limiter.close_for("one", 60)
    assert [limiter.closed_for(session) > 0 for session in sessions] == [True, False, False]
    limiter.close_for("two", 0.2)
    assert limiter.closed_for("one") > 50 and limiter.closed_for("three") <= 0.2
    began = clock()
    await asyncio.gather(limiter.acquire("two"), limiter.acquire("three"), limiter.acquire("new"))
    assert 0.19 <= clock() - began < 10 and not limiter.closed_for("new")


async def test_a_session_that_pauses_for_long_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from pier.gateway import budget

    monkeypatch.setattr(budget, "_RECENT", 0.01)
    limiter = budget.Limiter()
    await limiter.acquire("one")
    limiter.close_for("one", 3600)
    await asyncio.sleep(0.02)
    await asyncio.wait_for(limiter.acquire("two"), 10)


async def test_sessions_that_are_over_do_not_count_as_users_of_a_provider(tmp_path: Path) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway(retry=QUICK) as gateway:
        provider, url = fake.provider("chat"), await gateway.serve()
        for number in range(4):
            async with gateway.session("m", upstream=provider, recording=tmp_path / f"{number}.jsonl") as session:
                await post(url, PATHS["chat"], session.key, request_body("chat"))
        limiter = gateway.upstreams.limiter(provider)
        await limiter.acquire("one")
        limiter.close_for("one", 60)
        await limiter.acquire("two")
        limiter.close_for("two", 60)
        assert limiter.closed_for("three") > 0


async def test_a_call_that_is_held_back_when_its_turn_comes_says_so(tmp_path: Path) -> None:
    """Else its agent, whose time runs out meanwhile, would be blamed."""
    go_on = asyncio.Event()

    async def limit(request: Any, raw: bytes) -> Any:
        await go_on.wait()
        return await replies(429, b'{"error": {"message": "later"}}', {"Retry-After": "60"})(request, raw)

    async with fake_provider(limit) as fake, Gateway(retry=Retry()) as gateway:
        url, provider = await gateway.serve(), fake.provider("chat", concurrency=1)
        session = gateway.session("m", upstream=provider, recording=tmp_path / "calls.jsonl")
        asking = [asyncio.create_task(post(url, PATHS["chat"], session.key, request_body("chat"))) for _ in range(2)]
        while session.counts.most < 2:
            await asyncio.sleep(0.01)
        go_on.set()
        while not gateway.upstreams.limiter(provider).closed_for(session.recorder):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await session.close()
        await asyncio.gather(*asking, return_exceptions=True)
    calls = reader.read(tmp_path).generations()
    assert [(call.outcome, call.fault) for call in calls] == [("cancelled", "rate_limit")] * 2


async def test_a_call_that_waited_long_for_its_turn_is_still_retried(tmp_path: Path) -> None:
    """Only what the provider makes it wait counts."""
    go_on = asyncio.Event()

    async def slow(request: Any, raw: bytes) -> Any:
        await go_on.wait()
        return await says(HELLO)(request, raw)

    retry = Retry(first=0.01, longest=0.02, patience=0.3)
    async with fake_provider(says(HELLO)) as fake, Gateway(retry=retry) as gateway:
        fake.then = [slow, replies(429, b'{"error": {"message": "later"}}')]
        url, provider = await gateway.serve(), fake.provider("chat", concurrency=1)
        session = gateway.session("m", upstream=provider, recording=tmp_path / "calls.jsonl")
        asking = [asyncio.create_task(post(url, PATHS["chat"], session.key, request_body("chat"))) for _ in range(2)]
        await asyncio.sleep(0.5)
        go_on.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 200]
        assert len(fake.asked) == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_provider_that_stays_silent_is_given_up_once(stream: bool, begun: bool, tmp_path: Path) -> None:
    never = asyncio.Event()

    async def silent(request: Any, raw: bytes) -> Any:
        if begun and stream:
            return await streams(*events("chat")[:2], wait=never)(request, raw)
        return await never.wait()

    words = "silent" if begun and stream else "in time"
    case, _ = await run(tmp_path, "chat", "chat", stream, silent, words, silence=0.3)
    assert len(case.fake.asked) == 1


async def test_streamed_token_ids_are_kept_and_not_shown(tmp_path: Path) -> None:
    choice = {"index": 0, "delta": {"content": "hi"}, "token_ids": [7], "logprobs": {"content": [{"logprob": -1}]}}
    first = {"id": "c", "prompt_token_ids": [1, 2], "choices": [choice]}
    last = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": None}]}
    given = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in (first, last)]
    async with fake_provider(streams(*given, b"data: [DONE]\n\n")) as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = tmp_path / "calls.jsonl"
        session = gateway.session("m", upstream=fake.provider(tokens=True), recording=path)
        _, _, raw = await post(url, STREAM_PATHS["chat"], session.key, request_body("chat", stream=True))
        assert b"token_ids" not in raw
        assert b"logprob" not in raw
        assert b'"content":"hi"' in raw
        (call,) = reader.read(path).generations()
        assert call.answer
        assert call.answer.body == raw
        assert call.upstream
        assert call.upstream.answer
        assert call.upstream.answer.body == b"".join(given) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("client", NAMES)
async def test_a_body_that_only_the_provider_can_read(client: str, tmp_path: Path) -> None:
    async with fake_provider(streams(*events(client)[:2], cut=True)) as fake, Gateway(retry=QUICK) as gateway:
        case = Case(gateway, await gateway.serve(), fake, tmp_path, client, client)
        body = {"model": "m", "stream": True, "messages": "?", "input": 7, "contents": {"new": "shape"}}
        answer = await post(case.url, STREAM_PATHS[client], case.session.key, body)
        assert answer[0] == 200
        case.check_failure(True, answer, "")


class StuckReader(Exchange):
    """An exchange whose agent reads the first keep-alive only after a while."""

    def __init__(self) -> None:
        self.keep_alive_bytes, self.caller = b"sign", SimpleNamespace(request=self, started=True)
        self._keep_alive, self._last_write = 0.01, 0.0
        self.signs, self.full = 0, False

    def send(self, data: bytes) -> None:
        self.signs += 1
        self.full = self.signs == 1


async def test_an_agent_that_reads_late_still_gets_signs_of_life() -> None:
    stuck = StuckReader()
    async with asyncio.timeout(60):
        stuck._send_keep_alive(asyncio.get_running_loop())
        await asyncio.sleep(0.1)
        assert stuck.signs == 1
        stuck.full = False
        while stuck.signs < 3:
            await asyncio.sleep(0.01)
        assert stuck._beat
        stuck._beat.cancel()
