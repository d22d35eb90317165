"""Writes critiques and analyses next to the reviewed trials, in the layouts of datacurve pier and Harbor (see `read`).

All files are written through `pier.tree`: a job from an untrusted source may contain symbolic links.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from pier.beneath import remove
from pier.figures import total_cost
from pier.job.view import RESULT
from pier.review.order import refuse_links, run_differs
from pier.review.output import TRAJECTORY
from pier.review.read import ANALYSIS, CRITIQUES, READ_LIMIT, agreement
from pier.review.run import Review, ReviewRun
from pier.review.source import find_result
from pier.tree import Tree, TreeError
from pier.verifier.changes import ARTIFACTS

_COPY_LIMIT = 64 << 20
_ENTRIES = 2000
_TIMINGS = ("started_at", "finished_at", "environment_setup", "agent_setup", "agent_execution")
_MULTIPLIERS = ("timeout_multiplier", "agent_timeout_multiplier", "agent_setup_timeout_multiplier",
                "environment_build_timeout_multiplier")  # fmt: skip
_PARTS = {"critique-result.json": "file", "critique-result.md": "file", "critique-artifacts": "directory"}


def publish_critiques(run: ReviewRun, *, overwrite: bool = False) -> list[str]:
    """Write all finished critiques; the names of the published runs."""
    root, critics = run.plan.root, run.by_critic()
    with Tree(root) as tree:
        for name, reviews in critics.items():
            place = f"{CRITIQUES}/{name}"
            refuse_links(root, place)
            if overwrite and (root / place).exists():
                remove(str(root / place))
            config = _critique_config(run, name, reviews)
            _put(tree, f"{place}/config.json", config)
            tree.write(f"{place}/prompt.md", run.plan.prompt.encode())
            if run.plan.rubric is not None:
                _put(tree, f"{place}/rubric.json", run.plan.rubric.model_dump())
            ended = [review for review in reviews if review.row.outcome is not None]
            for review in ended:
                _put_critique(tree, f"{place}/{review.name}", run, review, config)
            _put(tree, f"{place}/{RESULT}", _critique_result(run, config, len(ended) == len(reviews), ended))
    return list(critics)


def refuse_foreign_run(root: Path, run: str) -> None:
    """Raise `JobError` if another program created the run."""
    with Tree(root) as tree:
        config = tree.read_object(f"{CRITIQUES}/{run}/config.json", READ_LIMIT)
    if config is not None and "pier" not in config:
        raise run_differs(run, "was created by another program")


def _put(tree: Tree, path: str, value: Any) -> None:
    tree.write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="replace"))


def _critique_config(run: ReviewRun, name: str, reviews: Sequence[Review]) -> dict[str, Any]:
    """A `CritiqueConfig` of datacurve pier."""
    config = run.view.config or {}
    return {
        "run_name": name,
        "source_job_dir": str(run.plan.root),
        "prompt_path": str(run.plan.root / CRITIQUES / name / "prompt.md"),
        "agent": config["agents"][reviews[0].agent],
        "environment": config["environment"],
        **{key: config[key] for key in _MULTIPLIERS if key in config},
        "n_concurrent": config["n_concurrent_trials"],
        "trial_names": [review.name for review in reviews],
        "pier": run.about(reviews[0]),
    }


def _critique_result(run: ReviewRun, config: dict[str, Any], all_ended: bool, ended: list[Review]) -> dict[str, Any]:
    """A `CritiqueJobResult` of datacurve pier, without its items."""
    name = config["run_name"]
    return {
        "id": _id(f"{run.view.id}/{name}"),
        "run_name": name,
        "source_job_dir": str(run.plan.root),
        "critique_dir": str(run.plan.root / CRITIQUES / name),
        "config": config,
        "started_at": run.view.created_at,
        "finished_at": run.view.finished_at if all_ended else None,
        "failed_items": [],
        "n_items": len(config["trial_names"]),
        "n_failed": sum(review.value is None for review in ended),
    }


def _id(text: str) -> str:
    return str(UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=4))


def _put_critique(tree: Tree, place: str, run: ReviewRun, review: Review, config: dict[str, Any]) -> None:
    """Write one critique: the checked output, the critic's trajectory and log, and the metadata."""
    metadata = _metadata(run, review)
    known = tree.read_object(f"{place}/critique-metadata.json", READ_LIMIT)
    if known is not None and known.get("id") == metadata["id"]:
        return
    if tree.find(place) is not None:
        remove(str(tree.path / place))
    _put(tree, f"{place}/critique-config.json", config)
    inside = f"artifacts/{ARTIFACTS.strip('/')}"
    with Tree(review.directory.resolve()) as source:
        for name in (TRAJECTORY, "exception.txt"):
            _copy(source, name, tree, f"{place}/{name}")
        _copy(source, "trial.log", tree, f"{place}/critique.log")
        _copy(source, f"{inside}/critique-result.md", tree, f"{place}/artifacts/critique-result.md")
        _copy_tree(source, f"{inside}/critique-artifacts", tree, f"{place}/artifacts/critique-artifacts")
    if review.value is not None:
        _put(tree, f"{place}/artifacts/critique-result.json", review.value)
    else:
        tree.write(f"{place}/exception.txt", f"{review.error}\n".encode(errors="replace"))
    manifest = [
        {"source": f"{ARTIFACTS}/{name}", "destination": f"artifacts/{name}", "type": kind}
        | {"status": "ok" if tree.find(f"{place}/artifacts/{name}") else "missing"}
        for name, kind in _PARTS.items()
    ]
    _put(tree, f"{place}/artifacts/manifest.json", manifest)
    _put(tree, f"{place}/critique-metadata.json", metadata)


def _metadata(run: ReviewRun, review: Review) -> dict[str, Any]:
    """A `CritiqueItemResult` of datacurve pier. An accepted critique has no exception, even if its agent failed."""
    source = find_result(run.plan.root / review.name)
    result = review.result.model_dump(mode="json") if review.result else {}
    exception = None
    if review.value is None:
        exception = result.get("exception_info") or {
            "exception_type": "AgentError",
            "exception_message": review.error or "",
            "exception_traceback": "",
            "occurred_at": result.get("finished_at") or run.view.created_at,
            "code": "bad_review",
        }
    return {
        "id": result.get("id") or _id(f"{run.view.id}/{review.row.name}"),
        "source_trial_name": review.name,
        "critique_trial_name": review.row.name,
        "task_name": source.task_name if source else review.name,
        "task_id": source.task_id if source else {"path": review.order.task or review.name},
        "task_checksum": source.task_checksum if source else "",
        "source_trial_uri": (run.plan.root / review.name).as_uri(),
        "critique_trial_uri": review.directory.resolve().as_uri(),
        "agent_info": result.get("agent_info"),
        "agent_result": result.get("agent_result"),
        "exception_info": exception,
        **{key: result.get(key) for key in _TIMINGS},
        "pier": run.about(review),
    }


def _copy(source: Tree, name: str, target: Tree, path: str) -> None:
    """Copy a regular file of at most `_COPY_LIMIT` bytes; skip it otherwise."""
    try:
        data = source.read(name, _COPY_LIMIT)
    except (OSError, TreeError):
        return
    target.write(path, data)


def _copy_tree(source: Tree, name: str, target: Tree, path: str) -> None:
    left, entries = _COPY_LIMIT, []
    with contextlib.suppress(OSError, TreeError):
        entries = list(source.entries(name, limit=_ENTRIES))
    for entry in entries:
        if entry.kind == "file" and entry.size <= left:
            left -= entry.size
            _copy(source, entry.path, target, f"{path}{entry.path.removeprefix(name)}")


def combined(run: ReviewRun) -> dict[str, dict[str, Any]]:
    """The accepted answers, combined into one for each trial or task."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for review in run.reviews:
        if review.value is not None:
            answers.setdefault(review.name, []).append({"checks": {}, **review.value, "pier": run.about(review)})
    return {name: _combined(each) for name, each in answers.items()}


def _combined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine several answers: the most frequent cause, with summary and findings of the first answer that names it,
    and the most frequent outcome of each criterion. All answers are included, with the share of agreeing pairs."""
    if len(answers) == 1:
        return answers[0]
    cause = Counter(answer.get("cause") for answer in answers).most_common(1)[0][0]
    chosen = next(answer for answer in answers if answer.get("cause") == cause)
    checks = {}
    for name in chosen["checks"]:
        outcome = Counter(answer["checks"][name]["outcome"] for answer in answers).most_common(1)[0][0]
        checks[name] = next(c for answer in answers if (c := answer["checks"][name])["outcome"] == outcome)
    shares = agreement({str(n): {"": outcomes_of(answer)} for n, answer in enumerate(answers)}, "cause").shares
    about = chosen["pier"] | {"cost_usd": total_cost(answer["pier"]["cost_usd"] for answer in answers)}
    return chosen | {"checks": checks, "pier": about, "agreement": shares, "answers": answers}


def outcomes_of(answer: Mapping[str, Any]) -> dict[str, str | None]:
    """The cause in an answer, and the outcome of each criterion."""
    return {"cause": answer.get("cause")} | {name: check["outcome"] for name, check in answer["checks"].items()}


def publish_analyses(root: Path, analyses: Iterable[dict[str, Any]]) -> None:
    """Write the analysis of each trial next to it."""
    with Tree(root) as tree:
        for analysis in analyses:
            name = analysis["trial_name"]
            _put(tree, f"{name}/{ANALYSIS}", analysis)
            tree.write(f"{name}/analysis.md", _analysis_text(analysis).encode(errors="replace"))


def publish_job_analysis(root: Path, value: dict[str, Any]) -> None:
    """Write the analysis of a whole job."""
    with Tree(root) as tree:
        _put(tree, ANALYSIS, value)
        tree.write("analysis.md", job_text(value).encode(errors="replace"))


def count_causes(analyses: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Causes, most frequent first, with their trials."""
    trials: dict[str, list[str]] = {}
    for analysis in analyses:
        trials.setdefault(str(analysis.get("cause") or "unknown"), []).append(str(analysis["trial_name"]))
    rows = sorted(trials.items(), key=lambda row: -len(row[1]))
    return [{"cause": cause, "count": len(names), "trials": names} for cause, names in rows]


def _analysis_text(analysis: dict[str, Any]) -> str:
    """The analysis of a trial as Markdown."""
    lines = [f"# {analysis['trial_name']}", "", str(analysis.get("summary", "")), ""]
    if analysis.get("cause"):
        lines += [f"Cause: {analysis['cause']}", ""]
    lines += [f"- {name}: {check['outcome']}. {check['explanation']}" for name, check in analysis["checks"].items()]
    lines += [f"- [{finding['severity']}] {finding['summary']}" for finding in analysis.get("findings") or ()]
    lines += [f"- agreement on {name}: {share:.0%}" for name, share in analysis.get("agreement", {}).items()]
    return "\n".join(lines) + "\n"


def job_text(value: dict[str, Any]) -> str:
    """The analysis of a job as Markdown."""
    rows = [f"| {row['cause']} | {row['count']} | {', '.join(row['trials'][:3])} |" for row in value["causes"]]
    table = ["| cause | trials | examples |", "|---|---|---|", *rows]
    return "\n".join([str(value["job_summary"]), "", *table]) + "\n"
