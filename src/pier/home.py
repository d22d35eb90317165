"""Directories of pier's persistent state: `$PIER_HOME`, else `$XDG_DATA_HOME/pier`, else `~/.local/share/pier`."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def home_text() -> str:
    """Return `pier_home` as text, for callers that avoid the import of `pathlib`."""
    if home := os.environ.get("PIER_HOME"):
        return home
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(base, "pier")


def pier_home() -> Path:
    """Return the directory of pier's state, which may not exist yet."""
    from pathlib import Path

    return Path(home_text())


def packs_home() -> Path:
    """Return the directory of agent packs: `$PIER_PACKS`, else `packs` in pier's home."""
    from pathlib import Path

    return Path(os.environ.get("PIER_PACKS") or own_packs()).absolute()


def own_packs() -> Path:
    """Return the pack directory in pier's home, for packs that must not go into a shared store."""
    return pier_home() / "packs"


def private_directories() -> tuple[Path, ...]:
    """Return the directories that are hidden from every sandbox."""
    return pier_home(), packs_home()
