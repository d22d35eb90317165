"""Processes: orphans are reaped, all can be killed, none sees or ends what is outside.

Limits: what is too much ends or is refused inside, and is told.
"""

from __future__ import annotations

import asyncio

from pier.sandbox.conformance.bench import PATIENCE, Bench, check, gone, is_alive, run, until
from pier.sandbox.contract import Limits, Sandbox

_COUNT = "n=0; for p in /proc/[0-9]*; do n=$((n+1)); done; echo $n"


async def _zombies(sandbox: Sandbox) -> int:
    listing = await run(sandbox, "cat /proc/[0-9]*/stat 2>/dev/null; true")
    return sum(row.rpartition(")")[2].split()[:1] == ["Z"] for row in listing.text.splitlines())


@check("orphans that ended are reaped")
async def orphans_are_reaped(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "i=0; while [ $i -lt 50 ]; do (sh -c 'true &' &); i=$((i+1)); done")

        async def none_left() -> bool:
            return await _zombies(sandbox) == 0

        await until("zombies to go", none_left)


@check("a sandbox sees its own processes only")
async def own_processes_only(bench: Bench) -> None:
    async with bench.sandbox() as one, bench.sandbox() as two:
        await run(one, "sleep 600 >/dev/null 2>&1 </dev/null &")
        assert int((await run(two, _COUNT)).text) < 6


@check("the sandbox outlives a kill of its init by its own root")
async def init_survives(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await sandbox.exec("kill -9 1; kill -TERM 1; kill -HUP 1", timeout=PATIENCE)
        await run(sandbox, "true")


@check("killing everything as root inside leaves the sandbox usable")
async def kill_everything_inside(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await sandbox.exec("kill -9 -1", timeout=PATIENCE)
        await run(sandbox, "true")


@check("kill_all ends every process and says how many")
async def kill_all(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        script = "for i in 1 2 3 4 5; do setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!; done"
        pids = (await run(sandbox, script)).text.split()
        assert await sandbox.kill_all() >= 5
        await gone(sandbox, *pids)
        await run(sandbox, "true")
        assert await sandbox.kill_all() == 0


@check("kill_all ends commands that are being waited for")
async def kill_all_ends_commands(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        process = await sandbox.spawn("sleep 600")
        await sandbox.kill_all()
        async with asyncio.timeout(PATIENCE):
            assert (await process.wait()).exit_code == 137


@check("kill_all wins against a fork storm")
async def kill_all_in_fork_storm(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
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


@check("a crashed command does not harm others")
async def crashes_are_apart(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        results = await asyncio.gather(*(sandbox.exec("kill -SEGV $$" if n % 2 else "echo fine") for n in range(20)))
        assert [result.exit_code for result in results] == [139 if n % 2 else 0 for n in range(20)]


MEGABYTE = 1 << 20


@check("more memory than allowed ends the command, and the sandbox goes on", needs="limit:memory")
async def memory_limit(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(memory=96 * MEGABYTE)) as sandbox:
        result = await sandbox.exec("head -c 600000000 /dev/zero | tail", timeout=PATIENCE, output_limit=1000)
        assert result.exit_code != 0, result
        await run(sandbox, "true")


@check("running out of memory is reported in the result", needs="limit:memory")
async def memory_limit_is_told(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(memory=96 * MEGABYTE)) as sandbox:
        result = await sandbox.exec("head -c 600000000 /dev/zero | tail", timeout=PATIENCE, output_limit=1000)
        if bench.capabilities.limits["memory"] == "cgroup":
            assert result.out_of_memory, result
        assert not (await run(sandbox, "true")).out_of_memory


@check("more processes than allowed cannot be started", needs="limit:processes")
async def process_limit(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(processes=20)) as sandbox:
        script = "for i in $(seq 60); do sleep 600 >/dev/null 2>&1 </dev/null & done"
        await sandbox.exec(script, timeout=PATIENCE, output_limit=100_000)
        assert await sandbox.kill_all() <= 21
        await run(sandbox, "true")


@check("more open files than allowed cannot be had", needs="limit:open_files")
async def open_files_limit(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(open_files=100)) as sandbox:
        assert (await run(sandbox, "ulimit -n; ulimit -Hn")).text == "100\n100\n"


@check("more on disk than allowed cannot be written", needs="limit:disk")
async def disk_limit(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(disk=32 * MEGABYTE)) as sandbox:
        result = await sandbox.exec("head -c 200000000 /dev/zero >/srv/big", timeout=PATIENCE)
        assert not result.ok, result


@check("a part of a cpu can be asked for", needs="limit:cpus")
async def cpu_limit(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(cpus=0.5)) as sandbox:
        await run(sandbox, "true")


@check("limits of one sandbox are not those of another", needs="limit:processes")
async def limits_are_apart(bench: Bench) -> None:
    async with bench.sandbox(limits=Limits(processes=20)) as one, bench.sandbox(limits=Limits(processes=20)) as two:
        await one.exec(
            "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 600 >/dev/null 2>&1 </dev/null & done", timeout=PATIENCE
        )
        script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 600 >/dev/null 2>&1 </dev/null & done; echo all"
        assert (await run(two, script)).text == "all\n"
