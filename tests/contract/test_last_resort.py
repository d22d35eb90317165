"""A sandbox without a network: what it tries is refused at once and told, whatever it does."""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pier.lease import Lease
from pier.network import plumbing, udp
from pier.network.netlink import Netlink
from pier.network.policy import Decision, NetworkPolicy
from pier.sandbox import Sandbox, SandboxSpec, open_backend
from pier.sandbox.host import host_image

pytestmark = pytest.mark.plain

_LOOK_UP = r"""
import socket, struct, sys, time
query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\4pypi\3org\0" + struct.pack(">HH", 1, 1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(60)
    try:
        sock.sendto(query, ("192.0.0.1", 53))
    except OSError:
        pass
    answer, source = sock.recvfrom(1000)
    print(source, answer[:2] == query[:2], answer[3] & 15)
"""
"""As musl does it: the socket is not connected, so errors are not heard of, and what matters is an answer's source."""

_FLOOD = r"""
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for _ in range(20000):
        try:
            sock.sendto(b"x", ("192.0.2.7", 9))
        except PermissionError:
            pass
"""


@pytest.fixture
async def told() -> list[Decision]:
    return []


@pytest.fixture
async def sandbox(told: list[Decision], pier_home: Path) -> AsyncIterator[Sandbox]:
    with Lease() as lease:
        async with (
            open_backend("local", lease) as backend,
            await backend.start(SandboxSpec(host_image(), on_decision=told.append)) as box,
        ):
            yield box


async def test_a_lookup_is_answered_to_who_hears_of_no_errors(sandbox: Sandbox, told: list[Decision]) -> None:
    result = await sandbox.exec(["/usr/bin/python3", "-c", _LOOK_UP], timeout=100)
    assert result.text.strip() == "('192.0.0.1', 53) True 3", result.error_text
    assert [(row.kind, row.name) for row in told if not row.allowed] == [("dns", "pypi.org")]


async def test_a_server_on_the_port_of_names_can_be_had(sandbox: Sandbox) -> None:
    bind = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(('0.0.0.0', 53))"
    result = await sandbox.exec(["/usr/bin/python3", "-c", bind], user="root")
    assert result.ok, result.error_text


async def test_a_flood_is_told_in_few_lines(sandbox: Sandbox, told: list[Decision]) -> None:
    await sandbox.exec(["/usr/bin/python3", "-c", _FLOOD], timeout=300)
    await sandbox.stop()
    rows = [row for row in told if not row.allowed]
    assert sum(row.count for row in rows) == 20_000
    assert len(rows) < 10_000
    assert {(row.kind, row.name, row.port) for row in rows} == {("udp", "192.0.2.7", 9), ("ip", "anywhere", 0)}


async def test_attempts_are_told_after_the_policy_changed_and_after_a_snapshot(
    sandbox: Sandbox, told: list[Decision]
) -> None:
    attempt = "import socket; socket.socket().connect_ex(('192.0.2.{}', 80))"
    await sandbox.set_network(NetworkPolicy("allowlist", ("allowed.test",)))
    await sandbox.set_network(NetworkPolicy("none"))
    await sandbox.exec(["/usr/bin/python3", "-c", attempt.format(7)])
    await sandbox.snapshot()
    await sandbox.exec(["/usr/bin/python3", "-c", attempt.format(8)])
    await sandbox.stop()
    assert [(row.name, row.reason) for row in told if row.kind == "tcp"] == [
        ("192.0.2.7", "no network"),
        ("192.0.2.8", "no network"),
    ]


def test_a_frame_that_is_put_on_the_loopback_device_is_told() -> None:
    def put_frame() -> bytes:
        (telling, _) = plumbing.listen_for_refused()
        there, here = ipaddress.ip_address("192.0.2.9"), ipaddress.ip_address("10.9.9.9")
        packet = udp.answer(udp.Datagram("udp", there, 6, here, 5, b"", b""), b"hello")
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as sock:
            sock.sendto(packet, ("lo", 0x0800, 0, 0, bytes(6)))
        telling.settimeout(60)
        return telling.recv(1 << 16)

    assert socket.inet_aton("192.0.2.9") in _in_a_namespace(put_frame)


def test_a_kernel_that_cannot_tell_leaves_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_it() -> bytes:
        monkeypatch.setattr(plumbing, "_LISTEN", b"".join((plumbing._LISTEN[:4], b"\1\x63", plumbing._LISTEN[6:])))
        assert plumbing.listen_for_refused() == []
        with socket.socket() as sock:
            return str(sock.connect_ex(("192.0.2.7", 80))).encode()

    assert _in_a_namespace(try_it) == b"101"


def _in_a_namespace(work: Callable[[], bytes]) -> bytes:
    """Do something in a network namespace of its own, with the loopback device up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            flags = 0x40000000 | (0 if os.geteuid() == 0 else 0x10000000)
            assert ctypes.CDLL(None, use_errno=True).unshare(flags) == 0, os.strerror(ctypes.get_errno())
            with Netlink() as netlink:
                netlink.set_up(1)
            os.write(write, work())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as stream:
        return stream.read()


_FLOOD_FOR_EVER = r"""
import os, socket
os.fork()
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("flooding", flush=True)
while True:
    try:
        sock.sendto(b"x", ("192.0.2.7", 9))
    except PermissionError:
        pass
"""


async def test_a_flood_that_goes_on_keeps_nobody_waiting(sandbox: Sandbox, told: list[Decision]) -> None:
    async with await sandbox.spawn(["/usr/bin/python3", "-c", _FLOOD_FOR_EVER]):
        while not told or told[-1].name != "192.0.2.7":
            await asyncio.sleep(0.05)
        await sandbox.set_network(NetworkPolicy("none"))
        await sandbox.stop()
    assert [row.name for row in told if row.kind == "probe"] == ["none", "none"]


async def test_more_lookups_than_can_be_answered_at_once_are_told(sandbox: Sandbox, told: list[Decision]) -> None:
    many = _LOOK_UP.replace("sock.sendto(query,", "for _ in range(150): sock.sendto(query,")
    result = await sandbox.exec(["/usr/bin/python3", "-c", many], timeout=100)
    assert result.text.strip() == "('192.0.0.1', 53) True 3", result.error_text
    await sandbox.stop()
    assert sum(row.count for row in told if not row.allowed) == 150
