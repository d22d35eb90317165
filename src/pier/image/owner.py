"""Runs operations on a store's directories as whoever owns the files in them.

As root the store's files have the owners that the image says (0 to 65535), and operations run in a thread. As a plain
user those owners are the user's subordinate ids, which only a process inside a user namespace may handle: this module
is then run as a program in there, with a request on its stdin and an answer on its stdout, both JSON. With a single id
all files are the user's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from pier.errors import ImageError
from pier.idmap import IdMap, mapped_argv
from pier.image.operations import OWNING, perform


async def run(operation: str, **arguments: Any) -> dict[str, Any]:
    """Run one of `pier.image.operations.OPERATIONS`. When this is cancelled no file is written any more."""
    if operation in OWNING:
        arguments["owners"] = IdMap.detect().mode != "single"
    if os.geteuid() == 0:
        return await _in_thread(operation, arguments)
    return await _in_namespace(operation, arguments)


async def _in_thread(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    work = asyncio.ensure_future(asyncio.to_thread(perform, operation, arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


async def _in_namespace(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *mapped_argv([sys.executable, "-m", "pier.image.owner"]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    try:
        out, problem = await process.communicate(json.dumps([operation, arguments]).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = json.loads(out)
    except ValueError:
        text = problem.decode(errors="replace").strip().rpartition("\n")[2]
        raise ImageError(
            f"{operation} could not be run in a user namespace: {text or process.returncode}", hint="pier doctor"
        ) from None
    if "error" in answer:
        raise ImageError(answer["error"], **answer["about"])
    return answer


def _main() -> None:
    operation, arguments = json.load(sys.stdin)
    try:
        answer = perform(operation, arguments)
    except ImageError as error:
        about = {"code": error.code, "blame": error.blame, "hint": error.hint, "retryable": error.retryable}
        answer = {"error": error.message, "about": about}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
