"""An agent that breaks its own grading gets its zero; a task, a flake or an outage never becomes one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pier.errors import SandboxError, VerifierError
from pier.network.policy import Decision
from pier.trial.result import TrialResult
from pier.trial.spec import AgentChoice
from pier.trial.verify import NetworkUse, is_machine_fault, network_faults
from tests.job_tasks import PIER, make_task, pier
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import TOML, Bench, kinds, write_task
from tests.world import in_world

SEPARATE = 'artifacts = ["/app/answer"]\n' + TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
ZERO = "reward 0, with a note"
GIVE_ZERO = "echo 0 > /logs/verifier/reward.txt"
ASSUMES = "#!/bin/bash\nset -e\nread -r value < /app/data\necho $((value == 7)) > /logs/verifier/reward.txt\n"
"""Tests that give no reward if a file of the task is missing."""


async def attack(bench: Bench, root: Path, command: str, *, test: str, toml: str = TOML, **more: str) -> TrialResult:
    task = write_task(root / "task", test=test, toml=toml, **{"environment__data": "1\n", **more})
    return await bench.run(task, AgentChoice("command", options={"command": command}))


def assert_broken(result: TrialResult, directory: Path) -> None:
    """The agent broke its own grading, and the result shows how that is known."""
    assert result.rewards == {"reward": 0} and result.exception_info is None
    assert "no_reward" in kinds(result) and result.integrity is not None
    runs = result.integrity.runs
    assert [(run.state, run.rewards is None) for run in runs] == [("agent", True), ("pristine", False), ("agent", True)]
    assert all((directory / run.logs).is_dir() for run in runs)
    assert json.loads((directory / "result.json").read_text())["integrity"]["runs"][1]["rewards"] == {"reward": 0}


@everywhere
@route("verdicts", "The agent removes a file that the tests need", ZERO)
async def test_a_file_of_the_task_is_removed(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        assert_broken(await attack(bench, tmp_path, "rm /app/data", test=ASSUMES), bench.last)


@everywhere
@route("verdicts", "The agent removes a program that the tests run, such as python", ZERO)
async def test_a_program_is_removed(place: str, tmp_path: Path) -> None:
    if place == "local" and os.geteuid():
        pytest.skip("a plain user's agent cannot remove the programs of the host image")
    test = "#!/bin/bash\nset -e\nawk 'BEGIN { print 0 }' > /tmp/value\nmv /tmp/value /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "rm -f /bin/awk /usr/bin/awk", test=test)
        assert_broken(result, bench.last)


@everywhere
@route("verdicts", "The agent removes the libraries of every program", ZERO)
async def test_the_whole_system_is_broken(place: str, tmp_path: Path) -> None:
    if place == "local" and os.geteuid():
        pytest.skip("a plain user's agent cannot remove the libraries of the host image")
    command = "rm -rf /lib/* /lib64/* /usr/lib/x86_64-linux-gnu /usr/lib64/* 2>/dev/null"
    async with open_place(place, tmp_path / "trials") as bench:
        assert_broken(await attack(bench, tmp_path, command, test=ASSUMES), bench.last)


@everywhere
@route("verdicts", "The agent plants code that keeps the tests from ending, such as a sleeping .pth", ZERO)
async def test_the_tests_never_end(place: str, tmp_path: Path) -> None:
    toml = TOML.replace("[verifier]\ntimeout_sec = 120", "[verifier]\ntimeout_sec = 2")
    test = "#!/bin/bash\nbash /app/startup.sh\necho 0 > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        command = "echo 'sleep 600' > /app/startup.sh"
        result = await attack(bench, tmp_path, command, test=test, toml=toml, **{"environment__startup.sh": "true\n"})
        assert_broken(result, bench.last)
        assert result.integrity is not None and result.integrity.runs[0].code == "verifier_timeout"


@everywhere
@route("verdicts", "The agent leaves a link to nowhere in place of its artifact", "graded as if there were no artifact")
async def test_an_artifact_that_is_a_link(place: str, tmp_path: Path) -> None:
    test = "#!/bin/bash\ntest -s /app/answer; echo $((! $?)) > /logs/verifier/reward.txt\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "ln -s /nowhere /app/answer", test=test, toml=SEPARATE)
        assert result.rewards == {"reward": 0} and result.exception_info is None


@everywhere
@route("verdicts", "The agent's artifact makes a separate verifier crash", ZERO)
async def test_an_artifact_that_crashes_the_verifier(place: str, tmp_path: Path) -> None:
    test = (
        "#!/bin/bash\nset -e\nif test -e /app/answer; then bash /app/answer; fi\necho 0 > /logs/verifier/reward.txt\n"
    )
    async with open_place(place, tmp_path / "trials") as bench:
        assert_broken(
            await attack(bench, tmp_path, "echo 'exit 3' > /app/answer", test=test, toml=SEPARATE), bench.last
        )


@everywhere
@pytest.mark.parametrize("toml", [TOML, SEPARATE], ids=["shared", "separate"])
@route("verdicts", "The tests give no reward, whatever the agent does", "no verdict, the task's fault")
async def test_tests_that_never_give_a_reward(place: str, toml: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "touch /app/answer", test="#!/bin/bash\nexit 1\n", toml=toml)
        assert result.rewards is None and result.exception_info is not None
        assert (result.exception_info.code, result.exception_info.blame) == ("reward_missing", "task")
        assert result.exception_info.retryable is False and "no_reward" not in kinds(result)
        assert result.integrity is not None and [run.rewards for run in result.integrity.runs] == [None] * 3


@everywhere
@route("verdicts", "The tests give no reward once, and one the next time", "no verdict, retried")
async def test_a_flake(place: str, tmp_path: Path) -> None:
    test = "#!/bin/bash\nif test -e /app/ran; then echo 1 > /logs/verifier/reward.txt; else touch /app/ran; fi\n"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, "true", test=test)
        assert result.rewards is None and result.exception_info is not None
        info = result.exception_info
        assert (info.code, info.blame, info.retryable) == ("verifier_flaky", "infra", True)
        assert not (bench.last / "verifier" / "reward.txt").exists()


STEPS = TOML + "".join(f'[[steps]]\nname = "{name}"\n' for name in ("one", "two", "three"))


@everywhere
@route("verdicts", "The agent breaks the second step of a task", "that step counts 0, and the trial's mean with it")
async def test_a_step_is_wrecked(place: str, tmp_path: Path) -> None:
    more = {f"steps__{name}__instruction.md": "Do it." for name in ("one", "two", "three")}
    toml = STEPS.replace('name = "two"', 'name = "two"\nmin_reward = 1')
    passes = "#!/bin/bash\nset -e\nread -r _ < /app/data\necho 1 > /logs/verifier/reward.txt\n"
    command = "if [ -e /app/first ]; then rm /app/data; fi; touch /app/first"
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path, command, test=passes, toml=toml, **more)
        assert result.rewards == {"reward": 0.5} and result.pier is not None
        assert (result.pier.graded_steps, result.pier.n_steps) == (2, 3)
        steps = result.step_results or []
        assert [step.verifier_result and step.verifier_result.rewards for step in steps] == [
            {"reward": 1},
            {"reward": 0},
        ]
        assert steps[1].integrity is not None and len(steps[1].integrity.runs) == 3
        assert (bench.last / "steps/two" / steps[1].integrity.runs[2].logs).is_dir()
        shown = subprocess.run([*PIER, "trial", "show", str(bench.last)], capture_output=True, text=True, check=True)
        assert "2 of 3 graded" in shown.stdout and "grading  shared" in shown.stdout
        assert "pristine state (verifier-runs/2-pristine): 1.0" in shown.stdout


@pytest.mark.plain
@route("verdicts", "The state of an agent that broke its grading is graded again", ZERO)
def test_regrading_a_broken_state(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks/t", solve="touch /tmp/broken", test=f"test ! -e /tmp/broken || exit 1\n{GIVE_ZERO}")
    pier("run", "-p", "tasks", "-a", "oracle", "--keep-state", "--job-name", "j", cwd=tmp_path)
    pier("job", "regrade", "jobs/j", "--job-name", "again", cwd=tmp_path)
    for name in ("j", "again"):
        (path,) = (tmp_path / "jobs" / name).glob("*/result.json")
        result = TrialResult.model_validate_json(path.read_bytes())
        assert_broken(result, path.parent)


@pytest.mark.plain
@route("verdicts", "A flake in a job with retries", "the trial is tried again")
def test_a_flake_is_tried_again(tmp_path: Path) -> None:
    test = f"if test -e /tmp/ran; then {GIVE_ZERO}; else touch /tmp/ran; fi"
    make_task(tmp_path / "tasks/t", test=test)
    done = pier("run", "-p", "tasks", "-a", "oracle", "-r", "1", "--job-name", "j", cwd=tmp_path, code=1)
    result = json.loads((tmp_path / "jobs/j/result.json").read_text())
    assert result["stats"]["n_retries"] == 1 and "blame: infra" in done.stdout
    assert "retry jobs/j --only infra" in done.stdout


TRIALS = """
import asyncio, json, sys
from pathlib import Path
from pier.trial.spec import AgentChoice
from tests.trial_runs import TOML, open_bench, write_task

ask = "exec 3<> /dev/tcp/allowed.test/{0}\\n"
ask += "printf 'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n' >&3\\nread -r _ <&3"
test = "#!/bin/bash\\nset -e\\nbash /app/startup.sh\\n" + ask + "\\necho 0 > /logs/verifier/reward.txt\\n"
toml = TOML.replace('"no-network"', '"allowlist"\\nallowed_hosts = ["allowed.test"]')

async def main(root, told):
    rows = []
    async with open_bench(root / "trials") as bench:
        for name, port, command in json.loads(sys.argv[3]):
            task = write_task(
                root / name, toml=toml, test=test.format(port), **{"environment__startup.sh": "true"}
            )
            result = await bench.run(task, AgentChoice("command", options={"command": command.format(ask.format(9))}))
            info = result.exception_info
            rows.append([result.rewards, info and [info.code, info.blame, info.retryable, info.exception_message]])
    told.write_text(json.dumps(rows))

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def run_in_world(root: Path, name: str, port: int, command: str) -> tuple[dict[str, float] | None, list[Any] | None]:
    """One trial in a network without a way out, whose tests need port `port` of a server that serves port 80."""
    told = root / "told.json"
    done = in_world(TRIALS, root, str(root), str(told), json.dumps([(name, port, command)]))
    assert told.exists(), f"{done.stdout}\n{done.stderr}"
    ((rewards, info),) = json.loads(told.read_text())
    return rewards, info


@pytest.mark.plain
@route("verdicts", "The network that the tests need is down", "no verdict, retried")
def test_a_network_that_is_down(tmp_path: Path) -> None:
    rewards, info = run_in_world(tmp_path, "down", 9, "true")
    assert rewards is None and info is not None and info[:3] == ["verifier_network", "infra", True]
    assert "allowed.test:9" in info[3]


@pytest.mark.plain
@route("verdicts", "The agent makes its tests fail next to a connection that fails", ZERO)
def test_a_fault_of_the_network_that_the_agent_plants(tmp_path: Path) -> None:
    command = "cat > /app/startup.sh << 'END'\n{}\nexit 3\nEND"
    assert run_in_world(tmp_path, "planted", 80, command) == ({"reward": 0}, None)
    rows = [json.loads(row) for row in (tmp_path / "trials/trial-1/network.jsonl").read_text().splitlines()]
    assert [row for row in rows if row.get("port") == 9 and row["allowed"] and row["reason"]]


@pytest.mark.plain
@route("verdicts", "The agent makes its tests fail next to a connection to their server that it cuts itself", ZERO)
def test_a_connection_that_the_agent_cuts(tmp_path: Path) -> None:
    cut = "import socket, struct, time; s = socket.create_connection(('allowed.test', 80)); time.sleep(0.3); "
    cut += "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); s.close(); time.sleep(0.3)"
    command = f'cat > /app/startup.sh << "END"\n/usr/bin/python3 -c "{cut}"\nexit 3\nEND'
    assert run_in_world(tmp_path, "cut", 80, command) == ({"reward": 0}, None)


def seen(*decisions: Decision) -> NetworkUse:
    use = NetworkUse()
    for decision in decisions:
        use.note(decision)
    return use


def test_which_failures_are_the_networks() -> None:
    down = seen(Decision("tcp", "pypi.test", True, 443, "connection refused", outage=True))
    up = seen(Decision("tcp", "pypi.test", True, 443, sent=100, received=100))
    cut = seen(Decision("tcp", "pypi.test", True, 443, "connection reset", sent=100))
    refused = seen(Decision("tcp", "pypi.test", False, 443, "not allowed"))
    assert network_faults(down, up, down, reward=True) == "pypi.test:443"
    assert network_faults(down, up, up, reward=True) == "pypi.test:443"
    assert network_faults(down, seen(), down, reward=True) == "", "only the agent tried that"
    assert network_faults(cut, up, cut, reward=True) == "", "whoever is connected can provoke a reset"
    assert network_faults(refused, refused, refused, reward=False) == ""
    assert network_faults(seen(), down, seen(), reward=False) == "pypi.test:443"
    assert network_faults(down, down, down, reward=True) == "", "the reward does not need it"


def test_which_faults_are_the_machines() -> None:
    full = SandboxError("no space left", code="disk_full")
    assert is_machine_fault(full) and is_machine_fault(OSError(errno.ENOSPC, "full"))
    for code in ("sandbox_gone", "zygote_gone", "helper_gone", "storage"):
        assert is_machine_fault(SandboxError("gone", code=code))
    assert not is_machine_fault(SandboxError("no such directory: /app", code="cwd", blame="task"))
    assert not is_machine_fault(FileNotFoundError("a dangling link"))
    wrapped = VerifierError("the tests could not be brought", code="reset")
    wrapped.__cause__ = full
    assert is_machine_fault(wrapped)
