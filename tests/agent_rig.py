"""Real agents from packs in sandboxes of this machine, with a model of the test's own.

Packs are built by `.ci/packs`, not by the tests; an agent whose pack is not there is skipped with that as the reason.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pier.agent.contract import AGENT_LOGS, PACK_PATH, pack_spec
from pier.agent.pack import Pack, PackStore
from pier.endpoint import GATEWAY_PORT
from pier.gateway.server import Gateway
from pier.gateway.session import Policy, Session
from pier.image.model import HOST, Image
from pier.lease import Lease
from pier.sandbox.contract import Mount, Sandbox, SandboxSpec
from pier.sandbox.local import LocalBackend
from tests.parts import need_parts

ROOT = Path(__file__).parents[1]
PACKS = Path(os.environ.get("PIER_PACKS") or ROOT / ".cache" / "packs")
FOUR = ("claude-code", "codex", "gemini-cli", "opencode")
"""The agents that are tried in every way."""
DESK = "/work-here"
"""Where agents work."""


def need_pack(name: str) -> Pack:
    """The pack of an agent; without it the test is skipped."""
    need_parts()
    spec = pack_spec(name)
    pack = PackStore(PACKS).find(spec) if spec else None
    if pack is None:
        pytest.skip(f"the pack of {name} is not built: .ci/packs {name}")
    return pack


_PLACED = """
mount -t tmpfs none /opt && mkdir -p /opt/pier/agent && mount --bind "$0" /opt/pier/agent || exit 99
program=$1; shift; exec "/opt/pier/agent/bin/$program" "$@"
"""


def on_host(name: str, program: str, *args: str) -> list[str]:
    """A command that runs a program of a pack on this machine, outside of any sandbox. Packs name their loader by the
    path that they have in sandboxes, so the pack is mounted there, for this command alone."""
    return ["unshare", "-rm", "sh", "-c", _PLACED, str(need_pack(name).path), program, *args]


@asynccontextmanager
async def stage(name: str, model: Policy, *, recording: Path | None = None) -> AsyncIterator[tuple[Sandbox, Session]]:
    """A sandbox with the agent's pack, and a model that it may call; `recording` keeps what went over the wire."""
    mounts = (Mount(PACK_PATH, need_pack(name).path),)
    with Lease() as lease:
        async with LocalBackend(lease) as backend, Gateway() as gateway:
            async with await backend.start(SandboxSpec(Image(HOST, HOST), mounts=mounts)) as sandbox:
                await sandbox.write_file(f"{DESK}/note.txt", b"hello\n")
                await sandbox.write_file(f"{AGENT_LOGS}/.keep", b"")
                session = gateway.session("scripted", upstream=model, recording=recording)
                await sandbox.listen(GATEWAY_PORT, gateway.protocol_factory(session))
                yield sandbox, session
