"""The helper's image: this interpreter and the few modules and libraries that the helper uses, and nothing else.

It is put together from files that are here already, so nothing is pulled and the engine's host needs nothing. Its
tag is the digest of its content. Beside the helper it holds the program that keeps containers alive.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from py_compile import compile as compile_module
from tempfile import TemporaryDirectory

from pier.errors import SandboxError
from pier.sandbox.docker.idle import IDLE, MACHINES, program
from pier.sandbox.linux.root import HOST

_BOOT = Path(__file__).resolve().with_name("far_boot.py")
_SOURCE = Path(__file__).resolve().parents[3]
_ROOT = "helper"


@dataclass(frozen=True, slots=True)
class Runtime:
    """An image that is yet to be made. `files` are sources by their place, or contents for what has no file here."""

    files: dict[str, Path | bytes] = field(repr=False)
    argv: tuple[str, ...]
    env: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Names the content."""
        made = hashlib.sha256()
        for place, source in sorted(self.files.items()):
            data = source if isinstance(source, bytes) else source.read_bytes()
            made.update(f"{place} {len(data)}\n".encode())
            made.update(data)
        return made.hexdigest()[:24]

    def archive(self) -> bytes:
        """The root file system as a tar archive. Modules are compiled, so that the helper starts at once."""
        sink = io.BytesIO()
        with (
            tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive,
            TemporaryDirectory() as scratch,
        ):
            for name in ("dev", "etc", "proc", "sys", "tmp", "shared"):
                _add(archive, name, None)
            _add_link(archive, HOST.lstrip("/"), "/")
            for place, source in sorted(self.files.items()):
                data = source if isinstance(source, bytes) else source.read_bytes()
                _add(archive, place, data)
                if place.endswith(".py"):
                    _add(archive, cache_from_source(place), _compiled(place, data, Path(scratch)))
        return sink.getvalue()


def find_runtime(engine_machine: str) -> Runtime:
    """What the helper is made of. `engine_machine`: the engine's word for its processor."""
    machine = os.uname().machine
    if sys.platform != "linux" or MACHINES.get(engine_machine, engine_machine) != machine:
        raise SandboxError(
            f"pier's helper is made of parts of this machine ({sys.platform} {machine}), and the engine's host is "
            f"{engine_machine}",
            code="helper_machine",
            blame="user",
            retryable=False,
            hint="run pier on a Linux machine with the engine's kind of processor",
        )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", str(_BOOT), "--parts"], capture_output=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise SandboxError(f"the helper's parts cannot be found: {done.stderr.decode()[-500:]}", code="helper_parts")
    parts = json.loads(done.stdout)
    modules = [Path(name) for name in parts["modules"]]
    libraries = [Path(name) for name in parts["libraries"]]
    home = f"{_ROOT}/{parts['lib']}/python{parts['version'][0]}.{parts['version'][1]}"
    library = _library_directory(modules)
    files: dict[str, Path | bytes] = {
        f"{IDLE}/{IDLE}": program(machine),
        "etc/nsswitch.conf": b"hosts: files dns\n",
        f"{_ROOT}/bin/python3": Path(getattr(sys, "_base_executable", sys.executable)).resolve(),
        f"{home}/os.py": library / "os.py",
        f"{_ROOT}/src/{_BOOT.relative_to(_SOURCE)}": _BOOT,
    }
    linker = ""
    for path in libraries:
        if path.is_relative_to(library):
            files[f"{home}/{path.relative_to(library)}"] = path
            continue
        files[f"{_ROOT}/lib/{path.name}"] = path
        if path.name.startswith("ld-") or path.name.startswith("ld.so"):
            linker = path.name
    for path in modules:
        if path.is_relative_to(library):
            files[f"{home}/{path.relative_to(library)}"] = path
        elif path.is_relative_to(_SOURCE):
            files[f"{_ROOT}/src/{path.relative_to(_SOURCE)}"] = path
    python = (f"/{_ROOT}/bin/python3", "-S", "-s", "-P", "-B", f"/{_ROOT}/src/{_BOOT.relative_to(_SOURCE)}")
    argv = (f"/{_ROOT}/lib/{linker}", "--library-path", f"/{_ROOT}/lib", *python) if linker else python
    return Runtime(files, argv, (f"PYTHONHOME=/{_ROOT}", "LC_ALL=C.UTF-8"))


def _library_directory(modules: list[Path]) -> Path:
    """The directory of the standard library: the one that has `os.py` or a package that is always there."""
    return next(path.parents[1] for path in modules if path.parts[-2:] == ("asyncio", "__init__.py"))


def _compiled(place: str, data: bytes, scratch: Path) -> bytes:
    source, target = scratch / "module.py", scratch / "module.pyc"
    source.write_bytes(data)
    mode = PycInvalidationMode.UNCHECKED_HASH
    compile_module(str(source), str(target), f"/{place}", doraise=True, invalidation_mode=mode)
    return target.read_bytes()


def _add_link(archive: tarfile.TarFile, place: str, target: str) -> None:
    """Where attendants look for the machine that they come from, which a zygote has mounted there."""
    info = tarfile.TarInfo(place)
    info.type, info.linkname = tarfile.SYMTYPE, target
    archive.addfile(info)


def _add(archive: tarfile.TarFile, place: str, data: bytes | None) -> None:
    info = tarfile.TarInfo(place)
    info.mode = 0o755
    if data is None:
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    else:
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
