"""Scores and saved results of an environment that needs no sandbox."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

import pier.rollout as vf
from pier.errors import UsageError

CLIENT = vf.ClientConfig(api_base_url="http://127.0.0.1:9/v1")


class Still(vf.Environment):
    said = "done"

    async def rollout(self, input: dict[str, Any], client: Any, model: str, sampling_args: Any = None) -> vf.State:
        state = await self.init_state(input, client, model, sampling_args)
        state["completion"], state["is_completed"] = [vf.AssistantMessage(content=self.said)], True
        return state


class Cancelled(vf.MultiTurnEnv):
    async def setup_state(self, state: vf.State) -> vf.State:
        raise asyncio.CancelledError if state["example_id"] == 0 else RuntimeError("no room")


def evaluate(*funcs: Any, weights: list[float] | None = None, said: str = "done", **options: Any) -> dict[str, Any]:
    rows = [{"question": str(number)} for number in range(9)]
    env = Still(dataset=rows, rubric=vf.Rubric(funcs=funcs, weights=weights), said=said)
    return env.evaluate_sync(CLIENT, "tiny", **{"num_examples": 2, **options})


def one() -> float:
    return 1.0


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, "nan"])
def test_a_score_that_is_not_finite_is_a_failure_of_its_function(score: Any) -> None:
    def alone() -> Any:
        return score

    def of_group(states: list[vf.State]) -> Any:
        return [score, 1.0]

    for func in (alone, of_group):
        results = evaluate(one, func, rollouts_per_example=2)
        assert [row["reward"] for row in results["outputs"]] == [None] * 4
        assert "expected a finite number" in results["outputs"][0]["error"]["message"]
        results = evaluate(one, func, weights=[1.0, 0.0], rollouts_per_example=2)
        assert [row["reward"] for row in results["outputs"]] == [1.0] * 4
        assert results["outputs"][0]["metrics"] == {"one": 1.0, func.__name__: None}
        assert results["metadata"]["avg_metrics"] == {"one": 1.0}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"sampling_args": {"temperature": 0.5}}, {}, "sampling_args was {'temperature': 0.5}"),
        ({"shuffle": True}, {"shuffle": True, "shuffle_seed": 1}, "shuffle_seed was 0"),
    ],
)
def test_results_of_other_settings_are_not_mixed(
    first: dict[str, Any], second: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved = {"save_results": True, "results_path": tmp_path}
    evaluate(one, **first, **saved)
    assert len(evaluate(one, **first, **saved)["outputs"]) == 2
    with pytest.raises(UsageError, match="cannot resume") as refused:
        evaluate(one, **second, **saved)
    assert said in refused.value.message


def test_results_of_another_dataset_are_not_mixed(tmp_path: Path) -> None:
    def run(*rows: dict[str, Any], **options: Any) -> list[Any]:
        env = Still(dataset=list(rows), rubric=vf.Rubric(one), env_id="sums")
        saved = {"save_results": True, "results_path": tmp_path, "rollouts_per_example": 2}
        return env.evaluate_sync(CLIENT, "tiny", **saved, **options)["outputs"]

    first, second = {"question": "1 + 1", "set": {1, 2}}, {"question": "2 + 2", "data": b"4"}
    assert len(run(first, second, num_examples=1)) == 2
    assert len(run(first, second)) == 4  # more of the same dataset
    assert len(run(first, second, {"question": "3 + 3"})) == 6  # a dataset that grew
    for changed in (
        [first, {**second, "data": b"5"}, {"question": "3 + 3"}],
        [second, first, {"question": "3 + 3"}],
        [{**first, "set": {1, 3}}, second, {"question": "3 + 3"}],
    ):
        with pytest.raises(UsageError, match="cannot resume") as refused:
            run(*changed)
        assert "dataset" in refused.value.message
    assert len(run(first, second, {"question": "3 + 3"})) == 6
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    del metadata["dataset_digest"]  # an earlier version of pier recorded none
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    assert len(run(first, second, {"question": "3 + 3"})) == 6


def test_rows_of_one_example_id_are_run_once(tmp_path: Path) -> None:
    rows = [{"question": "a", "example_id": 0}, {"question": "b", "example_id": 0}, {"question": "c", "example_id": 1}]
    env, saved = Still(dataset=rows, rubric=vf.Rubric(one)), {"save_results": True, "results_path": tmp_path}
    first = env.evaluate_sync(CLIENT, "tiny", **saved)["outputs"]
    with (tmp_path / "results.jsonl").open("a") as stream:
        stream.write('{"example_id": 1}\n{"example_id": [1], "reward": 0}\n{"example_id": 7, "reward": 0}\n')
    assert env.evaluate_sync(CLIENT, "tiny", **saved)["outputs"] == first
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6


def test_half_a_character_of_a_model_is_saved(tmp_path: Path) -> None:
    evaluate(one, said="a\ud83d\ude00 b\ud83d", save_results=True, results_path=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["completion"][0]["content"] for row in rows] == ["a\U0001f600 b\ufffd"] * 2


def test_two_runs_do_not_save_to_one_directory(tmp_path: Path) -> None:
    def nested() -> float:
        with pytest.raises(UsageError, match="another run does"):
            evaluate(one, save_results=True, results_path=tmp_path)
        return 1.0

    assert evaluate(nested, num_examples=1, save_results=True, results_path=tmp_path)["metadata"]["avg_reward"] == 1.0
    assert len(evaluate(nested, num_examples=1, save_results=True, results_path=tmp_path)["outputs"]) == 1


def test_code_that_awaited_what_was_cancelled_fails_its_rollout_alone() -> None:
    def cancelled(state: vf.State) -> float:
        if state["example_id"] == 0:
            raise asyncio.CancelledError
        return 1.0

    rows = evaluate(cancelled)["outputs"]
    assert [row["reward"] for row in rows] == [None, 1.0] and "was cancelled" in rows[0]["error"]["message"]
    rows = Cancelled(dataset=[{"question": "a"}, {"question": "b"}]).evaluate_sync(CLIENT, "tiny")["outputs"]
    assert [row["reward"] for row in rows] == [None, None]
    assert ["CancelledError" in row["error"]["message"] for row in rows] == [True, False]


def test_an_error_that_a_hook_set_as_a_text_is_reported() -> None:
    def failed(state: vf.State) -> float:
        state["error"] = "no luck"
        return 0.0

    assert evaluate(failed)["outputs"][0]["error"]["message"] == "no luck"
