"""From a configuration to a plan: tasks are found and read, and asked what they want to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from pier.job.config import DatasetConfig, JobConfig, TaskConfig
from pier.job.consent import Consent
from pier.job.identity import Identity
from pier.job.layout import to_disk
from pier.job.plan import Plan, PlannedTask, check_tasks, make_plan
from pier.job.templates import job_secrets
from pier.redact import Redactor
from pier.task import load_task
from pier.task.model import Origin
from pier.task.sources import Selection, check_patterns, find_tasks, select

NOT_ASKED = (
    "job_name",
    "jobs_dir",
    "debug",
    "quiet",
    "n_concurrent_trials",
    "n_concurrent_builds",
    "retry",
    "budget",
    "provider_retry",
)
"""What may differ between two commands that ask for the same job."""

_OUTSIDE_TRIALS = (*NOT_ASKED, "agents", "datasets", "tasks", "metrics", "n_attempts", "keep_state", "strict")
"""What does not change the result of a single trial, or is in its identity already."""


Warn = Callable[[str], None]


MakePlan = Callable[[bytes], Plan]
"""Makes the plan of a job whose secrets are hashed with this key."""


def plan_job(
    config: JobConfig, env: Mapping[str, str], *, yes: bool = False, warn: Warn = lambda _: None
) -> tuple[MakePlan, dict[str, Any]]:
    """The plan that a configuration asks for, and the configuration as it may stand on disk. `yes` is consent to what
    tasks want to know of this environment; `warn` is called with unknown keys and other warnings."""
    consent = Consent(env, given=yes)
    disk = to_disk(config, env)
    redactor = Redactor(job_secrets(config.model_dump(mode="json"), env))
    rows = [(source, _load(source, origins, config, consent, warn)) for source, origins in _find(config, warn)]
    found = [task for each in distinct_sources(rows) for task in each]
    check_tasks(found)
    wanted = [consent.values.get(task.path, {}) for task in found]
    found = [replace(task, **redactor.value({"path": task.path, "git_url": task.git_url})) for task in found]
    consent.ask()
    counted = Identity(config, env, _OUTSIDE_TRIALS)

    def make(key: bytes) -> Plan:
        variables = [counted.variables(values, key) for values in wanted]
        agents, settings = counted.agents(key), counted.settings(key)
        return make_plan(found, agents, settings, config.n_attempts, shown=disk["agents"], variables=variables)

    return make, disk


Source = DatasetConfig | TaskConfig


def distinct_sources(rows: list[tuple[Source, list[PlannedTask]]]) -> list[list[PlannedTask]]:
    """The tasks of each source. Two datasets of one name differ by more of their paths, or by version."""
    places: dict[str, set[str]] = {}
    for source, tasks in rows:
        for task in tasks if isinstance(source, DatasetConfig) else ():
            places.setdefault(task.source or "", set()).add(_place(source))
    return [
        [replace(task, source=_distinct(task.source, _place(source), places)) for task in tasks]
        for source, tasks in rows
    ]


def _place(source: Source) -> str:
    if isinstance(source, TaskConfig) or source.path:
        return str(source.path)
    return f"{source.name}@{source.version}"


def _distinct(name: str | None, place: str, places: Mapping[str, set[str]]) -> str | None:
    others = places.get(name or "", set()) - {place}
    if name is None or not others:
        return name
    parts = PurePosixPath(place).parts
    for size in range(2, len(parts) + 1):
        tail = "/".join(parts[-size:])
        if not any(f"/{other}".endswith(f"/{tail}") for other in others):
            return tail
    return place


def _find(config: JobConfig, warn: Warn) -> list[tuple[Source, list[Origin]]]:
    """The tasks that each source contributes. A pattern must match in one of the sources that it is given for."""
    found: list[tuple[Source, list[Origin]]] = []
    matching: dict[str, list[Origin]] = {}
    for source in config.datasets:
        version = f"@{source.version}" if source.version else ""
        place = source.path or f"{source.registry_path or 'registry.json'}#{source.name}{version}"
        origins = find_tasks(place, warn=warn)
        for pattern in source.task_names or ():
            matching.setdefault(pattern, []).extend(origins)
        selection = Selection(
            source.task_names or (), source.exclude_task_names or (), source.n_tasks, source.sample_seed
        )
        found.append((source, select(origins, selection)))
    for pattern, origins in matching.items():
        check_patterns([pattern], origins)
    for source in config.tasks:
        commit = f"@{source.git_commit_id}" if source.git_commit_id else ""
        place = f"{source.git_url}{commit}#{source.path}" if source.git_url else source.path
        found.append((source, select(find_tasks(place, warn=warn), Selection())))
    return found


def _load(source: Source, origins: list[Origin], config: JobConfig, consent: Consent, warn: Warn) -> list[PlannedTask]:
    tasks = [
        load_task(origin.path, strict=config.strict, verify=not config.verifier.disable, origin=origin)
        for origin in origins
    ]
    for task in tasks:
        consent.note(task)
        for key in task.unknown:
            warn(f"{task.path / 'task.toml'}: {key}")
    return [
        PlannedTask(
            name=task.name,
            digest=task.digest,
            path=str(task.path),
            source=task.origin.source or (source.source if isinstance(source, TaskConfig) else None),
            git_url=task.origin.git_url,
            git_commit_id=task.origin.git_commit,
            git_path=task.origin.git_path,
        )
        for task in tasks
    ]
