"""MCP servers and skills reach real agents: the model sees the tool and the skill on the wire, and the tool answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pier.agent.contract import AgentRun, find_agent
from pier.sandbox.contract import Sandbox
from pier.task.model import McpServerTable
from pier.wire.turn import Request, Text, ToolCall, ToolResult, Turn, Usage
from tests.agent_rig import DESK, FOUR, stage

SERVER = Path(__file__).parents[1] / "mcp_server.py"
AT = "/srv/mcp_server.py"
PORT = 8123
WORDS = {"text": "one two three"}
WAYS = (
    ("reverse_words", WORDS),
    ("tool_call", {"name": "mcp__words__reverse_words", "arguments": WORDS}),
    ("ToolSearch", {"query": "select:mcp__words__reverse_words"}),
)
OTHERS = ("qwen-code", "goose", "kimi", "copilot", "cline", "openhands")
SKILL = "---\nname: sorting-letters\ndescription: How to sort old letters by sender.\n---\n\nLook at the stamp first.\n"


class Caller:
    """A model that calls the tool whose name ends in `reverse_words` once, and keeps what it was sent and told."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: list[str] = []

    async def __call__(self, request: Request) -> Turn:
        self.requests.append(request)
        results = [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]
        self.answers = [str(part) for part in results]
        call = self._call(request, len(results))
        if call is None:
            return Turn((Text("Done."),), "end", Usage(1, 1), None, request.model)
        return Turn((call,), "tool_use", Usage(1, 1), None, request.model)

    def _call(self, request: Request, done: int) -> ToolCall | None:
        """The tool; or, where an agent keeps its many tools back, what looks it up or passes the call on."""
        if any("three two one" in answer for answer in self.answers) or done > 2:
            return None
        for ending, arguments in WAYS:
            for tool in request.tools:
                if tool.name.endswith(ending):
                    asked = (tool.schema or {}).get("required") or ()
                    text = json.dumps({**arguments, **({"security_risk": "LOW"} if "security_risk" in asked else {})})
                    return ToolCall(f"call_{done}", tool.name, text, namespace=tool.namespace)
        return None

    @property
    def offered(self) -> list[str]:
        return [tool.name for request in self.requests for tool in request.tools]

    @property
    def told(self) -> str:
        """Everything that the first requests said to the model."""
        return "\n".join(
            json.dumps(request.system) + str(request.messages) + str(request.tools) for request in self.requests
        )


async def start_server(sandbox: Sandbox) -> None:
    await sandbox.spawn(["python3", AT, str(PORT)], cwd="/")
    probe = f"for i in $(seq 600); do (: </dev/tcp/127.0.0.1/{PORT}) 2>/dev/null && exit; sleep 0.1; done; exit 1"
    assert (await sandbox.exec(["bash", "-c", probe], timeout=120)).ok


async def drive(name: str, model: Caller, server: McpServerTable, warnings: list[str] | None = None) -> None:
    """Run the agent with an MCP server and a directory of skills, to a good end."""
    async with stage(name, model) as (sandbox, session):
        await sandbox.upload(SERVER, AT)
        await sandbox.write_file("/skills/sorting-letters/SKILL.md", SKILL.encode())
        if server.url:
            await start_server(sandbox)
        run = AgentRun("Reverse the words.", DESK, session.endpoint(), seconds=300, skills_dir="/skills")
        told = [] if warnings is None else warnings
        run = replace(run, mcp_servers=(server,), warn=told.append)
        result = await find_agent(name)().run(sandbox, run)
        assert not result.timed_out and result.exit_code == 0, result.error_text + result.text


@pytest.mark.parametrize("name", (*FOUR, *OTHERS))
async def test_a_tool_of_an_mcp_server_answers_and_skills_are_told(name: str) -> None:
    model = Caller()
    await drive(name, model, McpServerTable(name="words", transport="stdio", command="python3", args=(AT,)))
    assert any("three two one" in answer for answer in model.answers), (model.offered, model.answers)
    assert "sorting-letters" in model.told
    assert name == "cline" or "by sender" in model.told, "Cline tells its model the names alone"


@pytest.mark.parametrize("name", FOUR)
async def test_a_tool_of_a_server_over_http_answers(name: str) -> None:
    model = Caller()
    await drive(
        name, model, McpServerTable(name="words", transport="streamable-http", url=f"http://127.0.0.1:{PORT}/mcp")
    )
    assert any("three two one" in answer for answer in model.answers), (model.offered, model.answers)


async def test_what_an_agent_has_no_notion_of_is_told() -> None:
    model, warnings = Caller(), []
    await drive("pi", model, McpServerTable(name="words", transport="stdio", command="python3", args=(AT,)), warnings)
    assert warnings == ["pi does not support MCP, so these servers are not offered to it: words"]
    assert "sorting-letters" in model.told
