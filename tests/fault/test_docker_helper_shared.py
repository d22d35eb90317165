"""One helper for all that use an engine: found by all, harmed by none of them, and gone when nobody needs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiodocker.exceptions import DockerError

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import SandboxSpec
from pier.sandbox.docker.client import connect
from pier.sandbox.docker.helper import open_helper
from pier.sandbox.docker.runtime import HELPER, HelperBox, Runtime, find_runtime
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, pier, wait_for
from tests.serving import ask, serving

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return find_runtime(os.uname().machine)


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as running:
        yield running
        running.wait_for_no_helper()
        assert running.containers() == []


@pytest.fixture(autouse=True)
def through_a_helper(docker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    monkeypatch.setenv("PIER_DOCKER_HELPER", "1")


def test_processes_that_start_at_once_share_one_and_outlive_each_other(
    docker: Engine, image: Image, tmp_path: Path
) -> None:
    with (
        serving(image) as one,
        serving(image) as two,
        serving(image) as three,
    ):
        assert [ask(running, "echo started") for running in (one, two, three)] == ["started\n"] * 3
        (helper,) = docker.helpers()
        sandboxes = set(docker.containers())
        assert len(sandboxes) == 3
        one.kill()
        one.wait()
        wait_for(lambda: [docker.processes(found) for found in sandboxes].count("") == 1)
        assert [ask(running, "echo fine") for running in (two, three)] == ["fine\n"] * 2
        assert two.stdin is not None
        two.stdin.close()
        assert two.wait(PATIENCE) == 0
        assert ask(three, "echo fine") == "fine\n"
        assert docker.helpers() == [helper]
        pier("gc", cwd=tmp_path)
        assert len(docker.containers()) == 1 and docker.helpers() == [helper]
        assert ask(three, "echo fine") == "fine\n"
        assert three.stdin is not None
        three.stdin.close()
        assert three.wait(PATIENCE) == 0
    assert docker.containers() == []


async def test_whoever_comes_while_it_waits_finds_it_and_after_that_another(docker: Engine, image: Image) -> None:
    seen: list[str] = []
    for _ in range(2):
        with Lease() as lease:
            async with open_backend("docker", lease) as backend:
                await backend.capabilities()
                seen += docker.helpers()
    assert seen[0] == seen[1]
    await asyncio.to_thread(docker.wait_for_no_helper)
    with Lease() as lease:
        async with open_backend("docker", lease) as backend, await backend.start(SandboxSpec(image)) as sandbox:
            assert (await sandbox.exec("echo fine")).text == "fine\n"
            assert docker.helpers() != seen[:1]


async def test_whoever_comes_at_its_end_is_served_by_the_next(docker: Engine) -> None:
    """At the very moment when a helper has decided to end its name is taken and it answers nobody."""
    machine = os.uname().machine
    with Lease() as lease:
        client, _ = await connect(docker.url)
        try:
            for _ in range(3):
                first = await open_helper(client, lease, machine)
                (id,) = docker.helpers()
                await first.close()
                ending = asyncio.ensure_future(asyncio.to_thread(docker.docker, "kill", id))
                second = await open_helper(client, lease, machine)
                await ending
                if second.closed or docker.helpers() == [id]:
                    await second.close()
                    second = await open_helper(client, lease, machine)
                assert not second.closed
                await second.close()
        finally:
            await client.close()
        assert lease.held() == []


async def test_one_that_somebody_has_paused_is_woken(docker: Engine, image: Image) -> None:
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            await backend.capabilities()
        await asyncio.to_thread(docker.pause, docker.helpers()[0])
        async with open_backend("docker", lease) as backend, await backend.start(SandboxSpec(image)) as sandbox:
            assert (await sandbox.exec("echo fine")).text == "fine\n"


async def test_another_version_has_its_own(docker: Engine, runtime: Runtime) -> None:
    machine = os.uname().machine
    with Lease() as lease:
        client, _ = await connect(docker.url)
        try:
            ours = await open_helper(client, lease, machine)
            theirs = HelperBox(client, lease, replace(runtime, env=(*runtime.env, "OTHER=1")), runtime.digest)
            await theirs.ensure()
            assert len(docker.helpers()) == 2
            docker.docker("rm", "-f", theirs.name)
            await ours.close()
            again = await open_helper(client, lease, machine)
            assert not again.closed
            await again.close()
        finally:
            await client.close()


async def test_one_that_never_ran_is_swept_and_one_that_runs_is_not(
    docker: Engine, runtime: Runtime, tmp_path: Path
) -> None:
    client, _ = await connect(docker.url)
    try:
        dead = Lease()
        ours = await open_helper(client, dead, os.uname().machine)
        other = HelperBox(client, dead, replace(runtime, env=(*runtime.env, "OTHER=1")), runtime.digest)
        await client.containers.create(other._config, name=other.name)
        for name in (ours.name, other.name):
            dead.write(HELPER, name, {"engine": docker.url, "name": name})
        dead.close()
        await asyncio.to_thread(pier, "gc", cwd=tmp_path)
        with pytest.raises(DockerError):
            await client.containers.container(other.name).show()
        await ours._own.ask({"op": "ping"})
        await ours.close()
    finally:
        await client.close()
