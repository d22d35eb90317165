"""Skills: directories with a `SKILL.md`, taken out of a task's image or put together, and registered for agents.

Agents on this machine look for skills in the directory that they work in: Claude Code in `.claude/skills`, the others
in `.agents/skills`. A skill of the same name that pier did not put there stays.
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
"""Skills that come with pier: how to use it."""
SKILL = "SKILL.md"
PLACES = {"claude-code": ".claude/skills"}
SHARED_PLACE = ".agents/skills"
"""Where all agents look that have no other place."""
_MOST = 256 * 1024 * 1024
_HOMES = {"claude-code": ".claude", "codex": ".codex", "gemini-cli": ".gemini", "opencode": ".local/share/opencode"}
"""Directories in the user's home that say that an agent is in use."""


@dataclass(frozen=True, slots=True)
class RegisteredSkill:
    """One skill in one place. `kept`: one of that name was there already, and stays."""

    name: str
    path: Path
    agents: tuple[str, ...]
    kept: bool = False


def find_skills(bundle: Path) -> list[Path]:
    """The skills in a directory: itself, or those right below it. `UsageError` if there are none."""
    if not bundle.is_dir():
        raise UsageError(f"{bundle}: no such directory", code="no-skills")
    if (bundle / SKILL).is_file():
        return [bundle]
    found = sorted(path for path in bundle.iterdir() if not path.is_symlink() and (path / SKILL).is_file())
    if not found:
        raise UsageError(f"{bundle} holds no skill: no {SKILL} in it or right below it", code="no-skills")
    return found


def compose(bundles: Sequence[Path], output: Path) -> list[Path]:
    """Put the skills of several directories into one, which must be new or empty."""
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
    """A copy of a skill without links, which could lead out of it."""
    shutil.copytree(source, target, symlinks=True)
    drop_links(target)
    return target


def agents_in_use(workspace: Workspace, chosen: Sequence[str], home: Path | None = None) -> list[str]:
    """The agents to register skills for: those that were chosen, the workspace's, or those of this user."""
    if chosen or workspace.config.agents:
        return list(dict.fromkeys(chosen or workspace.config.agents))
    place = home or Path.home()
    return [name for name, directory in _HOMES.items() if (place / directory).is_dir()] or list(_HOMES)


async def install_skills(
    workspace: Workspace, agents: Sequence[str], say: Callable[[str], None]
) -> list[RegisteredSkill]:
    """Register the skills of the workspace's task, and those that it was started with, for agents on this machine."""
    if not workspace.is_host:
        raise WorkspaceError(
            "this workspace has a sandbox, where skills are registered when it starts",
            hint="pier start --skill DIR adds one",
            code="not-host",
        )
    known = workspace.pier / "skills"
    earlier = {path.name for path in known.iterdir()} if known.is_dir() else set()
    with tempfile.TemporaryDirectory(prefix="pier-skills.") as name:
        scratch = Path(name)
        bundles = list(workspace.config.skills)
        if (inside := await _skills_of_task(workspace, scratch / "task", say)) is not None:
            bundles.append(inside)
        if not bundles:
            raise WorkspaceError(
                "there are no skills: the task names no skills_dir, and none was given",
                hint="pier start --skill DIR, or skills_dir in [environment] of task.toml",
                code="no-skills",
            )
        skills = compose(bundles, scratch / "all")
        done = [row for skill in skills for row in _register(workspace.root, skill, agents, earlier)]
        shutil.rmtree(known, ignore_errors=True)
        shutil.copytree(scratch / "all", known, symlinks=True)
    return done


def _register(root: Path, skill: Path, agents: Sequence[str], earlier: set[str]) -> Iterator[RegisteredSkill]:
    by_place: dict[str, list[str]] = {}
    for agent in agents:
        by_place.setdefault(PLACES.get(agent, SHARED_PLACE), []).append(agent)
    for place, names in by_place.items():
        target = root / place / skill.name
        for above in (target.parent.parent, target.parent):  # of the task's image, as everything in the directory
            if above.is_symlink():
                raise WorkspaceError(f"{above} is a link", hint=f"rm {above}", code="workspace-link")
        kept = os.path.lexists(target) and skill.name not in earlier
        if not kept:
            shutil.rmtree(target, ignore_errors=True)
            _copy(skill, target)
        yield RegisteredSkill(skill.name, target, tuple(names), kept)


async def _skills_of_task(workspace: Workspace, target: Path, say: Callable[[str], None]) -> Path | None:
    """The task's skills, copied out of its image; None if it has none."""
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
