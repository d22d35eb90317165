"""Ways past an allowlist to another host behind an allowed address, tried from a sandbox on real servers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import vhosts
from tests.attacks import ATTACKS
from tests.redteam import route
from tests.world import in_world

pytestmark = pytest.mark.plain
DIRECTORY = "PIER_TEST_VHOSTS"

_INSIDE = r"""
import json, socket, ssl, sys
attacks, ports = json.loads(sys.argv[1]), json.loads(sys.argv[2])
told = {}
def say(port, data):
    heard = b""
    try:
        with socket.create_connection(("allowed.test", port), 30) as sock:
            sock.sendall(data)
            sock.shutdown(1)
            while part := sock.recv(65536):
                heard += part
    except OSError:
        pass
    return heard.decode("latin-1")
def tls(name):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("allowed.test", 443), 30) as sock:
            with context.wrap_socket(sock, server_hostname=name) as secure:
                return secure.version()
    except OSError as error:
        return "failed"
for server, port in ports.items():
    fine = say(port, b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n")
    told[server] = {name: say(port, data.encode("latin-1")) for name, data in attacks.items()} | {"fine": fine}
told["tls"] = {str(name): tls(name) for name in (None, "allowed.test", "refused.test")}
print(json.dumps(told))
"""

_OUTSIDE = r"""
import asyncio, json, sys
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.host import host_image
from tests import vhosts
from tests.attacks import ATTACKS
from tests.redteam.test_network import _INSIDE

async def main():
    ports = {name: port for name, port in vhosts.PORTS.items() if vhosts.missing(name) is None}
    attacks = {name: data.decode("latin-1") for name, data in ATTACKS.items()}
    with Lease() as lease:
        async with open_backend("local", lease) as backend:
            told = {}
            for hosts in (("allowed.test",), ("allowed.test", "93.184.216.34:443")):
                spec = SandboxSpec(host_image(), network=NetworkPolicy("allowlist", hosts))
                async with await backend.start(spec) as box:
                    command = ["/usr/bin/python3", "-c", _INSIDE, json.dumps(attacks), json.dumps(ports)]
                    result = await box.exec(command, timeout=200)
                    told[len(hosts)] = json.loads(result.stdout) if result.ok else result.error_text
                ports = {}
    Path(sys.argv[1]).write_text(json.dumps(told))

asyncio.run(main())
"""


def serve(names: dict[str, str]) -> None:
    vhosts.start_all(Path(os.environ[DIRECTORY]))


@dataclass(frozen=True)
class Outcome:
    answers: dict[str, dict[str, str]]
    """For each server what each attack was answered."""
    tls: dict[str, str]
    tls_with_address: dict[str, str]
    """For each server name what came of a TLS connection, without and with a rule for the address."""
    directory: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directory = tmp_path_factory.mktemp("vhosts")
    told = directory / "told.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(directory / "pier"))
        patch.setenv(DIRECTORY, str(directory))
        done = in_world(_OUTSIDE, directory, str(told), servers="tests.redteam.test_network:serve")
    assert told.exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    found = json.loads(told.read_text())
    tls = found["1"].pop("tls")
    return Outcome(found["1"], tls, found["2"]["tls"], directory)


@pytest.mark.parametrize("server", vhosts.SERVERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(outcome: Outcome, server: str, attack: str) -> None:
    if why := vhosts.missing(server):
        pytest.skip(why)
    answers = outcome.answers[server]
    assert "allowed.test" in answers["fine"]
    assert vhosts.SECRET.decode() not in answers[attack]


for _attack in ATTACKS:
    route("network", f"another host over an allowed address: {_attack}", "no server sees the other host")(test_attacks)


@pytest.mark.parametrize("server", vhosts.SERVERS)
def test_no_server_saw_another_host(outcome: Outcome, server: str) -> None:
    if why := vhosts.missing(server):
        pytest.skip(why)
    assert {host.split(":")[0] for host in vhosts.hosts(server, outcome.directory / server)} == {"allowed.test"}


@route("network", "TLS without a server name to an allowed host", "refused, unless a rule names its address")
def test_tls_without_a_server_name(outcome: Outcome) -> None:
    assert outcome.tls["None"] == "failed" and outcome.tls_with_address["None"].startswith("TLS")


@route("network", "TLS with the server name of another host", "refused")
def test_tls_with_another_name(outcome: Outcome) -> None:
    assert outcome.tls["refused.test"] == outcome.tls_with_address["refused.test"] == "failed"
    assert outcome.tls["allowed.test"].startswith("TLS")


@route("network", "a rule for loopback, such as 127.0.0.1", "an error that says what to allow instead")
def test_a_rule_for_loopback() -> None:
    from pier.errors import UsageError
    from pier.network.policy import parse

    with pytest.raises(UsageError, match="is an address inside the sandbox"):
        parse("127.0.0.1:8080")
