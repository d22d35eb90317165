"""Tasks that ask for variables of the person who runs them: told which, asked for consent, refused without.

A task may say `${NAME}` in its variables, and the value goes into its sandbox. A task from somewhere else could ask for
anything, so nothing is handed out before the user agreed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import click

from pier.errors import UsageError
from pier.task import Task, wanted_variables


class Consent:
    """Collects what tasks want, then `ask`s. `given` is a yes in advance."""

    def __init__(self, env: Mapping[str, str], *, given: bool = False) -> None:
        self._env = env
        self._given = given
        self._wanted: dict[str, str] = {}
        self.values: dict[str, dict[str, str]] = {}
        """By the path of a task: the variables of this environment that it wants."""

    def note(self, task: Task) -> None:
        """Note what a task wants; what is not set and has no default is a `UsageError` at once."""
        for table in _tables(task):
            for name, default in wanted_variables(table).items():
                if name in self._env:
                    self._wanted.setdefault(name, task.name)
                    self.values.setdefault(str(task.path), {})[name] = self._env[name]
                elif default is None:
                    raise UsageError(
                        f"the task {task.name} wants the variable {name}, which is not set",
                        hint=f"export {name}=... or use --env-file",
                        code="missing_variable",
                    )

    def ask(self) -> None:
        """Get a yes, if any task wants something; a `UsageError` without one."""
        if not self._wanted or self._given:
            return
        rows = ", ".join(f"{name} (for {task})" for name, task in sorted(self._wanted.items()))
        question = f"tasks want these variables of yours in their sandboxes: {rows}"
        if not sys.stdin.isatty():
            raise UsageError(question, hint="add -y if they may have them", code="no-consent")
        if not click.confirm(f"{question}. Hand them out?", err=True):
            raise UsageError("the variables are not handed out, so nothing was run", code="no-consent")


def _tables(task: Task) -> Iterator[Mapping[str, str]]:
    yield task.config.environment.env
    yield task.config.solution.env
    for step in task.steps:
        yield step.verifier.env
        yield step.verifier_environment.table.env
