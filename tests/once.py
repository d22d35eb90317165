"""Results that are made once in a session and read by all of its workers."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that `make` fills for the first worker that asks; the others wait for it. If it fails, the next
    one tries again."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    place = root / f"once-{name}"
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / f"once-{name}.made").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            (root / f"once-{name}.made").touch()
    return place
