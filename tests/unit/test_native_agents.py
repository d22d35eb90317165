"""Session logs of Qwen Code, Goose and OpenHands, in the shapes that real runs of them wrote."""

from __future__ import annotations

import base64
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from pier.trajectory.model import Trajectory
from pier.trajectory.native.convert import convert, find_sessions, trajectory_of
from pier.trajectory.rules import validate, validate_file

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\nnot really a picture").decode()


def only(root: Path) -> Trajectory:
    """The one session there, found without being told whose it is."""
    (session,) = find_sessions(root)
    found = trajectory_of(session)
    assert validate(found) == []
    return found


def write_lines(path: Path, rows: list[dict[str, Any]], torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


# Qwen Code


def qwen(kind: str, second: int, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02d}.000Z"
    message = {"message": {"role": "model" if kind == "assistant" else "user", "parts": list(parts)}} if parts else {}
    return (
        {"uuid": f"u{second}", "sessionId": "s", "timestamp": at, "type": kind, "version": "0.24.4"} | message | fields
    )


def qwen_call(id_: str, name: str, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"id": id_, "name": name, "args": args}}


def qwen_result(second: int, id_: str, text: str, code: int | None = None, **fields: Any) -> dict[str, Any]:
    answer = {"functionResponse": {"id": id_, "name": "x", "response": {"output": text}}}
    shown = {"resultDisplay": {"type": "shell_result", "exitCode": code}} if code is not None else {}
    return qwen("tool_result", second, answer, toolCallResult={"callId": id_, "status": "success", **shown}, **fields)


def qwen_usage(prompt: int, output: int, thoughts: int = 0) -> dict[str, Any]:
    counts = {"promptTokenCount": prompt, "candidatesTokenCount": output, "thoughtsTokenCount": thoughts}
    return {"usageMetadata": {**counts, "cachedContentTokenCount": 3}}


def qwen_log(root: Path) -> Path:
    picture = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    thought = {"text": "Hm.", "thought": True}
    rows = [
        qwen("user", 1, {"text": "Do it."}, provenance="real_user"),
        qwen("system", 2, subtype="ui_telemetry", systemPayload={"uiEvent": {}}),
        qwen(
            "assistant",
            3,
            thought,
            qwen_call("c1", "run_shell_command", command="ls"),
            model="m",
            **qwen_usage(9, 5, 2),
        ),
        qwen_result(4, "c1", "a.txt", 1),
        qwen("assistant", 5, qwen_call("c2", "agent", prompt="look"), model="m", **qwen_usage(20, 6)),
        qwen_result(6, "c2", "launched"),
        qwen("user", 7, {"text": "<task-notification>"}, picture, provenance="task_notification"),
        qwen(
            "system",
            8,
            subtype="chat_compression",
            systemPayload={"compressedHistory": [{"role": "user", "parts": [{"text": "So far."}]}]},
        ),
        qwen("assistant", 9, {"text": "Done."}, model="m", **qwen_usage(30, 7)),
        qwen("assistant", 10, qwen_call("c3", "run_shell_command", command="sleep 9"), model="m"),
    ]
    side = {"isSidechain": True, "agentId": "general-purpose-c2"}
    child = [
        qwen("user", 5, {"text": "look"}, **side),
        qwen("assistant", 6, **side, message={"role": "model", "parts": []}, **qwen_usage(11, 4)),
        qwen("assistant", 7, qwen_call("d1", "run_shell_command", command="ls"), **side),
        qwen_result(8, "d1", "a.txt", **side),
        qwen("assistant", 9, {"text": "found"}, **side, **qwen_usage(12, 3)),
    ]
    project = root / "qwen" / "projects" / "-app"
    write_lines(project / "chats" / "s.jsonl", rows, torn='{"uuid": "u1')
    log = project / "subagents" / "s" / "agent-general-purpose-c2.jsonl"
    write_lines(log, child)
    log.with_suffix(".meta.json").write_text(json.dumps({"toolUseId": "c2", "agentType": "general-purpose"}))
    return root


def test_qwen_steps_sub_agents_and_compactions(tmp_path: Path) -> None:
    found = only(qwen_log(tmp_path))
    assert (found.agent.name, found.agent.version, found.agent.model_name) == ("qwen-code", "0.24.4", "m")
    assert [step.source for step in found.steps] == ["user", "agent", "agent", "user", "system", "agent", "agent"]
    first, second = found.agent_steps[:2]
    assert first.reasoning_content == "Hm." and first.metrics and first.metrics.prompt_tokens == 9
    assert first.metrics.extra == {"reasoning_tokens": 2} and first.metrics.completion_tokens == 5
    assert first.observation and first.observation.results[0].extra == {"exit_code": 1}
    assert found.steps[4].extra == {"kind": "compaction"} and found.steps[4].text == "So far."
    assert found.steps[3].extra == {"injected": True}
    (child,) = found.subagent_trajectories or []
    assert second.observation and second.observation.results[0].subagent_trajectory_ref
    assert second.observation.results[0].subagent_trajectory_ref[0].trajectory_id == child.trajectory_id
    assert [(len(step.tool_calls or ()), step.metrics is not None) for step in child.agent_steps] == [
        (1, True),
        (0, True),
    ]
    assert child.final_metrics and child.final_metrics.total_prompt_tokens == 23


def test_qwen_pictures_are_kept_beside_the_file(tmp_path: Path) -> None:
    (session,) = find_sessions(qwen_log(tmp_path / "logs"), "qwen-code")
    convert(session, tmp_path / "out" / "t.json")
    assert validate_file(tmp_path / "out" / "t.json") == []
    (picture,) = (tmp_path / "out" / "images").iterdir()
    assert picture.read_bytes() == base64.b64decode(PIXEL)


# Goose


GOOSE_TABLES = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, name TEXT, created_at TIMESTAMP, accumulated_cost REAL,
  parent_session_id TEXT);
CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT, session_id TEXT, role TEXT,
  content_json TEXT, created_timestamp INTEGER, metadata_json TEXT);
CREATE TABLE usage_ledger (id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT, created_timestamp INTEGER,
  input_tokens INTEGER, output_tokens INTEGER, is_compaction INTEGER);
"""


def goose_call(id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    called = {"status": "success", "value": {"name": name, "arguments": arguments}}
    return {"type": "toolRequest", "id": id_, "toolCall": called}


def goose_result(id_: str, *content: dict[str, Any], **facts: Any) -> dict[str, Any]:
    value = {"content": list(content), "structuredContent": facts, "isError": False}
    return {"type": "toolResponse", "id": id_, "toolResult": {"status": "success", "value": value}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def goose_log(root: Path) -> Path:
    path = root / "goose" / "data" / "sessions" / "sessions.db"
    path.parent.mkdir(parents=True)
    facts = {"inference": {"requestedModel": "m"}}
    counted = facts | {"usage": {"inputTokens": 10, "outputTokens": 5, "cacheReadTokens": 4}}
    picture = {"type": "image", "mimeType": "image/png", "data": PIXEL}
    rows: list[tuple[str | None, str, str, list[dict[str, Any]], int, dict[str, Any]]] = [
        ("m1", "one", "user", [text("Do it.")], 1, {"userVisible": True}),
        ("m2", "one", "user", [text("<turn-context>")], 1, {"userVisible": False, "turnContext": True}),
        ("r1", "one", "assistant", [{"type": "thinking", "thinking": "Hm."}, text("I look.")], 2, facts),
        ("r1", "one", "assistant", [goose_call("c1", "shell", command="ls")], 2, counted),
        ("m3", "one", "user", [goose_result("c1", text("a.txt"), picture, exit_code=0)], 2, {}),
        ("r2", "one", "assistant", [goose_call("c2", "delegate", instructions="look")], 3, counted),
        ("m4", "one", "user", [goose_result("c2", text("found"), session_id="two")], 4, {}),
        ("r3", "one", "assistant", [text("Done.")], 9, counted),
        ("n1", "two", "user", [text("look")], 3, {}),
        ("q1", "two", "assistant", [text("found")], 4, counted),
    ]
    with closing(sqlite3.connect(path)) as database:
        database.executescript(GOOSE_TABLES)
        insert = "INSERT INTO sessions VALUES (?, ?, ?, ?, ?)"
        database.execute(insert, ("one", "Name", "2026-01-01 00:00:00", 0.5, None))
        database.execute(insert, ("two", "", "2026-01-01 00:00:03", None, "one"))
        database.execute(insert, ("three", "empty", "2026-01-01 00:00:04", None, None))
        for id_, session, role, content, at, known in rows:
            database.execute(
                "INSERT INTO messages (message_id, session_id, role, content_json, created_timestamp, metadata_json)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (id_, session, role, json.dumps(content), 1767225600 + at, json.dumps(known)),
            )
        ledger = "INSERT INTO usage_ledger (session_id, created_timestamp, input_tokens, output_tokens, is_compaction)"
        database.execute(f"{ledger} VALUES ('one', {1767225600 + 6}, 100, 20, 1)")
        database.commit()
    return root


def test_goose_steps_sub_agents_and_compactions(tmp_path: Path) -> None:
    found = only(goose_log(tmp_path))
    assert (found.agent.name, found.agent.model_name, found.extra) == ("goose", "m", {"title": "Name"})
    assert [step.source for step in found.steps] == ["user", "user", "agent", "agent", "system", "agent"]
    assert found.steps[1].extra == {"injected": True}
    first, second, _ = found.agent_steps
    assert (first.text, first.reasoning_content) == ("I look.", "Hm.")
    assert first.metrics and (first.metrics.prompt_tokens, first.metrics.cached_tokens) == (10, 4)
    assert first.observation and first.observation.results[0].extra == {"exit_code": 0}
    assert found.steps[4].extra == {"kind": "compaction", "input_tokens": 100, "output_tokens": 20}
    (child,) = found.subagent_trajectories or []
    assert second.observation and second.observation.results[0].subagent_trajectory_ref
    assert second.observation.results[0].subagent_trajectory_ref[0].trajectory_id == child.trajectory_id == "two"
    assert found.final_metrics and found.final_metrics.total_cost_usd == 0.5


# OpenHands


def oh_action(second: int, response: str, id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": id_, "name": name, "arguments": json.dumps(arguments)}
    thought = [text("I look.")] if id_ == "c1" else []
    named = {"tool_name": name, "tool_call_id": id_, "tool_call": call, "llm_response_id": response}
    extra = {"thought": thought, "reasoning_content": "Hm." if id_ == "c1" else None}
    return oh("ActionEvent", second, source="agent", action={"kind": "X"}, **named, **extra)


def oh(kind: str, second: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"e{second}", "timestamp": f"2026-01-01T00:00:{second:02d}.000001", "kind": kind, **fields}


def oh_result(second: int, id_: str, *content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    told = {"content": list(content), "is_error": False, **fields}
    return oh("ObservationEvent", second, source="environment", tool_call_id=id_, observation=told)


def oh_write(place: Path, rows: list[dict[str, Any]], ids: list[str]) -> None:
    (place / "events").mkdir(parents=True)
    for number, row in enumerate(rows):
        (place / "events" / f"event-{number:05d}-{row['id']}.json").write_text(json.dumps(row))
    used = [{"response_id": id_, "prompt_tokens": 10, "completion_tokens": 5, "cache_read_tokens": 4} for id_ in ids]
    metrics = {"agent": {"accumulated_cost": 0.25, "token_usages": used}}
    state = {"agent": {"llm": {"model": "openai/m"}}, "execution_status": "finished"}
    (place / "base_state.json").write_text(json.dumps(state | {"stats": {"usage_to_metrics": metrics}}))


def oh_log(root: Path) -> Path:
    picture = {"type": "image", "image_urls": [f"data:image/png;base64,{PIXEL}"]}
    rows = [
        oh("SystemPromptEvent", 1, source="agent", system_prompt=text("You are.")),
        oh("MessageEvent", 2, source="user", llm_message={"role": "user", "content": [text("Do it.")]}),
        oh("ConversationStateUpdateEvent", 2, key="x", value=1),
        oh_action(3, "r1", "c1", "terminal", command="ls"),
        oh_action(3, "r1", "c2", "terminal", command="pwd"),
        oh_result(4, "c1", text("a.txt"), picture, exit_code=0),
        oh("AgentErrorEvent", 5, source="agent", tool_call_id="c2", tool_name="terminal", error="no such tool"),
        oh("Condensation", 6, source="environment", forgotten_event_ids=["e3"], summary="So far.", llm_response_id="k"),
        oh_action(7, "r2", "c3", "task", prompt="look"),
        oh_result(8, "c3", text("found"), task_id="kid"),
        oh("PauseEvent", 9, source="user"),
        oh("MessageEvent", 10, source="agent", llm_message={"content": [text("Done.")]}, llm_response_id="r3"),
    ]
    child = [
        oh("MessageEvent", 7, source="user", llm_message={"role": "user", "content": [text("look")]}),
        oh("MessageEvent", 8, source="agent", llm_message={"content": [text("found")]}, llm_response_id="q1"),
    ]
    place = root / "openhands" / "conversations" / "conv"
    oh_write(place, rows, ["r1", "r2", "r3"])
    oh_write(place / "subagents" / "kid", child, ["q1"])
    (place / "events" / "event-00012-torn.json").write_text('{"id": "e11", "ki')
    return root


def test_openhands_steps_sub_agents_and_compactions(tmp_path: Path) -> None:
    found = only(oh_log(tmp_path))
    assert (found.agent.name, found.agent.model_name, found.extra) == (
        "openhands",
        "openai/m",
        {"exit_status": "finished"},
    )
    sources = ["system", "user", "agent", "system", "agent", "system", "agent"]
    assert [step.source for step in found.steps] == sources
    first, second, last = found.agent_steps
    assert (first.text, first.reasoning_content, last.text) == ("I look.", "Hm.", "Done.")
    assert [call.arguments for call in first.tool_calls or ()] == [{"command": "ls"}, {"command": "pwd"}]
    assert first.observation and first.observation.results[0].extra == {"exit_code": 0}
    assert (first.observation.results[1].content, first.observation.results[1].extra) == (
        "no such tool",
        {"is_error": True},
    )
    assert first.metrics and (first.metrics.prompt_tokens, first.metrics.cached_tokens) == (10, 4)
    assert found.steps[3].text == "So far." and found.steps[3].extra == {"kind": "compaction", "forgotten_events": 1}
    assert found.steps[5].extra == {"kind": "PauseEvent", "event": {"source": "user"}}
    (child,) = found.subagent_trajectories or []
    assert second.observation and second.observation.results[0].subagent_trajectory_ref
    assert child.trajectory_id == "kid" and found.final_metrics and found.final_metrics.total_cost_usd == 0.25


def test_a_conversation_is_found_from_inside_too(tmp_path: Path) -> None:
    place = oh_log(tmp_path) / "openhands" / "conversations" / "conv"
    event = next((place / "events").iterdir())
    assert [session.id for path in (place, event) for session in find_sessions(path, "openhands")] == ["conv", "conv"]
    (kid,) = find_sessions(place / "subagents" / "kid", "openhands")
    assert kid.id == "kid"
