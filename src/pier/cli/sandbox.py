"""`pier sandbox`: run a command in a new sandbox, and reach the ones that run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.output import JSON, echo
from pier.sizes import columns, parse_size

if TYPE_CHECKING:
    from pier.sandbox.contract import Mount, Process

_SHELL = "/bin/sh"


class Size(click.ParamType[int]):
    """A number of bytes such as 512M or 2g."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        return parse_size(value, param.opts[-1] if param else self.name)


_command = click.argument("command", nargs=-1, type=click.UNPROCESSED)


def _exec_options(function: Any) -> Any:
    for option in (
        click.option("-w", "--workdir", metavar="DIR", help="Where the command starts."),
        click.option("-u", "--user", metavar="USER", help="Name or uid[:gid] that the command runs as."),
        click.option(
            "--env", multiple=True, metavar="NAME=VALUE", help="Set a variable; NAME alone passes on this shell's."
        ),
        click.option("--tty", is_flag=True, help="Give the command a terminal."),
        click.option("--interactive", is_flag=True, help="Pass stdin on."),
    ):
        function = option(function)
    return function


@click.group()
def sandbox() -> None:
    """Run commands in sandboxes."""


@sandbox.command(context_settings={"allow_interspersed_args": False})
@click.option("--image", default="host", show_default=True, help="What the root is made from.")
@click.option("--network", type=click.Choice(["none", "public"]), default="none", show_default=True)
@click.option("--allow", multiple=True, metavar="HOST", help="Let the sandbox reach this host, and only such.")
@click.option("--cpus", type=float, help="How many cpus, such as 1.5.")
@click.option("--memory", type=Size(), help="How much memory, such as 2G; 0 for unlimited.  [default: half of it]")
@click.option("--processes", type=int, help="How many processes; 0 for unlimited.  [default: 4096]")
@click.option("--disk", type=Size(), help="How much may be written; 0 for unlimited.  [default: half of what is free]")
@click.option("--open-files", type=int, help="How many open files a process may have.")
@click.option("--volume", multiple=True, metavar="SRC:DST[:ro|rw]", help="Mount a path of this machine.")
@click.option("--name", default="", help="A name for `pier sandbox exec`.")
@click.option("--hostname", default="pier", show_default=True)
@click.option("--no-new-privileges", is_flag=True, help="Let nothing inside gain rights, sudo included.")
@_exec_options
@_command
def run(command: tuple[str, ...], interactive: bool, tty: bool, **options: Any) -> None:
    """Run a command in a new sandbox and remove it afterwards.

    The exit code is the command's. Without a command the image's own is run.
    """
    sys.exit(asyncio.run(_until_terminated(_run(command, interactive, tty, options))))


@sandbox.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the sandboxes that `pier sandbox run` keeps running."""
    from pier.sandbox.remote import list_running

    rows = list_running()
    if not rows and not as_json:
        click.echo("no sandboxes run", err=True)
        return
    facts = ("id", "name", "image", "pid", "started", "command")
    ages = [f"{int(time.time() - one.started)}s" for one in rows]
    cells = [(r.id, r.name or None, r.image, age, shlex.join(r.command)) for r, age in zip(rows, ages, strict=True)]
    value = [{name: getattr(one, name) for name in facts} for one in rows]
    echo(value, as_json, columns(("ID", "NAME", "IMAGE", "AGE", "COMMAND"), *cells))


@sandbox.command("exec", context_settings={"allow_interspersed_args": False})
@_exec_options
@click.argument("name")
@_command
def exec_(name: str, command: tuple[str, ...], interactive: bool, tty: bool, **options: Any) -> None:
    """Run one more command in a running sandbox, by its name or id."""
    command = command[1:] if command[:1] == ("--",) else command
    if not command:
        raise click.UsageError("a command is needed")
    sys.exit(asyncio.run(_exec(name, command, interactive, tty, options)))


@sandbox.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def stop(names: tuple[str, ...]) -> None:
    """Stop running sandboxes, by their names or ids."""
    from pier.sandbox import remote

    async def stop_one(name: str) -> None:
        reader, writer = await remote.connect(remote.find_running(name))
        try:
            await remote.send(writer, remote.REQUEST, json.dumps({"op": "stop"}).encode())
            await remote.receive(reader)
        finally:
            writer.close()

    for name in names:
        asyncio.run(stop_one(name))
        click.echo(name)


async def _until_terminated(work: Coroutine[Any, Any, int]) -> int:
    """SIGTERM and SIGHUP end the work as Ctrl-C does: everything is removed first."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


async def _run(command: tuple[str, ...], interactive: bool, tty: bool, options: dict[str, Any]) -> int:
    from pier.cli import terminal
    from pier.sandbox.contract import Limits
    from pier.sandbox.opening import open_sandbox
    from pier.sandbox.remote import Running, serving

    if options["allow"] and options["network"] == "public":
        raise click.UsageError("--allow says what may be reached; with --network public that is everything")
    limits = {name: options.pop(name) for name in ("cpus", "memory", "processes", "disk", "open_files")}
    mounts = [_mount(text) for text in options.pop("volume")]
    env = _env(options.pop("env"))
    async with open_sandbox(**options, env=env, mounts=mounts, limits=Limits(**limits)) as box:
        config = box.spec.image.config
        argv = list(command) or [*config.entrypoint, *config.cmd] or [_SHELL]
        ended = asyncio.Event()
        directory: Path = box.box.directory  # type: ignore[attr-defined]
        reference, name = box.spec.image.reference, box.spec.name
        running = Running(box.id, name, reference, os.getpid(), time.time(), argv, directory)
        async with serving(box, running, ended.set):
            env = {"TERM": os.environ.get("TERM", "xterm")} if tty else {}
            process = await box.spawn(argv, env=env, tty=tty, stdin=interactive, on_output=terminal.write)
            if tty:
                await process.resize(*terminal.size())
            code = await _attach(process, interactive, tty, ended)
        if code == 127 and argv == [_SHELL] and not command:
            click.echo(f"{reference} has neither a default command nor a shell: give the program to run", err=True)
        return code


def _mount(text: str) -> Mount:
    from pier.sandbox.contract import Mount

    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro", "rw"):
        raise click.UsageError(f"{text!r} is not of the form SRC:DST[:ro|rw] with an absolute DST")
    return Mount(target, Path(source).resolve(), read_only=mode != "rw")


def _env(rows: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        name, equals, value = row.partition("=")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


async def _attach(process: Process, interactive: bool, tty: bool, ended: asyncio.Event) -> int:
    from pier.cli import terminal

    async with process, _background() as tasks:
        with terminal.raw() if tty else contextlib.nullcontext(), terminal.resizing(process.resize):
            if interactive:
                tasks.add(asyncio.create_task(terminal.pump(process.write, process.close_stdin)))
            waiting = asyncio.create_task(process.wait())
            stopping = asyncio.create_task(ended.wait())
            tasks.update({waiting, stopping})
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return 137
            result = waiting.result()
    if result.out_of_memory or result.out_of_disk:
        limit = "--memory allows" if result.out_of_memory else "--disk allows to be written"
        click.echo(f"killed: the sandbox took more than {limit}", err=True)
    return result.exit_code


@contextlib.asynccontextmanager
async def _background() -> AsyncIterator[set[asyncio.Task[Any]]]:
    """Tasks that end with the block."""
    tasks: set[asyncio.Task[Any]] = set()
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _exec(name: str, command: tuple[str, ...], interactive: bool, tty: bool, options: dict[str, Any]) -> int:
    from pier.cli import terminal
    from pier.sandbox import remote

    reader, writer = await remote.connect(remote.find_running(name))
    request = {
        "op": "exec",
        "argv": list(command),
        "cwd": options["workdir"],
        "user": options["user"],
        "env": _env(options["env"]) | ({"TERM": os.environ.get("TERM", "xterm")} if tty else {}),
        "tty": tty,
        "stdin": interactive,
    }

    async def resize(rows: int, columns: int) -> None:
        await remote.send(writer, remote.RESIZE, struct.pack("!HH", rows, columns))

    try:
        await remote.send(writer, remote.REQUEST, json.dumps(request).encode())
        async with _background() as tasks:
            with terminal.raw() if tty else contextlib.nullcontext(), terminal.resizing(resize):
                if tty:
                    await resize(*terminal.size())
                if interactive:
                    sending = terminal.pump(
                        lambda data: remote.send(writer, remote.STDIN, data),
                        lambda: remote.send(writer, remote.STDIN_END),
                    )
                    tasks.add(asyncio.create_task(sending))
                return await _take_output(reader)
    finally:
        writer.close()


async def _take_output(reader: asyncio.StreamReader) -> int:
    from pier.cli import terminal
    from pier.errors import SandboxError
    from pier.sandbox import remote

    while (frame := await remote.receive(reader)) is not None:
        kind, payload = frame
        if kind in (remote.STDOUT, remote.STDERR):
            terminal.write("stdout" if kind == remote.STDOUT else "stderr", payload)
        elif kind == remote.EXIT:
            return json.loads(payload)["exit_code"]
        elif kind == remote.ERROR:
            error = json.loads(payload)
            raise SandboxError(error["message"], code=error["code"], blame=error.get("blame"))
    raise SandboxError("the sandbox is gone", code="sandbox_gone")
