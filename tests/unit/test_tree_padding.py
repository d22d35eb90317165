"""A reader of an archive takes all of it: the writer would else find its pipe closed and report a failure."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from pier.sandbox.tar import unpack


def test_what_stands_behind_the_end_of_an_archive_is_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("one")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"abc"))
    stream = io.BytesIO(buffer.getvalue() + bytes(500_000))
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpack(stream, root)
    finally:
        os.close(root)
    assert (tmp_path / "one").read_bytes() == b"abc"
    assert stream.read() == b""
