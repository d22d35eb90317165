"""The filter is loaded in a real child process, which then tries the calls that matter."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pier.sandbox import seccomp

pytestmark = pytest.mark.plain
needs_table = pytest.mark.skipif(not seccomp.supported(), reason=f"no table for {platform.machine()}")
_libc = ctypes.CDLL(None, use_errno=True)


def behind_filter(body: Callable[[], int], **options: bool) -> int:
    """What `body` returns (0 to 250) in a child process behind the filter."""
    filter = seccomp.program(**options)
    child = os.fork()
    if child == 0:
        code = 251
        try:
            _libc.prctl(38, 1, 0, 0, 0)
            seccomp.load(filter)
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def raw(name: str, *arguments: object) -> Callable[[], int]:
    number = seccomp._NUMBERS[platform.machine()][name]
    return lambda: 0 if _libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()


@needs_table
@pytest.mark.parametrize(
    "name", ["mount", "umount2", "pivot_root", "setns", "bpf", "keyctl", "perf_event_open", "fsopen", "userfaultfd"]
)
def test_refuses_like_docker(name: str) -> None:
    assert behind_filter(raw(name, 0, 0, 0, 0, 0)) == errno.EPERM


@needs_table
@pytest.mark.parametrize("name", ["clone3", "io_uring_setup", "io_uring_enter"])
def test_hides_what_it_cannot_look_into(name: str) -> None:
    assert behind_filter(raw(name, 0, 0)) == errno.ENOSYS


@needs_table
@pytest.mark.parametrize("flag", [0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
def test_no_new_namespaces(flag: int) -> None:
    assert behind_filter(raw("unshare", flag)) == errno.EPERM
    assert behind_filter(raw("clone", ctypes.c_ulong(flag | 17), 0, 0, 0, 0)) == errno.EPERM


@needs_table
@pytest.mark.parametrize("family", [17, 38, 40, 44, 29, 31])
def test_no_sockets_that_a_network_namespace_does_not_bind(family: int) -> None:
    attempt = lambda: errno_of(lambda: socket.socket(family, socket.SOCK_STREAM))  # noqa: E731
    assert behind_filter(attempt) == errno.EAFNOSUPPORT


@needs_table
def test_ordinary_work_goes_on() -> None:
    def body() -> int:
        for family in (socket.AF_UNIX, socket.AF_INET):
            socket.socket(family).close()
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
        child = os.fork()
        if child == 0:
            os.execv("/bin/sh", ["sh", "-c", "echo $(id -u) | cat >/dev/null"])
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert behind_filter(body) == 0


@needs_table
def test_packet_sockets_on_demand() -> None:
    attempt = lambda: errno_of(lambda: socket.socket(17, socket.SOCK_RAW, 0))  # noqa: E731
    assert behind_filter(attempt, packet_sockets=True) in (0, errno.EPERM)


@needs_table
def test_single_id_pretends_to_change_owners(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()

    def body() -> int:
        os.chown(path, 12345, 12345)
        os.setgroups([1, 2, 3])
        os.setresuid(999, 999, 999)
        os.mknod(tmp_path / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.mkfifo(tmp_path / "fifo")
        return 0

    assert behind_filter(body, single_id=True) == 0
    assert path.stat().st_uid == os.getuid()
    assert not (tmp_path / "device").exists()
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


@needs_table
@pytest.mark.parametrize("single_id", [False, True])
def test_limits_are_set_of_oneself_only(single_id: bool) -> None:
    def body() -> int:
        core = resource.RLIMIT_CORE
        resource.prlimit(0, core, resource.prlimit(os.getppid(), core))
        return errno_of(lambda: resource.prlimit(os.getppid(), core, resource.prlimit(0, core)))

    assert behind_filter(body, single_id=single_id) == errno.EPERM


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("single_id", [False, True])
def test_every_path_through_the_program_ends(machine: str, single_id: bool) -> None:
    code = seccomp.program(machine=machine, single_id=single_id)
    rows = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    assert len(rows) < 4096
    for place, (kind, jump_true, jump_false, _) in enumerate(rows):
        if kind & 7 == 5:
            assert place + 1 + max(jump_true, jump_false) < len(rows)
    assert rows[-1][0] == 6


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_tables_name_each_call_once(machine: str) -> None:
    numbers = seccomp._NUMBERS[machine]
    assert len(set(numbers.values())) == len(numbers)
