"""A static look at the compose files of a task, by the reader that trials use. No engine is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pier.errors import TaskError
from pier.sandbox.compose import MAIN, Compose
from pier.sandbox.compose.read import read_compose
from pier.task import Task, load_task
from pier.task.config import Environment
from pier.task.lint import Problem
from pier.task.template import wanted_variables
from pier.trial.compose import compose_variables

_STAND_IN = "1"
"""The value of a variable that is not set here: a text, a number and a size."""


def lint_services(path: Path) -> list[Problem]:
    """What is wrong with the services of the task in a directory; nothing, if the task itself cannot be read."""
    try:
        task = load_task(path)
    except TaskError:
        return []
    problems: list[Problem] = []
    read: dict[Path, Compose | None] = {}
    for file, table in _files(task):
        if file not in read:
            read[file] = _read(file, table, problems)
    own = read.get(task.compose) if task.compose else None
    if own is not None or task.compose is None:
        problems += _lint_names(task, own)
    return problems


def _files(task: Task) -> Iterator[tuple[Path, Environment]]:
    if task.compose is not None:
        yield task.compose, task.config.environment
    for step in task.steps:
        verifier = step.verifier_environment
        if step.verifier_mode == "separate" and verifier.compose is not None:
            yield verifier.compose, verifier.table


def _read(file: Path, table: Environment, problems: list[Problem]) -> Compose | None:
    environ = dict.fromkeys(wanted_variables(table.env), _STAND_IN) | dict(os.environ)
    try:
        compose = read_compose(file, compose_variables(table, file.parent, environ))
    except TaskError as error:
        problems.append(_problem(file, error))
        return None
    problems += [
        Problem("warning", "compose-note", str(file), note.removeprefix(f"{file.name}: ")) for note in compose.notes
    ]
    return compose


def _problem(file: Path, error: TaskError) -> Problem:
    where, _, rest = error.message.partition(": ")
    key, _, message = rest.partition(": ")
    if where == str(file) and message and " " not in key:
        return Problem("error", "invalid-compose", f"{file}: {key}", message)
    return Problem("error", "invalid-compose", where, rest)


def _lint_names(task: Task, compose: Compose | None) -> Iterator[Problem]:
    known = set(compose.services) if compose else {MAIN}
    for step in task.steps:
        asked = {"artifacts": step.artifacts, "verifier.collect": step.collect}
        for key, rows in asked.items():
            for name in sorted({row.service for row in rows if row.service} - known):
                where = f"{task.path / 'task.toml'}: {key}"
                yield Problem("error", "unknown-service", where, f"there is no service {name!r}")
