"""Tasks of several services for tests, and trials of them on a real engine."""

from __future__ import annotations

import asyncio
import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import Sandbox, SandboxSpec, open_backend
from pier.sandbox.compose import Composition
from pier.sandbox.compose.read import read_compose
from pier.task import Task
from pier.trial.spec import TrialServices, open_services
from tests.busybox import add_program, busybox_image
from tests.engine import Engine
from tests.trial_runs import Bench, write_task

IMAGE = "test/bash"

TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 120
[environment]
network_mode = "no-network"
"""


def bash_image(directory: Path) -> Image:
    """Busybox and this machine's bash and tar with their libraries, by which busybox finds names too."""
    image = busybox_image(directory)
    for program in ("/bin/bash", "/usr/bin/tar"):
        add_program(image.layers[0], program)
    return image


def import_bash_image(running: Engine, directory: Path) -> None:
    """Give an engine the image `test/bash`."""
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(bash_image(directory).layers[0], ".")
    running.docker("import", "--change", "ENV GREETING=hello", "-", IMAGE, stdin=packed.getvalue())


def compose_task(root: Path, compose: str, *, toml: str = TOML, **more: str) -> Task:
    """A task whose environment is a compose file; `{image}` in it is the tests' image."""
    more["environment__docker-compose.yaml"] = compose.replace("{image}", IMAGE)
    return write_task(root, toml=toml, **more)


@asynccontextmanager
async def docker_bench(root: Path, environ: Mapping[str, str] | None = None) -> AsyncIterator[Bench]:
    """Trials on the engine at `$DOCKER_HOST`."""
    async with open_services("docker", label="test") as services:
        yield Bench(TrialServices(services.backend, services.images, environ=environ or {}), root, image=None)


def network_log(trial: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (trial / "network.jsonl").read_text().splitlines()]


@dataclass
class Services:
    """Services that run without a trial."""

    main: Sandbox
    printed: dict[str, bytes]

    def at(self, name: str) -> Sandbox:
        found = self.main.service(name)
        assert found is not None, name
        return found

    async def told(self, name: str, command: str) -> str:
        """What a command in a service prints."""
        result = await self.at(name).exec(command, timeout=60)
        return (result.stdout + result.stderr).decode().strip()

    def log(self, name: str) -> str:
        return self.printed.get(name, b"").decode()

    async def until_logged(self, name: str, text: str) -> str:
        """Wait until a service has printed `text`; all that it printed."""
        async with asyncio.timeout(60):
            while text not in self.log(name):
                await asyncio.sleep(0.05)
        return self.log(name)


@asynccontextmanager
async def running_services(directory: Path, text: str, image: Image, **spec: Any) -> AsyncIterator[Services]:
    """The services of a compose file, all of one image, on the engine at `$DOCKER_HOST`."""
    path = directory / "docker-compose.yaml"
    path.write_text(text)
    compose = read_compose(path, {})
    printed: dict[str, bytes] = {}

    def note(name: str, data: bytes) -> None:
        printed[name] = printed.get(name, b"") + data

    wanted = Composition(compose, dict.fromkeys(compose.services, image), note)
    with Lease() as lease:
        async with (
            open_backend("docker", lease) as backend,
            await backend.start(SandboxSpec(image, compose=wanted, **spec)) as main,
        ):
            yield Services(main, printed)
        assert lease.held() == []
