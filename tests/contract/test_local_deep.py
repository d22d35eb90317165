"""Trees that lie deeper than any path can tell: they are looked at, carried as far as they can be, and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pier.beneath import remove
from pier.errors import SandboxError
from pier.sandbox import Limits, SandboxSpec
from pier.sandbox.host import host_image
from pier.sandbox.local import LocalBackend
from tests.deep import LEVELS, NAME, make_deep

pytestmark = pytest.mark.plain

_MAKE = f"""
import os
os.chdir('/srv')
for _ in range({LEVELS}):
    os.mkdir({NAME!r}); os.chdir({NAME!r})
os.close(os.open('leaf', os.O_CREAT | os.O_WRONLY))
"""


async def test_a_tree_that_no_path_can_tell(backend: LocalBackend, tmp_path: Path) -> None:
    async with await backend.start(SandboxSpec(host_image())) as sandbox:
        assert (await sandbox.exec(["/usr/bin/python3", "-c", _MAKE], timeout=100)).ok
        told = [change.path for change in await sandbox.changes() if change.path.startswith(f"/srv/{NAME}/{NAME}")]
        assert len(told) == 1 and 4096 <= len(told[0]) < 4400
        left_out = await sandbox.download("/srv", tmp_path / "taken")
        assert len(left_out) == 1 and left_out[0].startswith(NAME)
        assert (tmp_path / "taken" / left_out[0]).parent.is_dir()
        await sandbox.remove(f"/srv/{NAME}")
        assert (await sandbox.exec("ls /srv")).text == ""
        assert (await sandbox.exec(["/usr/bin/python3", "-c", _MAKE], timeout=100)).ok


async def test_what_cannot_be_carried_is_refused(backend: LocalBackend, tmp_path: Path) -> None:
    make_deep(tmp_path / "deep")
    async with await backend.start(SandboxSpec(host_image())) as sandbox:
        with pytest.raises(SandboxError, match="too deep") as caught:
            await sandbox.upload(tmp_path / "deep", "/srv/deep")
        assert caught.value.code == "too_deep" and caught.value.blame == "task"
    remove(str(tmp_path / "deep"))


async def test_few_open_files_are_enough(backend: LocalBackend, tmp_path: Path) -> None:
    """However deep a tree is, its copy needs no more descriptors than a small limit allows."""
    make_deep(tmp_path / "deep", 200, "d")
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(open_files=64))) as sandbox:
        await sandbox.upload(tmp_path / "deep", "/srv/deep")
        assert await sandbox.download("/srv/deep", tmp_path / "back") == []
    deepest = max((len(Path(path).parts) for path, _, _ in os.walk(tmp_path / "back")), default=0)
    assert deepest == len((tmp_path / "back").parts) + 200
