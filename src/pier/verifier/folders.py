"""Directories in a sandbox, made as tar entries: this needs no shell and no program of the image."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from pier.sandbox.contract import Sandbox

LOGS = "/logs"
VERIFIER_LOGS = "/logs/verifier"
ARTIFACTS = "/logs/artifacts"
TESTS = "/tests"


async def make_folders(sandbox: Sandbox, folders: Mapping[str, int], *, clear: Sequence[str] = ()) -> None:
    """Make directories (absolute paths) with their modes, owned by root. Parents that are missing are made too. What is
    at the paths `clear` is removed first."""
    await sandbox.put_packed(_pack(tuple(folders.items())), "/", clear=clear)


@functools.lru_cache(maxsize=64)
def _pack(folders: tuple[tuple[str, int], ...]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, mode in folders:
            entry = tarfile.TarInfo(str(PurePosixPath(path).relative_to("/")))
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
    return buffer.getvalue()
