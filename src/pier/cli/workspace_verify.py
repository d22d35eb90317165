"""Client side of `pier verify`: prints the output of the tests and the reward, and watches for changes."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pier.cli.main import without_controls
from pier.workspace.client import PIER, WorkspacePlace, call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pier.workspace.workspace import Workspace

_PAUSE = 0.25
_MANY = 50_000


def run(place: WorkspacePlace | Workspace, options: dict[str, Any], *, as_json: bool = False) -> int:
    """Verify once, print the outcome, and return 0 if there is a reward."""
    printed = bytearray()
    verdict = _verify(place, options, printed.extend if as_json else _print_output)
    if as_json:
        row = {name: verdict[name] for name in ("directory", "rewards", "error")}
        click.echo(json.dumps(row | {"output": printed.decode(errors="replace")}, indent=2))
    else:
        _print(verdict)
    return 0 if verdict["has_verdict"] else 1


def _verify(
    place: WorkspacePlace | Workspace, options: dict[str, Any], on_output: Callable[[bytes], None]
) -> dict[str, Any]:
    if options["trial_dir"] is not None:
        options = {**options, "trial_dir": str(options["trial_dir"].absolute())}
    if not isinstance(place, WorkspacePlace) and place.is_host:
        import asyncio

        return asyncio.run(_verify_here(place, options, on_output))
    if not options["session_dir"]:
        return call(place, {"op": "verify", **options}, _say, on_output)
    import tempfile
    from pathlib import Path

    from pier.workspace.capture import session_place
    from pier.workspace.workspace import Workspace

    with tempfile.TemporaryDirectory(prefix="pier-verify.") as scratch:
        found = session_place(Workspace.open(Path(place.root)), options["session_dir"], Path(scratch) / "logs")
        return call(place, {"op": "verify", **options, "session_dir": str(found)}, _say, on_output)


async def _verify_here(
    workspace: Workspace, options: dict[str, Any], on_output: Callable[[bytes], None]
) -> dict[str, Any]:
    """Verify a workspace without a sandbox, in a temporary one."""
    from dataclasses import replace

    from pier.trial.spec import open_services
    from pier.workspace.verify import VerifyOrder, verify

    workspace.check_known()
    async with open_services(workspace.config.backend, label=f"verify {workspace.root}") as opened:
        services = replace(opened, environ={**os.environ, **workspace.environment()})
        return await verify(workspace, services, VerifyOrder(**options), _say, on_output=on_output)


def _say(line: str) -> None:
    click.echo(without_controls(line), err=True)


def _print_output(data: bytes) -> None:
    click.echo(without_controls(data.decode(errors="replace")), nl=False)


def _print(verdict: dict[str, Any]) -> None:
    for name, value in (verdict["rewards"] or {}).items():
        click.echo(f"{name}: {value:g}")
    if verdict["rewards"] is None and verdict["error"]:
        click.echo(f"no reward: {without_controls(verdict['error']['message'])}", err=True)
        if hint := verdict["error"]["hint"]:
            click.echo(f"hint: {without_controls(hint)}", err=True)
    for kind in ("note", "warning"):
        for text in verdict[f"{kind}s"]:
            click.echo(f"{kind}: {without_controls(text)}", err=True)
    click.echo(f"saved: {os.path.relpath(verdict['directory'])}")


def watch(place: WorkspacePlace | Workspace, options: dict[str, Any]) -> NoReturn:
    """Verify now and after each change of the task or the workspace, until Ctrl-C."""
    config = place.config if isinstance(place, WorkspacePlace) else place.config.model_dump()
    tops = [str(top) for top in (place.root, config["task_path"]) if top]
    if not config.get("mounted", True):
        click.echo("warning: only the task is watched, since the workspace's files are in the sandbox", err=True)
    while True:
        seen = _fingerprint(tops)
        run(place, options)
        click.echo("waiting for changes; press Ctrl-C to stop", err=True)
        while (now := _fingerprint(tops)) == seen:
            time.sleep(_PAUSE)
        while (later := _fingerprint(tops)) != now:  # wait until the changes have settled
            now = later
            time.sleep(_PAUSE)


def _fingerprint(tops: list[str]) -> int:
    return hash(tuple(row for top in tops for row in _rows(top)))


def _rows(top: str) -> Iterator[tuple[str, int, int]]:
    left = _MANY
    for directory, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name not in (PIER, ".git", "__pycache__"))
        for name in sorted(files):
            left -= 1
            if left < 0:
                return
            path = os.path.join(directory, name)
            try:
                found = os.lstat(path)
            except OSError:
                continue
            yield path, found.st_mtime_ns, found.st_size
