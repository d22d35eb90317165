"""What a job is asked to do, as it stands in `config.json` and in job files.

Field names are Harbor's, so that either program reads the other's file; fields of pier's own (`image`, `keep_state`,
`n_concurrent_builds`, ...) are ones that Harbor passes over. Unknown keys are refused by name in `load`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pier.sandbox import BACKENDS

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


class TaskConfig(_Part):
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
    tasks: list[TaskConfig] = Field(default_factory=list)
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
