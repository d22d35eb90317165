"""The end of a command that does not want to end: chains of processes that fork and exit without a pause."""

from __future__ import annotations

import os
import struct

import pytest

from pier.image.model import Image
from pier.sandbox import Limits, SandboxSpec
from pier.sandbox.contract import Sandbox
from pier.sandbox.local import LocalBackend

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the program is written in x86_64's own code"),
]

_FORK_AND_EXIT = bytes.fromhex(
    "b8 39 00 00 00  0f 05  85 c0  74 09"  # fork; who is the child goes on behind the exit
    "31 ff  b8 3c 00 00 00  0f 05"  # exit(0)
    "b8 70 00 00 00  0f 05  eb e3"  # setsid, and again from the start
)
_BASE = 0x400000
_BOUND = Limits(processes=5000)
"""So that what is not reaped yet never takes all of the machine's process numbers."""


def chain() -> bytes:
    """A program of nothing else, so that each process lives for a few microseconds."""
    start = 64 + 56
    size = start + len(_FORK_AND_EXIT)
    magic = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, _BASE + start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return magic + head + struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 4096) + _FORK_AND_EXIT


async def _running(sandbox: Sandbox) -> int:
    told = await sandbox.exec("cat /proc/[0-9]*/stat 2>/dev/null | grep -c '(chain) [^ZX]'", timeout=60)
    return int(told.text)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
async def test_no_chain_of_processes_outruns_a_kill(backend: LocalBackend, image: Image, beside: bool) -> None:
    async with await backend.start(SandboxSpec(image, limits=_BOUND)) as sandbox:
        await sandbox.write_file("/bin/chain", chain(), mode=0o755)
        other = await sandbox.spawn("sleep 1000") if beside else None
        for _ in range(100):
            process = await sandbox.spawn("exec chain >/dev/null 2>&1")
            assert (await process.wait()).exit_code == 0
            await process.kill()
            assert await _running(sandbox) == 0
        if other is not None:
            assert (await sandbox.exec("pidof sleep")).ok
            await other.kill()


async def test_many_chains_keep_nobody_waiting(backend: LocalBackend, image: Image) -> None:
    """What ends as fast as it is reaped must not keep pier's own requests from being heard."""
    async with await backend.start(SandboxSpec(image, limits=_BOUND)) as sandbox:
        await sandbox.write_file("/bin/chain", chain(), mode=0o755)
        result = await sandbox.exec("for i in $(seq 40); do chain & done; sleep 1000", timeout=1)
        assert result.timed_out
        assert await _running(sandbox) == 0
