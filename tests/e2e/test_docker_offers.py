"""What only some engines offer: GPUs, by a stand-in for the program that brings them, and limits on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pier.errors import SandboxError
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import Limits, SandboxSpec, open_backend
from pier.sandbox.conformance import CHECKS, verify
from pier.trial.config import EnvironmentConfig
from pier.trial.spec import SandboxChoice
from tests.busybox import busybox_image
from tests.compose_tasks import IMAGE, TOML, compose_task, docker_bench, import_bash_image
from tests.engine import Engine, cannot_mount, engine, missing
from tests.job_tasks import pier, rewards_of
from tests.trial_runs import write_task

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

HOOK = """\
#!/usr/bin/env python3
import json, pathlib, sys
config = json.loads(pathlib.Path(json.load(sys.stdin)["bundle"], "config.json").read_text())
env = dict(row.partition("=")[::2] for row in config["process"]["env"])
with open({told!r}, "a") as told:
    print(json.dumps([sys.argv[1], env]), file=told)
if "2" in env["NVIDIA_VISIBLE_DEVICES"].split(","):
    sys.exit("nvidia-container-cli: device error: 2: unknown device")
"""
TEST = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpus")


@pytest.fixture(scope="module")
def equipped(place: Path) -> Iterator[Engine]:
    """An engine whose host has two GPUs, as far as it can tell: the program that would bring them is on its path."""
    (place / "bin").mkdir()
    hook = place / "bin" / "nvidia-container-runtime-hook"
    hook.write_text(HOOK.format(told=str(place / "told")))
    hook.chmod(0o755)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{hook.parent}:{os.environ['PATH']}")
            running = stack.enter_context(engine())
        import_bash_image(running, place / "image")
        yield running
        assert running.containers() == []


@pytest.fixture
def gpus(equipped: Engine, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells what was asked for, empty."""
    monkeypatch.setenv("DOCKER_HOST", equipped.url)
    (place / "told").write_text("")
    return place / "told"


def devices(told: Path) -> list[str]:
    """The devices that each container with GPUs was given; the first asks whether there are any."""
    rows: list[tuple[str, dict[str, Any]]] = [json.loads(row) for row in told.read_text().splitlines()]
    assert all(when == "prestart" for when, _ in rows)
    return [env["NVIDIA_VISIBLE_DEVICES"] for _, env in rows]


@pytest.mark.parametrize("through_helper", ["", "1"], ids=["own", "helper"])
async def test_gpus_reach_the_runtime(
    gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_helper: str
) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", through_helper)
    image = busybox_image(tmp_path)
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            assert await backend.has_gpus()
            for count in (1, 2, -1):
                async with await backend.start(SandboxSpec(image, gpus=count)) as sandbox:
                    assert (await sandbox.exec(["true"])).ok
            async with await backend.start(SandboxSpec(image)):
                pass
            assert devices(gpus) == ["0", "0", "0,1", "all"]
            with pytest.raises(SandboxError, match="unknown device") as too_many:
                await backend.start(SandboxSpec(image, gpus=3))
            assert (too_many.value.code, too_many.value.blame, too_many.value.retryable) == ("gpu", "infra", False)
        assert lease.held() == []


async def test_a_task_has_the_gpus_that_it_asks_for(gpus: Path, tmp_path: Path) -> None:
    toml = TOML + f'docker_image = "{IMAGE}"\ngpus = 2\ngpu_types = ["H100", "A100"]\n'
    compose = "services: {main: {image: {image}}, other: {image: {image}, command: sleep 600, gpus: all}}"
    async with docker_bench(tmp_path / "trials") as bench:
        alone = await bench.run(write_task(tmp_path / "one", toml=toml, test=TEST), "nop")
        beside = await bench.run(compose_task(tmp_path / "two", compose, toml=TOML + "gpus = 1\n", test=TEST), "nop")
        without = await bench.run(
            write_task(tmp_path / "three", toml=toml, test=TEST),
            "nop",
            sandbox=SandboxChoice(EnvironmentConfig(type="docker", override_gpus=0)),
        )
    assert [result.rewards for result in (alone, beside, without)] == [{"reward": 1}] * 3, beside.exception_info
    assert devices(gpus)[:2] == ["0", "0,1"] and sorted(devices(gpus)[2:]) == ["0", "all"]
    assert alone.pier is not None and any("H100 or A100" in row for row in alone.pier.warnings)


def test_a_run_may_say_how_many_gpus(gpus: Path, equipped: Engine, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML + f'docker_image = "{IMAGE}"\n', test=TEST)
    options = ["-p", "tasks", "-a", "nop", "-q", "--env", "docker", "--job-name", "j", "--override-gpus", "1"]
    pier("run", *options, cwd=tmp_path, DOCKER_HOST=equipped.url)
    assert rewards_of(tmp_path / "jobs" / "j") == [1]
    assert devices(gpus) == ["0", "0", "0"], "a check before the job, one in it, and the trial's container"
    (config,) = (json.loads(path.read_text()) for path in (tmp_path / "jobs" / "j").glob("one*/config.json"))
    assert config["environment"]["override_gpus"] == 1


def test_a_run_without_gpus_is_refused_by_name(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", toml=TOML + f'docker_image = "{IMAGE}"\ngpus = 1\n', test=TEST)
    with engine() as running:
        options = ["-p", "tasks", "-a", "nop", "--env", "docker", "--job-name", "j"]
        done = pier("run", *options, cwd=tmp_path, code=2, DOCKER_HOST=running.url)
    assert "has no GPUs here" in done.stderr
    assert not (tmp_path / "jobs" / "j").exists()


async def _check_disk(running: Engine, image: Image, scratch: Path, *, kept_by: str) -> None:
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            assert (await backend.capabilities()).limits["disk"] == kept_by
            (check,) = (check for check in CHECKS if check.name == "disk_limit")
            assert await verify(check, backend, image, scratch)
            if kept_by == "quota":
                async with await backend.start(SandboxSpec(image, limits=Limits(disk=32 << 20))) as sandbox:
                    written = await sandbox.exec(["sh", "-c", "dd if=/dev/zero of=/big bs=1M count=100"])
                    assert "Disk quota exceeded" in written.error_text, written
                    with pytest.raises(SandboxError) as not_written:
                        await sandbox.write_file("/more", os.urandom(8 << 20))
                    assert (not_written.value.code, not_written.value.blame) == ("disk_limit", "agent")
                    await sandbox.exec(["rm", "/big", "/more"])
                    await sandbox.write_file("/more", os.urandom(24 << 20))
        assert lease.held() == []
    assert running.containers() == []


@pytest.mark.skipif(cannot_mount("btrfs") is not None, reason=str(cannot_mount("btrfs")))
@pytest.mark.parametrize("through_helper", ["", "1"], ids=["own", "helper"])
async def test_a_disk_is_limited_by_btrfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_helper: str) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", through_helper)
    with engine("--storage-driver=btrfs", disk="1g", filesystem="btrfs") as running:
        monkeypatch.setenv("DOCKER_HOST", running.url)
        await _check_disk(running, busybox_image(tmp_path), tmp_path, kept_by="quota")


@pytest.mark.skipif(cannot_mount("xfs") is not None, reason=str(cannot_mount("xfs")))
async def test_a_disk_is_watched_on_xfs_without_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("--storage-driver=overlay2", disk="512m", filesystem="xfs") as running:
        monkeypatch.setenv("DOCKER_HOST", running.url)
        await _check_disk(running, busybox_image(tmp_path), tmp_path, kept_by="watched")
        assert "pier/idle" in running.docker("images", "--format", "{{.Repository}}")


WITHOUT_PIDS = ("unshare", "--mount", "sh", "-c", 'umount /sys/fs/cgroup/pids && exec "$@"', "sh")


@pytest.mark.skipif(not Path("/sys/fs/cgroup/pids").is_dir(), reason="control groups of version 1 are not mounted here")
async def test_a_limit_that_the_engine_would_leave_out_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = busybox_image(tmp_path)
    with engine(before=WITHOUT_PIDS) as running, Lease() as lease:
        monkeypatch.setenv("DOCKER_HOST", running.url)
        async with open_backend("docker", lease) as backend:
            assert sorted((await backend.capabilities()).limits) == ["cpus", "disk", "memory", "open_files"]
            with pytest.raises(SandboxError, match="cannot limit processes here") as refused:
                await backend.start(SandboxSpec(image, limits=Limits(processes=10)))
            assert (refused.value.code, refused.value.blame, refused.value.retryable) == ("no_limit", "user", False)
        assert lease.held() == [] and running.containers() == []
