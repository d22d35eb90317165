"""How fast rollouts are: a 10-turn agent with an instant policy, all at once, next to verifiers 0.4 on the same task.

    python benchmarks/rollouts.py                        512 rollouts: pier on local, the agent as a bare process
    python benchmarks/rollouts.py --verifiers            also verifiers on its subprocess runtime
    python benchmarks/rollouts.py --docker 64            also pier and verifiers on a Docker engine, 64 rollouts (root)

The agent is a small C program (`cc` is needed), mounted or in the image, so that no interpreter is measured; the policy
is a function of the same process, for verifiers too; the verdict is a shell's `grep` in the sandbox. Each row is one
run of a fresh process, once everything is imported: rollouts a minute, the CPU of one rollout (an engine's own is not
in it), the latency of a turn as the agent sees it, the most memory that the framework held and that of what it started.
`bare` is a floor: the agent on the host behind pier's gateway, without sandbox or verdict. Ratios between rows of one
session are what counts; absolute numbers belong to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TURNS = 10
TITLES = ("rollouts", "good", "seconds", "a minute", "CPU ms", "turn ms", "MB own", "MB others")
IMAGE = "bench/rollouts"
"""The image on the engine: busybox, Python (which verifiers needs) and the agent at /agent."""


class Load(threading.Thread):
    """What a run costs: its seconds, its CPU, the most memory of this process and of what it started (what processes
    share counts once), and the time of turns as agents report it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over, self._own, self._others = threading.Event(), 0, 0
        self._turns: list[int] = []

    def start(self) -> None:
        self._began, self._cpu = time.monotonic(), _cpu()
        super().start()

    def run(self) -> None:
        took = 0.0
        while not self._over.wait(max(0.5, 50 * took)):  # so that looking takes no more than a fiftieth of a core
            began = time.thread_time()
            self._own = max(self._own, _share(os.getpid()))
            self._others = max(self._others, sum(_share(pid) for pid in _below(os.getpid())))
            took = time.thread_time() - began

    def note(self, said: str) -> None:
        if said.isdigit():
            self._turns.append(int(said))

    def finish(self) -> dict[str, float]:
        seconds, cpu = time.monotonic() - self._began, _cpu() - self._cpu
        self._over.set()
        self.join()
        turn = statistics.median(self._turns) / 1000 if self._turns else 0.0
        sizes = {"own_mb": self._own / 1024, "others_mb": self._others / 1024}
        return {"seconds": seconds, "cpu": cpu, "turn_ms": turn, **sizes}


class InstantPolicy:
    """Answers at once, with exact tokens: the prompt grows by four ids a turn."""

    vocab_size = 100

    def __init__(self, load: Load) -> None:
        self.load = load

    async def __call__(self, request: Any) -> Any:
        from pier.wire.turn import Text, Tokens, Turn, Usage

        self.load.note(request.messages[-1].text)
        turn = len(request.messages) // 2 + 1
        prompt = tuple(range(1, 4)) + (7, 8, 9) * (turn - 1)
        text = "done" if turn >= TURNS else "on"
        return Turn((Text(text),), usage=Usage(len(prompt), 2), tokens=Tokens(prompt, (7, 8), (-0.1, -0.2)))


def _cpu() -> float:
    """Seconds of CPU of this process and of all that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _share(pid: int) -> int:
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) for row in rows if row.startswith("Pss:")), 0)


def _below(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


async def run_pier(count: int, root: Path, backend: str) -> dict[str, Any]:
    from tests.job_tasks import make_task

    from pier import AgentConfig, rollouts

    backends = f"pier.sandbox.{backend}.backend"
    for name in ("pier.job.command", "pier.agent.command", "pier.gateway.server", "pier.image.store", backends):
        import_module(name)  # imports are not measured, in no row

    make_task(root / "tasks/t")
    if backend == "docker":
        (root / "tasks/t/environment/Dockerfile").write_text(f"FROM {IMAGE}\n")
        options: dict[str, Any] = {"backend": "docker"}
        agent = AgentConfig(name="command", kwargs={"command": "/agent"})
    else:
        options = {"image": "host"}
        agent = AgentConfig(name="command", kwargs={"command": "agent", "mount": str(root)})
    load, good = Load(), 0
    load.start()
    stream = rollouts(
        root / "tasks", agent=agent, policy=InstantPolicy(load), group=count, concurrency=count, retries=0, **options
    )
    async for rollout in stream:
        good += rollout.reward == 1.0 and rollout.turns == TURNS and len(rollout.trainable) == 1
        if rollout.reward != 1.0:
            print(rollout.error, file=sys.stderr)
    return {"rollouts": count, "good": good, **load.finish()}


async def run_bare(count: int, root: Path, _: str) -> dict[str, Any]:
    """The same agent as a process of the host, all at once, behind the same gateway; nothing is graded."""
    from pier.gateway import Gateway

    load = Load()
    load.start()
    policy = InstantPolicy(load)
    async with Gateway() as gateway:
        url = await gateway.serve()

        async def one(number: int) -> int:
            async with gateway.session("m", upstream=policy) as session:
                env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": session.key}
                process = await asyncio.create_subprocess_exec(root / "bin/agent", root / f"answer{number}", env=env)
                return await process.wait()

        good = sum(code == 0 for code in await asyncio.gather(*(one(number) for number in range(count))))
    return {"rollouts": count, "good": good, **load.finish()}


@contextmanager
def engine_of_ours(root: Path) -> Iterator[None]:
    """A Docker engine with the image, in a network namespace of its own, as verifiers publishes ports on a bridge."""
    from tests.busybox import add_python, busybox_image
    from tests.engine import engine

    inside = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    with engine("--bridge=", "--iptables=true", before=inside) as running:
        layer = busybox_image(root / "image").layers[0]
        add_python(layer)
        (layer / "agent").hardlink_to(root / "bin/agent")
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(layer, ".")
        running.docker("import", "-", IMAGE, stdin=packed.getvalue())
        os.environ["DOCKER_HOST"] = running.url
        yield


def measure(what: str, count: int, root: Path) -> None:
    """One run in a fresh process."""
    name, backend = what.split("/")
    with tempfile.TemporaryDirectory(prefix="pier-bench.") as home:
        command = [sys.executable, __file__, "--one", what, str(count), str(root)]
        if name == "verifiers":
            python = ROOT / ".cache/peers/verifiers/bin/python"
            agent = "/agent" if backend == "docker" else str(root / "bin/agent")
            command = [str(python), str(ROOT / "benchmarks/peers/verifiers_rollouts.py"), backend, str(count), agent]
        env = {**os.environ, "PIER_HOME": home, "VF_CACHE_DIR": home}
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    row = json.loads(ran.stdout.splitlines()[-1])
    rate, cpu = 60 * row["rollouts"] / row["seconds"], 1000 * row["cpu"] / row["rollouts"]
    cells = (row["rollouts"], row["good"], row["seconds"], rate, cpu, row["turn_ms"], row["own_mb"], row["others_mb"])
    print(
        f"{what:20} {' '.join(f'{cell:>{len(title)}.4g}' for cell, title in zip(cells, TITLES, strict=True))}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[512])
    parser.add_argument("--verifiers", action="store_true", help="also verifiers (.ci/peers verifiers)")
    parser.add_argument("--docker", type=int, nargs="*", default=[], help="how many rollouts on a Docker engine")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        what, count, root = given.one
        run = run_pier if what.startswith("pier") else run_bare
        print(json.dumps(asyncio.run(run(int(count), Path(root), what.split("/")[1]))))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'what':20} {' '.join(TITLES)}")
    with tempfile.TemporaryDirectory(prefix="pier-bench.") as name:
        root = Path(name)
        (root / "bin").mkdir()
        source = ROOT / "benchmarks/rollout_agent.c"
        subprocess.run(["cc", "-static", "-Os", "-D_GNU_SOURCE", "-o", root / "bin/agent", source], check=True)
        for count in given.rollouts:
            for what in ("pier/local", "bare/host", *(("verifiers/subprocess",) if given.verifiers else ())):
                measure(what, count, root)
        if given.docker:
            with engine_of_ours(root):
                for count in given.docker:
                    for what in ("pier/docker", "verifiers/docker"):
                        measure(what, count, root)


if __name__ == "__main__":
    main()
