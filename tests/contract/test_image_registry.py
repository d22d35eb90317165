"""Pulling from a real registry: digests, credentials, platforms, resumed downloads, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import socket
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pier.errors import ImageError
from pier.image import ImageStore
from pier.image.importing import pull_image
from tests.image_rig import (
    ARCH,
    Pieces,
    directory,
    entry,
    listing,
    pass_on,
    push,
    put_manifest,
    running_registry,
    running_server,
    sha,
    tar_of,
)

BASE = tar_of(directory("etc"), entry("etc/name", b"base"), entry("big", bytes(range(256)) * 4096))
TOP = tar_of(entry("etc/.wh.name"), entry("app", b"#!/bin/sh\n", mode=0o755))
CONFIG = {"Env": ["PATH=/bin", "A=b=c"], "WorkingDir": "/etc", "User": "1000", "Cmd": ["sh"], "Labels": {"k": "v"}}
PIECES = Pieces(BASE, TOP, config=CONFIG)


@pytest.fixture(autouse=True)
def no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither an engine nor the credentials of whoever runs the tests."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker"


@pytest.mark.plain
async def test_resolve_pulls_what_the_store_lacks(tmp_path: Path) -> None:
    store = ImageStore()
    async with running_registry(tmp_path / "registry") as address:
        await push(address, "org/app", "v1", PIECES)
        image = await store.resolve(f"{address}/org/app:v1")
    assert image.digest == sha(PIECES.manifest)
    assert [layer.parent.name for layer in image.layers] == [sha(layer)[7:] for layer in (BASE, TOP)]
    assert image.config.env == {"PATH": "/bin", "A": "b=c"}
    assert (image.config.workdir, image.config.user, image.config.cmd) == ("/etc", "1000", ("sh",))
    assert listing(image.layers[0])["etc/name"].startswith("-rw-r--r--")
    assert listing(image.layers[1])["etc/name"].startswith("crw")
    assert (image.layers[0] / "big").read_bytes() == bytes(range(256)) * 4096
    again = await store.resolve(f"{address}/org/app:v1")
    assert again == image
    assert not list((store.root / "downloads").iterdir())


async def test_a_pull_by_digest_is_that_image(tmp_path: Path) -> None:
    other = Pieces(BASE)
    async with running_registry(tmp_path / "registry") as address:
        await push(address, "app", "latest", PIECES)
        await push(address, "app", "latest", other)
        image = await pull_image(ImageStore(), f"{address}/app@{sha(PIECES.manifest)}")
        newest = await pull_image(ImageStore(), f"{address}/app")
    assert len(image.layers) == 2
    assert len(newest.layers) == 1


async def test_of_a_manifest_list_this_machines_image_is_taken(tmp_path: Path) -> None:
    foreign = Pieces(TOP)
    async with running_registry(tmp_path / "registry") as address:
        await push(address, "app", "mine", PIECES)
        await push(address, "app", "foreign", foreign)
        rows = [
            {"digest": sha(pieces.manifest), "size": len(pieces.manifest), "mediaType": kind, "platform": platform}
            for pieces, platform in (
                (foreign, {"os": "linux", "architecture": "s390x"}),
                (PIECES, {"os": "linux", "architecture": ARCH}),
            )
            for kind in ["application/vnd.oci.image.manifest.v1+json"]
        ]
        await _put_index(address, "both", rows)
        await _put_index(address, "foreign-only", rows[:1])
        image = await pull_image(ImageStore(), f"{address}/app:both")
        with pytest.raises(ImageError, match="s390x") as caught:
            await pull_image(ImageStore(), f"{address}/app:foreign-only")
    assert len(image.layers) == 2
    assert caught.value.code == "platform"


async def _put_index(address: str, tag: str, rows: list[dict[str, object]]) -> None:
    kind = "application/vnd.oci.image.index.v1+json"
    body = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": rows}).encode()
    async with aiohttp.ClientSession() as session:
        await put_manifest(session, f"http://{address}/v2/app", tag, body, kind)


async def test_basic_credentials_of_docker_are_used(tmp_path: Path, no_docker: Path) -> None:
    auth = base64.b64encode(b"pier:secret").decode()
    async with running_registry(tmp_path / "registry", htpasswd=True) as address:
        await push(address, "app", "latest", PIECES, auth=f"Basic {auth}")
        with pytest.raises(ImageError) as caught:
            await pull_image(ImageStore(), f"{address}/app")
        (no_docker / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))
        image = await pull_image(ImageStore(), f"{address}/app")
    assert caught.value.code == "unauthorized"
    assert caught.value.hint == f"docker login {address}"
    assert len(image.layers) == 2


async def test_a_credential_helper_that_is_missing_is_named(tmp_path: Path, no_docker: Path) -> None:
    (no_docker / "config.json").write_text(json.dumps({"credsStore": "nowhere"}))
    async with running_registry(tmp_path / "registry", htpasswd=True) as address:
        with pytest.raises(ImageError, match="docker-credential-nowhere") as caught:
            await pull_image(ImageStore(), f"{address}/app")
    assert caught.value.code == "credentials"


async def test_a_credential_helper_is_asked(tmp_path: Path, no_docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    helper = programs / "docker-credential-test"
    helper.write_text('#!/bin/sh\necho \'{"Username": "pier", "Secret": "secret"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    (no_docker / "config.json").write_text(json.dumps({"credsStore": "test"}))
    auth = base64.b64encode(b"pier:secret").decode()
    async with running_registry(tmp_path / "registry", htpasswd=True) as address:
        await push(address, "app", "latest", PIECES, auth=f"Basic {auth}")
        assert len((await pull_image(ImageStore(), f"{address}/app")).layers) == 2


async def test_a_token_is_got_where_the_registry_says(tmp_path: Path, no_docker: Path) -> None:
    asked: list[str] = []
    async with running_registry(tmp_path / "registry") as behind:
        await push(behind, "app", "latest", PIECES)

        async def front(request: web.Request) -> web.Response:
            if request.path == "/token":
                asked.append(f"{request.query['scope']} {request.headers.get('Authorization', '')}")
                return web.json_response({"token": "T0KEN"})
            if request.headers.get("Authorization") != "Bearer T0KEN":
                realm = f'Bearer realm="http://{request.host}/token",service="s",scope="repository:app:pull"'
                return web.Response(status=401, headers={"WWW-Authenticate": realm})
            status, headers, body = await pass_on(request, behind)
            return web.Response(status=status, headers=headers, body=body)

        async with running_server(front) as address:
            auth = base64.b64encode(b"me:pw").decode()
            (no_docker / "config.json").write_text(json.dumps({"auths": {f"https://{address}/v1/": {"auth": auth}}}))
            image = await pull_image(ImageStore(), f"{address}/app")
    assert len(image.layers) == 2
    assert asked == [f"repository:app:pull Basic {auth}"]


async def test_a_download_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    big = sha(PIECES.layers[0])
    ranges: list[str] = []
    async with running_registry(tmp_path / "registry") as behind:
        await push(behind, "app", "latest", PIECES)

        async def front(request: web.Request) -> web.StreamResponse:
            status, headers, body = await pass_on(request, behind)
            if not request.path.endswith(big):
                return web.Response(status=status, headers=headers, body=body)
            ranges.append(request.headers.get("Range", ""))
            answer = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(body))})
            await answer.prepare(request)
            if len(ranges) == 1:
                await answer.write(body[: len(body) // 2])
                assert request.transport is not None
                request.transport.close()
                return answer
            await answer.write(body)
            return answer

        async with running_server(front) as address:
            image = await pull_image(ImageStore(), f"{address}/app")
    assert (image.layers[0] / "big").stat().st_size == 1 << 20
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=")
    assert len(ranges) == 2


@pytest.mark.plain
async def test_a_download_of_a_process_that_was_killed_goes_on_in_another(tmp_path: Path) -> None:
    """What lies in the store is not asked for again; layers are fetched side by side, and progress is told."""
    store = ImageStore()
    big = PIECES.layers[0]
    store.prepare("downloads")
    (store.root / "downloads" / sha(big)[7:]).write_bytes(big[:1000])
    ranges: dict[str, str] = {}
    both = asyncio.Event()
    async with running_registry(tmp_path / "registry") as behind:
        await push(behind, "app", "latest", PIECES)

        async def front(request: web.Request) -> web.Response:
            status, headers, body = await pass_on(request, behind)
            if request.path.rpartition("/")[2] in map(sha, PIECES.layers):
                ranges[request.path.rpartition("/")[2]] = request.headers.get("Range", "")
                if len(ranges) == 2:
                    both.set()
                async with asyncio.timeout(60):
                    await both.wait()
            return web.Response(status=status, headers=headers, body=body)

        async with running_server(front) as address:
            lines: list[str] = []
            image = await pull_image(store, f"{address}/app", on_progress=lines.append)
    assert ranges == {sha(big): "bytes=1000-", sha(PIECES.layers[1]): ""}
    assert (image.layers[0] / "big").stat().st_size == 1 << 20
    for layer in PIECES.layers:
        assert {f"  {sha(layer)[7:19]}  downloading", f"  {sha(layer)[7:19]}  unpacking"} <= set(lines)


async def test_layers_may_be_compressed_with_zstd(tmp_path: Path) -> None:
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    pieces = Pieces(BASE, TOP, config=CONFIG)
    pieces.layers = [
        subprocess.run(["zstd", "-cq"], input=raw, capture_output=True, check=True).stdout for raw in pieces.plain
    ]
    value = json.loads(pieces.manifest)
    for row, layer in zip(value["layers"], pieces.layers, strict=True):
        row |= {"digest": sha(layer), "size": len(layer), "mediaType": "application/vnd.oci.image.layer.v1.tar+zstd"}
    pieces.manifest = json.dumps(value).encode()
    async with running_registry(tmp_path / "registry") as address:
        await push(address, "app", "zstd", pieces)
        image = await pull_image(ImageStore(), f"{address}/app:zstd")
    assert [layer.parent.name for layer in image.layers] == [sha(layer)[7:] for layer in (BASE, TOP)]


async def test_a_token_that_stands_for_a_password_is_traded(tmp_path: Path, no_docker: Path) -> None:
    """As cloud registries' helpers give it: an identity token of one registry, from a helper for that registry only."""
    asked: list[dict[str, str]] = []
    programs = tmp_path / "bin"
    programs.mkdir()
    helper = programs / "docker-credential-cloud"
    helper.write_text('#!/bin/sh\necho \'{"Username": "<token>", "Secret": "IDENTITY"}\'\n')
    helper.chmod(0o755)
    async with running_registry(tmp_path / "registry") as behind:
        await push(behind, "app", "latest", PIECES)

        async def front(request: web.Request) -> web.Response:
            if request.path == "/token":
                asked.append({key: str(value) for key, value in (await request.post()).items()})
                return web.json_response({"access_token": "ACCESS"})
            if request.headers.get("Authorization") != "Bearer ACCESS":
                realm = f'Bearer realm="http://{request.host}/token",service="s"'
                return web.Response(status=401, headers={"WWW-Authenticate": realm})
            status, headers, body = await pass_on(request, behind)
            return web.Response(status=status, headers=headers, body=body)

        async with running_server(front) as address:
            (no_docker / "config.json").write_text(json.dumps({"credHelpers": {address: "cloud"}}))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PATH", f"{programs}:/usr/bin:/bin")
                image = await pull_image(ImageStore(), f"{address}/app")
    assert len(image.layers) == 2
    assert [(row["grant_type"], row["refresh_token"], row["scope"]) for row in asked] == [
        ("refresh_token", "IDENTITY", "repository:app:pull")
    ]


async def test_a_blob_with_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    async with running_registry(tmp_path / "registry") as behind:
        await push(behind, "app", "latest", PIECES)

        async def front(request: web.Request) -> web.Response:
            status, headers, body = await pass_on(request, behind)
            if request.path.endswith(sha(PIECES.layers[1])):
                body = body[:-1] + bytes([body[-1] ^ 1])
            return web.Response(status=status, headers=headers, body=body)

        store = ImageStore()
        async with running_server(front) as address:
            with pytest.raises(ImageError) as caught:
                await pull_image(store, f"{address}/app")
            assert store.find(f"{address}/app") is None
    assert caught.value.code == "digest"
    assert sha(PIECES.layers[1]) in caught.value.message


async def test_a_layer_that_is_not_what_the_image_says_is_refused(tmp_path: Path) -> None:
    lying = Pieces(BASE, TOP)
    lying.layers[1] = Pieces(BASE, BASE).layers[1]
    value = json.loads(lying.manifest)
    value["layers"][1] |= {"digest": sha(lying.layers[1]), "size": len(lying.layers[1])}
    lying.manifest = json.dumps(value).encode()
    async with running_registry(tmp_path / "registry") as address:
        await push(address, "app", "latest", lying)
        with pytest.raises(ImageError, match="not to") as caught:
            await pull_image(ImageStore(), f"{address}/app")
    assert caught.value.code == "digest"


@pytest.mark.parametrize("where", ["layers", "config", "manifests", "diff_ids", "env"])
async def test_a_hostile_registry_cannot_lead_outside_the_store(tmp_path: Path, where: str) -> None:
    evil = "sha256:../../../../evil"
    config = json.loads(PIECES.config)
    manifest = json.loads(PIECES.manifest)
    if where == "diff_ids":
        config["rootfs"]["diff_ids"][0] = evil
    elif where == "env":
        config["config"]["Env"] = [1]
    raw = json.dumps(config).encode()
    manifest["config"]["digest"] = evil if where == "config" else sha(raw)
    if where == "layers":
        manifest["layers"][0]["digest"] = evil
    body = {"manifests": [{"digest": evil}]} if where == "manifests" else manifest

    async def front(request: web.Request) -> web.Response:
        if "manifests" in request.path:
            return web.json_response(body)
        return web.Response(body=raw if request.path.endswith(sha(raw)) else PIECES.layers[0])

    store = ImageStore()
    async with running_server(front) as address:
        with pytest.raises(ImageError) as caught:
            await pull_image(store, f"{address}/app")
    assert caught.value.code in ("manifest", "broken_archive")
    assert list((store.root / "downloads").iterdir()) == []
    assert not list(tmp_path.rglob("evil"))


async def test_what_was_tried_is_told_when_nothing_is_found(tmp_path: Path) -> None:
    async with running_registry(tmp_path / "registry") as address:
        with pytest.raises(ImageError) as caught:
            await ImageStore().resolve(f"{address}/no/such:thing")
    error = caught.value
    assert error.code == "not_found"
    assert error.blame == "user"
    assert not error.retryable
    for part in ("pier's store", "Docker engine", f"{address} has no"):
        assert part in error.message
    assert error.hint is not None
    assert "pier image import" in error.hint


async def test_a_registry_that_is_not_there_may_be_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ImageError) as caught:
            await ImageStore().resolve(f"127.0.0.1:{taken.getsockname()[1]}/app")
    assert caught.value.code == "unreachable"
    assert caught.value.retryable
    assert "pier image import" in (caught.value.hint or "")
