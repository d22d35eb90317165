"""Static checks of a task, and a template for new tasks, which the oracle solves and doing nothing does not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pier import files
from pier.errors import ImageError, TaskError
from pier.image.copying import matches, read_ignore
from pier.image.dockerfile import Dockerfile, Instruction, read, split
from pier.image.layer_directories import View
from pier.task.load import Task, TaskStep, load_task, read_config
from pier.task.model import TaskConfig, wanted_variables

Level = Literal["error", "warning"]

_REWARD = re.compile(rb"reward\.(txt|json)")
_FROM_HOST = re.compile(r"(?im)^\s*FROM\s+(?:--\S+\s+)*host(?:\s+AS\s+\S+)?\s*$")
_WRONG_REWARD = re.compile(rb"/logs/verifier/(rewards\.(txt|json)|reward(?![\w.-]))")
_OTHER_COMPOSE = ("docker-compose.yml", "compose.yaml", "compose.yml")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the kind `rule`. `where` is a file, with the key if there is one."""

    level: Level
    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.message}"


def lint(path: Path) -> list[Problem]:
    """The problems of a task. One with an error cannot run."""
    try:
        config, _ = read_config(path / "task.toml")
        task = load_task(path)
    except TaskError as error:
        where, _, message = str(error).partition(": ")
        return [Problem("error", "invalid-task", where, message)]
    return [*_lint_config(path / "task.toml", config, task), *_lint_image(task), *_lint_host(task), *_lint_steps(task)]


def _lint_config(file: Path, config: TaskConfig, task: Task) -> Iterator[Problem]:
    for key in task.unknown:
        nearest = f"did you mean {key.nearest}?" if key.nearest else "nothing reads it"
        yield Problem("warning", "unknown-key", f"{file}: {key.key}", f"unknown key, {nearest}")
    renamed = {"memory": "memory_mb", "storage": "storage_mb", "allow_internet": "network_mode"}
    renamed = {f"environment.{old}": f"environment.{new}" for old, new in renamed.items()}
    for old, new in ({"version": "schema_version"} | renamed).items():
        if attrgetter(old)(config) is not None:
            yield Problem("warning", "old-key", f"{file}: {old}", f"deprecated key, use {new}")
    unset = config.environment.network_mode is None and config.environment.allow_internet is None
    if unset and any(step.agent.policy is None or step.verifier.policy is None for step in task.steps):
        message = "missing, so the network is public; set no-network if the task needs none"
        yield Problem("warning", "public-by-default", f"{file}: environment.network_mode", message)
    if config.multi_step_reward_strategy and not config.steps:
        yield Problem("warning", "unused-key", f"{file}: multi_step_reward_strategy", "has no effect without steps")
    tables = [config.environment.env, config.verifier.env, config.solution.env]
    tables += [step.verifier.env for step in config.steps or ()]
    variables = {name: default for table in tables for name, default in wanted_variables(table).items()}
    for name in sorted(name for name, default in variables.items() if default is None):
        message = f"needs the variable {name} from the user's environment and has no default"
        yield Problem("warning", "needs-variable", f"{file}: env", message)


def _lint_image(task: Task) -> Iterator[Problem]:
    environment = task.config.environment
    if task.compose:
        message = "several services: only the backend docker runs this task"
        yield Problem("warning", "services", str(task.compose), message)
    elif not task.dockerfile and not environment.docker_image:
        message = "no image: neither a Dockerfile here nor environment.docker_image in task.toml"
        if other := [name for name in _OTHER_COMPOSE if (task.environment_dir / name).is_file()]:
            message += f"; rename {other[0]} to docker-compose.yaml if it describes the services"
        yield Problem("error", "no-image", str(task.environment_dir), message)
    if task.dockerfile and not environment.docker_image:
        yield from lint_dockerfile(task.dockerfile, task.environment_dir, task.path)
    for step in task.steps:
        verifier = step.verifier_environment
        if step.verifier_mode == "separate" and verifier.context and verifier.context != task.environment_dir:
            yield from lint_dockerfile(verifier.context / "Dockerfile", verifier.context)


def lint_dockerfile(path: Path, context: Path, task: Path | None = None) -> Iterator[Problem]:
    """The problems of a Dockerfile: its syntax, missing sources of COPY and ADD, and copies of a `task`'s solution or
    of all its tests, which the agent must not see."""
    try:
        file = read(path)
        ignore = read_ignore(context, path)
    except (ImageError, OSError) as error:
        where, colon, message = str(error).partition(": ")
        if not colon:
            where, message = str(path), str(error)
        hint = f" ({error.hint})" if isinstance(error, ImageError) and error.hint else ""
        yield Problem("error", "invalid-dockerfile", where, f"{message}{hint}")
        return
    tests, solution = (_fingerprints(task / name) if task else set() for name in ("tests", "solution"))
    view = View([str(context)])
    for instruction in file.instructions:
        for source in _sources(file, instruction):
            where = f"{path}:{instruction.line}"
            try:
                entries = matches(view, source, ignore)
            except ImageError as error:
                yield Problem("error", "missing-source", where, f"{instruction.name}: {error}")
                continue
            copied = {each for _, entry in entries for each in _fingerprints(Path(entry.place))}
            if copied & solution or (tests and tests <= copied):
                message = f"{source} holds the task's tests or its solution, which the agent then sees"
                yield Problem("warning", "copies-tests", where, message)


def _sources(file: Dockerfile, instruction: Instruction) -> list[str]:
    """The paths in the build context that an instruction copies, without those that depend on variables."""
    if instruction.name not in ("COPY", "ADD") or instruction.flag("from"):
        return []
    words = instruction.exec_form or split(instruction.text, file.escape)
    local = [word for word in words[:-1] if "$" not in word and not word.startswith(("<<", "git@"))]
    return [word.strip("\"'") for word in local if "://" not in word]


def _fingerprints(path: Path) -> set[tuple[str, bytes]]:
    """The names and digests of a file, or of all files in a directory, without empty ones."""
    files = path.rglob("*") if path.is_dir() else (path,)
    content = ((each.name, _bytes(each)) for each in files if each.is_file())
    return {(name, hashlib.sha256(data).digest()) for name, data in content if data}


def _lint_host(task: Task) -> Iterator[Problem]:
    message = "a task cannot choose the image 'host'; run it with --image host"
    tables = [task.config.environment, *(step.verifier_environment.table for step in task.steps)]
    if any(table.docker_image == "host" for table in tables):
        yield Problem("error", "host-image", f"{task.path / 'task.toml'}: docker_image", message)
    directories = [task.environment_dir, *(tests for step in task.steps for tests in step.tests)]
    for file in dict.fromkeys(directory / "Dockerfile" for directory in directories):
        if _FROM_HOST.search(_bytes(file).decode(errors="replace")):
            yield Problem("error", "host-image", str(file), message)


def _lint_steps(task: Task) -> Iterator[Problem]:
    for step in task.steps:
        home = task.path / "steps" / step.name if step.name else task.path
        if not step.instruction.strip():
            yield Problem("error", "empty-instruction", str(home / "instruction.md"), "the instruction is empty")
        if step.solution is None or not (step.solution / "solve.sh").is_file():
            message = "missing, so `pier task check --run` cannot show that the task is solvable"
            yield Problem("warning", "no-solution", str(home / "solution" / "solve.sh"), message)
        if step.agent.timeout_sec is None:
            where = f"{task.path / 'task.toml'}: agent.timeout_sec"
            yield Problem("warning", "no-timeout", where, "missing, so agents have no time limit")
        yield from _lint_tests(step, home)


def _lint_tests(step: TaskStep, home: Path) -> Iterator[Problem]:
    scripts = [tests / step.test_script for tests in step.tests if step.test_script]
    content = b"".join(_bytes(path) for tests in step.tests for path in sorted(tests.rglob("*")) if path.is_file())
    where = str(next((path for path in reversed(scripts) if path.is_file()), home / "tests"))
    if wrong := _WRONG_REWARD.search(content):
        name = wrong.group().decode()
        message = f"writes {name}; expected reward.txt or reward.json in /logs/verifier"
        yield Problem("error", "reward-path", where, message)
    elif content and not _REWARD.search(content):
        yield Problem("warning", "no-reward", where, "no test file mentions reward.txt or reward.json")
    sources = {artifact.source for artifact in step.artifacts}
    if step.verifier_mode == "separate" and not sources and not step.collect:
        message = "the verifier is separate and there are no artifacts, so it only gets /logs/artifacts"
        yield Problem("warning", "no-artifacts", f"{home / 'task.toml'}: artifacts", message)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()[: 1 << 20]
    except OSError:
        return b""


_TASK = """\
schema_version = "1.4"
artifacts = ["/app/sum.txt"]

[task]
name = "{org}/{name}"
description = "One sentence on what is to be done."

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 900

[verifier]
timeout_sec = 120
environment_mode = "separate"

[environment]
workdir = "/app"
network_mode = "no-network"
"""

_INSTRUCTION = """\
The file `/app/numbers.txt` holds one number a line. Write their sum to `/app/sum.txt`.
"""

_DOCKERFILE = """\
FROM ubuntu:24.04
WORKDIR /app
COPY numbers.txt /app/
"""

_SOLUTION = """\
#!/bin/bash
awk '{ sum += $1 } END { print sum }' /app/numbers.txt > /app/sum.txt
"""

_TESTS = """\
#!/bin/bash
# Runs after the agent has ended, as root, in a new sandbox with the agent's artifacts.
# Only the reward file counts, not the exit code.
reward=0
if [ "$(cat /app/sum.txt 2>/dev/null)" = "42" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
"""


def create_task(directory: Path, org: str = "local") -> list[Path]:
    """Write a new task into `directory`, which must be new or empty, and return the paths of its files."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TaskError(f"{directory}: already exists and is not empty", code="task_exists", blame="user")
    name = re.sub(r"[^a-zA-Z0-9._-]+", "-", directory.resolve().name).strip("-._") or "task"
    content = {
        "task.toml": _TASK.format(org=org, name=name),
        "instruction.md": _INSTRUCTION,
        "environment/Dockerfile": _DOCKERFILE,
        "environment/numbers.txt": "7\n15\n20\n",
        "solution/solve.sh": _SOLUTION,
        "tests/test.sh": _TESTS,
    }
    for relative, text in content.items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text, mode=0o755 if path.suffix == ".sh" else 0o644, durable=False)
    return [directory / relative for relative in content]
