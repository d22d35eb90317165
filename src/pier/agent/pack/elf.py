"""Just enough of ELF to move a program: which libraries and loader it wants, and how to name another loader in place.

Programs that carry a payload behind their code (single-file builds of node and bun agents) break when bytes move, so
nothing here changes a file's length or layout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pier.errors import AgentError

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB = 1, 5


@dataclass(frozen=True, slots=True)
class Elf:
    """What a dynamic program or library asks of its loader. A static one has neither `loader` nor `needed`."""

    loader: str | None = None
    loader_at: tuple[int, int] = (0, 0)
    """Where the loader's path stands in the file: offset and length, the closing zero included."""
    needed: tuple[str, ...] = ()
    machine: int = 0
    """The processor it is for, as ELF numbers them."""


def read_elf(path: Path) -> Elf | None:
    """Read a 64-bit little-endian ELF file; None if it is something else or broken."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return None
        try:
            return _read(file, head)
        except (struct.error, ValueError, OverflowError, OSError):
            return None


def _read(file: BinaryIO, head: bytes) -> Elf:
    table, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
    file.seek(table)
    raw = file.read(size * count)
    segments = [struct.unpack_from("<IIQQQQQQ", raw, index * size) for index in range(count)]
    loader, loader_at, needed = None, (0, 0), ()
    for kind, _, offset, _, _, length, *_ in segments:
        if kind == _PT_INTERP:
            file.seek(offset)
            loader, loader_at = file.read(min(length, 4096)).split(b"\0")[0].decode(), (offset, length)
        elif kind == _PT_DYNAMIC:
            file.seek(offset)
            entries = list(struct.iter_unpack("<QQ", file.read(min(length, 1 << 20) // 16 * 16)))
            needed = _needed(file, entries, segments)
    return Elf(loader, loader_at, needed, struct.unpack_from("<H", head, 18)[0])


def _needed(file: BinaryIO, entries: list[tuple[int, int]], segments: list[tuple[int, ...]]) -> tuple[str, ...]:
    address = next((value for tag, value in entries if tag == _DT_STRTAB), -1)
    home = next((s for s in segments if s[0] == _PT_LOAD and s[3] <= address < s[3] + s[5]), None)
    if home is None:
        return ()
    names = []
    for tag, value in entries:
        if tag == _DT_NEEDED:
            file.seek(home[2] + address - home[3] + value)
            names.append(file.read(4096).split(b"\0")[0].decode(errors="replace"))
    return tuple(names)


def set_loader(path: Path, loader: str) -> None:
    """Name another loader in a dynamic program, in place. The new path must not be longer than the old one."""
    elf = read_elf(path)
    if elf is None or elf.loader is None or elf.loader == loader:
        return
    offset, length = elf.loader_at
    new = loader.encode()
    if len(new) >= length:
        raise AgentError(f"{path.name}: no room for the loader path {loader!r}", code="pack", blame="infra")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new.ljust(length, b"\0"))
