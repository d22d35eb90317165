"""Small tasks for job tests, and `pier` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PIER = [sys.executable, "-m", "pier"]
PATIENCE = 300.0


def make_task(directory: Path, *, solve: str = "echo hi > /tmp/answer", test: str | None = None) -> Path:
    """A task without an image that the oracle passes and nop does not."""
    check = test or "grep -q hi /tmp/answer; echo $((! $?)) > /logs/verifier/reward.txt"
    files = {
        "task.toml": 'schema_version = "1.1"\n[environment]\nnetwork_mode = "no-network"\n',
        "instruction.md": "Write hi to /tmp/answer.\n",
        "environment/.gitkeep": "",
        "solution/solve.sh": f"#!/bin/sh\n{solve}\n",
        "tests/test.sh": f"#!/bin/sh\n{check}\n",
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def gated_task(directory: Path, gate: Path, phase: str) -> Path:
    """A task that says it is in `phase` (health, agent, collect or verify) by a file in `gate`, and waits there for
    `go`. The other phases run nothing of the task's."""
    gate.mkdir(exist_ok=True)
    gate.chmod(0o777)
    wait = f"touch /gate/{phase}.$$ && while [ ! -e /gate/go ]; do sleep 0.05; done"
    good = "echo 1 > /logs/verifier/reward.txt"
    if phase == "agent":
        return make_task(directory, solve=f"{wait}\necho hi > /tmp/answer")
    if phase == "verify":
        return make_task(directory, test=f"{wait}\n{good}")
    task = make_task(directory)
    table = {
        "health": f"[environment.healthcheck]\ncommand = {json.dumps(wait)}\ntimeout_sec = {PATIENCE}\n",
        "collect": f"[[verifier.collect]]\ncommand = {json.dumps(wait)}\ntimeout_sec = {PATIENCE}\n",
    }
    with (task / "task.toml").open("a") as stream:
        stream.write(table.get(phase, ""))
    return task


def gate_mount(gate: Path) -> list[str]:
    return ["--mounts", json.dumps([{"type": "bind", "source": str(gate), "target": "/gate", "read_only": False}])]


def start_pier(*args: str, cwd: Path, image: str | None = "host", **env: str) -> subprocess.Popen[str]:
    """`pier ARGS` in a session of its own, so that signals for it reach nothing else. A `pier run` on the local backend
    uses `image` unless it names one; None leaves the tasks' own."""
    chosen = ("--image", image) if image and args[0] == "run" and not {"--image", "--env"} & set(args) else ()
    return subprocess.Popen(
        [*PIER, *args, *chosen],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pier(
    *args: str, cwd: Path, code: int | None = 0, image: str | None = "host", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `pier ARGS` to its end and check its exit code."""
    with start_pier(*args, cwd=cwd, image=image, **env) as child:
        out, err = child.communicate(timeout=PATIENCE)
    assert code is None or child.returncode == code, f"exit {child.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def wait_for(condition: Callable[[], Any], child: subprocess.Popen[str] | None = None) -> Any:
    """Poll until the condition holds. A condition that takes long, such as a command, is polled less often, so that
    most of the time is left to what it waits for."""
    deadline = time.monotonic() + PATIENCE
    while True:
        begun = time.monotonic()
        if found := condition():
            return found
        if child is not None and child.poll() is not None:
            raise AssertionError(f"pier ended with {child.returncode}: {child.communicate()}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(max(0.005, 2 * (time.monotonic() - begun)))


def trials_of(job: Path) -> list[Path]:
    return sorted(path for path in job.iterdir() if path.is_dir() and not path.name.startswith("."))


def rewards_of(job: Path) -> list[float]:
    """The rewards in the result files of a job, by trial name."""
    results = [json.loads((trial / "result.json").read_text()) for trial in trials_of(job)]
    return [result["verifier_result"]["rewards"]["reward"] for result in results]


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """All files below a directory, with their inode, time and content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            stat = path.stat()
            found[str(path.relative_to(directory))] = (stat.st_ino, stat.st_mtime_ns, path.read_bytes())
    return found
