"""`pier view`: view jobs and trials in a browser, or print the pages as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pier.cli.main import echo
from pier.cli.options import PATH, PORT
from pier.cli.run import JobPath

if TYPE_CHECKING:
    from pier.view.library import Library


class _ViewGroup(click.Group):
    """A group whose first argument may be a path instead of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "-h", "--help"):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ViewGroup, context_settings={"help_option_names": ["-h", "--help"]})
def view() -> None:
    """View jobs and trials in a browser.

    `pier view [PATH]` is short for `pier view serve [PATH]`. PATH is a directory of jobs (default: jobs, or the
    enclosing workspace), a job, a trial, a workspace, a job directory of Harbor or datacurve pier, or a trajectory
    file.
    """


def _here() -> Path:
    """Return the `jobs` in this directory or, if missing, the enclosing workspace."""
    from pier.workspace.workspace import PIER

    jobs = Path("jobs")
    places = [] if jobs.exists() else [place for place in (Path.cwd(), *Path.cwd().parents) if (place / PIER).is_dir()]
    return places[0] if places else jobs


_PLACE = click.argument("path", type=JobPath(), default=_here)


@view.command()
@_PLACE
@click.option("--host", default="127.0.0.1", help="Address to listen on; others need a token.")
@click.option("--port", type=PORT, help="Port.  [default: the first free one from 8080]")
@click.option("--open/--no-open", "open_browser", default=True, help="Open a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print a page as JSON instead of serving it.")
@click.option("--page", help="With --json: the page's address, e.g. '/jobs/NAME?view=trials&sort=-cost'.")
def serve(path: Path, host: str, port: int | None, open_browser: bool, as_json: bool, page: str | None) -> None:
    """Serve the viewer until interrupted."""
    from pier.view.library import Library

    library = Library.open(path)
    if as_json:
        _print_page(library, page or library.start)
        return
    import asyncio

    asyncio.run(_serve(library, host, port, open_browser))


@view.command()
@_PLACE
@click.option("-o", "--output", required=True, type=PATH, help="A new directory, or FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="Print what was redacted as JSON.")
def export(path: Path, output: Path, as_json: bool) -> None:
    """Write pages that open without a server. The output is a directory, or one file for a trial or a small job.

    Secrets are removed; the page redactions.html lists them with their locations.
    """
    import os

    from pier.view.export import Cleaner, Export
    from pier.view.library import Library

    made = Export(Library.open(path), Cleaner(dict(os.environ), str(Path.home())))
    made.write(output)
    report = made.cleaner.report()
    words = [f"{count} × {kind}" for kind, count in report["totals"].items()]
    lines = [f"{output}: {made.n_pages} pages", f"redacted: {', '.join(words) or 'nothing'}"]
    echo({"output": str(output), "n_pages": made.n_pages, "redacted": report}, as_json, lines)


def _print_page(library: Library, page: str) -> None:
    from urllib.parse import parse_qs, urlsplit

    from pier.view.index import Index
    from pier.view.pages import Pages

    index = Index.open(library)
    try:
        index.refresh()
        parts = urlsplit(page)
        several = parse_qs(parts.query)
        found = Pages(library, index).get(parts.path, {key: values[-1] for key, values in several.items()}, several)
        click.echo(json.dumps(found.data, indent=2))
    finally:
        index.close()


async def _serve(library: Library, host: str, port: int | None, open_browser: bool) -> None:
    import asyncio
    import signal

    from pier.view.server import serve as start

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with start(library, host, port) as viewer:
        click.echo(f"viewer: {viewer.address}  (Ctrl-C to stop)")
        if open_browser:
            click.launch(viewer.address)
        await stopped.wait()
