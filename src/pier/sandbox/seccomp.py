"""The system call filter of a sandbox, as raw BPF, with nothing but the standard library.

It refuses what Docker's default filter refuses to a container without extra capabilities, and more: every socket
family but unix, inet, inet6 and netlink (vsock in particular is not bound by a network namespace), io_uring (which
would go around the socket rule), new namespaces of any kind, and setting limits of other processes: init and the tests
may have the ids of an agent's commands, and without CPU time or open files they fail. `clone3` answers ENOSYS, because
a filter cannot look into its argument: C libraries then fall back to `clone`. Everything else passes, so sudo, ping,
package managers, debuggers and language runtimes work as they do in a container.

With `single_id` the filter also pretends that changing owners and ids succeeded: in a user namespace with one id they
cannot, and package managers would stop at the first `chown`.

`load` needs CAP_SYS_ADMIN in the caller's user namespace, or no-new-privileges.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)

_LD_WORD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_AT_NUMBER, _AT_MACHINE, _AT_ARGUMENTS = 0, 4, 16
_BEYOND = 600
"""Numbers from here on are of kernels yet to come, or of the x32 calls: unknown to this filter, so not offered."""

_UNSHARED = 0x7E020080
"""Every CLONE_NEW* flag."""
_CLONED = 0x7E020000
"""The same without CLONE_NEWTIME, whose bit is part of the exit signal in `clone`."""

_FAMILIES = (1, 2, 10, 16)
_PACKET = 17
_PERSONALITIES = (0, 0x0008, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "mount_setattr": 442,
    "quotactl_fd": 443, "statmount": 457, "listmount": 458, "open_tree_attr": 467,
}  # fmt: skip

_NUMBERS = {
    "x86_64": _COMMON | {
        "acct": 163, "add_key": 248, "bpf": 321, "clock_settime": 227,
        "create_module": 174, "delete_module": 176, "fanotify_init": 300, "finit_module": 313, "get_kernel_syms": 177,
        "get_mempolicy": 239, "init_module": 175, "ioperm": 173, "iopl": 172, "kcmp": 312, "kexec_file_load": 320,
        "kexec_load": 246, "keyctl": 250, "lookup_dcookie": 212, "mbind": 237, "migrate_pages": 256, "mount": 165,
        "move_pages": 279, "nfsservctl": 180, "open_by_handle_at": 304, "perf_event_open": 298, "pivot_root": 155,
        "query_module": 178, "quotactl": 179, "reboot": 169, "request_key": 249, "set_mempolicy": 238, "setns": 308,
        "settimeofday": 164, "swapoff": 168, "swapon": 167, "sysfs": 139, "syslog": 103, "umount2": 166, "uselib": 134,
        "userfaultfd": 323, "ustat": 136, "vhangup": 153,
        "clone": 56, "personality": 135, "socket": 41, "socketpair": 53, "unshare": 272,
        "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "setuid": 105, "setgid": 106, "setreuid": 113,
        "setregid": 114, "setgroups": 116, "setresuid": 117, "setresgid": 119, "setfsuid": 122, "setfsgid": 123,
        "capset": 126, "mknod": 133, "mknodat": 259, "prlimit64": 302,
    },
    "aarch64": _COMMON | {
        "acct": 89, "add_key": 217, "bpf": 280, "clock_settime": 112,
        "delete_module": 106, "fanotify_init": 262, "finit_module": 273, "get_mempolicy": 236, "init_module": 105,
        "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104, "keyctl": 219, "lookup_dcookie": 18, "mbind": 235,
        "migrate_pages": 238, "mount": 40, "move_pages": 239, "nfsservctl": 42, "open_by_handle_at": 265,
        "perf_event_open": 241, "pivot_root": 41, "quotactl": 60, "reboot": 142, "request_key": 218,
        "set_mempolicy": 237, "setns": 268, "settimeofday": 170, "swapoff": 225, "swapon": 224, "syslog": 116,
        "umount2": 39, "userfaultfd": 282, "vhangup": 58,
        "clone": 220, "personality": 92, "socket": 198, "socketpair": 199, "unshare": 97,
        "fchown": 55, "fchownat": 54, "setuid": 146, "setgid": 144, "setreuid": 145, "setregid": 143, "setgroups": 159,
        "setresuid": 147, "setresgid": 149, "setfsuid": 151, "setfsgid": 152, "capset": 91, "mknodat": 33,
        "prlimit64": 261,
    },
}  # fmt: skip

_REFUSED = (
    "acct", "add_key", "bpf", "clock_settime", "create_module", "delete_module", "fanotify_init", "finit_module",
    "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms", "get_mempolicy", "init_module", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "listmount", "lookup_dcookie", "mbind", "migrate_pages",
    "mount", "mount_setattr", "move_mount", "move_pages", "nfsservctl", "open_by_handle_at", "open_tree",
    "open_tree_attr", "perf_event_open", "pivot_root", "query_module", "quotactl", "quotactl_fd", "reboot",
    "request_key", "set_mempolicy", "setns", "settimeofday", "statmount", "swapoff", "swapon", "sysfs", "syslog",
    "umount2", "uselib", "userfaultfd", "ustat", "vhangup",
)  # fmt: skip
_UNKNOWN = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
_PRETENDED = (
    "chown", "fchown", "lchown", "fchownat", "setuid", "setgid", "setreuid", "setregid", "setgroups", "setresuid",
    "setresgid", "setfsuid", "setfsgid", "capset",
)  # fmt: skip


def supported(machine: str | None = None) -> bool:
    """Whether there is a table for this kind of machine."""
    return (machine or os.uname().machine) in _NUMBERS


def program(*, single_id: bool = False, packet_sockets: bool = False, machine: str | None = None) -> bytes:
    """The filter as BPF instructions, 8 bytes each."""
    kind = machine or os.uname().machine
    numbers = _NUMBERS[kind]
    families = (*_FAMILIES, _PACKET) if packet_sockets else _FAMILIES
    code = [_load(_AT_MACHINE), *_unless(_JEQ, _AUDIT[kind], errno.ENOSYS), _load(_AT_NUMBER)]
    code += _when(_JGE, _BEYOND, errno.ENOSYS)
    code += _refuse(numbers, _REFUSED, errno.EPERM)
    code += _refuse(numbers, _UNKNOWN, errno.ENOSYS)
    if single_id:
        code += _refuse(numbers, _PRETENDED, 0)
        for name, argument in (("mknod", 1), ("mknodat", 2)):
            code += _pretend_device(numbers, name, argument)
    code += _about(numbers["prlimit64"], 0, _refuse_limits())
    code += _about(numbers["clone"], 0, _when(_JSET, _CLONED, errno.EPERM))
    code += _about(numbers["unshare"], 0, _when(_JSET, _UNSHARED, errno.EPERM))
    code += _about(numbers["personality"], 0, _unless_any(_PERSONALITIES, errno.EPERM))
    for name in ("socket", "socketpair"):
        code += _about(numbers[name], 0, _unless_any(families, errno.EAFNOSUPPORT))
    return b"".join([*code, _op(_RET, _ALLOW)])


def load(filter: bytes) -> None:
    """Put this process, and all that it will start, behind the filter. There is no way back."""
    buffer = ctypes.create_string_buffer(filter, len(filter))
    header = struct.pack("HxxxxxxP", len(filter) // 8, ctypes.addressof(buffer))
    if _libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot load the system call filter: {os.strerror(number)}")


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, k)


def _load(offset: int) -> bytes:
    return _op(_LD_WORD, offset)


def _answer(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


def _when(test: int, value: int, number: int) -> list[bytes]:
    return [_op(test, value, 0, 1), _answer(number)]


def _unless(test: int, value: int, number: int) -> list[bytes]:
    return [_op(test, value, 1, 0), _answer(number)]


def _unless_any(values: Sequence[int], number: int) -> list[bytes]:
    tests = [_op(_JEQ, value, len(values) - place) for place, value in enumerate(values)]
    return [*tests, _answer(number)]


def _refuse(numbers: dict[str, int], names: Sequence[str], number: int) -> list[bytes]:
    present = [numbers[name] for name in names if name in numbers]
    tests = [_op(_JEQ, value, len(present) - place - 1) for place, value in enumerate(present[:-1])]
    return [*tests, _op(_JEQ, present[-1], 0, 1), _answer(number)]


def _about(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Run `body` on an argument's low word if the call is `number`; afterwards the number is loaded again."""
    inner = [_load(_AT_ARGUMENTS + 8 * argument), *body, _load(_AT_NUMBER)]
    return [_op(_JEQ, number, 0, len(inner)), *inner]


def _pretend_device(numbers: dict[str, int], name: str, argument: int) -> list[bytes]:
    if name not in numbers:
        return []
    kinds = [_op(_AND, 0o170000), *_when(_JEQ, stat.S_IFCHR, 0), *_when(_JEQ, stat.S_IFBLK, 0)]
    return _about(numbers[name], argument, kinds)


def _refuse_limits() -> list[bytes]:
    """For the process that is in the accumulator: limits may be set of oneself, and be read of all. The new ones are
    the third argument, of two words."""
    new = _AT_ARGUMENTS + 8 * 2
    tests = [_load(new), *_unless(_JEQ, 0, errno.EPERM), _load(new + 4), *_unless(_JEQ, 0, errno.EPERM)]
    return [_op(_JEQ, 0, len(tests)), *tests]
