"""`pier run` and `pier job` as a user types them: real processes, real sandboxes."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from pier.cli.main import main
from tests.busybox import import_busybox
from tests.job_tasks import make_task, pier, rewards_of, snapshot, trials_of


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    make_task(tmp_path / "tasks" / "one")
    make_task(tmp_path / "tasks" / "two")
    return tmp_path / "tasks"


@pytest.mark.plain
def test_a_job_from_start_to_finish(tmp_path: Path, tasks: Path) -> None:
    done = pier("run", "-p", "tasks", "-a", "oracle", "-k", "2", "--job-name", "j", cwd=tmp_path)
    job = tmp_path / "jobs" / "j"
    assert rewards_of(job) == [1, 1, 1, 1]
    assert "4/4" in done.stdout and "files: jobs/j" in done.stdout and "next:" in done.stdout
    result = json.loads((job / "result.json").read_text())
    assert result["finished_at"] and result["stats"]["n_completed_trials"] == 4
    assert result["stats"]["evals"]["oracle__tasks"]["pass_at_k"] == {"1": 1.0, "2": 1.0}
    assert len(json.loads((job / "lock.json").read_text())["trials"]) == 4
    assert (job / "job.log").read_text().count("reward 1") == 4

    before = snapshot(job)
    again = pier("run", "-p", "tasks", "-a", "oracle", "-k", "2", "--job-name", "j", cwd=tmp_path)
    after = snapshot(job)
    changed = {name for name in before if before[name] != after[name]}
    assert "4 of 4" in again.stderr
    assert changed <= {"result.json", "job.log", "journal.jsonl", ".owner"}

    pier("run", "-p", "tasks", "-a", "oracle", "-k", "3", "--job-name", "j", cwd=tmp_path)
    assert rewards_of(job) == [1] * 6
    assert {name: after[name] for name in after if "/" in name}.items() <= snapshot(job).items()

    refused = pier("run", "-p", "tasks", "-a", "nop", "--job-name", "j", cwd=tmp_path, code=2)
    assert "not part of this command" in refused.stderr and "--job-name" in refused.stderr


def test_looking_at_jobs(tmp_path: Path, tasks: Path) -> None:
    made = pier("run", "-p", "tasks", "-a", "nop", "--job-name", "j", "--json", cwd=tmp_path)
    assert json.loads(made.stdout)["stats"]["n_completed_trials"] == 2
    (row,) = json.loads(pier("job", "list", "--json", cwd=tmp_path).stdout)
    assert (row["name"], row["state"], row["done"], row["mean"]) == ("j", "done", 2, 0)
    shown = json.loads(pier("job", "show", "jobs/j", "--json", cwd=tmp_path).stdout)
    assert [trial["rewards"] for trial in shown["trials"]] == [{"reward": 0}, {"reward": 0}]
    assert trials_of(tmp_path / "jobs" / "j")[0].name in pier("job", "show", "--trials", "jobs/j", cwd=tmp_path).stdout

    again = pier("job", "retry", "jobs/j", "--only", "failed", "-q", cwd=tmp_path)
    assert again.stdout == again.stderr == ""
    assert len(list((tmp_path / "jobs" / "j" / ".retries").iterdir())) == 2
    assert rewards_of(tmp_path / "jobs" / "j") == [0, 0]


def test_a_job_file_with_two_agents_templates_and_an_env_file(tmp_path: Path, tasks: Path) -> None:
    make_task(tasks / "one", test='test "$WORD" = yes; echo $((! $?)) > /logs/verifier/reward.txt')
    (tmp_path / "job.yaml").write_text(
        "job_name: j\nagents: [{name: oracle}, {name: nop}]\ndatasets: [{path: tasks, task_names: [one]}]\n"
        "verifier: {env: {WORD: '${SECRET_TOKEN_WORD}', A_KEY: canary-literal-value}}\n"
    )
    (tmp_path / ".env").write_text("SECRET_TOKEN_WORD=yes\n")
    missing = pier("run", "-c", "job.yaml", cwd=tmp_path, code=2)
    assert "SECRET_TOKEN_WORD" in missing.stderr
    pier("run", "-c", "job.yaml", "--env-file", ".env", cwd=tmp_path)
    job = tmp_path / "jobs" / "j"
    assert rewards_of(job) == [1, 1]
    result = json.loads((job / "result.json").read_text())
    assert set(result["stats"]["evals"]) == {"oracle__tasks", "nop__tasks"}
    held = [name for name, (_, _, data) in snapshot(job).items() if b"canary-literal-value" in data]
    assert held == []
    (trials_of(job)[0] / "result.json").unlink()
    refused = pier("job", "resume", "jobs/j", "--env-file", ".env", cwd=tmp_path, code=2)
    assert "A_KEY" in refused.stderr


def test_an_unfinished_job_of_the_same_command_is_continued(tmp_path: Path, tasks: Path) -> None:
    pier("run", "-p", "tasks", "-a", "oracle", cwd=tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    (trials_of(job)[0] / "result.json").write_text("")
    lines = (job / "journal.jsonl").read_text().splitlines(keepends=True)
    (job / "journal.jsonl").write_text("".join(line for line in lines if '"e":"done"' not in line))
    pier("run", "-p", "tasks", "-a", "oracle", cwd=tmp_path)
    assert list((tmp_path / "jobs").iterdir()) == [job]
    assert rewards_of(job) == [1, 1]
    pier("run", "-p", "tasks", "-a", "oracle", cwd=tmp_path)
    assert len(list((tmp_path / "jobs").iterdir())) == 2


def test_a_moved_job_is_resumed_elsewhere(tmp_path: Path, tasks: Path) -> None:
    pier("run", "-p", "tasks", "-a", "oracle", "--job-name", "j", cwd=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "jobs" / "j").rename(tmp_path / "elsewhere" / "renamed")
    (trials_of(moved)[0] / "result.json").unlink()
    pier("job", "resume", str(moved), cwd=tmp_path)
    assert rewards_of(moved) == [1, 1]


def test_a_changed_task_is_not_mixed_with_its_old_results(tmp_path: Path, tasks: Path) -> None:
    pier("run", "-p", "tasks", "-a", "oracle", "--job-name", "j", cwd=tmp_path)
    (trials_of(tmp_path / "jobs" / "j")[0] / "result.json").unlink()
    make_task(tasks / "one", solve="echo hi > /tmp/answer; true")
    resumed = pier("job", "resume", "jobs/j", cwd=tmp_path, code=1)
    assert "changed since" in resumed.stderr
    refused = pier("run", "-p", "tasks", "-a", "oracle", "--job-name", "j", cwd=tmp_path, code=2)
    assert "not part of this command" in refused.stderr


@pytest.mark.plain
def test_errors_are_no_zeros_and_can_be_retried(tmp_path: Path, tasks: Path) -> None:
    make_task(tasks / "one", test="true")
    done = pier("run", "-p", "tasks", "-a", "oracle", "-r", "2", "--job-name", "j", cwd=tmp_path, code=1)
    result = json.loads((tmp_path / "jobs" / "j" / "result.json").read_text())
    (stats,) = result["stats"]["evals"].values()
    assert stats["metrics"] == [{"mean": 1.0}] and stats["pier"]["coverage"] == 0.5
    assert list(stats["exception_stats"]) == ["RewardFileNotFoundError"]
    assert result["stats"]["n_retries"] == 0
    assert result["pier"] == {"faults_by_blame": {"task": 1}}
    assert "RewardFileNotFoundError" in done.stdout and "pier trial show jobs/j/" in done.stdout
    retried = pier("run", "-p", "tasks", "-a", "oracle", "-r", "1", "--retry-include", "RewardFileNotFoundError",
                   "--job-name", "k", cwd=tmp_path, code=1)  # fmt: skip
    assert "retrying in" in retried.stderr
    kept = list((tmp_path / "jobs" / "k" / ".retries").iterdir())
    assert len(kept) == 1 and (kept[0] / "result.json").is_file()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", "nowhere"], "nowhere"),
        ([], "no task"),
        (["-p", "tasks", "-a", "orakel"], "oracle"),
        (["-p", "tasks", "-a", "codex"], "-m MODEL"),
        (["-p", "tasks", "--ak", "nothing=1"], "nothing"),
        (["-p", "tasks", "-e", "lokal"], "local"),
        (["-p", "tasks", "--user-agent", "x"], "simulated users"),
        (["-p", "tasks", "--launch"], "hosted service"),
        (["-p", "tasks", "-k", "0"], "--n-attempts"),
        (["-p", "tasks", "--ak", "wrong"], "NAME=VALUE"),
        (["-p", "tasks", "--cpus", "guarantee"], "cpu_enforcement_policy"),
        (["-c", "gone.yaml"], "gone.yaml"),
        (["-p", "tasks", "-i", "zzz"], "zzz"),
        (["-p", "tasks", "-a", "codex", "-m", "openai/gpt-5"], "export OPENAI_API_KEY"),
        (["-p", "tasks", "-a", "codex", "-m", "nobody/gpt-5"], "nobody"),
        (["-p", "tasks", "-a", "codex", "-m", "x"], "'x'"),
        (["-p", "tasks", "--image", "nosuch:latest!"], "'latest!' is not a tag"),
        (["-p", "tasks", "--override-gpus", "1"], "no GPUs"),
        (["-p", "tasks", "-a", "command"], "needs a command or a script"),
        (["-p", "tasks", "-a", "command", "--ak", "command=5"], "expected a string or a list"),
        (["-p", "tasks", "-a", "command", "--ak", "script=gone.sh"], "gone.sh"),
        (["-p", "tasks", "-a", "codex", "-m", "openai/gpt-5", "--ak", "config_toml=["], "not TOML"),
    ],
)
def test_wrong_usage_ends_with_2_and_words(
    tmp_path: Path,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for more in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as stopped:
            main(["run", *args, *more])
        said = capsys.readouterr()
        assert stopped.value.code == 2 and words in said.err and "Traceback" not in said.err
    assert not (tmp_path / "jobs").exists()


def test_dry_run_and_print_config_run_nothing(tmp_path: Path, tasks: Path) -> None:
    (tasks / "dataset.toml").write_text('[dataset]\nname = "org/old"\n[[tasks]]\nname = "gone"\ndigest = "sha256:0"\n')
    planned = pier("run", "-p", "tasks", "-k", "2", "--dry-run", cwd=tmp_path)
    assert "4 trials" in planned.stdout and "dataset.toml: out of date" in planned.stderr
    config = json.loads(pier("run", "-p", "tasks", "--ae", "A_KEY=hidden-value", "--print-config", cwd=tmp_path).stdout)
    assert config["agents"][0]["env"] == {"A_KEY": "****"}
    assert not (tmp_path / "jobs").exists()


@pytest.mark.plain
def test_grading_again_what_agents_left_behind(tmp_path: Path, is_root: bool) -> None:
    solve = "mkdir -p /tmp/x/y && echo hi > /tmp/x/y/z && echo hi > /tmp/answer"
    check = 'test "$(cat /tmp/x/y/z)" = hi'
    if is_root:
        gone = next(path for path in ("/etc/issue", "/etc/debian_version", "/etc/profile") if Path(path).is_file())
        solve, check = f"{solve} && rm {gone}", f"{check} -a ! -e {gone}"
    task = make_task(tmp_path / "tasks" / "one", solve=solve)
    pier("run", "-p", "tasks", "-k", "2", "--keep-state", "--job-name", "j", cwd=tmp_path)
    make_task(task, test=f"{check} && echo 0.5 > /logs/verifier/reward.txt")
    before = snapshot(tmp_path / "jobs" / "j")
    pier("job", "regrade", "jobs/j", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "j-regrade") == [0.5, 0.5]
    assert snapshot(tmp_path / "jobs" / "j") == before
    names = [trial.name for trial in trials_of(tmp_path / "jobs" / "j")]
    assert [trial.name for trial in trials_of(tmp_path / "jobs" / "j-regrade")] == names
    pier("run", "-p", "tasks", "-a", "nop", "--job-name", "k", cwd=tmp_path, code=1)
    refused = pier("job", "regrade", "jobs/k", cwd=tmp_path, code=2)
    assert "--keep-state" in refused.stderr


@pytest.mark.plain
def test_states_of_images_without_gnu_tar_are_graded_again(tmp_path: Path) -> None:
    import_busybox(tmp_path)
    solve = "mkdir -pm 751 /tmp/x; echo hi > /tmp/x/y; chmod 751 /tmp/x/y; ln -s y /tmp/x/z; rm /bin/zcat"
    check = 'test "$(cat /tmp/x/z)" = hi -a "$(stat -c %a /tmp/x /tmp/x/y | uniq)" = 751 -a ! -e /bin/zcat'
    task = make_task(tmp_path / "tasks" / "one", solve=solve, test="echo 0 > /logs/verifier/reward.txt")
    for path in (task / "solution/solve.sh", task / "tests/test.sh"):
        path.write_text(path.read_text().replace("/bin/bash", "/bin/sh"))
    pier("run", "-p", "tasks", "--keep-state", "--job-name", "j", cwd=tmp_path, image="test/busybox")
    (task / "tests/test.sh").write_text(f"#!/bin/sh\n{check} && echo 1 > /logs/verifier/reward.txt\n")
    pier("job", "regrade", "jobs/j", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "j-regrade") == [1.0]


@pytest.mark.plain
def test_equal_environments_are_built_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        task = make_task(tmp_path / "tasks" / name, test="cat /built && echo 1 > /logs/verifier/reward.txt")
        (task / "task.toml").write_text('[environment]\nnetwork_mode = "no-network"\n')
        (task / "environment" / "Dockerfile").write_text(
            "FROM test/busybox\nRUN cat /proc/sys/kernel/random/uuid > /built\n"
        )
    import_busybox(tmp_path)
    pier("run", "-p", "tasks", "-k", "3", "-n", "6", "--job-name", "j", cwd=tmp_path, image=None)
    stamps = {(t / "verifier" / "test-stdout.txt").read_text() for t in trials_of(tmp_path / "jobs" / "j")}
    assert len(trials_of(tmp_path / "jobs" / "j")) == 6 and len(stamps) == 1


def test_tasks_get_no_variable_without_consent(tmp_path: Path) -> None:
    task = make_task(tmp_path / "tasks" / "one", test='test "$A" = mine; echo $((! $?)) > /logs/verifier/reward.txt')
    with (task / "task.toml").open("a") as stream:
        stream.write('[verifier.env]\nA = "${MY_WORD}"\n')
    command = ["run", "-p", "tasks", "--job-name", "j"]
    assert "MY_WORD" in pier(*command, "-y", cwd=tmp_path, code=2).stderr
    refused = pier(*command, cwd=tmp_path, code=2, MY_WORD="mine")
    assert "MY_WORD" in refused.stderr and "-y" in refused.stderr and not (tmp_path / "jobs").exists()
    pier(*command, "-y", cwd=tmp_path, MY_WORD="mine")
    assert rewards_of(tmp_path / "jobs" / "j") == [1]


CALL = """
import json, os, urllib.request
body = {"model": os.environ["PIER_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for _ in range(2):
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
open("/tmp/answer", "w").write(text)
"""


@pytest.mark.plain
def test_an_agent_with_a_model_is_counted_and_held_to_its_budget(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "one")
    (tmp_path / "agent.py").write_text(CALL)
    (tmp_path / "model.yaml").write_text("turns:\n  - text: hi\n  - text: hi again\n")
    agent = {"command": "python3 - < /agent/agent.py"}
    mounts = [{"type": "bind", "source": str(tmp_path), "target": "/agent", "read_only": True}]
    command = ["run", "-p", "tasks", "-a", "command", "--ak", f"command={agent['command']}", "-m", "script:model.yaml",
               "--mounts", json.dumps(mounts)]  # fmt: skip
    pier(*command, "--job-name", "j", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "j") == [1]
    stats = json.loads((tmp_path / "jobs" / "j" / "result.json").read_text())["stats"]
    assert stats["n_input_tokens"] > 0 and stats["n_output_tokens"] > 0
    pier(*command, "--job-name", "k", "--max-turns", "1", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "k") == [0]


class Provider(BaseHTTPRequestHandler):
    """Answers every call with `hi`, and keeps where it went and with which key."""

    calls: ClassVar[list[tuple[str, str | None]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.calls.append((self.path, self.headers["Authorization"]))
        message = {"role": "assistant", "content": "hi"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage,
                  "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}  # fmt: skip
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.plain
def test_a_model_at_another_address_with_a_key_of_another_name(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "one")
    (tmp_path / "agent.py").write_text(CALL)
    mounts = [{"type": "bind", "source": str(tmp_path), "target": "/agent", "read_only": True}]
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        command = ["run", "tasks", "-a", "command", "--ak", "command=python3 - < /agent/agent.py", "-m", "lab/one",
                   "--base-url", f"http://127.0.0.1:{server.server_port}/v1", "--api-key-name", "LAB_KEY",
                   "--api-format", "openai_chat_completions", "--mounts", json.dumps(mounts)]  # fmt: skip
        assert "LAB_KEY" in pier(*command, "--job-name", "j", cwd=tmp_path, code=2).stderr
        pier(*command, "--job-name", "k", "--skip-credential-checks", cwd=tmp_path, code=1)
        assert not Provider.calls
        pier(*command, "--job-name", "l", cwd=tmp_path, LAB_KEY="secret-of-the-lab")
        server.shutdown()
    assert rewards_of(tmp_path / "jobs" / "l") == [1]
    assert Provider.calls == [("/v1/chat/completions", "Bearer secret-of-the-lab")] * 2
    config = json.loads((trials_of(tmp_path / "jobs" / "l")[0] / "config.json").read_text())
    assert config["agent"]["model_api_key_name"] == "LAB_KEY"


def test_ignored_files_of_tests_stay_out_of_the_sandbox(tmp_path: Path) -> None:
    check = "test -e /tests/data && test ! -e /tests/notes.md && test ! -e /tests/.harborignore"
    task = make_task(tmp_path / "one", test=f"{check}; echo $((! $?)) > /logs/verifier/reward.txt")
    (task / "tests" / "data").write_text("")
    (task / "tests" / "notes.md").write_text("")
    (task / "tests" / ".harborignore").write_text("*.md\n")
    pier("run", "one", "--job-name", "j", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "j") == [1]


def test_the_first_steps_work(tmp_path: Path) -> None:
    pier("task", "init", "hello", cwd=tmp_path)
    pier("run", "hello", "--job-name", "j", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "j") == [1]


def test_without_verification_a_job_is_done_without_verdicts(tmp_path: Path, tasks: Path) -> None:
    pier("run", "-p", "tasks", "--disable-verification", "--job-name", "j", cwd=tmp_path)
    result = json.loads((trials_of(tmp_path / "jobs" / "j")[0] / "result.json").read_text())
    assert result["verifier_result"] is None


def test_hints_of_failed_trials_are_printed(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_task(tmp_path / "tasks" / name)
    for name in ("one", "two"):
        (tmp_path / "tasks" / name / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "tasks" / "three" / "environment" / "Dockerfile").write_text("FROM host\n")
    done = pier("run", "tasks", "--job-name", "j", cwd=tmp_path, image=None, code=1)
    (fault,) = [row for row in done.stdout.splitlines() if "× TaskError" in row]
    assert fault.startswith("1 × TaskError (blame: task), e.g. three__") and "FROM host: " in fault
    assert "      hint: run it with --image host" in done.stdout.splitlines()
    quiet = pier("run", "tasks", "--job-name", "q", "-q", cwd=tmp_path, image=None, code=1)
    assert quiet.stdout == "" and fault.partition(" three__")[0] in quiet.stderr
    assert "      hint: run it with --image host" in quiet.stderr.splitlines()
    shown = pier("job", "show", "jobs/q", cwd=tmp_path).stdout
    assert "      hint: run it with --image host" in shown.splitlines()


def test_quiet_is_quiet_if_every_trial_has_a_verdict(tmp_path: Path, tasks: Path) -> None:
    done = pier("run", "tasks", "-a", "command", "--ak", "command=exit 3", "-q", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


REFUSED = {
    "docker_image": ("task.toml", 'docker_image = "host"\n', "run it with --image host"),
    "a Dockerfile": ("environment/Dockerfile", "FROM scratch AS a\nFROM host\n", "run it with --image host"),
    "an argument": ("environment/Dockerfile", "ARG A=ho\nFROM ${A}st\n", "run it with --image host"),
    "a verifier": (
        "task.toml",
        '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ndocker_image = "host"\n',
        "run it with --image host",
    ),
    "no image": ("task.toml", "", "run it with --image host"),
    "Windows": ("task.toml", 'os = "windows"\n', ""),
    "services": (
        "environment/docker-compose.yaml",
        "services:\n  main: {image: scratch}\n  db: {image: scratch}\n",
        "run it with --env docker",
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_job_whose_trials_are_all_refused_is_not_made(way: str, tmp_path: Path) -> None:
    name, text, hint = REFUSED[way]
    task = make_task(tmp_path / "tasks" / "one")
    if way == "a verifier":
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    with (task / name).open("a") as stream:
        stream.write(text)
    for flags in ((), ("-q",), ("--json",), ("--dry-run",)):
        refused = pier("run", "tasks", *flags, cwd=tmp_path, image=None, code=2)
        assert refused.stdout == "" and refused.stderr.startswith("pier: ")
        assert not hint or refused.stderr.splitlines()[-1] == f"hint: {hint}"
    assert not (tmp_path / "jobs").exists()


def test_the_error_for_many_refused_tasks_names_the_first(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_task(tmp_path / "tasks" / name)
    refused = pier("run", "tasks", cwd=tmp_path, image=None, code=2)
    assert refused.stderr.startswith("pier: none of the 3 tasks can run, the first because ")
    assert "no image" in refused.stderr and not (tmp_path / "jobs").exists()
