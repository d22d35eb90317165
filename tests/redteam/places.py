"""Where red-team trials run: on the local backend, and in containers of a real Docker engine."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from pier.trial.spec import open_services
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.trial_runs import Bench

IMAGE = "test/bash"
"""An image of busybox and this machine's bash with its libraries."""

local = pytest.param("local", marks=pytest.mark.plain)
docker = pytest.param(
    "docker", marks=[pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
)
everywhere = pytest.mark.parametrize("place", [local, docker])
"""Run a test on both backends; it takes the name as `place` and opens `open_place(place, ...)`."""
_ENGINE = [
    pytest.param("docker", "", marks=docker.marks, id="docker"),
    pytest.param("docker", "1", marks=docker.marks, id="helper"),
]
by_root = pytest.mark.parametrize("place", ["local", docker])
"""As `everywhere`, for claims that do not depend on the user: plain users do not test them again."""
anywhere = pytest.mark.parametrize("place", ["local"])
"""Run a test on one backend, for claims about the gateway that depend neither on the backend nor on the user."""
by_engine = pytest.mark.parametrize(("place", "helper"), _ENGINE)
"""Run a test in containers that pier enters, and the helper: the test sets `PIER_DOCKER_HELPER` to `helper`."""
everywhere_and_by_helper = pytest.mark.parametrize(
    ("place", "helper"), [pytest.param("local", "", marks=local.marks, id="local"), *_ENGINE]
)
"""As `by_engine`, and on the local backend."""


@contextmanager
def bash_engine(directory: Path, *options: str, **more: str) -> Iterator[Engine]:
    """An engine that has `IMAGE`. `directory` is scratch space for making it; the rest as for `engine`."""
    layer = busybox_image(directory / "image").layers[0]
    told = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
    for path in ["/bin/bash", *(part for part in told.split() if part.startswith("/"))]:
        target = layer / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(Path(path).resolve(), target)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(layer, ".")
    with engine(*options, **more) as running:
        running.docker("import", "-", IMAGE, stdin=packed.getvalue())
        yield running
        assert running.containers() == []


@asynccontextmanager
async def open_place(place: str, root: Path) -> AsyncIterator[Bench]:
    """A bench on a backend. On `docker`, `DOCKER_HOST` must name the engine of `bash_engine`."""
    async with open_services(place, label="test") as services:
        yield Bench(services, root, image=IMAGE if place == "docker" else "host")
