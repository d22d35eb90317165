"""Files into and out of a sandbox: a worker inside does its half, the loop here does the other if it is small,
and else a thread.

What a worker writes into a pipe, taken by the loop while it is little, and else by a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import secrets
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from pier.beneath import DIRECTORY, remove
from pier.errors import (
    ArgumentError,
    DeniedPathError,
    DirectoryInTheWayError,
    MissingPathError,
    NoDirectoryError,
    PathError,
    SandboxError,
    StorageError,
)
from pier.sandbox import tree
from pier.sandbox.arguments import check_bytes
from pier.sandbox.linux.channel import Channel
from pier.tree import FAULTS, open_regular

T = TypeVar("T")

SMALL = 1 << 17
"""Bytes that are worth no thread."""


class Incoming(Generic[T]):
    """What a worker writes into a pipe: kept here while it is little, else handed to a thread that does the work."""

    def __init__(self, fd: int, work: Callable[[IO[bytes]], T]) -> None:
        self._fd = fd
        self._work = work
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._all: asyncio.Future[None] = self._loop.create_future()
        self._thread: asyncio.Future[T] | None = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Take what is there; whether there may be more at once."""
        try:
            data = os.read(self._fd, SMALL)
        except BlockingIOError:
            return False
        self._kept += data
        if data and len(self._kept) <= SMALL:
            return True
        self._loop.remove_reader(self._fd)
        self._all.set_result(None)
        if data:
            os.set_blocking(self._fd, True)
            self._thread = asyncio.ensure_future(asyncio.to_thread(self._work_on_all))
        return False

    def _work_on_all(self) -> T:
        try:
            with open(self._fd, "rb", closefd=False) as rest:
                return self._work(io.BufferedReader(_Joined(bytes(self._kept), rest), SMALL))
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        """Nobody reads any more, which the worker must learn, or it would wait for ever."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, self._fd, inheritable=False)
        os.close(nothing)

    async def ended(self) -> None:
        """Wait for the end of the stream, which the worker has closed."""
        while not self._all.done() and self._read():
            pass
        await self._all

    async def close(self) -> None:
        """Wait for the thread, which ends when the pipe does."""
        if self._thread is not None:
            await asyncio.wait([self._thread])
            self._thread.exception()
        elif not self._all.done():
            self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def result(self) -> T:
        """What the work gave, or its error."""
        return self._thread.result() if self._thread is not None else self._work(io.BytesIO(self._kept))


class _Joined(io.RawIOBase):
    """Bytes, and then the rest of a stream."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self._first = first
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._first[: len(buffer)] or self._rest.read(len(buffer))
        self._first = self._first[len(data) :]
        buffer[: len(data)] = data
        return len(data)


_CHUNK = 1 << 20
_FEW = 64
"""Entries of a tree that are worth no thread."""
_OF_PATHS = {
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EEXIST, errno.ENOTEMPTY, errno.EXDEV, errno.EBUSY,
    errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ETXTBSY, errno.EOPNOTSUPP,
}  # fmt: skip
"""What the kernel says of a path or of what is there: doing the same again does not help, and the machine is sound."""
_BLAMED_ON_TASK = {"not_regular", "too_large", "unsafe_archive", "no_such_user", "single_id", "broken_archive"}


async def copy(
    channel: Channel,
    request: dict[str, Any],
    *,
    inward: bool,
    work: Callable[[int], Awaitable[Any]],
    cancellable: bool = False,
) -> list[str]:
    """Have a worker do `request` with one end of a pipe while `work` has the other, which it closes. Gives what the
    worker left out. `cancellable`: `work` may be cancelled, else it ends because the pipe is closed."""
    if channel.closed:
        raise channel.lost()
    read, write = os.pipe2(os.O_CLOEXEC)
    theirs, ours = (read, write) if inward else (write, read)
    answer = asyncio.ensure_future(_ask(channel, request, theirs))
    half = asyncio.ensure_future(work(ours))
    try:
        message = await answer
    finally:
        if cancellable:
            half.cancel()
        done = await _finish(half)
    if isinstance(done, BaseException):
        raise done
    _raise_if_failed(message)
    return message.get("skipped", [])


async def _ask(channel: Channel, request: dict[str, Any], fd: int) -> dict[str, Any]:
    """A worker's answer. `fd` is its stream, closed here. The work ends when this is cancelled."""
    number = channel.number()

    def begin() -> None:
        try:
            channel.send({"op": "copy", "id": number, "request": request}, [fd])
        finally:
            os.close(fd)

    try:
        return (await channel.wait(number, begin))[0]
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxError):
            await asyncio.shield(channel.ask({"op": "kill", "job": number}))
        raise


async def put(channel: Channel, request: dict[str, Any], data: bytes) -> None:
    """Have a worker do `request` with `data` as its stream."""
    if len(data) > SMALL:
        await copy(channel, request, inward=True, work=lambda fd: asyncio.to_thread(_feed, fd, data))
        return
    if channel.closed:
        raise channel.lost()
    fd = os.memfd_create("pier-copy", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    _raise_if_failed(await _ask(channel, request, fd))


async def take(channel: Channel, request: dict[str, Any], work: Callable[[IO[bytes]], T]) -> tuple[list[str], T]:
    """Have a worker do `request` and `work` read what it writes: what the worker left out, and what `work` gave. What
    the worker reports goes before what goes wrong here because of it, unless it is that nobody reads any more."""
    if channel.closed:
        raise channel.lost()
    read, write = os.pipe2(os.O_CLOEXEC)
    incoming = Incoming(read, work)
    try:
        message = await _ask(channel, request, write)
        await incoming.ended()
    finally:
        await incoming.close()
    if message.get("errno") != errno.EPIPE:
        _raise_if_failed(message)
    done = incoming.result()
    _raise_if_failed(message)
    return message.get("skipped", []), done


async def _finish(half: asyncio.Future[Any]) -> Any:
    await asyncio.wait([half])
    return None if half.cancelled() else half.exception() or half.result()


def _raise_if_failed(message: dict[str, Any]) -> None:
    if message.get("ok"):
        return
    text, code = message.get("message", "the sandbox lost the copy"), message.get("code", "copy_lost")
    if message.get("errno") in (errno.ENOSPC, errno.EDQUOT):
        raise SandboxError(text, code="disk_full")
    if message.get("errno") in FAULTS:
        raise SandboxError(text, code="storage")
    if code in _BLAMED_ON_TASK:
        raise SandboxError(text, code=code, blame="task", retryable=False)
    if code == ArgumentError.code:
        raise ArgumentError(text)
    raise _path_error(text, code, message.get("errno") or 0) or SandboxError(text, code=code)


def _path_error(text: str, code: str, number: int) -> PathError | None:
    if number == errno.EISDIR:
        return DirectoryInTheWayError(text, number)
    if number == errno.ENOTDIR or code == NoDirectoryError.code:
        return NoDirectoryError(text, errno.ENOTDIR)
    if code == MissingPathError.code:
        return MissingPathError(text, errno.ENOENT)
    if number in (errno.EACCES, errno.EPERM):
        return DeniedPathError(text, number)
    return PathError(text, number) if number in _OF_PATHS else None


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) or 0 :]


async def upload(
    channel: Channel, source: Path, target: str, behalf: dict[str, Any], leave_out: Collection[str]
) -> None:
    """Have a worker write a file, make a link, or unpack a directory that comes as a tar stream. `behalf` is the part
    of the request that says who it is for."""
    request: dict[str, Any] = {"op": "unpack", "target": target} | behalf
    status = os.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        parent, _, name = target.rstrip("/").rpartition("/")
        await put(channel, request | {"target": parent or "/"}, _pack_link(name, str(source.readlink())))
        return
    is_directory = stat.S_ISDIR(status.st_mode)
    if not is_directory:
        if not stat.S_ISREG(status.st_mode):
            raise SandboxError(f"not a regular file: {source}", code="not_regular", blame="task", retryable=False)
        mode = stat.S_IMODE(status.st_mode)
        request |= (
            {"op": "write", "mode": None, "new_mode": mode} if "user" in behalf else {"op": "write", "mode": mode}
        )
    work = _pack_tree if is_directory else _read_file
    if not _is_small(source, status):
        await copy(channel, request, inward=True, work=lambda fd: asyncio.to_thread(_send, fd, work, source, leave_out))
        return
    data = io.BytesIO()
    work(source, data, leave_out)
    await put(channel, request, data.getvalue())


def _pack_link(name: str, leads: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as made:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, leads
        made.addfile(entry)
    return archive.getvalue()


def _is_small(source: Path, status: os.stat_result) -> bool:
    """Whether a file, or a directory without directories, is worth no thread."""
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size <= SMALL
    left, count = SMALL, 0
    with os.scandir(source) as entries:
        for entry in entries:
            left -= entry.stat(follow_symlinks=False).st_size
            count += 1
            if left < 0 or count > _FEW or entry.is_dir(follow_symlinks=False):
                return False
    return True


_Work = Callable[[Path, IO[bytes], Collection[str]], None]


def _send(fd: int, work: _Work, source: Path, leave_out: Collection[str]) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb") as out:
        work(source, out, leave_out)


def _read_file(source: Path, out: IO[bytes], _: Collection[str]) -> None:
    try:
        with open_regular(source) as stream:
            shutil.copyfileobj(stream, out, _CHUNK)
    except tree.TreeError as error:
        raise _refusal(error) from error


def _pack_tree(source: Path, out: IO[bytes], leave_out: Collection[str]) -> None:
    parent = os.open(source.parent if source.name else source, DIRECTORY)
    try:
        tree.pack_entry(parent, source.name or ".", out, leave_out=leave_out, whole=True)
    except tree.TreeError as error:
        raise _refusal(error) from error
    finally:
        os.close(parent)


def _refusal(error: tree.TreeError) -> SandboxError:
    return SandboxError(str(error), code=error.code, blame="task", retryable=False)


def unpack(stream: IO[bytes], target: Path, max_bytes: int | None, keep_empty: bool) -> list[str]:
    """The near half of a download."""
    if not keep_empty and isinstance(stream, io.BytesIO) and not stream.getbuffer():
        return []
    try:
        left_out = receive(stream, target, max_bytes=max_bytes)
    except tree.TreeError as error:
        raise _refusal(error) from error
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    if not keep_empty:
        with contextlib.suppress(OSError):
            target.rmdir()
    return left_out


async def feed_stream(fd: int, stream: AsyncIterator[bytes]) -> None:
    """The near half of unpacking a stream that somebody else makes. It may be cancelled at any moment."""
    os.set_blocking(fd, False)
    try:
        async for data in stream:
            check_bytes("a part of stream", data)
            view = memoryview(data).cast("B")
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await _ready(fd, writable=True)
    except BrokenPipeError:
        return
    finally:
        os.close(fd)


async def _ready(fd: int, *, writable: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)


async def stream(channel: Channel, request: dict[str, Any]) -> AsyncIterator[bytes]:
    """Have a worker pack something and give what it writes, as it comes."""
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    async def take(fd: int) -> None:
        os.set_blocking(fd, False)
        try:
            while True:
                try:
                    data = os.read(fd, _CHUNK)
                except BlockingIOError:
                    await _ready(fd, writable=False)
                    continue
                if not data:
                    return
                await chunks.put(data)
        finally:
            os.close(fd)

    work = asyncio.ensure_future(copy(channel, request, inward=False, work=take))
    try:
        while not (work.done() and chunks.empty()):
            getter = asyncio.ensure_future(chunks.get())
            await asyncio.wait([getter, work], return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
            else:
                getter.cancel()
        work.result()
    finally:
        if not work.done():
            work.cancel()
            while not work.done():
                if not chunks.empty():
                    chunks.get_nowait()
                await asyncio.wait([work], timeout=0.01)


_SINGLE = "content"


def receive(stream: IO[bytes], target: Path, *, max_bytes: int | None = None) -> list[str]:
    """Unpack what `pack` made to the host path `target`, which must not exist or be an empty directory. Parents are
    made. Answers what was left out. Raises FileExistsError if something is there already."""
    if target.is_symlink() or (target.exists() and not _is_empty(target)):
        raise FileExistsError(f"{target} exists already")
    unborn = _make_beside(target)
    try:
        root = os.open(unborn, DIRECTORY)
        try:
            unpacked = tree.unpack(stream, root, max_bytes=max_bytes, single=_SINGLE)
        finally:
            os.close(root)
        if unpacked.alone and not unpacked.skipped:
            if target.is_dir():
                target.rmdir()
            (unborn / _SINGLE).rename(target)
        elif not unpacked.alone:
            unborn.chmod(0o755)
            unborn.rename(target)
    finally:
        with contextlib.suppress(OSError):
            remove(str(unborn))
    return unpacked.skipped


def _make_beside(target: Path) -> Path:
    """A new directory next to `target`. Parents are made."""
    unborn = target.with_name(f".pier-{secrets.token_hex(6)}.tmp")
    try:
        unborn.mkdir(0o700)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        unborn.mkdir(0o700)
    return unborn


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
