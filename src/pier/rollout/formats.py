"""Samples as trainers load them: one row for each sample, with the names of the trainer's own types.

- `verl`: the fields of `AgentLoopOutput`.
- `trl`: the fields of a `TrainingSequence` of its asynchronous GRPO, with the reward and the group.
- `skyrl`: one entry of each list of a `GeneratorOutput`; a batch is the rows' values as lists.

Only samples that a trainer may learn from are written: those with exact tokens and a reward that the agent earned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pier.rollout.samples import Sample, SampleOrigin

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


TRAINERS: dict[str, Callable[[Sample, SampleOrigin], Row]] = {
    "verl": verl_row,
    "trl": trl_row,
    "skyrl": skyrl_row,
}
