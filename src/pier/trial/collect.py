"""Takes files out of a sandbox into the trial's directory, and brings them back: artifacts, logs, the agent's state.

What an agent did to its own files never fails a trial; `artifacts/manifest.json` lists what became of each artifact.
What this machine could not take, keep or hand over does: such a trial has no verdict. Nothing that came out of the
sandbox is resolved here: every path below goes through `pier.tree`.

The state is what an agent left behind, kept so that it can be graded again without the agent. A step of a multi-step
task keeps its own below `steps/<name>`. Tests and the verifier's logs are never part of it.

    <trial>/state/files.tar      every file that differs from the image, with owner and mode
    <trial>/state/removed.json   what the image has and the sandbox no longer had
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
from pier.trial.environment import TaskSandbox
from pier.trial.plan import disk_limit
from pier.trial.record import TrialRecord
from pier.trial.spec import user_text
from pier.verifier.changes import ARTIFACTS, TESTS, VERIFIER_LOGS, Note, judge_artifact, limited

LOGS_LIMIT = 512 * 1024 * 1024
"""How many bytes of logs are taken out of a sandbox at once."""

ARTIFACT_LIMIT = 16 * 1024**3
"""How many bytes one artifact may have."""
_BLOCK = 4096

_AGENTS_DOING = frozenset(
    {
        "os",
        "not_found",
        "not_regular",
        "not_directory",
        "too_large",
        "too_deep",
        "unsafe_archive",
        "broken_archive",
        "copy_lost",
    }
)
"""Codes of errors that an agent can bring about: by what it made of its files, or by killing the process that copies
them. All others are faults of the infrastructure."""


SHELL = ("/bin/sh", "-c", 'command -v bash >/dev/null 2>&1 && exec bash -c "$0"; exec sh -c "$0"')
"""Runs the next argument as a shell line: in bash where the image has one, since tasks are written for it."""

_PRE_ARTIFACTS = "/tmp/.pier-pre-artifacts.sh"
_PRE_ARTIFACTS_SECONDS = 300.0

_CONVENTIONAL = Artifact(source=ARTIFACTS)
Status = Literal["ok", "failed", "empty", "skipped"]
Look = Callable[[Tree, list[str]], None]


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of one artifact: `source` in the sandbox (absolute), `place` below the directory of artifacts.
    `mirrored`: it came as a part of an artifact before it."""

    source: str
    place: str
    status: Status
    is_directory: bool = False
    exclude: tuple[str, ...] = ()
    service: str = MAIN
    mirrored: bool = False
    reason: str = ""
    """Why it is not there, if it is too large."""


async def collect(
    environment: TaskSandbox, index: int, directory: Path, extra: Sequence[Artifact] = ()
) -> list[Collected]:
    """Run the hooks of a step, then take its artifacts and the `extra` ones out into `directory`, unless neither the
    trial's record nor a verifier gets them. Of these only faults of a disk fail the trial."""
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
    artifacts = (*step.artifacts, *extra)
    most = ARTIFACT_LIMIT
    if step.verifier_mode == "separate":
        disk = disk_limit(step.verifier_environment.table, environment.starter.choice)
        most = min(disk or most, most)
    return await collect_artifacts(sandbox, artifacts, directory, workdir=environment.workdir, record=record, most=most)


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
        how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
        record.warn(f"collect hook {name!r} {how}: {result.error_text.strip()[-300:]}")


async def collect_artifacts(
    sandbox: Sandbox,
    artifacts: Iterable[Artifact],
    directory: Path,
    *,
    workdir: str,
    record: TrialRecord,
    most: int = ARTIFACT_LIMIT,
) -> list[Collected]:
    """Take the conventional directory and `artifacts` out, each of at most `most` bytes, and write the manifest. They
    are as the agent left them, for this user's eyes only, until `seal_artifacts`."""
    found: list[Collected] = []
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    for artifact in (_CONVENTIONAL, *artifacts):
        place = sandbox.service(artifact.service or MAIN)
        if place is None:
            record.warn(f"artifact {artifact.source}: unknown service {artifact.service!r}")
            where = artifact.destination or artifact.source.lstrip("/")
            found.append(Collected(artifact.source, where, "skipped", service=str(artifact.service)))
            continue
        row = await _collect(place, artifact, directory, workdir, found, record, most)
        if row is not None:
            found.append(replace(row, service=artifact.service or MAIN))
    rows = record.redactor.value([_manifest_row(row) for row in found])
    files.write_json(directory / "manifest.json", rows, durable=False)
    return found


async def seal_artifacts(directory: Path, record: TrialRecord) -> None:
    """Take secrets out of collected artifacts, when no verifier needs them any more. Idempotent."""
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
            if isinstance(error, SandboxError) and error.code not in _AGENTS_DOING:
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
    """Take one artifact out; its status, and whether it is a directory. Small files take more space than they have
    bytes."""
    incoming = _unused(kept.path)
    try:
        left_out = await sandbox.download(source, incoming, exclude=exclude, max_bytes=most, keep_empty=False)
        came = find_entry(incoming)
        if most < ARTIFACT_LIMIT and await asyncio.to_thread(measure_tree, str(incoming)) > most:
            raise TreeError("too_large", f"it takes more than {most} bytes of disk: {source}")
        if came is not None:
            _store(kept, incoming, place)
    finally:
        remove(str(incoming))
    if left_out:
        record.log(f"artifact {source}: left out, as neither files nor links: {', '.join(left_out[:10])}")
    return ("ok", came.kind == "directory") if came is not None else ("empty", True)


def _store(kept: Tree, incoming: Path, place: str) -> None:
    try:
        kept.take(incoming, place)
    except OSError as error:
        raise StorageError(f"cannot keep {kept.path}/{place}: {error.strerror or error}") from error


def _manifest_row(row: Collected) -> dict[str, object]:
    kind = "directory" if row.is_directory or row.source == ARTIFACTS else "file"
    shown: dict[str, object] = {"source": row.source, "destination": f"artifacts/{row.place}", "type": kind}
    shown["status"] = row.status
    if row.service != MAIN:
        shown["service"] = row.service
    if row.exclude:
        shown["exclude"] = list(row.exclude)
    return shown


async def hand_over(
    sandbox: Sandbox, collected: Iterable[Collected], directory: Path, *, workdir: str, record: TrialRecord
) -> list[Note]:
    """Put artifacts into a verifier's own sandbox, each at the path that it came from. Nothing of the agent's may land
    where the verifier keeps its tests and its verdict, and no link may lead out of its artifact; the notes say what was
    left out, and what could steer the verifier."""
    notes: list[Note] = []
    with Tree(directory) as kept:
        for row in collected:
            if row.reason:
                notes.append(Note("artifact", row.reason, row.source))
            if row.status != "ok" or row.mirrored:
                continue
            if any(PurePosixPath(row.source).is_relative_to(place) for place in (TESTS, VERIFIER_LOGS)):
                record.warn(f"artifact {row.source}: not handed to the verifier, this place is the verifier's own")
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
    """How many bytes of disk the artifacts in a directory may take on any file system."""
    with Tree(directory) as kept:
        return sum(entry.size + _BLOCK for entry in kept.entries(limit=sys.maxsize))


async def _put(sandbox: Sandbox, kept: Tree, row: Collected, left_out: frozenset[str]) -> None:
    """Nothing of the agent's runs in this sandbox, so a copy that is killed there is the machine's fault."""
    try:
        if not any(PurePosixPath(own).is_relative_to(row.source) for own in (TESTS, VERIFIER_LOGS)):
            await _clear(sandbox, row.source)
        with kept.reached(row.place) as source:
            await sandbox.upload(source, row.source, leave_out=left_out)
    except (SandboxError, OSError) as error:
        if isinstance(error, SandboxError) and error.code not in {*DISK_FAULTS, "copy_lost"}:
            raise
        raise StorageError(f"artifact {row.source}: cannot be handed to the verifier: {error}") from error


async def _clear(sandbox: Sandbox, path: str) -> None:
    """Remove what the verifier's image has at a path, which may be of another kind than the artifact."""
    try:
        await sandbox.remove(path)
    except SandboxError as error:
        if error.code != "not_directory":
            raise


async def take_logs(sandbox: Sandbox, source: str, target: Path, record: TrialRecord, look: Look | None = None) -> None:
    """Take a directory of logs out into `target`, next to what is there already, which stays. Names of recordings are
    the gateway's: none comes out. What the agent or the
    tests made of that place is a warning, not the trial's failure. `look` sees the directory as it came, before secrets
    are taken out of it, and what was left out. Only the user may read what is kept, since logs hold conversations."""
    target.mkdir(parents=True, exist_ok=True)
    incoming = _unused(target)
    try:
        left_out = await sandbox.download(source, incoming, max_bytes=LOGS_LIMIT, keep_empty=False)
        came = find_entry(incoming)
        if came is not None and came.kind != "directory":
            record.warn(f"{source}: not a directory, not collected")
        elif came is not None:
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
        if isinstance(error, SandboxError) and error.code not in _AGENTS_DOING:
            raise
        record.warn(f"{source}: not collected: {error}")
    finally:
        remove(str(incoming))


def _is_small(logs: Tree) -> bool:
    """Whether a directory holds a few files and nothing else, so that a thread would cost more than it saves."""
    entries = logs.listed()
    return len(entries) <= 16 and all(entry.kind == "file" for entry in entries)


def _merge(logs: Tree, target: Path) -> None:
    """Move what is in a directory to another, but for names that are taken there and those of recordings."""
    with Tree(target) as kept:
        for name in os.listdir(logs.fd):
            if name not in FILE_NAMES and kept.find(name) is None:
                _store(kept, logs.path / name, name)


def _unused(target: Path) -> Path:
    """A name next to `target`, on the same file system, for what is not yet known to belong there."""
    return target.with_name(f".incoming.{secrets.token_hex(6)}")


STATE = "state"
_FILES, _REMOVED = "files.tar", "removed.json"
_SECONDS = 900.0
_CHUNK = 1 << 20
_CHANGED_MEANWHILE = 1
"""What tar ends with when a process that still runs wrote to a file while it was read. Others end with it, and write
nothing, when they do not know an option."""

_LIMIT = 64 * 1024**3
"""How many bytes a state may have; a sparse file counts whole."""
_NOT_STATE = (TESTS, VERIFIER_LOGS)


async def keep_state(sandbox: Sandbox, directory: Path) -> None:
    """Write the sandbox's state to `directory`. A `SandboxError` if this backend or task cannot. The image's own tar
    keeps it in one go; where the image has none that can (busybox, none at all), each path is copied by pier."""
    if others := [name for name in sandbox.services() if name != MAIN]:
        message = f"no state is kept: what other services hold ({', '.join(others)}) cannot be brought back"
        raise SandboxError(message, code="no_state", retryable=False)
    changes = await sandbox.changes()
    if changes is None:
        message = "this backend cannot list what changed, so no state is kept"
        raise SandboxError(message, code="no_state", blame="user", retryable=False)
    kept = [change.path for change in changes if change.kind != "removed" and not is_left_out(change.path)]
    directory.mkdir(parents=True)
    (directory / _FILES).touch(0o600, exist_ok=False)  # it is exact, so it may hold secrets
    if not await _keep_at_once(sandbox, kept, directory / _FILES):
        await _keep_each(sandbox, kept, directory / _FILES)
    write_json(directory / _REMOVED, [change.path for change in changes if change.kind == "removed"], durable=False)


async def _keep_at_once(sandbox: Sandbox, paths: list[str], target: Path) -> bool:
    """Write an archive of some paths with the image's tar; whether it could."""
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
    """The same without the image's tar. What is gone or no regular file or link meanwhile is left out."""
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
    """Bring a kept state into a sandbox of the same image."""
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
    """Whether a whole state was kept in `directory`; the list of what was removed is written last."""
    return (directory / _REMOVED).is_file()


def is_left_out(path: str) -> bool:
    """Whether a path is left out of every state."""
    return any(path == top or path.startswith(f"{top}/") for top in _NOT_STATE)


def _with_parents(paths: list[str]) -> list[str]:
    """The paths relative to the root, each after the directories that hold it."""
    found: dict[str, None] = {}
    for path in paths:
        relative = PurePosixPath(path.lstrip("/"))
        for parent in reversed(relative.parents[:-1]):
            found[str(parent)] = None
        found[str(relative)] = None
    return list(found)
