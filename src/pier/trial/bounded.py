"""Runs a function in a process of pier with limited memory and CPU time, since an agent chose the size of its input.

A runner that is killed for its memory loses every running trial; a child that is killed costs one trajectory. One
child runs at a time.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import pier
from pier.trial.result import captured

P = ParamSpec("P")
R = TypeVar("R")
MEMORY = 2 << 30
SECONDS = 300
_PROGRAM = "import sys; sys.path += sys.argv[1:]; from pier.trial.bounded import main; main()"
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def run_bounded(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of a module of pier in another process. `MemoryError` if it needs more than its limits; `OSError`
    as it was raised; `ValueError` for other errors."""
    request = pickle.dumps((MEMORY, function, args, kwargs))
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(pier.__file__).parents[1]), *sys.path],
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            answer, problem = await process.communicate(request)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    last = problem.decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode and (process.returncode < 0 or last.startswith("MemoryError")):
        raise MemoryError(f"more than {MEMORY >> 20} MB of memory or {SECONDS} s of CPU time are needed")
    if process.returncode:
        raise RuntimeError(f"a process of pier failed: {last or process.returncode}")
    value, error = pickle.loads(answer)
    if error is not None:
        raise error
    return value


def main() -> None:
    """The child: read a call from standard input, write its result or error to standard output."""
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
    if error is not None and not isinstance(error, OSError):
        error = ValueError(f"{type(error).__name__}: {error}")
    sys.stdout.buffer.write(pickle.dumps((value, error)))
