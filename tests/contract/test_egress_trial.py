"""A trial keeps what its network policy decided, in its log and in its result."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pier.image.importing import import_image
from pier.image.store import ImageStore
from pier.network.policy import NetworkPolicy
from pier.trial.config import AgentConfig
from pier.trial.images import ImageRequest
from pier.trial.spec import open_services
from tests.busybox import busybox_image
from tests.trial_runs import TOML, open_bench, write_task

pytestmark = pytest.mark.plain

ALLOWLIST = NetworkPolicy("allowlist", ("allowed.invalid",))


async def test_decisions_and_refusals_of_a_trial(tmp_path: Path) -> None:
    toml = TOML.replace('"no-network"', '"allowlist"\nallowed_hosts = ["allowed.invalid"]')
    task = write_task(tmp_path / "t", toml=toml)
    attempts = "getent hosts refused.invalid; getent hosts refused.invalid; touch /app/done"
    async with open_bench(tmp_path / "trials", {"PATH": os.environ["PATH"]}) as bench:
        result = await bench.run(task, AgentConfig(name="command", kwargs={"command": attempts}))
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
        result = await bench.run(task, AgentConfig(name="command", kwargs={"command": tries}))
        quiet = await bench.run(task, AgentConfig(name="command", kwargs={"command": "true"}))
    assert result.pier is not None and result.pier.network_refused == {"tcp 192.0.2.7:80": 3}
    assert quiet.pier is not None and quiet.pier.network_refused == {}


@pytest.mark.parametrize(("network", "links"), [(NetworkPolicy("none"), "lo"), (ALLOWLIST, "eth0 lo")])
async def test_a_build_has_the_network_that_its_task_says(tmp_path: Path, network: NetworkPolicy, links: str) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM busybox\nRUN echo $(ls /sys/class/net) > /links\n")
    await import_image(ImageStore(), busybox_image(tmp_path / "busybox").layers[0], "busybox")
    async with open_services("local", label="test") as services:
        image = await services.images.get(ImageRequest(context=context, network=network))
    assert (image.layers[-1] / "links").read_text().split() == links.split()
