"""A step as plain data that a page, the export and `--json` show: who spoke, what was called, and what came of it.

Arguments of tool calls are sorted into blocks: a command, an edit, the content of a file, a patch, and the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pier.trajectory.model import ObservationResult, Step, StepToolCall, text_of
from pier.trajectory.paged import PagedTrajectory
from pier.view.steps import pictures, seconds_between

_COMMANDS = ("command", "cmd", "script", "keystrokes", "bash_command", "code", "commands")
_PATHS = ("path", "file_path", "filename", "filePath", "target_file", "absolute_path", "file")
_EDITS = (("old_string", "new_string"), ("old_str", "new_str"), ("oldString", "newString"), ("old", "new"))
_CONTENTS = ("content", "file_text", "file_content", "contents")
_PATCH_MARKS = ("*** Begin Patch", "diff --git ", "--- a/")


def step_card(
    step: Step,
    index: int,
    previous: str | None,
    subs: Sequence[Mapping[str, Any]],
    times: Mapping[int, tuple[float, float]],
) -> dict[str, Any]:
    """A step. `previous` is the timestamp of the step before; `subs` are the sub-agents of its trajectory, and `times`
    the beginning and end of each recorded call."""
    metrics, extra = step.metrics, dict(step.extra or {})
    call = extra.get("call")
    began, ended = times.get(call, (0.0, 0.0)) if isinstance(call, int) else (0.0, 0.0)
    results = list(enumerate(step.observation.results if step.observation else ()))
    calls = [_call(tool, place, results, subs) for place, tool in enumerate(step.tool_calls or ())]
    used = {tool.tool_call_id for tool in step.tool_calls or ()}
    return {
        "number": index + 1,
        "source": step.source,
        "timestamp": step.timestamp,
        "elapsed": seconds_between(previous, step.timestamp),
        "latency": ended - began if ended > began else None,
        "model": step.model_name,
        "effort": step.reasoning_effort,
        "message": step.text,
        "pictures": pictures(step.message),
        "reasoning": step.reasoning_content or "",
        "calls": calls,
        "results": [_result(place, each, subs) for place, each in results if each.source_call_id not in used],
        "prompt": metrics.prompt_tokens if metrics else None,
        "cached": metrics.cached_tokens if metrics else None,
        "completion": metrics.completion_tokens if metrics else None,
        "reasoning_tokens": (metrics.extra or {}).get("reasoning_tokens") if metrics else None,
        "cost": metrics.cost_usd if metrics else None,
        "call": call if isinstance(call, int) else None,
        "stop_reason": extra.pop("stop_reason", None),
        "compaction": bool(extra.pop("compaction", False)),
        "copied": bool(step.is_copied_context),
        "problem": extra.pop("problem", None),
        "failed": any(bool((each.extra or {}).get("is_error")) for _, each in results),
    }


def _call(
    tool: StepToolCall, place: int, results: list[tuple[int, ObservationResult]], subs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "name": tool.function_name,
        "id": tool.tool_call_id,
        "place": f"call.{place}",
        "blocks": blocks_of(tool.arguments, (tool.extra or {}).get("raw_arguments")),
        "results": [_result(at, each, subs) for at, each in results if each.source_call_id == tool.tool_call_id],
    }


def _result(place: int, result: ObservationResult, subs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    wanted = {ref.trajectory_id or ref.session_id for ref in result.subagent_trajectory_ref or ()}
    return {
        "text": text_of(result.content),
        "place": f"result.{place}",
        "pictures": pictures(result.content),
        "failed": bool((result.extra or {}).get("is_error")),
        "subs": [sub for sub in subs if sub["id"] in wanted],
        "elsewhere": [ref.trajectory_path for ref in result.subagent_trajectory_ref or () if ref.trajectory_path],
    }


def sub_agents(trajectory: PagedTrajectory, sub: str) -> list[dict[str, Any]]:
    """The sub-agents of a trajectory; `place` is where each is found again."""
    found: list[dict[str, Any]] = []
    for number, each in enumerate(trajectory.subs):
        agent = each.agent
        found.append(
            {
                "id": each.value("trajectory_id") or each.value("session_id"),
                "place": f"{sub}.{number}" if sub else str(number),
                "name": agent.name if agent else "sub-agent",
                "model": agent.model_name if agent else None,
                "n_steps": len(each),
            }
        )
    return found


def blocks_of(arguments: Mapping[str, Any], raw: str | None = None) -> list[dict[str, Any]]:
    """The arguments of a call as blocks: `kind` is command, edit, file, patch or values."""
    rest = dict(arguments)
    if raw is not None and set(rest) == {"input"}:
        rest = {"input": raw}
    path = next((str(rest[key]) for key in _PATHS if isinstance(rest.get(key), str)), "")
    found: list[dict[str, Any]] = []
    for key in _COMMANDS:
        if (text := _command(rest.get(key))) is not None:
            found.append({"kind": "command", "text": text})
            del rest[key]
    edits = rest.get("edits")
    several = isinstance(edits, list) and all(isinstance(each, dict) for each in edits)
    for each in [rest, *(edits if several and isinstance(edits, list) else ())]:
        for old, new in _EDITS:
            if isinstance(each.get(old), str) and isinstance(each.get(new), str):
                found.append({"kind": "edit", "path": path, "old": each.pop(old), "new": each.pop(new)})
    for key in (*_CONTENTS, "patch", "diff", "input"):
        text = rest.get(key)
        if isinstance(text, str) and text.lstrip().startswith(_PATCH_MARKS):
            found.append({"kind": "patch", "text": text})
            del rest[key]
        elif isinstance(text, str) and key in _CONTENTS and (path or "\n" in text):
            found.append({"kind": "file", "path": path, "text": text})
            del rest[key]
    values = {key: value for key, value in rest.items() if value not in (None, "", [], {})}
    return ([{"kind": "values", "values": _short(values)}] if values else []) + found


def _command(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        shell = len(value) == 3 and value[1] in ("-c", "-lc")
        return value[2] if shell else " ".join(value)
    return None


def _short(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        str(key): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in values.items()
    }


def edits_of(trajectory: PagedTrajectory, limit: int = 2_000) -> list[dict[str, Any]]:
    """All edits, files and patches in a trajectory's tool calls, each with its step."""
    found: list[dict[str, Any]] = []
    for index in range(len(trajectory)):
        for call in trajectory.step(index).tool_calls or ():
            blocks = blocks_of(call.arguments, (call.extra or {}).get("raw_arguments"))
            edits = (block for block in blocks if block["kind"] in ("edit", "file", "patch"))
            found += [{**block, "step": index + 1, "tool": call.function_name} for block in edits]
        if len(found) >= limit:
            break
    return found
