"""Results and digests against Harbor and datacurve pier themselves, where they are installed under .cache/peers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pier.task import load_task
from pier.trial.config import AgentConfig
from pier.trial.result import TrialResult, read_result
from tests.trial_runs import TOML, open_bench, write_task

ROOT = Path(__file__).resolve().parents[2]
PEERS = {"harbor": "harbor", "datacurve-pier": "pier"}

LOAD = """
import importlib, json, sys
module, directories = sys.argv[1], sys.argv[2:]
result = importlib.import_module(module + ".models.trial.result").TrialResult
config = importlib.import_module(module + ".models.trial.config").TrialConfig
for directory in directories:
    read = result.model_validate_json(open(directory + "/result.json").read())
    assert read.config == config.model_validate_json(open(directory + "/config.json").read())
    open(directory + "/theirs.json", "w").write(read.model_dump_json())
    rewards = read.verifier_result.rewards if read.verifier_result else None
    print(json.dumps([read.task_name, rewards, read.exception_info.exception_type if read.exception_info else None]))
"""

DIGEST = """
import sys
from pathlib import Path
from harbor.publisher.packager import Packager
for path in sys.argv[1:]:
    print(Packager.compute_content_hash(Path(path))[0])
"""


def python(peer: str) -> str:
    path = ROOT / ".cache" / "peers" / peer / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{peer} is not installed under .cache/peers")
    return str(path)


@pytest.mark.parametrize("peer", PEERS)
async def test_their_models_load_our_results(peer: str, tmp_path: Path) -> None:
    interpreter = python(peer)
    async with open_bench(tmp_path / "trials") as bench:
        steps = TOML + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
        more = {f"steps__{name}__instruction.md": "Do it." for name in ("one", "two")}
        plain = write_task(tmp_path / "plain")
        await bench.run(plain)
        await bench.run(plain, "nop")
        await bench.run(
            plain, AgentConfig(name="command", kwargs={"command": "exit 3"}, env={"MY_KEY": "secret-value"})
        )
        await bench.run(write_task(tmp_path / "steps", toml=steps, **more))
        await bench.run(write_task(tmp_path / "broken", test="#!/bin/bash\n"))
    trials = [str(tmp_path / f"trials/trial-{n}") for n in range(1, 6)]
    done = subprocess.run([interpreter, "-c", LOAD, PEERS[peer], *trials], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["plain", {"reward": 1.0}, None],
        ["plain", {"reward": 0.0}, None],
        ["plain", {"reward": 0.0}, "NonZeroAgentExitCodeError"],
        ["steps", {"reward": 1.0}, None],
        ["broken", None, "RewardFileNotFoundError"],
    ]
    for trial in trials:
        theirs = TrialResult.model_validate_json(Path(trial, "theirs.json").read_bytes())
        assert theirs.rewards == read_result(Path(trial)).rewards
    if peer == "harbor":
        assert_harbor_agrees(interpreter, trials)


CAUSES = """
import json, sys
from harbor.models.trial.error_policy import FailureCause
from harbor.models.trial.result import TrialResult
for directory in sys.argv[1:]:
    text = open(directory + "/result.json").read()
    read, ours = TrialResult.model_validate_json(text), json.loads(text)
    FailureCause(ours["failure_cause"] or "unclassified")
    print(json.dumps([read.failure_cause, read.reward_valid, ours["failure_cause"], ours["reward_valid"]]))
"""


def assert_harbor_agrees(interpreter: str, trials: list[str]) -> None:
    """What Harbor derives from our results is what they say."""
    done = subprocess.run([interpreter, "-c", CAUSES, *trials], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [row[2:] for row in rows]
    causes = [None, None, "unclassified", None, "verifier_failed"]
    assert rows == [[cause, cause is None] * 2 for cause in causes]


def test_digests_are_harbors(tmp_path: Path) -> None:
    interpreter = python("harbor")
    ignored = "*.log\n!keep.log\n/solution/private\nbuild/\n**/deep/*.bin\n"
    more = {".gitignore": ignored, "environment__a.log": "1", "environment__keep.log": "2", "solution__private": "3"}
    more |= {"tests__build__x": "4", "tests__a__deep__y.bin": "5", "tests__a__z.bin": "6", "README.md": "7"}
    write_task(tmp_path / "t", **more)
    write_task(tmp_path / "u", **{"tests____pycache____x.pyc": "1", "environment__.DS_Store": "2"})
    more = {"tests__.harborignore": "*.tmp\n!keep.tmp\n/data/\n", "tests__a.tmp": "1", "tests__sub__keep.tmp": "2"}
    more |= {"tests__data__x": "3", "tests__sub__data__y": "4", "tests__sub__.harborignore": "keep.tmp\n!b.tmp\n"}
    more |= {"tests__sub__b.tmp": "5", "environment__.harborignore": "x\n", "environment__x": "6"}
    write_task(tmp_path / "v", **more | {"solution__.harborignore": "*.md\n", "solution__notes.md": "7"})
    paths = [*sorted((ROOT / "examples" / "tasks").iterdir()), *(tmp_path / name for name in "tuv")]
    done = subprocess.run([interpreter, "-c", DIGEST, *map(str, paths)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [f"sha256:{line}" for line in done.stdout.split()] == [load_task(path).digest for path in paths]
