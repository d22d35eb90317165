"""Finds tasks in sources, and selects among them.

A source is a task directory, a directory of tasks, `URL[@REF][#PATH]` of a git repository, a `dataset.toml` (names and
digests) or a `registry.json` (names, repositories, commits; with `#NAME[@VERSION]` if it has several datasets). The
tasks of a directory are its subdirectories, even if it has a `dataset.toml`; digests are only checked if that file is
the source. Tasks are sorted by name, so that a seed selects the same ones on every machine. Each commit of a repository
is checked out once into pier's cache.

    <home>/cache/git/<repository>/repo.git        bare repository, fetched into under a lock
    <home>/cache/git/<repository>/<commit>/       working tree of one commit, never changed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from pier.errors import TaskError, UsageError
from pier.files import locked
from pier.home import pier_home
from pier.task.load import Origin, Task, describe, load_task


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class DatasetTask(_Row):
    name: str
    digest: str | None = None


class Dataset(_Row):
    """The used fields of a `dataset.toml`."""

    dataset: DatasetTask
    tasks: tuple[DatasetTask, ...] = ()


class RegistryTask(_Row):
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class RegistryEntry(_Row):
    """The used fields of a dataset in a `registry.json`."""

    name: str
    version: str | None = None
    tasks: tuple[RegistryTask, ...] = ()


def _read(path: Path, kind: Any, code: str) -> Any:
    """Read a `dataset.toml` or `registry.json` and validate it as `kind`."""
    try:
        parse = tomllib.loads if path.suffix == ".toml" else json.loads
        return TypeAdapter(kind).validate_python(parse(path.read_bytes().decode()))
    except ValidationError as error:
        raise TaskError(f"{path}: {describe(error)}", code=code) from error
    except (OSError, ValueError, RecursionError) as error:
        form = "TOML" if path.suffix == ".toml" else "JSON"
        raise TaskError(f"{path}: cannot be read as {form}: {error}", code=code) from error


def find_entry(path: Path, name: str | None) -> RegistryEntry:
    """The dataset `name` or `name@version` of a registry. Without a name the registry must have a single dataset."""
    entries: list[RegistryEntry] = _read(path, list[RegistryEntry], "registry")
    plain, _, version = (name or "").partition("@")
    matches = [e for e in entries if (not plain or e.name == plain) and (not version or e.version == version)]
    if len(matches) == 1 or (matches and plain):
        return matches[-1]
    known = ", ".join(f"{e.name}@{e.version}" if e.version else e.name for e in entries)
    problem = f"has no dataset {name!r}" if name else "has several datasets"
    message = f"{path}: {problem}; known: {known or 'none'}"
    raise TaskError(message, code="registry", blame="user", hint=f"{path}#NAME@VERSION")


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCP = re.compile(r"[\w.-]+@[\w.-]+:")
_SECONDS = 600


@dataclass(frozen=True, slots=True)
class GitReference:
    """`URL[@REF][#PATH]`: a repository, a branch, tag or commit, and a directory in it."""

    url: str
    ref: str | None = None
    path: str = ""


def parse_git_reference(text: str) -> GitReference | None:
    """Parse a reference; None if `text` does not look like one."""
    address, _, path = text.partition("#")
    scheme, separator, rest = address.rpartition("://")
    if not (separator or _SCP.match(address) or address.endswith(".git") or path):
        return None
    head, at, ref = rest.rpartition("@")
    is_ref = at and ("/" in head or ":" in head) and "/" not in ref
    url = scheme + separator + (head if is_ref else rest)
    if Path(url).is_dir():
        url = Path(url).resolve().as_uri()
    if ".." in Path(path).parts or path.startswith("/"):
        raise TaskError(f"{text}: the path after # must stay inside the repository", code="git_reference", blame="user")
    return GitReference(url, ref if is_ref else None, path)


def check_out(url: str, ref: str | None = None) -> tuple[str, Path]:
    """The commit of `ref` (by default the default branch) and the directory of its tree, from the cache if it was
    fetched before."""
    home = pier_home() / "cache" / "git" / hashlib.sha256(url.encode()).hexdigest()[:20]
    home.mkdir(parents=True, exist_ok=True)
    if ref and _COMMIT.fullmatch(ref) and (home / ref).is_dir():
        return ref, home / ref
    with locked(home / "lock"):
        commit = _fetch(home, url, ref or "HEAD")
        if not (home / commit).is_dir():
            _materialise(home, commit)
    return commit, home / commit


def _fetch(home: Path, url: str, ref: str) -> str:
    repository = home / "repo.git"
    if not repository.is_dir():
        _git(["init", "--quiet", "--bare", str(repository)], home)
    if _COMMIT.fullmatch(ref):
        with contextlib.suppress(TaskError):
            _git(["cat-file", "-e", f"{ref}^{{commit}}"], repository)
            return ref
    _git(["fetch", "--quiet", "--depth=1", "--no-tags", "--", url, ref], repository)
    return _git(["rev-parse", "FETCH_HEAD^{commit}"], repository)


def _materialise(home: Path, commit: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".checkout.", dir=home, ignore_cleanup_errors=True) as name:
        tree = Path(name, "tree")
        tree.mkdir()
        extra = {"GIT_INDEX_FILE": f"{name}/index", "GIT_WORK_TREE": str(tree), "GIT_DIR": str(home / "repo.git")}
        _git(["checkout", "--quiet", "--force", commit, "--", "."], home, extra)
        tree.rename(home / commit)


def _git(args: list[str], cwd: Path, extra: dict[str, str] | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_LFS_SKIP_SMUDGE": "1", **(extra or {})}
    try:
        done = subprocess.run(["git", *args], cwd=cwd, env=env, capture_output=True, timeout=_SECONDS)
    except FileNotFoundError:
        message = "cannot fetch a task from a repository: git is not installed"
        raise TaskError(message, code="git", blame="infra") from None
    except subprocess.TimeoutExpired:
        raise TaskError(f"git {args[0]} took longer than {_SECONDS} s", code="git", blame="infra") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        detail = next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1])
        raise TaskError(f"git {args[0]} failed: {detail}", code="git", blame="infra", retryable=True)
    return done.stdout.decode().strip()


Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects tasks: by patterns for the names of their directories or their own names, then by a seeded shuffle, then
    the first `n_tasks`."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    n_tasks: int | None = None
    sample_seed: int | None = None


def resolve_sources(
    sources: Iterable[str | Path],
    selection: Selection | None = None,
    *,
    verify: bool = True,
    warn: Warn = lambda _: None,
) -> list[Task]:
    """Read the selected tasks of `sources`. A source without tasks and a pattern without matches are errors."""
    selection = selection or Selection()
    origins = [origin for source in sources for origin in find_tasks(source, warn=warn)]
    check_patterns(selection.include, origins)
    chosen = select(origins, selection)
    return [load_task(origin.path, verify=verify, origin=origin) for origin in chosen]


def find_tasks(source: str | Path, *, warn: Warn = lambda _: None) -> list[Origin]:
    """The origins of a source's tasks, which are not read."""
    path = Path(source)
    text = str(source)
    if path.is_dir():
        return _in_directory(path, Origin(path), warn)
    base, _, fragment = text.partition("#")
    if Path(base).is_file():
        return _in_file(Path(base), fragment or None)
    reference = parse_git_reference(text)
    if reference is None:
        message, hint = f"{text}: no such task, directory or repository", f"pier task init {text} makes a task"
        raise TaskError(message, code="source_missing", blame="user", hint=hint)
    commit, directory = check_out(reference.url, reference.ref)
    directory /= reference.path
    origin = Origin(directory, git_url=reference.url, git_commit=commit, git_path=reference.path)
    if not directory.is_dir():
        raise TaskError(f"{text}: {reference.path!r} is not a directory at commit {commit}", code="source_missing")
    return _in_directory(directory, origin, warn)


def select(origins: Sequence[Origin], selection: Selection) -> list[Origin]:
    """The selected tasks, sorted by the names of their directories unless they are shuffled."""
    if selection.n_tasks is not None and selection.n_tasks < 0:
        raise UsageError("the number of tasks cannot be negative")
    selected = sorted(origins, key=lambda origin: (origin.path.name, str(origin.path)))
    if selection.include:
        selected = [origin for origin in selected if _matches_any(_names(origin), selection.include)]
    if selection.exclude:
        selected = [origin for origin in selected if not _matches_any(_names(origin), selection.exclude)]
    if selection.sample_seed is not None:
        random.Random(selection.sample_seed).shuffle(selected)
    return selected[: selection.n_tasks]


def check_patterns(patterns: Sequence[str], origins: Sequence[Origin]) -> None:
    """Raise `UsageError` for a pattern that matches no task of any source."""
    names = [name for origin in origins for name in _names(origin)] if patterns else []
    for pattern in patterns:
        if not _matches_any(names, [pattern]):
            known = ", ".join(origin.path.name for origin in origins[:8])
            raise UsageError(f"no task matches {pattern!r}; known: {known}{', ...' if len(origins) > 8 else ''}")


def _matches_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _names(origin: Origin) -> list[str]:
    directory = origin.path.name
    names = (directory, origin.source and f"{origin.source}/{directory}", _own_name(origin.path))
    return [name for name in names if name]


def _own_name(directory: Path) -> str | None:
    """The name in a task's file, which is validated later."""
    try:
        with (directory / "task.toml").open("rb") as stream:
            table = tomllib.load(stream).get("task")
    except (OSError, ValueError):
        return None
    name = table.get("name") if isinstance(table, dict) else None
    return name if isinstance(name, str) else None


def _in_directory(directory: Path, origin: Origin, warn: Warn) -> list[Origin]:
    if (directory / "task.toml").is_file():
        return [origin]
    children = sorted(child for child in directory.iterdir() if (child / "task.toml").is_file())
    if not children:
        deeper = sorted({path.parent.parent.name for path in directory.glob("*/*/task.toml")})
        hint = f"{directory}/{deeper[0]}, or {directory}/*/ for all" if deeper else f"pier task init {directory}"
        message = f"{directory}: neither a task (no task.toml) nor a directory of tasks"
        if deeper:
            message = f"{directory}: no task here, but in {len(deeper)} of its directories: {', '.join(deeper[:5])}"
        raise TaskError(message, code="source_empty", blame="user", hint=hint)
    if (directory / "dataset.toml").is_file():
        _compare_with_dataset(directory / "dataset.toml", children, warn)
    source = directory.resolve().name
    return [_below(origin, child, source) for child in children]


def _compare_with_dataset(path: Path, children: Sequence[Path], warn: Warn) -> None:
    """Warn if a `dataset.toml` does not list the tasks of its directory."""
    try:
        listed = {row.name.rpartition("/")[2] for row in _read(path, Dataset, "dataset").tasks}
    except TaskError as error:
        warn(f"{error} (ignored: the tasks are the directories next to it)")
        return
    found = {child.name for child in children}
    if listed != found:
        counts = f"{len(found - listed)} tasks here are not listed, {len(listed - found)} listed ones are missing"
        warn(f"{path}: out of date: {counts}; give the file itself as the source to run what it lists")


def _in_file(path: Path, name: str | None) -> list[Origin]:
    if path.suffix == ".toml":
        return _in_dataset(path, Origin(path.parent))
    entry = find_entry(path, name)
    origins: list[Origin] = []
    for task in entry.tasks:
        if task.git_url:
            commit, directory = check_out(task.git_url, task.git_commit_id)
            origins.append(Origin(directory / task.path, entry.name, task.git_url, commit, task.path))
        else:
            origins.append(Origin(path.parent / task.path, entry.name))
    return origins


def _in_dataset(path: Path, origin: Origin) -> list[Origin]:
    """The tasks of a `dataset.toml`, which are directories next to it. Their digests must match."""
    dataset: Dataset = _read(path, Dataset, "dataset")
    origins: list[Origin] = []
    for row in dataset.tasks:
        candidates = (path.parent / row.name.rpartition("/")[2], path.parent / row.name)
        directory = next((each for each in candidates if (each / "task.toml").is_file()), None)
        if directory is None:
            raise TaskError(f"{path}: the task {row.name!r} is not in {candidates[0]}", code="dataset")
        if row.digest and load_task(directory, verify=False).digest != row.digest:
            message = f"{path}: the task {row.name!r} in {directory} does not have the digest {row.digest}"
            raise TaskError(message, code="dataset")
        origins.append(_below(origin, directory, dataset.dataset.name))
    return origins


def _below(origin: Origin, directory: Path, source: str) -> Origin:
    git_path = None
    if origin.git_path is not None:
        git_path = str(PurePosixPath(origin.git_path) / directory.relative_to(origin.path).as_posix())
    return Origin(directory, source, origin.git_url, origin.git_commit, git_path)
