"""How fast `pier run --env docker` is: trials a minute, next to a bare loop over the engine's API and Harbor if asked.

    python benchmarks/docker.py
    python benchmarks/docker.py --harbor HARBOR --trials 32 --concurrency 1 4 16
    python benchmarks/docker.py --image debian:stable-slim

With `--image`, everything runs on the engine at `$DOCKER_HOST`, as root, with an image that the engine has already.
Without, an engine of the benchmark's own is started with a small image. The bare loop does what no trial can do
without: it makes a container, runs two commands in it, reads a file and removes it. Where `docker compose` is not
installed, Harbor gets the stand-in of the tests. All is measured in one run, so that ratios mean something on a busy
machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs import make_task

ROOT = Path(__file__).resolve().parent.parent
SOLVE = "echo hi > /tmp/answer"
CHECK = "grep -q hi /tmp/answer && echo 1 > /tmp/reward.txt"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run of a fresh process."""

    what: str
    trials: int
    concurrency: int
    seconds: float
    per_minute: float
    ok: bool


def measure(what: str, trials: int, concurrency: int, command: list[str], cwd: Path, env: dict[str, str]) -> Row:
    """Run a command to its end and say how long it took."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        print(done.stderr.decode(errors="replace")[-2000:], file=sys.stderr)
    return Row(what, trials, concurrency, seconds, trials * 60 / seconds, done.returncode == 0)


async def bare_loop(image: str, trials: int, concurrency: int) -> None:
    """The same work by the engine's API alone."""
    import aiodocker

    from pier.image.importing import engine_address

    places = asyncio.Semaphore(concurrency)
    async with aiodocker.Docker(url=engine_address()) as docker:

        async def one() -> None:
            async with places:
                config = {"Image": image, "Cmd": ["sleep", "600"], "HostConfig": {"NetworkMode": "none", "Init": True}}
                container = await docker.containers.create(config)
                try:
                    await container.start()
                    for command in (SOLVE, CHECK):
                        asked = await container.exec(["/bin/sh", "-c", command])
                        async with asked.start(detach=False) as stream:
                            while await stream.read_out() is not None:
                                pass
                    with await container.get_archive("/tmp/reward.txt") as archive:
                        assert archive.getnames() == ["reward.txt"]
                finally:
                    await container.delete(force=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(trials):
                group.create_task(one())


@contextmanager
def own_engine(place: Path) -> Iterator[str]:
    """An engine that lives as long as the benchmark; the name of its image."""
    sys.path.insert(0, str(ROOT))
    from tests.compose_tasks import IMAGE, import_bash_image
    from tests.engine import engine

    with engine() as running:
        import_bash_image(running, place / "image")
        os.environ["DOCKER_HOST"] = running.url
        yield IMAGE


def harbor_env(place: Path) -> dict[str, str]:
    """What Harbor needs where its compose is missing."""
    sys.path.insert(0, str(ROOT))
    from tests.harbor_compose import install_if_missing

    return install_if_missing(place / "compose")


def run_all(arguments: argparse.Namespace, place: Path) -> list[Row]:
    env = {**os.environ, "PIER_HOME": str(place / "home")}
    harbors = harbor_env(place) if arguments.harbor else {}
    make_task(place / "tasks" / "hello", arguments.image)
    pier = [sys.executable, "-m", "pier", "run", "-p", "tasks", "-a", "oracle", "-q", "--env", "docker"]
    rows: list[Row] = []
    print(f"{'what':12} {'trials':>6} {'at once':>7} {'seconds':>8} {'a minute':>9}")
    for concurrency in arguments.concurrency:
        trials = max(arguments.trials if concurrency > 1 else arguments.trials // 4, 1)
        size = ["-n", str(concurrency), "-k", str(trials)]
        bare = [sys.executable, __file__, "--image", arguments.image, "--bare", str(trials), str(concurrency)]
        commands = {"pier run": [*pier, *size, "--job-name", f"j{concurrency}"], "bare loop": bare}
        if arguments.harbor:
            harbor = [
                str(Path(arguments.harbor).absolute()),
                "run",
                "-p",
                "tasks",
                "-a",
                "oracle",
                "-y",
                "-q",
                "-o",
                "harbor-jobs",
            ]
            commands["harbor run"] = [*harbor, *size]
        for what, command in commands.items():
            row = measure(what, trials, concurrency, command, place, env | (harbors if "harbor" in what else {}))
            failed = "" if row.ok else "  FAILED"
            print(f"{what:12} {trials:6} {concurrency:7} {row.seconds:8.2f} {row.per_minute:9.0f}{failed}", flush=True)
            rows.append(row)
    print_ratios(rows)
    return rows


def print_ratios(rows: list[Row]) -> None:
    """How pier compares, at each concurrency."""
    for concurrency in dict.fromkeys(row.concurrency for row in rows):
        rate = {row.what: row.per_minute for row in rows if row.concurrency == concurrency}
        own = rate.pop("pier run")
        told = ", ".join(f"{own / other:.2f} times {what}" for what, other in rate.items())
        print(f"at {concurrency}: pier is {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="an image of the engine's, with bash; without it, an engine is started")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--harbor", metavar="PROGRAM", help="also measure this `harbor` on the same engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--bare", type=int, nargs=2, metavar=("TRIALS", "CONCURRENCY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        asyncio.run(bare_loop(arguments.image, *arguments.bare))
        return 0
    place = Path(tempfile.mkdtemp(prefix="pier-benchmark."))
    (place / "image").mkdir()
    try:
        with nullcontext(arguments.image) if arguments.image else own_engine(place) as arguments.image:
            rows = run_all(arguments, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
