"""Hooks of mkdocs: the order of the parts, and links to files of the repository outside of `docs/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PARTS = {
    "Getting started": "getting-started",
    "Guides": "guides",
    "Concepts": "concepts",
    "Reference": "reference",
    "Decisions": "decisions",
}
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:examples|benchmarks|tests|src)/?[^)#]*|[A-Z]+(?:\.md)?)\)")


def on_config(config: Any) -> Any:
    """All pages by part; the index of a part comes first."""
    root = Path(config["docs_dir"])

    def pages(folder: str) -> list[Any]:
        found = sorted((root / folder).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
        below = sorted(path for path in (root / folder).iterdir() if path.is_dir() and list(path.glob("*.md")))
        return [
            *(str(page.relative_to(root)) for page in found),
            *({path.name.capitalize(): pages(f"{folder}/{path.name}")} for path in below),
        ]

    config["nav"] = ["index.md", *({title: pages(folder)} for title, folder in PARTS.items())]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Such a link becomes the name of the file."""
    return OUTSIDE.sub(lambda link: f"`{link[2]}`" if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
