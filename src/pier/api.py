"""Jobs and trials for Python programs: `pier.Job` and `pier.Trial`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import JobError
from pier.figures import main_reward
from pier.job.command import run_quietly
from pier.job.config import AgentConfig, DatasetConfig, EnvironmentConfig, JobConfig
from pier.job.ledger import Ledger
from pier.record.reader import Recording, RecordingTooLarge
from pier.record.reader import read as read_recording
from pier.tree import Tree
from pier.trial.bounded import MEMORY
from pier.trial.result import TrialResult, read_result
from pier.wire.body import count_values, memory_of


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt of an agent at a task, read from its directory. Its job may still be running."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def is_finished(self) -> bool:
        return (self.directory / "result.json").is_file()

    @property
    def result(self) -> TrialResult:
        """The result of a finished trial. Raises `JobError` with code `unfinished` otherwise."""
        return read_result(self.directory)

    @property
    def rewards(self) -> dict[str, float | int] | None:
        """The rewards by name; None without a verdict, which is not zero."""
        return self.result.rewards

    @property
    def reward(self) -> float | None:
        """The reward named `reward`, else the only one; None without a verdict, which is not zero."""
        return main_reward(self.rewards)

    @property
    def trajectory(self) -> dict[str, Any] | None:
        """The agent's steps (ATIF); None if the trajectory is missing or not a regular file. Raises `RecordingTooLarge`
        if parsing it would take more than 2 GiB of memory."""
        name = "agent/trajectory.json"
        with Tree(self.directory.resolve()) as tree:
            entry = tree.find(name)
            if not entry or entry.kind != "file":
                return None
            raw = tree.read(name, entry.size) if entry.size < MEMORY // 5 else None
        if raw is None or memory_of(raw, count_values(raw)) > MEMORY:
            why = f"more than {MEMORY >> 20} MB of memory are needed"
            raise RecordingTooLarge(f"cannot read the recording {self.directory / name}: {why}")
        return json.loads(raw)

    @property
    def recording(self) -> Recording:
        """The agent's model calls."""
        return read_recording(self.directory)


class Job:
    """A set of agents on a set of tasks. `run` runs or resumes it; `trials` are its results."""

    def __init__(self, config: JobConfig, *, env: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.env = dict(os.environ if env is None else env)
        self._directory: Path | None = None

    @classmethod
    def of(
        cls,
        *tasks: str | Path,
        agent: str = "oracle",
        model: str | None = None,
        image: str | None = None,
        backend: str = "local",
        n_attempts: int = 1,
        n_concurrent: int = 4,
        jobs_dir: str | Path = "jobs",
        job_name: str | None = None,
    ) -> Job:
        """Return a job of one agent with the most common settings; `JobConfig` has all of them. `tasks` are tasks,
        directories of tasks, or URL#PATH of a git repository."""
        return cls(
            JobConfig(
                datasets=[DatasetConfig(path=str(path)) for path in tasks],
                agents=[AgentConfig(name=agent, model_name=model)],
                environment=EnvironmentConfig(type=backend),
                image=image,
                n_attempts=n_attempts,
                n_concurrent_trials=n_concurrent,
                jobs_dir=str(jobs_dir),
                job_name=job_name,
            )
        )

    @classmethod
    def open(cls, directory: str | Path) -> Job:
        """Open a running or finished job to read its results."""
        from pier.job.directory import read_config

        Ledger.read(Path(directory))
        job = cls(read_config(Path(directory))[0])
        job._directory = Path(directory)
        return job

    async def run(self, *, yes: bool = False) -> Job:
        """Run every trial that has no result yet. `yes` passes the environment variables that tasks request. Errors of
        trials are in their results; an error that stops the whole job is raised."""
        self._directory = await run_quietly(self.config, self.env, yes=yes)
        return self

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise JobError("this job has no directory: it was not run yet", code="not-run")
        return self._directory

    @property
    def trials(self) -> list[Trial]:
        """All planned trials, finished or not."""
        return [Trial(self.directory / trial.name) for trial in Ledger.read(self.directory).plan.trials]

    @property
    def result(self) -> dict[str, Any]:
        """The contents of `result.json`: counts, rewards, pass@k, tokens and cost of each agent."""
        return json.loads((self.directory / "result.json").read_text())
