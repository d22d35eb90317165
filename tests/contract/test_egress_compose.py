"""The policy holds in every service of a task, in a fake internet that counts what reaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import missing
from tests.once import made_once
from tests.world import in_world

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

_SCRIPT = r"""
import asyncio, json, os, sys
from dataclasses import replace
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.compose import Composition
from pier.sandbox.compose.read import read_compose
from tests.compose_tasks import bash_image
from tests.egress import ALLOWED, ATTEMPTS as PROGRAM, tools_image
from tests.engine import engine

ATTEMPTS = {
    "allowed": "wget -qO- http://allowed.test/",
    "refused name": "wget -qO- http://refused.test/",
    "address": "wget -qO- http://93.184.216.36/",
    "metadata": "wget -qO- http://169.254.169.254/",
    "this machine": "wget -qO- http://203.0.113.2:80/",
    "neighbour": "wget -qO- http://side:8080/page",
    "hub": "wget -qO- http://198.19.0.1/",
    "host gateway": "wget -qO- http://machine/",
}

async def try_everything(backend, root, mode, images):
    # All ways out, tried by the own program of a service, from its first instruction on.
    path = root / "tries.yaml"
    (root / "attempts.py").write_text(PROGRAM)
    path.write_text(
        "services:\n  main: {image: x}\n"
        "  tries: {image: x, command: python3 /attempts.py, volumes: ['./attempts.py:/attempts.py']}\n"
    )
    compose = read_compose(path, {})
    decisions, printed = [], []
    spec = SandboxSpec(
        images["main"],
        network=NetworkPolicy(mode, ALLOWED if mode == "allowlist" else ()),
        on_decision=lambda decision: decisions.append(decision.line()),
        compose=Composition(compose, images, lambda name, data: printed.append(data)),
    )
    async with await backend.start(spec), asyncio.timeout(300):
        while b"[ended" not in b"".join(printed):
            await asyncio.sleep(0.1)
    return {"printed": b"".join(printed).decode(), "decisions": decisions}

async def main():
    root = Path(sys.argv[1])
    image = bash_image(root)
    path = root / "docker-compose.yaml"
    path.write_text(
        "services:\n  main: {image: x}\n"
        "  side: {image: x, command: httpd -f -p 8080 -h /tmp, networks: [default, inner],\n"
        "    extra_hosts: ['machine:host-gateway']}\n"
        "  inside: {image: x, command: sleep 9999, networks: [inner]}\n"
        "networks: {inner: {internal: true}}\n"
    )
    compose = read_compose(path, {})
    told, decisions, tried = {}, [], {}
    (root / "tools").mkdir()
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            images = {"main": image, "tries": replace(tools_image(root / "tools"), digest="sha256:" + "c" * 64)}
            for mode in ("allowlist", "none"):
                tried[mode] = await try_everything(backend, root, mode, images)
            before = traffic.seen()
            spec = SandboxSpec(
                image,
                network=NetworkPolicy("allowlist", ("allowed.test",)),
                on_decision=lambda decision: decisions.append(decision.line()),
                compose=Composition(compose, dict.fromkeys(compose.services, image)),
            )
            async with await backend.start(spec) as box:
                await box.service("side").write_file("/tmp/page", b"the page")
                for mode in ("allowlist", "none", "public"):
                    if mode != "allowlist":
                        await box.set_network(NetworkPolicy(mode))
                    for service in ("main", "side", "inside"):
                        for name, line in ATTEMPTS.items():
                            result = await box.service(service).exec(line, timeout=100)
                            told[f"{mode} {service} {name}"] = result.text.strip() if result.ok else "refused"
        assert lease.held() == []
    answer = {"told": told, "decisions": decisions, "tried": tried, "before": before, "seen": traffic.seen()}
    Path(sys.argv[2]).write_text(json.dumps(answer))

with engine() as running:
    os.environ["DOCKER_HOST"] = running.url
    asyncio.run(main())
    assert running.containers() == []
"""


@pytest.fixture(scope="module", params=["entered by pier", "entered by a helper"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    helper = "1" if "helper" in request.param else ""

    def run(root: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIER_HOME", str(root / "pier"))
            patch.setenv("PIER_DOCKER_HELPER", helper)
            done = in_world(_SCRIPT, root, str(root), str(root / "answer"))
        assert (root / "answer").exists(), f"{done.stdout}\n{done.stderr}"

    place = made_once(tmp_path_factory, f"compose-world{helper}", run)
    return json.loads((place / "answer").read_text())


def test_only_what_is_allowed_is_reached(outcome: dict[str, Any]) -> None:
    reached = {name: text for name, text in outcome["told"].items() if text != "refused"}
    assert reached == {
        "allowlist main allowed": "hello from 93.184.216.34/",
        "allowlist side allowed": "hello from 93.184.216.34/",
        **{
            f"public {who} {what}": f"hello from 93.184.216.{last}/"
            for who in ("main", "side")
            for what, last in (("allowed", 34), ("refused name", 36), ("address", 36))
        },
        **{
            f"{mode} {who} neighbour": "the page"
            for mode in ("allowlist", "none", "public")
            for who in ("main", "side", "inside")
        },
    }


def test_every_service_proves_and_logs_its_own(outcome: dict[str, Any]) -> None:
    rows = outcome["decisions"]
    for service in (None, "side", "inside"):
        own = [row for row in rows if row.get("service") == service]
        modes = [row["name"] for row in own if row["kind"] == "probe"]
        assert modes[-1] == ("none" if service == "inside" else "public")
        assert service == "inside" or modes[-3:] == ["allowlist", "none", "public"]
        refused = {row["name"] for row in own if not row["allowed"]}
        assert {"refused.test", "93.184.216.36", "169.254.169.254", "203.0.113.2"} <= refused
        assert ("169.254.0.1" in refused) == (service == "side")


@pytest.mark.parametrize("mode", ["allowlist", "none"])
def test_a_services_own_program_finds_no_way_out(outcome: dict[str, Any], mode: str) -> None:
    tried = outcome["tried"][mode]
    assert "exit code 0" in tried["printed"], tried["printed"]
    attempts: dict[str, str] = json.loads(tried["printed"].partition("[ended")[0])
    passed = {name for name, text in attempts.items() if text.startswith("got b")}
    by_tls = {"tls server name agrees", "tls without server name"}
    allowed = {"server speaks first", "port of its rule", "wildcard", "address by its rule", *by_tls}
    assert passed <= (allowed if mode == "allowlist" else set()), attempts
    assert {attempts[name] for name in ("vsock", "packet socket", "new route")} == {"EAFNOSUPPORT", "EPERM"}
    refused = {row["name"] for row in tried["decisions"] if row.get("service") == "tries" and not row["allowed"]}
    assert {"refused.test", "93.184.216.36", "169.254.169.254", "10.1.2.3", "2001:470::34", "8.8.8.8"} <= refused
    assert {row.get("service") for row in tried["decisions"] if row["kind"] != "probe"} == {"tries"}


def test_nothing_but_allowed_hosts_saw_anything_of_services(outcome: dict[str, Any]) -> None:
    hosts = {row.split()[1].rpartition(":")[0].strip("[]") for row in outcome["before"]}
    assert hosts <= {"93.184.216.34", "93.184.216.35", "93.184.216.37", "93.184.216.99", "2001:470::34"}, hosts
    assert not [row for row in outcome["seen"] if row.split()[1].startswith(("169.254.", "203.0.113.2"))]
