"""What must hold for the session logs of every agent: pictures, several sessions, torn ends, bounded memory."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pier.errors import UsageError
from pier.trajectory.model import Trajectory, read
from pier.trajectory.native.assemble import members
from pier.trajectory.native.convert import READERS, convert, find_sessions, trajectory_of
from pier.trajectory.rules import validate, validate_file
from tests.unit.test_native_agents import (
    GOOSE_TABLES,
    goose_call,
    goose_result,
    oh,
    oh_action,
    oh_result,
    oh_write,
    qwen,
    qwen_call,
    qwen_usage,
    text,
)
from tests.unit.test_native_logs import PIXEL, claude, claude_answer, claude_result, codex

AT = {"extra": {"timestamp": 1767225600}}
URL = f"data:image/png;base64,{PIXEL}"


def lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def claude_code(root: Path, name: str, turns: int, output: str) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield claude("user", 1, message={"role": "user", "content": "Go."})
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
        for n in range(turns):
            yield claude_answer(2, f"m{n}", {"type": "tool_use", "id": f"c{n}", "name": "Bash", "input": {"n": n}})
            yield claude_result(2, f"c{n}", [{"type": "text", "text": output}, *([picture] if n == 0 else ())])

    lines(root / "projects" / "-app" / f"{name}.jsonl", rows())


def codex_cli(root: Path, name: str, turns: int, output: str) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield codex("session_meta", 0, id=name)
        yield codex("response_item", 1, type="message", role="user", content=[{"type": "input_text", "text": "Go."}])
        picture = [{"type": "input_text", "text": output}, {"type": "input_image", "image_url": URL}]
        for n in range(turns):
            call = {"name": "exec", "arguments": json.dumps({"n": n}), "call_id": f"c{n}"}
            yield codex("response_item", 2, type="function_call", **call)
            yield codex("token_usage_record", 2, usage={"input_tokens": 10, "output_tokens": 5})
            given = picture if n == 0 else output
            yield codex("response_item", 3, type="function_call_output", call_id=f"c{n}", output=given)

    lines(root / "sessions" / f"rollout-{name}.jsonl", rows())


def gemini_cli(root: Path, name: str, turns: int, output: str) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        at = "2026-01-01T00:00:02Z"
        yield {"sessionId": name, "projectHash": "p", "kind": "main"}
        yield {"id": "u", "timestamp": at, "type": "user", "content": [{"text": "Go."}]}
        for n in range(turns):
            parts = [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}] if n == 0 else []
            answer = {"functionResponse": {"id": f"t{n}", "response": {"output": output}, "parts": parts}}
            call = {"id": f"t{n}", "name": "shell", "args": {"n": n}, "status": "success", "result": [answer]}
            tokens = {"input": 10, "output": 5}
            row = {"id": f"g{n}", "timestamp": at, "type": "gemini", "content": "", "tokens": tokens}
            yield row
            yield {**row, "toolCalls": [call]}

    lines(root / "chats" / f"session-{name}.jsonl", rows())


def qwen_code(root: Path, name: str, turns: int, output: str) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield qwen("user", 1, {"text": "Go."}, provenance="real_user")
        for n in range(turns):
            yield qwen("assistant", 2, qwen_call(f"c{n}", "shell", n=n), model="m", **qwen_usage(10, 5))
            parts = [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}] if n == 0 else []
            answer = {"id": f"c{n}", "name": "shell", "response": {"output": output}, "parts": parts}
            yield qwen("tool_result", 3, {"functionResponse": answer})

    lines(root / "projects" / "-app" / "chats" / f"{name}.jsonl", rows())


def mini(root: Path, name: str, turns: int, output: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.traj.json").open("w") as file:
        info = {"mini_version": "2.4", "exit_status": "Submitted"}
        file.write(
            '{"info": ' + json.dumps(info) + ', "messages": [' + json.dumps({"role": "user", "content": "Go.", **AT})
        )
        for n in range(turns):
            call = {"id": f"c{n}", "function": {"name": "bash", "arguments": json.dumps({"n": n})}}
            response = {"id": f"r{n}", "model": "m", "usage": {"prompt_tokens": 10, "completion_tokens": 5}}
            picture = [{"type": "text", "text": output}, {"type": "image_url", "image_url": {"url": URL}}]
            rows: list[dict[str, Any]] = [
                {"role": "assistant", "content": "", "tool_calls": [call], "extra": {"response": response}},
                {"role": "tool", "tool_call_id": f"c{n}", "content": picture if n == 0 else output},
            ]
            file.writelines(", " + json.dumps(row) for row in rows)
        file.write('], "trajectory_format": "mini-swe-agent-1.1"}')


def openhands(root: Path, name: str, turns: int, output: str) -> None:
    rows = [oh("MessageEvent", 1, source="user", llm_message={"role": "user", "content": [text("Go.")]})]
    for n in range(turns):
        picture = [{"type": "image", "image_urls": [URL]}] if n == 0 else []
        rows += [oh_action(2, f"r{n}", f"k{n}", "terminal", n=n), oh_result(3, f"k{n}", text(output), *picture)]
    oh_write(root / "conversations" / name, rows, [f"r{n}" for n in range(turns)])


def goose(root: Path, name: str, turns: int, output: str) -> None:
    path = root / name / "sessions" / "sessions.db"
    path.parent.mkdir(parents=True)
    add = (
        "INSERT INTO messages (message_id, session_id, role, content_json, created_timestamp, metadata_json)"
        " VALUES (?, ?, ?, ?, 1767225600, ?)"
    )
    usage = json.dumps({"usage": {"inputTokens": 10, "outputTokens": 5}})
    with closing(sqlite3.connect(path)) as database:
        database.executescript(GOOSE_TABLES)
        database.execute("INSERT INTO sessions VALUES (?, '', '2026-01-01', NULL, NULL)", (name,))
        database.execute(add, ("u", name, "user", json.dumps([text("Go.")]), "{}"))
        for n in range(turns):
            picture = [{"type": "image", "mimeType": "image/png", "data": PIXEL}] if n == 0 else []
            database.execute(add, (f"r{n}", name, "assistant", json.dumps([goose_call(f"c{n}", "shell", n=n)]), usage))
            given = goose_result(f"c{n}", text(output), *picture)
            database.execute(add, (f"m{n}", name, "user", json.dumps([given]), "{}"))
        database.commit()


def opencode(root: Path, name: str, turns: int, output: str) -> None:
    path = root / name / "opencode.db"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE session (id, parent_id, version, title, time_created)")
        database.execute("CREATE TABLE message (id, session_id, time_created, data)")
        database.execute("CREATE TABLE part (id, message_id, data)")
        database.execute("CREATE INDEX part_of ON part (message_id)")
        database.execute("INSERT INTO session VALUES (?, NULL, '1', 'T', 1)", (name,))

        def add(id_: str, at: int, message: dict[str, Any], part: dict[str, Any]) -> None:
            database.execute("INSERT INTO message VALUES (?, ?, ?, ?)", (id_, name, at, json.dumps(message)))
            database.execute("INSERT INTO part VALUES (?, ?, ?)", (f"{id_}p", id_, json.dumps(part)))

        add("a", 1, {"role": "user"}, {"type": "text", "text": "Go."})
        for n in range(turns):
            shown = [{"type": "file", "mime": "image/png", "url": URL}] if n == 0 else []
            state = {"status": "completed", "input": {"n": n}, "output": output, "attachments": shown}
            answer = {"role": "assistant", "modelID": "m", "tokens": {"input": 10, "output": 5}}
            add(f"m{n:06d}", n + 2, answer, {"type": "tool", "tool": "bash", "callID": f"c{n}", "state": state})
        database.commit()


def pi(root: Path, name: str, turns: int, output: str) -> None:
    at = "2026-01-01T00:00:02Z"

    def message(**fields: Any) -> dict[str, Any]:
        return {"type": "message", "timestamp": at, "message": fields}

    def rows() -> Iterator[dict[str, Any]]:
        yield {"type": "session", "version": 3, "id": name, "timestamp": at, "cwd": "/app"}
        yield message(role="user", content=[text("Go.")])
        for n in range(turns):
            call = {"type": "toolCall", "id": f"c{n}", "name": "bash", "arguments": {"n": n}}
            usage = {"input": 8, "cacheRead": 2, "output": 5, "totalTokens": 15}
            yield message(role="assistant", content=[call], model="m", usage=usage, responseId=f"r{n}")
            picture = [{"type": "image", "mimeType": "image/png", "data": PIXEL}] if n == 0 else []
            yield message(role="toolResult", toolCallId=f"c{n}", content=[text(output), *picture])

    lines(root / "sessions" / "--app--" / f"{name}.jsonl", rows())


def kimi(root: Path, name: str, turns: int, output: str) -> None:
    def event(**fields: Any) -> dict[str, Any]:
        return {"type": "context.append_loop_event", "event": fields, "time": 1767225602000}

    def rows() -> Iterator[dict[str, Any]]:
        yield {"type": "metadata", "protocol_version": "1.5", "created_at": 1767225600000}
        said = {"role": "user", "content": [text("Go.")], "origin": {"kind": "user"}}
        yield {"type": "context.append_message", "message": said, "time": 1767225601000}
        for n in range(turns):
            yield event(type="step.begin", uuid=f"s{n}")
            yield event(type="tool.call", toolCallId=f"c{n}", name="Bash", args={"n": n})
            picture = [text(output), {"type": "image_url", "imageUrl": {"url": URL}}]
            yield event(type="tool.result", toolCallId=f"c{n}", result={"output": picture if n == 0 else output})
            yield event(type="step.end", uuid=f"s{n}", usage={"inputOther": 8, "inputCacheRead": 2, "output": 5})

    lines(root / "sessions" / "wd" / f"session_{name}" / "agents" / "main" / "wire.jsonl", rows())


def cline(root: Path, name: str, turns: int, output: str) -> None:
    path = root / "sessions" / name / f"{name}.messages.json"
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        head = {"version": 1, "sessionId": name, "origin": {"version": "3.0"}}
        file.write(json.dumps(head)[:-1] + ', "messages": [')
        file.write(json.dumps({"role": "user", "content": [text("Go.")], "ts": 1767225601000}))
        for n in range(turns):
            call = {"type": "tool_use", "id": f"c{n}", "name": "run", "input": {"n": n}}
            used = {"inputTokens": 10, "outputTokens": 5}
            source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
            picture = [{"type": "image", "source": source}] if n == 0 else []
            given = {"type": "tool_result", "tool_use_id": f"c{n}", "content": [text(output), *picture]}
            answer = {"id": f"m{n}", "role": "assistant", "content": [call], "ts": 1767225602000, "metrics": used}
            file.write(", " + json.dumps(answer))
            file.write(", " + json.dumps({"role": "user", "content": [given], "ts": 1767225602000}))
        file.write('], "system_prompt": "You are."}')


def copilot(root: Path, name: str, turns: int, output: str) -> None:
    def event(kind: str, **data: Any) -> dict[str, Any]:
        return {"type": kind, "data": data, "timestamp": "2026-01-01T00:00:02Z"}

    def rows() -> Iterator[dict[str, Any]]:
        yield event("session.start", sessionId=name, copilotVersion="1.0")
        yield event("user.message", content="Go.")
        for n in range(turns):
            yield event("session.usage_record", usage={"inputTokens": 10, "outputTokens": 5})
            asked = [{"toolCallId": f"c{n}", "name": "bash", "arguments": {"n": n}}]
            yield event("assistant.message", messageId=f"m{n}", content="", toolRequests=asked)
            yield event("tool.execution_complete", toolCallId=f"c{n}", success=True, result={"content": output})

    lines(root / "session-state" / name / "events.jsonl", rows())


BUILDERS: dict[str, Callable[[Path, str, int, str], None]] = {
    "claude-code": claude_code,
    "codex": codex_cli,
    "gemini-cli": gemini_cli,
    "opencode": opencode,
    "mini-swe-agent": mini,
    "openhands": openhands,
    "qwen-code": qwen_code,
    "goose": goose,
    "pi": pi,
    "kimi": kimi,
    "cline": cline,
    "copilot": copilot,
}
AGENTS = sorted(BUILDERS)
PICTURED = [agent for agent in AGENTS if agent != "copilot"]
"""Those whose logs hold the pictures that tools gave."""


def check(found: Trajectory, turns: int, output: str) -> None:
    assert len(found.agent_steps) == turns
    for number, step in enumerate(found.agent_steps):
        (call,) = step.tool_calls or ()
        assert call.arguments == {"n": number}
        assert step.metrics is not None and (step.metrics.prompt_tokens, step.metrics.completion_tokens) == (10, 5)
        assert step.observation is not None
        (result,) = step.observation.results
        content = result.content or ""
        words = content if isinstance(content, str) else "".join(part.text or "" for part in content)
        assert words == output


def test_no_reader_is_left_out() -> None:
    assert set(BUILDERS) == set(READERS)


@pytest.mark.parametrize("agent", PICTURED)
def test_pictures_that_tools_gave_are_kept(agent: str, tmp_path: Path) -> None:
    BUILDERS[agent](tmp_path / "logs", "one", 3, "out")
    (session,) = find_sessions(tmp_path / "logs", agent)
    target = tmp_path / "out" / "trajectory.json"
    convert(session, target)
    assert validate_file(target) == []
    check(read(target), 3, "out")
    (picture,) = (tmp_path / "out" / "images").iterdir()
    assert picture.suffix == ".png"
    first = read(target).agent_steps[0].observation
    assert first is not None and isinstance(first.results[0].content, list)
    assert [part.type for part in first.results[0].content] == ["text", "image"]


@pytest.mark.parametrize("agent", AGENTS)
def test_several_sessions_in_several_directories_are_all_found(agent: str, tmp_path: Path) -> None:
    BUILDERS[agent](tmp_path / "first", "one", 2, "out")
    BUILDERS[agent](tmp_path / "second", "two", 3, "out")
    BUILDERS[agent](tmp_path / "second", "three", 1, "out")
    sessions = find_sessions(tmp_path)
    assert {session.agent for session in sessions} == {agent}
    assert sorted(len(trajectory_of(session).agent_steps) for session in sessions) == [1, 2, 3]


@pytest.mark.parametrize("agent", [agent for agent in AGENTS if agent not in ("goose", "opencode", "openhands")])
def test_a_log_that_ends_anywhere_gives_a_valid_trajectory(agent: str, tmp_path: Path) -> None:
    BUILDERS[agent](tmp_path, "one", 3, "out")
    (session,) = find_sessions(tmp_path, agent)
    whole = session.path.read_bytes()
    steps = []
    for cut in range(0, len(whole) + 1, max(1, len(whole) // 60)):
        session.path.write_bytes(whole[:cut])
        found = trajectory_of(session)
        if found.steps:
            assert [finding for finding in validate(found) if finding.level == "error"] == []
        steps.append(len(found.agent_steps))
    assert steps == sorted(steps) and steps[-1] in (2, 3)


def bent(value: Any) -> Iterator[Any]:
    """A value with one part after the other, two levels deep, turned into something that no agent writes."""
    for key in value if isinstance(value, dict) else ():
        for other in (5, "x", [1], {"a": [None]}):
            yield {**value, key: other}
        for inner in value[key] if isinstance(value[key], dict) else ():
            yield from ({**value, key: {**value[key], inner: other}} for other in (5, [1], {"a": [None]}))


@pytest.mark.parametrize("agent", [agent for agent in AGENTS if agent not in ("goose", "opencode")])
def test_logs_that_no_agent_writes_are_read_or_named(agent: str, tmp_path: Path) -> None:
    BUILDERS[agent](tmp_path / "logs", "s1", 1, "out")
    tried = 0
    for path in [path for path in sorted(tmp_path.rglob("*")) if path.suffix in (".json", ".jsonl")]:
        whole = path.read_text()
        rows = whole.splitlines() if path.suffix == ".jsonl" else [whole]
        for number, row in enumerate(rows):
            for value in bent(json.loads(row)):
                path.write_text("\n".join([*rows[:number], json.dumps(value), *rows[number + 1 :]]) + "\n")
                tried += 1
                try:
                    for session in find_sessions(tmp_path / "logs", agent):
                        convert(session, tmp_path / "made.json")
                except UsageError as error:
                    assert error.code == "trajectory" and "session log" in str(error)
        path.write_text(whole)
    assert tried > 10


@pytest.mark.parametrize("agent", AGENTS)
def test_memory_is_that_of_the_largest_turn(agent: str, tmp_path: Path) -> None:
    BUILDERS[agent](tmp_path / "logs", "one", 250, "x" * 50_000)
    (session,) = find_sessions(tmp_path / "logs", agent)
    target = tmp_path / "trajectory.json"
    tracemalloc.start()
    try:
        convert(session, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert target.stat().st_size > 12_000_000
    assert peak < 3_000_000
    check(read(target), 250, "x" * 50_000)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (
            '{"a": 1, "l": [1, {"b": [2]}, "x"], "z": null}',
            [("a", 1), ("l", 1), ("l", {"b": [2]}), ("l", "x"), ("z", None)],
        ),
        ('{"l": [], "a": "\\u00e9"}', [("a", "é")]),
        ('{"l": {"no": "list"}}', [("l", {"no": "list"})]),
        ('{"a": 12', []),
        ('{"l": [1, 2, {"torn', [("l", 1), ("l", 2)]),
        ("[1]", []),
        ("", []),
    ],
)
def test_a_document_is_read_member_by_member(raw: str, found: list[tuple[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(raw)
    assert list(members(path, "l")) == found


def test_elements_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    rows = ["x" * size for size in (10, 65_536, 300_000, 1)]
    path.write_text(json.dumps({"l": rows, "n": 123456}, indent=1))
    assert list(members(path, "l")) == [*(("l", row) for row in rows), ("n", 123456)]


def test_sub_agents_and_compactions_of_kimi_cline_and_copilot(tmp_path: Path) -> None:
    kimi(tmp_path / "kimi", "one", 1, "agent-0 says: found")
    main = tmp_path / "kimi/sessions/wd/session_one/agents"
    kimi(tmp_path / "other", "x", 2, "inner")
    (main / "agent-0").mkdir()
    (tmp_path / "other/sessions/wd/session_x/agents/main/wire.jsonl").rename(main / "agent-0/wire.jsonl")
    with (main / "main/wire.jsonl").open("a") as file:
        file.write(json.dumps({"type": "context.apply_compaction", "summary": "So far.", "time": 1767225603000}) + "\n")
    (session,) = find_sessions(tmp_path / "kimi", "kimi")
    found = trajectory_of(session)
    assert [len(inner.agent_steps) for inner in found.subagent_trajectories or []] == [2]
    assert found.steps[-1].extra == {"kind": "compaction"}
    cline(tmp_path / "cline", "one", 1, "out")
    cline(tmp_path / "side", "two", 3, "out")
    inner = tmp_path / "side/sessions/two/two.messages.json"
    inner.rename(tmp_path / "cline/sessions/one/agent_two.messages.json")
    (session,) = find_sessions(tmp_path / "cline", "cline")
    assert [len(kid.agent_steps) for kid in trajectory_of(session).subagent_trajectories or []] == [3]
    assert session.extra["system_prompt"] == "You are."
    copilot(tmp_path / "copilot", "one", 2, "out")
    log = tmp_path / "copilot/session-state/one/events.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    beside = [{**row, "agentId": "c1"} for row in rows[2:5]]
    late = {
        "type": "session.compaction_complete",
        "data": {"summaryContent": "So far."},
        "timestamp": rows[-1]["timestamp"],
    }
    lines(log, iter([*rows[:6], *beside, *rows[6:], late]))
    (session,) = find_sessions(tmp_path / "copilot", "copilot")
    found = trajectory_of(session)
    assert (len(found.agent_steps), found.steps[-1].text) == (2, "So far.")
    (kid,) = found.subagent_trajectories or []
    assert len(kid.agent_steps) == 1
    observed = found.agent_steps[1].observation
    assert observed is not None and observed.results[0].subagent_trajectory_ref
