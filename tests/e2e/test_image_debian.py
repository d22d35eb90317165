"""A real Debian: Dockerfiles as tasks have them, with apt and pip inside a sandbox with network; its own users, PAM and
sudo, as root and as a plain user with subordinate ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.idmap import IdMap
from pier.image import Image, ImageStore, build_image
from pier.image.importing import import_image
from pier.sandbox import SandboxSpec
from pier.sandbox.opening import SandboxRunner, open_runner
from tests.debian import Unavailable, debian_archive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

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
    try:
        return debian_archive()
    except Unavailable as why:
        pytest.skip(str(why))


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


USERS = """\
FROM debian-test
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends sudo adduser && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash --groups sudo agent && echo agent:pw | chpasswd \\
    && echo 'agent ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/agent \\
    && adduser --system --group --home /srv/svc svc && useradd --create-home other && echo other:secret | chpasswd
"""
ASKED = {
    "id -un; groups": "agent\nagent sudo\n",
    "sudo -n id -u; sudo -n -u svc id -un; sudo -n touch /etc/by-sudo && stat -c %U /etc/by-sudo": "0\nsvc\nroot\n",
    "echo pw | sudo -S -k -p '' whoami": "root\n",
    "echo secret | su other -c whoami": "other\n",
    "echo wrong | su other -c whoami || echo refused": "refused\n",
    "passwd -S | cut -d' ' -f1,2; sudo -n useradd new && id -u new && sudo -n userdel new": "agent P\n1002\n",
    "cat /etc/shadow || echo hidden": "hidden\n",
}


@pytest.mark.plain
async def test_users_sudo_and_pam_are_debians_own(debian: Path, runner: SandboxRunner, tmp_path: Path) -> None:
    if IdMap.detect().mode == "single":
        pytest.skip("with a single id there are no other users")
    store = ImageStore()
    await import_image(store, debian, "debian-test")
    (tmp_path / "Dockerfile").write_text(USERS)
    image = await build_image(store, tmp_path, runner=runner)
    async with await runner.backend.start(SandboxSpec(image=image)) as sandbox:
        for command, answer in ASKED.items():
            result = await sandbox.exec(["/bin/sh", "-c", command], user="agent", timeout=120)
            assert result.text == answer, (command, result.error_text)
    async with await runner.backend.start(SandboxSpec(image=image, no_new_privileges=True)) as sandbox:
        result = await sandbox.exec(["sudo", "-n", "id"], user="agent", timeout=120)
        assert result.exit_code == 1 and "no new privileges" in result.error_text
