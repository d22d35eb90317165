"""The files of a job's directory that other programs read: `config.json`, `lock.json`, `result.json`.

Their shapes are Harbor's. They are derived from the ledger (and the numbers of model calls from `gateway.json`), so
losing one loses nothing.

    <job>/config.json      what was asked for, without secrets
    <job>/lock.json        the plan: every trial with the digest of its task
    <job>/result.json      counts, metrics and which trial got what
    <job>/gateway.json     the numbers of the model calls (`pier.job.numbers`)
    <job>/job.log          what happened, as text
    <job>/journal.jsonl    the truth (`pier.job.ledger`)
    <job>/.retries/        tries that no longer count, as they were
    <job>/<trial>/         one directory per trial
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pier import __version__
from pier.agent.registry import pack_spec
from pier.errors import PierError
from pier.files import write, write_json
from pier.job.config import JobConfig
from pier.job.ledger import Ledger, Outcome, now
from pier.job.metrics import Cost, Graded, Summary, summarise
from pier.job.numbers import calls_of
from pier.job.plan import Plan, PlannedTask
from pier.job.templates import hide
from pier.sandbox import BACKENDS

CONFIG, LOCK, RESULT, LOG, RETRIES = "config.json", "lock.json", "result.json", "job.log", ".retries"
_ELSEWHERE_KNOWN = ("docker",)
"""Backends that other programs know by the same name."""


def to_disk(config: JobConfig, env: Mapping[str, str]) -> dict[str, Any]:
    """A configuration as it may stand on disk, in a shape that Harbor reads too."""
    data = config.model_dump(mode="json")
    backend = config.environment.backend
    known = backend in _ELSEWHERE_KNOWN
    data["environment"]["type"] = backend if known else None
    data["environment"]["import_path"] = None if known else BACKENDS.get(backend, backend)
    return hide(data, env)


def write_config(directory: Path, data: dict[str, Any]) -> None:
    write_json(directory / CONFIG, data)


def write_lock(directory: Path, config: dict[str, Any], plan: Plan) -> None:
    """Write the plan as a Harbor lock. One trial's text is made once per task and agent, whatever the attempts."""
    texts: dict[tuple[int, int], str] = {}
    rows: list[str] = []
    for trial in plan.trials:
        place = (trial.task, trial.agent)
        if place not in texts:
            texts[place] = json.dumps(_trial_lock(plan.tasks[trial.task], plan.agents[trial.agent], config))
        rows.append(texts[place])
    head = {
        "schema_version": 3,
        "created_at": now(),
        "pier": {"version": __version__, "packs": _packs(plan.agents)},
        "harbor": {"version": None},
        "n_concurrent_trials": config["n_concurrent_trials"],
        "retry": config["retry"],
    }
    body = json.dumps(head)[:-1] + ', "trials": [\n' + ",\n".join(rows) + "\n]}\n"
    write(directory / LOCK, body)


def _packs(agents: Iterable[dict[str, Any]]) -> dict[str, dict[str, str | None]]:
    """What the agents' packs are made of, by the agents' names; agents that cannot be found here are left out."""
    found: dict[str, dict[str, str | None]] = {}
    for agent in agents:
        name = agent.get("import_path") or agent.get("name") or ""
        with contextlib.suppress(PierError):
            if spec := pack_spec(name):
                found[name] = {"source": spec.source, "package": spec.package, "version": spec.version}
    return found


_SHARED_SETTINGS = (
    "timeout_multiplier",
    "agent_timeout_multiplier",
    "verifier_timeout_multiplier",
    "agent_setup_timeout_multiplier",
    "environment_build_timeout_multiplier",
)


def _trial_lock(task: PlannedTask, agent: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 2,
        "task": {
            "name": task.name,
            "type": "git" if task.git_url else "local",
            "digest": task.digest,
            "source": task.source,
            "path": task.git_path or task.path,
            "git_url": task.git_url,
            "git_commit_id": task.git_commit_id,
        },
        **{key: config[key] for key in _SHARED_SETTINGS},
        "agent": agent,
        "environment": config["environment"],
        "verifier": config["verifier"],
    }


def write_result(ledger: Ledger, config: JobConfig, running: int = 0, *, durable: bool = False) -> None:
    """Write where the job stands, as Harbor's `result.json`."""
    text = json.dumps(result_of(ledger, config, running), indent=2)
    write(ledger.directory / RESULT, text + "\n", durable=durable)


def result_of(ledger: Ledger, config: JobConfig, running: int = 0) -> dict[str, Any]:
    """Where the job stands, as Harbor's `JobResult`; `pier` holds what Harbor has no place for."""
    planned = {trial.id for trial in ledger.plan.trials}
    counted = {id: outcome for id, outcome in ledger.outcomes.items() if id in planned}
    cost = cost_of(counted.values())
    stats = {
        "n_completed_trials": len(counted),
        "n_errored_trials": sum(outcome.fault is not None for outcome in counted.values()),
        "n_running_trials": running,
        "n_pending_trials": max(len(planned) - len(counted) - running, 0),
        "n_cancelled_trials": 0,
        "n_retries": ledger.n_retries,
        **usage(counted.values()),
        "evals": {group.key: _eval_stats(group, config) for group in groups_of(ledger)},
    }
    return {
        "id": ledger.id,
        "started_at": ledger.created_at,
        "updated_at": now(),
        "finished_at": ledger.finished_at,
        "n_total_trials": len(planned),
        "stats": stats,
        "pier": {
            "faults_by_blame": Counter(outcome.fault.blame for outcome in counted.values() if outcome.fault),
            "model_calls": calls_of(ledger.directory),
            **({"cost": {"known_usd": cost.known, "trials_unknown": cost.unknown}} if cost.unknown else {}),
        },
    }


def usage(outcomes: Collection[Outcome]) -> dict[str, float | int | None]:
    """Tokens summed up, None where nothing is known; and the cost, None if a part of it is unknown."""
    totals: dict[str, float | int | None] = dict.fromkeys(("n_input_tokens", "n_cache_tokens", "n_output_tokens"))
    for outcome in outcomes:
        for key, value in zip(totals, outcome.tokens, strict=True):
            if value is not None:
                totals[key] = (totals[key] or 0) + value
    return {**totals, "cost_usd": cost_of(outcomes).total}


def cost_of(outcomes: Iterable[Outcome]) -> Cost:
    """What trials cost together."""
    cost = Cost()
    for outcome in outcomes:
        cost.add(outcome.cost)
    return cost


class Group:
    """The trials of one agent of the plan on one dataset, which are reported together."""

    def __init__(self, agent: str, model: str | None, short: str | None, dataset: str) -> None:
        self.agent, self.model, self.dataset = agent, model, dataset
        self.key = "__".join(part for part in (agent, short, dataset) if part)
        """In `evals`: as Harbor writes it, with more where two groups would have the same."""
        self.trials: list[tuple[str, str, Outcome | None]] = []
        """Each trial's name, its task's name and how it ended (None if it has not)."""

    @property
    def steps(self) -> tuple[int, int] | None:
        """How many steps of the trials that have ended were graded, and how many there are; None without steps."""
        found = [outcome.steps for _, _, outcome in self.trials if outcome is not None and outcome.steps is not None]
        return (sum(graded for graded, _ in found), sum(total for _, total in found)) if found else None

    def summary(self) -> Summary:
        return summarise(Graded(task, outcome.rewards if outcome else None) for _, task, outcome in self.trials)


def groups_of(ledger: Ledger) -> list[Group]:
    """All planned trials by agent and dataset, in the order of the plan."""
    groups: dict[tuple[int, str], Group] = {}
    plan = ledger.plan
    labels = agent_labels(plan.agents)
    for trial in plan.trials:
        task = plan.tasks[trial.task]
        key = (trial.agent, task.source or "adhoc")
        if key not in groups:
            name, short = labels[trial.agent]
            groups[key] = Group(name, plan.agents[trial.agent].get("model_name"), short, key[1])
        groups[key].trials.append((trial.name, task.name, ledger.outcomes.get(trial.id)))
    return list(groups.values())


def agent_labels(agents: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None]]:
    """What each agent and its model are called, no two alike. A model goes without its provider, as in Harbor, where
    that is enough; agents that are otherwise the same show the options in which they differ, or are numbered."""
    names = [str(agent.get("name") or agent.get("import_path")) for agent in agents]
    models: list[str | None] = [agent.get("model_name") for agent in agents]
    short = [model.partition("/")[2] or model if model else None for model in models]
    providers: dict[tuple[str, str | None], set[str | None]] = defaultdict(set)
    for name, brief, model in zip(names, short, models, strict=True):
        providers[name, brief].add(model)
    labels = [
        (name, model if len(providers[name, brief]) > 1 else brief)
        for name, brief, model in zip(names, short, models, strict=True)
    ]
    for label in [label for label, count in Counter(labels).items() if count > 1]:
        alike = [place for place, each in enumerate(labels) if each == label]
        told = _differences([agents[place] for place in alike])
        for number, place in enumerate(alike):
            labels[place] = (f"{label[0]}{told[number] or f' #{number + 1}'}", label[1])
    return labels


def _differences(agents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options in which agents differ, in brackets; empty texts if these are equal."""
    options = [{**(agent.get("env") or {}), **(agent.get("kwargs") or {})} for agent in agents]
    names = dict.fromkeys(name for each in options for name in each)
    differing = [name for name in names if len({json.dumps(each.get(name)) for each in options}) > 1]
    told = [",".join(f"{name}={each[name]!s:.40}" for name in differing if name in each) for each in options]
    return [f"({each})" if each else "" for each in told] if len(set(told)) == len(told) else [""] * len(told)


def _eval_stats(group: Group, config: JobConfig) -> dict[str, Any]:
    rewards: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    faults: dict[str, list[str]] = defaultdict(list)
    for name, _, outcome in group.trials:
        if outcome is None:
            continue
        for key, value in (outcome.rewards or {}).items():
            rewards[key][value].append(name)
        if outcome.fault is not None:
            faults[outcome.fault.type].append(name)
    summary = group.summary()
    return {
        "n_trials": summary.n_verdicts,
        "n_errors": sum(len(names) for names in faults.values()),
        "metrics": [_metric(summary, metric.type) for metric in config.metrics] or [_metric(summary, "mean")],
        "pass_at_k": summary.pass_at_k,
        "reward_stats": rewards,
        "exception_stats": faults,
        "pier": {**describe(summary), "steps": _steps(group)},
    }


def _steps(group: Group) -> dict[str, int] | None:
    return {"graded": group.steps[0], "total": group.steps[1]} if group.steps else None


_METRICS = {"mean": "mean", "sum": "total", "min": "low", "max": "high"}


def _metric(summary: Summary, name: str) -> dict[str, float]:
    values: dict[str, float] = getattr(summary, _METRICS[name])
    return {name: next(iter(values.values()))} if len(values) == 1 else dict(values)


def describe(summary: Summary) -> dict[str, Any]:
    """A summary as plain data."""
    return {
        "n_trials": summary.n_trials,
        "n_verdicts": summary.n_verdicts,
        "n_tasks": summary.n_tasks,
        "coverage": summary.coverage,
        "mean": summary.mean,
        "confidence": {
            key: {"low": found.low, "high": found.high, "level": 0.95, "method": found.method}
            for key, found in summary.interval.items()
        },
        "pass_at_k": {str(k): value for k, value in summary.pass_at_k.items()},
    }
