"""The policy holds in every service of a task, in a fake internet that counts what reaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import missing
from tests.world import in_world

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

_SCRIPT = r"""
import asyncio, json, os, sys
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.compose import Composition, read_compose
from tests.compose_tasks import bash_image
from tests.engine import engine

ATTEMPTS = {
    "allowed": "wget -qO- http://allowed.test/",
    "refused name": "wget -qO- http://refused.test/",
    "address": "wget -qO- http://93.184.216.36/",
    "metadata": "wget -qO- http://169.254.169.254/",
    "this machine": "wget -qO- http://203.0.113.2:80/",
    "neighbour": "wget -qO- http://side:8080/page",
    "hub": "wget -qO- http://198.19.0.1/",
}

async def main():
    root = Path(sys.argv[1])
    image = bash_image(root)
    path = root / "docker-compose.yaml"
    path.write_text(
        "services:\n  main: {image: x}\n"
        "  side: {image: x, command: httpd -f -p 8080 -h /tmp, networks: [default, inner]}\n"
        "  inside: {image: x, command: sleep 9999, networks: [inner]}\n"
        "networks: {inner: {internal: true}}\n"
    )
    compose = read_compose(path, {})
    told, decisions = {}, []
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            spec = SandboxSpec(
                image,
                network=NetworkPolicy("allowlist", ("allowed.test",)),
                on_decision=lambda decision: decisions.append(decision.line()),
                compose=Composition(compose, dict.fromkeys(compose.services, image)),
            )
            async with await backend.start(spec) as box:
                await box.service("side").write_file("/tmp/page", b"the page")
                for mode in ("allowlist", "none"):
                    if mode == "none":
                        await box.set_network(NetworkPolicy("none"))
                    for service in ("main", "side", "inside"):
                        for name, line in ATTEMPTS.items():
                            result = await box.service(service).exec(line, timeout=100)
                            told[f"{mode} {service} {name}"] = result.text.strip() if result.ok else "refused"
        assert lease.held() == []
    Path(sys.argv[2]).write_text(json.dumps({"told": told, "decisions": decisions, "seen": traffic.seen()}))

with engine() as running:
    os.environ["DOCKER_HOST"] = running.url
    asyncio.run(main())
    assert running.containers() == []
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root: Path = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(tmp_path_factory.mktemp("home") / "pier"))
        done = in_world(_SCRIPT, root, str(root), str(root / "answer"))
    assert (root / "answer").exists(), f"{done.stdout}\n{done.stderr}"
    return json.loads((root / "answer").read_text())


def test_only_what_is_allowed_is_reached(outcome: dict[str, Any]) -> None:
    reached = {name: text for name, text in outcome["told"].items() if text != "refused"}
    assert reached == {
        "allowlist main allowed": "hello from 93.184.216.34/",
        "allowlist side allowed": "hello from 93.184.216.34/",
        **{
            f"{mode} {who} neighbour": "the page"
            for mode in ("allowlist", "none")
            for who in ("main", "side", "inside")
        },
    }
    assert {row.split()[1] for row in outcome["seen"]} == {"93.184.216.34:80"}


def test_every_service_proves_and_logs_its_own(outcome: dict[str, Any]) -> None:
    rows = outcome["decisions"]
    for service in (None, "side", "inside"):
        own = [row for row in rows if row.get("service") == service]
        modes = [row["name"] for row in own if row["kind"] == "probe"]
        assert modes[-1] == "none" and (service == "inside" or "allowlist" in modes)
        refused = {row["name"] for row in own if not row["allowed"]}
        assert {"refused.test", "93.184.216.36", "169.254.169.254", "203.0.113.2"} <= refused
