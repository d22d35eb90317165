"""Copies files between a sandbox and the trial's directory: artifacts, logs, and the sandbox's state.

An agent's manipulation of its files never fails a trial; `artifacts/manifest.json` lists the status of each artifact.
A copy that fails on this machine does: the trial has no verdict. Paths that came out of the sandbox are never resolved
on this machine: all of them go through `pier.tree`.

The state of a sandbox is kept so that it can be graded again without the agent. The steps of a multi-step task keep
theirs below `steps/<name>`. It does not include tests and the verifier's logs.

    <trial>/state/files.tar      every file that differs from the image, with owner and mode
    <trial>/state/removed.json   the paths of the image that were removed in the sandbox
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from pier import files
from pier.beneath import remove
from pier.errors import SandboxError, StorageError
from pier.files import write_json
from pier.record import FILE_NAMES
from pier.sandbox.compose import MAIN
from pier.sandbox.contract import DISK_FAULTS, FileInfo, Sandbox, Stream
from pier.sandbox.linux.changes import measure_tree
from pier.task.model import Artifact
from pier.tree import Tree, TreeError, find_entry
from pier.trial.environment import TaskSandbox, ending
from pier.trial.plan import disk_limit
from pier.trial.record import TrialRecord
from pier.trial.spec import user_text
from pier.verifier.changes import ARTIFACTS, TESTS, VERIFIER_LOGS, Note, judge_artifact, limited

LOGS_LIMIT = 512 * 1024 * 1024
"""Maximum bytes of a directory of logs."""

ARTIFACT_LIMIT = 16 * 1024**3
"""Maximum bytes of an artifact."""
_BLOCK = 4096

_AGENT_CODES = frozenset(
    {
        *("os", "not_found", "not_regular", "not_directory", "too_large", "too_deep"),
        *("unsafe_archive", "broken_archive", "copy_lost"),
    }
)
"""Codes of errors that an agent can cause, by its files or by killing the process that copies them. All others are
infrastructure faults."""

SHELL = ("/bin/sh", "-c", 'command -v bash >/dev/null 2>&1 && exec bash -c "$0"; exec sh -c "$0"')
"""Runs the next argument as a shell command: in bash if the image has it, since tasks are written for it."""

_PRE_ARTIFACTS = "/tmp/.pier-pre-artifacts.sh"
_PRE_ARTIFACTS_SECONDS = 300.0

_CONVENTIONAL = Artifact(source=ARTIFACTS)
Status = Literal["ok", "failed", "empty", "skipped"]
Look = Callable[[Tree, list[str]], None]


@dataclass(frozen=True, slots=True)
class Collected:
    """The status of an artifact: `source` is its absolute path in the sandbox, `place` its path below the directory of
    artifacts. `mirrored`: it is a part of an earlier artifact."""

    source: str
    place: str
    status: Status
    is_directory: bool = False
    exclude: tuple[str, ...] = ()
    service: str = MAIN
    mirrored: bool = False
    reason: str = ""
    """Why it was not collected, if it is too large."""


async def collect(
    environment: TaskSandbox, index: int, directory: Path, extra: Sequence[Artifact] = ()
) -> list[Collected]:
    """Run the hooks of a step, then copy its artifacts and the `extra` ones to `directory`, if the record or a separate
    verifier needs them. Only disk faults fail the trial."""
    sandbox, record, step = environment.sandbox, environment.record, environment.task.steps[index]
    if (script := environment.task.pre_artifacts) is not None:
        argv = ["bash", _PRE_ARTIFACTS]
        await _run_hook(environment, sandbox, argv, script.name, None, _PRE_ARTIFACTS_SECONDS, script)
    for hook in sorted(step.collect, key=lambda hook: hook.service != MAIN):
        place = sandbox.service(hook.service)
        if place is None:
            record.warn(f"collect hook {hook.command!r}: unknown service {hook.service!r}")
            continue
        argv = [*SHELL, hook.command]
        await _run_hook(environment, place, argv, hook.command, user_text(hook.user), hook.timeout_sec)
    if not record.kept and step.verifier_mode != "separate":
        return []
    most = ARTIFACT_LIMIT
    if step.verifier_mode == "separate":
        disk = disk_limit(step.verifier_environment.table, environment.starter.choice)
        most = min(disk or most, most)
    return await _collect_all(environment, (_CONVENTIONAL, *step.artifacts, *extra), directory, most)


async def _run_hook(
    environment: TaskSandbox,
    sandbox: Sandbox,
    argv: list[str],
    name: str,
    user: str | None,
    seconds: float,
    script: Path | None = None,
) -> None:
    cwd, record = environment.workdir if sandbox is environment.sandbox else None, environment.record
    try:
        if script is not None:
            await sandbox.upload(script, _PRE_ARTIFACTS)
        result = await sandbox.exec(argv, cwd=cwd, user=user, timeout=seconds)
    except SandboxError as error:
        if error.code in DISK_FAULTS:
            raise StorageError(f"collect hook {name!r}: cannot be uploaded: {error}") from error
        record.warn(f"collect hook {name!r}: {error}")
        return
    if not result.ok:
        record.warn(f"collect hook {name!r} {ending(result)}: {result.error_text.strip()[-300:]}")


async def _collect_all(
    environment: TaskSandbox, artifacts: Iterable[Artifact], directory: Path, most: int
) -> list[Collected]:
    """Copy artifacts of at most `most` bytes each and write the manifest. Until `seal_artifacts` they are unchanged and
    readable for this user only."""
    sandbox, workdir, record = environment.sandbox, environment.workdir, environment.record
    collected: list[Collected] = []
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    for artifact in artifacts:
        service = sandbox.service(artifact.service or MAIN)
        if service is None:
            record.warn(f"artifact {artifact.source}: unknown service {artifact.service!r}")
            place = artifact.destination or artifact.source.lstrip("/")
            collected.append(Collected(artifact.source, place, "skipped", service=str(artifact.service)))
            continue
        row = await _collect(service, artifact, directory, workdir, collected, record, most)
        if row is not None:
            collected.append(replace(row, service=artifact.service or MAIN))
    rows = record.redactor.value([_manifest_row(row) for row in collected])
    files.write_json(directory / "manifest.json", rows, durable=False)
    return collected


async def seal_artifacts(directory: Path, record: TrialRecord) -> None:
    """Remove secrets from collected artifacts, once no verifier needs them. Idempotent."""
    try:
        if directory.stat().st_mode & 0o055:
            return
    except FileNotFoundError:
        return
    if record.redactor:
        with Tree(directory) as kept:
            await asyncio.to_thread(record.redactor.tree, kept)
    directory.chmod(0o755)


async def _collect(
    sandbox: Sandbox,
    artifact: Artifact,
    directory: Path,
    workdir: str,
    before: Sequence[Collected],
    record: TrialRecord,
    most: int,
) -> Collected | None:
    source = str(PurePosixPath(workdir) / artifact.source)
    place = artifact.destination or source.lstrip("/")
    service, reason = artifact.service or MAIN, ""
    if any((row.service, row.source, row.place) == (service, source, place) for row in before):
        return None
    if not place:
        record.warn(f"artifact {source}: not collected: the whole root needs a destination")
        return Collected(source, place, "skipped", True, artifact.exclude)
    with Tree(directory) as kept:
        if (there := kept.find(place)) is not None:
            inside = any(
                PurePosixPath(source).is_relative_to(r.source) and not r.exclude
                for r in before
                if r.status == "ok" and r.service == service
            )
            mirrored = inside and not artifact.destination and not artifact.exclude
            status: Status = "ok" if mirrored else "skipped"
            is_directory = there.kind == "directory"
            return Collected(source, place, status, is_directory, artifact.exclude, mirrored=mirrored)
        try:
            status, is_directory = await _take(sandbox, source, artifact.exclude, kept, place, record, most)
        except (FileNotFoundError, SandboxError, TreeError) as error:
            if isinstance(error, SandboxError) and error.code not in _AGENT_CODES:
                raise
            if getattr(error, "code", "") == "too_large":
                reason = f"not collected: larger than {most} bytes, or too many files"
            if source != ARTIFACTS:
                record.log(f"artifact {source}: not collected: {error}")
            status, is_directory = "empty" if source == ARTIFACTS else "failed", False
    return Collected(source, place, status, is_directory, artifact.exclude, reason=reason)


async def _take(
    sandbox: Sandbox, source: str, exclude: tuple[str, ...], kept: Tree, place: str, record: TrialRecord, most: int
) -> tuple[Status, bool]:
    """Copy an artifact to `place`; return its status and whether it is a directory."""
    incoming = _unused(kept.path)
    try:
        left_out = await sandbox.download(source, incoming, exclude=exclude, max_bytes=most, keep_empty=False)
        entry = find_entry(incoming)
        # Small files take more space than their size.
        if most < ARTIFACT_LIMIT and await asyncio.to_thread(measure_tree, str(incoming)) > most:
            raise TreeError("too_large", f"it takes more than {most} bytes of disk: {source}")
        if entry is not None:
            _store(kept, incoming, place)
    finally:
        remove(str(incoming))
    if left_out:
        record.log(f"artifact {source}: left out, as neither files nor links: {', '.join(left_out[:10])}")
    return ("ok", entry.kind == "directory") if entry is not None else ("empty", True)


def _store(kept: Tree, incoming: Path, place: str) -> None:
    try:
        kept.take(incoming, place)
    except OSError as error:
        raise StorageError(f"cannot keep {kept.path}/{place}: {error.strerror or error}") from error


def _manifest_row(row: Collected) -> dict[str, object]:
    kind = "directory" if row.is_directory or row.source == ARTIFACTS else "file"
    table: dict[str, object] = {"source": row.source, "destination": f"artifacts/{row.place}", "type": kind}
    table["status"] = row.status
    if row.service != MAIN:
        table["service"] = row.service
    if row.exclude:
        table["exclude"] = list(row.exclude)
    return table


async def hand_over(
    sandbox: Sandbox, collected: Iterable[Collected], directory: Path, *, workdir: str, record: TrialRecord
) -> list[Note]:
    """Copy artifacts into a separate verifier's sandbox, at their original paths. Files in the verifier's own
    directories and links that lead out of their artifact are left out. Returns notes on these, and on files that could
    influence the verifier."""
    notes: list[Note] = []
    with Tree(directory) as kept:
        for row in collected:
            if row.reason:
                notes.append(Note("artifact", row.reason, row.source))
            if row.status != "ok" or row.mirrored:
                continue
            if any(PurePosixPath(row.source).is_relative_to(place) for place in (TESTS, VERIFIER_LOGS)):
                record.warn(f"artifact {row.source}: not handed to the verifier, this path is the verifier's own")
                continue
            if not row.is_directory and PurePosixPath(workdir).is_relative_to(row.source):
                detail = "not handed over: it is a file, and the verifier works in or below a directory of this path"
                notes.append(Note("tests", detail, row.source, stopped=True))
                continue
            judged = await asyncio.to_thread(judge_artifact, kept, row.place, row.source, workdir)
            notes += judged.notes
            if not judged.dropped:
                await _put(sandbox, kept, row, judged.left_out)
    return limited(notes)


def space_for(directory: Path) -> int:
    """Bytes of disk that the artifacts in a directory may take on any file system."""
    with Tree(directory) as kept:
        return sum(entry.size + _BLOCK for entry in kept.entries(limit=sys.maxsize))


async def _put(sandbox: Sandbox, kept: Tree, row: Collected, left_out: frozenset[str]) -> None:
    """Copy an artifact. No process of the agent runs in this sandbox, so a lost copy is the machine's fault."""
    try:
        if not any(PurePosixPath(own).is_relative_to(row.source) for own in (TESTS, VERIFIER_LOGS)):
            try:  # the path may be of another kind in the verifier's image
                await sandbox.remove(row.source)
            except SandboxError as error:
                if error.code != "not_directory":
                    raise
        with kept.reached(row.place) as source:
            await sandbox.upload(source, row.source, leave_out=left_out)
    except (SandboxError, OSError) as error:
        if isinstance(error, SandboxError) and error.code not in {*DISK_FAULTS, "copy_lost"}:
            raise
        raise StorageError(f"artifact {row.source}: cannot be handed to the verifier: {error}") from error


async def take_logs(sandbox: Sandbox, source: str, target: Path, record: TrialRecord, look: Look | None = None) -> None:
    """Copy a directory of logs to `target`, except files that exist there or have the name of a recording, which is the
    gateway's. If the agent or the tests made it unreadable that is a warning. `look` receives the directory before
    secrets are removed, and the paths that were left out. Only this user may read the copy, since logs contain
    conversations."""
    target.mkdir(parents=True, exist_ok=True)
    incoming = _unused(target)
    try:
        left_out = await sandbox.download(source, incoming, max_bytes=LOGS_LIMIT, keep_empty=False)
        entry = find_entry(incoming)
        if entry is not None and entry.kind != "directory":
            record.warn(f"{source}: not a directory, not collected")
        elif entry is not None:
            with Tree(incoming) as logs:
                if look is not None:
                    look(logs, left_out)
                if record.redactor or not _is_small(logs):
                    await asyncio.to_thread(record.redactor.tree, logs, mode=0o600)
                else:
                    record.redactor.tree(logs, mode=0o600)
                _merge(logs, target)
    except FileNotFoundError:
        return
    except (SandboxError, TreeError) as error:
        if isinstance(error, SandboxError) and error.code not in _AGENT_CODES:
            raise
        record.warn(f"{source}: not collected: {error}")
    finally:
        remove(str(incoming))


def _is_small(logs: Tree) -> bool:
    """Whether a directory has only a few files, which are faster to process without a thread."""
    entries = logs.listed()
    return len(entries) <= 16 and all(entry.kind == "file" for entry in entries)


def _merge(logs: Tree, target: Path) -> None:
    """Move the entries of a directory to another, except existing names and those of recordings."""
    with Tree(target) as kept:
        for name in os.listdir(logs.fd):
            if name not in FILE_NAMES and kept.find(name) is None:
                _store(kept, logs.path / name, name)


def _unused(target: Path) -> Path:
    """A temporary path next to `target`, on the same file system."""
    return target.with_name(f".incoming.{secrets.token_hex(6)}")


STATE = "state"
_FILES, _REMOVED = "files.tar", "removed.json"
_SECONDS = 900.0
_CHUNK = 1 << 20
_CHANGED_MEANWHILE = 1
"""Exit code of GNU tar when a file changed while it was read. Other tars use it, without output, for an unknown
option."""

_LIMIT = 64 * 1024**3
"""Maximum bytes of a state, including holes of sparse files."""
_NOT_STATE = (TESTS, VERIFIER_LOGS)


async def keep_state(sandbox: Sandbox, directory: Path) -> None:
    """Write the sandbox's state to `directory`; `SandboxError` if the backend or the task does not support it. The
    image's tar archives it at once; if the image has no GNU tar pier copies each path."""
    if others := [name for name in sandbox.services() if name != MAIN]:
        message = f"no state is kept: that of other services ({', '.join(others)}) cannot be restored"
        raise SandboxError(message, code="no_state", retryable=False)
    changes = await sandbox.changes()
    if changes is None:
        message = "no state is kept: this backend cannot list changes"
        raise SandboxError(message, code="no_state", blame="user", retryable=False)
    kept = [change.path for change in changes if change.kind != "removed" and not is_left_out(change.path)]
    directory.mkdir(parents=True)
    (directory / _FILES).touch(0o600, exist_ok=False)  # its secrets are not removed
    if not await _keep_at_once(sandbox, kept, directory / _FILES):
        await _keep_each(sandbox, kept, directory / _FILES)
    write_json(directory / _REMOVED, [change.path for change in changes if change.kind == "removed"], durable=False)


async def _keep_at_once(sandbox: Sandbox, paths: list[str], target: Path) -> bool:
    """Archive paths with the image's tar, and return whether it succeeded."""
    with target.open("wb") as stream:

        def save(name: Stream, data: bytes) -> None:
            if name == "stdout":
                _check_size(stream.tell() + len(data))
                stream.write(data)

        result = await sandbox.exec(
            ["tar", "-C", "/", "--no-recursion", "--numeric-owner", "--null", "-T", "-", "-cf", "-"],
            stdin="\0".join(_with_parents(paths)).encode(errors="surrogateescape"),
            user="0",
            timeout=_SECONDS,
            on_output=save,
        )
        if result.timed_out:
            raise SandboxError(f"no state is kept: it took longer than {_SECONDS:g} s", retryable=False)
        return stream.tell() > 0 and result.exit_code in (0, _CHANGED_MEANWHILE)


async def _keep_each(sandbox: Sandbox, paths: list[str], target: Path) -> None:
    """Archive paths without the image's tar, except those that vanished or changed their kind."""
    files = {path.lstrip("/") for path in paths}
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in _with_parents(paths):
            with suppress(FileNotFoundError):
                if path in files:
                    await _add_file(archive, sandbox, path)
                else:
                    archive.addfile(_directory(path, await sandbox.stat(f"/{path}")))


def _directory(path: str, found: FileInfo) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, found.mode, found.uid, found.gid
    entry.mtime = int(found.mtime)
    return entry


async def _add_file(archive: tarfile.TarFile, sandbox: Sandbox, path: str) -> None:
    with tempfile.SpooledTemporaryFile(_CHUNK) as stream:
        async for chunk in sandbox.get_tar(f"/{path}"):
            _check_size(archive.offset + stream.write(chunk))
        stream.seek(0)
        with tarfile.open(fileobj=stream) as one:
            for entry in one:
                if entry.name == ".":
                    entry.name, entry.pax_headers = path, {}
                    archive.addfile(entry, one.extractfile(entry) if entry.isfile() else None)


def _check_size(size: int) -> None:
    if size > _LIMIT:
        raise SandboxError(f"no state is kept: it is larger than {_LIMIT} bytes", retryable=False)


async def restore_state(sandbox: Sandbox, directory: Path) -> None:
    """Restore a kept state in a sandbox of the same image."""
    for change in await sandbox.changes() or ():
        if change.kind == "added" and not is_left_out(change.path):
            await sandbox.remove(change.path)
    for path in json.loads((directory / _REMOVED).read_text()):
        await sandbox.remove(path)
    await sandbox.put_tar(_chunks(directory / _FILES), "/")


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as stream:
        while data := stream.read(_CHUNK):
            yield data


def has_state(directory: Path) -> bool:
    """Whether `directory` has a complete state. The list of removed paths is written last."""
    return (directory / _REMOVED).is_file()


def is_left_out(path: str) -> bool:
    """Whether a path is left out of every state."""
    return any(path == top or path.startswith(f"{top}/") for top in _NOT_STATE)


def _with_parents(paths: list[str]) -> list[str]:
    """The paths relative to the root, each after its parent directories."""
    relative = [PurePosixPath(path.lstrip("/")) for path in paths]
    return list(dict.fromkeys(str(each) for path in relative for each in (*reversed(path.parents[:-1]), path)))
