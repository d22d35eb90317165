"""Runs the tasks of a review as a job, and reads the results back.

The same command resumes an interrupted run. It runs failed reviews again and keeps finished ones, as long as the
reviewed trial, the prompt and the critic are the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pier.errors import JobError, UsageError
from pier.figures import total_cost
from pier.image.model import HOST
from pier.job.command import Show, run_without_report
from pier.job.config import DatasetConfig, JobConfig
from pier.job.runner import TrialSelection
from pier.job.view import JobView, TrialRow
from pier.review.order import REVIEWS, ReviewOrder, ReviewPlan, read_order, run_differs, was_written_here
from pier.review.output import OUTPUT_LIMIT, OUTPUTS, Kind
from pier.review.rubric import ReviewRubric
from pier.review.source import find_result
from pier.task import load_task
from pier.tree import Tree, TreeError
from pier.trial.result import TrialResult
from pier.verifier.changes import ARTIFACTS

DEFAULT_AGENT = "mini-swe-agent"
SMALL_MODEL = "anthropic/claude-haiku-4-5"
GOOD_MODEL = "anthropic/claude-sonnet-4-5"
ALIASES = {"haiku": SMALL_MODEL, "sonnet": GOOD_MODEL, "opus": "anthropic/claude-opus-4-5"}
"""Short model names that Harbor and datacurve pier accept."""
_NAME = re.compile(r"\d{4}-\d\d-\d\d__\d\d-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class ReviewOptions:
    """The settings of a review: those of its job, the name of the run, whether to replace a run of that name, and the
    number of retries after invalid output."""

    config: JobConfig
    env: Mapping[str, str]
    show: Show
    name: str | None = None
    overwrite: bool = False
    asks: int = 2

    def plan(self, kind: Kind, root: Path, prompt: str, rubric: ReviewRubric | None, *, prefix: str = "") -> ReviewPlan:
        """A plan with the given name, else the name of an interrupted run with this prompt, else a new name."""
        name = self.name or _unfinished_run(root, prompt, prefix)
        name = name or prefix + datetime.now().strftime("%Y-%m-%d__%H-%M-%S")
        return ReviewPlan(kind, root, name, prompt, rubric, self.asks, self.overwrite)


def _unfinished_run(root: Path, prompt: str, prefix: str) -> str | None:
    """The newest interrupted run below `root` with an automatic name and this prompt."""
    place = root / REVIEWS
    for path in sorted(place.iterdir(), reverse=True) if place.is_dir() else ():
        if not path.name.startswith(prefix) or not _NAME.fullmatch(path.name[len(prefix) :]):
            continue
        with contextlib.suppress(JobError, OSError):
            tasks = place / ".tasks" / path.name
            is_same = was_written_here(tasks) and (tasks / "prompt.md").read_text() == prompt
            if is_same and JobView.open(path).state == "interrupted":
                return path.name
    return None


def _review_config(user_config: JobConfig, plan: ReviewPlan, model: str) -> JobConfig:
    """The settings of a review's job: the user's agents, models, limits and sandboxes, and the plan's tasks. `model` is
    the default model."""
    config = user_config.model_copy(deep=True)
    for agent in config.agents:
        if agent.import_path is None and agent.name in (None, "oracle"):
            agent.name = DEFAULT_AGENT
        chosen = agent.model_name or (model if agent.name != "command" else None)
        agent.model_name = ALIASES.get(chosen or "", chosen)
    config.datasets, config.tasks = [DatasetConfig(path=str(plan.tasks_dir))], []
    config.jobs_dir, config.job_name = str(plan.root / REVIEWS), plan.run
    config.review, config.verifier.disable = True, True
    config.image = config.image or HOST
    if config.environment.backend != "local" and config.image == HOST:
        raise UsageError(
            f"the backend {config.environment.backend} cannot use this machine as an image",
            hint="choose an image for the critics: --image python:3.13-slim",
        )
    return config


@dataclass(frozen=True, slots=True)
class Review:
    """One review of the trial or task `name`. `agent` is the index of the critic."""

    name: str
    row: TrialRow
    directory: Path
    agent: int
    order: ReviewOrder
    result: TrialResult | None
    value: dict[str, Any] | None
    problems: tuple[str, ...] = ()

    @property
    def cost_usd(self) -> float | None:
        return self.row.outcome.cost if self.row.outcome else None

    @property
    def error(self) -> str | None:
        """The reason if there is no value."""
        if self.value is not None:
            return None
        if self.row.outcome is None:
            return "the review did not finish"
        fault = self.row.outcome.fault
        return fault.message if fault else "; ".join(self.problems)


@dataclass(frozen=True, slots=True)
class ReviewRun:
    """The reviews of a run. `code` is the exit code: 1 if a review is missing, 130 if the run was interrupted."""

    plan: ReviewPlan
    view: JobView
    code: int
    reviews: tuple[Review, ...]

    @property
    def cost_usd(self) -> float | None:
        return total_cost(review.cost_usd for review in self.reviews)

    def by_critic(self) -> dict[str, list[Review]]:
        """The reviews by name of their published run: the name of this run, with the number of the critic and of the
        attempt appended if there are several."""
        n_agents = len({review.agent for review in self.reviews})
        n_attempts = len({review.row.attempt for review in self.reviews})
        found: dict[str, list[Review]] = {}
        for review in self.reviews:
            name = self.plan.run
            name += f".{review.agent + 1}" if n_agents > 1 else ""
            name += f".k{review.row.attempt}" if n_attempts > 1 else ""
            found.setdefault(name, []).append(review)
        return found

    def about(self, review: Review) -> dict[str, Any]:
        """The origin of a result, for its `pier` key."""
        return {
            "run": self.plan.run,
            "job": f"{REVIEWS}/{self.plan.run}",
            "review_trial": review.row.name,
            "agent": review.row.agent,
            "model": (self.view.config or {})["agents"][review.agent].get("model_name"),
            "attempt": review.row.attempt,
            "cost_usd": review.cost_usd,
            "prompt_sha256": self.plan.prompt_sha256,
            "prompt": f"{REVIEWS}/.tasks/{self.plan.run}/prompt.md",
            "criteria": list(review.order.criteria),
        }


def run_review(plan: ReviewPlan, options: ReviewOptions, *, model: str) -> ReviewRun:
    """Run or resume the job of a plan whose tasks are written."""
    config = _review_config(options.config, plan, model)
    try:
        code = run_without_report(config, options.env, options.show, again=TrialSelection(kind="errored"))
    except UsageError as error:
        if plan.kind in ("check", "analysis") and error.code == "provider-key-missing":
            error.hint = f"{error.hint}, or run without a model: --no-model"
        raise
    except JobError as error:
        if error.code != "job-differs":
            raise
        raise run_differs(plan.run, "exists with other settings") from error
    view = JobView.open(plan.job)
    return ReviewRun(plan, view, code, tuple(_reviews(plan, view)))


def _reviews(plan: ReviewPlan, view: JobView) -> Iterator[Review]:
    agents: dict[str, int] = {}
    for row in view.trials:
        agent = agents.setdefault(f"{row.agent}\0{row.model}", len(agents))
        order = read_order(load_task(plan.tasks_dir / row.task, verify=False))
        directory = plan.job / row.name
        result = find_result(directory) if row.outcome is not None else None
        value, problems = _value(directory, order, plan.root) if result else (None, ())
        yield Review(row.task, row, directory, agent, order, result, value, problems)


def _value(directory: Path, order: ReviewOrder, root: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The critic's output among the job's artifacts, and its problems."""
    name = f"artifacts/{ARTIFACTS.strip('/')}/{OUTPUTS[order.kind]}"
    try:
        with Tree(directory.resolve()) as tree:
            data = tree.read(name, OUTPUT_LIMIT)
    except (OSError, TreeError) as error:
        return None, (f"{name}: {error}",)
    checked = order.check(data, root)
    return checked.value, checked.problems
