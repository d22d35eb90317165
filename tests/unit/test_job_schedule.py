"""The schedule: limits, retries outside the slot, and stopping, with plain coroutines in place of trials."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pier.job.config import RetryConfig
from pier.job.ledger import Fault, Ledger, Outcome
from pier.job.plan import PlannedTask, PlannedTrial, make_plan
from pier.job.progress import Progress
from pier.job.runner import Backoff, RunTry, Schedule

GOOD = Outcome(rewards={"reward": 1.0})
BROKEN = Outcome(fault=Fault("SandboxError", "sandbox", "infra", True, "it broke"))
WRONG = Outcome(fault=Fault("TaskError", "task", "task", False, "it is wrong"))


class Bench:
    """A ledger of n trials and a schedule over it."""

    def __init__(self, directory: Path, n: int, run: RunTry, limit: int = 2, **retry: object) -> None:
        task = PlannedTask("hello", "sha256:" + "a" * 64, "/hello")
        self.ledger = Ledger.create(directory)
        self.ledger.adopt_plan(make_plan([task], [{"name": "oracle"}], {}, n))
        self.aside: list[tuple[str, int]] = []
        config = RetryConfig.model_validate({"min_wait_sec": 0.01, "max_wait_sec": 0.02, **retry})
        self.progress = Progress(n)
        self.schedule = Schedule(
            self.ledger, run, self._set_aside, limit=limit, retry=config, watchers=(self.progress,)
        )

    def _set_aside(self, trial: PlannedTrial, number: int) -> str:
        self.aside.append((trial.id, number))
        return "kept"

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self.schedule.run(self.ledger.plan.trials), 60)
        finally:
            self.ledger.close()


async def test_no_more_than_the_limit_run_at_once_and_all_run(tmp_path: Path) -> None:
    now = most = 0

    async def run(trial: PlannedTrial, number: int) -> Outcome:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return GOOD

    bench = Bench(tmp_path, 20, run, limit=3)
    await bench.run()
    assert most == 3
    assert len(bench.ledger.outcomes) == bench.progress.done == 20


async def test_a_waiting_retry_leaves_its_slot_to_others(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    async def run(trial: PlannedTrial, number: int) -> Outcome:
        seen.append((trial.attempt, number))
        if trial.attempt == 4:
            asyncio.get_running_loop().call_soon(bench.schedule.stop)
        return BROKEN if trial.attempt == 1 else GOOD

    bench = Bench(tmp_path, 4, run, limit=1, max_retries=5, min_wait_sec=600, max_wait_sec=600)
    await bench.run()
    assert seen == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert len(bench.ledger.outcomes) == 3


async def test_every_try_is_set_aside_but_the_last(tmp_path: Path) -> None:
    async def run(trial: PlannedTrial, number: int) -> Outcome:
        return BROKEN if trial.attempt == 1 and number < 3 else GOOD

    bench = Bench(tmp_path, 4, run, limit=1, max_retries=5)
    await bench.run()
    assert [number for _, number in bench.aside] == [1, 2]
    assert bench.ledger.n_retries == bench.progress.retries == 2
    assert all(outcome == GOOD for outcome in bench.ledger.outcomes.values())


async def test_retries_end_and_the_last_outcome_stands(tmp_path: Path) -> None:
    async def run(trial: PlannedTrial, number: int) -> Outcome:
        return BROKEN

    bench = Bench(tmp_path, 1, run, max_retries=2)
    await bench.run()
    assert bench.ledger.tries == {bench.ledger.plan.trials[0].id: 3}
    assert list(bench.ledger.outcomes.values()) == [BROKEN]


async def test_stop_cancels_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    started: list[str] = []

    async def run(trial: PlannedTrial, number: int) -> Outcome:
        started.append(trial.id)
        if len(started) == 2:
            asyncio.get_running_loop().call_soon(bench.schedule.stop)
        await asyncio.sleep(600)
        return GOOD

    bench = Bench(tmp_path, 9, run, limit=2)
    await bench.run()
    assert len(started) == 2
    after = Ledger.read(tmp_path)
    assert after.outcomes == {} and after.open == set()
    assert len(list(after.owed())) == 9


async def test_a_ledger_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    async def run(trial: PlannedTrial, number: int) -> Outcome:
        raise OSError(28, "No space left on device")

    with pytest.raises(BaseExceptionGroup) as caught:
        await Bench(tmp_path, 3, run).run()
    assert caught.group_contains(OSError)


def test_what_is_retried() -> None:
    assert Backoff(RetryConfig(max_retries=1)).wants(BROKEN, 0)
    assert not Backoff(RetryConfig(max_retries=1)).wants(BROKEN, 1)
    assert not Backoff(RetryConfig(max_retries=1)).wants(WRONG, 0)
    assert not Backoff(RetryConfig(max_retries=1)).wants(GOOD, 0)
    assert Backoff(RetryConfig(max_retries=1, include_exceptions=["TaskError"])).wants(WRONG, 0)
    assert not Backoff(RetryConfig(max_retries=1, include_exceptions=["TaskError"])).wants(BROKEN, 0)
    assert not Backoff(RetryConfig(max_retries=1, exclude_exceptions=["sandbox"])).wants(BROKEN, 0)


def test_waits_grow_are_bounded_and_differ() -> None:
    backoff = Backoff(RetryConfig(max_retries=9, min_wait_sec=1, max_wait_sec=8, wait_multiplier=2))
    for retries, longest in ((1, 1), (2, 2), (3, 4), (4, 8), (500, 8)):
        waits = {backoff.wait(retries) for _ in range(50)}
        assert all(longest / 2 <= wait <= longest for wait in waits) and len(waits) > 1
