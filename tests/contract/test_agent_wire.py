"""Why an agent's run failed is told from what happened on the wire, whatever its exit code says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pier.agent.command import CommandAgent
from pier.gateway.server import Gateway
from pier.trial.config import AgentConfig
from pier.trial.result import TrialResult
from tests.agent_rig import PACKS, need_pack
from tests.trial_runs import Bench, open_bench, write_task

CALL = """
import json, os, sys, urllib.request, urllib.error
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
def call(words):
    body = {"model": os.environ["PIER_MODEL"], "messages": [{"role": "user", "content": words}]}
    if "title" not in words:
        body["tools"] = [TOOL]
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60).read()
    except urllib.error.HTTPError:
        pass
for words in sys.argv[3:] or ["go"] * int(sys.argv[1]):
    call(words)
sys.exit(int(sys.argv[2]))
"""


class Caller(CommandAgent):
    """Calls its model so often and ends with that exit code, and says that it needs a model."""

    name = "caller"
    dialect = "chat"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path / "trials") as found, Gateway() as gateway:
        yield Bench(replace(found.services, gateway=gateway), tmp_path / "trials")


async def run(bench: Bench, root: Path, turns: Any, calls: int, code: int = 0, *words: str) -> TrialResult:
    script = root / "script.yaml"
    script.write_text(yaml.safe_dump(turns))
    task = write_task(root / "task")
    options = {"command": ["python3", "-c", CALL, str(calls), str(code), *words]}
    return await bench.run(task, AgentConfig(name=f"{__name__}:Caller", model_name=f"script:{script}", kwargs=options))


def told(result: TrialResult) -> tuple[str | None, str | None, bool | None]:
    error = result.exception_info
    return (error.code, error.blame, error.retryable) if error else (None, None, None)


def counted(result: TrialResult) -> dict[str, int]:
    assert result.agent_result is not None and result.agent_result.metadata is not None
    return result.agent_result.metadata["model_calls"]


@pytest.mark.parametrize(
    ("turns", "calls", "code", "expected", "ends"),
    [
        ([{"text": "hi"}], 1, 0, (None, None, None), {"answered": 1}),
        ([{"text": "hi"}], 1, 3, ("agent_exit", "agent", False), {"answered": 1}),
        ([{"text": "hi"}], 0, 0, ("agent_no_calls", "agent", False), {}),
        ([{"text": "hi"}], 0, 3, ("agent_no_calls", "agent", False), {}),
        ([{"error": {"status": 429}}], 1, 0, ("provider_rate_limit", "provider", True), {"rate_limited": 1}),
        ([{"error": {"status": 503}}], 1, 3, ("provider_error", "provider", True), {"provider_error": 1}),
        ([{"error": {"status": 401}}], 1, 0, ("provider_error", "provider", False), {"provider_error": 1}),
        ([{"error": {"status": 400}}], 1, 3, ("agent_exit", "agent", False), {"rejected": 1}),
        ([{"error": {"status": 500}}, {"text": "hi"}], 2, 0, (None, None, None), {"provider_error": 1, "answered": 1}),
    ],
)
async def test_each_end_has_its_code(
    bench: Bench, tmp_path: Path, turns: list[Any], calls: int, code: int, expected: Any, ends: dict[str, int]
) -> None:
    result = await run(bench, tmp_path, turns, calls, code)
    assert (told(result), counted(result)) == (expected, ends)
    assert result.rewards == (None if expected[1] == "provider" else {"reward": 0})


TITLE = "Write a title for this session."


@pytest.mark.parametrize(
    ("work", "title", "expected"),
    [
        ({"text": "done"}, {"error": {"status": 500}}, (None, None, None)),
        ({"text": "done"}, {"error": {"status": 429}}, (None, None, None)),
        ({"error": {"status": 503}}, {"text": "Going"}, ("provider_error", "provider", True)),
    ],
)
async def test_only_the_agents_own_work_decides(
    bench: Bench, tmp_path: Path, work: Any, title: Any, expected: Any
) -> None:
    script = {"turns": [work], "lanes": [{"when": {"message": "title"}, "turns": [title]}]}
    result = await run(bench, tmp_path, script, 0, 0, "go", TITLE)
    assert told(result) == expected


@pytest.mark.parts
async def test_a_real_agent_that_exits_with_0_on_a_dead_provider(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_pack("pi")
    monkeypatch.setenv("PIER_PACKS", str(PACKS))
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump([{"error": {"status": 401}}] * 8))
    result = await bench.run(write_task(tmp_path / "task"), AgentConfig(name="pi", model_name=f"script:{script}"))
    assert told(result) == ("provider_error", "provider", False)
