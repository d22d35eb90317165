"""Packs, peers, clients and a Debian: `make test` makes them while tests run that need none of them."""

from __future__ import annotations

import os


def need_parts() -> None:
    """Fail if these may not be complete yet: what uses them is marked `parts`, and would be skipped otherwise."""
    assert os.environ.get("PIER_TEST_PARTS") != "missing", "a test that uses packs, peers or clients is marked `parts`"
