"""`pier samples`: export the training samples of trials and jobs, and check sample files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pier.cli.main import JSON, echo
from pier.cli.options import COUNT, EXISTING, PATH
from pier.errors import UsageError
from pier.sizes import columns


@click.group()
def samples() -> None:
    """Export and check training samples."""


def _known_format(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from pier.rollout.export import FORMATS

    if value not in FORMATS:
        raise UsageError(f"invalid value {value!r} for --format: expected one of {', '.join(FORMATS)}")
    return value


@samples.command()
@click.argument("places", nargs=-1, required=True, type=EXISTING)
@click.option("-o", "--out", type=PATH, help="File to write: .jsonl, or .parquet (needs pyarrow).")
@click.option(
    "--format",
    "form",
    callback=_known_format,
    default="pier",
    help="Output format: pier (all fields), sft (messages), or what a trainer loads: verl, trl, skyrl.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(["main", "sub_agent", "side", "foreign"]),
    default=("main", "sub_agent"),
    help="Kind of calls to export; repeatable.",
)
@click.option("--trainable", is_flag=True, help="Export only samples with a reward that the agent earned.")
@JSON
def export(
    places: tuple[Path, ...], out: Path | None, form: str, kinds: tuple[str, ...], trainable: bool, as_json: bool
) -> None:
    """Export training samples from recordings. They have exact token ids, a loss mask, log-probs and a reward.

    Without --out the samples are only listed. Text is never tokenised again: calls without token ids from the server
    yield samples without them (to request them: `tokens = true` in providers.toml, or `pier gateway serve --tokens`).
    """
    from contextlib import nullcontext

    from pier.rollout.export import export as export_samples
    from pier.rollout.export import sink_for

    with sink_for(out) if out else nullcontext() as sink:
        report = export_samples(places, sink, form=form, kinds=kinds, trainable_only=trainable)
    found = {**report.as_dict(), "file": str(out) if out else None}
    lines = [] if out else _samples_table(report.rows)
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
        if name != "file" or out:
            lines.append(f"{name.replace('_', ' '):27} {'unknown' if value is None else value}")
    echo(found, as_json, lines)


def _samples_table(rows: list[dict[str, Any]]) -> list[str]:
    notes = (", ".join([*((row["split"],) if row["split"] else ()), *row["flags"]]) for row in rows)
    names = ("id", "kind", "calls", "ids", "trained", "reward")
    cells = [(*(row[name] for name in names), note) for row, note in zip(rows, notes, strict=True)]
    return [*columns(("SAMPLE", "KIND", "CALLS", "IDS", "TRAINED", "REWARD", "NOTES"), *cells), ""]


@samples.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--vocab-size", type=COUNT, help="Also check that all ids are below this size.")
@JSON
@click.pass_context
def check(ctx: click.Context, files: tuple[Path, ...], vocab_size: int | None, as_json: bool) -> None:
    """Check the samples in FILES, of any format. Exits with 1 if one is invalid.

    Ids, mask and log-probs must have the same length. The mask must be 1 on exactly the sampled tokens that are
    trained, each with a log-prob. Rows of the format `pier` name their calls, so across rows: each token is trained
    once, a sample that continues another call begins with its ids, and a rollout that does not count is not trainable.
    Samples with ids and without log-probs train nothing and are counted.
    """
    from pier.rollout.check import check_file

    found = [check_file(path, vocab_size) for path in files]
    lines = [line for each in found for line in (f"{each.path}: {each.summary}", *(f"  {one}" for one in each.broken))]
    echo([each.as_dict() for each in found], as_json, lines)
    ctx.exit(int(any(each.broken for each in found)))
