"""Reads a task from its directory. An invalid task is a `TaskError` with the file and the key. A task without
`[[steps]]` has one step with an empty name, so that all tasks run in the same way.

Its digest is that of Harbor's packager: over `task.toml`, `instruction.md`, `README.md`, `trajectory.json` and the
trees `environment`, `tests`, `solution` and `steps`, without the files that the task's `.gitignore` (by default a list
of temporary files) excludes. `.harborignore` files exclude files of tests and solutions, also from sandboxes.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from pier.errors import TaskError
from pier.plugin import nearest
from pier.task.model import (
    AgentTable,
    Artifact,
    CollectHook,
    Environment,
    Healthcheck,
    PhaseNetwork,
    StepTable,
    TaskConfig,
    Verifier,
    VerifierMode,
)

if TYPE_CHECKING:
    from pathspec import PathSpec, Pattern

P = TypeVar("P", bound=PhaseNetwork)

COMPOSE_NAME = "docker-compose.yaml"
"""The name of compose files in Harbor. Others in `environment/` are the task's content."""
_CANARY = re.compile(r"\s*(?:<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key such as `environment.memmory_mb`, and the nearest known key."""

    key: str
    nearest: str | None = None

    def __str__(self) -> str:
        return f"unknown key {self.key}" + (f" (did you mean {self.nearest}?)" if self.nearest else "")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a task: a directory, or a copy of `git_path` in a commit of a git repository. `source` is the name
    of its dataset."""

    path: Path
    source: str | None = None
    git_url: str | None = None
    git_commit: str | None = None
    git_path: str | None = None


@dataclass(frozen=True, slots=True)
class TaskStep:
    """An instruction with its own verdict. Settings that a step leaves out are the task's."""

    name: str
    instruction: str
    agent: AgentTable
    verifier: Verifier
    verifier_mode: VerifierMode
    verifier_environment: VerifierEnvironment
    tests: tuple[Path, ...]
    test_script: str | None
    collect: tuple[CollectHook, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    solution: Path | None = None
    workdir: Path | None = None
    healthcheck: Healthcheck | None = None
    min_reward: float | dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class VerifierEnvironment:
    """The environment of a separate verifier. `context` is the directory of its Dockerfile. `bundled`: its image has
    the tests, so none are uploaded."""

    table: Environment
    context: Path | None = None
    bundled: bool = False
    own_table: bool = False
    compose: Path | None = None
    """The compose file of its services."""


@dataclass(frozen=True)
class Task:
    """A valid task."""

    path: Path
    name: str
    config: TaskConfig
    steps: tuple[TaskStep, ...]
    origin: Origin
    unknown: tuple[UnknownKey, ...] = ()
    pre_artifacts: Path | None = None
    compose: Path | None = None

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def is_multi_step(self) -> bool:
        return self.config.steps is not None

    @property
    def environment_dir(self) -> Path:
        return self.path / "environment"

    @property
    def dockerfile(self) -> Path | None:
        path = self.environment_dir / "Dockerfile"
        return path if path.is_file() else None

    @cached_property
    def digest(self) -> str:
        """`sha256:<hex>` of the content, as computed by Harbor's packager."""
        return task_digest(self.path)


def load_task(path: Path | str, *, strict: bool = False, verify: bool = True, origin: Origin | None = None) -> Task:
    """Read the task in the directory `path`. `strict` refuses unknown keys; `verify` refuses tasks without tests."""
    root = Path(path)
    config, unknown = read_config(root / "task.toml")
    if strict and unknown:
        raise TaskError(f"{root / 'task.toml'}: {'; '.join(map(str, unknown))}", code="task_unknown_key")
    if not (root / "environment").is_dir():
        raise TaskError(f"{root / 'environment'}: this directory is missing", code="task_layout")
    check_containment(root)
    if config.steps is not None and not config.steps:
        raise TaskError(f"{root / 'task.toml'}: steps: expected at least one step", code="task_toml")
    steps = tuple(_step(root, config, table, verify) for table in config.steps or (None,))
    name = config.task.name if config.task else root.resolve().name
    pre_artifacts = root / "pre_artifacts.sh"
    return Task(
        path=root.resolve(),
        name=name,
        config=config,
        steps=steps,
        origin=origin or Origin(root),
        unknown=tuple(unknown),
        pre_artifacts=pre_artifacts.resolve() if pre_artifacts.is_file() else None,
        compose=find_compose(root / "environment"),
    )


def read_config(path: Path) -> tuple[TaskConfig, list[UnknownKey]]:
    """Read a `task.toml` alone."""
    try:
        text = path.read_bytes().decode()
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file", code="task_missing", hint=f"pier task init {path.parent}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}", code="task_toml") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise TaskError(f"{path}: not TOML: {error}", code="task_toml") from error
    try:
        config = TaskConfig.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{path}: {describe(error)}", code="task_toml") from error
    if _holds_nul(data):
        raise TaskError(f"{path}: a string contains a NUL character", code="task_toml")
    return config, list(unknown_keys(data, TaskConfig))


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nul, (*value.keys(), *value.values())))
    return any(map(_holds_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def describe(error: ValidationError) -> str:
    """The problems of a validation error with their keys."""
    rows = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
        rows.append(f"{key or 'the file'}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(rows)


def unknown_keys(data: Any, model: type[BaseModel], prefix: str = "") -> Iterator[UnknownKey]:
    """The keys in `data` that are not fields of `model` and its nested models."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            near = nearest(str(key), model.model_fields)
            yield UnknownKey(f"{prefix}{key}", f"{prefix}{near}" if near else None)
            continue
        inner = model_in(field.annotation)
        if inner is None:
            continue
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            where = f"{prefix}{key}" if index is None else f"{prefix}{key}[{index}]"
            yield from unknown_keys(item, inner, f"{where}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that holds one or several; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_in(part)) is not None), None)


def strip_canary(text: str) -> str:
    """`text` without canary comments at its beginning and the blank lines after them."""
    lines = text.splitlines(keepends=True)
    rest = list(itertools.dropwhile(_CANARY.fullmatch, lines))
    return text if len(rest) == len(lines) else "".join(itertools.dropwhile(lambda line: not line.strip(), rest))


def find_compose(directory: Path) -> Path | None:
    """The compose file of a directory, if it has one."""
    path = directory / COMPOSE_NAME
    return path if path.is_file() else None


def _step(root: Path, config: TaskConfig, table: StepTable | None, verify: bool) -> TaskStep:
    home = root / "steps" / table.name if table else root
    verifier = config.verifier
    if table:
        env = {**config.verifier.env, **table.verifier.env}
        verifier = _overlay(config.verifier, table.verifier).model_copy(update={"env": env})
    mode = (table.verifier.mode if table else None) or config.verifier.mode or "shared"
    environment = _verifier_environment(root, home, config, table)
    tests = tuple(dict.fromkeys(d.resolve() for d in (root / "tests", home / "tests") if d.is_dir()))
    script = "test.bat" if config.environment.os == "windows" else "test.sh"
    has_script = any(is_kept(directory, script) for directory in tests)
    if verify and not has_script and not (mode == "separate" and environment.bundled):
        raise TaskError(f"{home / 'tests' / script}: the test script is missing", code="task_layout")
    solution = next((d.resolve() for d in (home / "solution", root / "solution") if d.is_dir()), None)
    workdir = home / "workdir"
    return TaskStep(
        name=table.name if table else "",
        instruction=_instruction(home / "instruction.md"),
        agent=_overlay(config.agent, table.agent) if table else config.agent,
        verifier=verifier,
        verifier_mode=mode,
        verifier_environment=environment,
        tests=tests,
        test_script=script if has_script or environment.bundled else None,
        collect=config.verifier.collect + (table.verifier.collect if table else ()),
        artifacts=config.artifacts + (table.artifacts if table else ()),
        solution=solution,
        workdir=workdir.resolve() if table and workdir.is_dir() else None,
        healthcheck=table.healthcheck if table else None,
        min_reward=table.min_reward if table else None,
    )


def _instruction(path: Path) -> str:
    try:
        text = strip_canary(path.read_bytes().decode())
    except FileNotFoundError:
        raise TaskError(f"{path}: the instruction is missing", code="task_layout") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}", code="task_layout") from error
    if "\0" in text:
        raise TaskError(f"{path}: the instruction contains a NUL character", code="task_layout")
    return text


def _overlay(base: P, over: P) -> P:
    """`base` with the keys that are set in `over`. The keys of the network are replaced together."""
    keys, network = over.model_fields_set, {"network_mode", "allowed_hosts"}
    keys = keys | network if keys & network else keys
    return base.model_copy(update={key: getattr(over, key) for key in keys})


def _verifier_environment(root: Path, home: Path, config: TaskConfig, table: StepTable | None) -> VerifierEnvironment:
    """The first of these with an image: the step's own environment, the task's, that of the agent."""
    layers = [(table.verifier.environment, home / "tests")] if table else []
    layers.append((config.verifier.environment, root / "tests"))
    for environment, tests in layers:
        has_file = (tests / "Dockerfile").is_file()
        compose = find_compose(tests)
        if has_file or compose or (environment is not None and environment.docker_image):
            context, own_table = tests.resolve() if has_file else None, environment is not None
            return VerifierEnvironment(environment or config.environment, context, True, own_table, compose)
    own = next((environment for environment, _ in layers if environment is not None), None)
    directory = root / "environment"
    context = directory.resolve() if (directory / "Dockerfile").is_file() else None
    return VerifierEnvironment(own or config.environment, context, False, own is not None, find_compose(directory))


DEFAULT_PATTERNS = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
"""Patterns excluded from a task without a `.gitignore`; `is_left_over` implements the same."""
IGNORE_FILE = ".harborignore"
_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_TREES = ("environment", "tests", "solution", "steps")


def task_digest(task: Path) -> str:
    """`sha256:<hex>` over the relative paths and contents of the task's files."""
    outer = hashlib.sha256()
    for relative, path in task_files(task):
        outer.update(f"{relative}\0{_sha256(path)}\n".encode(errors="surrogateescape"))
    return f"sha256:{outer.hexdigest()}"


def tree_digest(root: Path) -> str:
    """`sha256:<hex>` over the relative paths, executable bits and contents of the files below `root`."""
    outer = hashlib.sha256()
    for path in sorted(_walk(root)):
        executable = "x" if os.access(path, os.X_OK) else "-"
        relative = path.relative_to(root).as_posix()
        outer.update(f"{relative}\0{executable}{_sha256(path)}\n".encode(errors="surrogateescape"))
    return f"sha256:{outer.hexdigest()}"


def task_files(task: Path) -> list[tuple[str, Path]]:
    """The relative and real paths of the task's files, in order."""
    root = task.resolve()
    try:
        excluded = read_patterns((root / ".gitignore").read_text(errors="replace").splitlines()).match_file
    except FileNotFoundError:
        excluded = is_left_over
    files = [root / name for name in _FILES if (root / name).exists()]
    for tree in _TREES:
        files += _walk(root / tree)
    if any(path.name == IGNORE_FILE for path in files):
        scopes = [root / "tests", root / "solution", *root.glob("steps/*/tests"), *root.glob("steps/*/solution")]
        kept = {path for scope in scopes for path in kept_files(scope)}
        outside = {path for path in files if not any(path.is_relative_to(scope) for scope in scopes)}
        files = [path for path in files if path in kept or (path in outside and path.name != IGNORE_FILE)]
    named = ((path.relative_to(root).as_posix(), path) for path in files)
    return sorted((relative, path) for relative, path in named if not excluded(relative))


def is_left_over(relative: str) -> bool:
    """Whether `DEFAULT_PATTERNS` match a file. Avoids importing the library for patterns, which is slow."""
    parts = relative.split("/")
    return "__pycache__" in parts[:-1] or any(
        part == ".DS_Store" or part.endswith((".pyc", ".swp", ".swo", "~")) for part in parts
    )


def read_patterns(lines: Iterable[str]) -> PathSpec[Pattern]:
    """The patterns of a `.gitignore` file, for paths relative to its directory. Invalid ones are ignored."""
    from pathspec import PathSpec, lookup_pattern

    patterns: list[Pattern] = []
    for line in lines:
        with suppress(ValueError):
            patterns.append(lookup_pattern("gitignore")(line))
    return PathSpec(patterns)


def kept_files(root: Path) -> Iterator[Path]:
    """The files below a directory of tests or a solution, without those that its `.harborignore` files exclude. Their
    rules apply to their directory and all below. The innermost matching rule decides; an excluded directory is skipped
    with all its content."""
    rules: dict[Path, tuple[tuple[Path, PathSpec[Pattern]], ...]] = {root.parent: ()}
    pending = [root] if root.is_dir() else []
    while pending:
        directory = pending.pop()
        known, ignore_file = rules[directory.parent], directory / IGNORE_FILE
        if ignore_file.is_file():
            known = (*known, (directory, read_patterns(ignore_file.read_text(errors="replace").splitlines())))
        rules[directory] = known
        for path in sorted(directory.iterdir()):
            is_directory = path.is_dir() and not path.is_symlink()
            suffix = "/" if is_directory else ""
            results = (spec.check_file(f"{path.relative_to(base)}{suffix}").include for base, spec in known)
            matches = [is_excluded for is_excluded in results if is_excluded is not None]
            if path.name == IGNORE_FILE or (matches and matches[-1]):
                continue
            if is_directory:
                pending.append(path)
            elif path.is_file() or path.is_symlink():
                yield path


def is_kept(directory: Path, name: str) -> bool:
    """Whether the file `name` of a directory of tests exists and is not excluded."""
    path = directory / name
    return path.is_file() and (not (directory / IGNORE_FILE).is_file() or path in kept_files(directory))


@contextmanager
def without_ignored(directory: Path) -> Iterator[Path]:
    """`directory`, or a copy of it without the files that its `.harborignore` files exclude."""
    if not any(IGNORE_FILE in names for _, _, names in os.walk(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="pier-task-") as place:
        for path in kept_files(directory):
            target = Path(place, path.relative_to(directory))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
        yield Path(place)


def check_containment(task: Path) -> None:
    """Raise `TaskError` for a link that leads out of the task's directory, whose target would be uploaded."""
    root = task.resolve()
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            if not path.is_symlink():
                continue
            try:
                target = path.resolve(strict=True)
            except (OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) or error.errno == errno.ELOOP:
                    raise TaskError(f"{path}: the link points to itself", code="task_link") from error
                continue
            if not target.is_relative_to(root):
                raise TaskError(f"{path}: the link points outside of the task", code="task_link")


def _walk(tree: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(tree):
        yield from (path for name in names if (path := Path(directory, name)).is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
