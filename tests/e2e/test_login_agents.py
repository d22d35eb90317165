"""Real Claude Code, Codex and Gemini CLI behind the gateway, with the login of the user's own client upstream."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from pier.agent.gemini_cli import ENTRY
from pier.gateway import Directory, Gateway
from pier.wire.turn import Request, Text, ToolCall, ToolResult, Turn, Usage
from tests.agent_rig import PACKS, need_pack, on_host
from tests.e2e.test_capture_agents import CODEX
from tests.gateway_fakes import thinks
from tests.job_tasks import PIER, make_task
from tests.login_provider import LoginProvider, login_provider, write_login
from tests.workspaces import stop_all

MODELS = {"claude-code": "claude-sonnet-4-5", "codex": "gpt-5.1-codex", "gemini-cli": "gemini-2.5-pro"}


def _command(agent: str, home: Path, url: str, key: str) -> tuple[list[str], dict[str, str]]:
    """The client with the session's key, and a home without a login."""
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
    if agent == "claude-code":
        env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": MODELS[agent]}
        env |= {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        return on_host(agent, "claude", "-p", "Say hello."), env
    if agent == "codex":
        (home / ".codex").mkdir(parents=True)
        (home / ".codex" / "config.toml").write_text(CODEX.format(url=url).replace("scripted", MODELS[agent]))
        return on_host(agent, "codex", "exec", "--skip-git-repo-check", "Say hello."), {**env, "PIER_MODEL_KEY": key}
    (home / ".gemini").mkdir(parents=True)
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    env |= {"GEMINI_API_KEY": key, "GOOGLE_GEMINI_BASE_URL": url}
    env |= {"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_CLI_TRUST_WORKSPACE": "true"}
    return on_host(agent, "node", ENTRY, "--model", MODELS[agent], "--prompt", "Say hello."), env


@pytest.mark.parametrize("agent", MODELS)
async def test_a_real_client_works_with_its_users_login(agent: str, tmp_path: Path) -> None:
    owner, home, work = (tmp_path / name for name in ("owner", "home", "work"))
    for path in (owner, home, work):
        path.mkdir()
    async with login_provider() as provider:
        write_login(owner, agent, provider.access, provider.refresh)
        directory = Directory.load({"HOME": str(owner), **provider.environ}, tmp_path / "none.toml")
        async with Gateway(providers=directory) as gateway:
            session = gateway.session()
            argv, env = _command(agent, home, await gateway.serve(), session.key)
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=work, env=env, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said = (await asyncio.wait_for(process.communicate(), 120))[0].decode(errors="replace")
        assert process.returncode == 0, said
        assert "Hello there, friend." in said
        assert provider.fake.asked and session.counts.calls and not session.counts.faults
        assert provider.access not in said


def _write_then_finish(request: Request) -> Turn:
    """Look for a login in the sandbox, write the file that is asked for, and end."""
    results = [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]
    if results or not request.tools:
        return Turn((Text("Done."),), "end", Usage(20, 5), id="turn_2", model="served")
    command = "echo hi > /tmp/answer; env; cat ~/.claude/.credentials.json /root/.claude/.credentials.json"
    arguments = json.dumps({"command": command, "description": "write"})
    return Turn((ToolCall("call_1", "Bash", arguments),), "tool_use", Usage(10, 5), id="turn_1", model="served")


async def _pier(*args: str, cwd: Path, **env: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *PIER, *args, cwd=cwd, env={**os.environ, **env}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said = (await asyncio.wait_for(process.communicate(), 300))[0].decode(errors="replace")
    assert process.returncode is not None
    return process.returncode, said


def _env(provider: LoginProvider, home: Path) -> dict[str, str]:
    return {**provider.environ, "HOME": str(home), "PIER_LOGINS": "on", "PIER_PACKS": str(PACKS)}


async def test_a_run_uses_the_login_and_the_sandbox_never_sees_it(tmp_path: Path) -> None:
    need_pack("claude-code")
    home = tmp_path / "home"
    make_task(tmp_path / "task")
    async with login_provider() as provider:
        provider.answer = thinks(_write_then_finish)
        write_login(home, "claude-code", "access-token-of-yesterday", provider.refresh, expires_in=-10)
        args = ("run", "task", "-a", "claude-code", "-m", "claude-sonnet-4-5", "--image", "host", "--job-name", "j")
        code, said = await _pier(*args, cwd=tmp_path, **_env(provider, home))
        assert code == 0, said
        (trial,) = [path.parent for path in tmp_path.glob("jobs/j/*/result.json")]
        result = json.loads((trial / "result.json").read_text())
        assert result["verifier_result"]["rewards"] == {"reward": 1.0}, said
        assert "anthropic with the login of Claude Code" in (trial / "trial.log").read_text()
        assert len(provider.refreshes) == 1
        kept = [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()]
        assert [path for path in kept if provider.access.encode() in path.read_bytes()] == []
        assert [path for path in kept if provider.refresh.encode() in path.read_bytes()] == []


async def test_a_login_that_is_over_is_never_a_zero(tmp_path: Path) -> None:
    need_pack("claude-code")
    home = tmp_path / "home"
    make_task(tmp_path / "task")
    run = ("run", "task", "-a", "claude-code", "-m", "claude-sonnet-4-5", "--image", "host")
    async with login_provider() as provider:
        provider.dead = True
        write_login(home, "claude-code", "access-token-of-yesterday", provider.refresh, expires_in=-10)
        _, said = await _pier(*run, "--job-name", "j", cwd=tmp_path, **_env(provider, home))
        (path,) = tmp_path.glob("jobs/j/*/result.json")
        result = json.loads(path.read_text())
        assert result["verifier_result"] is None, said
        assert result["exception_info"]["blame"] == "provider"
        assert "run: claude auth login" in result["exception_info"]["exception_message"]
        write_login(home, "claude-code", "access-token-of-yesterday", None, expires_in=-10)
        code, said = await _pier(*run, "--job-name", "k", cwd=tmp_path, **_env(provider, home))
        assert code == 2 and "has expired and cannot be refreshed" in said and "hint: claude auth login" in said
        assert not (tmp_path / "jobs" / "k").exists()
        write_login(home, "claude-code", provider.access, provider.refresh)
        code, said = await _pier(*run, "-a", "opencode", cwd=tmp_path, **_env(provider, home))
        assert code == 2 and "cannot run opencode with the login of Claude Code" in said


async def test_a_workspace_uses_the_login_and_captures_the_session(tmp_path: Path, pier_home: Path) -> None:
    need_pack("claude-code")
    home, ws = tmp_path / "home", tmp_path / "ws"
    async with login_provider() as provider:
        write_login(home, "claude-code", provider.access, provider.refresh)
        env = _env(provider, home)
        try:
            code, said = await _pier("start", "-d", "ws", "--image", "host", "-a", "claude-code", cwd=tmp_path, **env)
            assert code == 0, said
            code, said = await _pier("exec", "--", "claude", "-p", "Say hello.", cwd=ws, **env)
            assert code == 0 and "Hello there, friend." in said
            code, said = await _pier("exec", "--", "sh", "-c", "env; cat /logs/agent/sessions/.c*", cwd=ws, **env)
            assert provider.access not in said
            code, said = await _pier("capture", cwd=ws, **env)
            assert code == 0 and "the recording of its model calls" in said, said
            code, said = await _pier("traces", "show", cwd=ws, **env)
            assert "Hello there, friend." in said and "Say hello." in said
        finally:
            await asyncio.to_thread(stop_all, pier_home)
        kept = [path for path in ws.rglob("*") if path.is_file()]
        assert [path for path in kept if provider.access.encode() in path.read_bytes()] == []
