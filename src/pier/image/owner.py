"""Runs operations on a store's directories as the owner of the files in them.

As root the store's files have the owners that the image says (0 to 65535), and operations run in a thread. As a plain
user those owners are the user's subordinate ids, which only a process inside a user namespace may handle: operations
then run in one. It reads `[operation, arguments]` from its stdin and writes the answer to its stdout, both JSON, and
uses the standard library only. With a single id all files are the user's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pier
from pier.errors import ImageError
from pier.idmap import IdMap, enter
from pier.image.copying import copy_into, make_directories
from pier.image.layer_directories import adopt_layer, copy_tree, measure, remove_tree, unpack_archive
from pier.image.layer_tar import digest_layer
from pier.image.model import disk_errors

OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "unpack_archive": unpack_archive,
    "copy_tree": copy_tree,
    "remove_tree": remove_tree,
    "measure": measure,
    "digest_layer": digest_layer,
    "adopt_layer": adopt_layer,
    "copy_into": copy_into,
    "make_directories": make_directories,
}
OWNING = frozenset({"unpack_archive", "copy_tree", "copy_into", "make_directories"})
"""The operations that give files their owners, and take `owners` to be told not to."""


def perform(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run an operation by name."""
    with disk_errors(operation.replace("_", " ")):
        return OPERATIONS[operation](**arguments)


def main() -> None:
    """Enter the namespace, perform the operation, answer."""
    enter(IdMap.detect())
    operation, arguments = json.load(sys.stdin)
    try:
        answer = perform(operation, arguments)
    except ImageError as error:
        about = {"code": error.code, "blame": error.blame, "hint": error.hint, "retryable": error.retryable}
        answer = {"error": error.message, "about": about}
    json.dump(answer, sys.stdout)


_PROGRAM = "import sys; sys.path += sys.argv[1:]; from pier.image.owner import main; main()"
"""Starts without running the hooks of site-packages, which takes half of the time."""


async def run(operation: str, **arguments: Any) -> dict[str, Any]:
    """Run one of `pier.image.owner.OPERATIONS`. When this is cancelled no file is written any more."""
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
        *[sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(pier.__file__).parents[1]), *sys.path],
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
