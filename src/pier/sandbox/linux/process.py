"""A running command as pier sees it: its pipes or terminal, and how it ended.

Output comes straight from the command's own pipes. What a command left running in the background may hold them open:
a command is over when its own process is, and later output of others is read and dropped, so that they do not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

from pier.errors import ArgumentError, SandboxError
from pier.sandbox import arguments
from pier.sandbox.contract import OnOutput, Process, Result, Stream
from pier.sandbox.linux.channel import WATCH, Channel, close_all, failure_of

_CHUNK = 256 * 1024
_STRAGGLE = 0.2
"""Seconds that output still held open by other processes is waited for after the command's own end."""


class Output:
    """One stream being read: kept up to a limit, or handed on."""

    def __init__(
        self,
        fd: int,
        stream: Stream,
        limit: int,
        on_output: OnOutput | None,
        on_failure: Callable[[BaseException], None],
        watched: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        os.set_blocking(fd, False)
        self._watched = watched
        self._fd = fd
        self._stream: Stream = stream
        self._limit = limit
        self._on_output = on_output
        self._kept: list[bytes] = []
        self._size = 0
        self._on_failure = on_failure
        self._handing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._drop = False
        self.dropped = 0
        self.ended = self._loop.create_future()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Take what is there; whether there may be more at once."""
        try:
            with self._watched():
                data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        if self._drop:
            return
        if self._on_output is None:
            room = max(0, self._limit - self._size)
            if room:
                self._kept.append(data[:room])
            self._size += min(room, len(data))
            self.dropped += max(0, len(data) - room)
            return
        try:
            answer = self._on_output(self._stream, data)
        except Exception as error:  # noqa: BLE001 - the caller's own function: its failure is raised by `wait`
            self._fail(error)
            return
        if inspect.isawaitable(answer):
            self._loop.remove_reader(self._fd)
            self._handing = self._loop.create_task(self._hand_on(answer))

    async def _hand_on(self, answer: Any) -> None:
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - the caller's own function: its failure is raised by `wait`
            self._fail(error)
        finally:
            self._handing = None
            if not self.ended.done():
                self._loop.add_reader(self._fd, self._read)

    def _fail(self, error: Exception) -> None:
        self._drop = True
        self._on_failure(error)

    @property
    def is_calling(self) -> bool:
        """Whether this is called by the function that output is handed to."""
        return self._handing is not None and self._handing is asyncio.current_task()

    async def settle(self) -> None:
        """After the command's end: take all that it wrote, wait a little for an end, then drop what comes later."""
        while not self.ended.done():
            if self._handing is not None:
                await asyncio.wait([self._handing])
            elif not self._read():
                break
            else:
                await asyncio.sleep(0)
        if not self.ended.done():
            await asyncio.wait([self.ended], timeout=_STRAGGLE)
        if self._handing is not None:
            await asyncio.wait([self._handing])
        self._drop = True

    def kept(self) -> bytes:
        return b"".join(self._kept)

    def close(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.ended.set_result(None)


class LinuxProcess(Process):
    """A command in a sandbox."""

    def __init__(
        self,
        channel: Channel,
        oom_kills: Callable[[], int],
        disk_kills: Callable[[], int],
        limit: int,
        on_output: OnOutput | None,
    ) -> None:
        self.number = channel.number()
        self._channel = channel
        self._outputs: dict[Stream, Output] = {}
        self._stdin = -1
        self._oom_kills = oom_kills
        self._oom_before = oom_kills()
        self._disk_kills = disk_kills
        self._disk_before = disk_kills()
        self._began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int] = self._loop.create_future()
        self._ended: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._terminal = -1
        self._striking: asyncio.Future[None] | None = None
        self._killing: asyncio.Future[None] | None = None
        self._failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._limit = limit
        self._on_output = on_output
        channel.hear(self.number, self._on_message)

    def open_pipes(self, *, wants_input: bool) -> list[int]:
        """Make the streams and give the command's ends of them. Without this they come later, with a terminal that is
        made inside."""
        source, self._stdin = _input(wants_input)
        theirs = [source]
        names: tuple[Stream, Stream] = ("stdout", "stderr")
        for name in names:
            read, write = os.pipe2(os.O_CLOEXEC)
            os.fchmod(write, 0o666)
            theirs.append(write)
            self._outputs[name] = Output(read, name, self._limit, self._on_output, self.fail, self._watched)
        return theirs

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        return WATCH.over(self._channel, self.number)

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        if message.get("started"):
            if fds:
                self._take_terminal(fds.pop())
            if not self._started.done():
                self._started.set_result(1)
        elif not self._ended.done():
            self._ended.set_result(message)
            self._channel.forget(self.number)
            if not self._started.done():
                self._started.set_result(0)
        close_all(fds)

    def _take_terminal(self, fd: int) -> None:
        self._terminal = fd
        self._outputs["stdout"] = Output(os.dup(fd), "stdout", self._limit, self._on_output, self.fail, self._watched)
        self._stdin = os.dup(fd)
        os.set_blocking(self._stdin, False)

    @property
    def has_begun(self) -> bool:
        return self._started.done() and self._started.result() == 1

    async def started(self) -> None:
        """Wait until the command runs; a `SandboxError` if it cannot. A program that is missing has run, and ended."""
        await self._started
        if self._ended.done():
            self._raise_if_failed(self._ended.result())

    def _raise_if_failed(self, message: dict[str, Any]) -> None:
        if not message:
            raise self._channel.lost()
        if "error" in message:
            error = failure_of(message)
            if error.code not in ("cannot_start", ArgumentError.code):
                error.blame, error.retryable = "task", False
            raise error

    async def write(self, data: bytes) -> None:
        arguments.check_bytes("data", data)
        view = memoryview(data).cast("B")
        while view and self._stdin >= 0 and not self._ended.done():
            try:
                with self._watched():
                    written = os.write(self._stdin, view)
                view = view[written:]
            except BlockingIOError:
                await self._wait_writable()
            except OSError:
                return

    async def _wait_writable(self) -> None:
        ready = self._loop.create_future()
        fd = self._stdin
        self._loop.add_writer(fd, lambda: ready.done() or ready.set_result(None))
        try:
            await asyncio.wait([ready, self._ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._loop.remove_writer(fd)

    async def close_stdin(self) -> None:
        if self._terminal >= 0:
            await self.write(b"\x04")
        elif self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def resize(self, rows: int, columns: int) -> None:
        arguments.check_terminal(rows, columns)
        if self._terminal >= 0:
            self._channel.resize(self.number, self._terminal, rows, columns)

    async def signal(self, number: int) -> None:
        arguments.check_signal(number)
        if not self._ended.done():
            self._channel.send({"op": "signal", "id": 0, "job": self.number, "number": number})

    async def kill(self) -> None:
        """Every caller waits until the tree is dead and its output was read. The function that output is handed to may
        call this too; that is not waited for then."""
        if self._striking is None or self._killing is None:
            self._striking = asyncio.ensure_future(self._strike())
            self._killing = asyncio.ensure_future(self._kill(self._striking))
        is_calling = any(output.is_calling for output in self._outputs.values())
        await asyncio.shield(self._striking if is_calling else self._killing)

    async def _strike(self) -> None:
        with contextlib.suppress(SandboxError):
            await self._channel.ask({"op": "kill", "job": self.number})

    async def _kill(self, striking: asyncio.Future[None]) -> None:
        await striking
        await self._settle()

    def fail(self, error: BaseException) -> None:
        """The function that output is handed to has failed: `wait` kills the command and raises this."""
        if not self._failed.done():
            self._failed.set_result(error)

    @property
    def failure(self) -> BaseException | None:
        """What the function raised that output is handed to."""
        return self._failed.result() if self._failed.done() else None

    async def wait(self) -> Result:
        await asyncio.wait([self._ended, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self.failure is None:
            await self._settle()
        if self.failure is not None:
            await asyncio.shield(self.kill())
            raise self.failure
        message = self._ended.result()
        self._raise_if_failed(message)
        return self.result(message["exit"])

    def result(self, exit_code: int, *, timed_out: bool = False) -> Result:
        """What came of the command so far."""
        out, err = self._outputs.get("stdout"), self._outputs.get("stderr")
        return Result(
            exit_code=exit_code,
            stdout=out.kept() if out else b"",
            stderr=err.kept() if err else b"",
            timed_out=timed_out,
            stdout_dropped=out.dropped if out else 0,
            stderr_dropped=err.dropped if err else 0,
            out_of_memory=exit_code == 137 and self._oom_kills() > self._oom_before,
            out_of_disk=exit_code == 137 and self._disk_kills() > self._disk_before,
            seconds=time.monotonic() - self._began,
        )

    async def _settle(self) -> None:
        for output in list(self._outputs.values()):
            await output.settle()
        self._close_input()

    def _close_input(self) -> None:
        for fd in (self._stdin, self._terminal):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._terminal = -1

    @property
    def finished(self) -> bool:
        """Whether the command ended and nothing holds its streams any more."""
        return self._ended.done() and all(output.ended.done() for output in self._outputs.values())

    def discard(self) -> None:
        """Close everything, when the sandbox is gone."""
        for output in self._outputs.values():
            output.close()
        self._close_input()


def _input(wanted: bool) -> tuple[int, int]:
    """What the command reads from, and pier's end of it (-1 without one)."""
    if not wanted:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1
    read, write = os.pipe2(os.O_CLOEXEC)
    os.fchmod(read, 0o666)
    os.set_blocking(write, False)
    return read, write
