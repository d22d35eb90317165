"""`pier skills`: bundles put together, skills registered for agents, and the skill that comes with pier."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.cli.main import COMMANDS
from pier.errors import UsageError, WorkspaceError
from pier.workspace.skills import PACKAGED, agents_in_use, compose, find_skills, install_skills
from pier.workspace.workspace import Workspace, WorkspaceConfig
from tests.job_tasks import pier


def _skill(directory: Path, text: str = "Do it.") -> Path:
    directory.mkdir(parents=True)
    (directory / "SKILL.md").write_text(f"---\nname: {directory.name}\ndescription: {text}\n---\n{text}\n")
    return directory


def _workspace(root: Path, **facts: object) -> Workspace:
    root.mkdir(exist_ok=True)
    workspace = Workspace(root, WorkspaceConfig.model_validate({"mode": "host", "seeded": True, **facts}))
    workspace.save()
    return workspace


def test_bundles_are_put_together(tmp_path: Path) -> None:
    _skill(tmp_path / "one" / "alpha")
    _skill(tmp_path / "one" / "beta")
    alone = _skill(tmp_path / "gamma")
    (alone / "link").symlink_to("/etc/passwd")
    said = pier("skills", "compose", "-o", "out", "one", "gamma", cwd=tmp_path, image=None).stdout
    assert len(said.splitlines()) == 3
    assert sorted(path.parent.name for path in (tmp_path / "out").glob("*/SKILL.md")) == ["alpha", "beta", "gamma"]
    assert not (tmp_path / "out" / "gamma" / "link").is_symlink()
    with pytest.raises(UsageError, match="expected a new or empty directory"):
        compose([alone], tmp_path / "out")
    _skill(tmp_path / "two" / "alpha")
    with pytest.raises(UsageError, match="two skills are called 'alpha'"):
        compose([tmp_path / "one", tmp_path / "two"], tmp_path / "more")
    assert not (tmp_path / "more").exists()
    (tmp_path / "empty").mkdir()
    for wrong in ("none", "empty"):
        with pytest.raises(UsageError):
            find_skills(tmp_path / wrong)


async def test_skills_are_registered_where_agents_look(tmp_path: Path) -> None:
    skill = _skill(tmp_path / "alpha")
    workspace = _workspace(tmp_path / "ws", skills=[skill], agents=["claude-code", "codex", "gemini-cli"])
    done = await install_skills(workspace, agents_in_use(workspace, ()), print)
    assert [(row.path.relative_to(workspace.root).as_posix(), row.agents) for row in done] == [
        (".claude/skills/alpha", ("claude-code",)),
        (".agents/skills/alpha", ("codex", "gemini-cli")),
    ]
    (skill / "SKILL.md").write_text("changed")
    await install_skills(workspace, ["claude-code"], print)
    assert (workspace.root / ".claude/skills/alpha/SKILL.md").read_text() == "changed"
    # One that the user put there stays.
    mine = _skill(workspace.root / ".claude/skills/beta", "mine")
    workspace.config.skills = [_skill(tmp_path / "beta", "theirs")]
    (row,) = await install_skills(workspace, ["claude-code"], print)
    assert row.kept and "mine" in (mine / "SKILL.md").read_text()


async def test_what_cannot_be_registered_is_refused(tmp_path: Path) -> None:
    workspace = _workspace(tmp_path / "ws")
    with pytest.raises(WorkspaceError, match="there are no skills"):
        await install_skills(workspace, ["codex"], print)
    with pytest.raises(WorkspaceError, match="has a sandbox"):
        await install_skills(_workspace(tmp_path / "other", mode="sandbox"), ["codex"], print)


def test_agents_in_use(tmp_path: Path) -> None:
    workspace = _workspace(tmp_path / "ws")
    assert agents_in_use(workspace, ("pi",), tmp_path) == ["pi"]
    assert agents_in_use(workspace, (), tmp_path) == ["claude-code", "codex", "gemini-cli", "opencode"]
    (tmp_path / ".codex").mkdir()
    assert agents_in_use(workspace, (), tmp_path) == ["codex"]


def test_the_skill_about_pier_names_commands_that_exist() -> None:
    (found,) = find_skills(PACKAGED)
    text = (found / "SKILL.md").read_text()
    assert text.startswith("---\nname: pier\ndescription: ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    commands = [part.split()[1] for line in lines for part in line.split("#")[0].replace("&&", ";").split(";")
                if part.strip().startswith("pier ")]  # fmt: skip
    assert len(commands) > 15
    # The viewer is a command of its own that may not be part of this build yet.
    assert set(commands) - {"view"} <= set(COMMANDS)
