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
"""The phases of a trial, in order. In a task with steps, `health` to `verify` come once for each step."""

OnPhase = Callable[[Phase], None]


Accept = Callable[[Sandbox, int], Awaitable[str | None]]
"""Looks at what an agent wrote, after each of its runs, which are counted from 0. None accepts it; a text is the
instruction to run the agent again with; `AgentError` rejects it for good."""


def user_text(user: str | int | None) -> str | None:
    """A user of a task's file, which may be a number, as sandboxes take it."""
    return None if user is None else str(user)


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """Where the trial runs. `image` replaces the task's own image; `network` replaces the baseline policy. `mounts` are
    those of the settings and others. `hidden` are directories of this machine that no sandbox may see, in addition to
    the trial's and its task's own. `snapshot` is an earlier sandbox, whose files the agent's sandbox begins with; what
    the task would bring or set up is there already. `keep`: see `SandboxSpec`."""

    settings: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    image: str | None = None
    network: NetworkPolicy | None = None
    mounts: tuple[Mount, ...] = ()
    hidden: tuple[Path, ...] = ()
    snapshot: Image | None = None
    keep: Path | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that are added to the baseline policy."""
        return tuple(self.settings.extra_allowed_hosts)

    @property
    def limits(self) -> Limits:
        """The limits that replace those of the task."""
        asked = self.settings
        memory, disk = (
            None if megabytes is None else megabytes << 20
            for megabytes in (asked.override_memory_mb, asked.override_storage_mb)
        )
        return Limits(cpus=asked.override_cpus, memory=memory, disk=disk, processes=asked.override_processes)


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One trial: one agent, one task, one attempt. `directory` is the trial's own; it is made if missing and must be
    empty."""

    name: str
    task: Task
    directory: Path
    agent: AgentConfig = field(default_factory=AgentConfig)
    """`env` may hold `${NAME}` templates, which are filled right before use and stay templates on disk; templates in
    other settings are filled already."""
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    sandbox: SandboxChoice = field(default_factory=SandboxChoice)
    multipliers: Mapping[str, float | None] = field(default_factory=dict)
    """Factors for the clocks, by their names in `MULTIPLIERS`."""
    attempt: int = 1
    job_id: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    extra_instructions: tuple[str, ...] = ()
    keep_state: bool = False
    """Keep what the agent left behind, so that it can be graded again (`pier.trial.collect`)."""
    secrets: tuple[str, ...] = ()
    """Values that may stand in no file, in addition to those of variables whose name looks secret."""
    policy: Upstream | None = None
    """The upstream that replaces the model's provider: a callable, servers, a provider."""
    accept: Accept | None = None
    """Checks the agent's output before the trial goes on; None takes whatever it is."""
    recorded: bool = True
    """Whether the trial's directory is kept: the recording of the model calls, the trajectory, logs, artifacts and the
    result. Else nothing is written but the artifacts that a verifier's own sandbox gets."""
    on_sandbox: Callable[[Sandbox], None] | None = None
    """Is called with the agent's sandbox when it runs."""
    on_generation: Callable[[str | None, Generation], None] | None = None
    """Is called with each model call when it is over, and the name of its step if the task has steps."""

    def factor(self, phase: Literal["agent", "verifier", "agent_setup", "environment_build"]) -> float:
        """The factor for the clock of a phase: its own, else that of all."""
        own = self.multipliers.get(f"{phase}_{ALL_CLOCKS}")
        return (self.multipliers.get(ALL_CLOCKS) or 1.0) if own is None else own


@dataclass(frozen=True, slots=True)
class TrialServices:
    """The services that trials share: a backend, the images, and the gateway if agents need a model."""

    backend: Backend
    images: TrialImages
    gateway: Gateway | None = None
    pool: Meter | None = None
    """A budget that the trials share."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The variables that templates are filled from."""


_BETWEEN_COLLECTIONS = 10_000
"""Objects that come to be between two looks of the garbage collector, while trials run."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let the garbage collector look less often: trials leave little to collect, and each look goes through what they
    hold. The caller's setting is back at the end; one that is higher, or off, stays."""
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
    """A backend with its lease and images, at most `builds` of which are built at once. What dead owners left is swept
    first. A backend that cannot be reached is an error here, and not in each trial."""
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(Lease(label=label))
        opened = await stack.enter_async_context(open_backend(backend, lease, options or {}))
        await opened.capabilities()
        await sweep(dict.fromkeys(opened.kinds, opened.destroy))
        images = open_images(opened, builds=builds)
        stack.push_async_callback(images.close)
        stack.enter_context(fewer_collections())
        yield TrialServices(backend=opened, images=images)
