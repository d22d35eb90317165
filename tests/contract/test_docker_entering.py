"""Entering containers from outside, by pier itself and by a helper: of any image, and of no other process."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiodocker
import pytest
import pytest_asyncio

from pier.errors import SandboxError
from pier.image.model import Image, ImageConfig
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import open_backend
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.docker.backend import DockerBackend
from pier.sandbox.docker.engine import attendant_plan
from pier.sandbox.docker.entering import OwnEntered, OwnEntrance
from tests.busybox import add_program, busybox_image
from tests.engine import Engine, engine, missing

pytestmark = [
    pytest.mark.docker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

MANY, MOST = 800, 640
"""Connections that are tried, and that the helper takes of one container at once."""


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as running:
        yield running
        assert running.containers() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["", "1"], ids=["own", "helper"])
async def backend(
    request: pytest.FixtureRequest, docker: Engine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DockerBackend]:
    home = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(home))
        patch.setenv("DOCKER_HOST", docker.url)
        patch.setenv("PIER_DOCKER_HELPER", request.param)
        with Lease(home / "leases") as lease:
            async with open_backend("docker", lease) as opened:
                assert isinstance(opened, DockerBackend)
                await opened.capabilities()
                yield opened
            assert lease.held() == []


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    made = busybox_image(tmp_path_factory.mktemp("image"))
    add_program(made.layers[0], "/bin/bash")
    return made


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """One static program and nothing else: no shell, no /tmp, no users."""
    layer = tmp_path_factory.mktemp("bare") / "layer"
    layer.mkdir()
    layer.chmod(0o755)
    shutil.copy(shutil.which("busybox") or "", layer / "busybox")
    return Image("test/bare", f"sha256:{'a' * 64}", (layer,), ImageConfig(user="4321:8765", workdir="/"))


async def test_commands_have_the_label_of_the_container(backend: DockerBackend, docker: Engine, image: Image) -> None:
    """Whatever security modules the kernel has: what the engine runs there and what pier runs are labelled alike."""
    look = "cat /proc/self/attr/current /proc/self/attr/apparmor/current 2>&1; true"
    async with await backend.start(SandboxSpec(image)) as sandbox:
        by_engine = docker.docker("exec", f"pier-{sandbox.id}", "sh", "-c", look)
        assert (await sandbox.exec(look)).text.strip() == by_engine
        assert (await sandbox.exec(look, user="1000")).text.strip() == by_engine


APPARMOR = Path("/sys/module/apparmor/parameters/enabled")


@pytest.mark.skipif(
    not APPARMOR.exists() or APPARMOR.read_text() != "Y\n",
    reason="the kernel has no AppArmor",
)
@pytest.mark.parametrize("confined", [True, False])
async def test_what_the_label_denies_is_denied(confined: bool, backend: DockerBackend, image: Image) -> None:
    """`docker-default` keeps even root from opening a file that root may write; `unconfined` shows that nothing else
    does."""
    more = {} if confined else {"SecurityOpt": ["apparmor=unconfined"]}
    async with await backend.start_container(SandboxSpec(image, no_new_privileges=confined), more) as sandbox:
        label = (await sandbox.exec("cat /proc/self/attr/current", user="0")).text
        assert label == ("docker-default (enforce)\n" if confined else "unconfined\n")
        done = await sandbox.exec("true >> /proc/dynamic_debug/control", user="0")
        assert done.ok is not confined, done
        assert not confined or "Permission denied" in done.stderr.decode()


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"hello\n")

    def data_received(self, data: bytes) -> None:
        self.transport.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def only(name: str, *args: str) -> list[str]:
    """A command of the one program."""
    return ["/busybox", name, *args]


async def test_an_image_with_one_program_and_nothing_else(
    backend: DockerBackend, bare: Image, docker: Engine, tmp_path: Path
) -> None:
    async with await backend.start(SandboxSpec(bare, network=NetworkPolicy("allowlist", ("example.com",)))) as sandbox:
        assert (await sandbox.exec(only("id", "-u"))).text == "4321\n"
        assert (await sandbox.exec(only("id", "-g"))).text == "8765\n"
        assert (await sandbox.exec(only("id", "-u"), user="0")).text == "0\n"
        with pytest.raises(SandboxError) as told:
            await sandbox.exec(only("id"), user="nobody")
        assert "nobody" in told.value.message
        await sandbox.write_file("/deep/down/file", b"x" * 3_000_000, owner="4321:8765")
        assert len(await sandbox.read_file("/deep/down/file", max_bytes=4_000_000)) == 3_000_000
        await sandbox.exec(only("rm", "/deep/down/file"), user="0")
        await sandbox.download("/deep", tmp_path / "deep")
        assert (tmp_path / "deep" / "down").is_dir()
        listener = await sandbox.listen(0, Greeter)
        answered = await sandbox.exec(only("nc", "127.0.0.1", str(listener.port)), stdin=b"!")
        assert answered.text == "hello\n"
        assert not (await sandbox.exec(only("wget", "-q", "-T", "5", "http://93.184.216.34/"))).ok
        terminal = await sandbox.spawn(only("tty"), tty=True)
        assert (await terminal.wait()).exit_code == 0
        await sandbox.spawn(only("sleep", "600"))
        assert await sandbox.kill_all() == 1
        assert {change.path for change in await sandbox.changes() or []} <= {"/etc/hosts", "/deep/down"}


async def test_a_root_that_cannot_be_written(backend: DockerBackend, bare: Image) -> None:
    spec = SandboxSpec(bare, mounts=(Mount("/scratch", None, read_only=False),))
    async with await backend.start_container(spec, {"ReadonlyRootfs": True}) as sandbox:
        assert (await sandbox.exec(only("echo", "fine"))).text == "fine\n"
        assert "Read-only" in (await sandbox.exec(only("touch", "/x"), user="0")).stderr.decode()
        with pytest.raises(SandboxError):
            await sandbox.write_file("/x", b"x")
        await sandbox.write_file("/scratch/x", b"fine")
        assert await sandbox.read_file("/scratch/x") == b"fine"


async def test_a_process_that_is_not_of_the_container_is_not_entered(
    backend: DockerBackend, docker: Engine, image: Image
) -> None:
    """Numbers of processes are used again, so a container that has just ended may seem to be another one."""
    async with await backend.start(SandboxSpec(image)) as one, await backend.start(SandboxSpec(image)) as two:
        opened = await backend._engine()
        entrance = await opened.entrance()
        ids = {
            name: docker.docker("inspect", "-f", "{{.Id}} {{.State.Pid}}", f"pier-{name}") for name in (one.id, two.id)
        }
        (one_id, _), (two_id, two_pid) = ids[one.id].split(), ids[two.id].split()
        for pid in (int(two_pid), os.getpid()):
            with pytest.raises(SandboxError) as told:
                await entrance.enter("pier-wrong", one_id, pid, attendant_plan(SandboxSpec(image)))
            assert told.value.blame in ("infra", "user")
        if isinstance(entrance, OwnEntrance):
            entered = OwnEntered("pier-wrong", two_id, int(two_pid), entrance._zygotes)
            entered._id = one_id
            with pytest.raises(SandboxError, match="has ended"):
                await entered.start(attendant_plan(SandboxSpec(image)))
            entered.channel.close()
            os.close(entered._first)
        assert (await one.exec("echo fine")).text == (await two.exec("echo fine")).text == "fine\n"


async def test_four_requests_to_the_engine_for_a_trial(
    backend: DockerBackend, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await backend.start(SandboxSpec(image)):
        pass
    asked: list[str] = []
    query = aiodocker.Docker._do_query

    async def counted(self: aiodocker.Docker, path: Any, **more: Any) -> Any:
        asked.append(f"{more.get('method')} {path}")
        return await query(self, path, **more)

    monkeypatch.setattr(aiodocker.Docker, "_do_query", counted)
    async with await backend.start(SandboxSpec(image)) as sandbox:
        await sandbox.exec("rm /etc/hostname; echo new > /srv/new; echo more >> /etc/passwd")
        found = {change.path: change.kind for change in await sandbox.changes() or []}
    assert (found["/srv/new"], found["/etc/passwd"]) == ("added", "changed")
    assert len(asked) == 4, asked


async def test_who_opens_many_connections_harms_nobody_else(backend: DockerBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as hostile, await backend.start(SandboxSpec(image)) as other:
        taken: list[Greeter] = []
        listener = await hostile.listen(0, lambda: taken.append(Greeter()) or taken[-1])
        opening = f"ulimit -n 4096; for i in $(seq {MANY}); do exec {{fd}}<>/dev/tcp/127.0.0.1/{listener.port}; done"
        await hostile.spawn(["/bin/bash", "-c", f"{opening} 2>/dev/null; echo done > /tmp/done; sleep 600"])
        served = await other.listen(0, Greeter)
        for _ in range(5):
            asked = await other.exec(f"echo hi | nc 127.0.0.1 {served.port}", timeout=60)
            assert asked.text == "hello\n"
        assert (await hostile.exec("echo alive", timeout=60)).text == "alive\n"
        if (await backend._engine()).through_helper:
            await until(lambda: len(taken) == MOST)
            await asyncio.sleep(1)
            assert len(taken) == MOST
        await hostile.kill_all()
        again = await hostile.exec(f"echo hi | nc 127.0.0.1 {listener.port}", timeout=60)
        assert again.text == "hello\n"


class Unmoved(asyncio.Protocol):
    """Never reads what it is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()


async def test_who_is_not_read_holds_up_nobody_and_fills_no_memory(
    backend: DockerBackend, docker: Engine, image: Image
) -> None:
    async with await backend.start(SandboxSpec(image)) as flooding, await backend.start(SandboxSpec(image)) as other:
        listener = await flooding.listen(0, Unmoved)
        before = memory(docker)
        flood = f"for i in $(seq 40); do (cat /dev/zero | nc 127.0.0.1 {listener.port}) & done; wait"
        await flooding.spawn(flood)
        unread = await flooding.spawn(["cat", "/dev/zero"], on_output=lambda *_: None, output_limit=0)
        served = await other.listen(0, Greeter)
        data = os.urandom(5_000_000)
        for _ in range(5):
            assert (await other.exec(f"echo hi | nc 127.0.0.1 {served.port}", timeout=60)).text == "hello\n"
            await asyncio.wait_for(other.write_file("/srv/data", data), 60)
            assert await asyncio.wait_for(other.read_file("/srv/data", max_bytes=len(data)), 60) == data
        assert memory(docker) - before < 100 << 20
        await unread.kill()


def memory(docker: Engine) -> int:
    """Bytes that this process and the helper have in use."""
    pids = [pid for found in docker.helpers() for pid in docker.docker("top", found, "-o", "pid").split()[1:]]
    sizes = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in (*pids, os.getpid())]
    return sum(map(int, sizes)) * os.sysconf("SC_PAGE_SIZE")


async def test_an_engine_that_maps_users_is_refused(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who enters from the host would be the host's root, which no container of such an engine is."""
    users = [line.partition(":")[0] for line in Path("/etc/subuid").read_text().splitlines()]
    if not users:
        pytest.skip("no user has subordinate ids: /etc/subuid")
    with engine(f"--userns-remap={users[0]}") as mapping:
        monkeypatch.setenv("DOCKER_HOST", mapping.url)
        for helper in ("", "1"):
            monkeypatch.setenv("PIER_DOCKER_HELPER", helper)
            with Lease() as lease:
                async with open_backend("docker", lease) as opened:
                    with pytest.raises(SandboxError, match="userns-remap") as told:
                        await opened.start(SandboxSpec(image))
                    assert (told.value.blame, told.value.retryable) == ("user", False)
                    assert "userns-remap" in (await opened.doctor())[1].detail
                assert lease.held() == []
        assert mapping.docker("ps", "-aq") == ""
