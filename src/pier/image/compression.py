"""Opens archives whatever they are compressed with, told by their first bytes and not by their names.

zstd is read by the `zstd` program, since Python reads it only from version 3.14 on.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, cast

from pier.errors import ImageError

_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_CHUNK = 1 << 20


def compression_of(head: bytes) -> str:
    """`gzip`, `xz`, `zstd`, `bzip2` or, for anything else, the empty string."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


@contextmanager
def decompressed(path: str) -> Iterator[BinaryIO]:
    """The file's content without its compression. Damage is an `ImageError` with code `broken_archive`."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        kind = compression_of(file.read(6))
        file.seek(0)
        try:
            if kind == "zstd":
                yield stack.enter_context(_zstd(file, path))
            elif kind == "gzip":
                yield cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
            elif kind == "xz":
                yield cast(BinaryIO, stack.enter_context(lzma.LZMAFile(file)))
            elif kind == "bzip2":
                yield cast(BinaryIO, stack.enter_context(bz2.BZ2File(file)))
            else:
                yield file
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ImageError(f"the {kind} data of {path} is broken: {error}", code="broken_archive") from None


@contextmanager
def _zstd(file: BinaryIO, path: str) -> Iterator[BinaryIO]:
    if shutil.which("zstd") is None:
        raise ImageError(
            f"{path} is compressed with zstd, and the program zstd is missing", hint="apt-get install zstd"
        )
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    process = subprocess.Popen(["zstd", "-dcq"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield cast(BinaryIO, _ProcessStream(process, path))
    finally:
        process.kill()
        process.communicate()


class _ProcessStream:
    """What a decompressor writes; that it failed is told at the end of its output."""

    def __init__(self, process: subprocess.Popen[bytes], path: str) -> None:
        self._process = process
        self._path = path

    def read(self, size: int = -1) -> bytes:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        data = self._process.stdout.read(size)
        if not data and size != 0 and self._process.wait() != 0:
            problem = self._process.stderr.read().decode(errors="replace").strip()
            raise ImageError(f"the zstd data of {self._path} is broken: {problem}", code="broken_archive")
        return data


class HashingReader:
    """A stream that knows the sha256 of what was read through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """The digest of the whole stream: what is left of it is read first."""
        drain(cast(BinaryIO, self))
        return f"sha256:{self._hash.hexdigest()}"


def drain(stream: BinaryIO) -> None:
    """Read a stream to its end."""
    while stream.read(_CHUNK):
        pass
