"""Files: in and out, with their names, modes, owners and links, and never astray."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

from pier.errors import SandboxError
from pier.sandbox.conformance.bench import Bench, check, check_inside, refuses, run
from pier.sandbox.contract import NewFile, Sandbox

ODD_NAMES = (
    b"with space",
    b"new\nline",
    b"-dash",
    b"quote'\"",
    b"\xc3\xa9\xe2\x98\x83",
    b"\xff\xfe",
    b"$(id)",
    b"n" * 255,
)


async def chunks(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@check_inside("a file is written and read back byte for byte")
async def write_and_read(sandbox: Sandbox) -> None:
    for data in (b"", b"text\n", bytes(range(256)) * 5000):
        await sandbox.write_file("/srv/file", data)
        assert await sandbox.read_file("/srv/file") == data


@check_inside("missing parents are made, and what is there is replaced")
async def write_makes_parents(sandbox: Sandbox) -> None:
    await sandbox.write_file("/srv/a/b c/d", b"one")
    await sandbox.write_file("/srv/a/b c/d", b"2")
    assert (await run(sandbox, ["cat", "/srv/a/b c/d"])).stdout == b"2"


@check_inside("a written file has the mode that was asked for")
async def write_mode(sandbox: Sandbox) -> None:
    for mode in (0o600, 0o755, 0o444):
        await sandbox.write_file("/srv/file", b"x", mode=mode)
        assert int((await run(sandbox, "stat -c %a /srv/file")).text, 8) == mode


@check_inside("a written file has the owner that was asked for", needs="users")
async def write_owner(sandbox: Sandbox) -> None:
    await sandbox.write_file("/srv/file", b"x", owner="1234:2345")
    await sandbox.write_file("/srv/other", b"x")
    assert (await run(sandbox, "stat -c %u:%g /srv/file /srv/other")).text.split() == ["1234:2345", "0:0"]


@check_inside("writing over a symlink replaces the link")
async def write_over_link(sandbox: Sandbox) -> None:
    await run(sandbox, "echo kept >/srv/target; ln -s target /srv/link")
    await sandbox.write_file("/srv/link", b"new")
    assert (await run(sandbox, "cat /srv/target; test ! -L /srv/link && cat /srv/link")).text == "kept\nnew"


@check_inside("read_file follows no symlink in any part of the path and reads regular files only")
async def read_regular_only(sandbox: Sandbox) -> None:
    await run(
        sandbox, "cd /srv; echo x >file; ln -s file link; mkdir dir; echo y >dir/in; ln -s dir alias; mkfifo fifo"
    )
    for name in ("link", "dir", "alias/in", "fifo"):
        error = await refuses(sandbox.read_file(f"/srv/{name}"), SandboxError)
        assert error.code == "not_regular", (name, error.code)
    await refuses(sandbox.read_file("/srv/none"), FileNotFoundError)
    assert await sandbox.read_file("/srv/dir/in") == b"y\n"


@check_inside("read_file stops at its limit")
async def read_limit(sandbox: Sandbox) -> None:
    await sandbox.write_file("/srv/file", bytes(1000))
    assert len(await sandbox.read_file("/srv/file", max_bytes=1000)) == 1000
    assert (await refuses(sandbox.read_file("/srv/file", max_bytes=999), SandboxError)).code == "too_large"


def _plant(root: Path) -> None:
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "plain").write_bytes(b"plain\0")
    (root / "tool").write_text("#!/bin/sh\necho works\n")
    (root / "tool").chmod(0o755)
    (root / "secret").write_text("x")
    (root / "secret").chmod(0o600)
    (root / "sub" / "deep" / "file").write_text("deep")
    (root / "relative").symlink_to("sub/deep")
    (root / "dangling").symlink_to("/no/such/thing")
    os.link(root / "plain", root / "sub" / "hard")


@check("a directory is uploaded with its modes and links")
async def upload_tree(bench: Bench) -> None:
    source = bench.scratch / "tree"
    source.mkdir()
    _plant(source)
    async with bench.sandbox() as sandbox:
        await sandbox.upload(source, "/srv/new/tree")
        result = await run(
            sandbox, "cd /srv/new/tree; ./tool; cat relative/file; readlink dangling; stat -c %a secret; ls -d empty"
        )
        assert result.text == "works\ndeep/no/such/thing\n600\nempty\n", result.text
        assert (await run(sandbox, "cd /srv/new/tree; stat -c %i plain sub/hard | uniq | wc -l")).text.strip() == "1"


@check("a file is uploaded to the path that was named")
async def upload_file(bench: Bench) -> None:
    source = bench.scratch / "file"
    source.write_bytes(b"data")
    source.chmod(0o751)
    async with bench.sandbox() as sandbox:
        await sandbox.upload(source, "/srv/sub/renamed")
        assert (await run(sandbox, "cat /srv/sub/renamed; stat -c %a /srv/sub/renamed")).text == "data751\n"


@check("what is uploaded belongs to root, or to the owner that was named", needs="users")
async def upload_owner(bench: Bench) -> None:
    source = bench.scratch / "tree"
    source.mkdir()
    _plant(source)
    async with bench.sandbox() as sandbox:
        await sandbox.upload(source, "/srv/a")
        await sandbox.upload(source, "/srv/b", owner="1234:2345")
        find = "find /srv/{} -mindepth 1 -exec stat -c %u:%g {{}} + | sort -u"
        assert (await run(sandbox, find.format("a"))).text == "0:0\n"
        assert (await run(sandbox, find.format("b"))).text == "1234:2345\n"


@check("an upload into a directory that is there adds to it")
async def upload_merges(bench: Bench) -> None:
    source = bench.scratch / "tree"
    source.mkdir()
    (source / "new").write_text("new")
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir -m 1777 /srv/dir; echo old >/srv/dir/old")
        await sandbox.upload(source, "/srv/dir")
        assert (await run(sandbox, "cd /srv/dir; ls; stat -c %a .")).text == "new\nold\n1777\n"


@check("odd names go in and out")
async def odd_names(bench: Bench) -> None:
    source = bench.scratch / "tree"
    source.mkdir()
    for name in ODD_NAMES:
        (source / os.fsdecode(name)).write_bytes(name)
    async with bench.sandbox() as sandbox:
        await sandbox.upload(source, "/srv/odd")
        assert int((await run(sandbox, "cd /srv/odd; set -- * ; echo $#")).text) == len(ODD_NAMES)
        assert await sandbox.download("/srv/odd", bench.scratch / "back") == []
        back = {os.fsencode(path.name): path.read_bytes() for path in (bench.scratch / "back").iterdir()}
        assert back == {name: name for name in ODD_NAMES}


@check("a large file goes in and out unchanged")
async def large_file(bench: Bench) -> None:
    source = bench.scratch / "large"
    block = os.urandom(1 << 20)
    source.write_bytes(block * 48)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    async with bench.sandbox() as sandbox:
        await sandbox.upload(source, "/srv/large")
        assert (await run(sandbox, "sha256sum </srv/large")).text.split()[0] == digest
        await sandbox.download("/srv/large", bench.scratch / "back")
    assert hashlib.sha256((bench.scratch / "back").read_bytes()).hexdigest() == digest


@check("thousands of small files")
async def many_files(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(
            sandbox, "mkdir /srv/many; cd /srv/many; i=0; while [ $i -lt 2000 ]; do echo $i >$i; i=$((i+1)); done"
        )
        await sandbox.download("/srv/many", bench.scratch / "many")
        assert len(list((bench.scratch / "many").iterdir())) == 2000
        await sandbox.upload(bench.scratch / "many", "/srv/again")
        assert (await run(sandbox, "ls /srv/again | wc -l")).text.strip() == "2000"


@check("a tree is downloaded with modes and links; a symlink comes as itself")
async def download_tree(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir -p /srv/t/sub; cd /srv/t; echo a >sub/a; chmod 640 sub/a; ln sub/a hard")
        await run(sandbox, "ln -s sub/a soft; ln -s / out", cwd="/srv/t")
        assert await sandbox.download("/srv/t", bench.scratch / "t") == []
    root = bench.scratch / "t"
    assert (root / "sub" / "a").read_text() == "a\n" and stat.S_IMODE((root / "sub" / "a").stat().st_mode) == 0o640
    assert (root / "hard").samefile(root / "sub" / "a")
    assert str((root / "soft").readlink()) == "sub/a" and str((root / "out").readlink()) == "/"


@check("one file is downloaded to the path that was named")
async def download_file(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await sandbox.write_file("/srv/file", b"data", mode=0o755)
        await sandbox.download("/srv/file", bench.scratch / "sub" / "file")
    assert (bench.scratch / "sub" / "file").read_bytes() == b"data"


@check("devices, fifos and sockets are left out of a download and named")
async def download_leaves_out_specials(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir -p /srv/t/sub; mkfifo /srv/t/sub/fifo; echo x >/srv/t/x")
        assert await sandbox.download("/srv/t", bench.scratch / "t") == ["sub/fifo"]
    assert sorted(path.name for path in (bench.scratch / "t").rglob("*")) == ["sub", "x"]


@check("exclude patterns are matched with paths and with base names")
async def download_exclude(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(
            sandbox,
            "mkdir -p /srv/t/keep /srv/t/node_modules; cd /srv/t; touch a.py a.pyc keep/b.pyc keep/c node_modules/y",
        )
        await sandbox.download("/srv/t", bench.scratch / "t", exclude=["*.pyc", "node_modules", "keep/c"])
    found = sorted(str(path.relative_to(bench.scratch / "t")) for path in (bench.scratch / "t").rglob("*"))
    assert found == ["a.py", "keep"], found


@check("a download larger than allowed is refused, and nothing is left of it")
async def download_limit(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await run(sandbox, "mkdir /srv/t; head -c 2000000 /dev/zero >/srv/t/big")
        error = await refuses(sandbox.download("/srv/t", bench.scratch / "t", max_bytes=1_000_000), SandboxError)
        assert error.code == "too_large"
        assert not (bench.scratch / "t").exists() or not any((bench.scratch / "t").iterdir())


@check("downloading what is not there is a FileNotFoundError")
async def download_missing(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await refuses(sandbox.download("/srv/none", bench.scratch / "t"), FileNotFoundError)


@check("a hostile tree reads and writes nothing of the host")
async def hostile_tree(bench: Bench) -> None:
    """A link named like a directory of the host, whose twin on the host must be neither read nor written."""
    canary = bench.scratch / "canary"
    canary.mkdir()
    (canary / "file").write_text("host")
    async with bench.sandbox() as sandbox:
        await run(
            sandbox,
            f"mkdir /srv/t; cd /srv/t; ln -s {canary} dir; ln -s {canary}/file file; ln -s .. up; ln -s /srv/t loop",
        )
        assert await sandbox.download("/srv/t", bench.scratch / "t") == []
        assert all(path.is_symlink() for path in (bench.scratch / "t").iterdir())
        await sandbox.write_file("/srv/t/up/written", b"x")
        assert (await run(sandbox, "cat /srv/written")).text == "x"
    assert [path.name for path in canary.iterdir()] == ["file"] and (canary / "file").read_text() == "host"


def _tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, content in entries:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _entry(
    name: str, mode: int = 0o644, owner: int = 0, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid, info.type, info.linkname = mode, owner, owner, kind, link
    return info


@check_inside("a tar stream is unpacked with its modes and links")
async def put_tar(sandbox: Sandbox) -> None:
    data = _tar((_entry("a/b", 0o751), b"b"), (_entry("l", kind=tarfile.SYMTYPE, link="a"), b""))
    await sandbox.put_tar(chunks(data), "/srv/put")
    assert (await run(sandbox, "cd /srv/put; cat l/b; stat -c %a a/b")).text == "b751\n"


@check_inside("a tar stream is unpacked with its owners", needs="users")
async def put_tar_owners(sandbox: Sandbox) -> None:
    await sandbox.put_tar(chunks(_tar((_entry("file", 0o4755, owner=1234), b"x"))), "/srv/put")
    assert (await run(sandbox, "stat -c '%u:%g %a' /srv/put/file")).text == "1234:1234 4755\n"


@check_inside("files and directories are put in place together, after what was there is removed")
async def put_files(sandbox: Sandbox) -> None:
    files = [NewFile("d", 0o700), NewFile("d/run", 0o755, b"x" * 200_000), NewFile("empty", 0o640, b"")]
    await run(sandbox, "mkdir -p /srv/put/old; ln -s /etc /srv/out")
    await sandbox.put_files(files, "/srv/put", clear=["/srv/put/old"])
    found = await run(sandbox, "cd /srv/put; ls; stat -c '%a %s' d/run empty; stat -c %a d")
    assert found.text == "d\nempty\n755 200000\n640 0\n700\n", found.text
    for path in ("../x", "/srv/x", "out/x"):
        error = await refuses(sandbox.put_files([NewFile(path, 0o644, b"x")], "/srv"), SandboxError)
        assert error.code == "unsafe_archive", (path, error.code)


@check_inside("an entry that would land outside the target is refused")
async def put_unsafe_tar(sandbox: Sandbox) -> None:
    link = _entry("link", kind=tarfile.SYMTYPE, link="..")
    hostile = [
        _tar((_entry("../out"), b"x")),
        _tar((_entry("/srv/out"), b"x")),
        _tar((link, b""), (_entry("link/out"), b"x")),
    ]
    for number, data in enumerate(hostile):
        error = await refuses(sandbox.put_tar(chunks(data), "/srv/put"), SandboxError)
        assert error.code == "unsafe_archive", (number, error.code)
    assert not (await sandbox.exec("test -e /srv/out")).ok


@check_inside("a tree comes out as a tar stream with modes, owners and links")
async def get_tar(sandbox: Sandbox) -> None:
    await run(sandbox, "mkdir /srv/t; cd /srv/t; echo x >a; chmod 750 a; ln -s a s")
    data = b"".join([part async for part in sandbox.get_tar("/srv/t")])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {info.name.removeprefix("./").rstrip("/"): info for info in archive}
        assert found["a"].mode == 0o750 and found["a"].uid == 0 and found["s"].linkname == "a", found
