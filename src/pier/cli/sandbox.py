"""`pier sandbox`: run a command in a new sandbox, and access running ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import termios
import threading
import time
import tty as terminal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo
from pier.cli.options import combine
from pier.errors import SandboxError
from pier.sizes import columns, parse_size

if TYPE_CHECKING:
    import socket

    from pier.sandbox.contract import Process

_SHELL = "/bin/sh"
_CHUNK = 65536


class Size(click.ParamType[int]):
    """A number of bytes such as 512M or 2g."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        return parse_size(value, param.opts[-1] if param else self.name)


_command = click.argument("command", nargs=-1, type=click.UNPROCESSED)


_exec_options = combine(
    click.option("-w", "--workdir", metavar="DIR", help="Working directory of the command."),
    click.option("-u", "--user", metavar="USER", help="Name or uid[:gid] that the command runs as."),
    click.option(
        "--env", multiple=True, metavar="NAME=VALUE", help="Set a variable; NAME alone forwards this shell's."
    ),
    click.option("--tty", is_flag=True, help="Give the command a terminal."),
    click.option("--interactive", is_flag=True, help="Forward stdin."),
)


@click.group()
def sandbox() -> None:
    """Run commands in sandboxes."""


@sandbox.command(context_settings={"allow_interspersed_args": False})
@click.option("--image", default="host", help="Image of the root file system.")
@click.option("--network", type=click.Choice(["none", "public"]), default="none", help="Network access.")
@click.option("--allow", multiple=True, metavar="HOST", help="Allow access to this host only; repeatable.")
@click.option("--cpus", type=float, help="Number of CPUs, such as 1.5.")
@click.option(
    "--memory", type=Size(), help="Memory limit, such as 2G; 0 for unlimited.  [default: half of the machine's]"
)
@click.option("--processes", type=int, help="Maximum number of processes; 0 for unlimited.  [default: 4096]")
@click.option("--disk", type=Size(), help="Disk limit; 0 for unlimited.  [default: half of the free space]")
@click.option("--open-files", type=int, help="Maximum number of open files per process.")
@click.option("--volume", multiple=True, metavar="SRC:DST[:ro|rw]", help="Mount a path of this machine.")
@click.option("--name", default="", show_default=False, help="Name for `pier sandbox exec`.")
@click.option("--hostname", default="pier", help="Host name inside the sandbox.")
@click.option("--no-new-privileges", is_flag=True, help="Prevent processes from gaining privileges, including by sudo.")
@_exec_options
@_command
def run(command: tuple[str, ...], interactive: bool, tty: bool, **options: Any) -> None:
    """Run a command in a new sandbox and remove it afterwards.

    Exits with the code of the command. Without a command, the image's default command is run.
    """
    sys.exit(asyncio.run(_until_terminated(_run(command, interactive, tty, options))))


@sandbox.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the running sandboxes of `pier sandbox run`."""
    from pier.sandbox.remote import list_running

    rows = list_running()
    if not rows and not as_json:
        click.echo("no running sandboxes", err=True)
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
    """Run another command in a running sandbox, given by name or id."""
    command = command[1:] if command[:1] == ("--",) else command
    if not command:
        raise click.UsageError("missing COMMAND")
    sys.exit(_exec(name, command, interactive, tty, options))


@sandbox.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def stop(names: tuple[str, ...]) -> None:
    """Stop running sandboxes, given by name or id."""
    from pier.frames import REQUEST, pack

    for name in names:
        with _dial(name) as sock:
            sock.sendall(pack(REQUEST, json.dumps({"op": "stop"}).encode()))
            sock.recv(1)
        click.echo(name)


async def _until_terminated(work: Coroutine[Any, Any, int]) -> int:
    """Handle SIGTERM and SIGHUP like Ctrl-C: clean up, then exit."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


async def _run(command: tuple[str, ...], interactive: bool, tty: bool, options: dict[str, Any]) -> int:
    from pier.cli.workspace_exec import terminal_size, write
    from pier.sandbox.contract import Limits, Mount
    from pier.sandbox.opening import open_sandbox
    from pier.sandbox.remote import Running, serving

    if options["allow"] and options["network"] == "public":
        raise click.UsageError("cannot combine --allow with --network public")
    limits = {name: options.pop(name) for name in ("cpus", "memory", "processes", "disk", "open_files")}
    mounts = [Mount.parse(text, "--volume") for text in options.pop("volume")]
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
            process = await box.spawn(
                argv,
                env=env,
                tty=tty,
                stdin=interactive,
                on_output=lambda stream, data: write(1 if stream == "stdout" else 2, data),
            )
            if tty:
                await process.resize(*terminal_size())
            code = await _attach(process, interactive, tty, ended)
        if code == 127 and argv == [_SHELL] and not command:
            click.echo(f"{reference} has neither a default command nor a shell: specify a command", err=True)
        return code


def _env(rows: tuple[str, ...]) -> dict[str, str]:
    pairs = (row.partition("=") for row in rows)
    values = {name: value if equals else os.environ.get(name) for name, equals, value in pairs}
    return {name: value for name, value in values.items() if value is not None}


async def _attach(process: Process, interactive: bool, tty: bool, ended: asyncio.Event) -> int:
    async with process:
        waiting = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(ended.wait())
        tasks: set[asyncio.Task[Any]] = {waiting, stopping}
        try:
            with _raw() if tty else contextlib.nullcontext(), _resizing(process.resize):
                if interactive:
                    tasks.add(asyncio.create_task(_pump(process.write, process.close_stdin)))
                await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    return 137
                result = waiting.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    if result.out_of_memory or result.out_of_disk:
        limit = "--memory" if result.out_of_memory else "--disk"
        click.echo(f"killed: the sandbox exceeded its {limit} limit", err=True)
    return result.exit_code


def _exec(name: str, command: tuple[str, ...], interactive: bool, tty: bool, options: dict[str, Any]) -> int:
    from pier.cli.workspace_exec import relay, terminal_size

    request = {
        "op": "exec",
        "argv": list(command),
        "cwd": options["workdir"],
        "user": options["user"],
        "env": _env(options["env"]) | ({"TERM": os.environ.get("TERM", "xterm")} if tty else {}),
        "tty": tty,
        "size": terminal_size() if tty else None,
        "stdin": interactive,
    }
    with _dial(name) as sock:
        return relay(sock, request, tty=tty, stdin=interactive)["exit_code"]


@contextlib.contextmanager
def _dial(name: str) -> Iterator[socket.socket]:
    """Connect to a running sandbox; raise `SandboxError` if it is gone."""
    from pier.frames import dial
    from pier.sandbox.remote import find_running

    gone = SandboxError(f"the sandbox {name} is gone", code="sandbox_gone")
    try:
        connection = dial(str(find_running(name).directory))
    except OSError as error:
        raise gone from error
    with connection:
        try:
            yield connection
        except SandboxError as error:
            raise gone if error.code == "supervisor_gone" else error from None


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Put the terminal, if any, into raw mode."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    terminal.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def _pump(on_data: Callable[[bytes], Awaitable[None]], on_end: Callable[[], Awaitable[None]]) -> None:
    """Forward stdin until its end. The reading thread is a daemon, since reads cannot be cancelled."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(16)

    def read() -> None:
        data = b"?"
        while data:
            room.acquire()
            try:
                data = os.read(0, _CHUNK)
            except OSError:
                data = b""
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, data)

    threading.Thread(target=read, daemon=True, name="pier-stdin").start()
    while data := await chunks.get():
        await on_data(data)
        room.release()
    await on_end()


@contextlib.contextmanager
def _resizing(on_resize: Callable[[int, int], Awaitable[None]]) -> Iterator[None]:
    """Forward changes of the terminal's size."""
    from pier.cli.workspace_exec import terminal_size

    loop = asyncio.get_running_loop()
    reporting: set[asyncio.Future[None]] = set()

    def changed() -> None:
        task = asyncio.ensure_future(on_resize(*terminal_size()))
        reporting.add(task)
        task.add_done_callback(reporting.discard)

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
