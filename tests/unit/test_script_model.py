"""One script drives any agent: its actions become calls of whatever tools are offered, or text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pier.errors import UsageError
from pier.gateway.script import Script
from pier.wire.turn import (
    Message,
    ModelFailed,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> Tool:
    typed = {key: value if isinstance(value, dict) else {"type": value} for key, value in properties.items()}
    return Tool(name, schema={"type": "object", "properties": typed, "required": list(required)})


SHELLS = {
    "claude": tool("Bash", ("command",), command="string", description="string", timeout="number"),
    "codex": tool("exec_command", ("cmd",), cmd="string", workdir="string"),
    "codex-old": tool("shell", ("command",), command={"type": "array", "items": {"type": "string"}}),
    "gemini": tool("run_shell_command", ("command", "is_background"), command="string", is_background="boolean"),
    "opencode": tool("bash", ("command", "description"), command="string", description="string"),
    "openhands": tool(
        "execute_bash",
        ("command", "security_risk"),
        command="string",
        security_risk={"type": "string", "enum": ["UNKNOWN", "LOW", "HIGH"]},
    ),
    "goose": tool("developer__shell", ("command",), command="string"),
    "cline": tool("run_commands", ("commands",), commands={"type": "array", "items": {"type": "string"}}),
    "droid": tool("Execute", ("command",), command="string"),
    "stranger": tool("vm_bash_session", ("script",), script="string"),
}


def ask(*messages: Message, tools: tuple[Tool, ...] = (), **more: Any) -> Request:
    return Request("m", messages or (Message("user", (Text("Do it."),)),), tools=tools, **more)


async def play(turns: Any, request: Request) -> Turn:
    return await Script.parse(turns)(request)


@pytest.mark.parametrize("agent", list(SHELLS))
async def test_a_command_finds_the_shell_of_each_agent(agent: str) -> None:
    shell = SHELLS[agent]
    others = (tool("Read", file_path="string"), tool("write_stdin", session="string", chars="string"))
    call = (await play([{"shell": "ls -l"}], ask(tools=(*others, shell)))).calls[0]
    arguments = json.loads(call.arguments)
    assert call.name == shell.name
    assert "ls -l" in json.dumps(arguments)
    assert set((shell.schema or {})["required"]) <= set(arguments)
    assert arguments.get("security_risk", "LOW") == "LOW"


async def test_files_are_written_and_edited_through_the_shell_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "it's.txt"
    content = "first 'line' $HOME `x` \\n\nsecond & \"line\"\n"
    edit = {"path": str(file), "old": "'line' $HOME", "new": "[\\1 & it's]"}
    turns = [{"write": {"path": str(file), "content": content}}, {"edit": edit}]
    script = Script.parse(turns)
    for number in range(2):
        turn = await script(ask(Message("user", (Text(f"go {number}"),)), tools=(SHELLS["claude"],)))
        command = json.loads(turn.calls[0].arguments)["command"]
        subprocess.run(["sh", "-c", command], check=True, timeout=60)
    assert file.read_text() == content.replace("'line' $HOME", "[\\1 & it's]", 1)


@pytest.mark.parametrize(
    ("action", "offered", "wanted"),
    [
        (
            {"write": {"path": "/a", "content": "b"}},
            tool("write_file", ("file_path", "content"), file_path="string", content="string"),
            {"file_path": "/a", "content": "b"},
        ),
        (
            {"edit": {"path": "/a", "old": "b", "new": "c"}},
            tool("Edit", filePath="string", oldString="string", newString="string"),
            {"filePath": "/a", "oldString": "b", "newString": "c"},
        ),
        (
            {"edit": {"path": "/a", "old": "b", "new": "c"}},
            tool("str_replace_editor", command="string", path="string"),
            {"command": "str_replace", "path": "/a", "old_str": "b", "new_str": "c"},
        ),
    ],
)
async def test_without_a_shell_the_agents_own_file_tools_are_used(
    action: dict[str, Any], offered: Tool, wanted: dict[str, Any]
) -> None:
    call = (await play([action], ask(tools=(offered,)))).calls[0]
    assert (call.name, json.loads(call.arguments)) == (offered.name, wanted)


async def test_what_no_tool_can_do_fails_clearly() -> None:
    with pytest.raises(ModelFailed, match=r"'shell'.*it offers: Read") as failed:
        await play([{"shell": "ls"}], ask(tools=(tool("Read", file_path="string"),)))
    assert failed.value.status == 400


async def test_text_reasoning_and_several_calls_make_one_turn() -> None:
    spec = {"text": "Now.", "reasoning": "Hm.", "actions": [{"shell": "a"}, {"shell": "b"}], "usage": {"input": 7}}
    turn = await play([spec], ask(tools=(SHELLS["claude"],)))
    assert (turn.text, turn.reasoning, turn.stop, turn.usage.input_tokens) == ("Now.", "Hm.", "tool_use", 7)
    assert len({call.id for call in turn.calls}) == 2


async def test_a_tool_can_be_called_by_name_with_free_text() -> None:
    patch = Tool("apply_patch", kind="custom", namespace="ns")
    call = (await play([{"call": {"name": "apply_patch", "arguments": "*** Begin"}}], ask(tools=(patch,)))).calls[0]
    assert (call.arguments, call.custom, call.namespace) == ("*** Begin", True, "ns")


async def test_turns_come_in_order_and_a_retry_gets_its_own_again() -> None:
    script = Script.parse([{"text": "one"}, {"error": {"status": 529, "message": "busy"}}, {"finish": "two"}])
    first, second = ask(), ask(Message("user", (Text("more"),)))
    assert (await script(first)).text == "one"
    assert (await script(first)).text == "one"
    with pytest.raises(ModelFailed, match="busy") as failed:
        await script(second)
    assert (failed.value.status, failed.value.kind) == (529, "overloaded")
    assert (await script(second)).text == "two"


async def test_a_script_that_is_over_says_so_and_at_last_fails() -> None:
    script = Script.parse([{"text": "one"}], "demo.yaml")

    def next_request(number: int) -> Request:
        return ask(Message("user", (Text(f"go {number}"),)))

    await script(next_request(0))
    assert "demo.yaml is over: it has 1 turns" in (await script(next_request(1))).text
    with pytest.raises(ModelFailed, match="over"):
        for number in range(2, 20):
            await script(next_request(number))


async def test_a_finish_is_repeated_for_agents_that_ask_twice() -> None:
    script = Script.parse([{"finish": "Done."}])
    assert (await script(ask())).text == "Done."
    assert (await script(ask(Message("user", (Text("sure?"),))))).text == "Done."


@pytest.mark.parametrize(
    "request_",
    [
        ask(system=("Generate a title for this conversation.",)),
        ask(Message("user", (Text("quota"),)), sampling=Sampling(max_tokens=1)),
        ask(Message("user", (Text("Please summarize the conversation so far."),))),
    ],
    ids=["title", "probe", "summary"],
)
async def test_calls_beside_the_work_use_up_no_turn(request_: Request) -> None:
    script = Script.parse({"turns": [{"text": "work"}], "side": "aside"})
    assert (await script(request_)).text == "aside"
    assert (await script(ask())).text == "work"


async def test_a_router_gets_json_of_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"reasoning": {"type": "string"}, "model_choice": {"enum": ["flash", "pro"]}},
        "required": ["reasoning", "model_choice"],
    }
    turn = await play([{"text": "work"}], ask(response_format=ResponseFormat(schema)))
    assert json.loads(turn.text)["model_choice"] == "flash"


async def test_lanes_answer_the_calls_they_are_for() -> None:
    lanes = [{"when": {"system": "helper"}, "turns": [{"text": "from the helper"}]}]
    script = Script.parse({"turns": [{"text": "main"}], "lanes": lanes})
    assert (await script(ask(system=("You are a helper",)))).text == "from the helper"
    assert (await script(ask(system=("You are the boss",)))).text == "main"


async def test_mini_swe_agent_takes_fenced_commands_and_ends_by_one() -> None:
    rules = "Answer with one ```mswea_bash_command block; end with echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    script = Script.parse([{"text": "Look.", "shell": "ls"}, {"finish": "Done."}])
    turn = await script(ask(system=(rules,)))
    assert turn.text == "Look.\n\n```mswea_bash_command\nls\n```"
    more = Message("user", (Text("a b"),))
    assert "echo COMPLETE_TASK" in (await script(ask(more, system=(rules,)))).text
    with_tools = await play([{"finish": "Done."}], ask(system=(rules,), tools=(SHELLS["opencode"],)))
    assert "COMPLETE_TASK" in with_tools.calls[0].arguments


async def test_aider_takes_edit_blocks_and_terminus_keystrokes() -> None:
    edit = {"edit": {"path": "a.py", "old": "x", "new": "y"}}
    turn = await play([edit], ask(system=("Use *SEARCH/REPLACE* blocks.",)))
    assert turn.text == "a.py\n```\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n```"
    prompt = 'Answer as {"commands": [{"keystrokes": ""}], "task_complete": false}'
    said = json.loads((await play([{"shell": "ls"}], ask(Message("user", (Text(prompt),))))).text)
    assert (said["commands"][0]["keystrokes"], said["task_complete"]) == ("ls\n", False)


async def test_agents_that_end_by_a_tool_are_ended_by_it() -> None:
    finish = tool("finish", ("message",), message="string")
    turn = await play([{"finish": "Done."}], ask(tools=(SHELLS["openhands"], finish)))
    assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == [("finish", {"message": "Done."})]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"turns": []}, "turns"),
        ({"turns": [{}]}, "a turn needs text"),
        ({"turns": [{"shel": "ls"}]}, "shel"),
        ({"turns": [{"finish": "x", "shell": "ls"}]}, "finish must be a separate turn"),
        ("no", "not a script"),
    ],
)
def test_a_wrong_script_says_where(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Script.parse(value)


def test_scripts_are_read_from_yaml_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- shell: ls\n- finish: done\n")
    (tmp_path / "b.json").write_text('{"turns": [{"text": "x"}]}')
    assert Script.load(tmp_path / "a.yaml").name.endswith("a.yaml")
    Script.load(tmp_path / "b.json")
    (tmp_path / "c.yaml").write_text("a: [")
    for name in ("c.yaml", "missing.yaml"):
        with pytest.raises(UsageError):
            Script.load(tmp_path / name)


async def test_usage_is_counted_roughly_when_the_script_gives_none() -> None:
    history = (
        Message("user", (Text("x" * 400),)),
        Message("assistant", (ToolCall("a", "Bash", "{}"),)),
        Message("user", (ToolResult("a", (Text("y" * 400),)),)),
    )
    turn = await play([{"text": "z" * 40}], ask(*history))
    assert turn.usage.input_tokens == 201
    assert turn.usage.output_tokens == 11
