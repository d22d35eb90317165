"""From a configuration to a plan: tasks are found and read, and asked what they want to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pier.job.config import DatasetConfig, JobConfig, TaskConfig
from pier.job.consent import Consent
from pier.job.layout import to_disk
from pier.job.plan import Plan, PlannedTask, make_plan
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


def plan_job(
    config: JobConfig, env: Mapping[str, str], *, yes: bool = False, warn: Warn = lambda _: None
) -> tuple[Plan, dict[str, Any]]:
    """The plan that a configuration asks for, and the configuration as it may stand on disk. `yes` is consent to what
    tasks want to know of this environment; `warn` is called with unknown keys and other warnings."""
    consent = Consent(env, given=yes)
    disk = to_disk(config, env)
    redactor = Redactor(job_secrets(config.model_dump(mode="json"), env))
    found = _find(config, warn)
    tasks = [task for source, origins in found for task in _load(source, origins, config, consent, warn)]
    tasks = [replace(task, **redactor.value({"path": task.path, "git_url": task.git_url})) for task in tasks]
    consent.ask()
    settings = {key: value for key, value in disk.items() if key not in _OUTSIDE_TRIALS}
    return make_plan(tasks, disk["agents"], settings, config.n_attempts), disk


def _find(config: JobConfig, warn: Warn) -> list[tuple[DatasetConfig | TaskConfig, list[Origin]]]:
    """The tasks that each source contributes. A pattern must match in one of the sources that it is given for."""
    found: list[tuple[DatasetConfig | TaskConfig, list[Origin]]] = []
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


def _load(
    source: DatasetConfig | TaskConfig, origins: list[Origin], config: JobConfig, consent: Consent, warn: Warn
) -> list[PlannedTask]:
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
