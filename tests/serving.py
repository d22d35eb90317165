"""Processes with a sandbox each, for tests of what several of them share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pier.image.model import Image

SERVE = """\
import asyncio, sys
from pathlib import Path
from pier.image.model import Image, ImageConfig
from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend

async def main():
    image = Image("test", "sha256:" + "b" * 64, (Path(sys.argv[1]),), ImageConfig())
    with Lease() as lease:
        async with open_backend("docker", lease) as backend, await backend.start(SandboxSpec(image)) as sandbox:
            await sandbox.spawn(["sleep", "600"])
            while line := await asyncio.to_thread(sys.stdin.readline):
                print((await sandbox.exec(line)).text, end="", flush=True)

asyncio.run(main())
"""


@contextmanager
def serving(image: Image) -> Iterator[subprocess.Popen[str]]:
    """A process of its own with one sandbox, in which it executes each line that it gets."""
    command = [sys.executable, "-c", SERVE, str(image.layers[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def ask(running: subprocess.Popen[str], line: str) -> str:
    """The first line of what a command there says."""
    assert running.stdin is not None and running.stdout is not None
    running.stdin.write(f"{line}\n")
    running.stdin.flush()
    return running.stdout.readline()
