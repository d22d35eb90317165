"""A session in the helper: serves containers on an engine's host for a pier that is elsewhere, or not root there.

It enters containers as pier does where it is root, and passes pier's requests on. Networks are served here, so a
sandbox reaches what the engine's host reaches. It ends when its standard input does, or when pier has been silent for
long; other sessions in the same helper are separate processes. Attendants are forked from a warm process with one
thread, as local sandboxes are from a zygote. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from pier.errors import PierError
from pier.network.policy import NetworkPolicy
from pier.sandbox import seccomp, tree
from pier.sandbox.docker import helper_boot
from pier.sandbox.docker.container import AttendedContainer, Hub
from pier.sandbox.docker.mux import Broken, Mux
from pier.sandbox.linux import attendant, changes, kernel, wire
from pier.sandbox.linux.channel import Channel
from pier.sandbox.linux.limits import free_bytes
from pier.sandbox.linux.network import offered_modes

SILENCE = 120.0
"""Seconds without a word from pier after which it counts as gone."""
_CHUNK = 1 << 18
_MANY = 1 << 16
"""Files that may be open in a session, for the connections of all its containers."""
_MARK_TRIES = 5
_MARK_SECONDS = 0.01
_NOT_ATTENDED = {"error": "the container is not attended", "code": "sandbox_gone"}


def main() -> None:
    """Serve until pier is gone, unless the helper is just ending."""
    fork_server = start_fork_server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MANY)), hard))
    if helper_boot.join():
        asyncio.run(HelperSession(fork_server).serve())


def list_parts() -> None:
    """Say which files this program needs: its modules, and the libraries as the linker found them."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo("localhost", 1)
    modules = sorted({path for each in list(sys.modules.values()) if (path := getattr(each, "__file__", None))})
    found = {"modules": modules, "libraries": _libraries(), "version": sys.version_info[:2], "lib": sys.platlibdir}
    sys.stdout.write(json.dumps(found))


def _libraries() -> list[str]:
    class Info(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))

    found: list[str] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
    def note(info: Any, *_: Any) -> int:
        found.append(os.fsdecode(info.contents.name or b""))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(note, None)
    return sorted(name for name in found if name.startswith("/"))


class HelperSession:
    """The far end of the connection, and the containers that are attended from here."""

    def __init__(self, fork_server: socket.socket) -> None:
        self._sock = fork_server
        self._attended: dict[str, AttendedContainer] = {}
        self._entering: dict[str, asyncio.Task[None] | None] = {}
        self._hubs: dict[str, Hub] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard = 0.0
        self._mux: Mux
        self._fork_server: Channel

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._mux = Mux(0, self._on_message)
        self._fork_server = Channel(self._sock, "the helper's fork server has died", lambda: os._exit(1))
        reader = asyncio.StreamReader(limit=_CHUNK)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        out, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), sys.stdout
        )
        writer = asyncio.StreamWriter(out, protocol, None, loop)
        self._start(self._send_out(writer))
        self._start(self._watch())
        self._mux.send({"key": "", "id": 0, "hello": self._hello()})
        with contextlib.suppress(Broken):
            while data := await reader.read(_CHUNK):
                self._heard = loop.time()
                self._mux.feed(data)
        os._exit(0)

    async def _send_out(self, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            await self._mux.run(write)
        finally:
            os._exit(0)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        while True:
            await asyncio.sleep(SILENCE / 4)
            if loop.time() - self._heard > SILENCE:
                os._exit(0)

    def _hello(self) -> dict[str, Any]:
        facts = {"networks": sorted(offered_modes()), "six": Path("/proc/sys/net/ipv6").exists()}
        return facts | {"mark": self._read_mark()}

    def _read_mark(self) -> str:
        """The mark of pier, if the engine sees it. It is read again for a moment: the parent may still be the program
        that started this process, which is about to exit."""
        place = os.environ.get(helper_boot.MARK, "")
        for _ in range(_MARK_TRIES if place else 0):
            with contextlib.suppress(OSError), open(f"{self._root}{place}") as stream:
                return stream.read(64)
            time.sleep(_MARK_SECONDS)
        return ""

    @property
    def _root(self) -> str:
        """The files as the engine sees them: who runs its containers is the parent of each one's first process."""
        return f"/proc/{os.getppid()}/root"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_message(self, message: dict[str, Any]) -> None:
        """Serve a request. Whatever goes wrong with one is its answer: others are served here, too."""
        key = str(message.pop("key", ""))
        attended = self._attended.get(key)
        if not key:
            self._start(self._manage(message))
        elif attended is None:
            self._answer(key, message, _NOT_ATTENDED)
        elif message.get("op") in ("listen", "network", "settle"):
            self._start(self._arrange(attended, message))
        else:
            self._pass_on(attended, message)

    def _pass_on(self, attended: AttendedContainer, message: dict[str, Any]) -> None:
        try:
            attended.take(message)
        except Exception as error:  # noqa: BLE001 - the boundary to pier, see `_on_message`
            self._answer(attended.key, message, _failure(error))

    def _answer(self, key: str, message: dict[str, Any], answer: dict[str, Any]) -> None:
        self._mux.send({"key": key, "id": message.get("id", -1)} | answer)

    async def _manage(self, message: dict[str, Any]) -> None:
        """Enter a container, leave one, or say that all is well."""
        try:
            answer: dict[str, Any] = {}
            if message["op"] == "enter":
                answer = await self._enter(message)
            elif message["op"] == "changes":
                answer = await self._attended[message["container"]].changes(self._fork_server, self._root)
            elif message["op"] == "measure":
                attended, volumes = self._attended[message["container"]], message["volumes"]
                answer = await attended.used_disk(self._fork_server, self._root, volumes)
            elif message["op"] == "free" and "path" in message:
                answer = {"bytes": free_bytes(Path(self._root + message["path"]))}
            elif message["op"] == "free":
                answer = self._attended[message["container"]].free_disk(self._root)
            elif message["op"] == "open_hub":
                await self._open_hub(message)
            elif message["op"] == "close_hub" and (hub := self._hubs.pop(message["container"], None)):
                hub.close()
            elif message["op"] == "leave":
                await self._leave(message["container"])
        except KeyError:
            self._answer("", message, _NOT_ATTENDED)
        except Exception as error:  # noqa: BLE001 - the boundary to pier, see `_on_message`
            self._answer("", message, _failure(error))
        else:
            self._answer("", message, answer)

    async def _open_hub(self, message: dict[str, Any]) -> None:
        """Private networks for several containers; they go with the connection at the latest."""
        hub = self._hubs[message["container"]] = Hub()
        names = {int(number): each for number, each in message["names"]}
        try:
            await hub.open([self._attended[key].member(places) for key, places in message["members"]], names)
        except BaseException:
            hub.close()
            raise

    async def _enter(self, message: dict[str, Any]) -> dict[str, Any]:
        key, plan = message["container"], message["plan"]
        attended = AttendedContainer(self._mux, key, message["of"], message["pid"])
        plan["filter"] = seccomp.program().hex() if seccomp.supported() else ""
        self._entering[key] = asyncio.current_task()
        try:
            proof = await attended.enter(self._fork_server, plan)
        except BaseException:
            await attended.leave()
            raise
        finally:
            del self._entering[key]
        self._attended[key] = attended
        return {"proof": proof}

    async def _leave(self, key: str) -> None:
        """Leave a container, also one that is just being entered."""
        if (entering := self._entering.get(key)) is not None:
            entering.cancel()
            await asyncio.wait([entering])
        if attended := self._attended.pop(key, None):
            await attended.leave()

    async def _arrange(self, attended: AttendedContainer, message: dict[str, Any]) -> None:
        try:
            if message["op"] == "listen":
                answer = await attended.listen(message)
            elif message["op"] == "settle":
                answer = await attended.settle()
            else:
                answer = await attended.set_network(NetworkPolicy(message["mode"], tuple(message["hosts"])))
        except Exception as error:  # noqa: BLE001 - the boundary to pier, see `_on_message`
            self._answer(attended.key, message, _failure(error))
        else:
            self._answer(attended.key, message, answer)


def _failure(error: Exception) -> dict[str, Any]:
    """What went wrong as an answer: with the error's own code, or else that the request made no sense."""
    if isinstance(error, (PierError, OSError)):
        return {"error": str(error), "code": getattr(error, "code", "sandbox")}
    return {"error": f"invalid request: {type(error).__name__}: {error}", "code": "bad_argument"}


_MOST_CHANGES = 20_000
_LONGEST_CHANGES = 1 << 20
"""Letters of their paths. More than that the engine is asked for, which does not hold up what else pier is told."""


def start_fork_server() -> socket.socket:
    """Start it; the socket to it. Call this before there is a second thread or a loop."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1):
                os.dup2(nothing, number)
            os.close(nothing)
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _serve(sock: socket.socket) -> None:
    kernel.set_name("pier-fork-server")
    tree.warm()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                received = wire.receive(sock)
            except ValueError:
                continue
            if received is None:
                return
            message, fds = received
            try:
                _enter(sock, message, fds) if message["op"] == "enter" else _look(sock, message)
            except Exception as error:  # noqa: BLE001 - the boundary to pier: no request ends this process
                wire.send(sock, wire.failure(message, error))
            finally:
                for fd in fds:
                    os.close(fd)


def _enter(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock.close()
        attendant.main(socket.socket(fileno=fds[0]), message["pid"], message["plan"])
    pidfd = os.pidfd_open(pid)
    try:
        wire.send(sock, {"id": message["id"], "pid": pid}, [pidfd])
    finally:
        os.close(pidfd)


def _look(sock: socket.socket, message: dict[str, Any]) -> None:
    """Have a child look at the files of a container."""
    if os.fork() == 0:
        try:
            found = _measure(message) if message["op"] == "measure" else _compare(message)
            wire.send(sock, {"id": message["id"]} | found)
        finally:
            os._exit(0)


def _measure(message: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": changes.measure("/proc", message["pid"], *message["paths"])}


def _compare(message: dict[str, Any]) -> dict[str, Any]:
    """What differs between layers; None if they cannot be read from here or it is too much to tell."""
    try:
        found = changes.compare(message["path"], message["layers"], _MOST_CHANGES)
    except (OSError, changes.TooMany):
        return {"changes": None}
    return {"changes": found if sum(len(row[0]) for row in found) <= _LONGEST_CHANGES else None}


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
