"""Where the published page is silent, pier does as verifiers 0.3.1 does: scores, advantages, rows and numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".cache" / "peers" / "verifiers-0.3"
HUB = {"push_to_hf_hub", "hf_hub_dataset_name", "on_log", "kwargs"}
"""What only a hub of one vendor, or its own progress bars, need."""


def run(python: str, who: str) -> dict:
    command = [python, str(ROOT / "tests" / "verifiers_peer" / "scores.py"), who]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_scores_rows_and_numbers_are_the_same() -> None:
    if not (PEER / ".ready").is_file():
        pytest.skip("verifiers 0.3.1 is not installed: .ci/peers verifiers-0.3")
    theirs, ours = run(str(PEER / "bin" / "python"), "verifiers"), run(sys.executable, "pier")
    for name in ("rewards", "advantages", "metrics", "steps", "alone", "timing", "pass"):
        assert ours[name] == theirs[name], name
    assert set(theirs["keys"]) - set(ours["keys"]) == set()
    assert set(ours["keys"]) - set(theirs["keys"]) == {"termination_reason", "advantage"}
    assert set(theirs["metadata"]) - set(ours["metadata"]) == set()
    taken = {*ours["evaluate"], *ours["generate"]}
    assert {*theirs["evaluate"], *theirs["generate"]} - taken - HUB == set()
