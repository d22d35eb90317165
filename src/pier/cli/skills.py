"""`pier skills`: a task's skills for agents that run on this machine, and bundles of skills."""

from __future__ import annotations

import json
from pathlib import Path

import click

_directory = click.Path(file_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.option("-a", "--agent", "agents", multiple=True, metavar="NAME", help="Register for this agent; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def skills(ctx: click.Context, agents: tuple[str, ...], as_json: bool) -> None:
    """Register the task's skills for the agents in use, in a workspace without a sandbox.

    They are taken out of the task's image (`skills_dir` in task.toml) and put where agents look for them in the
    workspace. In a workspace with a sandbox this is done when it starts.
    """
    if ctx.invoked_subcommand is not None:
        return
    import asyncio

    from pier.workspace.skills import agents_in_use, install_skills
    from pier.workspace.workspace import Workspace

    workspace = Workspace.find()
    found = asyncio.run(
        install_skills(workspace, agents_in_use(workspace, agents), lambda line: click.echo(line, err=True))
    )
    if as_json:
        rows = [{"name": s.name, "path": str(s.path), "agents": s.agents, "kept": s.kept} for s in found]
        click.echo(json.dumps(rows, indent=2))
        return
    for skill in found:
        note = "kept: another skill of this name is there" if skill.kept else f"for {', '.join(skill.agents)}"
        click.echo(f"{skill.name:20} {skill.path.relative_to(workspace.root)}  {note}")


@skills.command()
@click.argument("bundles", nargs=-1, required=True, type=_directory)
@click.option("-o", "--output", required=True, type=_directory, help="Directory to write; it must be new or empty.")
def compose(bundles: tuple[Path, ...], output: Path) -> None:
    """Put the skills of several BUNDLES, directories with skills, into one directory."""
    from pier.workspace.skills import compose as put_together

    for path in put_together(bundles, output):
        click.echo(str(path))


@skills.command()
def path() -> None:
    """Print where the skill is that teaches an agent to use pier.

    For example: pier start TASK -d DIR --skill "$(pier skills path)"
    """
    from pier.workspace.skills import PACKAGED

    click.echo(str(PACKAGED / "pier"))
