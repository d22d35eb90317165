"""Jobs and trials for Python programs: `pier.Job` and `pier.Trial`. Everything else in `pier` is used as it is."""

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
from pier.record.reader import Recording
from pier.record.reader import read as read_recording
from pier.tree import Tree
from pier.trial.result import TrialResult, read_result


@dataclass(frozen=True, slots=True)
class Trial:
    """One try of one agent on one task, as it stands in its directory, which may be of a job that still runs."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def is_finished(self) -> bool:
        return (self.directory / "result.json").is_file()

    @property
    def result(self) -> TrialResult:
        """All that is known of a finished trial. `JobError` with code `unfinished` if it is not."""
        return read_result(self.directory)

    @property
    def rewards(self) -> dict[str, float | int] | None:
        """The verdict by name; None if there is none, which is not zero."""
        return self.result.rewards

    @property
    def reward(self) -> float | None:
        """The reward of that name, else the only one; None if there is none, which is not zero."""
        return main_reward(self.rewards)

    @property
    def trajectory(self) -> dict[str, Any] | None:
        """The agent's steps (ATIF); None if it has none, or left something else than a file there."""
        name = "agent/trajectory.json"
        with Tree(self.directory.resolve()) as tree:
            found = tree.find(name)
            return json.loads(tree.read(name, found.size)) if found and found.kind == "file" else None

    @property
    def recording(self) -> Recording:
        """The model calls of the agent."""
        return read_recording(self.directory)


class Job:
    """Agents on tasks. `run` runs it, or continues it if its directory is there; `trials` are its results."""

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
        """A job of one agent, with the settings that most jobs need; a `JobConfig` has all of them. `tasks` are tasks,
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
        """A job that was run before, or is running, to read its results."""
        from pier.job.directory import read_config

        Ledger.read(Path(directory))
        job = cls(read_config(Path(directory))[0])
        job._directory = Path(directory)
        return job

    async def run(self, *, yes: bool = False) -> Job:
        """Run every trial that has no result yet. `yes` lets tasks have the variables of yours that they ask for.
        Errors of trials are in their results; what keeps the whole job from running is raised."""
        self._directory = await run_quietly(self.config, self.env, yes=yes)
        return self

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise JobError("this job was not run yet, so it has no directory", code="not-run")
        return self._directory

    @property
    def trials(self) -> list[Trial]:
        """All trials of the plan, finished or not."""
        return [Trial(self.directory / trial.name) for trial in Ledger.read(self.directory).plan.trials]

    @property
    def result(self) -> dict[str, Any]:
        """The job's `result.json`: counts, rewards, pass@k, tokens and cost of each agent."""
        return json.loads((self.directory / "result.json").read_text())
