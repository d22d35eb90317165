"""`pier skills`: a task's skills for agents on this machine, and bundles of skills."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pier.cli.main import JSON, echo
from pier.cli.options import DIRECTORY
from pier.sizes import columns


@click.group(invoke_without_command=True)
@click.option("-a", "--agent", "agents", multiple=True, metavar="NAME", help="Register for this agent; repeatable.")
@JSON
@click.pass_context
def skills(ctx: click.Context, agents: tuple[str, ...], as_json: bool) -> None:
    """Register the task's skills with the agents in use, in a workspace without a sandbox.

    The skills are copied from the task's image (`skills_dir` in task.toml) to the agents' skill directories in the
    workspace. A workspace with a sandbox does this when it starts.
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
    notes = ["skipped: another skill has this name" if s.kept else f"for {', '.join(s.agents)}" for s in found]
    rows = [(s.name, s.path.relative_to(workspace.root), note) for s, note in zip(found, notes, strict=True)]
    echo([asdict(skill) for skill in found], as_json, columns(*rows) if rows else ())


@skills.command()
@click.argument("bundles", nargs=-1, required=True, type=DIRECTORY)
@click.option("-o", "--output", required=True, type=DIRECTORY, help="Directory to write; it must be new or empty.")
def compose(bundles: tuple[Path, ...], output: Path) -> None:
    """Combine several BUNDLES (directories of skills) in one directory."""
    from pier.workspace.skills import compose as put_together

    for path in put_together(bundles, output):
        click.echo(str(path))


@skills.command()
def path() -> None:
    """Print the path of the skill that teaches an agent to use pier.

    For example: pier start TASK -d DIR --skill "$(pier skills path)"
    """
    from pier.workspace.skills import PACKAGED

    click.echo(str(PACKAGED / "pier"))
