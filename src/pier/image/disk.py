"""Errors of the file system as a store tells them."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from pier.errors import ImageError


@contextmanager
def told_by_disk(what: str) -> Iterator[None]:
    """Turn an OSError into an `ImageError`: code `disk_full` if there is no space left, else `files`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ImageError(
                f"the disk is full: {error}", code="disk_full", hint="pier image gc --max-size 10G", retryable=True
            ) from error
        raise ImageError(f"{what}: {error}", code="files") from error


def write_all(sink: BinaryIO | io.FileIO, data: bytes) -> None:
    """Write to an unbuffered file, which may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[sink.write(view) or 0 :]
