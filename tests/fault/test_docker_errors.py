"""What keeps an engine from being used, as a user of `pier` is told: whose fault it is and what to do next, at once and
once for a whole run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.compose_tasks import IMAGE, TOML, import_bash_image
from tests.e2e.test_docker_cli import old_engine
from tests.engine import Engine, engine, missing
from tests.image_rig import Pieces, entry, push, running_registry, tar_of
from tests.job_tasks import pier, rewards_of, trials_of
from tests.trial_runs import write_task
from tests.ways import free_port, make_certificates, tls_options

TEST = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
NAMED = f'docker_image = "{IMAGE}"\n'
RUN = ("run", "-p", "tasks", "-a", "nop", "--env", "docker", "--job-name", "j", "--max-retries", "1")
SPACE = 64 << 20


def write_tasks(place: Path, toml: str = TOML + NAMED, **more: str) -> None:
    for name in ("one", "two"):
        write_task(place / "tasks" / name, toml=toml, test=TEST, **more)


def faults(place: Path) -> list[dict[str, Any]]:
    """What went wrong in each trial."""
    found = [json.loads((trial / "result.json").read_text()) for trial in trials_of(place / "jobs" / "j")]
    return [result["exception_info"] for result in found]


@pytest.mark.plain
@pytest.mark.parametrize(
    ("env", "said", "fix", "code"),
    [
        ({"DOCKER_HOST": "unix:///nonexistent/docker.sock"}, "No such file or directory", "start the engine", 1),
        ({"DOCKER_HOST": "tcp://127.0.0.1:1"}, "does not answer: Connection refused", "docker version", 1),
        ({"DOCKER_CONTEXT": "nowhere"}, "unknown Docker context 'nowhere'", "docker context ls", 2),
        ({"DOCKER_HOST": "tcp://127.0.0.1:1", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/nonexistent"},
         "certificates /nonexistent is not there", "DOCKER_CERT_PATH", 2),
    ],
)  # fmt: skip
def test_a_run_without_its_engine_begins_no_trial(
    env: dict[str, str], said: str, fix: str, code: int, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    done = pier(*RUN, cwd=tmp_path, code=code, **{"DOCKER_HOST": "", "DOCKER_CONFIG": str(tmp_path), **env})
    assert (said in done.stderr and f"hint: {fix}" in done.stderr.replace("hint: check", "hint:")) or fix in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 500
    assert trials_of(tmp_path / "jobs" / "j") == []


@pytest.mark.plain
def test_a_run_at_an_engine_that_is_too_old_begins_no_trial(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    with old_engine() as address:
        done = pier(*RUN, cwd=tmp_path, code=2, DOCKER_HOST=address)
    assert "is too old: its API is 1.30" in done.stderr and "update the engine" in done.stderr
    assert trials_of(tmp_path / "jobs" / "j") == []


@dataclass(frozen=True)
class Guarded:
    """An engine with TLS, and certificates that suit it and that do not."""

    engine: Engine
    address: str
    certificates: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if missing() is not None:
        pytest.skip(str(missing()))
    place, port = tmp_path_factory.mktemp("certificates"), free_port()
    good, other = make_certificates(place / "good"), make_certificates(place / "other")
    for name, from_other in {"unknown": ["cert.pem", "key.pem"], "without": []}.items():
        (place / name).mkdir()
        shutil.copy(good / "ca.pem", place / name)
        for file in from_other:
            shutil.copy(other / file, place / name)
    with engine(*tls_options(good, port)) as running:
        import_bash_image(running, place / "image")
        yield Guarded(running, f"tcp://127.0.0.1:{port}", place)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("certificates", "said", "fix"),
    [
        ("other", "certificates do not agree: unable to get local issuer", "DOCKER_CERT_PATH"),
        ("unknown", "certificate", "DOCKER_CERT_PATH"),
        ("without", "certificates do not agree", "DOCKER_CERT_PATH"),
        ("", "requires TLS", "DOCKER_TLS_VERIFY=1"),
    ],
)
def test_wrong_certificates_are_told_as_such(
    guarded: Guarded, certificates: str, said: str, fix: str, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    env = {"DOCKER_HOST": guarded.address}
    if certificates:
        env |= {"DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(guarded.certificates / certificates)}
    done = pier(*RUN, cwd=tmp_path, code=2, **env)
    assert said in done.stderr and fix in done.stderr, done.stderr
    assert trials_of(tmp_path / "jobs" / "j") == []


@pytest.mark.docker
def test_a_run_goes_on_once_its_engine_is_there(guarded: Guarded, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    pier(*RUN, cwd=tmp_path, code=1, DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    pier(*RUN, cwd=tmp_path, DOCKER_HOST=guarded.engine.url)
    assert rewards_of(tmp_path / "jobs" / "j") == [1, 1]


@pytest.mark.docker
async def test_an_image_that_nobody_has_is_the_users_fault_and_not_asked_for_again(
    guarded: Guarded, tmp_path: Path
) -> None:
    async with running_registry(tmp_path / "registry") as address:
        reference = f"{address}/none:v1"
        write_tasks(tmp_path, TOML)
        done = pier(*RUN, "--image", reference, cwd=tmp_path, code=1, DOCKER_HOST=guarded.engine.url)
        told = pier("image", "pull", "--env", "docker", reference, cwd=tmp_path, code=2, DOCKER_HOST=guarded.engine.url)
    assert "retrying in" not in done.stderr
    for fault in faults(tmp_path):
        assert (fault["blame"], fault["code"], fault["retryable"]) == ("user", "not_found", False)
        assert "the engine cannot pull" in fault["exception_message"] and "registry: " in fault["exception_message"]
        assert fault["hint"] == f"check the name and its tag: docker manifest inspect {reference}"
    assert "manifest unknown" in told.stderr and "docker manifest inspect" in told.stderr


@pytest.mark.docker
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_a_disk_that_fills_up_is_told_wherever_it_does(tmp_path: Path) -> None:
    layer = tar_of(entry("data", os.urandom(SPACE)))
    with engine(disk=str(SPACE)) as running:
        import_bash_image(running, tmp_path / "image")
        async with running_registry(tmp_path / "registry") as address:
            await push(address, "big", "v1", Pieces(layer))
            pulled = f"{address}/big:v1"
            write_tasks(tmp_path / "pulled", TOML)
            told = pier("image", "pull", "--env", "docker", pulled, cwd=tmp_path, code=1, DOCKER_HOST=running.url)
            pier(*RUN, "--image", pulled, cwd=tmp_path / "pulled", code=1, DOCKER_HOST=running.url)
        assert "no space left on device" in told.stderr and "pier image gc --env docker" in told.stderr
        toml = TOML + '[metadata.pier]\nbuild_network = "none"\n'
        large = f"FROM {IMAGE}\nRUN dd if=/dev/urandom of=/data bs=1M count={SPACE >> 20}\n"
        for builder in ("engine", "pier"):
            write_tasks(tmp_path / builder, toml, environment__Dockerfile=large)
            pier(*RUN, "--ek", f"builder={builder}", cwd=tmp_path / builder, code=1, DOCKER_HOST=running.url)
        for place in ("pulled", "engine", "pier"):
            for fault in faults(tmp_path / place):
                assert (fault["code"], fault["blame"]) == ("disk_full", "infra"), (place, fault)
                assert "pier image gc --env docker" in fault["hint"]
        assert running.containers() == []
