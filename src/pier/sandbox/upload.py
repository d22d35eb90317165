"""Uploads a directory of scripts, one of which is run afterwards."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

from pier.sandbox.contract import NewFile, Sandbox
from pier.tree import open_regular

_FEW, _SMALL = 64, 1 << 17
"""Files and bytes of a directory that is read once for all trials of a task."""


async def upload_scripts(
    sandbox: Sandbox, source: Path, target: str, *, program: str | None = None, owner: str | None = None
) -> None:
    """Copy the contents of the directory `source` into the directory `target`, as `Sandbox.upload` does. The file
    `program` in it can be executed afterwards, whatever its mode is here."""
    files = _read_few(source, program) if owner is None and sandbox.spec.files_as is None else None
    if files is not None:
        await sandbox.put_files(files, target)
        return
    await sandbox.upload(source.resolve(), target, owner=owner)
    if program is not None and not os.access(source / program, os.X_OK):
        data = (source / program).read_bytes()
        await sandbox.write_file(f"{target}/{program}", data, mode=0o755, owner=owner)


def _read_few(source: Path, program: str | None) -> tuple[NewFile, ...] | None:
    """The files of a directory that holds a few small ones; None for any other directory."""
    rows: list[tuple[str, int, int, int, int]] = []
    left = _SMALL
    with os.scandir(source) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            left -= status.st_size
            if not stat.S_ISREG(status.st_mode) or left < 0 or len(rows) == _FEW:
                return None
            rows.append((entry.name, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return _read(str(source), program, tuple(sorted(rows)))


@functools.lru_cache(maxsize=64)
def _read(source: str, program: str | None, rows: tuple[tuple[str, int, int, int, int], ...]) -> tuple[NewFile, ...]:
    """The files that `rows` describe. A file that changes has another row."""
    files: list[NewFile] = []
    for name, of_file, modified, *_ in rows:
        with open_regular(Path(source, name)) as stream:
            data = stream.read()
        mode = stat.S_IMODE(of_file)
        if name == program and not mode & 0o111:
            mode = 0o755
        files.append(NewFile(name, mode, data, modified // 10**9))
    return tuple(files)
