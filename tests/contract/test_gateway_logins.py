"""The user's own logins at the gateway: the routes and headers that each client really sends, refreshes, and errors."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pier.errors import UsageError
from pier.gateway import Directory, Gateway
from pier.gateway.budget import Retry
from pier.record.reader import read
from tests.gateway_fakes import PATHS, STREAM_PATHS, post, request_body
from tests.login_provider import CLAUDE_BETAS, USER_AGENTS, LoginProvider, jwt, login_provider, write_login

CLIENTS = {
    "claude-code": ("anthropic", "claude-sonnet-4-5"),
    "codex": ("responses", "gpt-5.1-codex"),
    "gemini-cli": ("gemini", "gemini-2.5-pro"),
}


@pytest.fixture
async def provider() -> AsyncIterator[LoginProvider]:
    async with login_provider() as found:
        yield found


def _directory(provider: LoginProvider, home: Path, **variables: str) -> Directory:
    return Directory.load({"HOME": str(home), **provider.environ, **variables}, home / "none.toml")


async def _ask(
    directory: Directory, client: str, *, stream: bool = False, recording: Path | None = None, user_agent: str = ""
):
    """One call as the client makes it, with the session's key."""
    dialect, model = CLIENTS[client]
    body = request_body(dialect, stream=stream)
    if dialect == "responses":
        body["store"] = False
    headers = {"User-Agent": user_agent or USER_AGENTS[client]}
    if dialect == "anthropic":
        headers["anthropic-beta"] = CLAUDE_BETAS
    async with Gateway(providers=directory, retry=Retry(attempts=1)) as gateway:
        session = gateway.session(model, recording=recording)
        url = await gateway.serve()
        path = (STREAM_PATHS if stream else PATHS)[dialect] + ("?beta=true" if dialect == "anthropic" else "")
        status, _, raw = await post(url, path, session.key, body, **headers)
        return status, raw, session


def _expired(client: str, home: Path, provider: LoginProvider) -> Path:
    access = jwt(exp=time.time() - 60) if client == "codex" else "an-access-token-of-yesterday"
    return write_login(home, client, access, provider.refresh, expires_in=-60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_login_is_used_as_its_client_uses_it(
    client: str, stream: bool, provider: LoginProvider, tmp_path: Path
) -> None:
    write_login(tmp_path, client, provider.access, provider.refresh)
    recording = tmp_path / "recording.jsonl"
    status, raw, session = await _ask(_directory(provider, tmp_path), client, stream=stream, recording=recording)
    assert status == 200, raw
    assert b"Hello" in raw and b"traceId" not in raw
    assert "the login of" in (session.served_by or "")
    assert (session.meter.input_tokens, session.meter.output_tokens) == (11, 7)
    sent = provider.fake.asked[-1]
    assert session.key not in str(sent)
    call = read(recording).generations()[0]
    assert (call.outcome, call.status) == ("ok", 200)
    assert call.attempts[0].url.startswith(provider.fake.url)
    assert provider.access not in recording.read_text()


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_expired_login_is_refreshed_and_written_back(
    client: str, provider: LoginProvider, tmp_path: Path
) -> None:
    path = _expired(client, tmp_path, provider)
    before = json.loads(path.read_text())
    status, raw, _ = await _ask(_directory(provider, tmp_path), client)
    assert status == 200, raw
    assert len(provider.refreshes) == 1
    after = json.loads(path.read_text())
    text = json.dumps(after)
    assert provider.access in text and provider.refresh in text
    assert after.keys() == before.keys()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir() if entry.name.endswith((".tmp", "_refresh.lock"))] == []
    assert (await _ask(_directory(provider, tmp_path), client))[0] == 200
    assert len(provider.refreshes) == 1


@pytest.mark.parametrize("client", CLIENTS)
async def test_many_calls_in_two_gateways_refresh_once(client: str, provider: LoginProvider, tmp_path: Path) -> None:
    _expired(client, tmp_path, provider)
    asked = (_ask(_directory(provider, tmp_path), client) for _ in range(4))
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 4
    assert len(provider.refreshes) == 1


async def test_a_login_that_its_client_refreshed_meanwhile_is_read_again(
    provider: LoginProvider, tmp_path: Path
) -> None:
    write_login(tmp_path, "claude-code", provider.access, provider.refresh)
    directory = _directory(provider, tmp_path)
    assert (await _ask(directory, "claude-code"))[0] == 200
    provider.next_tokens()
    write_login(tmp_path, "claude-code", provider.access, provider.refresh)
    assert (await _ask(directory, "claude-code"))[0] == 200
    assert provider.refreshes == []


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_login_that_cannot_be_refreshed_says_what_to_type(
    client: str, provider: LoginProvider, tmp_path: Path
) -> None:
    path = _expired(client, tmp_path, provider)
    provider.dead = True
    before, recording = path.read_text(), tmp_path / "recording.jsonl"
    status, raw, session = await _ask(_directory(provider, tmp_path), client, recording=recording)
    assert status == 400
    assert b"could not be refreshed" in raw and b"run: " in raw and b"revoked" in raw
    assert session.counts.last == ("provider", 400)
    assert path.read_text() == before
    call = read(recording).generations()[0]
    assert call.outcome == "error" and call.error


async def test_a_refresh_is_finished_when_its_agent_leaves(provider: LoginProvider, tmp_path: Path) -> None:
    path = _expired("claude-code", tmp_path, provider)
    provider.slow = asyncio.Event()
    asking = asyncio.ensure_future(_ask(_directory(provider, tmp_path), "claude-code"))
    while not provider.refreshes:
        await asyncio.sleep(0.01)
    asking.cancel()  # the agent goes, and the gateway with it
    await asyncio.sleep(0.1)
    provider.slow.set()
    await asyncio.wait({asking})
    assert provider.refresh in path.read_text()
    assert not (path.parent / ".oauth_refresh.lock").exists()


@pytest.mark.plain
async def test_a_login_that_cannot_be_written_back_is_not_refreshed(provider: LoginProvider, tmp_path: Path) -> None:
    path = _expired("codex", tmp_path, provider)
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    path.chmod(0o400)
    status, raw, _ = await _ask(_directory(provider, tmp_path), "codex")
    assert status == 400 and b"is read-only" in raw and provider.refreshes == []


async def test_a_lock_that_a_dead_client_left_is_taken_over(provider: LoginProvider, tmp_path: Path) -> None:
    path = _expired("claude-code", tmp_path, provider)
    lock = path.parent / ".oauth_refresh.lock"
    lock.mkdir()
    os.utime(lock, (1000, 1000))
    assert (await _ask(_directory(provider, tmp_path), "claude-code"))[0] == 200
    assert not lock.exists()


async def test_a_refused_token_is_refreshed_once(provider: LoginProvider, tmp_path: Path) -> None:
    write_login(tmp_path, "claude-code", "a-token-that-was-revoked", provider.refresh)
    assert (await _ask(_directory(provider, tmp_path), "claude-code"))[0] == 200
    write_login(tmp_path, "claude-code", "a-token-that-was-revoked", "another")
    status, raw, _ = await _ask(_directory(provider, tmp_path), "claude-code")
    assert status == 400 and b"claude auth login" in raw


async def test_a_token_in_a_variable_is_used_and_not_refreshed(provider: LoginProvider, tmp_path: Path) -> None:
    good = _directory(provider, tmp_path, CLAUDE_CODE_OAUTH_TOKEN=provider.access)
    assert (await _ask(good, "claude-code"))[0] == 200
    bad = _directory(provider, tmp_path, CLAUDE_CODE_OAUTH_TOKEN="sk-ant-oat01-of-last-year")
    status, raw, _ = await _ask(bad, "claude-code")
    assert status == 400 and b"claude setup-token" in raw


async def test_a_login_serves_its_own_client_alone(provider: LoginProvider, tmp_path: Path) -> None:
    write_login(tmp_path, "claude-code", provider.access, provider.refresh)
    directory = _directory(provider, tmp_path)
    status, raw, session = await _ask(directory, "claude-code", user_agent="opencode/1.0")
    assert status == 400 and b"ANTHROPIC_API_KEY" in raw
    assert session.counts.last[0] == "agent"
    assert provider.fake.asked == []


async def test_gemini_counts_tokens_with_a_login(provider: LoginProvider, tmp_path: Path) -> None:
    write_login(tmp_path, "gemini-cli", provider.access, provider.refresh)
    async with Gateway(providers=_directory(provider, tmp_path)) as gateway:
        session = gateway.session("gemini-2.5-pro")
        url = await gateway.serve()
        body: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
        path = "/v1beta/models/gemini-2.5-pro:countTokens"
        status, _, raw = await post(url, path, session.key, body, **{"User-Agent": USER_AGENTS["gemini-cli"]})
    assert (status, json.loads(raw)) == (200, {"totalTokens": 4321})


def test_a_key_wins_over_a_login_and_an_address_drops_it(tmp_path: Path) -> None:
    write_login(tmp_path, "claude-code", "a-claude-access-token", "r")
    write_login(tmp_path, "codex", jwt(exp=time.time() + 60), "r")
    home, none = {"HOME": str(tmp_path)}, tmp_path / "none.toml"
    with_login = Directory.load(home, none)
    assert with_login.get("anthropic").login and with_login.get("openai").login and not with_login.get("google").login
    assert "a-claude-access-token" not in repr(with_login.get("anthropic"))
    keyed = Directory.load({**home, "ANTHROPIC_API_KEY": "k"}, none).get("anthropic")
    assert (keyed.login, keyed.key, keyed.credential) == (None, "k", "the key in ANTHROPIC_API_KEY")
    assert Directory.load({**home, "ANTHROPIC_BASE_URL": "http://h"}, none).get("anthropic").login is None
    assert with_login.connected("claude-x", {}, base_url="http://h").provider.login is None
    assert with_login.connected("claude-x", {"K": "v"}, model_api_key_name="K").provider.login is None
    assert Directory.load({}, none).get("anthropic").login is None


def test_a_key_that_codex_keeps_is_a_key(tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "auth.json").write_text('{"OPENAI_API_KEY": "sk-of-codex", "tokens": null}')
    found = Directory.load({"HOME": str(tmp_path)}, tmp_path / "none.toml").get("openai")
    assert (found.key, found.login, found.dialects) == ("sk-of-codex", None, ("responses", "chat"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"claudeAiOauth": {}}', '{"claudeAiOauth": 3}', '"x"'])
def test_a_broken_login_file_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / ".credentials.json").write_text(text)
    provider = Directory.load({"HOME": str(tmp_path)}, tmp_path / "none.toml").get("anthropic")
    with pytest.raises(UsageError) as broken:
        provider.check()
    assert broken.value.code == "login-unreadable" and "claude auth login" in (broken.value.hint or "")


def test_an_expired_login_without_a_refresh_token_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_login(tmp_path, "claude-code", "token", None, expires_in=-1)
    provider = Directory.load({"HOME": str(tmp_path)}, tmp_path / "none.toml").get("anthropic")
    with pytest.raises(UsageError, match="has expired") as expired:
        provider.check()
    assert expired.value.code == "login-expired" and expired.value.blame == "user"
