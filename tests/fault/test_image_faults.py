"""Images when things go wrong: killed imports, several processes at once, a full disk."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pier.image import ImageStore
from pier.image.importing import import_image
from tests.busybox import busybox_image
from tests.image_rig import entry, tar_of

pytestmark = pytest.mark.plain

PIER = [sys.executable, "-m", "pier", "image"]


def gc() -> dict[str, list[str]]:
    done = subprocess.run([*PIER, "gc", "--json"], capture_output=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_a_killed_import_is_never_half_visible_and_is_swept(tmp_path: Path) -> None:
    """The archive ends in four gigabytes of zeros, so that there is time to kill the import."""
    store = ImageStore()
    first, big = tarfile.TarInfo("first"), tarfile.TarInfo("big")
    big.size = 4 << 30
    zeros = gzip.compress(bytes(1 << 24))
    (tmp_path / "slow.tar.gz").write_bytes(gzip.compress(first.tobuf() + big.tobuf()) + zeros * 257)
    process = subprocess.Popen([*PIER, "import", str(tmp_path / "slow.tar.gz"), "slow"], start_new_session=True)
    try:
        _wait_for(lambda: any((store.root / "tmp").glob("*/layer/fs/big")))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert store.find("slow") is None
    assert list(store.layers.ids()) == []
    assert any((store.root / "tmp").iterdir())
    assert len(gc()["leftovers"]) == 1
    assert list((store.root / "tmp").iterdir()) == []


async def test_a_killed_build_leaves_no_layer_and_goes_on_later(tmp_path: Path) -> None:
    store = ImageStore()
    await import_image(store, busybox_image(tmp_path / "busybox").layers[0], "busybox")
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(
        "FROM busybox\nRUN echo one >/one\nRUN echo begun; test -e /stop || sleep 600\n"
    )
    command = [*PIER, "build", str(context), "--tag", "app", "--network", "none"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        _wait_for(lambda: b"\n  begun\n" in (tmp_path / "log").read_bytes())
    finally:
        process.kill()
        process.wait()
    before = set(store.layers.ids())
    assert len(before) == 2
    subprocess.run([sys.executable, "-m", "pier", "gc"], check=True, timeout=120, stdout=subprocess.DEVNULL)
    gc()
    assert list((store.root / "tmp").iterdir()) == []
    (context / "Dockerfile").write_text("FROM busybox\nRUN echo one >/one\nRUN echo begun\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("  cached") == 1
    assert before <= set(store.layers.ids())


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_processes_that_import_the_same_share_it(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(*(entry(f"d/f{number}", b"x" * 1000) for number in range(300))))
    running = [
        subprocess.Popen([*PIER, "import", str(tmp_path / "a.tar"), f"same:{number % 2}"]) for number in range(4)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0, 0]
    store = ImageStore()
    assert len(list(store.layers.ids())) == 1
    assert len(store.list()) == 2
    image = await store.resolve("same:0")
    assert len(list((image.layers[0] / "d").iterdir())) == 300
    assert list((store.root / "tmp").iterdir()) == []


async def test_removing_and_importing_at_once_never_leaves_half_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(*(entry(f"f{number}", b"x" * 1000) for number in range(100))))
    commands = [[*PIER, "import", str(tmp_path / "a.tar"), "same"], [*PIER, "gc", "--max-size", "0"]] * 3
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(timeout=120) for process in running] == [0] * 6
    store = ImageStore()
    image = store.find("same") or await import_image(store, tmp_path / "a.tar", "same")
    assert len(list(image.layers[0].iterdir())) == 100


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, pier_home: Path) -> None:
    (tmp_path / "big.tar").write_bytes(tar_of(entry("big", os.urandom(6 << 20))))
    pier_home.mkdir(parents=True)
    script = (
        f"mount -t tmpfs -o size=4m none {pier_home} && "
        f"{sys.executable} -m pier image import {tmp_path}/big.tar big; code=$?; "
        f"find {pier_home}/images/layers {pier_home}/images/refs {pier_home}/images/tmp -type f; exit $code"
    )
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    done = subprocess.run([*unshare, "sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert "pier image gc" in done.stderr
    assert done.stdout == ""
