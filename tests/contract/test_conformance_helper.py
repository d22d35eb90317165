"""The Docker backend keeps its promises where pier is not root on the engine's host: a helper there does the work.

As a plain user who may only use the socket all of them are checked. As root a part of them is, for each way to an
engine: the ways differ in how bytes come to the engine, not in what is done there.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.conformance import CHECKS, Check, verify
from pier.sandbox.contract import Backend, Mount, SandboxSpec
from pier.sandbox.docker.images import collect_pier_volumes
from tests.busybox import busybox_image
from tests.engine import engine, missing
from tests.ways import by_tcp, free_port, make_certificates, ssh_missing, sshd, tls_options

GIVEN = os.environ.get("PIER_TEST_ENGINE", "")
"""An engine that this user may use, when the user is not root."""

SELECTED = (
    "exit_codes", "output_as_it_comes", "large_stdin", "terminal_size", "timeout_kills_daemons", "upload_tree",
    "download_tree", "served_from_outside", "none_refuses_at_once", "allowlist_refuses_at_once", "kill_all", "snapshot",
    "isolated_view", "written_as_user", "refused_to_user", "large_as_user",
    "wrong_arguments", "undecodable_names", "paths_in_the_way", "failing_on_output",
)  # fmt: skip
WAYS = ("socket", "tcp", "context", "chosen context", "tls", "ssh")

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]
as_root = pytest.mark.skipif(missing() is not None, reason=str(missing()))
as_plain_user = pytest.mark.skipif(not GIVEN, reason="no engine was given to this user: PIER_TEST_ENGINE")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
    home = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(home))
        patch.setenv("DOCKER_HOST", GIVEN)
        async with _opened(home) as backend:
            yield backend


@pytest.mark.plain
@as_plain_user
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_promise_to_a_plain_user(check: Check, plain: Backend, image: Image, tmp_path: Path) -> None:
    await verify(check, plain, image, tmp_path)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """One engine, and for each way to it the variables that say so."""
    directory = tmp_path_factory.mktemp("ways")
    certificates, port = make_certificates(directory / "certificates"), free_port()
    with ExitStack() as stack:
        running = stack.enter_context(engine(*tls_options(certificates, port)))
        server = stack.enter_context(sshd(directory / "ssh")) if ssh_missing() is None else None
        secure = {
            "DOCKER_HOST": f"tcp://127.0.0.1:{port}",
            "DOCKER_TLS_VERIFY": "1",
            "DOCKER_CERT_PATH": str(certificates),
        }
        made = ["context", "create", "there", f"--docker=host={secure['DOCKER_HOST']},ca={certificates}/ca.pem"]
        made[-1] += f",cert={certificates}/cert.pem,key={certificates}/key.pem"
        for name in ("config", "chosen"):
            running.docker("--config", str(directory / name), *made)
        running.docker("--config", str(directory / "chosen"), "context", "use", "there")
        yield {
            "socket": {"DOCKER_HOST": running.url, "PIER_DOCKER_HELPER": "1"},
            "tcp": {"DOCKER_HOST": stack.enter_context(by_tcp(running.socket))},
            "tls": secure,
            "ssh": {
                "DOCKER_HOST": f"ssh://root@127.0.0.1:{server.port}{running.socket}" if server else "",
                "PATH": f"{server.path}:{os.environ['PATH']}" if server else "",
            },
            "context": {"DOCKER_CONFIG": str(directory / "config"), "DOCKER_CONTEXT": "there"},
            "chosen context": {"DOCKER_CONFIG": str(directory / "chosen")},
        }
        assert running.containers() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    request: pytest.FixtureRequest, ways: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Backend]:
    if request.param == "ssh" and (why := ssh_missing()):
        pytest.skip(why)
    home = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(home))
        for name, value in ways[request.param].items():
            patch.setenv(name, value)
        async with _opened(home) as backend:
            yield backend


@asynccontextmanager
async def _opened(home: Path) -> AsyncIterator[Backend]:
    """A backend with a helper of its own, which serves all that is checked. It finds its engine now."""
    with Lease(home / "leases") as lease:
        async with open_backend("docker", lease) as backend:
            await backend.capabilities()
            yield backend
        assert lease.held() == []


@as_root
@pytest.mark.parametrize("backend", ("tls", "ssh"), indirect=True, scope="module")
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in SELECTED], ids=lambda check: check.name)
async def test_promise_from_afar(check: Check, backend: Backend, image: Image, tmp_path: Path) -> None:
    await verify(check, backend, image, tmp_path)


@as_root
@pytest.mark.parametrize("backend", WAYS, indirect=True, scope="module")
async def test_a_directory_comes_along_where_the_engine_cannot_see_it(
    backend: Backend, image: Image, tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    (pack / "bin").mkdir(parents=True)
    (pack / "bin" / "tool").write_text("#!/bin/sh\necho from the pack\n")
    (pack / "bin" / "tool").chmod(0o755)
    (pack / "tool").symlink_to("bin/tool")
    (pack / "large").write_bytes(os.urandom(3 << 20))
    for _ in range(2):
        async with await backend.start(SandboxSpec(image, mounts=(Mount("/opt/pack", pack),))) as sandbox:
            result = await sandbox.exec("/opt/pack/tool && touch /opt/pack/new")
            assert (result.text, result.ok) == ("from the pack\n", False)
            assert await sandbox.read_file("/opt/pack/large") == (pack / "large").read_bytes()
        await collect_pier_volumes()
