"""What pier brings to an engine: the program that keeps a container alive, and the helper's image and container.

The program ignores its dead children, so that they vanish, and waits forever. It is a few machine instructions in an
ELF file, so no image has to have a shell or `sleep`.

The helper's image holds that program, this interpreter and the few modules and libraries that the helper uses. It is
put together from files of this machine, so nothing is pulled and the engine's host needs nothing. Its tag is the digest
of its content. The container's name is derived from its configuration, so that every pier that starts at the same time
means the same one. It has no owner: it ends when no session has used it for a while (`helper_boot`), and the engine
then removes it. A lease has it only until it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from py_compile import compile as compile_module
from tempfile import TemporaryDirectory
from typing import Any

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from pier.errors import SandboxError
from pier.files import write
from pier.home import pier_home
from pier.image.store import only_one
from pier.lease import Lease
from pier.sandbox.docker.client import Client, bring_image, engine_error, in_use_lock
from pier.sandbox.docker.helper_boot import MARK
from pier.sandbox.linux.root import HOST

IDLE = "idle"
PLACE = "/.pier-idle"
"""Where the program, or the directory that has it, is mounted in a container."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""What engines call processors, and what the kernel does."""

_BASE = 0x400000
_HEADERS = 64 + 56

_X86_64 = bytes.fromhex(
    "b80d000000"  # mov eax, 13         rt_sigaction
    "bf11000000"  # mov edi, 17         SIGCHLD
    "488d351b000000"  # lea rsi, [rip+27]   the action below
    "31d2"  # xor edx, edx
    "41ba08000000"  # mov r10d, 8
    "0f05"  # syscall
    "b822000000"  # mov eax, 34         pause
    "0f05"  # syscall
    "ebf7"  # jmp to the pause
    "9090909090909090"  # padding
    "0100000000000000"  # SIG_IGN
    "0000000400000000"  # SA_RESTORER
    "0000000000000000"  # no restorer is called
    "0000000000000000"  # an empty mask
)
_AARCH64 = b"".join(
    struct.pack("<I", word)
    for word in (
        0xD2800220,  # mov x0, 17          SIGCHLD
        0x10000161,  # adr x1, +44         the action below
        0xD2800002,  # mov x2, 0
        0xD2800103,  # mov x3, 8
        0xD28010C8,  # mov x8, 134         rt_sigaction
        0xD4000001,  # svc 0
        0xD2800000,  # mov x0, 0
        0xD2800001,  # mov x1, 0
        0xD2800928,  # mov x8, 73          ppoll(NULL, 0, NULL, ...)
        0xD4000001,  # svc 0
        0x17FFFFFC,  # b to the ppoll
        0xD503201F,  # nop
    )
) + struct.pack("<4Q", 1, 0, 0, 0)


def program(machine: str) -> bytes:
    """The program for a machine, as an ELF file."""
    codes = {"x86_64": (62, _X86_64), "aarch64": (183, _AARCH64)}
    if machine not in codes:
        raise SandboxError(f"containers cannot be kept alive on {machine}", code="docker_machine", retryable=False)
    number, code = codes[machine]
    size = _HEADERS + len(code)
    header = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8)
    header += struct.pack("<HHIQQQIHHHHHH", 2, number, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + code


def archive(engine_machine: str) -> bytes:
    """A root file system that has the program as `/idle` and nothing else, the same each time."""
    data = program(MACHINES.get(engine_machine, engine_machine))
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as packed:
        info = tarfile.TarInfo(IDLE)
        info.mode, info.size = 0o755, len(data)
        packed.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def place(directory: Path) -> Path:
    """Write the program below `directory`, once."""
    path = directory / f"idle-{os.uname().machine}"
    wanted = program(os.uname().machine)
    if not path.is_file() or path.read_bytes() != wanted:
        directory.mkdir(parents=True, exist_ok=True)
        write(path, wanted, mode=0o755)
    return path


_BOOT = Path(__file__).resolve().with_name("helper_boot.py")
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


HELPER = "helper"
"""The kind of lease that a helper has while it is made."""
HELPER_REPOSITORY = "pier/helper"
_LABEL = "dev.pier.helper"
_CAPABILITIES = ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "WAKE_ALARM"]
_UNCONFINED = ["seccomp=unconfined", "apparmor=unconfined", "label=disable"]
_ENDING = (404, 409, 500)
"""How engines answer to what is asked of a container that is not there, does not run yet or is just ending."""
_MOST_STARTS = 5
_MAKE_SECONDS = 60
_AGAIN_SECONDS = 1.0


class HelperBox:
    """The container of that name at one engine."""

    def __init__(self, docker: Client, lease: Lease, runtime: Runtime, digest: str) -> None:
        self.volume = f"pier-pack-{digest}"
        """The volume that has the program which keeps containers alive."""
        self._docker = docker
        self._lease = lease
        self._runtime = runtime
        self._image = f"{HELPER_REPOSITORY}:{digest}"
        self._config = _config(runtime, self._image, self.volume)
        config = json.dumps(self._config, sort_keys=True)
        self.name = f"pier-helper-{hashlib.sha256(config.encode()).hexdigest()[:16]}"
        self._starts = 0
        self._refusal = ""

    async def attach(self, mark: str) -> Stream | None:
        """The standard streams of a new session; None if there is no helper that runs."""
        try:
            session = await self._docker.containers.container(self.name).exec(
                list(self._runtime.argv), stdin=True, user="0:0", environment={MARK: mark}
            )
            stream = session.start()
            await stream._init()
        except DockerError as error:
            if error.status not in _ENDING:
                raise
            self._refusal = str(error.message)
            return None
        return stream

    async def ended(self) -> None:
        """Wait until it does not run. Engines leave the streams of a session open when they kill the container."""
        container = self._docker.containers.container(self.name)
        while True:
            try:
                await container.wait()
                return
            except DockerError as error:
                if error.status == 404:
                    return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(_AGAIN_SECONDS)

    async def ensure(self) -> None:
        """Have it run. When it is just being started or removed by somebody else, it may not do so yet."""
        container = self._docker.containers.container(self.name)
        try:
            state = (await container.show())["State"]
        except DockerError as error:
            if error.status != 404:
                raise
            await self._make_whole()
            return
        try:
            if state.get("Paused"):
                await container.unpause()
            elif not state.get("Running"):
                await container.start()
        except DockerError as error:
            if error.status not in _ENDING:
                raise
            # One that has ended and can be neither started nor waited for must not keep the name for ever.
            await remove_idle(self._docker, self.name)

    async def _make_whole(self) -> None:
        """Make it. An engine goes on with what it was asked for, so whoever is cancelled waits until that is done."""
        making = asyncio.ensure_future(self._make())
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making], timeout=_MAKE_SECONDS)
            if making.done() and not making.cancelled():
                making.exception()
            raise

    async def _make(self) -> None:
        self._starts += 1
        if self._starts > _MOST_STARTS:
            why = f": {self._refusal}" if self._refusal else ""
            raise SandboxError(f"the helper {self.name} does not stay{why}", code="helper_start", hint="pier doctor")
        self._lease.write(HELPER, self.name, {"engine": self._docker.address, "name": self.name})
        try:
            async with in_use_lock(self._image):
                async with only_one(pier_home() / "docker" / "locks", self._image):
                    await bring_image(self._docker, self._image, self._runtime.archive, "pier's helper")
                container = await self._create()
            if container is not None:
                await self._start(container)
        finally:
            self._lease.strike(HELPER, self.name)

    async def _create(self) -> DockerContainer | None:
        """None if somebody else has just made it."""
        try:
            return await self._docker.containers.create(self._config, name=self.name)
        except DockerError as error:
            if error.status != 409 and "already in use" not in str(error.message):
                raise
            return None

    async def _start(self, container: DockerContainer) -> None:
        try:
            await container.start()
        except DockerError as error:
            if error.status != 409:
                await remove_idle(self._docker, self.name)
                raise


async def remove_idle(docker: aiodocker.Docker, name: str) -> None:
    """Remove a helper that was made and never ran. One that runs ends itself, and may be used by others."""
    try:
        await docker.containers.container(name).delete(v=True)
    except DockerError as error:
        if error.status not in _ENDING:
            raise engine_error(error) from error


def _config(runtime: Runtime, image: str, volume: str) -> dict[str, Any]:
    return {
        "Image": image,
        "Entrypoint": [*runtime.argv, "--keep"],
        "Cmd": [],
        "Env": list(runtime.env),
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": {_LABEL: image},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "host",
            "PidMode": "host",
            "CgroupnsMode": "host",
            "CapAdd": _CAPABILITIES,
            "SecurityOpt": _UNCONFINED,
            "LogConfig": {"Type": "none"},
            "Binds": ["/sys/fs/cgroup:/sys/fs/cgroup:rw"],
            "Mounts": [{"Type": "volume", "Source": volume, "Target": f"/{IDLE}"}],
        },
    }
