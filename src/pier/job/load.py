"""Job files: YAML or JSON into a `JobConfig`, with every complaint naming the file and the key.

Several files are layers: later ones win for single values, lists are joined, an empty list clears. Keys of Harbor's
that ask for what pier does not do are refused by name; left at their neutral value they are passed over.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pier.errors import UsageError
from pier.job.config import JobConfig

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
