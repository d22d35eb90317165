"""Commands: exit codes, arguments, environment, directories, timeouts; output of any size, stdin, terminals."""

from __future__ import annotations

import asyncio
import os

from pier.errors import SandboxError
from pier.sandbox.conformance.bench import PATIENCE, Bench, check, gone, is_alive, refuses, run, until
from pier.sandbox.contract import OUTPUT_LIMIT, Sandbox, Stream


@check("exec gives the exit code of the command")
async def exit_codes(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        for code in (0, 1, 42, 126, 127, 255):
            assert (await sandbox.exec(f"exit {code}")).exit_code == code


@check("a command that died of signal n has exit code 128 + n")
async def signals_in_exit_codes(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        for name, number in (("KILL", 9), ("TERM", 15), ("SEGV", 11)):
            result = await sandbox.exec(f"kill -{name} $$; sleep 100", timeout=PATIENCE)
            assert result.exit_code == 128 + number and not result.timed_out, result


@check("stdout and stderr are kept apart")
async def two_streams(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await run(sandbox, "echo out; echo err >&2")
        assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


@check("a sequence is an argv and no shell looks at it")
async def argv_without_shell(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        words = ["$HOME", "a b", "*", "'", '"', ";", "\n", "", "é"]
        result = await run(sandbox, ["printf", "[%s]", *words])
        assert result.text == "".join(f"[{word}]" for word in words)


@check("a string runs in the shell")
async def string_in_shell(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        assert (await run(sandbox, "x=1; for i in a b; do echo $i$x; done | tail -n 1")).text == "b1\n"


@check("programs are looked up along PATH")
async def program_on_path(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("/opt/tools/greet", b"#!/bin/sh\necho hi $1\n", mode=0o755)
        result = await run(sandbox, ["greet", "you"], env={"PATH": "/opt/tools:/usr/bin:/bin"})
        assert result.text == "hi you\n"


@check("a program that does not exist exits with 127")
async def missing_program(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        for command in (["no-such-program-here"], ["/no/such/program"], "no-such-program-here"):
            assert (await sandbox.exec(command)).exit_code == 127, command


@check("a file that may not be run exits with 126")
async def program_without_permission(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("/tmp/data", b"no program", mode=0o644)
        assert (await sandbox.exec(["/tmp/data"])).exit_code == 126


@check("the command starts in `cwd`")
async def working_directory(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir -p '/srv/a b/c'")
        assert (await run(sandbox, "pwd", cwd="/srv/a b/c")).text == "/srv/a b/c\n"


@check("the sandbox's own working directory holds where none is given")
async def default_working_directory(bench: Bench) -> None:
    async with bench.sandbox(workdir="/usr") as sandbox:
        assert (await run(sandbox, "pwd")).text == "/usr\n"
        assert (await run(sandbox, "pwd", cwd="/tmp")).text == "/tmp\n"


@check("a missing working directory is a SandboxError")
async def missing_working_directory(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await refuses(sandbox.exec("true", cwd="/no/such/place"), SandboxError)
        await run(sandbox, "true")


@check("environment: the sandbox's own, with the command's on top")
async def environment(bench: Bench) -> None:
    async with bench.sandbox(env={"ONE": "1", "TWO": "2"}) as sandbox:
        result = await run(sandbox, "echo $ONE $TWO $THREE", env={"TWO": "two", "THREE": "three"})
        assert result.text == "1 two three\n"
        assert (await run(sandbox, "echo $TWO[$THREE]")).text == "2[]\n"


@check("any value survives in the environment")
async def odd_environment(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        values = {"A": "", "B": "two\nlines", "C": "a=b=c", "D": "é☃", "E": "  $(id) `id` 'q' \"q\"", "F": "x" * 50_000}
        for name, value in values.items():
            assert (await run(sandbox, f'printf %s "${name}"', env=values)).text == value


@check("the host's environment does not leak in")
async def clean_environment(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        names = {row.partition("=")[0] for row in (await run(sandbox, ["env"])).text.splitlines()}
        assert "PATH" in names
        assert not {name for name in names if name.startswith(("PIER_", "PYTEST", "XDG_", "SSH_", "VIRTUAL_ENV"))}


@check("long command lines")
async def long_command_line(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        text = "x" * 120_000
        assert (await run(sandbox, ["printf", "%s", text])).text == text
        words = ["y" * 1000] * 900
        assert len((await run(sandbox, ["printf", "%s", *words])).stdout) == 900_000
        assert (await run(sandbox, "true " + "z" * 100_000)).ok


@check("a timeout is reported in the result, with the output so far")
async def timeout_result(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec("echo before; sleep 600", timeout=1)
        assert result.timed_out and not result.ok and result.stdout == b"before\n", result
        await run(sandbox, "true")


@check("a command that ends in time is not touched")
async def timeout_not_reached(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec("echo done", timeout=PATIENCE)
        assert result.ok and not result.timed_out


_KEEP = "echo $$ >/tmp/pid; exec sleep 600"
_DEAF = "trap '' TERM INT HUP; echo $$ >/tmp/pid; while :; do sleep 1; done"
_FAMILIES = {
    "children": "sh /tmp/keep & wait",
    "sessions": "setsid sh /tmp/keep & wait; sleep 600",
    "orphans": "(sh /tmp/keep >/dev/null 2>&1 &) ; sleep 600",
    "daemons": "(setsid sh -c '(sh /tmp/keep </dev/null >/dev/null 2>&1 &)' &) ; sleep 600",
    "deaf": "trap '' TERM INT HUP; sh /tmp/deaf & wait; sleep 600",
}


async def _plant(sandbox: Sandbox) -> None:
    await sandbox.write_file("/tmp/keep", _KEEP.encode())
    await sandbox.write_file("/tmp/deaf", _DEAF.encode())


async def _timeout_kills(bench: Bench, kind: str) -> None:
    """The timeout is doubled until the family had the time to come to be."""
    async with bench.sandbox() as sandbox:
        await _plant(sandbox)
        bystander = (await run(sandbox, "sleep 600 >/dev/null 2>&1 </dev/null & echo $!")).text.strip()
        for seconds in (0.5, 1, 2, 4, 8, 16, 32):
            result = await sandbox.exec(_FAMILIES[kind], timeout=seconds)
            assert result.timed_out
            if (await sandbox.exec("test -s /tmp/pid")).ok:
                break
        pid = (await run(sandbox, "cat /tmp/pid")).text.strip()
        await gone(sandbox, pid)
        assert await is_alive(sandbox, bystander), "a process of another command was killed"


@check("a timeout kills background children")
async def timeout_kills_children(bench: Bench) -> None:
    await _timeout_kills(bench, "children")


@check("a timeout kills processes in other sessions")
async def timeout_kills_sessions(bench: Bench) -> None:
    await _timeout_kills(bench, "sessions")


@check("a timeout kills orphaned grandchildren")
async def timeout_kills_orphans(bench: Bench) -> None:
    await _timeout_kills(bench, "orphans")


@check("a timeout kills daemons that forked twice into their own session")
async def timeout_kills_daemons(bench: Bench) -> None:
    await _timeout_kills(bench, "daemons")


@check("a timeout kills processes that ignore signals")
async def timeout_kills_the_deaf(bench: Bench) -> None:
    await _timeout_kills(bench, "deaf")


@check("a cancelled exec kills the whole tree")
async def cancel_kills_tree(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await _plant(sandbox)
        task = asyncio.ensure_future(sandbox.exec(_FAMILIES["daemons"]))

        async def started() -> bool:
            return (await sandbox.exec("test -s /tmp/pid")).ok

        await until("the daemon to start", started)
        pid = (await run(sandbox, "cat /tmp/pid")).text.strip()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await gone(sandbox, pid)


@check("a background process outlives the command that started it in peace")
async def background_survives(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        pid = (await run(sandbox, "sleep 600 >/dev/null 2>&1 </dev/null & echo $!")).text.strip()
        await run(sandbox, "true")
        assert await is_alive(sandbox, pid)


@check("many commands at once in one sandbox")
async def commands_at_once(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        results = await asyncio.gather(*(sandbox.exec(f"echo {n}; exit {n}") for n in range(64)))
        assert [(result.exit_code, result.text) for result in results] == [(n, f"{n}\n") for n in range(64)]


@check("commands are independent: a slow one does not hold up others")
async def slow_beside_fast(bench: Bench) -> None:
    async with bench.sandbox() as sandbox, await sandbox.spawn("sleep 600") as slow:
        for _ in range(5):
            await run(sandbox, "true")
        await slow.kill()
        assert (await slow.wait()).exit_code == 137


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
