"""The reviews behind `pier analyze`, `pier summarize` and `pier check`, and their combined results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pier.figures import total_cost
from pier.files import write_json
from pier.review.order import ReviewPlan
from pier.review.publish import combined, count_causes, job_text, outcomes_of, publish_analyses, publish_job_analysis
from pier.review.read import Agreement, agreement, read_analysis, read_job_analysis
from pier.review.rubric import ReviewRubric
from pier.review.run import GOOD_MODEL, SMALL_MODEL, ReviewOptions, ReviewRun, run_review
from pier.review.source import Source, SourceTrial
from pier.tree import Tree

SUMMARY = "summary.md"
REPORT = "check_report.json"


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """The trials to analyze, with prompts and rubric. With `keep`, analyses are saved next to the trials and reused."""

    source: Source
    trials: Sequence[SourceTrial]
    prompt: str
    job_prompt: str
    rubric: ReviewRubric
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Analysis:
    """The outcome of an analysis. `failed` maps trials that could not be analyzed to the reason; `agreement` compares
    several critics or attempts. `code` is the exit code."""

    analyses: tuple[dict[str, Any], ...]
    job: dict[str, Any] | None
    failed: dict[str, str]
    code: int
    cost_usd: float | None
    agreement: Agreement | None = None


def analyze(request: AnalysisRequest, options: ReviewOptions) -> Analysis:
    """Analyze each trial and, unless the source is a single trial, the job as a whole."""
    root, reuse = request.source.root, request.keep and not options.overwrite
    stored = [read_analysis(trial.directory) for trial in request.trials] if reuse else []
    analyses = {each.trial: each.as_file() for each in stored if each is not None}
    missing = [trial for trial in request.trials if trial.name not in analyses]
    prefix = "analyze-" if request.keep else "summarize-"
    plan = options.plan("analysis", root, request.prompt, request.rubric, prefix=prefix)
    runs: list[ReviewRun] = []
    failed, agreed = dict[str, str](), None
    if missing:
        plan.write_trials(missing)
        runs.append(run_review(plan, options, model=SMALL_MODEL))
        new = {name: {"trial_name": name, **answer} for name, answer in combined(runs[0]).items()}
        if request.keep:
            publish_analyses(root, new.values())
        analyses |= new
        failed = {r.name: r.error or "" for r in runs[0].reviews if r.name not in analyses}
        agreed = _agreement(runs[0])
    ordered = tuple(analyses[trial.name] for trial in request.trials if trial.name in analyses)
    job = None
    if not request.source.single and ordered and not (runs and runs[0].code == 130):
        job = None if missing else _stored_job(root, ordered)
        if job is None:
            job, run = _analyze_job(request, f"{plan.run}-job", ordered, agreed, options)
            runs.append(run)
    code = max((run.code for run in runs), default=0)
    return Analysis(ordered, job, failed, code, total_cost(run.cost_usd for run in runs), agreed)


def _agreement(run: ReviewRun) -> Agreement | None:
    """The agreement of several critics or attempts on causes and criteria."""
    critics = {
        critic: {each.name: outcomes_of({"checks": {}, **each.value}) for each in reviews if each.value is not None}
        for critic, reviews in run.by_critic().items()
    }
    return agreement(critics, "cause") if len(critics) > 1 else None


def _stored_job(root: Path, analyses: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The stored analysis of the job, if it covers the same trials."""
    found = read_job_analysis(root)
    if found is None or set(found.trials) != {each["trial_name"] for each in analyses}:
        return None
    return {"job_summary": found.summary, "trials": list(analyses), "causes": count_causes(analyses), "pier": {}}


def _analyze_job(
    request: AnalysisRequest,
    name: str,
    analyses: Sequence[dict[str, Any]],
    agreed: Agreement | None,
    options: ReviewOptions,
) -> tuple[dict[str, Any] | None, ReviewRun]:
    """Review the analyses of all trials together, with the first critic."""
    root, rows = request.source.root, {trial.name: trial for trial in request.trials}
    lines = "\n".join(json.dumps(_facts(rows[each["trial_name"]], each)) for each in analyses)
    plan = ReviewPlan("job", root, name, request.job_prompt, None, options.asks, overwrite=True)
    causes = count_causes(analyses)
    plan.write_job({"trials.jsonl": lines + "\n", "causes.json": json.dumps(causes, indent=2)})
    one = options.config.model_copy(update={"agents": options.config.agents[:1], "n_attempts": 1})
    run = run_review(plan, replace(options, config=one), model=SMALL_MODEL)
    review = run.reviews[0]
    if review.value is None:
        return None, run
    value = {"job_summary": str(review.value["job_summary"]), "trials": list(analyses), "causes": causes}
    value |= {"agreement": asdict(agreed) if agreed else None, "pier": run.about(review)}
    if request.keep:
        publish_job_analysis(root, value)
    else:
        with Tree(root) as tree:
            tree.write(SUMMARY, job_text(value).encode(errors="replace"))
    return value, run


def _facts(trial: SourceTrial, analysis: Mapping[str, Any]) -> dict[str, Any]:
    """One row of `trials.jsonl`, the input of the job's review."""
    outcome = trial.outcome
    return {
        "trial": trial.name,
        "task": trial.task,
        "agent": trial.agent,
        "model": trial.model,
        "rewards": outcome.rewards if outcome else None,
        "error": outcome.fault.code if outcome and outcome.fault else None,
        "cause": analysis.get("cause"),
        "checks": {name: check["outcome"] for name, check in analysis["checks"].items()},
        "summary": analysis.get("summary"),
    }


def check_tasks_by_rubric(
    paths: Sequence[Path], root: Path, rubric: ReviewRubric, prompt: str, options: ReviewOptions
) -> tuple[dict[Path, dict[str, Any]], int]:
    """Review tasks; the answers by path of the task, and the exit code. Also writes `check_report.json` to the review's
    directory."""
    root.mkdir(parents=True, exist_ok=True)
    plan = options.plan("check", root.resolve(), prompt, rubric, prefix="check-")
    named = plan.write_tasks(paths)
    run = run_review(plan, options, model=GOOD_MODEL)
    answers, errors = combined(run), {review.name: {"error": review.error} for review in run.reviews}
    found = {path: answers.get(name) or errors[name] for name, path in named.items()}
    write_json(plan.job / REPORT, {"tasks": {str(path): value for path, value in found.items()}})
    return found, run.code
