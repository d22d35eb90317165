"""Identities: the same for the same work, wherever it is; different for different work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pier.errors import UsageError
from pier.job.config import JobConfig
from pier.job.plan import Identity, Plan, PlannedTask, make_plan

TASK = PlannedTask("org/hello", "sha256:" + "a" * 64, "/one/hello")
AGENT = {"name": "oracle", "kwargs": {"url": "http://127.0.0.1:4001/v1"}}


def _ids(tasks: list[PlannedTask], agents: list[dict] | None = None, settings: dict | None = None, k: int = 1):
    return [trial.id for trial in make_plan(tasks, agents or [AGENT], settings or {}, k).trials]


def test_paths_and_ports_do_not_matter() -> None:
    moved = replace(TASK, path="/two/hello")
    other_port = {"name": "oracle", "kwargs": {"url": "http://127.0.0.1:59999/v1"}}
    assert _ids([TASK]) == _ids([moved], [other_port])


def test_content_agent_settings_and_attempt_matter() -> None:
    different = {
        *_ids([TASK]),
        *_ids([replace(TASK, digest="sha256:" + "b" * 64)]),
        *_ids([TASK], [{"name": "nop"}]),
        *_ids([TASK], settings={"timeout_multiplier": 2}),
        _ids([TASK], k=2)[1],
    }
    assert len(different) == 5


def test_a_setting_that_asks_for_nothing_does_not_matter() -> None:
    assert _ids([TASK]) == _ids([TASK], [{**AGENT, "later": None}], {"new": [], "table": {}})


def test_a_model_that_is_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    for name, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / name).write_text(text)
    models = [f"script:{tmp_path / name}" for name in "abc"]
    configs = [JobConfig.model_validate({"agents": [{"name": "x", "model_name": model}]}) for model in models]
    ids = [_ids([TASK], Identity(config, {}, ()).agents(b"")) for config in configs]
    assert ids[0] == ids[1] != ids[2]


def test_more_attempts_keep_the_earlier_ones() -> None:
    assert _ids([TASK], k=4)[:2] == _ids([TASK], k=2)


def test_equal_tasks_and_agents_are_still_told_apart() -> None:
    plan = make_plan([TASK, TASK], [AGENT, AGENT], {}, 3)
    assert len({trial.id for trial in plan.trials}) == 12
    assert len({trial.name for trial in plan.trials}) == 12


def test_names_are_directories_and_say_the_task() -> None:
    odd = PlannedTask("org/" + "ä /../.. x" * 20, TASK.digest, "/x")
    (trial,) = make_plan([odd], [AGENT], {}, 1).trials
    assert "/" not in trial.name and not trial.name.startswith(".") and len(trial.name) <= 41
    (trial,) = make_plan([TASK], [AGENT], {}, 1).trials
    assert trial.name.startswith("hello__") and len(trial.name) == len("hello__") + 7


def test_a_plan_survives_its_journal_line() -> None:
    plan = make_plan([TASK], [AGENT], {}, 2)
    assert Plan.from_line(plan.to_line()) == plan


def test_no_task_is_an_error() -> None:
    with pytest.raises(UsageError):
        make_plan([], [AGENT], {}, 1)
