"""Tasks written on the spot and trials of them on the real local backend, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pier.task import Task, load_task
from pier.trial.config import AgentConfig
from pier.trial.result import TrialResult
from pier.trial.run import run_trial
from pier.trial.spec import SandboxChoice, TrialServices, TrialSpec, open_services

TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 120
[environment]
workdir = "/app"
network_mode = "no-network"
"""

ON_HOST = SandboxChoice(image="host")
"""For trials that are not run by a `Bench`."""

PASS = "#!/bin/bash\ntest -e /app/done; echo $((! $?)) > /logs/verifier/reward.txt\n"
"""Tests that want the file /app/done."""


def write_task(root: Path, *, toml: str = TOML, solve: str = "touch /app/done", test: str = PASS, **more: str) -> Task:
    """Write a task and read it. `more` are further files, with `__` for each `/` in their paths."""
    content = {"task.toml": toml, "instruction.md": "Do it.\n", "solution/solve.sh": f"#!/bin/bash\n{solve}\n"}
    if test:
        content["tests/test.sh"] = test
    content |= {name.replace("__", "/"): text for name, text in more.items()}
    (root / "environment").mkdir(parents=True)
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(root)


class Bench:
    """Runs trials one after another in directories of their own, in `image` unless a trial says otherwise. Without an
    image each task's own is used."""

    def __init__(self, services: TrialServices, root: Path, image: str | None = "host") -> None:
        self.services = services
        self.root = root
        self.image = image
        self.count = 0

    async def run(self, task: Task, agent: str | AgentConfig = "oracle", **spec: Any) -> TrialResult:
        self.count += 1
        directory = self.root / f"trial-{self.count}"
        choice = AgentConfig(name=agent) if isinstance(agent, str) else agent
        spec.setdefault("sandbox", SandboxChoice(image=self.image))
        return await run_trial(TrialSpec(directory.name, task, directory, choice, **spec), self.services)

    @property
    def last(self) -> Path:
        """The directory of the last trial."""
        return self.root / f"trial-{self.count}"


@asynccontextmanager
async def open_bench(root: Path, environ: Mapping[str, str] | None = None) -> AsyncIterator[Bench]:
    """A bench on the local backend."""
    async with open_services("local", label="test") as services:
        lent = services if environ is None else TrialServices(services.backend, services.images, environ=environ)
        yield Bench(lent, root)


def kinds(result: TrialResult) -> set[str]:
    """The kinds of integrity notes of a result."""
    return {note.kind for note in result.integrity.notes} if result.integrity else set()
