"""Runs reviews: makes their tasks, runs them as a job, and writes what came of it next to what was reviewed.

A run that was interrupted goes on with the same command; reviews that failed are then run again, and finished ones are
kept as long as the reviewed trial, the prompt and the critic are the same.
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
from pier.job.config import AgentConfig, DatasetConfig, JobConfig
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
"""Names of models that Harbor's and datacurve's commands take."""
_NAME = re.compile(r"\d{4}-\d\d-\d\d__\d\d-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class ReviewOptions:
    """How to review: the settings of the review's job, the name of the run, whether to replace one of that name, and
    how often to ask again for valid output."""

    config: JobConfig
    env: Mapping[str, str]
    show: Show
    name: str | None = None
    overwrite: bool = False
    asks: int = 2

    def plan(self, kind: Kind, root: Path, prompt: str, rubric: ReviewRubric | None, *, prefix: str = "") -> ReviewPlan:
        """A plan under the name that was given, of an interrupted run with this prompt, or a new one."""
        name = self.name or _unfinished_run(root, prompt, prefix)
        name = name or prefix + datetime.now().strftime("%Y-%m-%d__%H-%M-%S")
        return ReviewPlan(kind, root, name, prompt, rubric, self.asks, self.overwrite)


def _unfinished_run(root: Path, prompt: str, prefix: str) -> str | None:
    """The newest run below `root` that was interrupted and has this prompt, so that the same command continues it."""
    place = root / REVIEWS
    for path in sorted(place.iterdir(), reverse=True) if place.is_dir() else ():
        if path.name[:1] == "." or not path.name.startswith(prefix) or not _NAME.fullmatch(path.name[len(prefix) :]):
            continue
        with contextlib.suppress(JobError, OSError):
            tasks = place / ".tasks" / path.name
            asked = was_written_here(tasks) and (tasks / "prompt.md").read_text() == prompt
            if asked and JobView.open(path).state == "interrupted":
                return path.name
    return None


def _review_config(given: JobConfig, plan: ReviewPlan, model: str) -> JobConfig:
    """The job of a review: the user's settings for agents, models, limits and sandboxes, and the plan's tasks. `model`
    is used if none is given."""
    config = given.model_copy(deep=True)
    agents: list[AgentConfig] = []
    for agent in config.agents:
        name = agent.name
        if agent.import_path is None and name in (None, "oracle"):
            name = DEFAULT_AGENT
        chosen = agent.model_name or (model if name != "command" else None)
        agents.append(agent.model_copy(update={"name": name, "model_name": ALIASES.get(chosen or "", chosen)}))
    config.agents = agents
    config.datasets, config.tasks = [DatasetConfig(path=str(plan.tasks_dir))], []
    config.jobs_dir, config.job_name = str(plan.root / REVIEWS), plan.run
    config.review, config.verifier.disable = True, True
    config.image = config.image or HOST
    if config.environment.backend != "local" and config.image == HOST:
        raise UsageError(
            f"the backend {config.environment.backend} has no image of this machine",
            hint="name an image for critics to work in: --image python:3.13-slim",
        )
    return config


@dataclass(frozen=True, slots=True)
class Review:
    """One finished review: of a trial or task called `name`, by the critic `agent` of the plan in its `attempt`."""

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
        """Why it has no value."""
        if self.value is not None:
            return None
        if self.row.outcome is None:
            return "it did not finish"
        fault = self.row.outcome.fault
        return fault.message if fault else "; ".join(self.problems)


@dataclass(frozen=True, slots=True)
class ReviewRun:
    """The result of a run of reviews. `code` is the exit code: 1 if a review is missing, 130 if it was interrupted."""

    plan: ReviewPlan
    config: dict[str, Any]
    code: int
    reviews: tuple[Review, ...]
    started_at: str | None
    finished_at: str | None
    job_id: str | None

    @property
    def cost_usd(self) -> float | None:
        return total_cost(review.cost_usd for review in self.reviews)

    def by_critic(self) -> dict[str, list[Review]]:
        """The reviews by the name of their published run: the run's own if it has one critic with one attempt, else
        with the number of the critic and of the attempt."""
        agents = {review.agent for review in self.reviews}
        attempts = {review.row.attempt for review in self.reviews}
        found: dict[str, list[Review]] = {}
        for review in self.reviews:
            name = self.plan.run
            name += f".{review.agent + 1}" if len(agents) > 1 else ""
            name += f".k{review.row.attempt}" if len(attempts) > 1 else ""
            found.setdefault(name, []).append(review)
        return found

    def about(self, review: Review) -> dict[str, Any]:
        """The origin of a result, which is kept with it."""
        agent = self.config["agents"][review.agent]
        return {
            "run": self.plan.run,
            "job": f"{REVIEWS}/{self.plan.run}",
            "review_trial": review.row.name,
            "agent": review.row.agent,
            "model": agent.get("model_name"),
            "attempt": review.row.attempt,
            "cost_usd": review.cost_usd,
            "prompt_sha256": self.plan.prompt_sha256,
            "prompt": f"{REVIEWS}/.tasks/{self.plan.run}/prompt.md",
            "criteria": list(review.order.criteria),
        }


def run_review(plan: ReviewPlan, options: ReviewOptions, *, model: str) -> ReviewRun:
    """Run the tasks of a plan, which are written already, or go on with them."""
    config = _review_config(options.config, plan, model)
    try:
        code = run_without_report(config, options.env, options.show, again=TrialSelection(kind="errored"))
    except UsageError as error:
        if plan.kind in ("check", "analysis") and error.code == "provider-key-missing":
            error.hint = f"{error.hint}, or leave out the model: --no-model"
        raise
    except JobError as error:
        if error.code != "job-differs":
            raise
        raise run_differs(plan.run, "exists and asked for something else") from error
    view = JobView.open(plan.job)
    reviews = tuple(_reviews(plan, view))
    return ReviewRun(plan, view.config or {}, code, reviews, view.created_at, view.finished_at, view.id)


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
    """The output of a critic, as it was taken out of its sandbox, checked again."""
    name = f"artifacts/{ARTIFACTS.strip('/')}/{OUTPUTS[order.kind]}"
    try:
        with Tree(directory.resolve()) as tree:
            data = tree.read(name, OUTPUT_LIMIT)
    except (OSError, TreeError) as error:
        return None, (f"{name}: {error}",)
    checked = order.check(data, root)
    return checked.value, checked.problems
