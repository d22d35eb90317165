"""Directories of scripts on their way into sandboxes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.image.store import ImageStore
from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.contract import Sandbox
from pier.sandbox.upload import upload_scripts

pytestmark = pytest.mark.plain


@pytest.fixture
async def sandbox(pier_home: Path) -> AsyncIterator[Sandbox]:
    with Lease(label="uploads") as lease:
        async with open_backend("local", lease) as backend:
            async with await backend.start(SandboxSpec(image=await ImageStore().resolve("host"))) as started:
                yield started


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "below").mkdir(parents=True)
    (directory / "run.sh").write_text("#!/bin/sh\necho one\n")
    (directory / "below" / "data").write_text("data")
    (directory / "below" / "data").chmod(0o640)
    (directory / "link").symlink_to("below/data")
    return directory


async def look(sandbox: Sandbox) -> str:
    found = await sandbox.exec("cd /in && /in/run.sh && readlink link && stat -c '%a %u:%g' below/data run.sh && ls -A")
    assert found.ok, found.error_text
    return found.text


@pytest.mark.parametrize("large", [False, True])
async def test_a_directory_arrives_as_it_is_with_its_program_ready_to_run(
    sandbox: Sandbox, source: Path, large: bool
) -> None:
    if large:
        (source / "below" / "more").write_bytes(os.urandom(100_000))
    await upload_scripts(sandbox, source, "/in", program="run.sh")
    assert await look(sandbox) == "one\nbelow/data\n640 0:0\n755 0:0\nbelow\nlink\nrun.sh\n"


async def test_an_owner_is_given_and_a_program_behind_a_link_runs(sandbox: Sandbox, source: Path) -> None:
    (source / "run.sh").rename(source / "real.sh")
    (source / "run.sh").symlink_to("real.sh")
    await upload_scripts(sandbox, source, "/in", program="run.sh", owner="0:0")
    assert (await look(sandbox)).startswith("one\n")
    await sandbox.remove("/in")
    await upload_scripts(sandbox, source, "/in", program="run.sh")
    assert (await look(sandbox)).startswith("one\n")
