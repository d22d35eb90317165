"""Dockerfiles that an engine builds itself: because it is asked to, or because pier can have no sandbox here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pier.errors import ImageError, PolicyError
from pier.image.model import Image
from pier.lease import Lease
from pier.network.policy import NONE, NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.docker.building import built_name
from pier.sandbox.docker.ours import collect_ours
from pier.sandbox.order import BuildOrder
from tests.compose_tasks import import_bash_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import rewards_of
from tests.trial_runs import write_task

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

DOCKERFILE = """\
FROM test/bash AS first
ARG WORD=none
COPY . /src
RUN echo "the word is $WORD" && ls /src | sort > /listed && stat -c %u /src/kept.txt >> /listed
FROM first AS last
ENV COLOUR=blue
WORKDIR /work
"""
TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 120
[environment]
network_mode = "no-network"
[metadata.pier]
build_network = "none"
"""
TEST = "#!/bin/sh\ncat /made && echo 1 > /logs/verifier/reward.txt\n"
RUNS = "FROM test/bash\nRUN echo {} > /made\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine() as found:
        import_bash_image(found, tmp_path_factory.mktemp("image"))
        yield found
        assert found.containers() == []


@pytest.fixture
def docker(running: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", running.url)
    return running


async def test_an_engine_builds_with_progress_and_once(docker: Engine, tmp_path: Path) -> None:
    told: list[str] = []
    for name, text in {"Dockerfile": DOCKERFILE, ".dockerignore": "left.*\n", "kept.txt": "", "left.txt": ""}.items():
        (tmp_path / name).write_text(text)
        os.chown(tmp_path / name, 1000, 1000)
    order = BuildOrder("key", tmp_path, None, {"WORD": "given"}, "last", NONE, told.append)
    with Lease() as lease:
        async with open_backend("docker", lease, {"builder": "engine"}) as backend:
            image = await backend.build_image(order)
            assert "the word is given" in told
            assert any("COPY" in row and row.endswith("done") for row in told), told
            assert image.reference == built_name(order) and image.config.workdir == "/work"
            assert image.config.env["COLOUR"] == "blue" and image.config.labels["dev.pier.image"] == "key"
            told.clear()
            assert (await backend.build_image(order)).digest == image.digest and told == []
            async with await backend.start(SandboxSpec(image)) as sandbox:
                listed = await sandbox.exec(["cat", "/listed"])
                assert listed.text.split() == ["Dockerfile", "kept.txt", "0"]
                assert await collect_ours() == []
            assert [one.reference for one in await collect_ours()] == [image.reference]
            await _check_refusals(backend.build_image, order)


async def _check_refusals(build: Callable[[BuildOrder], Awaitable[Image]], order: BuildOrder) -> None:
    with pytest.raises(PolicyError, match="cannot keep an allowlist"):
        await build(replace(order, network=NetworkPolicy("allowlist", ("example.com",))))
    elsewhere = order.context.with_name("elsewhere.Dockerfile")
    elsewhere.write_text("FROM test/bash\nRUN echo last words; exit 3\n")
    with pytest.raises(ImageError, match=r"(?s)elsewhere.*last words") as failed:
        await build(replace(order, key="other", dockerfile=elsewhere, target=None))
    assert (failed.value.code, failed.value.blame) == ("build", "task")


def test_the_engine_builds_if_asked_to(docker: Engine, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML, test=TEST, environment__Dockerfile=RUNS.format("asked"))
    run_pier(tmp_path, "--ek", "builder=engine")
    assert rewards_of(tmp_path / "jobs" / "j") == [1]
    assert "buildkit" in docker.docker("history", "--format", "{{.Comment}}", built_by(docker))


def built_by(docker: Engine) -> str:
    """The image that was built last."""
    return docker.docker("images", "-q", "--filter", "label=dev.pier.image").split()[0]


def run_pier(place: Path, *more: str, before: tuple[str, ...] = (), **env: str) -> None:
    command = [*before, sys.executable, "-m", "pier", "run", "-p", "tasks", "-a", "nop", "-q", "--env", "docker"]
    done = subprocess.run(
        [*command, "--job-name", "j", *more],
        cwd=place,
        env={**os.environ, "PIER_HOME": str(place / "home"), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


NO_NAMESPACES = 'for n in user mnt; do echo 0 > /proc/sys/user/max_${n}_namespaces; done; exec "$@"'


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_the_engine_builds_where_pier_can_have_no_sandbox(docker: Engine, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML, test=TEST, environment__Dockerfile=RUNS.format("alone"))
    run_pier(tmp_path, before=("unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"))
    assert rewards_of(tmp_path / "jobs" / "j") == [1]
    assert "buildkit" in docker.docker("history", "--format", "{{.Comment}}", built_by(docker))
