"""A trial keeps what its network policy decided, in its log and in its result."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pier.trial.spec import AgentChoice
from tests.trial_runs import TOML, open_bench, write_task

pytestmark = pytest.mark.plain


async def test_decisions_and_refusals_of_a_trial(tmp_path: Path) -> None:
    toml = TOML.replace('"no-network"', '"allowlist"\nallowed_hosts = ["allowed.invalid"]')
    task = write_task(tmp_path / "t", toml=toml)
    attempts = "getent hosts refused.invalid; getent hosts refused.invalid; touch /app/done"
    async with open_bench(tmp_path / "trials", {"PATH": os.environ["PATH"]}) as bench:
        result = await bench.run(task, AgentChoice("command", options={"command": attempts}))
    rows = [json.loads(row) for row in (bench.last / "network.jsonl").read_text().splitlines()]
    assert rows[0]["kind"] == "probe" and rows[0]["allowed"]
    assert [row for row in rows if row.get("name") == "refused.invalid" and not row["allowed"]]
    assert result.pier is not None
    assert result.pier.network_refused["dns refused.invalid"] >= 2
    assert not [name for name in result.pier.network_refused if "probe" in name or "169.254" in name]


async def test_attempts_without_a_network_are_summed_up(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    tries = "python3 -c \"import socket; [socket.socket().connect_ex(('192.0.2.7', 80)) for _ in range(3)]\""
    async with open_bench(tmp_path / "trials", {"PATH": os.environ["PATH"]}) as bench:
        result = await bench.run(task, AgentChoice("command", options={"command": tries}))
        quiet = await bench.run(task, AgentChoice("command", options={"command": "true"}))
    assert result.pier is not None and result.pier.network_refused == {"ip anywhere": 3}
    assert quiet.pier is not None and quiet.pier.network_refused == {}
