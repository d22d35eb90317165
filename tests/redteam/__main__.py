"""Writes the table of routes into the documentation: `python -m tests.redteam`."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.redteam import ROUTES, SECTIONS

ROOT = Path(__file__).parents[2]
PAGES = {
    "docs/concepts/honest-grading.md": ("host", "grading", "verdicts", "secrets", "identity", "faults"),
    "docs/concepts/networks.md": ("network", "closed_book"),
}
BEGIN = "<!-- routes: written by `python -m tests.redteam` -->"
END = "<!-- end of routes -->"


def load_routes() -> None:
    """Import every test module, each of which declares its routes."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.redteam.{path.stem}")


def table(sections: tuple[str, ...]) -> str:
    """The routes of some sections as Markdown tables."""
    parts: list[str] = []
    for section in sections:
        rows = sorted(route for route in set(ROUTES) if route.section == section)
        if rows:
            lines = [f"### {SECTIONS[section]}", "", "| route | outcome |", "|---|---|"]
            parts.append("\n".join(lines + [f"| {row.attack} | {row.outcome} |" for row in rows]))
    return "\n\n".join(parts)


def with_table(page: str, sections: tuple[str, ...]) -> str:
    """`page` with the present table between its two markers."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"the page lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table(sections)}\n\n{END}{after}"


def main() -> None:
    load_routes()
    for name, sections in PAGES.items():
        path = ROOT / name
        path.write_text(with_table(path.read_text(), sections))


if __name__ == "__main__":
    main()
