"""RUN in real sandboxes: what a command sees, and what of it becomes the layer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.errors import ImageError
from pier.idmap import IdMap
from pier.image import Image, ImageStore, build_image
from pier.image.importing import import_image
from pier.image.view import View
from pier.lease import Lease
from pier.network.policy import NONE
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.building import SandboxRunner
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
    command = ["image", "build", str(bench.context), "-t", "app:1", "--build-arg", "WHAT=it", "--network", "none"]
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
