"""`pier analyze`, `pier summarize` and `pier check`: which reviews they run, and what they make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.files import write_json
from pier.job.command import Show
from pier.job.config import JobConfig
from pier.review.order import ReviewPlan
from pier.review.publish import count_causes, job_text, publish_analyses, publish_job_analysis
from pier.review.read import read_analysis, read_job_analysis
from pier.review.rubric import ReviewRubric, load_prompt
from pier.review.run import GOOD_MODEL, SMALL_MODEL, ReviewRun, new_name, run_review, unfinished_run
from pier.review.source import Source, SourceTrial
from pier.tree import Tree

SUMMARY = "summary.md"
REPORT = "check_report.json"


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """What to analyze, and how. `keep` writes analyses next to trials and reuses those that are there."""

    source: Source
    trials: Sequence[SourceTrial]
    prompt: str
    job_prompt: str
    rubric: ReviewRubric
    name: str | None = None
    overwrite: bool = False
    keep: bool = True
    asks: int = 2


@dataclass(frozen=True, slots=True)
class Analysis:
    """What came of it. `failed` are the trials without an analysis, with the reason."""

    analyses: tuple[dict[str, Any], ...]
    job: dict[str, Any] | None
    failed: dict[str, str]
    code: int
    cost_usd: float | None


def analyze(request: AnalysisRequest, given: JobConfig, env: Mapping[str, str], show: Show) -> Analysis:
    """Analyze each trial, and then all of them together if they are several."""
    known = [] if request.overwrite or not request.keep else [_known(trial) for trial in request.trials]
    reused = {each["trial_name"]: each for each in known if each is not None}
    owed = [trial for trial in request.trials if trial.name not in reused]
    root, prefix = request.source.root, "analyze-" if request.keep else "summarize-"
    name = request.name or unfinished_run(root, request.prompt, prefix) or new_name(prefix)
    runs: list[ReviewRun] = []
    analyses, failed = dict(reused), dict[str, str]()
    if owed:
        plan = ReviewPlan("analysis", root, name, request.prompt, request.rubric, request.asks, request.overwrite)
        plan.write_trials(owed)
        runs.append(run_review(plan, given, env, show, model=SMALL_MODEL))
        new = publish_analyses(runs[0]) if request.keep else analyses_of(runs[0])
        analyses |= {each["trial_name"]: each for each in new}
        failed = {r.name: r.error or "" for r in runs[0].reviews if r.name not in analyses}
    ordered = tuple(analyses[trial.name] for trial in request.trials if trial.name in analyses)
    job = None
    if not owed and not request.source.single:
        job = _known_job(root, ordered)
    if job is None and not request.source.single and ordered and not (runs and runs[0].code == 130):
        job, run = _analyze_job(request, f"{name}-job", ordered, given, env, show)
        runs.append(run)
    costs = [run.cost_usd for run in runs]
    cost = None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs)
    return Analysis(ordered, job, failed, max((run.code for run in runs), default=0), cost)


def _known(trial: SourceTrial) -> dict[str, Any] | None:
    found = read_analysis(trial.directory)
    if found is None:
        return None
    return {
        "trial_name": trial.name,
        "summary": found.summary,
        "cause": found.cause,
        "checks": {name: check.model_dump() for name, check in found.checks.items()},
        "findings": [finding.model_dump(exclude_none=True) for finding in found.findings],
        "pier": {"model": found.model, "cost_usd": found.cost_usd},
    }


def _known_job(root: Path, analyses: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The analysis of the job that is there, if it is about the same trials."""
    found = read_job_analysis(root)
    if found is None or found.trials != {each["trial_name"] for each in analyses}:
        return None
    return {"job_summary": found.summary, "trials": list(analyses), "causes": count_causes(analyses), "pier": {}}


def analyses_of(run: ReviewRun) -> list[dict[str, Any]]:
    """The analyses that were accepted, one for each trial."""
    found: dict[str, dict[str, Any]] = {}
    for review in run.reviews:
        if review.value is not None:
            found.setdefault(review.name, {"trial_name": review.name, "checks": {}, **review.value})
    return list(found.values())


def _analyze_job(
    request: AnalysisRequest,
    name: str,
    analyses: Sequence[dict[str, Any]],
    given: JobConfig,
    env: Mapping[str, str],
    show: Show,
) -> tuple[dict[str, Any] | None, ReviewRun]:
    """Review the analyses of all trials together, with the first of the critics."""
    rows = {trial.name: trial for trial in request.trials}
    lines = [json.dumps(_facts(rows[each["trial_name"]], each)) for each in analyses]
    texts = {"trial_results": "\n".join(lines)}
    plan = ReviewPlan("job", request.source.root, name, request.job_prompt, None, request.asks, True, texts)
    causes = count_causes(analyses)
    plan.write_job({"trials.jsonl": "\n".join(lines) + "\n", "causes.json": json.dumps(causes, indent=2)})
    one = given.model_copy(update={"agents": given.agents[:1], "n_attempts": 1})
    run = run_review(plan, one, env, show, model=SMALL_MODEL)
    review = run.reviews[0]
    if review.value is None:
        return None, run
    summary, about = str(review.value["job_summary"]), run.about(review)
    if request.keep:
        return publish_job_analysis(request.source.root, summary, analyses, about), run
    value = {"job_summary": summary, "trials": list(analyses), "causes": causes, "pier": about}
    with Tree(request.source.root) as tree:
        tree.write(SUMMARY, job_text(value).encode(errors="replace"))
    return value, run


def _facts(trial: SourceTrial, analysis: Mapping[str, Any]) -> dict[str, Any]:
    """What the review of a job sees of one trial."""
    outcome = trial.outcome
    checks = {name: check["outcome"] for name, check in (analysis.get("checks") or {}).items()}
    return {
        "trial": trial.name,
        "task": trial.task,
        "agent": trial.agent,
        "model": trial.model,
        "rewards": outcome.rewards if outcome else None,
        "error": outcome.fault.code if outcome and outcome.fault else None,
        "cause": analysis.get("cause"),
        "checks": checks,
        "summary": analysis.get("summary"),
    }


def check_tasks_by_rubric(
    paths: Sequence[Path],
    root: Path,
    rubric: ReviewRubric,
    prompt: str,
    given: JobConfig,
    env: Mapping[str, str],
    show: Show,
    *,
    name: str | None = None,
    asks: int = 2,
) -> tuple[dict[Path, dict[str, Any]], ReviewRun]:
    """Review tasks: the answers by the path of the task. The report is also in the review's directory."""
    root.mkdir(parents=True, exist_ok=True)
    name = name or unfinished_run(root, prompt, "check-") or new_name("check-")
    plan = ReviewPlan("check", root.resolve(), name, prompt, rubric, asks)
    named = plan.write_tasks(paths)
    run = run_review(plan, given, env, show, model=GOOD_MODEL)
    found: dict[Path, dict[str, Any]] = {}
    for review in run.reviews:
        value = review.value or {"error": review.error}
        found.setdefault(named[review.name], {**value, "pier": run.about(review)})
    write_json(plan.job / REPORT, {"tasks": {str(path): value for path, value in found.items()}})
    return found, run


def default_prompt(given: str | None, name: str) -> str:
    """The text of the prompt that a user gave, else of the built-in one."""
    return load_prompt(Path(given) if given else name)
