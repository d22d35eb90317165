"""Rubrics and prompts: files in this package, which users can copy, edit and pass to the commands.

A rubric is a TOML, YAML or JSON file in Harbor's format: `[[criteria]]` with name, description and guidance. A rubric
for `pier analyze` may also have `[[causes]]`: the critic chooses one of them for each trial.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pier.errors import UsageError
from pier.task.load import describe

_HERE = Path(__file__).parent
RUBRICS, PROMPTS = _HERE / "rubrics", _HERE / "prompts"

CRITIQUE_RUBRICS = ("reward", "reward-hacking", "environment", "trajectory", "patch")
"""The default rubrics of a critique."""

_KEY = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Criterion(BaseModel):
    """One question of a rubric."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=_KEY)
    description: str = ""
    guidance: str = ""


class ReviewRubric(BaseModel):
    """The criteria of a critic."""

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


def as_list(criteria: Iterable[Criterion]) -> str:
    """Criteria or causes as a list for a prompt."""
    texts = (f"- {each.name}: {each.description} {each.guidance}" for each in criteria)
    return "\n".join(text.rstrip(" :") for text in texts)


def built_in_rubrics() -> list[str]:
    return sorted(path.stem for path in RUBRICS.glob("*.toml"))


def load_rubric(*sources: str | Path) -> ReviewRubric:
    """Load rubrics from files, or by name of built-in ones, and merge them."""
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
    path = RUBRICS / f"{source}.toml" if str(source) in built_in_rubrics() else source
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


def load_prompt(name: str, file: str | None = None) -> str:
    """The text of the user's prompt `file`, else of the built-in prompt `name`."""
    try:
        return (Path(file) if file else PROMPTS / f"{name}.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"invalid value {file!r} for --prompt: cannot read the file: {error}") from error


def copy_files(directory: Path) -> list[Path]:
    """Copy the built-in prompts and rubrics to a directory; the new files. Existing files are not overwritten."""
    written: list[Path] = []
    for kind in (PROMPTS, RUBRICS):
        (directory / kind.name).mkdir(parents=True, exist_ok=True)
        for path in sorted(kind.iterdir()):
            target = directory / kind.name / path.name
            if path.suffix in (".md", ".toml") and not target.exists():
                shutil.copyfile(path, target)
                written.append(target)
    return written


def fill_in(template: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of a prompt. Placeholders in the values, which may come from a trial, have no effect."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), template)
