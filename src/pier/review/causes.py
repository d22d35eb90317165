"""Causes of trial outcomes, found without a model: exact, free, and from the trial's files.

The cause of a trial is the first of these that applies: it passed; an error for which the agent is not to blame; an
exhausted budget; an error of the agent; the agent broke its grading; failed tests, by name if the verifier's output has
names; else its reward. Signs (planted files, refused hosts, retried model calls) are additional facts that do not
decide the cause.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pier.errors import JobError
from pier.job.view import step_places
from pier.review.source import SourceTrial
from pier.tree import Tree
from pier.trial.result import AgentResult, Integrity, TrialResult, read_result

PASSED = "passed"
_OUTPUT_LIMIT = 16 << 20
_NAMED = 3
_FAILED_LINE = re.compile(r"^(?:FAILED|ERROR)\s+([^\s(]\S*)|^(?:FAIL|ERROR): \S+ \(([^)\s]+)\)", re.MULTILINE)
"""A failed test in the output of pytest, or of unittest."""
_NOT_PASSED = frozenset({"failed", "other"})


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of one trial's outcome: a stable `key` to group by, the blame, a sentence, and the signs."""

    key: str
    blame: str
    text: str
    signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CauseGroup:
    """The trials with one cause. `text` is the first trial's; `signs` are counted over all."""

    key: str
    blame: str
    text: str
    trials: tuple[str, ...]
    tasks: int
    signs: tuple[tuple[str, int], ...]


def group_causes(trials: Iterable[SourceTrial]) -> list[CauseGroup]:
    """The causes of trials, most frequent first; trials that passed come last."""
    members: dict[str, list[tuple[SourceTrial, Cause]]] = {}
    for trial in trials:
        cause = find_cause(trial)
        members.setdefault(cause.key, []).append((trial, cause))
    groups: list[CauseGroup] = []
    for key, rows in members.items():
        signs = Counter(sign for _, cause in rows for sign in cause.signs)
        first, names = rows[0][1], tuple(trial.name for trial, _ in rows)
        n_tasks = len({trial.task for trial, _ in rows})
        groups.append(CauseGroup(key, first.blame, first.text, names, n_tasks, tuple(signs.most_common(5))))
    return sorted(groups, key=lambda group: (group.key == PASSED, -len(group.trials), group.key))


def find_cause(trial: SourceTrial) -> Cause:
    try:
        result = read_result(trial.directory)
    except JobError as error:
        return Cause(error.code, "infra", str(error))
    return next(_causes(trial, result))


def _causes(trial: SourceTrial, result: TrialResult) -> Iterator[Cause]:
    """All causes that apply, the deciding one first; the last one always applies."""
    signs = tuple(_signs(result))
    fault = trial.outcome.fault if trial.outcome else None
    if trial.passed:
        yield Cause(PASSED, "none", "passed", signs)
    if fault is not None and fault.blame != "agent":
        yield Cause(fault.code, fault.blame, _first_line(fault.message), signs)
    for used in _agent_results(result):
        if ended := (used.metadata or {}).get("ended"):
            yield Cause(_budget_key(str(ended)), "agent", f"the model session ended: {ended}", signs)
    if fault is not None:
        yield Cause(fault.code, fault.blame, _first_line(fault.message), signs)
    broken = [note for integrity in _integrity(result) for note in integrity.notes if note.kind == "no_reward"]
    if broken:
        yield Cause("broke-grading", "agent", _first_line(broken[0].detail), signs)
    if not result.has_verdict:
        yield Cause("not-graded", "none", "the trial was not graded", signs)
    if failed := failed_tests(trial):
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        names = ", ".join(failed[:_NAMED])
        yield Cause(f"tests: {names}{more}", "agent", f"{len(failed)} tests failed: {names}{more}", signs)
    if not any((result.rewards or {}).values()):
        yield Cause("zero", "agent", "the verifier gave 0 without naming a failed test", signs)
    yield Cause("partial", "agent", f"the verifier gave {json.dumps(result.rewards)}", signs)


def _budget_key(ended: str) -> str:
    limits = {name: name for name in ("turns", "input tokens", "output tokens", "tokens")}
    limits |= {"$": "cost", "seconds": "time"}
    return f"budget: {next((name for sign, name in limits.items() if sign in ended), 'session')}"


def _agent_results(result: TrialResult) -> list[AgentResult]:
    found = [result.agent_result, *(step.agent_result for step in result.step_results or ())]
    return [each for each in found if each is not None]


def _integrity(result: TrialResult) -> list[Integrity]:
    found = [result.integrity, *(step.integrity for step in result.step_results or ())]
    return [each for each in found if each is not None]


def _signs(result: TrialResult) -> Iterator[str]:
    """Facts that may explain the outcome."""
    for kind in dict.fromkeys(note.kind for each in _integrity(result) for note in each.notes):
        yield f"integrity: {kind}"
    if result.pier is not None and result.pier.network_refused:
        yield "network: " + ", ".join(sorted(result.pier.network_refused)[:_NAMED])
    for used in _agent_results(result):
        metadata = used.metadata or {}
        if metadata.get("model_retries"):
            yield "model calls were retried"
        calls = metadata.get("model_calls")
        for end in sorted(calls) if isinstance(calls, dict) else ():
            if end != "answered":
                yield f"model calls: {end}"
        if used.summarization_count:
            yield "context was summarized"


def failed_tests(trial: SourceTrial) -> list[str]:
    """The names of failed tests: from `ctrf.json`, else from the summary lines of pytest or unittest."""
    found: list[str] = []
    with Tree(trial.directory.resolve()) as tree:
        for place in step_places(tree):
            names = _from_report(tree.read_json(f"{place}verifier/ctrf.json", _OUTPUT_LIMIT))
            text = "" if names else tree.read_text(f"{place}verifier/test-stdout.txt", _OUTPUT_LIMIT) or ""
            found += names or [pytest or unittest for pytest, unittest in _FAILED_LINE.findall(text)]
    return list(dict.fromkeys(name[:200] for name in found))


def _from_report(report: Any) -> list[str]:
    try:
        return [str(test["name"]) for test in report["results"]["tests"] if test.get("status") in _NOT_PASSED]
    except (TypeError, KeyError, AttributeError):
        return []


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]
