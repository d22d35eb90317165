"""`pier capture` and `pier traces`: save, list, show and export trajectories of agent sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo
from pier.cli.options import FILE, PATH
from pier.cli.trajectory import print_trajectory
from pier.errors import UsageError, WorkspaceError
from pier.sizes import columns

if TYPE_CHECKING:
    from pier.redact import Redactor
    from pier.workspace.traces import ExportReport
    from pier.workspace.workspace import Workspace


@click.command()
@click.option(
    "--session-dir", metavar="DIR", help="Directory of the logs, in a workspace's sandbox or on this machine."
)
@click.option("-a", "--agent", metavar="NAME", help="Agent of the session.  [default: any]")
@click.option(
    "--session", metavar="ID", help="The session: its time in a workspace, else its id.  [default: the newest]"
)
@click.option("-o", "--output", type=PATH, help="Directory to save to.  [default: .pier/trials/TIME]")
@JSON
def capture(
    session_dir: str | None, agent: str | None, session: str | None, output: Path | None, as_json: bool
) -> None:
    """Save the trajectory of an agent session as a trial without a verdict.

    In a workspace this is the last session that `pier exec` recorded. Elsewhere, and in a workspace without a sandbox,
    it is the last session of Claude Code, Codex, Gemini CLI or OpenCode that was started in this directory.
    """
    from pier.workspace.capture import capture as save

    found = save(_workspace(), agent=agent, session=session, session_dir=session_dir, output=output)
    done, used = found.session, found.session.result
    row = {"directory": str(found.directory), "agent": done.agent, "version": done.version, "model": done.model}
    row |= {"session": done.id, "source": done.source, **used.model_dump(mode="json", exclude_none=True)}
    whose = f"{done.agent} {done.version}" + (f" with {done.model}" if done.model else "")
    cost = "" if used.cost_usd is None else f", ${used.cost_usd:.4f}"
    lines = [
        f"session     {done.id}: {whose}, {used.n_agent_steps or 0} steps{cost}",
        f"from        {'the recording of its model calls' if done.source == 'recording' else done.source}",
        f"trajectory  {found.directory / 'agent' / 'trajectory.json'}",
    ]
    echo(row, as_json, lines)


def _workspace() -> Workspace | None:
    """Return the enclosing workspace, if any."""
    from pier.workspace.workspace import Workspace

    try:
        return Workspace.find(Path.cwd())
    except WorkspaceError as error:
        if error.code != "no-workspace":
            raise
        return None


@click.command()
@click.argument("words", nargs=-1, metavar="[show] [ID]")
@click.option("--all", "every", is_flag=True, help="Export all traces.")
@click.option("-o", "--output", type=FILE, help="Archive to write: FILE.tar.gz.")
@click.option("--full", is_flag=True, help="With show: do not truncate text.")
@JSON
def traces(words: tuple[str, ...], every: bool, output: Path | None, full: bool, as_json: bool) -> None:
    """List the trials of this workspace or directory, or export them with -o.

    ID is the name of a trial or a prefix of it; the newest by default. `pier traces show [ID]` prints its trajectory.
    The archive contains regular files only, without secrets; its redactions.json lists what was removed.
    """
    from pier.workspace.traces import export, find_trace, list_traces, trace_rows, traces_home

    showing = words[:1] == ("show",)
    names = words[1:] if showing else words
    if len(names) > 1 or (every and (names or showing)):
        raise UsageError(
            "cannot choose these traces: expected one ID or --all", hint="pier traces --help", code="usage"
        )
    home, name = traces_home(), names[0] if names else None
    if showing:
        _show(find_trace(home, name), full=full, as_json=as_json)
    elif output is not None:
        chosen = [view.directory for view in list_traces(home)] if every else [find_trace(home, name)]
        if not chosen:
            raise UsageError(f"no traces in {home}", hint="pier capture saves one", code="no-traces")
        _report(export(chosen, output, _redactor()), as_json=as_json)
    else:
        wanted = find_trace(home, name).name if name else None
        rows = [row for row in trace_rows(list_traces(home)) if wanted in (None, row["id"])]
        echo(rows, as_json, _table(rows))


def _redactor() -> Redactor:
    """Return a redactor for the secrets in this machine's variables and logins, and in the workspace's."""
    import os

    from pier.redact import Redactor
    from pier.secret import secret_values
    from pier.workspace.capture import known_secrets

    return Redactor([*secret_values(os.environ, os.environ), *known_secrets(os.environ, _workspace())])


def _show(directory: Path, *, full: bool, as_json: bool) -> None:
    from pier.job.view import TrialView
    from pier.trajectory.model import read

    files = TrialView.open(directory).files.trajectories
    if not files:
        raise UsageError(f"{directory} has no trajectory", hint=f"pier trial show {directory}", code="no-trajectory")
    for path in files:
        print_trajectory(read(path), as_json=as_json, full=full)


def _report(report: ExportReport, *, as_json: bool) -> None:
    lines = [f"redacted  {row['count']} x {row['kind']} in {row['file']}" for row in report.redacted]
    lines += [f"left out  {row['file']}: {row['reason']}" for row in report.left_out]
    total = sum(report.counts().values())
    many = f"{len(report.trials)} trials" if len(report.trials) > 1 else report.trials[0]
    lines += [f"exported  {many}, {report.files} files, {total} secrets redacted", f"archive   {report.output}"]
    echo({"output": str(report.output), **report.as_dict()}, as_json, lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    from pier.trial.record import printable

    if not rows:
        return ["no traces yet; pier capture saves one"]
    cells: list[tuple[object, ...]] = []
    for row in rows:
        known = [row["input_tokens"], row["output_tokens"]]
        cost = None if row["cost_usd"] is None else f"${row['cost_usd']:.4f}"
        texts = ((row["task"], 20), (row["agent"], 14), (row["model"] or "-", 26))
        names = (printable(text)[:size] for text, size in texts)
        cells.append((row["id"], *names, row["steps"], None if None in known else sum(known), cost, _reward(row)))
    return columns(("ID", "TASK", "AGENT", "MODEL", "STEPS", "TOKENS", "COST", "REWARD"), *cells)


def _reward(row: dict[str, Any]) -> str:
    rewards = row["rewards"]
    if not rewards:
        return "-"
    return f"{next(iter(rewards.values())):g}" if len(rewards) == 1 else str(len(rewards)) + " of"
