"""The memory that one agent can make pier use, measured in a separate process, above its use at the start."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pier.job.view import TrialView
from pier.record.writer import Recorder
from pier.trial import bounded
from pier.view.index import Index
from pier.view.library import Library
from pier.view.steps import StepReader
from pier.wire.body import parse
from tests.gateway_fakes import PATHS
from tests.redteam import route
from tests.view_jobs import write_file, write_job, write_result

MOST = 640
"""Megabytes that one session may add to a gateway, its copies of a request for a moment included."""
GATEWAY = """
import asyncio, sys
from pathlib import Path
from pier.gateway import Gateway
from pier.wire.turn import Text, Turn, Usage

async def answer(request):
    await asyncio.sleep(0.05)
    return Turn((Text("hello"),), "end", Usage(1, 1))

def used():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

async def main():
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=answer, recording=Path(sys.argv[1]))
        print(await gateway.serve(session=session), session.key, used(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(used(), flush=True)

asyncio.run(main())
"""


class Measured:
    """A gateway in another process, its session, and what that took, in megabytes."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = f"{url}/v1/chat/completions", key
        self.added = 0

    async def post(self, body: bytes) -> int:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(self.url, data=body, headers=headers) as answer,
        ):
            await answer.read()
            return answer.status


@asynccontextmanager
async def measured(recording: Path) -> AsyncIterator[Measured]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", GATEWAY, recording, stdin=pipe, stdout=pipe)
    assert child.stdin and child.stdout
    url, key, before = (await child.stdout.readline()).decode().split()
    found = Measured(url, key)
    try:
        yield found
        child.stdin.close()
        found.added = int(await child.stdout.readline()) - int(before)
        assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def body(*messages: Any) -> bytes:
    said = [{"role": "user", "content": message} for message in messages]
    return json.dumps({"model": "m", "messages": said}, ensure_ascii=False).encode()


def many_values() -> Iterator[bytes]:
    for number in range(3):
        yield b'{"model":"m","x":%d,"messages":[%b]}' % (number, b",".join([b"{}"] * 490_000))


def large_texts() -> Iterator[bytes]:
    for number in range(8):
        yield body(f"\N{PILE OF POO}{number}" + "x" * (14 << 20))


def many_conversations() -> Iterator[bytes]:
    for number in range(10):
        yield body(str(number), *["x"] * 10_000)


def many_messages() -> Iterator[bytes]:
    for number in range(8):
        yield body(*map(str, range(number * 15_000, (number + 1) * 15_000)))


@route(
    "host",
    "an agent fills pier's memory: large requests at once, millions of values, ever new messages or conversations",
    "one session adds less than 640 MB to the gateway; its large requests wait for one another",
)
@pytest.mark.parametrize("bodies", [many_values, large_texts, many_conversations, many_messages])
async def test_a_session_takes_a_bounded_amount_of_memory(bodies: Any, tmp_path: Path) -> None:
    async with measured(tmp_path / "recording.jsonl") as gateway:
        asked = await asyncio.gather(*(gateway.post(each) for each in bodies()))
    assert set(asked) == {400 if bodies is many_values else 200}, "they wait for one another"
    assert gateway.added < MOST, gateway.added


RUNNER = """
import asyncio, json, resource, sys
from pathlib import Path
from pier.agent.oracle import NopAgent
from pier.errors import AgentError
from pier.gateway import Gateway
from pier.redact import Redactor
from pier.trial import bounded
from pier.record import About
from pier.trial.agent import find_fault
from pier.trial.trajectory import add_trajectory
from pier.trial.record import TrialRecord

def used():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

async def main():
    logs, bounded.MEMORY = Path(sys.argv[1]), int(sys.argv[2])
    record, before = TrialRecord(logs, Redactor()), used()
    async with Gateway() as gateway:
        session = gateway.session(recording=logs / "recording.jsonl")
        session.counts.add("error", 503, "provider")
        found = await find_fault(NopAgent(), AgentError("it failed", code="agent_exit"), session)
    await add_trajectory(logs, About("a", "1", "m", "s"), None, record)
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(json.dumps([used() - before, child, found.code, record.warnings]))

asyncio.run(main())
"""


def record_calls(path: Path, bodies: Iterator[bytes]) -> None:
    """A recording of these requests, each answered."""
    recorder = Recorder(path, {"model": "m"})
    facts = {"kind": "generate", "dialect": "chat", "method": "POST", "path": PATHS["chat"], "headers": {}}
    answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]})
    for raw in bodies:
        call = recorder.call(facts, parse(raw))
        call.status("delivered", 200, {"content-type": "application/json"}, False)
        call.chunk("delivered", answer.encode())
        call.end("ok", 200)
    recorder.close("done")


def one_history_many_times() -> Iterator[bytes]:
    for number in range(1_200):
        yield body(str(number % 12), "\N{PILE OF POO}" + "x" * 200_000)


@route(
    "host",
    "an agent makes calls whose recording fills pier's memory when it is read at the end of the trial",
    "it is read in a process of at most 2 GiB; without success there is no trajectory, and the agent is graded",
)
@pytest.mark.parametrize(
    ("bodies", "memory"),
    [(large_texts, 2 << 30), (many_messages, 2 << 30), (one_history_many_times, 2 << 30), (many_messages, 192 << 20)],
)
async def test_a_recording_is_read_back_in_a_bounded_amount_of_memory(bodies: Any, memory: int, tmp_path: Path) -> None:
    record_calls(tmp_path / "recording.jsonl", bodies())
    command = [sys.executable, "-c", RUNNER, tmp_path, str(memory)]
    runner = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    added, child, code, warnings = json.loads((await runner.communicate())[0])
    assert added < 192 and child < memory >> 20, (added, child)
    assert code == "agent_exit", "not the provider's fault"
    assert (tmp_path / "trajectory.json").is_file() is (warnings == [])
    assert len(warnings) == (memory < 1 << 30) and all("of memory" in each for each in warnings)


VIEWER = """
import asyncio, json, sys
from pathlib import Path
import aiohttp
from pier.trial import bounded
from tests.view_jobs import viewing

bounded.MEMORY = int(sys.argv[3])

def used():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

async def main():
    before, found = used(), []
    headers = {"Accept": "application/json"}
    async with viewing(Path(sys.argv[1])) as viewer, aiohttp.ClientSession(headers=headers) as http:
        for tab in ("", "/calls", "/verifier"):
            async with http.get(f"{viewer.origin}/jobs/one/{sys.argv[2]}{tab}") as answer:
                found.append((await answer.json())["content"])
    page, calls, tests = found
    rows = [part["tests"] for part in tests["parts"]]
    print(json.dumps([used() - before, calls, page.get("missing"), rows]))

asyncio.run(main())
"""


@route(
    "host",
    "an agent makes calls whose recording, or leaves a report of tests that, would fill the viewer's memory",
    "the recording is read in a process of at most 2 GiB, the report up to a limit; the page says what is missing",
)
@pytest.mark.parametrize("hostile", [False, True])
async def test_a_page_takes_a_bounded_amount_of_memory(hostile: bool, tmp_path: Path) -> None:
    trial = tmp_path / "one" / write_job(tmp_path / "one", 1, 1, agents=1)[0]
    write_result(trial)
    (trial / "agent").mkdir()
    if hostile:
        shaped_by_an_agent(trial / "agent" / "recording.jsonl")
    else:
        record_calls(trial / "agent" / "recording.jsonl", one_history_many_times())
    write_file(trial / "verifier" / "ctrf.json", b'{"results": {"tests": [' + b"{}," * 20_000_000 + b"{}]}}")
    memory = 512 << 20 if hostile else 2 << 30
    command = [sys.executable, "-c", VIEWER, tmp_path, trial.name, str(memory)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    viewer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
    added, calls, missing, tests = json.loads((await viewer.communicate())[0])
    assert added < 256, added
    assert len(calls["calls"]) == (0 if hostile else 1_200) and tests == [[]]
    assert ("of memory" in calls.get("problem", "")) is bool(missing) is hostile


def test_a_large_recording_holds_up_no_other_page(tmp_path: Path) -> None:
    names = write_job(tmp_path / "one", 2, 1, agents=1)[:2]
    for name, size in zip(names, (9 << 20, 10), strict=True):
        write_result(tmp_path / "one" / name)
        (tmp_path / "one" / name / "agent").mkdir()
        record_calls(tmp_path / "one" / name / "agent" / "recording.jsonl", iter([body("0", "x" * size)]))
    large, small = (TrialView.open(tmp_path / "one" / name) for name in names)
    (tmp_path / "index").mkdir()
    reader = StepReader(Index(Library.open(tmp_path / "one"), tmp_path / "index" / "index.sqlite"))
    with ThreadPoolExecutor() as pool:
        with bounded._lock:  # no process is free to read the large one
            slow = pool.submit(reader.parts, large)
            while not reader._large:
                time.sleep(0.01)
            assert pool.submit(reader.parts, small).result(20)
        assert slow.result(60)


READER = """
import sys
from pathlib import Path
from pier.errors import PierError
from pier.trial import bounded
{imports}

def used():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

trial, bounded.MEMORY = Path(sys.argv[1]), int(sys.argv[2])
before, problem = used(), ""
try:
    {statement}
except PierError as error:
    problem = error.explain()
print(problem)
print(used() - before)
"""
READERS = {
    "samples": ("from pier.rollout.export import export", "export([trial], None)"),
    "rollouts": (
        "from pier.rollout.samples import log, read_samples",
        "log.warning = lambda *words: print(*words); read_samples(trial / 'agent' / 'recording.jsonl', ['main'])",
    ),
    "capture": ("from pier.workspace.capture import capture", "capture(None, session_dir=trial / 'agent', environ={})"),
    "show": ("from pier.cli.gateway import show", "show.main([str(trial)], standalone_mode=False)"),
    "api": ("from pier import Trial", "Trial(trial).recording"),
    "trajectory": ("from pier import Trial", "Trial(trial).trajectory"),
    "replay": ("from pier.gateway.replay import Replay", "Replay.load(trial)"),
}


def shaped_by_an_agent(path: Path) -> None:
    """A recording that an agent wrote itself: one of its lines is parsed to thirty times its size."""
    record_calls(path, many_messages())
    with path.open("ab") as stream:
        stream.write(b'{"t":"note","c":1,"at":1,"x":[' + b"{}," * 20_000_000 + b"{}]}\n")


@route(
    "host",
    "an agent leaves a recording that fills memory when its samples are exported, when it is captured, listed "
    "or read by a program",
    "it is read in a process of at most 2 GiB, or up to a limit; beyond it the command fails and says why",
)
@pytest.mark.parametrize("reader", READERS)
async def test_a_hostile_recording_is_not_read_beyond_a_limit(reader: str, tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    shaped_by_an_agent(tmp_path / "agent" / "recording.jsonl")
    if reader == "trajectory":
        (tmp_path / "agent" / "trajectory.json").write_bytes(b'{"steps": [' + b"{}," * 20_000_000 + b"{}]}")
    imports, statement = READERS[reader]
    code = READER.format(imports=imports, statement=statement)
    command = [sys.executable, "-c", code, tmp_path, str(256 << 20)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=tmp_path)
    problem, _, added = (await process.communicate())[0].decode().strip().rpartition("\n")
    assert int(added) < 256, added
    assert "recording" in problem and "memory" in problem, problem
