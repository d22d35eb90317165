"""Building without RUN: COPY, ADD, WORKDIR, variables, stages, settings and the cache, as Docker would do them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from pier.errors import ImageError
from pier.image import Image, ImageStore, build_image
from pier.image.importing import import_image
from pier.image.layer_directories import View
from tests.image_rig import Pieces, directory, entry, link, tar_of

BASE = tar_of(
    directory("./"),
    directory("etc"),
    entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nbob:x:1000:1001::/home/bob:/bin/sh\n"),
    entry("etc/group", b"root:x:0:\nbob:x:1001:\nstaff:x:50:\n"),
    directory("usr"),
    directory("usr/lib", 0o711, uid=3, gid=4),
    entry("usr/lib/old", b"old"),
    link("lib", "usr/lib"),
    directory("srv", 0o700, uid=7, gid=8),
    entry("srv/private", b"p", mode=0o600, uid=7, gid=8),
)


class Bench:
    """A context, and builds of it on the small base."""

    def __init__(self, context: Path, store: ImageStore) -> None:
        self.context = context
        self.store = store
        self.lines: list[str] = []

    def write(self, name: str, text: str = "", mode: int = 0o644) -> Path:
        path = self.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    async def build(self, dockerfile: str, **options: object) -> Image:
        (self.context / "Dockerfile").write_text(dockerfile)
        self.lines = []
        return await build_image(self.store, self.context, on_progress=self.lines.append, **options)  # type: ignore[arg-type]

    async def tree(self, dockerfile: str, **options: object) -> dict[str, str]:
        """What the built image holds beyond its base, merged: mode, owner and content of each file."""
        image = await self.build(dockerfile, **options)
        view = View([str(layer) for layer in image.layers])
        base = View([str(image.layers[0])])
        return {path: row for path, row in _rows(view).items() if _rows(base).get(path) != row}


def _rows(view: View) -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = [view.root]
    while waiting:
        for child in view.children(waiting.pop()):
            status = child.status
            text = os.readlink(child.place) if child.is_link else Path(child.place).read_text() if child.is_file else ""
            found[child.path] = f"{status.st_mode & 0o7777:o} {status.st_uid}:{status.st_gid} {text}".strip()
            if child.is_dir:
                waiting.append(child)
    return found


@pytest.fixture
async def bench(tmp_path: Path, is_root: bool, monkeypatch: pytest.MonkeyPatch) -> Bench:
    if not is_root:
        pytest.skip("owners are looked at from outside, which needs root")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    store = ImageStore()
    (tmp_path / "base.tar").write_bytes(BASE)
    await import_image(store, tmp_path / "base.tar", "base")
    context = tmp_path / "context"
    context.mkdir()
    return Bench(context, store)


async def test_copied_files_belong_to_root_and_keep_their_modes(bench: Bench) -> None:
    bench.write("run.sh", "x", 0o750)
    bench.write("data/deep/file", "y")
    (bench.context / "data/deep").chmod(0o700)
    os.chown(bench.context / "data/deep/file", 1234, 1234)
    (bench.context / "data/link").symlink_to("/nowhere")
    tree = await bench.tree("FROM base\nCOPY run.sh /app/bin/\nCOPY data /data\n")
    assert tree == {
        "/app": "755 0:0",
        "/app/bin": "755 0:0",
        "/app/bin/run.sh": "750 0:0 x",
        "/data": "755 0:0",
        "/data/deep": "700 0:0",
        "/data/deep/file": "644 0:0 y",
        "/data/link": "777 0:0 /nowhere",
    }


async def test_destinations_with_and_without_a_slash(bench: Bench) -> None:
    bench.write("a", "1")
    tree = await bench.tree("FROM base\nWORKDIR /w\nCOPY a b\nCOPY a c/\nCOPY a .\nCOPY a /etc\nCOPY a ./d/e\n")
    files = {path for path, row in tree.items() if row.endswith(" 1")}
    assert files == {"/w/b", "/w/c/a", "/w/a", "/etc/a", "/w/d/e"}


async def test_links_of_the_image_are_followed_and_directories_keep_their_metadata(bench: Bench) -> None:
    bench.write("new", "n")
    bench.write("old", "changed")
    tree = await bench.tree("FROM base\nCOPY new old /lib/\nCOPY new /srv/private\n")
    assert tree == {
        "/usr/lib/new": "644 0:0 n",
        "/usr/lib/old": "644 0:0 changed",
        "/srv/private": "644 0:0 n",
    }


async def test_chown_and_chmod_apply_to_what_is_copied_and_made(bench: Bench) -> None:
    bench.write("d/f", "x", 0o600)
    tree = await bench.tree(
        "FROM base\nARG WHO=bob\nCOPY --chown=$WHO d /one/two\nCOPY --chown=bob:staff --chmod=755 d/f /f\n"
        "COPY --chown=55 d/f /g\nCOPY --chmod=0640 d /h/\n"
    )
    assert tree == {
        "/one": "755 1000:1001",
        "/one/two": "755 1000:1001",
        "/one/two/f": "600 1000:1001 x",
        "/f": "755 1000:50 x",
        "/g": "600 55:55 x",
        "/h": "755 0:0",
        "/h/f": "640 0:0 x",
    }


async def test_wildcards_and_the_ignore_file(bench: Bench) -> None:
    for name in ("a.txt", "b.txt", "c.log", "sub/d.txt", "sub/e.log", "secret/key", "secret/pub"):
        bench.write(name, name)
    bench.write(".dockerignore", "**/*.log\nsecret\n!secret/pub\n.dockerignore\nDockerfile\n")
    tree = await bench.tree("FROM base\nCOPY *.txt s?b none* /w/\nCOPY . /all/\n")
    assert {path for path, row in tree.items() if "/" in row or "." in row} == {
        "/w/a.txt",
        "/w/b.txt",
        "/w/d.txt",
        "/all/a.txt",
        "/all/b.txt",
        "/all/sub/d.txt",
        "/all/secret/pub",
    }
    with pytest.raises(ImageError, match=r"Dockerfile:2: COPY: c\.log is not there"):
        await bench.build("FROM base\nCOPY c.log /\n")
    bench.write("Dockerfile.dockerignore", "a.txt\n")
    tree = await bench.tree("FROM base\nCOPY c.log /\n")
    assert list(tree) == ["/c.log"]


async def test_nothing_outside_of_the_context_can_be_copied(bench: Bench) -> None:
    (bench.context.parent / "outside").write_text("no")
    (bench.context / "link").symlink_to("../outside")
    for source in ("../outside", "link", str(bench.context.parent / "outside")):
        with pytest.raises(ImageError, match="is not there"):
            await bench.build(f"FROM base\nCOPY {source} /x\n")


async def test_add_unpacks_archives_and_copies_the_rest(bench: Bench) -> None:
    archive = tar_of(directory("top", 0o750, uid=9, gid=9), entry("top/f", b"in", uid=9, gid=9), link("top/l", "f"))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as packed:
        member, data = entry("z", b"zip")
        packed.addfile(member, io.BytesIO(data))
    (bench.context / "a.tar").write_bytes(archive)
    (bench.context / "z.bin").write_bytes(out.getvalue())
    bench.write("plain", "text")
    tree = await bench.tree("FROM base\nADD a.tar z.bin plain /x/\n")
    assert tree == {
        "/x": "755 0:0",
        "/x/top": "750 9:9",
        "/x/top/f": "644 9:9 in",
        "/x/top/l": "777 0:0 f",
        "/x/z": "644 0:0 zip",
        "/x/plain": "644 0:0 text",
    }


async def test_here_documents_become_files(bench: Bench) -> None:
    text = 'FROM base\nARG V=1\nCOPY --chmod=755 <<one <<"two" /d/\n$V \\$V "q"\none\n$V\ntwo\n'
    text += "COPY <<-x /plain\n\t\ttab\n\tx\n"
    assert await bench.tree(text) == {
        "/d": "755 0:0",
        "/d/one": '755 0:0 1 $V "q"',
        "/d/two": "755 0:0 $V",
        "/plain": "644 0:0 tab",
    }


async def test_workdir_is_made_for_the_current_user_and_only_if_missing(bench: Bench) -> None:
    image = await bench.build(
        "FROM base\nENV D=deep\nWORKDIR /w\nUSER bob\nWORKDIR $D/er\nWORKDIR /srv\nWORKDIR /lib/x\n"
    )
    tree = _rows(View([str(layer) for layer in image.layers]))
    assert tree["/w"] == "755 0:0"
    assert tree["/w/deep"] == tree["/w/deep/er"] == "755 1000:1001"
    assert tree["/srv"] == "700 7:8"
    assert tree["/usr/lib/x"] == "755 1000:1001"
    assert tree["/usr/lib"] == "711 3:4"
    assert image.config.workdir == "/lib/x"
    assert len(image.layers) == 4


async def test_stages_are_copied_from_with_their_owners(bench: Bench) -> None:
    bench.write("f", "x")
    tree = await bench.tree(
        "FROM base AS One\nCOPY --chown=bob f /out/f\nFROM missing-image AS unused\nFROM base\n"
        "COPY --from=one /out /in\nCOPY --from=0 --chown=9:9 /out/* /\n"
        "COPY --from=base /lib/old /copied\n"
    )
    assert tree == {
        "/in": "755 0:0",
        "/in/f": "644 1000:1001 x",
        "/f": "644 9:9 x",
        "/copied": "644 0:0 old",
    }


async def test_a_stage_can_go_on_from_another_and_be_the_target(bench: Bench) -> None:
    bench.write("f", "x")
    text = "FROM base AS a\nENV A=1\nCOPY f /a\nFROM a AS b\nCOPY f /b\nFROM b\nCOPY f /c\n"
    tree = await bench.tree(text, target="b")
    assert sorted(tree) == ["/a", "/b"]
    image = await bench.build(text, target="A")
    assert image.config.env["A"] == "1"
    with pytest.raises(ImageError, match="no stage 'zzz'"):
        await bench.build(text, target="zzz")


async def test_arguments_have_scopes(bench: Bench) -> None:
    text = (
        "ARG IMAGE=nothing\nARG GLOBAL=g\nFROM ${IMAGE} AS a\nARG GLOBAL\nARG LOCAL=l\nARG UNSET\nENV E=$LOCAL$GLOBAL\n"
        "ENV LOCAL2=${LOCAL}2 UNSET=[$UNSET] PATH=/x:$PATH ARCH=$TARGETARCH\n"
        "ARG TARGETARCH\nENV HAS=${TARGETARCH:+yes}\n"
        "FROM base\nENV NONE=[$LOCAL$GLOBAL]\n"
    )
    args = {"IMAGE": "base", "LOCAL": "given", "EXTRA": "1", "http_proxy": "p"}
    image = await bench.build(text, build_args=args, target="a")
    assert image.config.env == {
        "E": "giveng",
        "LOCAL2": "given2",
        "UNSET": "[]",
        "PATH": "/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "ARCH": "",
        "HAS": "yes",
    }
    assert [line for line in bench.lines if "warning" in line] == [
        "warning: the build argument EXTRA is not used by any ARG"
    ]
    image = await bench.build(text, build_args=args)
    assert image.config.env == {"NONE": "[]"}


async def test_settings_are_those_of_docker(bench: Bench) -> None:
    image = await bench.build(
        'FROM base\nENV A="one two" B=\'$A\' C=x\\ y\nENV old a  b\nLABEL "k 1"="v" k2=v2 \\\n  k3="$A"\n'
        "USER bob:staff\nEXPOSE 80 53/udp\nVOLUME /a /b\n"
        'VOLUME ["/c"]\nSTOPSIGNAL SIGINT\nSHELL ["/bin/bash", "-c"]\nCMD run it\nENTRYPOINT ["e", "$A"]\n'
        "HEALTHCHECK --interval=1m30s --timeout=500ms --retries=3 CMD curl -f x || exit 1\nMAINTAINER me\n"
    )
    config = image.config
    assert config.env == {"A": "one two", "B": "$A", "C": "x y", "old": "a  b"}
    assert config.labels == {"k 1": "v", "k2": "v2", "k3": "one two"}
    assert (config.user, config.stop_signal) == ("bob:staff", "SIGINT")
    assert config.exposed_ports == ("80/tcp", "53/udp")
    assert config.volumes == ("/a", "/b", "/c")
    assert config.shell == ("/bin/bash", "-c")
    assert config.cmd == ("/bin/bash", "-c", "run it")
    assert config.entrypoint == ("e", "$A")
    assert config.healthcheck == {
        "Test": ["CMD-SHELL", "curl -f x || exit 1"],
        "Interval": 90 * 10**9,
        "Timeout": 5 * 10**8,
        "Retries": 3,
    }
    below = await bench.build('FROM base\nCMD ["old"]\n', tag="with-cmd")
    assert below.config.cmd == ("old",)
    assert (await bench.build('FROM with-cmd\nENTRYPOINT ["x"]\n')).config.cmd == ()


async def test_scratch_starts_with_nothing(bench: Bench) -> None:
    bench.write("f", "x")
    image = await bench.build('FROM scratch\nCOPY f /\nCMD ["/f"]\n')
    assert _rows(View([str(layer) for layer in image.layers])) == {"/f": "644 0:0 x"}
    assert list(image.config.env) == ["PATH"]


async def test_host_is_a_base_whose_files_cannot_be_copied(bench: Bench) -> None:
    bench.write("f", "x")
    image = await bench.build("FROM host\nWORKDIR /usr/pier-test-dir\nCOPY f .\n", tag="on-host")
    assert image.is_host
    assert (await bench.store.resolve("on-host")).on_host
    assert _rows(View([str(layer) for layer in image.layers]))["/usr/pier-test-dir/f"] == "644 0:0 x"
    for text in (
        "FROM host AS h\nFROM base\nCOPY --from=h /etc/passwd /x\n",
        "FROM base\nCOPY --from=host /etc/passwd /x\n",
    ):
        with pytest.raises(ImageError):
            await bench.build(text)


async def test_only_what_changed_is_made_again(bench: Bench) -> None:
    bench.write("a", "1")
    bench.write("b", "1")
    text = "FROM base\nWORKDIR /w\nCOPY a .\nCOPY b .\n"
    first = await bench.build(text, tag="app")
    assert "  cached" not in bench.lines
    (bench.context / "a").touch()
    assert await bench.build(text, tag="app") == first
    assert bench.lines.count("  cached") == 3
    bench.write("b", "2")
    second = await bench.build(text, tag="app")
    assert bench.lines.count("  cached") == 2
    assert second.layers[:3] == first.layers[:3]
    assert second.digest != first.digest
    (bench.context / "b").chmod(0o755)
    assert (await bench.build(text)).digest != second.digest
    assert await bench.store.resolve("app") == second


async def test_triggers_of_a_base_are_refused_by_name(bench: Bench, tmp_path: Path) -> None:
    config = {"OnBuild": ["COPY . /app", "RUN make"]}
    (tmp_path / "t.tar").write_bytes(Pieces(BASE, config=config).docker_archive("triggers:1"))
    await import_image(bench.store, tmp_path / "t.tar")
    with pytest.raises(ImageError) as caught:
        await bench.build("FROM base\nFROM triggers:1\n")
    assert "Dockerfile:2: the image triggers:1 has triggers" in caught.value.message
    assert "ONBUILD COPY . /app; ONBUILD RUN make" in caught.value.message
    assert (caught.value.code, caught.value.blame) == ("dockerfile", "task")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN x\nFROM base\n", "Dockerfile:1: RUN comes before the first FROM"),
        ("ARG A\n", "has no FROM"),
        ("FROM base\nCOPY missing /x\n", "Dockerfile:2: COPY: missing is not there"),
        ("FROM base\nCOPY f\n", "Dockerfile:2: COPY: it needs a source and a destination"),
        ("FROM base\nCOPY f f /x\n", "Dockerfile:2: COPY: with more than one source"),
        ("FROM base\nCOPY f /etc/passwd/x\n", "Dockerfile:2: COPY: "),
        ("FROM base\nCOPY d /etc/passwd\n", "Dockerfile:2: COPY: /etc/passwd is not a directory"),
        ("FROM base\nCOPY --chown=nobody f /\n", "Dockerfile:2: COPY: 'nobody' is not in /etc/passwd"),
        ("FROM base\nCOPY --chmod=u+x f /\n", "Dockerfile:2: COPY: --chmod=u[+]x is not an octal mode"),
        ("FROM base\n\nWORKDIR /etc/passwd\n", "Dockerfile:3: WORKDIR: /etc/passwd is not a directory"),
        ("FROM base\nENV A\n", "Dockerfile:2: ENV A has no value"),
        ("FROM base\nSHELL sh\n", "Dockerfile:2: SHELL needs a JSON array"),
        ("FROM base\nEXPOSE many\n", "Dockerfile:2: 'many' is not a port"),
        ("FROM base AS\n", "Dockerfile:1: FROM needs an image"),
        ("FROM $NOTHING\n", "Dockerfile:1: FROM .* names no image"),
        ("FROM --platform=windows/amd64 base\n", "is not this machine's platform"),
        ("FROM base\nRUN true\n", "Dockerfile:2: RUN: RUN needs a sandbox"),
        ("FROM base\nRUN --mount=type=secret,id=x true\n", "Dockerfile:2: RUN: --mount=type=secret is not supported"),
        ("FROM base\nRUN --mount=type=bind,from=x,target=/y true\n", "type=bind,from is not supported"),
        ("FROM base\nRUN --network=host true\n", "--network=host is not supported"),
        ("FROM base\nADD git@github.com:a/b.git /x\n", "git sources"),
        ("FROM base\nENV A=${B\n", "Dockerfile:2: "),
    ],
)
async def test_what_is_wrong_is_told_with_file_and_line(bench: Bench, text: str, message: str) -> None:
    bench.write("f", "x")
    bench.write("d/e", "x")
    with pytest.raises(ImageError, match=message) as caught:
        await bench.build(text)
    assert str(bench.context / "Dockerfile") in caught.value.message
    assert not list((bench.store.root / "tmp").iterdir())
