"""Exports the samples of trials and jobs to one file, trial by trial, and reports the outcome of every call.

Files are written atomically. Samples that violate an invariant are a bug of pier and are never written. Each format is
a function from a sample and its origin to a row: `pier` has all fields, with exact tokens, mask and log-probs where the
server returned them; `sft` has only the messages. The formats of trainers have the fields of the trainers' types,
without advantages and padding, which trainers compute themselves:

- `verl`: the fields of `AgentLoopOutput`.
- `trl`: the fields of `TrainingSequence` of asynchronous GRPO, the reward and the group.
- `skyrl`: one entry of each list of a `GeneratorOutput`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pier.errors import PierError, UsageError
from pier.rollout.samples import Counts, Sample, SampleOrigin, broken_promises, origins, samples_of
from pier.trajectory.model import whole_characters
from pier.trial.bounded import read_back_now

FORMAT = 1
Row = dict[str, Any]


def is_trainable(sample: Sample, origin: SampleOrigin) -> bool:
    """Whether the sample has a reward that the agent earned, and tokens or messages to train."""
    return origin.is_earned and (sample.trained > 0 or not sample.exact)


def is_wanted(sample: Sample, origin: SampleOrigin, form: str) -> bool:
    """Whether a format has a row for this sample: formats of trainers only if it is exact and trainable."""
    return form not in TRAINERS or (sample.exact and is_trainable(sample, origin))


def pier_row(sample: Sample, origin: SampleOrigin) -> Row:
    """All fields; `docs/guides/training-samples.md` lists them."""
    return {
        "format": FORMAT,
        "id": sample_id(sample, origin),
        "rollout_id": origin.rollout,
        "group_id": origin.group,
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
        "continues": f"{origin.rollout}#{sample.continues}" if sample.continues else None,
        "spawned_by_call": sample.spawned_by,
        "stop": sample.stop,
        "termination_reason": origin.termination_reason,
        "fault": origin.fault,
        "flags": [*sample.flags, *(("hack_suspected",) if origin.notes else ())],
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
    """Messages for supervised fine-tuning, in OpenAI's format. Answers that are not from this branch's calls, or that
    another branch trains, have weight 0."""
    messages = sample.messages()
    # The last answers of the conversation are those of the branch's calls, unless the history was changed.
    answers = [place for place, each in enumerate(messages) if each["role"] == "assistant"][-len(sample.turns) :]
    trained = {place for place, owned in zip(answers, sample.owns[-len(answers) :], strict=True) if owned}
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place not in trained:
            message["weight"] = 0
    tools = sample.tools()
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _parts(sample: Sample) -> tuple[list[int], list[int], list[int], list[float] | None]:
    """The prompt, the response, and the response's mask and log-probs (0 where the mask is 0)."""
    ids, mask = list(sample.input_ids or ()), list(sample.loss_mask or ())
    start = sample.prompt_length
    logprobs = None if sample.logprobs is None else [value or 0.0 for value in sample.logprobs[start:]]
    return ids[:start], ids[start:], mask[start:], logprobs


def verl_row(sample: Sample, origin: SampleOrigin) -> Row:
    prompt, response, mask, logprobs = _parts(sample)
    facts = {"task": origin.task, "kind": sample.kind, "weights": list(sample.weights)}
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": mask,
        "response_logprobs": logprobs,
        "reward_score": origin.reward,
        "num_turns": 2 * len(sample.calls),
        "metrics": {},
        "extra_fields": {"rollout_id": origin.rollout, "group_id": origin.group, **facts},
    }


def trl_row(sample: Sample, origin: SampleOrigin) -> Row:
    return {
        "input_ids": list(sample.input_ids or ()),
        "completion_mask": list(sample.loss_mask or ()),
        "old_log_probs": [value or 0.0 for value in sample.logprobs or ()],
        "rollout_id": origin.rollout,
        "group_id": origin.group,
        "reward": origin.reward,
    }


def skyrl_row(sample: Sample, origin: SampleOrigin) -> Row:
    prompt, response, mask, logprobs = _parts(sample)
    return {
        "prompt_token_ids": prompt,
        "response_ids": response,
        "loss_masks": mask,
        "rewards": origin.reward,
        "rollout_logprobs": logprobs,
        "stop_reasons": "length" if sample.stop in ("length", "context") else "stop",
        "trajectory_ids": {"instance_id": origin.group, "repetition_id": origin.attempt or 0},
        "is_last_step": True,
    }


TRAINERS: dict[str, Callable[[Sample, SampleOrigin], Row]] = {
    "verl": verl_row,
    "trl": trl_row,
    "skyrl": skyrl_row,
}


FORMATS: dict[str, Callable[[Sample, SampleOrigin], Row]] = {"pier": pier_row, "sft": sft_row, **TRAINERS}


def rows_of(
    samples: Sequence[Sample], origin: SampleOrigin, form: str = "pier", *, trainable_only: bool = False
) -> Iterator[Row]:
    """The rows of a session's samples in a format. `PierError` if a sample violates an invariant."""
    if broken := next(broken_promises(samples), None):
        raise PierError(f"{origin.recording or origin.rollout}: {broken}", code="internal")
    for sample in samples:
        good = is_trainable(sample, origin) or (form == "sft" and origin.is_earned)
        if is_wanted(sample, origin, form) and (good or not trainable_only):
            yield FORMATS[form](sample, origin)


def sample_id(sample: Sample, origin: SampleOrigin) -> str:
    return f"{origin.rollout}#{sample.number}"


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    return list(values) if values is not None else None


@dataclass(slots=True)
class Report:
    """The counts of an export."""

    recordings: int = 0
    samples: int = 0
    written: int = 0
    exact: int = 0
    trainable: int = 0
    without_reward: int = 0
    without_logprobs: int = 0
    """Samples with ids and no log-probs, which train nothing."""
    kinds: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    rows: list[Row] = field(default_factory=list)
    """A summary of each sample, for printing."""

    def add(self, sample: Sample, origin: SampleOrigin) -> None:
        self.samples += 1
        self.exact += sample.exact
        self.trainable += is_trainable(sample, origin)
        self.without_reward += origin.reward is None
        self.without_logprobs += sample.exact and sample.logprobs is None
        self.kinds[sample.kind] = self.kinds.get(sample.kind, 0) + 1

    def merge(self, other: Report) -> None:
        for name in ("recordings", "samples", "written", "exact", "trainable", "without_reward", "without_logprobs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds = dict(Counter(self.kinds) + Counter(other.kinds))
        self.counts.add(other.counts)
        self.rows += other.rows

    def as_dict(self) -> Row:
        found = asdict(replace(self, rows=[])) | self.counts.as_dict()
        found["generations_without_tokens"] = found.pop("without_tokens")
        return {name: value for name, value in found.items() if name not in ("counts", "rows")}


class Sink(Protocol):
    def add(self, row: Row) -> None: ...


def export(
    places: Iterable[Path],
    sink: Sink | None,
    *,
    form: str = "pier",
    kinds: Collection[str] = ("main", "sub_agent"),
    trainable_only: bool = False,
) -> Report:
    """Write the samples of all recordings at `places` to `sink`, in the given format."""
    report = Report()
    for origin in (origin for place in places for origin in origins(place)):
        assert origin.recording is not None
        part, rows = read_back_now(_read_rows, origin.recording, origin, form, kinds, trainable_only, sink is None)
        report.merge(part)
        if sink is not None:
            for row in rows:
                sink.add(json.loads(row))
    return report


def _read_rows(
    recording: Path,
    origin: SampleOrigin,
    form: str,
    kinds: Collection[str],
    trainable_only: bool,
    only_listed: bool,
    most: int | None,
) -> tuple[Report, list[bytes]]:
    """The report on one recording, and its rows as JSON."""
    samples, counts = samples_of(recording, kinds, most)
    report, rows = Report(recordings=1, counts=counts), list[bytes]()
    for row in rows_of(samples, origin, form, trainable_only=trainable_only):
        report.written += 1
        if not only_listed:
            rows.append(json.dumps(row).encode())
    for sample in samples:
        report.add(sample, origin)
        report.rows.append(_line(sample, origin))
    return report, rows


def _line(sample: Any, origin: SampleOrigin) -> Row:
    return {
        "id": sample_id(sample, origin),
        "kind": sample.kind,
        "calls": len(sample.calls),
        "ids": len(sample.input_ids) if sample.exact else None,
        "trained": sample.trained if sample.exact else None,
        "reward": origin.reward,
        "split": sample.split,
        "flags": list(sample.flags),
    }


def sink_for(path: Path) -> AbstractContextManager[Sink]:
    """Write rows to `path` as Parquet if it ends in .parquet, else as JSON lines. The file appears once complete."""
    return _parquet(path) if path.suffix == ".parquet" else _lines(path)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.touch(0o600)
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Lines:
    stream: Any

    def add(self, row: Row) -> None:
        self.stream.write(whole_characters(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + "\n")


@contextmanager
def _lines(path: Path) -> Iterator[Sink]:
    with _replacing(path) as scratch, scratch.open("w", encoding="utf-8") as stream:
        yield _Lines(stream)


_LISTS = {
    **dict.fromkeys(("input_ids", "prompt_ids", "response_ids", "prompt_token_ids"), "int64"),
    **dict.fromkeys(("loss_mask", "response_mask", "completion_mask", "loss_masks"), "int8"),
    **dict.fromkeys(("logprobs", "response_logprobs", "old_log_probs", "rollout_logprobs"), "float32"),
}
_VALUES = {
    **dict.fromkeys(("reward", "reward_score", "rewards"), "float64"),
    **dict.fromkeys(("format", "attempt", "prompt_length", "spawned_by_call", "num_turns"), "int64"),
    **dict.fromkeys(("exact", "trainable", "is_last_step"), "bool_"),
}
_BATCH = 64


class _Table:
    """Rows as columns: ids as int64, masks as int8, log-probs as float32. Nested values are JSON text, since tool
    arguments differ from row to row."""

    def __init__(self, path: Path, arrow: Any, parquet: Any) -> None:
        self._path, self._arrow, self._parquet = path, arrow, parquet
        self._rows: list[Row] = []
        self._writer: Any = None

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            names = dict.fromkeys((*self._rows[0], *(["tools"] if "messages" in self._rows[0] else ())))
            self._schema = self._arrow.schema([(name, self._type(name)) for name in names])
            self._writer = self._parquet.ParquetWriter(self._path, self._schema, compression="zstd")
        rows = [{name: self._cell(name, value) for name, value in row.items()} for row in self._rows]
        try:
            table = self._arrow.Table.from_pylist(rows, schema=self._schema)
        except (OverflowError, ValueError) as error:
            raise UsageError(
                f"cannot write the samples as Parquet: {error}", hint="write to a .jsonl file, which has no limit"
            ) from error
        self._writer.write_table(table)
        self._rows = []

    def finish(self) -> None:
        self.flush()
        if self._writer is None:
            self._parquet.write_table(self._arrow.table({}), self._path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _type(self, name: str) -> Any:
        arrow = self._arrow
        if name in _LISTS:
            return arrow.list_(getattr(arrow, _LISTS[name])())
        return getattr(arrow, _VALUES.get(name, "string"))()

    def _cell(self, name: str, value: Any) -> Any:
        if value is None or not self._arrow.types.is_string(self._schema.field(name).type):
            return value
        return whole_characters(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


@contextmanager
def _parquet(path: Path) -> Iterator[Sink]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path}: Parquet files need pyarrow", hint="pip install 'pier-agents[parquet]', or write to a .jsonl file"
        ) from None
    with _replacing(path) as scratch, closing(_Table(scratch, pyarrow, parquet)) as table:
        yield table
        table.finish()
