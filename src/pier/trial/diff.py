"""The changes of an agent in the working directory of a task, as a diff that is kept with the trial.

The sandbox lists from outside which files changed, so nothing inside can hide one. What a file had before comes from a
sandbox of the same image that no agent worked in; that is started only if a file that was there before has changed.
Sizes are bounded, secrets are removed, and what is not text is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path, PurePosixPath

from pier.errors import PathError, SandboxError
from pier.files import write
from pier.network.policy import NONE
from pier.redact import Redactor
from pier.sandbox.contract import Sandbox
from pier.trial.environment import TaskSandbox
from pier.trial.plan import agent_plan
from pier.trial.record import limit, printable
from pier.verifier.changes import LOGS, TESTS, changed_since

CHANGES = "changes.diff"
MOST_LINES = 2_000
"""Files that differ in more lines are shown as removed and written again: finding the shortest diff takes too long."""
_MOST_FILES = 200
_FILE_BYTES = 256 << 10
_DIFF_CHARACTERS = 2_000_000
_SECONDS = 30.0
_MADE = frozenset({".git", "__pycache__", "node_modules", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
"""Directories of files that programs make by the thousand."""


def unified(path: str, before: str, after: str) -> str:
    """The lines in which two texts differ, as a unified diff; empty if they are equal."""
    old, new = list(StringIO(before)), list(StringIO(after))
    is_short = len(old) + len(new) <= 2 * MOST_LINES or old == new
    if is_short:
        from difflib import unified_diff

        rows = unified_diff(old, new, f"a/{path}", f"b/{path}")
    else:
        head = (f"--- a/{path}\n", f"+++ b/{path}\n", f"@@ -1,{len(old)} +1,{len(new)} @@\n")
        rows = (*head, *(f"-{line}" for line in old), *(f"+{line}" for line in new))
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


async def keep_diff(environment: TaskSandbox, index: int, target: Path) -> None:
    """Write what changed in the working directory since the step began to `target`, compared with the files that the
    task gives. Nothing is written if nothing changed or the backend cannot list it; what goes wrong is a warning."""
    try:
        async with limit(_SECONDS, lambda: SandboxError(f"it took longer than {_SECONDS:g} s")):
            text = await _diff(environment, index)
        if text:
            data = environment.record.redactor.text(text).encode(errors="replace")
            write(target, data, mode=0o600, durable=False)
    except (SandboxError, OSError) as error:
        environment.record.warn(f"{CHANGES} was not written: {error}")


async def _diff(environment: TaskSandbox, index: int) -> str:
    after = await environment.sandbox.changes()
    if after is None or environment.before is None:
        return ""
    changed = sorted(changed_since(environment.before, after), key=lambda change: change.path)
    inside = [change for change in changed if _is_work(change.path, environment.workdir)]
    known = {change.path for change in environment.before}
    parts: list[str] = []
    async with AsyncExitStack() as stack:
        clean: Sandbox | None = None
        for change in inside[:_MOST_FILES]:
            is_new = change.kind == "added" and change.path not in known
            if not is_new and clean is None:
                clean = await stack.enter_async_context(_clean(environment, index))
            before = await _content(clean, change.path) if clean and not is_new else ""
            now = await _content(environment.sandbox, change.path) if change.kind != "removed" else ""
            path = printable(change.path)
            found = await asyncio.to_thread(_file_diff, path.lstrip("/"), before, now, environment.record.redactor)
            parts.append(found or (f"Empty file {path}\n" if is_new else ""))
            if sum(map(len, parts)) > _DIFF_CHARACTERS:
                break
    if rest := len(inside) - len(parts):
        parts.append(f"# {rest} more files changed\n")
    return "".join(parts)


def _is_work(path: str, workdir: str) -> bool:
    """Whether a file counts as work of the agent. Where the whole root is the working directory, files that begin with
    a dot are settings of programs."""
    top = PurePosixPath(workdir)
    file = PurePosixPath(path)
    if not file.is_relative_to(top) or any(file.is_relative_to(place) for place in (LOGS, TESTS)):
        return False
    parts = file.relative_to(top).parts
    return not (_MADE.intersection(parts) or (workdir == "/" and any(part.startswith(".") for part in parts)))


@asynccontextmanager
async def _clean(environment: TaskSandbox, index: int) -> AsyncIterator[Sandbox]:
    """A sandbox with the files that the task gives for a step."""
    starter = environment.starter
    plan = replace(agent_plan(starter.task, starter.choice, starter.environ), compose=None)
    async with starter.open(plan, NONE, "before", image=starter.choice.snapshot) as (clean, workdir):
        for step in starter.task.steps[: index + 1]:
            if step.workdir is not None:
                await clean.upload(step.workdir, workdir)
        yield clean


async def _content(sandbox: Sandbox, path: str) -> str | None:
    """The text of a file, empty if there is none; None for what is too large or no text."""
    try:
        data = await sandbox.read_file(path, max_bytes=_FILE_BYTES)
    except FileNotFoundError:
        return ""
    except PathError:
        return None
    except SandboxError as error:
        if error.code not in ("not_regular", "too_large"):
            raise
        return None
    return None if b"\0" in data else data.decode(errors="replace")


def _file_diff(path: str, before: str | None, after: str | None, redactor: Redactor) -> str:
    """The diff of a file without its secrets: in a diff the lines of one would no longer stand together."""
    if before is None or after is None:
        return f"Binary or large file {path} differs\n"
    return unified(path, redactor.text(before), redactor.text(after))
