"""Client side of `pier exec`: connects this terminal to a command in a running workspace.

Only small modules of the standard library are imported before the command runs; `pier.__main__` calls `run_quickly`
before it loads the command line.
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
"""Variables that are passed to the command."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)


def run_quickly(words: Sequence[str]) -> int | None:
    """Run the command of `pier exec WORDS` and return its exit code; None if there are options or the workspace is not
    running, which the full command line handles."""
    command = words[1:] if words[:1] == ["--"] else words
    if not command or (command is words and command[0].startswith("-")):
        return None
    place = find_place()
    if place is None or not os.path.exists(f"{place.state}/{frames.SOCKET}"):
        return None
    return run(place, command)


def _request(place: WorkspacePlace | Workspace, command: Sequence[str]) -> dict[str, Any]:
    """Return the request to run a command, in the user's current directory if it is inside the workspace."""
    below = os.path.relpath(os.path.realpath("."), place.root)
    inside = below != "." and below.split("/")[0] != ".."
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {"op": "exec", "argv": list(command), "cwd": below if inside else "", "env": env}


def run(place: WorkspacePlace | Workspace, command: Sequence[str], log: str | None = None) -> int:
    """Run a command with this process's streams and return its exit code. With `log`, the redacted output goes to that
    file."""
    _open_streams()
    tty = os.isatty(0) and os.isatty(1)
    request = _request(place, command) | {"tty": tty, "size": terminal_size(), "log": log}
    with connect(place) as sock:
        answer = relay(sock, request, tty=tty)
    for note in answer["notes"]:
        sys.stderr.write(f"pier: {note}\n")
    if answer["missing"]:
        sys.stderr.write(f"hint: add it to this workspace: pier start --agent {answer['missing']}\n")
    return answer["exit_code"]


def relay(sock: socket.socket, request: dict[str, Any], *, tty: bool, stdin: bool = True) -> dict[str, Any]:
    """Send a request to run a command over a control socket, relay its streams until it ends, and return the answer."""
    before = termios.tcgetattr(0) if tty and os.isatty(0) else None
    try:
        if before is not None:
            import tty as terminal

            terminal.setraw(0, termios.TCSADRAIN)
        return _Relay(sock, request, stdin).run(resizes=tty)
    finally:
        if before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def _open_streams() -> None:
    """Open /dev/null in place of closed streams, so that the connection does not get their descriptors."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def terminal_size() -> tuple[int, int]:
    """Return the rows and columns of this terminal."""
    try:
        size = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    return size.lines or 24, size.columns or 80


class _Relay:
    """Forwards stdin, signals and terminal sizes to a supervisor, and output back, until the final answer. Neither
    direction blocks the other."""

    def __init__(self, sock: socket.socket, request: dict[str, Any], stdin: bool) -> None:
        self._sock = sock
        self._received = bytearray()
        self._unsent = bytearray(frames.pack(frames.REQUEST, json.dumps(request).encode()))
        self._stdin_open = stdin
        self._unacknowledged = 0
        self._signal_reader, self._signal_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self, *, resizes: bool) -> dict[str, Any]:
        self._sock.setblocking(False)
        signal.set_wakeup_fd(self._signal_writer, warn_on_full_buffer=False)
        numbers = _SIGNALS if resizes else _SIGNALS[:-1]
        before = [(number, signal.signal(number, lambda *_: None)) for number in numbers]
        try:
            while (answer := self._step()) is None:
                pass
            return answer
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before:
                signal.signal(number, handler)
            os.close(self._signal_reader)
            os.close(self._signal_writer)

    def _step(self) -> dict[str, Any] | None:
        poll, sock = select.poll(), self._sock.fileno()
        poll.register(self._signal_reader, select.POLLIN)
        poll.register(sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if self._stdin_open and not self._unsent and self._unacknowledged < frames.WINDOW:
            poll.register(0, select.POLLIN)
        for fd, events in poll.poll():
            if fd == self._signal_reader:
                self._forward_signals()
            elif fd == 0:
                self._forward_input()
            else:
                if events & select.POLLOUT:
                    self._send()
                if events & ~select.POLLOUT and (answer := self._receive()) is not None:
                    return answer
        return None

    def _forward_signals(self) -> None:
        for number in os.read(self._signal_reader, _CHUNK):
            if number == signal.SIGWINCH:
                self._unsent += frames.pack(frames.RESIZE, struct.pack("!HH", *terminal_size()))
            elif number in _SIGNALS:
                self._unsent += frames.pack(frames.SIGNAL, bytes([number]))

    def _forward_input(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._stdin_open = bool(data)
        self._unacknowledged += 1
        self._unsent += frames.pack(frames.STDIN, data) if data else frames.pack(frames.STDIN_END)
        self._send()

    def _send(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the supervisor is gone; its last frames can still be read

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
                self._unacknowledged -= 1
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
    """Replace this process by the command, in host mode; return the exit code if that fails."""
    try:
        os.execvpe(command[0], list(command), {**os.environ, **host_env(workspace)})
    except OSError as error:
        sys.stderr.write(f"pier: cannot run {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def host_env(workspace: Workspace) -> dict[str, str]:
    """Return the variables of a command in host mode."""
    workspace.check_known()
    return {**workspace.environment(), "TASK_WORKSPACE": str(workspace.root)}


def detach(workspace: Workspace, command: Sequence[str]) -> str:
    """Start a background command and return its id."""
    from pier.workspace import background

    return background.start(workspace, command, {**os.environ, **(host_env(workspace) if workspace.is_host else {})})


def _main(root: str, log: str, *command: str) -> int:
    """Run a background command of the workspace in `root`."""
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
