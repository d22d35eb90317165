"""Where tasks come from, and which of them are taken.

A source is a task directory, a directory of tasks, `URL[@REF][#PATH]` of a git repository, a `dataset.toml` (names and
digests) or a `registry.json` (names, repositories, commits; with `#NAME[@VERSION]` if it holds several datasets). A
directory is walked whether or not a `dataset.toml` lies in it; digests are checked only when the file itself is the
source. The order of tasks is by name, the same on every machine, so that a seed always picks the same ones. Each commit
of a repository is checked out once into pier's cache and never changed after.

    <home>/cache/git/<repository>/repo.git        bare; only fetched into, under a lock
    <home>/cache/git/<repository>/<commit>/       the working tree of one commit
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """`dataset.toml`, as far as it is used."""

    dataset: DatasetTask
    tasks: tuple[DatasetTask, ...] = ()


class RegistryTask(_Row):
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class RegistryEntry(_Row):
    """One dataset of a `registry.json`, as far as it is used."""

    name: str
    version: str | None = None
    tasks: tuple[RegistryTask, ...] = ()


def _read(path: Path, kind: Any, code: str) -> Any:
    """A `dataset.toml` or `registry.json`, checked as `kind`."""
    try:
        parse = tomllib.loads if path.suffix == ".toml" else json.loads
        return TypeAdapter(kind).validate_python(parse(path.read_bytes().decode()))
    except ValidationError as error:
        raise TaskError(f"{path}: {describe(error)}", code=code) from error
    except (OSError, ValueError, RecursionError) as error:
        form = "TOML" if path.suffix == ".toml" else "JSON"
        raise TaskError(f"{path}: cannot be read as {form}: {error}", code=code) from error


def find_entry(path: Path, name: str | None) -> RegistryEntry:
    """The dataset `name` or `name@version` of a registry; without a name the registry must hold one only."""
    entries: list[RegistryEntry] = _read(path, list[RegistryEntry], "registry")
    wanted, _, version = (name or "").partition("@")
    found = [e for e in entries if (not wanted or e.name == wanted) and (not version or e.version == version)]
    if len(found) == 1 or (found and wanted):
        return found[-1]
    known = ", ".join(f"{e.name}@{e.version}" if e.version else e.name for e in entries)
    problem = f"has no dataset {name!r}" if name else "holds several datasets"
    raise TaskError(
        f"{path}: {problem}; it holds: {known or 'nothing'}", code="registry", blame="user", hint=f"{path}#NAME@VERSION"
    )


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCP = re.compile(r"[\w.-]+@[\w.-]+:")
_SECONDS = 600


@dataclass(frozen=True, slots=True)
class GitReference:
    """`URL[@REF][#PATH]`: a repository, a branch, tag or commit in it, and a directory in that."""

    url: str
    ref: str | None = None
    path: str = ""


def parse_git_reference(text: str) -> GitReference | None:
    """The reference that `text` is, or None if it does not look like one."""
    address, _, path = text.partition("#")
    scheme, separator, rest = address.rpartition("://")
    is_git = separator or _SCP.match(address) or address.endswith(".git") or path
    if not is_git:
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
    """The commit that `ref` is (the default branch if None) and the directory with its tree, from the cache if that
    commit was fetched before."""
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
    unborn = Path(tempfile.mkdtemp(prefix=".checkout.", dir=home))
    try:
        tree = unborn / "tree"
        tree.mkdir()
        extra = {"GIT_INDEX_FILE": str(unborn / "index"), "GIT_WORK_TREE": str(tree), "GIT_DIR": str(home / "repo.git")}
        _git(["checkout", "--quiet", "--force", commit, "--", "."], home, extra)
        tree.rename(home / commit)
    finally:
        shutil.rmtree(unborn, ignore_errors=True)


def _git(args: list[str], cwd: Path, extra: dict[str, str] | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_LFS_SKIP_SMUDGE": "1", **(extra or {})}
    try:
        done = subprocess.run(["git", *args], cwd=cwd, env=env, capture_output=True, timeout=_SECONDS)
    except FileNotFoundError:
        raise TaskError(
            "cannot fetch a task from a repository: git is not installed", code="git", blame="infra"
        ) from None
    except subprocess.TimeoutExpired:
        raise TaskError(f"git {args[0]} took longer than {_SECONDS} s", code="git", blame="infra") from None
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        fatal = next((word for word in words if word.startswith(("fatal: ", "error: "))), "")
        detail = fatal or (words[-1] if words else f"exit code {done.returncode}")
        raise TaskError(f"git {args[0]} failed: {detail}", code="git", blame="infra", retryable=True)
    return done.stdout.decode().strip()


Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tasks of a source are taken: globs against the names of their directories and the names that they give
    themselves, then a seeded shuffle, then the first `n_tasks`."""

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
    """Read all tasks of `sources` that `selection` takes. A source without tasks is an error, and so is a pattern that
    matches no task of any source."""
    selection = selection or Selection()
    origins = [origin for source in sources for origin in find_tasks(source, warn=warn)]
    check_patterns(selection.include, origins)
    chosen = select(origins, selection)
    return [load_task(origin.path, verify=verify, origin=origin) for origin in chosen]


def find_tasks(source: str | Path, *, warn: Warn = lambda _: None) -> list[Origin]:
    """Where the tasks of one source are, without reading them."""
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
    found = directory / reference.path
    origin = Origin(found, git_url=reference.url, git_commit=commit, git_path=reference.path)
    if not found.is_dir():
        raise TaskError(f"{text}: {reference.path!r} is not a directory at commit {commit}", code="source_missing")
    return _in_directory(found, origin, warn)


def select(origins: Sequence[Origin], selection: Selection) -> list[Origin]:
    """The tasks that `selection` takes, in order of their directory's name."""
    if selection.n_tasks is not None and selection.n_tasks < 0:
        raise UsageError("the number of tasks cannot be negative")
    ordered = sorted(origins, key=lambda origin: (origin.path.name, str(origin.path)))
    kept = ordered
    if selection.include or selection.exclude:
        kept = [origin for origin in ordered if _matches(tuple(_names(origin)), selection)]
    if selection.sample_seed is not None:
        random.Random(selection.sample_seed).shuffle(kept)
    return kept if selection.n_tasks is None else kept[: selection.n_tasks]


def check_patterns(patterns: Sequence[str], origins: Sequence[Origin]) -> None:
    """Refuse a pattern that no task of any source matches: it is a typing error."""
    named = [tuple(_names(origin)) for origin in origins] if patterns else []
    for pattern in patterns:
        if not any(_fits(names, pattern) for names in named):
            known = ", ".join(origin.path.name for origin in origins[:8])
            raise UsageError(f"no task matches {pattern!r}; there are: {known}{', ...' if len(origins) > 8 else ''}")


def _matches(names: Sequence[str], selection: Selection) -> bool:
    if selection.include and not any(_fits(names, pattern) for pattern in selection.include):
        return False
    return not any(_fits(names, pattern) for pattern in selection.exclude)


def _fits(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _names(origin: Origin) -> Iterator[str]:
    yield origin.path.name
    if origin.source:
        yield f"{origin.source}/{origin.path.name}"
    if name := _own_name(origin.path):
        yield name


def _own_name(directory: Path) -> str | None:
    """The name that a task gives itself. The rest of its file is checked when the task is loaded."""
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
    """Warn when a `dataset.toml` is out of date. The directory decides which tasks there are."""
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
    found: list[Origin] = []
    for task in entry.tasks:
        if task.git_url:
            commit, directory = check_out(task.git_url, task.git_commit_id)
            found.append(Origin(directory / task.path, entry.name, task.git_url, commit, task.path))
        else:
            found.append(Origin(path.parent / task.path, entry.name))
    return found


def _in_dataset(path: Path, origin: Origin) -> list[Origin]:
    """The tasks of a `dataset.toml` lie in the directories next to it; digests that it gives must match."""
    dataset: Dataset = _read(path, Dataset, "dataset")
    found: list[Origin] = []
    for row in dataset.tasks:
        short = row.name.rpartition("/")[2]
        directory = next(
            (d for d in (path.parent / short, path.parent / row.name) if (d / "task.toml").is_file()), None
        )
        if directory is None:
            raise TaskError(f"{path}: the task {row.name!r} is not in {path.parent / short}", code="dataset")
        if row.digest and load_task(directory, verify=False).digest != row.digest:
            raise TaskError(
                f"{path}: the task {row.name!r} in {directory} does not have the digest {row.digest}", code="dataset"
            )
        found.append(_below(origin, directory, dataset.dataset.name))
    return found


def _below(origin: Origin, directory: Path, source: str) -> Origin:
    git_path = None
    if origin.git_path is not None:
        git_path = str(PurePosixPath(origin.git_path) / directory.relative_to(origin.path).as_posix())
    return Origin(directory, source, origin.git_url, origin.git_commit, git_path)
