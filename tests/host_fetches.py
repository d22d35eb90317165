"""What tasks make the host fetch, tried in a fake internet: `ADD` of URLs, and registries that lead elsewhere.

`serve` adds the servers of the fake internet, `run_fetches` runs every attempt and returns what became of each.
"""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.image_rig import Pieces, entry, sha, tar_of
from tests.world import in_world

DIRECTORY = "PIER_TEST_FETCHES"
PLAIN, SECURE = 8081, 5443
REALMS = {
    "own": f"https://registry.test:{SECURE}/token",
    "elsewhere": f"http://files.test:{PLAIN}/token",
    "metadata": f"http://169.254.169.254:{PLAIN}/token",
    "metadata-name": f"http://metadata.test:{PLAIN}/token",
    "loopback": "http://127.0.0.1:7777/token",
    "loopback-name": "http://loop.test:7777/token",
    "machine": "http://203.0.113.2:7777/token",
    "private": f"http://10.1.2.3:{PLAIN}/token",
    "redirected": f"https://registry.test:{SECURE}/to/http://169.254.169.254:{PLAIN}/token",
}
"""For each repository of `registry.test` the token server that its challenge names."""
REGISTRIES = ("127.0.0.1:7777", "localhost:7777", "203.0.113.2:7777", "metadata.test:8443", "169.254.169.254")
"""Registries that a task does not reach."""
PIECES = Pieces(tar_of(entry("name", b"base")), config={"Env": ['NAME=a "$b"'], "WorkingDir": "/there"})
_BLOBS = {sha(blob): blob for blob in (*PIECES.layers, PIECES.config)}

SPECIAL = {
    "loopback": "http://127.0.0.1:7777/x",
    "localhost": "http://localhost:7777/x",
    "short loopback": "http://127.1:7777/x",
    "loopback as a number": "http://2130706433:7777/x",
    "loopback in hex": "http://0x7f.1:7777/x",
    "loopback mapped to IPv6": "http://[::ffff:127.0.0.1]:7777/x",
    "IPv6 loopback": "http://[::1]:7777/x",
    "any address": "http://0.0.0.0:7777/x",
    "this machine": "http://203.0.113.2:7777/x",
    "metadata": f"http://169.254.169.254:{PLAIN}/x",
    "IPv6 metadata": f"http://[fd00:ec2::254]:{PLAIN}/x",
    "name on loopback": "http://loop.test:7777/x",
    "name on metadata": f"http://metadata.test:{PLAIN}/x",
    "name on mapped metadata": f"http://mapped.test:{PLAIN}/x",
}
"""URLs that no task makes this machine fetch."""

BUILDS = {
    "on an image": f"FROM registry.test:{SECURE}/own\nLABEL a=b\n",
    **{f"FROM {name}": f"FROM registry.test:{SECURE}/{name}\nLABEL a=b\n" for name in REALMS if name[-2:] != "wn"},
    **{f"FROM at {host}": f"FROM {host}/app\nLABEL a=b\n" for host in REGISTRIES},
    "COPY --from": "FROM scratch\nCOPY --from=127.0.0.1:7777/app /x /x\n",
    "RUN --mount": f'FROM registry.test:{SECURE}/own\nRUN --mount=target=/x,"FROM=127.0.0.1:7777/app" x\n',
    "syntax": "# syntax=127.0.0.1:7777/app\nFROM scratch\nLABEL a=b\n",
    "ADD": "FROM scratch\nADD http://127.0.0.1:7777/x /x\n",
    "ADD of git": "FROM scratch\nADD git@127.0.0.1:x.git /x\n",
}
"""Dockerfiles for the builder of an engine; what all but the first would fetch is out of a task's reach."""

_OUTSIDE = r"""
import asyncio, contextlib, json, os, socket, sys, threading
from hashlib import sha256
from pathlib import Path
from pier.errors import PierError
from pier.image import ImageStore
from pier.image.build import build_image
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import open_backend
from pier.sandbox.contract import BuildOrder
from pier.trial.images import ImageRequest, open_images
from tests.engine import engine
from tests.host_fetches import BUILDS, PLAIN, REALMS, REGISTRIES, SECURE, SPECIAL

touched = []
def listen(family, address):
    machine = socket.socket(family)
    machine.bind((address, 7777))
    machine.listen()
    def take():
        while True:
            client, _ = machine.accept()
            touched.append(address)
            client.close()
    threading.Thread(target=take, daemon=True).start()
listen(socket.AF_INET, "0.0.0.0")
listen(socket.AF_INET6, "::1")

told, context, place = {}, Path(sys.argv[1]) / "context", sys.argv[3]
context.mkdir()

async def attempt(name, work):
    try:
        told[name] = f"got {await work()}"
    except PierError as error:
        told[name] = f"{error.code}: {error.explain()}"

async def add(url, mode="public", hosts=()):
    (context / "Dockerfile").write_text(f"FROM scratch\nADD {url} /d/\n")
    image = await build_image(ImageStore(), context, network=NetworkPolicy(mode, hosts))
    found = next((image.layers[0] / "d").iterdir())
    return found.name, found.read_text(), oct(found.stat().st_mode & 0o777), int(found.stat().st_mtime)

async def add_all():
    fine, other = f"http://files.test:{PLAIN}/file", f"http://other.test:{PLAIN}/file"
    to = f"http://files.test:{PLAIN}/to/"
    await attempt("add", lambda: add(fine))
    await attempt("add with its checksum", lambda: add(f"--checksum=sha256:{sha256(b'fetched').hexdigest()} {fine}"))
    await attempt("add with another checksum", lambda: add(f"--checksum=sha256:{'0' * 64} {fine}"))
    await attempt("add by redirect", lambda: add(to + other))
    for name, url in SPECIAL.items():
        await attempt(f"add special {name}", lambda: add(url))
        await attempt(f"add redirected {name}", lambda: add(to + url))
    await attempt("add rebinding", lambda: add(f"http://rebind.test:{PLAIN}/file"))
    await attempt("add none", lambda: add(fine, "none"))
    for name, url in {"fine": fine, "other": other, "redirected": to + other, "address": f"http://10.1.2.3:{PLAIN}/x",
                      "inward": f"http://inward.test:{PLAIN}/x"}.items():
        await attempt(f"add allowlist {name}", lambda: add(url, "allowlist", ("files.test", "inward.test")))

async def build(text, backend):
    (context / "Dockerfile").write_text(text)
    image = await backend.build_image(BuildOrder(text, context))
    return image.config.env.get("NAME"), image.config.workdir

async def main():
    if place == "local":
        await add_all()
    with Lease() as lease:
        async with open_backend(place, lease) as backend:
            images = open_images(backend)
            async def pull(reference, chosen=False):
                image = await images.get(ImageRequest(reference, chosen=chosen))
                return len(image.layers)
            for name in REALMS:
                await attempt(f"realm {name}", lambda: pull(f"registry.test:{SECURE}/{name}"))
            for host in REGISTRIES:
                await attempt(f"registry {host}", lambda: pull(f"{host}/app"))
            for name, text in BUILDS.items() if place == "docker" else ():
                await attempt(f"engine builds {name}", lambda: build(text, backend))
            await attempt("registry private", lambda: pull(f"inward.test:{SECURE}/own"))
            before = len(touched)
            await attempt("registry of the user", lambda: pull("127.0.0.1:7777/app", chosen=True))
            told["touched"], told["by the user"] = touched[:before], len(touched) - before
            await images.close()
    told["seen"] = traffic.seen()
    Path(sys.argv[2]).write_text(json.dumps(told))

with contextlib.ExitStack() as stack:
    if place == "docker":
        os.environ["DOCKER_HOST"] = stack.enter_context(engine()).url
    asyncio.run(main())
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self._answer(b"", 302, {"Location": unquote(self.path.removeprefix("/to/").partition("?")[0])})
        elif self.path.startswith("/token"):
            self._answer(b'{"token": "T"}')
        elif self.path.startswith("/v2/"):
            self._serve_registry(*self.path.split("/")[2:])
        else:
            self._answer(b"fetched", 200, {"Last-Modified": "Tue, 14 Nov 2023 22:13:20 GMT"})

    def _serve_registry(self, name: str, kind: str, wanted: str) -> None:
        if self.headers.get("Authorization") != "Bearer T":
            challenge = f'Bearer realm="{REALMS[name]}",service="s"'
            self._answer(b"", 401, {"WWW-Authenticate": challenge})
        else:
            self._answer(PIECES.manifest if kind == "manifests" else _BLOBS[wanted])

    def _answer(self, body: bytes, status: int = 200, fields: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


class _Server6(http.server.ThreadingHTTPServer):
    address_family = 10
    daemon_threads = True


def serve(names: dict[str, str]) -> None:
    """Files over HTTP and a registry over TLS, at every address."""
    names |= {
        "files.test": "93.184.216.51",
        "registry.test": "93.184.216.52",
        "rebind.test": "93.184.216.53 127.0.0.1",
    }
    for port in (PLAIN, SECURE):
        server = _Server6(("::", port), _Handler)
        if port == SECURE:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(Path(os.environ[DIRECTORY]) / "server.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()


@dataclass(frozen=True)
class Fetches:
    """What became of each attempt, the connections to this machine, and what reached the fake internet."""

    outcomes: dict[str, str]
    touched: list[str]
    by_user: int
    seen: dict[str, int]


def run_fetches(directory: Path, place: str) -> Fetches:
    """Run every attempt on a backend; for `docker` with an engine inside the fake internet. The caller's environment
    must name `directory` as `DIRECTORY`, and trust its `server.pem`."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=world"]
    command += ["-addext", "subjectAltName=DNS:registry.test,DNS:inward.test", "-keyout", "key", "-out", "crt"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    (directory / "server.pem").write_text((directory / "key").read_text() + (directory / "crt").read_text())
    answer = directory / "told.json"
    done = in_world(_OUTSIDE, directory, str(directory), str(answer), place, servers="tests.host_fetches:serve")
    assert answer.exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    told = json.loads(answer.read_text())
    touched, by_user, seen = told.pop("touched"), told.pop("by the user"), told.pop("seen")
    return Fetches(told, touched, by_user, seen)
