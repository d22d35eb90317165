"""How fast `pier run` is: hello-world trials a minute, next to a bare loop over sandboxes and, if asked, Harbor.

    python benchmarks/jobs.py                      1, 16 and 64 trials at concurrency 1 and 16
    python benchmarks/jobs.py --trials 256 --concurrency 16 --harbor HARBOR
    python benchmarks/jobs.py --large 10000        one large job, then its resume
    python benchmarks/jobs.py --trials 256 --concurrency 16 --before PYTHON --rounds 5 --place /dev/shm
                                                   this pier and the one that another interpreter has, in turns

Each row is one run of a fresh process: wall time, trials a minute, CPU seconds and the most memory that the process and
its children held together. Ratios between rows of one session are what counts; absolute numbers belong to the machine.
All programs are compiled before the first row, as installed ones are. Where compose is not installed Harbor gets a
stand-in for it (`tests/harbor_compose.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests import harbor_compose

TASK = {
    "task.toml": 'schema_version = "1.1"\n[environment]\n{image}network_mode = "no-network"\n',
    "instruction.md": "Write hi to /tmp/answer.\n",
    "environment/.gitkeep": "",
    "solution/solve.sh": "#!/bin/sh\necho hi > /tmp/answer\n",
    "tests/test.sh": "#!/bin/sh\ngrep -q hi /tmp/answer && echo 1 > /logs/verifier/reward.txt\n",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run."""

    what: str
    trials: int
    concurrency: int
    seconds: float
    per_minute: float
    cpu_seconds: float
    memory_mb: float
    ok: bool


class Memory(threading.Thread):
    """The most memory that a process and its descendants held together, sampled; what they share counts once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.most = max(self.most, sum(_share(pid) for pid in _tree(self._pid)))

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.most / 1024


def _share(pid: int) -> int:
    """A process's share of the memory it uses, in kB."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) for row in rows if row.startswith("Pss:")), 0)


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
        except OSError:
            continue
    return found


def measure(what: str, trials: int, concurrency: int, command: list[str], cwd: Path, env: dict[str, str]) -> Row:
    """Run a command to its end and say what it took."""
    began = time.monotonic()
    child = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    memory = Memory(child.pid)
    memory.start()
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    if child.returncode:
        print(said.decode(errors="replace")[-2000:], file=sys.stderr)
    cpu = used.ru_utime + used.ru_stime
    rate = trials * 60 / seconds
    return Row(what, trials, concurrency, seconds, rate, cpu, memory.end(), child.returncode == 0)


def make_task(directory: Path, image: str | None = None) -> Path:
    key = f'docker_image = "{image}"\n' if image else ""
    for name, text in TASK.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{image}", key))
    return directory


async def bare_loop(trials: int, concurrency: int) -> None:
    """What a trial cannot do without: start a sandbox, run two commands, read a file, stop."""
    from pier.image.store import ImageStore
    from pier.lease import Lease
    from pier.sandbox import SandboxSpec, open_backend

    places = asyncio.Semaphore(concurrency)
    with Lease(label="benchmark") as lease:
        async with open_backend("local", lease) as backend:
            image = await ImageStore().resolve("host")

            async def one() -> None:
                async with places, await backend.start(SandboxSpec(image=image)) as sandbox:
                    await sandbox.exec("echo hi > /tmp/answer")
                    await sandbox.exec(
                        "mkdir -p /logs/verifier; grep -q hi /tmp/answer && echo 1 > /logs/verifier/reward.txt"
                    )
                    assert (await sandbox.read_file("/logs/verifier/reward.txt")).strip() == b"1"

            async with asyncio.TaskGroup() as group:
                for _ in range(trials):
                    group.create_task(one())


def run_all(arguments: argparse.Namespace, place: Path) -> list[Row]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PIER_HOME": str(place / "home"), "PYTHONPYCACHEPREFIX": str(place / "compiled")}
    make_task(place / "tasks" / "hello")
    pier = [sys.executable, "-m", "pier", "run", "-p", "tasks", "--image", "host", "-a", "oracle", "-q"]
    rows: list[Row] = []
    bare = [sys.executable, __file__, "--bare"]
    warm_up = [[*pier, "--job-name", "warm-up"], [*bare, "1", "1"]]
    if arguments.harbor:
        env |= harbor_compose.install_if_missing(place / "bin")
        make_task(place / "docker" / "hello", arguments.harbor_image)
        warm_up.append([arguments.harbor, "run", "--help"])
    for command in warm_up:
        subprocess.run(command, cwd=place, env=env, stdout=subprocess.DEVNULL, check=True)

    def row(what: str, trials: int, concurrency: int, command: list[str]) -> None:
        rows.append(measure(what, trials, concurrency, command, place, env))
        print(_line(rows[-1]), flush=True)

    print(f"{'what':12} {'trials':>6} {'at once':>7} {'seconds':>8} {'a minute':>9} {'cpu s':>7} {'MB':>6}")
    for concurrency in arguments.concurrency:
        for trials in arguments.trials:
            size = ["-n", str(concurrency), "-k", str(trials)]
            row("pier run", trials, concurrency, [*pier, *size, "--job-name", f"j{trials}-{concurrency}"])
            row("bare loop", trials, concurrency, [*bare, str(trials), str(concurrency)])
            if arguments.harbor:
                harbor = [arguments.harbor, "run", "-p", "docker", "-a", "oracle", "-y", "-q", "-o", "harbor-jobs"]
                row("harbor run", trials, concurrency, [*harbor, *size])
    if arguments.large:
        size = ["-n", str(max(arguments.concurrency)), "-k", str(arguments.large), "--job-name", "large"]
        row("pier run", arguments.large, max(arguments.concurrency), [*pier, *size])
        row("pier again", arguments.large, 0, [*pier, *size])
        row("pier resume", arguments.large, 0, [sys.executable, "-m", "pier", "job", "resume", "jobs/large", "-q"])
    return rows


def compare(arguments: argparse.Namespace, place: Path) -> list[Row]:
    """Run the same jobs with two versions of pier in turns, which share whatever else the machine does; the last lines
    are ratios of medians, above 1 where this version is faster."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    make_task(place / "tasks" / "hello")
    rows: list[Row] = []

    def run(what: str, python: str, trials: int, concurrency: int, number: int) -> Row:
        job = f"{what}-{trials}-{concurrency}-{number}"
        own = {"PIER_HOME": str(place / what), "PYTHONPYCACHEPREFIX": str(place / f"compiled-{what}")}
        command = [python, "-m", "pier", "run", "-p", "tasks", "--image", "host", "-a", "oracle", "-q"]
        command += ["-n", str(concurrency), "-k", str(trials), "--job-name", job]
        row = measure(what, trials, concurrency, command, place, env | own)
        shutil.rmtree(place / "jobs" / job, ignore_errors=True)
        return row

    versions = [("before", arguments.before), ("now", sys.executable)]
    for what, python in versions:
        run(what, python, 1, 1, 0)
    for concurrency in arguments.concurrency:
        for trials in arguments.trials:
            measured: dict[str, list[Row]] = {"before": [], "now": []}
            for number in range(1, arguments.rounds + 1):
                for what, python in versions if number % 2 else versions[::-1]:
                    row = run(what, python, trials, concurrency, number)
                    measured[what].append(row)
                    print(_line(row), flush=True)
            for name in ("seconds", "cpu_seconds"):
                old, new = (statistics.median(getattr(row, name) for row in measured[what]) for what, _ in versions)
                size = f"{trials} trials, {concurrency} at once"
                print(f"{size}: {name} {old:.2f} before, {new:.2f} now, {old / new:.2f}")
            rows += measured["before"] + measured["now"]
    return rows


def _line(row: Row) -> str:
    failed = "" if row.ok else "  FAILED"
    return (
        f"{row.what:12} {row.trials:6} {row.concurrency:7} {row.seconds:8.2f} {row.per_minute:9.0f}"
        f" {row.cpu_seconds:7.2f} {row.memory_mb:6.0f}{failed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--large", type=int, help="also run one job of so many trials, and resume it")
    parser.add_argument("--harbor", metavar="PROGRAM", help="also measure this `harbor` on its Docker engine")
    parser.add_argument("--harbor-image", default="debian:stable-slim")
    parser.add_argument("--before", metavar="PYTHON", help="compare with the pier that this interpreter has, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="how often each version runs with --before")
    parser.add_argument("--place", type=Path, help="directory for jobs and homes, instead of the temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--bare", type=int, nargs=2, metavar=("TRIALS", "CONCURRENCY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        asyncio.run(bare_loop(*arguments.bare))
        return 0
    place = Path(tempfile.mkdtemp(prefix="pier-benchmark.", dir=arguments.place))
    try:
        rows = compare(arguments, place) if arguments.before else run_all(arguments, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
