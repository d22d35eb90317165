"""A static look at a task: what would make it fail, mislead or grade wrongly, each with its file and key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pier.errors import TaskError
from pier.task.config import TaskConfig
from pier.task.load import load_task, read_config
from pier.task.model import Step, Task
from pier.task.template import wanted_variables

Level = Literal["error", "warning"]

_REWARD = re.compile(rb"reward\.(txt|json)")
_FROM_HOST = re.compile(r"(?im)^\s*FROM\s+(?:--\S+\s+)*host(?:\s+AS\s+\S+)?\s*$")
_WRONG_REWARD = re.compile(rb"/logs/verifier/(rewards\.(txt|json)|reward(?![\w.]))")


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. `where` is a file, with its key where there is one."""

    level: Level
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message}"


def lint(path: Path) -> list[Problem]:
    """What is wrong with the task in a directory. An error means that it cannot run as it is."""
    try:
        config, _ = read_config(path / "task.toml")
        task = load_task(path)
    except TaskError as error:
        where, _, message = str(error).partition(": ")
        return [Problem("error", where, message)]
    return [*_lint_config(path / "task.toml", config, task), *_lint_image(task), *_lint_host(task), *_lint_steps(task)]


def _lint_config(file: Path, config: TaskConfig, task: Task) -> Iterator[Problem]:
    for key in task.unknown:
        nearest = f"did you mean {key.nearest}?" if key.nearest else "nothing reads it"
        yield Problem("warning", f"{file}: {key.key}", f"unknown key, {nearest}")
    renamed = {"version": "schema_version", "environment.memory": "environment.memory_mb"}
    renamed |= {
        "environment.storage": "environment.storage_mb",
        "environment.allow_internet": "environment.network_mode",
    }
    for old, new in renamed.items():
        table, _, key = old.rpartition(".")
        part = config.environment if table else config
        if getattr(part, key) is not None:
            yield Problem("warning", f"{file}: {old}", f"an old name, write {new}")
    if config.environment.network_mode is None and config.environment.allow_internet is None:
        message = "not said, so the network is public; say no-network if the task needs none"
        yield Problem("warning", f"{file}: environment.network_mode", message)
    if config.multi_step_reward_strategy and not config.steps:
        yield Problem("warning", f"{file}: multi_step_reward_strategy", "means nothing without steps")
    for name in _variables(config):
        yield Problem("warning", f"{file}: env", f"needs the variable {name} of whoever runs it, without a default")


def _variables(config: TaskConfig) -> list[str]:
    tables = [config.environment.env, config.verifier.env, config.solution.env]
    tables += [step.verifier.env for step in config.steps or ()]
    wanted = {name: default for table in tables for name, default in wanted_variables(table).items()}
    return sorted(name for name, default in wanted.items() if default is None)


def _lint_image(task: Task) -> Iterator[Problem]:
    environment = task.config.environment
    if task.compose:
        yield Problem("warning", str(task.compose), "several services: only the backend docker runs this task")
    elif not task.dockerfile and not environment.docker_image:
        where = f"{task.environment_dir}"
        yield Problem("error", where, "neither a Dockerfile here nor environment.docker_image says what to run in")
    elif task.dockerfile and re.search(r"(?im)^\s*(COPY|ADD)\s.*\b(tests|solution)/", _text(task.dockerfile)):
        yield Problem("warning", str(task.dockerfile), "copies tests or the solution to where the agent sees them")


def _lint_host(task: Task) -> Iterator[Problem]:
    message = "a task cannot choose the image 'host'; run it with --image host"
    tables = [task.config.environment, *(step.verifier_environment.table for step in task.steps)]
    if any(table.docker_image == "host" for table in tables):
        yield Problem("error", f"{task.path / 'task.toml'}: docker_image", message)
    directories = [task.environment_dir, *(tests for step in task.steps for tests in step.tests)]
    for file in dict.fromkeys(directory / "Dockerfile" for directory in directories):
        if _FROM_HOST.search(_text(file)):
            yield Problem("error", str(file), message)


def _lint_steps(task: Task) -> Iterator[Problem]:
    for step in task.steps:
        home = task.path / "steps" / step.name if step.name else task.path
        if not step.instruction.strip():
            yield Problem("error", str(home / "instruction.md"), "the instruction is empty")
        if step.solution is None or not (step.solution / "solve.sh").is_file():
            yield Problem(
                "warning", str(home / "solution" / "solve.sh"), "missing, so nobody can show that it is solvable"
            )
        if step.agent.timeout_sec is None:
            yield Problem(
                "warning", f"{task.path / 'task.toml'}: agent.timeout_sec", "not said, so agents have no limit"
            )
        yield from _lint_tests(step, home)


def _lint_tests(step: Step, home: Path) -> Iterator[Problem]:
    scripts = [tests / step.test_script for tests in step.tests if step.test_script]
    content = b"".join(_bytes(path) for tests in step.tests for path in sorted(tests.rglob("*")) if path.is_file())
    where = str(next((path for path in reversed(scripts) if path.is_file()), home / "tests"))
    if wrong := _WRONG_REWARD.search(content):
        name = wrong.group().decode()
        yield Problem("error", where, f"writes {name}; the names are reward.txt and reward.json in /logs/verifier")
    elif content and not _REWARD.search(content):
        yield Problem("warning", where, "nothing in the tests mentions reward.txt or reward.json")
    sources = {artifact.source for artifact in step.artifacts}
    if step.verifier_mode == "separate" and not sources and not step.collect:
        message = "the verifier is separate and no artifacts are named, so it sees only /logs/artifacts"
        yield Problem("warning", f"{home / 'task.toml'}: artifacts", message)


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()[: 1 << 20]
    except OSError:
        return b""
