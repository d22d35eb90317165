"""The same Dockerfile built by BuildKit and by pier gives the same files, owners, modes and settings."""

from __future__ import annotations

import gzip
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
from pier.image.importing import import_image, take_from_engine
from pier.image.layer_directories import View, ViewEntry
from pier.network.policy import NONE
from pier.sandbox.opening import open_runner
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
COPY --chmod=751 tree /modes
COPY --chmod=0600 --chown=user:9 a.txt b.txt /modes/given/
COPY ["with space", "/spaces/in name"]
COPY kept skipped-but/this /exceptions/
COPY tree/. ./dot/
COPY tr*/d* /globbed-directory/
COPY --from=base /etc/passwd /from-image/
ADD archive.tar.gz plain.tar.xz /unpacked-both/
ADD --chown=11:12 plain.tar.xz /unpacked-for/
ADD not-an-archive.gz /added-as-it-is
ENV DIR=/env/dir NUMBER=${VERSION:-none} UNSET=${NOTHING:-default} ALTERNATIVE=${VERSION:+set}
WORKDIR $DIR
WORKDIR ../${NUMBER}/x
RUN echo "$ALTERNATIVE $UNSET" >here; ls -la / >/dev/null
USER 7:8
RUN id -u >/tmp/seven && id -g >>/tmp/seven
USER user
WORKDIR /home/user/new/dir
WORKDIR rel
RUN id -u >me && pwd >>me
USER root

FROM scratch AS nothing
COPY --chown=1:2 tree /from/nothing

FROM base AS last
ARG BASE
RUN echo "[$BASE]" >/base-argument
COPY --from=nothing /from /
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
VOLUME ["/json"]
LABEL "quoted key"="a \"b\"" three=3
LABEL one=changed
ENTRYPOINT ["/bin/echo"]
CMD echo "$HOME" tail
"""

ESCAPED = r"""# escape=`
FROM base
ENV WINDOWS=c:\dir\file JOINED="a `
b" QUOTED=a`"b
RUN echo one `
    && echo "$WINDOWS" >/windows
COPY a.txt `
     b.txt /both/
CMD ["c:\\run", "it"]
"""

HEREDOCS = r"""FROM base
ENV NAME=value
SHELL ["/bin/busybox", "sh", "-ec"]
RUN <<EOF
echo "$NAME" >/one
echo '$NAME' >>/one
false || echo two >>/one
EOF
RUN cat <<"A" >/two && tr a-z A-Z <<-B >/three
$NAME a
A
	lower $NAME
	B
COPY <<first <<"second" /docs/
$NAME in a file
first
$NAME as it is
second
COPY --chown=user:user --chmod=640 <<EOF /docs/named
some
EOF
"""
SPELLED_OUT = r"""FROM base
ENV NAME=value
SHELL ["/bin/busybox", "sh", "-ec"]
RUN echo "$NAME" >/one; echo '$NAME' >>/one; false || echo two >>/one
RUN printf '$NAME a\n' >/two; printf 'LOWER VALUE\n' >/three
RUN mkdir /docs; printf "$NAME in a file\n" >/docs/first; printf '$NAME as it is\n' >/docs/second
RUN echo some >/docs/named; chown user:user /docs/named; chmod 640 /docs/named
"""
"""The same for an engine that is older than here-documents."""


_OLD, _MEMBERS = 1_600_000_000, 1_700_000_000
"""The times of the context's files, and of those in archives."""


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
    with tarfile.open(context / "plain.tar.xz", "w:xz") as archive:
        for member, data in (entry("one", b"1", uid=3), directory("d", 0o700), entry("d/two", b"2", mode=0o600)):
            archive.addfile(member, io.BytesIO(data))
    (context / "not-an-archive.gz").write_bytes(gzip.compress(b"words", mtime=0))
    (context / "with space").write_text("x")
    for name in ("kept/f", "skipped-but/this", "skipped-but/that", "deep/a/skipped.tmp", "deep/a/kept.tmp"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    (context / ".dockerignore").write_text(
        "# a comment\n**/*.log\nDockerfile*\nskipped-but/*\n!skipped-but/this\ndeep/**/*.tmp\n!deep/a/kept*\n"
    )
    for path in context.rglob("*"):
        os.utime(path, (_OLD, _OLD), follow_symlinks=False)
    for name, text in (("", DOCKERFILE), (".escaped", ESCAPED), (".heredocs", HEREDOCS), (".spelled", SPELLED_OUT)):
        (context / f"Dockerfile{name}").write_text(text)


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

    def look(above: ViewEntry) -> None:
        for child in view.children(above):
            status = child.status
            content = os.readlink(child.place) if child.is_link else ""
            if child.is_file and status.st_size < 10_000:
                content = Path(child.place).read_bytes().hex()
            # The time of a file that was copied; others have that of the build, and directories that of their changes.
            at = int(status.st_mtime) if child.is_file and status.st_mtime <= _MEMBERS else ""
            rows[child.path] = f"{status.st_mode:o} {status.st_uid}:{status.st_gid} {at} {content}"
            if child.is_dir:
                look(child)

    look(view.root)
    for name in ("/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/etc/mtab", "/proc", "/sys", "/dev"):
        rows.pop(name, None)
    return {path: row for path, row in rows.items() if not path.startswith(("/dev/", "/proc/", "/sys/"))}


BUILDS = [("", "", "maker"), ("", "", "last"), (".escaped", ".escaped", ""), (".heredocs", ".spelled", "")]
"""The Dockerfiles of pier's build and of the engine's, and the target."""


@pytest.mark.parametrize(("mine", "theirs", "target"), BUILDS, ids=["maker", "last", "escaped", "heredocs"])
async def test_both_builders_make_the_same(
    docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, theirs: str, target: str
) -> None:
    monkeypatch.setenv("DOCKER_BUILDKIT", "1")
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    context = tmp_path / "context"
    context.mkdir()
    _context(context)
    base = _base(tmp_path)
    docker.docker("import", str(base), "base")
    command = [*_client(docker), "build", "--network=none", "--target", target, "-t", "theirs", str(context)]
    built = subprocess.run(
        [*command, "-f", str(context / f"Dockerfile{theirs}")], capture_output=True, text=True, timeout=280
    )
    if built.returncode != 0 and "buildx" in built.stderr:
        pytest.skip("this Docker client cannot use BuildKit: buildx is missing")
    assert built.returncode == 0, built.stdout + built.stderr
    store = ImageStore()
    image = await take_from_engine(store, "theirs")
    assert image is not None
    await import_image(store, base, "base")
    async with open_runner() as runner:
        file = context / f"Dockerfile{mine}"
        ours = await build_image(store, context, file, runner=runner, network=NONE, target=target or None)
    found, other = _rows(ours.layers), _rows(image.layers)
    different = {path: (found.get(path), other.get(path)) for path in found | other}
    different = {path: pair for path, pair in different.items() if pair[0] != pair[1]}
    assert different == {}, json.dumps(different, indent=2)
    for name in ("workdir", "user", "entrypoint", "cmd", "shell", "labels", "stop_signal", "healthcheck"):
        assert getattr(ours.config, name) == getattr(image.config, name), name
    assert set(ours.config.exposed_ports) == set(image.config.exposed_ports)
    assert set(ours.config.volumes) == set(image.config.volumes)
    paths = {name: value for name, value in image.config.env.items() if name != "PATH"}
    assert ours.config.env == paths
