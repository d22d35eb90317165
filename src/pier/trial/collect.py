"""Takes files out of a sandbox into the trial's directory, and artifacts into a separate verifier's sandbox.

What cannot be taken never fails a trial; `artifacts/manifest.json` says of each artifact what became of it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from pier import files
from pier.errors import SandboxError
from pier.sandbox.compose import MAIN
from pier.sandbox.contract import Sandbox
from pier.task.config import Artifact
from pier.trial.record import TrialRecord
from pier.verifier.folders import ARTIFACTS, TESTS, VERIFIER_LOGS

LOGS_LIMIT = 512 * 1024 * 1024
"""How many bytes of logs are taken out of a sandbox at once."""

Status = Literal["ok", "failed", "empty", "skipped"]
Look = Callable[[Path, list[str]], None]


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of one artifact: `source` in the sandbox (absolute), `place` below the directory of artifacts."""

    source: str
    place: str
    status: Status
    is_directory: bool = False
    exclude: tuple[str, ...] = ()
    service: str = MAIN


async def collect_artifacts(
    sandbox: Sandbox, artifacts: Iterable[Artifact], directory: Path, *, workdir: str, record: TrialRecord
) -> list[Collected]:
    """Take the conventional directory and `artifacts` out, and write the manifest."""
    found: list[Collected] = []
    for artifact in (Artifact(source=ARTIFACTS), *artifacts):
        place = sandbox.service(artifact.service or MAIN)
        if place is None:
            record.warn(f"artifact {artifact.source}: there is no service {artifact.service!r}")
            where = artifact.destination or artifact.source.lstrip("/")
            found.append(Collected(artifact.source, where, "skipped", service=str(artifact.service)))
            continue
        row = await _collect(place, artifact, directory, workdir, found, record)
        if row is not None:
            found.append(replace(row, service=artifact.service or MAIN))
    record.redactor.tree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    rows = record.redactor.value([_manifest_row(row) for row in found])
    files.write_json(directory / "manifest.json", rows, durable=False)
    return found


async def _collect(
    sandbox: Sandbox,
    artifact: Artifact,
    directory: Path,
    workdir: str,
    before: Sequence[Collected],
    record: TrialRecord,
) -> Collected | None:
    source = str(PurePosixPath(workdir) / artifact.source)
    place = artifact.destination or source.lstrip("/")
    service = artifact.service or MAIN
    if any((row.service, row.source, row.place) == (service, source, place) for row in before):
        return None
    target = directory / place
    if os.path.lexists(target):
        inside = any(
            PurePosixPath(source).is_relative_to(r.source) and not r.exclude
            for r in before
            if r.status == "ok" and r.service == service
        )
        mirrored = inside and not artifact.destination and not artifact.exclude
        return Collected(source, place, "ok" if mirrored else "skipped", target.is_dir(), artifact.exclude)
    incoming = _unused(directory)
    try:
        left_out = await sandbox.download(source, incoming, exclude=artifact.exclude, keep_empty=False)
        is_empty = not os.path.lexists(incoming)
        is_directory = is_empty or (incoming.is_dir() and not incoming.is_symlink())
        if not is_empty:
            target.parent.mkdir(parents=True, exist_ok=True)
            incoming.rename(target)
    except (FileNotFoundError, SandboxError, OSError) as error:
        if source != ARTIFACTS:
            record.log(f"artifact {source}: not collected: {error}")
        return Collected(source, place, "empty" if source == ARTIFACTS else "failed", exclude=artifact.exclude)
    finally:
        _discard(incoming)
    if left_out:
        record.log(f"artifact {source}: left out, as neither files nor links: {', '.join(left_out[:10])}")
    return Collected(source, place, "empty" if is_empty else "ok", is_directory, artifact.exclude)


def _discard(path: Path) -> None:
    """Remove what is there, if anything is."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except NotADirectoryError:
        path.unlink()
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _manifest_row(row: Collected) -> dict[str, object]:
    kind = "directory" if row.is_directory or row.source == ARTIFACTS else "file"
    shown: dict[str, object] = {"source": row.source, "destination": f"artifacts/{row.place}", "type": kind}
    shown["status"] = row.status
    if row.service != MAIN:
        shown["service"] = row.service
    if row.exclude:
        shown["exclude"] = list(row.exclude)
    return shown


async def hand_over(sandbox: Sandbox, collected: Iterable[Collected], directory: Path, record: TrialRecord) -> None:
    """Put artifacts into a verifier's own sandbox, each at the path that it came from. Nothing of the agent's may land
    where the verifier keeps its tests and its verdict."""
    for row in collected:
        if row.status != "ok":
            continue
        if any(PurePosixPath(row.source).is_relative_to(place) for place in (TESTS, VERIFIER_LOGS)):
            record.warn(f"artifact {row.source}: not handed to the verifier, this place is the verifier's own")
            continue
        if row.is_directory:
            await sandbox.remove(row.source)
        await sandbox.upload(directory / row.place, row.source)


async def take_logs(sandbox: Sandbox, source: str, target: Path, record: TrialRecord, look: Look | None = None) -> None:
    """Take a directory of logs out into `target`, beside what is there already, which stays. Logs that cannot be taken
    are a warning: what the agent or the tests did to that place is not the trial's failure. `look` sees the directory
    as it came, before secrets are taken out of it, and what was left out. Only the user may read what is kept, since
    logs hold conversations."""
    target.mkdir(parents=True, exist_ok=True)
    incoming = _unused(target)
    try:
        left_out = await sandbox.download(source, incoming, max_bytes=LOGS_LIMIT, keep_empty=False)
        if not os.path.lexists(incoming):
            return
        if look is not None and incoming.is_dir() and not incoming.is_symlink():
            look(incoming, left_out)
        await asyncio.to_thread(record.redactor.tree, incoming, mode=0o600)
        if not incoming.is_dir() or incoming.is_symlink():
            record.warn(f"{source}: not a directory, not collected")
            return
        for name in os.listdir(incoming):
            if not os.path.lexists(target / name):
                (incoming / name).rename(target / name)
    except FileNotFoundError:
        return
    except (SandboxError, OSError) as error:
        record.warn(f"{source}: not collected: {error}")
    finally:
        _discard(incoming)


def _unused(target: Path) -> Path:
    """A name beside `target`, on the same file system, for what is not yet known to belong there."""
    return target.with_name(f".incoming.{secrets.token_hex(6)}")
