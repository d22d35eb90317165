"""How fast rollouts are: a 10-turn agent with an instant policy on `local`, all at once.

    python benchmarks/rollouts.py                        64 and 512 rollouts
    python benchmarks/rollouts.py --rollouts 512
    python benchmarks/rollouts.py --bare                 also the same agent as a bare subprocess, without a sandbox

Each row is one run of a fresh process: rollouts a minute, the most memory that pier itself held, that of its sandboxes,
and the latency of a turn as the agent sees it, of which all is pier's, since the policy answers at once. `bare` is the
floor: the same agent started on the host, with the gateway and no isolation. Ratios between rows of one session are
what counts; absolute numbers belong to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TURNS = 10
AGENT = r"""#!/usr/bin/env python3
import http.client, json, os, sys, time, urllib.parse
base = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
link = http.client.HTTPConnection(base.hostname, base.port)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages, took = [{"role": "user", "content": "go"}], []
while True:
    began = time.monotonic()
    link.request("POST", base.path + "/chat/completions", json.dumps({"model": "m", "messages": messages}), headers)
    message = json.load(link.getresponse())["choices"][0]["message"]
    took.append(time.monotonic() - began)
    messages += [message, {"role": "user", "content": "and then?"}]
    if message["content"] == "done":
        break
open("/tmp/answer", "w").write("hi\n") if len(sys.argv) < 2 else None
print(json.dumps(took))
"""


class InstantPolicy:
    """Answers at once, with exact tokens: the prompt grows by four ids a turn."""

    vocab_size = 100

    async def __call__(self, request: Any) -> Any:
        from pier.wire.turn import Text, Tokens, Turn, Usage

        turn = len(request.messages) // 2 + 1
        prompt = tuple(range(1, 4)) + (7, 8, 9) * (turn - 1)
        text = "done" if turn >= TURNS else "on"
        return Turn((Text(text),), usage=Usage(len(prompt), 2), tokens=Tokens(prompt, (7, 8), (-0.1, -0.2)))


class Memory(threading.Thread):
    """The most memory of this process, and of its sandboxes, sampled; what processes share counts once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over, self.own, self.others = threading.Event(), 0, 0

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.own = max(self.own, _share(os.getpid()))
            self.others = max(self.others, sum(_share(pid) for pid in _below(os.getpid())))


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


async def run_pier(count: int, root: Path) -> dict[str, Any]:
    from tests.job_tasks import make_task

    import pier
    from pier import AgentConfig

    make_task(root / "tasks/t")
    agent = AgentConfig(name="command", kwargs={"script": str(root / "agent.py")})
    memory = Memory()
    memory.start()
    began, good, exact = time.monotonic(), 0, 0
    stream = pier.rollouts(
        root / "tasks", agent=agent, policy=InstantPolicy(), group=count, concurrency=count, image="host", retries=0
    )
    async for rollout in stream:
        good += rollout.reward == 1.0 and rollout.turns == TURNS
        exact += len(rollout.trainable) == 1
    seconds = time.monotonic() - began
    memory.over.set()
    memory.join()
    sizes = {"pier_mb": memory.own / 1024, "sandboxes_mb": memory.others / 1024}
    return {"rollouts": count, "seconds": seconds, "good": good, "exact": exact, **sizes}


async def run_bare(count: int, root: Path) -> dict[str, Any]:
    """The same agent as a process of the host, all at once, behind the same gateway; nothing is graded."""
    from pier.gateway import Gateway

    began = time.monotonic()
    async with Gateway() as gateway:
        url = await gateway.serve()

        async def one() -> list[float]:
            async with gateway.session("m", upstream=InstantPolicy()) as session:
                env = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": session.key}
                script = str(root / "agent.py")
                process = await asyncio.create_subprocess_exec(
                    sys.executable, script, "bare", env=env, stdout=subprocess.PIPE
                )
                out, _ = await process.communicate()
                return json.loads(out)

        took = [seconds for times in await asyncio.gather(*(one() for _ in range(count))) for seconds in times]
    return {"rollouts": count, "seconds": time.monotonic() - began, "turn_ms": statistics.median(took) * 1000}


def measure(what: str, count: int) -> dict[str, Any]:
    """One run in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="pier-bench.") as name:
        (Path(name) / "agent.py").write_text(AGENT)
        command = [sys.executable, __file__, "--one", what, str(count), name]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        what, count, root = given.one
        run = run_pier if what == "pier" else run_bare
        print(json.dumps(asyncio.run(run(int(count), Path(root)))))
        return
    for count in given.rollouts:
        for what in ("pier", *(("bare",) if given.bare else ())):
            row = measure(what, count)
            rate = 60 * row["rollouts"] / row["seconds"]
            rest = " ".join(f"{name}={value:.4g}" for name, value in row.items() if name != "seconds")
            print(f"{what:5} {rate:8.0f} rollouts/min  {row['seconds']:6.1f} s  {rest}", flush=True)


if __name__ == "__main__":
    main()
