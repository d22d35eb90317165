"""What kills or hinders a runner, and that the job goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.busybox import import_busybox
from tests.job_tasks import (
    gate_mount,
    gated_task,
    make_task,
    pier,
    rewards_of,
    snapshot,
    start_pier,
    trials_of,
    wait_for,
)


def _journal(job: Path, event: str) -> int:
    try:
        return (job / "journal.jsonl").read_bytes().count(f'"e":"{event}"'.encode())
    except FileNotFoundError:
        return 0


def _assert_nothing_is_owned(home: Path) -> None:
    left = [str(path) for path in (home / "leases").rglob("*")] if (home / "leases").is_dir() else []
    assert left == []


def _kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=60)


MANY_REWARDS = """
awk 'BEGIN { printf "{\\"reward\\":1"; for (i = 0; i < 3000; i++) printf ",\\"key-%d\\":1", i; print "}" }' > /tmp/many
cp /tmp/many /logs/verifier/reward.json"""
"""A verdict that takes a while to seal."""


def _reached(job: Path, trial: str, phase: str) -> bool:
    """Whether a trial has said that it is in a phase."""
    return any(f" phase {phase}\n" in log.read_text() for log in job.glob(f"{trial}__*/trial.log"))


@pytest.mark.parametrize("phase", ["start", "health", "agent", "collect", "verify", "seal"])
def test_a_runner_killed_in_a_phase(tmp_path: Path, pier_home: Path, phase: str) -> None:
    gate = tmp_path / "gate"
    make_task(tmp_path / "tasks" / "a-quick")
    gated_task(tmp_path / "tasks" / "gated", gate, phase)
    make_task(tmp_path / "tasks" / "later")
    if phase == "seal":
        make_task(tmp_path / "tasks" / "gated", test=MANY_REWARDS)
    command = ["run", "-p", "tasks", "-a", "oracle", "-n", "1", "--job-name", "j", *gate_mount(gate)]
    job = tmp_path / "jobs" / "j"
    with start_pier(*command, cwd=tmp_path) as child:
        waits = phase not in ("start", "seal")
        wait_for(lambda: list(gate.glob(f"{phase}.*")) if waits else _reached(job, "gated", phase), child)
        _kill(child)
    _assert_it_goes_on(tmp_path, pier_home, command, [gate], in_time=waits)


def _assert_it_goes_on(
    tmp_path: Path,
    pier_home: Path,
    command: list[str],
    gates: list[Path],
    *,
    in_time: bool = True,
    image: str | None = "host",
) -> None:
    """After a kill: what was finished stays as it is, the rest is done, and nothing is left. `in_time`: the trial that
    was under way cannot have come further."""
    job = tmp_path / "jobs" / "j"
    (quick,) = (trial for trial in trials_of(job) if trial.name.startswith("a-quick"))
    before = snapshot(quick)
    begun = {trial.name for trial in trials_of(job)}
    sealed = {trial.name for trial in trials_of(job) if (trial / "result.json").exists()}
    assert sealed == {quick.name} or not in_time
    assert "interrupted" in pier("job", "list", cwd=tmp_path).stdout
    for gate in gates:
        (gate / "go").touch()
    pier(*command, cwd=tmp_path, image=image)
    assert rewards_of(job) == [1, 1, 1]
    assert snapshot(quick) == before
    kept = list((job / ".retries").iterdir()) if (job / ".retries").is_dir() else []
    assert len(kept) == len(begun - sealed)
    _assert_nothing_is_owned(pier_home)


@pytest.mark.plain
def test_a_runner_killed_while_it_builds(tmp_path: Path, pier_home: Path) -> None:
    """The phase `prepare`, in the middle of a RUN."""
    import_busybox(tmp_path)
    for name in ("a-quick", "gated", "later"):
        task = make_task(tmp_path / "tasks" / name)
        (task / "environment" / "Dockerfile").write_text("FROM test/busybox\n")
    task = tmp_path / "tasks" / "gated"
    wait = "touch /gate/prepare && while [ ! -e /gate/go ]; do sleep 0.05; done"
    (task / "environment" / "Dockerfile").write_text(f"FROM test/busybox\nRUN --mount=type=cache,target=/gate {wait}\n")
    command = ["run", "-p", "tasks", "-a", "oracle", "-n", "1", "--job-name", "j"]
    job = tmp_path / "jobs" / "j"
    with start_pier(*command, cwd=tmp_path, image=None) as child:
        gates = wait_for(lambda: [path.parent for path in pier_home.rglob("caches/*/prepare")], child)
        wait_for(lambda: _reached(job, "gated", "prepare"), child)
        _kill(child)
    assert not _reached(job, "gated", "start")
    _assert_it_goes_on(tmp_path, pier_home, command, gates, image=None)


INSTALLED = """
from pier.agent.contract import Agent, AgentRun, Launch, PackSpec

class Installed(Agent):
    name = "installed"
    pack = PackSpec("npm", "installed")

    def launch(self, run: AgentRun) -> Launch:
        return Launch(["/bin/sh", "-c", "echo hi > /tmp/answer"])
"""
NPM = """#!/bin/sh
mkdir /gate/first 2>/dev/null || { touch /gate/setup.$$; while [ ! -e /gate/go ]; do sleep 0.05; done; }
mkdir -p node_modules/installed
echo '{"version": "1.4.2"}' > node_modules/installed/package.json
"""
"""A stand-in that installs an agent at once the first time, and then waits at the gate."""


def test_a_runner_killed_while_an_agent_is_installed(
    tmp_path: Path, pier_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phase `setup`, in the middle of the sandbox's own npm."""
    gate = tmp_path / "gate"
    for name in ("a-quick", "gated", "later"):
        make_task(tmp_path / "tasks" / name)
    (gate / "bin").mkdir(parents=True)
    for name, text in (("npm", NPM), ("node", "#!/bin/sh\n")):
        (gate / "bin" / name).write_text(text)
        (gate / "bin" / name).chmod(0o755)
    (tmp_path / "own_agents.py").write_text(INSTALLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ["run", "-p", "tasks", "-a", "own_agents:Installed", "--install-in-sandbox", "-n", "1"]
    command += ["--job-name", "j", "--ae", f"PATH=/gate/bin:{os.defpath}", *gate_mount(gate)]
    with start_pier(*command, cwd=tmp_path) as child:
        wait_for(lambda: list(gate.glob("setup.*")), child)
        _kill(child)
    (unfinished,) = (tmp_path / "jobs" / "j").glob("gated__*")
    assert (unfinished / "trial.log").read_text().endswith(" phase setup\n")
    _assert_it_goes_on(tmp_path, pier_home, command, [gate])


@pytest.mark.plain
def test_runners_killed_again_and_again(tmp_path: Path, pier_home: Path) -> None:
    make_task(tmp_path / "tasks" / "hello")
    command = ["run", "-p", "tasks", "-a", "oracle", "-n", "2", "-k", "8", "--job-name", "j"]
    job = tmp_path / "jobs" / "j"
    sealed: dict[str, dict] = {}
    for event, more in (("start", 1), ("end", 1), ("start", 2), ("end", 2)):
        seen = _journal(job, event)
        with start_pier(*command, cwd=tmp_path) as child:
            wait_for(
                lambda seen=seen, event=event, more=more: (
                    _journal(job, event) >= seen + more or child.poll() is not None
                )
            )
            _kill(child)
        for trial in trials_of(job):
            if trial.name in sealed:
                assert snapshot(trial) == sealed[trial.name]
            elif (trial / "result.json").exists():
                sealed[trial.name] = snapshot(trial)
    pier("job", "resume", "jobs/j", cwd=tmp_path)
    assert rewards_of(job) == [1] * 8
    assert all(snapshot(job / name) == files for name, files in sealed.items())
    _assert_nothing_is_owned(pier_home)


def test_torn_empty_and_missing_results_are_owed_again(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "hello")
    command = ["run", "-p", "tasks", "-a", "oracle", "-k", "4", "--job-name", "j"]
    pier(*command, cwd=tmp_path)
    job = tmp_path / "jobs" / "j"
    torn, empty, missing, whole = trials_of(job)
    data = (torn / "result.json").read_bytes()
    (torn / "result.json").write_bytes(data[: len(data) // 2])
    (empty / "result.json").write_bytes(b"")
    (missing / "result.json").unlink()
    before = snapshot(whole)
    again = pier(*command, cwd=tmp_path)
    assert "1 of 4" in again.stderr
    assert rewards_of(job) == [1] * 4
    assert snapshot(whole) == before
    for name in ("config.json", "lock.json", "result.json"):
        (job / name).write_bytes(b"")
    pier(*command, cwd=tmp_path)
    assert json.loads((job / "result.json").read_text())["stats"]["n_completed_trials"] == 4


def test_a_sealed_result_counts_though_its_end_was_not_written_down(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "hello")
    command = ["run", "-p", "tasks", "-a", "oracle", "--job-name", "j"]
    pier(*command, cwd=tmp_path)
    job = tmp_path / "jobs" / "j"
    (trial,) = trials_of(job)
    before = snapshot(trial)
    lines = (job / "journal.jsonl").read_bytes().splitlines(keepends=True)
    cut = next(index for index, line in enumerate(lines) if b'"e":"end"' in line)
    (job / "journal.jsonl").write_bytes(b"".join(lines[:cut]) + lines[cut][:25])
    assert "1 of 1" in pier(*command, cwd=tmp_path).stderr
    assert snapshot(trial) == before


@pytest.mark.plain
def test_ctrl_c_once_cleans_up_and_keeps_what_is_done(tmp_path: Path, pier_home: Path) -> None:
    gate = tmp_path / "gate"
    make_task(tmp_path / "tasks" / "a-quick")
    gated_task(tmp_path / "tasks" / "gated", gate, "agent")
    make_task(tmp_path / "tasks" / "never")
    command = ["run", "-p", "tasks", "-a", "oracle", "-n", "1", "--job-name", "j", *gate_mount(gate)]
    job = tmp_path / "jobs" / "j"
    with start_pier(*command, cwd=tmp_path) as child:
        wait_for(lambda: list(gate.glob("agent.*")), child)
        os.kill(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=300)
    assert child.returncode == 130, err
    assert "stopping" in err and "pier job resume jobs/j" in out and "Traceback" not in err
    assert _journal(job, "start") == 2
    _assert_nothing_is_owned(pier_home)
    (gate / "go").touch()
    pier("job", "resume", "jobs/j", cwd=tmp_path)
    assert rewards_of(job) == [1, 1, 1]


def test_a_storm_of_ctrl_c(tmp_path: Path, pier_home: Path) -> None:
    make_task(tmp_path / "tasks" / "hello")
    command = ["run", "-p", "tasks", "-a", "oracle", "-n", "2", "-k", "6", "--job-name", "j"]
    job = tmp_path / "jobs" / "j"
    with start_pier(*command, cwd=tmp_path) as child:
        wait_for(lambda: _journal(job, "start"), child)
        while child.poll() is None:
            os.kill(child.pid, signal.SIGINT)
            time.sleep(0.01)
        _, err = child.communicate(timeout=300)
    assert child.returncode == 130 and "Traceback" not in err
    pier(*command, cwd=tmp_path)
    assert rewards_of(job) == [1] * 6
    _assert_nothing_is_owned(pier_home)


@pytest.mark.plain
def test_the_second_runner_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gated_task(tmp_path / "tasks" / "gated", gate, "agent")
    command = ["run", "-p", "tasks", "-a", "oracle", "--job-name", "j", *gate_mount(gate)]
    with start_pier(*command, cwd=tmp_path) as first:
        wait_for(lambda: list(gate.glob("agent.*")), first)
        for second in (command, ["job", "resume", "jobs/j"], ["job", "retry", "jobs/j", "--only", "failed"]):
            refused = pier(*second, cwd=tmp_path, code=2)
            assert f"process {first.pid} " in refused.stderr
        assert "running" in pier("job", "list", cwd=tmp_path).stdout
        (gate / "go").touch()
        _, err = first.communicate(timeout=300)
    assert first.returncode == 0, err
    assert rewards_of(tmp_path / "jobs" / "j") == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can only be mounted by root")
def test_a_full_disk_stops_the_job_and_space_lets_it_go_on(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "hello")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=4k", "small", str(disk)], check=True)
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * (900 << 10))
        command = ["run", "-p", "tasks", "-a", "oracle", "-n", "2", "-k", "40", "--job-name", "j", "-o", "disk"]
        full = pier(*command, cwd=tmp_path, code=1)
        assert "full" in full.stderr and "Traceback" not in full.stderr
        sealed = {t.name: snapshot(t) for t in trials_of(disk / "j") if (t / "result.json").exists()}
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        pier(*command, cwd=tmp_path)
        assert rewards_of(disk / "j") == [1] * 40
        assert all(snapshot(disk / "j" / name) == files for name, files in sealed.items())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
