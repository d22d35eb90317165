"""Opens the databases that some agents keep their sessions in. An agent may have written anything into them."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_LONGEST = 256 * 1024 * 1024
"""Bytes of the longest value that a query may give or compute."""


@contextmanager
def opened(path: Path, *tables: str) -> Iterator[sqlite3.Connection]:
    """The database as it is, unwritten messages of its journal included; where that cannot be, without them.
    `sqlite3.DatabaseError` if one of `tables` is missing or computed, or a file next to it is not a regular one."""
    for end in ("", "-wal", "-shm", "-journal"):
        if os.path.lexists(f"{path}{end}") and not stat.S_ISREG(os.lstat(f"{path}{end}").st_mode):
            raise sqlite3.DatabaseError(f"{path.name}{end} is not a regular file")
    for how in ("mode=ro", "immutable=1"):
        with closing(sqlite3.connect(f"{path.as_uri()}?{how}", uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            try:
                found = database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
                ).fetchall()
            except sqlite3.OperationalError:
                if how == "immutable=1":
                    raise
                continue
            if missing := set(tables) - {name for (name,) in found}:
                raise sqlite3.DatabaseError(f"{path.name} has no table {missing.pop()}")
            yield database
            return
