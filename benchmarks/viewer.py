"""How fast the viewer indexes and answers, next to `harbor view` on the same directories.

    python benchmarks/viewer.py [--jobs 100] [--trials 1000] [--peer-trials 1024]

Writes jobs with a journal each (pier's own), one job with a result per trial (as Harbor writes them), and one trial of
5,000 steps and 100 MB. Pages are asked for over HTTP, each several times; the best time is shown, since other
programs on this machine only ever add to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pier.job.ledger import Fault, Ledger, Outcome
from pier.job.plan import PlannedTask, make_plan
from pier.view.index import Index
from pier.view.library import Library

ROOT = Path(__file__).resolve().parents[1]
HARBOR = ROOT / ".cache" / "peers" / "harbor" / "bin" / "harbor"
AGENTS = [{"name": "claude-code", "model_name": "anthropic/sonnet"}, {"name": "codex", "model_name": "openai/gpt"}]


def outcome(place: int) -> Outcome:
    if place % 17 == 0:
        return Outcome(fault=Fault("SandboxError", "sandbox", "infra", True, "the sandbox broke"), cost=0.0)
    rewards = {"reward": float(place % 3 > 0)}
    return Outcome(rewards=rewards, cost=0.01 * (place % 9), tokens=(1000 + place, 500, 20), seconds=30.0 + place % 60)


def write_job(directory: Path, trials: int) -> None:
    directory.mkdir(parents=True)
    tasks = [
        PlannedTask(f"task-{n:04}", "sha256:" + "a" * 64, f"/t/{n}", source="set") for n in range(trials // 4 or 1)
    ]
    ledger = Ledger.create(directory)
    ledger.adopt_plan(make_plan(tasks, AGENTS, {}, 2))
    for place, trial in enumerate(ledger.plan.trials):
        ledger.begin(trial.id)
        ledger.end(trial.id, outcome(place))
    ledger.finish()
    ledger.close()


def write_harbor_job(directory: Path, trials: int) -> None:
    """A job as Harbor writes it, with a result in each trial's directory."""
    times = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:01:00Z"}
    agent = {"name": "claude-code", "version": "1", "model_info": {"name": "sonnet", "provider": "anthropic"}}
    for number in range(trials):
        name = f"task-{number:04}__abcdefg"
        path = directory / name
        path.mkdir(parents=True)
        task = {"path": f"/t/task-{number:04}"}
        config = {"task": task, "trial_name": name, "agent": {"name": "claude-code"}, "job_id": "1" * 32}
        about = {"id": f"00000000-0000-0000-0000-{number:012}", "task_name": task["path"][3:], "trial_name": name}
        where = {"trial_uri": f"file://{path}", "task_id": task, "task_checksum": "a" * 64, "config": config}
        verdict = {"verifier_result": {"rewards": {"reward": float(number % 3 > 0)}}}
        result = {**about, **where, "agent_info": agent, **verdict, **times}
        (path / "result.json").write_text(json.dumps(result))
        (path / "config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(
        json.dumps({"job_name": directory.name, "agents": [{"name": "claude-code"}]})
    )
    stats = {"n_completed_trials": trials, "n_errored_trials": 0, "evals": {}}
    head = {"id": "00000000-0000-0000-0000-000000000001", "n_total_trials": trials, "stats": stats, **times}
    (directory / "result.json").write_text(json.dumps(head))


def write_long_trial(job: Path, steps: int = 5000, size: int = 100 << 20) -> Path:
    """A trial with a trajectory of many steps and megabytes."""
    write_harbor_job(job, 1)
    (trial,) = (path for path in job.iterdir() if path.is_dir())
    text = ('a line of "output" of some program\n' * (size // steps // 38))[: size // steps]
    rows = []
    for n in range(1, steps + 1):
        call = {"tool_call_id": f"c{n}", "function_name": "Bash", "arguments": {"command": f"step {n}"}}
        results = {"results": [{"source_call_id": f"c{n}", "content": text}]}
        step = {"step_id": n, "source": "agent", "message": f"I do {n}.", "tool_calls": [call], "observation": results}
        rows.append(step)
    (trial / "agent").mkdir()
    whole = {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "a", "version": "1"}, "steps": rows}
    (trial / "agent" / "trajectory.json").write_text(json.dumps(whole, indent=2))
    return trial


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], port: int, ready: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(base + ready, timeout=60).read()
                break
            time.sleep(0.1)
        yield base, child
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()


def best(url: str, times: int = 7) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        urllib.request.urlopen(url, timeout=120).read()
        found.append(time.perf_counter() - began)
    return min(found)


def peak_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def bench_index(jobs: Path, trials: int) -> float:
    index = Index.open(Library.open(jobs))
    began = time.perf_counter()
    index.refresh()
    took = time.perf_counter() - began
    print(f"index of {trials:,} trials: {took:.1f} s, {trials / took:,.0f} trials/s (goal: 2,000/s)")
    began = time.perf_counter()
    index.refresh()
    print(f"  again, nothing changed: {time.perf_counter() - began:.3f} s")
    index.close()
    return trials / took


def bench_pages(jobs: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "pier", "view", str(jobs), "--no-open", "--port", str(port)]
    with running(command, port, "/") as (base, child):
        job = sorted(path.name for path in jobs.iterdir())[0]
        pages = {
            "jobs": "/",
            "job, grid": f"/jobs/{job}",
            "job, trials": f"/jobs/{job}?view=trials",
            "job, trials by cost": f"/jobs/{job}?view=trials&sort=-cost",
            "job, failures": f"/jobs/{job}?view=trials&standing=failures",
            "job, charts": f"/jobs/{job}?view=charts",
        }
        for name, path in pages.items():
            print(f"  {name:22} {1000 * best(base + path):6.1f} ms (goal: 50 ms)")
        print(f"  memory of the server   {peak_megabytes(child.pid):6.0f} MB (goal: 200 MB)")


def bench_long(job: Path, trial: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "pier", "view", str(job), "--no-open", "--port", str(port)]
    size = (trial / "agent" / "trajectory.json").stat().st_size
    with running(command, port, f"/jobs/{job.name}") as (base, child):
        page = f"{base}/jobs/{job.name}/{trial.name}"
        first = best(page, 1)
        print(
            f"trial of 5,000 steps, {size / 1e6:.0f} MB: opened in {first:.2f} s (goal: 1 s), again {best(page):.3f} s"
        )
        print(f"  step 4,000 {best(page + '?step=4000'):.3f} s, outline {best(page + '/steps/outline', 2):.3f} s")
        print(f"  memory of the server {peak_megabytes(child.pid):.0f} MB")


def bench_harbor(jobs: Path, trials: int) -> None:
    """The same list of one job's trials from both viewers."""
    job = jobs / "harbor"
    write_harbor_job(job, trials)
    port = free_port()
    command = [sys.executable, "-m", "pier", "view", str(jobs), "--no-open", "--port", str(port)]
    with running(command, port, "/jobs/harbor") as (base, child):
        ours, memory = best(f"{base}/jobs/harbor?view=trials"), peak_megabytes(child.pid)
        jobs_page = best(base)
    print(
        f"a Harbor job of {trials:,} trials: pier {1000 * ours:.1f} ms, jobs {1000 * jobs_page:.1f} ms, {memory:.0f} MB"
    )
    if not HARBOR.exists():
        print("  harbor is not installed under .cache/peers")
        return
    port = free_port()
    command = [str(HARBOR), "view", str(jobs), "--port", str(port), "--no-build"]
    with running(command, port, "/api/health") as (base, child):
        try:
            theirs = best(f"{base}/api/jobs/harbor/trials", 3)
            jobs_page = best(f"{base}/api/jobs", 3)
        except (OSError, urllib.error.URLError) as error:
            print(f"  harbor view did not answer: {error}")
            return
        memory = peak_megabytes(child.pid)
    print(f"  harbor view: {1000 * theirs:.1f} ms (only its data), jobs {1000 * jobs_page:.1f} ms, {memory:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--peer-trials", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pier-bench-") as base:
        os.environ["PIER_HOME"] = f"{base}/home"
        for number in range(given.jobs):
            write_job(Path(base) / "jobs" / f"job-{number:03}", given.trials)
        bench_index(Path(base) / "jobs", given.jobs * given.trials)
        bench_pages(Path(base) / "jobs")
        trial = write_long_trial(Path(base) / "long" / "one")
        bench_long(trial.parent, trial)
        bench_harbor(Path(base) / "peers", given.peer_trials)
    print(f"memory of this program: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
