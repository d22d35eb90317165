"""Lists of tasks: `dataset.toml` (names and digests) and `registry.json` (names, repositories, commits)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pier.errors import TaskError
from pier.task.config import Author
from pier.task.load import describe


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class DatasetInfo(_Row):
    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class DatasetTask(_Row):
    name: str
    digest: str | None = None


class DatasetFile(_Row):
    path: str
    digest: str | None = None


class Dataset(_Row):
    """`dataset.toml`."""

    schema_version: str = "1.0"
    dataset: DatasetInfo
    tasks: tuple[DatasetTask, ...] = ()
    files: tuple[DatasetFile, ...] = ()


class RegistryTask(_Row):
    path: str
    name: str | None = None
    git_url: str | None = None
    git_commit_id: str | None = None


class RegistryMetric(_Row):
    type: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class RegistryEntry(_Row):
    """One dataset of a `registry.json`."""

    name: str
    version: str | None = None
    description: str = ""
    tasks: tuple[RegistryTask, ...] = ()
    metrics: tuple[RegistryMetric, ...] = ()


def read_dataset(path: Path) -> Dataset:
    """Read a `dataset.toml`."""
    try:
        return Dataset.model_validate(tomllib.loads(path.read_bytes().decode()))
    except ValidationError as error:
        raise TaskError(f"{path}: {describe(error)}", code="dataset") from error
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: cannot be read as TOML: {error}", code="dataset") from error


def read_registry(path: Path) -> list[RegistryEntry]:
    """Read a `registry.json`."""
    try:
        return TypeAdapter(list[RegistryEntry]).validate_python(json.loads(path.read_bytes()))
    except ValidationError as error:
        raise TaskError(f"{path}: {describe(error)}", code="registry") from error
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: cannot be read as JSON: {error}", code="registry") from error


def find_entry(path: Path, name: str | None) -> RegistryEntry:
    """The dataset `name` or `name@version` of a registry; without a name the registry must hold one only."""
    entries = read_registry(path)
    wanted, _, version = (name or "").partition("@")
    found = [e for e in entries if (not wanted or e.name == wanted) and (not version or e.version == version)]
    if len(found) == 1 or (found and wanted):
        return found[-1]
    known = ", ".join(f"{e.name}@{e.version}" if e.version else e.name for e in entries)
    problem = f"has no dataset {name!r}" if name else "holds several datasets"
    raise TaskError(
        f"{path}: {problem}; it holds: {known or 'nothing'}", code="registry", blame="user", hint=f"{path}#NAME@VERSION"
    )
