"""Directories in a sandbox, made as tar entries: this needs no shell and no program of the image."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Mapping
from pathlib import PurePosixPath

from pier.sandbox.contract import Sandbox

LOGS = "/logs"
VERIFIER_LOGS = "/logs/verifier"
ARTIFACTS = "/logs/artifacts"
TESTS = "/tests"


async def make_folders(sandbox: Sandbox, folders: Mapping[str, int]) -> None:
    """Make directories (absolute paths) with their modes, owned by root. Parents that are missing are made too."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, mode in folders.items():
            entry = tarfile.TarInfo(str(PurePosixPath(path).relative_to("/")))
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
    await sandbox.put_tar(_once(buffer.getvalue()), "/")


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
