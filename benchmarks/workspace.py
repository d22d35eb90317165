"""How long a workspace takes: start, first command, further commands, the verify loop; next to plain `docker run/exec`.

    python benchmarks/workspace.py
    python benchmarks/workspace.py --rounds 20

All commands are processes of their own, as people type them. The bare commands do the same with a container that has
the directory mounted: `docker run -d -v`, `docker exec`, and for the tests a second container that gets a copy of the
files. `in the supervisor` is what `pier verify` costs without the start of a Python process, and `the tests alone` is
what the tests take by themselves. An engine of the benchmark's own is started if there is none. All is measured in one
run, so that ratios mean something on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PIER = [sys.executable, "-m", "pier"]
TEST = "#!/bin/sh\ngrep -q hi answer.txt; echo $((! $?)) > /logs/verifier/reward.txt\n"


def timed(command: list[str], cwd: Path, env: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.decode()[-2000:]}")
    return (time.perf_counter() - began) * 1000


def repeated(rounds: int, work: Callable[[], float]) -> float:
    return statistics.median(work() for _ in range(rounds))


def make_task(place: Path) -> Path:
    task = place / "task"
    for name, text in {
        "task.toml": 'schema_version = "1.1"\n[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n',
        "instruction.md": "Write hi to answer.txt.\n",
        "environment/Dockerfile": "FROM bench/busybox\nWORKDIR /app\n",
        "tests/test.sh": TEST,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


def measure_pier(backend: str, rounds: int, place: Path, env: dict[str, str]) -> dict[str, float]:
    """Milliseconds of each thing that people do."""
    ws = place / f"ws-{backend}"
    start = [*PIER, "start", "./task", "-d", str(ws), "--env", backend]
    found = {"first start, image built": timed(start, place, env)}
    found["first exec"] = timed([*PIER, "exec", "true"], ws, env)
    found["exec"] = repeated(rounds, lambda: timed([*PIER, "exec", "true"], ws, env))
    (ws / "answer.txt").write_text("hi\n")
    found["verify"] = repeated(rounds, lambda: timed([*PIER, "verify"], ws, env))
    found["verify, in the supervisor"] = repeated(rounds, lambda: _asked(ws, env))
    trial = max((ws / ".pier" / "trials").iterdir())
    result = json.loads((trial / "result.json").read_text())
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}, result
    timed([*PIER, "stop"], ws, env)
    found["start again"] = timed([*PIER, "start"], ws, env)
    timed([*PIER, "stop"], ws, env)
    return found


def _asked(ws: Path, env: dict[str, str]) -> float:
    """One verification, asked for by a process that runs already."""
    code = (
        "import sys, time; from pier.workspace.client import call, find_place\n"
        "ws = find_place(sys.argv[1]); began = time.perf_counter()\n"
        "call(ws, {'op': 'verify'}); print((time.perf_counter() - began) * 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ws)], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_docker(rounds: int, place: Path, env: dict[str, str]) -> dict[str, float]:
    """The same by hand."""
    ws = place / "by-hand"
    ws.mkdir()
    (ws / "answer.txt").write_text("hi\n")
    run = ["docker", "run", "-d", "--network", "none", "--name", "bench", "-v", f"{ws}:/app", "-w", "/app"]
    found = {"start again": timed([*run, "bench/busybox", "sleep", "1d"], place, env)}
    found["first exec"] = timed(["docker", "exec", "bench", "true"], place, env)
    found["exec"] = repeated(rounds, lambda: timed(["docker", "exec", "bench", "true"], place, env))
    script = (
        f"id=$(docker run -d --network none -w /app bench/busybox sleep 1d) && docker cp {ws}/. $id:/app >/dev/null"
        f" && docker cp {place}/task/tests $id:/tests >/dev/null"
        " && docker exec $id sh -c 'mkdir -p /logs/verifier; sh /tests/test.sh; cat /logs/verifier/reward.txt'"
        " && docker rm -f $id >/dev/null"
    )
    found["verify"] = repeated(rounds, lambda: timed(["sh", "-c", script], place, env))
    timed(["docker", "rm", "-f", "bench"], place, env)
    return found


def print_table(rows: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"{'milliseconds':28}" + "".join(f"{column:>16}" for column in rows))
    for name in names:
        cells = (f"{row[name]:.0f}" if name in row else "-" for row in rows.values())
        print(f"{name:28}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from tests.busybox import busybox_image
    from tests.engine import engine, missing

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pier-bench.")))
        env = {**os.environ, "PIER_HOME": str(place / "home")}
        make_task(place)
        packed = place / "busybox.tar"
        layer = busybox_image(place / "image").layers[0]
        subprocess.run(["tar", "-C", layer, "-cf", packed, "."], check=True)
        shutil.rmtree(place / "image")
        timed([*PIER, "image", "import", str(packed), "bench/busybox"], place, env)
        rows = {"pier, local": measure_pier("local", args.rounds, place, env)}
        if missing() is None:
            running = stack.enter_context(engine())
            running.docker("import", "-", "bench/busybox", stdin=packed.read_bytes())
            env["DOCKER_HOST"] = running.url
            rows["pier, docker"] = measure_pier("docker", args.rounds, place, env)
            rows["docker by hand"] = measure_docker(args.rounds, place, env)
    print(json.dumps(rows, indent=2)) if args.json else print_table(rows)


if __name__ == "__main__":
    main()
