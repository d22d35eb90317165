"""The same Dockerfile built by BuildKit and by pier gives the same files, owners, modes and settings."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.image import ImageStore, build_image
from pier.image.engine import take_from_engine
from pier.image.importing import import_image
from pier.image.view import Entry, View
from pier.network.policy import NONE
from pier.sandbox.building import open_runner
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.image_rig import directory, entry, link

pytestmark = [pytest.mark.docker, pytest.mark.slow]

DOCKERFILE = r"""# syntax-free on purpose: no frontend is fetched
ARG BASE=base
FROM ${BASE} AS maker
ARG VERSION=1
ENV VERSION=$VERSION LIST="a b" QUOTED='$VERSION' ESCAPED=a\ b
LABEL one="1" two=$VERSION
RUN mkdir -p /made/deep && echo "$VERSION $LIST" >/made/f && chown 1000:1000 /made/f && chmod 4750 /made/f \
    # a comment in between
    && ln -s f /made/link && ln /made/f /made/deep/hard && rm -r /srv && rm /etc/hostname-old
WORKDIR /work/dir
COPY . .
COPY tree/ /flat
COPY tree /lib/inside/
COPY a.txt b.txt /both/
COPY a.txt /renamed
COPY *.txt tr?e /globbed/
COPY --chown=user:user tree /owned
COPY --chown=7 a.txt /owned/seven
COPY link-to-a /through/
ADD archive.tar.gz /unpacked/
ADD a.txt /added
COPY a.txt /private/given
USER user
WORKDIR /home/user/new/dir
WORKDIR rel
RUN id -u >me && pwd >>me
USER root

FROM base AS last
COPY --from=maker /made /from/made
COPY --from=maker /owned/ /home/user/new/dir/rel/me* /from/
COPY --from=0 --chown=3:4 /made/f /etc/f
RUN ["/bin/sh", "-c", "echo exec >/exec"]
SHELL ["/bin/busybox", "sh", "-c"]
RUN echo $0 >/shell
EXPOSE 80 53/udp
VOLUME /data /more
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5s --retries=2 CMD true || exit 1
ENTRYPOINT ["/bin/echo"]
CMD echo "$HOME" tail
"""


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with engine() as running:
        yield running


def _client(docker: Engine) -> list[str]:
    """The engine's own client: newer ones cannot use BuildKit without a plug-in."""
    program = next(path for path in ("/usr/bin/docker", shutil.which("docker")) if path and Path(path).exists())
    return [program, "--host", docker.url]


def _context(context: Path) -> None:
    (context / "tree/deep").mkdir(parents=True)
    (context / "tree/deep").chmod(0o700)
    for name, mode in (
        ("a.txt", 0o640),
        ("b.txt", 0o755),
        ("tree/x", 0o600),
        ("tree/deep/y", 0o644),
        ("skip.log", 0o644),
    ):
        (context / name).write_text(name)
        (context / name).chmod(mode)
    os.chown(context / "tree/x", 1234, 1234)
    (context / "link-to-a").symlink_to("a.txt")
    (context / "tree/broken").symlink_to("/nowhere")
    with tarfile.open(context / "archive.tar.gz", "w:gz") as archive:
        for member, data in (
            directory("top", 0o750, uid=5, gid=6),
            entry("top/file", b"in", uid=5, gid=6, mode=0o4755),
            link("top/l", "file"),
        ):
            archive.addfile(member, io.BytesIO(data))
    (context / ".dockerignore").write_text("**/*.log\nDockerfile\n")
    (context / "Dockerfile").write_text(DOCKERFILE)


def _base(tmp_path: Path) -> Path:
    """A root file system with what makes copying hard: a linked directory, odd owners, things to remove."""
    root = busybox_image(tmp_path / "busybox").layers[0]
    (root / "usr/lib").mkdir()
    (root / "usr/lib").chmod(0o711)
    (root / "lib").symlink_to("usr/lib")
    (root / "private").mkdir()
    (root / "private").chmod(0o700)
    os.chown(root / "private", 7, 8)
    (root / "private/given").write_text("old")
    (root / "etc/hostname-old").write_text("x")
    (root / "srv/gone").write_text("x")
    archive = tmp_path / "base.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=120)
    return archive


def _rows(layers: tuple[Path, ...]) -> dict[str, str]:
    """Every file of the merged layers, but for what engines put there to mount on."""
    view = View([str(layer) for layer in layers])
    rows: dict[str, str] = {}

    def look(above: Entry) -> None:
        for child in view.children(above):
            status = child.status
            content = os.readlink(child.place) if child.is_link else ""
            if child.is_file and status.st_size < 10_000:
                content = Path(child.place).read_bytes().hex()
            rows[child.path] = f"{status.st_mode:o} {status.st_uid}:{status.st_gid} {content}"
            if child.is_dir:
                look(child)

    look(view.root)
    for name in ("/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/etc/mtab", "/proc", "/sys", "/dev"):
        rows.pop(name, None)
    return {path: row for path, row in rows.items() if not path.startswith(("/dev/", "/proc/", "/sys/"))}


@pytest.mark.parametrize("target", ["maker", "last"])
async def test_both_builders_make_the_same(
    docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv("DOCKER_BUILDKIT", "1")
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    context = tmp_path / "context"
    context.mkdir()
    _context(context)
    base = _base(tmp_path)
    docker.docker("import", str(base), "base")
    built = subprocess.run(
        [*_client(docker), "build", "--network=none", "--target", target, "-t", f"theirs:{target}", str(context)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    if built.returncode != 0 and "buildx" in built.stderr:
        pytest.skip("this Docker client cannot use BuildKit: buildx is missing")
    assert built.returncode == 0, built.stdout + built.stderr
    store = ImageStore()
    theirs = await take_from_engine(store, f"theirs:{target}")
    assert theirs is not None
    await import_image(store, base, "base")
    async with open_runner() as runner:
        ours = await build_image(store, context, runner=runner, network=NONE, target=target)
    mine, other = _rows(ours.layers), _rows(theirs.layers)
    different = {path: (mine.get(path), other.get(path)) for path in mine | other if mine.get(path) != other.get(path)}
    assert different == {}, json.dumps(different, indent=2)
    for name in ("workdir", "user", "entrypoint", "cmd", "shell", "labels", "stop_signal", "healthcheck"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert set(ours.config.exposed_ports) == set(theirs.config.exposed_ports)
    assert set(ours.config.volumes) == set(theirs.config.volumes)
    paths = {name: value for name, value in theirs.config.env.items() if name != "PATH"}
    assert ours.config.env == paths
