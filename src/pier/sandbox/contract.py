"""The contract that every backend keeps: getting a sandbox (`Backend`) is apart from using one (`Sandbox`).

`pier.sandbox.conformance` checks each promise below against a running backend. A promise that a backend cannot keep
is declared in its `Capabilities`; everything else holds everywhere.
"""

from __future__ import annotations

import asyncio
import io
import socket
import tarfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pier.errors import SandboxError, UsageError
from pier.image.model import Image, OnProgress
from pier.lease import Held, Lease
from pier.network.policy import NetworkMode, NetworkPolicy, OnDecision
from pier.sandbox.compose import MAIN, Composition


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """A Dockerfile to be built. `key` names everything that the result depends on. `network` is what RUN steps may
    reach; None is whatever the builder offers."""

    key: str
    context: Path
    dockerfile: Path | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    network: NetworkPolicy | None = None
    on_progress: OnProgress | None = field(default=None, compare=False, repr=False)

    @property
    def file(self) -> Path:
        return self.dockerfile or self.context / "Dockerfile"


OUTPUT_LIMIT = 16 * 1024 * 1024
"""The default limit on the bytes of each stream that a `Result` keeps. What is beyond is read and dropped."""

LOST = "sandbox"
"""The error code for a request whose process inside the sandbox was killed or stopped, while the sandbox lives on."""

Command = str | Sequence[str]
"""A string runs in the image's shell (`/bin/sh -c`), a sequence is an argv; no shell is needed for the latter."""

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], Awaitable[None] | None]
DEFAULT_PROCESSES = 4096
"""The default limit on processes and threads in a sandbox."""

ProtocolFactory = Callable[[], asyncio.BaseProtocol]

DISK_FAULTS = frozenset({"disk_full", "storage"})
"""Codes of errors of the disk that a sandbox is on."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Something put at `target`: a bind of a host path (`source`), or a private tmpfs if `source` is None."""

    target: str
    source: Path | None = None
    read_only: bool = True
    size: int | None = None

    @classmethod
    def parse(cls, text: str, flag: str, default: str = "ro") -> Mount:
        """A mount as `SRC:DST[:ro|rw]`, with an absolute source. `UsageError` names the `flag`."""
        source, _, rest = text.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target.startswith("/") or mode not in ("", "ro", "rw"):
            expected = "SRC:DST[:ro|rw] with an absolute DST"
            raise UsageError(f"invalid value {text!r} for {flag}: expected {expected}", code="mounts")
        return cls(target, Path(source).expanduser().resolve(), read_only=(mode or default) == "ro")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use, all of its processes together. None means unlimited. Sizes are in bytes."""

    cpus: float | None = None
    memory: int | None = None
    processes: int | None = None
    disk: int | None = None
    open_files: int | None = None

    def over(self, share: Limits) -> Limits:
        """These limits, with those of `share` where they are None. Here 0 means no limit."""
        own, others = self.named(), share.named()
        return Limits(**{name: (others[name] if own[name] is None else own[name]) or None for name in own})

    def named(self) -> dict[str, Any]:
        """The limits by their names."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """All that is needed to start a sandbox. `user`, `workdir` and `env` add to and go before the image's own. A
    `workdir` that is missing is made and belongs to the user."""

    image: Image
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    limits: Limits = field(default_factory=Limits)
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None
    files_as: str | None = None
    """The user that calls about files act as if they name none; None is root (see `Sandbox`)."""
    hostname: str = "pier"
    no_new_privileges: bool = False
    gpus: int = 0
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    on_progress: OnProgress | None = field(default=None, compare=False, repr=False)
    """Receives a line about long work that has to be done before the sandbox can start."""
    on_decision: OnDecision | None = field(default=None, compare=False, repr=False)
    """Receives each decision of the network policy; these are the lines of a trial's `network.jsonl`."""
    hidden: tuple[Path, ...] = ()
    """Directories of this machine that the sandbox must not see, whatever is mounted; pier's own always are."""
    keep: Path | None = None
    """A file that will hold the sandbox's id as long as what it wrote must outlive a killed owner (`reopen`)."""
    compose: Composition | None = None
    """The services of the trial; this sandbox is the service `main`. Only for backends with `Capabilities.compose`."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended. `exit_code` is 128 + n after signal n. `timed_out`: pier killed it at its deadline.
    `out_of_disk`: it was killed because the sandbox had written more than its limit."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    out_of_memory: bool = False
    out_of_disk: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do on this machine, now."""

    networks: frozenset[NetworkMode] = frozenset({"none"})
    switch_network: bool = False
    listen: bool = True
    snapshot: bool = False
    tty: bool = True
    compose: bool = False
    bind_mounts: bool = True
    users: bool = True
    isolates_verifier: bool = False
    """Whether `Sandbox.isolate` works."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """For each field of `Limits`: by what it is enforced (`cgroup`, `namespace`, `rlimit`, `watched`, `affinity`,
    `quota`), absent if it is not. An `rlimit` on processes holds for each user id apart."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `pier doctor`: the subject, whether it is in order, and the command that fixes it."""

    subject: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class NewFile:
    """What `Sandbox.put_files` makes: a file with `data`, or a directory without; `path` is relative."""

    path: str
    mode: int
    data: bytes | None = None
    mtime: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One path whose content, owner or mode differs from the image. `mark` is opaque and differs whenever the file was
    written again, so that two listings show what happened between them. Directories count only when removed."""

    path: str
    kind: Literal["added", "changed", "removed"]
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that was still running: its number and user inside, and the beginning of its command line."""

    pid: int
    uid: int
    command: str


@dataclass(frozen=True, slots=True)
class Isolation:
    """`sandbox` is a view of a sandbox for a verifier, None if nothing else runs there. Of `count` processes that run
    some are described in `survivors`."""

    sandbox: Sandbox | None = None
    survivors: tuple[Survivor, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What `Sandbox.stat` and `Sandbox.list_dir` know of a path."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float


class Process(ABC):
    """A running command with its streams. Leaving the context kills the whole tree that it started."""

    @property
    def has_begun(self) -> bool:
        """Whether its program ran at all: one that does not exist, or may not be run, did not."""
        return True

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to stdin; returns when the pipe took it. Ignored if the command closed its stdin."""

    @abstractmethod
    async def close_stdin(self) -> None: ...

    @abstractmethod
    async def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size. Only with `tty`."""

    @abstractmethod
    async def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the command and every process that it started, also those that left its session. Idempotent; every
        caller waits until they are dead."""

    @abstractmethod
    async def wait(self) -> Result:
        """Wait until the command ended and its output was read; `stdout`/`stderr` hold what `on_output` did not get.
        What `on_output` raises is raised here, after the command was killed."""

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.kill())


class Listener(ABC):
    """A socket inside a sandbox that pier serves from outside."""

    port: int

    @abstractmethod
    async def close(self) -> None: ...


class Sandbox(ABC):
    """A running sandbox. All methods raise `SandboxError` when the sandbox is gone; none of them hangs then. A wrong
    argument is an `ArgumentError` before anything is done (`pier.sandbox.arguments` has the checks), and a path that is
    not what a call needs a `PathError`: a FileNotFoundError, PermissionError, IsADirectoryError or NotADirectoryError
    where that fits. The sandbox goes on after either. Relative paths are meant from `spec.workdir`, else from the
    image's.

    Calls about files act as `user` (a name or `uid[:gid]`), else as `spec.files_as`, as that user's shell would: that
    user's rights decide, what is made belongs to that user, links are followed, and a file that exists is written in
    place, so that it keeps its mode, owner and links. Without either, or with an `owner`, they act as root and trust
    nothing inside: a link is not followed but replaced, a file is replaced at once by a new one, and what is made,
    parents included, belongs to `owner`, else to root. No call is ever led out of the sandbox by a link.

    Use as an async context manager, or call `stop`.
    """

    id: str
    spec: SandboxSpec

    @abstractmethod
    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
        stdin: bool = False,
        on_output: OnOutput | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Process:
        """Start a command. Without `stdin` it reads from /dev/null. A program that does not exist exits with 127,
        one that may not be run with 126, a missing `cwd` is a `SandboxError`."""

    @abstractmethod
    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
        stdin: bytes | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Result:
        """Run a command to its end. A timeout or a cancel kills its whole process tree inside the sandbox, processes
        in other sessions and double-forked ones included; a timeout is reported in the result, not raised. `user` is a
        name or `uid[:gid]`; a uid needs no passwd entry. `env` adds to the sandbox's own."""

    @abstractmethod
    async def upload(
        self,
        source: Path,
        target: str,
        *,
        owner: str | None = None,
        user: str | None = None,
        leave_out: Collection[str] = (),
    ) -> None:
        """Copy a file or a link to the path `target`, or the contents of a directory into the directory `target`,
        without what has one of the paths `leave_out` below it. Parents are made. Modes are kept. No link is followed on
        this side: a source that is a link, or links in it, come as links."""

    @abstractmethod
    async def write_file(
        self,
        target: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        owner: str | None = None,
        user: str | None = None,
    ) -> None:
        """Write one file, text as UTF-8. Parents are made. A new file has the mode 0o644 if there is no `mode`."""

    @abstractmethod
    async def mkdir(
        self, target: str, *, mode: int | None = None, owner: str | None = None, user: str | None = None
    ) -> None:
        """Make a directory and its parents. One that exists stays as it is."""

    @abstractmethod
    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        """What is at a path; links are followed."""

    @abstractmethod
    async def list_dir(self, path: str = ".", *, user: str | None = None) -> list[FileInfo]:
        """The entries of a directory by name; links are listed as links."""

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at a path; links are followed. PermissionError if the user may not know."""
        try:
            await self.stat(path, user=user)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @abstractmethod
    async def download(
        self,
        source: str,
        target: Path,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int | None = None,
        keep_empty: bool = True,
        user: str | None = None,
    ) -> list[str]:
        """Copy a file or a tree out to the host path `target`, which must not exist or be an empty directory. Regular
        files, directories and symlinks come; devices, fifos and sockets are left out and named in the answer; a
        symlink is copied as it is, never followed. Nothing is written outside `target`. `exclude` are glob patterns
        against the path below `source` and against base names. Of a directory from which nothing comes there is
        nothing at `target` without `keep_empty`. Raises `SandboxError` with code `too_large` past `max_bytes`, and
        `StorageError` if this machine cannot write what came."""

    @abstractmethod
    async def read_file(self, source: str, *, max_bytes: int = OUTPUT_LIMIT, user: str | None = None) -> bytes:
        """Read one regular file; without a user no symlink is followed in any part of the path. `SandboxError` with
        code `not_regular` if it is something else and `too_large` past `max_bytes`."""

    async def read_text(self, source: str, *, max_bytes: int = OUTPUT_LIMIT, user: str | None = None) -> str:
        """`read_file` of a file in UTF-8."""
        return (await self.read_file(source, max_bytes=max_bytes, user=user)).decode()

    @abstractmethod
    async def put_tar(self, stream: AsyncIterator[bytes], target: str) -> None:
        """Unpack a tar stream below the directory `target` (made if missing) with its owners, modes and links. An
        entry that would land outside `target` is a `SandboxError` with code `unsafe_archive`."""

    async def put_files(self, files: Sequence[NewFile], target: str, *, clear: Sequence[str] = ()) -> None:
        """Make a few small files and directories of root's below the directory `target` (made if missing), after each
        of the paths `clear` was removed as by `remove`. A directory that is there gets the mode."""
        from pier.sandbox.arguments import check_files, check_paths

        check_files("files", files)
        check_paths("clear", clear)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for file in files:
                entry = tarfile.TarInfo(file.path)
                entry.type = tarfile.DIRTYPE if file.data is None else tarfile.REGTYPE
                entry.mode, entry.mtime, entry.size = file.mode, file.mtime, len(file.data or b"")
                archive.addfile(entry, io.BytesIO(file.data or b""))

        async def once() -> AsyncIterator[bytes]:
            yield buffer.getvalue()

        for path in clear:
            await self.remove(path)
        await self.put_tar(once(), target)

    @abstractmethod
    def get_tar(self, source: str) -> AsyncIterator[bytes]:
        """The directory or file `source` as a tar stream with owners, modes and links."""

    @abstractmethod
    async def remove(self, target: str, *, user: str | None = None) -> None:
        """Remove a file, a link or a tree; a missing one is fine. None of the sandbox's own programs is run."""

    async def changes(self) -> list[Change] | None:
        """What differs from the image now, seen from outside, so that nothing inside can hide it; None if this backend
        cannot tell. Mounts are left out."""
        return None

    async def disk_was_full(self) -> bool:
        """Whether the disk that the sandbox is on was full at some time, as far as the backend watches it. Commands
        may have failed because of that."""
        return False

    @abstractmethod
    async def set_network(self, policy: NetworkPolicy) -> None:
        """Change what the sandbox may reach, from the next packet on. `PolicyError` if that cannot be enforced."""

    @abstractmethod
    async def listen(self, port: int, factory: ProtocolFactory, *, host: str = "127.0.0.1") -> Listener:
        """Put a TCP socket inside the sandbox's own network namespace and serve it from outside: for each connection
        `factory()` gives an asyncio protocol (aiohttp's `web.Server` is such a factory). Works in every network mode.
        No process, credential or file is added inside."""

    async def dial(self, port: int) -> socket.socket:
        """A connection to a TCP port on the sandbox's own loopback; works in every network mode. OSError if nothing
        listens there, `SandboxError` with code `cannot_dial` if this backend cannot."""
        raise SandboxError("this backend cannot connect to a port inside", code="cannot_dial", retryable=False)

    def service(self, name: str) -> Sandbox | None:
        """The sandbox of a service of the same trial; `main` is this one. None if there is no such service."""
        return self if name == MAIN else None

    def services(self) -> tuple[str, ...]:
        """The names of all services of the same trial."""
        return (MAIN,)

    @abstractmethod
    async def kill_all(self) -> int:
        """Kill every process but the sandbox's own init, also ones that are being forked meanwhile; how many died."""

    async def isolate(self, folders: Mapping[str, int]) -> Isolation:
        """A view of this sandbox for a verifier, next to processes that are to go on running. In it `folders` (absolute
        paths with their modes) are empty directories that those processes can neither read nor write nor replace, and
        they cannot trace what runs in it. All else is shared. The view's `kill_all` kills what was started in it, and
        its `stop` ends the view only. After either `kill_all` the view's files can still be read. There is one view at
        a time. `SandboxError` with code `cannot_isolate` if that is not possible, and nothing has changed."""
        raise SandboxError("this backend cannot isolate a verifier", code="cannot_isolate", retryable=False)

    @abstractmethod
    async def snapshot(self) -> Image:
        """Freeze what was written so far as an image that new sandboxes can start from, without copying what is
        shared. Processes inside are killed first. This sandbox goes on, on a new writable layer. The image lives
        until `Backend.remove_snapshot` or until its owner's lease is swept."""

    @abstractmethod
    async def stop(self) -> None:
        """Kill everything and remove all traces, at once. Idempotent, never hangs, safe to call at any moment."""

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())


class Backend(ABC):
    """Starts sandboxes of one kind. One backend object serves many sandboxes at once; use it as a context manager."""

    name: str
    options: tuple[str, ...] = ()
    """The options that its constructor takes in addition to the lease (`--ek NAME=VALUE`)."""
    builder: Literal["pier", "own", "either"] = "pier"
    """Who builds Dockerfiles: pier, in local sandboxes; the backend's own builder; or that where pier cannot."""

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """What this backend can do here. Cached; probes at most once."""

    async def has_gpus(self) -> bool:
        """Whether sandboxes can have GPUs. Not part of `capabilities`, since some backends have to try it out, which
        only trials that ask for one should pay for. Cached; tries at most once."""
        return False

    async def share(self) -> Limits:
        """The default limits of one sandbox on this machine, as far as they can be enforced here."""
        return Limits(processes=DEFAULT_PROCESSES if "processes" in (await self.capabilities()).limits else None)

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, with its policy already in force. It is written into `lease` before anything is made. When
        this raises or is cancelled nothing is left behind. Asking for what `capabilities` lacks is a `SandboxError`
        (a `PolicyError` for networks) before anything starts."""

    async def reopen(self, id: str, spec: SandboxSpec) -> Sandbox:
        """A sandbox with what the sandbox `id` had written when its owner was killed: that one was started with `keep`,
        from the same image. Its `stop` leaves that in place. `SandboxError` with code `cannot_reopen` if it is gone,
        or this backend cannot."""
        raise SandboxError(f"the backend {self.name} cannot", code="cannot_reopen", retryable=False)

    async def find_image(self, reference: str) -> Image | None:
        """An image that the backend keeps itself; None if it has none of that name, or no store."""
        return None

    async def pull_image(self, reference: str, on_progress: OnProgress | None = None) -> Image | None:
        """An image that the backend's own store gets from a registry; None if it has no store. An `ImageError` says why
        it could not."""
        return None

    async def build_image(self, order: BuildOrder) -> Image:
        """An image that the backend's own builder makes and its store keeps. Only where `builder` is not `pier`."""
        raise NotImplementedError(f"the backend {self.name!r} builds nothing itself")

    async def fork(self, image: Image, spec: SandboxSpec, n: int) -> list[Sandbox]:
        """Start n sandboxes from a snapshot; all or none."""
        started: list[Sandbox] = []
        try:
            while len(started) < n:
                started.append(await self.start(replace(spec, image=image)))
        except BaseException:
            for sandbox in started:
                await asyncio.shield(sandbox.stop())
            raise
        return started

    @abstractmethod
    async def remove_snapshot(self, image: Image) -> None:
        """Remove an image made by `Sandbox.snapshot`. No sandbox may still run on it."""

    @abstractmethod
    async def doctor(self) -> list[Finding]:
        """What this machine offers to the backend, what is missing, and how to fix it."""

    @abstractmethod
    async def destroy(self, held: Held) -> None:
        """Remove a thing that a dead owner wrote down. Already gone is fine."""

    @property
    @abstractmethod
    def kinds(self) -> frozenset[str]:
        """The kinds of leased things that `destroy` knows."""

    @property
    @abstractmethod
    def lease(self) -> Lease:
        """Where this backend writes down what it makes."""

    @abstractmethod
    async def close(self) -> None:
        """Stop all sandboxes that are still running and everything that serves them. Idempotent."""

    async def __aenter__(self) -> Backend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.close())
