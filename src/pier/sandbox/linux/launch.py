"""Starts one command inside a sandbox: finds the program, becomes the user, takes the streams or a terminal.

Runs in a worker (see `pier.sandbox.linux.worker`), with the sandbox's root. A command as root without a terminal is
spawned without copying this process; others take a fork, because ids and a controlling terminal are set in between.

Who a command runs as, by the sandbox's own /etc/passwd and /etc/group.

Those files are the sandbox's to write, so they are read with care: regular files only, and not more than a megabyte.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
import termios
from collections.abc import Callable, Iterator
from typing import Any

from pier.sandbox.linux import kernel

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
_RESET = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
"""What this interpreter ignores, and whatever whoever started pier did, is no command's concern."""


class NotStarted(Exception):
    """The command cannot be started. `code` is a stable word for machines."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class CannotRun(Exception):
    """The program does not exist (127) or may not be run (126), which is an exit code and not an error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Program:
    """What is to be run: `candidates` are the files that it may be, in the order of the search path."""

    def __init__(
        self, argv: list[str], env: dict[str, str], user: User, first: Callable[[], None] | None, extra: int
    ) -> None:
        self.argv = argv
        self.env = env
        self.user = user
        self.first = first
        self.extra = extra
        self.candidates = _candidates(argv[0], env["PATH"])


def launch(
    request: dict[str, Any],
    fds: list[int],
    *,
    many_ids: bool,
    first: Callable[[], None] | None = None,
    extra: int = -1,
) -> tuple[int, int]:
    """Start the command; its pid, and the terminal's master or -1. `fds` are its stdin, stdout and stderr. `first` is
    done by its process before anything else. `extra` is a capability that it keeps, whichever user it runs as."""
    try:
        user = find_user(request["user"])
    except NoSuchUser as error:
        raise NotStarted(str(error), "no_such_user") from None
    if not many_ids and (user.uid or user.gid):
        raise NotStarted(f"there is only one id here, so nothing can run as {request['user']}", "single_id")
    env = {"PATH": PATH, "HOME": user.home} | request["env"]
    _enter(request["cwd"])
    argv = request["argv"]
    if not argv or any("\0" in part for part in argv) or any("\0" in part for pair in env.items() for part in pair):
        raise NotStarted(
            "a command needs a program, and no part of it or its environment may have a NUL", "bad_command"
        )
    program = Program(argv, env, user, first, extra)
    if request.get("tty"):
        return _launch_terminal(program, request["tty"])
    if user.uid == 0 and user.gid == 0 and first is None:
        return _spawn(program, fds), -1
    return _fork(program, fds, terminal=False), -1


def _enter(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        raise NotStarted(f"cannot work in {path}: {os.strerror(error.errno or 0)}", "no_such_directory") from None


def _candidates(program: str, path: str) -> list[str]:
    if "/" in program:
        return [program]
    return [f"{part or '.'}/{program}" for part in path.split(":")] if program else []


def _cannot_run(program: str, error: OSError | None) -> CannotRun:
    if error is None or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CannotRun(f"{program}: not found", 127)
    return CannotRun(f"{program}: {os.strerror(error.errno or 0)}", 126)


def _spawn(program: Program, fds: list[int]) -> int:
    """Looking for a program before trying to run it spares a process for each directory that lacks it."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    worst: OSError | None = None
    for path in program.candidates:
        try:
            os.stat(path)
            return os.posix_spawn(
                path, program.argv, program.env, file_actions=actions, setsid=True, setsigdef=_RESET, setsigmask=()
            )  # fmt: skip
        except OSError as error:
            worst = _worse(worst, error)
    raise _cannot_run(program.argv[0], worst)


def _worse(one: OSError | None, other: OSError) -> OSError:
    missing = (errno.ENOENT, errno.ENOTDIR)
    return other if one is None or one.errno in missing else one


def _launch_terminal(program: Program, size: list[int]) -> tuple[int, int]:
    program.env.setdefault("TERM", "xterm")
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    slave = -1
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("I", fcntl.ioctl(master, _TIOCGPTN, b"\0" * 4))[0]
        slave = os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))
        if program.user.uid:
            os.fchown(slave, program.user.uid, -1)
        return _fork(program, [slave, slave, slave], terminal=True), master
    except BaseException:
        os.close(master)
        raise
    finally:
        if slave >= 0:
            os.close(slave)


def _fork(program: Program, fds: list[int], *, terminal: bool) -> int:
    report_in, report_out = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        step = b"f"
        try:
            if program.first is not None:
                program.first()
            step = b"u"
            _become(program, fds, terminal)
            worst: OSError | None = None
            for path in program.candidates:
                try:
                    os.execve(path, program.argv, program.env)
                except OSError as error:
                    worst = _worse(worst, error)
            os.write(report_out, b"%d" % (worst.errno or 0 if worst else errno.ENOENT))
        except OSError as error:
            os.write(report_out, b"%s%d" % (step, error.errno or 0))
        except Exception:  # noqa: BLE001 - the parent must not take this process for the command
            os.write(report_out, b"a0")
        finally:
            os._exit(127)
    os.close(report_out)
    report = os.read(report_in, 64)
    os.close(report_in)
    if not report:
        return pid
    os.waitpid(pid, 0)
    if report.startswith(b"a"):
        raise NotStarted("the command or its environment holds something that cannot be passed on", "bad_argument")
    if report.startswith(b"f"):
        raise NotStarted(f"the command's process cannot be prepared: {os.strerror(int(report[1:]))}", "cannot_start")
    if report.startswith(b"u"):
        raise NotStarted(
            f"cannot become user {program.user.name}: {os.strerror(int(report[1:]))}", "cannot_become_user"
        )
    raise _cannot_run(program.argv[0], OSError(int(report), ""))


def _become(program: Program, fds: list[int], terminal: bool) -> None:
    os.setsid()
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    if terminal:
        fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in fds]
    for number, fd in enumerate(moved):
        os.dup2(fd, number)
    user = program.user
    if user.uid or user.gid:
        kernel.become(user.groups, user.gid, user.uid, program.extra)


_MOST = 1 << 20


class User:
    """The ids, groups and home of whom a command runs as."""

    def __init__(self, uid: int, gid: int, groups: list[int], home: str, name: str) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.home = home
        self.name = name


class NoSuchUser(Exception):
    """The sandbox has no such user or group."""


def find_user(wanted: str) -> User:
    """The user for `name`, `uid`, `name:group` or `uid:gid`. A number needs no entry; the empty string is root."""
    who, _, group = (wanted or "0").partition(":")
    row = next((row for row in _rows("/etc/passwd", 7, who) if who in (row[0], row[2])), None)
    if row is not None:
        name, uid, gid, home = row[0], int(row[2]), int(row[3]), row[5] or "/"
    elif _is_id(who):
        name, uid, gid, home = who, int(who), 0, "/root" if who == "0" else "/"
    else:
        raise NoSuchUser(f"unknown user {who!r}: not in the sandbox's /etc/passwd")
    if group:
        gid = _group(group)
        return User(uid, gid, [gid], home, name)
    extra = [int(row[2]) for row in _rows("/etc/group", 4, name) if name in row[3].split(",")]
    return User(uid, gid, sorted({gid, *extra}), home, name)


def _group(wanted: str) -> int:
    if _is_id(wanted):
        return int(wanted)
    for row in _rows("/etc/group", 4, wanted):
        if row[0] == wanted:
            return int(row[2])
    raise NoSuchUser(f"unknown group {wanted!r}: not in the sandbox's /etc/group")


def _rows(path: str, fields: int, wanted: str) -> Iterator[list[str]]:
    """The valid rows of a file that contain `wanted`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return
    try:
        data = os.read(fd, _MOST) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        data = b""
    finally:
        os.close(fd)
    for line in data.decode(errors="surrogateescape").splitlines():
        row = line.split(":") if wanted in line else []
        if len(row) == fields and all(map(_is_id, row[2 : 4 if fields == 7 else 3])):
            yield row


def _is_id(text: str) -> bool:
    """Whether this is a number that the kernel takes for an id; Python knows more digits than it does."""
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 0xFFFFFFFF
