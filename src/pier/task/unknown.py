"""Keys of a file that no model knows, each with the nearest name that one does know."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key such as `environment.memmory_mb` and the known key that was probably meant."""

    key: str
    nearest: str | None = None

    def __str__(self) -> str:
        return f"unknown key {self.key}" + (f" (did you mean {self.nearest}?)" if self.nearest else "")


def unknown_keys(data: Any, model: type[BaseModel]) -> list[UnknownKey]:
    """The keys in `data` that `model` and the models inside it ignore."""
    return list(_walk(data, model, ""))


def _walk(data: Any, model: type[BaseModel], prefix: str) -> Iterator[UnknownKey]:
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), model.model_fields, n=1)
            yield UnknownKey(f"{prefix}{key}", f"{prefix}{near[0]}" if near else None)
            continue
        inner = _model_in(field.annotation)
        if inner is None:
            continue
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            place = f"{prefix}{key}" if index is None else f"{prefix}{key}[{index}]"
            yield from _walk(item, inner, f"{place}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        if (found := _model_in(part)) is not None:
            return found
    return None
