"""The formats of training samples. Each is one function from a sample and its origin to a row.

`pier` has all fields: exact tokens, mask and log-probs where the server gave them, and the messages. `sft` has the
messages alone. What a trainer computes itself (advantages, padding) is in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pier.rollout.samples import Sample, SampleOrigin

FORMAT = 1
Row = dict[str, Any]


def is_trainable(sample: Sample, origin: SampleOrigin) -> bool:
    """Whether the sample has a reward that the agent earned, and something to train."""
    return origin.reward is not None and origin.fault is None and (sample.trained > 0 or not sample.exact)


def pier_row(sample: Sample, origin: SampleOrigin) -> Row:
    """Everything: `docs/guides/training-samples.md` lists the fields."""
    return {
        "format": FORMAT,
        "id": sample_id(sample, origin),
        "rollout_id": origin.rollout,
        "group_id": origin.group,
        **_about(sample, origin),
        "exact": sample.exact,
        "input_ids": _listed(sample.input_ids),
        "prompt_length": sample.prompt_length if sample.exact else None,
        "loss_mask": _listed(sample.loss_mask),
        "logprobs": _listed(sample.logprobs),
        "spans": [asdict(span) for span in sample.spans],
        "reward": origin.reward,
        "all_rewards": dict(origin.rewards) if origin.rewards is not None else None,
        "trainable": is_trainable(sample, origin),
        "messages": sample.messages(),
        "tools": sample.tools(),
    }


def sft_row(sample: Sample, origin: SampleOrigin) -> Row:
    """A line for supervised fine-tuning on messages, as OpenAI and its like take it. Answers that no call of the branch
    gave, and those that another branch trains, have weight 0."""
    said = sample.messages()
    given = _answers(sample, said)
    ours = {place for place, owned in zip(given, sample.owns[-len(given) :], strict=True) if owned}
    for place, message in enumerate(said):
        if message["role"] == "assistant" and place not in ours:
            message["weight"] = 0
    tools = sample.tools()
    return {"messages": said, **({"tools": tools} if tools else {})}


FORMATS: dict[str, Callable[[Sample, SampleOrigin], Row]] = {"pier": pier_row, "sft": sft_row}


def sample_id(sample: Sample, origin: SampleOrigin) -> str:
    return f"{origin.rollout}#{sample.number}"


def _about(sample: Sample, origin: SampleOrigin) -> Row:
    continues = f"{origin.rollout}#{sample.continues}" if sample.continues else None
    return {
        "task": origin.task,
        "task_digest": origin.task_digest,
        "step": origin.step,
        "attempt": origin.attempt,
        "agent": origin.agent,
        "agent_version": origin.agent_version,
        "model": sample.model,
        "dialect": sample.dialect,
        "weights": list(sample.weights),
        "kind": sample.kind,
        "calls": list(sample.calls),
        "split": sample.split,
        "continues": continues,
        "spawned_by_call": sample.spawned_by,
        "stop": sample.stop,
        "termination": origin.termination,
        "fault": origin.fault,
        "flags": [*sample.flags, *(("hack_suspected",) if origin.notes else ())],
    }


def _answers(sample: Sample, said: list[Row]) -> list[int]:
    """Where the answers of this branch stand among its messages; the last for sure, the others as far back as each
    history still has the one before it."""
    places = [place for place, message in enumerate(said) if message["role"] == "assistant"]
    return places[-len(sample.turns) :]


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    return list(values) if values is not None else None
