"""What `pier doctor` says of Docker: which engine answers, and whether its containers can be entered."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from aiodocker.exceptions import DockerError

from pier.errors import PierError
from pier.image.model import Image, ImageConfig
from pier.image.reach import shown
from pier.sandbox.contract import Finding, Sandbox, SandboxSpec
from pier.sandbox.docker.client import SPACE_HINT, engine_error
from pier.sandbox.docker.engine import Engine

_LITTLE = 1e9
"""Bytes of space below which images and containers are about to fail."""


async def examine(engine: Engine, start: Callable[[SandboxSpec], Awaitable[Sandbox]]) -> list[Finding]:
    """Look at the engine, and enter a container of pier's own there: `start` makes one."""
    version = engine.version
    name = version.get("Platform", {}).get("Name") or "Docker"
    told = f"{name} {version.get('Version', '?')} at {shown(engine.address)}, API {version.get('ApiVersion', '?')}"
    found = [Finding("Docker engine", True, told), await _examine_entrance(engine, start)]
    return [*found, *(await _examine_disk(engine) if found[-1].ok else ())]


async def _examine_disk(engine: Engine) -> list[Finding]:
    """How much space the engine has, if its disk is this machine's."""
    root = await engine.data_directory()
    try:
        space = os.statvfs(root) if root and await engine.shares_disk() else None
    except OSError:
        space = None
    if space is None:
        return []
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    told = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB at {root}"
    if free >= _LITTLE:
        return [Finding("engine's disk", True, told)]
    return [Finding("engine's disk", False, told, SPACE_HINT)]


async def _examine_entrance(engine: Engine, start: Callable[[SandboxSpec], Awaitable[Sandbox]]) -> Finding:
    try:
        async with engine.idle_image() as name, await start(SandboxSpec(Image(name, "", (), ImageConfig()))):
            pass
        if not engine.through_helper:
            return Finding("containers", True, "entered by pier itself, as root on the engine's host")
        helper = await engine.helper()
    except PierError as error:
        return Finding("containers", False, error.message, error.hint or "")
    except DockerError as error:
        return Finding("containers", False, engine_error(error).message)
    modes = ", ".join(sorted(helper.networks))
    disk = "the engine sees this machine's files" if helper.shares_disk else "mounts are copied into volumes"
    return Finding("containers", True, f"entered by a helper container; networks: {modes}; {disk}")
