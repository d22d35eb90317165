"""A podman of the tests' own, which speaks Docker's API: its storage and socket are below one directory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60


@dataclass
class Podman:
    """A podman below one directory."""

    directory: Path

    @property
    def url(self) -> str:
        return f"unix://{self.directory}/podman.sock"

    def command(self, *args: str) -> list[str]:
        places = ["--root", str(self.directory / "root"), "--runroot", str(self.directory / "run")]
        return ["podman", *places, "--storage-driver=vfs", "--cgroup-manager=cgroupfs", *args]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "CONTAINERS_CONF": str(self.directory / "containers.conf")}

    def run(self, *args: str) -> str:
        done = subprocess.run(self.command(*args), env=self.env, capture_output=True, text=True, check=True)
        return done.stdout.strip()


def podman_missing() -> str | None:
    """Why no podman can run here, or None."""
    if os.geteuid() != 0:
        return "this podman is root's"
    return None if shutil.which("podman") else "podman is not installed (apt-get install podman)"


@contextmanager
def podman() -> Iterator[Podman]:
    """Serve Docker's API until the end; nothing of it is left then."""
    running = Podman(Path(tempfile.mkdtemp(prefix="pier-engine-", dir="/tmp")))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = f'default_ulimits = ["nofile={most}:{most}", "nproc=1000:1000"]\n'
    (running.directory / "containers.conf").write_text(f"[containers]\n{limits}")
    with (running.directory / "log").open("wb") as log:
        command = running.command("system", "service", "--time=0", running.url)
        process = subprocess.Popen(command, env=running.env, cwd=running.directory, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (running.directory / "podman.sock").is_socket():
            assert process.poll() is None and time.monotonic() < deadline, (running.directory / "log").read_text()
            time.sleep(0.05)
        yield running
    finally:
        try:
            running.run("rm", "--all", "--force", "--time=0")
        finally:
            process.terminate()
            process.wait(START_SECONDS)
        shutil.rmtree(running.directory)
