"""The runtime of a pack's programs in any image: a loader that searches the pack alone, libraries, a shell and CAs.

All of it is copied from the machine that builds the pack; programs use nothing of the image that the pack is mounted
into. The loader is this machine's, with the pack's `lib` as its built-in search path and without cache and preload
files. Files are patched in place, at the same length: programs with a payload behind their code (single-file builds of
node and bun) break when bytes move.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pier.agent.contract import PACK_PATH
from pier.agent.pack.build import pack_error

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB = 1, 5


@dataclass(frozen=True, slots=True)
class Elf:
    """The loader and libraries of a dynamic program or library; a static one has none."""

    loader: str | None = None
    loader_at: tuple[int, int] = (0, 0)
    """Offset and length of the loader's path in the file, with its terminating zero."""
    needed: tuple[str, ...] = ()
    machine: int = 0
    """ELF's number of the processor."""


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
    """Replace the loader of a dynamic program in place. The new path must not be longer than the old one."""
    elf = read_elf(path)
    if elf is None or elf.loader is None or elf.loader == loader:
        return
    offset, length = elf.loader_at
    new = loader.encode()
    if len(new) >= length:
        raise pack_error(f"{path.name}: no room for the loader path {loader!r}")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new.ljust(length, b"\0"))


LOADER = f"{PACK_PATH}/ld.so"
MACHINE_LOADER, MACHINE_CODE = {
    "aarch64": ("/lib/ld-linux-aarch64.so.1", 183),
}.get(platform.machine(), ("/lib64/ld-linux-x86-64.so.2", 62))
LIBRARIES = f"{PACK_PATH}/lib"

CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
LOCALES = "/usr/lib/locale"
ALWAYS = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2", "libutil.so.1")
"""Libraries that programs open at run time without naming them in their headers."""
NAME_SERVICE = ("libnss_files.so.2", "libnss_dns.so.2")
TOOLS = ("bash", "ps")
"""Programs that some agents require. They are last on PATH, so an image's own take precedence."""

_NOT_PROGRAMS = frozenset({".py", ".pyc", ".pyi", ".js", ".mjs", ".cjs", ".ts", ".map", ".json", ".md", ".txt"})


def complete(root: Path) -> None:
    """Add the loader, libraries, tools and CA bundle that the programs below `root` need to run from the mount."""
    _add_tools(root)
    if bundle := next((path for path in CA_BUNDLES if Path(path).is_file()), None):
        shutil.copyfile(bundle, root / "ca.pem")
    programs = list(_programs(root))
    _add_loader(root / "ld.so")
    (root / "lib").mkdir(exist_ok=True)
    _add_libraries(root / "lib", {*ALWAYS, *NAME_SERVICE, *(name for _, elf in programs for name in elf.needed)})
    _add_locale(root)
    for path, elf in programs:
        path.chmod(0o755)  # some packages ship programs without the executable bit
        if elf.loader == MACHINE_LOADER:
            set_loader(path, LOADER)


def _add_loader(target: Path) -> None:
    source = Path(MACHINE_LOADER)
    if not source.exists():
        raise pack_error(f"this machine has no {source}", "build the pack on a glibc Linux")
    data = source.read_bytes()
    directories = re.findall(rb"\0((?:/usr)?/lib/[a-z0-9_]+-linux-gnu/)\0", data)
    directories = [directory for directory in directories if len(directory) > len(LIBRARIES)]
    if not directories:
        message = "this machine's loader has no search path that is long enough to be replaced"
        raise pack_error(message, "build the pack on Debian or Ubuntu")
    for directory in directories:
        padded = f"{PACK_PATH}{'/' * (len(directory) - len(LIBRARIES))}lib/".encode()
        data = data.replace(b"\0" + directory + b"\0", b"\0" + padded + b"\0")
    data = data.replace(b"/etc/ld.so.cache\0", b"/dev/null/.cache\0")
    target.write_bytes(data.replace(b"/etc/ld.so.preload\0", b"/dev/null/.preload\0"))
    target.chmod(0o755)


def _add_libraries(library: Path, names: Iterable[str]) -> None:
    """Copy this machine's libraries `names` and those that they need."""
    machine, todo, done = _machine_libraries(), list(names), set[str]()
    while todo:
        name = todo.pop()
        if name in done or name.startswith(("ld-linux", "linux-vdso")):
            continue
        done.add(name)
        source = machine.get(name)
        if source is None:
            continue
        if not (library / name).exists():
            shutil.copyfile(source, library / name)
            (library / name).chmod(0o755)
        elf = read_elf(source) or Elf()
        todo += [need for need in elf.needed if need not in done]


def _add_locale(root: Path) -> None:
    """Copy the locale C.UTF-8. Without it, as in images without glibc, programs print warnings."""
    source, libc = Path(LOCALES) / "C.utf8", root / "lib" / "libc.so.6"
    if not source.is_dir() or not libc.exists() or len(LOCALES) < len(PACK_PATH):
        return
    shutil.copytree(source, root / "C.utf8")
    old, new = LOCALES.encode() + b"\0", PACK_PATH.encode().ljust(len(LOCALES), b"\0") + b"\0"
    libc.write_bytes(libc.read_bytes().replace(old, new))


def _machine_libraries() -> dict[str, Path]:
    """This machine's libraries by name."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise pack_error(f"cannot list this machine's libraries: {error}") from error
    found: dict[str, Path] = {}
    for line in listed.splitlines():
        match = re.match(r"\s+(\S+) \(libc6,(?:x86-64|AArch64)[^)]*\) => (\S+)", line)
        if match:
            found.setdefault(match[1], Path(match[2]))
    return found


def _add_tools(root: Path) -> None:
    tools = root / "tools"
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        source = shutil.which(name, path=os.defpath + ":/usr/bin:/usr/local/bin")
        if source and read_elf(Path(source).resolve()):
            shutil.copyfile(Path(source).resolve(), tools / name)
            (tools / name).chmod(0o755)


def _programs(root: Path) -> Iterator[tuple[Path, Elf]]:
    """Programs and libraries for this processor below `root`."""
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.suffix in _NOT_PROGRAMS:
            continue
        elf = read_elf(path)
        if elf is not None and elf.machine == MACHINE_CODE:
            yield path, elf
