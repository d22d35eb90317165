"""Faults of providers, disks, tests and arguments, none of which may become a zero or hide one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pier.agent.contract import Agent, AgentRun, Launch
from pier.errors import ArgumentError, SandboxError, VerifierError
from pier.gateway import Gateway
from pier.gateway.budget import Retry
from pier.gateway.providers import Provider
from pier.gateway.session import Session
from pier.image.model import host_image
from pier.network.policy import Decision
from pier.sandbox.contract import OnOutput, Result, Sandbox, SandboxSpec
from pier.trial import record
from pier.trial.config import AgentConfig, EnvironmentConfig
from pier.trial.result import TrialResult
from pier.trial.run import run_trial
from pier.trial.spec import SandboxChoice, TrialSpec
from pier.trial.verify import NetworkUse, is_machine_fault, network_faults
from tests.engine import cannot_mount, missing
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
from tests.job_tasks import PIER, make_task, pier
from tests.redteam import route
from tests.redteam.places import bash_engine, everywhere, open_place
from tests.trial_runs import PASS, TOML, Bench, kinds, write_task
from tests.world import in_world

CALL = r"""
call() {
  exec 3<>/dev/tcp/127.0.0.1/4000
  printf 'POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n' "$1" "$PIER_API_KEY" >&3
  printf '%bContent-Length: %d\r\nConnection: close\r\n\r\n%s' "${3:-}" "${#2}" "$2" >&3
  while IFS= read -r line <&3; do echo "$line"; done; exec 3>&-
}
"""
"""A function for bash: one request to the model, with its path, its body and more headers."""


class Served(Gateway):
    """A gateway behind which one provider serves every model."""

    provider: Provider

    def session(self, model: str | None = None, **terms: Any) -> Session:
        return super().session("m", **{**terms, "upstream": self.provider})


@asynccontextmanager
async def bench(place: str, root: Path, behaviour: Behaviour, dialect: str = "chat") -> AsyncIterator[Trials]:
    async with open_place(place, root / "trials") as found, serving(found, root, behaviour, dialect) as trials:
        yield trials


@asynccontextmanager
async def serving(found: Bench, root: Path, behaviour: Behaviour, dialect: str = "chat") -> AsyncIterator[Trials]:
    """Trials on an open bench, with a provider of their own."""
    retry = Retry(attempts=2, first=0.01, longest=0.02, patience=1)
    async with fake_provider(behaviour) as fake, Served(retry=retry) as gateway:
        gateway.provider = fake.provider(dialect)
        found.services = replace(found.services, gateway=gateway)
        yield Trials(found, root, fake)


class Trials:
    def __init__(self, bench: Bench, root: Path, fake: FakeProvider) -> None:
        self.bench, self.root, self.fake = bench, root, fake

    async def run(self, script: str, test: str = "echo 0 > /logs/verifier/reward.txt", **choice: Any) -> TrialResult:
        """A trial of an agent that is a bash script."""
        task = write_task(self.root / f"task-{self.bench.count}", toml=TOML, test=f"#!/bin/bash\n{test}\n")
        options = {"command": ["bash", "-c", CALL + script]}
        return await self.bench.run(task, AgentConfig(name="command", model_name="m", kwargs=options, **choice))


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
    "a conflict of its own": ("anthropic", error(409), "provider_error"),
    "a request that went to the wrong server": ("responses", error(421), "provider_error"),
    "a request that it cancelled": ("gemini", error(499, code="CANCELLED"), "provider_error"),
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
    async with open_place(place, tmp_path / "trials") as found:
        for number, (name, (dialect, behaviour, code)) in enumerate(FAULTS.items()):
            async with serving(found, tmp_path, behaviour, dialect) as trials:
                stream = {"stream": True} if "stream" in name else {}
                result = await trials.run(ask(dialect, **stream) + ("exit 3" if number % 2 else ""), good)
                assert told(result) == (code, "provider", None), (name, result.exception_info)


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
    "a file that is in use": (
        when(b"file_id", error(409)),
        ask(messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]),
    ),
    "settings of the stream that are none": (says(HELLO), ask(stream=True, stream_options=7)),
    "a prompt that is nested deeply": (says(HELLO), nested(500)),
    "another prompt that is nested deeply": (says(HELLO), nested(900)),
    "a field that is nested deeply": (says(HELLO), ask() + nested(700, metadata="@")),
    "another model": (when(b"serves-this", error(404)), ask(models=["nobody/serves-this"])),
    "garbage": (error(400), "call /v1/chat/completions '{\"messages\": 7, \"tools\": {}}'\n"),
    "no request at all": (says(HELLO), "call /v1/chat/completions '{'\n"),
    "a grammar that cannot be translated": (
        says(HELLO), ask("responses", tools=[{"type": "custom", "name": "f", "format": "x"}]),
    ),
    "a choice of a tool that was taken out": (
        says(HELLO), ask(tools=[{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}],
                         tool_choice={"function": 1.5}),
    ),
    "a route that does not exist": (error(404), ask() .replace("/v1/chat/completions", "/v1/files") ),
    "a request that it gives up": (
        says(HELLO),
        "exec 3<>/dev/tcp/127.0.0.1/4000; printf 'POST /v1/responses HTTP/1.1\\r\\n' >&3; exec 3>&-\n",
    ),
}  # fmt: skip


@route("verdicts", "an agent that provokes an error of its provider to lose its zero", "the zero stands")
@everywhere
async def test_a_provoked_error_does_not_void_a_zero(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as found:
        for name, (behaviour, script) in PROVOKED.items():
            async with serving(found, tmp_path, behaviour) as trials:
                result = await trials.run(script)
                assert result.rewards == {"reward": 0}, (name, told(result))
                assert told(result)[1] in (None, "agent"), name


def edge(status: int, name: str, value: str = "") -> Behaviour:
    """A provider behind a server that refuses requests with this in their header, or in their target, with a page."""

    async def behave(request: Any, raw: bytes) -> Any:
        found = request.headers.get(name) if name else request.query_string
        page = replies(status, HTML, {"Content-Type": "text/html"})
        return await (page if found is not None and value in found else says(HELLO))(request, raw)

    return behave


HEADERS: dict[str, tuple[Behaviour, str]] = {
    "a header of proxies": (edge(508, "CDN-Loop"), "CDN-Loop: cloudflare; loops=9"),
    "another target": (edge(404, "X-Original-URL"), "X-Original-URL: /nowhere"),
    "a header of few hops": (edge(502, "Max-Forwards"), "Max-Forwards: 0"),
    "a header of no one": (edge(403, "X-Mine"), "X-Mine: 1"),
    "a client that is banned": (edge(403, "User-Agent", "urllib"), "User-Agent: Python-urllib/3.11"),
    "an attack in an allowed header": (edge(403, "X-Stainless-Lang", "<"), "X-Stainless-Lang: <script>"),
    "a value that is very long": (edge(502, "User-Agent", "a" * 5000), "User-Agent: " + "a" * 9000),
    "a header that comes often": (edge(500, "User-Agent", "a, a"), "\\r\\n".join(["User-Agent: a"] * 9)),
    "bytes that are no text": (says(HELLO), "User-Agent: \\0377\\0376"),
    "an attack in the query": (edge(403, "", "script"), "?<script>"),
    "a limit of a feature": (edge(429, "OpenAI-Beta"), "OpenAI-Beta: long"),
}


@route(
    "verdicts",
    "an agent adds a header or a query that its provider, or a server in front of it, refuses as if it were down",
    "it is not sent, or the request is sent again without it",
)
@everywhere
async def test_a_header_of_the_agent_does_not_void_a_zero(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as found:
        for name, (behaviour, header) in HEADERS.items():
            async with serving(found, tmp_path, behaviour) as trials:
                query, header = (header, "") if header.startswith("?") else ("", f"{header}\\r\\n")
                script = ask().replace(PATHS["chat"], PATHS["chat"] + f"'{query}'").rstrip("\n")
                result = await trials.run(f"{script} '{header}'\n")
                assert told(result) == (None, None, {"reward": 0}), name
                answer = (trials.bench.last / "agent" / "command.txt").read_text()
                assert answer.startswith("HTTP/1.1 200 "), (name, answer)


def lacks(status: int, name: str) -> Behaviour:
    """A provider that refuses requests with a field as if it were down."""
    return when(name.encode(), error(status, message="try again later"))


BODIES: dict[str, tuple[str, Behaviour, dict[str, Any]]] = {
    "a tier of the account": ("chat", lacks(429, "service_tier"), {"service_tier": "priority"}),
    "a tier of the account, in Messages": ("anthropic", lacks(529, "service_tier"), {"service_tier": "auto"}),
    "a tier of the account, streamed": ("responses", lacks(503, "service_tier"), {"service_tier": "x", "stream": True}),
    "a tier of the account, in Gemini": ("gemini", lacks(503, "serviceTier"), {"serviceTier": "PRIORITY"}),
    "a key of a cache": ("chat", lacks(500, "prompt_cache_key"), {"prompt_cache_key": "x" * 9000}),
    "labels": ("gemini", lacks(500, "labels"), {"labels": {"a": "b" * 9000}}),
}


@route(
    "verdicts",
    "an agent adds a field to its request that its provider refuses as if it were down",
    "the request is sent again without it, unless the answer depends on it",
)
@everywhere
async def test_a_field_of_the_agent_does_not_void_a_zero(place: str, tmp_path: Path) -> None:
    for number, (name, (dialect, behaviour, more)) in enumerate(BODIES.items()):
        async with bench(place, tmp_path / str(number), behaviour, dialect) as trials:
            result = await trials.run(ask(dialect, **more))
            assert told(result) == (None, None, {"reward": 0}), name
            answer = (trials.bench.last / "agent" / "command.txt").read_text()
            assert answer.startswith("HTTP/1.1 200 "), (name, answer)
            field = next(iter(more)).encode()
            assert field in trials.fake.asked[0].body and field not in trials.fake.asked[-1].body, name


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
        result = await trials.bench.run(
            task, AgentConfig(name="command", model_name="m", kwargs=options, override_timeout_sec=8)
        )
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
        result = await trials.bench.run(task, AgentConfig(name="command", model_name="m", kwargs=options))
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


SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@contextmanager
def small_disk(path: Path, size: str = "2m") -> Iterator[Path]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def assert_no_verdict(result: TrialResult) -> None:
    assert not result.has_verdict and result.rewards is None
    info = result.exception_info
    assert info is not None, result
    assert (info.blame, info.retryable, info.exception_type) == ("infra", True, "StorageError"), info


@needs_root
@everywhere
@pytest.mark.parametrize("mode", [TOML, SEPARATE], ids=["shared", "separate"])
@route(
    "verdicts",
    "let the disk of the job fill up while an artifact is taken out",
    "an infrastructure fault without a verdict, retryable",
)
async def test_an_artifact_lost_to_a_full_disk(place: str, mode: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "trials") as disk:
        async with open_place(place, disk) as bench:
            solve = "head -c 8000000 /dev/urandom > /app/done"
            task = write_task(tmp_path / "t", toml=f'artifacts = ["/app/done"]\n{mode}', solve=solve)
            assert_no_verdict(await bench.run(task))
            assert (bench.last / "result.json").exists()


@everywhere
@route(
    "verdicts",
    "let a file of the job be cut at the user's limit on file sizes",
    "an infrastructure fault without a verdict, retryable",
)
async def test_an_artifact_lost_to_a_limit_on_files(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(
            tmp_path / "t",
            toml=f'artifacts = ["/app/done"]\n{SEPARATE}',
            solve="head -c 8000000 /dev/urandom > /app/done",
        )
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(phase: str) -> None:
            """Sandboxes and images are ready by then, and no new process takes the limit over."""
            if phase == "collect":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            elif phase == "seal":
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        try:
            spec = TrialSpec(
                "limited",
                task,
                tmp_path / "limited",
                AgentConfig(name="oracle"),
                sandbox=SandboxChoice(image=bench.image),
            )
            assert_no_verdict(await run_trial(spec, bench.services, limit))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs_root
@everywhere
@route(
    "verdicts",
    "let the disk of the job fill up while logs are taken out",
    "an infrastructure fault without a verdict, retryable",
)
async def test_logs_lost_to_a_full_disk(place: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "trials") as disk:
        async with open_place(place, disk) as bench:
            big = "head -c 8000000 /dev/urandom >"
            agents = write_task(tmp_path / "a", solve=f"touch /app/done; {big} /logs/agent/big")
            assert_no_verdict(await bench.run(agents))
            tests = write_task(
                tmp_path / "b", test=f"#!/bin/bash\n{big} /logs/verifier/big\necho 1 > /logs/verifier/reward.txt\n"
            )
            assert_no_verdict(await bench.run(tests))


class FillingAgent(Agent):
    """Does its work and prints a lot; `option` fills the disk of the trial afterwards."""

    name = "filling"
    options = ("disk",)

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        done = await sandbox.exec("touch /app/done; head -c 200000 /dev/zero", on_output=on_output)
        fill(Path(run.options["disk"]) / "ballast")
        return done


def fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@needs_root
@everywhere
@route(
    "verdicts",
    "fill the disk of the job while the trial runs",
    "no verdict: not a line of the record may be missing from a graded trial",
)
async def test_a_disk_that_is_full_when_the_agent_ends(place: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "trials") as disk:
        async with open_place(place, disk) as bench:
            task = write_task(tmp_path / "t", toml=f'artifacts = ["/app/done"]\n{TOML}')
            with pytest.raises(OSError) as caught:
                await bench.run(task, AgentConfig(name=f"{__name__}:FillingAgent", kwargs={"disk": str(disk)}))
            assert caught.value.errno == errno.ENOSPC
            assert not (bench.last / "result.json").exists()


@pytest.mark.plain
@route("verdicts", "let a line of the log of a task with steps be lost", "no verdict, and none for its steps")
async def test_a_lost_line_voids_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> None:
        if b"phase verify" in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(fd, data)

    monkeypatch.setattr(record, "write_all", write)
    more = {f"steps__{name}__instruction.md": "Do it." for name in ("one", "two")}
    toml = TOML + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    async with open_place("local", tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "t", toml=toml, **more))
        assert_no_verdict(result)
        assert [step.rewards for step in result.step_results or ()] == [None, None]
        assert result.pier is not None and result.pier.graded_steps == 0


@needs_root
@route(
    "verdicts",
    "hand over an artifact that does not fit into the verifier's sandbox",
    "an infrastructure fault without a verdict, retryable",
)
async def test_a_verifiers_sandbox_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_HOME", str(tmp_path / "home"))
    with small_disk(tmp_path / "home", "64m"):
        async with open_place("local", tmp_path / "trials") as bench:
            task = write_task(
                tmp_path / "t",
                toml=f'artifacts = ["/app/done"]\n{SEPARATE}',
                solve="head -c 40000000 /dev/urandom > /app/done",
            )
            unlimited = SandboxChoice(image=bench.image, settings=EnvironmentConfig(override_storage_mb=0))
            assert_no_verdict(await bench.run(task, sandbox=unlimited))


@everywhere
@route(
    "verdicts",
    "hand over artifacts of up to the verifier's limit on disk",
    "they fit; larger ones, also of holes, are left out with a note",
)
async def test_artifacts_up_to_the_limit(place: str, tmp_path: Path) -> None:
    toml = f'artifacts = ["/app/out", "/app/done"]\n{SEPARATE}storage_mb = 24\n'
    test = (
        "#!/bin/bash\nstat -c %s /app/out/* > /logs/verifier/sizes\nhead -c 15M /dev/zero > /tmp/own; sleep 3\n" + PASS
    )
    fits = "mkdir /app/out; head -c 20000000 /dev/urandom > /app/out/a; touch /app/done"
    holes = "mkdir /app/out; for n in 1 2 3; do truncate -s 20M /app/out/$n; done; touch /app/done"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "fits", toml=toml, solve=fits, test=test))
        assert result.rewards == {"reward": 1} and kinds(result) == set(), result
        assert (bench.last / "verifier/sizes").read_text() == "20000000\n"
        result = await bench.run(write_task(tmp_path / "holes", toml=toml, solve=holes, test=test))
        assert result.exception_info is None and kinds(result) == {"artifact"}, result
        assert (bench.last / "verifier/sizes").read_text() == ""


@needs_root
@everywhere
@route(
    "verdicts",
    "let the disk fill up before the tests are uploaded to the agent's sandbox",
    "an infrastructure fault without a verdict, retryable",
)
async def test_tests_that_do_not_fit(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:
        if place == "local":
            disk = stack.enter_context(small_disk(tmp_path / "home", "64m"))
        else:
            running = stack.enter_context(bash_engine(tmp_path, disk="128m"))
            monkeypatch.setenv("DOCKER_HOST", running.url)
            disk = running.directory / "data"
        async with open_place(place, tmp_path / "trials") as bench:
            task = write_task(tmp_path / "t", tests__large="x" * 8_000_000)
            filling = AgentConfig(name=f"{__name__}:FillingAgent", kwargs={"disk": str(disk)})
            assert_no_verdict(await bench.run(task, filling))


class CrampedAgent(FillingAgent):
    """Finds hardly any space left on the disk, so that it cannot do its work."""

    name = "cramped"

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        ballast = Path(run.options["disk"]) / "ballast"
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - 700_000)
        return await sandbox.exec("head -c 3000000 /dev/urandom > /app/done || rm /app/done; test -e /app/done")


@needs_root
@everywhere
@route(
    "verdicts",
    "let the disk fill up while the agent works, but for what the tests need",
    "an infrastructure fault without a verdict, retryable",
)
async def test_work_that_does_not_fit(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:
        if place == "local":
            disk = stack.enter_context(small_disk(tmp_path / "home", "64m"))
        else:
            running = stack.enter_context(bash_engine(tmp_path, disk="128m"))
            monkeypatch.setenv("DOCKER_HOST", running.url)
            disk = running.directory / "data"
        async with open_place(place, tmp_path / "trials") as bench:
            cramped = AgentConfig(name=f"{__name__}:CrampedAgent", kwargs={"disk": str(disk)})
            assert_no_verdict(await bench.run(write_task(tmp_path / "t"), cramped))


@pytest.mark.docker
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(cannot_mount("btrfs") is not None, reason=str(cannot_mount("btrfs")))
@route(
    "verdicts",
    "fill a container up to the quota that its engine keeps, so that no tests fit",
    "the agent broke its own grading: 0, with a note",
)
async def test_a_container_at_its_own_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bash_engine(tmp_path, "--storage-driver=btrfs", disk="1g", filesystem="btrfs") as running:
        monkeypatch.setenv("DOCKER_HOST", running.url)
        async with open_place("docker", tmp_path / "trials") as bench:
            task = write_task(
                tmp_path / "t",
                toml=f"{TOML}storage_mb = 32\n",
                solve="cat /dev/zero > /zeros; true",
                tests__large="x" * 4_000_000,
            )
            result = await bench.run(task)
            assert result.rewards == {"reward": 0} and "no_reward" in kinds(result), result.exception_info
            assert result.integrity is not None
            assert "has reached its own limit on disk" in (result.integrity.runs[0].message or "")


@everywhere
@route(
    "verdicts",
    "remove an artifact, or make it something that is not a file",
    "the agent's doing: the trial is graded without it",
)
async def test_an_artifact_that_the_agent_lost_is_graded(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        for number, solve in enumerate(
            ("rm -f /app/done", "mkfifo /app/done", "rm -rf /app; touch /app", "ln -s done /app/done")
        ):
            task = write_task(tmp_path / str(number), toml=f'artifacts = ["/app/done"]\n{SEPARATE}', solve=solve)
            result = await bench.run(task)
            assert result.rewards == {"reward": 0}, (solve, result.exception_info)
        test = "#!/bin/bash\ncat /app/out; echo 0 > /logs/verifier/reward.txt\n"
        for number, solve in enumerate(
            ("cd /; rm -rf /app; echo x > /app", "cd /; rm -rf /etc/init.d; echo x > /etc/init.d")
        ):
            toml = f'artifacts = ["/app", "/etc/init.d"]\n{SEPARATE}'
            result = await bench.run(write_task(tmp_path / f"kind-{number}", toml=toml, solve=solve, test=test))
            assert result.rewards == {"reward": 0}, (solve, result.exception_info)


@everywhere
@route(
    "verdicts",
    "answer with a value that is a secret of the job",
    "the verifier gets the real bytes; only the kept copy is redacted",
)
async def test_verifiers_get_the_real_bytes(place: str, tmp_path: Path) -> None:
    secret = "postgres-is-the-answer"
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(
            tmp_path / "t",
            toml=f'artifacts = ["/app/out", "/app/done"]\n{SEPARATE}',
            solve=f"mkdir /app/out; echo {secret} > /app/out/a; ln /app/out/a /app/out/b; echo {secret} > /app/done",
            test="#!/bin/bash\ncat /app/out/a /app/out/b /app/done | sha256sum > /logs/verifier/sum\n" + PASS,
        )
        result = await bench.run(task, secrets=(secret,))
        real = subprocess.run(["sha256sum"], input=f"{secret}\n".encode() * 3, capture_output=True, check=True).stdout
        assert (bench.last / "verifier/sum").read_bytes() == real and result.rewards == {"reward": 1}
        files = [path for path in bench.last.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert (bench.last / "artifacts/app/out/b").read_text() == "[REDACTED]\n"
        assert (bench.last / "artifacts").stat().st_mode & 0o777 == 0o755


@everywhere
async def test_artifacts_are_redacted_when_grading_fails_or_is_cancelled(place: str, tmp_path: Path) -> None:
    secret = "postgres-is-the-answer"
    async with open_place(place, tmp_path / "trials") as bench:
        toml = f'artifacts = ["/app/done"]\n{SEPARATE}'
        solve = f"echo {secret} > /app/done"
        result = await bench.run(
            write_task(tmp_path / "a", toml=toml, solve=solve, test="#!/bin/bash\n"), secrets=(secret,)
        )
        assert not result.has_verdict
        assert (bench.last / "artifacts/app/done").read_text() == "[REDACTED]\n"
        waiting = write_task(tmp_path / "b", toml=toml, solve=solve, test="#!/bin/bash\necho here; sleep 600\n")
        running = asyncio.ensure_future(bench.run(waiting, secrets=(secret,)))
        printed = bench.root / "trial-2/verifier/test-stdout.txt"
        async with asyncio.timeout(120):
            while not (printed.exists() and printed.read_text()):
                await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (bench.last / "artifacts/app/done").read_text() == "[REDACTED]\n"


SEPARATE_ANSWER = 'artifacts = ["/app/answer"]\n' + SEPARATE
ZERO = "reward 0, with a note"
GIVE_ZERO = "echo 0 > /logs/verifier/reward.txt"
ASSUMES = "#!/bin/bash\nset -e\nread -r value < /app/data\necho $((value == 7)) > /logs/verifier/reward.txt\n"
"""Tests that give no reward if a file of the task is missing."""


async def attack(bench: Bench, root: Path, command: str, *, test: str, toml: str = TOML, **more: str) -> TrialResult:
    task = write_task(root / "task", test=test, toml=toml, **{"environment__data": "1\n", **more})
    return await bench.run(task, AgentConfig(name="command", kwargs={"command": command}))


def assert_broken(result: TrialResult, directory: Path) -> None:
    """The agent broke its own grading, and the result shows how that is known."""
    assert result.rewards == {"reward": 0} and result.exception_info is None
    assert "no_reward" in kinds(result) and result.integrity is not None
    runs = result.integrity.runs
    assert [(run.state, run.rewards is None) for run in runs] == [("agent", True), ("pristine", False), ("agent", True)]
    assert all((directory / run.logs).is_dir() for run in runs)
    assert json.loads((directory / "result.json").read_text())["integrity"]["runs"][1]["rewards"] == {"reward": 0}


@everywhere
@route("verdicts", "The agent removes a file that the tests need", ZERO)
async def test_a_file_of_the_task_is_removed(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        assert_broken(await attack(bench, tmp_path, "rm /app/data", test=ASSUMES), bench.last)


@everywhere
@route("verdicts", "The agent removes a program that the tests run, such as python", ZERO)
async def test_a_program_is_removed(place: str, tmp_path: Path) -> None:
    if place == "local" and os.geteuid():
        pytest.skip("a plain user's agent cannot remove the programs of the host image")
    test = "#!/bin/bash\nset -e\nawk 'BEGIN { print 0 }' > /tmp/value\nmv /tmp/value /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "rm -f /bin/awk /usr/bin/awk", test=test)
        assert_broken(result, bench.last)


@everywhere
@route("verdicts", "The agent removes the libraries of every program", ZERO)
async def test_the_whole_system_is_broken(place: str, tmp_path: Path) -> None:
    if place == "local" and os.geteuid():
        pytest.skip("a plain user's agent cannot remove the libraries of the host image")
    command = "rm -rf /lib/* /lib64/* /usr/lib/x86_64-linux-gnu /usr/lib64/* 2>/dev/null"
    async with open_place(place, tmp_path / "trials") as bench:
        assert_broken(await attack(bench, tmp_path, command, test=ASSUMES), bench.last)


@everywhere
@route("verdicts", "The agent plants code that keeps the tests from ending, such as a sleeping .pth", ZERO)
async def test_the_tests_never_end(place: str, tmp_path: Path) -> None:
    toml = TOML.replace("[verifier]\ntimeout_sec = 120", "[verifier]\ntimeout_sec = 2")
    test = "#!/bin/bash\nbash /app/startup.sh\necho 0 > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        command = "echo 'sleep 600' > /app/startup.sh"
        result = await attack(bench, tmp_path, command, test=test, toml=toml, **{"environment__startup.sh": "true\n"})
        assert_broken(result, bench.last)
        assert result.integrity is not None and result.integrity.runs[0].code == "verifier_timeout"


@everywhere
@route("verdicts", "The agent leaves a link to nowhere in place of its artifact", "graded as if there were no artifact")
async def test_an_artifact_that_is_a_link(place: str, tmp_path: Path) -> None:
    test = "#!/bin/bash\ntest -s /app/answer; echo $((! $?)) > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "ln -s /nowhere /app/answer", test=test, toml=SEPARATE_ANSWER)
        assert result.rewards == {"reward": 0} and result.exception_info is None


@everywhere
@route("verdicts", "The agent's artifact makes a separate verifier crash", ZERO)
async def test_an_artifact_that_crashes_the_verifier(place: str, tmp_path: Path) -> None:
    test = (
        "#!/bin/bash\nset -e\nif test -e /app/answer; then bash /app/answer; fi\necho 0 > /logs/verifier/reward.txt\n"
    )
    async with open_place(place, tmp_path / "trials") as bench:
        assert_broken(
            await attack(bench, tmp_path, "echo 'exit 3' > /app/answer", test=test, toml=SEPARATE_ANSWER), bench.last
        )


@everywhere
@pytest.mark.parametrize("toml", [TOML, SEPARATE_ANSWER], ids=["shared", "separate"])
@route("verdicts", "The tests give no reward, whatever the agent does", "no verdict, the task's fault")
async def test_tests_that_never_give_a_reward(place: str, toml: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "touch /app/answer", test="#!/bin/bash\nexit 1\n", toml=toml)
        assert result.rewards is None and result.exception_info is not None
        assert (result.exception_info.code, result.exception_info.blame) == ("reward_missing", "task")
        assert result.exception_info.retryable is False and "no_reward" not in kinds(result)
        assert result.integrity is not None and [run.rewards for run in result.integrity.runs] == [None] * 3


@everywhere
@route("verdicts", "The agent breaks only the first run of its tests", ZERO)
async def test_only_the_first_run_is_broken(place: str, tmp_path: Path) -> None:
    test = "#!/bin/bash\nset -e\nbash /app/startup.sh\n" + GIVE_ZERO
    command = "echo 'test -e /app/ran || { touch /app/ran; exit 3; }' > /app/startup.sh"
    start = {"environment__startup.sh": "true\n"}
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, command, test=test, **start)
        assert result.rewards == {"reward": 0} and result.exception_info is None and "no_reward" in kinds(result)
        assert result.integrity is not None
        assert [run.rewards is None for run in result.integrity.runs] == [True, False, False]
        others = test.replace(GIVE_ZERO, 'echo \'{"reward": 0, "ran": 9}\' > /logs/verifier/reward.json')
        result = await attack(bench, tmp_path / "others", command, test=others, **start)
        assert result.rewards == {"reward": 0, "ran": 9}


@pytest.mark.plain
@pytest.mark.parametrize(
    "said", ['{"reward": 0.5}', '{"reward": 0.5, "ran": 9}', '{"speed": 1, "answer": 0}'], ids=["part", "more", "keys"]
)
@route("verdicts", "The agent breaks only the first run of tests that would give a part of the reward", "that part")
async def test_a_part_of_a_reward_is_not_tried_again(said: str, tmp_path: Path) -> None:
    test = f"#!/bin/bash\nset -e\nbash /app/startup.sh\necho '{said}' > /logs/verifier/reward.json\n"
    command = "echo 'test -e /app/ran || { touch /app/ran; exit 3; }' > /app/startup.sh"
    async with open_place("local", tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, command, test=test, **{"environment__startup.sh": "true\n"})
        assert result.rewards == json.loads(said) and result.exception_info is None and "no_reward" in kinds(result)


@everywhere
@route("verdicts", "The tests give no reward once, and 1 or more the next time", "no verdict, retried")
async def test_a_flake(place: str, tmp_path: Path) -> None:
    test = "#!/bin/bash\nif test -e /app/ran; then echo 1 > /logs/verifier/reward.txt; else touch /app/ran; fi\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "true", test=test)
        assert result.rewards is None and result.exception_info is not None
        info = result.exception_info
        assert (info.code, info.blame, info.retryable) == ("verifier_flaky", "infra", True)
        assert not (bench.last / "verifier" / "reward.txt").exists()


STEPS = TOML + "".join(f'[[steps]]\nname = "{name}"\n' for name in ("one", "two", "three"))


@everywhere
@route("verdicts", "The agent breaks the second step of a task", "that step counts 0, and the trial's mean with it")
async def test_a_step_is_wrecked(place: str, tmp_path: Path) -> None:
    more = {f"steps__{name}__instruction.md": "Do it." for name in ("one", "two", "three")}
    toml = STEPS.replace('name = "two"', 'name = "two"\nmin_reward = 1')
    passes = "#!/bin/bash\nset -e\nread -r _ < /app/data\necho 1 > /logs/verifier/reward.txt\n"
    command = "if [ -e /app/first ]; then rm /app/data; fi; touch /app/first"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, command, test=passes, toml=toml, **more)
        assert result.rewards == {"reward": 0.5} and result.pier is not None
        assert (result.pier.graded_steps, result.pier.n_steps) == (2, 3)
        steps = result.step_results or []
        assert [step.verifier_result and step.verifier_result.rewards for step in steps] == [
            {"reward": 1},
            {"reward": 0},
        ]
        assert steps[1].integrity is not None and len(steps[1].integrity.runs) == 3
        assert (bench.last / "steps/two" / steps[1].integrity.runs[2].logs).is_dir()
        shown = subprocess.run([*PIER, "trial", "show", str(bench.last)], capture_output=True, text=True, check=True)
        assert "2 of 3 graded" in shown.stdout and "grading  shared" in shown.stdout
        assert "pristine state (verifier-runs/2-pristine): 1.0" in shown.stdout


@pytest.mark.plain
@route("verdicts", "The state of an agent that broke its grading is graded again", ZERO)
def test_regrading_a_broken_state(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks/t", solve="touch /tmp/broken", test=f"test ! -e /tmp/broken || exit 1\n{GIVE_ZERO}")
    pier("run", "-p", "tasks", "-a", "oracle", "--keep-state", "--job-name", "j", cwd=tmp_path)
    pier("job", "regrade", "jobs/j", "--job-name", "again", cwd=tmp_path)
    for name in ("j", "again"):
        (path,) = (tmp_path / "jobs" / name).glob("*/result.json")
        result = TrialResult.model_validate_json(path.read_bytes())
        assert_broken(result, path.parent)


@pytest.mark.plain
@route("verdicts", "A flake in a job with retries", "the trial is tried again")
def test_a_flake_is_tried_again(tmp_path: Path) -> None:
    test = "if test -e /tmp/ran; then echo 1 > /logs/verifier/reward.txt; else touch /tmp/ran; fi"
    make_task(tmp_path / "tasks/t", test=test)
    done = pier("run", "-p", "tasks", "-a", "oracle", "-r", "1", "--job-name", "j", cwd=tmp_path, code=1)
    result = json.loads((tmp_path / "jobs/j/result.json").read_text())
    assert result["stats"]["n_retries"] == 1 and "blame: infra" in done.stdout
    assert "retry jobs/j --only infra" in done.stdout


TRIALS = """
import asyncio, json, sys
from pathlib import Path
from pier.trial.config import AgentConfig, EnvironmentConfig
from tests.trial_runs import TOML, open_bench, write_task

ask = "exec 3<> /dev/tcp/allowed.test/{0}\\n"
ask += "printf 'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n' >&3\\nread -r _ <&3"
test = "#!/bin/bash\\nset -e\\nbash /app/startup.sh\\n" + ask + "\\necho 0 > /logs/verifier/reward.txt\\n"
toml = TOML.replace('"no-network"', '"allowlist"\\nallowed_hosts = ["allowed.test"]')

async def main(root, told):
    rows = []
    async with open_bench(root / "trials") as bench:
        for name, port, command in json.loads(sys.argv[3]):
            task = write_task(
                root / name, toml=toml, test=test.format(port), **{"environment__startup.sh": "true"}
            )
            kwargs = {"command": command.format(ask.format(9))}
            result = await bench.run(task, AgentConfig(name="command", kwargs=kwargs))
            info = result.exception_info
            rows.append([result.rewards, info and [info.code, info.blame, info.retryable, info.exception_message]])
    told.write_text(json.dumps(rows))

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def run_in_world(root: Path, name: str, port: int, command: str) -> tuple[dict[str, float] | None, list[Any] | None]:
    """One trial in a network without a way out, whose tests need port `port` of a server that serves port 80."""
    told = root / "told.json"
    done = in_world(TRIALS, root, str(root), str(told), json.dumps([(name, port, command)]))
    assert told.exists(), f"{done.stdout}\n{done.stderr}"
    ((rewards, info),) = json.loads(told.read_text())
    return rewards, info


@pytest.mark.plain
@route("verdicts", "The network that the tests need is down", "no verdict, retried")
def test_a_network_that_is_down(tmp_path: Path) -> None:
    rewards, info = run_in_world(tmp_path, "down", 9, "true")
    assert rewards is None and info is not None and info[:3] == ["verifier_network", "infra", True]
    assert "allowed.test:9" in info[3]


@pytest.mark.plain
@route("verdicts", "The agent makes its tests fail next to a connection that fails", ZERO)
def test_a_fault_of_the_network_that_the_agent_plants(tmp_path: Path) -> None:
    command = "cat > /app/startup.sh << 'END'\n{}\nexit 3\nEND"
    assert run_in_world(tmp_path, "planted", 80, command) == ({"reward": 0}, None)
    rows = [json.loads(row) for row in (tmp_path / "trials/trial-1/network.jsonl").read_text().splitlines()]
    assert [row for row in rows if row.get("port") == 9 and row["allowed"] and row["reason"]]


@pytest.mark.plain
@route("verdicts", "The agent makes its tests fail next to a connection to their server that it cuts itself", ZERO)
def test_a_connection_that_the_agent_cuts(tmp_path: Path) -> None:
    cut = "import socket, struct, time; s = socket.create_connection(('allowed.test', 80)); time.sleep(0.3); "
    cut += "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); s.close(); time.sleep(0.3)"
    command = f'cat > /app/startup.sh << "END"\n/usr/bin/python3 -c "{cut}"\nexit 3\nEND'
    assert run_in_world(tmp_path, "cut", 80, command) == ({"reward": 0}, None)


def seen(*decisions: Decision) -> NetworkUse:
    use = NetworkUse()
    for decision in decisions:
        use.note(decision)
    return use


def test_which_failures_are_the_networks() -> None:
    down = seen(Decision("tcp", "pypi.test", True, 443, "connection refused", outage=True))
    up = seen(Decision("tcp", "pypi.test", True, 443, sent=100, received=100))
    cut = seen(Decision("tcp", "pypi.test", True, 443, "connection reset", sent=100))
    refused = seen(Decision("tcp", "pypi.test", False, 443, "not allowed"))
    assert network_faults(down, up, down, reward=True) == "pypi.test:443"
    assert network_faults(down, up, up, reward=True) == "pypi.test:443"
    assert network_faults(down, seen(), down, reward=True) == "", "only the agent tried that"
    assert network_faults(cut, up, cut, reward=True) == "", "whoever is connected can provoke a reset"
    assert network_faults(refused, refused, refused, reward=False) == ""
    assert network_faults(seen(), down, seen(), reward=False) == "pypi.test:443"
    assert network_faults(down, down, down, reward=True) == "", "the reward does not need it"


def test_which_faults_are_the_machines() -> None:
    full = SandboxError("no space left", code="disk_full")
    assert is_machine_fault(full) and is_machine_fault(OSError(errno.ENOSPC, "full"))
    for code in ("sandbox_gone", "zygote_gone", "helper_gone", "storage"):
        assert is_machine_fault(SandboxError("gone", code=code))
    assert not is_machine_fault(SandboxError("no such directory: /app", code="cwd", blame="task"))
    assert not is_machine_fault(FileNotFoundError("a dangling link"))
    wrapped = VerifierError("the tests could not be brought", code="reset")
    wrapped.__cause__ = full
    assert is_machine_fault(wrapped)


COMMANDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("echo \ud83d", {}),
    ("echo a\0b", {}),
    ("true", {"cwd": "/a\0b"}),
    ("true", {"cwd": "/\udead"}),
    ("true", {"env": {"": "1"}}),
    ("true", {"env": {"A=B": "1"}}),
    ("true", {"env": {"A": "\ud83d"}}),
)
"""What a model may ask for, and no process can be given."""


class Careful:
    """Goes on when a command is refused."""

    def __init__(self, logs_dir: Path, **_: Any) -> None:
        pass

    @staticmethod
    def name() -> str:
        return "careful"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        refused = 0
        for command, options in COMMANDS:
            try:
                await environment.exec(command, **options)
            except ValueError:
                refused += 1
        assert refused == len(COMMANDS)
        await environment.exec("touch /app/done")


class Careless(Careful):
    """Leaves an error of its model to others."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        command, options = COMMANDS[0]
        await environment.exec(command, **options)


class InTheWay(Careful):
    """Leaves a file where its logs belong."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec("rm -rf /logs/agent && touch /logs/agent")


@route(
    "verdicts",
    "A model's command holds half an emoji, a NUL or an impossible variable name",
    "The agent gets an error, and the sandbox and its grade live on",
)
@everywhere
async def test_a_command_that_no_process_can_be_given_costs_nothing(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "task"), AgentConfig(name=f"{__name__}:Careful"))
    assert result.exception_info is None, result.exception_info
    assert result.rewards == {"reward": 1}


@route(
    "verdicts",
    "An agent fails on its model's malformed command or puts a file where its logs belong",
    "The agent is blamed, not the infrastructure, and nothing is retried",
)
@everywhere
@pytest.mark.parametrize(("agent", "code"), [("Careless", "bad_argument"), ("InTheWay", "not_directory")])
async def test_an_agent_that_fails_on_it_is_to_blame(place: str, agent: str, code: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "task"), AgentConfig(name=f"{__name__}:{agent}"))
    error = result.exception_info
    assert error is not None
    assert (error.code, error.blame, error.retryable) == (code, "agent", False), error


@pytest.mark.plain
@route("verdicts", "A caller gives an impossible port, or no directories to isolate", "an error of the caller")
async def test_wrong_ports_and_directories(tmp_path: Path) -> None:
    async with open_place("local", tmp_path) as bench:
        async with await bench.services.backend.start(SandboxSpec(host_image())) as sandbox:
            for port in (-1, 0, 65536, 2**70, "80", "a\0b", "\ud83d", None, True, []):
                with pytest.raises(ArgumentError):
                    await sandbox.dial(port)  # pyright: ignore[reportArgumentType]
            for folders in (None, "/tests", ["/tests"], {"": 0}, {"a\0": 0}, {"\ud83d": 0}, {7: 0}, {"/tests": "0"}):
                with pytest.raises(ArgumentError):
                    await sandbox.isolate(folders)  # pyright: ignore[reportArgumentType]
            assert (await sandbox.exec("echo ok")).text == "ok\n"
