"""The settings of a job. Job files, the flags of `pier run`, `--print-config`, the lock and the reference page are
generated from this one model.

Keys are Harbor's, so that each program reads the other's files; Harbor ignores keys that only pier has (`image`,
`keep_state`, `n_concurrent_builds`, ...). The tables of a trial are in `pier.trial.config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt
from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from pier.errors import Blame
from pier.files import is_plain_name
from pier.task.load import model_in
from pier.trial.config import (
    Above0,
    AgentConfig,
    BudgetConfig,
    EnvironmentConfig,
    Flag,
    FlagPrefix,
    SettingsTable,
    VerifierConfig,
    is_empty,
)


class RetryConfig(SettingsTable):
    """Retries of failed trials. Without lists, the error's `retryable` decides."""

    group = "Retries"

    max_retries: Annotated[int, Flag("-r --max-retries", "N")] = Field(
        default=0, ge=0, description="Retries of a trial whose failure was not the agent's fault."
    )
    include_exceptions: Annotated[list[str] | None, Flag("--retry-include", "ERROR")] = Field(
        default=None, description="Retry only these errors: class name or code."
    )
    exclude_exceptions: Annotated[list[str] | None, Flag("--retry-exclude", "ERROR")] = Field(
        default=None, description="Never retry these errors."
    )
    blame: list[Blame] | None = Field(
        default=None, exclude_if=is_empty, description="Retry only faults with this blame, such as `infra`."
    )
    wait_multiplier: float = Field(default=2.0, ge=1, description="Factor between two waits.")
    min_wait_sec: float = Field(default=1.0, ge=0, description="Wait before the first retry.")
    max_wait_sec: float = Field(default=60.0, ge=0, description="Longest wait before a retry.")


class ProviderRetryConfig(SettingsTable):
    """Retries of a model call by the gateway while a provider is busy or down, before the agent sees the error. After
    a rate limit, ten times as many attempts are made within the same time."""

    group = "Retries"

    max_attempts: Annotated[int, Flag("--provider-attempts", "N")] = Field(
        default=6, ge=1, description="Attempts of each model call at a failing provider."
    )
    max_wait_sec: Annotated[float, Flag("--provider-wait", "SECONDS")] = Field(
        default=180.0, ge=0, description="Longest wait for a failing provider."
    )


class DatasetConfig(SettingsTable):
    """A set of tasks: a directory, a `dataset.toml`, a git reference, or a named one from a `registry.json`."""

    group = "Tasks"

    path: Annotated[str | None, Flag("-p --path", "PATH")] = Field(
        default=None, description="A task, a directory of tasks, or URL#PATH of a git repository; same as TASKS."
    )
    name: Annotated[str | None, Flag("-d --dataset", "NAME[@VERSION]")] = Field(
        default=None, description="A dataset of --registry-path."
    )
    version: str | None = Field(default=None, description="The version of the named dataset.")
    registry_path: Annotated[str | None, Flag("--registry-path", "FILE")] = Field(
        default=None, description="A registry.json file."
    )
    task_names: Annotated[list[str] | None, Flag("-i --include-task-name", "GLOB", common=6)] = Field(
        default=None, description="Run only tasks whose name matches."
    )
    exclude_task_names: Annotated[list[str] | None, Flag("-x --exclude-task-name", "GLOB")] = Field(
        default=None, description="Skip tasks whose name matches."
    )
    n_tasks: Annotated[int | None, Flag("-l --n-tasks", "N", common=7)] = Field(
        default=None, gt=0, description="Run only the first N tasks."
    )
    sample_seed: Annotated[int | None, Flag("--sample-seed", "SEED")] = Field(
        default=None, description="Shuffle the tasks with this seed before taking the first N."
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> DatasetConfig:
        if (self.path is None) == (self.name is None):
            raise ValueError("expected either path or name")
        return self


class JobTask(SettingsTable):
    """One task: a directory, or `path` inside the git repository `git_url`."""

    group = "Tasks"

    path: Annotated[str, Flag("-t --task", "PATH")] = Field(description="A single task: a directory, or URL#PATH.")
    git_url: str | None = Field(default=None, description="The git repository that holds the task.")
    git_commit_id: str | None = Field(default=None, description="The commit to check out.")
    source: str | None = Field(default=None, description="The dataset that the task belongs to.")


class MetricConfig(SettingsTable):
    """A metric over the rewards of one agent on one dataset."""

    group = "Job"

    type: Literal["mean", "sum", "min", "max"] = Field(default="mean", description="mean, sum, min or max.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Ignored; accepted for Harbor's files.")


class JobConfig(SettingsTable):
    """All settings of a job."""

    group = "Job"

    job_name: Annotated[str | None, Flag("--job-name", "NAME")] = Field(
        default=None, description="Name of the job's directory in --jobs-dir.  [default: the time]"
    )
    jobs_dir: Annotated[str, Flag("-o --jobs-dir", "DIRECTORY", common=9)] = Field(
        default="jobs", description="Directory of jobs."
    )
    n_attempts: Annotated[int, Flag("-k --group --n-attempts", "N", common=4)] = Field(
        default=1, ge=1, description="Attempts of each agent at each task; in training, the size of a group."
    )
    timeout_multiplier: Annotated[float, Flag("--timeout-multiplier", "FACTOR", group="Time limits")] = Field(
        default=1.0, gt=0, description="Factor for all time limits."
    )
    agent_timeout_multiplier: Annotated[Above0, Flag("--agent-timeout-multiplier", "FACTOR", group="Time limits")] = (
        Field(default=None, description="Factor for the agent's time limit, overriding --timeout-multiplier.")
    )
    verifier_timeout_multiplier: Annotated[
        Above0, Flag("--verifier-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="Factor for the verifier's time limit.")
    agent_setup_timeout_multiplier: Annotated[
        Above0, Flag("--agent-setup-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="Factor for the time limit of agent installation.")
    environment_build_timeout_multiplier: Annotated[
        Above0, Flag("--environment-build-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="Factor for the time limit of image builds.")
    debug: bool = Field(default=False, description="Print tracebacks and debug messages; same as --debug.")
    n_concurrent_trials: Annotated[int, Flag("-n --n-concurrent", "N", common=3)] = Field(
        default=4, ge=1, description="Number of concurrent trials."
    )
    n_concurrent_builds: Annotated[int, Flag("--n-concurrent-builds", "N")] = Field(
        default=2, ge=1, description="Number of concurrent image builds."
    )
    quiet: Annotated[bool, Flag("-q --quiet --silent", group="Output")] = Field(
        default=False, description="Print nothing but errors."
    )
    skip_credential_checks: Annotated[bool, Flag("--skip-credential-checks", group="Model")] = Field(
        default=False, exclude_if=is_empty, description="Do not check for API keys before the job starts."
    )
    retry: RetryConfig = Field(default_factory=RetryConfig, description="Retries of trials.")
    provider_retry: ProviderRetryConfig = Field(
        default_factory=ProviderRetryConfig, description="Retries of model calls."
    )
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, description="The sandboxes.")
    verifier: VerifierConfig = Field(default_factory=VerifierConfig, description="The verifier.")
    metrics: list[MetricConfig] = Field(default_factory=list, description="Metrics to report.")
    agents: list[AgentConfig] = Field(default_factory=lambda: [AgentConfig()], description="The agents.")
    datasets: list[DatasetConfig] = Field(default_factory=list, description="Sets of tasks.")
    tasks: list[JobTask] = Field(default_factory=list, description="Single tasks.")
    artifacts: Annotated[list[str | dict[str, Any]], Flag("--artifact", "PATH")] = Field(
        default_factory=list, description="A path in the sandbox to keep, or a table {source, destination, exclude}."
    )
    extra_instructions: Annotated[
        list[str],
        Flag("--extra-instruction-path", "FILE", "text-file", joins=True, help="A file to add to each instruction."),
        Flag("--extra-instruction", "TEXT", joins=True),
    ] = Field(default_factory=list, description="Text to add to each instruction.")
    budget: Annotated[BudgetConfig, FlagPrefix("--job-", "Limits for the whole job")] = Field(
        default_factory=BudgetConfig, description="Limits for all trials together; same keys as agents.budget."
    )
    image: Annotated[str | None, Flag("--image", "REF", group="Sandbox")] = Field(
        default=None, description="Image to use instead of each task's; `host` is this machine's software."
    )
    keep_state: Annotated[bool, Flag("--keep-state")] = Field(
        default=False, description="Keep the final state of each sandbox for `pier job regrade`."
    )
    regrade_of: str | None = Field(default=None, description="The job that this one regrades.")
    review: bool = Field(
        default=False, exclude_if=is_empty, description="Whether the tasks are reviews by `pier critique run`."
    )
    strict: Annotated[bool, Flag("--strict", group="Tasks")] = Field(
        default=False, description="Refuse tasks with unknown keys."
    )

    @field_validator("job_name")
    @classmethod
    def _is_one_name(cls, name: str | None) -> str | None:
        if name is not None and not is_plain_name(name):
            raise ValueError("expected the name of one directory")
        return name

    @field_validator("agents")
    @classmethod
    def _some_agent(cls, agents: list[AgentConfig]) -> list[AgentConfig]:
        return agents or [AgentConfig()]


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the model, its key (`agents.budget.turns`), and one of its flags if it has any. A field with several
    flags yields several settings."""

    key: str
    field: FieldInfo
    flag: Flag | None
    names: tuple[str, ...]
    group: str

    @property
    def help(self) -> str:
        return (self.flag and self.flag.help) or self.field.description or ""


def settings(
    model: type[SettingsTable] = JobConfig, place: str = "", prefix: FlagPrefix | None = None
) -> Iterator[Setting]:
    """Yield all settings in the model's order."""
    for name, field in model.model_fields.items():
        key = f"{place}{name}"
        if (inner := model_in(field.annotation)) is not None and issubclass(inner, SettingsTable):
            own = next((each for each in field.metadata if isinstance(each, FlagPrefix)), None)
            yield from settings(inner, f"{key}.", own)
            continue
        flags = [each for each in field.metadata if isinstance(each, Flag)]
        for flag in flags or [None]:
            names = tuple(flag.names.split()) if flag else ()
            if prefix:
                names = tuple(each.replace("--", prefix.prefix, 1) for each in names)
            group = prefix.group if prefix else (flag and flag.group) or model.group
            yield Setting(key, field, flag, names, group)


_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a table", list: "a list"}


def expected(field: FieldInfo) -> str:
    """Describe the values that a field accepts, for error messages."""
    if named := [flag.expects for flag in field.metadata if isinstance(flag, Flag) and flag.expects]:
        return named[0]
    nouns = [
        f"one of {', '.join(get_args(kind))}"
        if get_origin(kind) is Literal
        else _NOUNS.get(get_origin(kind) or kind, "a table")
        for kind in _kinds(field.annotation)
        if kind is not type(None)
    ]
    bounds = [f" >= {bound.ge}" for bound in field.metadata if isinstance(bound, Ge)]
    bounds += [f" > {bound.gt}" for bound in field.metadata if isinstance(bound, Gt)]
    return " or ".join(nouns) + "".join(bounds)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for each in get_args(annotation) for kind in _kinds(each))
    return (annotation,)
