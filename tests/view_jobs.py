"""Jobs and trials written on the spot for tests of the viewer, and a viewer that serves them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from pier.job.ledger import Fault, Ledger, Outcome
from pier.job.plan import PlannedTask, make_plan
from pier.view.library import Library
from pier.view.server import Viewer, serve

AGENTS = [
    {"name": "claude-code", "model_name": "anthropic/sonnet"},
    {"name": "codex", "model_name": "openai/gpt"},
]
BROKEN = Outcome(fault=Fault("SandboxError", "sandbox", "infra", True, "the sandbox broke"), cost=0.0, seconds=3.0)


def outcome(place: int) -> Outcome:
    """Every fifth trial breaks, every third fails, the others pass."""
    if place % 5 == 4:
        return BROKEN
    cost = 0.01 * (place % 7 + 1)
    rewards = {"reward": 0.0 if place % 3 == 2 else 1.0}
    return Outcome(rewards=rewards, cost=cost, tokens=(1000 * place + 10, 500, 20), seconds=10.0 + place)


def write_job(directory: Path, tasks: int = 4, attempts: int = 2, *, agents: int = 2) -> list[str]:
    """A finished job of pier's, of which only the journal exists; the names of its trials."""
    directory.mkdir(parents=True)
    planned = [PlannedTask(f"task-{n:03}", "sha256:" + "a" * 64, f"/task-{n:03}", source="set") for n in range(tasks)]
    ledger = Ledger.create(directory)
    ledger.adopt_plan(make_plan(planned, AGENTS[:agents], {}, attempts))
    for place, trial in enumerate(ledger.plan.trials):
        ledger.begin(trial.id)
        ledger.end(trial.id, outcome(place))
    ledger.finish()
    ledger.close()
    return [trial.name for trial in ledger.plan.trials]


def write_result(trial: Path, **more: Any) -> None:
    base = {"task_name": "task-000", "trial_name": trial.name, "trial_uri": "file:///x", "task_id": {"path": "/x"}}
    agent = {"name": "claude-code", "version": "1.2", "model_info": {"name": "sonnet", "provider": "anthropic"}}
    times = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:05Z"}
    verdict = {"verifier_result": {"rewards": {"reward": 1.0}}}
    result = {**base, "task_checksum": "x", "config": {}, "agent_info": agent, **times, **verdict, **more}
    trial.mkdir(parents=True, exist_ok=True)
    (trial / "result.json").write_text(json.dumps(result))


def write_file(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def agent_step(number: int, text: str = "", **more: Any) -> dict[str, Any]:
    stamp = f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z"
    used = {"metrics": {"prompt_tokens": 1000, "cached_tokens": 800, "completion_tokens": 20, "cost_usd": 0.01}}
    return {
        "step_id": number,
        "timestamp": stamp,
        "source": "agent",
        "message": text,
        "model_name": "m",
        **used,
        **more,
    }


def tool_step(number: int, command: str, output: str, text: str = "", **more: Any) -> dict[str, Any]:
    call = {"tool_call_id": f"c{number}", "function_name": "Bash", "arguments": {"command": command}}
    results = {"results": [{"source_call_id": f"c{number}", "content": output}]}
    return agent_step(number, text, tool_calls=[call], observation=results, **more)


def trajectory(steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    agent = {"name": "claude-code", "version": "1.2", "model_name": "sonnet"}
    return {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": agent, "steps": steps, **more}


def conversation() -> dict[str, Any]:
    """A small trajectory with everything that a step may have."""
    edit = {"file_path": "/app/a.py", "old_string": "x = 1\n", "new_string": "x = 2\n"}
    inner = trajectory([tool_step(1, "ls inner", "inner.txt", "I am the sub-agent.")], trajectory_id="sub-1")
    ref = [{"trajectory_id": "sub-1"}]
    steps = [
        {"step_id": 1, "source": "system", "message": "You are careful."},
        {"step_id": 2, "source": "user", "message": "Fix the **bug** in `a.py`."},
        tool_step(3, "cat a.py", "x = 1", "I look first.", reasoning_content="Where is the bug?"),
        agent_step(4, tool_calls=[{"tool_call_id": "e", "function_name": "Edit", "arguments": edit}]),
        agent_step(
            5,
            "I ask a helper.",
            tool_calls=[{"tool_call_id": "t", "function_name": "Task", "arguments": {"prompt": "look"}}],
            observation={"results": [{"source_call_id": "t", "content": "done", "subagent_trajectory_ref": ref}]},
        ),
        {"step_id": 6, "source": "user", "message": "Summary so far.", "extra": {"compaction": True}},
        agent_step(7, "All done.", model_name="other"),
    ]
    return trajectory(steps, subagent_trajectories=[inner])


@asynccontextmanager
async def viewing(path: Path, **options: Any) -> AsyncIterator[Viewer]:
    async with serve(Library.open(path), port=0, **options) as viewer:
        yield viewer


@contextmanager
def viewer_thread(path: Path) -> Iterator[Viewer]:
    """A viewer in a thread with its own event loop, for a synchronous browser."""
    import asyncio
    import threading

    ready: list[tuple[Viewer, asyncio.AbstractEventLoop, asyncio.Event]] = []
    started = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        async with viewing(path) as viewer:
            ready.append((viewer, asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(60)
        yield ready[0][0]
    finally:
        if ready:
            ready[0][1].call_soon_threadsafe(ready[0][2].set)
        thread.join()


def write_critique(job: Path, run: str, trial: str, answers: dict[str, str], evidence: list[dict[str, Any]]) -> None:
    """What a critic said about a trial, one answer for each criterion and one finding."""
    place = job / ".critiques" / run
    write_file(place / "config.json", json.dumps({"agent": {"name": "critic"}, "pier": {"criteria": list(answers)}}))
    checks = {name: {"outcome": outcome, "explanation": "because"} for name, outcome in answers.items()}
    finding = {"criterion": next(iter(answers)), "severity": "low", "summary": "see there", "evidence": evidence}
    result = {"rating": "good", "feedback": "Fine.", "checks": checks, "findings": [finding]}
    write_file(place / trial / "critique-metadata.json", "{}")
    write_file(place / trial / "artifacts" / "critique-result.json", json.dumps(result))
