"""Where pier keeps what outlives one command: `$PIER_HOME`, else `$XDG_DATA_HOME/pier`, else `~/.local/share/pier`."""

from __future__ import annotations

import os
from pathlib import Path


def pier_home() -> Path:
    """The directory of pier's own state. It is not created here."""
    if home := os.environ.get("PIER_HOME"):
        return Path(home)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "pier"


def packs_home() -> Path:
    """Where the packs of agents are kept: `$PIER_PACKS`, else in pier's home."""
    return Path(os.environ.get("PIER_PACKS") or pier_home() / "packs").absolute()


def private_directories() -> tuple[Path, ...]:
    """What pier keeps on this machine, which no sandbox may see."""
    return pier_home(), packs_home()
