"""`pier trajectory`: convert, check, show and count trajectories."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from pier.cli.output import JSON

PLACE = click.argument("places", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))


@click.group()
def trajectory() -> None:
    """Validate, show and count trajectories. A PLACE is a trajectory file or a trial's directory."""


@trajectory.command()
@PLACE
@JSON
@click.option("--strict/--no-strict", default=True, help="Also check the rules that pier adds to ATIF.")
@click.option("--media/--no-media", default=True, help="Also check that the pictures named are there.")
@click.pass_context
def validate(ctx: click.Context, places: tuple[Path, ...], as_json: bool, strict: bool, media: bool) -> None:
    """Check trajectories against ATIF and pier's stricter rules; exits with 1 if any is broken."""
    from pier.trajectory.model import find
    from pier.trajectory.rules import validate_file

    report = []
    for place in places:
        file = find(place)
        found = [item for item in validate_file(file, media=media) if strict or item.level == "error"]
        report.append({"file": str(file), "valid": not found, "findings": [asdict(item) for item in found]})
        if as_json:
            continue
        click.echo(f"{file}: {'valid' if not found else f'{len(found)} findings'}")
        for item in found:
            click.echo(f"  {item.level} {item.rule}: {item.where} {item.message}")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    if not all(entry["valid"] for entry in report):
        ctx.exit(1)


@trajectory.command()
@click.argument("place", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A file, or a directory for many.")
@click.option("-a", "--agent", help="Agent that wrote the logs; detected by default.")
@JSON
@click.pass_context
def convert(ctx: click.Context, place: Path, output: Path, agent: str | None, as_json: bool) -> None:
    """Write agents' own session logs as trajectories. PLACE is a log, or a directory that holds some. Exits with 1 if
    one of several could not be read; the others are written."""
    from pier.errors import UsageError
    from pier.trajectory.native.convert import convert as write
    from pier.trajectory.native.convert import find_sessions, targets

    rows, broken = [], False
    for session, target in targets(find_sessions(place, agent), output):
        try:
            write(session, target)
        except UsageError as error:
            click.echo(f"Error: {error}", err=True)
            broken = True
            continue
        rows.append({"agent": session.agent, "session": session.id, "source": str(session.path), "file": str(target)})
        if not as_json:
            click.echo(f"{target}  {session.agent} {session.id}")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    if broken:
        ctx.exit(1)


@trajectory.command()
@click.argument("place", type=click.Path(exists=True, path_type=Path))
@JSON
@click.option("--full", is_flag=True, help="Cut no text.")
def show(place: Path, as_json: bool, full: bool) -> None:
    """Print a trajectory step by step."""
    from pier.trajectory.model import dump, find, read
    from pier.trajectory.show import lines

    found = read(find(place))
    if as_json:
        click.echo(dump(found), nl=False)
        return
    for line in lines(found, width=0 if full else 2000):
        click.echo(line)


@trajectory.command()
@PLACE
@JSON
def stats(places: tuple[Path, ...], as_json: bool) -> None:
    """Count steps, tools, tokens, cost and time."""
    from pier.trajectory.model import find, read
    from pier.trajectory.show import stats as count

    counted = [(file, count(read(file))) for file in map(find, places)]
    if as_json:
        click.echo(json.dumps([{"file": str(file), **found} for file, found in counted], indent=2))
        return
    for file, found in counted:
        click.echo(str(file))
        for name, value in found.items():
            if name == "tools":
                value = ", ".join(f"{tool} {number}" for tool, number in value.items()) or "none"
            click.echo(f"  {name.replace('_', ' '):20} {'unknown' if value is None else value}")
