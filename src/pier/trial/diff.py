"""The agent's changes in the task's working directory, as a diff in the trial's directory.

The backend lists changed files from outside the sandbox, so nothing inside can hide one. The original content comes
from a second sandbox of the same image, which is started only if an existing file has changed. Sizes are bounded, and
secrets are removed. Binary files are only named.
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
"""Beyond this number of lines a file is shown as removed and added, since a shortest diff takes too long to find."""
_MOST_FILES = 200
_FILE_BYTES = 256 << 10
_DIFF_CHARACTERS = 2_000_000
_SECONDS = 30.0
_MADE = frozenset({".git", "__pycache__", "node_modules", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
"""Directories of generated files."""


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
    """Write the changes of a step in the working directory to `target`, if there are any and the backend can list them.
    Failures are warnings."""
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
    redactor = environment.record.redactor
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
            text = await asyncio.to_thread(_file_diff, path.lstrip("/"), before, now, redactor)
            parts.append(text or (f"Empty file {path}\n" if is_new else ""))
            if sum(map(len, parts)) > _DIFF_CHARACTERS:
                break
    if rest := len(inside) - len(parts):
        parts.append(f"# {rest} more files changed\n")
    return "".join(parts)


def _is_work(path: str, workdir: str) -> bool:
    """Whether a file counts as the agent's work. If the working directory is the root, hidden files do not."""
    file = PurePosixPath(path)
    if not file.is_relative_to(workdir) or file.is_relative_to(LOGS) or file.is_relative_to(TESTS):
        return False
    parts = file.relative_to(workdir).parts
    return not (_MADE.intersection(parts) or (workdir == "/" and any(part.startswith(".") for part in parts)))


@asynccontextmanager
async def _clean(environment: TaskSandbox, index: int) -> AsyncIterator[Sandbox]:
    """A new sandbox with the task's files for a step."""
    starter = environment.starter
    plan = replace(agent_plan(starter.task, starter.choice, starter.environ), compose=None)
    async with starter.open(plan, NONE, "before", image=starter.choice.snapshot) as (clean, workdir):
        for step in starter.task.steps[: index + 1]:
            if step.workdir is not None:
                await clean.upload(step.workdir, workdir)
        yield clean


async def _content(sandbox: Sandbox, path: str) -> str | None:
    """The text of a file, empty if it is missing; None if it is too large or binary."""
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
    """The diff of a file. Secrets are removed first, since a diff could separate the lines of one."""
    if before is None or after is None:
        return f"Binary or large file {path} differs\n"
    return unified(path, redactor.text(before), redactor.text(after))
