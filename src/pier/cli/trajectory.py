"""`pier trajectory`: convert, validate, show and count trajectories."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pier.cli.main import JSON, echo
from pier.cli.options import EXISTING, PATH
from pier.errors import UsageError
from pier.trajectory.model import Trajectory, dump, find, read
from pier.trajectory.show import lines as step_lines
from pier.trajectory.show import stats as count

PLACE = click.argument("places", nargs=-1, required=True, type=EXISTING)


@click.group()
def trajectory() -> None:
    """Convert, validate, show and count trajectories. A PLACE is a trajectory file or a trial's directory."""


@trajectory.command()
@PLACE
@JSON
@click.option("--strict/--no-strict", default=True, help="Also check pier's additional rules.")
@click.option("--media/--no-media", default=True, help="Also check that referenced images exist.")
@click.pass_context
def validate(ctx: click.Context, places: tuple[Path, ...], as_json: bool, strict: bool, media: bool) -> None:
    """Check trajectories against ATIF and pier's rules. Exits with 1 if any is invalid."""
    from pier.trajectory.rules import validate_file

    report: list[dict[str, Any]] = []
    lines: list[str] = []
    for place in places:
        file = find(place)
        found = [item for item in validate_file(file, media=media) if strict or item.level == "error"]
        report.append({"file": str(file), "valid": not found, "findings": [asdict(item) for item in found]})
        lines.append(f"{file}: {'valid' if not found else f'{len(found)} findings'}")
        lines += [f"  {item.level} {item.rule}: {item.where} {item.message}" for item in found]
    echo(report, as_json, lines)
    ctx.exit(int(not all(entry["valid"] for entry in report)))


@trajectory.command()
@click.argument("place", type=EXISTING)
@click.option("-o", "--output", required=True, type=PATH, help="A file, or a directory for many.")
@click.option("-a", "--agent", help="Agent that wrote the logs; detected by default.")
@JSON
@click.pass_context
def convert(ctx: click.Context, place: Path, output: Path, agent: str | None, as_json: bool) -> None:
    """Convert agents' session logs to trajectories. PLACE is a log or a directory of logs. Exits with 1 if any of them
    cannot be read; the others are converted."""
    from pier.trajectory.native.convert import convert as write
    from pier.trajectory.native.convert import find_sessions, targets

    rows, broken = [], False
    for session, target in targets(find_sessions(place, agent), output):
        try:
            write(session, target)
        except UsageError as error:
            click.echo(f"pier: {error}", err=True)
            broken = True
            continue
        rows.append({"agent": session.agent, "session": session.id, "source": str(session.path), "file": str(target)})
    echo(rows, as_json, [f"{row['file']}  {row['agent']} {row['session']}" for row in rows])
    ctx.exit(int(broken))


@trajectory.command()
@click.argument("place", type=EXISTING)
@JSON
@click.option("--full", is_flag=True, help="Do not truncate text.")
def show(place: Path, as_json: bool, full: bool) -> None:
    """Print a trajectory step by step."""
    print_trajectory(read(find(place)), as_json=as_json, full=full)


def print_trajectory(found: Trajectory, *, as_json: bool, full: bool) -> None:
    """Print a trajectory as JSON, or step by step, with long texts truncated unless `full`."""
    from pier.trial.record import printable

    if as_json:
        click.echo(dump(found), nl=False)
        return
    for line in step_lines(found, width=0 if full else 2000):
        click.echo(printable(line))


@trajectory.command()
@PLACE
@JSON
def stats(places: tuple[Path, ...], as_json: bool) -> None:
    """Count steps, tools, tokens, cost and time."""
    counted = [(file, count(read(file))) for file in map(find, places)]
    lines: list[str] = []
    for file, found in counted:
        lines.append(str(file))
        for name, value in found.items():
            if name == "tools":
                value = ", ".join(f"{tool} {number}" for tool, number in value.items()) or "none"
            lines.append(f"  {name.replace('_', ' '):20} {'unknown' if value is None else value}")
    echo([{"file": str(file), **found} for file, found in counted], as_json, lines)
