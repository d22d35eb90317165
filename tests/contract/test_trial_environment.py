"""A task's sandbox as a library: opened, worked in, graded again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pier.errors import PolicyError, SandboxError
from pier.network.policy import NONE
from pier.redact import Redactor
from pier.task import Task
from pier.trial.environment import TaskSandbox, open_environment
from pier.trial.plan import NetworkPlan, StepNetwork
from pier.trial.record import TrialRecord
from pier.trial.verify import grade
from tests.trial_runs import ON_HOST, TOML, open_bench, write_task

pytestmark = pytest.mark.plain

SEPARATE = TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"') + 'docker_image = "host"\n'


@asynccontextmanager
async def opened(task: Task, root: Path, network: NetworkPlan | None = None) -> AsyncIterator[TaskSandbox]:
    record = TrialRecord(root / "record", Redactor(()))
    record.open()
    try:
        async with (
            open_bench(root) as bench,
            open_environment(task, bench.services, record, choice=ON_HOST, network=network) as environment,
        ):
            await environment.begin_step(0)
            yield environment
    finally:
        record.close()


async def test_grading_can_be_repeated_and_harms_nothing(pier_home: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", environment__numbers="7\n")
    async with opened(task, tmp_path) as environment:
        sandbox = environment.sandbox
        assert (await sandbox.exec("cat numbers", cwd=environment.workdir)).text == "7\n"
        await sandbox.exec("sleep 300 >/dev/null 2>&1 & echo $! > /app/pid", cwd=environment.workdir)
        first = await grade(environment, tmp_path / "first")
        await sandbox.exec("touch /app/done")
        second = await grade(environment, tmp_path / "second")
        (task.path / "tests" / "test.sh").write_text("#!/bin/sh\necho 0.5 > /logs/verifier/reward.txt\n")
        third = await grade(environment, tmp_path / "third")
        assert (first.rewards, second.rewards, third.rewards) == ({"reward": 0}, {"reward": 1}, {"reward": 0.5})
        assert [graded.error for graded in (first, second, third)] == [None, None, None]
        assert (await sandbox.exec("kill -0 $(cat /app/pid)")).ok, "what runs there goes on"
        assert environment.network == NONE
    assert (tmp_path / "second" / "verifier" / "reward.txt").read_text() == "1\n"


async def test_a_separate_verifier_collects_what_it_grades(pier_home: Path, tmp_path: Path) -> None:
    toml = 'artifacts = ["/app/done"]\n' + SEPARATE
    task = write_task(tmp_path / "task", toml=toml)
    async with opened(task, tmp_path) as environment:
        await environment.sandbox.exec("touch /app/done")
        graded = await grade(environment, tmp_path / "graded")
    assert (graded.mode, graded.rewards, graded.error) == ("separate", {"reward": 1}, None)
    assert (tmp_path / "graded" / "artifacts" / "app" / "done").is_file()


async def test_tests_that_give_no_reward_are_an_error_of_the_grade(pier_home: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", test="#!/bin/sh\ntrue\n")
    async with opened(task, tmp_path) as environment:
        graded = await grade(environment, tmp_path / "graded")
        assert (await environment.sandbox.exec("true")).ok
    assert graded.rewards is None and getattr(graded.error, "code", None) == "reward_missing"
    assert [run.state for run in graded.runs] == ["agent", "pristine", "agent"]


async def test_what_cannot_be_enforced_or_run_is_refused(pier_home: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    odd = NetworkPlan(NONE, (StepNetwork(NONE, NONE),), setup=type(NONE)("nowhere"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PolicyError, match="nowhere"):
        async with opened(task, tmp_path / "a", odd):
            pass
    windows = write_task(tmp_path / "windows", toml=TOML + 'os = "windows"\n', **{"tests__test.bat": ""})
    with pytest.raises(SandboxError, match="windows"):
        async with opened(windows, tmp_path / "b"):
            pass
