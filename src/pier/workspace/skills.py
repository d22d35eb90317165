"""Skills: directories with a `SKILL.md`, copied from a task's image or from bundles, and registered for agents.

Agents on this machine look for skills in their working directory: Claude Code in `.claude/skills`, the others in
`.agents/skills`. An existing skill of the same name is kept unless pier installed it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pier.errors import UsageError, WorkspaceError
from pier.tree import drop_links

if TYPE_CHECKING:
    from pier.workspace.workspace import Workspace

PACKAGED = Path(__file__).parent / "packaged"
"""The skills that come with pier."""
SKILL = "SKILL.md"
PLACES = {"claude-code": ".claude/skills"}
SHARED_PLACE = ".agents/skills"
"""The directory of skills for all other agents."""
_MOST = 256 * 1024 * 1024
_HOMES = {"claude-code": ".claude", "codex": ".codex", "gemini-cli": ".gemini", "opencode": ".local/share/opencode"}
"""Directories in the user's home whose existence shows that an agent is in use."""


@dataclass(frozen=True, slots=True)
class RegisteredSkill:
    """One skill in one place. `kept` means that another skill of that name exists there and was not replaced."""

    name: str
    path: Path
    agents: tuple[str, ...]
    kept: bool = False


def find_skills(bundle: Path) -> list[Path]:
    """The skills in a bundle: the directory itself, or its subdirectories. `UsageError` if there are none."""
    if not bundle.is_dir():
        raise UsageError(f"{bundle}: no such directory", code="no-skills")
    if (bundle / SKILL).is_file():
        return [bundle]
    found = sorted(path for path in bundle.iterdir() if not path.is_symlink() and (path / SKILL).is_file())
    if not found:
        raise UsageError(f"no skill in {bundle}: expected {SKILL} in it or in a subdirectory", code="no-skills")
    return found


def compose(bundles: Sequence[Path], output: Path) -> list[Path]:
    """Copy the skills of several bundles to one directory, which must be new or empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output}: expected a new or empty directory", hint="-o DIR", code="not-empty")
    chosen: dict[str, Path] = {}
    for bundle in bundles:
        for skill in find_skills(bundle):
            name = skill.resolve().name
            if name in chosen:
                raise UsageError(
                    f"two skills are called {name!r}: {chosen[name]} and {skill}",
                    hint="rename one of the directories",
                    code="skill-name",
                )
            chosen[name] = skill
    return [_copy(skill, output / name) for name, skill in chosen.items()]


def _copy(source: Path, target: Path) -> Path:
    """Copy a skill without its links, which could lead out of it."""
    shutil.copytree(source, target, symlinks=True)
    drop_links(target)
    return target


def agents_in_use(workspace: Workspace, chosen: Sequence[str], home: Path | None = None) -> list[str]:
    """The agents to register skills for: the chosen ones, else the workspace's, else those that this user has."""
    if chosen or workspace.config.agents:
        return list(dict.fromkeys(chosen or workspace.config.agents))
    place = home or Path.home()
    return [name for name, directory in _HOMES.items() if (place / directory).is_dir()] or list(_HOMES)


async def install_skills(
    workspace: Workspace, agents: Sequence[str], say: Callable[[str], None]
) -> list[RegisteredSkill]:
    """Register the skills of the workspace and of its task for agents on this machine."""
    if not workspace.is_host:
        raise WorkspaceError(
            "this workspace has a sandbox, in which skills are registered at the start",
            hint="pier start --skill DIR adds one",
            code="not-host",
        )
    installed = workspace.pier / "skills"
    earlier = {path.name for path in installed.iterdir()} if installed.is_dir() else set()
    with tempfile.TemporaryDirectory(prefix="pier-skills.") as name:
        scratch = Path(name)
        bundles = list(workspace.config.skills)
        if (of_task := await _skills_of_task(workspace, scratch / "task", say)) is not None:
            bundles.append(of_task)
        if not bundles:
            raise WorkspaceError(
                "there are no skills: the task has no skills_dir, and the workspace has no skills",
                hint="pier start --skill DIR, or skills_dir in [environment] of task.toml",
                code="no-skills",
            )
        skills = compose(bundles, scratch / "all")
        done = [row for skill in skills for row in _register(workspace.root, skill, agents, earlier)]
        shutil.rmtree(installed, ignore_errors=True)
        shutil.copytree(scratch / "all", installed, symlinks=True)
    return done


def _register(root: Path, skill: Path, agents: Sequence[str], earlier: set[str]) -> Iterator[RegisteredSkill]:
    by_place: dict[str, list[str]] = {}
    for agent in agents:
        by_place.setdefault(PLACES.get(agent, SHARED_PLACE), []).append(agent)
    for place, names in by_place.items():
        target = root / place / skill.name
        for above in (target.parent.parent, target.parent):  # the task's image may have put links there
            if above.is_symlink():
                raise WorkspaceError(f"{above} is a link", hint=f"rm {above}", code="workspace-link")
        kept = os.path.lexists(target) and skill.name not in earlier
        if not kept:
            shutil.rmtree(target, ignore_errors=True)
            _copy(skill, target)
        yield RegisteredSkill(skill.name, target, tuple(names), kept)


async def _skills_of_task(workspace: Workspace, target: Path, say: Callable[[str], None]) -> Path | None:
    """Copy the task's skills out of its image; None if it has none."""
    from pier.redact import Redactor
    from pier.task import load_task
    from pier.trial.environment import open_environment
    from pier.trial.record import TrialRecord
    from pier.trial.spec import SandboxChoice, open_services

    path, backend = workspace.config.task_path, workspace.config.backend
    task = load_task(path, verify=False) if path is not None else None
    place = task.config.environment.skills_dir if task else None
    if task is None or place is None:
        return None
    record = TrialRecord(target.parent / "record", Redactor())
    record.open()
    try:
        choice = SandboxChoice()
        async with (
            open_services(backend, label="pier skills") as services,
            open_environment(task, services, record, choice=choice, on_progress=say) as opened,
        ):
            await opened.sandbox.download(place, target, max_bytes=_MOST)
    except FileNotFoundError:
        raise WorkspaceError(
            f"the task's skills_dir {place} is not in its image",
            hint=f"correct skills_dir in {task.path / 'task.toml'}",
            code="no-skills",
            blame="task",
        ) from None
    finally:
        record.close()
    drop_links(target)
    return target
