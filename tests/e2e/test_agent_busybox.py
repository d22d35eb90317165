"""Real agents in an image of nothing but a busybox: on this machine's own sandboxes, and on Docker with an engine of
the tests' own. Packs as in `test_agent_real`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, find_agent
from pier.endpoint import GATEWAY_PORT
from pier.gateway.script import Script
from pier.gateway.server import Gateway
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Mount, SandboxSpec
from tests.agent_rig import need_pack
from tests.busybox import busybox_image
from tests.engine import engine, missing

AGENTS = ("claude-code", "codex", "opencode", "pi", "mini-swe-agent")
KINDS = ("claude-code", "pi", "mini-swe-agent")
"""A native program, one for node and one for Python: packs of one kind differ in nothing that Docker sees."""
TURNS = [{"shell": "cat note.txt > seen.txt"}, {"shell": "echo done >> seen.txt"}, {"finish": "I have seen it."}]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def docker() -> Iterator[str]:
    with engine() as running:
        yield running.url
        assert running.containers() == []


@pytest.fixture
async def docker_backend(docker: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    monkeypatch.setenv("DOCKER_HOST", docker)
    with Lease() as lease:
        async with open_backend("docker", lease) as opened:
            yield opened


@pytest.fixture
async def local_backend() -> AsyncIterator[Backend]:
    with Lease() as lease:
        async with open_backend("local", lease) as opened:
            yield opened


async def drive(backend: Backend, image: Image, name: str) -> None:
    """Let the agent do what the script says, as root and as nobody in particular."""
    agent, pack = find_agent(name)(), need_pack(name)
    async with Gateway() as gateway:
        spec = SandboxSpec(image, mounts=(Mount(PACK_PATH, pack.path),))
        async with await backend.start(spec) as sandbox:
            made = await sandbox.exec(
                f"mkdir -p /desk /home/x {AGENT_LOGS}; chmod 777 /desk /home/x {AGENT_LOGS}", timeout=60
            )
            assert made.ok, made.error_text
            await sandbox.write_file("/desk/note.txt", b"hello\n")
            session = gateway.session("scripted", upstream=Script.parse(TURNS))
            await sandbox.listen(GATEWAY_PORT, gateway.protocol_factory(session))
            run = AgentRun("See.", "/desk", session.endpoint(), user="4321", home="/home/x", seconds=300)
            result = await agent.run(sandbox, run)
            assert not result.timed_out, result.error_text
            assert await sandbox.read_file("/desk/seen.txt") == b"hello\ndone\n", result.error_text + result.text


@pytest.mark.parametrize("name", AGENTS)
async def test_local(name: str, local_backend: Backend, image: Image) -> None:
    if not (await local_backend.capabilities()).users:
        pytest.skip("sandboxes of this user have one user only")
    await drive(local_backend, image, name)


@pytest.mark.docker
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", KINDS)
async def test_docker(name: str, docker_backend: Backend, image: Image) -> None:
    await drive(docker_backend, image, name)
