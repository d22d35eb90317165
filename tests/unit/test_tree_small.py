"""Requests that are done at once, without a process of their own, and those that are not."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pier.sandbox.tree import serve_small

pytestmark = pytest.mark.plain


def ask(request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any] | None, bytes]:
    """The answer, and what was written to the stream; the stream is open still if there is no answer."""
    if request["op"] in ("pack", "read"):
        read, write = os.pipe()
        answer = serve_small(request, write)
        if answer is None:
            os.close(write)
        with open(read, "rb") as stream:
            return answer, stream.read()
    fd = os.memfd_create("test")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    answer = serve_small(request, fd)
    if answer is None:
        os.close(fd)
    return answer, b""


def packing(source: Path) -> dict[str, Any]:
    return {"op": "pack", "source": str(source), "exclude": [], "max_bytes": None}


def reading(source: Path) -> dict[str, Any]:
    return {"op": "read", "source": str(source), "max_bytes": 1 << 20}


def removing(target: Path) -> dict[str, Any]:
    return {"op": "remove", "target": str(target)}


def test_an_empty_directory_is_no_bytes_if_asked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "file").touch()
    for name, is_packed in (("empty", False), ("link", True), ("file", True), (".", True)):
        answer, packed = ask(packing(tmp_path / name) | {"keep_empty": False})
        assert answer == {"ok": True, "skipped": []}
        assert bool(packed) == is_packed, name
    assert ask(packing(tmp_path / "empty"))[1]
    assert ask(packing(tmp_path / "missing") | {"keep_empty": False})[0] is None


def test_little_goes_in_and_out(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    writing = {"op": "write", "target": str(target), "mode": 0o600, "owner": None}
    assert ask(writing, b"content")[0] == {"ok": True, "skipped": []}
    assert target.read_bytes() == b"content"
    assert ask(reading(target)) == ({"ok": True, "skipped": []}, b"content")
    answer, packed = ask(packing(target.parent))
    assert answer == {"ok": True, "skipped": []}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == [".", "file"]
    unpacking = {"op": "unpack", "target": str(tmp_path / "copy"), "owner": None}
    assert ask(unpacking, packed)[0] == {"ok": True, "skipped": []}
    assert (tmp_path / "copy" / "file").read_bytes() == b"content"
    assert ask(removing(tmp_path / "copy"))[0] == {"ok": True, "skipped": []}
    assert not (tmp_path / "copy").exists()


def test_much_is_left_to_others(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    (tmp_path / "many").mkdir()
    for number in range(200):
        (tmp_path / "many" / str(number)).touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    writing = {"op": "write", "target": str(tmp_path / "new"), "mode": 0o600, "owner": None}
    for request in (reading(tmp_path / "large"), packing(tmp_path), packing(tmp_path / "many")):
        assert ask(request) == (None, b"")
    assert ask(removing(tmp_path / "many"))[0] is None and ask(removing(tmp_path / "deep"))[0] is None
    assert ask(writing, b"x" * 200_000)[0] is None
    assert not (tmp_path / "new").exists() and len(os.listdir(tmp_path / "many")) == 200


def test_what_may_wait_or_is_wrong_is_left_to_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "empty").touch()
    for name in ("fifo", "link", "empty", "missing"):
        assert ask(reading(tmp_path / name)) == (None, b""), name
    assert ask(packing(tmp_path / "missing")) == (None, b"")
    assert ask(removing(tmp_path / "missing"))[0] == {"ok": True, "skipped": []}
    answer, _ = ask(packing(tmp_path))
    assert answer == {"ok": True, "skipped": ["fifo"]}


def test_places_are_cleared_before_an_archive_comes(tmp_path: Path) -> None:
    for name in ("old", "kept", "deep/er"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    _, packed = ask(packing(tmp_path / "kept"))
    unpacking = {"op": "unpack", "target": str(tmp_path / "old"), "owner": None}
    clear = [str(tmp_path / name) for name in ("old", "missing")]
    (tmp_path / "old" / "planted").touch()
    assert ask({**unpacking, "clear": [*clear, str(tmp_path / "deep")]}, packed)[0] is None
    assert (tmp_path / "old" / "planted").exists()
    assert ask({**unpacking, "clear": clear}, packed)[0] == {"ok": True, "skipped": []}
    assert os.listdir(tmp_path / "old") == ["file"]
    (tmp_path / "link").symlink_to("kept")
    behind_a_link = ask({**unpacking, "clear": [str(tmp_path / "link" / "file")]}, packed)[0]
    assert behind_a_link is None and (tmp_path / "kept" / "file").exists()


def test_many_entries_are_left_to_somebody_else_though_nothing_is_packed_of_them(tmp_path: Path) -> None:
    for number in range(300):
        os.mkfifo(tmp_path / str(number))
    assert ask(packing(tmp_path)) == (None, b"")
