"""A provider that fails is never graded as a zero, and an agent cannot turn its zero into a fault of its provider."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.gateway.budget import Retry
from pier.gateway.providers import Provider
from pier.gateway.session import Session
from pier.trial.result import TrialResult
from pier.trial.spec import AgentChoice
from tests.fault.test_gateway_upstreams import HTML, events
from tests.gateway_fakes import (
    HELLO,
    PATHS,
    Behaviour,
    FakeProvider,
    fake_provider,
    replies,
    request_body,
    says,
    streams,
)
from tests.job_tasks import pier
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import TOML, Bench, write_task

CALL = r"""
call() {
  exec 3<>/dev/tcp/127.0.0.1/4000
  printf 'POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n' "$1" "$PIER_API_KEY" >&3
  printf 'Content-Length: %d\r\nConnection: close\r\n\r\n%s' "${#2}" "$2" >&3
  while IFS= read -r line <&3; do echo "$line"; done; exec 3>&-
}
"""
"""A function for bash: one request to the model, with its path and body."""


class Served(Gateway):
    """A gateway behind which one provider serves every model."""

    provider: Provider

    def session(self, model: str | None = None, **terms: Any) -> Session:
        return super().session("m", upstream=self.provider, **terms)


@asynccontextmanager
async def bench(place: str, root: Path, behaviour: Behaviour, dialect: str = "chat") -> AsyncIterator[Trials]:
    retry = Retry(attempts=2, first=0.01, longest=0.02, patience=1)
    async with fake_provider(behaviour) as fake, Served(retry=retry) as gateway:
        gateway.provider = fake.provider(dialect)
        async with open_place(place, root / "trials") as found:
            found.services = replace(found.services, gateway=gateway)
            yield Trials(found, root, fake)


class Trials:
    def __init__(self, bench: Bench, root: Path, fake: FakeProvider) -> None:
        self.bench, self.root, self.fake = bench, root, fake

    async def run(self, script: str, test: str = "echo 0 > /logs/verifier/reward.txt", **choice: Any) -> TrialResult:
        """A trial of an agent that is a bash script."""
        task = write_task(self.root / f"task-{self.bench.count}", toml=TOML, test=f"#!/bin/bash\n{test}\n")
        options = {"command": ["bash", "-c", CALL + script]}
        return await self.bench.run(task, AgentChoice("command", "m", options=options, **choice))


def ask(dialect: str = "chat", **more: Any) -> str:
    body = json.dumps({**request_body(dialect, stream=bool(more.get("stream"))), **more})
    return f"call {PATHS[dialect]} '{body}'\n"


def told(result: TrialResult) -> tuple[str | None, str | None, Any]:
    error = result.exception_info
    return (error.code if error else None, error.blame if error else None, result.rewards)


def error(status: int, **facts: Any) -> Behaviour:
    return replies(status, json.dumps({"error": {"message": "no", **facts}}).encode())


def when(word: bytes, behaviour: Behaviour) -> Behaviour:
    """The behaviour for requests that hold the word; others are answered."""

    async def behave(request: Any, raw: bytes) -> Any:
        return await (behaviour if word in raw else says(HELLO))(request, raw)

    return behave


CREDIT = "Your credit balance is too low to access the Anthropic API."
FAULTS: dict[str, tuple[str, Behaviour, str]] = {
    "a key that the provider refuses": ("chat", error(401), "provider_error"),
    "a key without permission": ("anthropic", error(403, type="permission_error"), "provider_error"),
    "a rate limit that does not pass": ("chat", error(429), "provider_rate_limit"),
    "a quota that is used up": ("chat", error(429, code="insufficient_quota"), "provider_quota"),
    "a credit balance that is too low": ("anthropic", error(400, message=CREDIT), "provider_quota"),
    "a model that the provider does not know": ("chat", error(404, code="model_not_found"), "provider_error"),
    "an outage": ("gemini", error(503, type="UNAVAILABLE"), "provider_error"),
    "a web page instead of an answer": (
        "responses",
        replies(200, HTML, {"Content-Type": "text/html"}),
        "provider_error",
    ),
    "a stream that is cut off": ("anthropic", streams(*events("anthropic")[:4], cut=True), "provider_error"),
    "an error event inside a stream": (
        "anthropic",
        streams(*events("anthropic")[:3], b'data: {"type":"error","error":{"type":"api_error","message":"oh"}}\n\n'),
        "provider_error",
    ),
    "an answer without choices": ("chat", replies(200, b'{"id": "c", "choices": []}'), "provider_error"),
    "an error with status 200": ("chat", replies(200, b'{"error": {"code": 502, "message": "oh"}}'), "provider_error"),
}


@route(
    "verdicts", "a provider that fails, and an agent that ends as if all were well", "no reward, blamed on the provider"
)
@everywhere
async def test_a_failing_provider_leaves_no_reward(place: str, tmp_path: Path) -> None:
    """Whatever the verifier would say, and whatever the agent's exit code is."""
    good = "echo 1 > /logs/verifier/reward.txt"
    for number, (name, (dialect, behaviour, code)) in enumerate(FAULTS.items()):
        root = tmp_path / str(number)
        async with bench(place, root, behaviour, dialect) as trials:
            stream = {"stream": True} if "stream" in name else {}
            result = await trials.run(ask(dialect, **stream) + ("exit 3" if number % 2 else ""), good)
            assert told(result) == (code, "provider", None), name


@route("verdicts", "a rate limit or an outage that passes", "the agent never sees it, and is graded")
@everywhere
async def test_a_passing_rate_limit_is_never_seen(place: str, tmp_path: Path) -> None:
    async with bench(place, tmp_path, says(HELLO)) as trials:
        trials.fake.then = [replies(429, b"{}", {"Retry-After": "0"})]
        result = await trials.run(ask() + "call /v1/models x; touch /app/done", "echo 1 > /logs/verifier/reward.txt")
        assert told(result) == (None, None, {"reward": 1}) and len(trials.fake.asked) == 2
        assert result.agent_result is not None and result.agent_result.metadata is not None
        assert result.agent_result.metadata["model_retries"] == 1
        assert "model: 1 retries after faults of the provider" in (trials.bench.last / "trial.log").read_text()
        assert b"429" not in (trials.bench.last / "agent" / "command.txt").read_bytes()


def nested(depth: int, **fields: Any) -> str:
    """A request in which lists are inside of one another."""
    script = ask(**(fields or {"messages": [{"role": "user", "content": "@"}]}))
    return script.replace('"@"', "[" * depth + "]" * depth)


PROVOKED: dict[str, tuple[Behaviour, str]] = {
    "a wrong request": (error(400, type="invalid_request_error"), ask(temperature="hot")),
    "a request with a quoted error": (error(400, message=f"invalid value '{CREDIT}'"), ask(user=CREDIT)),
    "a prompt that is too long": (error(400, code="context_length_exceeded"), ask()),
    "a request that is too large": (error(413), ask()),
    "words against the content policy": (error(403, metadata={"flagged_input": "x"}), ask()),
    "a file that does not exist": (
        when(b"file_id", error(404)),
        ask(messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]),
    ),
    "settings of the stream that are none": (says(HELLO), ask(stream=True, stream_options=7)),
    "a prompt that is nested deeply": (says(HELLO), nested(500)),
    "another prompt that is nested deeply": (says(HELLO), nested(900)),
    "a field that is nested deeply": (says(HELLO), ask() + nested(700, metadata="@")),
    "another model": (error(404), ask(models=["nobody/serves-this"])),
    "garbage": (error(400), "call /v1/chat/completions '{\"messages\": 7, \"tools\": {}}'\n"),
    "no request at all": (says(HELLO), "call /v1/chat/completions '{'\n"),
    "a route that does not exist": (error(404), ask() .replace("/v1/chat/completions", "/v1/files") ),
    "a request that it gives up": (
        says(HELLO),
        "exec 3<>/dev/tcp/127.0.0.1/4000; printf 'POST /v1/responses HTTP/1.1\\r\\n' >&3; exec 3>&-\n",
    ),
}  # fmt: skip


@route("verdicts", "an agent that provokes an error of its provider to lose its zero", "the zero stands")
@everywhere
async def test_a_provoked_error_does_not_void_a_zero(place: str, tmp_path: Path) -> None:
    for number, (name, (behaviour, script)) in enumerate(PROVOKED.items()):
        async with bench(place, tmp_path / str(number), behaviour) as trials:
            result = await trials.run(script)
            assert result.rewards == {"reward": 0}, (name, told(result))
            assert told(result)[1] in (None, "agent"), name


HANG_UP = """
import os, socket, time
body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer %s\\r\\n"
head += "Content-Length: %d\\r\\n\\r\\n"
head = (head % (os.environ["PIER_API_KEY"], len(body))).encode()
calls = [socket.create_connection(("127.0.0.1", 4000)) for _ in range(40)]
for call in calls:
    call.sendall(head + body)
time.sleep(0.5)
for call in calls:
    call.close()
time.sleep(600)
"""


@route(
    "verdicts", "an agent cuts off many calls before they are answered, and sleeps to its deadline", "the zero stands"
)
@pytest.mark.plain
async def test_calls_that_are_cut_off_at_once_are_no_wait(tmp_path: Path) -> None:
    async def late(request: Any, raw: bytes) -> Any:
        await asyncio.sleep(3)
        return await says(HELLO)(request, raw)

    async with bench("local", tmp_path, late) as trials:
        task = write_task(tmp_path / "task", toml=TOML, test="#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n")
        options = {"command": ["/usr/bin/python3", "-c", HANG_UP]}
        result = await trials.bench.run(task, AgentChoice("command", "m", options=options, timeout=8))
        assert told(result) == ("agent_timeout", "agent", {"reward": 0})


@route("verdicts", "a side call that fails after the work was done", "the run is graded")
@everywhere
async def test_a_failed_side_call_does_not_void_a_run(place: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    title = [{"role": "user", "content": "Write a title for this session."}]
    async with bench(place, tmp_path, error(401)) as trials:
        trials.fake.then = [says(HELLO)]
        script = ask(tools=tools) + ask(messages=title) + "call /v1/messages/count_tokens '{}'"
        assert told(await trials.run(script)) == (None, None, {"reward": 0})


@route("verdicts", "a step of a task whose provider fails after a good step", "the whole trial has no reward")
@everywhere
async def test_a_provider_that_fails_in_the_second_step(place: str, tmp_path: Path) -> None:
    toml = TOML + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    test = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    steps = {f"steps__{name}__{part}": text for name in ("one", "two") for part, text in
             (("instruction.md", "Do it.\n"), ("tests__test.sh", test))}  # fmt: skip
    async with bench(place, tmp_path, error(401)) as trials:
        trials.fake.then = [says(HELLO)]
        task = write_task(tmp_path / "task", toml=toml, test="", **steps)
        options = {"command": ["bash", "-c", CALL + ask()]}
        result = await trials.bench.run(task, AgentChoice("command", "m", options=options))
        assert told(result) == ("provider_error", "provider", None)
        assert result.step_results is not None
        assert [step.verifier_result is not None for step in result.step_results] == [True, False]


@route("verdicts", "a job whose provider fails", "exit code 1, lower coverage, and retry --only infra runs it again")
@pytest.mark.plain
async def test_a_job_counts_it_against_coverage_and_retries_it(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "agent.sh").write_text("#!/bin/bash\n" + CALL + ask())
    async with fake_provider(error(401)) as fake:
        env = {"OPENAI_BASE_URL": f"{fake.url}/v1", "OPENAI_API_KEY": "sk-test"}
        command = (
            "run",
            "-p",
            "tasks",
            "-a",
            "command",
            "--ak",
            "script=agent.sh",
            "-m",
            "openai/gpt-4o",
            "--job-name",
            "j",
        )

        async def run(*args: str, code: int) -> dict[str, Any]:
            done = await asyncio.to_thread(pier, *args, "--json", cwd=tmp_path, code=code, **env)
            return json.loads(done.stdout)

        first = await run(*command, "--image", "host", code=1)
        (summary,) = first["stats"]["evals"].values()
        assert summary["n_errors"] == 1 and summary["pier"]["coverage"] == 0
        fake.always = says(HELLO)
        again = await run("job", "retry", "jobs/j", "--only", "infra", code=0)
        (summary,) = again["stats"]["evals"].values()
        assert summary["pier"]["coverage"] == 1 and len(fake.asked) == 2
