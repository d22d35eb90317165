"""Runs a function in a child process with limited memory and CPU time, since agents choose the size of its input.

If the runner runs out of memory all trials are lost; if a child does, only one trajectory. One child runs at a time.
All readers of agents' recordings and logs use this, except those with their own limits. `read_back` reads small
recordings without a child.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import subprocess
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import pier
from pier.errors import PierError
from pier.trial.result import captured

P = ParamSpec("P")
R = TypeVar("R")
MEMORY = 2 << 30
SECONDS = 300
SMALL = 8 << 20
"""Maximum bytes of a recording and its requests to read in this process, which may take thirty times as much memory."""
_PROGRAM = "import sys; sys.path += sys.argv[1:]; from pier.trial.bounded import main; main()"
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
_lock = threading.Lock()


async def read_back(read: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call a function that reads a recording of at most `most` bytes: in a thread if the recording is small, else in a
    child as `run_bounded` does."""
    from pier.record.reader import RecordingTooLarge

    try:
        return await asyncio.to_thread(read, *args, **kwargs, most=SMALL)
    except RecordingTooLarge:
        return await run_bounded(read, *args, **kwargs, most=None)


def read_back_now(read: Callable[..., R], path: Path, *args: Any) -> R:
    """The same without an event loop, for the recording at `path`. `RecordingTooLarge` replaces `MemoryError`."""
    from pier.record.reader import RecordingTooLarge

    try:
        return read(path, *args, most=SMALL)
    except RecordingTooLarge:
        try:
            return call_bounded(read, path, *args, most=None)
        except MemoryError as error:
            raise RecordingTooLarge(f"cannot read the recording {path}: {error}") from None


async def run_bounded(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of pier in a child process. `MemoryError` if it exceeds the limits; `OSError` and `PierError` are
    passed on; other errors are `ValueError`."""
    request = pickle.dumps((MEMORY, function, args, kwargs))
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        process = await asyncio.create_subprocess_exec(*_command(), stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            answer, problem = await process.communicate(request)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return _result(process.returncode or 0, answer, problem)


def call_bounded(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The same without an event loop."""
    request = pickle.dumps((MEMORY, function, args, kwargs))
    with _lock:
        done = subprocess.run(_command(), input=request, capture_output=True, check=False)
    return _result(done.returncode, done.stdout, done.stderr)


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(pier.__file__).parents[1]), *sys.path]


def _result(code: int, answer: bytes, problem: bytes) -> Any:
    last = problem.decode(errors="replace").strip().rpartition("\n")[2]
    if code and (code < 0 or last.startswith("MemoryError")):
        raise MemoryError(f"more than {MEMORY >> 20} MB of memory or {SECONDS} s of CPU time are needed")
    if code:
        raise RuntimeError(f"a process of pier failed: {last or code}")
    value, error = pickle.loads(answer)
    if error is not None:
        raise error
    return value


def main() -> None:
    """Run the child: read a call from standard input, write its result or error to standard output."""
    memory, function, args, kwargs = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    value = None
    with captured() as failure:
        value = function(*args, **kwargs)
    error = failure.error
    if isinstance(error, MemoryError):
        raise error
    if error is not None and not isinstance(error, OSError | PierError):
        error = ValueError(f"{type(error).__name__}: {error}")
    sys.stdout.buffer.write(pickle.dumps((value, error)))
