"""RUN in real sandboxes: what a command sees, and what of it becomes the layer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pier.errors import ImageError
from pier.idmap import IdMap
from pier.image import Image, ImageStore, build_image
from pier.image.importing import import_image
from pier.image.layer_directories import View, remove_tree
from pier.image.layer_tar import digest_layer, pack_layer, unpack
from pier.image.store import collect
from pier.lease import Lease
from pier.network.policy import NONE
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.opening import SandboxRunner
from tests.busybox import busybox_image

pytestmark = pytest.mark.plain


class Bench:
    def __init__(self, context: Path, runner: SandboxRunner) -> None:
        self.context = context
        self.store = ImageStore()
        self.runner = runner
        self.lines: list[str] = []

    async def build(self, dockerfile: str, **options: object) -> Image:
        (self.context / "Dockerfile").write_text(dockerfile)
        self.lines = []
        return await build_image(
            self.store,
            self.context,
            runner=self.runner,
            network=NONE,
            on_progress=self.lines.append,
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    context = tmp_path / "context"
    context.mkdir()
    with Lease(label="test") as lease:
        async with open_backend("local", lease) as backend:
            bench = Bench(context, SandboxRunner(backend))
            await import_image(bench.store, busybox_image(tmp_path / "busybox").layers[0], "busybox")
            yield bench


def names(layer: Path) -> list[str]:
    """The files of one layer, without the directories above them."""
    found = [path for path in sorted(layer.rglob("*")) if not path.is_dir() or not any(path.iterdir())]
    return [str(path.relative_to(layer)) for path in found]


async def seen(bench: Bench, image: Image, command: str) -> str:
    """What a command prints in a sandbox on the image."""
    backend = bench.runner.backend
    async with await backend.start(SandboxSpec(image=image)) as sandbox:
        result = await sandbox.exec(["/bin/sh", "-c", command])
    assert result.ok, result.error_text
    return result.text


async def test_a_layer_holds_what_its_command_did_and_nothing_else(bench: Bench) -> None:
    image = await bench.build(
        "FROM busybox\n"
        "RUN mkdir /d && echo one >/d/one && chmod 640 /d/one && ln -s one /d/link && rm /etc/group && rm -r /srv\n"
        "RUN mkdir /srv && echo again >/srv/f && rm /d/one\n"
        "RUN true\n"
        "RUN cat /etc/resolv.conf /etc/hosts >/dev/null; ls /d /srv\n"
    )
    assert len(image.layers) == 3
    assert names(image.layers[1]) == ["d/link", "d/one", "etc/group", "srv"]
    assert names(image.layers[2]) == ["d/one", "srv/f"]
    view = View([str(layer) for layer in image.layers])
    assert view.find("/d/one", follow=False) is None
    assert view.find("/etc/group") is None
    assert view.find("/etc/passwd") is not None
    assert bench.lines[-5:] == ["  /d:", "  link", "  ", "  /srv:", "  f"]


async def test_owners_and_special_modes_are_kept(bench: Bench) -> None:
    if IdMap.detect().mode == "single":
        pytest.skip("with a single id all files are root's")
    image = await bench.build(
        "FROM busybox\nRUN touch /a && chown 1000:50 /a && chmod 4711 /a && mkdir -m 2775 /b && chown 7 /b\n"
        "USER user\nWORKDIR /home/user/work\nRUN id -u >mine\n"
    )
    rows = await seen(bench, image, "stat -c '%n %a %u:%g' /a /b /home/user/work /home/user/work/mine")
    assert rows.splitlines() == [
        "/a 4711 1000:50",
        "/b 2775 7:0",
        "/home/user/work 755 1000:1000",
        "/home/user/work/mine 644 1000:1000",
    ]


async def test_what_a_command_is_told(bench: Bench) -> None:
    await bench.build(
        'FROM busybox\nARG ONE=1\nENV TWO="2 2"\nWORKDIR /w\nRUN echo "$ONE,$TWO,$PWD,$UNDECLARED,$http_proxy"\n'
        'RUN ["echo", "$ONE", "exec form"]\nSHELL ["/bin/busybox", "sh", "-ec"]\nRUN echo shell $0; false || echo or\n',
        build_args={"ONE": "uno", "http_proxy": "proxy"},
    )
    output = [line.strip() for line in bench.lines if line.startswith("  ") and "cached" not in line]
    assert output == ["uno,2 2,/w,,proxy", "$ONE exec form", "shell sh", "or"]


async def test_here_documents_run(bench: Bench) -> None:
    await bench.build(
        "FROM busybox\nENV A=1\nRUN <<EOF\nset -e\necho first $A\necho second\nEOF\n"
        'RUN cat <<X && tac <<"Y"\n$A\nX\n$A\nb\nY\n'
        "RUN <<EOF\n#!/bin/busybox ash\necho script\nEOF\n"
        "RUN ls /tmp\n"
    )
    output = [line.strip() for line in bench.lines if line.startswith("  ")]
    assert output == ["first 1", "second", "1", "b", "$A", "script"]


async def test_a_failing_command_is_told_with_its_place_and_output(bench: Bench) -> None:
    with pytest.raises(ImageError) as caught:
        await bench.build("FROM busybox\n\nRUN echo some words; echo more >&2; exit 7\n")
    error = caught.value
    assert f"{bench.context}/Dockerfile:3: RUN: the command failed with exit code 7" in error.message
    assert "some words" in error.message
    assert "more" in error.message
    assert (error.code, error.blame, error.retryable) == ("build", "task", False)
    with pytest.raises(ImageError, match="exit code 127"):
        await bench.build('FROM busybox\nRUN ["/no/such/program"]\n')
    assert list((bench.store.root / "tmp").iterdir()) == []


async def test_mounts_are_there_for_one_command(bench: Bench) -> None:
    (bench.context / "part").mkdir()
    (bench.context / "part" / "f").write_text("from the context")
    image = await bench.build(
        "FROM busybox\n"
        "RUN --mount=type=bind,source=part,target=/in --mount=type=tmpfs,target=/scratch \\\n"
        "  cat /in/f >/out; touch /scratch/x\n"
        "WORKDIR /w\nRUN --mount=type=bind,source=part/f,target=one/f cat one/f\n"
    )
    assert names(image.layers[1]) == ["out"]
    assert "  from the context" in bench.lines
    assert names(image.layers[-1]) == ["w"]
    (bench.context / "part" / "f").write_text("changed")
    text = (bench.context / "Dockerfile").read_text()
    assert (await bench.build(text)).digest != image.digest


async def test_a_cache_mount_outlives_a_build(bench: Bench) -> None:
    flags = "--mount=type=cache,id=c,target=/var/cache/x"
    await bench.build(f"FROM busybox\nRUN {flags} echo kept >/var/cache/x/f\n")
    image = await bench.build(f"FROM busybox\nRUN {flags} cat /var/cache/x/f; ls -A /var/cache/x >/listed\n")
    assert "  kept" in bench.lines
    assert names(image.layers[-1]) == ["listed"]


async def test_caches_count_and_go_by_the_budget(bench: Bench) -> None:
    flags = "--mount=type=cache,target=/var/cache/x,sharing=locked,uid=0"
    await bench.build(f"FROM busybox\nRUN {flags} head -c 50000 /dev/zero >/var/cache/x/f; mkdir -m 0 /var/cache/x/d\n")
    await bench.build("FROM busybox\nRUN echo one >/one\n", tag="kept")
    collected = await collect(bench.store, max_size=0, dry_run=True)
    assert collected.caches == [], "this process uses it"
    listed = await pier_image("list", "--cached")
    assert {(row["kind"], row["name"]) for row in listed} >= {("directory", "/var/cache/x")}
    assert next(row["size"] for row in listed if row["kind"] == "directory") == 50000
    (bench.store.root / "users.lock").touch()
    for path in (bench.store.root / "users").iterdir():
        path.write_text("")
    before = await pier_image("gc", "--dry-run")
    done = await pier_image("gc", "--max-size", str(before["size"] - 1))
    assert done["caches"] == ["/var/cache/x"] or len(done["layers"]) == 1
    done = await pier_image("gc", "--max-size", str(before["size"] - 50000))
    assert not list((bench.store.root / "caches").iterdir())
    assert bench.store.find("kept") is not None


async def pier_image(*arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "pier", "image", *arguments, "--json"], stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


async def test_a_layer_is_named_by_what_it_holds(bench: Bench, tmp_path: Path) -> None:
    """Its id is the digest of its tar, which unpacks to the same layer; other steps that make the same share it."""
    (bench.context / "f").write_text("copied")
    image = await bench.build(
        "FROM busybox\nCOPY f /d/f\n"
        "RUN rm -r /srv && mkdir /srv && ln -s f /srv/l && echo x >/srv/f && ln /srv/f /srv/h && rm /etc/group\n"
    )
    for layer in image.layers:
        archive = tmp_path / f"{layer.parent.name}.tar"
        with archive.open("wb") as sink:
            made = await asyncio.to_thread(pack_layer, str(layer), sink.write)
        assert made > 0
        if os.geteuid() == 0:
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == layer.parent.name
            again = await import_image(bench.store, archive, f"again-{layer.parent.name[:8]}")
            assert again.layers == (layer,)
            (tmp_path / "unpacked").mkdir()
            with archive.open("rb") as source:
                unpack(source, str(tmp_path / "unpacked"))
            assert digest_layer(str(tmp_path / "unpacked"))["digest"][7:] == layer.parent.name
            remove_tree(str(tmp_path / "unpacked"))
    other = await bench.build("FROM busybox\nENV OTHER=1\nCOPY . /none\nFROM busybox\nCOPY --chmod=644 f /d/f\n")
    assert other.layers == image.layers[:2]
    assert "  cached" not in bench.lines


async def test_two_builds_at_once_run_a_step_once(bench: Bench) -> None:
    text = "FROM busybox\nRUN cat /proc/sys/kernel/random/uuid >/id\n"
    (bench.context / "Dockerfile").write_text(text)

    async def build() -> Image:
        return await build_image(bench.store, bench.context, runner=bench.runner, network=NONE)

    first, second, third = await asyncio.gather(build(), build(), build())
    assert first == second == third


async def test_a_cancelled_build_leaves_nothing(bench: Bench) -> None:
    started = asyncio.Event()

    def look(line: str) -> None:
        if line == "  begun":
            started.set()

    (bench.context / "Dockerfile").write_text("FROM busybox\nRUN echo begun; sleep 600\n")
    task = asyncio.create_task(
        build_image(bench.store, bench.context, runner=bench.runner, network=NONE, on_progress=look)
    )
    async with asyncio.timeout(120):
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert list((bench.store.root / "tmp").iterdir()) == []
    assert bench.runner.backend.lease.held() == []


async def test_the_command_line_builds(bench: Bench) -> None:
    (bench.context / "Dockerfile").write_text("FROM busybox\nARG WHAT\nRUN echo built $WHAT; echo x >/f\n")
    command = ["image", "build", str(bench.context), "--tag", "app:1", "--build-arg", "WHAT=it", "--network", "none"]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "pier", *command, "--json"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, progress = await process.communicate()
    assert process.returncode == 0, progress.decode()
    assert "  built it" in progress.decode().splitlines()
    image = await bench.store.resolve("app:1")
    assert json.loads(out)["digest"] == image.digest
    assert names(image.layers[-1]) == ["f"]


async def test_the_machines_own_root_is_a_base(bench: Bench) -> None:
    if os.geteuid() != 0:
        pytest.skip("a plain user cannot write into the machine's root, also not copy-on-write")
    image = await bench.build(
        "FROM host\nRUN echo built >/opt/pier-built && test -e /bin/sh\nRUN cat /opt/pier-built\n"
    )
    assert image.is_host
    assert "  built" in bench.lines
    assert await seen(bench, image, "cat /opt/pier-built") == "built\n"
    assert not Path("/opt/pier-built").exists()
