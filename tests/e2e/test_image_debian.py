"""A Dockerfile as tasks have them, built on a real Debian: apt and pip inside a sandbox with network.

The base is bootstrapped once and kept under `.cache/test` (or `$PIER_TEST_CACHE`), with this machine's own package
sources in it: what reaches packages here reaches them inside.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.image import Image, ImageStore, build_image
from pier.image.importing import import_image
from pier.sandbox import SandboxSpec
from pier.sandbox.building import SandboxRunner, open_runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CACHE = Path(os.environ.get("PIER_TEST_CACHE") or Path(__file__).parents[2] / ".cache" / "test")
COPIED = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/apt.conf.d", "etc/pip.conf", "etc/ssl/certs")

DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG BASE=debian-test
FROM ${BASE} AS build
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends jq openssh-client python3-pip python3-setuptools \\
    && rm -rf /var/lib/apt/lists/*
COPY package /src
RUN pip install --break-system-packages --no-build-isolation --no-deps /src && python3 -m hello_pier
RUN useradd --create-home --uid 1000 agent
WORKDIR /app
COPY --chown=agent:agent src/ ./src/
RUN <<EOF
set -eu
jq -n '{"built": true}' > built.json
chown agent built.json
stat -c '%a %U:%G' /usr/bin/ssh-agent
EOF
USER agent
RUN echo "$(id -un) $HOME $(pwd)" > ~/who

FROM ${BASE}
COPY --from=build /app /copied
COPY --from=build /etc/passwd /home/agent/who /seen/
CMD ["cat", "/seen/who"]
"""


@pytest.fixture(scope="module")
def debian() -> Path:
    """The tar of the base."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a base is made by debootstrap, as root")
    CACHE.mkdir(parents=True, exist_ok=True)
    archive = CACHE / "debian.tar"
    with (CACHE / "debian.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _bootstrap(archive)
    return archive


def _bootstrap(archive: Path) -> None:
    suite = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    if suite is None:
        pytest.skip("this machine's release has no code name")
    root = archive.with_name(f"debian-{os.getpid()}")
    part = archive.with_suffix(".part")
    try:
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", suite[1], str(root), _mirror()],
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode != 0:
            pytest.skip(f"debootstrap failed here: {done.stdout[-300:]} {done.stderr[-300:]}")
        for name in COPIED:
            _copy(Path("/") / name, root / name)
        for path in (root / "var/cache/apt/archives").glob("*.deb"):
            path.unlink()
        subprocess.run(["tar", "-C", str(root), "--one-file-system", "-cf", str(part), "."], check=True, timeout=600)
        part.replace(archive)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=False, ignore_dangling_symlinks=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _mirror() -> str:
    """Where this machine's own packages come from."""
    texts = [path.read_text() for path in Path("/etc/apt").rglob("*") if path.suffix in (".list", ".sources")]
    found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+/debian/?)(?:\s|$)", "\n".join(texts), re.MULTILINE)
    if not found:
        pytest.skip("this machine has no Debian packages configured")
    return found[1]


@pytest.fixture
async def runner() -> AsyncIterator[SandboxRunner]:
    async with open_runner() as opened:
        yield opened


async def _print(runner: SandboxRunner, image: Image, command: str) -> str:
    async with await runner.backend.start(SandboxSpec(image=image)) as sandbox:
        result = await sandbox.exec(["/bin/sh", "-c", command], timeout=120)
    assert result.ok, result.error_text
    return result.text


async def test_apt_and_pip_install_and_stages_are_copied(debian: Path, runner: SandboxRunner, tmp_path: Path) -> None:
    """pip installs a package of the context, so that no index is needed beyond Debian's own packages."""
    store = ImageStore()
    await import_image(store, debian, "debian-test")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.py").write_text("print('hi')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/pyproject.toml").write_text('[project]\nname = "hello-pier"\nversion = "1"\n')
    (tmp_path / "package/hello_pier.py").write_text("print('hello from a package')\n")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    lines: list[str] = []
    image = await build_image(store, tmp_path, runner=runner, on_progress=lines.append)
    assert "  hello from a package" in lines
    assert "  2755 root:_ssh" in lines
    rows = await _print(runner, image, "cat /seen/who /copied/built.json; stat -c '%n %a %u:%g' /copied/* /seen/who")
    assert rows.splitlines() == [
        "agent /home/agent /app",
        "{",
        '  "built": true',
        "}",
        "/copied/built.json 644 1000:0",
        "/copied/src 755 1000:1000",
        "/seen/who 644 1000:1000",
    ]
    stage = await build_image(store, tmp_path, target="build")
    assert await _print(runner, stage, "python3 /app/src/main.py; dpkg -s jq | grep ^Status") == (
        "hi\nStatus: install ok installed\n"
    )
