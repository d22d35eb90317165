"""Session logs of agents become trajectories that lose nothing: sub-agents, compactions, pictures, unfinished turns."""

from __future__ import annotations

import base64
import json
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pier.errors import UsageError
from pier.trajectory.model import Trajectory
from pier.trajectory.native.convert import convert, find_sessions, targets, trajectory_of
from pier.trajectory.rules import validate, validate_file

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\nnot really a picture").decode()


def write_lines(path: Path, rows: list[dict[str, Any]], torn: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return path


def only(root: Path, agent: str | None = None) -> Trajectory:
    (session,) = find_sessions(root, agent)
    found = trajectory_of(session)
    assert validate(found) == []
    return found


# Claude Code


def claude(kind: str, second: int, **fields: Any) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02d}.000Z"
    return {"type": kind, "uuid": f"u{second}", "sessionId": "s", "version": "2.1", "timestamp": at, **fields}


def claude_answer(second: int, id_: str, block: dict[str, Any], **usage: int) -> dict[str, Any]:
    counted = {"input_tokens": 10, "output_tokens": 5, **usage}
    message = {"id": id_, "role": "assistant", "model": "m", "content": [block], "usage": counted}
    return claude("assistant", second, message=message)


def claude_result(second: int, call: str, content: Any, told: dict[str, Any] | None = None) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": call, "content": content}
    return claude("user", second, message={"role": "user", "content": [block]}, toolUseResult=told or {})


def claude_log(root: Path) -> Path:
    use = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}
    task = {"type": "tool_use", "id": "c2", "name": "Task", "input": {"prompt": "look"}}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    rows = [
        claude("user", 1, message={"role": "user", "content": "Do it."}),
        claude_answer(2, "m1", {"type": "thinking", "thinking": "Hm."}),
        claude_answer(2, "m1", {"type": "text", "text": "I look."}),
        claude_answer(2, "m1", use, cache_read_input_tokens=100, cache_creation_input_tokens=7),
        claude_result(3, "c1", [{"type": "text", "text": "a.txt"}, picture]),
        claude_answer(4, "m2", task),
        claude_result(5, "c2", "found", {"agentId": "a1"}),
        claude("system", 6, subtype="compact_boundary", compactMetadata={"trigger": "auto", "preTokens": 9}),
        claude("user", 7, isCompactSummary=True, message={"role": "user", "content": "So far."}),
        claude_answer(8, "m3", {"type": "tool_use", "id": "c3", "name": "Bash", "input": {"command": "sleep 9"}}),
        {"type": "cost-state", "sessionId": "s", "totalCostUSD": 0.25},
    ]
    child = [
        claude("user", 4, isSidechain=True, message={"role": "user", "content": "look"}),
        claude_answer(5, "n1", {"type": "text", "text": "found"}),
    ]
    write_lines(root / "projects" / "-app" / "s" / "subagents" / "agent-a1.jsonl", child)
    return write_lines(root / "projects" / "-app" / "s.jsonl", rows, torn='{"type": "assis')


def test_claude_code_blocks_of_one_answer_are_one_step(tmp_path: Path) -> None:
    claude_log(tmp_path)
    found = only(tmp_path)
    kinds = [(step.source, step.text) for step in found.steps]
    assert kinds == [
        ("user", "Do it."),
        ("agent", "I look."),
        ("agent", ""),
        ("system", ""),
        ("system", "So far."),
        ("agent", ""),
    ]
    first = found.steps[1]
    assert first.reasoning_content == "Hm." and first.metrics is not None
    assert (first.metrics.prompt_tokens, first.metrics.cached_tokens) == (117, 100)
    assert found.final_metrics is not None and found.final_metrics.total_cost_usd == 0.25
    assert found.steps[3].extra == {"kind": "compaction", "trigger": "auto", "preTokens": 9}


def test_an_answer_of_very_many_blocks_is_read(tmp_path: Path) -> None:
    """To copy or search all blocks for each of them would exceed the time limit of this test."""
    count = 60_000
    answer = claude_answer(1, "m1", {})
    answer["message"]["content"] = [
        *({"type": "text", "text": "x" * 200} for _ in range(count)),
        *({"type": "tool_use", "id": f"c{number}", "name": "Bash", "input": {}} for number in range(count)),
    ]
    results = claude_result(2, "c0", "")
    results["message"]["content"] = [
        {"type": "tool_result", "tool_use_id": f"c{number}", "content": ""} for number in range(count)
    ]
    write_lines(tmp_path / "projects" / "-app" / "s.jsonl", [answer, results])
    (session,) = find_sessions(tmp_path, "claude-code")
    (step,) = session.steps()
    assert len(step.text) == 202 * count - 2 and len(step.tool_calls or ()) == count
    assert step.observation is not None and len(step.observation.results) == count


def test_claude_code_sub_agents_are_embedded_and_named_by_the_call(tmp_path: Path) -> None:
    claude_log(tmp_path)
    found = only(tmp_path)
    (inner,) = found.subagent_trajectories or []
    assert inner.trajectory_id == "a1" and inner.agent_steps[0].text == "found"
    observation = found.steps[2].observation
    assert observation is not None
    assert (observation.results[0].subagent_trajectory_ref or [])[0].trajectory_id == "a1"


def test_an_unfinished_turn_is_kept_without_its_answer(tmp_path: Path) -> None:
    claude_log(tmp_path)
    last = only(tmp_path).steps[-1]
    assert last.tool_calls is not None and last.tool_calls[0].tool_call_id == "c3" and last.observation is None


def test_pictures_are_put_beside_the_file(tmp_path: Path) -> None:
    claude_log(tmp_path / "logs")
    (session,) = find_sessions(tmp_path / "logs")
    target = tmp_path / "out" / "trajectory.json"
    convert(session, target)
    assert validate_file(target) == []
    (picture,) = (tmp_path / "out" / "images").iterdir()
    assert picture.read_bytes() == base64.b64decode(PIXEL)


# Codex


def codex(kind: str, second: int, **payload: Any) -> dict[str, Any]:
    return {"type": kind, "timestamp": f"2026-01-01T00:00:{second:02d}.000Z", "payload": payload}


def codex_log(path: Path, id_: str, parent: str | None = None) -> Path:
    usage = {"input_tokens": 50, "cached_input_tokens": 20, "output_tokens": 9, "reasoning_output_tokens": 4}
    meta = {"id": id_, "cli_version": "0.1", "parent_thread_id": parent}
    said = [{"type": "input_text", "text": "Fix it."}]
    rows = [
        codex("session_meta", 0, **meta),
        codex("turn_context", 0, model="m"),
        codex("response_item", 1, type="message", role="user", content=said),
        codex("response_item", 2, type="reasoning", summary=[{"type": "summary_text", "text": "Hm."}]),
        codex("response_item", 2, type="function_call", name="exec", arguments='{"cmd": "ls"}', call_id=f"{id_}1"),
        codex("response_item", 2, type="function_call", name="exec", arguments="not json", call_id=f"{id_}2"),
        codex("token_usage_record", 2, usage=usage),
        codex(
            "event_msg", 3, type="item_completed", item={"type": "CommandExecution", "id": f"{id_}1", "exit_code": 3}
        ),
        codex("response_item", 3, type="function_call_output", call_id=f"{id_}1", output="a.txt"),
        codex("response_item", 3, type="function_call_output", call_id=f"{id_}2", output="b.txt"),
        codex("compacted", 4, message="So far."),
        codex("response_item", 5, type="message", role="assistant", content=[{"type": "output_text", "text": "Done."}]),
        codex("token_usage_record", 5, usage=usage),
    ]
    return write_lines(path, rows)


def test_codex_answers_end_with_their_tokens(tmp_path: Path) -> None:
    codex_log(tmp_path / "2026" / "rollout-a.jsonl", "a")
    codex_log(tmp_path / "2026" / "rollout-b.jsonl", "b", parent="a")
    found = only(tmp_path, "codex")
    assert [step.source for step in found.steps] == ["user", "agent", "system", "agent"]
    step = found.steps[1]
    assert step.reasoning_content == "Hm." and step.observation is not None and step.tool_calls is not None
    assert [call.arguments for call in step.tool_calls] == [{"cmd": "ls"}, {"input": "not json"}]
    assert [result.content for result in step.observation.results] == ["a.txt", "b.txt"]
    assert step.observation.results[0].extra == {"exit_code": 3}
    assert found.final_metrics is not None and found.final_metrics.total_prompt_tokens == 100
    assert (found.final_metrics.extra or {})["summarization_count"] == 1
    assert [inner.trajectory_id for inner in found.subagent_trajectories or []] == ["b"]


# Gemini CLI


def test_gemini_cli_messages_that_are_written_again_are_one_step(tmp_path: Path) -> None:
    tokens = {"input": 30, "output": 5, "cached": 10, "thoughts": 2, "total": 37}
    answer = {"id": "g1", "timestamp": "2026-01-01T00:00:02Z", "type": "gemini", "content": "I look.", "tokens": tokens}
    response = {"functionResponse": {"id": "t1", "name": "shell", "response": {"output": "a.txt"}}}
    call = {"id": "t1", "name": "shell", "args": {"command": "ls"}, "status": "success", "result": [response]}
    rows = [
        {"sessionId": "s", "projectHash": "p", "kind": "main"},
        {"id": "u1", "timestamp": "2026-01-01T00:00:01Z", "type": "user", "content": [{"text": "Fix it."}]},
        answer,
        {"$set": {"lastUpdated": "2026-01-01T00:00:02Z"}},
        {**answer, "thoughts": [{"subject": "Look", "description": "first"}], "toolCalls": [call]},
        {"id": "u2", "timestamp": "2026-01-01T00:00:03Z", "type": "user", "content": [response]},
        {**answer, "id": "g2", "timestamp": "2026-01-01T00:00:04Z", "content": "Done."},
    ]
    write_lines(tmp_path / "chats" / "session-s.jsonl", rows)
    found = only(tmp_path)
    assert [(step.source, step.text) for step in found.steps] == [
        ("user", "Fix it."),
        ("agent", "I look."),
        ("agent", "Done."),
    ]
    step = found.steps[1]
    assert step.reasoning_content == "Look\nfirst" and step.metrics is not None and step.observation is not None
    assert step.metrics.completion_tokens == 7 and len(step.observation.results) == 1


# OpenCode


def test_opencode_sessions_of_one_database_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "opencode" / "opencode.db"
    path.parent.mkdir()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE session (id, parent_id, version, title, time_created)")
    database.execute("CREATE TABLE message (id, session_id, time_created, data)")
    database.execute("CREATE TABLE part (id, message_id, data)")

    def add(session: str, id_: str, at: int, message: dict[str, Any], *parts: dict[str, Any]) -> None:
        database.execute("INSERT INTO message VALUES (?, ?, ?, ?)", (id_, session, at, json.dumps(message)))
        for number, part in enumerate(parts):
            database.execute("INSERT INTO part VALUES (?, ?, ?)", (f"{id_}{number}", id_, json.dumps(part)))

    for row in (("top", None, "1", "Top", 1), ("sub", "top", "1", "Sub", 2)):
        database.execute("INSERT INTO session VALUES (?, ?, ?, ?, ?)", row)
    tokens = {"input": 20, "output": 5, "reasoning": 3, "cache": {"read": 8, "write": 2}}
    answer = {"role": "assistant", "modelID": "m", "tokens": tokens, "cost": 0.5, "finish": "stop"}
    state = {"status": "completed", "input": {"p": "x"}, "output": "found", "metadata": {"sessionId": "sub"}}
    add("top", "m1", 1000, {"role": "user"}, {"type": "text", "text": "Fix it."})
    add("top", "m2", 2000, answer, {"type": "tool", "tool": "task", "callID": "c1", "state": state})
    add("sub", "m3", 2500, answer, {"type": "text", "text": "found"}, {"type": "reasoning", "text": "Hm."})
    database.commit()
    database.close()
    found = only(tmp_path)
    assert found.session_id == "top" and [step.source for step in found.steps] == ["user", "agent"]
    metrics = found.steps[1].metrics
    assert metrics is not None and (metrics.prompt_tokens, metrics.completion_tokens) == (30, 8)
    (inner,) = found.subagent_trajectories or []
    assert inner.agent_steps[0].reasoning_content == "Hm."


def _opencode_sessions(path: Path, parents: dict[str | None, str | None]) -> Path:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE session (id, parent_id, version, title, time_created)")
        database.execute("CREATE TABLE message (id, session_id, time_created, data)")
        database.execute("CREATE TABLE part (id, message_id, data)")
        for number, (id_, parent) in enumerate(parents.items()):
            part = json.dumps({"type": "text", "text": f"I am {id_}."})
            database.execute("INSERT INTO session VALUES (?, ?, '1', '', ?)", (id_, parent, number))
            database.execute(
                "INSERT INTO message VALUES (?, ?, ?, ?)", (id_, id_, number, json.dumps({"role": "user"}))
            )
            database.execute("INSERT INTO part VALUES ('p', ?, ?)", (id_, part))
        database.commit()
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "parents",
    [
        {"a": "a"},
        {"a": "b", "b": "a"},
        {"a": "c", "b": "a", "c": "b", "d": "c", "e": None, "f": "gone"},
        {f"s{number}": f"s{(number + 1) % 2000}" for number in range(2000)},
        {f"s{number}": f"s{number - 1}" for number in range(2000)},
    ],
    ids=["itself", "each other", "three and others", "a large circle", "a long line"],
)
def test_opencode_sessions_in_a_circle_are_all_kept(parents: dict[str | None, str | None], tmp_path: Path) -> None:
    _opencode_sessions(tmp_path / "logs" / "opencode.db", parents)
    for session, target in targets(find_sessions(tmp_path / "logs"), tmp_path / "out"):
        convert(session, target)
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert all(written.count(f'"I am {id_}."') == 1 for id_ in parents)
    for path in (tmp_path / "out").iterdir():
        json.loads(path.read_text())


# All


def test_several_sessions_get_a_file_each(tmp_path: Path) -> None:
    claude_log(tmp_path / "logs")
    codex_log(tmp_path / "logs" / "rollout-a.jsonl", "a")
    sessions = find_sessions(tmp_path / "logs")
    names = [target.name for _, target in targets(sessions, tmp_path / "out")]
    assert sorted(names) == ["claude-code-s.json", "codex-a.json"]


def test_ids_of_logs_lead_nowhere_and_hide_no_session(tmp_path: Path) -> None:
    for number, id_ in enumerate(("../../out", "/etc/out", "same", "same", "long" * 100, "long" * 100)):
        codex_log(tmp_path / "logs" / f"rollout-{number}.jsonl", id_)
    found = [target for _, target in targets(find_sessions(tmp_path / "logs"), tmp_path / "made")]
    assert {target.parent for target in found} == {tmp_path / "made"}
    assert len({target.name for target in found}) == 6 and all(len(target.name) < 200 for target in found)


def test_sessions_that_name_each_other_as_parents_are_kept(tmp_path: Path) -> None:
    for id_, parent in (("a", "b"), ("b", "a"), ("c", "c"), ("d", "a")):
        codex_log(tmp_path / f"rollout-{id_}.jsonl", id_, parent)
    found = find_sessions(tmp_path)
    assert [session.id for session in found] == ["b", "c"]
    (below,) = found[0].children
    assert [below.id, *(session.id for session in below.children)] == ["a", "d"]


def test_where_there_is_no_log_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(UsageError, match="no session logs"):
        find_sessions(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        find_sessions(tmp_path, "unheard-of")


def test_a_late_answer_of_a_tool_is_kept(tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {}}
    rows = [
        claude("user", 1, message={"role": "user", "content": "Go."}),
        claude_answer(2, "m1", use),
        claude_answer(3, "m2", {"type": "text", "text": "Meanwhile."}),
        claude_result(4, "c1", "late"),
    ]
    write_lines(tmp_path / "s.jsonl", rows)
    last = only(tmp_path).steps[-1]
    assert last.source == "system" and last.observation is not None
    assert last.observation.results[0].content == "late"
    assert last.observation.results[0].extra == {"call_id": "c1"}


def test_a_long_session_needs_the_memory_of_its_largest_turn(tmp_path: Path) -> None:
    log = tmp_path / "long.jsonl"
    with log.open("w") as file:
        file.write(json.dumps(claude("user", 1, message={"role": "user", "content": "Go."})) + "\n")
        for number in range(400):
            use = {"type": "tool_use", "id": f"c{number}", "name": "Bash", "input": {"command": "cat big"}}
            file.write(json.dumps(claude_answer(2, f"m{number}", use)) + "\n")
            file.write(json.dumps(claude_result(2, f"c{number}", "x" * 50_000)) + "\n")
    assert log.stat().st_size > 20_000_000
    (session,) = find_sessions(log, "claude-code")
    tracemalloc.start()
    try:
        convert(session, tmp_path / "trajectory.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert (tmp_path / "trajectory.json").stat().st_size > 20_000_000
