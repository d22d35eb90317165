"""Whose fault it is that an agent could not go on, in every dialect, whole and streamed, relayed and translated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pier.agent.oracle import NopAgent
from pier.errors import AgentError, PierError
from pier.gateway import Gateway
from pier.gateway.budget import Retry
from pier.gateway.logins import CodexLogin
from pier.gateway.session import Session
from pier.record import reader
from pier.trial.agent import find_fault
from pier.wire.dialects import DIALECTS
from pier.wire.faults import classify
from tests.fault.test_gateway_upstreams import HTML, events
from tests.gateway_fakes import (
    HELLO,
    PATHS,
    STREAM_PATHS,
    TOOL,
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
QUICK = Retry(attempts=2, patience=1.0, first=0.001, longest=0.002)

ERRORS: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "no key": (401, {"type": "authentication_error", "message": "invalid x-api-key"}, "provider_error"),
    "no permission": (403, {"type": "permission_error", "message": "not for you"}, "provider_error"),
    "no money": (402, {"message": "Insufficient credits", "code": 402}, "provider_quota"),
    "rate limit": (429, {"type": "rate_limit_error", "message": "slow down"}, "provider_rate_limit"),
    "openai quota": (429, {"type": "insufficient_quota", "code": "insufficient_quota"}, "provider_quota"),
    "anthropic credit": (
        400,
        {"type": "invalid_request_error", "message": "Your credit balance is too low to access the Anthropic API."},
        "provider_quota",
    ),
    "google quota of a day": (
        429,
        {
            "status": "RESOURCE_EXHAUSTED",
            "details": [{"violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}],
        },
        "provider_quota",
    ),
    "google key": (
        400,
        {"status": "INVALID_ARGUMENT", "message": "API key not valid.", "details": [{"reason": "API_KEY_INVALID"}]},
        "provider_error",
    ),
    "openai model": (404, {"code": "model_not_found", "message": "The model `m` does not exist"}, "provider_error"),
    "anthropic model": (404, {"type": "not_found_error", "message": "model: m"}, "provider_error"),
    "outage": (503, {"message": "no healthy upstream"}, "provider_error"),
    "overload": (529, {"type": "overloaded_error", "message": "Overloaded"}, "provider_error"),
    "bad request": (400, {"type": "invalid_request_error", "message": "messages: required"}, None),
    "long context": (400, {"code": "context_length_exceeded", "message": "maximum context length"}, None),
    "too large": (413, {"type": "request_too_large", "message": "too large"}, None),
    "content policy": (400, {"code": "content_policy_violation", "message": "no"}, None),
    "moderation": (403, {"code": 403, "message": "flagged", "metadata": {"flagged_input": "x"}}, None),
    "quoted words": (400, {"message": "invalid temperature 'Your credit balance is too low'"}, None),
    "unprocessable": (422, {"message": "nope"}, None),
}


class Run:
    """One agent's session in front of one provider."""

    def __init__(self, session: Session, url: str, client: str, stream: bool) -> None:
        self.session, self.url, self.client, self.stream = session, url, client, stream

    async def ask(self, text: str = "hi", **more: Any) -> tuple[int, dict[str, str], bytes]:
        path = (STREAM_PATHS if self.stream else PATHS)[self.client]
        body = {**request_body(self.client, text, stream=self.stream), **more}
        return await post(self.url, path, self.session.key, body)

    async def judge(self, failed: AgentError | None = None) -> PierError | None:
        return await find_fault(NopAgent(), failed, self.session)


@asynccontextmanager
async def run(
    root: Path, fake: FakeProvider, client: str = "chat", upstream: str = "chat", stream: bool = False, **how: Any
) -> AsyncIterator[Run]:
    async with Gateway(**{"retry": QUICK, **how}) as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(upstream), recording=root / "recording.jsonl")
        yield Run(session, url, client, stream)


def other(client: str) -> str:
    return "chat" if client != "chat" else "anthropic"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("same", [True, False], ids=["relayed", "translated"])
@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("inside", [False, True], ids=["status", "inside"])
async def test_each_error_has_its_fault(client: str, same: bool, stream: bool, inside: bool, tmp_path: Path) -> None:
    """`inside`: the status is 200, and the body or the first event holds the error."""
    upstream = client if same else other(client)
    for number, (name, (status, error, code)) in enumerate(ERRORS.items()):
        folder = tmp_path / str(number)
        async with fake_provider(_error(upstream, status, error, stream, inside)) as fake:
            async with run(folder, fake, client, upstream, stream) as agent:
                answered, _, raw = await agent.ask()
                assert answered >= 400 and raw, name
                found = await agent.judge()
        assert (found.code if found else None) == code, name
        assert found is None or found.blame == "provider"
        (call,) = reader.read(folder).generations()
        assert call.outcome == "error" and (call.fault == "agent") == (code is None)


def _error(upstream: str, status: int, error: dict[str, Any], stream: bool, inside: bool) -> Behaviour:
    if not inside:
        return replies(status, json.dumps({"type": "error", "error": error}).encode())
    error = {**error, "code": error.get("code") or status}
    if not stream:
        return replies(200, json.dumps({"error": error}).encode())
    if upstream == "responses":
        value: dict[str, Any] = {"type": "response.failed", "response": {"status": "failed", "error": error}}
    else:
        value = {"type": "error", "error": error}
    return streams(b"data: " + json.dumps(value).encode() + b"\n\n")


DEEP = b'{"choices": ' + b"[" * 100_000
BROKEN: dict[str, dict[str, Any]] = {
    "chat": {"id": "c", "object": "chat.completion", "choices": []},
    "responses": {"id": "r", "object": "response", "status": "completed"},
    "anthropic": {"id": "m", "type": "message"},
    "gemini": {"responseId": "g", "candidates": []},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("same", [True, False], ids=["relayed", "translated"])
@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("fault", ["page", "nothing", "cut", "early", "late error", "deep"])
async def test_an_answer_that_is_none_is_the_providers_fault(
    fault: str, client: str, same: bool, stream: bool, tmp_path: Path
) -> None:
    upstream = client if same else other(client)
    good = events(upstream)
    late = {
        "responses": {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "oh"}}}
    }.get(upstream, {"type": "error", "error": {"type": "api_error", "message": "oh"}})
    behaviours: dict[str, Behaviour] = {
        "page": replies(200, HTML, {"Content-Type": "text/html"}),
        "nothing": streams(b"data: [DONE]\n\n") if stream else replies(200, json.dumps(BROKEN[upstream]).encode()),
        "cut": streams(*good[:3], good[3][:9], cut=True) if stream else replies(200, b'{"id": "x", "cho'),
        "early": streams(*good[:3]) if stream else replies(200, b""),
        "late error": streams(*good[:3], b"data: " + json.dumps(late).encode() + b"\n\n"),
        "deep": streams(b"data: " + DEEP + b"\n\n") if stream else replies(200, DEEP),
    }
    async with fake_provider(behaviours[fault]) as fake, run(tmp_path, fake, client, upstream, stream) as agent:
        await agent.ask()
        found = await agent.judge()
        assert found is not None and (found.code, found.blame, found.retryable) == ("provider_error", "provider", True)
        assert len(fake.asked) == 1, "an answer that has begun is never asked for twice"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("same", [True, False], ids=["relayed", "translated"])
@pytest.mark.parametrize("client", NAMES)
async def test_a_passing_fault_inside_an_answer_is_never_seen(
    client: str, same: bool, stream: bool, tmp_path: Path
) -> None:
    upstream = client if same else other(client)
    prelude = {
        "anthropic": [{"type": "message_start", "message": {"usage": {}}}, {"type": "ping"}],
        "responses": [{"type": "response.created", "response": {}}, {"type": "response.in_progress"}],
        "chat": [{"id": "c", "choices": []}],
        "gemini": [{"responseId": "g"}],
    }[upstream]
    error = {"type": "overloaded_error", "code": "server_error", "message": "busy"}
    if upstream == "responses":
        last: dict[str, Any] = {"type": "response.failed", "response": {"error": error}}
    else:
        last = {"type": "error", "error": error}
    busy = streams(*(b"data: " + json.dumps(value).encode() + b"\n\n" for value in (*prelude, last)))
    async with fake_provider(says(HELLO)) as fake, run(tmp_path, fake, client, upstream, stream) as agent:
        fake.then = [busy if stream else replies(200, json.dumps({"error": error}).encode())]
        status, _, raw = await agent.ask()
        assert status == 200 and b"busy" not in raw and len(fake.asked) == 2
        assert await agent.judge() is None
        assert agent.session.meter.turns == 1
        assert dict(agent.session.counts.ends) == {"answered": 1} and agent.session.counts.retries == 1
    (call,) = reader.read(tmp_path).generations()
    assert [attempt.fault for attempt in call.attempts] == ["provider", None]


async def test_a_fault_that_was_followed_by_an_answer_is_none(tmp_path: Path) -> None:
    async with fake_provider(says(HELLO)) as fake, run(tmp_path, fake) as agent:
        error = b'{"error": {"message": "no"}}'
        fake.then = [replies(401, error), replies(500, error), replies(500, error)]
        assert [(await agent.ask())[0] for _ in range(3)] == [401, 500, 200]
        assert await agent.judge() is None


async def test_a_budget_that_ends_after_a_fault_is_not_the_providers(tmp_path: Path) -> None:
    async with fake_provider(replies(401, b"{}")) as fake, run(tmp_path, fake) as agent:
        await agent.ask()
        agent.session.stop("budget: all turns are used")
        await agent.ask()
        assert dict(agent.session.counts.ends) == {"provider_error": 1, "refused": 1}
        assert await agent.judge() is None


async def test_an_agent_that_stops_waiting_for_a_provider_that_is_down(tmp_path: Path) -> None:
    """Its time ran out while the gateway held its call back."""
    limit = replies(429, b'{"error": {"message": "later"}}', {"Retry-After": "60"})
    async with fake_provider(limit) as fake, run(tmp_path, fake, retry=Retry()) as agent:
        asking = asyncio.create_task(agent.ask())
        limiter = agent.session.gateway.upstreams.limiter(fake.provider("chat"))
        while not limiter.closed_for(agent.session.recorder):
            await asyncio.sleep(0.01)
        queued = asyncio.create_task(agent.ask("second"))
        while agent.session.counts.most < 2:
            await asyncio.sleep(0.01)
        found = await agent.judge(AgentError("the agent took too long", code="agent_timeout"))
        await asyncio.gather(asking, queued, return_exceptions=True)
        assert found is not None and (found.code, found.blame) == ("provider_rate_limit", "provider")
        assert dict(agent.session.counts.ends) == {"cancelled": 2} and len(fake.asked) == 1


async def test_an_agent_that_gives_up_its_own_calls_is_graded(tmp_path: Path) -> None:
    """It asks, does not wait, and sleeps until its deadline: the model did answer in time."""
    never = asyncio.Event()

    async def hang(request: Any, raw: bytes) -> Any:
        await never.wait()

    async with fake_provider(hang) as fake, run(tmp_path, fake) as agent:
        asking = asyncio.create_task(agent.ask())
        while not fake.asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not agent.session.counts.calls:
            await asyncio.sleep(0.01)
        (call,) = reader.read(tmp_path).generations()
        assert call.ended is not None
        await asyncio.sleep(2 * (call.ended - call.at) + 0.1)
        failed = AgentError("the agent took too long", code="agent_timeout")
        assert await agent.judge(failed) is failed


async def test_a_flood_that_meets_a_rate_limit_is_the_agents(tmp_path: Path) -> None:
    limit = replies(429, b'{"error": {"message": "slow down"}}')
    async with fake_provider(limit) as fake, run(tmp_path, fake) as agent:
        await asyncio.gather(*(agent.ask(f"call {number}") for number in range(60)))
        assert agent.session.counts.most > 32
        assert await agent.judge() is None


TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]}


@pytest.mark.parametrize(
    ("answer", "asked", "code"),
    [
        (HELLO, "Write a short title for this conversation.", None),
        (HELLO, "Suggest what the user might type next.", None),
        (HELLO, "Now do the second part.", "provider_error"),
        (TOOL, "Summarise what was done so far.", "provider_error"),
    ],
)
async def test_a_side_call_that_fails_after_the_work_was_done(
    answer: Any, asked: str, code: str | None, tmp_path: Path
) -> None:
    async with fake_provider(replies(401, b"{}")) as fake, run(tmp_path, fake) as agent:
        fake.then = [says(answer)]
        await agent.ask("Do it.", **TOOLS)
        request = DIALECTS["chat"].parse_request(request_body("chat"))
        said = DIALECTS["chat"].render_response(answer, request)["choices"][0]["message"]
        history = [{"role": "user", "content": "Do it."}, said]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in answer.calls]
        await agent.ask(messages=[*history, {"role": "user", "content": asked}], **TOOLS)
        found = await agent.judge()
        assert (found.code if found else None) == code


@pytest.mark.parametrize("depth", [880, 915, 5000])
async def test_a_deeply_nested_call_keeps_no_other_from_being_judged(depth: int, tmp_path: Path) -> None:
    deep = "[" * depth + "]" * depth
    function = {"name": "f", "arguments": deep}
    said = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    async with fake_provider() as fake, run(tmp_path, fake) as agent:
        await agent.ask(messages=[said, {"role": "tool", "tool_call_id": "c", "content": "x"}], **TOOLS)
        if depth < 950:
            await agent.ask(
                messages=[{"role": "user", "content": [{"type": "new", "value": json.loads(deep)}]}], **TOOLS
            )
        fake.then = [replies(401, b"{}")] * 2
        await agent.ask("Do it.", **TOOLS)
        found = await agent.judge()
        assert found is not None and found.code == "provider_error"


@pytest.mark.parametrize(
    ("status", "more"),
    [
        (404, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]}),
        (404, {"models": ["nobody/serves-this"]}),
        (403, {"provider": {"only": ["nobody"]}}),
    ],
)
async def test_a_refusal_of_what_the_agent_itself_chose_is_the_agents(
    status: int, more: dict[str, Any], tmp_path: Path
) -> None:
    async with fake_provider(replies(status, b'{"error": {"message": "no such thing"}}')) as fake:
        async with run(tmp_path, fake) as agent:
            assert (await agent.ask(**more))[0] == status
            assert await agent.judge() is None


async def test_only_headers_that_clients_send_pass(tmp_path: Path) -> None:
    """A provider, or a server in front of it, would refuse others with the status of a wrong key or an outage."""
    names = {
        *("openai-organization", "openai-project", "x-goog-user-project", "x-http-method-override"),
        *("cf-connecting-ip", "cdn-loop", "range", "if-match", "max-forwards", "x-original-url", "x-mine", "cookie"),
        *("accept-language", "anthropic-beta"),
    }
    kept = {"X-Title": "kept", "x-stainless-lang": "python", "OpenAI-Beta": "a=1", "Accept": "text/event-stream"}
    async with fake_provider() as fake, run(tmp_path, fake) as agent:
        headers = {**dict.fromkeys(names, "mine"), "Idempotency-Key": "k" * 5000, "http-referer": "ü", **kept}
        status, _, _ = await post(agent.url, PATHS["chat"], agent.session.key, request_body("chat"), **headers)
        assert status == 200
        sent = {name.lower(): value for name, value in fake.asked[0].headers.items()}
    assert set(sent) - {"host", "content-length", "authorization", "content-type", "accept-encoding"} == {
        *("x-title", "x-stainless-lang", "openai-beta", "accept", "user-agent")
    }
    assert sent["content-type"] == "application/json" and sent["openai-beta"] == "a=1"
    (call,) = reader.read(tmp_path).generations()
    assert set(call.attempts[0].dropped) == names | {"idempotency-key", "http-referer"}


@pytest.mark.parametrize(
    ("name", "value", "refusal", "code"),
    [
        ("User-Agent", "Python-urllib/3.11", (403, b"error code: 1010"), None),
        ("X-Stainless-Lang", "() { :; }", (500, b"<html>"), None),
        ("OpenAI-Beta", "fast", (429, b'{"error": {"message": "not in your plan"}}'), None),
        ("X-Title", "mine", (403, b'{"error": {"message": "not for you"}}'), None),
        ("X-Stainless-Lang", "py", (401, b'{"error": {"message": "no such key"}}'), "provider_error"),
    ],
)
async def test_a_refusal_that_ends_without_the_agents_headers_is_none(
    name: str, value: str, refusal: tuple[int, bytes], code: str | None, tmp_path: Path
) -> None:
    async def behave(request: Any, raw: bytes) -> Any:
        return await (replies(*refusal) if request.headers.get(name) == value else says(HELLO))(request, raw)

    async with fake_provider(behave) as fake, run(tmp_path, fake) as agent:
        headers = {name: value}
        status, _, _ = await post(agent.url, PATHS["chat"], agent.session.key, request_body("chat"), **headers)
        found = await agent.judge()
        assert (status, found.code if found else None) == (refusal[0] if code else 200, code)
        assert fake.asked[-1].headers["User-Agent"].startswith("Python/" if code else "pier")
    (call,) = reader.read(tmp_path).generations()
    assert code or name.lower() in call.attempts[-1].dropped


@pytest.mark.parametrize(("login", "found"), [(False, "agent"), (True, "provider")])
async def test_what_a_plain_request_is_refused_for_decides(login: bool, found: str, tmp_path: Path) -> None:
    """Not with a login: its provider may refuse whatever its own client does not send."""

    async def behave(request: Any, raw: bytes) -> Any:
        beta = request.headers.get("OpenAI-Beta")
        return await replies(503 if beta else 400, b'{"error": {"message": "no"}}')(request, raw)

    async with fake_provider(behave) as fake, Gateway(retry=QUICK) as gateway:
        provider = fake.provider("chat")
        if login:
            provider = replace(provider, login=OpenLogin(None, {"PIER_OPENAI_LOGIN_URL": fake.url}, "token"))
        session = gateway.session("m", upstream=provider, recording=tmp_path / "recording.jsonl")
        headers = {"OpenAI-Beta": "x", "User-Agent": "codex-cli"}
        await post(await gateway.serve(), PATHS["chat"], session.key, request_body("chat"), **headers)
        assert fake.asked[-1].headers["User-Agent"] == ("codex-cli" if login else "pier")
    (call,) = reader.read(tmp_path).generations()
    assert call.fault == found


class OpenLogin(CodexLogin):
    dialect = "chat"


def test_pauses_are_read_wherever_providers_write_them() -> None:
    google = {"error": {"code": 429, "details": [{"retryDelay": "23.5s"}]}}
    assert classify(429, google).asked == 23.5
    assert classify(429, {}, {"Retry-After": "7"}).asked == 7
    assert classify(529, {}, {"retry-after-ms": "1500"}).asked == 1.5
    assert classify(429, "<html>").asked is None
    assert not classify(402, {}).retryable and not classify(401, {}).retryable and classify(503, b"").retryable
