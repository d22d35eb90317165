"""What is shown while a job runs and when it is over."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pier.job.command import exit_code
from pier.job.ledger import Fault, Ledger, Outcome
from pier.job.plan import PlannedTask, make_plan
from pier.job.progress import LiveProgress, PlainProgress, Progress, describe_outcome, next_command, print_report
from pier.job.view import JobView

PLAN = make_plan([PlannedTask("hello", "sha256:" + "a" * 64, "/hello")], [{"name": "oracle"}], {}, 60)
GOOD = Outcome(rewards={"reward": 1.0}, cost=0.25)
BAD = Outcome(rewards={"reward": 0.0})
BROKEN = Outcome(fault=Fault("SandboxError", "sandbox", "infra", True, "it broke\x1b[2J\nand more"))


def test_numbers_add_up_and_earlier_trials_count() -> None:
    progress = Progress(5, [GOOD, BAD])
    first, second, *_ = PLAN.trials
    progress.started(first, 1)
    progress.phase(first.name, "agent")
    assert progress.running[first.name][0] == "agent"
    progress.ended(first, GOOD)
    progress.started(second, 1)
    progress.retrying(second, BROKEN, 1.0)
    totals = progress.totals
    assert (totals.done, totals.verdicts, progress.retries, totals.cost.known) == (3, 3, 1, 0.5)
    assert "3/5 trials" in progress.line() and "mean reward 0.667" in progress.line()


def test_plain_lines_name_each_trial_of_a_small_job() -> None:
    out = io.StringIO()
    progress = PlainProgress(2, stream=out)
    for trial, outcome in zip(PLAN.trials[:2], (GOOD, BROKEN), strict=True):
        progress.ended(trial, outcome)
    assert out.getvalue().splitlines()[0] == f"[1/2] {PLAN.trials[0].name}: reward 1"
    assert "SandboxError (infra): it broke" in out.getvalue()


def test_long_work_is_told_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out, trial = io.StringIO(), PLAN.trials[0]
    progress = PlainProgress(2, stream=out)
    progress.started(trial, 1)
    progress.detail(trial.name, "image: [1/3] FROM x")
    assert out.getvalue() == "" and progress.details == {trial.name: "image: [1/3] FROM x"}
    monkeypatch.setattr("pier.job.progress.PLAIN_PAUSE", 0)
    progress.detail(trial.name, "image: [2/3] RUN make\x1b[2J")
    assert out.getvalue() == f"{trial.name}: prepare: image: [2/3] RUN make?[2J\n"
    progress.phase(trial.name, "start")
    assert progress.details == {}
    progress.detail("another", "image: [3/3] RUN make")
    assert progress.details == {}


def test_a_large_job_gets_few_lines_and_a_last_one() -> None:
    out = io.StringIO()
    progress = PlainProgress(60, stream=out)
    for trial in PLAN.trials:
        progress.ended(trial, GOOD)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 20 and lines[-1].startswith("60/60 trials")


def test_the_live_view_shows_phases_and_what_is_beyond() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    progress = LiveProgress(60, console)
    for trial in PLAN.trials[:20]:
        progress.started(trial, 1)
        progress.phase(trial.name, "verify")
    progress.detail(PLAN.trials[0].name, "image: [2/3] RUN make " + "x" * 200)
    with progress.show():
        pass
    progress.stop_noticed()
    with progress.show():
        pass
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert any(row.startswith(PLAN.trials[0].name) for row in bare.splitlines()) and "8 in verify" in bare
    assert any("[2/3] RUN make" in row and len(row) <= 100 for row in bare.splitlines())
    assert "stopping" in out.getvalue()


def test_what_others_wrote_cannot_move_the_cursor() -> None:
    assert "\x1b" not in describe_outcome(BROKEN) and "and more" not in describe_outcome(BROKEN)
    assert describe_outcome(Outcome()) == "done, not graded"


@pytest.mark.parametrize(
    ("outcomes", "code", "words"),
    [
        ([GOOD, GOOD], 0, "pier job show"),
        ([GOOD, BAD], 0, "pier trial show"),
        ([GOOD, BROKEN], 1, "--only infra"),
        ([GOOD], 1, "pier job resume"),
    ],
)
def test_the_report_says_what_comes_next(
    tmp_path: Path, outcomes: list[Outcome], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger.create(tmp_path)
    ledger.adopt_plan(make_plan(PLAN.tasks, PLAN.agents, {}, 2))
    for trial, outcome in zip(ledger.plan.trials, outcomes, strict=False):
        ledger.begin(trial.id)
        ledger.end(trial.id, outcome)
    ledger.close()
    view = JobView.open(tmp_path)
    print_report(view)
    shown = capsys.readouterr().out
    assert words in shown and words in (next_command(view) or "")
    assert str(tmp_path) in shown
    heading, row = (line.split() for line in shown.splitlines()[:2])
    assert heading[:4] == ["agent", "model", "dataset", "verdicts"] and row[0] == PLAN.agents[0]["name"]
    assert exit_code(ledger) == code
    assert exit_code(ledger, interrupted=True) == 130


def test_faults_are_grouped_by_their_hints_and_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.create(tmp_path)
    ledger.adopt_plan(PLAN)
    for number, trial in enumerate(PLAN.trials):
        ledger.begin(trial.id)
        hint = "pull it" if number < 40 else f"try {number}"
        ledger.end(trial.id, Outcome(fault=Fault("ImageError", "image", "infra", False, "no\x1b[2J image", hint)))
    ledger.close()
    print_report(JobView.open(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    faults = [number for number, line in enumerate(lines) if " × " in line]
    assert lines[faults[0]].startswith("40 × ImageError (blame: infra), e.g. ")
    assert lines[faults[0] + 1] == "      hint: pull it"
    assert len(faults) == 8 and lines[faults[-1] + 2] == "13 more errors; see: pier job show --trials " + str(tmp_path)


def test_a_journal_without_hints_is_read() -> None:
    old = Fault("ImageError", "image", "infra", False, "no image")
    assert Outcome.from_line(Outcome(fault=old).to_line()) == Outcome(fault=old)
    assert Outcome(fault=old).to_line()["fault"] == ["ImageError", "image", "infra", False, "no image"]
    new = Outcome(fault=replace(old, hint="pull it"))
    assert Outcome.from_line(new.to_line()) == new
