"""The near side of `pier verify`: shows the tests as they run, prints the reward, and waits for changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from pier.cli.workspace import _shown
from pier.trial.result import TrialResult, read_result
from pier.workspace.client import call
from pier.workspace.workspace import PIER, Workspace

STDOUT = Path("verifier") / "test-stdout.txt"
_PAUSE = 0.25
_MANY = 50_000


def run(workspace: Workspace, options: dict[str, Any], *, as_json: bool = False) -> int:
    """Verify once and print the outcome; 0 if there is a reward."""
    directory = options["trial_dir"] or workspace.new_trial_directory()
    directory = directory.absolute()
    result = asyncio.run(_verify(workspace, options, directory, quiet=as_json))
    if as_json:
        error = result.exception_info
        row = {
            "directory": str(directory),
            "rewards": result.rewards,
            "error": error and {"code": error.code, "message": error.exception_message},
            "output": _read(directory / STDOUT),
        }
        click.echo(json.dumps(row, indent=2))
    else:
        _print(directory, result)
    return 0 if result.has_verdict else 1


async def _verify(workspace: Workspace, options: dict[str, Any], directory: Path, *, quiet: bool) -> TrialResult:
    request = {name: options[name] for name in ("agent", "session", "step", "in_place")}
    request |= {"op": "verify", "trial_dir": str(directory), "session_dir": options["session_dir"]}
    printed = _Tail(directory / STDOUT)
    work = asyncio.create_task(
        _verify_here(workspace, options, directory) if workspace.is_host else _ask(workspace, request)
    )
    try:
        while not (await asyncio.wait({work}, timeout=0.1))[0]:
            if not quiet:
                printed.show()
        await work
    except BaseException:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise
    if not quiet:
        printed.show(last=True)
    return read_result(directory)


async def _ask(workspace: Workspace, request: dict[str, Any]) -> None:
    await call(workspace, request, lambda line: click.echo(_shown(line), err=True))


async def _verify_here(workspace: Workspace, options: dict[str, Any], directory: Path) -> None:
    """In host mode: in a sandbox that lasts as long as the tests."""
    from pier.trial.spec import open_services
    from pier.workspace.verify import VerifyOrder, verify

    session_dir = options["session_dir"]
    order = VerifyOrder(
        step=options["step"],
        agent=options["agent"],
        session=options["session"],
        session_dir=Path(session_dir) if session_dir else None,
        trial_dir=directory,
    )
    async with open_services(workspace.config.backend, label=f"verify {workspace.root}") as services:
        await verify(workspace, services, order, lambda line: click.echo(_shown(line), err=True))


class _Tail:
    """Prints what is added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def show(self, *, last: bool = False) -> None:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._at)
                data = stream.read()
        except OSError:
            return
        if not last:
            data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        if data:
            click.echo(_shown(data.decode(errors="replace")), nl=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _print(directory: Path, result: TrialResult) -> None:
    if result.rewards is not None:
        for name, value in result.rewards.items():
            click.echo(f"{name}: {value:g}")
    elif result.exception_info is not None:
        click.echo(f"no reward: {_shown(result.exception_info.exception_message)}", err=True)
    for note in result.integrity.notes if result.integrity else ():
        click.echo(f"note: {_shown(note.detail)}", err=True)
    for warning in result.pier.warnings if result.pier else ():
        click.echo(f"warning: {_shown(warning)}", err=True)
    click.echo(f"saved: {os.path.relpath(directory)}")


def watch(workspace: Workspace, options: dict[str, Any]) -> NoReturn:
    """Verify, and again after each change of the task or the workspace, until Ctrl-C."""
    while True:
        seen = _fingerprint(workspace)
        run(workspace, options)
        click.echo("waiting for changes; Ctrl-C ends", err=True)
        _wait_for_change(lambda: _fingerprint(workspace), seen)


def _wait_for_change(look: Callable[[], int], seen: int) -> None:
    """Return when something changed and is quiet again."""
    while (now := look()) == seen:
        time.sleep(_PAUSE)
    while (later := look()) != now:
        now = later
        time.sleep(_PAUSE)


def _fingerprint(workspace: Workspace) -> int:
    tops = [workspace.root, *([workspace.config.task_path] if workspace.config.task_path else [])]
    return hash(tuple(row for top in tops for row in _rows(top)))


def _rows(top: Path) -> Iterator[tuple[str, int, int]]:
    left = _MANY
    for directory, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name not in (PIER, ".git", "__pycache__"))
        for name in sorted(files):
            left -= 1
            if left < 0:
                return
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                yield path, found.st_mtime_ns, found.st_size
