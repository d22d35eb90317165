"""What an agent left behind, kept with the trial so that it can be graded again without the agent.

    <trial>/state/files.tar      every file that differs from the image, with owner and mode
    <trial>/state/removed.json   what the image has and the sandbox no longer had

A step of a multi-step task keeps its own below `steps/<name>`. Tests and the verifier's logs are never part of it.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from pier.errors import SandboxError
from pier.files import write_json
from pier.sandbox.contract import Sandbox, Stream
from pier.verifier.folders import TESTS, VERIFIER_LOGS

STATE = "state"
_FILES, _REMOVED = "files.tar", "removed.json"
_SECONDS = 900.0
_CHANGED_MEANWHILE = 1
"""What tar ends with when a process that still runs wrote to a file while it was read. Others end with it, and write
nothing, when they do not know an option."""

_MOST_COMPLAINTS = 300
_LIMIT = 64 * 1024**3
"""How many bytes a state may have; a sparse file counts whole."""
_NOT_STATE = (TESTS, VERIFIER_LOGS)


async def keep_state(sandbox: Sandbox, directory: Path) -> None:
    """Write the sandbox's state to `directory`. A `SandboxError` if this backend or image cannot."""
    changes = await sandbox.changes()
    if changes is None:
        raise SandboxError("this backend cannot list what changed, so no state is kept", retryable=False)
    kept = [change.path for change in changes if change.kind != "removed" and not _is_left_out(change.path)]
    directory.mkdir(parents=True)
    complaints = bytearray()
    (directory / _FILES).touch(0o600, exist_ok=False)  # it is exact, so it may hold secrets
    with (directory / _FILES).open("wb") as stream:

        def save(name: Stream, data: bytes) -> None:
            if name == "stdout":
                if stream.tell() + len(data) > _LIMIT:
                    raise SandboxError(f"no state is kept: it is larger than {_LIMIT} bytes", retryable=False)
                stream.write(data)
            elif len(complaints) < _MOST_COMPLAINTS:
                complaints.extend(data)

        result = await sandbox.exec(
            ["tar", "-C", "/", "--no-recursion", "--numeric-owner", "--null", "-T", "-", "-cf", "-"],
            stdin="\0".join(_with_parents(kept)).encode(errors="surrogateescape"),
            user="0",
            timeout=_SECONDS,
            on_output=save,
        )
    is_empty = not (directory / _FILES).stat().st_size
    if result.timed_out or is_empty or result.exit_code not in (0, _CHANGED_MEANWHILE):
        told = complaints[:_MOST_COMPLAINTS].decode(errors="replace").strip()
        raise SandboxError(f"the state could not be kept: {told}", retryable=False)
    write_json(directory / _REMOVED, [change.path for change in changes if change.kind == "removed"], durable=False)


async def restore_state(sandbox: Sandbox, directory: Path) -> None:
    """Bring a kept state into a sandbox of the same image."""
    for change in await sandbox.changes() or ():
        if change.kind == "added" and not _is_left_out(change.path):
            await sandbox.remove(change.path)
    for path in json.loads((directory / _REMOVED).read_text()):
        await sandbox.remove(path)
    await sandbox.upload(directory / _FILES, "/tmp/.pier-state.tar")
    result = await sandbox.exec(
        ["tar", "-C", "/", "--numeric-owner", "-xpf", "/tmp/.pier-state.tar"], user="0", timeout=_SECONDS
    )
    await sandbox.remove("/tmp/.pier-state.tar")
    if not result.ok:
        raise SandboxError(f"the state could not be restored: {result.error_text.strip()[-300:]}", retryable=False)


def has_state(directory: Path) -> bool:
    """Whether a whole state was kept in `directory`; the list of what was removed is written last."""
    return (directory / _REMOVED).is_file()


def _is_left_out(path: str) -> bool:
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
