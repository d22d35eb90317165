"""The documentation points at things that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pier.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_examples_exist(page: Path) -> None:
    unknown = []
    for block in re.findall(r"```(?:sh|bash|console|shell)\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for command in re.findall(r"^(?:\$ )?pier ([a-z]+)", block, flags=re.MULTILINE):
            if command not in COMMANDS:
                unknown.append(command)
    assert unknown == []


def test_the_page_of_settings_is_current() -> None:
    made = subprocess.run([sys.executable, ROOT / ".ci/settings"], capture_output=True, text=True, check=True).stdout
    page = ROOT / "docs/reference/settings.md"
    assert page.read_text() == made, f"run: .ci/settings > {page.relative_to(ROOT)}"


def test_the_page_of_errors_is_complete() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / ".ci/errors", "--check"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


def test_the_pages_of_commands_and_names_are_current() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / ".ci/reference", "--check"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


def test_named_tests_exist() -> None:
    pages = ("docs/reference/acceptance.md", "docs/concepts/promises.md")
    text = "".join((ROOT / page).read_text() for page in pages)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 60
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_the_example_is_explained_line_by_line() -> None:
    """The listings of the guide are the files, whole and in order, and each line with code is in a table's row."""
    text = (ROOT / "docs/guides/train-on-rollouts.md").read_text()
    found = re.findall(
        r"<!-- not run: (\S+), lines (\d+) to (\d+) -->\n```python\n(.*?)```\n\n((?:\|[^\n]*\n)+)", text, re.S
    )
    listed: dict[str, set[int]] = {}
    for name, first, last, code, table in found:
        lines = (ROOT / name).read_text().splitlines()
        assert code.splitlines() == lines[int(first) - 1 : int(last)], f"{name}: lines {first} to {last} differ"
        listed.setdefault(name, set()).update(range(int(first), int(last) + 1))
        rows = [(int(a), int(b or a)) for a, b in re.findall(r"^\| (\d+)(?:-(\d+))? \|", table, re.M)]
        explained = {number for a, b in rows for number in range(a, b + 1)}
        needed = {n for n in range(int(first), int(last) + 1) if lines[n - 1].strip()}
        assert {n for n in needed - explained if not lines[n - 1].lstrip().startswith(("def ", '"""'))} == set(), name
    for name in ("examples/train/agent.py", "examples/train/train.py"):
        lines = (ROOT / name).read_text().splitlines()
        assert {n for n, line in enumerate(lines, 1) if line.strip()} <= listed[name], name
