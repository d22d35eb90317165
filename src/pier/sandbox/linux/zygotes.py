"""pier's side of the zygotes: starts them when they are needed, spreads work over them, replaces those that died.

The end of a process that pier holds a descriptor of.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pier.beneath import remove
from pier.errors import SandboxError
from pier.idmap import IdMap, IdRange, mapped_argv
from pier.sandbox import seccomp
from pier.sandbox.linux.channel import Answer, Channel

NO_SANDBOXES = "no_sandboxes"
"""The code of the error that this machine lets nobody here have a sandbox."""

_BOOT = Path(__file__).resolve().with_name("boot.py")
_GONE = "the process that sandboxes are forked from has died"
_PASSED_ON = ("PATH", "PIER_TEST_SESSION")


def id_rows(ids: IdMap, ranges: tuple[IdRange, ...]) -> str:
    """The id map that a zygote writes for each sandbox. Zygotes of plain users are root in a namespace already."""
    shifted = ids.mode == "root"
    return "".join(f"{part.inside} {part.outside if shifted else part.inside} {part.count}\n" for part in ranges)


class ZygoteConnection:
    """One zygote process and the connection to it."""

    def __init__(self, ids: IdMap) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = os.memfd_create("pier-zygote", os.MFD_CLOEXEC)
        argv = [sys.executable, "-I", "-S", str(_BOOT)]
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {"LC_ALL": "C.UTF-8"}
        self._process = subprocess.Popen(
            argv if ids.mode == "root" else mapped_argv(argv),
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=env,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._process.pid
        self.pending = 0
        self.channel = Channel(ours, _GONE, self._reap, code="zygote_gone")
        self._ids = ids

    async def prepare(self) -> None:
        """Wait until it can start sandboxes."""
        shifted = self._ids.mode == "root"
        maps = {"uid_map": id_rows(self._ids, self._ids.uids), "gid_map": id_rows(self._ids, self._ids.gids)}
        root = self._ids.uids[0].outside if shifted else 0
        single = self._ids.mode == "single"
        config = {
            "shifted": shifted,
            "root_outside": root,
            "maps": maps,
            "many_ids": not single,
            "filter": seccomp.program(single_id=single).hex() if seccomp.supported() else "",
        }
        try:
            await self.channel.wait(0, lambda: self.channel.send(config))
        except SandboxError as error:
            raise SandboxError(
                f"cannot prepare sandboxes here: {self.log() or error}",
                hint="pier doctor",
                code=NO_SANDBOXES,
                retryable=False,
            ) from error

    def ask(self, message: dict[str, Any], fds: list[int] | None = None) -> asyncio.Task[Answer]:
        """Have it do something. It counts as busy from now on."""
        self.pending += 1
        asking = asyncio.ensure_future(self.channel.ask(message, fds))
        asking.add_done_callback(self._on_answer)
        return asking

    def _on_answer(self, _: asyncio.Task[Answer]) -> None:
        self.pending -= 1

    def log(self) -> str:
        """The last line of what it complained of."""
        if self._log < 0:
            return ""
        text = os.pread(self._log, 1 << 16, 0).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else ""

    def _reap(self) -> None:
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.channel.close()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


class Zygotes:
    """Up to one zygote for each core; the first is made at the first need, more when all are busy."""

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self._most = min(4, len(os.sched_getaffinity(0)))
        self._all: list[ZygoteConnection] = []
        self._lock = asyncio.Lock()

    async def pick(self) -> ZygoteConnection:
        """The zygote with the least to do, alive."""
        self._bury()
        if not self._all or (len(self._all) < self._most and min(one.pending for one in self._all) > 1):
            async with self._lock:
                self._bury()
                if len(self._all) < self._most and all(one.pending > 1 for one in self._all):
                    self._all.append(await self._make())
        return min(self._all, key=lambda one: one.pending)

    async def _make(self) -> ZygoteConnection:
        zygote = ZygoteConnection(self.ids)
        try:
            await zygote.prepare()
        except BaseException:
            zygote.close()
            raise
        return zygote

    def _bury(self) -> None:
        for one in [one for one in self._all if one.channel.closed]:
            self._all.remove(one)
            one.close()

    async def ask_any(self, message: dict[str, Any]) -> Answer:
        """Have one of them do something that any can do; once more with another if the first one dies."""
        zygote = await self.pick()
        try:
            return await zygote.ask(message)
        except SandboxError:
            if not zygote.channel.closed:
                raise
        return await (await self.pick()).ask(message)

    async def remove(self, path: Path) -> None:
        """Remove a tree as whoever owns its files. Where no zygote can be had, none of them wrote anything either, and
        what is there is this user's own."""
        try:
            await self.pick()
        except SandboxError:
            await asyncio.to_thread(remove, str(path))
            return
        await self.ask_any({"op": "remove", "path": str(path)})

    async def tell_all(self, message: dict[str, Any]) -> None:
        for one in self._all:
            if not one.channel.closed:
                one.channel.send(message)

    def pids(self) -> list[int]:
        return [one.pid for one in self._all]

    def close(self) -> None:
        for one in self._all:
            one.close()
        self._all.clear()


STOP_SECONDS = 60


async def kill_and_wait(pidfd: int) -> None:
    """Kill a process by its descriptor and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await ended
    except TimeoutError:
        raise SandboxError(f"a sandbox's processes did not end in {STOP_SECONDS} s", code="stop_timeout") from None
    finally:
        loop.remove_reader(pidfd)
