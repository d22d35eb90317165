"""Programs of a pack run in roots that have nothing for them: no glibc, no shell, no user."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pier.agent.contract import PACK_PATH
from pier.agent.pack.runtime import complete
from pier.image.model import Image, ImageConfig
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.local import LocalBackend

pytestmark = pytest.mark.plain

ROOTS = ("empty", "busybox", "musl")


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    tree = tmp_path / "pack"
    tree.mkdir()
    complete(tree)
    return tree


def make_root(kind: str, root: Path) -> Image:
    """A root file system: nothing at all, a static busybox, or a busybox beside musl's C library."""
    for name in ("proc", "dev", "tmp", "etc", "bin", "lib"):
        (root / name).mkdir(parents=True)
    if kind != "empty":
        busybox = shutil.which("busybox")
        if busybox is None:
            pytest.skip("busybox is not installed")
        shutil.copyfile(busybox, root / "bin" / "busybox")
        (root / "bin" / "busybox").chmod(0o755)
        for name in ("sh", "cat", "ls", "env"):
            (root / "bin" / name).symlink_to("busybox")
    if kind == "musl":
        found = next(Path("/lib").glob("ld-musl-*.so.1"), None)
        if found is None:
            pytest.skip("musl is not installed")
        shutil.copyfile(found.resolve(), root / "lib" / found.name)
        (root / "lib" / found.name).chmod(0o755)
        (root / "lib" / "libc.musl-x86_64.so.1").symlink_to(found.name)
    return Image(f"test-{kind}", f"sha256:{kind}", layers=(root,), config=ImageConfig(env={"PATH": "/bin"}))


@pytest.mark.parametrize("kind", ROOTS)
async def test_a_shell_from_a_pack_runs(kind: str, backend: LocalBackend, pack: Path, tmp_path: Path) -> None:
    spec = SandboxSpec(make_root(kind, tmp_path / "root"), mounts=(Mount(PACK_PATH, pack),))
    capabilities = await backend.capabilities()
    async with await backend.start(spec) as sandbox:
        for user in (None, "12345") if capabilities.users else (None,):
            command = [f"{PACK_PATH}/tools/bash", "-c", "LC_ALL=C.UTF-8; echo $((6 * 7)) ${BASH_VERSION%%.*}"]
            result = await sandbox.exec(command, user=user, timeout=60)
            assert (result.exit_code, result.error_text) == (0, "")
            assert result.text.startswith("42 ")


async def test_a_pack_does_not_leak_into_the_programs_of_the_image(
    backend: LocalBackend, pack: Path, tmp_path: Path
) -> None:
    spec = SandboxSpec(make_root("busybox", tmp_path / "root"), mounts=(Mount(PACK_PATH, pack),))
    async with await backend.start(spec) as sandbox:
        result = await sandbox.exec([f"{PACK_PATH}/tools/bash", "-c", "/bin/env"], timeout=60)
        assert result.exit_code == 0
        assert "LD_" not in result.text and "PYTHON" not in result.text
