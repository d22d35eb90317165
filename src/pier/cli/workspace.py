"""`pier start`, `exec`, `verify`, `diff`, `fork`, `stop`, `list` and `skills`: live workspaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo, without_controls
from pier.cli.options import DIRECTORY, FILE
from pier.errors import UsageError, WorkspaceError
from pier.sizes import columns

if TYPE_CHECKING:
    from pier.workspace.client import WorkspacePlace
    from pier.workspace.starting import StartOrder
    from pier.workspace.workspace import Workspace

_where = click.option(
    "-d",
    "--dir",
    "--workspace-dir",
    "directory",
    type=DIRECTORY,
    help="Workspace directory.  [default: the enclosing one]",
)


@click.command()
@click.argument("task", required=False)
@click.option("-d", "--dir", "directory", type=DIRECTORY, help="Workspace directory.  [default for a URL: ./TASK-NAME]")
@click.option("--image", metavar="REF", help="Start from an image, instead of the task's.")
@click.option("-a", "--agent", "agents", multiple=True, metavar="NAME", help="Add an agent; repeatable.")
@click.option("-m", "--model", metavar="MODEL", help="Model for all agents.  [default: chosen by each agent]")
@click.option("--host", is_flag=True, help="Work in the directory on this machine, without a sandbox.")
@click.option("--no-mount", is_flag=True, help="Keep the files in the sandbox; `pier stop` copies them back.")
@click.option(
    "--ports", multiple=True, metavar="[HOST:]PORT", help="Forward a port of the sandbox to 127.0.0.1; repeatable."
)
@click.option("--mounts-json", metavar="JSON", help="Additional mounts: '[\"./data:/data:ro\"]'.")
@click.option(
    "-e", "--variable", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable for every command; repeatable."
)
@click.option("--env-file", type=FILE, help="A file of NAME=VALUE lines.")
@click.option("--skill", "skills", multiple=True, type=DIRECTORY, help="Add a skill to all agents; repeatable.")
@click.option("-f", "--force", is_flag=True, help="Start in a directory that is not empty, and keep its files.")
@click.option("--env", "backend", metavar="BACKEND", help="Sandbox backend: local or docker.  [default: local]")
@click.option("-y", "--yes", is_flag=True, help="Pass the environment variables that the task requests.")
@click.option("--direct", is_flag=True, help="Let agents call their providers directly, with variables from -e.")
@JSON
def start(task: str | None, as_json: bool, **options: Any) -> None:
    """Start a workspace: a directory with a live sandbox around it.

    TASK is the directory of a task or URL#PATH of a git repository. Without TASK and --image, the enclosing workspace
    is restarted with additional agents, ports and variables.

    \b
    Examples:
      pier start ./tasks/my-task -d ./ws -a claude-code
      pier start --image ubuntu:24.04 -d ./ws
      pier start --agent codex             add an agent to this workspace
    """
    import asyncio

    from pier.workspace.starting import start as begin

    order = _start_order(task, options)
    workspace, status = asyncio.run(begin(order, _say))
    if as_json:
        click.echo(json.dumps({"workspace": str(workspace.root), "mode": workspace.config.mode, **status}, indent=2))
        return
    for warning in status.get("warnings", ()):
        click.echo(f"warning: {warning}", err=True)
    _print_started(workspace, new=order.is_new)


def _print_started(workspace: Workspace, *, new: bool) -> None:
    root = workspace.root
    click.echo(f"{root}: {'ready' if workspace.is_host else 'running'}")
    if Path.cwd().resolve() != root:
        click.echo(f"  cd {os.path.relpath(root)}")
    if workspace.config.task_path is not None and new:
        click.echo("  cat .task/instruction.md")
    if not workspace.is_host:
        from pier.workspace.agents import PROGRAMS

        words = [word for word, name in PROGRAMS.items() if name in workspace.config.agents]
        click.echo(f"  pier exec {words[0] if words else 'bash'}")
    if workspace.config.task_path is not None:
        click.echo("  pier verify")


def _start_order(task: str | None, options: dict[str, Any]) -> StartOrder:
    from pier.job.load import read_env_file
    from pier.workspace.agents import PROGRAMS
    from pier.workspace.starting import StartOrder, parse_mounts

    file, mounts, model = (options.pop(name) for name in ("env_file", "mounts_json", "model"))
    return StartOrder(
        task=task,
        agents=tuple(PROGRAMS.get(name) or name for name in options.pop("agents")),
        model=_absolute_model(model),
        mounted=not options.pop("no_mount"),
        mounts=parse_mounts(mounts) if mounts else (),
        env={**(read_env_file(file) if file else {}), **_variables(options.pop("env"))},
        skills=tuple(path.resolve() for path in options.pop("skills")),
        **options,
    )


def _variables(rows: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        name, equals, value = row.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"invalid value {row!r} for -e: expected NAME=VALUE", code="variable")
        if not equals and name not in os.environ:
            raise UsageError(f"invalid value {row!r} for -e: {name} is not set here", hint=f"-e {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _absolute_model(model: str | None) -> str | None:
    """Make the path of a script or a recording absolute, since the supervisor runs in another directory."""
    scheme, colon, rest = (model or "").partition(":")
    return f"{scheme}:{Path(rest).resolve()}" if colon and scheme in ("script", "replay") else model


def _say(line: str) -> None:
    click.echo(without_controls(line), err=True)


def _place(directory: Path | None) -> WorkspacePlace | Workspace:
    """Return the enclosing workspace; as a `WorkspacePlace`, which loads faster, where possible."""
    from pier.workspace.client import find_place

    if (place := find_place(str(directory or "."))) is not None:
        return place
    from pier.workspace.workspace import Workspace

    return Workspace.find(directory)


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("-d", "--detach", is_flag=True, help="Run in the background, with a log.")
@click.option("--list", "list_all", is_flag=True, help="List background commands.")
@click.option("--logs", metavar="ID", help="Print the log of a background command.")
@click.option("--stop", "stop_id", metavar="ID", help="Stop a background command.")
@JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def exec_(
    command: tuple[str, ...], detach: bool, list_all: bool, logs: str | None, stop_id: str | None, as_json: bool
) -> None:
    """Run COMMAND in the enclosing workspace, and exit with its code.

    The command gets a terminal if pier has one, else pipes. Sessions of agents (claude, codex, gemini, ...) are
    recorded, both the terminal and the model calls, in a directory per run below .pier/sessions.

    \b
    Examples:
      pier exec claude
      pier exec -- claude -p "Do the task" --dangerously-skip-permissions
      pier exec -d -- python3 -m http.server 8888
    """
    from pier.cli import workspace_exec
    from pier.workspace import background
    from pier.workspace.workspace import Workspace

    workspace = Workspace.find()
    if list_all:
        known = background.list_all(workspace)
        rows = [row.model_dump(mode="json") | {"state": row.state} for row in known]
        lines = [f"{row.id:>4}  {row.state:<12}  {' '.join(row.command)}" for row in known]
        echo(rows, as_json, lines or ["no background commands"])
    elif logs is not None:
        place = background.find(workspace, logs) / background.LOG
        with contextlib.suppress(FileNotFoundError), place.open("rb") as stream:
            shutil.copyfileobj(stream, sys.stdout.buffer)
    elif stop_id is not None:
        background.stop(workspace, stop_id)
    elif not command:
        raise click.UsageError("missing COMMAND, such as: pier exec bash")
    elif detach:
        id = workspace_exec.detach(workspace, command)
        click.echo(f"{id}  (pier exec --logs {id}, pier exec --stop {id})")
    else:
        run = workspace_exec.become if workspace.is_host else workspace_exec.run
        sys.exit(run(workspace, command))


@click.command()
@_where
@click.option("-a", "--agent", help="Agent whose trajectory is saved.  [default: that of the newest session]")
@click.option("--session", metavar="TIME", help="Session whose trajectory is saved.  [default: the newest]")
@click.option("--session-dir", help="Directory of an agent's session logs, in the sandbox if there is one.")
@click.option("--trial-dir", type=DIRECTORY, help="Directory of the result.  [default: .pier/trials/TIME]")
@click.option("--step", help="Name of the step to verify.  [default: the first]")
@click.option("--in-place", is_flag=True, help="Run the tests in the workspace's sandbox instead of a copy.")
@click.option("--watch", is_flag=True, help="Run again after each change of the tests or the workspace.")
@JSON
def verify(directory: Path | None, watch: bool, as_json: bool, **options: Any) -> None:
    """Run the task's tests on the current state, print the reward, and save the result and the trajectory.

    The tests run in a copy of the sandbox, so they change nothing. Exits with 0 for any reward, and with 1 without one.
    """
    from pier.cli import workspace_verify

    if watch and as_json:
        raise UsageError("cannot use --json with --watch: it prints a single result", hint="omit one of them")
    place = _place(directory)
    if watch:
        workspace_verify.watch(place, options)
    raise click.exceptions.Exit(workspace_verify.run(place, options, as_json=as_json))


@click.command()
@_where
@click.option("--name-only", is_flag=True, help="Print paths only.")
@JSON
def diff(directory: Path | None, name_only: bool, as_json: bool) -> None:
    """Show the changes in the workspace since its start, and elsewhere in its sandbox."""
    from pier.workspace.diff import outside_changes, workspace_changes
    from pier.workspace.workspace import Workspace

    workspace = Workspace.find(directory)
    changes, outside = workspace_changes(workspace), outside_changes(workspace)
    if as_json:
        echo({"changes": [asdict(change) for change in changes], "outside": outside}, as_json, ())
        return
    for change in changes:
        if name_only or not change.diff:
            click.echo(without_controls(f"{change.kind}: {change.path}"))
        else:
            click.echo(without_controls(change.diff), nl=False)
    for row in outside:
        click.echo(without_controls(f"{row['kind']}: {row['path']}"))


@click.command()
@click.argument("target", type=DIRECTORY)
@_where
@click.option(
    "--ports", multiple=True, metavar="[HOST:]PORT", help="Forward a port of the sandbox to 127.0.0.1; repeatable."
)
def fork(target: Path, directory: Path | None, ports: tuple[str, ...]) -> None:
    """Create a second workspace in TARGET from the current state of this one, and start it.

    Commands in the first workspace continue to run. Ports are not copied, since each can be forwarded only once.
    """
    import asyncio

    from pier.workspace.starting import fork as make
    from pier.workspace.workspace import Workspace

    made = asyncio.run(make(Workspace.find(directory), target, ports, _say))
    _print_started(made, new=False)


@click.command()
@_where
def stop(directory: Path | None) -> None:
    """Stop the workspace; `pier start` restarts it.

    Its directory and all other changes in the sandbox are kept. Background commands end.
    """
    from pier.workspace.client import call

    workspace = _place(directory)
    try:
        answer = call(workspace, {"op": "stop"}) if not workspace.is_host else None
    except WorkspaceError as error:
        if error.code != "not-running":
            raise
        answer = None
    if answer is None:
        click.echo(f"{workspace.root}: not running")
        return
    for note in answer["notes"]:
        click.echo(f"warning: {without_controls(note)}", err=True)
    click.echo(f"{workspace.root}: stopped")


@click.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the workspaces of this machine."""
    from pier.workspace.client import list_places, status_of

    gone: list[str] = []
    rows = [status_of(place) for place in list_places(gone.append)]
    for path in gone:
        click.echo(f"{path} is gone and no longer listed; if it was moved, run pier start there", err=True)
    if not rows and not as_json:
        click.echo("no workspaces; create one: pier start TASK -d DIR", err=True)
        return
    table = [("Workspace", "Sandbox", "Status"), *((r["workspace"], r["sandbox"] or "—", r["status"]) for r in rows)]
    rule = ["─" * max(map(len, column)) for column in zip(*table, strict=True)]
    echo(rows, as_json, columns(table[0], rule, *table[1:]))


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
