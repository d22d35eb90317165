"""The settings of a job: one model from which job files, the flags of `pier run`, `--print-config`, the lock and the
reference page are made.

Keys are Harbor's, so that either program reads the other's files; keys that only pier has (`image`, `keep_state`,
`n_concurrent_builds`, ...) are ignored by Harbor. A field's description is its help; a `Flag` in its annotation is its
spelling on the command line. Fields added after the first release are left out of dumps at their default
(`exclude_if`), so that a job from before they existed is still recognised as the same job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from pier.errors import Blame
from pier.files import is_plain_name

Policy = Literal["auto", "limit", "request", "guarantee", "ignore"]
ApiFormat = Literal["openai_chat_completions", "openai_responses", "anthropic_messages", "google_generate_content"]
Form = Literal["value", "pairs", "typed-pairs", "json", "text-file", "mcp-file"]
"""How a flag's text becomes a value: as it is, from NAME=VALUE (typed: VALUE may be JSON), from JSON, from a file."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The spelling of a setting on the command line: its names, separated by spaces, with `/` before the negative ones.
    `common` is its place among the flags that help shows first. With `entry` the value is that entry of a table; with
    `joins` a list adds to that of the job files."""

    names: str
    metavar: str | None = None
    form: Form = "value"
    group: str | None = None
    common: int = 0
    help: str | None = None
    entry: str | None = None
    joins: bool = False
    hidden: bool = False
    expects: str | None = None


@dataclass(frozen=True, slots=True)
class FlagPrefix:
    """The prefix of a table's flags instead of `--`, and their group."""

    prefix: str
    group: str


def _is_empty(value: Any) -> bool:
    return not value


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )
    group: ClassVar[str]

    @field_validator("*")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        """JSON has no NaN and no infinity: written down, they are null, as which another trial may count."""
        if isinstance(value, dict | list) and not _all_finite(value):
            raise ValueError("expected finite numbers")
        return value


def _all_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_all_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


_Above0 = Annotated[float | None, Gt(0)]


class BudgetConfig(_Part):
    """Limits on model use: an agent's are for each of its trials, the job's for all trials together."""

    group = "Limits for each trial"

    turns: Annotated[int | None, Flag("--max-turns", "N")] = Field(
        default=None, gt=0, description="Stop after N model calls."
    )
    input_tokens: int | None = Field(default=None, gt=0, description="Stop after this many input tokens.")
    output_tokens: int | None = Field(default=None, gt=0, description="Stop after this many output tokens.")
    total_tokens: Annotated[int | None, Flag("--max-tokens", "N")] = Field(
        default=None, gt=0, description="Stop after N tokens, input and output together."
    )
    cost_usd: Annotated[float | None, Flag("--max-cost", "USD", common=8)] = Field(
        default=None, gt=0, description="Stop after this cost in dollars."
    )
    wall_time: float | None = Field(default=None, gt=0, description="Stop after this many seconds.")
    requests_per_minute: int | None = Field(default=None, gt=0, description="Maximum model calls per minute.")


class AgentConfig(_Part):
    """One agent with its model and options. Each agent of a job runs on each of its tasks."""

    group = "Agent"

    name: Annotated[
        str | None,
        Flag("-a --agent", "NAME", common=1),
        Flag("--agent-import-path", "MODULE:CLASS", hidden=True),
    ] = Field(default=None, description="The agent: a name, NAME@VERSION or module:Class.  [default: oracle]")
    import_path: str | None = Field(default=None, description="An agent written in Python, module:Class.")
    model_name: Annotated[str | None, Flag("-m --model", "MODEL", common=2)] = Field(
        default=None, description="The model, e.g. openai/gpt-5, script:FILE or replay:FILE; repeat for several."
    )
    base_url: Annotated[str | None, Flag("--base-url", "URL", group="Model", expects="an http or https URL")] = Field(
        default=None, pattern=r"^(https?://[^/\s]+\S*|\$\{.*\})$", exclude_if=_is_empty,
        description="Address of the model's API instead of the provider's own.",
    )  # fmt: skip
    model_api_key_name: Annotated[
        str | None, Flag("--api-key-name", "NAME", group="Model", expects="the name of a variable")
    ] = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", exclude_if=_is_empty,
        description="Variable of this machine that holds the model's API key.",
    )  # fmt: skip
    model_api_format: Annotated[ApiFormat | None, Flag("--api-format", "FORMAT", group="Model")] = Field(
        default=None, exclude_if=_is_empty,
        description="Format of the model's API: openai_chat_completions, openai_responses, anthropic_messages or "
        "google_generate_content.",
    )  # fmt: skip
    kwargs: Annotated[
        dict[str, Any],
        Flag("--ak --agent-kwarg", "K=V", "typed-pairs"),
        Flag("--effort", "LEVEL", entry="reasoning_effort", help="Reasoning effort, if the agent supports it."),
    ] = Field(default_factory=dict, description="An option of the agent.")
    env: Annotated[dict[str, str], Flag("--ae --agent-env", "K=V", "pairs")] = Field(
        default_factory=dict, description="A variable for the agent; ${NAME} is filled in right before use."
    )
    override_timeout_sec: _Above0 = Field(default=None, description="Time limit instead of the task's.")
    override_setup_timeout_sec: _Above0 = Field(default=None, description="Time limit for installing the agent.")
    max_timeout_sec: _Above0 = Field(default=None, description="Upper bound of the task's time limit.")
    extra_allowed_hosts: Annotated[list[str], Flag("--allow-agent-host", "HOST", joins=True)] = Field(
        default_factory=list, description="A host that the agent may reach."
    )
    mcp_servers: Annotated[list[dict[str, Any]], Flag("--mcp-config", "FILE", "mcp-file", joins=True)] = Field(
        default_factory=list, description="MCP servers for the agent, from a JSON file such as .mcp.json."
    )
    direct: Annotated[bool, Flag("--direct", group="Model")] = Field(
        default=False,
        description="Let the agent call its provider itself, with keys from --ae: no recording, no limits.",
    )
    install_in_sandbox: Annotated[bool, Flag("--install-in-sandbox")] = Field(
        default=False, description="Install the agent in each sandbox with npm or pip instead of mounting a pack."
    )
    sampling: Annotated[dict[str, Any], Flag("--sampling", "K=V", "typed-pairs", group="Model")] = Field(
        default_factory=dict, exclude_if=_is_empty,
        description="A sampling parameter that replaces the agent's: temperature, top_p, max_tokens, seed, stop, ...",
    )  # fmt: skip
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="Limits for each trial of this agent.")

    @model_validator(mode="after")
    def _has_a_name(self) -> AgentConfig:
        if self.name is None and self.import_path is None:
            object.__setattr__(self, "name", "oracle")
        return self

    @property
    def connection(self) -> dict[str, str]:
        """Replaces the model's own address, key and format."""
        return self.model_dump(include={"base_url", "model_api_key_name", "model_api_format"}, exclude_none=True)

    @property
    def label(self) -> str:
        """The name of the agent in tables and results."""
        return self.name or str(self.import_path)


class EnvironmentConfig(_Part):
    """The sandboxes that trials run in. Other programs find pier's backends by `import_path`."""

    group = "Sandbox"

    type: Annotated[
        str | None,
        Flag("-e --env --environment", "BACKEND", common=5),
        Flag("--environment-import-path", "MODULE:CLASS", hidden=True),
    ] = Field(default=None, description="Where trials run: local, docker or module:Class.  [default: local]")
    import_path: str | None = Field(default=None, description="A backend written in Python, module:Class.")
    force_build: Annotated[bool, Flag("--force-build/--no-force-build")] = Field(
        default=False, description="Build images even if the task names a prebuilt one."
    )
    delete: Annotated[bool, Flag("--delete/--no-delete")] = Field(
        default=True, description="Delete each sandbox's state after its trial."
    )
    cpu_enforcement_policy: Annotated[Policy, Flag("--cpus", "POLICY")] = Field(
        default="auto", description="How CPU limits are enforced: auto or limit."
    )
    memory_enforcement_policy: Annotated[Policy, Flag("--memory", "POLICY")] = Field(
        default="auto", description="How memory limits are enforced: auto or limit."
    )
    override_cpus: Annotated[float | None, Flag("--override-cpus", "N")] = Field(
        default=None, gt=0, description="CPUs for each sandbox; may be a fraction."
    )
    override_memory_mb: Annotated[int | None, Flag("--override-memory-mb", "MB")] = Field(
        default=None, ge=0, description="Memory for each sandbox; 0 for unlimited."
    )
    override_storage_mb: Annotated[int | None, Flag("--override-storage-mb", "MB")] = Field(
        default=None, ge=0, description="Disk for each sandbox; 0 for unlimited."
    )
    override_processes: Annotated[int | None, Flag("--override-processes", "N")] = Field(
        default=None, ge=0, description="Processes for each sandbox; 0 for unlimited."
    )
    override_gpus: Annotated[int | None, Flag("--override-gpus", "N")] = Field(
        default=None, ge=0, description="GPUs for each sandbox."
    )
    mounts: Annotated[list[dict[str, Any]], Flag("--mounts --mounts-json", "JSON", "json")] = Field(
        default_factory=list,
        description="Mounts: a list of {type: bind, source, target, read_only} or {type: tmpfs, target}.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Variables of each sandbox.")
    kwargs: Annotated[dict[str, Any], Flag("--ek --environment-kwarg", "K=V", "typed-pairs")] = Field(
        default_factory=dict, description="An option of the backend."
    )
    extra_allowed_hosts: Annotated[list[str], Flag("--allow-environment-host", "HOST", joins=True)] = Field(
        default_factory=list, description="A host that sandboxes may reach, in every phase."
    )

    @model_validator(mode="before")
    @classmethod
    def _old_spelling(cls, data: Any) -> Any:
        if isinstance(data, dict) and ("mounts" in data or "mounts_json" in data):
            given = data.get("mounts") or data.get("mounts_json") or []
            data = {key: value for key, value in data.items() if key != "mounts_json"} | {"mounts": given}
        return data

    @property
    def backend(self) -> str:
        """The backend as `open_backend` takes it."""
        from pier.sandbox import BACKENDS

        known = {place: name for name, place in BACKENDS.items()}
        return known.get(self.import_path or "") or self.import_path or self.type or "local"


class VerifierConfig(_Part):
    """How results are graded."""

    group = "Verifier"

    override_timeout_sec: _Above0 = Field(default=None, description="Time limit instead of the task's.")
    max_timeout_sec: _Above0 = Field(default=None, description="Upper bound of the task's time limit.")
    env: Annotated[dict[str, str], Flag("--ve --verifier-env", "K=V", "pairs")] = Field(
        default_factory=dict, description="A variable for the verifier."
    )
    extra_allowed_hosts: Annotated[list[str], Flag("--allow-verifier-host", "HOST", joins=True)] = Field(
        default_factory=list, exclude_if=_is_empty, description="A host that the verifier may reach."
    )
    disable: Annotated[bool, Flag("--disable-verification/--enable-verification")] = Field(
        default=False, description="Do not grade."
    )
    kill_processes: Annotated[bool, Flag("--kill-processes/--keep-processes")] = Field(
        default=False, description="Kill processes that the agent left running before the tests run."
    )


class RetryConfig(_Part):
    """When a failed trial is run again. Without lists, an error's own `retryable` decides."""

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
        default=None, exclude_if=_is_empty, description="Retry only the faults of these, such as `infra`."
    )
    wait_multiplier: float = Field(default=2.0, ge=1, description="Factor between two waits.")
    min_wait_sec: float = Field(default=1.0, ge=0, description="Wait before the first retry.")
    max_wait_sec: float = Field(default=60.0, ge=0, description="Longest wait before a retry.")


class ProviderRetryConfig(_Part):
    """How often the gateway retries a model call at a provider that is busy or down, before the agent sees the error.
    After a rate limit, ten times as many attempts are made within the same time."""

    group = "Retries"

    max_attempts: Annotated[int, Flag("--provider-attempts", "N")] = Field(
        default=6, ge=1, description="Attempts of each model call at a failing provider."
    )
    max_wait_sec: Annotated[float, Flag("--provider-wait", "SECONDS")] = Field(
        default=180.0, ge=0, description="Longest wait for a failing provider."
    )


class DatasetConfig(_Part):
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


class JobTask(_Part):
    """One task: a directory, or `path` inside the git repository `git_url`."""

    group = "Tasks"

    path: Annotated[str, Flag("-t --task", "PATH")] = Field(description="A single task: a directory, or URL#PATH.")
    git_url: str | None = Field(default=None, description="The git repository that holds the task.")
    git_commit_id: str | None = Field(default=None, description="The commit to check out.")
    source: str | None = Field(default=None, description="The dataset that the task belongs to.")


class MetricConfig(_Part):
    """A metric over the rewards of one agent on one dataset."""

    group = "Job"

    type: Literal["mean", "sum", "min", "max"] = Field(default="mean", description="mean, sum, min or max.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Ignored; accepted for Harbor's files.")


class JobConfig(_Part):
    """A whole job."""

    group = "Job"

    job_name: Annotated[str | None, Flag("--job-name", "NAME")] = Field(
        default=None, description="The job's directory in --jobs-dir.  [default: the time]"
    )
    jobs_dir: Annotated[str, Flag("-o --jobs-dir", "DIRECTORY", common=9)] = Field(
        default="jobs", description="Where jobs are kept."
    )
    n_attempts: Annotated[int, Flag("-k --group --n-attempts", "N", common=4)] = Field(
        default=1, ge=1, description="Attempts of each agent at each task; in training, the size of a group."
    )
    timeout_multiplier: Annotated[float, Flag("--timeout-multiplier", "FACTOR", group="Time limits")] = Field(
        default=1.0, gt=0, description="Factor for all time limits."
    )
    agent_timeout_multiplier: Annotated[
        _Above0, Flag("--agent-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="Factor for the agent's time limit, instead of that.")  # fmt: skip
    verifier_timeout_multiplier: Annotated[
        _Above0, Flag("--verifier-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="The same for the verifier's time limit.")
    agent_setup_timeout_multiplier: Annotated[
        _Above0, Flag("--agent-setup-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="The same for the time limit of installing the agent.")
    environment_build_timeout_multiplier: Annotated[
        _Above0, Flag("--environment-build-timeout-multiplier", "FACTOR", group="Time limits")
    ] = Field(default=None, description="The same for the time limit of building images.")
    debug: bool = Field(default=False, description="Print tracebacks and debug messages, as --debug does.")
    n_concurrent_trials: Annotated[int, Flag("-n --n-concurrent", "N", common=3)] = Field(
        default=4, ge=1, description="Trials that run at once."
    )
    n_concurrent_builds: Annotated[int, Flag("--n-concurrent-builds", "N")] = Field(
        default=2, ge=1, description="Images that are built at once."
    )
    quiet: Annotated[bool, Flag("-q --quiet --silent", group="Output")] = Field(
        default=False, description="Print nothing but errors."
    )
    skip_credential_checks: Annotated[bool, Flag("--skip-credential-checks", group="Model")] = Field(
        default=False, exclude_if=_is_empty, description="Do not check for API keys before the job starts."
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
        default=None, description="Image instead of each task's own; `host` is this machine's software."
    )
    keep_state: Annotated[bool, Flag("--keep-state")] = Field(
        default=False, description="Keep the final state of each sandbox for `pier job regrade`."
    )
    regrade_of: str | None = Field(default=None, description="The job that this one grades again.")
    review: bool = Field(
        default=False,
        exclude_if=_is_empty,
        description="Whether the tasks are reviews, as `pier critique run` makes them.",
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
    """One field of the model with its place (`agents.budget.turns`), and one of its flags if it has any. A field with
    several flags makes several settings."""

    key: str
    field: FieldInfo
    flag: Flag | None
    names: tuple[str, ...]
    group: str

    @property
    def help(self) -> str:
        return (self.flag and self.flag.help) or self.field.description or ""


def settings(model: type[_Part] = JobConfig, place: str = "", prefix: FlagPrefix | None = None) -> Iterator[Setting]:
    """All settings in the model's order."""
    for name, field in model.model_fields.items():
        key = f"{place}{name}"
        if (inner := model_in(field.annotation)) is not None:
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


def model_in(annotation: Any) -> type[_Part] | None:
    """The table that a field holds one or several of; None for plain values."""
    if get_origin(annotation) in (list, Union, UnionType):
        return next((found for each in get_args(annotation) if (found := model_in(each))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, _Part) else None


_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a table", list: "a list"}


def expected(field: FieldInfo) -> str:
    """The values that a field accepts, for error messages."""
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
