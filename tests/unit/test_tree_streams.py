"""Trees through tar streams: what goes in comes out, and nothing leaves its directory."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pier.beneath import BENEATH, NO_MAGICLINKS
from pier.sandbox import tree
from pier.sandbox.linux.copying import receive

pytestmark = pytest.mark.plain


def packed(source: Path, **options: Any) -> tuple[bytes, list[str]]:
    """`source` as a stream, read by a thread while it is written, as a pipe must be."""
    read, write = os.pipe()
    chunks: list[bytes] = []

    def drain() -> None:
        with open(read, "rb") as stream:
            chunks.extend(iter(lambda: stream.read(65536), b""))

    thread = threading.Thread(target=drain)
    thread.start()
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        skipped = tree.pack(root, str(source), write, **options)
    finally:
        os.close(write)
        os.close(root)
        thread.join(60)
    return b"".join(chunks), skipped


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        for info, content in entries:
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def unpack(data: bytes, target: Path, **options: Any) -> list[str]:
    fd = os.open(target, os.O_PATH | os.O_DIRECTORY)
    try:
        return tree.unpack(io.BytesIO(data), fd, **options).skipped
    finally:
        os.close(fd)


def listing(root: Path) -> dict[str, tuple[str, int, bytes]]:
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        kind = stat.filemode(status.st_mode)[0]
        found[str(path.relative_to(root))] = (kind, 0 if kind == "l" else stat.S_IMODE(status.st_mode), content)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "plain").write_bytes(b"hello")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "sub" / "deep" / "big").write_bytes(os.urandom(3_000_000))
    (root / "out").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../../..")
    os.link(root / "plain", root / "sub" / "again")
    (root / ("n" * 200)).write_text("long")
    (root / "with space\n and newline").write_text("odd")
    (root / os.fsdecode(b"bytes-\xff\xfe")).write_text("not utf-8")
    (root / "empty").mkdir(mode=0o700)
    return root


def test_a_tree_comes_out_as_it_went_in(source: Path, tmp_path: Path) -> None:
    data, skipped = packed(source)
    assert skipped == []
    assert receive(io.BytesIO(data), tmp_path / "copy") == []
    assert listing(tmp_path / "copy") == listing(source)
    assert (tmp_path / "copy" / "plain").samefile(tmp_path / "copy" / "sub" / "again")
    assert (tmp_path / "copy" / "plain").stat().st_mtime == int((source / "plain").stat().st_mtime)


def test_one_file(source: Path, tmp_path: Path) -> None:
    data, _ = packed(source / "run")
    receive(io.BytesIO(data), tmp_path / "new" / "file")
    assert (tmp_path / "new" / "file").read_text() == "#!/bin/sh\n"
    assert stat.S_IMODE((tmp_path / "new" / "file").stat().st_mode) == 0o755


def test_a_symlink_itself_is_what_comes(source: Path, tmp_path: Path) -> None:
    data, _ = packed(source / "out")
    receive(io.BytesIO(data), tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "/etc/passwd"


def test_special_files_are_left_out_and_named(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "sub" / "fifo")
    data, skipped = packed(source)
    assert skipped == ["sub/fifo"]
    receive(io.BytesIO(data), tmp_path / "copy")
    assert not (tmp_path / "copy" / "sub" / "fifo").exists()
    assert packed(source / "sub" / "fifo")[1] == ["."]


def test_exclude_by_path_and_by_name(source: Path) -> None:
    data, _ = packed(source, exclude=["deep", "out", "sub/ag*", "*.pyc"])
    names = tarfile.open(fileobj=io.BytesIO(data)).getnames()
    assert "plain" in names and "sub" in names
    assert not {"out", "sub/deep", "sub/deep/big", "sub/again"} & set(names)


def test_size_is_capped_on_both_sides(source: Path, tmp_path: Path) -> None:
    with pytest.raises(tree.TreeError) as caught:
        packed(source, max_bytes=100_000)
    assert caught.value.code == "too_large"
    data, _ = packed(source)
    with pytest.raises(tree.TreeError) as caught:
        receive(io.BytesIO(data), tmp_path / "copy", max_bytes=100_000)
    assert caught.value.code == "too_large"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_is_there_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    data, _ = packed(source)
    (tmp_path / "copy").mkdir()
    receive(io.BytesIO(data), tmp_path / "copy")
    with pytest.raises(FileExistsError):
        receive(io.BytesIO(data), tmp_path / "copy")


@pytest.mark.parametrize(
    "entries",
    [
        [(entry("../out"), b"x")],
        [(entry("a/../../out"), b"x")],
        [(entry("/abs"), b"x")],
        [(entry("link", tarfile.SYMTYPE, ".."), b""), (entry("link/out"), b"x")],
        [(entry("link", tarfile.SYMTYPE, "/"), b""), (entry("link/tmp/out"), b"x")],
        [(entry("a", tarfile.SYMTYPE, "b"), b""), (entry("b", tarfile.SYMTYPE, ".."), b""), (entry("a/out"), b"x")],
        [(entry("hard", tarfile.LNKTYPE, "../secret"), b"")],
        [(entry("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(entry("link", tarfile.SYMTYPE, ".."), b""), (entry("hard", tarfile.LNKTYPE, "link/secret"), b"")],
        [(entry("file"), b"x"), (entry("file/below"), b"x")],
        [(entry("."), b"x")],
    ],
)
def test_nothing_lands_outside(entries: list[tuple[tarfile.TarInfo, bytes]], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"
    target.mkdir()
    for limits in ({}, {"resolve": NO_MAGICLINKS | BENEATH, "keep": True, "owner": (os.getuid(), os.getgid())}):
        with pytest.raises(tree.TreeError) as caught:
            unpack(archive(*entries), target, **limits)
        assert caught.value.code == "unsafe_archive"
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "target"}
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").symlink_to(tmp_path / "secret")
    unpack(archive((entry("file"), b"new"), (entry("sub", tarfile.DIRTYPE, mode=0o500), b"")), target)
    assert (tmp_path / "secret").read_text() == "secret"
    assert (target / "file").read_text() == "new" and not (target / "file").is_symlink()


def test_devices_and_set_id_bits_stay_out_of_the_host(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    entries = [
        (entry("dev", tarfile.CHRTYPE), b""),
        (entry("blk", tarfile.BLKTYPE), b""),
        (entry("su", mode=0o6755), b""),
    ]
    assert unpack(archive(*entries), target) == ["dev", "blk"]
    assert [path.name for path in target.iterdir()] == ["su"]
    assert stat.S_IMODE((target / "su").stat().st_mode) == 0o755


@pytest.mark.parametrize("cut", [100, 700, 1500])
def test_a_torn_archive_is_told(cut: int, tmp_path: Path) -> None:
    data = archive((entry("a"), b"x" * 5000))
    with pytest.raises(tree.TreeError) as caught:
        unpack(data[:cut], tmp_path)
    assert caught.value.code == "broken_archive"


def test_a_deep_tree_ends(tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    os.chdir(root)
    try:
        for _ in range(450):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir("/")
    assert len(packed(root)[1]) == 1


names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names.filter(lambda name: name not in (".", "..")), st.binary(max_size=2000), max_size=8))
def test_any_names_and_contents(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "source").mkdir()
    kept = {name: data for name, data in files.items() if len(name.encode()) < 250}
    for name, data in kept.items():
        (base / "source" / name).write_bytes(data)
    receive(io.BytesIO(packed(base / "source")[0]), base / "copy")
    assert {path.name: path.read_bytes() for path in (base / "copy").iterdir()} == kept
