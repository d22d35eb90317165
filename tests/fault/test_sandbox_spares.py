"""Inits that are made ahead: taken, killed while they wait, left alone by their zygote, too old for a layer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pier.image.model import Image
from pier.sandbox import Limits, SandboxSpec
from pier.sandbox.local import LocalBackend

pytestmark = pytest.mark.plain


def children(pids: list[int]) -> list[int]:
    """The children of these processes."""
    return [int(word) for pid in pids for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def spare(backend: LocalBackend, image: Image) -> int:
    """Start sandboxes until an init is made ahead, and give that one."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not list the children of processes")
    for _ in range(3):
        await (await backend.start(SandboxSpec(image))).stop()
    for _ in range(3000):
        found = [pid for pid in children(backend.zygotes) if is_running(pid)]
        if found:
            return found[0]
        await asyncio.sleep(0.02)
    raise AssertionError("no init was made ahead")


async def test_a_spare_becomes_the_next_sandbox(backend: LocalBackend, image: Image) -> None:
    waiting = await spare(backend, image)
    sandbox = await backend.start(SandboxSpec(image, hostname="harbour", limits=Limits(open_files=50)))
    async with sandbox:
        assert sandbox.box.pid == waiting
        assert (await sandbox.exec("hostname; ulimit -n")).text == "harbour\n50\n"
    assert not is_running(waiting)


async def test_a_spare_without_privileges_to_gain(backend: LocalBackend, image: Image) -> None:
    await spare(backend, image)
    async with await backend.start(SandboxSpec(image, no_new_privileges=True)) as sandbox:
        own, other = await asyncio.gather(*(sandbox.exec("sleep 0.2; grep NoNewPrivs /proc/self/status") for _ in "ab"))
        assert own.text.split() == other.text.split() == ["NoNewPrivs:", "1"]


async def test_a_spare_that_was_killed_is_not_missed(backend: LocalBackend, image: Image) -> None:
    os.kill(await spare(backend, image), signal.SIGKILL)
    async with await backend.start(SandboxSpec(image)) as sandbox:
        assert (await sandbox.exec("echo here")).text == "here\n"


async def test_a_spare_ends_with_its_zygote(backend: LocalBackend, image: Image) -> None:
    waiting = await spare(backend, image)
    for pid in backend.zygotes:
        os.kill(pid, signal.SIGKILL)
    for _ in range(3000):
        if not is_running(waiting):
            break
        await asyncio.sleep(0.02)
    assert not is_running(waiting)
    async with await backend.start(SandboxSpec(image)) as sandbox:
        assert (await sandbox.exec("echo here")).text == "here\n"


async def test_layers_that_are_younger_than_a_spare(backend: LocalBackend, image: Image, tmp_path: Path) -> None:
    waiting = await spare(backend, image)
    layers = []
    for number in range(3):
        layer = tmp_path / f"layer-{number}"
        (layer / "srv").mkdir(parents=True)
        (layer / "srv" / str(number)).write_text(f"{number}\n")
        layers.append(layer)
    more = Image("test/more", "sha256:2", (*image.layers, *layers), image.config)
    sandbox = await backend.start(SandboxSpec(more))
    async with sandbox:
        assert sandbox.box.pid == waiting
        assert (await sandbox.exec("cat /srv/0 /srv/1 /srv/2")).text == "0\n1\n2\n"
