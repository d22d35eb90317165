"""Routes to more of this machine than one sandbox's share."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pier.image.host import host_image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Limits, Sandbox, SandboxSpec
from pier.sandbox.local import LocalBackend
from pier.trial.spec import AgentChoice, SandboxChoice
from tests.redteam import route
from tests.redteam.places import IMAGE, by_engine, everywhere, open_place
from tests.trial_runs import TOML, write_task

PATIENCE = 120
MEGABYTE = 1 << 20
FORKS = """
import os, sys, time
ids, made = int(sys.argv[1]), 0
for number in range(6000):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        if ids:
            os.setuid(1000 + number % ids)
        time.sleep(600)
        os._exit(0)
    made += 1
print(made, flush=True)
os.kill(-1, 9)
"""


@asynccontextmanager
async def started(place: str, limits: Limits | None = None) -> AsyncIterator[tuple[Backend, Sandbox]]:
    """A sandbox on a backend, with its share of the machine unless `limits` are given."""
    with Lease() as lease:
        async with open_backend(place, lease) as backend:
            image = host_image() if place == "local" else await backend.find_image(IMAGE)
            assert image is not None
            async with await backend.start(SandboxSpec(image, limits=limits or await backend.share())) as sandbox:
                yield backend, sandbox


@route("host", "a fork bomb under the default limits", "4,096 processes; other sandboxes go on")
@everywhere
async def test_forks_are_limited_by_default(place: str) -> None:
    script = "i=0; while [ $i -lt 6000 ] && sleep 600 >/dev/null 2>&1 </dev/null & do i=$((i+1)); done; echo $i"
    async with started(place) as (backend, sandbox), await backend.start(sandbox.spec) as other:
        if place == "local":
            result = await sandbox.exec(["/usr/bin/python3", "-c", FORKS, "0"], timeout=PATIENCE)
            assert 4000 < int(result.text) <= 4096
        else:
            await sandbox.exec(script, timeout=PATIENCE)
            assert await sandbox.kill_all() <= 4100
        assert (await other.exec("sleep 0.01 & wait; echo fine", timeout=PATIENCE)).text == "fine\n"
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a fork bomb that changes its user id", "one limit for all ids together")
@pytest.mark.plain
async def test_forks_of_many_ids_are_limited_together(backend: LocalBackend) -> None:
    capabilities = await backend.capabilities()
    if capabilities.limits["processes"] == "rlimit" or not capabilities.users:
        pytest.skip("this kernel limits processes for each user id only, or there is one id")
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(processes=400))) as sandbox:
        result = await sandbox.exec(["/usr/bin/python3", "-c", FORKS, "50"], timeout=PATIENCE)
        assert 350 < int(result.text) <= 800
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


HOLD = """
import mmap, os, sys, time
way, size = sys.argv[1], int(sys.argv[2])
files = []
for number in range(size >> 20):
    fd = os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(1 << 20))
    os.unlink(f"/tmp/{number}")
    if way == "mapped":
        files.append(mmap.mmap(fd, 4096))
        os.close(fd)
time.sleep(600)
"""


@route("host", "space is held by files that are open or mapped, and unlinked", "counts as written; all is killed")
@pytest.mark.plain
@pytest.mark.parametrize("way", ["open", "mapped"])
async def test_unlinked_files_count(backend: LocalBackend, way: str) -> None:
    if way == "mapped" and os.geteuid() != 0:
        pytest.skip("only root can look at mapped files")
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(disk=20 * MEGABYTE))) as sandbox:
        held = await sandbox.exec(["/usr/bin/python3", "-c", HOLD, way, str(180 * MEGABYTE)], timeout=PATIENCE)
        assert held.out_of_disk, held
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a container writes more than its limit, also to a file that it unlinked", "all is killed")
@by_engine
@pytest.mark.parametrize(
    "script", ["head -c 60000000 /dev/zero >/big", "exec 3>/x; rm /x; head -c 60000000 /dev/zero >&3"]
)
async def test_the_disk_of_containers_is_limited(
    place: str, helper: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", helper)
    async with started(place, Limits(disk=20 * MEGABYTE)) as (_, sandbox):
        assert (await sandbox.exec(f"{script}; sleep 600", timeout=PATIENCE)).out_of_disk
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "the watcher of the disk meets an error of the system", "it goes on and the limit holds")
async def test_the_watcher_of_the_disk_survives_errors(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(disk=20 * MEGABYTE))) as sandbox:
        with monkeypatch.context() as patch:
            tries: list[str] = []
            sys.addaudithook(lambda event, args: tries.append(args[1][0]) if event == "subprocess.Popen" else None)
            patch.setattr(sys, "executable", "/nonexistent")
            for pid in backend.zygotes:
                os.kill(pid, 9)
            async with asyncio.timeout(PATIENCE):
                while tries.count("/nonexistent") < 2:
                    await asyncio.sleep(0.01)
        script = "i=0; while true; do head -c 1000000 /dev/zero > /tmp/$i || exit 1; i=$((i+1)); sleep 0.01; done"
        assert (await sandbox.exec(script, timeout=PATIENCE)).out_of_disk


@route("host", "an agent lowers its score for the OOM killer", "refused, or taken back within a second")
@everywhere
async def test_sandboxes_are_first_in_line(place: str) -> None:
    script = "sleep 0.2; cat /proc/self/oom_score_adj; echo 0 > /proc/$$/oom_score_adj; "
    script += 'while read n < /proc/$$/oom_score_adj; [ "$n" -lt 1000 ]; do sleep 0.05; done; echo back'
    async with started(place) as (_, sandbox):
        lines = (await sandbox.exec(script, timeout=PATIENCE)).text.split()
        assert (lines[0], lines[-1]) == ("1000", "back")


MANY = """
import os, time
for number in range(200):
    if os.fork() == 0:
        held = b"x" * (2 << 20)
        time.sleep(600)
time.sleep(2)
"""


@route("host", "many small processes take all memory, so that what serves them is the largest", "one of them is killed")
@everywhere
async def test_what_serves_a_sandbox_is_not_killed_for_its_commands(place: str) -> None:
    async with started(place, Limits(memory=64 * MEGABYTE)) as (_, sandbox):
        if place == "local":
            await sandbox.exec(["/usr/bin/python3", "-c", MANY], timeout=PATIENCE)
        else:
            many = "i=0; while [ $i -lt 100 ]; do tail -c 1500000 /dev/zero >/dev/null 2>&1 & i=$((i+1)); done; sleep 2"
            await sandbox.exec(many, timeout=PATIENCE)
        await sandbox.kill_all()
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a task without limits runs", "half of the memory and of the free disk, and 4,096 processes")
@everywhere
async def test_trials_have_limits(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        share = await bench.services.backend.share()
        assert share.processes == 4096 and (share.memory or 0) > 0 and (share.disk or 0) > 0
        many = "i=0; while [ $i -lt 60 ]; do sleep 600 >/dev/null 2>&1 </dev/null & i=$((i+1)); done; touch /app/done"
        task = write_task(tmp_path / "t", toml=TOML + "[metadata.pier]\nprocesses = 20\n")
        agent = AgentChoice("command", options={"command": many})
        assert (await bench.run(task, agent)).rewards == {"reward": 0}
        chosen = SandboxChoice(image=bench.image, limits=Limits(processes=4000))
        assert (await bench.run(task, agent, sandbox=chosen)).rewards == {"reward": 1}
        lifted = SandboxChoice(image=bench.image, limits=Limits(processes=0))
        assert (await bench.run(task, agent, sandbox=lifted)).rewards == {"reward": 1}
