"""What the rules find, and that files are read and written as ATIF says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pier.cli.trajectory import trajectory as command
from pier.errors import UsageError
from pier.trajectory.model import Trajectory, dump, read, write
from pier.trajectory.rules import validate, validate_file
from pier.trajectory.show import stats


def good() -> dict[str, Any]:
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": "s",
        "agent": {"name": "a", "version": "1", "model_name": "m"},
        "steps": [
            {"step_id": 1, "timestamp": "2026-01-01T00:00:00Z", "source": "user", "message": "go"},
            {
                "step_id": 2,
                "timestamp": "2026-01-01T00:00:02Z",
                "source": "agent",
                "message": "",
                "llm_call_count": 1,
                "tool_calls": [{"tool_call_id": "c", "function_name": "bash", "arguments": {"command": "ls"}}],
                "observation": {"results": [{"source_call_id": "c", "content": "a\nb"}]},
                "metrics": {"prompt_tokens": 7, "completion_tokens": 3, "completion_token_ids": [1, 2, 3]},
            },
        ],
        "final_metrics": {
            "total_prompt_tokens": 7,
            "total_completion_tokens": 3,
            "total_steps": 2,
            "extra": {"peak_context_tokens": 7, "summarization_count": 0},
        },
    }


def put(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = value
    for step in steps:
        place = place[step]
    place[last] = new
    return value


def test_a_good_one_has_no_findings() -> None:
    assert validate(Trajectory.model_validate(good())) == []


@pytest.mark.parametrize(
    ("path", "value", "level", "rule"),
    [
        ("schema_version", "ATIF-v9", "error", "version"),
        ("steps", [], "error", "steps"),
        ("steps.1.step_id", 3, "error", "step_ids"),
        ("steps.0.timestamp", "yesterday", "error", "timestamps"),
        ("steps.0.model_name", "m", "error", "agent_only"),
        ("steps.1.llm_call_count", 0, "error", "llm_calls"),
        ("steps.1.observation.results.0.source_call_id", "x", "error", "source_calls"),
        ("steps.1.observation.results.0.subagent_trajectory_ref", [{}], "error", "refs"),
        ("steps.0.message", [{"type": "text"}], "error", "content"),
        ("steps.0.message", [{"type": "image", "text": "x"}], "error", "content"),
        ("steps.1.llm_call_count", None, "strict", "one_call_per_step"),
        ("steps.0.llm_call_count", 1, "strict", "one_call_per_step"),
        ("steps.0.timestamp", None, "strict", "timestamps"),
        ("steps.0.timestamp", "2027-01-01T00:00:00Z", "strict", "timestamps"),
        ("steps.1.observation.results.0.subagent_trajectory_ref", [{"trajectory_id": "t"}], "strict", "refs"),
        ("final_metrics.total_prompt_tokens", 8, "strict", "totals"),
        ("final_metrics.total_steps", 9, "strict", "totals"),
        ("final_metrics.total_cost_usd", 0.1, "strict", "cost_source"),
        ("final_metrics.extra.peak_context_tokens", 6, "strict", "peak_context"),
        ("final_metrics", None, "strict", "totals"),
    ],
)
def test_each_broken_rule_is_found(path: str, value: Any, level: str, rule: str) -> None:
    found = validate(Trajectory.model_validate(put(good(), path, value)))
    assert (level, rule) in {(item.level, item.rule) for item in found}


def test_embedded_trajectories_are_checked_too() -> None:
    value = good()
    inner = put(good(), "steps.1.step_id", 5)
    inner["trajectory_id"] = "t"
    value["subagent_trajectories"] = [inner]
    found = validate(Trajectory.model_validate(value))
    assert [item.where for item in found] == ["subagent_trajectories[0].steps[1].step_id"]


def test_a_picture_that_is_not_there_is_found(tmp_path: Path) -> None:
    picture = {"type": "image", "source": {"media_type": "image/png", "path": "images/a.png"}}
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(put(good(), "steps.0.message", [picture])))
    assert [item.rule for item in validate_file(file)] == ["media"]
    assert validate_file(file, media=False) == []
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    assert validate_file(file) == []


def test_files_have_no_nulls_and_numbers_on_one_line(tmp_path: Path) -> None:
    value = put(good(), "steps.0.message", "a list: [\n 1,\n 2]")
    write(tmp_path / "t.json", Trajectory.model_validate(value))
    text = (tmp_path / "t.json").read_text()
    assert "null" not in text
    assert '"completion_token_ids": [1, 2, 3]' in text
    assert read(tmp_path / "t.json").model_dump(exclude_none=True) == value
    assert dump(read(tmp_path / "t.json")) == text


def test_half_characters_are_joined_or_replaced(tmp_path: Path) -> None:
    value = put(good(), "steps.0.message", "")
    trajectory = Trajectory.model_validate(value)
    trajectory.steps[0].message = "\ud83d\ude00 and \ud83d alone"
    write(tmp_path / "t.json", trajectory)
    assert read(tmp_path / "t.json").steps[0].message == "\U0001f600 and \ufffd alone"


def test_unknown_fields_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({**good(), "more": 1}))
    assert [item.rule for item in validate_file(file)] == ["schema"]
    with pytest.raises(UsageError, match="not a trajectory"):
        read(file)


def test_counts() -> None:
    found = stats(Trajectory.model_validate(good()))
    assert (found["agent_steps"], found["llm_calls"], found["tool_calls"], found["tools"]) == (1, 1, 1, {"bash": 1})
    assert (found["seconds"], found["cost_usd"], found["peak_context_tokens"]) == (2.0, None, 7)


def test_the_command_line(tmp_path: Path) -> None:
    place = tmp_path / "agent" / "trajectory.json"
    place.parent.mkdir()
    place.write_text(json.dumps(good()))
    run = CliRunner()
    valid = run.invoke(command, ["validate", str(tmp_path), "--json"])
    assert valid.exit_code == 0
    assert json.loads(valid.output)[0]["valid"] is True
    shown = run.invoke(command, ["show", str(tmp_path)])
    assert 'bash {"command": "ls"}' in shown.output
    counted = run.invoke(command, ["stats", str(place), "--json"])
    assert json.loads(counted.output)[0]["tool_calls"] == 1
    place.write_text(json.dumps(put(good(), "steps.1.step_id", 9)))
    broken = run.invoke(command, ["validate", str(place)])
    assert broken.exit_code == 1
    assert "step_ids" in broken.output
