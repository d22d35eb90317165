"""Small directories that go into many sandboxes: packed once, and sent as they are while nothing in them changes."""

from __future__ import annotations

import functools
import io
import os
import stat
import tarfile
from pathlib import Path

from pier.sandbox.contract import Sandbox

_BYTES, _ENTRIES = 64 * 1024, 64
"""What a directory may hold to be kept packed; a larger one is packed each time."""

_Mark = tuple[str, int, int, int, int]
"""A path below the directory, with its mode, size, inode and time of change."""


async def deliver(
    sandbox: Sandbox, source: Path, target: str, *, program: str | None = None, owner: str | None = None
) -> None:
    """Copy the contents of the directory `source` into the directory `target`, as `Sandbox.upload` does. The file
    `program` in it can be executed afterwards, whatever its mode is here."""
    plain = owner is None and not (program is not None and (source / program).is_symlink())
    marks = _marks(source) if plain else None
    if marks is not None:
        await sandbox.put_packed(_pack(source, program, marks), target)
        return
    await sandbox.upload(source.resolve(), target, owner=owner)
    if program is not None and not os.access(source / program, os.X_OK):
        data = (source / program).read_bytes()
        await sandbox.write_file(f"{target}/{program}", data, mode=0o755, owner=owner)


def _marks(source: Path) -> tuple[_Mark, ...] | None:
    """What tells whether a directory has changed; None if it is too large to be kept packed, or holds odd things."""
    found: list[_Mark] = []
    left = _BYTES
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(source / below if below else source) as entries:
            for entry in entries:
                status, path = entry.stat(follow_symlinks=False), below + entry.name
                found.append((path, status.st_mode, status.st_size, status.st_ino, status.st_ctime_ns))
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(f"{path}/")
                elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    left -= status.st_size
                elif not stat.S_ISLNK(status.st_mode):
                    return None
                if left < 0 or len(found) > _ENTRIES:
                    return None
    return tuple(sorted(found))


@functools.lru_cache(maxsize=64)
def _pack(source: Path, program: str | None, marks: tuple[_Mark, ...]) -> bytes:
    """The directory as a tar archive; `marks` are there so that another state of it is packed anew."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, mode, *_ in marks:
            entry = archive.gettarinfo(source / path, path)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = int(entry.mtime)
            if path == program:
                entry.mode |= 0o755
            if stat.S_ISREG(mode):
                archive.addfile(entry, io.BytesIO((source / path).read_bytes()))
            else:
                archive.addfile(entry)
    return buffer.getvalue()
