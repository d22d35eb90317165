"""A stranger's walk: a clean user with the wheel in a fresh environment types what README shows, and nothing else.

Each `console` block is played as printed, in a directory with nothing but the examples of the checkout, and what a
command prints must look like what README says: `...` stands for anything in a line, and alone for any lines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STRANGER = 54321
"""The user that walks when root runs the tests: it has no name, no groups, no subordinate ids, and a new home."""


def steps() -> list[tuple[str, str]]:
    """The commands of README in order, each with what it prints."""
    found: list[tuple[str, str]] = []
    for block in BLOCK.findall((ROOT / "README.md").read_text()):
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            found.append((command, output))
    return found


def as_pattern(output: str) -> re.Pattern[str]:
    lines = []
    for line in output.splitlines():
        lines.append("(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n")
    return re.compile("".join(lines))


@pytest.fixture(scope="module")
def stranger() -> Iterator[tuple[Path, list[str], dict[str, str]]]:
    """A home with the examples and an installed pier; the command that becomes its owner, and its environment."""
    with tempfile.TemporaryDirectory(prefix="stranger.") as name:
        home = Path(name)
        home.chmod(0o755)
        checkout = home / "checkout"
        left_out = shutil.ignore_patterns(".*", "jobs", "__pycache__")
        shutil.copytree(ROOT, checkout, ignore=left_out, symlinks=True)
        # A Python in root's home is of no use to others; Debian's own may have no pip to put into an environment.
        python = "/usr/bin/python3" if os.geteuid() == 0 else sys.executable
        subprocess.run([python, "-m", "venv", "--without-pip", home / "venv"], check=True)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", home / "venv/bin/python"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", home / "dist", checkout], check=True)
        subprocess.run([*pip, "install", "--no-compile", *(home / "dist").glob("*.whl")], check=True)
        (home / "work").mkdir()
        shutil.move(checkout / "examples", home / "work" / "examples")
        shutil.rmtree(checkout)
        become: list[str] = []
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", f"{STRANGER}:{STRANGER}", home], check=True)
            become = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
        path = f"{home}/venv/bin:/usr/local/bin:/usr/bin:/bin"
        yield home / "work", become, {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}


def test_what_readme_shows_is_what_a_stranger_sees(stranger: tuple[Path, list[str], dict[str, str]]) -> None:
    work, become, env = stranger
    walked = []
    place = work
    for command, output in steps():
        killed = "nightly" in command and (work / "jobs/nightly/journal.jsonl").exists()
        argv = [*become, "bash", "-c", f'{command}\nstatus=$?; pwd > "$HOME/place"; exit $status']
        if command.startswith("pier view"):
            look_at_the_viewer([*become, "bash", "-c", f"exec {command}"], place, env, output)
        else:
            done = subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert as_pattern(output).fullmatch(done.stdout), f"{command}\n{done.stdout}\n{done.stderr}"
            assert not killed or "continuing jobs/nightly" in done.stderr, done.stderr
            place = Path((work.parent / "place").read_text().strip())
        walked += re.findall(r"\bpier ([a-z]+)", command)
    assert " ".join(walked) == "task run run run run analyze view start exec verify stop rollout"
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def look_at_the_viewer(argv: list[str], work: Path, env: dict[str, str], output: str) -> None:
    """The viewer answers at the address that it prints."""
    with subprocess.Popen(argv, cwd=work, env=env, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        line = viewer.stdout.readline()
        try:
            assert as_pattern(output).fullmatch(line), line
            (address,) = re.findall(r"http://\S+", line)
            with urllib.request.urlopen(address, timeout=60) as page:
                text = page.read().decode()
            assert page.status == 200 and "nightly" in text and "wrong" in text
        finally:
            viewer.terminate()
