"""The warm process that sandboxes are forked from, so that none of them pays for an interpreter's start.

It is small, has one thread, imports everything beforehand and does three things on request: start a sandbox, remove a
directory, and end when pier does. Its own root is a private tmpfs: `/host` is the machine, `/lowers/N` are the layers
in use (with shifted ids, when root), so that a clone of this process finds them without being able to read pier's home.
Clones are made by `pier.sandbox.linux.pid1`.

Run as `python -I -S -c BOOT`; descriptor 0 is its socket to pier, the configuration is its first message.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import stat
from typing import Any

from pier.beneath import remove, remove_some
from pier.sandbox import tree
from pier.sandbox.linux import attendant, changes, kernel, wire
from pier.sandbox.linux.pid1 import Spare, Spares, write_maps
from pier.sandbox.linux.root import HOST, POINTS, find_masks, make_skeleton, make_view, share_devices

_SAME_IDS = {"uid_map": "0 0 65536\n", "gid_map": "0 0 65536\n"}
_ROOTS_SECRETS = ("kmsg", "slabinfo", "kpagecount", "kpageflags", "kpagecgroup", "vmallocinfo", "pagetypeinfo")
_LOWERS_KEPT = 128
_REMOVED_AT_ONCE = 200
"""Of larger trees the rest is removed by a child, so that starts do not wait."""

_QUIET_MS = 2
"""How long nobody must have asked for anything before something is made ahead."""

_LOOKED_AT_AT_ONCE = 200
"""In larger trees changes are looked for by a child."""


class Zygote:
    """One zygote. `serve` runs until pier closes the socket."""

    def __init__(self, sock: socket.socket, config: dict[str, Any]) -> None:
        self.sock = sock
        self.config = config
        self.lowers: dict[tuple[str, int, int, bool], tuple[str, int]] = {}
        self.counter = 0
        self.points = 0
        self.free: list[str] = []
        self.shift = -1
        self.spares = Spares(sock, config)
        self.shiftable: dict[int, bool] = {}
        self.viewable = True

    def prepare(self) -> None:
        """Take a root of its own; with shifted ids, make the namespace that layers are shifted by."""
        kernel.set_name("pier-zygote")
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", "/tmp", "tmpfs", 0, "mode=755")
        for name in ("host", "skeleton", "lowers", "views", *POINTS):
            os.mkdir(f"/tmp/{name}", 0o755)
        make_skeleton("/tmp/skeleton", self.config["root_outside"])
        kernel.pivot_root("/tmp", "/tmp/host")
        os.chdir("/")
        kernel.bind("/e", "/e", read_only=True, flags=kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        share_devices()
        self.config["masks"] = find_masks()
        if self.config["shifted"]:
            self.shift = self._make_user_namespace()
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake_in, select.POLLIN)
        while True:
            ready = poll.poll(_QUIET_MS if self.spares.wanted else None)
            if not ready:
                self.spares.add()
            for fd, _ in ready:
                if fd == wake_in:
                    os.read(wake_in, 4096)
                    self._reap()
                    continue
                try:
                    received = wire.receive(self.sock)
                except ValueError:
                    continue
                if received is None:
                    self.spares.end()
                    return
                self._answer(*received)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self.spares.forget(pid)

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            if message["op"] == "start":
                self._start(message, fds)
            elif message["op"] == "enter":
                self._enter(message, fds)
            elif message["op"] == "remove":
                self._remove(message)
            elif message["op"] == "move":
                os.rename(HOST + message["path"], HOST + message["to"])
                wire.send(self.sock, {"id": message["id"]})
            elif message["op"] in ("changes", "measure"):
                self._look(message)
            elif message["op"] == "forget":
                self._forget(message["path"])
            else:
                raise ValueError(f"unknown operation {message['op']!r}")
        except ConnectionError:
            problem = "the init that was to run the sandbox has been killed"
            wire.send(self.sock, {"id": message["id"], "error": problem, "code": "sandbox_gone"})
        except Exception as error:  # noqa: BLE001 - the boundary to pier: no request ends this process
            wire.send(self.sock, wire.failure(message, error))
        finally:
            for fd in fds:
                os.close(fd)

    def _start(self, message: dict[str, Any], fds: list[int]) -> None:
        """Hand a plan to an init. It holds a lock on its directory as long as it lives, whoever else dies."""
        plan = message["plan"]
        directory = HOST + message["directory"]
        _make_directories(directory, HOST + message["layers"][-1])
        trees = plan["trees"]
        shifted = self._can_shift([message["directory"], *message["layers"], *(["/"] if trees else [])])
        view = self._view(trees, shifted)
        lowers = [(self._skeleton(shifted), 0), *view, *(self._lower(path, shifted) for path in message["layers"])]
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fds.append(held)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fds.append(self._open_source(directory, shifted))
        same_ids = plan["same_ids"] = self.shift >= 0 and not shifted
        if same_ids:
            plan["mounts"] = [*plan["mounts"], *_hidden_from_root()]
        spare = self.spares.clone(_SAME_IDS) if same_ids else self.spares.take()
        try:
            plan["lowers"] = [self._reach(spare, lower, fds) for lower in lowers]
            plan["layers"] = len(fds) - 2
            for wanted in plan["mounts"]:
                if "source" in wanted:
                    wanted["tree"] = len(fds) - 1
                    fds.append(self._open_source(HOST + wanted["source"], shifted, read_only=wanted["read_only"]))
            plan["binds"] = []
            for tree in () if view else trees:
                with contextlib.suppress(FileNotFoundError):  # removed since the backend listed them
                    fds.append(self._open_source(HOST + tree, shifted, read_only=True))
                    plan["binds"].append({"to": tree, "tree": len(fds) - 2})
            plan["groups"] = len(message["groups"])
            for path, settings in message["groups"].items():
                make_group(HOST + path, settings)
                fds.append(os.open(f"{HOST}{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            wire.send(spare.control, plan, fds)
            answer = {"id": message["id"], "pid": spare.pid, "shifted": shifted}
            wire.send(self.sock, answer, [spare.pidfd, spare.control.fileno()])
        except BaseException:
            os.kill(spare.pid, signal.SIGKILL)
            raise
        finally:
            spare.close()

    def _reach(self, spare: Spare, lower: tuple[str, int], fds: list[int]) -> str:
        """Where an init finds a layer; one that was mounted after it was cloned is handed to it."""
        target, number = lower
        if number <= spare.layers:
            return target
        point = len(fds) - 2
        fds.append(kernel.open_tree(target))
        if point >= self.points:
            os.mkdir(f"/x/{point}", 0o755)
            self.points += 1
        return f"/x/{point}"

    def _enter(self, message: dict[str, Any], fds: list[int]) -> None:
        """Fork a process that serves a container of somebody else's making."""
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self.spares.close()
            attendant.main(socket.socket(fileno=fds[0]), message["pid"], message["plan"])
        pidfd = os.pidfd_open(pid)
        try:
            wire.send(self.sock, {"id": message["id"], "pid": pid}, [pidfd])
        finally:
            os.close(pidfd)

    def _can_shift(self, paths: list[str]) -> bool:
        """Whether the file systems of all these can be mounted with shifted ids; each is tried once."""
        if self.shift < 0:
            return False
        for path in paths:
            device = os.stat(HOST + path).st_dev
            if device not in self.shiftable:
                fd = kernel.open_tree(HOST + path)
                try:
                    kernel.set_mount(fd, user_namespace=self.shift)
                    self.shiftable[device] = True
                except OSError:
                    self.shiftable[device] = False
                finally:
                    os.close(fd)
            if not self.shiftable[device]:
                return False
        return True

    def _skeleton(self, shifted: bool) -> str:
        """The layer below all others, whose owner is root inside."""
        if shifted or self.shift < 0:
            return "/skeleton"
        if not os.path.isdir("/skeleton-0"):
            os.mkdir("/skeleton-0", 0o755)
            make_skeleton("/skeleton-0", 0)
        return "/skeleton-0"

    def _make_user_namespace(self) -> int:
        go_in, go_out = os.pipe2(os.O_CLOEXEC)
        pid, pidfd = kernel.clone(kernel.CLONE_NEWUSER)
        if pid == 0:
            os.close(go_out)
            os.read(go_in, 1)
            os._exit(0)
        write_maps(pid, self.config["maps"])
        fd = os.open(f"{HOST}/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        for end in (go_in, go_out, pidfd):
            os.close(end)
        os.waitpid(pid, 0)
        return fd

    def _lower(self, path: str, shifted: bool) -> tuple[str, int]:
        """Where the layer `path` is mounted, with shifted ids if need be, and its number in order of mounting."""
        found = os.stat(HOST + path)
        key = (path, found.st_dev, found.st_ino, shifted)
        if key in self.lowers:
            self.lowers[key] = self.lowers.pop(key)
            return self.lowers[key]
        while len(self.lowers) >= _LOWERS_KEPT:
            oldest = next(iter(self.lowers))
            self._detach(self.lowers.pop(oldest)[0])
        target = self._mount_point()
        fd = kernel.open_tree(HOST + path)
        try:
            if shifted:
                kernel.set_mount(fd, user_namespace=self.shift)
            kernel.attach(fd, target)
        finally:
            os.close(fd)
        self.spares.layers += 1
        self.lowers[key] = target, self.spares.layers
        return self.lowers[key]

    def _view(self, trees: list[str], shifted: bool) -> list[tuple[str, int]]:
        """The layer that is those `trees` of the machine's root, at their places, and nothing else. None where the
        kernel cannot make it: for a plain user, on a root that is an overlay itself, or with trees on other disks."""
        key = ("", 0, 0, shifted)
        if trees and key not in self.lowers and self.shift >= 0 and self.viewable:
            try:
                owner = self.config["root_outside"] if shifted else 0
                found = [tree for tree in trees if os.path.isdir(HOST + tree)]
                target = make_view(self._mount_point, found, self.shift if shifted else None, owner)
                self.spares.layers += 1
                self.lowers[key] = target, self.spares.layers
            except OSError:
                self.viewable = False
        return [self.lowers[key]] if trees and key in self.lowers else []

    def _forget(self, path: str) -> None:
        for key in [key for key in self.lowers if key[0] == path]:
            self._detach(self.lowers.pop(key)[0])

    def _mount_point(self) -> str:
        """A place to mount at. Places are used again and never removed: clones may still have something there."""
        if self.free:
            return self.free.pop()
        self.counter += 1
        target = f"/lowers/{self.counter}"
        os.mkdir(target, 0o755)
        return target

    def _detach(self, target: str) -> None:
        kernel.unmount(target)
        self.free.append(target)

    def _open_source(self, source: str, shifted: bool, *, read_only: bool = False) -> int:
        """A copy of a mount, with shifted ids where the file system can do that, else with all that is below it."""
        if shifted:
            fd = kernel.open_tree(source)
            try:
                kernel.set_mount(fd, user_namespace=self.shift, read_only=read_only)
                return fd
            except OSError:
                os.close(fd)
        fd = kernel.open_tree(source, recursive=True)
        if read_only:
            kernel.set_mount(fd, read_only=True, recursive=True)
        return fd

    def _look(self, message: dict[str, Any]) -> None:
        lowers: list[str] = []
        if message["op"] == "changes":
            view = self._view(message.get("trees") or [], self._can_shift(["/"]))
            lowers = [*(place for place, _ in view), *(HOST + path for path in message["layers"])]
            with contextlib.suppress(changes.TooMany):
                wire.send(self.sock, {"id": message["id"]} | look(message, lowers, _LOOKED_AT_AT_ONCE))
                return
        if os.fork() == 0:
            try:
                wire.send(self.sock, {"id": message["id"]} | look(message, lowers))
            except Exception as error:  # noqa: BLE001 - pier waits for an answer
                wire.send(self.sock, wire.failure(message, error))
            finally:
                os._exit(0)

    def _remove(self, message: dict[str, Any]) -> None:
        path = HOST + message["path"]
        if remove_some(path, _REMOVED_AT_ONCE):
            wire.send(self.sock, {"id": message["id"]})
        elif os.fork() == 0:
            try:
                remove(path)
                wire.send(self.sock, {"id": message["id"]})
            except Exception as error:  # noqa: BLE001 - pier waits for an answer
                wire.send(self.sock, wire.failure(message, error))
            finally:
                os._exit(0)


def look(message: dict[str, Any], lowers: list[str], most: int | None = None) -> dict[str, Any]:
    """The answer to a question about a tree; `TooMany` if it is one about changes in more than `most` entries."""
    if message["op"] == "measure":
        paths = (HOST + path for path in message["paths"])
        descend = message.get("descend", False)
        return {"bytes": changes.measure(f"{HOST}/proc", message["pid"], *paths, descend=descend)}
    return {"changes": changes.compare(HOST + message["path"], lowers, most)}


def make_group(path: str, settings: list[tuple[str, str, bool]]) -> None:
    """Make a control group. The kernel makes one at a time, so pier's own process would wait long for it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    for name, value, required in settings:
        with contextlib.nullcontext() if required else contextlib.suppress(FileNotFoundError):
            fd = os.open(f"{path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)


def _hidden_from_root() -> list[dict[str, Any]]:
    """What the machine's root may read of the kernel, for a sandbox whose root has the same id."""
    return [
        {"target": f"/proc/{name}", "source": "/dev/null", "read_only": True}
        for name in _ROOTS_SECRETS
        if os.path.exists(f"{HOST}/proc/{name}")
    ]


def _make_directories(directory: str, top: str) -> None:
    """The parts of a sandbox's directory. The root that is merged looks like its topmost layer."""
    for name in ("u", "w"):
        os.mkdir(f"{directory}/{name}", 0o755)
    like = os.stat(top)
    os.chown(f"{directory}/u", like.st_uid, like.st_gid)
    os.chmod(f"{directory}/u", stat.S_IMODE(like.st_mode))


def main() -> None:
    kernel.set_command_line("pier-init")
    sock = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    tree.warm()
    received = wire.receive(sock)
    if received is None:
        return
    zygote = Zygote(sock, received[0])
    try:
        zygote.prepare()
    except OSError as error:
        wire.send(sock, {"id": 0, "error": str(error), "errno": error.errno or 0})
        return
    wire.send(sock, {"id": 0})
    with contextlib.suppress(ConnectionError):
        zygote.serve()
