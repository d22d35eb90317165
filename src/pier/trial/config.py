"""The settings of a trial: its agent, its sandboxes, its verifier, and the limits on model use.

A job's settings have them as tables of the same names (see `pier.job.config`). Keys are Harbor's. A field's description
is its help, and a `Flag` in its annotation its flag on the command line. Fields added after the first release are left
out of dumps at their default (`exclude_if`), so that older jobs are still recognised as the same job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Policy = Literal["auto", "limit", "request", "guarantee", "ignore"]
ApiFormat = Literal["openai_chat_completions", "openai_responses", "anthropic_messages", "google_generate_content"]
Form = Literal["value", "pairs", "typed-pairs", "json", "text-file", "mcp-file"]
"""Syntax of a flag's value: plain text, NAME=VALUE (typed: VALUE may be JSON), JSON, or a file."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The command line flag of a setting: its names, separated by spaces, with `/` before the negative ones. `common`
    is its position among the flags that help shows first. `entry` is the key of the value in a table. With `joins` a
    list extends that of the job files."""

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


def is_empty(value: Any) -> bool:
    return not value


class SettingsTable(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )
    group: ClassVar[str]

    @field_validator("*")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        """JSON writes NaN and infinity as null, which would be another setting."""
        if isinstance(value, dict | list) and not _all_finite(value):
            raise ValueError("expected finite numbers")
        return value


def _all_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_all_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


Above0 = Annotated[float | None, Gt(0)]


class BudgetConfig(SettingsTable):
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


class AgentConfig(SettingsTable):
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
        default=None, pattern=r"^(https?://[^/\s]+\S*|\$\{.*\})$", exclude_if=is_empty,
        description="Address of the model's API instead of the provider's own.",
    )  # fmt: skip
    model_api_key_name: Annotated[
        str | None, Flag("--api-key-name", "NAME", group="Model", expects="the name of a variable")
    ] = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", exclude_if=is_empty,
        description="Variable of this machine that holds the model's API key.",
    )  # fmt: skip
    model_api_format: Annotated[ApiFormat | None, Flag("--api-format", "FORMAT", group="Model")] = Field(
        default=None, exclude_if=is_empty,
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
    override_timeout_sec: Above0 = Field(default=None, description="Time limit instead of the task's.")
    override_setup_timeout_sec: Above0 = Field(default=None, description="Time limit for installing the agent.")
    max_timeout_sec: Above0 = Field(default=None, description="Upper bound of the task's time limit.")
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
        default_factory=dict, exclude_if=is_empty,
        description="A sampling parameter that replaces the agent's: temperature, top_p, max_tokens, seed, stop, ...",
    )  # fmt: skip
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="Limits for each trial of this agent.")

    @model_validator(mode="after")
    def _has_a_name(self) -> AgentConfig:
        if self.import_path is None:
            by_path = ":" in (self.name or "")
            object.__setattr__(self, "import_path", self.name if by_path else None)
            object.__setattr__(self, "name", None if by_path else self.name or "oracle")
        return self

    @property
    def connection(self) -> dict[str, str]:
        """Settings that replace the model's own address, key and format."""
        return self.model_dump(include={"base_url", "model_api_key_name", "model_api_format"}, exclude_none=True)

    @property
    def label(self) -> str:
        """The name of the agent in tables and results."""
        return self.name or str(self.import_path)

    @property
    def kind(self) -> str:
        """The agent's name for `find_agent`."""
        return self.import_path or str(self.name)


class EnvironmentConfig(SettingsTable):
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
            mounts = data.get("mounts") or data.get("mounts_json") or []
            data = {key: value for key, value in data.items() if key != "mounts_json"} | {"mounts": mounts}
        return data

    @property
    def backend(self) -> str:
        """The backend's name for `open_backend`."""
        from pier.sandbox import BACKENDS

        names = {path: name for name, path in BACKENDS.items()}
        return names.get(self.import_path or "") or self.import_path or self.type or "local"


class VerifierConfig(SettingsTable):
    """Settings of grading."""

    group = "Verifier"

    override_timeout_sec: Above0 = Field(default=None, description="Time limit instead of the task's.")
    max_timeout_sec: Above0 = Field(default=None, description="Upper bound of the task's time limit.")
    env: Annotated[dict[str, str], Flag("--ve --verifier-env", "K=V", "pairs")] = Field(
        default_factory=dict, description="A variable for the verifier."
    )
    extra_allowed_hosts: Annotated[list[str], Flag("--allow-verifier-host", "HOST", joins=True)] = Field(
        default_factory=list, exclude_if=is_empty, description="A host that the verifier may reach."
    )
    disable: Annotated[bool, Flag("--disable-verification/--enable-verification")] = Field(
        default=False, description="Do not grade."
    )
    kill_processes: Annotated[bool, Flag("--kill-processes/--keep-processes")] = Field(
        default=False, description="Kill processes that the agent left running before the tests run."
    )
