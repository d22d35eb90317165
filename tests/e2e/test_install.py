"""pier installs from a checkout as its documentation says, with nothing but what running it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pier import __version__

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DEVELOPMENT = {"pytest", "ruff", "pyright", "hypothesis", "import-linter", "playwright", "mkdocs"}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]} {done.stderr[-2000:]}"
    return done.stdout


def test_a_checkout_installs_into_a_fresh_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel under 2 MB with the packaged files, no development tools, and a first graded trial; its extras resolve,
    and pipx runs it."""
    monkeypatch.setenv("PIP_NO_COMPILE", "no")  # pip reads this as: do not compile
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "jobs", "__pycache__"), symlinks=True)
    run(sys.executable, "-m", "venv", ".venv", cwd=checkout)
    pip = (checkout / ".venv/bin/python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", ".", cwd=checkout)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.stat().st_size < 2_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("py.typed") for name in names) and not any("test" in name.split("/")[0] for name in names)
    run(*pip, "install", "-q", wheel, cwd=checkout)
    installed = {line.partition("==")[0].lower() for line in run(*pip, "list", "--format=freeze", cwd=checkout).split()}
    assert "pier-agents" in installed and not installed & DEVELOPMENT
    pier = checkout / ".venv/bin/pier"
    assert "usable" in run(pier, "--version", "-v", cwd=tmp_path)
    run(pier, "task", "init", "hello", cwd=tmp_path)
    assert "1.000" in run(pier, "run", "hello", "--image", "host", cwd=tmp_path)
    run(*pip, "install", "-q", "--dry-run", f"{wheel}[fast,parquet,verifiers]", cwd=tmp_path)
    run(*pip, "install", "-q", "pipx", cwd=tmp_path)
    monkeypatch.setenv("PIPX_HOME", str(tmp_path / "pipx"))
    assert __version__ in run(checkout / ".venv/bin/pipx", "run", "--spec", wheel, "pier", "--version", cwd=tmp_path)
