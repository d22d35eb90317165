"""A Docker engine of the tests' own: its data, socket and containerd are below one directory and end with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    socket: Path
    directory: Path
    pid: int

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def docker(self, *args: str, stdin: bytes | None = None) -> str:
        """Run the engine's own client against it."""
        done = subprocess.run(
            ["docker", "--host", self.url, *args], input=stdin, capture_output=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def processes(self, container: str) -> str:
        """What runs in a container; nothing if it is not running."""
        command = ["docker", "--host", self.url, "top", container]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False).stdout

    def containers(self) -> list[str]:
        return self.docker("ps", "-aq").split()


def missing() -> str | None:
    """Why no engine can run here, or None."""
    if os.geteuid() != 0:
        return "a Docker engine needs root"
    if shutil.which("dockerd") is None:
        return "dockerd is not installed (apt-get install docker.io)"
    return None


@contextmanager
def engine(*options: str) -> Iterator[Engine]:
    """Start an engine without a bridge and without packet filters; it is killed and its mounts undone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="pier-engine-", dir="/tmp"))
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [
            "dockerd",
            f"--host=unix://{directory}/docker.sock",
            f"--data-root={directory}/data",
            f"--exec-root={directory}/exec",
            f"--pidfile={directory}/pid",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            *options,
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        running = Engine(directory / "docker.sock", directory, process.pid)
        _wait(running, process, directory / "log")
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        log.close()
        _unmount(directory)
        shutil.rmtree(directory, ignore_errors=True)


def _wait(running: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"dockerd ended:\n{log.read_text()[-2000:]}"
        done = subprocess.run(["docker", "--host", running.url, "version"], capture_output=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.2)
    raise AssertionError(f"dockerd did not answer in {START_SECONDS} s:\n{log.read_text()[-2000:]}")


def _unmount(directory: Path) -> None:
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    for target in sorted((row.split()[4] for row in rows if str(directory) in row), reverse=True):
        subprocess.run(["umount", "-l", target], capture_output=True, check=False)
