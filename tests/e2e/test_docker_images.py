"""Images at an engine: pulled from a registry, brought there once, and collected when nobody needs them."""

from __future__ import annotations

import asyncio
import base64
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pier.errors import ImageError, SandboxError
from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.docker.client import Client
from pier.sandbox.docker.images import EngineImages, collect_pier_images, engine_name, list_pier_images, pull_there
from tests.busybox import busybox_image
from tests.compose_tasks import TOML, docker_bench
from tests.engine import Engine, engine, missing
from tests.image_rig import Pieces, entry, push, running_registry, tar_of
from tests.trial_runs import write_task

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine() as found:
        yield found
        assert found.containers() == []


@pytest.fixture
def docker(running: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", running.url)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return running


async def test_an_engine_pulls_with_progress_and_credentials(docker: Engine, tmp_path: Path) -> None:
    auth = base64.b64encode(b"pier:secret").decode()
    told: list[str] = []
    async with running_registry(tmp_path / "registry", htpasswd=True) as address:
        await push(address, "org/app", "v1", Pieces(tar_of(entry("etc/name", b"base"))), auth=f"Basic {auth}")
        with pytest.raises(ImageError) as refused:
            await pull_there(f"{address}/org/app:v1")
        (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))
        with pytest.raises(ImageError) as unknown:
            await pull_there(f"{address}/org/app:v2")
        image = await pull_there(f"{address}/org/app:v1", told.append)
    with pytest.raises(ImageError) as gone:
        await pull_there(f"{address}/org/app:v3")
    assert (refused.value.code, refused.value.hint) == ("unauthorized", f"docker login {address}")
    assert (unknown.value.code, gone.value.code) == ("not_found", "unreachable")
    assert image.reference == f"{address}/org/app:v1"
    assert told[-1].endswith("Pull complete (1 of 1 layers)")


async def test_a_trial_uses_what_the_engine_pulls(docker: Engine, tmp_path: Path) -> None:
    """From a registry that the user has logged in to; others a task cannot have the engine ask."""
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(busybox_image(tmp_path / "image").layers[0], ".")
    async with running_registry(tmp_path / "registry") as address:
        await push(address, "tools", "v1", Pieces(packed.getvalue()))
        toml = TOML + f'docker_image = "{address}/tools:v1"\n'
        test = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
        task = write_task(tmp_path / "task", toml=toml, test=test)
        async with docker_bench(tmp_path / "trials") as bench:
            refused = await bench.run(task, "nop")
            auth = base64.b64encode(b"some:body").decode()
            (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))
            result = await bench.run(task, "nop")
    assert refused.exception_info is not None and refused.exception_info.code == "refused"
    assert result.rewards == {"reward": 1}, result.exception_info
    assert result.pier is not None and result.pier.image == f"{address}/tools:v1", result.exception_info
    assert "image: " in (log := (bench.last / "trial.log").read_text()) and "Pull complete (1 of 1 layers)" in log
    assert f"{address}/tools" in docker.docker("images", "--format", "{{.Repository}}")


async def test_an_image_is_brought_once_and_kept_while_a_container_is_made(docker: Engine, tmp_path: Path) -> None:
    image = busybox_image(tmp_path)
    client = Client(docker.url)
    try:
        many = [EngineImages(client) for _ in range(4)]
        names = await asyncio.gather(*(images.ensure(image) for images in many))
        assert set(names) == {engine_name(image)}
        assert len(docker.docker("images", "-aq", engine_name(image)).split()) == 1
        assert docker.docker("images", "-q", "--filter", "dangling=true") == ""
        async with many[0].held(image):
            assert await collect_pier_images() == []
    finally:
        await client.close()
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            async with await backend.start(SandboxSpec(image)):
                assert await collect_pier_images() == []
                (found,) = await list_pier_images()
                assert found.in_use
                assert await collect_pier_images(max_size=found.size) == []
    assert await collect_pier_images(max_size=1 << 40) == []
    assert [one.reference for one in await collect_pier_images()] == [engine_name(image)]


async def test_a_container_costs_four_calls_and_tells_what_it_wrote(
    docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = replace(busybox_image(tmp_path), digest=f"sha256:{'c' * 64}")
    (image.layers[0] / "data" / "below").mkdir(parents=True)
    (image.layers[0] / "data" / "below" / "old").write_text("old")
    calls: list[str] = []
    ask = aiohttp.ClientSession._request

    async def note(self: aiohttp.ClientSession, method: str, *args: Any, **more: Any) -> aiohttp.ClientResponse:
        calls.append(method)
        return await ask(self, method, *args, **more)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", note)
    writes = (
        "echo a > /added; rm -r /data/below; mkdir /data/below; echo b > /data/below/new; rm /bin/wget; ln -s x /mine"
    )
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            async with await backend.start(SandboxSpec(image)) as sandbox:
                await sandbox.exec(["sh", "-c", writes])
                calls.clear()
                seen = {change.path: change for change in await sandbox.changes() or ()}
                assert calls == []
                rows = docker.docker("diff", f"pier-{sandbox.id}").splitlines()
                await sandbox.exec(["sh", "-c", "echo c > /added"])
                again = {change.path: change for change in await sandbox.changes() or ()}
            told = {row[2:]: {"A": "added", "C": "changed", "D": "removed"}[row[0]] for row in rows}
            assert {path: change.kind for path, change in seen.items()}.items() <= told.items()
            assert {"/added", "/data/below/new", "/data/below/old", "/bin/wget", "/mine"} <= seen.keys()
            assert again["/added"] != seen["/added"] and again["/mine"] == seen["/mine"]
            calls.clear()
            async with await backend.start(SandboxSpec(image)):
                pass
            assert calls == ["POST", "POST", "GET", "DELETE"]
            docker.docker("rmi", engine_name(image))
            async with await backend.start(SandboxSpec(image)) as sandbox:
                assert (await sandbox.exec(["true"])).ok
    docker.docker("rmi", engine_name(image))


async def test_what_the_engine_lacks_is_refused_before_anything_starts(docker: Engine, tmp_path: Path) -> None:
    image = busybox_image(tmp_path)
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            with pytest.raises(SandboxError) as refused:
                await backend.start(SandboxSpec(image, gpus=1))
            assert (refused.value.code, refused.value.blame) == ("no_gpu", "user")
        assert lease.held() == []
