"""The budget of a job: what the flags say, what the journal keeps, and when no further trial begins."""

from __future__ import annotations

from pathlib import Path

from pier.gateway.budget import Reservation
from pier.job.config import BudgetConfig, RetryConfig
from pier.job.ledger import Ledger, Outcome, Used, outcome_of
from pier.job.plan import PlannedTrial
from pier.job.runner import Schedule, job_meter
from pier.trial.result import AgentInfo, ExceptionInfo, TrialResult
from pier.wire.turn import Usage


def test_what_was_used_outlives_the_runner(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path)
    budget = job_meter(BudgetConfig(turns=3), ledger)
    assert budget is not None
    budget.turns, budget.input_tokens, budget.cost_usd = 2, 40, 0.25
    budget.save()
    size = (tmp_path / "journal.jsonl").stat().st_size
    budget.save()
    assert (tmp_path / "journal.jsonl").stat().st_size == size
    ledger.close()
    later = job_meter(BudgetConfig(turns=3), Ledger.read(tmp_path))
    assert later is not None and later.exhausted() is None
    assert (later.turns, later.input_tokens, later.cost_usd) == (2, 40, 0.25)
    later.turns += 1
    assert later.exhausted() == "3 of 3 turns of this job are used"


def test_each_turn_is_written_down_when_it_is_spent_and_not_before(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path)
    pool = job_meter(BudgetConfig(turns=3), ledger)
    assert pool is not None
    with Reservation((pool,)) as failing, Reservation((pool,)) as going:
        assert failing.reserve() is None and going.reserve() is None
        assert Ledger.read(tmp_path).used == Used()
        going.spend()
        assert Ledger.read(tmp_path).used == Used(turns=1)
        going.add(Usage(11, 7), 0.5)
        assert Ledger.read(tmp_path).used == Used(1, 11, 7, 0.5)
    assert (pool.turns, pool.held, pool.used) == (1, 0, Used(1, 11, 7, 0.5))
    ledger.close()


def test_time_goes_on_where_an_earlier_run_stopped(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path)
    ledger.note_used(Used(turns=1, seconds=59.0))
    ledger.close()
    again = Ledger.read(tmp_path)
    over = job_meter(BudgetConfig(wall_time=59), again)
    assert over is not None and over.exhausted() == "the 59 seconds of this job are over"
    budget = job_meter(BudgetConfig(wall_time=600), again)
    assert budget is not None and budget.seconds_left == 541
    budget.start()
    assert (budget.seconds_left or 0) < 541 and budget.exhausted() is None
    assert budget.used.seconds >= 59
    untimed = job_meter(BudgetConfig(turns=5), again)
    assert untimed is not None
    untimed.start()
    assert untimed.used == again.used


def test_a_job_without_limits_has_no_pool(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path)
    assert job_meter(BudgetConfig(), ledger) is None
    ledger.close()
    assert Ledger.read(tmp_path).used == Used()


async def test_trials_that_run_go_on_and_no_further_one_begins(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path)
    trials = [PlannedTrial(str(number), f"t{number}", 0, 0, number) for number in range(9)]
    begun: list[str] = []

    async def run(trial: PlannedTrial, number: int) -> Outcome:
        begun.append(trial.id)
        return Outcome(rewards={"reward": 1})

    schedule = Schedule(
        ledger, run, lambda *_: None, limit=2, retry=RetryConfig(), watchers=(), may_begin=lambda: len(begun) < 4
    )
    await schedule.run(trials)
    ledger.close()
    assert begun == list(ledger.outcomes) and 4 <= len(begun) <= 5
    assert not schedule.stopping


def test_a_trial_that_the_job_cut_off_is_owed_and_has_no_verdict(tmp_path: Path) -> None:
    info = ExceptionInfo.model_validate(
        {
            "exception_type": "JobError",
            "exception_message": "cut off",
            "exception_traceback": "",
            "occurred_at": "2024-01-01T00:00:00Z",
            "code": "job-budget",
        }
    )
    result = TrialResult(
        task_name="a", trial_name="t", trial_uri="file:///t", task_id={"path": "a"}, task_checksum="0",
        config={}, agent_info=AgentInfo(name="x"), exception_info=info,
    )  # fmt: skip
    outcome = outcome_of(result, tmp_path)
    assert outcome.cancelled and outcome.fault is None and outcome.rewards is None
