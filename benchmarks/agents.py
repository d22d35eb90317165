"""How soon an agent calls its model in a fresh sandbox: from a mounted pack, and installed there first.

Measures from the start of the sandbox to the first model call, and apart from that what of it is pier's own: the time
until the agent's process is started. Installing is done with `npm` on this machine into an empty directory, as an
installer in a sandbox would do it, with npm's cache emptied. Prints a table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, find_agent
from pier.agent.pack import PackStore
from pier.endpoint import GATEWAY_PORT
from pier.gateway.server import Gateway
from pier.image.model import HOST, Image
from pier.lease import Lease
from pier.sandbox.contract import Backend, Mount, SandboxSpec
from pier.sandbox.local import LocalBackend
from pier.wire.turn import Request, Text, Turn, Usage

PACKS = Path(os.environ.get("PIER_PACKS") or Path(__file__).parents[1] / ".cache" / "packs")
AGENTS = ("claude-code", "codex", "gemini-cli", "opencode", "goose", "pi")


async def first_call(backend: Backend, gateway: Gateway, name: str) -> tuple[float, float]:
    """Seconds from the start of a sandbox until the agent is started, and until it calls its model."""
    agent = find_agent(name)()
    assert agent.pack is not None
    pack = PackStore(PACKS).find(agent.pack)
    assert pack is not None
    called: list[float] = []

    async def answer(request: Request) -> Turn:
        called.append(time.perf_counter())
        return Turn((Text("Done."),), "end", Usage(1, 1), None, request.model)

    start = time.perf_counter()
    spec = SandboxSpec(Image(HOST, HOST), mounts=(Mount(PACK_PATH, pack.path),))
    async with await backend.start(spec) as sandbox:
        await sandbox.write_file(f"{AGENT_LOGS}/.keep", b"")
        session = gateway.session("scripted", upstream=answer)
        await sandbox.listen(GATEWAY_PORT, gateway.protocol_factory(session))
        ready = time.perf_counter()
        await agent.run(sandbox, AgentRun("Say that you are done.", "/tmp", session.endpoint(), seconds=120))
        await session.close()
    return ready - start, called[0] - start


def install(name: str) -> float:
    """Seconds that installing the agent takes, with nothing in a cache."""
    agent = find_agent(name)
    assert agent.pack is not None
    with tempfile.TemporaryDirectory(prefix="pier-bench-") as directory:
        package = agent.pack.package.replace("{arch}", "x64")
        command = [
            "npm",
            "install",
            "--silent",
            "--no-save",
            "--cache",
            f"{directory}/cache",
            f"{package}@{agent.pack.version}",
        ]
        start = time.perf_counter()
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
        return time.perf_counter() - start


async def measure(names: list[str], times: int, installs: bool) -> list[dict[str, Any]]:
    rows = []
    with Lease(label="benchmark") as lease:
        async with LocalBackend(lease) as backend, Gateway() as gateway:
            for name in names:
                await first_call(backend, gateway, name)
                runs = [await first_call(backend, gateway, name) for _ in range(times)]
                row = {
                    "agent": name,
                    "pier_s": round(statistics.median(run[0] for run in runs), 4),
                    "first_call_s": round(statistics.median(run[1] for run in runs), 3),
                    "install_s": round(await asyncio.to_thread(install, name), 1) if installs else None,
                }
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agents", nargs="*", default=list(AGENTS))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--no-install", action="store_true", help="measure mounted packs only")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    built = [name for name in given.agents if (spec := find_agent(name).pack) and PackStore(PACKS).find(spec)]
    installs = not given.no_install and shutil.which("npm") is not None
    rows = asyncio.run(measure(built, given.times, installs))
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'agent':16} {'pier':>10} {'first call':>12} {'install first':>14}")
    for row in rows:
        installed = f"{row['install_s'] + row['first_call_s']:.1f} s" if row["install_s"] else "-"
        print(f"{row['agent']:16} {row['pier_s'] * 1000:>7.1f} ms {row['first_call_s']:>10.2f} s {installed:>14}")
    for name in given.agents:
        if name not in built:
            print(f"{name}: its pack is not built (.ci/packs {name})")


if __name__ == "__main__":
    main()
