"""Reads and writes trajectory files in ATIF, the agent trajectory interchange format.

Reads every version up to 1.8 and writes 1.7, formatted as Harbor does: indented, without nulls, number lists on one
line. Unknown fields are refused, as in Harbor; `pier.trajectory.rules` checks rules beyond the types of fields.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pier import files
from pier.errors import UsageError
from pier.tree import Tree, TreeError, open_regular

VERSION = "ATIF-v1.7"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))

Source = Literal["system", "user", "agent"]


class _Atif(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MediaSource(_Atif):
    """An image or sound; `path` is relative to the trajectory file, or a URL."""

    media_type: str
    path: str
    duration_sec: float | None = Field(default=None, ge=0)


class ContentPart(_Atif):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: MediaSource | None = None


Content = str | list[ContentPart]


class TrajectoryAgent(_Atif):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class StepToolCall(_Atif):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class SubagentTrajectoryRef(_Atif):
    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: dict[str, Any] | None = None


class ObservationResult(_Atif):
    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentTrajectoryRef] | None = None
    extra: dict[str, Any] | None = None


class Observation(_Atif):
    results: list[ObservationResult]


class Metrics(_Atif):
    """Metrics of one step. Prompt tokens include cached ones; completion tokens include reasoning."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class FinalMetrics(_Atif):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = Field(default=None, ge=0)
    extra: dict[str, Any] | None = None


class Step(_Atif):
    step_id: int = Field(ge=1)
    timestamp: str | None = None
    source: Source
    message: Content
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: list[StepToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = Field(default=None, ge=0)
    extra: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The message without its images."""
        return text_of(self.message)


class Trajectory(_Atif):
    schema_version: str = VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: TrajectoryAgent
    steps: list[Step]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[Trajectory] | None = None

    @property
    def agent_steps(self) -> list[Step]:
        return [step for step in self.steps if step.source == "agent"]


def text_of(content: Content | None) -> str:
    """The text in a message or an observation."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content if part.text)


def iso(at: float) -> str:
    """A time in seconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_of(text: str) -> datetime | None:
    """An ISO 8601 time, UTC unless it has a zone; None if it is invalid."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


_NUMBERS = re.compile(r"\[\s*(-?\d[\d.eE+-]*(?:,\s*-?\d[\d.eE+-]*)*)\s*\]")


def dump(trajectory: Trajectory) -> str:
    text = json.dumps(trajectory.model_dump(exclude_none=True), indent=2, ensure_ascii=False)
    return whole_characters("".join(_compact(line) for line in _outside_strings(text)) + "\n")


def whole_characters(text: str) -> str:
    """Join surrogate pairs, which a streamed answer may split, and replace lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _outside_strings(text: str) -> list[str]:
    """Split JSON into its strings and the text between them."""
    # Possessive, since backtracking into a string takes a hundred bytes of memory per character.
    return re.split(r'("(?:[^"\\]++|\\.)*+")', text)


def _compact(piece: str) -> str:
    if piece.startswith('"'):
        return piece
    return _NUMBERS.sub(lambda found: "[" + re.sub(r",\s*", ", ", found[1]) + "]", piece)


def write(path: Path, trajectory: Trajectory, *, durable: bool = True) -> None:
    """Replace the file at `path` atomically."""
    files.write(path, dump(trajectory), mode=0o600, durable=durable)


def file_content(path: Path) -> bytes:
    """The bytes of the file at `path`. Links are refused: an agent may have made them in its trial's directory."""
    with open_regular(path) as stream:
        return stream.read()


def read(path: Path) -> Trajectory:
    """Read the trajectory at `path`; `UsageError` if it is invalid."""
    try:
        return Trajectory.model_validate_json(file_content(path))
    except (OSError, TreeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', error)}", code="trajectory") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise UsageError(
            f"{path} is not a trajectory: {place}: {first['msg']}", hint=f"pier trajectory validate {path}"
        ) from error


def find(path: Path) -> Path:
    """Find the trajectory file at `path`, a file or a trial's directory."""
    if path.is_file():
        return path
    if path.is_dir():
        with Tree(path.resolve()) as tree:
            for name in ("agent/trajectory.json", "trajectory.json"):
                if (found := tree.find(name)) is not None and found.kind == "file":
                    return path / name
    raise UsageError(f"no trajectory found at {path}", hint="give a trajectory.json, or a trial directory that has one")
