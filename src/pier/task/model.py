"""A task as the rest of pier sees it: where it came from, its settings, and its steps in one shape.

A task without `[[steps]]` is a task with one nameless step, so that nothing downstream has two ways to run a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pier.task.config import Agent, Artifact, CollectHook, Environment, Healthcheck, TaskConfig, Verifier, VerifierMode
from pier.task.digest import task_digest
from pier.task.unknown import UnknownKey


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a task came from: a directory, or `git_path` at one commit of a git repository, which `path` holds a copy
    of. `source` names its dataset."""

    path: Path
    source: str | None = None
    git_url: str | None = None
    git_commit: str | None = None
    git_path: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction with its own verdict. Everything a step may leave out is filled in from the task."""

    name: str
    instruction: str
    agent: Agent
    verifier: Verifier
    verifier_mode: VerifierMode
    verifier_environment: VerifierEnvironment
    tests: tuple[Path, ...]
    test_script: str | None
    collect: tuple[CollectHook, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    solution: Path | None = None
    workdir: Path | None = None
    healthcheck: Healthcheck | None = None
    min_reward: float | dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class VerifierEnvironment:
    """What a separate verifier runs in. `context` is the directory with its Dockerfile; None without one. `bundled`:
    its image brings the tests, so none are uploaded."""

    table: Environment
    context: Path | None = None
    bundled: bool = False
    own_table: bool = False
    compose: Path | None = None
    """The file that describes its services."""


@dataclass(frozen=True)
class Task:
    """A task that was read and found whole."""

    path: Path
    name: str
    config: TaskConfig
    steps: tuple[Step, ...]
    origin: Origin
    unknown: tuple[UnknownKey, ...] = ()
    pre_artifacts: Path | None = None
    compose: Path | None = None

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def is_multi_step(self) -> bool:
        return self.config.steps is not None

    @property
    def environment_dir(self) -> Path:
        return self.path / "environment"

    @property
    def dockerfile(self) -> Path | None:
        path = self.environment_dir / "Dockerfile"
        return path if path.is_file() else None

    @cached_property
    def digest(self) -> str:
        """`sha256:<hex>` of the content, as Harbor's packager computes it."""
        return task_digest(self.path)
