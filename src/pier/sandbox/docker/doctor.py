"""What `pier doctor` says of Docker: which engine answers, and whether its containers can be entered."""

from __future__ import annotations

import os

from pier.errors import PierError
from pier.image.reach import shown
from pier.lease import Lease
from pier.sandbox.contract import Finding
from pier.sandbox.docker.client import connect
from pier.sandbox.docker.engine import Engine

_LITTLE = 1e9
"""Bytes of space below which images and containers are about to fail."""


async def examine(address: str, lease: Lease) -> list[Finding]:
    """Look at the engine, and enter nothing that is not pier's."""
    try:
        docker, version = await connect(address)
    except PierError as error:
        return [Finding("Docker engine", False, error.message, error.hint or "")]
    name = version.get("Platform", {}).get("Name") or "Docker"
    told = f"{name} {version.get('Version', '?')} at {shown(address)}, API {version.get('ApiVersion', '?')}"
    engine = Engine(docker, version, lease)
    try:
        found = [Finding("Docker engine", True, told), await _examine_entrance(engine)]
        return [*found, *(await _examine_disk(engine) if found[-1].ok else ())]
    finally:
        await engine.close()


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
    return [
        Finding("engine's disk", False, told, "pier image gc --env docker, and docker system df for what others left")
    ]


async def _examine_entrance(engine: Engine) -> Finding:
    if not engine.through_helper:
        return Finding("containers", True, "entered by pier itself, as root on the engine's host")
    try:
        helper = await engine.helper()
    except PierError as error:
        return Finding("containers", False, error.message, error.hint or "")
    modes = ", ".join(sorted(helper.networks))
    disk = "the engine sees this machine's files" if helper.shares_disk else "mounts are copied into volumes"
    return Finding("containers", True, f"entered by a helper container; networks: {modes}; {disk}")
