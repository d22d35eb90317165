"""Faults that once made pier hang, leak or report something else: none of them does."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiodocker.exceptions import DockerError

from pier.errors import ImageError, SandboxError
from pier.image.model import Image
from pier.lease import Lease
from pier.network import outside
from pier.network.outside import Outside, Unreachable
from pier.redact import Redactor
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Mount, SandboxSpec
from pier.sandbox.docker import client as client_module
from pier.sandbox.docker import images
from pier.sandbox.docker.client import Client
from pier.sandbox.docker.images import EngineImages
from pier.sandbox.host import host_image
from pier.tree import Tree
from tests.busybox import busybox_image
from tests.redteam import route
from tests.redteam.places import everywhere, everywhere_and_by_helper

PATIENCE = 60.0
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def opened(place: str) -> AsyncIterator[Backend]:
    with Lease() as lease:
        async with open_backend(place, lease) as backend:
            yield backend
        assert lease.held() == []


@route("faults", "A second kill comes while the first is under way", "It returns when the command's tree is dead")
@everywhere
async def test_a_second_kill_waits_for_the_first(place: str, tmp_path: Path) -> None:
    image = busybox_image(tmp_path / "image")
    async with opened(place) as backend, await backend.start(SandboxSpec(image)) as sandbox:
        process = await sandbox.spawn("(setsid sleep 600 &) ; sleep 600")
        first = asyncio.ensure_future(process.kill())
        await asyncio.sleep(0)
        await process.kill()
        assert first.done(), "the second kill returned before the first"
        assert (await sandbox.exec("pidof sleep && cat /proc/[0-9]*/stat")).exit_code == 1


@route("faults", "A caller's function for output raises TimeoutError", "It is raised, not reported as a timeout")
@everywhere
async def test_a_failing_function_is_no_timeout(place: str, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise TimeoutError("the caller's")

    image = busybox_image(tmp_path / "image")
    async with opened(place) as backend, await backend.start(SandboxSpec(image)) as sandbox:
        with pytest.raises(TimeoutError, match="the caller's"):
            await sandbox.exec("echo x; sleep 600", on_output=fail, timeout=PATIENCE)
        assert (await sandbox.exec("pidof sleep")).exit_code == 1


@route(
    "faults",
    "One of several sandboxes cannot be struck from the lease when pier ends",
    "All others are stopped and struck, and the failure is reported",
)
@everywhere
async def test_a_failure_at_the_end_leaves_nothing_else_behind(place: str, tmp_path: Path) -> None:
    image = busybox_image(tmp_path / "image")
    with Lease() as lease:
        backend = open_backend(place, lease)
        sandboxes = [await backend.start(SandboxSpec(image)) for _ in range(4)]
        (entry,) = lease.directory.glob(f"*.{sandboxes[0].id}")
        entry.unlink()
        entry.mkdir()
        with pytest.raises(OSError):
            await backend.close()
        entry.rmdir()
        assert lease.held() == []
        for sandbox in sandboxes:
            with pytest.raises(SandboxError):
                await sandbox.exec("true")


async def _ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(100_000)
    writer.transport.abort()


async def _answer_in_part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}")
    await writer.drain()
    writer.transport.abort()


async def _stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def _never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As `_stall`, and to questions already."""
    await asyncio.sleep(3600)


@asynccontextmanager
async def false_engine(path: Path, on_image: Reply) -> AsyncIterator[Client]:
    """An engine that has no image, and is given one."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"images/create" in head or (b"/images/" in head and on_image is _never_answer):
                    await on_image(reader, writer)
                    return
                body = b'{"ApiVersion":"1.41"}' if b"/version" in head else b'{"message":"no such image"}'
                status = b"200 OK" if b"/version" in head else b"404 Not Found"
                kind = b"Content-Type: application/json\r\nContent-Length: %d" % len(body)
                writer.write(b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, kind, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    client = Client(f"unix://{path}")
    try:
        yield client
    finally:
        await client.close()
        server.close()
        for task in serving:
            task.cancel()


REPLIES = [_ignore, _break_off, _answer_in_part, _stall, _never_answer]


def _large_image(directory: Path) -> Image:
    image = busybox_image(directory)
    (image.layers[0] / "large").write_bytes(bytes(8 << 20))
    return image


@route(
    "faults",
    "The connection to an engine breaks or stands still while an image is sent",
    "The error is reported, and the next attempt does not wait for a lock",
)
@pytest.mark.plain
@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.__name__)
async def test_an_image_that_cannot_be_sent_holds_no_lock(
    reply: Reply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(client_module, "STALL_SECONDS", 2.0 if reply is _stall else PATIENCE)
    image = _large_image(tmp_path / "image")
    async with false_engine(tmp_path / "engine.sock", reply) as client:
        for _ in range(2):
            with pytest.raises((ImageError, DockerError)):
                await asyncio.wait_for(EngineImages(client).ensure(image), PATIENCE)


SPLICE = """
import os, socket, struct
near, far = socket.socketpair()
near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
while True:
    try:
        os.write(1, b"x")
        os.splice(near.fileno(), 1, 1)
    except BlockingIOError:
        pass
"""
"""Writes what pier wants to read, then waits for data with the lock of the output's pipe held, for five seconds."""


def host_python(mount: str) -> str:
    """How a container runs this machine's Python, with `/usr` mounted at `mount`."""
    (linker,) = Path("/usr/lib").glob("*/ld-linux-*.so.*")
    libraries = f"{mount}/lib/{linker.parent.name}"
    return f"PYTHONHOME={mount} {libraries}/{linker.name} --library-path {libraries} {mount}/bin/python3"


@everywhere_and_by_helper
@route(
    "faults",
    "A command splices a stalled socket into its output, which holds the lock of the pipe",
    "The command is killed, and pier goes on",
)
async def test_a_command_cannot_keep_pier_from_reading(
    place: str, helper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", helper)
    spec, python = SandboxSpec(host_image()), "/usr/bin/python3"
    if place == "docker":
        spec = SandboxSpec(busybox_image(tmp_path / "image"), mounts=(Mount("/usr/host", Path("/usr")),))
        python = host_python("/usr/host")
    async with opened(place) as backend, await backend.start(spec) as sandbox, await backend.start(spec) as other:
        await sandbox.write_file("/tmp/splice.py", SPLICE.encode())
        splice = f"timeout -s KILL 60 env {python} /tmp/splice.py"
        done = await sandbox.exec(f"{splice}; echo went on >/tmp/went-on")
        assert done.exit_code == 137
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("/tmp/went-on")
        for each in (sandbox, other):
            assert (await each.exec("echo fine")).text == "fine\n"


class Resolver:
    """The system's resolver, which holds lookups of `slow.test` until it is released."""

    def __init__(self) -> None:
        self.held = 0
        self.released = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, *rest: Any, **options: Any) -> Any:
        if host != "slow.test":
            return self._real(host, *rest, **options)
        self.held += 1
        self.released.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    slow = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield slow
    slow.released.set()


@pytest.mark.plain
@route("faults", "lookups of one sandbox that a name server never answers", "other sandboxes and pier's own work go on")
async def test_a_slow_name_server_starves_nothing_else(resolver: Resolver) -> None:
    slow = Outside()
    waiting = [asyncio.create_task(slow.resolve("slow.test")) for _ in range(100)]
    async with asyncio.timeout(60):
        while resolver.held < 16:
            await asyncio.sleep(0.001)
        assert [str(address) for address in await Outside().resolve("192.0.2.1")] == ["192.0.2.1"]
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(64)))
        assert resolver.held == 16, "one sandbox has a bounded number of lookups under way"
        assert not any(task.done() for task in waiting)
        resolver.released.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Unreachable}


@pytest.mark.plain
@route("faults", "a lookup that takes longer than ten seconds", "fails; its thread counts until it has ended")
async def test_a_lookup_that_never_ends_is_given_up(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_LOOK_UP_SECONDS", 0.01)
    slow = Outside()
    outcomes = await asyncio.gather(*(slow.resolve("slow.test") for _ in range(100)), return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {"slow.test: the name servers do not answer"}
    assert resolver.held <= 16


@route(
    "faults",
    "leave logs that take long to search for secrets, or in which a secret begins and never goes on",
    "they are searched in linear time, and at most a mebibyte of them is held back",
)
@pytest.mark.plain
@pytest.mark.parametrize(
    "line", [b'{"a":["s","s","s","s"]}\n', b'{"b":"\\n","c":"\\\\\\\\%25"}\n'], ids=["beginnings", "escapes"]
)
def test_hostile_logs_take_little_time(line: bytes, tmp_path: Path) -> None:
    data = b'{"a":"sk-canary-4f1d"}\n' + line * ((2 << 20) // len(line))
    (tmp_path / "log.jsonl").write_bytes(data)
    key = "\n".join(f"{number:02}mIEpQ/9a+X7mIEpQ/9a+X7mIEpQ" for number in range(20))
    began = time.process_time()
    with Tree(tmp_path) as tree:
        Redactor(["sk-canary-4f1d9c0b7e22", key]).tree(tree)
    assert time.process_time() - began < 6
    assert (tmp_path / "log.jsonl").read_bytes() == data
