"""Reading job directories: finished, running, torn, empty, foreign and hostile ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pier.cli.main import main
from pier.errors import JobError, UsageError
from pier.job.directory import remove_job
from pier.job.ledger import JOURNAL, Fault, Ledger, Outcome, owning
from pier.job.plan import PlannedTask, make_plan
from pier.job.report import print_comparison, print_job, print_jobs, print_log
from pier.job.view import JobView, TrialView, list_jobs

TASKS = [PlannedTask(name, "sha256:" + "a" * 64, f"/{name}", source="set") for name in ("one", "two")]
AGENTS = [{"name": "codex", "model_name": "openai/x"}]
GOOD = Outcome(rewards={"reward": 1.0}, cost=0.25, tokens=(10, None, 2), seconds=1.0)
BROKEN = Outcome(fault=Fault("SandboxError", "sandbox", "infra", True, "it broke"))


def write_job(directory: Path, outcomes: list[Outcome | None], attempts: int = 2) -> Ledger:
    """A job of two tasks whose trials began and, where an outcome is given, ended."""
    directory.mkdir(parents=True)
    ledger = Ledger.create(directory)
    ledger.adopt_plan(make_plan(TASKS, AGENTS, {}, attempts))
    for trial, outcome in zip(ledger.plan.trials, outcomes, strict=False):
        ledger.begin(trial.id)
        if outcome is not None:
            ledger.end(trial.id, outcome)
    ledger.close()
    return ledger


def result(name: str, task: str = "one", **more: Any) -> dict[str, Any]:
    """A trial's result with what every program writes."""
    base = {"task_name": task, "trial_name": name, "trial_uri": "file:///x", "task_id": {"path": "/x"}}
    agent = {"name": "codex", "version": "1", "model_info": {"name": "x", "provider": "openai"}}
    times = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:05Z"}
    verdict = {"verifier_result": {"rewards": {"reward": 1.0}}}
    return {**base, "task_checksum": "x", "config": {}, "agent_info": agent, **times, **verdict, **more}


def write_foreign(directory: Path, *results: dict[str, Any], finished: str | None = "2026-01-01T00:01:00") -> Path:
    directory.mkdir(parents=True)
    head = {"id": "1", "started_at": "2026-01-01T00:00:00", "finished_at": finished, "n_total_trials": len(results)}
    (directory / "result.json").write_text(json.dumps({**head, "stats": {"n_retries": 3}}))
    for each in results:
        (directory / each["trial_name"]).mkdir()
        (directory / each["trial_name"] / "result.json").write_text(json.dumps(each))
    return directory


def test_rows_and_numbers_come_from_the_journal_alone(tmp_path: Path) -> None:
    ledger = write_job(tmp_path / "j", [GOOD, BROKEN, None])
    view = JobView.open(tmp_path / "j")
    assert (view.name, view.state, view.n_trials, view.is_ours, view.id) == ("j", "interrupted", 4, True, ledger.id)
    assert [row.state for row in view.trials] == ["done", "done", "unfinished", "pending"]
    assert [(row.task, row.attempt) for row in view.trials] == [("one", 1), ("two", 1), ("one", 2), ("two", 2)]
    (group,) = view.groups
    assert (group.key, group.agent, group.model, group.dataset) == ("codex__x__set", "codex", "openai/x", "set")
    assert (group.totals.verdicts, group.totals.errors, group.summary.coverage) == (1, {"infra": 1}, 0.25)
    assert (view.totals.tokens.input, view.totals.tokens.cached, view.totals.tokens.output) == (10, None, 2)
    with owning(tmp_path / "j"):
        running = JobView.open(tmp_path / "j")
    assert (running.state, [row.state for row in running.trials][2]) == ("running", "running")


def test_a_trial_that_never_began_is_shown_by_its_row(tmp_path: Path) -> None:
    write_job(tmp_path / "j", [GOOD])
    view = JobView.open(tmp_path / "j")
    pending = view.trial(view.trials[3].name)
    assert (pending.state, pending.task, pending.attempt, pending.model) == ("pending", "two", 2, "openai/x")
    assert pending.result is None and pending.files.logs == ()
    with pytest.raises(UsageError, match="no trial nope"):
        view.trial("nope")


def test_a_cost_known_in_part_is_listed_with_the_count_of_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path / "jobs" / "j", [GOOD, BROKEN, GOOD])
    views = list_jobs(tmp_path / "jobs")
    print_jobs(views, tmp_path / "jobs", as_json=False)
    assert "at least $0.5000 (1 unknown)" in capsys.readouterr().out
    print_jobs(views, tmp_path / "jobs", as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["cost_usd"], row["cost_known_usd"], row["cost_trials_unknown"]) == (None, 0.5, 1)


def test_empty_torn_and_other_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert JobView.open(tmp_path / "empty").state == "empty"
    with owning(tmp_path / "empty"):
        assert JobView.open(tmp_path / "empty").state == "running"
    ledger = write_job(tmp_path / "torn", [GOOD])
    trial = tmp_path / "torn" / ledger.plan.trials[0].name
    trial.mkdir()
    (trial / "result.json").write_text(json.dumps(result(trial.name)))
    whole = (tmp_path / "torn" / JOURNAL).read_bytes()
    (tmp_path / "torn" / JOURNAL).write_bytes(b"x" + whole[: len(whole) // 3])
    torn = JobView.open(tmp_path / "torn")
    assert torn.state == "broken" and JOURNAL in torn.problems[0]
    assert [row.outcome.rewards for row in torn.trials if row.outcome] == [{"reward": 1.0}], "trials are still read"
    print_job(torn, trials=True, as_json=False)
    assert trial.name in capsys.readouterr().out
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    for other in (tmp_path / "notes", tmp_path / "missing", trial):
        with pytest.raises(JobError) as caught:
            JobView.open(other)
        assert caught.value.code == "not-a-job"
    assert [view.name for view in list_jobs(tmp_path)] == ["torn"]


@pytest.mark.plain
@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_job_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    write_job(tmp_path / "j", [GOOD])
    (tmp_path / "j").chmod(0)
    try:
        with pytest.raises(JobError) as caught:
            JobView.open(tmp_path / "j")
        assert caught.value.code == "job-files" and list_jobs(tmp_path) == []
    finally:
        (tmp_path / "j").chmod(0o700)


def test_jobs_of_other_programs_are_read_from_their_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"exception_message": "m", "exception_traceback": "t", "occurred_at": "2026-01-01T00:00:00Z"}
    failed = {"verifier_result": None, "exception_info": {"exception_type": "AgentTimeoutError", **error}}
    used = {"agent_result": {"n_input_tokens": 5, "n_output_tokens": 1, "cost_usd": 0.5}}
    cancelled = {"verifier_result": None, "exception_info": {"exception_type": "CancelledError", **error}}
    job = write_foreign(
        tmp_path / "h", result("a", **used), result("b", **failed), result("c", "two", **cancelled), result("d", "two")
    )
    (job / "d" / "result.json").write_text('{"task_name": "two", "tri')
    (job / "e").mkdir()
    (job / "e" / "config.json").write_text(json.dumps({"task": {"path": "/t/three"}, "agent": {"name": "codex"}}))
    (job / ".hidden").mkdir()
    (job / "analysis").mkdir()
    view = JobView.open(job)
    assert (view.state, view.is_ours, view.n_trials, view.n_retries) == ("done", False, 5, 3)
    states = {row.name: row.state for row in view.trials}
    assert states == {"a": "done", "b": "done", "c": "unfinished", "d": "broken", "e": "unfinished"}
    assert [(row.task, row.attempt) for row in view.trials[:2]] == [("one", 1), ("one", 2)]
    fault = view.trials[1].outcome and view.trials[1].outcome.fault
    assert fault and (fault.type, fault.blame) == ("AgentTimeoutError", "agent")
    assert (view.totals.cost.known, view.totals.tokens.input) == (0.5, 5)
    assert view.trials[3].problem and "result.json" in view.trials[3].problem and view.trials[4].task == "three"
    print_job(view, trials=True, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] == "done" and len(shown["trials"]) == 5
    other = write_foreign(tmp_path / "going", finished=None)
    assert JobView.open(other).state == "unfinished"


def test_no_link_is_followed_out_of_a_job(tmp_path: Path) -> None:
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "result.json").write_text(json.dumps(result("outside")))
    (secret / JOURNAL).write_text('{"e":"job","id":"1","at":"x"}\n')
    (secret / "job.log").write_text("secret\n")
    job = write_foreign(tmp_path / "h", result("a"))
    (job / "linked").symlink_to(secret)
    (job / "a" / "agent").symlink_to(secret)
    (job / "file").mkdir()
    (job / "file" / "result.json").symlink_to(secret / "result.json")
    (job / "job.log").symlink_to(secret / "job.log")
    (job / "config.json").symlink_to(secret / "result.json")
    view = JobView.open(job)
    assert {row.name: row.state for row in view.trials} == {"a": "done", "file": "broken"}
    assert view.config is None and view.trial("a").files.logs == ()
    with pytest.raises(JobError, match="not a regular file"):
        print_log(view, None, follow=False, as_json=False)
    (job / JOURNAL).symlink_to(secret / JOURNAL)
    assert JobView.open(job).state == "broken"


@pytest.mark.parametrize("name", ["../outside", "..", "linked"])
def test_a_journal_cannot_name_a_trial_elsewhere(tmp_path: Path, name: str) -> None:
    ledger = write_job(tmp_path / "j", [GOOD])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "result.json").write_text(json.dumps(result("outside")))
    (tmp_path / "j" / "linked").symlink_to(tmp_path / "outside")
    journal = tmp_path / "j" / JOURNAL
    journal.write_text(journal.read_text().replace(ledger.plan.trials[0].name, name))
    view = JobView.open(tmp_path / "j")
    assert bool(view.problems) == (name != "linked")  # the line of the plan is not taken
    with pytest.raises(JobError if name == "linked" else UsageError):
        view.trial(name)


def test_only_certain_jobs_are_removed(tmp_path: Path) -> None:
    for number, content in enumerate((b"// settings\n{}", b'{"tasks": []}', b"[" * 200_000, None)):
        other = tmp_path / f"other{number}"
        (other / "src").mkdir(parents=True)
        if content is not None:
            (other / "config.json").write_bytes(content)
        with pytest.raises(JobError) as caught:
            remove_job(other)
        assert caught.value.code == "not-a-job" and (other / "src").is_dir()
    write_job(tmp_path / "ours", [GOOD])
    write_foreign(tmp_path / "harbors", result("a"))
    write_job(tmp_path / "torn", [GOOD])
    (tmp_path / "torn" / JOURNAL).write_bytes(b"[" * 200_000 + b"\n")
    (tmp_path / "torn" / ".owner").write_text("{}")
    assert [view.name for view in list_jobs(tmp_path) if view.name == "torn" and view.state == "broken"] == ["torn"]
    for name in ("ours", "harbors", "torn"):
        remove_job(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["other0", "other1", "other2", "other3"]


def test_a_hostile_owner_file_is_neither_written_nor_waited_for(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for number, make in enumerate((lambda p: p.symlink_to(victim), lambda p: p.hardlink_to(victim), os.mkfifo)):
        job = tmp_path / f"j{number}"
        write_job(job, [GOOD])
        make(job / ".owner")
        assert JobView.open(job).owner is None
        with pytest.raises(JobError):
            remove_job(job)
    assert victim.read_text() == "mine" and (tmp_path / "j0" / JOURNAL).is_file()


@pytest.mark.parametrize(
    ("content", "state"), [(None, "unfinished"), (b"", "broken"), (b'{"trial', "broken"), (b"[]", "broken")]
)
def test_a_trial_without_a_usable_result_has_a_state(tmp_path: Path, content: bytes | None, state: str) -> None:
    trial = tmp_path / "t__1"
    trial.mkdir()
    (trial / "trial.log").write_text("phase prepare\n")
    config = {"task": {"path": "/tasks/hello"}, "agent": {"name": "codex", "model_name": "openai/x"}}
    (trial / "config.json").write_text(json.dumps(config))
    if content is not None:
        (trial / "result.json").write_bytes(content)
    view = TrialView.open(trial)
    assert (view.state, view.task, view.agent, view.model) == (state, "hello", "codex", "openai/x")
    assert view.problem and view.files.logs == (trial / "trial.log",) and view.phases == {}


def test_where_the_parts_of_a_trial_are(tmp_path: Path) -> None:
    trial = tmp_path / "t__1"
    names = ("agent/trajectory.json", "agent/recording.jsonl", "agent/codex.txt", "steps/one/agent/trajectory.json")
    for name in (*names, "artifacts/manifest.json"):
        (trial / name).parent.mkdir(parents=True, exist_ok=True)
        (trial / name).write_text("{}")
    phases = {"environment_setup": {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:02Z"}}
    (trial / "result.json").write_text(json.dumps(result("t__1", **phases)))
    view = TrialView.open(trial)
    assert view.phases == {"environment_setup": 2.0} and view.model == "openai/x"
    assert view.files.trajectories == (trial / names[0], trial / names[3])
    assert view.files.recordings == (trial / names[1],) and view.files.logs == (trial / names[2],)
    assert view.files.artifacts == (trial / "artifacts",)


def test_jobs_are_compared_task_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = Outcome(rewards={"reward": 0.0})
    write_job(tmp_path / "before", [GOOD, bad, GOOD, bad])
    write_job(tmp_path / "after", [GOOD, GOOD, GOOD, GOOD])
    (tmp_path / "before" / "config.json").write_text('{"agents": [{"name": "a"}], "job_name": "x", "strict": true}')
    (tmp_path / "after" / "config.json").write_text('{"agents": [{"name": "b"}], "job_name": "y", "strict": true}')
    views = [JobView.open(tmp_path / name) for name in ("before", "after")]
    print_comparison(views, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    (other,) = shown["others"]
    found = other["against_first"]
    assert (found["difference"], found["wins"], found["losses"], found["n_paired"]) == (0.5, 1, 0, 2)
    assert found["interval"]["low"] <= 0.5 <= found["interval"]["high"]
    assert [(row["task"], row["difference"]) for row in found["tasks"]] == [("one", 0.0), ("two", 1.0)]
    assert shown["configuration"] == {"agents.name": ["a", "b"]}
    print_comparison(views, as_json=False)
    text = capsys.readouterr().out
    assert "1 better, 0 worse, 1 equal" in text and "+0.500" in text and "two" in text
    with pytest.raises(UsageError, match="nothing to compare"):
        print_comparison(views[:1], as_json=False)
    write_job(tmp_path / "elsewhere" / "before", [GOOD, GOOD])
    print_comparison([views[0], JobView.open(tmp_path / "elsewhere" / "before")], as_json=False)
    text = capsys.readouterr().out
    assert f"{tmp_path / 'elsewhere' / 'before'} against {tmp_path / 'before'}" in text
    (tmp_path / "before" / JOURNAL).write_bytes(b"x")
    text = output_of(capsys, "job", "compare", str(tmp_path / "after"), str(tmp_path / "before"), code=2)
    assert f"cannot compare {tmp_path}/before: {tmp_path}/before/{JOURNAL} cannot be read" in text


def output_of(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    """What `pier ARGS` prints."""
    with pytest.raises(SystemExit) as stopped:
        main(args)
    out, err = capsys.readouterr()
    assert stopped.value.code == code, err
    return out + err


def test_a_job_goes_by_its_name_in_the_jobs_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for jobs in ("jobs", "other"):
        ledger = write_job(tmp_path / jobs / "one", [GOOD])
        trial = tmp_path / jobs / "one" / ledger.plan.trials[0].name
        trial.mkdir()
        (trial / "result.json").write_text(json.dumps(result(trial.name)))
        (tmp_path / jobs / "one" / "job.log").write_text(f"log of {jobs}\n")
    assert "files: jobs/one" in output_of(capsys, "job", "show", "one")
    assert "files: other/one" in output_of(capsys, "job", "show", "one", "--jobs-dir", "other")
    assert "log of other" in output_of(capsys, "job", "logs", "-o", "other", "one")
    assert "jobs/one: not running" in output_of(capsys, "job", "stop", "one")
    assert "nothing to compare" in output_of(capsys, "job", "compare", "one", code=2)
    assert "reward   1.0" in output_of(capsys, "trial", "show", f"one/{trial.name}")
    for command in (("resume",), ("retry", "--only", "infra"), ("regrade",)):
        assert "jobs/one/config.json" in output_of(capsys, "job", *command, "one", code=2)
    (tmp_path / "one").mkdir()
    assert "state: empty" in output_of(capsys, "job", "show", "one"), "a path comes first"
    (tmp_path / "one").rmdir()
    assert "removed jobs/one" in output_of(capsys, "job", "rm", "one") and not (tmp_path / "jobs" / "one").exists()
    assert "one: no such directory" in output_of(capsys, "job", "rm", "one", code=2)
    assert (tmp_path / "other" / "one").is_dir()


@pytest.mark.parametrize("outcome", [GOOD, BROKEN])
def test_a_trial_whose_result_is_torn_is_shown_as_the_journal_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: Outcome
) -> None:
    ledger = write_job(tmp_path / "j", [outcome], attempts=1)
    trial = tmp_path / "j" / ledger.plan.trials[0].name
    trial.mkdir()
    (trial / "result.json").write_text('{"task_name": "one", "tri')
    view = TrialView.open(trial)
    assert (view.state, view.outcome, view.task, view.agent) == ("done", outcome, "one", "codex")
    assert JobView.open(tmp_path / "j").trial(trial.name) == view
    text = output_of(capsys, "trial", "show", str(trial))
    verdict = "reward   1.0" if outcome is GOOD else "error    SandboxError (blame: infra): it broke"
    assert verdict in text and "state  " not in text
    assert f"note     from the job's journal, since the result cannot be read: {trial}/result.json" in text
    data = json.loads(output_of(capsys, "trial", "show", str(trial), "--json"))
    assert data["state"] == "done" and data["problem"]
    assert data.get("verifier_result") == ({"rewards": {"reward": 1.0}} if outcome is GOOD else None)


@pytest.mark.parametrize(
    ("phase", "exception", "log"),
    [
        ("setup", "AgentError", "agent/install.txt"),
        ("agent", "AgentError", "agent/codex.txt"),
        (None, "AgentTimeoutError", "agent/codex.txt"),
        ("verify", "VerifierError", "verifier/test-stdout.txt"),
        ("collect", "SandboxError", "trial.log"),
        (None, None, "verifier/test-stdout.txt"),
    ],
)
def test_a_failed_trial_names_the_log_of_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str | None, exception: str | None, log: str
) -> None:
    trial = tmp_path / "t__1"
    for name in ("agent/codex.txt", "agent/install.txt", "agent/other.txt", "verifier/test-stdout.txt", "trial.log"):
        (trial / name).parent.mkdir(parents=True, exist_ok=True)
        (trial / name).write_text("text\n")
    error = {"exception_message": "m", "exception_traceback": "t", "occurred_at": "2026-01-01T00:00:00Z"}
    info = {"exception_type": exception, **error, "phase": phase} if exception else None
    failed = result("t__1", verifier_result={"rewards": {"reward": 0.0}}, exception_info=info)
    (trial / "result.json").write_text(json.dumps(failed))
    assert f"  try    less {trial / log}\n" in output_of(capsys, "trial", "show", str(trial))


def test_a_file_is_neither_a_job_nor_a_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(JobError) as refused:
        JobView.open(tmp_path / "file")
    assert refused.value.code == "not-a-job"
    with pytest.raises(JobError) as refused:
        TrialView.open(tmp_path / "file")
    assert refused.value.code == "no_trial"


def test_a_finished_job_was_updated_when_it_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = write_job(tmp_path / "j", [GOOD, GOOD], attempts=1)
    ledger.write({"e": "done", "at": "2026-01-01T00:00:00"})
    ledger.close()
    data = json.loads(output_of(capsys, "job", "show", str(tmp_path / "j"), "--json"))
    assert data["updated_at"] == data["finished_at"] == "2026-01-01T00:00:00"


def test_the_log_of_a_trial_directory_is_refused_with_the_right_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = write_job(tmp_path / "j", [GOOD])
    name = ledger.plan.trials[0].name
    (tmp_path / "j" / name).mkdir()
    (tmp_path / "j" / name / "trial.log").write_text("phase prepare\n")
    text = output_of(capsys, "job", "logs", str(tmp_path / "j" / name), code=2)
    hint = f"job logs {tmp_path / 'j'} {name}"
    assert "is a trial, not a job" in text and f"hint: pier {hint}" in text
    assert "phase prepare" in output_of(capsys, *hint.split())
