"""What a job is asked to do, as it stands in `config.json` and in job files.

Field names are Harbor's, so that either program reads the other's file; fields of pier's own (`image`, `keep_state`,
`n_concurrent_builds`, ...) are ones that Harbor passes over. Unknown keys are refused by name in `load`.

Job files: YAML or JSON into a `JobConfig`, with every complaint naming the file and the key.

Several files are layers: later ones win for single values, lists are joined, an empty list clears. Keys of Harbor's
that ask for what pier does not do are refused by name; left at their neutral value they are passed over.

`${NAME}` templates, and what of a configuration may be written to disk.

Templates stay templates in every file: they are filled in memory only, right before use. A literal value that is
secret (see `pier.secret`) is written as `${NAME}` when the host's variable of that name holds the same, else as `****`,
and a secret inside a longer text as `[REDACTED]`; such a value cannot be read back, so resuming from the files alone
asks for it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pier.errors import UsageError
from pier.redact import REDACTED, Redactor
from pier.sandbox import BACKENDS
from pier.secret import HIDDEN, is_secret, looks_secret, secrets_in, secrets_in_text, value_on_disk

Policy = Literal["auto", "limit", "request", "guarantee", "ignore"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)


class BudgetConfig(_Part):
    """What one trial's agent, or all agents of a job together, may use of their models; None means unlimited."""

    turns: int | None = Field(default=None, gt=0)
    input_tokens: int | None = Field(default=None, gt=0)
    output_tokens: int | None = Field(default=None, gt=0)
    total_tokens: int | None = Field(default=None, gt=0)
    cost_usd: float | None = Field(default=None, gt=0)
    wall_time: float | None = Field(default=None, gt=0)
    requests_per_minute: int | None = Field(default=None, gt=0)


class AgentConfig(_Part):
    """One agent with its model and options. Each agent of a job runs on each of its tasks. With `direct` no gateway
    stands before its model; with `install_in_sandbox` it is not mounted in a pack."""

    name: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    override_timeout_sec: float | None = Field(default=None, gt=0)
    override_setup_timeout_sec: float | None = Field(default=None, gt=0)
    max_timeout_sec: float | None = Field(default=None, gt=0)
    extra_allowed_hosts: list[str] = Field(default_factory=list)
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list)
    direct: bool = False
    install_in_sandbox: bool = False
    budget: BudgetConfig = Field(default_factory=BudgetConfig)

    @model_validator(mode="after")
    def _has_a_name(self) -> AgentConfig:
        if self.name is None and self.import_path is None:
            object.__setattr__(self, "name", "oracle")
        return self

    @property
    def label(self) -> str:
        """What the agent is called in tables and results."""
        return self.name or str(self.import_path)


class EnvironmentConfig(_Part):
    """Where trials run. `type` is a backend's name; other programs find pier's own backends by `import_path`."""

    type: str | None = None
    import_path: str | None = None
    force_build: bool = False
    delete: bool = True
    cpu_enforcement_policy: Policy = "auto"
    memory_enforcement_policy: Policy = "auto"
    override_cpus: float | None = Field(default=None, gt=0)
    override_memory_mb: int | None = Field(default=None, ge=0)
    override_storage_mb: int | None = Field(default=None, ge=0)
    override_processes: int | None = Field(default=None, ge=0)
    override_gpus: int | None = Field(default=None, ge=0)
    mounts: list[dict[str, Any]] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    extra_allowed_hosts: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _old_spelling(cls, data: Any) -> Any:
        if isinstance(data, dict) and "mounts_json" in data:
            data = {**data, "mounts": data.get("mounts") or data["mounts_json"] or []}
            del data["mounts_json"]
        if isinstance(data, dict) and data.get("mounts", ...) is None:
            data = {**data, "mounts": []}
        return data

    @property
    def backend(self) -> str:
        """The backend as `open_backend` takes it."""
        for name, place in BACKENDS.items():
            if place == self.import_path:
                return name
        return self.import_path or self.type or "local"


class VerifierConfig(_Part):
    """How results are graded."""

    override_timeout_sec: float | None = Field(default=None, gt=0)
    max_timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    disable: bool = False
    kill_processes: bool = False


class RetryConfig(_Part):
    """When a trial that failed is run again. Without lists, an error's own `retryable` decides."""

    max_retries: int = Field(default=0, ge=0)
    include_exceptions: list[str] | None = None
    exclude_exceptions: list[str] | None = None
    wait_multiplier: float = Field(default=2.0, ge=1)
    min_wait_sec: float = Field(default=1.0, ge=0)
    max_wait_sec: float = Field(default=60.0, ge=0)


class ProviderRetryConfig(_Part):
    """How often, and for how long, the gateway retries a model call that a provider's rate limit or outage holds up,
    before the agent sees the error. After a rate limit, ten times as many attempts are made within the same time."""

    max_attempts: int = Field(default=6, ge=1)
    max_wait_sec: float = Field(default=180.0, ge=0)


class DatasetConfig(_Part):
    """A set of tasks: a directory, a `dataset.toml`, a git reference, or a named one from a `registry.json`."""

    path: str | None = None
    name: str | None = None
    version: str | None = None
    registry_path: str | None = None
    task_names: list[str] | None = None
    exclude_task_names: list[str] | None = None
    n_tasks: int | None = Field(default=None, gt=0)
    sample_seed: int | None = None

    @model_validator(mode="after")
    def _has_a_source(self) -> DatasetConfig:
        if (self.path is None) == (self.name is None):
            raise ValueError("give either path or name")
        return self


class JobTask(_Part):
    """One task: a directory, or `path` inside the git repository `git_url`."""

    path: str
    git_url: str | None = None
    git_commit_id: str | None = None
    source: str | None = None


class MetricConfig(_Part):
    """A metric over the rewards of one agent on one dataset."""

    type: Literal["mean", "sum", "min", "max"] = "mean"
    kwargs: dict[str, Any] = Field(default_factory=dict)


class JobConfig(_Part):
    """A whole job. Its `budget` is for all trials together, an agent's is for each of its trials."""

    job_name: str | None = None
    jobs_dir: str = "jobs"
    n_attempts: int = Field(default=1, ge=1)
    timeout_multiplier: float = Field(default=1.0, gt=0)
    agent_timeout_multiplier: float | None = Field(default=None, gt=0)
    verifier_timeout_multiplier: float | None = Field(default=None, gt=0)
    agent_setup_timeout_multiplier: float | None = Field(default=None, gt=0)
    environment_build_timeout_multiplier: float | None = Field(default=None, gt=0)
    debug: bool = False
    n_concurrent_trials: int = Field(default=4, ge=1)
    n_concurrent_builds: int = Field(default=2, ge=1)
    quiet: bool = False
    retry: RetryConfig = Field(default_factory=RetryConfig)
    provider_retry: ProviderRetryConfig = Field(default_factory=ProviderRetryConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    verifier: VerifierConfig = Field(default_factory=VerifierConfig)
    metrics: list[MetricConfig] = Field(default_factory=list)
    agents: list[AgentConfig] = Field(default_factory=lambda: [AgentConfig()])
    datasets: list[DatasetConfig] = Field(default_factory=list)
    tasks: list[JobTask] = Field(default_factory=list)
    artifacts: list[str | dict[str, Any]] = Field(default_factory=list)
    extra_instructions: list[str] = Field(default_factory=list)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    image: str | None = None
    keep_state: bool = False
    regrade_of: str | None = None
    strict: bool = False

    @field_validator("job_name")
    @classmethod
    def _is_one_name(cls, name: str | None) -> str | None:
        if name is not None and (not name or "/" in name or "\0" in name or name in (".", "..")):
            raise ValueError("must be the name of one directory")
        return name

    @field_validator("agents")
    @classmethod
    def _some_agent(cls, agents: list[AgentConfig]) -> list[AgentConfig]:
        return agents or [AgentConfig()]


MAX_FILE = 16 * 1024 * 1024
"""A job file larger than this is a mistake, and YAML of that size would take minutes to parse."""

NOT_DONE = {
    "install_only": "installing agents without running them",
    "user_agent": "simulated users",
    "extra_instruction_paths": "reading extra instructions from files (give them as extra_instructions)",
    "source_jobs": "comparing with earlier jobs",
    "plugins": "job plugins",
    "agents.n_concurrent": "limits per agent",
    "agents.concurrency_group": "limits per group of agents",
    "agents.resume_trajectory": "continuing a recorded session",
    "agents.load_trajectory": "loading an earlier trajectory",
    "agents.skills": "additional skills",
    "agents.include_logs": "filtering an agent's logs",
    "agents.exclude_logs": "filtering an agent's logs",
    "environment.stream": "streaming of a sandbox's output",
    "environment.extra_docker_compose": "additional compose files",
    "environment.override_tpu": "TPUs",
    "environment.suppress_override_warnings": "silencing warnings about overrides",
    "verifier.include_logs": "filtering a verifier's logs",
    "verifier.exclude_logs": "filtering a verifier's logs",
    "verifier.import_path": "verifiers written as Python classes",
    "verifier.kwargs": "options of verifiers written as Python classes",
    "datasets.ref": "datasets of a hosted registry",
    "datasets.registry_url": "registries on the network",
    "datasets.repo": "a git repository as a dataset (use path: URL#directory)",
    "datasets.overwrite": "downloading a dataset again",
    "datasets.download_dir": "another download directory",
    "tasks.name": "tasks of a hosted registry",
    "tasks.ref": "tasks of a hosted registry",
    "tasks.overwrite": "downloading a task again",
    "tasks.download_dir": "another download directory",
}
"""Keys of Harbor's job files that pier does not support, each with a description of what it asks for."""

_NEUTRAL: tuple[Any, ...] = (None, False, [], {})


def load_job(paths: Iterable[Path], *, overlay: Mapping[str, Any] | None = None) -> JobConfig:
    """The configuration that the files give together, with `overlay` (from the command line) on top."""
    merged: dict[str, Any] = {}
    origin = "the job's configuration"
    for path in paths:
        origin = str(path)
        merged = merge(merged, read_file(path))
    if overlay:
        merged = {**merged, **overlay}
    return parse(merged, origin)


def read_file(path: Path) -> dict[str, Any]:
    """One job file as it stands."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise UsageError(f"{path}: larger than {MAX_FILE >> 20} MB, which no job file is")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else _read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{path}: must be a table of names and values")
    return data


def _read_yaml(text: str) -> Any:
    """The content of a YAML file; a `ValueError` if it is none. The parser is loaded for those who need it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def merge(low: dict[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`: tables by key, lists joined (an empty one clears), everything else replaced."""
    merged = dict(low)
    for key, value in high.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = merge(before, value)
        elif isinstance(before, list) and isinstance(value, list) and value:
            merged[key] = before + value
        else:
            merged[key] = value
    return merged


def parse(data: dict[str, Any], origin: str) -> JobConfig:
    """`data` as a configuration; complaints name `origin` and the key."""
    cleaned = _drop_neutral(data, "", origin)
    try:
        return JobConfig.model_validate(cleaned)
    except ValidationError as error:
        raise UsageError(f"{origin}: " + "; ".join(_complaints(error)), code="job-config") from error
    except RecursionError as error:
        raise UsageError(f"{origin}: nested too deeply", code="job-config") from error


def _drop_neutral(data: dict[str, Any], prefix: str, origin: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if name in NOT_DONE:
            if not any(value is neutral or value == neutral for neutral in _NEUTRAL):
                raise UsageError(f"{origin}: {name}: pier does not do this yet: {NOT_DONE[name]}", code="not-done")
        elif not prefix and isinstance(value, list):
            kept[key] = [_drop_neutral(v, f"{key}.", origin) if isinstance(v, dict) else v for v in value]
        elif not prefix and isinstance(value, dict):
            kept[key] = _drop_neutral(value, f"{key}.", origin)
        else:
            kept[key] = value
    return kept


def _complaints(error: ValidationError) -> list[str]:
    rows = []
    for found in error.errors(include_url=False, include_input=False, include_context=False):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
        if found["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(found["loc"][-1]), _known(found["loc"][:-1]), n=1)
            rows.append(f"{where}: unknown key" + (f", did you mean {near[0]!r}?" if near else ""))
        else:
            rows.append(f"{where or 'the file'}: {found['msg'].removeprefix('Value error, ')}")
    return rows


def _known(place: tuple[int | str, ...]) -> list[str]:
    model: Any = JobConfig
    for part in place:
        if isinstance(part, str) and isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(part)
            model = field.annotation if field else None
        model = _model_in(model)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    if get_origin(annotation) in (list, Union, UnionType):
        return next((found for each in get_args(annotation) if (found := _model_in(each))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

_HARBOR_BACKENDS = ("docker",)
"""Backends that Harbor knows by the same name."""


def to_disk(config: JobConfig, env: Mapping[str, str]) -> dict[str, Any]:
    """A configuration as it may stand on disk, in a shape that Harbor reads too."""
    data = config.model_dump(mode="json")
    backend = config.environment.backend
    known = backend in _HARBOR_BACKENDS
    data["environment"]["type"] = backend if known else None
    data["environment"]["import_path"] = None if known else BACKENDS.get(backend, backend)
    return hide(data, env)


def fill(value: Any, env: Mapping[str, str], where: str = "") -> Any:
    """`value` with each string that is one whole template replaced by what it stands for."""
    if isinstance(value, dict):
        return {key: fill(each, env, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, env, f"{where}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str) or not (match := _TEMPLATE.fullmatch(value)):
        if isinstance(value, str) and (value == HIDDEN or REDACTED in value):
            raise UsageError(
                f"{where}: this value is secret and was not written to disk",
                hint="run the command that started the job again, it continues the job",
                code="hidden-value",
            )
        return value
    name, default = match.groups()
    if name in env:
        return env[name]
    if default is None:
        raise UsageError(f"{where}: the variable {name} is not set", hint=f"export {name}=... or use --env-file")
    return default


def hide(value: Any, env: Mapping[str, str]) -> Any:
    """A configuration as it may be written to disk."""
    return Redactor(job_secrets(value, env)).value(_hide(value, env))


def _hide(value: Any, env: Mapping[str, str], name: str = "", *, given: bool = False) -> Any:
    if isinstance(value, dict):
        theirs = given or name in ("env", "headers")
        return {key: _hide(each, env, str(key), given=theirs) for key, each in value.items()}
    if isinstance(value, list):
        return [_hide(each, env, name, given=given) for each in value]
    return value_on_disk(name, value, env, given=given) if isinstance(value, str) else value


def job_secrets(config: Any, env: Mapping[str, str]) -> Iterator[str]:
    """The secrets of a job: those of its configuration, of its env file, and the keys of this machine's environment,
    which a provider may send back."""
    yield from secrets_in(config, env)
    for name, value in env.items():
        if os.environ.get(name) != value:
            if is_secret(name, value, given=True):
                yield value
            yield from secrets_in_text(value)
        elif looks_secret(name):
            yield value


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of an `.env` file: `NAME=value` lines, `export` allowed, quotes removed, `#` starts a comment."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    found: dict[str, str] = {}
    for number, row in enumerate(text.splitlines(), 1):
        line = row.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"{path}:{number}: not of the form NAME=value")
        found[name.strip()] = _unquote(value.strip())
    return found


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value.partition(" #")[0].rstrip()
