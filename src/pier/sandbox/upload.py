"""Uploads a directory of scripts, one of which is run afterwards."""

from __future__ import annotations

import os
from pathlib import Path

from pier.sandbox.contract import Sandbox


async def upload_scripts(
    sandbox: Sandbox, source: Path, target: str, *, program: str | None = None, owner: str | None = None
) -> None:
    """Copy the contents of the directory `source` into the directory `target`, as `Sandbox.upload` does. The file
    `program` in it can be executed afterwards, whatever its mode is here."""
    await sandbox.upload(source.resolve(), target, owner=owner)
    if program is not None and not os.access(source / program, os.X_OK):
        data = (source / program).read_bytes()
        await sandbox.write_file(f"{target}/{program}", data, mode=0o755, owner=owner)
