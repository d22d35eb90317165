"""Reviews without a sandbox: what critics may write, evidence, rubrics, selection, causes, reading hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.cli.review import is_within
from pier.errors import JobError, UsageError
from pier.review.causes import find_cause, group_causes
from pier.review.order import ReviewPlan, read_order
from pier.review.output import check_output, schema_of
from pier.review.publish import publish_analyses
from pier.review.read import (
    compare_runs,
    critiques_of,
    heat_map,
    list_runs,
    read_analysis,
    read_job_analysis,
    read_run,
)
from pier.review.rubric import CRITIQUE_RUBRICS, built_in_rubrics, copy_files, fill_in, load_prompt, load_rubric
from pier.review.source import SourceTrial, TrialFilter, open_source, task_directory
from pier.task import load_task
from pier.tree import TreeError
from pier.trial.result import TrialResult

OUTPUT, STEP = "trial/verifier/test-stdout.txt", "trial/steps/b/agent/trajectory.json"
GOOD = {"rating": "good", "feedback": "fine", "tags": ["clean"]}


def make_trial(directory: Path, *, steps: int = 3, **result: Any) -> Path:
    """A finished trial as its files have it."""
    (directory / "agent").mkdir(parents=True)
    (directory / "verifier").mkdir()
    (directory / "trial.log").write_text("")
    table = {
        "task_name": "t",
        "trial_name": directory.name,
        "trial_uri": directory.as_uri(),
        "task_id": {"path": "t"},
        "task_checksum": "0",
        "config": {"task": {"path": "tasks/t"}},
        "agent_info": {"name": "codex", "model_info": {"name": "gpt", "provider": "openai"}},
        "verifier_result": {"rewards": {"reward": 0}},
        **result,
    }
    (directory / "result.json").write_text(json.dumps(table, indent=1))
    if steps:
        rows = [{"step_id": number, "source": "agent", "message": f"step {number}"} for number in range(1, steps + 1)]
        (directory / "agent" / "trajectory.json").write_text(json.dumps({"steps": rows}))
    (directory / "verifier" / "test-stdout.txt").write_text("one\ntwo words here\nthree\n")
    return directory


def problems(evidence: dict[str, Any], trial: Path) -> tuple[str, ...]:
    value = {**GOOD, "findings": [{"summary": "s", "evidence": [evidence]}]}
    return check_output(json.dumps(value).encode(), schema_of("critique", (), ()), {"trial": trial}).problems


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        ({"step": 3}, None),
        ({"step": 4}, "step 4 does not exist"),
        ({"step": 1, "file": "agent/trajectory.json"}, None),
        ({"file": "trial/verifier/test-stdout.txt", "line": 2, "quote": "two  words"}, None),
        ({"file": "/critique/input/trial/verifier/test-stdout.txt"}, None),
        ({"file": "verifier/test-stdout.txt", "line": 99}, "no line 99"),
        ({"file": "verifier/test-stdout.txt", "line": 1, "quote": "absent"}, "is not in"),
        ({"file": "verifier/gone.txt"}, "there is no file"),
        ({"file": "trial/../../etc/passwd"}, "there is no file"),
        ({"file": "/etc/passwd"}, "there is no file"),
        ({"file": "trial/agent/link"}, "there is no file"),
        ({"file": "trial/agent"}, "there is no file"),
        ({"file": "a\0b"}, "there is no file"),
        ({"quote": "x"}, "expected a step or a file"),
        ({"step": 1, "quote": "step 1"}, None),
        ({"step": 1, "quote": "step 2"}, "the quote 'step 2' is not in step 1"),
    ],
)
def test_evidence_must_exist(evidence: dict[str, Any], word: str | None, tmp_path: Path) -> None:
    trial = make_trial(tmp_path / "trial")
    (trial / "agent" / "link").symlink_to("/etc/passwd")
    found = problems(evidence, trial)
    assert not found if word is None else word in found[0]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"step": 2}, {"step": 2, "file": "trial/agent/trajectory.json"}),
        ({"step": 2, "line": 9}, {"step": 2, "file": "trial/agent/trajectory.json"}),
        ({"step": 1, "file": "steps/b/agent/trajectory.json"}, {"step": 1, "file": STEP}),
        ({"step": 1, "quote": "only  here"}, {"step": 1, "file": STEP, "quote": "only  here"}),
        ({"file": "/critique/input/trial/./verifier//test-stdout.txt", "line": 1}, {"file": OUTPUT, "line": 1}),
        ({"file": "verifier/test-stdout.txt", "quote": "words"}, {"file": OUTPUT, "line": 2, "quote": "words"}),
        ({"file": OUTPUT, "line": 4, "quote": "three"}, {"file": OUTPUT, "line": 3, "quote": "three"}),
        ({"file": OUTPUT, "line": 1, "quote": "here three"}, {"file": OUTPUT, "line": 1, "quote": "here three"}),
    ],
)
def test_evidence_is_kept_in_one_form(given: dict[str, Any], kept: dict[str, Any], tmp_path: Path) -> None:
    """A step with its trajectory, or a file below trial/ or task/ with the line that holds the quote."""
    trial = make_trial(tmp_path / "trial")
    (trial / "steps/b/agent").mkdir(parents=True)
    (trial / "steps/b/agent/trajectory.json").write_text('{"steps": [{"step_id": 1, "message": "only here"}]}')
    value = {**GOOD, "findings": [{"summary": "s", "evidence": [given]}]}
    found = check_output(json.dumps(value).encode(), schema_of("critique", (), ()), {"trial": trial})
    assert found.value and found.value["findings"][0]["evidence"] == [kept]


def test_a_trial_without_a_trajectory_has_no_steps(tmp_path: Path) -> None:
    trial = make_trial(tmp_path / "trial", steps=0)
    assert "no trajectory" in problems({"step": 1}, trial)[0]
    (trial / "agent" / "trajectory.json").write_text("[" * 100_000)
    assert "does not exist" in problems({"step": 1}, trial)[0]
    (trial / "agent" / "trajectory.json").write_text(
        '{"steps": [{"step_id": "x"}, {"step_id": []}, 3, {"step_id": 4}]}'
    )
    assert "are 4 to 4" in problems({"step": 1}, trial)[0]


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b"\xff", b"[" * 100_000, b'{"rating": "great"}'])
def test_what_is_not_a_review_is_refused(data: bytes) -> None:
    found = check_output(data, schema_of("critique", ("a",), ()), {})
    assert found.value is None and found.problems


def test_every_criterion_needs_an_answer_and_further_keys_stay(tmp_path: Path) -> None:
    schema = schema_of("critique", ("copy", "json"), ())
    check = {"outcome": "pass", "explanation": "x"}
    half = check_output(json.dumps({**GOOD, "checks": {"copy": check}}).encode(), schema, {})
    assert half.problems == ("checks.json: Field required",)
    whole = check_output(json.dumps({**GOOD, "checks": {"copy": check, "json": check}, "mine": 1}).encode(), schema, {})
    assert whole.value and whole.value["mine"] == 1 and whole.value["checks"] == {"copy": check, "json": check}
    chosen = schema_of("analysis", (), ("solved", "gave_up"))
    assert check_output(b'{"summary": "s", "cause": "other"}', chosen, {}).problems
    assert check_output(b'{"summary": "s", "cause": "gave_up"}', chosen, {}).value


def test_rubrics_of_all_forms(tmp_path: Path) -> None:
    assert set(CRITIQUE_RUBRICS) <= set(built_in_rubrics()) and len(load_rubric(*CRITIQUE_RUBRICS).names) > 10
    assert {cause.name for cause in load_rubric("analyze").causes} >= {"solved", "provider_fault"}
    row = {"name": "a", "description": "d", "guidance": "g"}
    (tmp_path / "r.json").write_text(json.dumps({"criteria": [row]}))
    (tmp_path / "r.yaml").write_text("criteria:\n- {name: b}\n")
    (tmp_path / "r.toml").write_text('[[criteria]]\nname = "c"\n')
    assert load_rubric(*(tmp_path / f"r.{kind}" for kind in ("json", "yaml", "toml"))).names == ["a", "b", "c"]
    for text, word in (
        ("criteria: []", "expected criteria"),
        ("[", "cannot be read"),
        ("criteria: [{name: 1 2}]", "name"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(UsageError, match=word):
            load_rubric(tmp_path / "bad.yaml")
    with pytest.raises(UsageError, match="two criteria"):
        load_rubric(tmp_path / "r.json", tmp_path / "r.json")
    with pytest.raises(UsageError, match="--rubric"):
        load_rubric("nothing")
    assert len(copy_files(tmp_path / "mine")) > 10 and not copy_files(tmp_path / "mine")
    assert load_prompt("job") == (tmp_path / "mine" / "prompts" / "job.md").read_text()


def test_values_of_placeholders_are_not_templates() -> None:
    assert fill_in("{a} and {b} {c}", {"a": "{b}", "b": "2"}) == "{b} and 2 {c}"


def test_trials_are_chosen_by_outcome_task_agent_and_name(tmp_path: Path) -> None:
    error = {"exception_type": "AgentTimeoutError", "exception_message": "m", "exception_traceback": "",
             "occurred_at": "2026-01-01T00:00:00Z"}  # fmt: skip
    make_trial(tmp_path / "a", verifier_result={"rewards": {"reward": 1}})
    make_trial(tmp_path / "b", task_name="org/other")
    make_trial(tmp_path / "c", exception_info=error, verifier_result=None)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "note").write_text("x")
    source = open_source(tmp_path)

    def names(**wanted: Any) -> list[str]:
        return [trial.name for trial in TrialFilter(**wanted).apply(source.trials)]

    assert names() == ["a", "b", "c"] and source.root == tmp_path and not source.single
    assert (names(only="passed"), names(only="failed"), names(only="errored")) == (["a"], ["b"], ["c"])
    assert (names(passing=True), names(passing=False)) == (["a"], ["b", "c"])
    assert names(tasks=["oth*"]) == ["b"] and names(agents=["codex"]) == names(models=["GPT"]) == ["a", "b", "c"]
    assert names(models=["openai/gpt"], limit=1) == ["a"] and names(names=["c", "a"]) == ["c", "a"]
    assert names(seed=1) == names(seed=1) and sorted(names(seed=1)) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="unknown trial 'x'"):
        names(names=["x"])
    single = open_source(tmp_path / "b")
    assert single.single and single.root == tmp_path and [trial.name for trial in single.trials] == ["b"]
    (tmp_path / "ws" / ".pier").mkdir(parents=True)
    make_trial(tmp_path / "ws" / ".pier" / "trials" / "2026-01-01_00-00-00")
    assert [trial.name for trial in open_source(tmp_path / "ws").trials] == ["2026-01-01_00-00-00"]
    with pytest.raises(JobError) as refused:
        open_source(tmp_path / "d")
    assert refused.value.code == "not-a-job"


def test_nothing_but_a_task_of_that_name_is_shown_to_a_critic(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    task = tmp_path / "tasks" / "t"
    (task / "environment").mkdir(parents=True)
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("x")
    result = json.loads((make_trial(tmp_path / "jobs" / "j" / "a") / "result.json").read_text())

    def found(path: str, name: str = "t") -> Path | None:
        named = TrialResult.model_validate({**result, "task_name": name, "config": {"task": {"path": path}}})
        return task_directory(named, tmp_path / "jobs" / "j")

    assert found("tasks/t") == found(str(task)) == task
    assert found(str(tmp_path / "secret")) is found(str(task), "other") is found("") is found("/") is None


def test_an_order_travels_in_the_task_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    trial = make_trial(tmp_path / 'it\'s "odd"', steps=0)
    source = open_source(trial)
    plan = ReviewPlan("critique", source.root, "r", "Judge {trial_dir}.", load_rubric("patch"))
    plan.write_trials(source.trials)
    task = load_task(plan.tasks_dir / trial.name, verify=False)
    order = read_order(task)
    assert order.trial == trial.name and order.criteria == tuple(load_rubric("patch").names)
    assert order.places(source.root) == {"trial": trial}
    text = task.steps[0].instruction
    assert "Judge /critique/input/trial." in text and "patch_correct" in text and "no trajectory" in text
    schema = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert set(GOOD) <= set(schema["properties"])
    assert task.config.environment.policy.mode == "none"
    (source.root / ".reviews" / "r").mkdir()
    (source.root / ".reviews" / "r" / "journal.jsonl").write_text("{}\n")
    plan.write_trials(source.trials)
    (trial / "result.json").write_text((trial / "result.json").read_text() + " ")
    with pytest.raises(JobError) as refused:
        plan.write_trials(source.trials)
    assert refused.value.code == "job-differs"
    for name in ("", ".", "..", "a/b", ".hidden"):
        with pytest.raises(UsageError, match="--name"):
            ReviewPlan("critique", source.root, name, "").write_trials(())


def test_a_leak_is_a_problem_of_its_own_task_only() -> None:
    for where in ("/t/task1", "/t/task1/environment/Dockerfile", "/t/task1:3"):
        assert is_within(where, "/t/task1")
    for where in ("/t/task10", "/t/task10/environment", "/t/task1-b:3", "/t"):
        assert not is_within(where, "/t/task1")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    trial = make_trial(tmp_path / "job" / "a")
    (tmp_path / "job" / ".reviews").symlink_to(tmp_path / "outside")
    with pytest.raises(JobError, match="is a link"):
        ReviewPlan("critique", tmp_path / "job", "r", "x").write_trials(open_source(trial).trials)
    assert not list((tmp_path / "outside").iterdir())


def test_hostile_links_in_a_reviewed_trial_are_not_followed(tmp_path: Path) -> None:
    """Neither reading a trial nor writing its analysis leaves the trial's own directory."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "trajectory.json").write_text('{"steps": [{"step_id": 7, "message": "TOPSECRET"}]}')
    (secret / "victim").write_text("mine")
    trial = make_trial(tmp_path / "job" / "a", steps=0)
    (trial / "agent").rmdir()
    (trial / "agent").symlink_to(secret)
    (trial / "analysis.json").symlink_to(secret / "victim")
    (trial / "analysis.md").symlink_to(secret / "victim")
    (trial / "verifier" / "ctrf.json").symlink_to(secret / "trajectory.json")
    assert "no trajectory" in problems({"step": 7}, trial)[0]
    assert "there is no file" in problems({"file": "trial/agent/trajectory.json", "line": 1}, trial)[0]
    assert "there is no file" in problems({"file": "trial/verifier/ctrf.json", "quote": "TOPSECRET"}, trial)[0]
    assert cause_of(trial) == "zero" and read_analysis(trial) is None
    publish_analyses(tmp_path / "job", [{"trial_name": "a", "summary": "s", "checks": {}}])
    assert (secret / "victim").read_text() == "mine"
    assert (found := read_analysis(trial)) and found.summary == "s"
    (tmp_path / "job" / "b").symlink_to(secret)
    with pytest.raises((OSError, TreeError)):
        publish_analyses(tmp_path / "job", [{"trial_name": "b", "summary": "s", "checks": {}}])
    assert sorted(path.name for path in secret.iterdir()) == ["trajectory.json", "victim"]


def cause_of(trial: Path) -> str:
    return find_cause(open_source(trial).trials[0]).key


def test_causes_without_a_model(tmp_path: Path) -> None:
    error = {"exception_type": "ProviderError", "exception_message": "busy\nmore", "exception_traceback": "",
             "occurred_at": "2026-01-01T00:00:00Z", "code": "provider_rate_limit", "blame": "provider"}  # fmt: skip
    report = {"results": {"tests": [{"name": "test_a", "status": "failed"}, {"name": "test_b", "status": "passed"}]}}
    ended = {"metadata": {"ended": "budget: 5 of 5 turns of this session are used", "model_retries": 1}}
    note = {"kind": "no_reward", "detail": "broke it"}
    make_trial(tmp_path / "a", verifier_result={"rewards": {"reward": 1}})
    make_trial(tmp_path / "b", exception_info=error, verifier_result=None)
    ctrf = make_trial(tmp_path / "c")
    (ctrf / "verifier" / "ctrf.json").write_text(json.dumps(report))
    make_trial(tmp_path / "d", agent_result=ended)
    make_trial(tmp_path / "e", integrity={"mode": "shared", "notes": [note]})
    output = make_trial(tmp_path / "f")
    (output / "verifier" / "test-stdout.txt").write_text("FAILED tests/test_x.py::test_y - assert 1 == 2\n")
    make_trial(tmp_path / "g")
    make_trial(tmp_path / "h", verifier_result={"rewards": {"reward": 0.5}})
    make_trial(tmp_path / "i", verifier_result=None)
    make_trial(tmp_path / "k", agent_result={"metadata": {"model_calls": {"answered": 2, "refused": 1}}})
    keys = {name: cause_of(tmp_path / name) for name in "abcdefghik"}
    assert keys == {
        "a": "passed",
        "b": "provider_rate_limit",
        "c": "tests: test_a",
        "d": "budget: turns",
        "e": "broke-grading",
        "f": "tests: tests/test_x.py::test_y",
        "g": "zero",
        "h": "partial",
        "i": "not-graded",
        "k": "zero",
    }
    groups = group_causes(open_source(tmp_path).trials)
    assert (groups[0].key, groups[0].trials) == ("zero", ("g", "k")) and groups[-1].key == "passed"
    assert groups[0].signs == (("model calls: refused", 1),)
    gone = SourceTrial("x", tmp_path / "gone", "t", "a", None, None)
    assert find_cause(gone).key == "no_trial"


def test_readers_take_any_file(tmp_path: Path) -> None:
    """Broken, huge, odd and linked files are values that are missing."""
    run = tmp_path / ".critiques" / "r"
    (run / "a" / "artifacts").mkdir(parents=True)
    (run / "b" / "artifacts").mkdir(parents=True)
    (run / "config.json").write_text("{")
    (run / "result.json").write_text('{"n_items": "many", "started_at": 5}')
    (run / "a" / "critique-metadata.json").write_text('{"agent_result": {"cost_usd": true}, "exception_info": []}')
    checks = {"x": 1, "y": {"outcome": "fail", "explanation": "e"}}
    findings = [{"summary": "s"}, {"summary": "s", "evidence": [{"step": 1}]}]
    odd = {"rating": "great", "tags": "one", "tag": "two", "checks": checks, "findings": findings, "score": 3}
    (run / "a" / "artifacts" / "critique-result.json").write_text(json.dumps(odd))
    (run / "b" / "artifacts" / "critique-result.json").symlink_to("/etc/passwd")
    (run / "c").symlink_to(run / "a")
    (found,) = list_runs(tmp_path)
    assert (found.name, found.n_items, found.started_at, found.agent) == ("r", 0, None, None)
    first, second = found.critiques
    assert (first.status, first.rating, first.tags, list(first.checks)) == ("completed", None, ("two", "one"), ["y"])
    assert [each.evidence[0].place for each in first.findings] == ["step 1"] and first.more == {"score": 3}
    assert (second.status, second.rating, second.cost_usd) == ("running", None, None)
    assert heat_map(found).criteria == ("y",) and heat_map(found).rows[1].outcomes == (None,)
    assert critiques_of(tmp_path, "../r/a") == critiques_of(tmp_path, "..") == []
    assert read_run(tmp_path, "none") is None and [each.trial for each in critiques_of(tmp_path, "a")] == ["a"]
    assert list_runs(tmp_path / "nowhere") == [] and read_analysis(tmp_path) is read_job_analysis(tmp_path) is None
    (tmp_path / "analysis.json").write_text(
        '{"job_summary": "s", "causes": [{"cause": "c", "count": 1, "trials": ["a"]}, 5]}'
    )
    assert (found_job := read_job_analysis(tmp_path)) and found_job.causes[0].trials == ("a",)
    twin = found.model_copy(update={"name": "s"})
    assert compare_runs([found, twin]).shares["rating"] == 1.0


def test_odd_values_of_a_critic_are_kept_or_refused_and_never_raise() -> None:
    schema = schema_of("critique", (), ())
    for text in ('"\\ud800"', "[" * 400 + "]" * 400, '{"a": 1e400}', '"' + "x" * 100_000 + '"'):
        found = check_output(
            f'{{"rating": "good", "feedback": "f", "tags": ["t"], "more": {text}}}'.encode(), schema, {}
        )
        assert (found.value is None) == bool(found.problems)
        if found.value is not None:
            json.dumps(found.value).encode(errors="replace")
