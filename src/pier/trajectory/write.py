"""Reads and writes trajectory files. Written as Harbor does: indented, without nulls, number lists on one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import ValidationError

from pier import files
from pier.errors import UsageError
from pier.trajectory.model import Trajectory
from pier.tree import Tree, TreeError, open_regular

_NUMBERS = re.compile(r"\[\s*(-?\d[\d.eE+-]*(?:,\s*-?\d[\d.eE+-]*)*)\s*\]")


def dump(trajectory: Trajectory) -> str:
    """The text of a trajectory file."""
    text = json.dumps(trajectory.model_dump(exclude_none=True), indent=2, ensure_ascii=False)
    return whole_characters("".join(_compact(line) for line in _outside_strings(text)) + "\n")


def whole_characters(text: str) -> str:
    """Halves of characters, as a streamed answer may bring them, joined again; a half without its other is replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _outside_strings(text: str) -> list[str]:
    """The text in pieces, each either one JSON string or what stands between two."""
    return re.split(r'("(?:[^"\\]|\\.)*")', text)


def _compact(piece: str) -> str:
    if piece.startswith('"'):
        return piece
    return _NUMBERS.sub(lambda found: "[" + re.sub(r",\s*", ", ", found[1]) + "]", piece)


def write(path: Path, trajectory: Trajectory, *, durable: bool = True) -> None:
    """Replace the file at `path`, all of it or not at all."""
    files.write(path, dump(trajectory), mode=0o600, durable=durable)


def file_content(path: Path) -> bytes:
    """The bytes of the file at `path`. A link is refused: in a trial's directory an agent may have made it."""
    with open_regular(path) as stream:
        return stream.read()


def read(path: Path) -> Trajectory:
    """The trajectory at `path`; `UsageError` says what is wrong with the file."""
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
    """The trajectory file at `path`: the file itself, or the one of a trial's directory."""
    if path.is_file():
        return path
    if path.is_dir():
        with Tree(path.resolve()) as tree:
            for name in ("agent/trajectory.json", "trajectory.json"):
                if (found := tree.find(name)) is not None and found.kind == "file":
                    return path / name
    raise UsageError(
        f"there is no trajectory at {path}", hint="give a trajectory.json, or a trial directory that has one"
    )
