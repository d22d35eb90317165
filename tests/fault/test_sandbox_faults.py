"""Sandboxes through kills at every joint: zygotes, inits, workers, pier itself; cancelled starts and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.errors import SandboxError
from pier.image.model import Image
from pier.lease import Lease, sweep
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.local import LocalBackend

pytestmark = pytest.mark.plain


async def test_a_killed_zygote_is_replaced(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as before:
        for pid in backend.zygotes:
            os.kill(pid, signal.SIGKILL)
        assert (await before.exec("echo still here")).text == "still here\n"
        async with await backend.start(SandboxSpec(image)) as after:
            assert (await after.exec("echo new")).text == "new\n"


async def test_zygotes_killed_during_starts(backend: LocalBackend, image: Image) -> None:
    await (await backend.start(SandboxSpec(image))).stop()
    starts = [asyncio.ensure_future(backend.start(SandboxSpec(image))) for _ in range(8)]
    await asyncio.sleep(0.01)
    for pid in backend.zygotes:
        os.kill(pid, signal.SIGKILL)
    for outcome in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, SandboxError) and outcome.blame == "infra" and outcome.retryable, outcome
        else:
            assert (await outcome.exec(["true"])).ok
            await outcome.stop()


async def test_a_killed_init_is_told_and_nothing_hangs(backend: LocalBackend, image: Image) -> None:
    sandbox = await backend.start(SandboxSpec(image))
    running = asyncio.ensure_future(sandbox.exec("sleep 1000"))
    process = await sandbox.spawn("sleep 1000")
    os.kill(sandbox.box.pid, signal.SIGKILL)
    for broken in (running, process.wait(), sandbox.read_file("/etc/passwd"), sandbox.exec("true"), sandbox.kill_all()):
        with pytest.raises(SandboxError) as caught:
            await asyncio.wait_for(broken, 60)
        assert caught.value.code == "sandbox_gone" and caught.value.blame == "infra"
    await process.kill()
    await sandbox.stop()
    await sandbox.stop()


async def test_killing_everything_inside_ends_commands_only(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        alone = await sandbox.exec("sleep 1000 & kill -9 -1; wait $!; echo $?", timeout=60)
        assert alone.text == "137\n"
        async with await sandbox.spawn("sleep 1000") as first:
            result = await sandbox.exec("kill -9 -1; sleep 1000", timeout=60)
            assert result.exit_code == 137 and not result.timed_out
            assert (await first.wait()).exit_code == 137
        assert (await sandbox.exec("echo alive", timeout=60)).text == "alive\n"


async def test_a_stopped_worker_cannot_keep_its_command_alive(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        script = "kill -STOP $PPID; (sleep 1000 &); sleep 1000"
        result = await sandbox.exec(script, timeout=2)
        assert result.timed_out
        assert await sandbox.kill_all() == 0


@pytest.mark.parametrize("sent", ["STOP", "KILL"])
@pytest.mark.parametrize("beside", [False, True])
async def test_what_stops_or_kills_all_others_cannot_make_anybody_wait(
    backend: LocalBackend, image: Image, beside: bool, sent: str
) -> None:
    """Programs that are about to begin can be stopped, too, and so can whoever copies files."""
    async with await backend.start(SandboxSpec(image)) as sandbox:
        first = await sandbox.spawn("sleep 1000") if beside else None
        await sandbox.exec(f"(while :; do kill -{sent} -1; done) >/dev/null 2>&1 &")
        if first is not None:
            await first.kill()
        for user in ("0", "1000") * 5:
            await asyncio.wait_for(sandbox.exec("true", user=user, timeout=0.2), 60)
            with contextlib.suppress(SandboxError):
                await asyncio.wait_for(sandbox.read_file("/etc/passwd"), 60)
        await asyncio.wait_for(sandbox.kill_all(), 60)
        assert (await sandbox.exec("echo alive", timeout=60)).text == "alive\n"
        assert await sandbox.read_file("/etc/hostname")


async def test_no_signal_from_inside_ends_the_first_process(backend: LocalBackend, image: Image) -> None:
    async with await backend.start(SandboxSpec(image)) as sandbox:
        await sandbox.exec("for number in $(seq 1 64); do kill -$number 1; done; sleep 0.1", timeout=60)
        assert (await sandbox.exec("echo alive", timeout=60)).text == "alive\n"


async def test_a_download_that_cannot_be_written_here_ends(backend: LocalBackend, image: Image, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "before").touch()
    async with await backend.start(SandboxSpec(image)) as sandbox:
        await sandbox.exec("mkdir /srv/d; head -c 4000000 /dev/zero >/srv/d/large")
        with pytest.raises(FileExistsError):
            await asyncio.wait_for(sandbox.download("/srv/d", tmp_path / "full"), 60)
        assert (await sandbox.exec("echo alive")).text == "alive\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


async def test_cancelled_starts_leave_nothing(backend: LocalBackend, image: Image, pier_home: Path) -> None:
    await (await backend.start(SandboxSpec(image))).stop()
    for step in range(20):
        start = asyncio.ensure_future(backend.start(SandboxSpec(image)))
        await asyncio.sleep(step * 0.001)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await start).stop()
    assert backend.lease.held() == []
    assert not list(pier_home.glob("sandboxes/*"))


async def test_a_start_that_fails_is_explained(backend: LocalBackend, image: Image, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    broken = Image("test/broken", "sha256:1", (tmp_path / "missing",))
    with pytest.raises(SandboxError, match="lacks its layer"):
        await backend.start(SandboxSpec(broken))
    assert backend.lease.held() == []


_OWNER = """
import asyncio, sys, time
from pathlib import Path
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import Limits, SandboxSpec, open_backend

async def main():
    backend = open_backend("local", Lease())
    image = Image("test", "sha256:2", (Path(sys.argv[1]),))
    sandbox = await backend.start(SandboxSpec(image, limits=Limits(processes=50)))
    await sandbox.exec("mkdir -p /srv/a; chmod 0 /srv/a; (setsid sleep 1000 >/dev/null 2>&1 &)")
    frozen = await sandbox.snapshot()
    await sandbox.exec("(setsid sleep 1000 >/dev/null 2>&1 &)")
    print(sandbox.box.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_killed_pier_leaves_nothing_after_a_sweep(image: Image, pier_home: Path) -> None:
    argv = [sys.executable, "-c", _OWNER, str(image.layers[0])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        init = int(owner.stdout.readline())
        owner.kill()
        owner.wait(60)
    await _until_gone(init)
    with Lease() as lease:
        async with open_backend("local", lease) as backend:
            planned = await sweep(dict.fromkeys(backend.kinds, backend.destroy), dry_run=True)
            assert sorted(held.kind for held in planned.removed) == ["sandbox", "snapshot"]
            swept = await sweep(dict.fromkeys(backend.kinds, backend.destroy))
            assert len(swept.removed) == 2 and swept.failed == []
            groups = [path for held in swept.removed for path in held.data.get("groups", [])]
            assert not any(Path(path).exists() for path in groups)
    for name in ("sandboxes", "snapshots", "leases"):
        assert list((pier_home / name).iterdir()) == []


async def _until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} outlived its owner"
        await asyncio.sleep(0.02)


@pytest.fixture
def small_disk(pier_home: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    pier_home.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(pier_home)], check=True)
    try:
        yield pier_home
    finally:
        subprocess.run(["umount", "-l", str(pier_home)], check=True)


async def test_a_full_disk_is_told(small_disk: Path, image: Image) -> None:
    with Lease() as lease:
        async with open_backend("local", lease) as backend:
            async with await backend.start(SandboxSpec(image)) as sandbox:
                filled = await sandbox.exec("head -c 20000000 /dev/zero >/srv/big", timeout=60)
                assert filled.exit_code == 1
                with pytest.raises(SandboxError) as caught:
                    await sandbox.write_file("/srv/more", b"x" * 100_000)
                assert caught.value.code == "disk_full"
                with pytest.raises((SandboxError, OSError)):
                    await backend.start(SandboxSpec(image))
            async with await backend.start(SandboxSpec(image)) as again:
                assert (await again.exec("true")).ok
        assert lease.held() == []


def test_a_kernel_without_user_namespaces_is_told(pier_home: Path) -> None:
    closed = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    argv = ["unshare", "-Ur", "sh", "-c", closed, "-", sys.executable, "-m", "pier"]
    run = subprocess.run(
        [*argv, "sandbox", "run", "--", "true"], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 1 and "cannot prepare sandboxes here" in run.stderr and "pier doctor" in run.stderr
    doctor = subprocess.run([*argv, "doctor"], capture_output=True, text=True, timeout=120, check=False)
    assert doctor.returncode == 1 and "sysctl user.max_user_namespaces" in doctor.stdout
    for name in ("sandboxes", "leases"):
        assert list((pier_home / name).iterdir()) == []
