"""Agents that are written against Harbor's interface run in pier's sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pier.agent.contract import AgentRun, check_options, find_agent
from pier.agent.harbor import adapt, is_harbor_agent
from pier.endpoint import Endpoint
from pier.errors import AgentError, UsageError
from pier.image.model import HOST, Image
from pier.lease import Lease
from pier.sandbox.contract import Sandbox, SandboxSpec
from pier.sandbox.local import LocalBackend


class HarborStyle:
    """Has the shape of an agent of Harbor's and nothing else."""

    def __init__(self, logs_dir: Path, model_name: str | None = None, greeting: str = "hello", **kwargs: Any) -> None:
        self.logs_dir, self.model_name, self.greeting = logs_dir, model_name, greeting

    @staticmethod
    def name() -> str:
        return "harbor-style"

    async def setup(self, environment: Any) -> None:
        result = await environment.exec("mkdir -p /tmp/seen && echo $0 && echo oops >&2", timeout_sec=60)
        assert (result.return_code, result.stdout, result.stderr) == (0, "bash\n", "oops\n")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        source = self.logs_dir / "greeting.txt"
        source.write_text(f"{self.greeting}: {instruction} ({self.model_name})")
        await environment.upload_file(source, "/tmp/seen/greeting.txt")
        assert await environment.is_file("/tmp/seen/greeting.txt") and not await environment.is_dir("/tmp/unseen")
        with environment.scoped_exec_env({"WHO": "me"}):
            assert (await environment.exec("echo $WHO")).stdout == "me\n"
        await environment.download_file("/tmp/seen/greeting.txt", self.logs_dir / "back.txt")
        context.n_input_tokens = 7


class Broken(HarborStyle):
    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        raise RuntimeError("it broke")


class Impatient(HarborStyle):
    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        raise TimeoutError("its own")


class Slow(HarborStyle):
    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec("sleep 3600")


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    with Lease() as lease:
        async with LocalBackend(lease) as backend, await backend.start(SandboxSpec(Image(HOST, HOST))) as found:
            yield found


def run(**fields: Any) -> AgentRun:
    return AgentRun("Do it.", "/tmp", Endpoint("http://127.0.0.1:4000", "key", "some-model"), **fields)


async def test_a_harbor_agent_sets_up_and_runs(sandbox: Sandbox) -> None:
    agent = find_agent(f"{__name__}:HarborStyle")()
    result = await agent.run(sandbox, run(options={"greeting": "hi"}, seconds=300))
    assert result.exit_code == 0
    said = b"hi: Do it. (openai/some-model)"
    assert await sandbox.read_file("/tmp/seen/greeting.txt") == said
    assert await sandbox.read_file("/logs/agent/back.txt") == said


async def test_its_failure_is_the_agents_and_its_time_is_limited(sandbox: Sandbox) -> None:
    with pytest.raises(AgentError, match="it broke"):
        await adapt(Broken)().run(sandbox, run(seconds=300))
    with pytest.raises(AgentError, match="its own"):
        await adapt(Impatient)().run(sandbox, run(seconds=300))
    result = await asyncio.wait_for(adapt(Slow)().run(sandbox, run(seconds=3)), 240)
    assert result.timed_out


def test_its_options_are_those_of_its_constructor() -> None:
    kind = find_agent(f"{__name__}:HarborStyle")
    assert kind.name == "harbor-style" and kind.options == ("greeting",) and kind.outside
    check_options(kind, {"greeting": "hi"})
    with pytest.raises(UsageError, match="greting") as refused:
        check_options(kind, {"greting": "hi"})
    assert refused.value.code == "agent_option"


def test_other_classes_are_no_agents() -> None:
    assert is_harbor_agent(HarborStyle) and not is_harbor_agent(Path) and not is_harbor_agent("text")
    with pytest.raises(UsageError, match="is not an agent"):
        find_agent("pathlib:Path")
