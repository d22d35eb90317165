"""The inputs of a trial (`TrialSpec`) and the services that trials share (`TrialServices`)."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pier.image.model import Image
from pier.lease import Lease, sweep
from pier.network.policy import NetworkPolicy
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Limits, Mount, Sandbox
from pier.task import Task
from pier.task.model import Artifact
from pier.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
from pier.trial.images import open_images
from pier.trial.result import ALL_CLOCKS

if TYPE_CHECKING:
    from pier.gateway import Gateway, Meter
    from pier.gateway.policy import Upstream
    from pier.trajectory.calls import Generation
    from pier.trial.images import TrialImages


Phase = Literal["prepare", "start", "health", "setup", "agent", "collect", "verify", "seal"]
"""The phases of a trial, in order. `health` to `verify` are repeated for each step."""

OnPhase = Callable[[Phase], None]

Accept = Callable[[Sandbox, int], Awaitable[str | None]]
"""Checks an agent's output after each of its runs, numbered from 0. It returns None to accept the output, or the
instruction of another run; `AgentError` rejects the output."""


def user_text(user: str | int | None) -> str | None:
    """A user of a task's file, which may be a number, as text."""
    return None if user is None else str(user)


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """The sandbox of a trial. `image` replaces the task's image, `network` its baseline policy. `mounts` include those
    of the settings. `hidden` are directories of this machine that no sandbox may see, besides the trial's and the
    task's. `snapshot` has the files of an earlier sandbox, with the task's files and set-up. `keep`: see
    `SandboxSpec`."""

    settings: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    image: str | None = None
    network: NetworkPolicy | None = None
    mounts: tuple[Mount, ...] = ()
    hidden: tuple[Path, ...] = ()
    snapshot: Image | None = None
    keep: Path | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in addition to the baseline policy."""
        return tuple(self.settings.extra_allowed_hosts)

    @property
    def limits(self) -> Limits:
        """The limits that replace those of the task."""
        settings = self.settings
        memory, disk = (
            None if megabytes is None else megabytes << 20
            for megabytes in (settings.override_memory_mb, settings.override_storage_mb)
        )
        return Limits(cpus=settings.override_cpus, memory=memory, disk=disk, processes=settings.override_processes)


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One attempt of one agent at one task. `directory` is created if it is missing, and must be empty."""

    name: str
    task: Task
    directory: Path
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Templates (`${NAME}`) in `env` are filled right before use and stay templates on disk; those in other settings
    are filled already."""
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    sandbox: SandboxChoice = field(default_factory=SandboxChoice)
    multipliers: Mapping[str, float | None] = field(default_factory=dict)
    """Factors for time limits, by their names in `MULTIPLIERS`."""
    attempt: int = 1
    job_id: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    extra_instructions: tuple[str, ...] = ()
    keep_state: bool = False
    """Whether to keep the sandbox's state, so that it can be graded again (`pier.trial.collect`)."""
    secrets: tuple[str, ...] = ()
    """Values to remove from all files, in addition to those of variables whose name looks secret."""
    policy: Upstream | None = None
    """The upstream that replaces the model's provider: a callable, servers, a provider."""
    accept: Accept | None = None
    """Checks the agent's output; None accepts any."""
    recorded: bool = True
    """Whether to write the trial's directory: recording, trajectory, logs, artifacts and result. Else only artifacts
    for a separate verifier are written."""
    on_sandbox: Callable[[Sandbox], None] | None = None
    """Receives the agent's sandbox once it runs."""
    on_generation: Callable[[str | None, Generation], None] | None = None
    """Receives each finished model call, with the name of its step if the task has steps."""

    def factor(self, phase: Literal["agent", "verifier", "agent_setup", "environment_build"]) -> float:
        """The factor for a time limit: its own, else the general one."""
        own = self.multipliers.get(f"{phase}_{ALL_CLOCKS}")
        return (self.multipliers.get(ALL_CLOCKS) or 1.0) if own is None else own


@dataclass(frozen=True, slots=True)
class TrialServices:
    """The services that trials share: a backend, the images, and a gateway if agents need a model."""

    backend: Backend
    images: TrialImages
    gateway: Gateway | None = None
    pool: Meter | None = None
    """The shared budget of the trials."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Variables for templates."""


_BETWEEN_COLLECTIONS = 10_000
"""Threshold of the garbage collector while trials run, in allocated objects."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Run the garbage collector less often during the block: trials create little garbage, and each collection scans
    their data. A higher threshold or a disabled collector is left alone."""
    before = gc.get_threshold()
    if not 0 < before[0] < _BETWEEN_COLLECTIONS:
        yield
        return
    gc.set_threshold(_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@asynccontextmanager
async def open_services(
    backend: str = "local", *, label: str = "trials", options: Mapping[str, Any] | None = None, builds: int = 2
) -> AsyncIterator[TrialServices]:
    """Open a backend with its lease and images, at most `builds` of which are built at once. Resources of dead owners
    are swept first. An unreachable backend fails here instead of in each trial."""
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(Lease(label=label))
        opened = await stack.enter_async_context(open_backend(backend, lease, options or {}))
        await opened.capabilities()
        await sweep(dict.fromkeys(opened.kinds, opened.destroy))
        images = open_images(opened, builds=builds)
        stack.push_async_callback(images.close)
        stack.enter_context(fewer_collections())
        yield TrialServices(backend=opened, images=images)
