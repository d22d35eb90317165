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
