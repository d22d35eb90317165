"""Results of rollouts: one row each, and metadata with the numbers over all of them, in memory and on disk.

Each scored group is appended to `results.jsonl`, and `metadata.json` is replaced. A killed run resumes from these
files. Rollouts without a reward are excluded from means and pass@k and reported as errors.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pier import __version__, files
from pier.errors import JobError, UsageError
from pier.figures import mean, means, pass_all_k, pass_at_k
from pier.job.ledger import owning
from pier.rollout.dataset import Row
from pier.rollout.export import rows_of, sink_for
from pier.rollout.samples import Counts, SampleOrigin
from pier.rollout.state import RolloutTiming, State, error_data, is_fault
from pier.trajectory.model import whole_characters

Output = dict[str, Any]
_RESULTS, _METADATA = "results.jsonl", "metadata.json"
_SAME = ("env_id", "env_args", "model", "rollouts_per_example", "sampling_args", "shuffle", "shuffle_seed")
"""Settings that must be the same to resume an earlier run."""


def default_path(env_id: str, model: str) -> Path:
    name = f"{env_id or 'environment'}--{model}".replace("/", "--")
    return Path("outputs") / "evals" / name / secrets.token_hex(4)


def output_of(state: State, columns: Iterable[str] = ()) -> Output:
    """The row of a rollout; `columns` are additional keys of its state."""
    timing, error = state["timing"], state.get("error")
    output: Output = {
        "example_id": state["example_id"],
        "prompt": _saved(state.get("prompt")),
        "completion": _saved(state.get("completion")),
        "reward": state.get("reward"),
        "error": None if error is None else error_data(error),
        "timing": timing.as_dict() if isinstance(timing, RolloutTiming) else timing,
        "is_completed": state.get("is_completed", False),
        "is_truncated": state.get("is_truncated", False),
        "stop_condition": state.get("stop_condition"),
        "termination_reason": state.get("termination_reason"),
        "metrics": state.get("metrics") or {},
        "tool_defs": state.get("tool_defs"),
    }
    output |= {name: state[name] for name in ("answer", "info") if state.get(name)}
    if state.get("advantage") is not None:
        output["advantage"] = state["advantage"]
    if (usage := _usage(state)) is not None:
        output["token_usage"] = usage
    if (counts := state.get("sample_counts")) is not None and counts.sampled_tokens:
        output["sample_counts"] = counts.as_dict()
    if error is not None:
        output["error_chain"] = output["error"]["error_chain_repr"]
        output["long_error_chain"] = output["error"]["error_chain_str"]
    output |= output["metrics"]
    for name in columns:
        output[name] = _plain(state.get(name), name)
    return output


def _saved(messages: Any) -> Any:
    """Messages with each tool call as JSON text, so that rows with different tools have the same type."""
    if not isinstance(messages, list):
        return messages
    rows = []
    for message in messages:
        row = dict(message)
        if row.get("tool_calls"):
            row["content"] = row.get("content") or ""
            row["tool_calls"] = [json.dumps(dict(call), ensure_ascii=False) for call in row["tool_calls"]]
        rows.append(row)
    return rows


def _usage(state: State) -> dict[str, float] | None:
    steps = [step["response"]["usage"] for step in state.get("trajectory") or () if step["response"].get("usage")]
    if not steps:
        return None
    output = float(sum(usage["completion_tokens"] for usage in steps))
    context = float(steps[-1]["prompt_tokens"] + steps[-1]["completion_tokens"])
    return {
        "input_tokens": float(sum(usage["prompt_tokens"] for usage in steps)),
        "output_tokens": output,
        "final_output_tokens": output,
        "final_input_tokens": max(0.0, context - output),
    }


def _plain(value: Any, name: str) -> Any:
    try:
        return json.loads(whole_characters(json.dumps(value, default=_as_json, ensure_ascii=False)))
    except (TypeError, ValueError) as error:
        raise UsageError(f"invalid value {name!r} for state_columns: it cannot be written as JSON ({error})") from None


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseException):
        return repr(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, RolloutTiming):
        return value.as_dict()
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump()
    raise TypeError(f"{type(value).__name__} is not JSON")


@dataclass(frozen=True, slots=True)
class ResultsHeader:
    """The settings of a run."""

    env_id: str
    env_args: Mapping[str, Any]
    model: str
    base_url: str
    num_examples: int
    rollouts_per_example: int
    sampling_args: Mapping[str, Any]
    pass_threshold: float
    state_columns: list[str]
    shuffle: bool = False
    shuffle_seed: int | None = None
    dataset_digest: str | None = None


@dataclass(slots=True)
class Results:
    """The rows so far. `save` appends new ones to the files in the directory `path`."""

    header: ResultsHeader
    path: Path
    outputs: list[Output] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    def load(self, rows: list[Row]) -> list[Output]:
        """Add the results of an earlier run in `path` that belong to these rows of the dataset. `UsageError` if that
        run had other settings or another dataset; a larger `num_examples` is fine."""
        saved = _read_metadata(self.path)
        settings = {name: _plain(getattr(self.header, name), name) for name in _SAME}
        differing = [name for name, value in settings.items() if saved.get(name, value) != value]
        if not differing and saved.get("num_examples", 0) > self.header.num_examples:
            differing = ["num_examples"]
        problem = ", ".join(f"{name} was {saved.get(name)!r}" for name in differing)
        digest = saved.get("dataset_digest")
        if not differing and digest and digest != dataset_digest(rows, saved.get("num_examples", 0)):
            problem = "the rows of its dataset were different"
        if problem:
            raise UsageError(
                f"cannot resume {self.path}: {problem}", hint="use the same settings and dataset, or another directory"
            )
        counts, seen = Counter(row["example_id"] for row in rows), Counter[Any]()
        for row in files.read_journal(self.path / _RESULTS):
            if isinstance(row, dict) and "reward" in row and isinstance(row.get("example_id"), int | str):
                seen[row["example_id"]] += 1
                if seen[row["example_id"]] <= counts.get(row["example_id"], 0):
                    self.outputs.append(row)
        return self.outputs

    @property
    def can_resume(self) -> bool:
        return (self.path / _RESULTS).is_file() and (self.path / _METADATA).is_file()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Lock the directory; `UsageError` if another run writes to it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(owning(self.path))
            except JobError as error:
                raise UsageError(
                    f"cannot save to {self.path}: another run does", hint="wait for its end, or use another directory"
                ) from error
            yield

    def start(self) -> None:
        (self.path / _RESULTS).touch()
        self.save_metadata()

    def save(self, new: list[Output]) -> None:
        journal = files.Journal(self.path / _RESULTS, durable=True)
        try:
            for output in new:
                journal.append(_plain(output, "the rollout"))
        finally:
            journal.close()
        self.save_metadata()

    def save_metadata(self) -> None:
        saved = {name: value for name, value in self.metadata().items() if name not in ("path_to_save", "date")}
        files.write_json(self.path / _METADATA, saved)

    def metadata(self) -> dict[str, Any]:
        head, rewards = self.header, [row["reward"] for row in self.outputs if row.get("reward") is not None]
        at, every = pass_rates(self.outputs, head.rollouts_per_example, head.pass_threshold)
        return {
            **asdict(head),
            "date": datetime.now().isoformat(),
            "time": time.time() - self.began,
            "avg_reward": mean(rewards),
            "avg_metrics": means(row.get("metrics") or {} for row in self.outputs),
            "avg_error": mean(row.get("error") is not None for row in self.outputs) or 0.0,
            "without_reward": len(self.outputs) - len(rewards),
            "pass_at_k": at,
            "pass_all_k": every,
            "usage": means(row.get("token_usage") or {} for row in self.outputs) or None,
            "version_info": {"pier_version": __version__},
            "path_to_save": self.path,
            "tools": None,
            **self._sample_counts(),
        }

    def _sample_counts(self) -> dict[str, Any]:
        known = [row["sample_counts"] for row in self.outputs if row.get("sample_counts")]
        total = Counts()
        for each in known:
            total.add(Counts(**{name: each[name] for name in Counts.__dataclass_fields__}))
        return {"sample_counts": total.as_dict()} if known else {}

    def as_dict(self) -> dict[str, Any]:
        """`outputs`, ordered by example, and `metadata`."""
        return {"outputs": sorted(self.outputs, key=lambda row: row["example_id"]), "metadata": self.metadata()}


def dataset_digest(rows: Iterable[Row], num_examples: int) -> str:
    """A digest of the rows of the first `num_examples` examples."""
    digest, examples = blake2b(digest_size=16), set[Any]()
    for row in rows:
        if row["example_id"] in examples or len(examples) < num_examples:
            examples.add(row["example_id"])
            digest.update(json.dumps(_stable(row)).encode() + b"\n")
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    """A value as JSON that is the same in each process: no order of keys, no addresses of objects."""
    if isinstance(value, Mapping):
        return {str(key): _stable(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_stable(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, str | int | float):
        return value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        value = json.loads((path / _METADATA).read_text())
    except ValueError as error:
        raise UsageError(f"cannot resume {path}: {_METADATA} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def pass_rates(outputs: list[Output], size: int, threshold: float) -> tuple[dict[str, float], dict[str, float]]:
    """Unbiased pass@k and pass^k for k = 1, 2, 4, ... as means over the examples whose `size` rollouts all have a
    reward."""
    groups: dict[Any, list[float | None]] = defaultdict(list)
    for row in outputs:
        groups[row["example_id"]].append(row.get("reward"))
    whole = [[r for r in group if r is not None] for group in groups.values()]
    whole = [group for group in whole if len(group) == size]
    if size < 2 or not whole:
        return {}, {}
    passed = [sum(reward >= threshold for reward in group) for group in whole]
    powers = [1 << power for power in range(size.bit_length())]

    def rates(estimate: Callable[[int, int, int], float]) -> dict[str, float]:
        return {str(k): mean(estimate(size, good, k) for good in passed) or 0.0 for k in powers}

    return rates(pass_at_k), rates(pass_all_k)


@contextmanager
def sample_writer(path: Path, form: str = "pier") -> Iterator[Callable[[State], None]]:
    """A function that writes the training samples of a rollout to a file in JSON lines or Parquet. The file appears at
    the end; after an error or Ctrl-C it has the samples of the finished rollouts, if any."""
    written, stopped = 0, None
    with sink_for(path) as sink:

        def write(state: State) -> None:
            nonlocal written
            for row in rows_of(state.get("samples") or (), origin_of(state), form):
                sink.add(row)
                written += 1

        try:
            yield write
        except BaseException as error:
            if not written:
                raise
            stopped = error
    if stopped is not None:
        raise stopped


def origin_of(state: State) -> SampleOrigin:
    """The origin of a rollout's samples. A missing reward stays None."""
    error, reward = state.get("error"), state.get("reward")
    metrics = {name: value for name, value in (state.get("metrics") or {}).items() if value is not None}
    return SampleOrigin(
        recording=None,
        rollout=state.get("rollout_id", state["trajectory_id"]),
        group=f"example-{state['example_id']}",
        task=str(state.get("task")),
        agent="command",
        rewards=None if reward is None else {**metrics, "reward": reward},
        termination_reason=state.get("termination_reason") or "unknown",
        fault=getattr(error, "blame", "user") if is_fault(error) else None,
    )
