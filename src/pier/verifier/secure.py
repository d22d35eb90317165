"""Makes a sandbox that an agent worked in fit for grading: what the agent left running cannot reach the verifier, its
tests and its verdict, and nothing it prepared for the verifier is left in the places that the verifier trusts."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pier.errors import SandboxError, VerifierError
from pier.sandbox.contract import Change, Isolation, NewFile, Sandbox
from pier.verifier.changes import LOGS, TESTS, VERIFIER_LOGS, Note, Suspicion, changed_since, judge, limited

Pristine = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Opens a sandbox of the same image that no agent has touched."""


PRIVATE_TESTS = 256 << 20
"""Bytes of tests that are kept in memory while processes of the agent run. Of a sandbox with a limit on memory it is at
most a quarter of that."""


async def make_folders(sandbox: Sandbox, folders: Mapping[str, int], *, clear: Sequence[str] = ()) -> None:
    """Make directories (absolute paths) with their modes, owned by root. Parents that are missing are made too. What is
    at the paths `clear` is removed first."""
    await sandbox.put_files([NewFile(path.strip("/"), mode) for path, mode in folders.items()], "/", clear=clear)


@dataclass(frozen=True, slots=True)
class Secured:
    """The changes that were found and undone. `compared`: the sandbox lists changes. `view` is where the tests must
    run if processes of the agent do, and `changed` what differed from the image then."""

    notes: tuple[Note, ...] = ()
    compared: bool = False
    view: Sandbox | None = None
    changed: tuple[Change, ...] | None = None

    @asynccontextmanager
    async def place(self, sandbox: Sandbox) -> AsyncIterator[Sandbox]:
        """Where to run the tests of `sandbox`; a view of it ends with this."""
        if self.view is None:
            yield sandbox
        else:
            async with self.view as view:
                yield view


async def secure(
    sandbox: Sandbox,
    *,
    before: Iterable[Change] | None,
    workdir: str,
    pristine: Pristine,
    keep_processes: bool = True,
    tests: Iterable[Path] = (),
) -> Secured:
    """Isolate the verifier from running processes, or kill them; undo planted files; ensure that the verifier's
    directories are empty. `before` is what differed from the image when the agent began, `tests` are to be uploaded."""
    view, notes = await _isolate(sandbox, tests) if keep_processes else (None, await _kill(sandbox))
    after = await sandbox.changes()
    if after is not None:
        changed = changed_since(before or (), after)
        notes += _prepared(changed)
        notes += await _undo(sandbox, judge(changed, workdir=workdir), pristine)
    else:
        notes += await _probe(sandbox)
    if view is None:
        await _reset(sandbox)
    await _make_workdir(sandbox, workdir)
    now = await sandbox.changes() if view is not None else None
    return Secured(tuple(limited(notes)), after is not None, view, None if now is None else tuple(now))


async def look_again(sandbox: Sandbox, secured: Secured, workdir: str) -> list[Note]:
    """Notes on what was planted while the tests ran: processes of the agent could do it until then. It may be the tests
    themselves that did."""
    after = await sandbox.changes() if secured.changed is not None else None
    if after is None:
        return []
    found = judge(changed_since(secured.changed or (), after), workdir=workdir)
    aside = "; it changed while processes of the agent ran next to the tests"
    return limited([Note(each.kind, each.detail + aside, each.path) for each in found if each.action != "note"])


async def _isolate(sandbox: Sandbox, tests: Iterable[Path]) -> tuple[Sandbox | None, list[Note]]:
    try:
        isolation = await sandbox.isolate({TESTS: 0o755, VERIFIER_LOGS: 0o777})
    except SandboxError as error:
        if error.code != "cannot_isolate":
            raise
        return None, await _kill(sandbox, f", and the verifier cannot be isolated from it: {error}")
    if isolation.sandbox is not None and not await asyncio.to_thread(_fit, sandbox, tests):
        await isolation.sandbox.stop()
        return None, await _kill(sandbox, ", and the tests are too large to be kept in memory, away from it")
    return isolation.sandbox, _survivors(isolation)


async def _kill(sandbox: Sandbox, why: str = "") -> list[Note]:
    killed = await sandbox.kill_all()
    detail = f"still running when the agent had ended{why}: {killed}"
    return [Note("processes", detail, stopped=True)] if killed else []


def _survivors(isolation: Isolation) -> list[Note]:
    notes = [
        Note("processes", f"left running by the agent while the tests ran: {each.pid}, user {each.uid}: {each.command}")
        for each in isolation.survivors
    ]
    if more := isolation.count - len(isolation.survivors):
        notes.append(Note("processes", f"left running by the agent while the tests ran: {more} more"))
    return notes


def _fit(sandbox: Sandbox, tests: Iterable[Path]) -> bool:
    """Whether the tests may be kept in memory."""
    left = min(PRIVATE_TESTS, (sandbox.spec.limits.memory or 4 * PRIVATE_TESTS) // 4)
    for directory in tests:
        for path in directory.rglob("*"):
            left -= path.lstat().st_size
            if left < 0:
                return False
    return True


def _prepared(changed: Iterable[Change]) -> list[Note]:
    """Notes on what lies where only the verifier should write."""
    notes: list[Note] = []
    for change in changed:
        if change.kind == "removed":
            continue
        for kind, place in (("reward", VERIFIER_LOGS), ("tests", TESTS)):
            if change.path == place or change.path.startswith(f"{place}/"):
                notes.append(Note(kind, "written before the verifier ran", change.path, stopped=True))
        if change.path == LOGS:
            notes.append(Note("reward", "the directory of the logs was replaced", change.path, stopped=True))
    return notes


async def _probe(sandbox: Sandbox) -> list[Note]:
    """For a sandbox that cannot list what changed: look at the few places that matter most."""
    notes: list[Note] = []
    for path in (f"{VERIFIER_LOGS}/reward.json", f"{VERIFIER_LOGS}/reward.txt", f"{TESTS}/test.sh"):
        if await _look(sandbox, path) == "there":
            kind = "tests" if path.startswith(TESTS) else "reward"
            notes.append(Note(kind, "written before the verifier ran", path, stopped=True))
    if await _look(sandbox, "/etc/ld.so.preload") == "there":
        notes.append(Note("loader", "libraries named here are loaded into every program", "/etc/ld.so.preload"))
    return notes


async def _undo(sandbox: Sandbox, suspicions: list[Suspicion], pristine: Pristine) -> list[Note]:
    for suspicion in suspicions:
        if suspicion.action == "remove":
            await sandbox.remove(suspicion.path)
    replaced = [suspicion.path for suspicion in suspicions if suspicion.action == "restore"]
    if replaced:
        async with pristine() as clean:
            for path in replaced:
                await sandbox.remove(path)
                place = PurePosixPath(path)
                await sandbox.put_tar(_named(clean.get_tar(path), place.name), str(place.parent))
    return [Note(each.kind, each.detail, each.path, stopped=each.action != "note") for each in suspicions]


async def _named(stream: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """The archive of one file or link, under its name."""
    whole = b"".join([chunk async for chunk in stream])
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(whole)) as old, tarfile.open(fileobj=out, mode="w") as new:
        for entry in old:
            entry.name = name
            new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
    yield out.getvalue()


async def _reset(sandbox: Sandbox) -> None:
    folders = {TESTS: 0o755, LOGS: 0o755, VERIFIER_LOGS: 0o777}
    try:
        try:
            await make_folders(sandbox, folders, clear=(TESTS, VERIFIER_LOGS))
        except SandboxError as error:
            if error.code != "not_directory":
                raise
            await make_folders(sandbox, folders, clear=(TESTS, LOGS))
    except SandboxError as error:
        raise VerifierError(
            f"{TESTS} and {VERIFIER_LOGS} could not be emptied: {error}", code="reset", blame="agent"
        ) from error


async def _make_workdir(sandbox: Sandbox, workdir: str) -> None:
    if workdir != "/" and await _look(sandbox, workdir) == "missing":
        await make_folders(sandbox, {workdir: 0o755})


async def _look(sandbox: Sandbox, path: str) -> Literal["there", "missing", "unknown"]:
    """Whether a path has anything; a link on the way to it is not followed."""
    try:
        await sandbox.read_file(path, max_bytes=1)
    except FileNotFoundError:
        return "missing"
    except SandboxError as error:
        return "there" if error.code in ("not_regular", "too_large") else "unknown"
    return "there"
