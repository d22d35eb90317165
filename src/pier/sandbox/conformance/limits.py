"""Limits: what is too much ends or is refused inside, and is told."""

from __future__ import annotations

from pier.sandbox.conformance.bench import PATIENCE, Bench, check, run
from pier.sandbox.contract import Limits

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
