"""What tests of images are made with: small archives, a real registry on loopback, and a front that misbehaves."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

HTPASSWD = "pier:$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n"
"""The user `pier` with the password `secret`."""

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member; `fields` are attributes of `TarInfo`."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    member.mtime = 1_700_000_000
    for key, value in fields.items():
        setattr(member, key, value)
    return member, data


def directory(name: str, mode: int = 0o755, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def link(name: str, to: str, *, hard: bool = False) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE if hard else tarfile.SYMTYPE, linkname=to)


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Pieces:
    """An image as a registry or a layout holds it: gzipped layers, a configuration and a manifest."""

    def __init__(self, *layers: bytes, config: dict[str, Any] | None = None) -> None:
        self.plain = layers
        self.layers = [gzip.compress(layer, mtime=0) for layer in layers]
        value = {
            "architecture": ARCH,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [sha(layer) for layer in layers]},
        }
        self.config = json.dumps(value).encode()
        oci = "application/vnd.oci.image"
        value = {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": {"mediaType": f"{oci}.config.v1+json", "digest": sha(self.config), "size": len(self.config)},
            "layers": [
                {"mediaType": f"{oci}.layer.v1.tar+gzip", "digest": sha(blob), "size": len(blob)}
                for blob in self.layers
            ],
        }
        self.manifest = json.dumps(value).encode()

    def docker_archive(self, tag: str) -> bytes:
        """What `docker save` writes."""
        names = [f"{sha(layer)[7:]}/layer.tar" for layer in self.plain]
        config = f"{sha(self.config)[7:]}.json"
        manifest = json.dumps([{"Config": config, "RepoTags": [tag], "Layers": names}]).encode()
        members = [entry(name, layer) for name, layer in zip(names, self.plain, strict=True)]
        return tar_of(*members, entry(config, self.config), entry("manifest.json", manifest))

    def write_layout(self, target: Path, name: str = "") -> None:
        blobs = target / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for blob in (*self.layers, self.config, self.manifest):
            (blobs / sha(blob)[7:]).write_bytes(blob)
        (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        notes = {"annotations": {"org.opencontainers.image.ref.name": name}} if name else {}
        described = {"digest": sha(self.manifest), "size": len(self.manifest), **notes}
        (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))


def listing(*layers: Path) -> dict[str, str]:
    """Each file of some layers (not merged): kind, mode, owner and what it holds."""
    found: dict[str, str] = {}
    for layer in layers:
        for path in sorted(layer.rglob("*")):
            status = path.lstat()
            content = ""
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()[:200].decode(errors="replace")
            mode = stat.filemode(status.st_mode)
            found[str(path.relative_to(layer))] = f"{mode} {status.st_uid}:{status.st_gid} {content}"
    return found


@asynccontextmanager
async def running_registry(root: Path, *, htpasswd: bool = False) -> AsyncIterator[str]:
    """Debian's `docker-registry` on a loopback port of its own choice; its address."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    root.mkdir(parents=True, exist_ok=True)
    auth = ""
    if htpasswd:
        (root / "htpasswd").write_text(HTPASSWD)
        auth = f"auth:\n  htpasswd:\n    realm: test\n    path: {root}/htpasswd\n"
    (root / "config.yml").write_text(
        f"version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {root}/data\n"
        f"http:\n  addr: 127.0.0.1:0\n{auth}"
    )
    with (root / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(root / "config.yml")], stdout=log, stderr=log)
    try:
        yield await _registry_address(process, root / "log")
    finally:
        process.kill()
        process.wait()


async def _registry_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The port that the registry took, as it tells in its log."""
    for _ in range(1200):
        found = re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())
        if found:
            return found[1]
        assert process.poll() is None, log.read_text()
        await asyncio.sleep(0.05)
    raise AssertionError("the registry did not start: " + log.read_text())


async def push(address: str, repository: str, tag: str, pieces: Pieces, *, auth: str = "") -> None:
    """Upload an image the way every client does: blobs, then the manifest."""
    headers = {"Authorization": auth} if auth else {}
    base = f"http://{address}/v2/{repository}"
    async with aiohttp.ClientSession(headers=headers) as session:
        for blob in (*pieces.layers, pieces.config):
            async with session.post(f"{base}/blobs/uploads/") as answer:
                assert answer.status == 202, await answer.text()
                place = answer.headers["Location"]
            join = "&" if "?" in place else "?"
            async with session.put(f"{place}{join}digest={sha(blob)}", data=blob) as answer:
                assert answer.status == 201, await answer.text()
        await put_manifest(session, base, tag, pieces.manifest, "application/vnd.oci.image.manifest.v1+json")


async def put_manifest(session: aiohttp.ClientSession, base: str, tag: str, body: bytes, kind: str) -> None:
    async with session.put(f"{base}/manifests/{tag}", data=body, headers={"Content-Type": kind}) as answer:
        assert answer.status == 201, await answer.text()


Front = Callable[[web.Request], Any]


@asynccontextmanager
async def running_server(answer: Front) -> AsyncIterator[str]:
    """An HTTP server on loopback whose every request goes to `answer`; its address."""
    runner = web.AppRunner(_app(answer))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def running_socket(answer: Front, path: Path) -> AsyncIterator[None]:
    """The same on a unix socket."""
    runner = web.AppRunner(_app(answer))
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


def _app(answer: Front) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app


async def pass_on(request: web.Request, address: str) -> tuple[int, dict[str, str], bytes]:
    """What the registry at `address` answers to a request."""
    kept = {key: value for key, value in request.headers.items() if key in ("Accept", "Range")}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(f"http://{address}{request.path_qs}", headers=kept) as answer,
    ):
        names = ("Content-Type", "Docker-Content-Digest", "Content-Range")
        return answer.status, {key: answer.headers[key] for key in names if key in answer.headers}, await answer.read()
