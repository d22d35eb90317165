"""Workspaces for tests: `pier` as a user types it, also in a real pseudo-terminal, and an end for every supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.workspace.state import RUNNING
from tests.busybox import import_busybox
from tests.engine import engine, missing
from tests.job_tasks import PATIENCE, PIER

_ESCAPES = re.compile(r"\x1b\[[0-9;?<>=]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b.")


GIVEN = os.environ.get("PIER_TEST_ENGINE", "")
"""An engine that a plain user may use."""
BACKENDS = [
    pytest.param("local", marks=pytest.mark.plain),
    pytest.param(
        "docker",
        marks=[
            pytest.mark.docker,
            pytest.mark.plain,
            pytest.mark.skipif(missing() is not None and not GIVEN, reason=str(missing())),
        ],
    ),
]


@pytest.fixture(scope="module")
def docker() -> Iterator[str]:
    """The address of an engine."""
    if GIVEN:
        yield GIVEN
        return
    with engine() as running:
        yield running.url
        assert running.containers() == []


@pytest.fixture
def backend(request: pytest.FixtureRequest, pier_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend that has the image `test/busybox`."""
    if request.param == "docker":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker"))
    import_busybox(tmp_path)
    return request.param


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *args: str, cwd: Path, rows: int = 30, columns: int = 100) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(PIER[0], [*PIER, *args], {**os.environ, "TERM": "xterm-256color"})
        self.resize(rows, columns)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, wanted: str, *, press: str = "") -> None:
        """Wait until something is on the screen, and forget all up to it; `press` is typed every two seconds."""
        deadline = time.monotonic() + PATIENCE
        pressed = time.monotonic()
        while wanted not in self.text:
            if press and time.monotonic() - pressed > 2:
                self.type(press)
                pressed = time.monotonic()
            assert time.monotonic() < deadline, f"{wanted!r} did not come: {self.text[-2000:]}"
            assert self._read(), f"ended before {wanted!r} came: {self.text[-2000:]}"
        self.text = self.text[self.text.index(wanted) + len(wanted) :]

    def code(self) -> int:
        """Wait for the end; the exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.text += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)


def states(home: Path) -> list[Path]:
    return [path for path in home.glob("workspaces/*") if path.is_dir()]


def supervisor(root: Path) -> int:
    """The process that holds a workspace."""
    rows = json.loads(subprocess.run([*PIER, "list", "--json"], capture_output=True, check=True).stdout)
    (pid,) = (row["pid"] for row in rows if row["workspace"] == str(root.resolve()))
    return pid


def kill_supervisor(root: Path) -> None:
    """Kill it as a crash or a reboot would."""
    pid = supervisor(root)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while _is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def stop_all(home: Path) -> None:
    """Stop the supervisors of all workspaces of a test, whatever state they are in, and give up what they kept."""
    for state in states(home):
        with contextlib.suppress(OSError, ValueError, KeyError):
            root = json.loads((state / "link.json").read_text())["path"]
            subprocess.run([*PIER, "stop", "-d", root], capture_output=True, timeout=PATIENCE, check=False)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes()
            mine = f"PIER_HOME={home}".encode() in (path / "environ").read_bytes().split(b"\0")
            if b"pier.workspace.supervisor" in command and mine:
                os.kill(int(path.name), signal.SIGTERM)
                deadline = time.monotonic() + 30
                while _is_alive(int(path.name)) and time.monotonic() < deadline:
                    time.sleep(0.05)
    if kept := [state / RUNNING for state in states(home) if (state / RUNNING).exists()]:
        for mark in kept:
            mark.unlink()
        subprocess.run([*PIER, "gc"], capture_output=True, timeout=PATIENCE, check=False)
