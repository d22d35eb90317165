"""A Docker engine of the tests' own: its data, socket and containerd are below one directory and end with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120


@dataclass
class Engine:
    """An engine below one directory."""

    directory: Path
    options: tuple[str, ...]
    before: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.directory / "docker.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Start the engine, again if it ran before, and wait until it answers."""
        own = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        command = ["dockerd", f"--host={self.url}", *(f"--{key}={self.directory / own[key]}" for key in own)]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.before, *command, "--bridge=none", "--iptables=false", "--ip6tables=false", *self.options],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            told = (self.directory / "log").read_text()[-2000:]
            assert self.process.poll() is None, f"dockerd ended:\n{told}"
            assert time.monotonic() < deadline, f"dockerd did not answer in {START_SECONDS} s:\n{told}"
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(START_SECONDS)
            client.connect(str(self.socket))
            client.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in client.recv(100)
        return False

    def kill(self) -> None:
        """Kill the engine as a crash would: its containers are left running."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        # Its containerd dies with it; where nobody collects the dead, its number would pass for one that runs.
        (self.directory / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """End the engine and its containers."""
        if self.process is None:
            return
        # Containers that ignore the signal to stop would hold up the engine's end for ten seconds.
        command = f"docker --host {self.url} ps -q | xargs -r docker --host {self.url} kill"
        subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
        for pid in self._shims():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _shims(self) -> Iterator[int]:
        """What an engine that was killed has left of itself: who holds its containers, and their first processes."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{self.directory}/exec/".encode() in (path / "cmdline").read_bytes():
                    children = (path / "task" / path.name / "children").read_text().split()
                    yield from (int(pid) for pid in (*children, path.name))

    def docker(self, *args: str, stdin: bytes | None = None) -> str:
        """Run the engine's own client against it."""
        done = subprocess.run(
            ["docker", "--host", self.url, *args], input=stdin, capture_output=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def pause(self, container: str) -> None:
        """Pause a container; runc gives up at once when a process is busy in the kernel, so ask until it is done."""
        deadline = time.monotonic() + START_SECONDS
        command = ["docker", "--host", self.url, "pause", container]
        while (done := subprocess.run(command, capture_output=True, timeout=300, check=False)).returncode != 0:
            assert b"unable to freeze" in done.stderr and time.monotonic() < deadline, done.stderr.decode()
            time.sleep(0.1)

    def processes(self, container: str) -> str:
        """What runs in a container; nothing if it is not running."""
        command = ["docker", "--host", self.url, "top", container]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False).stdout

    def containers(self) -> list[str]:
        """All but the helper, which stays for a while in case that somebody needs it again."""
        helpers = set(self.helpers())
        return [found for found in self.docker("ps", "-aq").split() if found not in helpers]

    def helpers(self) -> list[str]:
        return self.docker("ps", "-aq", "--filter", "label=dev.pier.helper").split()

    def wait_for_no_helper(self) -> None:
        """Wait until nobody has needed the helper for a while."""
        deadline = time.monotonic() + START_SECONDS
        while self.helpers():
            assert time.monotonic() < deadline, "a helper that nobody uses does not end"
            time.sleep(0.25)


def missing() -> str | None:
    """Why no engine can run here, or None."""
    if os.geteuid() != 0:
        return "a Docker engine needs root"
    if shutil.which("dockerd") is None:
        return "dockerd is not installed (apt-get install docker.io)"
    return None


@contextmanager
def engine(*options: str, disk: str = "", filesystem: str = "tmpfs", before: tuple[str, ...] = ()) -> Iterator[Engine]:
    """Start an engine without a bridge and without packet filters; it is killed and its mounts undone at the end. With
    `disk`, such as 64m, that is all the space for its data, on a file system of that kind. `before`
    is what runs it."""
    directory = Path(tempfile.mkdtemp(prefix="pier-engine-", dir="/tmp"))
    running = Engine(directory, options, before)
    if any(option.startswith("--userns-remap") for option in options):
        directory.chmod(0o711)
    try:
        if disk:
            _mount(directory, disk, filesystem)
        running.start()
        yield running
    finally:
        running.stop()
        _unmount(directory)
        shutil.rmtree(directory, ignore_errors=True)


def _mount(directory: Path, size: str, filesystem: str) -> None:
    target, image = directory / "data", directory / "disk"
    target.mkdir()
    if filesystem == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", target], check=True)
        return
    subprocess.run(["truncate", "-s", size, image], check=True)
    subprocess.run([f"mkfs.{filesystem}", "-q", image], check=True)
    subprocess.run(["mount", "-t", filesystem, "-o", "loop", image, target], check=True)


def cannot_mount(filesystem: str) -> str | None:
    """Why no file system of that kind can be made here, or None."""
    if shutil.which(f"mkfs.{filesystem}") is None:
        return f"mkfs.{filesystem} is not installed (apt-get install btrfs-progs xfsprogs)"
    known = Path("/proc/filesystems").read_text().split()
    return None if filesystem in known else f"the kernel has no {filesystem}"


def _unmount(directory: Path) -> None:
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    for target in sorted((row.split()[4] for row in rows if str(directory) in row), reverse=True):
        subprocess.run(["umount", "-l", target], capture_output=True, check=False)


def serve_group(group: str) -> None:
    """Run an engine that the users of a group may use, say its address, and end it with the standard input."""
    with engine(f"--group={group}") as running:
        running.directory.chmod(0o755)
        print(running.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve_group(sys.argv[1])
