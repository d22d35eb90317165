"""Wrong arguments are errors of the caller, and cost nothing: the sandbox goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from pier.errors import ArgumentError, SandboxError
from pier.sandbox.conformance.bench import PATIENCE, Bench, check, check_inside, refuses, run
from pier.sandbox.contract import NewFile, Process, Sandbox

SURROGATE = "a\ud83d"
"""What a model's JSON gives that was cut inside an emoji."""
NOT_A_STRING = (SURROGATE, "a\0b", 7, b"bytes", ["list"], Path("path"))
"""None of these can be a string for the kernel."""

Call = Callable[[Sandbox, Process, Any], Any]


def _drain(sandbox: Sandbox, source: Any) -> Any:
    async def take() -> None:
        async for _ in sandbox.get_tar(source):
            pass

    return take()


async def _chunks(*parts: Any) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


WRONG: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "exec(command)": (lambda s, _, x: s.exec(x), (SURROGATE, "a\0b", 7, b"true", None, [], {"true": 1})),
    "exec(argv)": (lambda s, _, x: s.exec(["echo", x]), (*NOT_A_STRING, None)),
    "exec(cwd)": (lambda s, _, x: s.exec("true", cwd=x), NOT_A_STRING),
    "exec(user)": (lambda s, _, x: s.exec("true", user=x), (*NOT_A_STRING, 0)),
    "exec(env)": (lambda s, _, x: s.exec("true", env=x), (["A=1"], "A=1", {"": "1"}, {"A=B": "1"}, {1: "1"})),
    "exec(env value)": (lambda s, _, x: s.exec("true", env={"A": x}), (*NOT_A_STRING, None)),
    "exec(env name)": (lambda s, _, x: s.exec("true", env={x: "1"}), (SURROGATE, "a\0b", 7, b"A")),
    "exec(stdin)": (lambda s, _, x: s.exec("cat", stdin=x), ("text", True, 7, [b"x"])),
    "exec(timeout)": (lambda s, _, x: s.exec("true", timeout=x), ("1", float("nan"), True)),
    "exec(output_limit)": (lambda s, _, x: s.exec("true", output_limit=x), (-1, None, "1", 1.5)),
    "exec(on_output)": (lambda s, _, x: s.exec("true", on_output=x), (7, "print")),
    "spawn(command)": (lambda s, _, x: s.spawn(x), (SURROGATE, 7, [])),
    "spawn(stdin)": (lambda s, _, x: s.spawn("true", stdin=x), (b"text", 1, None)),
    "spawn(tty)": (lambda s, _, x: s.spawn("true", tty=x), ("yes", 1)),
    "upload(source)": (lambda s, _, x: s.upload(x, "/srv/x"), ("/etc", 7, Path("a\0b"), Path("/dev/zero"))),
    "upload(target)": (lambda s, _, x: s.upload(Path("/etc/passwd"), x), (*NOT_A_STRING, "")),
    "upload(owner)": (lambda s, _, x: s.upload(Path("/etc/passwd"), "/srv/x", owner=x), NOT_A_STRING),
    "write_file(target)": (lambda s, _, x: s.write_file(x, b""), (*NOT_A_STRING, "")),
    "write_file(data)": (lambda s, _, x: s.write_file("/srv/x", x), (SURROGATE, None, 7)),
    "write_file(mode)": (lambda s, _, x: s.write_file("/srv/x", b"", mode=x), ("0644", -1, 0o10000, 1.5, True)),
    "write_file(owner)": (lambda s, _, x: s.write_file("/srv/x", b"", owner=x), NOT_A_STRING),
    "write_file(user)": (lambda s, _, x: s.write_file("/srv/x", b"", user=x), (*NOT_A_STRING, 0)),
    "write_file(user and owner)": (lambda s, _, x: s.write_file("/srv/x", b"", user="0", owner=x), ("0", "1:1")),
    "mkdir(target)": (lambda s, _, x: s.mkdir(x), (*NOT_A_STRING, "")),
    "stat(path)": (lambda s, _, x: s.stat(x), (*NOT_A_STRING, "")),
    "list_dir(path)": (lambda s, _, x: s.list_dir(x), (*NOT_A_STRING, "")),
    "read_file(source)": (lambda s, _, x: s.read_file(x), (*NOT_A_STRING, "")),
    "read_file(max_bytes)": (lambda s, _, x: s.read_file("/etc/passwd", max_bytes=x), (-1, None, "9", 1.5)),
    "download(source)": (lambda s, _, x: s.download(x, Path("/nonexistent/x")), (*NOT_A_STRING, "")),
    "download(target)": (lambda s, _, x: s.download("/etc/passwd", x), ("/nonexistent/x", 7, Path("a\0b"))),
    "download(exclude)": (lambda s, _, x: s.download("/etc", Path("/nonexistent/x"), exclude=x), ("*.py", [7], None)),
    "put_tar(stream)": (lambda s, _, x: s.put_tar(x, "/srv"), (b"data", [b"data"], None)),
    "put_tar(chunk)": (lambda s, _, x: s.put_tar(_chunks(x), "/srv"), ("text", 7, None)),
    "put_tar(target)": (lambda s, _, x: s.put_tar(_chunks(b""), x), (*NOT_A_STRING, "")),
    "put_files(files)": (lambda s, _, x: s.put_files(x, "/srv"), ("text", [7], None)),
    "put_files(path)": (lambda s, _, x: s.put_files([NewFile(x, 0o644)], "/srv"), (*NOT_A_STRING, "")),
    "put_files(clear)": (lambda s, _, x: s.put_files([], "/srv", clear=x), ("/srv", [SURROGATE], [""], None)),
    "get_tar(source)": (lambda s, _, x: _drain(s, x), (*NOT_A_STRING, "")),
    "remove(target)": (lambda s, _, x: s.remove(x), (*NOT_A_STRING, "")),
    "set_network(policy)": (lambda s, _, x: s.set_network(x), ("none", None)),
    "listen(port)": (lambda s, _, x: s.listen(x, asyncio.Protocol), (-1, 65536, "80", None, True)),
    "listen(factory)": (lambda s, _, x: s.listen(0, x), (None, "protocol")),
    "listen(host)": (lambda s, _, x: s.listen(0, asyncio.Protocol, host=x), ("localhost", "", "::g", SURROGATE, 7)),
    "Process.write": (lambda _, p, x: p.write(x), ("text", None, 7)),
    "Process.signal": (lambda _, p, x: p.signal(x), (0, -1, 9999, "TERM", None)),
    "Process.resize": (lambda _, p, x: p.resize(x, 80), (-1, 65536, "24", None)),
}
"""Each argument with values that it cannot have."""


@check_inside("a wrong argument is an ArgumentError of the caller, and the sandbox answers afterwards")
async def wrong_arguments(sandbox: Sandbox) -> None:
    async with await sandbox.spawn("cat", stdin=True) as process:
        for name, (call, values) in WRONG.items():
            for value in values:
                error = await refuses(asyncio.wait_for(_start(call, sandbox, process, value), PATIENCE), ArgumentError)
                found = (error.code, error.blame, error.retryable, isinstance(error, ValueError))
                assert found == ("bad_argument", "user", False, True), (name, value, found)
        await process.write(b"still here")
        await process.close_stdin()
        assert (await process.wait()).stdout == b"still here"
        assert (await run(sandbox, "echo ok")).text == "ok\n"


async def _start(call: Call, sandbox: Sandbox, process: Process, value: Any) -> Any:
    return await call(sandbox, process, value)


@check_inside("bytes that are not UTF-8 go in and out by Python's own names for them")
async def undecodable_names(sandbox: Sandbox) -> None:
    name = os.fsdecode(b"/srv/\xff\xc3\x28")
    await sandbox.write_file(name, b"data")
    assert await sandbox.read_file(name) == b"data"
    assert (await run(sandbox, ["cat", name])).stdout == b"data"
    assert (await run(sandbox, 'printf %s "$NAME"', env={"NAME": name})).stdout == os.fsencode(name)
    await sandbox.remove(name)
    assert (await run(sandbox, "ls /srv")).text == ""


@check("a file over a directory is an IsADirectoryError, one below a file a NotADirectoryError, by its own name")
async def paths_in_the_way(bench: Bench) -> None:
    source = bench.scratch / "tree"
    source.mkdir()
    (source / "dir").write_text("a file where a directory is")
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir -p /srv/dir /srv/full/dir/sub; echo x >/srv/file")
        calls: list[tuple[Any, type[OSError], str]] = [
            (sandbox.write_file("/srv/dir", b"x"), IsADirectoryError, "/srv/dir"),
            (sandbox.write_file("/srv/dir/", b"x"), IsADirectoryError, "/srv/dir/"),
            (sandbox.upload(source / "dir", "/srv/dir"), IsADirectoryError, "/srv/dir"),
            (sandbox.upload(source, "/srv/full"), IsADirectoryError, "dir"),
            (sandbox.write_file("/srv/file/x/y", b"x"), NotADirectoryError, "/srv/file/x"),
            (sandbox.upload(source, "/srv/file"), NotADirectoryError, "/srv/file"),
            (sandbox.remove("/srv/file/x"), NotADirectoryError, "/srv/file"),
        ]
        for call, kind, name in calls:
            error = await refuses(call, kind)
            assert isinstance(error, SandboxError) and (error.blame, error.retryable) == ("user", False), error
            assert error.message.endswith(f": {name}"), error.message
        assert (await run(sandbox, "ls -A /srv /srv/dir; cat /srv/file")).text.count(".pier-") == 0


@check_inside("a second kill returns when the command is dead, as the first does")
async def concurrent_kills(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("(setsid sleep 600 &) ; sleep 600")
    first = asyncio.ensure_future(process.kill())
    await asyncio.sleep(0)
    await process.kill()
    assert first.done(), "the second kill returned before the first"
    assert (await sandbox.exec("pidof sleep")).exit_code == 1, "a process outlived the second kill"


@check_inside("what on_output raises is raised, also a TimeoutError, and ends the command")
async def failing_on_output(sandbox: Sandbox) -> None:
    async def later(*_: Any) -> None:
        await asyncio.sleep(0)
        raise TimeoutError("of the callback")

    def at_once(*_: Any) -> None:
        raise TimeoutError("of the callback")

    for callback in (at_once, later):
        error = await refuses(sandbox.exec("echo x; sleep 600", timeout=PATIENCE, on_output=callback), TimeoutError)
        assert str(error) == "of the callback"
        assert (await sandbox.exec("pidof sleep")).exit_code == 1, "the command goes on"


@check_inside("on_output may kill its own command")
async def killing_on_output(sandbox: Sandbox) -> None:
    started: asyncio.Future[Process] = asyncio.get_running_loop().create_future()

    async def stop(*_: Any) -> None:
        await (await started).kill()

    process = await sandbox.spawn("echo x; sleep 600", on_output=stop)
    started.set_result(process)
    with contextlib.suppress(SandboxError):
        assert (await asyncio.wait_for(process.wait(), PATIENCE)).exit_code == 137
