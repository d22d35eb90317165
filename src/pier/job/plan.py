"""The plan of a job: its trials, each with a reproducible identity.

An identity is computed from the task's name and digest, the agent's configuration, the settings that can change a
result, the content of all files that these name, and the attempt. Paths of tasks, ports on the loopback and times are
excluded, so the same command finds its trials again after a move or a reboot. Default values are excluded too, so that
new settings in later versions change nothing. Secrets are included as keyed hashes: the key is random and readable only
by the owner of the job's directory, so no file reveals the secret.

Tasks may request variables of the user's environment (`${NAME}`), whose values go into their sandboxes. Since tasks are
untrusted, values are passed only with the user's consent.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import click

from pier.errors import UsageError
from pier.files import is_plain_name, write
from pier.job.config import DatasetConfig, JobConfig, JobTask
from pier.job.load import fill, job_secrets, map_texts, to_disk
from pier.redact import Redactor
from pier.secret import is_secret, looks_secret
from pier.task import Task, load_task, wanted_variables
from pier.task.load import Origin, tree_digest
from pier.task.model import wanted_in_headers
from pier.task.sources import Selection, check_patterns, find_tasks, select

_ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_LOOPBACK_PORT = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task of the plan. `source` is its dataset."""

    name: str
    digest: str
    path: str
    source: str | None = None
    git_url: str | None = None
    git_commit_id: str | None = None
    git_path: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial of the plan; `task` and `agent` are indexes into the plan's lists, `attempt` counts from 1."""

    id: str
    name: str
    task: int
    agent: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All trials of a job, in starting order."""

    tasks: tuple[PlannedTask, ...] = ()
    agents: tuple[dict[str, Any], ...] = ()
    trials: tuple[PlannedTrial, ...] = ()
    by_id: dict[str, PlannedTrial] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.by_id.update((trial.id, trial) for trial in self.trials)

    def to_line(self) -> dict[str, Any]:
        """Return the plan as a journal line."""
        keys = PlannedTask.__slots__
        return {
            "e": "plan",
            "tasks": [{key: value for key in keys if (value := getattr(task, key)) is not None} for task in self.tasks],
            "agents": list(self.agents),
            "trials": [[trial.id, trial.name, trial.task, trial.agent, trial.attempt] for trial in self.trials],
        }

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Plan:
        """Parse a journal line. Raises `ValueError` for a trial name that would leave the job's directory."""
        trials = tuple(PlannedTrial(*trial) for trial in line["trials"])
        if wrong := next((trial.name for trial in trials if not is_plain_name(trial.name)), None):
            raise ValueError(f"invalid trial name: {wrong!r}")
        return cls(tuple(PlannedTask(**task) for task in line["tasks"]), tuple(line["agents"]), trials)


def check_tasks(tasks: Sequence[PlannedTask]) -> None:
    """Raise `UsageError` if there are no tasks."""
    if not tasks:
        raise UsageError("no task to run", hint="pier run DIRECTORY")


def make_plan(
    tasks: Sequence[PlannedTask],
    agents: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    attempts: int,
    *,
    shown: Sequence[dict[str, Any]] | None = None,
    variables: Sequence[dict[str, Any]] | None = None,
) -> Plan:
    """Plan each agent on each task, `attempts` times. `agents` and `settings` are in their form for identities; `shown`
    are the agents in their form for files, if different; `variables` are the requested variables of each task."""
    check_tasks(tasks)
    asked = variables or [{}] * len(tasks)
    prefixes = [
        [_identity_of(task, agent, {**settings, "variables": more}) for agent in agents]
        for task, more in zip(tasks, asked, strict=True)
    ]
    seen: Counter[str] = Counter()
    names: set[str] = set()
    trials: list[PlannedTrial] = []
    for attempt in range(1, attempts + 1):
        for t, task in enumerate(tasks):
            for a in range(len(agents)):
                base = f"{prefixes[t][a]}/{attempt}"
                seen[base] += 1
                digest = hashlib.sha256(f"{base}/{seen[base]}".encode()).digest()
                name = next(name for name in _names(task.name, digest) if name not in names)
                names.add(name)
                trials.append(PlannedTrial(digest[:8].hex(), name, t, a, attempt))
    return Plan(tuple(tasks), tuple(agents if shown is None else shown), tuple(trials))


def _identity_of(task: PlannedTask, agent: dict[str, Any], settings: dict[str, Any]) -> str:
    stable = [task.name, task.digest, task.source, _set_values(agent), _set_values(settings)]
    counted = map_texts(stable, lambda name, text, given: _LOOPBACK_PORT.sub(r"\1", text))
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def _set_values(table: dict[str, Any]) -> dict[str, Any]:
    """Return the non-empty entries of a table, without recursion."""
    return {key: value for key, value in table.items() if value is not None and value != [] and value != {}}


def _names(task: str, digest: bytes) -> Iterator[str]:
    """Yield names for a trial's directory by preference: the task's short name and seven characters of the identity."""
    short = _UNSAFE.sub("-", task.rsplit("/", 1)[-1]).lstrip(".-_")[:32].rstrip("_-") or "task"
    number = int.from_bytes(digest, "big")
    while True:
        suffix = ""
        for _ in range(7):
            number, place = divmod(number, len(_ALPHABET))
            suffix += _ALPHABET[place]
        yield f"{short}__{suffix}"
        number = int.from_bytes(hashlib.sha256(suffix.encode() + digest).digest(), "big")


def variables_for(task: Task, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a task requests. Raises `UsageError` for one without a value and a default."""
    values: dict[str, str] = {}
    for name, default in (item for requested in _requested(task) for item in requested.items()):
        if name in env:
            values[name] = env[name]
        elif default is None:
            raise UsageError(
                f"the task {task.name} needs the variable {name}, which is not set",
                hint=f"export {name}=... or use --env-file",
                code="missing_variable",
            )
    return values


def ask_consent(requested: Mapping[str, str]) -> None:
    """Ask the user to pass variables to tasks; `requested` maps each to its first task. Raises `UsageError` without
    consent."""
    rows = ", ".join(f"{name} (for {task})" for name, task in sorted(requested.items()))
    question = f"tasks request these environment variables: {rows}"
    if not sys.stdin.isatty():
        raise UsageError(question, hint="add -y to allow it", code="no-consent")
    if not click.confirm(f"{question}. Allow it?", err=True):
        raise UsageError("access to environment variables was denied; nothing was run", code="no-consent")


def _requested(task: Task) -> Iterator[Mapping[str, str | None]]:
    yield wanted_variables(task.config.environment.env)
    yield wanted_variables(task.config.solution.env)
    for server in task.config.environment.mcp_servers:
        yield wanted_in_headers(server.headers)
    for step in task.steps:
        yield wanted_variables(step.verifier.env)
        yield wanted_variables(step.verifier_environment.table.env)


KEY = ".identity"
"""The file with the key of a job."""

_FILE_MODELS = ("script:", "replay:")
_TREES = re.compile(r"skill|template|prompt|config|script|mount|plugin|rule|hook|extension")
"""Options with such names may name a directory whose content is part of the identity."""
_FILES = re.compile(f"{_TREES.pattern}|file|path")


class Identity:
    """The values of a configuration in their form for identities."""

    def __init__(self, config: JobConfig, env: Mapping[str, str], excluded: tuple[str, ...]) -> None:
        data = config.model_dump(mode="json", exclude_defaults=True)
        agents = data.pop("agents", None) or [{}]
        self._env = env
        self._redactor = Redactor(job_secrets(data | {"agents": agents}, env))
        self._settings = {name: value for name, value in data.items() if name not in excluded}
        for mount in data.get("environment", {}).get("mounts", ()):
            if digest := _digest(_filled(mount.get("source"), env), tree=False):
                mount["source"] = {"content": digest}
        self._agents = [{**agent, **_files_of(agent, env)} for agent in agents]

    def agents(self, key: bytes) -> list[dict[str, Any]]:
        return [self._keyed(agent, key) for agent in self._agents]

    def settings(self, key: bytes) -> dict[str, Any]:
        return self._keyed(self._settings, key)

    def variables(self, values: Mapping[str, str], key: bytes) -> dict[str, Any]:
        """Return the variables that a task requests, with secrets hashed."""
        return self._keyed({"env": dict(values)}, key)["env"]

    def _keyed(self, value: Any, key: bytes) -> Any:
        """Fill the templates of a value and hash its secrets."""

        def keyed(name: str, text: str, given: bool) -> Any:
            try:
                real = fill(text, self._env)
            except UsageError:
                return text
            hidden = (
                (looks_secret(name) and real) or is_secret(name, real, given=given) or self._redactor.text(real) != real
            )
            return {"hmac": hmac.digest(key, real.encode(errors="surrogatepass"), "sha256").hex()} if hidden else real

        return map_texts(value, keyed)


def _files_of(agent: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Return digests of the files named by an agent's model and options, and of a custom agent's code."""
    found: dict[str, Any] = {}
    model = str(_filled(agent.get("model_name"), env))
    for prefix in _FILE_MODELS:
        if model.startswith(prefix) and (digest := _digest(model.removeprefix(prefix), tree=True)):
            found["model_name"] = prefix + digest
    if options := agent.get("kwargs"):
        found["kwargs"] = {name: _with_contents(name, value, env) for name, value in options.items()}
    if agent.get("import_path"):
        found["code"] = _code_of(str(agent["import_path"]))
    return found


def _with_contents(name: str, value: Any, env: Mapping[str, str]) -> Any:
    """Replace the files that an option names by digests. Words in a list or a table may have any meaning, such as paths
    inside a sandbox, so they are only looked up if the name suggests files."""
    if isinstance(value, dict):
        return {key: _with_contents(f"{name}.{key}", each, env) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_contents(f"{name}.", each, env) for each in value]
    if "." in name and not _FILES.search(name):
        return value
    digest = _digest(_filled(value, env), tree=_TREES.search(name) is not None)
    return {"content": digest} if digest else value


def _filled(value: Any, env: Mapping[str, str]) -> Any:
    """Fill the template of a value if possible."""
    try:
        return fill(value, env)
    except UsageError:
        return value


def _digest(value: Any, *, tree: bool) -> str | None:
    """Return the digest of the file (with `tree`, also of the directory) that an option names; None without one."""
    if not isinstance(value, str) or not value or "\n" in value or "\0" in value:
        return None
    try:
        path = Path(value).expanduser()
        if path.is_file():
            with path.open("rb") as stream:
                return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
        return tree_digest(path) if tree and path.is_dir() else None
    except (OSError, RuntimeError):  # expanduser fails for an unknown user, such as "~about"
        return None


def _code_of(import_path: str) -> str | None:
    try:
        spec = importlib.util.find_spec(import_path.partition(":")[0])
    except (ImportError, ValueError):
        return None
    return _digest(spec.origin, tree=False) if spec else None


def read_key(directory: Path) -> bytes:
    """Return the key of the job in `directory`; empty if it is missing."""
    try:
        return bytes.fromhex((directory / KEY).read_text())
    except (OSError, ValueError):
        return b""


def make_key(directory: Path) -> bytes:
    """Return the key of the job in `directory`, creating it if it is missing."""
    if not (key := read_key(directory)):
        key = secrets.token_bytes(32)
        write(directory / KEY, key.hex(), mode=0o600)
    return key


NOT_IDENTIFYING = (
    "job_name",
    "jobs_dir",
    "debug",
    "quiet",
    "n_concurrent_trials",
    "n_concurrent_builds",
    "retry",
    "budget",
    "provider_retry",
    "skip_credential_checks",
)
"""Settings that may differ between commands for the same job."""

_OUTSIDE_TRIALS = (*NOT_IDENTIFYING, "agents", "datasets", "tasks", "metrics", "n_attempts", "keep_state", "strict")
"""Settings that do not change the result of a single trial, or are part of its identity elsewhere."""

Warn = Callable[[str], None]
MakePlan = Callable[[bytes], Plan]
"""Creates the plan of a job, given the key for hashes of secrets."""


def plan_job(
    config: JobConfig, env: Mapping[str, str], *, yes: bool = False, warn: Warn = lambda _: None
) -> tuple[MakePlan, dict[str, Any]]:
    """Return a function that creates the plan, and the configuration for writing to disk. `yes` is consent to pass the
    variables that tasks request; `warn` is called with unknown keys and other warnings."""
    disk = to_disk(config, env)
    redactor = Redactor(job_secrets(config.model_dump(mode="json"), env))
    variables: dict[str, dict[str, str]] = {}
    rows = [(source, _load(source, origins, config, env, variables, warn)) for source, origins in _find(config, warn)]
    tasks = [task for each in distinct_sources(rows) for task in each]
    check_tasks(tasks)
    requested = [variables[task.path] for task in tasks]
    first = {name: task.name for task, values in reversed([*zip(tasks, requested, strict=True)]) for name in values}
    tasks = [replace(task, **redactor.value({"path": task.path, "git_url": task.git_url})) for task in tasks]
    if first and not yes:
        ask_consent(first)
    identity = Identity(config, env, _OUTSIDE_TRIALS)

    def make(key: bytes) -> Plan:
        hashed = [identity.variables(values, key) for values in requested]
        agents, settings = identity.agents(key), identity.settings(key)
        return make_plan(tasks, agents, settings, config.n_attempts, shown=disk["agents"], variables=hashed)

    return make, disk


Source = DatasetConfig | JobTask


def distinct_sources(rows: list[tuple[Source, list[PlannedTask]]]) -> list[list[PlannedTask]]:
    """Return the tasks of each source. Datasets of the same name are distinguished by longer paths, or by version."""
    places: dict[str, set[str]] = {}
    for source, tasks in rows:
        for task in tasks if isinstance(source, DatasetConfig) else ():
            places.setdefault(task.source or "", set()).add(_place(source))
    return [
        [replace(task, source=_distinct(task.source, _place(source), places)) for task in tasks]
        for source, tasks in rows
    ]


def _place(source: Source) -> str:
    if isinstance(source, JobTask) or source.path:
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
    """Find the tasks of each source. A pattern must match in at least one of its sources."""
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


def _load(
    source: Source,
    origins: list[Origin],
    config: JobConfig,
    env: Mapping[str, str],
    variables: dict[str, dict[str, str]],
    warn: Warn,
) -> list[PlannedTask]:
    """Load the tasks of a source, and add the variables that each requests to `variables`, by the task's path."""
    planned: list[PlannedTask] = []
    for origin in origins:
        task = load_task(origin.path, strict=config.strict, verify=not config.verifier.disable, origin=origin)
        variables[str(task.path)] = variables_for(task, env)
        for key in task.unknown:
            warn(f"{task.path / 'task.toml'}: {key}")
        planned.append(
            PlannedTask(
                name=task.name,
                digest=task.digest,
                path=str(task.path),
                source=origin.source or (source.source if isinstance(source, JobTask) else None),
                git_url=origin.git_url,
                git_commit_id=origin.git_commit,
                git_path=origin.git_path,
            )
        )
    return planned
