"""Keys, budgets, small routes and sizes: what a session is and where it ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pier.endpoint import GATEWAY_PORT
from pier.errors import UsageError
from pier.gateway import Budget, Directory, Gateway, Meter
from pier.record import reader
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Request, Text, Turn, TurnBuilder, Usage
from tests.gateway_fakes import HELLO, PATHS, STREAM_PATHS, fake_provider, post, replies, request_body, says, thinks

NAMES = ["chat", "responses", "anthropic", "gemini"]


async def hello(request: Request) -> Turn:
    return HELLO


@pytest.mark.parametrize("client", NAMES)
async def test_a_key_is_taken_wherever_clients_put_it(client: str) -> None:
    async with Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        key = gateway.session("m", upstream=hello).key
        body = request_body(client)
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
            async with http.post(url + PATHS[client], json=body, headers=headers) as response:
                assert response.status == 200
        async with http.post(f"{url}{PATHS[client]}?key={key}", json=body) as response:
            assert response.status == 200


@pytest.mark.parametrize("client", NAMES)
async def test_a_wrong_or_dead_key_is_refused_in_the_dialect(client: str) -> None:
    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=hello)
        dead = gateway.session("m", upstream=hello)
        await dead.close()
        for key in ("", "nope", session.key[:-1], dead.key, session.id):
            status, _, raw = await post(url, PATHS[client], key, request_body(client))
            assert status == 401
            assert DIALECTS[client].parse_error(401, json.loads(raw))[1] == "authentication"


async def test_a_bound_listener_takes_its_own_session_only(tmp_path: Path) -> None:
    async with Gateway() as gateway:
        one, two = (gateway.session("m", upstream=hello) for _ in range(2))
        url = await gateway.serve(session=one)
        assert (await post(url, PATHS["chat"], one.key, request_body("chat")))[0] == 200
        assert (await post(url, PATHS["chat"], two.key, request_body("chat")))[0] == 401
        assert two.meter.turns == 0
        await one.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(url, PATHS["chat"], one.key, request_body("chat"))


async def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=hello)
        path = tmp_path / "gateway.sock"
        await gateway.serve_unix(path)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            headers = {"Authorization": f"Bearer {session.key}"}
            async with http.post("http://pier" + PATHS["chat"], json=request_body("chat"), headers=headers) as response:
                assert response.status == 200
    assert not path.exists()


async def test_an_endpoint_says_all_that_an_agent_needs() -> None:
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=hello, context_window=1000)
        endpoint = session.endpoint()
        assert (endpoint.url, endpoint.model) == (f"http://127.0.0.1:{GATEWAY_PORT}", "m")
        assert (endpoint.key, endpoint.context_window) == (session.key, 1000)
        assert session.endpoint("http://host:1/").url == "http://host:1"
        assert session.key not in repr(session) + repr(endpoint)


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [True, False])
async def test_n_turns_are_n_generations(client: str, stream: bool, tmp_path: Path) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        budget = Budget(turns=3)
        session = gateway.session(
            "m", upstream=fake.provider(client), budget=budget, recording=tmp_path / "calls.jsonl"
        )
        path, body = (STREAM_PATHS if stream else PATHS)[client], request_body(client, stream=stream)
        answers = await asyncio.gather(*(post(url, path, session.key, body) for _ in range(8)))
        assert sorted(status for status, _, _ in answers) == [200] * 3 + [400] * 5
        assert len(fake.asked) == 3
        refused = next(raw for status, _, raw in answers if status == 400)
        assert "3 of 3 turns" in DIALECTS[client].parse_error(400, json.loads(refused))[0]
        assert session.ended
        outcomes = sorted(call.outcome for call in reader.read(tmp_path).generations())
        assert outcomes == ["ok"] * 3 + ["refused"] * 5


async def test_a_turn_that_failed_is_not_counted() -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), budget=Budget(turns=1))
        fake.then = [replies(400, b'{"error":{"message":"no"}}')]
        statuses = [(await post(url, PATHS["chat"], session.key, request_body("chat")))[0] for _ in range(3)]
        assert statuses == [400, 200, 400]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(input_tokens=22), "22 of 22 input tokens"),
        (Budget(output_tokens=14), "14 of 14 output tokens"),
        (Budget(total_tokens=20), "36 of 20 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_end_a_session_even_if_the_agent_counts_none(budget: Budget, expected: str, stream: bool) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), budget=budget)
        body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        answers = [await post(url, PATHS["chat"], session.key, body) for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 200, 400]
        assert expected.encode() in answers[2][2]
        if stream:
            assert b'"usage"' not in answers[0][2]
            assert answers[0][2].endswith(b"data: [DONE]\n\n")


async def test_money_ends_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_provider(says(HELLO)) as fake:
        directory = Directory.load({"ANTHROPIC_BASE_URL": fake.url, "ANTHROPIC_API_KEY": "k"})
        async with Gateway(providers=directory) as gateway:
            url = await gateway.serve()
            session = gateway.session("anthropic/claude-sonnet-4-5", budget=Budget(cost_usd=0.0001))
            statuses = [
                (await post(url, PATHS["anthropic"], session.key, request_body("anthropic")))[0] for _ in range(2)
            ]
            assert statuses == [200, 400]
            assert session.meter.cost_usd == pytest.approx(11 * 3e-6 + 7 * 15e-6)
            with pytest.raises(UsageError, match="unknown price"):
                gateway.session("anthropic/claude-unheard-of", budget=Budget(cost_usd=1))


async def test_time_ends_a_call_that_runs() -> None:
    never = asyncio.Event()

    async def slow(request: Request) -> Turn:
        await never.wait()
        return HELLO

    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=slow, budget=Budget(wall_time=0.2))
        for _ in range(2):
            status, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat"))
            assert (status, b"0.2 seconds" in raw) == (400, True)


async def test_a_pool_is_shared() -> None:
    async with Gateway() as gateway:
        url = await gateway.serve()
        pool = Meter(Budget(turns=3), owner="job")
        sessions = [gateway.session("m", upstream=hello, pool=pool) for _ in range(2)]
        answers = [
            await post(url, PATHS["chat"], session.key, request_body("chat")) for session in sessions for _ in range(2)
        ]
        assert [status for status, _, _ in answers] == [200, 200, 200, 400]
        assert b"3 of 3 turns of this job" in answers[3][2]


async def test_a_stopped_session_says_why() -> None:
    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=hello)
        session.stop("the trial was cancelled")
        status, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat"))
        assert (status, b"the trial was cancelled" in raw) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "headers", "client"),
    [
        ("POST", "/v1/nothing", {}, "chat"),
        ("POST", "/v1/messages/nothing", {"anthropic-version": "2023-06-01"}, "anthropic"),
        ("GET", "/v1beta/nothing", {"x-goog-api-key": "k"}, "gemini"),
        ("DELETE", "/admin", {}, "chat"),
    ],
)
async def test_an_unknown_route_is_told_in_the_dialect(
    method: str, path: str, headers: dict[str, str], client: str
) -> None:
    async with Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        session = gateway.session("m", upstream=hello)
        for key in ({}, {"Authorization": f"Bearer {session.key}"}):
            async with http.request(method, url + path, headers={**headers, **key}) as response:
                assert response.status == 404
                message, kind = DIALECTS[client].parse_error(404, await response.json())
                assert (path in message, kind) == (True, "not_found")


async def test_what_agents_probe_is_answered() -> None:
    async with Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        session = gateway.session("m", upstream=hello)
        headers = {"Authorization": f"Bearer {session.key}"}
        async with http.head(url + "/") as response:
            assert response.status == 200
        for path, field in (("/v1/models", "data"), ("/v1beta/models", "models")):
            async with http.get(url + path, headers=headers) as response:
                assert "m" in str((await response.json())[field])
        async with http.get(url + "/v1/models/any", headers=headers) as response:
            assert (await response.json())["id"] == "any"
        assert session.meter.turns == 0


@pytest.mark.parametrize(
    ("client", "path"),
    [("anthropic", "/v1/messages/count_tokens"), ("gemini", "/v1beta/models/gemini-x:countTokens")],
)
async def test_tokens_are_counted_by_the_provider_or_roughly(client: str, path: str) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        body = request_body(client, "four" * 100)
        asked = gateway.session("m", upstream=fake.provider(client))
        guessed = gateway.session("m", upstream=fake.provider("chat"))
        assert b"4321" in (await post(url, path, asked.key, body))[2]
        rough = json.loads((await post(url, path, guessed.key, body))[2])
        assert 80 < next(value for value in rough.values() if isinstance(value, int)) < 200
        assert asked.meter.turns == guessed.meter.turns == 0


LIMIT = 64 * 1024 * 1024


async def test_tokens_of_a_model_that_nobody_serves_are_counted_roughly(tmp_path: Path) -> None:
    async with Gateway(providers=Directory({})) as gateway:
        url = await gateway.serve()
        session = gateway.session(recording=tmp_path / "calls.jsonl")
        body = {**request_body("anthropic"), "model": "unheard-of"}
        status, _, raw = await post(url, "/v1/messages/count_tokens", session.key, body)
        assert status == 200 and json.loads(raw)["input_tokens"] > 0
        await session.close()
        (call,) = reader.read(tmp_path).calls
        assert call.outcome == "ok"


async def test_an_agent_that_leaves_while_its_tokens_are_counted(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def hang(request: object, raw: bytes) -> aiohttp.web.StreamResponse:
        asked.set()
        return await asyncio.Future()

    async with fake_provider(hang) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider("anthropic"), recording=tmp_path / "calls.jsonl")
        counting = asyncio.create_task(post(url, "/v1/messages/count_tokens", session.key, request_body("anthropic")))
        await asked.wait()
        counting.cancel()
        await asyncio.wait_for(fake.cancelled.wait(), 60)
        await session.close()
        (call,) = reader.read(tmp_path).calls
        assert call.outcome == "cancelled"


async def test_a_body_of_almost_64_mebibytes_passes() -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("named-by-agent", upstream=fake.provider("anthropic"))
        body = json.dumps(request_body("anthropic", "x" * (LIMIT - 2000))).encode()
        status, _, _ = await post(url, PATHS["anthropic"], session.key, body)
        assert status == 200
        assert len(fake.asked[0].body) == len(body)


@pytest.mark.parametrize("client", NAMES)
async def test_a_bigger_body_is_refused_in_the_dialect(client: str) -> None:
    async with Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        session = gateway.session("m", upstream=hello)
        headers = {"Authorization": f"Bearer {session.key}", "Content-Length": str(LIMIT + 1)}
        async with http.post(url + PATHS[client], data=_never(), headers=headers) as response:
            assert response.status == 413
            assert DIALECTS[client].parse_error(413, await response.json())[1] == "too_large"


async def _never() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(0.2)


@pytest.mark.parametrize("client", NAMES)
async def test_what_is_no_request_is_told_in_the_dialect(client: str) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider("chat" if client == "anthropic" else "anthropic"))
        for body in (b"", b"[1]", b"{", b'{"messages": 7, "input": 7, "contents": 7}'):
            status, _, raw = await post(url, PATHS[client], session.key, body)
            assert (status, json.loads(raw)["error"] != {}) == (400, True)
        assert fake.asked == []


async def test_models_lead_elsewhere_by_pattern() -> None:
    async with fake_provider() as one, fake_provider() as two:
        directory = Directory({"one": one.provider(), "two": two.provider()})
        async with Gateway(providers=directory) as gateway:
            url = await gateway.serve()
            session = gateway.session("one/big", models={"*haiku*": "two/small"})
            for name in ("claude-haiku-9", "anything"):
                await post(url, PATHS["chat"], session.key, {**request_body("chat"), "model": name})
            open_session = gateway.session()
            for name in ("one/x", "two/y", "three/z"):
                answer = await post(url, PATHS["chat"], open_session.key, {**request_body("chat"), "model": name})
            assert (answer[0], b"unknown provider" in answer[2]) == (400, True)
            assert [asked.json["model"] for asked in one.asked] == ["big", "x"]
            assert [asked.json["model"] for asked in two.asked] == ["small", "y"]


async def test_token_ids_are_kept_and_not_shown(tmp_path: Path) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    extra = {"token_ids": [5, 6], "logprobs": {"content": [{"token": "hi", "logprob": -0.5}]}}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [1, 2]}
    given = json.dumps({**body, "choices": [{**choice, **extra}]}).encode()
    async with fake_provider(replies(200, given)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), tokens=True, recording=tmp_path / "calls.jsonl")
        _, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat"))
        assert fake.asked[0].json["return_token_ids"] is True
        assert fake.asked[0].json["logprobs"] is True
        del body["prompt_token_ids"]
        assert json.loads(raw) == {**body, "choices": [choice]}
        (call,) = reader.read(tmp_path).generations()
        assert call.upstream
        assert call.upstream.answer
        assert call.upstream.answer.body == given
        assert call.answer
        assert call.answer.body == raw


async def test_a_key_that_the_provider_echoes_goes_no_further(tmp_path: Path) -> None:
    echo = replies(401, b'{"error":{"message":"bad key sk-provider-secret"}}')
    async with fake_provider(echo) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), recording=tmp_path / "calls.jsonl")
        status, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat"))
        assert (status, b"[redacted]" in raw) == (401, True)
        assert b"sk-provider-secret" not in raw + (tmp_path / "calls.jsonl").read_bytes()


async def test_a_secret_header_that_the_provider_echoes_goes_no_further(tmp_path: Path) -> None:
    echo = replies(401, b'{"error":{"message":"no such sk-in-a-header-0123, team evals-of-the-lab"}}')
    headers = {"X-Proxy-Auth": "Bearer sk-in-a-header-0123", "X-Team": "evals-of-the-lab"}
    async with fake_provider(echo) as fake, Gateway() as gateway:
        url = await gateway.serve()
        upstream = fake.provider(key=None, headers=headers)
        session = gateway.session("m", upstream=upstream, recording=tmp_path / "calls.jsonl")
        _, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat"))
        assert fake.asked[0].headers["X-Proxy-Auth"] == headers["X-Proxy-Auth"]
        assert b"no such [redacted], team evals-of-the-lab" in raw
        assert b"sk-in-a-header" not in raw + (tmp_path / "calls.jsonl").read_bytes()


async def test_a_call_that_cannot_be_recorded_fails_before_its_model_is_asked(tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), recording=tmp_path / "calls.jsonl")
        (tmp_path / "calls.jsonl").unlink()
        (tmp_path / "calls.jsonl").mkdir()
        for stream in (False, True):
            status, _, raw = await post(url, PATHS["chat"], session.key, request_body("chat", stream=stream))
            assert status == 500
            assert b"recorded" in raw
        assert not fake.asked
        assert session.recorder.lost and gateway.metrics.open_calls == 0
        assert gateway.metrics.snapshot()["recording_gaps_total"] == 2


async def test_closing_a_session_cuts_its_calls(tmp_path: Path) -> None:
    never = asyncio.Event()
    started = asyncio.Event()

    async def slow(request: Request) -> Turn:
        started.set()
        await never.wait()
        return HELLO

    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=slow, recording=tmp_path / "calls.jsonl")
        asking = asyncio.create_task(post(url, PATHS["chat"], session.key, request_body("chat")))
        await started.wait()
        await session.close("enough")
        with pytest.raises(aiohttp.ClientError):
            await asking
        found = reader.read(tmp_path)
        assert (found.calls[0].outcome, found.closed) == ("cancelled", "enough")


async def test_a_closed_book_has_no_hosted_tools(tmp_path: Path) -> None:
    own = {"name": "add", "input_schema": {"type": "object"}}
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        for upstream in ("anthropic", "chat"):
            path = tmp_path / f"{upstream}.jsonl"
            session = gateway.session("m", upstream=fake.provider(upstream), closed_book=True, recording=path)
            body = {**request_body("anthropic"), "tools": [own, hosted]}
            assert (await post(url, PATHS["anthropic"], session.key, body))[0] == 200
            assert b"web_search" not in fake.asked[-1].body
            assert b"add" in fake.asked[-1].body
            (call,) = reader.read(path).generations()
            assert b"web_search" in call.body
            assert call.upstream
            assert call.upstream.body == fake.asked[-1].body
            assert any("web_search" in edit["what"] for edit in call.edits)


async def test_a_client_that_waits_to_be_asked_for_its_body() -> None:
    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=hello)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = json.dumps(request_body("chat")).encode()
        head = (
            f"POST {PATHS['chat']} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_power_may_fail_after_the_last_event(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    path, on_disk, real = tmp_path / "calls.jsonl", [], os.fdatasync

    def watched(fd: int) -> None:
        real(fd)
        on_disk.append(path.read_bytes())

    monkeypatch.setattr(os, "fdatasync", watched)
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), recording=path, durable="power")
        where = (STREAM_PATHS if stream else PATHS)["chat"]
        status, _, raw = await post(url, where, session.key, request_body("chat", stream=stream))
        assert status == 200
        path.write_bytes(on_disk[0])
        (call,) = reader.read(path).generations()
        assert call.outcome == "ok"
        assert call.answer
        assert call.answer.body == raw


async def test_requests_per_minute_hold_back_what_is_too_much() -> None:
    asked: list[Request] = []

    async def counted(request: Request) -> Turn:
        asked.append(request)
        return HELLO

    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=counted, budget=Budget(requests_per_minute=2))
        calls = [asyncio.create_task(post(url, PATHS["chat"], session.key, request_body("chat"))) for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*await _first(calls, 2)), 60)
        assert len(asked) == 2
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def _first(tasks: list[asyncio.Task[tuple[int, dict[str, str], bytes]]], count: int) -> list[asyncio.Task]:
    while sum(task.done() for task in tasks) < count:
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    return [task for task in tasks if task.done()]


@pytest.mark.parametrize("client", NAMES)
async def test_a_script_answers(client: str, tmp_path: Path) -> None:
    (tmp_path / "script.yaml").write_text("- text: First words.\n- finish: Last words.\n")
    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session(f"script:{tmp_path / 'script.yaml'}")
        for number, words in enumerate((b"First words.", b"Last words.")):
            status, _, raw = await post(url, PATHS[client], session.key, request_body(client, str(number)))
            assert (status, words in raw) == (200, True)


async def test_a_key_of_any_bytes_is_refused() -> None:
    async with Gateway() as gateway:
        url = await gateway.serve()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: \xff\xfe\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 401")
        writer.close()


async def test_many_sessions_at_once_see_only_their_own(tmp_path: Path) -> None:
    def echo(request: Request) -> Turn:
        return Turn((Text(f"you said {request.messages[0].text}"),), "end", Usage(1, 1))

    async with fake_provider(thinks(echo)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        sessions = [
            gateway.session("m", upstream=fake.provider("chat"), recording=tmp_path / str(number) / "calls.jsonl")
            for number in range(20)
        ]

        async def talk(number: int, turn: int) -> None:
            client, words = NAMES[turn % 4], f"<{number}-{turn}>"
            body = request_body(client, words, stream=True)
            status, _, raw = await post(url, STREAM_PATHS[client], sessions[number].key, body)
            parser = DIALECTS[client].stream_parser()
            built = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
            assert (status, built.turn().text) == (200, f"you said {words}")

        await asyncio.gather(*(talk(number, turn) for number in range(20) for turn in range(10)))
        for number in range(20):
            calls = reader.read(tmp_path / str(number)).generations()
            assert [call.outcome for call in calls] == ["ok"] * 10
            for call in calls:
                said = re.findall(rb"<\d+-\d+>", call.body)
                assert said[0].startswith(b"<%d-" % number)
                assert call.upstream
                assert call.upstream.answer
                assert said[0] in call.upstream.body
                parser = DIALECTS["chat"].stream_parser()
                heard = TurnBuilder().extend(parser.feed(call.upstream.answer.body)).turn().text
                assert heard == f"you said {said[0].decode()}"


async def test_an_agent_that_reads_slowly_slows_the_provider_down(tmp_path: Path) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 2**20)
    count, sent = 64, 0

    async def pour(request: aiohttp.web.BaseRequest, raw: bytes) -> aiohttp.web.StreamResponse:
        nonlocal sent
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await response.write(event)
            sent += 1
        await response.write(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        return response

    async with fake_provider(pour) as fake, Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider())
        headers, body = {"Authorization": f"Bearer {session.key}"}, request_body("chat", stream=True)
        async with http.post(url + PATHS["chat"], json=body, headers=headers) as response:
            before, still = -1, 0
            while still < 10:
                still = still + 1 if sent == before else 0
                before = sent
                await asyncio.sleep(0.05)
            assert sent < count
            size = 0
            async for part in response.content.iter_any():
                size += len(part)
        assert sent == count
        assert size > count * 2**20
