"""`pier samples check`: whatever the tree of calls, an export passes, and one that was tampered with does not."""

from __future__ import annotations

import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pier.cli.samples import samples as command
from pier.errors import UsageError
from pier.rollout.check import check_file
from pier.rollout.export import pier_row, sink_for
from pier.rollout.export import rows_of as rows_of_format
from pier.rollout.results import sample_writer
from pier.rollout.samples import SampleBuilder
from pier.rollout.state import State
from pier.trajectory.calls import Generation
from tests.unit.test_samples_derivation import ORIGIN, Model, loop, said, trees

Rows = list[dict[str, Any]]
FIELDS = {
    "verl": ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score"),
    "skyrl": ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards"),
    "trl": ("input_ids", "completion_mask", "old_log_probs", "reward"),
    "sft": ("messages",) * 4,
}


def written(rows: Rows, path: Path) -> Path:
    with sink_for(path) as sink:
        for row in rows:
            sink.add(row)
    return path


def broken(rows: Rows, vocab_size: int | None = None) -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        return check_file(written(rows, Path(place) / "rows.jsonl"), vocab_size).broken


def rows_of(model: Model) -> Rows:
    return [pier_row(sample, ORIGIN) for sample in model.samples()]


@given(model=trees())
def test_every_export_of_any_tree_passes(model: Model) -> None:
    assert broken(rows_of(model)) == []


@given(model=trees(), seed=st.integers(0, 2**32))
def test_samples_do_not_depend_on_the_order_in_which_calls_end(model: Model, seed: int) -> None:
    def built(order: list[int]) -> Rows:
        builder = SampleBuilder()
        for place in order:
            builder.add(Generation(copy.copy(model.lineage.nodes[place]), "ok"))
        return [pier_row(sample, ORIGIN) for sample in builder.samples()[0]]

    order = list(range(len(model.lineage.nodes)))
    shuffled = random.Random(seed).sample(order, len(order))
    assert built(shuffled) == built(order)


def tampered(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Changes of an exact sample that each break a promise."""
    ids, mask, likely = row["input_ids"], row["loss_mask"], row["logprobs"]
    place = mask.index(1)
    return {
        "trained": {"loss_mask": [1, *mask[1:]]},
        "untrained": {"loss_mask": [0 if i == place else bit for i, bit in enumerate(mask)]},
        "shorter": {"input_ids": ids[:-1]},
        "longer": {"input_ids": [*ids, 5], "loss_mask": [*mask, 0], "logprobs": [*likely, None]},
        "negative": {"input_ids": [-1, *ids[1:]]},
        "half": {"input_ids": [0.5, *ids[1:]]},
        "true": {"input_ids": [True, *ids[1:]]},
        "no list": {"input_ids": 5},
        "words": {"loss_mask": ["a"] * len(mask)},
        "no mask": {"loss_mask": 5},
        "maybe": {"trainable": "yes"},
        "no log-prob": {"logprobs": [None if i == place else value for i, value in enumerate(likely)]},
        "positive": {"logprobs": [0.5 if i == place else value for i, value in enumerate(likely)]},
        "moved": {"logprobs": [likely[place], *likely[1:]]},
        "prompt": {"prompt_length": row["prompt_length"] + 1},
        "calls": {"calls": [99, *row["calls"][1:]]},
        "fault": {"fault": "provider", "trainable": True},
        "nothing trained": {
            "loss_mask": [0] * len(mask),
            "logprobs": [None] * len(mask),
            "spans": [{**span, "trained": False} for span in row["spans"]],
        },
        "no calls": {
            "trainable": False,
            "calls": [],
            "spans": [],
            "loss_mask": [0] * len(mask),
            "logprobs": [None] * len(mask),
        },
        "no reward": {"reward": None, "trainable": True},
    }


def test_every_tampering_is_found() -> None:
    model = Model()
    loop(model, [said("go")], 3)
    (row,) = rows_of(model)
    assert broken([row]) == []
    for name, change in tampered(row).items():
        assert broken([{**row, **change}]) != [], name
    assert broken([row, row]) != []
    assert "trained twice" in " ".join(broken([row, {**row, "id": "other"}]))
    again = {**row, "id": "other", "input_ids": [9, *row["input_ids"][1:]]}
    assert "other tokens for call 1" in " ".join(broken([row, again]))
    assert "outside of the vocabulary" in " ".join(broken([row], vocab_size=100))


def test_samples_without_log_probs_are_sound_and_counted() -> None:
    """Their ids are kept, and nothing of them is trained."""
    model, plain = Model(), Model()
    loop(model, [said("go")], 2)
    loop(plain, [said("go")], 2, likely=False)
    (whole,), (bare,) = rows_of(model), rows_of(plain)
    bare |= {"id": "other", "rollout_id": "other"}
    with tempfile.TemporaryDirectory() as place:
        found = check_file(written([whole, bare], Path(place) / "rows.jsonl"))
    assert (found.broken, found.exact, found.trainable, found.without_logprobs) == ([], 2, 1, 1)
    assert "2 exact (1 without log-probs), 1 trainable" in found.summary and found.as_dict()["without_logprobs"] == 1
    assert "logprobs_missing" in " ".join(broken([{**bare, "flags": []}]))
    trained = {name: whole[name] for name in ("loss_mask", "spans")}
    assert "a trained token has the log-prob None" in " ".join(broken([{**bare, **trained}]))


FORMS = ("verl", "trl", "skyrl", "sft")


@given(model=trees(), form=st.sampled_from(FORMS))
def test_exports_of_every_format_pass(model: Model, form: str) -> None:
    rows = list(rows_of_format(model.samples(), ORIGIN, form))
    assert broken(rows) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_tampering_with_rows_of_trainers_is_found(form: str, name: str, tmp_path: Path) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'pier[parquet]'")
    model = Model()
    model.call([said("Write a title for: go")], tools=(), system="Titles.")  # a row without tools comes first
    loop(model, [said("go")], 3)
    rows = list(rows_of_format(model.samples("side") + model.samples("main"), ORIGIN, form))
    found = check_file(written(rows, tmp_path / name), None)
    assert (found.broken, found.rows, found.exact) == ([], 2, 0 if form == "sft" else 2)
    row, (*_, last, mask, likely, reward) = rows[1], FIELDS[form]
    changes: dict[str, Any] = {
        last: [-1, *row[last][1:]],
        mask: [0] * len(row[mask]),
        likely: [0.5] * len(row[mask]),
        reward: float("nan"),
    }
    if form == "sft":
        changes = {"messages": row["messages"][:-1]}
    for field, value in changes.items():
        assert check_file(written([{**row, field: value}], tmp_path / name)).broken != [], field
    if form != "sft":
        assert found.trained == 12 and found.without_logprobs == 0
        assert "outside of the vocabulary" in " ".join(check_file(written(rows, tmp_path / name), 100).broken)
        assert check_file(written([{**row, last: row[last][:-1]}], tmp_path / name)).broken != []


def test_the_command_says_what_is_broken(tmp_path: Path) -> None:
    model = Model()
    loop(model, [said("go")], 2)
    (row,) = rows_of(model)
    good, bad = written([row], tmp_path / "good.jsonl"), written([{**row, "reward": None}], tmp_path / "bad.jsonl")
    runner = CliRunner()
    ran = runner.invoke(command, ["check", str(good)])
    assert (ran.exit_code, ran.output.count("no promise is broken: 1 samples, 1 exact")) == (0, 1)
    ran = runner.invoke(command, ["check", str(good), str(bad), "--json"])
    found = json.loads(ran.output)
    assert (ran.exit_code, [each["ok"] for each in found]) == (1, [True, False])
    other = tmp_path / "other.jsonl"
    for unknown in ('{"messages": [], "format": 9}', '{"input_ids": [1]}', "[]"):
        other.write_text(unknown + "\n")
        with pytest.raises(UsageError, match="expected a sample of the format pier"):
            check_file(other)
    for damaged in (b"{\n", b"\xff\n", b"[" * 100_000):
        other.write_bytes(damaged)
        with pytest.raises(UsageError, match="not JSON"):
            check_file(other)
    parquet = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'pier[parquet]'")
    assert parquet and check_file(written([row], tmp_path / "good.parquet")).broken == []
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-9])
    with pytest.raises(UsageError, match="not Parquet"):
        check_file(tmp_path / "torn.parquet")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rollouts_that_were_finished_are_written_when_the_others_are_stopped(name: str, tmp_path: Path) -> None:
    model, path = Model(), tmp_path / name
    loop(model, [said("go")], 2)
    state = State({"example_id": 0, "rollout_id": "r", "trajectory_id": "t", "samples": model.samples(), "reward": 1.0})
    with pytest.raises(KeyboardInterrupt), sample_writer(path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [], "nothing was finished"
    with pytest.raises(KeyboardInterrupt), sample_writer(path) as write:
        write(state)
        raise KeyboardInterrupt
    assert check_file(path).broken == [] and list(tmp_path.iterdir()) == [path]
