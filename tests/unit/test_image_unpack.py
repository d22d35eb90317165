"""Archives to layers: whiteouts, owners, links, and archives that mean harm."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pier.errors import ImageError
from pier.idmap import IdMap, mapped_argv
from pier.image import owner
from pier.image.layer_directories import unpack_archive
from pier.image.layer_tar import unpack
from tests.image_rig import directory, entry, link, tar_of

pytestmark = pytest.mark.plain


def unpacked(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes], name: str = "layer") -> Path:
    target = tmp_path / name
    target.mkdir()
    unpack(io.BytesIO(tar_of(*members)), str(target), owners=False)
    return target


def test_whiteouts_become_what_overlayfs_knows(tmp_path: Path, is_root: bool) -> None:
    if not is_root:
        pytest.skip("a whiteout can be made only inside a user namespace, see the next test")
    layer = unpacked(
        tmp_path,
        directory("d"),
        entry("d/.wh.gone"),
        directory("opaque"),
        entry("opaque/.wh..wh..opq"),
        entry("opaque/new", b"x"),
        entry(".wh.replaced"),
        directory("replaced"),
        directory("late"),
        entry(".wh.late"),
        entry(".wh..wh.plnk"),
    )
    status = (layer / "d/gone").lstat()
    assert stat.S_ISCHR(status.st_mode)
    assert status.st_rdev == 0
    for name in ("opaque", "replaced", "late"):
        assert os.getxattr(layer / name, "user.overlay.opaque") == b"y"
    assert sorted(path.name for path in layer.iterdir()) == ["d", "late", "opaque", "replaced"]


async def test_the_stores_owner_unpacks_owners_and_whiteouts(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(
        tar_of(directory("d", 0o2750, uid=10, gid=20), entry("d/s", b"x", mode=0o4755, uid=1), entry("d/.wh.gone"))
    )
    target = tmp_path / "layer"
    target.mkdir()
    made = await owner.run("unpack_archive", archive=str(archive), target=str(target))
    try:
        assert made["size"] == 1
        script = "import os, sys; s = os.lstat(sys.argv[1]); print(f'{s.st_mode:o} {s.st_uid}:{s.st_gid} {s.st_rdev}')"
        seen = {name: _inside(script, str(target / name)) for name in ("d", "d/s", "d/gone")}
        assert seen["d/gone"].split()[0] == "20600"
        if IdMap.detect().mode != "single":
            assert seen["d"] == "42750 10:20 0"
            assert seen["d/s"] == "104755 1:0 0"
    finally:
        await owner.run("remove_tree", path=str(target))
    assert not target.exists()


def _inside(script: str, *args: str) -> str:
    """What a script prints where the store's owners are seen as the image's."""
    argv = ["/usr/bin/python3", "-c", script, *args]
    if os.geteuid() != 0:
        argv = mapped_argv(argv)
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_modes_times_links_and_attributes_are_kept(tmp_path: Path) -> None:
    layer = unpacked(
        tmp_path,
        directory("./", 0o750),
        directory("d", 0o700, mtime=1_000_000_000),
        entry(
            "d/f",
            b"data",
            mode=0o640,
            pax_headers={"SCHILY.xattr.user.note": "hi", "SCHILY.xattr.user.overlay.redirect": "/x"},
        ),
        link("d/hard", "d/f", hard=True),
        link("d/soft", "/absolute/../somewhere"),
        entry("d/pipe", type=tarfile.FIFOTYPE),
        entry("dev/sda", type=tarfile.BLKTYPE, devmajor=8),
        entry("implicit/parent/file", b"y"),
    )
    assert stat.S_IMODE(layer.stat().st_mode) == 0o750
    assert (layer / "d").stat().st_mtime == 1_000_000_000
    assert (layer / "d/f").stat().st_mtime == 1_700_000_000
    assert (layer / "d/f").stat().st_nlink == 2
    assert os.readlink(layer / "d/soft") == "/absolute/../somewhere"
    assert (layer / "d/pipe").is_fifo()
    assert os.listxattr(layer / "d/f") == ["user.note"]
    assert list((layer / "dev").iterdir()) == []
    assert (layer / "implicit/parent/file").read_text() == "y"


def test_a_later_entry_replaces_an_earlier_one(tmp_path: Path) -> None:
    layer = unpacked(
        tmp_path,
        directory("a"),
        entry("a/x", b"1"),
        entry("a", b"file now"),
        entry("b", b"1"),
        directory("b"),
        entry("b/y", b"2"),
        link("c", "b"),
        directory("c"),
        entry("c/z", b"3"),
    )
    assert (layer / "a").read_text() == "file now"
    assert (layer / "b/y").read_text() == "2"
    assert not (layer / "c").is_symlink()
    assert not (layer / "b/z").exists()


def test_links_in_the_way_lead_inside_only(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layer = unpacked(
        tmp_path,
        link("abs", str(outside)),
        entry("abs/one", b"1"),
        link("up", "../../../.."),
        entry("up/two", b"2"),
        directory("real"),
        link("rel", "real"),
        entry("rel/three", b"3"),
    )
    assert list(outside.iterdir()) == []
    assert (layer / str(outside).lstrip("/") / "one").read_text() == "1"
    assert (layer / "two").read_text() == "2"
    assert (layer / "real/three").read_text() == "3"


@pytest.mark.parametrize(
    "members",
    [
        [entry("../evil", b"x")],
        [entry("a/../../evil", b"x")],
        [directory("a"), link("a/h", "../../../etc/passwd", hard=True)],
        [link("h", "etc/passwd", hard=True)],
        [link("l", "l"), entry("l/x", b"y")],
        [entry("f", b"x"), entry("f/below", b"y")],
        [entry(".wh.")],
        [entry(".wh...")],
    ],
)
def test_hostile_archives_are_refused(tmp_path: Path, members: list[Any]) -> None:
    with pytest.raises(ImageError) as caught:
        unpacked(tmp_path, *members)
    assert caught.value.code == "unsafe_archive"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer"]


def test_absolute_names_stay_below_the_target(tmp_path: Path) -> None:
    layer = unpacked(tmp_path, entry("/etc/thing", b"x"), entry("//a///b", b"y"))
    assert (layer / "etc/thing").read_text() == "x"
    assert (layer / "a/b").read_text() == "y"


def _damage(data: bytes) -> list[bytes]:
    middle = len(data) // 2
    return [
        data[:middle],
        data[: middle // 512 * 512],
        data[:1536] + b"\xff" * 512 + data[2048:],
        b"",
        b"not a tar" * 200,
    ]


@pytest.mark.parametrize("kind", range(5))
def test_damaged_archives_are_noticed(tmp_path: Path, kind: int) -> None:
    data = tar_of(entry("a", b"x" * 600), entry("b", b"y" * 3000), entry("c", b"z"))
    (tmp_path / "a.tar").write_bytes(_damage(data)[kind])
    (tmp_path / "layer").mkdir()
    with pytest.raises(ImageError) as caught:
        unpack_archive(str(tmp_path / "a.tar"), str(tmp_path / "layer"), owners=False)
    assert caught.value.code == "broken_archive"


def _zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("squeeze", [gzip.compress, lzma.compress, bz2.compress, _zstd, bytes])
def test_compression_is_told_by_content(tmp_path: Path, squeeze: Any) -> None:
    data = tar_of(entry("a", os.urandom(300_000)))
    (tmp_path / "archive").write_bytes(squeeze(data))
    (tmp_path / "layer").mkdir()
    made = unpack_archive(str(tmp_path / "archive"), str(tmp_path / "layer"), owners=False)
    assert made["size"] == 300_000
    if squeeze is not bytes:
        (tmp_path / "cut").write_bytes(squeeze(data)[:-200_000])
        (tmp_path / "other").mkdir()
        with pytest.raises(ImageError) as caught:
            unpack_archive(str(tmp_path / "cut"), str(tmp_path / "other"), owners=False)
        assert caught.value.code == "broken_archive"


_NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "l", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4)
_MEMBERS = st.lists(
    st.one_of(
        _NAMES.map(lambda parts: entry("/".join(parts) or "a", b"data")),
        _NAMES.map(lambda parts: directory("/".join(parts) or "a")),
        st.tuples(_NAMES, _NAMES).map(lambda pair: link("/".join(pair[0]) or "a", "/".join(pair[1]) or "a")),
        st.tuples(_NAMES, _NAMES).map(lambda pair: link("/".join(pair[0]) or "a", "/".join(pair[1]), hard=True)),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_MEMBERS)
def test_nothing_is_ever_written_outside(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    place = tmp_path / "fuzz"
    shutil.rmtree(place, ignore_errors=True)
    (place / "in" / "target").mkdir(parents=True)
    (place / "in" / "secret").write_text("untouched")
    try:
        unpack(io.BytesIO(tar_of(*members)), str(place / "in" / "target"), owners=False)
    except (ImageError, OSError):
        pass
    assert sorted(path.name for path in place.iterdir()) == ["in"]
    assert sorted(path.name for path in (place / "in").iterdir()) == ["secret", "target"]
    assert (place / "in" / "secret").read_text() == "untouched"
    assert (place / "in" / "secret").stat().st_nlink == 1
