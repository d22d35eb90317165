"""The example that learns: from chance to over 0.9, on samples of real sandboxes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="numpy is not installed: pip install -r requirements-dev.lock")
TRAIN = Path(__file__).resolve().parents[2] / "examples/train/train.py"


def test_a_policy_learns_to_count(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(TRAIN)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"from ([\d.]+) to ([\d.]+) in \d+ steps", ran.stdout)
    assert found is not None, ran.stdout
    assert float(found[1]) < 0.4
    assert float(found[2]) > 0.9
    assert "prefixes matched 1.0" in ran.stdout
    assert list(tmp_path.iterdir()) == []
