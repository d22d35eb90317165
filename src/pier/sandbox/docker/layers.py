"""The layers of a container, where its root is an overlay of this machine: what it wrote can be read from them, without
the engine, which for some storage walks through the whole image to tell."""

from __future__ import annotations

from pathlib import Path


def find_layers(pid: int) -> tuple[str, list[str]] | None:
    """The directory that the container of the process `pid` writes to, and those below it, lowest first."""
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == "/":
            kind, _, options = after.split(" ", 2)
            return _layers(kind, options)
    return None


def _layers(kind: str, options: str) -> tuple[str, list[str]] | None:
    said = {name: value for name, _, value in (option.partition("=") for option in options.split(","))}
    upper, lowers = said.get("upperdir", ""), said.get("lowerdir", "").split(":")
    # Engines mount by relative names what has many layers; names with odd letters are escaped in more than one way.
    if kind != "overlay" or "\\" in options or not all(path.startswith("/") for path in (upper, *lowers)):
        return None
    return upper, lowers[::-1]
