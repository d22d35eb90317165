"""Reviews as text for a terminal. Control characters in the output of models are escaped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pier.review.analyze import Analysis
from pier.review.causes import PASSED, CauseGroup
from pier.review.output import CriterionAnswer, CritiqueFinding
from pier.review.read import Agreement, Critique, CritiqueRun
from pier.trial.record import printable

_EXAMPLES = 3
_WIDTH = 100


def lines_of(text: str, indent: str = "") -> list[str]:
    """The lines of a model's text, safe for a terminal."""
    return [f"{indent}{printable(line)}" for line in text.strip().splitlines()]


def cost_text(cost: float | None) -> str:
    return "unknown" if cost is None else f"${cost:.4f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _first(names: Sequence[str], number: int = _EXAMPLES) -> str:
    return ", ".join(names[:number]) + (", ..." if len(names) > number else "")


def runs_lines(runs: Iterable[CritiqueRun]) -> list[str]:
    return [line for run in runs for line in _run_lines(run)]


def _critic(found: CritiqueRun | Critique) -> str:
    return f"{found.agent or 'unknown'}{f' on {found.model}' if found.model else ''}"


def _run_lines(run: CritiqueRun) -> list[str]:
    """A summary of one run: ratings, outcomes by criterion, tags, failures."""
    done = [each for each in run.critiques if each.status == "completed"]
    ratings = Counter(each.rating for each in done)
    lines = [
        printable(f"{run.name}: {_critic(run)}"),
        f"  {len(done)} of {max(run.n_items, len(run.critiques))} trials reviewed: {ratings['good']} good, "
        f"{ratings['bad']} bad; cost {cost_text(run.cost_usd)}",
    ]
    lines += _criteria_table(done)
    if tags := Counter(tag for each in done for tag in each.tags):
        lines.append(printable("  tags: " + ", ".join(f"{tag} {count}" for tag, count in tags.most_common(10))))
    failed = [each for each in run.critiques if each.status == "failed"]
    for each in failed[:_EXAMPLES]:
        lines.append(printable(f"  no review of {each.trial}: {(each.error or '')[:200]}"))
    if len(failed) > _EXAMPLES:
        lines.append(f"  ... and {len(failed) - _EXAMPLES} more without a review")
    return lines


def _criteria_table(critiques: Sequence[Critique]) -> list[str]:
    names = list(dict.fromkeys(name for each in critiques for name in each.checks))
    if not names:
        return []
    width = max(map(len, names))
    lines = [f"  {'criterion':<{width}}  pass  fail   n/a  failed in"]
    for name in names:
        answers = [(each.trial, each.checks[name].outcome) for each in critiques if name in each.checks]
        count = Counter(outcome for _, outcome in answers)
        failed = [trial for trial, outcome in answers if outcome == "fail"]
        counts = "".join(f"  {count[outcome]:>4}" for outcome in ("pass", "fail", "not_applicable"))
        lines.append(printable(f"  {name:<{width}}{counts}  {_first(failed)}".rstrip()))
    return lines


def critique_lines(critique: Critique) -> list[str]:
    """One critique with all details."""
    verdict = critique.rating or critique.status
    lines = [printable(f"{critique.trial}: {verdict}  ({critique.run}: {_critic(critique)})")]
    if critique.error:
        lines += lines_of(critique.error, "  ")
    lines += lines_of(critique.feedback or "", "  ")
    if critique.tags:
        lines.append(printable(f"  tags: {', '.join(critique.tags)}"))
    lines += _review_lines(critique.checks, critique.findings)
    lines.append(f"  cost {cost_text(critique.cost_usd)}, files {critique.directory}")
    return lines


def _review_lines(checks: Mapping[str, CriterionAnswer], findings: Iterable[CritiqueFinding]) -> Iterator[str]:
    """The outcome of each criterion, and the findings with their evidence."""
    for name, check in checks.items():
        yield printable(f"  {check.outcome:<14} {name}: {check.explanation}")
    for finding in findings:
        about = f"{finding.criterion}: " if finding.criterion else ""
        yield printable(f"  [{finding.severity}] {about}{finding.summary}")
        for evidence in finding.evidence:
            yield printable(f"      {evidence.place}" + (f": {evidence.quote}" if evidence.quote else ""))


def analysis_lines(found: Analysis) -> list[str]:
    """The result of `pier analyze` and `pier summarize`."""
    lines: list[str] = []
    if found.job:
        lines += [*lines_of(found.job["job_summary"]), "", *counted_lines(found.job["causes"])]
    else:
        for each in found.analyses:
            lines += lines_of(f"{each['trial_name']}: {each.get('cause') or ''}") + lines_of(each["summary"], "  ")
    if found.agreement:
        lines += agreement_lines(found.agreement)
    for name, reason in found.failed.items():
        lines += lines_of(f"no analysis of {name}: {reason[:200]}")
    return [*lines, f"cost {cost_text(found.cost_usd)}"]


def agreement_lines(found: Agreement) -> list[str]:
    if not found.n_trials:
        return ["no agreement: no trial was reviewed by two of these critics"]
    lines = [f"agreement of {len(found.critics)} critics over {_count(found.n_trials, 'trial')}:"]
    lines += [printable(f"  {name}: {share:.0%}") for name, share in found.shares.items()]
    if found.disputed:
        lines.append(printable(f"  disputed ({len(found.disputed)}): {_first(found.disputed, 10)}"))
    return lines


def cause_lines(groups: Sequence[CauseGroup]) -> list[str]:
    """Causes found without a model."""
    total = sum(len(group.trials) for group in groups)
    passed = sum(len(group.trials) for group in groups if group.key == PASSED)
    lines = [f"{_count(total, 'trial')}, {passed} passed"]
    for group in groups:
        blame = f" (blame: {group.blame})" if group.blame != "none" else ""
        lines.append(printable(f"{len(group.trials):>6}  {group.key[:_WIDTH]}{blame}"))
        if group.key != PASSED:
            lines.append(printable(f"        {group.text[: 2 * _WIDTH]}"))
            lines.append(printable(f"        {_count(group.tasks, 'task')}; e.g. {_first(group.trials)}"))
        lines += [printable(f"        {count} x {sign[:_WIDTH]}") for sign, count in group.signs]
    return lines


def counted_lines(causes: Iterable[dict[str, Any]]) -> list[str]:
    """Causes chosen by a model."""
    return [printable(f"{row['count']:>6}  {row['cause']}  e.g. {_first(row['trials'])}") for row in causes]


def check_lines(report: dict[str, dict[str, Any]]) -> list[str]:
    """The report of `pier check`."""
    lines: list[str] = []
    for path, row in report.items():
        lines.append(path)
        lines += [f"  {p['level']}: {p['rule']}: {printable(p['message'])}" for p in row["problems"]]
        lines += [
            printable(f"  {'ok' if run['ok'] else 'FAILED':<7} {run['agent']}: {json.dumps(run['rewards'])}")
            for run in row["runs"]
        ]
        review = row["review"] or {}
        if review.get("error"):
            lines += lines_of(f"no review: {review['error']}", "  ")
        checks = {name: CriterionAnswer(**answer) for name, answer in (review.get("checks") or {}).items()}
        lines += _review_lines(checks, [CritiqueFinding(**each) for each in review.get("findings") or ()])
        shares = [f"{name} {share:.0%}" for name, share in (review.get("agreement") or {}).items() if name in checks]
        if shares:
            lines.append(f"  agreement of {len(review['answers'])} answers: {', '.join(shares)}")
        if not row["problems"] and not checks:
            lines.append("  no problems found")
    return lines


def has_failures(report: dict[str, dict[str, Any]]) -> bool:
    """Whether a task has an error, a failed run or a failed criterion."""
    return any(
        any(problem["level"] == "error" for problem in row["problems"])
        or not all(run["ok"] for run in row["runs"])
        or any(answer["outcome"] == "fail" for answer in ((row["review"] or {}).get("checks") or {}).values())
        for row in report.values()
    )
