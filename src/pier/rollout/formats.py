"""Samples in the words of those who train on them. Each format is one function from a sample and its origin to a row.

Rows of token formats have exact tokens, mask and log-probs; what a trainer computes itself (advantages, padding) is not
in them. A sample without tokens has no row in those: `messages` formats still take it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pier.rollout.samples import Exact, Sample, SampleOrigin
from pier.wire.chat import FINISHES
from pier.wire.turn import Turn

FORMAT = 1
Row = dict[str, Any]


def is_trainable(sample: Sample, origin: SampleOrigin) -> bool:
    """Whether the sample has a reward that the agent earned, and something to train."""
    return origin.reward is not None and origin.fault is None and (sample.trained > 0 or not sample.exact)


def pier_row(sample: Sample, origin: SampleOrigin) -> Row:
    """Everything: `docs/guides/training-samples.md` tells the fields."""
    return {
        "format": FORMAT,
        "id": name_of(sample, origin),
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


def verl_row(sample: Sample, origin: SampleOrigin) -> Row | None:
    """verl's `AgentLoopOutput`."""
    if not sample.exact:
        return None
    return {
        "prompt_ids": _prompt(sample),
        "response_ids": _response(sample.input_ids, sample),
        "response_mask": _response(sample.loss_mask, sample),
        "response_logprobs": _response(_filled(sample), sample),
        "reward_score": origin.reward,
        "num_turns": len(sample.calls),
        "metrics": {},
        "extra_fields": {"rollout_id": origin.rollout, "uid": origin.group, **_about(sample, origin)},
    }


def prime_rl_row(sample: Sample, origin: SampleOrigin) -> Row | None:
    """prime-rl's `TrainingSample`, before advantages."""
    if not sample.exact:
        return None
    temperatures = [1.0] * len(sample.input_ids or ())
    for span in sample.spans:
        asked = 1.0 if span.temperature is None else span.temperature
        temperatures[span.start : span.end] = [asked] * (span.end - span.start)
    return {
        "token_ids": _listed(sample.input_ids),
        "mask": [bool(bit) for bit in sample.loss_mask or ()],
        "logprobs": _filled(sample),
        "temperatures": temperatures,
        "env_name": origin.task,
        "reward": origin.reward,
        "rollout_id": origin.rollout,
        "group_id": origin.group,
    }


def slime_row(sample: Sample, origin: SampleOrigin) -> Row | None:
    """slime's `Sample`; its masks and log-probs cover the response alone."""
    if not sample.exact:
        return None
    return {
        "tokens": _listed(sample.input_ids),
        "response_length": len(sample.input_ids or ()) - sample.prompt_length,
        "loss_mask": _response(sample.loss_mask, sample),
        "rollout_log_probs": _response(_filled(sample), sample),
        "reward": origin.reward,
        "status": _slime_status(sample, origin),
        "rollout_id": origin.rollout,
        "weight_versions": list(sample.weights),
        "metadata": {"group_id": origin.group, **_about(sample, origin)},
    }


def skyrl_row(sample: Sample, origin: SampleOrigin) -> Row | None:
    """One place of SkyRL's `GeneratorOutput`, whose fields are lists of these."""
    if not sample.exact:
        return None
    return {
        "prompt_token_ids": _prompt(sample),
        "response_ids": _response(sample.input_ids, sample),
        "rewards": origin.reward,
        "loss_masks": _response(sample.loss_mask, sample),
        "stop_reasons": sample.stop,
        "rollout_logprobs": _response(_filled(sample), sample),
        "trajectory_ids": origin.rollout,
    }


def trl_row(sample: Sample, origin: SampleOrigin) -> Row | None:
    """A row of TRL's asynchronous GRPO."""
    if not sample.exact:
        return None
    return {
        "input_ids": _listed(sample.input_ids),
        "completion_mask": _listed(sample.loss_mask),
        "old_log_probs": _filled(sample),
        "rollout_id": origin.rollout,
        "reward": origin.reward,
    }


def harbor_row(sample: Sample, origin: SampleOrigin) -> Row | None:
    """Harbor's `RolloutDetail`: lists by turn."""
    turns = [Exact.of(turn) for turn in sample.turns]
    if not all(turns):
        return None
    known = [turn for turn in turns if turn]
    likely = [list(turn.logprobs) if turn.logprobs is not None else None for turn in known]
    return {
        "prompt_token_ids": [list(turn.prompt) for turn in known],
        "completion_token_ids": [list(turn.completion) for turn in known],
        "logprobs": likely if all(each is not None for each in likely) else None,
        "extra": {"rollout_id": origin.rollout, "reward": origin.reward, **_about(sample, origin)},
    }


def art_row(sample: Sample, origin: SampleOrigin) -> Row:
    """ART's `Trajectory`: what was said, and the sampled answers as choices with their log-probs."""
    said = sample.messages()
    choices = dict(_choices(sample, said))
    return {
        "messages_and_choices": [choices.get(place, message) for place, message in enumerate(said)],
        "tools": sample.tools() or None,
        "reward": origin.reward,
        "metrics": {"turns": len(sample.calls)},
        "metadata": {
            "rollout_id": origin.rollout,
            "group_id": origin.group,
            "kind": sample.kind,
            "termination": origin.termination,
        },
        "logs": [],
    }


def sft_row(sample: Sample, origin: SampleOrigin) -> Row:
    """A line for supervised fine-tuning on messages, as OpenAI and its like take it. Answers that no call of the branch
    gave, and those that another branch trains, have weight 0."""
    said = sample.messages()
    given = _choices(sample, said)
    ours = {place for (place, _), owned in zip(given, sample.owns[-len(given) :], strict=True) if owned}
    for place, message in enumerate(said):
        if message["role"] == "assistant" and place not in ours:
            message["weight"] = 0
    tools = sample.tools()
    return {"messages": said, **({"tools": tools} if tools else {})}


FORMATS: dict[str, Callable[[Sample, SampleOrigin], Row | None]] = {
    "pier": pier_row,
    "verl": verl_row,
    "prime-rl": prime_rl_row,
    "slime": slime_row,
    "skyrl": skyrl_row,
    "trl": trl_row,
    "harbor": harbor_row,
    "art": art_row,
    "sft": sft_row,
}


def name_of(sample: Sample, origin: SampleOrigin) -> str:
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


def _choices(sample: Sample, said: list[Row]) -> list[tuple[int, Row]]:
    """Where the answers of this branch stand among its messages, as choices of Chat Completions; the last for sure, the
    others as far back as each history still has the one before it."""
    places = [place for place, message in enumerate(said) if message["role"] == "assistant"]
    found = list(zip(reversed(places), reversed(sample.turns), strict=False))
    return [(place, _choice(turn, said[place])) for place, turn in reversed(found)]


def _choice(turn: Turn, message: Row) -> Row:
    exact, content = Exact.of(turn), None
    if exact and exact.logprobs is not None:
        content = [
            {"token": f"token_id:{token}", "bytes": None, "logprob": value, "top_logprobs": []}
            for token, value in zip(exact.completion, exact.logprobs, strict=True)
        ]
    return {
        "finish_reason": FINISHES[turn.stop],
        "index": 0,
        "logprobs": {"content": content, "refusal": None} if content is not None else None,
        "message": message,
    }


def _slime_status(sample: Sample, origin: SampleOrigin) -> str:
    if origin.fault is not None:
        return "aborted"
    cut = "truncated" in sample.flags or origin.termination in ("budget", "timeout")
    return "truncated" if cut else "completed"


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    return list(values) if values is not None else None


def _filled(sample: Sample) -> list[float] | None:
    """Log-probs with 0 where nothing is trained, as trainers want them."""
    return [value or 0.0 for value in sample.logprobs] if sample.logprobs is not None else None


def _prompt(sample: Sample) -> list[int]:
    return list((sample.input_ids or ())[: sample.prompt_length])


def _response(values: Any, sample: Sample) -> list[Any] | None:
    return list(values[sample.prompt_length :]) if values is not None else None
