"""`pier image --env docker` and `pier doctor` as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import SandboxSpec
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, PIER, pier

needs_engine = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as running:
        yield running


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return busybox_image(tmp_path)


@pytest.mark.docker
@needs_engine
async def test_only_images_that_pier_brought_are_listed_and_collected(
    docker: Engine, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    for name in ("other/one", "pier/tool", f"pier/{'c' * 31}", f"pier/helper:{'c' * 23}"):
        docker.docker("import", "/dev/stdin", name, stdin=bytes(10240))
    docker.docker("volume", "create", "pier-pack-mine")
    others = sorted(docker.docker("images", "--format", "{{.Repository}}").split())
    ours = f"pier/{'b' * 32}"
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            async with await backend.start(SandboxSpec(image)) as sandbox:
                snapshot = await sandbox.snapshot()
                (listed,) = json.loads(pier("image", "list", "--env", "docker", "--json", cwd=tmp_path).stdout)
                assert (listed["reference"], listed["in_use"]) == (ours, True)
                kept = json.loads(pier("image", "gc", "--env", "docker", "--json", cwd=tmp_path).stdout)
                assert kept["images"] == []
            await backend.remove_snapshot(snapshot)
    assert "would remove 1" in pier("image", "gc", "--env", "docker", "--dry-run", cwd=tmp_path).stdout
    assert "removed 0" in pier("image", "gc", "--env", "docker", "--max-size", "10G", cwd=tmp_path).stdout
    assert ours in pier("image", "list", "--env", "docker", cwd=tmp_path).stdout
    assert "removed 1" in pier("image", "gc", "--env", "docker", cwd=tmp_path).stdout
    assert sorted(docker.docker("images", "--format", "{{.Repository}}").split()) == others
    assert docker.docker("volume", "ls", "-q") == "pier-pack-mine"


@pytest.mark.docker
@needs_engine
def test_doctor_names_the_engine(docker: Engine, tmp_path: Path) -> None:
    rows = json.loads(pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=docker.url).stdout)["docker"]
    assert [row["ok"] for row in rows[:2]] == [True, True]
    assert docker.url in rows[0]["detail"]
    assert f"GB at {docker.directory}/data" in rows[2]["detail"]


@pytest.mark.docker
@needs_engine
@pytest.mark.parametrize(("lacking", "entered"), [("", "by pier itself"), ("sys_admin", "by a helper")])
def test_doctor_has_tried_how_containers_are_entered(
    docker: Engine, lacking: str, entered: str, tmp_path: Path
) -> None:
    """Root that lacks the right to join namespaces is not told from other roots before it tries."""
    limited = ["setpriv", f"--bounding-set=-{lacking}"] if lacking else []
    command = [*limited, *PIER, "doctor", "--json"]
    env = {**os.environ, "DOCKER_HOST": docker.url}
    told = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=PATIENCE, check=False).stdout
    row = json.loads(told)["docker"][1]
    assert (row["ok"], row["subject"]) == (True, "containers")
    assert f"entered {entered}" in row["detail"]
    assert docker.containers() == []


@pytest.mark.plain
@pytest.mark.parametrize(
    ("address", "said", "fix"),
    [
        ("unix:///nonexistent/docker.sock", "does not answer", "start the engine"),
        ("tcp://127.0.0.1:1", "does not answer", "docker version"),
        ("ssh://nobody@127.0.0.1:1", "Connection refused", "docker version"),
        ("carrier-pigeon://there", "invalid Docker engine address", "ssh://user@host"),
    ],
)
def test_doctor_says_what_docker_lacks(address: str, said: str, fix: str, tmp_path: Path) -> None:
    if address.startswith("ssh") and shutil.which("ssh") is None:
        pytest.skip("ssh is not installed")
    told = pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=address).stdout
    (reached,) = json.loads(told)["docker"]
    assert not reached["ok"]
    assert said in reached["detail"]
    assert fix in reached["fix"]


@pytest.mark.plain
def test_doctor_names_a_context_that_is_not_there(tmp_path: Path) -> None:
    env = {"DOCKER_HOST": "", "DOCKER_CONTEXT": "nowhere", "DOCKER_CONFIG": str(tmp_path)}
    (reached,) = json.loads(pier("doctor", "--json", cwd=tmp_path, code=None, **env).stdout)["docker"]
    assert "unknown Docker context 'nowhere'" in reached["detail"]
    assert reached["fix"] == "docker context ls"


@pytest.mark.plain
def test_doctor_says_that_a_socket_is_forbidden(tmp_path: Path, is_root: bool) -> None:
    if is_root:
        pytest.skip("root may use every socket")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()
        (tmp_path / "s").chmod(0)
        told = pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=f"unix://{tmp_path}/s").stdout
    (reached,) = json.loads(told)["docker"]
    assert "may not use the Docker engine's socket" in reached["detail"]
    assert "group" in reached["fix"]


@pytest.mark.plain
def test_doctor_says_that_an_engine_is_too_old(tmp_path: Path) -> None:
    with old_engine() as address:
        (reached,) = json.loads(pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=address).stdout)["docker"]
    assert "is too old: its API is 1.30" in reached["detail"]


@contextmanager
def old_engine() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"Version": "17.06", "ApiVersion": "1.30", "MinAPIVersion": "1.12"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.plain
def test_an_engine_that_is_not_there_has_no_images(tmp_path: Path) -> None:
    done = pier("image", "list", "--env", "docker", cwd=tmp_path, code=None, DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    assert done.returncode != 0
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr
