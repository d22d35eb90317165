"""What sessions cost that do nothing: memory, counted in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

PROGRAM = """
import asyncio, json, resource, sys
from pathlib import Path
from pier.gateway import Budget, Gateway

async def model(request):
    return "hi"

def kept():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

async def main():
    folder = Path(sys.argv[1])
    async with Gateway() as gateway:
        url = await gateway.serve()
        host, port = url.removeprefix("http://").split(":")
        before, idle, sessions = kept(), [], []
        for number in range(1000):
            session = gateway.session("m", upstream=model, budget=Budget(turns=5), recording=folder / f"{number}.jsonl")
            sessions.append(session)
            idle.append(await asyncio.open_connection(host, int(port)))
        for session, (reader, writer) in list(zip(sessions, idle))[:200]:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 2000}]})
            head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: h\\r\\nAuthorization: Bearer {session.key}"
            writer.write(f"{head}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
            assert b" 200 " in await reader.readuntil(b"\\r\\n\\r\\n")
        for _ in range(600):
            if (files := len(list(Path("/proc/self/fd").iterdir()))) < 2100:
                break
            await asyncio.sleep(0.1)
        print(json.dumps({"before": before, "after": kept(), "files": files}))
        for _, writer in idle:
            writer.close()

asyncio.run(main())
"""


async def test_a_thousand_idle_sessions_are_small(tmp_path: Path) -> None:
    running = await asyncio.create_subprocess_exec(
        "sh", "-c", 'ulimit -n 4096 && exec "$@"', "sh", sys.executable, "-c", PROGRAM, str(tmp_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(running.communicate(), 240)
    assert running.returncode == 0, err.decode()
    told = json.loads(out)
    assert told["after"] < 200 * 2**20
    # Both ends of each connection are in that process, and no recording stays open.
    assert told["files"] < 2100
