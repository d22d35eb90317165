"""Writes the samples of trials and jobs to one file, a trial at a time, and reports the outcome of every call.

A file is there whole or not at all. Samples that break a promise are a fault of this program and are never written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pier.errors import PierError, UsageError
from pier.rollout.formats import FORMATS, Row, is_trainable, sample_id
from pier.rollout.samples import Counts, SampleOrigin, broken_promises, origins, samples_of
from pier.trajectory.model import whole_characters


@dataclass(slots=True)
class Report:
    """What an export found and wrote."""

    recordings: int = 0
    samples: int = 0
    written: int = 0
    exact: int = 0
    trainable: int = 0
    without_reward: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    rows: list[Row] = field(default_factory=list)
    """One line on each sample, for a person."""

    def as_dict(self) -> Row:
        counts = self.counts
        return {
            "recordings": self.recordings,
            "samples": self.samples,
            "written": self.written,
            "exact": self.exact,
            "trainable": self.trainable,
            "without_reward": self.without_reward,
            "kinds": self.kinds,
            "generations": counts.generations,
            "unanswered": counts.unanswered,
            "retries": counts.retries,
            "generations_without_tokens": counts.without_tokens,
            "other_kinds": counts.other_kinds,
            "splits": counts.splits,
            "sampled_tokens": counts.sampled_tokens,
            "trained_tokens": counts.trained_tokens,
            "delivered_fraction": counts.delivered_fraction,
        }


class Sink(Protocol):
    """Takes rows one by one."""

    def add(self, row: Row) -> None: ...


def export(
    places: Iterable[Path],
    sink: Sink | None,
    *,
    form: str = "pier",
    kinds: Collection[str] = ("main", "sub_agent"),
    trainable_only: bool = False,
) -> Report:
    """Give the samples of all recordings at `places` to `sink`, in the given format."""
    report, write = Report(), FORMATS[form]
    for origin in (origin for place in places for origin in origins(place)):
        samples, counts = samples_of(origin.recording, kinds)
        if broken := next(broken_promises(samples), None):
            raise PierError(f"{origin.recording}: {broken}", code="internal")
        report.recordings += 1
        report.counts.add(counts)
        for sample in samples:
            good = is_trainable(sample, origin)
            report.samples += 1
            report.exact += sample.exact
            report.trainable += good
            report.without_reward += origin.reward is None
            report.kinds[sample.kind] = report.kinds.get(sample.kind, 0) + 1
            if good or not trainable_only:
                report.written += 1
                if sink is not None:
                    sink.add(write(sample, origin))
            report.rows.append(_line(sample, origin))
    return report


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
    """What writes to `path`: Parquet if it is named so, else JSON lines. Nothing is there until all is written."""
    return _parquet(path) if path.suffix == ".parquet" else _lines(path)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A place for a new file next to `path`, which takes its place when all went well."""
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


_LISTS = {"input_ids": "int32", "loss_mask": "int8", "logprobs": "float32"}
_VALUES = {
    "reward": "float64",
    **dict.fromkeys(("format", "attempt", "prompt_length", "spawned_by_call"), "int64"),
    **dict.fromkeys(("exact", "trainable"), "bool_"),
}
_BATCH = 64


class _Table:
    """Rows as columns: ids as int32, masks as int8, log-probs as float32, all that is nested as JSON text, since tool
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
            self._schema = self._arrow.schema([(name, self._type(name)) for name in self._rows[0]])
            self._writer = self._parquet.ParquetWriter(self._path, self._schema, compression="zstd")
        rows = [{name: self._cell(name, value) for name, value in row.items()} for row in self._rows]
        self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))
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
            f"{path}: Parquet files need pyarrow", hint="pip install 'pier[parquet]', or write to a .jsonl file"
        ) from None
    with _replacing(path) as scratch, closing(_Table(scratch, pyarrow, parquet)) as table:
        yield table
        table.finish()
