"""Checks the promises of an exported file of samples from the file alone, without the recordings.

Rows of the format `pier` name their calls, so the tokens of a call are compared between all rows that contain it: this
finds tokens that were tokenised again, trained twice or paired with another token's log-prob. Rows of trainers and of
`sft` do not, and are checked one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.rollout.export import FORMAT, Row
from pier.rollout.samples import NOT_THE_AGENTS

_MOST = 100
"""Problems listed per file."""
_TOKENS = {
    "verl": (("prompt_ids",), "response_ids", "response_mask", "response_logprobs", "reward_score"),
    "skyrl": (("prompt_token_ids",), "response_ids", "loss_masks", "rollout_logprobs", "rewards"),
    "trl": ((), "input_ids", "completion_mask", "old_log_probs", "reward"),
}
"""Fields of each trainer's rows: prompt, ids under the mask, mask, log-probs (0 where the mask is 0), reward."""
_NESTED = ("spans", "calls", "messages")
"""JSON text in Parquet files."""


@dataclass(slots=True)
class SampleCheck:
    """Counts of one file, and its broken promises with their lines."""

    path: Path
    rows: int = 0
    exact: int = 0
    trainable: int = 0
    without_logprobs: int = 0
    """Rows with ids and no log-probs; nothing of them may be trained."""
    ids: int = 0
    trained: int = 0
    broken: list[str] = field(default_factory=list)

    def count(self, row: Row, form: str) -> None:
        exact, trainable, ids, mask, logprobs = False, True, (), (), ()
        if form == "pier":
            names = ("exact", "trainable", "input_ids", "loss_mask", "logprobs")
            exact, trainable, ids, mask, logprobs = (row[name] for name in names)
        elif form in _TOKENS:
            prompt, last, masked, *_ = _TOKENS[form]
            exact, mask = True, row[masked]
            ids = [token for name in (*prompt, last) for token in row[name]]
        self.exact += exact
        self.trainable += trainable
        self.without_logprobs += exact and logprobs is None
        self.ids += len(ids or ())
        self.trained += sum(mask or ())

    @property
    def summary(self) -> str:
        share = f", {self.trained / self.ids:.1%} of {self.ids} ids trained" if self.ids else ""
        state = "no promise is broken" if not self.broken else f"{len(self.broken)} promises are broken"
        bare = f" ({self.without_logprobs} without log-probs)" if self.without_logprobs else ""
        return f"{state}: {self.rows} samples, {self.exact} exact{bare}, {self.trainable} trainable{share}"

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {"file": str(found.pop("path")), "ok": not self.broken, **found}


def check_file(path: Path, vocab_size: int | None = None) -> SampleCheck:
    """Check a .jsonl or .parquet file; `UsageError` if a row is of no format that pier exports."""
    found, seen = SampleCheck(path), _Seen()
    for number, row in enumerate(_read(path), 1):
        form = _format_of(row)
        if form is None:
            raise UsageError(
                f"{path}:{number}: expected a sample of the format pier {FORMAT}, sft, {', '.join(_TOKENS)}",
                hint="pier samples export PLACE -o FILE",
                code="not-samples",
            )
        found.rows += 1
        try:
            if form == "pier":
                problems = list(_problems(row, seen, vocab_size))
            else:
                problems = list(_sft_problems(row) if form == "sft" else _trainer_problems(row, form, vocab_size))
            found.count(row, form)
        except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
            problems = [f"it cannot be read: {type(error).__name__}: {error}"]
        name = f"{row['id']}: " if "id" in row else ""
        found.broken += [f"line {number}: {name}{problem}" for problem in problems[: _MOST - len(found.broken)]]
    return found


def _format_of(row: Any) -> str | None:
    if not isinstance(row, dict):
        return None
    if "format" in row:
        return "pier" if row["format"] == FORMAT else None
    names = {form: {*prompt, *others} for form, (prompt, *others) in _TOKENS.items()} | {"sft": {"messages"}}
    return next((form for form, fields in names.items() if fields <= set(row)), None)


def _read(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}", code="not-samples") from None


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{path}: Parquet files need pyarrow", hint="pip install 'pier-agents[parquet]'") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for row in batch.to_pylist():
                nested = {name: json.loads(row[name]) for name in _NESTED if isinstance(row.get(name), str)}
                yield {**row, **nested}
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: not Parquet: {error}", code="not-samples") from None


class _Seen:
    """Facts from the earlier rows of a file."""

    def __init__(self) -> None:
        self.rows: set[str] = set()
        self.calls: dict[tuple[str, int], tuple[int, int]] = {}
        """Hashes of the prompt and the completion of each call of a rollout."""
        self.trained: set[tuple[str, int]] = set()
        self.rewards: dict[str, Any] = {}


def _problems(row: Row, seen: _Seen, vocab_size: int | None) -> Iterator[str]:
    if row["id"] in seen.rows:
        yield "another sample has the same id"
    seen.rows.add(row["id"])
    for name in ("exact", "trainable"):
        if not isinstance(row[name], bool):
            yield f"{name} is {row[name]!r}: expected true or false"
    rollout = row["rollout_id"]
    if seen.rewards.setdefault(rollout, row["reward"]) != row["reward"]:
        yield "another sample of the rollout has another reward"
    if row["trainable"] and (row["reward"] is None or row["fault"] in NOT_THE_AGENTS):
        yield f"it is trainable with the reward {row['reward']} and the fault {row['fault']}"
    if row["reward"] is not None and not math.isfinite(row["reward"]):
        yield f"its reward is {row['reward']}"
    if not row["exact"]:
        if any(row[name] is not None for name in ("input_ids", "loss_mask", "logprobs")):
            yield "it has tokens and is not exact"
        return
    yield from _token_problems(row, seen, vocab_size)


def _token_problems(row: Row, seen: _Seen, vocab_size: int | None) -> Iterator[str]:
    ids, mask, logprobs, spans = row["input_ids"], row["loss_mask"], row["logprobs"], row["spans"]
    if len(mask) != len(ids) or (logprobs is not None and len(logprobs) != len(ids)):
        yield f"{len(ids)} ids, {len(mask)} in the mask, {len(logprobs or ids)} log-probs"
        return
    yield from _value_problems(ids, mask, vocab_size)
    sampled = {place for span in spans if span["trained"] for place in range(span["start"], span["end"])}
    if {place for place, bit in enumerate(mask) if bit} != sampled:
        yield "the mask is not 1 on exactly the tokens of the calls that it trains"
    if logprobs is None and "logprobs_missing" not in row["flags"]:
        yield "it has no log-probs and lacks the flag logprobs_missing"
    yield from _logprob_problems(mask, logprobs)
    if row["trainable"] and not sampled:
        yield "it is trainable and trains nothing"
    if not spans or spans[-1]["end"] != len(ids):
        yield "it does not end with the completion of its last call"
    if spans and row["prompt_length"] != spans[0]["start"]:
        yield "its prompt does not end where the first completion begins"
    if [span["call"] for span in spans] != list(row["calls"]):
        yield "its spans are not those of its calls"
    yield from _call_problems(row["rollout_id"], ids, spans, seen)


def _trainer_problems(row: Row, form: str, vocab_size: int | None) -> Iterator[str]:
    prompt, last, *names = _TOKENS[form]
    ids, (mask, logprobs, reward) = row[last], (row[name] for name in names)
    if not len(ids) == len(mask) == len(logprobs):
        yield f"{len(ids)} ids, {len(mask)} in the mask, {len(logprobs)} log-probs"
        return
    yield from _value_problems([token for name in prompt for token in row[name]] + ids, mask, vocab_size)
    yield from _logprob_problems(mask, logprobs, absent=0.0)
    if 1 not in mask:
        yield "it trains nothing"
    if not math.isfinite(reward):
        yield f"its reward is {reward}"


def _sft_problems(row: Row) -> Iterator[str]:
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    if not answers or row["messages"][-1]["role"] != "assistant":
        yield "it does not end with an answer"
    elif all(message.get("weight") == 0 for message in answers):
        yield "it trains nothing"


def _value_problems(ids: list[Any], mask: list[Any], vocab_size: int | None) -> Iterator[str]:
    size = math.inf if vocab_size is None else vocab_size
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < size]:
        yield f"the id {wrong[0]!r} is outside of the vocabulary"
    if not set(mask) <= {0, 1} or not set(map(type, mask)) <= {int}:
        yield "the mask has other values than 0 and 1"


def _logprob_problems(
    mask: list[int], logprobs: list[float | None] | None, absent: float | None = None
) -> Iterator[str]:
    """The first wrong log-prob. `absent` stands where the mask is 0."""
    for bit, value in zip(mask, logprobs or [absent] * len(mask), strict=True):
        if bit and (value is None or not math.isfinite(value) or value > 1e-6):
            yield f"a trained token has the log-prob {value}"
            return
        if not bit and value != absent:
            yield "a token that is not trained has a log-prob"
            return


def _call_problems(rollout: str, ids: list[int], spans: Iterable[Row], seen: _Seen) -> Iterator[str]:
    before = 0
    for span in spans:
        start, end, place = span["start"], span["end"], (rollout, span["call"])
        if not before <= start <= end <= len(ids):
            yield f"the tokens of call {span['call']} begin before those of an earlier call end"
        before = end
        tokens = (hash(tuple(ids[:start])), hash(tuple(ids[start:end])))
        if seen.calls.setdefault(place, tokens) != tokens:
            yield f"another sample has other tokens for call {span['call']}"
        if span["trained"] and place in seen.trained:
            yield f"the tokens of call {span['call']} are trained twice"
        if span["trained"]:
            seen.trained.add(place)
