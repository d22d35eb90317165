"""Samples of rollouts, written for verl, TRL and SkyRL and loaded by code of these packages, with the exact tokens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pier.rollout.results import sample_writer
from pier.rollout.state import State
from tests.contract.test_cli_agent_env import LOOP, environment
from tests.policies import END, BytePolicy, says

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PEER = ROOT / ".cache" / "peers" / "trainers"


async def rolled_out(tmp_path: Path, forms: tuple[str, ...]) -> tuple[list[State], dict[str, Path]]:
    """Two rollouts of one example, three turns each, with rewards 1 and 0."""

    async def first(states: list[State]) -> list[float]:
        return [1.0, 0.0]

    env = environment(LOOP, first, home=tmp_path / "agent.py")
    policy = BytePolicy([says("one"), says("two"), says("three")])
    states: list[State] = []
    await env.evaluate(policy, "bytes", rollouts_per_example=2, on_state=states.append)
    paths = {}
    for form in forms:
        paths[form] = tmp_path / f"{form}.jsonl"
        with sample_writer(paths[form], form) as write:
            for state in states:
                write(state)
    return states, paths


def load(trainer: str, path: Path) -> Any:
    variables = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(PEER / "bin" / "python"), str(ROOT / "tests" / "trainers_peer" / "load.py"), trainer, str(path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("trainer", ["verl", "trl", "skyrl"])
async def test_a_trainer_loads_the_samples(trainer: str, tmp_path: Path) -> None:
    if not (PEER / ".ready").is_file():
        pytest.skip("the trainers are not installed: .ci/peers trainers")
    states, paths = await rolled_out(tmp_path, (trainer,))
    samples = [sample for state in states for sample in state["samples"]]
    assert len(samples) == 2 and all(sample.exact for sample in samples)
    ids, mask, start = samples[0].input_ids or (), samples[0].loss_mask or (), samples[0].prompt_length
    said = [*b"one", END, *b"two", END, *b"three", END]
    likely = pytest.approx([-token / 1000 for token in said])
    assert [token for token, bit in zip(ids, mask, strict=True) if bit] == said
    found = load(trainer, paths[trainer])
    if trainer == "verl":
        assert [each["reward"] for each in found] == [1.0, 0.0]
        assert found[0]["prompts"] + found[0]["responses"] == list(ids)
        assert found[0]["mask"] == list(mask[start:])
        kept = [value for value, bit in zip(found[0]["logprobs"], found[0]["mask"], strict=True) if bit]
        assert kept == likely
    elif trainer == "trl":
        assert found["trained"] == said * 2 and found["logprobs"][: len(said)] == likely
        assert found["advantages"] == [0.5] * len(said) + [-0.5] * len(said)
        assert found["tokens"] < 2 * len(ids), "what both share is forwarded once"
    else:
        assert found["sequences"][0] == list(ids) and found["masks"][0] == list(mask[start:])
        assert found["rewards"] == [1.0, 0.0] and found["attention"] == [len(ids)] * 2
        kept = [value for value, bit in zip(found["logprobs"][0], found["masks"][0], strict=True) if bit]
        assert kept == likely


async def test_rollouts_with_faults_are_no_samples(tmp_path: Path) -> None:
    env = environment(LOOP, lambda: 1 / 0, home=tmp_path / "agent.py")
    states: list[State] = []
    results = await env.evaluate(BytePolicy([says("one")] * 3), "bytes", on_state=states.append)
    assert results["outputs"][0]["reward"] is None and results["outputs"][0]["error"]["error"] == "VerifierError"
    for form, expected in (("verl", 0), ("pier", 1)):
        with sample_writer(tmp_path / form, form) as write:
            write(states[0])
        rows = [json.loads(line) for line in (tmp_path / form).read_text().splitlines()]
        assert len(rows) == expected and all(not row["trainable"] for row in rows)
