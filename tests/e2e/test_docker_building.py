"""Dockerfiles that an engine builds itself: because it is asked to, or because pier can have no sandbox here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pier.errors import ImageError, PolicyError
from pier.image.model import Image
from pier.lease import Lease
from pier.network.policy import NONE, NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.contract import BuildOrder
from pier.sandbox.docker.building import built_name
from pier.sandbox.docker.images import collect_pier_images
from tests.compose_tasks import IMAGE, bash_image, import_bash_image
from tests.engine import Engine, engine, missing
from tests.engine_proxy import without_buildkit
from tests.image_rig import entry, tar_of
from tests.job_tasks import rewards_of
from tests.podman import Podman, podman, podman_missing
from tests.trial_runs import write_task

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

DOCKERFILE = """\
ARG BASE=test/nothing
FROM $BASE AS first
ARG WORD=none
COPY . /src
COPY --chown=1000:2000 kept.txt /owned/
ADD packed.tar /unpacked/
RUN echo "the word is $WORD" && ls /src > /listed && stat -c %u /src/kept.txt >> /listed
RUN grep -c : /proc/net/dev > /links
FROM first AS last
ENV COLOUR=blue
WORKDIR /work
FROM last AS more
RUN touch /not-wanted
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
FETCHES = {
    "FROM test/bash\nADD http://files.test/x /x\n": "line 2: what ADD names",
    'FROM test/bash\nADD ["http://files.test/x", "/x"]\n': "line 2: what ADD names",
    "FROM test/bash\nADD http':'//files.test/x /x\n": "line 2: what ADD names",
    "FROM test/bash\nADD git@files.test:x.git /x\n": "line 2: what ADD names",
    "FROM test/bash\nARG WHERE=http:\nADD ${WHERE}//files.test/x /x\n": "line 3: what ADD names",
    "# syntax=evil.test/x\nFROM test/bash\n": "a program that reads it",
    "#!/bin/x\n# syntax = evil.test/x\nFROM test/bash\n": "a program that reads it",
    "FROM ${TARGETOS:+evil.test/}bash\n": "line 1: an image that depends on TARGETOS",
    "FROM scratch\nARG B=test/bash\nFROM ${B:-evil.test/x}\n": "line 3: an image that depends on B",
    "FROM --platform=linux/s390x test/bash\n": "line 1: an image of another platform",
    "FROM test/bash\nCOPY --from=$B /x /x\n": "line 2: an image that depends on a variable",
    "FROM test/bash\nRUN <<EOF\nFROM evil.test/x\nEOF\n": "line 2: what some builders read",
}
RUNS = "FROM test/bash\nRUN echo {} > /made\n"


@dataclass(frozen=True)
class Builder:
    """An engine, and how it builds."""

    kind: str
    engine: Engine | Podman

    def comments(self) -> str:
        """What the engine says of the steps of the image that was built last."""
        assert isinstance(self.engine, Engine)
        return self.engine.docker("history", "--format", "{{.Comment}}", built_by(self.engine))


def bash_archive(place: Path) -> Path:
    (place / "image").mkdir()
    with tarfile.open(place / "image.tar", mode="w") as archive:
        archive.add(bash_image(place / "image").layers[0], ".")
    return place / "image.tar"


def write_context(place: Path) -> Path:
    """A context that is some user's, with an archive and a file that is to be left out."""
    place.mkdir()
    for name, text in {
        "Dockerfile": DOCKERFILE,
        ".dockerignore": "left.*\n.d*\n",
        "kept.txt": "",
        "left.txt": "",
    }.items():
        (place / name).write_text(text)
    (place / "packed.tar").write_bytes(tar_of(entry("inside", b"text", uid=7, gid=8)))
    for path in place.iterdir():
        os.chown(path, 1000, 1000)
    return place


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


@pytest.fixture(params=["buildkit", "classic", "podman"])
def builder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Builder]:
    """Each kind of builder that an engine may have, behind `$DOCKER_HOST`."""
    with ExitStack() as stack:
        if request.param == "podman":
            if podman_missing() is not None:
                pytest.skip(str(podman_missing()))
            address, docker = (found := stack.enter_context(podman())).url, found
            found.run("import", str(bash_archive(tmp_path)), IMAGE)
        else:
            docker = request.getfixturevalue("running")
            address = docker.url
            if request.param == "classic":
                address = stack.enter_context(without_buildkit(docker.socket, tmp_path))
        monkeypatch.setenv("DOCKER_HOST", address)
        yield Builder(request.param, docker)


async def test_an_engine_builds_with_progress_and_once(builder: Builder, tmp_path: Path) -> None:
    told: list[str] = []
    context = write_context(tmp_path / "context")
    network = None if builder.kind == "podman" else NONE
    order = BuildOrder(builder.kind, context, None, {"BASE": IMAGE, "WORD": "given"}, "last", network, told.append)
    with Lease() as lease:
        async with open_backend("docker", lease, {"builder": "engine"}) as backend:
            image = await backend.build_image(order)
            assert "the word is given" in told
            assert any("COPY" in row for row in told), told
            assert image.reference == built_name(order) and image.config.workdir == "/work"
            assert image.config.env["COLOUR"] == "blue" and image.config.labels["dev.pier.image"] == order.key
            told.clear()
            assert (await backend.build_image(order)).digest == image.digest and told == []
            async with await backend.start(SandboxSpec(image)) as sandbox:
                listed = (await sandbox.exec(["cat", "/listed"])).text.split()
                assert sorted(listed[:-1]) == ["Dockerfile", "kept.txt", "packed.tar"] and listed[-1] == "0"
                owners = await sandbox.exec(["stat", "-c", "%n %u:%g", "/owned/kept.txt", "/unpacked/inside"])
                assert owners.text.splitlines() == ["/owned/kept.txt 1000:2000", "/unpacked/inside 7:8"]
                assert ((await sandbox.exec(["cat", "/links"])).text == "1\n") is (network == NONE)
                if network == NONE:
                    assert ("buildkit" in builder.comments()) is (builder.kind == "buildkit")
                else:
                    with pytest.raises(PolicyError, match="may not keep a build without a network"):
                        await backend.build_image(replace(order, network=NONE))
                assert not (await sandbox.exec(["test", "-e", "/not-wanted"])).ok
                assert await collect_pier_images() == []
            assert [one.reference for one in await collect_pier_images()] == [image.reference]
            await _check_refusals(backend.build_image, order)


async def _check_refusals(build: Callable[[BuildOrder], Awaitable[Image]], order: BuildOrder) -> None:
    with pytest.raises(PolicyError, match="cannot keep an allowlist"):
        await build(replace(order, network=NetworkPolicy("allowlist", ("example.com",))))
    elsewhere = order.context.with_name("elsewhere.Dockerfile")
    for number, (text, why) in enumerate(FETCHES.items()):
        elsewhere.write_text(text)
        with pytest.raises(PolicyError, match=f"would fetch, from any host, {why}"):
            await build(replace(order, key=f"fetch {number}", dockerfile=elsewhere, target=None))
    with pytest.raises(PolicyError, match="a program that reads it"):
        await build(replace(order, key="syntax", args={**order.args, "BUILDKIT_SYNTAX": "evil.test/x"}))
    elsewhere.write_text("FROM test/bash\nRUN echo last words; exit 3\n")
    with pytest.raises(ImageError, match=r"(?s)elsewhere.*RUN echo last words; exit 3.*last words") as failed:
        await build(replace(order, key="other", dockerfile=elsewhere, target=None))
    assert (failed.value.code, failed.value.blame, failed.value.retryable) == ("build", "task", False)
    with pytest.raises(ImageError, match=r"Dockerfile.*nowhere") as lost:
        await build(replace(order, key="lost", target="nowhere"))
    assert (lost.value.code, lost.value.blame) == ("build", "task")
    elsewhere.write_text("FROM test/bash\nRUNG echo hi\n")
    with pytest.raises(ImageError, match=r"elsewhere.Dockerfile:2.*RUNG") as unknown:
        await build(replace(order, key="unknown", dockerfile=elsewhere, target=None))
    assert unknown.value.blame == "task"


def test_the_engine_builds_if_asked_to(docker: Engine, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML, test=TEST, environment__Dockerfile=RUNS.format("asked"))
    run_pier(tmp_path, "--ek", "builder=engine")
    assert rewards_of(tmp_path / "jobs" / "j") == [1]
    assert "buildkit" in docker.docker("history", "--format", "{{.Comment}}", built_by(docker))


def built_by(docker: Engine) -> str:
    """The image that was built last."""
    return docker.docker("images", "-q", "--filter", "label=dev.pier.image").split()[0]


@pytest.mark.parametrize("builder", ["engine", "pier"])
def test_a_long_build_is_told_while_it_goes_on(docker: Engine, tmp_path: Path, builder: str) -> None:
    steps = "FROM test/bash\nRUN for n in $(seq 50); do echo piece $n; sleep 0.2; done; touch /made\n"
    write_task(
        tmp_path / "tasks" / "one", toml=TOML, test=TEST, environment__Dockerfile=steps + f"LABEL by={builder}\n"
    )
    told = run_pier(tmp_path, "--ek", f"builder={builder}", quiet=False)
    assert re.search(r"^one__\w+: prepare: image: piece \d+$", told, re.MULTILINE), told
    (log,) = (tmp_path / "jobs" / "j").glob("one__*/trial.log")
    assert all(f"image: piece {n}\n" in log.read_text() for n in range(1, 51))


def run_pier(place: Path, *more: str, before: tuple[str, ...] = (), quiet: bool = True, **env: str) -> str:
    command = [*before, sys.executable, "-m", "pier", "run", "-p", "tasks", "-a", "nop", "--env", "docker"]
    done = subprocess.run(
        [*command, "--job-name", "j", *(["-q"] if quiet else []), *more],
        cwd=place,
        env={**os.environ, "PIER_HOME": str(place / "home"), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


NO_NAMESPACES = 'for n in user mnt; do echo 0 > /proc/sys/user/max_${n}_namespaces; done; exec "$@"'


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_the_engine_builds_where_pier_can_have_no_sandbox(docker: Engine, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML, test=TEST, environment__Dockerfile=RUNS.format("alone"))
    run_pier(tmp_path, before=("unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"))
    assert rewards_of(tmp_path / "jobs" / "j") == [1]
    assert "buildkit" in docker.docker("history", "--format", "{{.Comment}}", built_by(docker))
