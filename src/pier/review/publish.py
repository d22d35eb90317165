"""Writes the results of reviews next to the reviewed trials, in the layouts of datacurve pier and Harbor.

    <root>/.critiques/RUN/config.json, result.json, prompt.md, rubric.json
    <root>/.critiques/RUN/TRIAL/critique-metadata.json, critique-config.json, critique.log, agent/, artifacts/
    <root>/TRIAL/analysis.json, analysis.md          one trial
    <root>/analysis.json, analysis.md                the job

Everything is written through `pier.tree`: a job that came from somewhere else may hold links.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from pier.beneath import remove
from pier.errors import JobError
from pier.job.view import RESULT
from pier.review.order import refuse_links
from pier.review.run import Review, ReviewRun, by_critic
from pier.tree import Tree, TreeError
from pier.trial.result import TrialResult, read_result
from pier.verifier.changes import ARTIFACTS

CRITIQUES = ".critiques"
ANALYSIS = "analysis.json"
_COPY_LIMIT = 64 << 20
_ENTRIES = 2000


def publish_critiques(run: ReviewRun, *, overwrite: bool = False) -> list[str]:
    """Write every critique that has ended; the names of the published runs."""
    root = run.plan.root
    refuse_links(root, CRITIQUES)
    names = list(by_critic(run))
    with Tree(root) as tree:
        for name, reviews in by_critic(run).items():
            place = f"{CRITIQUES}/{name}"
            refuse_links(root, place)
            if overwrite and (root / place).exists():
                remove(str(root / place))
            config = _critique_config(run, name, reviews)
            _put(tree, f"{place}/config.json", config)
            tree.write(f"{place}/prompt.md", run.plan.prompt.encode())
            if run.plan.rubric is not None:
                _put(tree, f"{place}/rubric.json", run.plan.rubric.model_dump())
            for review in reviews:
                if review.row.outcome is not None:
                    _put_critique(tree, f"{place}/{review.name}", run, review, config)
            _put(tree, f"{place}/{RESULT}", _critique_result(run, name, reviews, config))
    return names


def refuse_foreign_run(root: Path, run: str) -> None:
    """Refuse to add to a run that another program made."""
    with Tree(root) as tree:
        config = _read(tree, f"{CRITIQUES}/{run}/config.json")
    if config is not None and "pier" not in config:
        raise JobError(
            f"the run {run} was made by another program",
            hint="choose another --name, or add --overwrite",
            code="job-differs",
        )


def _put(tree: Tree, path: str, value: Any) -> None:
    tree.write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="replace"))


def _critique_config(run: ReviewRun, name: str, reviews: Sequence[Review]) -> dict[str, Any]:
    """datacurve's `CritiqueConfig`."""
    config = run.config
    keys = ("timeout_multiplier", "agent_timeout_multiplier", "agent_setup_timeout_multiplier")
    return {
        "run_name": name,
        "source_job_dir": str(run.plan.root),
        "prompt_path": str(run.plan.root / CRITIQUES / name / "prompt.md"),
        "agent": config["agents"][reviews[0].agent],
        "environment": config["environment"],
        **{key: config.get(key) for key in (*keys, "environment_build_timeout_multiplier") if key in config},
        "n_concurrent": config["n_concurrent_trials"],
        "trial_names": [review.name for review in reviews],
        "pier": run.about(reviews[0]),
    }


def _critique_result(run: ReviewRun, name: str, reviews: Sequence[Review], config: dict[str, Any]) -> dict[str, Any]:
    """datacurve's `CritiqueJobResult`, which has no items on disk."""
    failed = [review for review in reviews if review.row.outcome is not None and review.value is None]
    owed = any(review.row.outcome is None for review in reviews)
    return {
        "id": str(_id(f"{run.job_id}/{name}")),
        "run_name": name,
        "source_job_dir": str(run.plan.root),
        "critique_dir": str(run.plan.root / CRITIQUES / name),
        "config": config,
        "started_at": run.started_at,
        "finished_at": None if owed else run.finished_at,
        "failed_items": [],
        "n_items": len(reviews),
        "n_failed": len(failed),
    }


def _id(text: str) -> UUID:
    return UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=4)


def _put_critique(tree: Tree, place: str, run: ReviewRun, review: Review, config: dict[str, Any]) -> None:
    """One item: what the critic wrote, as it was checked, and how it came to be."""
    result = review.result
    metadata = _metadata(run, review, result)
    known = _read(tree, f"{place}/critique-metadata.json")
    if known is not None and known.get("id") == metadata["id"]:
        return
    if tree.find(place) is not None:
        remove(str(tree.path / place))
    _put(tree, f"{place}/critique-config.json", config)
    inside = f"artifacts/{ARTIFACTS.strip('/')}"
    with Tree(review.directory.resolve()) as source:
        for name in ("agent/trajectory.json", "exception.txt"):
            _copy(source, name, tree, f"{place}/{name}")
        _copy(source, "trial.log", tree, f"{place}/critique.log")
        _copy(source, f"{inside}/critique-result.md", tree, f"{place}/artifacts/critique-result.md")
        _copy_tree(source, f"{inside}/critique-artifacts", tree, f"{place}/artifacts/critique-artifacts")
    if review.value is not None:
        _put(tree, f"{place}/artifacts/critique-result.json", review.value)
    else:
        tree.write(f"{place}/exception.txt", f"{review.error}\n".encode(errors="replace"))
    _put(tree, f"{place}/artifacts/manifest.json", _manifest(tree, place))
    _put(tree, f"{place}/critique-metadata.json", metadata)


def _metadata(run: ReviewRun, review: Review, result: TrialResult | None) -> dict[str, Any]:
    """datacurve's `CritiqueItemResult`. A critique that was accepted has no exception, however its agent ended."""
    source = _source_result(run.plan.root / review.name)
    dumped = result.model_dump(mode="json") if result else {}
    timings = ("started_at", "finished_at", "environment_setup", "agent_setup", "agent_execution")
    exception = dumped.get("exception_info")
    if review.value is None and exception is None:
        exception = {
            "exception_type": "AgentError",
            "exception_message": review.error or "",
            "exception_traceback": "",
            "occurred_at": dumped.get("finished_at") or run.started_at,
            "code": "bad_review",
        }
    return {
        "id": dumped.get("id") or str(_id(f"{run.job_id}/{review.row.name}")),
        "source_trial_name": review.name,
        "critique_trial_name": review.row.name,
        "task_name": source.task_name if source else review.name,
        "task_id": source.task_id if source else {"path": review.order.task or review.name},
        "task_checksum": source.task_checksum if source else "",
        "source_trial_uri": (run.plan.root / review.name).as_uri(),
        "critique_trial_uri": review.directory.resolve().as_uri(),
        "agent_info": dumped.get("agent_info"),
        "agent_result": dumped.get("agent_result"),
        "exception_info": exception if review.value is None else None,
        **{key: dumped.get(key) for key in timings},
        "pier": run.about(review),
    }


def _source_result(directory: Path) -> TrialResult | None:
    try:
        return read_result(directory)
    except JobError:
        return None


def _manifest(tree: Tree, place: str) -> list[dict[str, str]]:
    rows = []
    for name, kind in (
        ("critique-result.json", "file"),
        ("critique-result.md", "file"),
        ("critique-artifacts", "directory"),
    ):
        status = "ok" if tree.find(f"{place}/artifacts/{name}") else "missing"
        rows.append(
            {"source": f"{ARTIFACTS}/{name}", "destination": f"artifacts/{name}", "type": kind, "status": status}
        )
    return rows


def _copy(source: Tree, name: str, target: Tree, path: str) -> int:
    """Copy a regular file of bounded size; its size, 0 if there is none."""
    try:
        data = source.read(name, _COPY_LIMIT)
    except (OSError, TreeError):
        return 0
    target.write(path, data)
    return len(data)


def _copy_tree(source: Tree, name: str, target: Tree, path: str) -> None:
    left = _COPY_LIMIT
    try:
        entries = [entry for entry in source.entries(name, limit=_ENTRIES) if entry.kind == "file"]
    except (OSError, TreeError):
        return
    for entry in entries:
        if entry.size <= left:
            left -= _copy(source, entry.path, target, f"{path}{entry.path.removeprefix(name)}")


def _read(tree: Tree, path: str) -> dict[str, Any] | None:
    try:
        value = json.loads(tree.read(path, _COPY_LIMIT))
    except (OSError, TreeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def publish_analyses(run: ReviewRun) -> list[dict[str, Any]]:
    """Write the analysis of each trial next to it; all that were accepted."""
    done: dict[str, dict[str, Any]] = {}
    for review in run.reviews:
        if review.value is not None and review.name not in done:
            done[review.name] = {"trial_name": review.name, "checks": {}, **review.value, "pier": run.about(review)}
    with Tree(run.plan.root) as tree:
        for name, analysis in done.items():
            _put(tree, f"{name}/{ANALYSIS}", analysis)
            tree.write(f"{name}/analysis.md", analysis_text(analysis).encode(errors="replace"))
    return list(done.values())


def publish_job_analysis(
    root: Path, summary: str, analyses: Sequence[dict[str, Any]], about: dict[str, Any]
) -> dict[str, Any]:
    """Write the analysis of a whole job: the summary, and the causes with their counts."""
    value = {
        "job_summary": summary,
        "trials": list(analyses),
        "causes": count_causes(analyses),
        "pier": about,
    }
    with Tree(root) as tree:
        _put(tree, ANALYSIS, value)
        tree.write("analysis.md", job_text(value).encode(errors="replace"))
    return value


def count_causes(analyses: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Causes, the most frequent first, with the trials that have them."""
    trials: dict[str, list[str]] = {}
    for analysis in analyses:
        trials.setdefault(str(analysis.get("cause") or "unknown"), []).append(str(analysis["trial_name"]))
    order = Counter({cause: len(names) for cause, names in trials.items()})
    return [{"cause": cause, "count": count, "trials": trials[cause]} for cause, count in order.most_common()]


def analysis_text(analysis: dict[str, Any]) -> str:
    """The analysis of a trial as Markdown."""
    lines = [f"# {analysis['trial_name']}", "", str(analysis.get("summary", "")), ""]
    if analysis.get("cause"):
        lines += [f"Cause: {analysis['cause']}", ""]
    lines += [f"- {name}: {check['outcome']}. {check['explanation']}" for name, check in analysis["checks"].items()]
    for finding in analysis.get("findings") or ():
        lines.append(f"- [{finding['severity']}] {finding['summary']}")
    return "\n".join(lines) + "\n"


def job_text(value: dict[str, Any]) -> str:
    """The analysis of a job as Markdown."""
    rows = [f"| {row['cause']} | {row['count']} | {', '.join(row['trials'][:3])} |" for row in value["causes"]]
    table = ["| cause | trials | for example |", "|---|---|---|", *rows]
    return "\n".join([str(value["job_summary"]), "", *table]) + "\n"
