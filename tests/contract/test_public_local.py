"""What a public network carries beside TCP, proven in the fake internet: datagrams, pings and lookups of every kind, by
name and by address, over IPv4 and IPv6; and what it refuses."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.world import in_world

pytestmark = [pytest.mark.plain, pytest.mark.timeout(300)]

INSIDE = r"""
import errno, json, os, socket, struct
told = {}

def udp(name, to, data=b"x" * 100, port=4433, segment=0):
    try:
        family, _, _, _, where = socket.getaddrinfo(to, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(60)
            sock.connect(where)
            if segment:
                sock.setsockopt(socket.IPPROTO_UDP, 103, segment)
            sock.send(data)
            heard = [sock.recv(2000).split(b"\n")[0].decode() for _ in range(len(data) // segment if segment else 1)]
            told[name] = ", ".join(heard)
    except OSError as error:
        told[name] = errno.errorcode.get(error.errno, str(error))

def ping(name, to, six=False):
    sock = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_RAW, 58 if six else 1)
    sock.settimeout(60)
    packet = struct.pack(">BBHHH", 128 if six else 8, 0, 0, 77, 5) + b"payload!"
    total = sum(struct.unpack(">8H", packet))
    total = (total & 0xFFFF) + (total >> 16)
    packet = packet[:2] + struct.pack(">H", 0xFFFF - total) + packet[4:]
    sock.sendto(packet, (to, 0))
    while True:
        data = sock.recv(1000)
        body = data if six else data[20:]
        if body[0] not in (8, 128, 133, 134, 135, 136):
            told[name] = f"{body[0]} {body[1]} " + (body[4:].hex() if body[0] in (0, 129) else "")
            return

def lookup(name, kind):
    query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    query += b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + struct.pack(">BHH", 0, kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(60)
        sock.sendto(query, ("9.9.9.9", 53))
        told[f"lookup {name} {kind}"] = repr(sock.recv(2000)[-7:]) if kind == 16 else str(sock.recv(2000)[3] & 15)

udp("address", "93.184.216.36")
udp("name", "allowed.test")
udp("address6", "2001:470::34")
udp("name6", "six.test")
udp("large", "93.184.216.36", b"y" * 20000)
udp("joined", "93.184.216.36", b"z" * 5000, segment=1000)
udp("joined6", "2001:470::34", b"z" * 5000, segment=1000)
udp("closed port", "93.184.216.36", port=9)
udp("closed port6", "2001:470::34", port=9)
for place in "169.254.169.254 203.0.113.2 192.0.0.1 loop.test metadata.test 2001:db8::2 fd00:ec2::2".split():
    udp(f"refused {place}", place)
ping("ping", "93.184.216.36")
ping("ping6", "2001:470::34", six=True)
ping("ping refused", "169.254.169.254")
lookup("allowed.test", 16)
lookup("nothing.test", 15)
print(json.dumps(told))
"""

OUTSIDE = r"""
import asyncio, json, os, socket, sys, threading
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NONE, PUBLIC
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.host import host_image

Path("/proc/sys/net/ipv4/ping_group_range").write_text(f"{os.getgid()} {os.getgid()}")
machine = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
machine.bind(("::", 4433))
machine.setblocking(False)

async def main():
    decisions = []
    note = lambda decision: decisions.append(decision.line())
    with Lease() as lease:
        async with open_backend("local", lease) as backend:
            async with await backend.start(SandboxSpec(host_image(), network=PUBLIC, on_decision=note)) as box:
                await box.write_file("/tmp/inside.py", Path(sys.argv[1]).read_bytes())
                result = await box.exec(["/usr/bin/python3", "/tmp/inside.py"], timeout=200)
                told = {"inside": json.loads(result.stdout) if result.ok else {"failed": result.error_text}}
                await box.set_network(NONE)
            told["decisions"] = decisions
    try:
        told["touched"] = machine.recv(100).hex()
    except BlockingIOError:
        told["touched"] = ""
    told["seen"] = traffic.seen()
    Path(sys.argv[2]).write_text(json.dumps(told))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    directory = tmp_path_factory.mktemp("public")
    (directory / "inside.py").write_text(INSIDE)
    answer = directory / "told.json"
    done: subprocess.CompletedProcess[str] = in_world(OUTSIDE, directory, str(directory / "inside.py"), str(answer))
    assert answer.exists(), done.stdout + done.stderr
    found = json.loads(answer.read_text())
    assert "failed" not in found["inside"], found["inside"]["failed"]
    return found


def test_datagrams_go_by_name_and_by_address(told: dict[str, dict[str, str]]) -> None:
    inside = told["inside"]
    assert inside["address"] == "heard 100 at 93.184.216.36"
    assert inside["name"] == "heard 100 at 93.184.216.34"
    assert inside["address6"] == inside["name6"] == "heard 100 at 2001:470::34"
    assert inside["large"] == "heard 20000 at 93.184.216.36"


def test_datagrams_that_a_program_sends_as_one_arrive_apart(told: dict[str, dict[str, str]]) -> None:
    assert told["inside"]["joined"] == ", ".join(["heard 1000 at 93.184.216.36"] * 5)
    assert told["inside"]["joined6"] == ", ".join(["heard 1000 at 2001:470::34"] * 5)


def test_who_does_not_listen_is_told(told: dict[str, dict[str, str]]) -> None:
    assert told["inside"]["closed port"] == told["inside"]["closed port6"] == "ECONNREFUSED"


def test_this_machine_and_metadata_are_refused(told: dict[str, dict[str, str]]) -> None:
    outcomes = {name: out for name, out in told["inside"].items() if name.startswith("refused ")}
    assert len(outcomes) == 7
    assert set(outcomes.values()) <= {"EHOSTUNREACH", "EACCES"}, outcomes
    assert told["touched"] == ""
    assert not [row for row in told["seen"] if "169.254." in row or "203.0.113.2" in row or "fd00" in row]


def test_pings_are_answered_by_who_was_asked(told: dict[str, dict[str, str]]) -> None:
    payload = "004d0005" + b"payload!".hex()
    assert told["inside"]["ping"] == f"0 0 {payload}"
    assert told["inside"]["ping6"] == f"129 0 {payload}"
    assert told["inside"]["ping refused"].startswith("3 13")
    assert "icmp 93.184.216.36" in told["seen"]


def test_lookups_of_other_kinds_are_answered(told: dict[str, dict[str, str]]) -> None:
    assert told["inside"]["lookup allowed.test 16"] == repr(b"v=world")
    assert told["inside"]["lookup nothing.test 15"] == "3"


def test_each_flow_is_in_the_log(told: dict[str, list[dict[str, object]]]) -> None:
    rows = {(row["kind"], row["name"], row["allowed"]) for row in told["decisions"]}
    assert {("udp", "allowed.test", True), ("udp", "169.254.169.254", False), ("icmp", "93.184.216.36", True)} <= rows
    passed = next(row for row in told["decisions"] if row["kind"] == "udp" and row["name"] == "allowed.test")
    assert passed["address"] == "93.184.216.34" and passed["sent"] == 100
