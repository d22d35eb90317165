"""Results are never taken for those of other work: what counts as the same trial, and what is reported together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pier.errors import JobError
from pier.figures import Cost, main_reward
from pier.job.config import JobConfig
from pier.job.directory import open_for, result_of
from pier.job.ledger import JOURNAL, Fault, Ledger, Outcome
from pier.job.plan import Plan, plan_job
from pier.job.progress import Progress
from pier.job.view import JobView, agent_labels, list_jobs
from tests.job_tasks import pier, rewards_of
from tests.redteam import route
from tests.trial_runs import TOML, write_task

pytestmark = pytest.mark.plain

KEY = b"a key of one job"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_task(tmp_path / "tasks" / "one")
    return tmp_path / "tasks"


def configure(tasks: Path, *agents: dict[str, Any], **more: Any) -> JobConfig:
    config = {"agents": list(agents) or [{"name": "oracle"}], "datasets": [{"path": str(tasks)}], "image": "host"}
    return JobConfig.model_validate(config | more)


def plan(*args: Any, env: dict[str, str] | None = None, key: bytes = KEY, **more: Any) -> Plan:
    return plan_job(configure(*args, **more), env or {}, yes=True)[0](key)


def ids(*args: Any, **more: Any) -> tuple[str, ...]:
    return tuple(trial.id for trial in plan(*args, **more).trials)


def option(name: str, value: Any) -> dict[str, Any]:
    return {"name": "command", "kwargs": {name: value}}


@route("identity", "an option is changed to 0, false, null or an empty list", "other work, no result is reused")
def test_every_value_counts(tasks: Path) -> None:
    values: list[Any] = [0, False, None, [], {}, "", 1, "0", [0], {"a": 0}, {"a": False}, {"a": {}}]
    found = {ids(tasks, option("temperature", value)) for value in values}
    assert len(found | {ids(tasks, {"name": "command"})}) == len(values) + 1
    zero = configure(tasks, environment={"override_gpus": 0})
    assert plan_job(zero, {})[0](KEY).trials != plan(tasks).trials


@route("identity", "an option is NaN or infinite, which JSON writes as null", "refused")
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '{"a": [0, NaN]}'])
def test_options_that_json_cannot_write_are_refused(tasks: Path, tmp_path: Path, value: str) -> None:
    for flag in ("--ak", "--ek", "--sampling"):
        words = ("run", "-p", str(tasks), "-a", "command", "--image", "host", flag, f"temperature={value}")
        assert "expected finite numbers" in pier(*words, cwd=tmp_path, code=2).stderr
    with pytest.raises(ValueError, match="finite"):
        configure(tasks, option("temperature", json.loads(value)))


@route("identity", "a file or directory that an option names is changed", "other work, no result is reused")
def test_the_content_of_files_counts_and_their_place_does_not(tasks: Path, tmp_path: Path) -> None:
    script, moved, folder = tmp_path / "agent.sh", tmp_path / "moved.sh", tmp_path / "folder"
    folder.mkdir()
    for path in (script, moved, folder / "a"):
        path.write_text("one")
    before = [ids(tasks, option("script", str(script))), ids(tasks, option("mount", str(folder)))]
    assert before[0] == ids(tasks, option("script", str(moved)))
    script.write_text("two")
    (folder / "a").write_text("two")
    after = [ids(tasks, option("script", str(script))), ids(tasks, option("mount", str(folder)))]
    assert before[0] != after[0] and before[1] != after[1]


@route("identity", "a file that an option names by a variable, or a recording to replay, is changed", "other work")
def test_the_content_of_files_counts_however_they_are_named(tasks: Path, tmp_path: Path) -> None:
    script, kept = tmp_path / "agent.sh", tmp_path / "kept"
    kept.mkdir()
    agents = [option("script", "${SCRIPT}"), {"name": "command", "model_name": f"replay:{kept}"}]
    agents.append({"name": "command", "model_name": "${MODEL}"})
    found: list[tuple[tuple[str, ...], ...]] = []
    for text in ("one", "two"):
        for path in (script, kept / "recording.jsonl"):
            path.write_text(text)
        env = {"SCRIPT": str(script), "MODEL": f"script:{script}"}
        found.append(tuple(ids(tasks, agent, env=env) for agent in agents))
    assert all(before != after for before, after in zip(*found, strict=True))


@route("identity", "a file in a list or table of options, or a file that is mounted, is changed", "other work")
def test_the_content_of_files_counts_wherever_they_are_named(tasks: Path, tmp_path: Path) -> None:
    given = tmp_path / "rules.md"
    given.write_text("one")
    mounts = {"mounts": [{"type": "bind", "source": str(given), "target": "/rules.md"}]}
    agents = [option("files", [str(given)]), option("settings", {"rules": [{"path": str(given)}]})]

    def found() -> list[tuple[str, ...]]:
        return [*(ids(tasks, agent) for agent in agents), ids(tasks, environment=mounts)]

    before, words = found(), ids(tasks, option("command", ["cat", str(given)]))
    given.write_text("two")
    assert words == ids(tasks, option("command", ["cat", str(given)])), "a path inside the sandbox"
    assert all(was != now for was, now in zip(before, found(), strict=True))


def test_a_text_that_looks_like_a_home_directory_is_a_text(tasks: Path) -> None:
    assert ids(tasks, option("note", "~about 5 minutes")) != ids(tasks, option("note", "~about 6 minutes"))


@route("identity", "the code of an agent of the user's is changed", "other work, no result is reused")
def test_the_code_of_an_agent_counts(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "agent_of_mine.py"
    code.write_text("class Mine: ...\n")
    before = ids(tasks, {"import_path": "agent_of_mine:Mine"})
    code.write_text("class Mine: x = 1\n")
    assert ids(tasks, {"import_path": "agent_of_mine:Mine"}) != before


@route("identity", "a variable with a secret name is changed", "other work, and no file tells the value")
def test_secrets_count_as_keyed_hashes(tasks: Path) -> None:
    def given(value: str, **more: Any) -> tuple[str, ...]:
        return ids(tasks, {"name": "oracle", "env": {"API_KEY": value}}, **more)

    assert given("postgres") != given("sk-canary-31f0a9") == given("sk-canary-31f0a9") != given("sk-canary-31f0a8")
    assert given("sk-canary-31f0a9") != given("sk-canary-31f0a9", key=b"another job's key")
    assert given("${A}", env={"A": "sk-canary-31f0a9"}) == given("sk-canary-31f0a9")
    assert given("${A}", env={"A": "sk-canary-31f0a8"}) == given("sk-canary-31f0a8")
    assert ids(tasks, key=b"one") == ids(tasks, key=b"two"), "without secrets, the same in every job"


def test_variables_that_a_task_asks_for_count(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML + '[environment.env]\nMODE = "${MODE:-x}"\n')
    write_task(tmp_path / "tasks" / "two")
    fast, slow = (ids(tmp_path / "tasks", env={"MODE": mode}) for mode in ("fast", "slow"))
    assert fast[0] != slow[0] and fast[1] == slow[1]


@route("identity", "the same command is given with another secret", "its finished trials are not reused")
def test_a_job_knows_its_secrets_again(tasks: Path, tmp_path: Path) -> None:
    def asked(value: str) -> JobConfig:
        agent = {"name": "oracle", "env": {"API_KEY": value}}
        return configure(tasks, agent, job_name="j", jobs_dir=str(tmp_path / "jobs"))

    with open_for(asked("sk-canary-31f0a9"), {}) as job:
        (trial,) = job.ledger.plan.trials
        job.ledger.begin(trial.id)
        job.ledger.end(trial.id, Outcome(rewards={"reward": 1.0}, size=1))
        (job.directory / trial.name).mkdir()
        (job.directory / trial.name / "result.json").write_text("x")
    with open_for(asked("sk-canary-31f0a9"), {}) as again:
        assert again.continued and trial.id in again.ledger.plan.by_id
    with pytest.raises(JobError, match="not part of this command"), open_for(asked("sk-canary-31f0a8"), {}):
        pass
    kept = [path for path in (tmp_path / "jobs" / "j").iterdir() if path.is_file()]
    assert not any(b"31f0a9" in path.read_bytes() for path in kept)
    assert os.stat(tmp_path / "jobs" / "j" / ".identity").st_mode & 0o777 == 0o600


@route("identity", "a job of an earlier version meets its own command", "refused, and `pier job resume` continues it")
def test_an_older_job_is_refused_and_can_be_resumed(tasks: Path, tmp_path: Path) -> None:
    words = ["run", "-p", str(tasks), "--image", "host", "--job-name", "j", "-q"]
    pier(*words, cwd=tmp_path)
    journal = tmp_path / "jobs" / "j" / JOURNAL
    (trial,) = Ledger.read(journal.parent).plan.trials
    old = journal.read_text().replace('"v":2', '"v":1').replace(trial.id, "00112233445566ff")
    journal.write_text(old)
    (journal.parent / ".identity").unlink()
    refused = pier(*words, cwd=tmp_path, code=2)
    assert "an earlier version of pier" in refused.stderr and "pier job resume" in refused.stderr
    (journal.parent / trial.name / "result.json").unlink()
    pier("job", "resume", "jobs/j", "-q", cwd=tmp_path)
    assert rewards_of(journal.parent) == [1]


@route("identity", "two directories of tasks have the same name", "reported apart, by more of their paths")
def test_directories_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("a", "b"):
        write_task(tmp_path / place / "tasks" / "one")
    both = [{"path": str(tmp_path / place / "tasks")} for place in ("a", "b")]
    made = plan(tmp_path, datasets=both)
    assert [task.source for task in made.tasks] == ["a/tasks", "b/tasks"]
    turned = plan(tmp_path, datasets=both[::-1])
    assert [trial.id for trial in made.trials] == [trial.id for trial in turned.trials][::-1]
    assert [task.source for task in plan(tmp_path, datasets=both[:1] * 2).tasks] == ["tasks", "tasks"]


@route("identity", "two providers serve a model of the same name", "both are in `evals`, with their providers")
@route("identity", "two agents differ in their options only", "both are in `evals`, with these options")
def test_no_two_agents_share_a_place_in_evals(tasks: Path, tmp_path: Path) -> None:
    agents = [{"name": "command", "model_name": model} for model in ("openai/x", "azure/x", "openai/y")]
    assert agent_labels(agents) == [("command", "openai/x"), ("command", "azure/x"), ("command", "y")]
    options = [option("temperature", value) | {"model_name": "openai/x"} for value in (0, 0.5)]
    assert agent_labels(options) == [("command(temperature=0)", "x"), ("command(temperature=0.5)", "x")]
    hidden = [{"name": "command", "env": {"API_KEY": "****"}}] * 2
    assert agent_labels(hidden) == [("command #1", None), ("command #2", None)]
    ledger = Ledger.create(tmp_path)
    ledger.adopt_plan(plan(tasks, *agents, *options))
    ledger.close()
    found = result_of(JobView.of(ledger))["stats"]["evals"]
    assert len(found) == 5 and "command__y__tasks" in found


@route("identity", "trials have several rewards", "every screen shows the same mean")
def test_there_is_one_mean_reward(tasks: Path, tmp_path: Path) -> None:
    rewards: list[dict[str, float] | None] = [{"reward": 1.0, "style": 0.0}, {"reward": 0.0, "style": 1.0}, None]
    rewards += [{"reward": 1.0, "style": 1.0}, {}]
    ledger = Ledger.create(tmp_path / "jobs" / "j") if (tmp_path / "jobs" / "j").mkdir(parents=True) is None else None
    assert ledger is not None
    ledger.adopt_plan(plan(tasks, n_attempts=5))
    outcomes = [Outcome(rewards=each) for each in rewards]
    for trial, outcome in zip(ledger.plan.trials, outcomes, strict=True):
        ledger.begin(trial.id)
        ledger.end(trial.id, outcome)
    ledger.close()
    (group,) = result_of(JobView.of(ledger))["stats"]["evals"].values()
    (row,) = list_jobs(tmp_path / "jobs")
    assert (
        group["pier"]["mean"]["reward"]
        == row.totals.mean.value
        == Progress(5, outcomes).totals.mean.value
        == pytest.approx(2 / 3)
    )
    assert [main_reward(each) for each in ({"a": 0.5}, {"a": 1, "b": 0}, {"reward": 0.0, "b": 1})] == [0.5, None, 0.0]


@route("identity", "the cost of some trials is unknown", "the sum is null, and the known part is shown as `at least`")
def test_a_cost_that_is_known_in_part_is_not_a_sum(tasks: Path, tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path)
    ledger.adopt_plan(plan(tasks, n_attempts=3))
    first, second, third = ledger.plan.trials
    ledger.end(first.id, Outcome(rewards={"reward": 1.0}, cost=0.5))
    ledger.end(second.id, Outcome(fault=Fault("E", "e", "infra", True, "m"), cost=0.0))
    assert result_of(JobView.of(ledger))["stats"]["cost_usd"] == 0.5
    ledger.end(third.id, Outcome(rewards={"reward": 1.0}))
    ledger.close()
    result = result_of(JobView.of(ledger))
    assert result["stats"]["cost_usd"] is None
    assert result["pier"]["cost"] == {"known_usd": 0.5, "trials_unknown": 1}
    assert [str(Cost(0.5, 1)), str(Cost(0.5)), str(Cost(None, 2)), str(Cost())] == [
        *("at least $0.5000 (1 unknown)", "$0.5000", "unknown", "$0.0000"),
    ]


@route("identity", "a plain file or an unreadable job lies in `jobs/`", "passed over")
def test_what_else_lies_beside_jobs_is_passed_over(tasks: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    (jobs / "empty").mkdir(parents=True)
    (jobs / "zzz").write_text("a note")
    (jobs / "torn").mkdir()
    (jobs / "torn" / JOURNAL).write_text('{"e":"job"')
    done = pier("run", "-p", str(tasks), "--image", "host", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["stats"]["n_completed_trials"] == 1
