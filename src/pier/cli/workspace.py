"""`pier start`, `exec`, `verify`, `diff`, `fork`, `stop` and `list`: live workspaces."""

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

from pier.cli.main import JSON, echo, shown
from pier.errors import UsageError
from pier.sizes import columns

if TYPE_CHECKING:
    from pier.workspace.client import WorkspacePlace
    from pier.workspace.starting import StartOrder
    from pier.workspace.workspace import Workspace

_directory = click.Path(file_okay=False, path_type=Path)
_where = click.option(
    "-d",
    "--dir",
    "--workspace-dir",
    "directory",
    type=_directory,
    help="The workspace.  [default: the enclosing one]",
)


@click.command()
@click.argument("task", required=False)
@click.option("-d", "--dir", "directory", type=_directory, help="Its directory.  [default for a URL: ./TASK-NAME]")
@click.option("--image", metavar="REF", help="Start from an image; with a task, in place of the task's own.")
@click.option("-a", "--agent", "agents", multiple=True, metavar="NAME", help="Add an agent; repeatable.")
@click.option("-m", "--model", metavar="MODEL", help="The model for every agent.  [default: what an agent asks for]")
@click.option("--host", is_flag=True, help="No sandbox: work in the directory on this machine.")
@click.option("--no-mount", is_flag=True, help="Keep the files inside; `pier stop` copies them back.")
@click.option(
    "--ports", multiple=True, metavar="[HOST:]PORT", help="Forward a port of the sandbox to 127.0.0.1; repeatable."
)
@click.option("--mounts-json", metavar="JSON", help="Additional mounts: '[\"./data:/data:ro\"]'.")
@click.option(
    "-e", "--variable", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable for every command; repeatable."
)
@click.option("--env-file", type=click.Path(dir_okay=False, path_type=Path), help="A file of NAME=VALUE lines.")
@click.option("--skill", "skills", multiple=True, type=_directory, help="Give a skill to every agent; repeatable.")
@click.option("-f", "--force", is_flag=True, help="Start in a directory that is not empty; its files stay.")
@click.option("--env", "backend", metavar="BACKEND", help="Where the sandbox runs: local or docker.  [default: local]")
@click.option("-y", "--yes", is_flag=True, help="Give the task the environment variables that it requests.")
@click.option("--direct", is_flag=True, help="Agents call their providers themselves, with the variables of -e.")
@JSON
def start(task: str | None, as_json: bool, **options: Any) -> None:
    """Start a workspace: a directory with a live sandbox around it.

    TASK is the directory of a task or URL#PATH of a git repository. Without TASK and --image the workspace around here
    is brought back, with the agents, ports and variables that are added.

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
    """A script or a recording is found from wherever the workspace is served."""
    scheme, colon, rest = (model or "").partition(":")
    return f"{scheme}:{Path(rest).resolve()}" if colon and scheme in ("script", "replay") else model


def _say(line: str) -> None:
    click.echo(shown(line), err=True)


def _place(directory: Path | None) -> WorkspacePlace | Workspace:
    """The workspace around a directory; as a `WorkspacePlace`, which loads quickly, if that is enough."""
    from pier.workspace.client import find_place

    if (place := find_place(str(directory or "."))) is not None:
        return place
    from pier.workspace.workspace import Workspace

    return Workspace.find(directory)


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("-d", "--detach", is_flag=True, help="Run in the background, with a log.")
@click.option("--list", "list_all", is_flag=True, help="List the commands in the background.")
@click.option("--logs", metavar="ID", help="Print the log of a command in the background.")
@click.option("--stop", "stop_id", metavar="ID", help="Stop a command in the background.")
@JSON
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def exec_(
    command: tuple[str, ...], detach: bool, list_all: bool, logs: str | None, stop_id: str | None, as_json: bool
) -> None:
    """Run COMMAND in the workspace around here, and exit with its code.

    With a terminal the command gets one too; else its streams are plain pipes. Agents (claude, codex, gemini, ...) are
    recorded: the terminal and the model calls, each run in its own directory below .pier/sessions.

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
        echo(rows, as_json, lines or ["no commands in the background"])
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
@click.option("-a", "--agent", help="The agent whose trajectory is saved.  [default: that of the newest session]")
@click.option("--session", metavar="TIME", help="The session whose trajectory is saved.  [default: the newest]")
@click.option("--session-dir", help="A directory with an agent's own session logs; inside the sandbox if there is one.")
@click.option("--trial-dir", type=_directory, help="Where the result goes.  [default: .pier/trials/TIME]")
@click.option("--step", help="The step whose tests run, by its name.  [default: the first]")
@click.option("--in-place", is_flag=True, help="Run the tests in the workspace's own sandbox, not in a copy of it.")
@click.option("--watch", is_flag=True, help="Run again whenever the tests or the workspace change.")
@JSON
def verify(directory: Path | None, watch: bool, as_json: bool, **options: Any) -> None:
    """Run the task's tests on the present state, print the reward, and save result and trajectory.

    The tests run in a copy of the sandbox, so they change nothing. The exit code is 0 when there is a reward, whatever
    it is, and 1 when there is none.
    """
    from pier.cli import workspace_verify

    if watch and as_json:
        raise UsageError("cannot use --json with --watch: it prints one result", hint="leave out one of them")
    place = _place(directory)
    if watch:
        workspace_verify.watch(place, options)
    raise click.exceptions.Exit(workspace_verify.run(place, options, as_json=as_json))


@click.command()
@_where
@click.option("--name-only", is_flag=True, help="Print paths only.")
@JSON
def diff(directory: Path | None, name_only: bool, as_json: bool) -> None:
    """Show what changed in the workspace since its start, and what changed elsewhere in its sandbox."""
    from pier.workspace.diff import outside_changes, workspace_changes
    from pier.workspace.workspace import Workspace

    workspace = Workspace.find(directory)
    changes, outside = workspace_changes(workspace), outside_changes(workspace)
    if as_json:
        echo({"changes": [asdict(change) for change in changes], "outside": outside}, as_json, ())
        return
    for change in changes:
        if name_only or not change.diff:
            click.echo(shown(f"{change.kind}: {change.path}"))
        else:
            click.echo(shown(change.diff), nl=False)
    for row in outside:
        click.echo(shown(f"{row['kind']}: {row['path']}"))


@click.command()
@click.argument("target", type=_directory)
@_where
@click.option(
    "--ports", multiple=True, metavar="[HOST:]PORT", help="Forward a port of the sandbox to 127.0.0.1; repeatable."
)
def fork(target: Path, directory: Path | None, ports: tuple[str, ...]) -> None:
    """Make a second workspace in TARGET from the present state of this one, and start it.

    What runs in the first goes on there. Ports are not taken over, since this machine has each of them once.
    """
    import asyncio

    from pier.workspace.starting import fork as make
    from pier.workspace.workspace import Workspace

    made = asyncio.run(make(Workspace.find(directory), target, ports, _say))
    _print_started(made, new=False)


@click.command()
@_where
def stop(directory: Path | None) -> None:
    """Stop the workspace; `pier start` brings it back.

    Its directory stays as it is. What changed elsewhere in the sandbox is kept too. Commands in the background end.
    """
    from pier.errors import WorkspaceError
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
        click.echo(f"warning: {shown(note)}", err=True)
    click.echo(f"{workspace.root}: stopped")


@click.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the workspaces of this machine."""
    from pier.workspace.client import list_places, status_of

    gone: list[str] = []
    rows = [status_of(place) for place in list_places(gone.append)]
    for path in gone:
        click.echo(f"{path} is gone and no longer listed; pier start in its new place brings it back", err=True)
    if not rows and not as_json:
        click.echo("no workspaces: pier start TASK -d DIR makes one", err=True)
        return
    table = [("Workspace", "Sandbox", "Status"), *((r["workspace"], r["sandbox"] or "—", r["status"]) for r in rows)]
    rule = ["─" * max(map(len, column)) for column in zip(*table, strict=True)]
    echo(rows, as_json, columns(table[0], rule, *table[1:]))
