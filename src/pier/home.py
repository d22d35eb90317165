"""Where pier keeps what outlives one command: `$PIER_HOME`, else `$XDG_DATA_HOME/pier`, else `~/.local/share/pier`."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def home_text() -> str:
    """The directory of pier's own state, for callers that have no time to import `pathlib`."""
    if home := os.environ.get("PIER_HOME"):
        return home
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(base, "pier")


def pier_home() -> Path:
    """The directory of pier's own state. It is not created here."""
    from pathlib import Path

    return Path(home_text())


def packs_home() -> Path:
    """Where the packs of agents are kept: `$PIER_PACKS`, else in pier's home."""
    from pathlib import Path

    return Path(os.environ.get("PIER_PACKS") or own_packs()).absolute()


def own_packs() -> Path:
    """Packs in pier's home, for what cannot be kept in a store that others share."""
    return pier_home() / "packs"


def private_directories() -> tuple[Path, ...]:
    """What pier keeps on this machine, which no sandbox may see."""
    return pier_home(), packs_home()
