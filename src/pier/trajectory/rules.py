"""Validates trajectories by the rules of ATIF and by stricter rules of pier.

An `error` breaks ATIF itself: Harbor's validator refuses such a file too. A `strict` finding breaks a rule that pier
adds so that numbers can be trusted: one step per model call, real timestamps, correct totals, costs with their source,
valid references.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from pier.trajectory.model import VERSIONS, Content, Step, Trajectory, file_content, time_of
from pier.tree import Tree, TreeError

IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


@dataclass(frozen=True, slots=True)
class RuleFinding:
    level: Literal["error", "strict"]
    rule: str
    where: str
    message: str


def validate_file(path: Path, *, media: bool = True) -> list[RuleFinding]:
    """All findings for a file; with `media`, missing images too."""
    try:
        trajectory = Trajectory.model_validate_json(file_content(path))
    except ValidationError as error:
        return [
            RuleFinding("error", "schema", ".".join(str(step) for step in item["loc"]) or "file", item["msg"])
            for item in error.errors()
        ]
    except (OSError, TreeError) as error:
        return [RuleFinding("error", "schema", "file", f"cannot be read: {getattr(error, 'strerror', error)}")]
    return validate(trajectory, path.parent if media else None)


def validate(trajectory: Trajectory, folder: Path | None = None, where: str = "") -> list[RuleFinding]:
    """All findings for a trajectory and its embedded ones; with `folder`, images missing there too."""
    found = [*_errors(trajectory, where), *_strict(trajectory, where)]
    if folder is not None:
        found.extend(_missing_media(trajectory, folder, where))
    for index, inner in enumerate(trajectory.subagent_trajectories or ()):
        found.extend(validate(inner, folder, f"{where}subagent_trajectories[{index}]."))
    return found


def _errors(trajectory: Trajectory, where: str) -> Iterator[RuleFinding]:
    def error(rule: str, place: str, message: str) -> RuleFinding:
        return RuleFinding("error", rule, where + place, message)

    if trajectory.schema_version not in VERSIONS:
        yield error("version", "schema_version", f"unknown version {trajectory.schema_version!r}")
    elif trajectory.session_id is None and trajectory.schema_version < "ATIF-v1.7":
        yield error("session", "session_id", "is required before version 1.7")
    if not trajectory.steps:
        yield error("steps", "steps", "there must be at least one step")
    for index, step in enumerate(trajectory.steps):
        for rule, field, message in _step_errors(step, index):
            yield error(rule, f"steps[{index}].{field}", message)
    ids = [inner.trajectory_id for inner in trajectory.subagent_trajectories or ()]
    if None in ids:
        yield error("subagents", "subagent_trajectories", "each needs a trajectory_id")
    if len(set(ids)) != len(ids):
        yield error("subagents", "subagent_trajectories", "two have the same trajectory_id")


def _step_errors(step: Step, index: int) -> Iterator[tuple[str, str, str]]:
    if step.step_id != index + 1:
        yield "step_ids", "step_id", f"must be {index + 1}, is {step.step_id}"
    if step.timestamp is not None and time_of(step.timestamp) is None:
        yield "timestamps", "timestamp", f"{step.timestamp!r} is not ISO 8601"
    if step.source != "agent":
        for field in _AGENT_ONLY:
            if getattr(step, field) is not None:
                yield "agent_only", field, f"is for agent steps only; the source of this one is {step.source}"
    elif step.llm_call_count == 0 and (step.metrics is not None or step.reasoning_content is not None):
        yield "llm_calls", "llm_call_count", "a step without a model call has no metrics and no reasoning"
    yield from _content_errors(step.message, "message")
    calls = {call.tool_call_id for call in step.tool_calls or ()}
    for number, result in enumerate(step.observation.results if step.observation else ()):
        place = f"observation.results[{number}]"
        if result.source_call_id is not None and result.source_call_id not in calls:
            yield "source_calls", f"{place}.source_call_id", f"unknown call {result.source_call_id!r}: not in this step"
        for ref in result.subagent_trajectory_ref or ():
            if ref.trajectory_id is None and ref.trajectory_path is None and ref.session_id is None:
                yield "refs", f"{place}.subagent_trajectory_ref", "has neither a trajectory_id nor a path"
        yield from _content_errors(result.content, f"{place}.content")


def _content_errors(content: Content | None, where: str) -> Iterator[tuple[str, str, str]]:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        place = f"{where}[{index}]"
        if (part.type == "text") != (part.text is not None):
            yield "content", place, "must have text if its type is text, and only then"
        if (part.type != "text") != (part.source is not None):
            yield "content", place, "must have a source if it is an image or a sound, and only then"
        if part.type == "image" and part.source and part.source.media_type not in IMAGES:
            yield "content", place, f"unsupported image type {part.source.media_type}"


def _strict(trajectory: Trajectory, where: str) -> Iterator[RuleFinding]:
    def strict(rule: str, place: str, message: str) -> RuleFinding:
        return RuleFinding("strict", rule, where + place, message)

    last: datetime | None = None
    seen: set[str] = set()
    embedded = {inner.trajectory_id for inner in trajectory.subagent_trajectories or ()}
    for index, step in enumerate(trajectory.steps):
        place = f"steps[{index}]"
        if step.source == "agent" and step.llm_call_count is None:
            yield strict("one_call_per_step", place, "llm_call_count is missing from an agent step")
        if step.source != "agent" and step.llm_call_count is not None:
            yield strict("one_call_per_step", place, "llm_call_count is for agent steps only")
        time = time_of(step.timestamp) if step.timestamp else None
        if step.timestamp is None:
            yield strict("timestamps", place, "has no timestamp")
        if time is not None and last is not None and time < last:
            yield strict("timestamps", place, "is earlier than the step before it")
        last = time or last
        for call in step.tool_calls or ():
            if call.tool_call_id in seen:
                yield strict("unique_calls", place, f"duplicate call id {call.tool_call_id!r}")
            seen.add(call.tool_call_id)
        for result in step.observation.results if step.observation else ():
            for ref in result.subagent_trajectory_ref or ():
                if ref.trajectory_id is not None and ref.trajectory_path is None and ref.trajectory_id not in embedded:
                    yield strict("refs", place, f"no embedded trajectory has the id {ref.trajectory_id!r}")
    yield from (strict(*finding) for finding in _totals(trajectory))


def _totals(trajectory: Trajectory) -> Iterator[tuple[str, str, str]]:
    final = trajectory.final_metrics
    if final is None:
        yield "totals", "final_metrics", "is missing"
        return
    extra = final.extra or {}
    parts = extra.get("breakdown")
    names = {"prompt_tokens": final.total_prompt_tokens, "completion_tokens": final.total_completion_tokens}
    for name, total in names.items():
        steps = [getattr(step.metrics, name) or 0 for step in trajectory.agent_steps if step.metrics]
        if isinstance(parts, dict):
            listed = sum(part.get(name) or 0 for part in parts.values() if isinstance(part, dict))
            main = (parts.get("main") or {}).get(name) or 0
            if main != sum(steps):
                yield "totals", "final_metrics.extra.breakdown.main", f"{name} is {main}, the steps have {sum(steps)}"
        else:
            listed = sum(steps)
        if total is not None and total != listed:
            yield "totals", f"final_metrics.total_{name}", f"is {total}, its parts make {listed}"
    if final.total_cost_usd is not None and "cost_source" not in extra:
        yield "cost_source", "final_metrics.extra", "cost_source is missing"
    prompts = [step.metrics.prompt_tokens for step in trajectory.agent_steps if step.metrics]
    known = [count for count in prompts if count is not None]
    if known and extra.get("peak_context_tokens") != max(known):
        yield "peak_context", "final_metrics.extra", f"peak_context_tokens must be {max(known)}"
    if final.total_steps is not None and final.total_steps != len(trajectory.steps) and not trajectory.notes:
        yield "totals", "final_metrics.total_steps", f"is {final.total_steps}, there are {len(trajectory.steps)}"


def _missing_media(trajectory: Trajectory, folder: Path, where: str) -> Iterator[RuleFinding]:
    for index, step in enumerate(trajectory.steps):
        results = step.observation.results if step.observation else ()
        for content in (step.message, *(result.content for result in results)):
            for part in content if isinstance(content, list) else ():
                path = part.source.path if part.source else None
                if path and "://" not in path and not _is_file(folder, path):
                    yield RuleFinding("error", "media", f"{where}steps[{index}]", f"missing file {path}")


def _is_file(folder: Path, path: str) -> bool:
    try:
        with Tree(folder.resolve()) as tree:
            found = tree.find(path)
    except OSError:
        return False
    return found is not None and found.kind == "file"
