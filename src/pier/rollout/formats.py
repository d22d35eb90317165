"""Samples as trainers load them: one row for each sample, with the names of the trainer's own types.

- `verl`: the fields of `AgentLoopOutput`.
- `trl`: the fields of a `TrainingSequence` of its asynchronous GRPO, with the reward and the group.
- `skyrl`: one entry of each list of a `GeneratorOutput`; a batch is the rows' values as lists.
- `art`: a `Trajectory`; each answer that is trained is a `Choice` whose tokens are `token_id:N`, with log-probs.

Only samples that a trainer may learn from are written: those with exact tokens and a reward that the agent earned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pier.rollout.samples import Exact, Sample, SampleOrigin
from pier.wire.chat import FINISHES, render_assistant
from pier.wire.turn import Turn

Row = dict[str, Any]


def _parts(sample: Sample) -> tuple[list[int], list[int], list[int], list[float] | None]:
    """The prompt; then the response, its mask and its log-probs, 0 where nothing is trained."""
    ids, mask = list(sample.input_ids or ()), list(sample.loss_mask or ())
    start = sample.prompt_length
    likely = None if sample.logprobs is None else [value or 0.0 for value in sample.logprobs[start:]]
    return ids[:start], ids[start:], mask[start:], likely


def _about(sample: Sample, origin: SampleOrigin) -> Row:
    return {
        "rollout_id": origin.rollout,
        "group_id": origin.group,
        "task": origin.task,
        "kind": sample.kind,
        "weights": list(sample.weights),
    }


def verl_row(sample: Sample, origin: SampleOrigin) -> Row:
    prompt, response, mask, likely = _parts(sample)
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": mask,
        "response_logprobs": likely,
        "reward_score": origin.reward,
        "num_turns": 2 * len(sample.calls),
        "metrics": {},
        "extra_fields": _about(sample, origin),
    }


def trl_row(sample: Sample, origin: SampleOrigin) -> Row:
    return {
        "input_ids": list(sample.input_ids or ()),
        "completion_mask": list(sample.loss_mask or ()),
        "old_log_probs": [value or 0.0 for value in sample.logprobs or [0.0] * len(sample.input_ids or ())],
        "rollout_id": origin.rollout,
        "group_id": origin.group,
        "reward": origin.reward,
    }


_SKYRL_STOPS = {"length": "length", "context": "length"}


def skyrl_row(sample: Sample, origin: SampleOrigin) -> Row:
    prompt, response, mask, likely = _parts(sample)
    return {
        "prompt_token_ids": prompt,
        "response_ids": response,
        "loss_masks": mask,
        "rewards": origin.reward,
        "rollout_logprobs": likely,
        "stop_reasons": _SKYRL_STOPS.get(sample.stop, "stop"),
        "trajectory_ids": {"instance_id": origin.group, "repetition_id": origin.attempt or 0},
        "is_last_step": True,
    }


def art_row(sample: Sample, origin: SampleOrigin) -> Row:
    said: list[Row] = list(sample.messages())
    places = [place for place, message in enumerate(said) if message["role"] == "assistant"][-len(sample.turns) :]
    turns = zip(sample.turns[-len(places) :], sample.owns[-len(places) :], strict=True)
    for place, (turn, owned) in zip(places, turns, strict=True):
        if owned and (tokens := Exact.of(turn)) is not None:
            said[place] = _choice(turn, tokens)
    return {
        "messages_and_choices": said,
        "tools": sample.tools() or None,
        "reward": origin.reward,
        "metrics": {name: value for name, value in (origin.rewards or {}).items() if name != "reward"},
        "metadata": {name: value for name, value in _about(sample, origin).items() if not isinstance(value, list)},
    }


def _choice(turn: Turn, tokens: Exact) -> Row:
    likely = tokens.logprobs or (0.0,) * len(tokens.completion)
    content = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": value, "top_logprobs": []}
        for token, value in zip(tokens.completion, likely, strict=True)
    ]
    message = {**render_assistant(turn.parts, answer=True), "refusal": None}
    return {
        "index": 0,
        "finish_reason": FINISHES[turn.stop],
        "message": message,
        "logprobs": {"content": content, "refusal": None},
    }


TRAINERS: dict[str, Callable[[Sample, SampleOrigin], Row]] = {
    "verl": verl_row,
    "trl": trl_row,
    "skyrl": skyrl_row,
    "art": art_row,
}
