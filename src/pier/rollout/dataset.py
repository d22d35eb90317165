"""The dataset of an environment: an immutable table of rows, from a list or anything with `to_list()` such as a dataset
of Hugging Face. Each row gets an `example_id`, and a `prompt` made from its `question`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, overload

from pier.errors import UsageError

Row = dict[str, Any]


class RolloutDataset:
    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]

    @property
    def column_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.to_list())

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | str) -> Row | list[Any]:
        if isinstance(key, str):
            return [row.get(key) for row in self._rows]
        return deepcopy(self._rows[key])

    def __repr__(self) -> str:
        return f"RolloutDataset({len(self)} rows: {', '.join(self.column_names)})"

    def to_list(self) -> list[Row]:
        return deepcopy(self._rows)

    def select(self, indices: Iterable[int]) -> RolloutDataset:
        return RolloutDataset(self._rows[index] for index in indices)

    def shuffle(self, seed: int | None = None) -> RolloutDataset:
        rows = list(self._rows)
        random.Random(seed).shuffle(rows)
        return RolloutDataset(rows)

    def repeat(self, times: int) -> RolloutDataset:
        return RolloutDataset(self._rows * times)

    def map(self, change: Callable[[Row], Mapping[str, Any]]) -> RolloutDataset:
        return RolloutDataset({**row, **change(dict(row))} for row in self._rows)

    def filter(self, keep: Callable[[Row], bool]) -> RolloutDataset:
        return RolloutDataset(row for row in self._rows if keep(dict(row)))


def as_dataset(rows: Any) -> RolloutDataset:
    """Convert a list of rows, a dataset, or the results of `evaluate`."""
    if isinstance(rows, RolloutDataset):
        return rows
    if isinstance(rows, Mapping) and "outputs" in rows:
        rows = rows["outputs"]
    listed = getattr(rows, "to_list", None)
    rows = listed() if listed is not None else rows
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError(f"invalid dataset {type(rows).__name__}: expected a list of objects or a dataset of them")
    return RolloutDataset(rows)


def with_prompts(
    dataset: RolloutDataset, system_prompt: str | None = None, few_shot: list[Any] | None = None
) -> RolloutDataset:
    """Give each row an `example_id`, a `prompt` and its decoded `info`."""
    numbered = all(isinstance(row.get("example_id"), int) for row in dataset)
    before = [*([{"role": "system", "content": system_prompt}] if system_prompt else []), *(few_shot or [])]
    return RolloutDataset(
        _complete(row, index, numbered=numbered, before=before, system=system_prompt)
        for index, row in enumerate(dataset)
    )


def _complete(row: Row, index: int, *, numbered: bool, before: list[Any], system: str | None) -> Row:
    if not numbered:
        if row.get("example_id") is not None:
            row["src_id"] = row["example_id"]
        row["example_id"] = index
    if isinstance(row.get("info"), str):
        row["info"] = json.loads(row["info"])
    prompt = row.get("prompt")
    if prompt is None:
        if "question" not in row:
            raise UsageError(f"row {index} of the dataset has neither a question nor a prompt")
        row["prompt"] = [*before, {"role": "user", "content": str(row["question"])}]
    elif system and isinstance(prompt, list) and (not prompt or prompt[0].get("role") != "system"):
        row["prompt"] = [{"role": "system", "content": system}, *prompt]
    return row
