"""The store: importing, finding, removing, collecting; and the command line over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pier.errors import ImageError
from pier.image import ImageStore
from pier.image.importing import import_image, take_from_engine
from pier.image.store import collect
from tests.image_rig import Pieces, directory, entry, link, running_socket, sha, tar_of

pytestmark = pytest.mark.plain

ONE = tar_of(directory("etc"), entry("etc/name", b"one"), link("l", "etc"))
TWO = tar_of(entry("two", b"2" * 1000))
PIECES = Pieces(ONE, TWO, config={"Env": ["A=1"], "Entrypoint": ["/two"]})


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")


def pier(*args: str, stdin: bytes = b"") -> Any:
    """Run `pier image ... --json` in a process of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pier", "image", *args, "--json"], input=stdin, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


async def test_host_is_always_there_and_stays_the_same() -> None:
    host = await ImageStore().resolve("host")
    assert host.is_host
    assert host.layers == ()
    assert host == await ImageStore().resolve("host")
    assert not ImageStore().root.exists()


async def test_a_directory_and_its_tar_can_be_imported(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_text("x")
    (root / "bin/tool").chmod(0o755)
    os.link(root / "bin/tool", root / "bin/same")
    (root / "link").symlink_to("bin/tool")
    os.mkfifo(root / "pipe")
    subprocess.run(["tar", "-C", str(root), "-czf", str(tmp_path / "root.tgz"), "."], check=True, timeout=60)
    store = ImageStore()
    for source, name in ((root, "dir"), (tmp_path / "root.tgz", "tar:1")):
        image = await import_image(store, source, name)
        layer = image.layers[0]
        assert (layer / "bin/tool").stat().st_mode & 0o777 == 0o755
        assert (layer / "bin/tool").stat().st_nlink == 2
        assert os.readlink(layer / "link") == "bin/tool"
        assert (layer / "pipe").is_fifo()
        assert await store.resolve(name) == image
    assert [record.reference for record in store.list()] == ["docker.io/library/dir:latest", "docker.io/library/tar:1"]
    assert store.root.stat().st_mode & 0o777 == 0o700


async def test_archives_of_docker_and_oci_say_their_names(tmp_path: Path) -> None:
    store = ImageStore()
    (tmp_path / "saved.tar").write_bytes(PIECES.docker_archive("org/saved:v2"))
    saved = await import_image(store, tmp_path / "saved.tar")
    assert saved.reference == "org/saved:v2"
    assert saved.digest == sha(PIECES.config)
    PIECES.write_layout(tmp_path / "layout", "example.org/laid:v3")
    laid = await import_image(store, tmp_path / "layout")
    assert (laid.reference, laid.digest) == ("example.org/laid:v3", sha(PIECES.manifest))
    subprocess.run(["tar", "-C", str(tmp_path / "layout"), "-cf", str(tmp_path / "l.tar"), "."], check=True, timeout=60)
    packed = await import_image(store, tmp_path / "l.tar", "packed")
    assert saved.layers == laid.layers == packed.layers
    assert saved.config.env == {"A": "1"}
    assert saved.config.entrypoint == ("/two",)


async def test_damaged_images_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    store = ImageStore()
    whole = PIECES.docker_archive("x:1")
    lying = Pieces(ONE, TWO)
    lying.plain = (ONE, ONE)
    PIECES.write_layout(tmp_path / "layout", "x:1")
    blob = tmp_path / "layout/blobs/sha256" / sha(PIECES.layers[1])[7:]
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/oci-layout").write_text("{}")
    sources = {
        "cut.tar": (whole[: len(whole) // 2], "broken_archive"),
        "lying.tar": (lying.docker_archive("x:1"), "digest"),
        "no-manifest.tar": (tar_of(entry("repositories", b"{}")), "broken_archive"),
        "missing.tar": (tar_of(entry("manifest.json", b'[{"Config": "c", "Layers": []}]')), "broken_archive"),
        "escape.tar": (
            tar_of(entry("manifest.json", b'[{"Config": "c", "Layers": []}]'), link("c", "/etc/passwd")),
            "broken_archive",
        ),
        "layout": (None, "digest"),
        "empty": (None, "broken_archive"),
    }
    for name, (data, code) in sources.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(ImageError) as caught:
            await import_image(store, tmp_path / name, "x:1")
        assert caught.value.code == code, name
        assert str(tmp_path / name) in caught.value.message
        assert store.find("x:1") is None
        assert list((store.root / "tmp").iterdir()) == []


async def test_names_are_needed_and_checked(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(ONE)
    for name in (None, "Bad Name", "host", "scratch"):
        with pytest.raises(ImageError) as caught:
            await import_image(ImageStore(), tmp_path / "a.tar", name)
        assert caught.value.code == "reference"
    with pytest.raises(ImageError) as caught:
        await import_image(ImageStore(), tmp_path / "none.tar", "x")
    assert caught.value.code == "not_found"


async def test_images_come_from_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def engine(request: web.Request) -> web.Response:
        if request.path == "/images/org/app:v1/json":
            return web.json_response({"Id": "sha256:1"})
        if request.path == "/images/org/app:v1/get":
            return web.Response(body=PIECES.docker_archive("org/app:v1"))
        return web.json_response({"message": "No such image"}, status=404)

    store = ImageStore()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
    async with running_socket(engine, tmp_path / "engine.sock"):
        image = await store.resolve("org/app:v1")
        assert len(image.layers) == 2
        assert store.record("org/app:v1").origin == "docker"
        assert await take_from_engine(store, "other") is None
        with pytest.raises(ImageError, match="Docker engine: not there") as caught:
            await store.resolve("other", pull=False)
    assert caught.value.code == "not_found"
    with pytest.raises(ImageError) as caught:
        await take_from_engine(store, "org/app:v1")
    assert caught.value.code == "no_engine"


def test_the_command_line_imports_lists_inspects_and_removes(tmp_path: Path) -> None:
    (tmp_path / "saved.tar").write_bytes(PIECES.docker_archive("org/saved:v2"))
    pier("import", str(tmp_path / "saved.tar"))
    pier("import", "-", "plain", stdin=ONE)
    rows = {row["reference"]: row for row in pier("list")}
    assert set(rows) == {"org/saved:v2", "plain:latest"}
    assert rows["org/saved:v2"]["size"] == 1003
    inspected = pier("inspect", "org/saved:v2")
    assert [layer["size"] for layer in inspected["layers"]] == [3, 1000]
    assert inspected["config"]["env"] == {"A": "1"}
    shared, own = (Path(layer["path"]) for layer in inspected["layers"])
    pier("rm", "org/saved:v2")
    assert shared.exists()
    assert not own.exists()
    pier("rm", "plain")
    assert not shared.exists()
    assert pier("list") == []
    done = subprocess.run(
        [sys.executable, "-m", "pier", "image", "rm", "nothing"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "unknown image 'nothing'" in done.stderr


def test_a_budget_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").write_bytes(tar_of(entry("f", bytes([number]) * 1000)))
        pier("import", str(tmp_path / f"{number}.tar"), f"image:{number}")
    store = ImageStore()
    for age, number in enumerate((2, 0, 3, 1)):
        path = next(
            path
            for path in (store.root / "refs").iterdir()
            if json.loads(path.read_text())["reference"].endswith(f":{number}")
        )
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    would = pier("gc", "--max-size", "2k", "--dry-run")
    assert would["images"] == ["docker.io/library/image:2", "docker.io/library/image:0"]
    assert len(store.list()) == 4
    done = pier("gc", "--max-size", "2k")
    assert done["images"] == would["images"]
    assert (done["freed"], done["size"]) == (2000, 2000)
    assert [record.reference[-1] for record in store.list()] == ["1", "3"]


def test_pier_gc_keeps_the_store_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore()
    for number, origin in enumerate(("import", "build", "pull")):
        (tmp_path / f"{number}.tar").write_bytes(tar_of(entry("f", bytes([number]) * 1000)))
        pier("import", str(tmp_path / f"{number}.tar"), f"image:{number}")
        record = store.record(f"image:{number}")
        (path,) = [path for path in (store.root / "refs").iterdir() if record.reference in path.read_text()]
        path.write_text(record.model_copy(update={"origin": origin}).model_dump_json())
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    assert collect_garbage()["images"]["images"] == []
    monkeypatch.setenv("PIER_IMAGE_BUDGET", "2k")
    assert collect_garbage()["images"]["images"] == ["docker.io/library/image:1"]
    assert collect_garbage("--max-size", "0")["images"]["images"] == ["docker.io/library/image:2"]
    assert [record.reference[-1] for record in store.list()] == ["0"]
    monkeypatch.setenv("PIER_IMAGE_BUDGET", "many")
    done = subprocess.run([sys.executable, "-m", "pier", "gc"], capture_output=True, text=True)
    assert done.returncode == 2 and "invalid value 'many' for PIER_IMAGE_BUDGET" in done.stderr


def collect_garbage(*args: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "pier", "gc", "--json", *args], capture_output=True, check=True)
    return json.loads(done.stdout)


async def test_what_a_living_process_uses_is_kept(tmp_path: Path) -> None:
    store = ImageStore()
    (tmp_path / "a.tar").write_bytes(TWO)
    image = await import_image(store, tmp_path / "a.tar", "used")
    assert pier("gc", "--max-size", "0")["images"] == []
    pier("rm", "used")
    assert (image.layers[0] / "two").exists()
    assert (await collect(store)).layers == []
    script = "import asyncio; from pier.image import *; asyncio.run(ImageStore().resolve('host'))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert (image.layers[0] / "two").exists()
