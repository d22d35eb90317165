"""Reading a task directory. Whatever is wrong with it is a `TaskError` that names the file and the key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from pier.errors import TaskError
from pier.task.digest import check_containment, is_kept
from pier.task.model import (
    AgentTable,
    Origin,
    PhaseNetwork,
    StepTable,
    Task,
    TaskConfig,
    TaskStep,
    UnknownKey,
    Verifier,
    VerifierEnvironment,
)

P = TypeVar("P", bound=PhaseNetwork)

COMPOSE_NAME = "docker-compose.yaml"
"""The one name that Harbor reads. Other compose files in `environment/` are the task's own content."""
_CANARY = re.compile(r"\s*(?:<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)


def load_task(path: Path | str, *, strict: bool = False, verify: bool = True, origin: Origin | None = None) -> Task:
    """Read the task in the directory `path`. With `strict` an unknown key is an error. Without `verify` a task needs
    no tests."""
    root = Path(path)
    config, unknown = read_config(root / "task.toml")
    if strict and unknown:
        raise TaskError(f"{root / 'task.toml'}: {'; '.join(map(str, unknown))}", code="task_unknown_key")
    if not (root / "environment").is_dir():
        raise TaskError(f"{root / 'environment'}: this directory is missing", code="task_layout")
    check_containment(root)
    steps = _steps(root, config, verify)
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
        raise TaskError(f"{path}: a string holds a NUL, which no command, path or variable can have", code="task_toml")
    return config, unknown_keys(data, TaskConfig)


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nul, (*value.keys(), *value.values())))
    return any(map(_holds_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def describe(error: ValidationError) -> str:
    """A validation error as text, each finding with its key."""
    rows = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
        rows.append(f"{key or 'the file'}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(rows)


def unknown_keys(data: Any, model: type[BaseModel]) -> list[UnknownKey]:
    """The keys in `data` that `model` and the models inside it ignore."""
    return list(_walk(data, model, ""))


def _walk(data: Any, model: type[BaseModel], prefix: str) -> Iterator[UnknownKey]:
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            import difflib

            near = difflib.get_close_matches(str(key), model.model_fields, n=1)
            yield UnknownKey(f"{prefix}{key}", f"{prefix}{near[0]}" if near else None)
            continue
        inner = _model_in(field.annotation)
        if inner is None:
            continue
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            place = f"{prefix}{key}" if index is None else f"{prefix}{key}[{index}]"
            yield from _walk(item, inner, f"{place}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        if (found := _model_in(part)) is not None:
            return found
    return None


def strip_canary(text: str) -> str:
    """`text` without the canary comments at its beginning and the blank lines after them."""
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start]):
        start += 1
    if start:
        while start < len(lines) and not lines[start].strip():
            start += 1
    return "".join(lines[start:])


def find_compose(directory: Path) -> Path | None:
    """The compose file in a directory, if there is one."""
    path = directory / COMPOSE_NAME
    return path if path.is_file() else None


def _steps(root: Path, config: TaskConfig, verify: bool) -> tuple[TaskStep, ...]:
    if config.steps is None:
        return (_step(root, config, None, verify),)
    if not config.steps:
        raise TaskError(f"{root / 'task.toml'}: steps: a task with steps needs one at least", code="task_toml")
    return tuple(_step(root, config, table, verify) for table in config.steps)


def _step(root: Path, config: TaskConfig, table: StepTable | None, verify: bool) -> TaskStep:
    home = root / "steps" / table.name if table else root
    verifier = _merge_verifier(config.verifier, table.verifier) if table else config.verifier
    mode = (table.verifier.mode if table else None) or config.verifier.mode or "shared"
    environment = _verifier_environment(root, home, config, table)
    tests = tuple(dict.fromkeys(d.resolve() for d in (root / "tests", home / "tests") if d.is_dir()))
    script = f"test{_suffix(config)}"
    has_script = any(is_kept(directory, script) for directory in tests)
    if verify and not has_script and not (mode == "separate" and environment.bundled):
        raise TaskError(f"{home / 'tests' / script}: the test script is missing", code="task_layout")
    solution = next((d.resolve() for d in (home / "solution", root / "solution") if d.is_dir()), None)
    workdir = home / "workdir"
    return TaskStep(
        name=table.name if table else "",
        instruction=_instruction(home / "instruction.md"),
        agent=_merge_agent(config, table),
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


def _suffix(config: TaskConfig) -> str:
    return ".bat" if config.environment.os == "windows" else ".sh"


def _instruction(path: Path) -> str:
    try:
        text = strip_canary(path.read_bytes().decode())
    except FileNotFoundError:
        raise TaskError(f"{path}: the instruction is missing", code="task_layout") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}", code="task_layout") from error
    if "\0" in text:
        raise TaskError(f"{path}: the instruction holds a NUL, which no agent can be given", code="task_layout")
    return text


def _merge_agent(config: TaskConfig, table: StepTable | None) -> AgentTable:
    if table is None:
        return config.agent
    return _overlay(config.agent, table.agent, ("network_mode", "allowed_hosts"))


def _merge_verifier(task: Verifier, step: Verifier) -> Verifier:
    merged = _overlay(task, step, ("network_mode", "allowed_hosts"))
    return merged.model_copy(update={"env": {**task.env, **step.env}})


def _overlay(base: P, over: P, together: tuple[str, ...]) -> P:
    """`over` where it says something, `base` elsewhere; the keys in `together` come from one of the two."""
    said = {key: getattr(over, key) for key in over.model_fields_set}
    if said.keys() & set(together):
        said = {**{key: getattr(over, key) for key in together}, **said}
    return base.model_copy(update=said)


def _verifier_environment(root: Path, home: Path, config: TaskConfig, table: StepTable | None) -> VerifierEnvironment:
    """The first of these that defines an image: the step's own, the task's own, the agent's environment again."""
    layers = [(table.verifier.environment, home / "tests")] if table else []
    layers.append((config.verifier.environment, root / "tests"))
    for environment, tests in layers:
        has_file = (tests / "Dockerfile").is_file()
        compose = find_compose(tests)
        if has_file or compose or (environment is not None and environment.docker_image):
            context = tests.resolve() if has_file else None
            used = environment or config.environment
            return VerifierEnvironment(used, context, True, environment is not None, compose)
    own = next((environment for environment, _ in layers if environment is not None), None)
    context = root / "environment"
    found = context.resolve() if (context / "Dockerfile").is_file() else None
    return VerifierEnvironment(own or config.environment, found, False, own is not None, find_compose(context))
