"""Options that users set on real agents are seen where they matter: in what the model is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pier.agent.contract import AgentRun, find_agent
from pier.wire.turn import Request, Text, ToolCall, Turn, Usage
from tests.agent_rig import DESK, PACKS, need_pack, stage
from tests.job_tasks import make_task, pier, trials_of


class Listener:
    """A model that keeps what it is asked and, as long as `busy`, asks for one command after the other."""

    def __init__(self, busy: bool = False) -> None:
        self.requests: list[Request] = []
        self.busy = busy

    async def __call__(self, request: Request) -> Turn:
        self.requests.append(request)
        shell = next((tool for tool in request.tools if tool.name in ("Bash", "bash", "shell")), None)
        if self.busy and shell is not None and len(self.requests) < 12:
            number = len(self.requests)
            call = ToolCall(f"call_{number}", shell.name, json.dumps({"command": f"echo {number}"}))
            return Turn((call,), "tool_use", Usage(1, 1), None, request.model)
        return Turn((Text("Done."),), "end", Usage(1, 1), None, request.model)

    @property
    def work(self) -> Request:
        return next(request for request in self.requests if request.tools)


async def ask(
    name: str,
    options: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    *,
    busy: bool = False,
    recording: Path | None = None,
) -> Listener:
    model = Listener(busy)
    async with stage(name, model, recording=recording) as (sandbox, session):
        run = AgentRun("Go.", DESK, session.endpoint(), seconds=300, options=options, env=env or {})
        await find_agent(name)().run(sandbox, run)
    return model


async def test_claude_code() -> None:
    options = {"reasoning_effort": "max", "append_system_prompt": "Be brief, says the user.", "max_turns": 3}
    model = await ask("claude-code", options, busy=True)
    assert model.work.sampling.effort == "max"
    assert "Be brief, says the user." in str(model.work.system) + str(model.work.messages)
    names = {tool.name for tool in model.work.tools}
    assert "Bash" in names and "EnterPlanMode" not in names and "EnterPlanMode" not in str(model.work.messages)
    assert len(model.requests) == 3


async def test_claude_code_without_its_shell() -> None:
    model = await ask("claude-code", {"disallowed_tools": ["Bash", "EnterPlanMode"]})
    assert "Bash" not in {tool.name for tool in model.work.tools}


async def test_codex() -> None:
    own = 'developer_instructions = "Be brief, says the user."\nmodel_verbosity = "low"\n'
    model = await ask("codex", {"reasoning_effort": "xhigh", "config_toml": own})
    assert model.work.sampling.effort == "xhigh"
    assert "Be brief, says the user." in str(model.work)


async def test_gemini_cli() -> None:
    model = await ask("gemini-cli", {"reasoning_effort": "low"})
    assert "low" in str(model.work.sampling).lower() + str(model.work.extra).lower()
    assert "enter_plan_mode" not in {tool.name for tool in model.work.tools}


async def test_opencode() -> None:
    own = {"agent": {"build": {"prompt": "Be brief, says the user."}}, "permission": {"glob": "deny"}}
    model = await ask("opencode", {"opencode_config": own, "disable_web_search": True})
    assert "Be brief, says the user." in str(model.work.system)
    names = {tool.name for tool in model.work.tools}
    assert "bash" in names and not names & {"glob", "webfetch", "websearch"}


async def test_mini_swe_agent(tmp_path: Path) -> None:
    own = "model:\n  model_kwargs:\n    temperature: 0.25\nagent:\n  system_template: Be brief, says the user.\n"
    options = {"config_yaml": own, "reasoning_effort": "high", "set_cache_control": "default_end", "max_turns": 2}
    model = await ask("mini-swe-agent", options, busy=True, recording=tmp_path / "recording.jsonl")
    assert model.work.sampling.temperature == 0.25
    assert model.work.sampling.effort == "high"
    assert "Be brief, says the user." in str(model.work.system) + str(model.work.messages)
    assert "cache_control" in (tmp_path / "recording.jsonl").read_text()
    assert len(model.requests) == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen-code", {"settings": {"model": {"generationConfig": {"samplingParams": {"temperature": 0.25}}}}}),
        ("goose", {"temperature": 0.25}),
    ],
)
async def test_a_temperature(name: str, options: dict[str, Any]) -> None:
    model = await ask(name, options)
    assert model.work.sampling.temperature == 0.25


async def test_variables_of_the_user_go_before_those_of_pier() -> None:
    model = await ask("claude-code", {}, {"CLAUDE_CODE_EXTRA_BODY": json.dumps({"metadata": {"user_id": "of-mine"}})})
    assert "of-mine" in str(model.work)


def test_several_agents_in_one_job_file(tmp_path: Path) -> None:
    turns = [{"shell": "echo hi > /tmp/answer; echo $NOTE > /logs/agent/note"}, {"finish": "Done."}]
    (tmp_path / "script.json").write_text(json.dumps(turns))
    make_task(tmp_path / "task")
    model = f"script:{tmp_path / 'script.json'}"
    agents: list[dict[str, Any]] = [
        {"name": "codex", "kwargs": {"reasoning_effort": "xhigh"}, "env": {"NOTE": "${NOTE_OF_MINE}"}},
        {"name": "pi", "kwargs": {"thinking": "low"}, "env": {"NOTE": "other"}},
    ]
    for agent in agents:
        need_pack(agent["name"])
        agent["model_name"] = model
    job = {"agents": agents, "datasets": [{"path": "task"}], "job_name": "j"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    pier("run", "-c", "job.json", cwd=tmp_path, PIER_PACKS=str(PACKS), NOTE_OF_MINE="seen")
    found = {}
    for trial in trials_of(tmp_path / "jobs" / "j"):
        result = json.loads((trial / "result.json").read_text())
        assert result["verifier_result"]["rewards"] == {"reward": 1} and result["agent_info"]["model_info"]
        recorded = (trial / "agent" / "recording.jsonl").read_text()
        found[result["agent_info"]["name"]] = ((trial / "agent" / "note").read_text(), "xhigh" in recorded)
        assert "${NOTE_OF_MINE}" in (trial / "config.json").read_text() or result["agent_info"]["name"] == "pi"
    assert found == {"codex": ("seen\n", True), "pi": ("other\n", False)}
    packs = json.loads((tmp_path / "jobs" / "j" / "lock.json").read_text())["pier"]["packs"]
    assert set(packs) == {"codex", "pi"} and packs["codex"]["version"]
