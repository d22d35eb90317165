"""A budget for a whole job, as a user sees it: it cuts off, leaves trials owed, is remembered and can be raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.record import reader
from tests.job_tasks import make_task, pier, rewards_of, start_pier, trials_of, wait_for

CALL = """
import json, os, urllib.error, urllib.request
body = {"model": os.environ["PIER_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for _ in range(2):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        print(error.read().decode())
        raise SystemExit(0)
open("/tmp/answer", "w").write(text)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A job of three trials, each of which calls its model twice."""
    make_task(tmp_path / "tasks" / "one")
    (tmp_path / "agent.py").write_text(CALL)
    (tmp_path / "model.yaml").write_text("turns:\n  - text: hi\n  - text: hi again\n")
    mounts = [{"type": "bind", "source": str(tmp_path), "target": "/agent", "read_only": True}]
    return ["run", "-p", "tasks", "-a", "command", "--ak", "command=python3 - < /agent/agent.py", "-k", "3",
            "-m", "script:model.yaml", "--mounts", json.dumps(mounts), "--job-name", "j"]  # fmt: skip


def generations(job: Path) -> int:
    """How often a model really answered, in tries that count and in those that do not."""
    calls = [call for path in job.rglob("recording.jsonl") for call in reader.read(path).generations()]
    return sum(call.outcome == "ok" for call in calls)


def test_turns_of_a_job_are_shared_and_counted_over_its_runs(tmp_path: Path, command: list[str]) -> None:
    job = tmp_path / "jobs" / "j"
    stopped = pier(*command, "-n", "1", "--job-max-turns", "3", cwd=tmp_path, code=1)
    assert "stopped: 3 of 3 turns of this job are used" in stopped.stdout
    assert "1 of 3 trials done" in stopped.stdout and "next:  pier job resume" in stopped.stdout
    assert generations(job) == 3
    first, cut_off = (json.loads((trial / "result.json").read_text()) for trial in trials_of(job))
    ends = [first, cut_off] if first["exception_info"] is None else [cut_off, first]
    assert ends[0]["verifier_result"]["rewards"] == {"reward": 1}
    assert ends[1]["verifier_result"] is None and ends[1]["exception_info"]["code"] == "job-budget"
    stats = json.loads((job / "result.json").read_text())
    assert stats["finished_at"] is None and stats["stats"]["n_errored_trials"] == 0

    again = pier("job", "resume", str(job), cwd=tmp_path, code=1)
    assert "3 of 3 turns" in again.stdout and generations(job) == 3

    pier("job", "resume", str(job), "--job-max-turns", "7", cwd=tmp_path)
    assert rewards_of(job) == [1, 1, 1]
    assert generations(job) == 7
    assert json.loads((job / "result.json").read_text())["finished_at"]


def test_no_turn_too_many_with_trials_side_by_side(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "job.yaml").write_text("budget: {turns: 5}\n")
    pier(*command, "-n", "3", "-c", "job.yaml", cwd=tmp_path, code=1)
    job = tmp_path / "jobs" / "j"
    assert generations(job) == 5
    pier(*command, "--job-max-turns", "100", cwd=tmp_path)
    assert rewards_of(job) == [1, 1, 1]


def test_a_runner_that_is_killed_forgets_no_turn(tmp_path: Path, command: list[str]) -> None:
    """Killed right after its first generation, long before anything else of the job is written down. One more that had
    begun then is spent too, though its answer is in no recording."""
    job = tmp_path / "jobs" / "j"
    with start_pier(*command, "-n", "1", "--job-max-turns", "4", cwd=tmp_path) as child:
        wait_for(lambda: job.exists() and generations(job), child)
        child.kill()
        child.communicate()
    stopped = pier("job", "resume", str(job), cwd=tmp_path, code=1)
    assert "4 of 4 turns of this job are used" in stopped.stdout
    assert generations(job) in (3, 4)


def test_tokens_of_a_job_are_limited(tmp_path: Path, command: list[str]) -> None:
    stopped = pier(*command, "-n", "1", "--job-max-tokens", "1", cwd=tmp_path, code=1)
    assert "of 1 tokens of this job are used" in stopped.stdout
    assert generations(tmp_path / "jobs" / "j") == 1


def test_a_limit_in_money_needs_a_price(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "providers.toml").write_text('[mine]\nurl = "http://127.0.0.1:9"\n')
    at = command.index("script:model.yaml")
    refused = pier(
        *command[:at], "mine/unheard-of", *command[at + 1 :], "--job-max-cost", "1",
        cwd=tmp_path, code=None, PIER_HOME=str(tmp_path),
    )  # fmt: skip
    assert refused.returncode != 0 and "unknown price" in refused.stderr
