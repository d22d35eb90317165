"""Rubrics and prompts: files in this package that users can copy, change and give instead.

A rubric is a TOML, YAML or JSON file in Harbor's form: `[[criteria]]` with name, description and guidance. One for
`pier analyze` may also name `[[causes]]`, from which the critic chooses one for each trial.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pier.errors import UsageError
from pier.task.load import describe

_HERE = Path(__file__).parent
RUBRICS, PROMPTS = _HERE / "rubrics", _HERE / "prompts"

CRITIQUE_RUBRICS = ("reward", "reward-hacking", "environment", "trajectory", "patch")
"""The rubrics of a critique, unless others are asked for."""

_KEY = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"


class Criterion(BaseModel):
    """One question of a rubric."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=_KEY)
    description: str = ""
    guidance: str = ""


class ReviewRubric(BaseModel):
    """What a critic judges by."""

    model_config = ConfigDict(extra="ignore")

    criteria: list[Criterion] = Field(default_factory=list)
    causes: list[Criterion] = Field(default_factory=list)

    @model_validator(mode="after")
    def _asks_something(self) -> ReviewRubric:
        if not self.criteria and not self.causes:
            raise ValueError("expected criteria")
        return self

    @property
    def names(self) -> list[str]:
        return [criterion.name for criterion in self.criteria]

    def guidance(self) -> str:
        """The criteria as a prompt shows them."""
        return "\n".join(_line(criterion) for criterion in self.criteria)

    def cause_list(self) -> str:
        return "\n".join(_line(cause) for cause in self.causes)


def _line(criterion: Criterion) -> str:
    text = " ".join(part for part in (criterion.description, criterion.guidance) if part)
    return f"- {criterion.name}: {text}" if text else f"- {criterion.name}"


def built_in_rubrics() -> list[str]:
    return sorted(path.stem for path in RUBRICS.glob("*.toml"))


def load_rubric(*sources: str | Path) -> ReviewRubric:
    """The rubric that files or names of built-in rubrics make together."""
    parts = [_load(Path(source)) for source in sources]
    rubric = ReviewRubric(
        criteria=[criterion for part in parts for criterion in part.criteria],
        causes=[cause for part in parts for cause in part.causes],
    )
    for name, count in Counter(rubric.names).items():
        if count > 1:
            raise UsageError(f"the rubric has two criteria named {name!r}", code="rubric")
    return rubric


def _load(source: Path) -> ReviewRubric:
    path = RUBRICS / f"{source}.toml" if source.parent == Path() and str(source) in built_in_rubrics() else source
    if not path.is_file():
        known = ", ".join(built_in_rubrics())
        raise UsageError(f"invalid value {str(source)!r} for --rubric: expected a file or one of {known}")
    try:
        return ReviewRubric.model_validate(_parse(path))
    except ValidationError as error:
        raise UsageError(f"{path}: not a rubric: {describe(error)}", code="rubric") from error
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", code="rubric") from error


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    match path.suffix.lower():
        case ".toml":
            return tomllib.loads(text)
        case ".yaml" | ".yml":
            return yaml.safe_load(text)
        case ".json":
            return json.loads(text)
    raise UsageError(f"invalid value {str(path)!r} for --rubric: expected a .toml, .yaml or .json file")


def load_prompt(source: str | Path) -> str:
    """The text of a prompt: of a file, or of a built-in one by its name."""
    built_in = PROMPTS / f"{source}.md"
    path = built_in if isinstance(source, str) and built_in.is_file() else Path(source)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"invalid value {str(source)!r} for --prompt: cannot be read: {error}") from error


def copy_files(directory: Path) -> list[Path]:
    """Copy the built-in prompts and rubrics to a directory, to be changed there; files that are there stay."""
    written: list[Path] = []
    for kind in (PROMPTS, RUBRICS):
        (directory / kind.name).mkdir(parents=True, exist_ok=True)
        for path in sorted(kind.iterdir()):
            target = directory / kind.name / path.name
            if path.suffix in (".md", ".toml") and not target.exists():
                shutil.copyfile(path, target)
                written.append(target)
    return written


def fill_in(template: str, values: dict[str, str]) -> str:
    """A prompt with its placeholders filled in. Values are not looked at again, so no text of a trial is a template."""
    parts, rest = [], template
    while rest:
        place, key = _first(rest, values)
        if place < 0:
            break
        parts += [rest[:place], values[key]]
        rest = rest[place + len(key) + 2 :]
    return "".join((*parts, rest))


def _first(text: str, keys: Iterable[str]) -> tuple[int, str]:
    found = [(text.find(f"{{{key}}}"), key) for key in keys]
    return min((each for each in found if each[0] >= 0), default=(-1, ""))
