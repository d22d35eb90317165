"""No argument and no message ends the process that serves a sandbox: random ones, and frames that are not messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier.errors import PierError, SandboxError
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import SandboxSpec
from pier.sandbox.contract import NewFile, Sandbox
from pier.sandbox.linux.sandbox import LinuxSandbox
from pier.sandbox.local import LocalBackend
from pier.sandbox.local.box import LocalBox

ODD_TEXT = st.text(alphabet=st.one_of(st.characters(codec=None), st.sampled_from("\0=/.\ud83d\udcff\n ")), max_size=12)
VALUE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=8), ODD_TEXT,
        ODD_TEXT.map(lambda text: f"/srv/{text}"), st.just(Path("/nonexistent/x")),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ODD_TEXT, inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), ODD_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ODD_TEXT, inner, max_size=3)),
    max_leaves=5,
)
METHODS = (
    "exec", "environment", "place", "write_file", "data", "read_file", "upload", "download", "get_tar",
    "put_files", "remove", "listen", "mkdir", "stat", "list_dir", "as_user",
)  # fmt: skip
OPERATIONS = ("exec", "copy", "probe", "signal", "kill", "listen", "network", "none of these")
REQUESTS = ("pack", "unpack", "read", "write", "remove", "mkdir", "list", "stat", "none of these")


async def _take(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass


async def _call(sandbox: Sandbox, name: str, one: Any, two: Any, scratch: Path) -> None:
    """Call a method with two odd arguments, wherever they fit."""
    calls = {
        "exec": lambda: sandbox.exec(["true", one], env={"A": two}, timeout=60),
        "environment": lambda: sandbox.exec(["true"], env=one, user=two, timeout=60),
        "place": lambda: sandbox.exec(["true"], cwd=one, stdin=two, timeout=60),
        "write_file": lambda: sandbox.write_file(one, b"x", mode=two),
        "data": lambda: sandbox.write_file("/srv/x", one, owner=two),
        "read_file": lambda: sandbox.read_file(one, max_bytes=two),
        "upload": lambda: sandbox.upload(Path("/etc/passwd"), one, owner=two),
        "download": lambda: sandbox.download(one, scratch / os.urandom(6).hex(), exclude=two),
        "put_files": lambda: sandbox.put_files([NewFile(one, 0o644, two)], "/srv"),
        "get_tar": lambda: _take(sandbox.get_tar(one)),
        "remove": lambda: sandbox.remove(one),
        "mkdir": lambda: sandbox.mkdir(one, mode=two),
        "stat": lambda: sandbox.stat(one, user=two),
        "list_dir": lambda: sandbox.list_dir(one, user=two),
        "as_user": lambda: sandbox.write_file(one, b"x", user=two),
        "listen": lambda: sandbox.listen(one, asyncio.Protocol, host=two),
    }
    await asyncio.wait_for(calls[name](), 60)


@contextmanager
def running(image: Image) -> Iterator[tuple[asyncio.Runner, LinuxSandbox[LocalBox]]]:
    """A sandbox, and what runs calls to it."""
    with asyncio.Runner() as runner, Lease() as lease:
        backend: LocalBackend = runner.run(_opened(lease))
        sandbox = runner.run(backend.start(SandboxSpec(image)))
        try:
            yield runner, sandbox
        finally:
            runner.run(backend.close())


async def _opened(lease: Lease) -> LocalBackend:
    return LocalBackend(lease)


def test_no_argument_ends_a_sandbox(image: Image, tmp_path: Path) -> None:
    with running(image) as (runner, sandbox):

        @settings(max_examples=400)
        @given(st.sampled_from(METHODS), VALUE, VALUE)
        def fuzz(name: str, one: Any, two: Any) -> None:
            try:
                runner.run(_call(sandbox, name, one, two, tmp_path))
            except SandboxError as error:
                assert error.blame != "infra" and not error.retryable, (name, one, two, error)
            except (FileNotFoundError, PierError):
                pass
            assert runner.run(sandbox.exec("echo ok", timeout=60)).text == "ok\n"

        fuzz()


def test_no_message_ends_what_serves_a_sandbox(image: Image) -> None:
    """Requests as nobody sends them, with and without an open file, while a command runs and while none does."""
    with running(image) as (runner, sandbox):
        before = sandbox.box.pid
        runner.run(sandbox.spawn(["sleep", "600"]))

        @settings(max_examples=300)
        @given(
            st.sampled_from(OPERATIONS), st.dictionaries(st.sampled_from(KEYS), JSON), st.booleans(),
            st.one_of(JSON, st.dictionaries(st.sampled_from(KEYS), JSON)), st.sampled_from(REQUESTS), st.booleans(),
        )  # fmt: skip
        def fuzz(op: str, message: Any, with_file: bool, request: Any, what: str, alone: bool) -> None:
            if isinstance(request, dict):
                request = request | {"op": what}
            runner.run(_send(sandbox, message | {"op": op, "id": 1 << 20, "request": request}, with_file, alone))
            assert runner.run(sandbox.exec("echo ok", timeout=60)).text == "ok\n"

        fuzz()
        assert sandbox.box.pid == before


KEYS = ("argv", "env", "cwd", "user", "tty", "tell", "first", "job", "number", "host", "port", "mode", "prefixes",
        "source", "target", "owner", "exclude", "max_bytes", "clear")  # fmt: skip


async def _send(sandbox: LinuxSandbox[LocalBox], message: dict[str, Any], with_file: bool, alone: bool) -> None:
    if alone:
        await sandbox.kill_all()
    read, write = os.pipe()
    os.close(write)
    try:
        sandbox.box.channel.send(message, [read] if with_file else [])
    finally:
        os.close(read)


@pytest.mark.plain
@pytest.mark.parametrize(
    "frame", [b"{", b"[]", b"7", b"@", b"\xff\xfe", b"[" * 60_000, b'{"op":7,"id":[]}', b'{"id":999999}']
)
async def test_a_frame_that_is_not_a_message_ends_nothing(backend: LocalBackend, image: Image, frame: bytes) -> None:
    sandbox = await backend.start(SandboxSpec(image))
    async with sandbox:
        sandbox.box.channel._sock.send(frame)
        assert (await sandbox.exec("echo ok", timeout=60)).text == "ok\n"
        for zygote in backend._zygotes._all:
            zygote.channel._sock.send(frame)
        before = backend.zygotes
        async with await backend.start(SandboxSpec(image)) as another:
            assert (await another.exec("echo ok", timeout=60)).text == "ok\n"
        assert backend.zygotes == before
