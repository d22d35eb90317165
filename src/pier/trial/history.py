"""Looks for the future in a task's past: commits that an agent could find beyond the one that it works on.

A repository that was cloned and reset still holds the fix: in other branches and tags, in reflogs and stashes, in
objects that nothing names any more, in a copy under another name, in a bundle. The look is taken where the agent
would: in a sandbox of the task's image, as the agent's user, with the image's own git.
"""

from __future__ import annotations

from pathlib import Path

from pier.task import Task
from pier.task.lint import Problem
from pier.tree import find_files, open_regular
from pier.trial.run import run_trial
from pier.trial.spec import AgentChoice, SandboxChoice, TrialServices, TrialSpec, VerifierChoice

FOUND = "history.tsv"
_SECONDS = 300.0
_LONGEST = 16 * 1024 * 1024
_WORDS = {
    "commits": "holds commits that are not ancestors of HEAD ({}); the solution may be among them",
    "files": "holds files that no commit of HEAD has ({}), left over from other commits",
    "bundle": "is a bundle of commits{}",
    "pack": "is a pack of git objects outside of a repository{}",
    "unseen": "is a repository, and the image has no git to look into it{}",
}
_SCRIPT = Path(__file__).with_name("history.sh")


async def find_history(
    task: Task, services: TrialServices, directory: Path, sandbox: SandboxChoice | None = None
) -> list[Problem]:
    """What an agent could find of a task's repository beyond the commit that it works on."""
    command = _SCRIPT.read_text()
    spec = TrialSpec(
        f"{task.short_name}-history",
        task,
        directory,
        AgentChoice("command", options={"command": command}, timeout=_SECONDS),
        VerifierChoice(enabled=False),
        sandbox or SandboxChoice(),
    )
    result = await run_trial(spec, services)
    if (info := result.exception_info) is not None:
        words = f"could not be searched for a repository's history: {info.exception_message}"
        return [Problem("warning", "history", str(task.path), words)]
    found = (problem for path in find_files(directory, FOUND) for problem in _problems(task, path))
    return list(dict.fromkeys(found))


def _problems(task: Task, path: Path) -> list[Problem]:
    with open_regular(path) as stream:
        text = stream.read(_LONGEST).decode(errors="replace")
    rows = (line.split("\t") for line in text.splitlines())
    found = ((row[0], row[1], row[2]) for row in rows if len(row) == 3 and row[0] in _WORDS)
    return [
        Problem("warning", "history", f"{task.path}: {where}", _WORDS[kind].format(words))
        for kind, where, words in found
    ]
