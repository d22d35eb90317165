"""`task.toml`: Harbor's format up to schema 1.4. Models accept what Harbor accepts, and rename old keys.

Values may be templates for variables of the runner's environment: `${NAME}` or `${NAME:-default}`. Only the template is
written to disk, never its value.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from pier.errors import TaskError
from pier.network.policy import NetworkPolicy
from pier.secret import TEMPLATE

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def normalise_host(text: str) -> str:
    """The canonical form of a host name, `*.host`, IP address or CIDR range; ValueError if it is invalid."""
    host = text.strip().lower().rstrip(".")
    if not host:
        raise ValueError("an allowed host must not be empty")
    name = host.removeprefix("*.")
    if "*" in name:
        raise ValueError(f"{text!r}: a wildcard must be the first label, as in *.example.org")
    try:
        address = "" if "%" in host else (ip_network if "/" in name else ip_address)(name).compressed
    except ValueError:
        address = ""
    if address and name != host:
        raise ValueError(f"{text!r}: a wildcard needs a host name, not an address")
    if not address and not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(
            f"invalid host {text!r}: expected a name, an address or a CIDR range, without scheme, port or path"
        )
    return address or host


SCHEMA_VERSION = "1.4"

Seconds = Annotated[float, Field(ge=0)]
Host = Annotated[str, AfterValidator(normalise_host)]
User = str | int | None
NetworkName = Literal["public", "no-network", "allowlist"]
VerifierMode = Literal["shared", "separate"]

_PACKAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_DEVICE = re.compile(r"\s*(CON|PRN|AUX|NUL|(COM|LPT)[1-9])\s*(\.|$)", re.IGNORECASE)
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


def _service(name: str) -> str:
    if not _SERVICE.fullmatch(name.strip()):
        raise ValueError(f"invalid service name {name!r}: expected letters, digits, `_`, `.` and `-`")
    return name.strip()


def _env(table: dict[str, str]) -> dict[str, str]:
    for name in table:
        if not name or "=" in name:
            raise ValueError(f"invalid variable name {name!r}: expected a name that is not empty and has no `=`")
    return table


Env = Annotated[dict[str, str], AfterValidator(_env)]
Service = Annotated[str, AfterValidator(_service)]


class Table(BaseModel):
    """A table of the file. Frozen, so that trials can share a task. Validators are built lazily: most tables are only
    validated as a part of the file."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class PhaseNetwork(Table):
    """The network of a phase; None is that of the environment."""

    network_mode: NetworkName | None = None
    allowed_hosts: tuple[Host, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_allowlist(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts needs network_mode = "allowlist"')
        return self

    @property
    def policy(self) -> NetworkPolicy | None:
        if self.network_mode is None:
            return None
        if self.network_mode == "allowlist":
            return NetworkPolicy("allowlist", tuple(self.allowed_hosts or ()))
        return NetworkPolicy("none" if self.network_mode == "no-network" else "public")


class Author(Table):
    name: str
    email: str | None = None


class Package(Table):
    """`[task]`: the task's identity in a registry."""

    name: str
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_org_slash_name(cls, name: str) -> str:
        if not _PACKAGE.fullmatch(name) or ".." in name:
            raise ValueError(f"{name!r} is not of the form org/name (letters, digits, `_`, `.`, `-`; no `..`)")
        return name


class Healthcheck(Table):
    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Seconds = 0.0
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=0)


class McpServerTable(Table):
    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """For HTTP transports. Templates may be a part of a value, and are filled right before use."""

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or "\r" in value or "\n" in value:
                raise ValueError(f"invalid HTTP header {name!r}")
        return headers

    @field_validator("transport", mode="before")
    @classmethod
    def _http_is_streamable(cls, value: Any) -> Any:
        return "streamable-http" if value == "http" else value

    @model_validator(mode="after")
    def _has_an_address(self) -> Self:
        if self.transport == "stdio" and not self.command:
            raise ValueError("the transport stdio needs `command`")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"the transport {self.transport} needs `url`")
        if self.transport == "stdio" and self.headers:
            raise ValueError("the transport stdio takes no `headers`")
        return self


class Tpu(Table):
    type: str = Field(min_length=1)
    topology: str = Field(pattern=r"^\s*[1-9]\d*(x[1-9]\d*)+\s*$")


_MOST_MB = (1 << 43) - 1
"""Maximum size in megabytes whose bytes fit in 64 bits."""


class Environment(PhaseNetwork):
    """`[environment]` and `[verifier.environment]`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: int | Annotated[float, Field(allow_inf_nan=False)] | None = Field(default=None, le=1 << 20)
    memory_mb: int | None = Field(default=None, le=_MOST_MB)
    storage_mb: int | None = Field(default=None, le=_MOST_MB)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: tuple[str, ...] | None = None
    tpu: Tpu | None = None
    mcp_servers: tuple[McpServerTable, ...] = ()
    env: Env = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None
    memory: str | None = None
    storage: str | None = None

    @field_validator("os", mode="before")
    @classmethod
    def _os_in_lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _rename_legacy_sizes(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if isinstance(data.get(old), str):
                size = parse_size_mb(data[old])
                if data.setdefault(new, size) != size:
                    raise ValueError(f"{old} = {data[old]!r} and {new} = {data[new]!r} disagree")
        return data

    @property
    def policy(self) -> NetworkPolicy:
        """The baseline: `network_mode`, else the legacy `allow_internet`, else public as in Harbor."""
        explicit = super().policy
        if explicit is not None:
            return explicit
        return NetworkPolicy("none" if self.allow_internet is False else "public")


class CollectHook(Table):
    """`[[verifier.collect]]`: a command run between the agent and the collection of artifacts."""

    command: str
    service: Service = "main"
    timeout_sec: Seconds = 60.0
    user: User = None


class AgentTable(PhaseNetwork):
    """`[agent]`. No timeout means no limit."""

    timeout_sec: Seconds | None = None
    user: User = None


class Verifier(PhaseNetwork):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: Env = Field(default_factory=dict)
    user: User = None
    environment_mode: VerifierMode | None = None
    environment: Environment | None = None
    collect: tuple[CollectHook, ...] = ()

    @model_validator(mode="after")
    def _own_environment_is_separate(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('[verifier.environment] cannot be combined with environment_mode = "shared"')
        return self

    @property
    def mode(self) -> VerifierMode | None:
        """The explicit mode, or the one implied by an environment; None if neither is set."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


class Solution(Table):
    env: Env = Field(default_factory=dict)


class Artifact(Table):
    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: Service | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_is_source(cls, data: Any) -> Any:
        return {"source": data} if isinstance(data, str) else data

    @field_validator("source")
    @classmethod
    def _source_stays_inside(cls, source: str) -> str:
        if not source or ".." in PurePosixPath(source).parts or "\0" in source:
            raise ValueError(f"the source {source!r} may not be empty or contain `..`")
        return source

    @field_validator("destination")
    @classmethod
    def _destination_stays_inside(cls, destination: str | None) -> str | None:
        if not destination:
            return None
        parts = PurePosixPath(destination).parts
        if "\\" in destination or "\0" in destination or ".." in parts or destination.startswith("/") or not parts:
            raise ValueError(f"the destination {destination!r} must be a relative path with `/` and without `..`")
        if parts == ("manifest.json",):
            raise ValueError("the destination manifest.json is reserved for the list of artifacts")
        return destination

    @model_validator(mode="after")
    def _sidecar_sources_are_absolute(self) -> Self:
        if self.service not in (None, "main") and not self.source.startswith("/"):
            raise ValueError(f"a source in the service {self.service!r} must be an absolute path")
        return self


class StepTable(Table):
    """`[[steps]]`."""

    name: str
    agent: AgentTable = Field(default_factory=AgentTable)
    verifier: Verifier = Field(default_factory=Verifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_a_directory_name(cls, name: str) -> str:
        bad = set('<>:"/\\|?*')
        if name.strip() in ("", ".", "..") or any(char in bad or ord(char) < 32 for char in name):
            raise ValueError(f"{name!r} cannot be the name of a directory")
        if name[-1] in ". " or len(name.encode()) > 255 or _DEVICE.match(name):
            raise ValueError(f"{name!r} is not a valid directory name on every system")
        return name


class TaskConfig(Table):
    """All of `task.toml`."""

    schema_version: str = SCHEMA_VERSION
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: Verifier = Field(default_factory=Verifier)
    agent: AgentTable = Field(default_factory=AgentTable)
    environment: Environment = Field(default_factory=Environment)
    solution: Solution = Field(default_factory=Solution)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[StepTable, ...] | None = None
    artifacts: tuple[Artifact, ...] = ()
    version: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data and "schema_version" not in data:
            return {**data, "schema_version": data["version"]}
        return data

    @field_validator("steps")
    @classmethod
    def _step_names_differ(cls, steps: tuple[StepTable, ...] | None) -> tuple[StepTable, ...] | None:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps or ()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two steps are called {twice[0]!r}")
        return steps


def parse_size_mb(text: str) -> int:
    """A size such as `2G`, `512M` or `1024K` in megabytes, rounded down."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])\s*", text.upper())
    if match is None:
        raise ValueError(f"invalid size {text!r}: expected one such as 2G, 512M or 1024K")
    return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]])


def resolve_env(env: Mapping[str, str], *, where: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`env` with its templates filled in. `TaskError` for a missing variable without a default."""
    known = os.environ if environ is None else environ
    matches = {key: TEMPLATE.fullmatch(value) for key, value in env.items()}
    return {key: _fill(key, match, where, known) if (match := matches[key]) else env[key] for key in env}


def _fill(key: str, match: re.Match[str], where: str, environ: Mapping[str, str]) -> str:
    value = environ.get(match[1], match[2])
    if value is None:
        message = f"{where}: {key} needs the variable {match[1]}, which is not set"
        raise TaskError(message, hint=f"export {match[1]}=...", code="missing_variable", blame="user")
    return value


_IN_HEADER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def resolve_headers(
    headers: Mapping[str, str], *, where: str, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """HTTP headers with their templates filled in. A template may be a part of a value: `Bearer ${TOKEN}`."""
    known = os.environ if environ is None else environ
    return {
        name: _IN_HEADER.sub(lambda match, name=name: _fill(name, match, where, known), value)
        for name, value in headers.items()
    }


def wanted_in_headers(headers: Mapping[str, str]) -> dict[str, str | None]:
    """The variables in templates of `headers`, with their defaults."""
    return {match[1]: match[2] for value in headers.values() for match in _IN_HEADER.finditer(value)}


def wanted_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """The variables in templates of `env`, with their defaults."""
    matches = (TEMPLATE.fullmatch(value) for value in env.values())
    return {match[1]: match[2] for match in matches if match is not None}
