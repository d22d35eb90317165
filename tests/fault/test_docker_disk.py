"""An engine whose disk is full: whoever needs space there is told so, and the infrastructure is blamed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pier.errors import PierError, SandboxError
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import pier

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SPACE = 24 << 20


async def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = busybox_image(tmp_path / "small")
    large = replace(busybox_image(tmp_path / "large"), digest=f"sha256:{'d' * 64}", reference="test/large")
    (large.layers[0] / "data").write_bytes(os.urandom(SPACE))
    with engine(disk=str(SPACE)) as running:
        monkeypatch.setenv("DOCKER_HOST", running.url)
        with Lease() as lease:
            await _fill(running, lease, small, large)
        rows = json.loads(pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=running.url).stdout)["docker"]
        assert not rows[-1]["ok"] and "0.0 GB free" in rows[-1]["detail"]
        assert "pier image gc --env docker" in rows[-1]["fix"]
        assert running.containers() == []


async def _fill(running: Engine, lease: Lease, small: Image, large: Image) -> None:
    async with open_backend("docker", lease) as backend:
        with pytest.raises(PierError) as not_taken:
            await backend.start(SandboxSpec(large))
        assert (not_taken.value.code, not_taken.value.blame) == ("disk_full", "infra")
        async with await backend.start(SandboxSpec(small)) as sandbox:
            written = await sandbox.exec(["sh", "-c", "cat /dev/zero > /zeros"])
            assert not written.ok and "No space left" in written.error_text
            with pytest.raises(SandboxError) as not_uploaded:
                await sandbox.write_file("/more", os.urandom(1 << 20))
            assert (not_uploaded.value.code, not_uploaded.value.blame) == ("disk_full", "infra")
            with pytest.raises(SandboxError) as not_kept:
                await sandbox.snapshot()
            assert (not_kept.value.code, not_kept.value.blame) == ("disk_full", "infra")
            with pytest.raises(SandboxError) as not_started:
                await backend.start(SandboxSpec(small))
            assert (not_started.value.code, not_started.value.blame) == ("disk_full", "infra")
