"""Streams: output of any size and content, stdin, interactive processes, terminals."""

from __future__ import annotations

import asyncio
import os

from pier.sandbox.conformance.bench import PATIENCE, Bench, check, gone, run, until
from pier.sandbox.contract import OUTPUT_LIMIT, Stream

MEGABYTE = 1 << 20


class Gathered:
    """Collects what `on_output` is given."""

    def __init__(self) -> None:
        self.data: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    def __call__(self, stream: Stream, data: bytes) -> None:
        self.data[stream] += data

    async def saw(self, text: bytes) -> None:
        async def holds() -> bool:
            return text in self.data["stdout"]

        await until(f"{text!r} to be printed", holds)


@check("100 MB of output: what is beyond the limit is read, dropped and counted")
async def output_of_100_megabytes(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await run(sandbox, "head -c 104857600 /dev/zero; echo end >&2")
        assert len(result.stdout) == OUTPUT_LIMIT
        assert len(result.stdout) + result.stdout_dropped == 100 * MEGABYTE
        assert result.stderr == b"end\n" and result.stderr_dropped == 0


@check("the output limit can be chosen and holds for each stream")
async def output_limit(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await run(sandbox, "echo 0123456789; echo 0123456789 >&2", output_limit=4)
        assert (result.stdout, result.stderr) == (b"0123", b"0123")
        assert (result.stdout_dropped, result.stderr_dropped) == (7, 7)


@check("`on_output` gets all of the output, in order, while it comes")
async def output_as_it_comes(bench: Bench) -> None:
    gathered = Gathered()
    async with bench.sandbox() as sandbox:
        await run(sandbox, "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done", on_output=gathered)
    expected = b"".join(b"line %d\n" % number for number in range(20000))
    assert bytes(gathered.data["stdout"]) == expected


@check("`on_output` may be slow and asynchronous")
async def slow_reader(bench: Bench) -> None:
    total = 0

    async def slow(stream: Stream, data: bytes) -> None:
        nonlocal total
        await asyncio.sleep(0.001)
        total += len(data)

    async with bench.sandbox() as sandbox:
        await run(sandbox, "head -c 5000000 /dev/zero", on_output=slow)
    assert total == 5_000_000


@check("NULs and bytes that are not text pass unchanged")
async def binary_output(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert (await run(sandbox, "printf 'a\\000b\\377\\200\\n'")).stdout == b"a\0b\xff\x80\n"
        data = bytes(range(256)) * 100
        assert (await run(sandbox, ["cat"], stdin=data)).stdout == data


@check("without stdin a command reads nothing at once")
async def no_stdin(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert (await run(sandbox, ["cat"])).stdout == b""


@check("stdin of many megabytes goes through while output comes back")
async def large_stdin(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        data = os.urandom(8 * MEGABYTE)
        assert (await run(sandbox, ["cat"], stdin=data)).stdout == data


@check("stdin that the command does not read is discarded")
async def unread_stdin(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert (await run(sandbox, ["true"], stdin=bytes(4 * MEGABYTE))).ok
        assert (await run(sandbox, "head -c 3", stdin=b"abc" + bytes(4 * MEGABYTE))).stdout == b"abc"


@check("a process is written to and answers, step by step")
async def conversation(bench: Bench) -> None:
    gathered = Gathered()
    async with bench.sandbox() as sandbox:
        script = "while read line; do echo got $line; done; echo bye"
        async with await sandbox.spawn(script, stdin=True, on_output=gathered) as process:
            for word in (b"one", b"two"):
                await process.write(word + b"\n")
                await gathered.saw(b"got " + word + b"\n")
            await process.close_stdin()
            assert (await process.wait()).ok
        assert gathered.data["stdout"].endswith(b"bye\n")


@check("a signal reaches the command's process group")
async def signal_to_process(bench: Bench) -> None:
    gathered = Gathered()
    async with bench.sandbox() as sandbox:
        script = "trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.1; done"
        async with await sandbox.spawn(script, on_output=gathered) as process:
            await gathered.saw(b"ready\n")
            await process.signal(10)
            assert (await process.wait()).exit_code == 7
        assert b"caught\n" in gathered.data["stdout"]


@check("`kill` ends a process with all that it started, and may be called again")
async def kill_process(bench: Bench) -> None:
    gathered = Gathered()
    async with bench.sandbox() as sandbox:
        process = await sandbox.spawn("setsid sleep 600 & echo $!; wait; sleep 600", on_output=gathered)
        await gathered.saw(b"\n")
        await process.kill()
        await process.kill()
        assert (await process.wait()).exit_code == 137
        await gone(sandbox, gathered.data["stdout"].decode().split()[0])


@check("leaving a process's context kills it")
async def leave_process(bench: Bench) -> None:
    gathered = Gathered()
    async with bench.sandbox() as sandbox:
        async with await sandbox.spawn("echo $$; exec sleep 600", on_output=gathered):
            await gathered.saw(b"\n")
        await gone(sandbox, gathered.data["stdout"].decode().split()[0])


@check("with `tty` the command has a terminal", needs="tty")
async def terminal(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await run(sandbox, "test -t 0 && test -t 1 && test -t 2 && echo terminal", tty=True)
        assert result.text.strip() == "terminal"
        assert not (await sandbox.exec("test -t 0 || test -t 1")).ok


@check("a terminal can be resized", needs="tty")
async def terminal_size(bench: Bench) -> None:
    gathered = Gathered()
    async with bench.sandbox() as sandbox:
        script = "while read line; do stty size; done"
        async with await sandbox.spawn(script, tty=True, stdin=True, on_output=gathered) as process:
            for rows, columns in ((33, 101), (50, 200)):
                await process.resize(rows, columns)
                await process.write(b"\n")
                await gathered.saw(b"%d %d" % (rows, columns))


@check("an interrupt typed at a terminal stops the command", needs="tty")
async def terminal_interrupt(bench: Bench) -> None:
    gathered = Gathered()
    async with (
        bench.sandbox() as sandbox,
        await sandbox.spawn("echo ready; exec sleep 600", tty=True, stdin=True, on_output=gathered) as process,
    ):
        await gathered.saw(b"ready")
        await process.write(b"\x03")
        async with asyncio.timeout(PATIENCE):
            assert (await process.wait()).exit_code == 130
