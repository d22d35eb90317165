"""Sandboxes as a whole: isolated, many at once, stopped at any moment, snapshotted and forked; and their processes.

Orphans are reaped, all processes can be killed, and none sees or ends a process outside.
"""

from __future__ import annotations

import asyncio
import random

from pier.errors import SandboxError
from pier.sandbox.conformance.bench import PATIENCE, Bench, check, check_inside, gone, is_alive, refuses, run, until
from pier.sandbox.contract import Limits, Mount, Sandbox, SandboxSpec

_COUNT = "n=0; for p in /proc/[0-9]*; do n=$((n+1)); done; echo $n"


async def _zombies(sandbox: Sandbox) -> int:
    listing = await run(sandbox, "cat /proc/[0-9]*/stat 2>/dev/null; true")
    return sum(row.rpartition(")")[2].split()[:1] == ["Z"] for row in listing.text.splitlines())


@check_inside("orphans that ended are reaped")
async def orphans_are_reaped(sandbox: Sandbox) -> None:
    await run(sandbox, "i=0; while [ $i -lt 50 ]; do (sh -c 'true &' &); i=$((i+1)); done")

    async def none_left() -> bool:
        return await _zombies(sandbox) == 0

    await until("zombies to go", none_left)


@check("a sandbox sees its own processes only")
async def own_processes_only(bench: Bench) -> None:
    async with bench.sandbox() as one, bench.sandbox() as two:
        await run(one, "sleep 600 >/dev/null 2>&1 </dev/null &")
        assert int((await run(two, _COUNT)).text) < 6


@check_inside("the sandbox outlives a kill of its init by its own root")
async def init_survives(sandbox: Sandbox) -> None:
    await sandbox.exec("kill -9 1; kill -TERM 1; kill -HUP 1", timeout=PATIENCE)
    await run(sandbox, "true")


@check_inside("killing everything as root inside leaves the sandbox usable")
async def kill_everything_inside(sandbox: Sandbox) -> None:
    await sandbox.exec("kill -9 -1", timeout=PATIENCE)
    await run(sandbox, "true")


@check_inside("kill_all ends every process and says how many")
async def kill_all(sandbox: Sandbox) -> None:
    script = "for i in 1 2 3 4 5; do setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!; done"
    pids = (await run(sandbox, script)).text.split()
    assert await sandbox.kill_all() >= 5
    await gone(sandbox, *pids)
    await run(sandbox, "true")
    assert await sandbox.kill_all() == 0


@check_inside("kill_all ends commands that are being waited for")
async def kill_all_ends_commands(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 600")
    await sandbox.kill_all()
    async with asyncio.timeout(PATIENCE):
        assert (await process.wait()).exit_code == 137


@check_inside("kill_all wins against a fork storm")
async def kill_all_in_fork_storm(sandbox: Sandbox) -> None:
    await sandbox.write_file(
        "/srv/storm",
        b"#!/bin/sh\nwhile :; do setsid sh -c 'sleep 0.01; sleep 0.01' & sleep 0.005; done\n",
        mode=0o755,
    )
    await run(sandbox, "for i in 1 2 3; do setsid /srv/storm >/dev/null 2>&1 </dev/null & done; sleep 0.5")
    await sandbox.kill_all()

    async def calm() -> bool:
        return not (
            await run(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'srv/stor[m]'; true")
        ).text.strip("0\n")

    await until("the storm to end", calm, 20)


@check("a verifier's view is out of reach of what goes on running", needs="isolates_verifier")
async def isolated_view(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        folders = {"/private": 0o755, "/above/private": 0o777}
        assert (await sandbox.isolate(folders)).sandbox is None, "nothing runs here"
        await run(sandbox, "mkdir -p /above/private; echo forged >/above/private/verdict; echo shared >/srv/shared")
        start = (
            "setsid sleep 600 >/dev/null 2>&1 </dev/null & until grep -q ^sleep /proc/$!/cmdline; do :; done; echo $!"
        )
        kept = (await run(sandbox, start)).text.strip()
        isolation = await sandbox.isolate(folders)
        view = isolation.sandbox
        assert view is not None and isolation.count == 1 and isolation.survivors[0].command == "sleep 600"
        await view.write_file("/private/test", b"test")
        script = (
            "cat /private/test /srv/shared; ls -A /above/private; setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"
        )
        test, shared, own = (await run(view, script)).text.replace("test", "test ").split()
        assert (test, shared) == ("test", "shared")
        await run(view, "echo 1 >/above/private/verdict")
        if bench.capabilities.users:
            await run(view, "echo more >/above/private/more", user="4321")
        await run(sandbox, f'test -z "$(ls -A /private /above/private | grep -v :)" && ! ls /proc/{own}/root/private')
        for attempt in (
            "rmdir /private",
            "mv /above /b",
            "mv /above/private /c",
            "touch /private/x",
            f"cat /proc/{own}/mem",
        ):
            assert not (await sandbox.exec(attempt, timeout=PATIENCE)).ok, attempt
        assert await view.kill_all() == 1
        await gone(sandbox, own)
        assert await is_alive(sandbox, kept)
        assert await sandbox.kill_all() >= 1
        assert (await view.read_file("/above/private/verdict")).startswith(b"1\n")
        await view.stop()
        assert (await run(sandbox, "cat /above/private/verdict; rmdir /private")).text == "forged\n"


@check_inside("a crashed command does not harm others")
async def crashes_are_apart(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec("kill -SEGV $$" if n % 2 else "echo fine") for n in range(20)))
    assert [result.exit_code for result in results] == [139 if n % 2 else 0 for n in range(20)]


MEGABYTE = 1 << 20


@check_inside(
    "more memory than allowed ends the command, and the sandbox goes on",
    needs="limit:memory",
    limits=Limits(memory=96 * MEGABYTE),
)
async def memory_limit(sandbox: Sandbox) -> None:
    result = await sandbox.exec("head -c 600000000 /dev/zero | tail", timeout=PATIENCE, output_limit=1000)
    assert result.exit_code != 0, result
    await run(sandbox, "true")


@check("running out of memory is reported in the result", needs="limit:memory")
async def memory_limit_is_reported(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(memory=96 * MEGABYTE)) as sandbox:
        result = await sandbox.exec("head -c 600000000 /dev/zero | tail", timeout=PATIENCE, output_limit=1000)
        if bench.capabilities.limits["memory"] == "cgroup":
            assert result.out_of_memory, result
        assert not (await run(sandbox, "true")).out_of_memory


@check_inside("more processes than allowed cannot be started", needs="limit:processes", limits=Limits(processes=20))
async def process_limit(sandbox: Sandbox) -> None:
    script = "for i in $(seq 60); do sleep 600 >/dev/null 2>&1 </dev/null & done"
    await sandbox.exec(script, timeout=PATIENCE, output_limit=100_000)
    assert await sandbox.kill_all() <= 21
    await run(sandbox, "true")


@check_inside("more open files than allowed cannot be had", needs="limit:open_files", limits=Limits(open_files=100))
async def open_files_limit(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "ulimit -n; ulimit -Hn")).text == "100\n100\n"


@check_inside("more on disk than allowed cannot be written", needs="limit:disk", limits=Limits(disk=32 * MEGABYTE))
async def disk_limit(sandbox: Sandbox) -> None:
    result = await sandbox.exec("head -c 200000000 /dev/zero >/srv/big", timeout=PATIENCE)
    assert not result.ok, result


@check_inside("a part of a cpu can be asked for", needs="limit:cpus", limits=Limits(cpus=0.5))
async def cpu_limit(sandbox: Sandbox) -> None:
    await run(sandbox, "true")


@check("limits of one sandbox are not those of another", needs="limit:processes")
async def limits_are_apart(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(processes=20)) as one, bench.sandbox(limits=Limits(processes=20)) as two:
        await one.exec(
            "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 600 >/dev/null 2>&1 </dev/null & done", timeout=PATIENCE
        )
        script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 600 >/dev/null 2>&1 </dev/null & done; echo all"
        assert (await run(two, script)).text == "all\n"


@check_inside("the host name is the one that was asked for", hostname="harbour")
async def host_name(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "cat /proc/sys/kernel/hostname")).text == "harbour\n"
    assert "harbour" in (await run(sandbox, "cat /etc/hosts")).text


@check("/tmp, /dev/shm and the usual devices are there, and private")
async def usual_places(bench: Bench) -> None:
    async with bench.sandbox() as one, bench.sandbox() as two:
        await run(
            one, "echo x >/tmp/x; echo x >/dev/shm/x; echo x >/dev/null; head -c 1 /dev/urandom /dev/zero >/dev/null"
        )
        await run(one, "test -c /dev/tty && test -d /dev/pts && test -e /dev/fd/0 && test -L /dev/stdout")
        assert (await run(two, "ls /tmp/x /dev/shm/x 2>/dev/null; true")).stdout == b""


@check("what one sandbox writes no other sees, and the image stays as it was")
async def sandboxes_are_apart(bench: Bench) -> None:
    async with bench.sandbox() as one:
        await run(one, "echo x >/srv/mark; mkdir -p /opt/new")
        async with bench.sandbox() as two:
            assert not (await two.exec("test -e /srv/mark || test -e /opt/new")).ok
    async with bench.sandbox() as three:
        assert not (await three.exec("test -e /srv/mark || test -e /opt/new")).ok


@check("a host directory is seen read-only", needs="bind_mounts")
async def read_only_mount(bench: Bench) -> None:
    (bench.scratch / "file").write_text("host")
    async with bench.sandbox(mounts=(Mount("/mnt/given", bench.scratch),)) as sandbox:
        assert (await run(sandbox, "cat /mnt/given/file")).text == "host"
        assert not (await sandbox.exec("echo x >/mnt/given/new")).ok
        assert not (await sandbox.exec("mount -o remount,rw /mnt/given")).ok
    assert [path.name for path in bench.scratch.iterdir()] == ["file"]


@check("a host directory is shared read-write", needs="bind_mounts")
async def shared_mount(bench: Bench) -> None:
    shared = bench.scratch / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    async with bench.sandbox(mounts=(Mount("/mnt/shared", shared, read_only=False),)) as sandbox:
        await run(sandbox, "echo inside >/mnt/shared/new")
    assert (shared / "new").read_text() == "inside\n"


@check_inside(
    "a tmpfs is private and no larger than asked for", mounts=(Mount("/scratch", None, read_only=False, size=1 << 20),)
)
async def tmpfs_mount(sandbox: Sandbox) -> None:
    await run(sandbox, "echo x >/scratch/x")
    assert not (await sandbox.exec("head -c 3000000 /dev/zero >/scratch/big")).ok


@check("64 sandboxes at once")
async def sixty_four_at_once(bench: Bench) -> None:
    async def one(number: int) -> str:
        async with bench.sandbox() as sandbox:
            await sandbox.write_file("/srv/number", b"%d" % number)
            await asyncio.sleep(0)
            return (await run(sandbox, "cat /srv/number")).text

    assert await asyncio.gather(*(one(number) for number in range(64))) == [str(number) for number in range(64)]


@check_inside("stopping twice is fine, and a stopped sandbox says so at once")
async def stop_twice(sandbox: Sandbox) -> None:
    await sandbox.stop()
    await sandbox.stop()
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    await refuses(sandbox.exec("true"), SandboxError)
    await refuses(sandbox.write_file("/x", b""), SandboxError)
    await refuses(sandbox.read_file("/x"), SandboxError)
    await refuses(sandbox.kill_all(), SandboxError)


@check_inside("stopping ends what is going on inside, with an error")
async def stop_while_busy(sandbox: Sandbox) -> None:
    tasks = [asyncio.ensure_future(sandbox.exec("sleep 600")) for _ in range(5)]
    process = await sandbox.spawn("sleep 600")
    tasks.append(asyncio.ensure_future(process.wait()))
    await run(sandbox, "true")
    await sandbox.stop()
    done, pending = await asyncio.wait(tasks, timeout=PATIENCE)
    assert not pending
    for task in done:
        error = task.exception()
        assert isinstance(error, SandboxError) or (error is None and task.result().exit_code == 137), task


@check("stopping at any moment of a transfer, a command or a listener")
async def stop_at_any_moment(bench: Bench) -> None:
    source = bench.scratch / "file"
    source.write_bytes(bytes(4_000_000))
    dice = random.Random(7)

    async def work(sandbox: Sandbox) -> None:
        await sandbox.upload(source, "/srv/file")
        await sandbox.exec("cat /srv/file | wc -c")
        await sandbox.listen(0, asyncio.Protocol)
        await sandbox.read_file("/srv/file")
        await sandbox.exec("sleep 600")

    for _ in range(8):
        async with bench.sandbox() as sandbox:
            task = asyncio.ensure_future(work(sandbox))
            await asyncio.sleep(dice.random() * 0.1)
            await sandbox.stop()
            await asyncio.wait([task], timeout=PATIENCE)
            assert task.done() and not task.cancelled()
            assert task.exception() is None or isinstance(task.exception(), SandboxError), task.exception()


@check("a start that is cancelled at any moment leaves nothing behind")
async def cancelled_start(bench: Bench) -> None:
    dice = random.Random(11)
    for _ in range(12):
        task = asyncio.ensure_future(bench.backend.start(SandboxSpec(bench.image)))
        await asyncio.sleep(dice.random() * 0.03)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().stop()
    assert bench.held() == []


@check("a sandbox is written down while it lives and struck out after")
async def written_down(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert bench.held()
        await sandbox.stop()
    assert bench.held() == []


@check("a snapshot holds what was written, and the sandbox goes on", needs="snapshot")
async def snapshot(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir /srv/d; echo one >/srv/d/file; sleep 600 >/dev/null 2>&1 </dev/null &")
        image = await sandbox.snapshot()
        await run(sandbox, "cat /srv/d/file; echo two >/srv/d/file; echo x >/srv/later")
        async with bench.sandbox(image=image) as fork:
            assert (await run(fork, "cat /srv/d/file; ls /srv")).text.split() == ["one", "d"]
        assert (await run(sandbox, "cat /srv/d/file")).text == "two\n"
    await bench.backend.remove_snapshot(image)


@check("what was removed stays removed in a snapshot", needs="snapshot")
async def snapshot_of_removals(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir /srv/d; echo a >/srv/d/a; echo b >/srv/d/b")
        one = await sandbox.snapshot()
        await run(sandbox, "rm /srv/d/a; rm -r /srv/d; mkdir /srv/d; echo c >/srv/d/c; rm /etc/hostname || true")
        two = await sandbox.snapshot()
        async with bench.sandbox(image=two) as fork:
            assert (await run(fork, "ls /srv/d")).text == "c\n"
        async with bench.sandbox(image=one) as fork:
            assert (await run(fork, "ls /srv/d")).text == "a\nb\n"
    await bench.backend.remove_snapshot(two)
    await bench.backend.remove_snapshot(one)


@check("n sandboxes start from one snapshot, each on its own", needs="snapshot")
async def fork(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "echo base >/srv/base")
        image = await sandbox.snapshot()
    forks = await bench.backend.fork(image, SandboxSpec(image), 4)
    try:
        await asyncio.gather(*(run(each, f"echo {number} >/srv/own") for number, each in enumerate(forks)))
        seen = [(await run(each, "cat /srv/base /srv/own")).text for each in forks]
        assert seen == [f"base\n{number}\n" for number in range(4)]
    finally:
        await asyncio.gather(*(each.stop() for each in forks))
    await bench.backend.remove_snapshot(image)


@check("asking for what the backend lacks is refused before anything starts")
async def refused_before_start(bench: Bench) -> None:
    if not await bench.backend.has_gpus():
        await refuses(bench.backend.start(SandboxSpec(bench.image, gpus=1)), SandboxError)
    await refuses(bench.backend.start(SandboxSpec(bench.image, limits=Limits(memory=-1))), SandboxError)
    assert bench.held() == []
