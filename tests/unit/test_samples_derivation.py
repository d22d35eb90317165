"""Samples from trees of calls: exact tokens merged where they go on, and every promise kept whatever the tree."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier.errors import UsageError
from pier.rollout.export import FORMATS, is_trainable, is_wanted, sink_for
from pier.rollout.samples import KINDS, Sample, SampleOrigin, broken_promises, from_threads, origins
from pier.trajectory.calls import Node
from pier.trajectory.lineage import Lineage
from pier.wire.turn import Message, Request, Sampling, Text, Tokens, Tool, ToolCall, ToolResult, Turn

TOOLS = (Tool("bash", schema={"type": "object"}),)
ORIGIN = SampleOrigin(Path("recording.jsonl"), "trial", "task::agent", task="task", rewards={"reward": 0.5})


def tokenised(message: Message) -> tuple[int, ...]:
    """Ids of a message as a server's template would make them: a start, its words, an end."""
    words = [part.text if isinstance(part, Text) else repr(part) for part in message.parts]
    return (1, *(sum(map(ord, word)) % 900 + 100 for text in words for word in text.split()), 2)


class Model:
    """A server that gives token ids, and a session that calls it."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.sampled: dict[int, tuple[int, ...]] = {}
        self.next_id = 10_000

    def call(
        self,
        history: list[tuple[Message, tuple[int, ...]]],
        text: str = "",
        *,
        drift: bool = False,
        answered: bool = True,
        ids: bool = True,
        likely: bool = True,
        **more: Any,
    ) -> tuple[Message, tuple[int, ...]]:
        """One generation; its answer with the ids that were sampled. With `drift` the template writes the last answer
        with other ids than were sampled."""
        number = len(self.lineage.nodes) + 1
        prompt: list[int] = [7]
        for place, (message, exact) in enumerate(history):
            ours = message.role == "assistant" and not (drift and place >= len(history) - 2)
            prompt += exact if ours else tokenised(message)
        completion = tuple(range(self.next_id, self.next_id + 3))
        self.next_id += 3
        call = ToolCall(f"c{number}", "bash", json.dumps({"n": number, "text": text}))
        tokens = Tokens(tuple(prompt), completion, (-0.5,) * 3 if likely else None) if ids else None
        turn = Turn((call,), "tool_use", tokens=tokens) if answered else None
        request = Request(
            "m",
            tuple(message for message, _ in history),
            system=(more.pop("system", "You are an agent."),),
            tools=more.pop("tools", TOOLS),
            sampling=Sampling(temperature=0.7),
            dialect="chat",
        )
        self.lineage.add(Node(number, request, turn, float(number), number + 0.5, {"user-agent": "a/1"}))
        self.sampled[number] = completion
        return Message("assistant", (call,)), completion

    def samples(self, *kinds: str) -> list[Sample]:
        found, _ = from_threads(self.lineage.threads(), kinds or KINDS)
        assert list(broken_promises(found)) == []
        return found


def said(text: str) -> tuple[Message, tuple[int, ...]]:
    return Message("user", (Text(text),)), ()


def result_of(answer: tuple[Message, tuple[int, ...]]) -> tuple[Message, tuple[int, ...]]:
    (call,) = answer[0].parts
    assert isinstance(call, ToolCall)
    return Message("user", (ToolResult(call.id, (Text(f"out of {call.id}"),)),)), ()


def loop(model: Model, history: list[Any], turns: int, **more: Any) -> list[Any]:
    for _ in range(turns):
        answer = model.call(history, **more)
        history = [*history, answer, result_of(answer)]
    return history


def test_a_loop_whose_prompts_go_on_exactly_is_one_sample() -> None:
    model = Model()
    loop(model, [said("go")], 3)
    (sample,) = model.samples()
    assert sample.calls == (1, 2, 3)
    assert sample.input_ids is not None and sample.loss_mask is not None and sample.logprobs is not None
    assert sample.prompt_length == 4
    kept = [token for token, bit in zip(sample.input_ids, sample.loss_mask, strict=True) if bit]
    assert kept == [token for call in (1, 2, 3) for token in model.sampled[call]]
    assert [value for value in sample.logprobs if value is not None] == [-0.5] * 9
    assert (sample.split, sample.continues) == (None, None)


def test_where_a_template_wrote_an_answer_anew_another_sample_begins() -> None:
    model = Model()
    history = loop(model, [said("go")], 2)
    history = loop(model, history, 1, drift=True)
    first, second = model.samples()
    assert (first.calls, second.calls) == ((1, 2), (3,))
    assert (second.split, second.continues) == ("retokenised", 1)
    assert second.trained == 3


def test_calls_without_ids_make_samples_of_messages_only() -> None:
    model = Model()
    loop(model, [said("go")], 3, ids=False)
    (sample,) = model.samples()
    assert (sample.input_ids, sample.loss_mask, sample.logprobs, sample.exact) == (None, None, None, False)
    assert [message["role"] for message in sample.messages()] == [
        "system",
        "user",
        *["assistant", "tool"] * 2,
        "assistant",
    ]


def test_log_probs_that_are_missing_for_one_call_leave_it_out_of_training() -> None:
    model = Model()
    history = loop(model, [said("go")], 1)
    history = loop(model, history, 1, likely=False)
    loop(model, history, 1)
    (sample,) = model.samples()
    assert [span.trained for span in sample.spans] == [True, False, True]
    assert "logprobs_missing" in sample.flags
    other = Model()
    loop(other, [said("go")], 2, likely=False)
    (plain,) = other.samples()
    assert (plain.exact, plain.logprobs, plain.trained, is_trainable(plain, ORIGIN)) == (True, None, 0, False)
    assert [span.end - span.start for span in plain.spans] == [3, 3]
    assert [is_wanted(plain, ORIGIN, form) for form in FORMATS] == [form in ("pier", "sft") for form in FORMATS]


def test_of_retries_one_is_trained_and_a_fork_trains_what_it_shares_once() -> None:
    model = Model()
    history = [said("go")]
    model.call(history)
    used = model.call(history)
    grown = [*history, used, result_of(used)]
    model.call([*grown, said("this way")])
    model.call([*grown, said("that way")])
    one, other = model.samples()
    assert (one.calls, other.calls) == ((2, 3), (2, 4))
    assert (other.split, other.continues, other.owns) == ("fork", 1, (False, True))
    assert sum(sample.trained for sample in (one, other)) == 9


def test_kinds_are_told_apart_and_can_be_chosen() -> None:
    model = Model()
    task = "Look into the first module, please."
    model.call([said("Write a title for: go")], tools=(), system="Titles.")
    spawn = model.call([said("go")], task)
    loop(model, [said(task)], 2, system="You look.")
    model.call([said("go"), spawn, result_of(spawn)])
    assert [(sample.kind, sample.calls) for sample in model.samples()] == [
        ("main", (2, 5)),
        ("side", (1,)),
        ("sub_agent", (3, 4)),
    ]
    assert [sample.spawned_by for sample in model.samples("sub_agent")] == [2]


@st.composite
def trees(draw: st.DrawFn) -> Model:
    """Sessions with retries, forks, answers written anew, failures, compactions, sub-agents and side calls."""
    model = Model()
    lines: list[tuple[str, list[Any]]] = [("You are an agent.", [said("go")])]
    for step in range(draw(st.integers(1, 14))):
        place = draw(st.integers(0, len(lines) - 1))
        system, history = lines[place]
        what = draw(st.sampled_from(["go on", "go on", "go on", "retry", "fail", "fork", "compact", "sub", "side"]))
        ids, likely = draw(st.integers(0, 9)) > 0, draw(st.integers(0, 9)) > 0
        more = {"system": system, "ids": ids, "likely": likely, "drift": draw(st.integers(0, 5)) == 0}
        if what == "fail":
            model.call(history, answered=False, **more)
        elif what == "retry":
            for _ in range(draw(st.integers(1, 3))):
                model.call(history, answered=draw(st.booleans()), **more)
        elif what == "side":
            model.call([said(f"Write a title for step {step}")], tools=(), system="Titles.", ids=ids)
        elif what == "compact":
            lines[place] = (system, [said(f"This goes on from before, summary of {step} things."), *history[-2:]])
        elif what == "sub":
            task = f"Look into the module of number {step}, please."
            answer = model.call(history, task, **more)
            lines[place] = (system, [*history, answer, result_of(answer)])
            lines.append(("You look.", [said(task)]))
        else:
            answer = model.call(history, **more)
            grown = (system, [*history, answer, result_of(answer)])
            if what == "fork":
                lines.append((system, [*grown[1], said(f"or else {step}")]))
            lines[place] = grown
    return model


@settings(max_examples=150, deadline=None)
@given(model=trees())
def test_all_promises_hold_on_any_tree(model: Model) -> None:
    samples, counts = from_threads(model.lineage.threads())
    assert list(broken_promises(samples)) == []
    nodes = {node.number: node for node in model.lineage.nodes}
    trained: Counter[int] = Counter()
    for sample in samples:
        for span in sample.spans:
            assert sample.input_ids is not None
            assert sample.input_ids[span.start : span.end] == model.sampled[span.call]
            trained[span.call] += span.trained
    assert max(trained.values(), default=0) <= 1
    answered = {n for n, node in nodes.items() if node.turn is not None and node.kind != "retry"}
    covered = {call for sample in samples for call in sample.calls}
    assert covered == answered
    questions: dict[bytes, list[int]] = {}
    for number, node in nodes.items():
        questions.setdefault(node.chain[-1] + bytes([bool(node.request.tools)]), []).append(number)
    continued = {node.parent.number for node in nodes.values() if node.parent is not None}
    for group in questions.values():
        kept = [number for number in group if trained[number]]
        assert len(kept) <= 1 or all(number in continued for number in kept)
    assert counts.trained_tokens == sum(sample.trained for sample in samples) <= counts.sampled_tokens
    assert counts.generations == len(nodes)
    assert counts.unanswered + counts.retries + len(answered) == len(nodes)


@settings(max_examples=30, deadline=None)
@given(model=trees(), form=st.sampled_from(("verl", "trl", "skyrl")))
def test_a_trainers_row_has_the_same_tokens(model: Model, form: str) -> None:
    for sample in from_threads(model.lineage.threads())[0]:
        row = FORMATS[form](sample, ORIGIN)
        assert json.loads(json.dumps(row)) == row
        if sample.input_ids is None or form == "trl":
            ids, mask = row.get("input_ids", []), row.get("completion_mask", [])
        elif form == "verl":
            ids, mask = row["prompt_ids"] + row["response_ids"], row["response_mask"]
        else:
            ids, mask = row["prompt_token_ids"] + row["response_ids"], row["loss_masks"]
        assert tuple(ids) == (sample.input_ids or ()) and sum(mask) == sample.trained


@settings(max_examples=30, deadline=None)
@given(model=trees(), form=st.sampled_from(("pier", "sft")))
def test_every_format_says_the_same_of_any_tree(model: Model, form: str) -> None:
    for sample in from_threads(model.lineage.threads())[0]:
        row = FORMATS[form](sample, ORIGIN)
        assert json.loads(json.dumps(row)) == row
        assert row["messages"][-1]["role"] == "assistant"
        if form == "pier":
            assert (tuple(row["input_ids"] or ()), sum(row["loss_mask"] or ())) == (
                sample.input_ids or (),
                sample.trained,
            )
        else:
            trained = [each for each in row["messages"] if each["role"] == "assistant" and each.get("weight") != 0]
            assert len(trained) <= sum(sample.owns)


def test_a_parquet_file_has_typed_columns_and_json_for_what_is_nested(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'pier[parquet]'")
    model = Model()
    loop(model, [said("go \ud83d")], 2)
    loop(model, [said("other")], 2, ids=False)
    for form in FORMATS:
        path = tmp_path / f"{form}.parquet"
        rows = [FORMATS[form](sample, ORIGIN) for sample in model.samples()]
        with sink_for(path) as sink:
            for row in rows:
                sink.add(row)
        table = parquet.read_table(path)
        assert table.num_rows == len(rows)
    table = parquet.read_table(tmp_path / "pier.parquet")
    assert str(table.schema.field("input_ids").type) == "list<element: int64>"
    assert str(table.schema.field("loss_mask").type) == "list<element: int8>"
    first = table.to_pylist()[0]
    assert json.loads(first["messages"])[1]["role"] == "user"
    assert first["reward"] == 0.5


@pytest.mark.parametrize("form", ["pier", "verl", "trl", "skyrl"])
def test_large_token_ids_are_written_to_parquet_or_refused(form: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'pier[parquet]'")
    model, path = Model(), tmp_path / "samples.parquet"
    model.next_id = 2**40
    loop(model, [said("go")], 2)
    (sample,) = model.samples()
    with sink_for(path) as sink:
        sink.add(FORMATS[form](sample, ORIGIN))
    ids = "response_ids" if form in ("verl", "skyrl") else "input_ids"
    assert max(parquet.read_table(path).to_pylist()[0][ids]) == 2**40 + 5
    too_large = replace(sample, input_ids=(*(sample.input_ids or ())[:-1], 2**63))
    with pytest.raises(UsageError, match="cannot write the samples as Parquet"), sink_for(path) as sink:
        sink.add(FORMATS[form](too_large, ORIGIN))
        sink.add(FORMATS[form](too_large, ORIGIN))
    assert path.stat().st_size and [file.name for file in tmp_path.iterdir()] == ["samples.parquet"]


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("old\n")
    with pytest.raises(RuntimeError), sink_for(path) as sink:
        sink.add({"a": 1})
        raise RuntimeError
    assert path.read_text() == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]


def test_origins_are_found_with_rewards_of_trials_and_steps(tmp_path: Path) -> None:
    result = {
        "trial_name": "t1",
        "task_name": "task",
        "verifier_result": {"rewards": {"score": 0.25}},
        "agent_info": {"name": "a"},
        "exception_info": {"code": "provider_error", "blame": "provider"},
        "step_results": [{"step_name": "one", "verifier_result": {"rewards": {"reward": 1}}}],
    }
    for folder in ("job/t1/agent", "job/t1/steps/one/agent", "job/.retries/t1/agent"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "recording.jsonl").write_text("")
    (tmp_path / "job/result.json").write_text(json.dumps({"stats": {}}))
    (tmp_path / "job/t1/result.json").write_text(json.dumps(result))
    whole, step = origins(tmp_path)
    assert (whole.rollout, whole.reward, whole.fault, whole.termination_reason) == (
        "t1",
        0.25,
        "provider",
        "provider_error",
    )
    assert (step.rollout, step.reward, step.fault, step.step) == ("t1/one", 1, None, "one")
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no recording"):
        list(origins(tmp_path / "none"))
