"""What the flags of `pier run` say, as a layer over job files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pier.errors import UsageError

Flags = Mapping[str, Any]
"""By the name of the parameter; a flag that was not given is None or empty."""

_PLAIN = {
    "job_name": "job_name",
    "jobs_dir": "jobs_dir",
    "n_attempts": "n_attempts",
    "timeout_multiplier": "timeout_multiplier",
    "agent_timeout_multiplier": "agent_timeout_multiplier",
    "verifier_timeout_multiplier": "verifier_timeout_multiplier",
    "agent_setup_timeout_multiplier": "agent_setup_timeout_multiplier",
    "environment_build_timeout_multiplier": "environment_build_timeout_multiplier",
    "n_concurrent": "n_concurrent_trials",
    "n_concurrent_builds": "n_concurrent_builds",
    "job_max_turns": "budget.turns",
    "job_max_tokens": "budget.total_tokens",
    "job_max_cost": "budget.cost_usd",
    "max_retries": "retry.max_retries",
    "retry_include": "retry.include_exceptions",
    "retry_exclude": "retry.exclude_exceptions",
    "provider_attempts": "provider_retry.max_attempts",
    "provider_wait": "provider_retry.max_wait_sec",
    "env": "environment.type",
    "allow_environment_host": "environment.extra_allowed_hosts",
    "force_build": "environment.force_build",
    "delete": "environment.delete",
    "cpus": "environment.cpu_enforcement_policy",
    "memory": "environment.memory_enforcement_policy",
    "override_cpus": "environment.override_cpus",
    "override_memory_mb": "environment.override_memory_mb",
    "override_storage_mb": "environment.override_storage_mb",
    "override_processes": "environment.override_processes",
    "override_gpus": "environment.override_gpus",
    "disable_verification": "verifier.disable",
    "kill_processes": "verifier.kill_processes",
    "extra_instruction": "extra_instructions",
    "artifact": "artifacts",
    "image": "image",
    "keep_state": "keep_state",
    "strict": "strict",
    "debug": "debug",
    "quiet": "quiet",
}
"""Flags that set one value, and the key that they set."""


def apply_flags(config: dict[str, Any], flags: Flags) -> dict[str, Any]:
    """`config` (as read from job files) with what the command line says on top."""
    merged: dict[str, Any] = json.loads(json.dumps(config, default=str))
    for flag, key in _PLAIN.items():
        value = flags.get(flag)
        if value is not None and value != ():
            _put(merged, key, list(value) if isinstance(value, tuple) else value)
    if flags.get("extra_instruction_path"):
        texts = [_read_text(Path(path)) for path in flags["extra_instruction_path"]]
        merged["extra_instructions"] = [*merged.get("extra_instructions", []), *texts]
    if flags.get("mounts"):
        _put(merged, "environment.mounts", _json_list("--mounts", flags["mounts"]))
    _add(merged, "environment.kwargs", pairs("--ek", flags.get("environment_kwarg") or (), typed=True))
    _add(merged, "verifier.env", pairs("--ve", flags.get("verifier_env") or ()))
    _apply_agents(merged, flags)
    _apply_sources(merged, flags)
    return merged


def pairs(flag: str, rows: Iterable[str], *, typed: bool = False) -> dict[str, Any]:
    """`NAME=VALUE` rows as a table; with `typed`, values that are JSON are taken as such."""
    found: dict[str, Any] = {}
    for row in rows:
        name, equals, value = row.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} {row!r}: not of the form NAME=VALUE")
        found[name] = _typed(value) if typed else value
    return found


def _typed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _apply_agents(merged: dict[str, Any], flags: Flags) -> None:
    """An agent or model on the command line replaces those of the files; other agent flags add to each agent."""
    agents: list[dict[str, Any]] = merged.get("agents") or [{}]
    models = flags.get("model") or ()
    if flags.get("agent"):
        agents = [{"import_path" if ":" in flags["agent"] else "name": flags["agent"]}]
    if models:
        if len(agents) > 1:
            raise UsageError("-m together with a job file of several agents is ambiguous", hint="give -a as well")
        agents = [{**agents[0], "model_name": model} for model in models]
    options = pairs("--ak", flags.get("agent_kwarg") or (), typed=True)
    if flags.get("effort"):
        options["reasoning_effort"] = flags["effort"]
    limits = {
        "turns": flags.get("max_turns"),
        "total_tokens": flags.get("max_tokens"),
        "cost_usd": flags.get("max_cost"),
    }
    budget = {key: value for key, value in limits.items() if value is not None}
    variables = pairs("--ae", flags.get("agent_env") or ())
    servers = [server for path in flags.get("mcp_config") or () for server in _mcp_servers(Path(path))]
    for agent in agents:
        _add(agent, "kwargs", options)
        _add(agent, "env", variables)
        _add(agent, "budget", budget)
        for switch in ("direct", "install_in_sandbox"):
            if flags.get(switch) is not None:
                agent[switch] = flags[switch]
        for key, rows in (("extra_allowed_hosts", flags.get("allow_agent_host") or ()), ("mcp_servers", servers)):
            if rows:
                agent[key] = [*agent.get(key, []), *rows]
    merged["agents"] = agents


def _apply_sources(merged: dict[str, Any], flags: Flags) -> None:
    """A source on the command line replaces those of the files; selections apply to every dataset."""
    datasets: list[dict[str, Any]] = merged.get("datasets") or []
    if flags.get("path") or flags.get("dataset") or flags.get("task"):
        datasets = [{"path": path} for path in flags.get("path") or ()]
        datasets += [_named_dataset(name, flags.get("registry_path")) for name in flags.get("dataset") or ()]
        merged["tasks"] = [_one_task(task) for task in flags.get("task") or ()]
    selection = {
        "task_names": list(flags.get("include_task_name") or ()),
        "exclude_task_names": list(flags.get("exclude_task_name") or ()),
        "n_tasks": flags.get("n_tasks"),
        "sample_seed": flags.get("sample_seed"),
    }
    said = {key: value for key, value in selection.items() if value not in (None, [])}
    if said and not datasets:
        raise UsageError("a selection of tasks is given, but no dataset to select from", hint="add -p DIRECTORY")
    merged["datasets"] = [_absolute({**dataset, **said}) for dataset in datasets]
    merged["tasks"] = [_absolute(task) for task in merged.get("tasks") or []]


def _named_dataset(name: str, registry: str | None) -> dict[str, Any]:
    if registry is None:
        raise UsageError(f"-d {name}: pier has no built-in registry", hint=f"-d {name} --registry-path registry.json")
    short, _, version = name.partition("@")
    return {"name": short, "registry_path": registry, **({"version": version} if version else {})}


def _one_task(task: str) -> dict[str, Any]:
    url, _, inside = task.partition("#")
    if not inside:
        return {"path": task}
    base, at, commit = url.rpartition("@") if "@" in url.rpartition("/")[2] else (url, "", "")
    return {"git_url": base or url, "path": inside, **({"git_commit_id": commit} if at else {})}


def _absolute(source: dict[str, Any]) -> dict[str, Any]:
    """Paths on this machine are kept whole, so that a job can be resumed from anywhere."""
    made = dict(source)
    for key in ("path", "registry_path"):
        value = made.get(key)
        if isinstance(value, str) and not made.get("git_url") and Path(value.partition("#")[0]).exists():
            base, mark, rest = value.partition("#")
            made[key] = f"{Path(base).resolve()}{mark}{rest}"
    return made


def _mcp_servers(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(_read_text(path))
        servers = data["mcpServers"] if isinstance(data, dict) and "mcpServers" in data else data
        if isinstance(servers, dict):
            servers = [{"name": name, **table} for name, table in servers.items()]
        return [{"transport" if key == "type" else key: row[key] for key in row} for row in servers]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: not a list of MCP servers: {error}") from error


def _json_list(flag: str, text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag}: not JSON: {error}") from error
    if not isinstance(value, list):
        raise UsageError(f"{flag}: must be a JSON list")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for part in outer:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{part}: must be a table")
        table = inner
    table[last] = value


def _add(table: dict[str, Any], key: str, values: dict[str, Any]) -> None:
    if values:
        *outer, last = key.split(".")
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = {**(table.get(last) or {}), **values}
