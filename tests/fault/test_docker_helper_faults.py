"""Faults between pier and the helper on an engine's host: who waits is told, others go on, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pier.errors import SandboxError
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, SandboxSpec
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, pier, wait_for
from tests.ways import Sshd, ssh_missing, sshd

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SOON = 40
"""Seconds, fewer than it takes to find that nobody answers any more."""
HOLD = """\
import asyncio, sys
from pathlib import Path
from pier.image.model import Image, ImageConfig
from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend

async def main():
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            image = Image("test", "sha256:" + "b" * 64, (Path(sys.argv[1]),), ImageConfig())
            async with await backend.start(SandboxSpec(image)) as sandbox:
                await sandbox.spawn(["sleep", "600"])
                print("started", flush=True)
                await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as running:
        yield running
        assert running.containers() == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if why := ssh_missing():
        pytest.skip(why)
    with sshd(tmp_path_factory.mktemp("server") / "ssh") as running:
        yield running


@pytest.fixture
async def backend(docker: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    with Lease() as lease:
        async with open_backend("docker", lease) as opened:
            yield opened
        assert lease.held() == []


async def test_who_waits_is_told_when_the_helper_is_killed(
    docker: Engine, backend: Backend, image: Image, tmp_path: Path
) -> None:
    async with asyncio.timeout(PATIENCE):
        sandbox = await backend.start(SandboxSpec(image))
        waiting = [asyncio.ensure_future(sandbox.exec(["sleep", "600"])) for _ in range(2)]
        waiting.append(asyncio.ensure_future(sandbox.exec(["cat", "/dev/zero"], output_limit=0)))
        await sandbox.exec(["true"])
        await asyncio.to_thread(docker.docker, "kill", *docker.helpers())
        async with asyncio.timeout(SOON):
            told = await asyncio.gather(*waiting, sandbox.read_file("/etc/passwd"), return_exceptions=True)
        assert [error.blame for error in told if isinstance(error, SandboxError)] == ["infra"] * len(told), told
        assert "helper" in str(told[0])
        await sandbox.stop()
        async with await backend.start(SandboxSpec(image)) as next_one:
            assert (await next_one.exec("echo fine")).text == "fine\n"


async def test_a_container_that_vanishes_harms_no_sibling(docker: Engine, backend: Backend, image: Image) -> None:
    async with asyncio.timeout(PATIENCE):
        sandbox, sibling = [await backend.start(SandboxSpec(image)) for _ in range(2)]
        waiting = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
        await sandbox.exec(["true"])
        await asyncio.to_thread(docker.docker, "rm", "-f", f"pier-{sandbox.id}")
        with pytest.raises(SandboxError) as told:
            await waiting
        assert told.value.blame == "infra"
        assert (await sibling.exec("echo fine")).text == "fine\n"
        await sandbox.stop()
        await sibling.stop()


async def test_who_waits_for_a_paused_container_is_told(docker: Engine, backend: Backend, image: Image) -> None:
    async with asyncio.timeout(PATIENCE):
        sandbox, sibling = [await backend.start(SandboxSpec(image)) for _ in range(2)]
        waiting = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
        await sandbox.exec(["true"])
        await asyncio.to_thread(docker.pause, f"pier-{sandbox.id}")
        with pytest.raises(SandboxError, match="paused"):
            await waiting
        assert (await sibling.exec("echo fine")).text == "fine\n"
        await sandbox.stop()
        await sibling.stop()


async def test_starts_that_are_cancelled_leave_nothing_at_the_helper(
    docker: Engine, backend: Backend, image: Image
) -> None:
    async with asyncio.timeout(PATIENCE):
        async with await backend.start(SandboxSpec(image)):
            pass
        before = open_files(docker)
        for step in range(12):
            starting = asyncio.ensure_future(backend.start(SandboxSpec(image)))
            await asyncio.sleep(0.05 * step)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).stop()
        while open_files(docker) > before:
            await asyncio.sleep(0.1)
        assert docker.containers() == []


def open_files(docker: Engine) -> int:
    """How many files all processes of the helper have open."""
    (helper,) = docker.helpers()
    pids = docker.docker("top", helper, "-o", "pid").split()[1:]
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


async def test_a_connection_by_ssh_that_is_cut(
    docker: Engine, server: Sshd, backend: Backend, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    sibling = await backend.start(SandboxSpec(image))
    monkeypatch.setenv("DOCKER_HOST", f"ssh://root@127.0.0.1:{server.port}{docker.socket}")
    monkeypatch.setenv("PATH", f"{server.path}:{os.environ['PATH']}")
    with Lease() as lease:
        async with open_backend("docker", lease) as by_ssh, asyncio.timeout(PATIENCE):
            sandbox = await by_ssh.start(SandboxSpec(image))
            waiting = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
            await sandbox.exec(["true"])
            assert len(docker.helpers()) == 1
            for pid in server.sessions():
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SandboxError) as told:
                await waiting
            assert told.value.blame == "infra"
            await asyncio.to_thread(wait_for, lambda: not docker.processes(f"pier-{sandbox.id}"))
            assert (await sibling.exec("echo fine")).text == "fine\n"
            await sandbox.stop()
            async with await by_ssh.start(SandboxSpec(image)) as next_one:
                assert (await next_one.exec("echo fine")).text == "fine\n"
        assert lease.held() == []
    await sibling.stop()


def test_what_a_killed_pier_had_is_over_and_the_rest_is_swept(docker: Engine, image: Image, tmp_path: Path) -> None:
    env = {**os.environ, "DOCKER_HOST": docker.url, "PIER_DOCKER_HELPER": "1"}
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    with subprocess.Popen(
        [sys.executable, str(script), str(image.layers[0])], env=env, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "started\n"
        running.kill()
    (left,) = docker.containers()
    wait_for(lambda: not docker.processes(left))
    pier("gc", cwd=tmp_path)
    assert docker.containers() == []
    docker.wait_for_no_helper()


async def test_an_engine_that_dies_and_comes_back(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    with ExitStack() as stack:
        docker = stack.enter_context(engine())
        monkeypatch.setenv("DOCKER_HOST", docker.url)
        with Lease() as lease:
            async with open_backend("docker", lease) as backend, asyncio.timeout(PATIENCE):
                sandbox = await backend.start(SandboxSpec(image))
                waiting = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
                await sandbox.exec(["true"])
                await asyncio.to_thread(docker.kill)
                with pytest.raises(SandboxError) as told:
                    await waiting
                assert told.value.blame == "infra"
                await asyncio.to_thread(docker.start)
                await sandbox.stop()
                async with await backend.start(SandboxSpec(image)) as next_one:
                    assert (await next_one.exec("echo fine")).text == "fine\n"
            assert lease.held() == []
        assert docker.containers() == []
