"""`pier exec` on the client side: this terminal and a command in a running workspace.

Nothing but the standard library's smallest parts is imported before the command runs; `pier.__main__` calls
`run_quickly` before it loads the command line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import termios

from pier import frames
from pier.workspace.client import WorkspacePlace, connect, ended, error_of, find_place

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import Any

    from pier.workspace.workspace import Workspace

_CHUNK = 1 << 16
_PASSED = ("TERM", "COLORTERM", "LANG", "LC_ALL")
"""Variables of this terminal that a command inside gets."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)


def run_quickly(words: Sequence[str]) -> int | None:
    """Run the command of `pier exec WORDS` if it has no options and its workspace runs; its exit code. None if the
    whole command line must look at it."""
    command = words[1:] if words[:1] == ["--"] else words
    if not command or (command is words and command[0].startswith("-")):
        return None
    place = find_place()
    if place is None or not os.path.exists(f"{place.state}/{frames.SOCKET}"):
        return None
    return run(place, command)


def _request(place: WorkspacePlace | Workspace, command: Sequence[str]) -> dict[str, Any]:
    """The request to run a command here: in the directory that the user is in, if the workspace has it."""
    below = os.path.relpath(os.path.realpath("."), place.root)
    inside = below != "." and below.split("/")[0] != ".."
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {"op": "exec", "argv": list(command), "cwd": below if inside else "", "env": env}


def run(place: WorkspacePlace | Workspace, command: Sequence[str], log: str | None = None) -> int:
    """Run a command with this process's streams; its exit code. With a `log` its output goes there, without secrets."""
    _open_streams()
    tty = os.isatty(0) and os.isatty(1)
    asked = _request(place, command) | {"tty": tty, "size": terminal_size(), "log": log}
    with connect(place) as sock:
        answer = relay(sock, asked, tty=tty)
    for note in answer["notes"]:
        sys.stderr.write(f"pier: {note}\n")
    if answer["missing"]:
        sys.stderr.write(f"hint: pier start --agent {answer['missing']} adds it to this workspace\n")
    return answer["exit_code"]


def relay(sock: socket.socket, asked: dict[str, Any], *, tty: bool, stdin: bool = True) -> dict[str, Any]:
    """Ask for a command at a control socket, and be its terminal until its end; the answer."""
    before = termios.tcgetattr(0) if tty and os.isatty(0) else None
    try:
        if before is not None:
            _set_raw()
        return _Relay(sock, asked, stdin).run(resizes=tty)
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _open_streams() -> None:
    """Open /dev/null in place of closed streams, so that the connection does not get their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def terminal_size() -> tuple[int, int]:
    """Rows and columns of this terminal."""
    try:
        found = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    return found.lines or 24, found.columns or 80


def _set_raw() -> None:
    import tty

    tty.setraw(0, termios.TCSADRAIN)


class _Relay:
    """Passes stdin, signals and sizes to a supervisor and output back, until the answer. It never waits for one side
    while the other has something to say."""

    def __init__(self, sock: socket.socket, asked: dict[str, Any], stdin: bool) -> None:
        self._sock = sock
        self._received = bytearray()
        self._unsent = bytearray(frames.pack(frames.REQUEST, json.dumps(asked).encode()))
        self._stdin_open = stdin
        self._not_taken = 0
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self, *, resizes: bool) -> dict[str, Any]:
        self._sock.setblocking(False)
        wanted = _SIGNALS if resizes else _SIGNALS[:-1]
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        before = [(number, signal.signal(number, lambda *_: None)) for number in wanted]
        try:
            while (answer := self._step()) is None:
                pass
            return answer
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before:
                signal.signal(number, handler)
            os.close(self._woken)
            os.close(self._waker)

    def _step(self) -> dict[str, Any] | None:
        poll, sock = select.poll(), self._sock.fileno()
        poll.register(self._woken, select.POLLIN)
        poll.register(sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if self._stdin_open and not self._unsent and self._not_taken < frames.WINDOW:
            poll.register(0, select.POLLIN)
        for fd, events in poll.poll():
            if fd == self._woken:
                self._pass_signals()
            elif fd == 0:
                self._pass_input()
            else:
                if events & select.POLLOUT:
                    self._send()
                if events & ~select.POLLOUT and (answer := self._receive()) is not None:
                    return answer
        return None

    def _pass_signals(self) -> None:
        for number in os.read(self._woken, _CHUNK):
            if number == signal.SIGWINCH:
                self._unsent += frames.pack(frames.RESIZE, struct.pack("!HH", *terminal_size()))
            elif number in _SIGNALS:
                self._unsent += frames.pack(frames.SIGNAL, bytes([number]))

    def _pass_input(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._stdin_open = bool(data)
        self._not_taken += 1
        self._unsent += frames.pack(frames.STDIN, data) if data else frames.pack(frames.STDIN_END)
        self._send()

    def _send(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # what the supervisor said before it went is still to be read

    def _receive(self) -> dict[str, Any] | None:
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            raise ended()
        self._received += data
        for kind, payload in frames.unpack(self._received):
            if kind in (frames.STDOUT, frames.STDERR):
                write(1 if kind == frames.STDOUT else 2, payload)
            elif kind == frames.TAKEN:
                self._not_taken -= 1
            elif kind == frames.EXIT:
                return json.loads(payload)
            elif kind == frames.ERROR:
                raise error_of(payload)
        return None


def write(fd: int, data: bytes) -> None:
    """Write all of `data`, also to a terminal that another program has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def become(workspace: Workspace, command: Sequence[str]) -> int:
    """In host mode the command takes this process's place; the exit code if it cannot."""
    try:
        os.execvpe(command[0], list(command), {**os.environ, **host_env(workspace)})
    except OSError as error:
        sys.stderr.write(f"pier: cannot run {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def host_env(workspace: Workspace) -> dict[str, str]:
    """The variables of a command in host mode."""
    workspace.check_known()
    return {**workspace.environment(), "TASK_WORKSPACE": str(workspace.root)}


def detach(workspace: Workspace, command: Sequence[str]) -> str:
    """Start a command in the background; its id."""
    from pier.workspace import background

    return background.start(workspace, command, {**os.environ, **(host_env(workspace) if workspace.is_host else {})})


def _main(root: str, log: str, *command: str) -> int:
    """Run a command in the background of the workspace in `root`."""
    from pathlib import Path

    from pier.cli.main import explain_failure
    from pier.errors import PierError
    from pier.workspace.workspace import Workspace

    try:
        return run(Workspace.open(Path(root)), command, log)
    except PierError as error:
        return explain_failure(error)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
