"""A scripted model drives a small agent in each dialect, and the trajectory that comes of it keeps every rule."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pier.gateway import Gateway, Provider
from pier.gateway.script import Script
from pier.trajectory import TrajectoryHeader, rules
from pier.trajectory.derive import Derivation, write_trajectory
from pier.trajectory.model import Step, read
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Media, Message, Request, Text, Tool, ToolResult, Turn

pytestmark = pytest.mark.parts
PEER = Path(__file__).parents[2] / ".cache/peers/harbor"
HARBOR = PEER / "bin/python"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = (Tool("bash", "Run a command.", SCHEMA),)
TURNS = [
    {"reasoning": "I should look first.", "text": "Looking.", "shell": "ls"},
    {"actions": [{"shell": "echo one"}, {"shell": "echo two"}]},
    {"finish": "All done."},
]


class Agent:
    """The smallest agent: calls the model, runs its tools, and goes on until there are none."""

    def __init__(self, dialect: str, url: str, key: str, *, stream: bool) -> None:
        self.dialect, self.url, self.key, self.stream = DIALECTS[dialect], url, key, stream
        self.headers = {"authorization": f"Bearer {key}", "user-agent": "tiny/1"}

    async def ask(self, request: Request) -> Turn:
        body = self.dialect.render_request(request)
        address = self.url + self.dialect.request_path(request)
        async with aiohttp.ClientSession() as http, http.post(address, json=body, headers=self.headers) as answer:
            data = await answer.read()
            assert answer.status == 200, data
        if not self.stream:
            return self.dialect.parse_response(json.loads(data))
        from pier.wire.turn import TurnBuilder

        parser = self.dialect.stream_parser()
        builder = TurnBuilder().extend(parser.feed(data)).extend(parser.close())
        assert builder.ended, builder.error
        return builder.turn()

    def request(self, messages: list[Message], **more: Any) -> Request:
        system = more.pop("system", ("You are an agent.",))
        tools = more.pop("tools", TOOLS)
        return Request("m", tuple(messages), system, tools, stream=self.stream, dialect=self.dialect.name, **more)

    async def run(self, prompt: str, **more: Any) -> list[Message]:
        messages = [Message("user", (Text(prompt),))]
        while True:
            turn = await self.ask(self.request(messages, **more))
            messages.append(Message("assistant", turn.parts))
            if not turn.calls:
                return messages
            results = tuple(
                ToolResult(call.id, (Text(f"output of {call.arguments}"),), name=call.name) for call in turn.calls
            )
            messages.append(Message("user", results))


async def session(gateway: Gateway, path: Path, turns: Any) -> tuple[str, str]:
    made = gateway.session("m", upstream=Script.parse(turns), recording=path)
    return await gateway.serve(), made.key


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_any_dialect_gives_the_same_good_trajectory(dialect: str, stream: bool, tmp_path: Path) -> None:
    async with Gateway() as gateway:
        url, key = await session(gateway, tmp_path / "calls.jsonl", TURNS)
        await Agent(dialect, url, key, stream=stream).run("Do the work.")
    target = tmp_path / "trajectory.json"
    summary = write_trajectory(
        tmp_path / "calls.jsonl", target, TrajectoryHeader("tiny", version="1", model="m", session="s")
    )
    assert rules.validate_file(target) == []
    trajectory = read(target)
    assert [step.source for step in trajectory.steps] == ["system", "user", "agent", "agent", "agent"]
    first, second, last = trajectory.agent_steps
    assert (first.message, first.reasoning_content) == ("Looking.", "I should look first.")
    assert second.message == ""
    assert last.message == "All done."
    assert [call.function_name for call in second.tool_calls or []] == ["bash", "bash"]
    results = second.observation.results if second.observation else []
    assert [result.source_call_id for result in results] == [call.tool_call_id for call in second.tool_calls or []]
    assert "echo two" in str(results[1].content)
    assert all(step.llm_call_count == 1 for step in trajectory.agent_steps)
    assert summary.agent_steps == 3
    assert summary.cost_usd is None
    assert summary.calls == {"main": 3}
    assert summary.peak_context_tokens == max(
        step.metrics.prompt_tokens or 0 for step in trajectory.agent_steps if step.metrics
    )


async def test_titles_sub_agents_and_compaction_are_told_apart(tmp_path: Path) -> None:
    recording, target = tmp_path / "calls.jsonl", tmp_path / "trajectory.json"
    summary_text = "The user wants the work done; so far the directory was listed and two numbers were printed."
    script = {
        "turns": [
            {"call": {"name": "Task", "arguments": {"prompt": "Count the files in this directory."}}},
            {"shell": "ls"},
            {"shell": "pwd"},
            {"finish": "All done."},
        ],
        "lanes": [
            {"when": {"system": "You count"}, "turns": [{"shell": "ls | wc -l"}, {"finish": "There are 3."}]},
            {"when": {"message": "Summarise what"}, "turns": [{"text": summary_text}]},
        ],
        "side": "A title",
    }
    tools = (
        *TOOLS,
        Tool("Task", "Start a sub-agent.", {"type": "object", "properties": {"prompt": {"type": "string"}}}),
    )
    async with Gateway() as gateway:
        url, key = await session(gateway, recording, script)
        agent = Agent("anthropic", url, key, stream=True)
        ask = agent.request([Message("user", (Text("Give this a title: work"),))], tools=(), system=("Titles only",))
        await agent.ask(ask)
        messages = [Message("user", (Text("Do the work."),))]
        turn = await agent.ask(agent.request(messages, tools=tools))
        messages.append(Message("assistant", turn.parts))
        counted = await agent.run("Count the files in this directory.", system=("You count",))
        messages.append(Message("user", (ToolResult(turn.calls[0].id, (Text(counted[-1].text),)),)))
        turn = await agent.ask(agent.request(messages, tools=tools))
        messages += [Message("assistant", turn.parts), Message("user", (ToolResult(turn.calls[0].id, (Text("a b"),)),))]
        follower = Derivation(recording, target, TrajectoryHeader("tiny", "1", "m", "s"))
        assert follower.update().calls == {"side": 1, "main": 2, "sub_agent": 2}
        asked = Message("user", (Text("Summarise what was done."),))
        await agent.ask(agent.request([Message("user", (Text("Summarise what was done: ls"),)), asked], tools=tools))
        fresh = [Message("user", (Text("Do the work."),)), Message("user", (Text(f"Summary: {summary_text}"),))]
        turn = await agent.ask(agent.request(fresh, tools=tools))
        fresh += [Message("assistant", turn.parts), Message("user", (ToolResult(turn.calls[0].id, (Text("/"),)),))]
        await agent.ask(agent.request(fresh, tools=tools))
    summary = follower.update()
    assert rules.validate_file(target) == []
    assert summary.summarization_count == 1
    assert summary.calls["sub_agent"] == 2
    trajectory = read(target)
    inner = (trajectory.subagent_trajectories or [])[0]
    assert inner.steps[-1].message == "There are 3."
    spawn = trajectory.agent_steps[0].observation
    assert spawn is not None
    refs = spawn.results[0].subagent_trajectory_ref or []
    assert [ref.trajectory_id for ref in refs] == [inner.trajectory_id]
    breakdown = (trajectory.final_metrics.extra or {})["breakdown"] if trajectory.final_metrics else {}
    assert breakdown["side"]["calls"] >= 1
    title, *others = (trajectory.extra or {})["side_calls"]
    assert (title["call"], title["kind"], title["message"]) == (1, "side", "A title")
    assert title["metrics"]["prompt_tokens"] > 0 and summary_text in [other["message"] for other in others]
    harbor_takes(target)


async def test_a_retry_is_one_step(tmp_path: Path) -> None:
    turns = [{"error": {"status": 529, "message": "busy"}}, {"shell": "ls"}, {"finish": "Done."}]
    async with Gateway() as gateway:
        url, key = await session(gateway, tmp_path / "calls.jsonl", turns)
        agent = Agent("chat", url, key, stream=False)
        with pytest.raises(AssertionError, match="busy"):
            await agent.run("Do the work.")
        await agent.run("Do the work.")
    summary = write_trajectory(tmp_path / "calls.jsonl", tmp_path / "t.json", TrajectoryHeader("tiny"))
    assert summary.calls == {"retry": 1, "main": 2}
    assert summary.agent_steps == 2
    (busy,) = (read(tmp_path / "t.json").extra or {})["side_calls"]
    assert (busy["call"], busy["kind"], "message" in busy) == (1, "retry", False)


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic", "gemini"])
async def test_a_cost_that_the_model_names_is_kept_in_every_dialect(dialect: str, tmp_path: Path) -> None:
    turns = [{"shell": "ls", "usage": {"cost_usd": 0.25}}, {"finish": "Done.", "usage": {"cost_usd": 0.5}}]
    async with Gateway() as gateway:
        url, key = await session(gateway, tmp_path / "calls.jsonl", turns)
        await Agent(dialect, url, key, stream=True).run("Do the work.")
    summary = write_trajectory(tmp_path / "calls.jsonl", tmp_path / "t.json", TrajectoryHeader("tiny"))
    assert (summary.cost_usd, summary.cost_source) == (0.75, "provider")


def test_nothing_recorded_writes_nothing(tmp_path: Path) -> None:
    recording = tmp_path / "calls.jsonl"
    recording.write_text('{"t":"session","format":1,"at":1.0}\n')
    summary = write_trajectory(recording, tmp_path / "t.json", TrajectoryHeader("tiny"))
    assert summary.path is None
    assert not (tmp_path / "t.json").exists()


async def test_pictures_are_files_beside_the_trajectory(tmp_path: Path) -> None:
    async with Gateway() as gateway:
        url, key = await session(gateway, tmp_path / "calls.jsonl", [{"finish": "A dot."}])
        agent = Agent("anthropic", url, key, stream=True)
        await agent.ask(agent.request([Message("user", (Media("image/png", "aGk="), Text("What is it?")))]))
    target = tmp_path / "agent" / "trajectory.json"
    write_trajectory(tmp_path / "calls.jsonl", target, TrajectoryHeader("tiny", session="s"))
    assert rules.validate_file(target) == []
    asked = read(target).steps[1].message
    assert isinstance(asked, list)
    source = asked[0].source
    assert source is not None
    assert (target.parent / source.path).read_bytes() == b"hi"
    harbor_takes(target)


def harbor_takes(target: Path) -> None:
    """Harbor's own validator, where it is installed."""
    if not (PEER / ".ready").exists():
        return
    checked = subprocess.run(
        [HARBOR, "-m", "harbor.utils.trajectory_validator", target], capture_output=True, text=True, timeout=300
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not (PEER / ".ready").exists(), reason="no Harbor in .cache/peers; .ci/peers makes it")
async def test_harbor_takes_it(tmp_path: Path) -> None:
    async with Gateway() as gateway:
        url, key = await session(gateway, tmp_path / "calls.jsonl", TURNS)
        await Agent("anthropic", url, key, stream=True).run("Do the work.")
    target = tmp_path / "trajectory.json"
    write_trajectory(tmp_path / "calls.jsonl", target, TrajectoryHeader("tiny", session="s"))
    harbor_takes(target)


PAIRS = [(client, model) for client in DIALECTS for model in DIALECTS if client != model]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize(("client", "model"), PAIRS, ids=[f"{client}-on-{model}" for client, model in PAIRS])
async def test_an_agent_of_any_dialect_works_on_a_model_of_any_other(
    client: str, model: str, stream: bool, tmp_path: Path
) -> None:
    """The model is a script behind a second gateway, which is asked in its own dialect."""
    async with Gateway() as models, Gateway() as gateway:
        scripted = models.session("m", upstream=Script.parse(TURNS), recording=tmp_path / "model.jsonl")
        provider = Provider("far", await models.serve(), (model,), key=scripted.key)  # type: ignore[arg-type]
        session = gateway.session("m", upstream=provider, recording=tmp_path / "calls.jsonl")
        await Agent(client, await gateway.serve(), session.key, stream=stream).run("Do the work.")
    shown = []
    for name in ("model.jsonl", "calls.jsonl"):
        target = tmp_path / f"{name}.json"
        summary = write_trajectory(tmp_path / name, target, TrajectoryHeader("tiny", session="s"))
        assert rules.validate_file(target) == []
        assert summary.calls == {"main": 3}
        shown.append(read(target))
    far, near = shown
    assert [step.message for step in near.agent_steps] == ["Looking.", "", "All done."]
    assert near.agent_steps[0].reasoning_content == "I should look first."
    assert [step.observation for step in far.agent_steps] == [step.observation for step in near.agent_steps]
    assert [_used(step) for step in far.agent_steps] == [_used(step) for step in near.agent_steps]


def _used(step: Step) -> tuple[int | None, int | None]:
    return (step.metrics.prompt_tokens, step.metrics.completion_tokens) if step.metrics else (None, None)
