"""`pier gateway serve` and `show`, as a user runs them; and what is left when the gateway is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from pier.agent.contract import AGENTS, find_agent
from pier.cli.gateway import exports
from pier.endpoint import Endpoint
from pier.gateway import Gateway
from pier.record import reader
from pier.wire.turn import Request
from tests.gateway_fakes import HELLO, PATHS, STREAM_PATHS, fake_provider, post, request_body, says, streams


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`pier gateway serve`, and the variables it prints."""
    command = [sys.executable, "-m", "pier", "gateway", "serve", "--port", "0", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        found: dict[str, str] = {}
        for line in process.stdout:
            if match := re.match(r"export (\w+)=(.*)", line):
                found[match[1]] = match[2]
            if line.startswith("export LLM_MODEL"):
                break
        yield process, found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.stdout
        process.stdout.close()


def pier(*args: str) -> str:
    return subprocess.run([sys.executable, "-m", "pier", *args], check=True, capture_output=True, text=True).stdout


async def test_serve_prints_variables_that_work_and_show_prints_the_calls(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with fake_provider(says(HELLO)) as fake:
        args = ("-m", "some-model", "--upstream", f"chat,anthropic+{fake.url}", "-o", str(path), "--max-turns", "2")
        with serving(*args) as (process, found):
            url = found["ANTHROPIC_BASE_URL"]
            assert found["OPENAI_BASE_URL"] == f"{url}/v1"
            assert found["ANTHROPIC_MODEL"] == "some-model"
            statuses = [
                (await post(url, PATHS[client], found["OPENAI_API_KEY"], request_body(client)))[0]
                for client in ("chat", "anthropic", "gemini")
            ]
            assert statuses == [200, 200, 400]
        assert process.returncode == 0
    table = pier("gateway", "show", str(tmp_path))
    assert "2 of 2 turns" in table
    assert "3 calls; closed:" in table
    rows = json.loads(pier("gateway", "show", str(path), "--json"))
    assert [row["outcome"] for row in rows] == ["ok", "ok", "refused"]
    whole = json.loads(pier("gateway", "show", str(path), "1"))
    assert whole["request"] == request_body("chat")
    assert HELLO.text in whole["answer"]


@pytest.mark.parametrize("model", ["some-model", "a model; $HOME", ""])
def test_every_agent_is_told_what_to_export(model: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:4000", "sk-pier-key", model)
    lines = exports(endpoint)
    agents = {name for name in AGENTS if name != "terminus-2" and find_agent(name).dialect}
    sections = {line.removeprefix("# ").partition(":")[0]: at for at, line in enumerate(lines) if line.startswith("# ")}
    assert set(sections) - {"OpenAI, Anthropic and Gemini clients", "terminus-2"} == agents
    for name in agents:
        after = [at for at in sections.values() if at > sections[name]]
        section = "\n".join(lines[sections[name] : min(after, default=len(lines))])
        assert endpoint.url in section and endpoint.key in section, name
        assert model in section or json.dumps(model)[1:-1] in section, name
    script = "\n".join([*lines, "env"])
    environ = {"PATH": "/usr/bin:/bin"}
    told = subprocess.run(["sh", "-euc", script], check=True, capture_output=True, text=True, env=environ).stdout
    found = dict(line.split("=", 1) for line in told.splitlines())
    assert found["ANTHROPIC_BASE_URL"] == endpoint.url and found["OPENAI_BASE_URL"] == f"{endpoint.url}/v1"
    assert found.get("ANTHROPIC_MODEL", "") == model
    assert found.get("LLM_MODEL", "") == (f"openai/{model}" if model else "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-turns", "0"), "--max-turns"),
        (("--rpm", "0"), "--rpm"),
        (("--max-cost", "-1"), "--max-cost"),
        (("--port", "70000"), "--port"),
        (("-o", "/proc/nowhere/calls.jsonl"), "cannot be written"),
        (("--upstream", "ftp://127.0.0.1"), "not an http or https address"),
    ],
)
def test_serve_says_what_is_wrong(args: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "pier", "gateway", "serve", "-m", "x", "--upstream", "http://127.0.0.1:1", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


async def test_serve_at_an_address_of_the_newer_kind() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    async with Gateway() as gateway:
        try:
            url = await gateway.serve("::1")
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
        session = gateway.session("m", upstream=hello)
        assert url.startswith("http://[::1]:")
        assert (await post(url, PATHS["chat"], session.key, request_body("chat")))[0] == 200


async def hello(request: Request) -> str:
    return "hello"


def test_serve_without_a_key_says_what_to_do() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    command = [sys.executable, "-m", "pier", "gateway", "serve", "--port", "0", "-m", "anthropic/claude-x"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "export ANTHROPIC_API_KEY" in done.stderr


async def read_until_killed(
    url: str, key: str, mark: bytes, process: subprocess.Popen[str], written: Path | None = None
) -> bytes:
    """A streamed answer up to the moment that `mark` arrives; the gateway is killed then. With `written`, once the last
    call of that recording has an answer: what is streamed follows a moment after it was delivered."""
    raw = b""
    async with aiohttp.ClientSession() as http:
        headers, body = {"Authorization": f"Bearer {key}"}, request_body("chat", "last", stream=True)
        async with http.post(url + STREAM_PATHS["chat"], json=body, headers=headers) as response:
            while mark not in raw:
                raw += await asyncio.wait_for(response.content.readany(), 60)
            async with asyncio.timeout(60):
                while written and not reader.read(written).calls[-1].answer:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
    return raw


@pytest.mark.parametrize(("mark", "outcome"), [(b"[DONE]", "ok"), (b"Hello", "interrupted")])
async def test_a_killed_gateway_loses_nothing_that_the_agent_has_seen(
    mark: bytes, outcome: str, tmp_path: Path
) -> None:
    path, never = tmp_path / "calls.jsonl", asyncio.Event()
    chunks = [b'data: {"choices":[{"index":0,"delta":{"content":"Hello"}}]}\n\n']
    if outcome == "ok":
        chunks += [b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
    async with fake_provider(streams(*chunks, wait=never)) as fake:
        fake.then = [says(HELLO), says(HELLO)]
        with serving("-m", "m", "--upstream", fake.url, "-o", str(path)) as (process, found):
            url, key = found["ANTHROPIC_BASE_URL"], found["OPENAI_API_KEY"]
            for stream in (False, True):
                where = (STREAM_PATHS if stream else PATHS)["chat"]
                assert (await post(url, where, key, request_body("chat", str(stream), stream=stream)))[0] == 200
            waits = path if outcome == "interrupted" else None
            raw = await read_until_killed(url, key, mark, process, waits)
    calls = reader.read(path).generations()
    assert [call.outcome for call in calls] == ["ok", "ok", outcome]
    assert [call.request["messages"][0]["content"] for call in calls] == ["False", "True", "last"]
    assert calls[-1].answer
    assert calls[-1].answer.body.startswith(raw)


def test_an_address_that_is_taken_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('[{"text": "hi"}]')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for more in (["--port", port], ["--port", "0", "--metrics", f"127.0.0.1:{port}"]):
            command = [sys.executable, "-m", "pier", "gateway", "serve", "-m", f"script:{script}", *more]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2
            assert done.stderr.startswith(f"pier: the gateway cannot listen at 127.0.0.1:{port}: ")
