"""A step as plain data for a page, the export and `--json`: its text, tool calls and their results.

Tool call arguments are grouped into blocks: a command, an edit, a file's content, a patch, and the remaining values.
"""

from __future__ import annotations

import json
import re
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
    """A step. `previous` is the timestamp of the previous step, `subs` are the sub-agents of its trajectory, and
    `times` the start and end of each recorded call."""
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
        "side_calls": [],
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
    refs = result.subagent_trajectory_ref or ()
    ids = {ref.trajectory_id or ref.session_id for ref in refs}
    return {
        "text": text_of(result.content),
        "place": f"result.{place}",
        "pictures": pictures(result.content),
        "failed": bool((result.extra or {}).get("is_error")),
        "subs": [sub for sub in subs if sub["id"] in ids],
        "elsewhere": [ref.trajectory_path for ref in refs if ref.trajectory_path],
    }


def sub_agents(trajectory: PagedTrajectory, sub: str) -> list[dict[str, Any]]:
    """The sub-agents of a trajectory; `place` is the `sub` argument that opens one."""
    return [
        {
            "id": each.value("trajectory_id") or each.value("session_id"),
            "place": f"{sub}.{number}" if sub else str(number),
            "name": each.agent.name if each.agent else "sub-agent",
            "model": each.agent.model_name if each.agent else None,
            "n_steps": len(each),
        }
        for number, each in enumerate(trajectory.subs)
    ]


def blocks_of(arguments: Mapping[str, Any], raw: str | None = None) -> list[dict[str, Any]]:
    """The arguments of a call as blocks whose `kind` is command, edit, file, patch or values."""
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
    for each in [rest, *(each for each in (edits if isinstance(edits, list) else ()) if isinstance(each, dict))]:
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
    values = {
        str(key): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in rest.items()
        if value not in (None, "", [], {})
    }
    return ([{"kind": "values", "values": values}] if values else []) + found


def _command(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        shell = len(value) == 3 and value[1] in ("-c", "-lc")
        return value[2] if shell else " ".join(value)
    return None


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


def _side_calls(trajectory: PagedTrajectory) -> list[dict[str, Any]]:
    """Model calls that belong to no step: titles, summaries, retries and calls by other programs."""
    extra = trajectory.value("extra")
    rows = extra.get("side_calls") if isinstance(extra, dict) else None
    if not isinstance(rows, list):
        return []
    return [_side_call(row) for row in rows if isinstance(row, dict) and isinstance(row.get("call"), int)]


def _side_call(row: Mapping[str, Any]) -> dict[str, Any]:
    metrics = row["metrics"] if isinstance(row.get("metrics"), dict) else {}
    used = {key: metrics.get(f"{key}_tokens") for key in ("prompt", "completion")} | {"cost": metrics.get("cost_usd")}
    numbers = {key: value if isinstance(value, int | float) else None for key, value in used.items()}
    texts = {key: str(row.get(key) or "") for key in ("kind", "model_name", "message")}
    return {"call": row["call"], **texts, **numbers}


def mark_side_calls(trajectory: PagedTrajectory, cards: Sequence[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Add to each card the side calls made between the previous step's call and its own; return those after the last
    card. `start` is the index of the first card's step."""
    found = _side_calls(trajectory)
    earlier = ((trajectory.step(index).extra or {}).get("call") for index in range(start - 1, -1, -1))
    last = next((call for call in earlier if isinstance(call, int)), 0) if found else 0
    for card in cards:
        if card["call"] is not None:
            card["side_calls"] = [each for each in found if last < each["call"] < card["call"]]
            last = card["call"]
    return [each for each in found if each["call"] > last]


def loose_subs(subs: Sequence[dict[str, Any]], cards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sub-agents that no result on the cards refers to."""
    results = [result for card in cards for each in (*card["calls"], card) for result in each["results"]]
    shown = {sub["place"] for result in results for sub in result["subs"]}
    return [each for each in subs if each["place"] not in shown]


_PART_STARTS = ("diff --git ", "Binary or large file ", "Empty file ", "# ")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def diff_files(text: str) -> list[dict[str, Any]]:
    """The parts of a diff, one for each file: its path, the number of lines added and removed, and the text. A line
    inside a hunk never starts a part, even if it looks like a header."""
    found: list[dict[str, Any]] = []
    old = new = 0
    is_named = True  # False between a "diff --git" line and its file names
    for line in text.removesuffix("\n").split("\n"):
        sign = line[:1]
        if old > 0 or new > 0:
            old -= sign in ("-", " ", "")
            new -= sign in ("+", " ", "")
            found[-1]["removed"] += sign == "-"
            found[-1]["added"] += sign == "+"
        elif not found or line.startswith(_PART_STARTS) or (line.startswith("--- ") and is_named):
            found.append({"path": line, "added": 0, "removed": 0, "lines": []})
            is_named = not line.startswith("diff --git ")
        elif hunk := _HUNK.match(line):
            old, new = (int(count) if count is not None else 1 for count in hunk.groups())
            is_named = True
        part = found[-1]
        if line.startswith(("--- ", "+++ ")) and not part["added"] + part["removed"] and "/dev/null" not in line:
            part["path"] = line[4:].partition("\t")[0].removeprefix("a/").removeprefix("b/")
        part["lines"].append(line)
    for part in found:
        lines = part.pop("lines")
        part["text"] = "\n".join(lines) if len(lines) > 1 else ""
    return found
