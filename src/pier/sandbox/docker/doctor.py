"""What `pier doctor` says of Docker: which engine answers, and whether its containers can be entered."""

from __future__ import annotations

from pier.errors import PierError
from pier.image.reach import shown
from pier.lease import Lease
from pier.sandbox.contract import Finding
from pier.sandbox.docker.client import connect
from pier.sandbox.docker.engine import Engine


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
        return [Finding("Docker engine", True, told), await _examine_entrance(engine)]
    finally:
        await engine.close()


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
