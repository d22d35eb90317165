"""An image of pier's own store as one tar stream, for engines that know nothing of its layers."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


def write_flat(layers: tuple[Path, ...], sink: IO[bytes]) -> None:
    """Write what the layers (lowest first) show together, with owners, modes and links."""
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _merged(list(reversed(layers)), ""):
            found = path.lstat()
            info = archive.gettarinfo(str(path), arcname=name)
            if info is None:
                continue
            info.uname = info.gname = ""
            key = (found.st_dev, found.st_ino)
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and key in links:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, links[key], 0
                archive.addfile(info)
            elif stat.S_ISREG(found.st_mode):
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", found.st_size
                links[key] = name
                with path.open("rb") as stream:
                    archive.addfile(info, stream)
            else:
                archive.addfile(info)


def _merged(roots: list[Path], name: str) -> Iterator[tuple[str, Path]]:
    """Everything below a directory that several layers have, topmost first, parents before children."""
    names: dict[str, list[Path]] = {}
    hidden: set[str] = set()
    for root in roots:
        directory = root / name
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.name in hidden:
                continue
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                hidden.add(entry.name)
                continue
            above = names.setdefault(entry.name, [])
            if above and not stat.S_ISDIR(found.st_mode):
                hidden.add(entry.name)
                continue
            above.append(root)
            if not stat.S_ISDIR(found.st_mode) or _is_opaque(Path(entry.path)):
                hidden.add(entry.name)
    for part in sorted(names):
        below = f"{name}/{part}" if name else part
        top = names[part][0] / below
        yield below, top
        if top.is_dir() and not top.is_symlink():
            yield from _merged(names[part], below)


def _is_opaque(path: Path) -> bool:
    for attribute in _OPAQUE:
        try:
            if os.getxattr(path, attribute, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False
