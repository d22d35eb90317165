"""Loads job files and flags into a `JobConfig`, and converts a `JobConfig` for writing to disk.

Files are layers: later ones override single values, lists are joined, an empty list clears. Harbor's keys for features
that pier does not support are refused by name; at their neutral value they are ignored.

`${NAME}` templates stay templates in every file and are filled in memory, right before use. A literal secret (see
`pier.secret`) is written as `${NAME}` if the host's variable of that name has the same value, else as `****`, and a
secret inside a longer text as `[REDACTED]`. Such values cannot be read back, so resuming from the files alone fails
with a request for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pier.errors import UsageError
from pier.job.config import JobConfig, Setting, expected
from pier.plugin import nearest
from pier.redact import REDACTED, Redactor
from pier.secret import HIDDEN, TEMPLATE, is_secret, looks_secret, secrets_in, secrets_in_text, value_on_disk
from pier.task.load import model_in
from pier.trial.record import backend_fields

UNSUPPORTED = tuple(
    tuple(cell.strip() for cell in row.split("|"))
    for row in """\
--diff source_jobs | comparing a plan with earlier jobs | run the job, then: pier job compare JOB JOB
--n-concurrent-agents agents.n_concurrent agents.concurrency_group | limits per agent | \
limit trials with -n, and model calls with `concurrency` in providers.toml
--install-only install_only | installing agents without running them | pier agent pack NAME
--resume-trajectory --load-trajectory agents.resume_trajectory agents.load_trajectory | \
continuing a recorded session | -m replay:FILE answers a new session from a recording
--skill --skills agents.skills | additional skills | name a directory of the image as skills_dir in task.toml
--user-agent --user-model --uk --user-agent-kwarg --user-persona-path --user-prompt-template-path --bridge \
--bridge-prompt-path --bk --bridge-kwarg user_agent | simulated users | split the conversation into steps of the task
--stream --no-stream environment.stream | streaming from sandboxes | read the trial's directory while it runs
--override-tpu environment.override_tpu | TPUs | leave it out
--extra-docker-compose environment.extra_docker_compose | additional compose files | \
write the services into the task's environment/docker-compose.yaml
environment.suppress_override_warnings | silencing warnings about overrides | leave it out
--verifier --verifier-kwarg --verifier-import-path verifier.import_path verifier.kwargs | \
verifiers written as Python classes | write tests/test.sh, which may run Python
--repo datasets.repo | a git repository as a registry | pier run URL#DIRECTORY
--registry-url datasets.registry_url datasets.ref tasks.name tasks.ref | registries on the network | \
download registry.json and use -d NAME --registry-path FILE
datasets.overwrite datasets.download_dir tasks.overwrite tasks.download_dir | other download directories | set PIER_HOME
--task-git-url --task-git-commit --task-path | separate flags for a task in git | -t URL@COMMIT#PATH
extra_instruction_paths | files of instructions as a key | use extra_instructions or --extra-instruction-path
--skip-model-parsing-and-provider-mapping --sm agents.skip_model_parsing | model names without a provider | \
write -m PROVIDER/MODEL, or give --base-url
--plugin --pk --plugin-kwarg plugins | job plugins | read the job's directory when it is done
--upload --launch --use-static-ip --credential-mode --one-off-secret --stored-secret --no-secrets --registry-secret \
--public --private --share --share-user --user --org | hosted services | share the job's directory
--agent-include-logs --agent-exclude-logs --verifier-include-logs --verifier-exclude-logs agents.include_logs \
agents.exclude_logs verifier.include_logs verifier.exclude_logs | filtering logs | \
delete the files that you do not need when the job is done
--export-traces --export-push --export-sharegpt --export-episodes --export-repo --export-instruction-metadata \
--export-verifier-metadata | exporting traces while running | pier trajectory convert, when the job is done
""".splitlines()
)
"""Harbor's flags and keys that pier does not support: their names, the feature, and the alternative."""


def unsupported(name: str) -> UsageError | None:
    """Return the error for a flag or key of Harbor that pier does not support; None for any other."""
    for names, feature, instead in UNSUPPORTED:
        if name in names.split():
            return UsageError(f"{name}: pier does not support {feature}", hint=instead, code="not-done")
    return None


MAX_FILE = 16 * 1024 * 1024
"""Maximum size of a job file; YAML of this size already takes minutes to parse."""

_NEUTRAL: tuple[Any, ...] = (None, False, [], {})


def read_file(path: Path) -> dict[str, Any]:
    """Read one job file."""
    text = _read_text(path)
    try:
        data = json.loads(text) if path.suffix == ".json" else _read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    if data is not None and (not isinstance(data, dict) or not all(isinstance(key, str) for key in data)):
        raise UsageError(f"{path}: expected a mapping of names to values")
    return data or {}


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE:
            raise UsageError(f"cannot read {path}: larger than {MAX_FILE >> 20} MB")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read {path}: {reason}") from error


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def merge(low: dict[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `high` into `low`: tables by key, lists joined (an empty one clears), everything else replaced."""
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


def parse(data: dict[str, Any], origin: str, flags: Mapping[str, str] = MappingProxyType({})) -> JobConfig:
    """Validate `data` as a configuration. Errors name `origin` and the key, or the flag of a key in `flags`."""
    cleaned = _drop_neutral(data, "", origin)
    try:
        return JobConfig.model_validate(cleaned)
    except ValidationError as error:
        message = "; ".join(_messages(error, flags))
        if all(_key(each["loc"]) in flags for each in error.errors()):
            raise UsageError(message, hint="pier run --help") from error
        raise UsageError(f"{origin}: {message}", code="job-config") from error
    except RecursionError as error:
        raise UsageError(f"{origin}: nested too deeply", code="job-config") from error


def _drop_neutral(data: dict[str, Any], prefix: str, origin: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if (error := unsupported(f"{prefix}{key}")) is not None:
            if not any(value is neutral or value == neutral for neutral in _NEUTRAL):
                raise UsageError(f"{origin}: {error.message}", hint=error.hint, code=error.code)
        elif not prefix and isinstance(value, list):
            kept[key] = [_drop_neutral(v, f"{key}.", origin) if isinstance(v, dict) else v for v in value]
        elif not prefix and isinstance(value, dict):
            kept[key] = _drop_neutral(value, f"{key}.", origin)
        else:
            kept[key] = value
    return kept


def _key(place: tuple[int | str, ...]) -> str:
    return ".".join(part for part in place if isinstance(part, str))


def _messages(error: ValidationError, flags: Mapping[str, str]) -> Iterator[str]:
    for each in error.errors(include_url=False, include_context=False):
        place = each["loc"]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        where = flags.get(_key(place), where)
        model, field = _find(place)
        if each["type"] == "extra_forbidden":
            near = nearest(str(place[-1]), model.model_fields if model else ())
            yield f"unknown key {where}" + (f", did you mean {near!r}?" if near else "")
            continue
        reason = each["msg"].removeprefix("Value error, ")
        if each["type"] != "value_error" and field:
            reason = f"expected {expected(field)}"
        value, hidden = each["input"], {"env", "kwargs", "headers", "mcp_servers"} & {*place}
        shown = "" if hidden or isinstance(value, dict | list) or len(repr(value)) > 80 else f" {value!r}"
        yield f"invalid value{shown} for {where or 'the file'}: {reason}"


def _find(place: tuple[int | str, ...]) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """Return the table and the field at a place; None if the place is inside a plain value."""
    model: type[BaseModel] | None = JobConfig
    field: FieldInfo | None = None
    for part in place:
        if isinstance(part, str):
            field = model.model_fields.get(part) if model else None
            if part != place[-1]:
                model = model_in(field.annotation) if field else None
    return model, field


_SELECTING = (
    *("agents.name", "agents.model_name", "datasets.path", "datasets.name", "datasets.registry_path", "tasks.path"),
)
"""Settings that select agents and sources, and so replace those of the job files."""


def apply_flags(config: dict[str, Any], given: Iterable[tuple[Setting, Any]]) -> dict[str, Any]:
    """Apply the flags to `config`, as read from job files. An agent, a model or a source replaces those of the files;
    other flags of agents and datasets apply to each of them."""
    merged: dict[str, Any] = json.loads(json.dumps(config, default=str))
    selected: dict[str, Any] = {}
    layer: list[tuple[str, Any, bool]] = []
    for setting, text in given:
        if setting.key in _SELECTING:
            selected[setting.key] = text
        else:
            layer.append((setting.key, flag_value(setting, text), bool(setting.flag and setting.flag.joins)))
    merged["agents"] = _agents(merged.get("agents") or [{}], selected)
    _choose_sources(merged, selected)
    if not merged["datasets"] and any(key.startswith("datasets.") for key, _, _ in layer):
        raise UsageError("cannot select tasks without a dataset", hint="pier run DIRECTORY")
    for key, value, joins in layer:
        root, _, inner = key.partition(".")
        if root in ("agents", "datasets"):
            for table in merged[root]:
                _put(table, inner, value, joins)
        else:
            _put(merged, key, value, joins)
    return merged


def flag_value(setting: Setting, text: Any) -> Any:
    """Convert the text of a flag to the value of its setting."""
    flag = setting.flag
    if flag is not None and flag.entry:
        return {flag.entry: text}
    match flag.form if flag else "value":
        case "pairs":
            return _pairs(setting.names[-1], text)
        case "typed-pairs":
            return {name: _typed(value) for name, value in _pairs(setting.names[-1], text).items()}
        case "json":
            return _json_list(setting.names[0], text)
        case "text-file":
            return [_read_text(Path(path)) for path in text]
        case "mcp-file":
            return [server for path in text for server in _mcp_servers(Path(path))]
        case _:
            return list(text) if isinstance(text, tuple) else text


def _pairs(flag: str, rows: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        name, equals, value = row.partition("=")
        if not equals or not name:
            raise UsageError(f"invalid value {row!r} for {flag}: expected NAME=VALUE")
        found[name] = value
    return found


def _typed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _agents(agents: list[dict[str, Any]], selected: Mapping[str, Any]) -> list[dict[str, Any]]:
    if name := selected.get("agents.name"):
        agents = [{"name": name}]
    if models := selected.get("agents.model_name"):
        if len(agents) > 1:
            raise UsageError("cannot use -m with a job file that names several agents", hint="give -a as well")
        agents = [{**agents[0], "model_name": model} for model in models]
    return [dict(agent) for agent in agents]


def _choose_sources(merged: dict[str, Any], selected: Mapping[str, Any]) -> None:
    paths, names, tasks = (selected.get(key) or () for key in ("datasets.path", "datasets.name", "tasks.path"))
    if paths or names or tasks:
        merged["datasets"] = [{"path": path} for path in paths]
        merged["datasets"] += [_named_dataset(name, selected.get("datasets.registry_path")) for name in names]
        merged["tasks"] = [_one_task(task) for task in tasks]
    for key in ("datasets", "tasks"):
        merged[key] = [_absolute(source) for source in merged.get(key) or []]


def _named_dataset(name: str, registry: str | None) -> dict[str, Any]:
    if registry is None:
        raise UsageError(f"-d {name}: pier has no built-in registry", hint=f"-d {name} --registry-path registry.json")
    short, _, version = name.partition("@")
    return {"name": short, "registry_path": registry, "version": version or None}


def _one_task(task: str) -> dict[str, Any]:
    url, _, inside = task.partition("#")
    if not inside:
        return {"path": task}
    base, at, commit = url.rpartition("@") if "@" in url.rpartition("/")[2] else (url, "", "")
    return {"git_url": base or url, "path": inside, **({"git_commit_id": commit} if at else {})}


def _absolute(source: dict[str, Any]) -> dict[str, Any]:
    """Make local paths absolute, so that a job can be resumed from any directory."""
    source = dict(source)
    for key in ("path", "registry_path"):
        base, mark, rest = str(source.get(key) or "").partition("#")
        if base and not source.get("git_url") and Path(base).exists():
            source[key] = f"{Path(base).resolve()}{mark}{rest}"
    return source


def _mcp_servers(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(_read_text(path))
        servers = data["mcpServers"] if isinstance(data, dict) and "mcpServers" in data else data
        if isinstance(servers, dict):
            servers = [{"name": name, **table} for name, table in servers.items()]
        return [{"transport" if key == "type" else key: row[key] for key in row} for row in servers]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: expected a list of MCP servers: {error}") from error


def _json_list(flag: str, text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"invalid value for {flag}: not JSON: {error}") from error
    if not isinstance(value, list):
        raise UsageError(f"invalid value for {flag}: expected a JSON list")
    return value


def _put(table: dict[str, Any], key: str, value: Any, joins: bool) -> None:
    """Set one value: a table is updated, and a list is replaced, or extended if it `joins`."""
    *outer, last = key.split(".")
    for part in outer:
        table = table.setdefault(part, {})
    before = table.get(last)
    if isinstance(value, dict):
        value = {**(before or {}), **value}
    elif joins and isinstance(value, list):
        value = [*(before or []), *value]
    table[last] = value


def read_job(files: Iterable[str], given: Iterable[tuple[Setting, Any]] = ()) -> JobConfig:
    """Return the configuration from job files and flags."""
    merged: dict[str, Any] = {}
    for name in files:
        merged = merge(merged, read_file(Path(name)))
    for key in ("agents", "datasets", "tasks"):
        if merged.get(key, ...) is None:
            del merged[key]
    if merged:
        parse(merged, ", ".join(files))
    given = list(given)
    flags = {setting.key: setting.names[-1] for setting, _ in given}
    return parse(apply_flags(merged, given), "the command line", flags)


def to_disk(config: JobConfig, env: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration for writing to disk, in a shape that Harbor also reads."""
    data = config.model_dump(mode="json")
    data["environment"] |= backend_fields(config.environment.backend)
    return hide(data, env)


def fill(value: Any, env: Mapping[str, str], where: str = "") -> Any:
    """Replace each string that consists of one template by its value."""
    if isinstance(value, dict):
        return {key: fill(each, env, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, env, f"{where}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str) or not (match := TEMPLATE.fullmatch(value)):
        if isinstance(value, str) and (value == HIDDEN or REDACTED in value):
            raise UsageError(
                f"{where}: this value is secret and was not written to disk",
                hint="run the command that started the job again, to continue the job",
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
    """Remove the secrets of a configuration."""
    shown = map_texts(value, lambda name, text, given: value_on_disk(name, text, env, given=given))
    return Redactor(job_secrets(value, env)).value(shown)


def map_texts(value: Any, change: Callable[[str, str, bool], Any], name: str = "", *, given: bool = False) -> Any:
    """Change every text of a configuration. `change` is called with the key of the text, the text, and whether it is in
    a table of values from the user (`env`, `headers`)."""
    if isinstance(value, dict):
        given = given or name in ("env", "headers")
        return {key: map_texts(each, change, str(key), given=given) for key, each in value.items()}
    if isinstance(value, list):
        return [map_texts(each, change, name, given=given) for each in value]
    return change(name, value, given) if isinstance(value, str) else value


def job_secrets(config: Any, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets of a job: those of its configuration and its env file, and the keys in this process's
    environment, which a provider may echo."""
    yield from secrets_in(config, env)
    for name, value in env.items():
        if os.environ.get(name) != value:
            if is_secret(name, value, given=True):
                yield value
            yield from secrets_in_text(value)
        elif looks_secret(name):
            yield value


def environ_with(env_file: str | None) -> dict[str, str]:
    """Return the variables of this process, overridden by those of a file."""
    return {**os.environ, **(read_env_file(Path(env_file)) if env_file else {})}


def read_env_file(path: Path) -> dict[str, str]:
    """Read an `.env` file: `NAME=value` lines, `export` allowed, quotes removed, `#` starts a comment."""
    variables: dict[str, str] = {}
    for number, row in enumerate(_read_text(path).splitlines(), 1):
        line = row.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"{path}:{number}: expected NAME=value")
        value = value.strip()
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        variables[name.strip()] = value[1:-1] if quoted else value.partition(" #")[0].rstrip()
    return variables
