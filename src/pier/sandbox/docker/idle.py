"""The program that keeps a container alive: it ignores its dead children, so that they vanish, and waits for ever.

No image has to bring a shell or `sleep` for that. The program is a few machine instructions in an ELF file of its own.
"""

from __future__ import annotations

import io
import os
import struct
import tarfile
from pathlib import Path

from pier.errors import SandboxError
from pier.files import write

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
