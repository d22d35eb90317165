"""The parts that programs of a pack need in any image: a loader that looks only into the pack, libraries, a shell, CAs.

The loader is this machine's own, with its built-in search path replaced by the pack's `lib` (same length, so nothing
moves) and its cache and preload files pointed at nothing. Everything is copied from the machine that builds the
pack, once, and nothing is ever taken from the image that the pack is mounted into. Programs that carry a payload behind
their code (single-file builds of node and bun agents) break when bytes move, so no file's length or layout changes.
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
from pier.errors import AgentError

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB = 1, 5


@dataclass(frozen=True, slots=True)
class Elf:
    """The needs of a dynamic program or library. A static one has neither `loader` nor `needed`."""

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
"""Libraries that programs open by name at run time, so that no header names them."""
NAME_SERVICE = ("libnss_files.so.2", "libnss_dns.so.2")
TOOLS = ("bash", "ps")
"""Programs that some agents cannot do without; found last on PATH, so an image's own go first."""

_NOT_PROGRAMS = frozenset({".py", ".pyc", ".pyi", ".js", ".mjs", ".cjs", ".ts", ".map", ".json", ".md", ".txt"})


def complete(root: Path) -> None:
    """Make the programs below `root` run from the pack's mount: loader, libraries, tools and CA bundle."""
    _add_tools(root)
    _add_certificates(root)
    found = list(_programs(root))
    _add_loader(root / "ld.so")
    machine = _machine_libraries()
    wanted = {*ALWAYS, *NAME_SERVICE, *(name for _, elf in found for name in elf.needed)}
    (root / "lib").mkdir(exist_ok=True)
    _add_libraries(root / "lib", wanted, machine)
    _add_locale(root)
    for path, elf in found:
        path.chmod(0o755)  # some packages forget to mark the programs that they bring
        if elf.loader == MACHINE_LOADER:
            set_loader(path, LOADER)


def _add_loader(target: Path) -> None:
    source = Path(MACHINE_LOADER)
    if not source.exists():
        raise AgentError(
            f"this machine has no {source}", code="pack", blame="infra", hint="build the pack on a glibc Linux"
        )
    data = source.read_bytes()
    found = False
    for directory in re.findall(rb"\0((?:/usr)?/lib/[a-z0-9_]+-linux-gnu/)\0", data):
        room = len(directory) - len(LIBRARIES) - 1
        if room >= 0:
            data = data.replace(b"\0" + directory + b"\0", b"\0" + _padded(len(directory)) + b"\0")
            found = True
    if not found:
        raise AgentError(
            "the loader of this machine has no search path that a pack could use",
            code="pack",
            blame="infra",
            hint="build the pack on Debian or Ubuntu",
        )
    data = data.replace(b"/etc/ld.so.cache\0", b"/dev/null/.cache\0").replace(
        b"/etc/ld.so.preload\0", b"/dev/null/.preload\0"
    )
    target.write_bytes(data)
    target.chmod(0o755)


def _padded(length: int) -> bytes:
    """The pack's library directory written with as many slashes as make it `length` bytes long."""
    return (PACK_PATH + "/" * (length - len(LIBRARIES)) + "lib/").encode()


def _add_libraries(library: Path, names: Iterable[str], machine: dict[str, Path]) -> None:
    todo, done = list(names), set()
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
    """Bring the locale C.UTF-8, which images without glibc lack; its programs would warn into every output."""
    source, libc = Path(LOCALES) / "C.utf8", root / "lib" / "libc.so.6"
    if not source.is_dir() or not libc.exists() or len(LOCALES) < len(PACK_PATH):
        return
    shutil.copytree(source, root / "C.utf8")
    old, new = LOCALES.encode() + b"\0", PACK_PATH.encode().ljust(len(LOCALES), b"\0") + b"\0"
    libc.write_bytes(libc.read_bytes().replace(old, new))


def _machine_libraries() -> dict[str, Path]:
    """Every library that this machine's loader knows, by name."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise AgentError(f"cannot list this machine's libraries: {error}", code="pack", blame="infra") from error
    found: dict[str, Path] = {}
    for line in listed.splitlines():
        match = re.match(r"\s+(\S+) \(libc6,(?:x86-64|AArch64)[^)]*\) => (\S+)", line)
        if match:
            found.setdefault(match[1], Path(match[2]))
    return found


def _add_tools(root: Path) -> None:
    """Copy a shell and `ps`, for images without them."""
    tools = root / "tools"
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        source = shutil.which(name, path=os.defpath + ":/usr/bin:/usr/local/bin")
        if source and read_elf(Path(source).resolve()):
            shutil.copyfile(Path(source).resolve(), tools / name)
            (tools / name).chmod(0o755)


def _add_certificates(root: Path) -> None:
    source = next((path for path in CA_BUNDLES if Path(path).is_file()), None)
    if source:
        shutil.copyfile(source, root / "ca.pem")


def _programs(root: Path) -> Iterator[tuple[Path, Elf]]:
    """Programs and libraries for this processor below `root`; files that are plainly something else are not opened."""
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        if path.suffix in _NOT_PROGRAMS:
            continue
        elf = read_elf(path)
        if elf is not None and elf.machine == MACHINE_CODE:
            yield path, elf
