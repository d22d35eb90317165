"""Commands: exit codes, arguments, environment, directories, timeouts; output of any size, stdin, terminals."""

from __future__ import annotations

import asyncio
import os

from pier.errors import SandboxError
from pier.sandbox.conformance.bench import PATIENCE, check_inside, gone, is_alive, refuses, run, until
from pier.sandbox.contract import OUTPUT_LIMIT, Sandbox, Stream


@check_inside("exec gives the exit code of the command")
async def exit_codes(sandbox: Sandbox) -> None:
    for code in (0, 1, 42, 126, 127, 255):
        assert (await sandbox.exec(f"exit {code}")).exit_code == code


@check_inside("a command that died of signal n has exit code 128 + n")
async def signals_in_exit_codes(sandbox: Sandbox) -> None:
    for name, number in (("KILL", 9), ("TERM", 15), ("SEGV", 11)):
        result = await sandbox.exec(f"kill -{name} $$; sleep 100", timeout=PATIENCE)
        assert result.exit_code == 128 + number and not result.timed_out, result


@check_inside("stdout and stderr are kept apart")
async def two_streams(sandbox: Sandbox) -> None:
    result = await run(sandbox, "echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


@check_inside("a sequence is an argv and no shell looks at it")
async def argv_without_shell(sandbox: Sandbox) -> None:
    words = ["$HOME", "a b", "*", "'", '"', ";", "\n", "", "é"]
    result = await run(sandbox, ["printf", "[%s]", *words])
    assert result.text == "".join(f"[{word}]" for word in words)


@check_inside("a string runs in the shell")
async def string_in_shell(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "x=1; for i in a b; do echo $i$x; done | tail -n 1")).text == "b1\n"


@check_inside("programs are looked up along PATH")
async def program_on_path(sandbox: Sandbox) -> None:
    await sandbox.write_file("/opt/tools/greet", b"#!/bin/sh\necho hi $1\n", mode=0o755)
    result = await run(sandbox, ["greet", "you"], env={"PATH": "/opt/tools:/usr/bin:/bin"})
    assert result.text == "hi you\n"


@check_inside("a program that does not exist exits with 127")
async def missing_program(sandbox: Sandbox) -> None:
    for command in (["no-such-program-here"], ["/no/such/program"], "no-such-program-here"):
        assert (await sandbox.exec(command)).exit_code == 127, command


@check_inside("a file that may not be run exits with 126")
async def program_without_permission(sandbox: Sandbox) -> None:
    await sandbox.write_file("/tmp/data", b"no program", mode=0o644)
    assert (await sandbox.exec(["/tmp/data"])).exit_code == 126


@check_inside("the command starts in `cwd`")
async def working_directory(sandbox: Sandbox) -> None:
    await run(sandbox, "mkdir -p '/srv/a b/c'")
    assert (await run(sandbox, "pwd", cwd="/srv/a b/c")).text == "/srv/a b/c\n"


@check_inside("the sandbox's own working directory holds where none is given", workdir="/usr")
async def default_working_directory(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "pwd")).text == "/usr\n"
    assert (await run(sandbox, "pwd", cwd="/tmp")).text == "/tmp\n"


@check_inside("a missing working directory is a SandboxError")
async def missing_working_directory(sandbox: Sandbox) -> None:
    await refuses(sandbox.exec("true", cwd="/no/such/place"), SandboxError)
    await run(sandbox, "true")


@check_inside("environment: the sandbox's own, with the command's on top", env={"ONE": "1", "TWO": "2"})
async def environment(sandbox: Sandbox) -> None:
    result = await run(sandbox, "echo $ONE $TWO $THREE", env={"TWO": "two", "THREE": "three"})
    assert result.text == "1 two three\n"
    assert (await run(sandbox, "echo $TWO[$THREE]")).text == "2[]\n"


@check_inside("any value survives in the environment")
async def odd_environment(sandbox: Sandbox) -> None:
    values = {"A": "", "B": "two\nlines", "C": "a=b=c", "D": "é☃", "E": "  $(id) `id` 'q' \"q\"", "F": "x" * 50_000}
    for name, value in values.items():
        assert (await run(sandbox, f'printf %s "${name}"', env=values)).text == value


@check_inside("the host's environment does not leak in")
async def clean_environment(sandbox: Sandbox) -> None:
    names = {row.partition("=")[0] for row in (await run(sandbox, ["env"])).text.splitlines()}
    assert "PATH" in names
    assert not {name for name in names if name.startswith(("PIER_", "PYTEST", "XDG_", "SSH_", "VIRTUAL_ENV"))}


@check_inside("long command lines")
async def long_command_line(sandbox: Sandbox) -> None:
    text = "x" * 120_000
    assert (await run(sandbox, ["printf", "%s", text])).text == text
    words = ["y" * 1000] * 900
    assert len((await run(sandbox, ["printf", "%s", *words])).stdout) == 900_000
    assert (await run(sandbox, "true " + "z" * 100_000)).ok


@check_inside("a timeout is reported in the result, with the output so far")
async def timeout_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo before; sleep 600", timeout=1)
    assert result.timed_out and not result.ok and result.stdout == b"before\n", result
    await run(sandbox, "true")


@check_inside("a command that ends in time is not touched")
async def timeout_not_reached(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo done", timeout=PATIENCE)
    assert result.ok and not result.timed_out


_KEEP = "echo $$ >/tmp/pid; exec sleep 600"
_DEAF = "trap '' TERM INT HUP; echo $$ >/tmp/pid; while :; do sleep 1; done"
_DAEMON = "(setsid sh -c '(sh /tmp/keep </dev/null >/dev/null 2>&1 &)' &) ; sleep 600"
_FAMILIES = {
    "children": ("background children", "sh /tmp/keep & wait"),
    "sessions": ("processes in other sessions", "setsid sh /tmp/keep & wait; sleep 600"),
    "orphans": ("orphaned grandchildren", "(sh /tmp/keep >/dev/null 2>&1 &) ; sleep 600"),
    "daemons": ("daemons that forked twice into their own session", _DAEMON),
    "the_deaf": ("processes that ignore signals", "trap '' TERM INT HUP; sh /tmp/deaf & wait; sleep 600"),
}


async def _plant(sandbox: Sandbox) -> None:
    await sandbox.write_file("/tmp/keep", _KEEP.encode())
    await sandbox.write_file("/tmp/deaf", _DEAF.encode())


def _check_timeout(name: str, what: str, script: str) -> None:
    async def timeout_kills(sandbox: Sandbox) -> None:
        """The timeout is doubled until the family had the time to come to be."""
        await _plant(sandbox)
        bystander = (await run(sandbox, "sleep 600 >/dev/null 2>&1 </dev/null & echo $!")).text.strip()
        for seconds in (0.5, 1, 2, 4, 8, 16, 32):
            result = await sandbox.exec(script, timeout=seconds)
            assert result.timed_out
            if (await sandbox.exec("test -s /tmp/pid")).ok:
                break
        pid = (await run(sandbox, "cat /tmp/pid")).text.strip()
        await gone(sandbox, pid)
        assert await is_alive(sandbox, bystander), "a process of another command was killed"

    timeout_kills.__name__ = f"timeout_kills_{name}"
    check_inside(f"a timeout kills {what}")(timeout_kills)


for _name, _family in _FAMILIES.items():
    _check_timeout(_name, *_family)


@check_inside("a cancelled exec kills the whole tree")
async def cancel_kills_tree(sandbox: Sandbox) -> None:
    await _plant(sandbox)
    task = asyncio.ensure_future(sandbox.exec(_DAEMON))

    async def started() -> bool:
        return (await sandbox.exec("test -s /tmp/pid")).ok

    await until("the daemon to start", started)
    pid = (await run(sandbox, "cat /tmp/pid")).text.strip()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await gone(sandbox, pid)


@check_inside("a background process outlives the command that started it in peace")
async def background_survives(sandbox: Sandbox) -> None:
    pid = (await run(sandbox, "sleep 600 >/dev/null 2>&1 </dev/null & echo $!")).text.strip()
    await run(sandbox, "true")
    assert await is_alive(sandbox, pid)


@check_inside("many commands at once in one sandbox")
async def commands_at_once(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(f"echo {n}; exit {n}") for n in range(64)))
    assert [(result.exit_code, result.text) for result in results] == [(n, f"{n}\n") for n in range(64)]


@check_inside("commands are independent: a slow one does not hold up others")
async def slow_beside_fast(sandbox: Sandbox) -> None:
    async with await sandbox.spawn("sleep 600") as slow:
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


@check_inside("100 MB of output: what is beyond the limit is read, dropped and counted")
async def output_of_100_megabytes(sandbox: Sandbox) -> None:
    result = await run(sandbox, "head -c 104857600 /dev/zero; echo end >&2")
    assert len(result.stdout) == OUTPUT_LIMIT
    assert len(result.stdout) + result.stdout_dropped == 100 * MEGABYTE
    assert result.stderr == b"end\n" and result.stderr_dropped == 0


@check_inside("the output limit can be chosen and holds for each stream")
async def output_limit(sandbox: Sandbox) -> None:
    result = await run(sandbox, "echo 0123456789; echo 0123456789 >&2", output_limit=4)
    assert (result.stdout, result.stderr) == (b"0123", b"0123")
    assert (result.stdout_dropped, result.stderr_dropped) == (7, 7)


@check_inside("`on_output` gets all of the output, in order, while it comes")
async def output_as_it_comes(sandbox: Sandbox) -> None:
    gathered = Gathered()
    await run(sandbox, "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done", on_output=gathered)
    expected = b"".join(b"line %d\n" % number for number in range(20000))
    assert bytes(gathered.data["stdout"]) == expected


@check_inside("`on_output` may be slow and asynchronous")
async def slow_reader(sandbox: Sandbox) -> None:
    total = 0

    async def slow(stream: Stream, data: bytes) -> None:
        nonlocal total
        await asyncio.sleep(0.001)
        total += len(data)

    await run(sandbox, "head -c 5000000 /dev/zero", on_output=slow)
    assert total == 5_000_000


@check_inside("NULs and bytes that are not text pass unchanged")
async def binary_output(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "printf 'a\\000b\\377\\200\\n'")).stdout == b"a\0b\xff\x80\n"
    data = bytes(range(256)) * 100
    assert (await run(sandbox, ["cat"], stdin=data)).stdout == data


@check_inside("without stdin a command reads nothing at once")
async def no_stdin(sandbox: Sandbox) -> None:
    assert (await run(sandbox, ["cat"])).stdout == b""


@check_inside("stdin of many megabytes goes through while output comes back")
async def large_stdin(sandbox: Sandbox) -> None:
    data = os.urandom(8 * MEGABYTE)
    assert (await run(sandbox, ["cat"], stdin=data)).stdout == data


@check_inside("stdin that the command does not read is discarded")
async def unread_stdin(sandbox: Sandbox) -> None:
    assert (await run(sandbox, ["true"], stdin=bytes(4 * MEGABYTE))).ok
    assert (await run(sandbox, "head -c 3", stdin=b"abc" + bytes(4 * MEGABYTE))).stdout == b"abc"


@check_inside("a process is written to and answers, step by step")
async def conversation(sandbox: Sandbox) -> None:
    gathered = Gathered()
    script = "while read line; do echo got $line; done; echo bye"
    async with await sandbox.spawn(script, stdin=True, on_output=gathered) as process:
        for word in (b"one", b"two"):
            await process.write(word + b"\n")
            await gathered.saw(b"got " + word + b"\n")
        await process.close_stdin()
        assert (await process.wait()).ok
    assert gathered.data["stdout"].endswith(b"bye\n")


@check_inside("a signal reaches the command's process group")
async def signal_to_process(sandbox: Sandbox) -> None:
    gathered = Gathered()
    script = "trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.1; done"
    async with await sandbox.spawn(script, on_output=gathered) as process:
        await gathered.saw(b"ready\n")
        await process.signal(10)
        assert (await process.wait()).exit_code == 7
    assert b"caught\n" in gathered.data["stdout"]


@check_inside("`kill` ends a process with all that it started, and may be called again")
async def kill_process(sandbox: Sandbox) -> None:
    gathered = Gathered()
    process = await sandbox.spawn("setsid sleep 600 & echo $!; wait; sleep 600", on_output=gathered)
    await gathered.saw(b"\n")
    await process.kill()
    await process.kill()
    assert (await process.wait()).exit_code == 137
    await gone(sandbox, gathered.data["stdout"].decode().split()[0])


@check_inside("leaving a process's context kills it")
async def leave_process(sandbox: Sandbox) -> None:
    gathered = Gathered()
    async with await sandbox.spawn("echo $$; exec sleep 600", on_output=gathered):
        await gathered.saw(b"\n")
    await gone(sandbox, gathered.data["stdout"].decode().split()[0])


@check_inside("with `tty` the command has a terminal", needs="tty")
async def terminal(sandbox: Sandbox) -> None:
    result = await run(sandbox, "test -t 0 && test -t 1 && test -t 2 && echo terminal", tty=True)
    assert result.text.strip() == "terminal"
    assert not (await sandbox.exec("test -t 0 || test -t 1")).ok


@check_inside("a terminal can be resized", needs="tty")
async def terminal_size(sandbox: Sandbox) -> None:
    gathered = Gathered()
    script = "while read line; do stty size; done"
    async with await sandbox.spawn(script, tty=True, stdin=True, on_output=gathered) as process:
        for rows, columns in ((33, 101), (50, 200)):
            await process.resize(rows, columns)
            await process.write(b"\n")
            await gathered.saw(b"%d %d" % (rows, columns))


@check_inside("an interrupt typed at a terminal stops the command", needs="tty")
async def terminal_interrupt(sandbox: Sandbox) -> None:
    gathered = Gathered()
    async with await sandbox.spawn("echo ready; exec sleep 600", tty=True, stdin=True, on_output=gathered) as process:
        await gathered.saw(b"ready")
        await process.write(b"\x03")
        async with asyncio.timeout(PATIENCE):
            assert (await process.wait()).exit_code == 130
