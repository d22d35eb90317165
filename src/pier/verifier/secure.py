"""Secures an agent's sandbox for grading: its processes cannot reach the verifier, its tests and its verdict, and files
that it planted where the verifier trusts them are removed."""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pier.errors import SandboxError, VerifierError
from pier.sandbox.contract import Change, Isolation, NewFile, Sandbox
from pier.verifier.changes import LOGS, TESTS, VERIFIER_LOGS, Note, Suspicion, changed_since, judge, limited

Pristine = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Opens a new sandbox of the same image."""

PRIVATE_TESTS = 256 << 20
"""Maximum bytes of tests that are kept in memory while processes of the agent run; at most a quarter of the sandbox's
memory limit."""


async def make_folders(sandbox: Sandbox, folders: Mapping[str, int], *, clear: Sequence[str] = ()) -> None:
    """Create directories (absolute paths) with their modes, owned by root, and missing parents. The paths `clear` are
    removed first."""
    await sandbox.put_files([NewFile(path.strip("/"), mode) for path, mode in folders.items()], "/", clear=clear)


@dataclass(frozen=True, slots=True)
class Secured:
    """Notes on what was found and undone. `compared`: the sandbox lists changes. `view` is the isolated view that the
    tests must run in while processes of the agent run, and `changed` the changes from the image at its start."""

    notes: tuple[Note, ...] = ()
    compared: bool = False
    view: Sandbox | None = None
    changed: tuple[Change, ...] | None = None

    @asynccontextmanager
    async def place(self, sandbox: Sandbox) -> AsyncIterator[Sandbox]:
        """The sandbox to run the tests in: the view, which ends with the block, or `sandbox` itself."""
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
    """Isolate the verifier from running processes, or kill them. Remove planted files and empty the verifier's
    directories. `before` are the changes from the image when the agent started; `tests` are uploaded later."""
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
    """Notes on files that were planted during the tests, by processes of the agent or by the tests themselves."""
    after = await sandbox.changes() if secured.changed is not None else None
    if after is None:
        return []
    suspicions = judge(changed_since(secured.changed or (), after), workdir=workdir)
    suffix = "; it changed while processes of the agent ran next to the tests"
    return limited([Note(each.kind, each.detail + suffix, each.path) for each in suspicions if each.action != "note"])


async def _isolate(sandbox: Sandbox, tests: Iterable[Path]) -> tuple[Sandbox | None, list[Note]]:
    try:
        isolation = await sandbox.isolate({TESTS: 0o755, VERIFIER_LOGS: 0o777})
    except SandboxError as error:
        if error.code != "cannot_isolate":
            raise
        return None, await _kill(sandbox, f", and the verifier cannot be isolated from it: {error}")
    if isolation.sandbox is not None and not await asyncio.to_thread(_fit_in_memory, sandbox, tests):
        await isolation.sandbox.stop()
        return None, await _kill(sandbox, ", and the tests are too large to be kept in memory, isolated from it")
    return isolation.sandbox, _survivors(isolation)


async def _kill(sandbox: Sandbox, why: str = "") -> list[Note]:
    killed = await sandbox.kill_all()
    detail = f"still running when the agent had ended{why}: {killed}"
    return [Note("processes", detail, stopped=True)] if killed else []


def _survivors(isolation: Isolation) -> list[Note]:
    processes = [f"{each.pid}, user {each.uid}: {each.command}" for each in isolation.survivors]
    if more := isolation.count - len(processes):
        processes.append(f"{more} more")
    return [Note("processes", f"left running by the agent while the tests ran: {each}") for each in processes]


def _fit_in_memory(sandbox: Sandbox, tests: Iterable[Path]) -> bool:
    left = min(PRIVATE_TESTS, (sandbox.spec.limits.memory or 4 * PRIVATE_TESTS) // 4)
    for directory in tests:
        for path in directory.rglob("*"):
            left -= path.lstat().st_size
            if left < 0:
                return False
    return True


def _prepared(changed: Iterable[Change]) -> list[Note]:
    """Notes on files in the verifier's own directories."""
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
    """Notes on the most important files, for a backend that cannot list changes."""
    notes: list[Note] = []
    for path in (f"{VERIFIER_LOGS}/reward.json", f"{VERIFIER_LOGS}/reward.txt", f"{TESTS}/test.sh"):
        if await _look(sandbox, path) == "there":
            kind = "tests" if path.startswith(TESTS) else "reward"
            notes.append(Note(kind, "written before the verifier ran", path, stopped=True))
    if await _look(sandbox, "/etc/ld.so.preload") == "there":
        notes.append(Note("loader", "every program loads the libraries named here", "/etc/ld.so.preload"))
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
                parent, name = posixpath.split(path)
                await sandbox.put_tar(_renamed(clean.get_tar(path), name), parent)
    return [Note(each.kind, each.detail, each.path, stopped=each.action != "note") for each in suspicions]


async def _renamed(stream: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """The archive of one file or link, with `name` as its name."""
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
        message = f"cannot empty {TESTS} and {VERIFIER_LOGS}: {error}"
        raise VerifierError(message, code="reset", blame="agent") from error


async def _make_workdir(sandbox: Sandbox, workdir: str) -> None:
    if workdir != "/" and await _look(sandbox, workdir) == "missing":
        await make_folders(sandbox, {workdir: 0o755})


async def _look(sandbox: Sandbox, path: str) -> Literal["there", "missing", "unknown"]:
    """Whether a path exists. Links are not followed."""
    try:
        await sandbox.read_file(path, max_bytes=1)
    except FileNotFoundError:
        return "missing"
    except SandboxError as error:
        return "there" if error.code in ("not_regular", "too_large") else "unknown"
    return "there"
