"""Requests as a forked child serves them, in an empty root where nothing can be imported any more."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from pier.idmap import CLONE_NEWUSER
from pier.sandbox import tree

pytestmark = pytest.mark.plain


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in ("app", "usr/bin", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "escape").symlink_to("../../../..")
    (root / "app" / "file").write_bytes(b"content")
    return root


def ask(root: Path, request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """Serve one request in a child whose root is `root`."""
    tree.warm()
    answers = os.pipe()
    stream = os.pipe()
    gives = request["op"] in ("pack", "read")
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() != 0:
                import ctypes

                assert ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
            os.close(stream[0 if gives else 1])
            os.chroot(root)
            os.chdir("/")
            os.write(answers[1], json.dumps(tree.serve(request, stream[1 if gives else 0])).encode())
        finally:
            os._exit(0)
    os.close(answers[1])
    os.close(stream[1 if gives else 0])
    got: list[bytes] = []

    def move() -> None:
        try:
            with open(stream[0 if gives else 1], "rb" if gives else "wb") as end:
                got.append(end.read()) if gives else end.write(data)
        except BrokenPipeError:
            pass

    thread = threading.Thread(target=move)
    thread.start()
    with open(answers[0], "rb") as end:
        answer = json.loads(end.read() or b"{}")
    thread.join(60)
    os.waitpid(child, 0)
    return answer, b"".join(got)


def write(target: str) -> dict[str, Any]:
    return {"op": "write", "target": target, "mode": 0o640, "owner": None}


def read(source: str, max_bytes: int = 1000) -> dict[str, Any]:
    return {"op": "read", "source": source, "max_bytes": max_bytes}


def test_read(inside: Path) -> None:
    assert ask(inside, read("/app/file")) == ({"ok": True, "skipped": []}, b"content")
    assert ask(inside, read("/app/none"))[0]["code"] == "not_found"
    assert ask(inside, read("/app"))[0]["code"] == "not_regular"
    assert ask(inside, read("/app/file", 3))[0]["code"] == "too_large"


def test_read_follows_no_link(inside: Path) -> None:
    (inside / "app" / "link").symlink_to("file")
    os.mkfifo(inside / "app" / "fifo")
    (inside / "alias").symlink_to("app")
    for name in ("/app/link", "/app/fifo", "/alias/file"):
        assert ask(inside, read(name))[0]["code"] == "not_regular", name


def test_write_replaces_links_and_stays_inside(inside: Path) -> None:
    (inside.parent / "secret").write_text("secret")
    (inside / "app" / "link").symlink_to("../../secret")
    assert ask(inside, write("/app/link"), b"new")[0]["ok"]
    assert (inside.parent / "secret").read_text() == "secret"
    assert (inside / "app" / "link").read_text() == "new"
    assert (inside / "app" / "link").stat().st_mode & 0o777 == 0o640
    assert ask(inside, write("/escape/made/here"), b"x")[0]["ok"]
    assert (inside / "made" / "here").read_text() == "x"
    assert ask(inside, write("/app"), b"x")[0]["ok"] is False


def test_pack_and_unpack(inside: Path) -> None:
    answer, data = ask(inside, {"op": "pack", "source": "/app", "exclude": [], "max_bytes": None})
    assert answer["ok"] and tarfile.open(fileobj=io.BytesIO(data)).getnames() == [".", "file"]
    request = {"op": "unpack", "target": "/new/place", "owner": [0, 0]}
    if os.geteuid() != 0:
        request["owner"] = None
    answer, _ = ask(inside, request, data)
    if answer["ok"]:
        assert (inside / "new" / "place" / "file").read_bytes() == b"content"
    else:
        assert os.geteuid() != 0 and answer["code"] == "unsafe_archive"  # owners that this user has not
    assert ask(inside, {"op": "pack", "source": "/nothing", "exclude": [], "max_bytes": None})[0]["code"] == "not_found"


def test_unpack_at_the_root_goes_through_its_links(inside: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("bin/tool")
        info.uid, info.gid = os.getuid(), os.getgid()
        archive.addfile(info)
    answer, _ = ask(inside, {"op": "unpack", "target": "/", "owner": None}, buffer.getvalue())
    if os.geteuid() == 0:
        assert answer["ok"]
        assert (inside / "usr" / "bin" / "tool").exists()
