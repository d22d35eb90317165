"""One engine used by several processes at once: what they need is made once, whole, and stays while it is needed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.contract import Mount
from pier.sandbox.docker.client import Client
from pier.sandbox.docker.images import collect_pier_volumes
from pier.sandbox.docker.volumes import PackVolumes
from tests.busybox import busybox_image
from tests.compose_tasks import IMAGE, TOML, import_bash_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, gate_mount, pier, rewards_of, start_pier, wait_for
from tests.trial_runs import write_task
from tests.ways import by_tcp

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

BUILDS = TOML + '[metadata.pier]\nbuild_network = "none"\n'
TEST = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
FILL = """\
import asyncio, sys
from pathlib import Path
from pier.lease import Lease
from pier.sandbox.docker.client import Client
from pier.sandbox.docker.volumes import PackVolumes

async def main():
    client, told = Client(sys.argv[1]), []
    with Lease() as lease:
        volumes = PackVolumes(client, lease, sys.argv[2])
        copying = volumes._copy
        async def note(*args):
            told.append(args)
            await copying(*args)
        volumes._copy = note
        name = await volumes.ensure(Path(sys.argv[3]))
        await volumes.close()
    await client.close()
    print(name, len(told))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine() as running:
        import_bash_image(running, tmp_path_factory.mktemp("image"))
        yield running
        assert running.containers() == []


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A directory that takes a moment to copy."""
    place = tmp_path / "pack"
    place.mkdir()
    for number in range(40):
        (place / f"file{number}").write_bytes(os.urandom(1 << 20))
    (place / "tool").write_text("#!/bin/sh\necho here\n")
    (place / "tool").chmod(0o755)
    return place


def test_a_pack_is_copied_once_by_processes_that_need_it_at_once(docker: Engine, pack: Path) -> None:
    command = [sys.executable, "-c", FILL, docker.url, IMAGE, str(pack)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [each.communicate(timeout=PATIENCE)[0].split() for each in running]
    assert len({name for name, _ in told}) == 1
    assert sorted(copies for _, copies in told) == ["0", "0", "1"]


async def test_a_volume_that_somebody_prunes_stays_with_a_run(
    docker: Engine, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = busybox_image(tmp_path / "image")
    with by_tcp(docker.socket) as address, Lease() as lease:
        monkeypatch.setenv("DOCKER_HOST", address)
        async with open_backend("docker", lease) as backend:
            spec = SandboxSpec(image, mounts=(Mount("/pack", pack),))
            for _ in range(2):
                async with await backend.start(spec) as sandbox:
                    assert (await sandbox.exec(["/pack/tool"])).text == "here\n"
                docker.docker("volume", "prune", "-f")
                monkeypatch.setenv("PIER_HOME", str(tmp_path / "another"))
                assert await collect_pier_volumes() == []
                monkeypatch.undo()
                monkeypatch.setenv("DOCKER_HOST", address)
        assert lease.held() == []


async def test_a_copy_that_broke_off_is_made_again(docker: Engine, pack: Path) -> None:
    client = Client(docker.url)
    try:
        with Lease() as lease:
            volumes = PackVolumes(client, lease, IMAGE)
            (pack / "file7").unlink()
            (pack / "file7").symlink_to("/nonexistent")
            breaking = asyncio.ensure_future(volumes.ensure(pack))
            while not docker.docker("volume", "ls", "-q"):
                await asyncio.sleep(0.01)
            breaking.cancel()
            await asyncio.wait([breaking])
            name = await volumes.ensure(pack)
            listed = docker.docker("run", "--rm", "--network=none", "-v", f"{name}:/pack", IMAGE, "ls", "-A", "/pack")
            await volumes.close()
            assert lease.held() == []
    finally:
        await client.close()
    assert set(listed.split()) == {".pier-whole", "tool", *(f"file{number}" for number in range(40))}


def test_two_runs_build_an_image_once(docker: Engine, tmp_path: Path) -> None:
    steps = f"FROM {IMAGE}\nRUN for n in $(seq 10); do echo piece $n; sleep 0.2; done; touch /made\n"
    write_task(tmp_path / "tasks" / "one", toml=BUILDS, test=TEST, environment__Dockerfile=steps)
    options = ["run", "-p", "tasks", "-a", "nop", "-q", "--env", "docker", "--ek", "builder=engine", "--job-name"]
    before = docker.docker("images", "-q", "--filter", "label=dev.pier.image").split()
    both = [start_pier(*options, name, cwd=tmp_path, DOCKER_HOST=docker.url) for name in ("a", "b")]
    for running in both:
        told = running.communicate(timeout=PATIENCE)
        assert running.returncode == 0, told
    logs = [next((tmp_path / "jobs" / name).glob("one__*/trial.log")).read_text() for name in ("a", "b")]
    assert sorted("piece 5" in log for log in logs) == [False, True]
    assert len(docker.docker("images", "-q", "--filter", "label=dev.pier.image").split()) == len(before) + 1
    assert [rewards_of(tmp_path / "jobs" / name) for name in ("a", "b")] == [[1], [1]]


def test_a_collection_during_a_trial_takes_nothing_of_it(docker: Engine, tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    wait = "#!/bin/sh\ntouch /gate/here; while [ ! -e /gate/go ]; do sleep 0.05; done\n"
    steps = f"FROM {IMAGE}\nRUN echo {tmp_path} > /made\n"
    write_task(tmp_path / "tasks" / "one", toml=BUILDS, test=wait + TEST, environment__Dockerfile=steps)
    options = ["-p", "tasks", "-a", "nop", "-q", "--env", "docker", "-k", "2", "-n", "1", "--job-name", "j"]
    running = start_pier("run", *options, *gate_mount(tmp_path / "gate"), cwd=tmp_path, DOCKER_HOST=docker.url)
    wait_for(lambda: (tmp_path / "gate" / "here").exists(), running)
    for home in (os.environ["PIER_HOME"], str(tmp_path / "another")):
        env = {"DOCKER_HOST": docker.url, "PIER_HOME": home}
        pier("image", "gc", "--env", "docker", "--json", cwd=tmp_path, **env)
        listed = json.loads(pier("image", "list", "--env", "docker", "--json", cwd=tmp_path, **env).stdout)
        (left,) = [row for row in listed if not row["reference"].startswith("pier/helper:")]
        assert left["in_use"]
    (tmp_path / "gate" / "go").touch()
    told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, told
    assert rewards_of(tmp_path / "jobs" / "j") == [1, 1]
