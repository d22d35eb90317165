"""The digest of a task's content, the same that Harbor's packager computes, and the checks that go with reading it.

It covers `task.toml`, `instruction.md`, `README.md`, `trajectory.json` and the trees `environment`, `tests`,
`solution` and `steps`, without what the task's `.gitignore` (or a short list of editors' left-overs) excludes.

The patterns of a `.gitignore` file, as far as a single file at the root of a task needs them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pier.errors import TaskError

DEFAULT_PATTERNS = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    ignore: bool


class IgnoreRules:
    """Says which files below a directory are ignored. The last rule that matches decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _parse(line)) is not None]

    def ignores(self, path: str) -> bool:
        """Whether the file `path` (relative, with `/`) is ignored."""
        ignored = False
        for rule in self._rules:
            if rule.pattern.fullmatch(path):
                ignored = rule.ignore
        return ignored


def _parse(line: str) -> _Rule | None:
    text = line.rstrip("\n")
    if text.startswith("#"):
        return None
    text = re.sub(r"(?<!\\)\s+$", "", text)
    if not text or text == "/":
        return None
    negated = text.startswith("!")
    text = text[1:] if negated else text
    if text.startswith(("\\!", "\\#")):
        text = text[1:]
    only_directory = text.endswith("/")
    text = text.rstrip("/") if only_directory else text
    anchored = "/" in text
    body = _translate(text.lstrip("/"))
    prefix = "" if anchored else "(?:.*/)?"
    below = "/.*" if only_directory else "(?:/.*)?"
    try:
        return _Rule(re.compile(f"{prefix}{body}{below}", re.DOTALL), not negated)
    except re.error:
        return None


def _translate(pattern: str) -> str:
    segments = pattern.split("/")
    out = ""
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            out += ".+" if last else "(?:.*/)?"
            continue
        out += _segment(segment) + ("" if last else "/")
    return out


def _segment(text: str) -> str:
    out, index = "", 0
    while index < len(text):
        char = text[index]
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "\\" and index + 1 < len(text):
            index += 1
            out += re.escape(text[index])
        elif char == "[" and (end := text.find("]", index + 2)) > 0:
            inner = text[index + 1 : end]
            inner = "^" + inner[1:] if inner[0] in "!^" else inner
            out += "[" + inner.replace("\\", "\\\\") + "]"
            index = end
        else:
            out += re.escape(char)
        index += 1
    return out


_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_TREES = ("environment", "tests", "solution", "steps")


def task_digest(task: Path) -> str:
    """`sha256:<hex>` over the relative path and the content of each file of the task."""
    outer = hashlib.sha256()
    for relative, path in task_files(task):
        outer.update(f"{relative}\0{_sha256(path)}\n".encode(errors="surrogateescape"))
    return f"sha256:{outer.hexdigest()}"


def tree_digest(root: Path) -> str:
    """`sha256:<hex>` over the relative path, the mode's executable bit and the content of each file below `root`."""
    outer = hashlib.sha256()
    for path in sorted(_walk(root)):
        executable = "x" if os.access(path, os.X_OK) else "-"
        relative = path.relative_to(root).as_posix()
        outer.update(f"{relative}\0{executable}{_sha256(path)}\n".encode(errors="surrogateescape"))
    return f"sha256:{outer.hexdigest()}"


def task_files(task: Path) -> list[tuple[str, Path]]:
    """The files that make up the task, as relative paths with their real ones, in order."""
    root = task.resolve()
    try:
        rules = IgnoreRules((root / ".gitignore").read_text(errors="replace").splitlines())
    except FileNotFoundError:
        rules = IgnoreRules(DEFAULT_PATTERNS)
    found = [root / name for name in _FILES if (root / name).exists()]
    for tree in _TREES:
        found += _walk(root / tree)
    named = ((path.relative_to(root).as_posix(), path) for path in found)
    return sorted((relative, path) for relative, path in named if not rules.ignores(relative))


def check_containment(task: Path) -> None:
    """Refuse a task with a link that leads out of its directory: what is uploaded must be the task's own."""
    root = task.resolve()
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            if not path.is_symlink():
                continue
            try:
                target = path.resolve(strict=True)
            except (OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) or error.errno == errno.ELOOP:
                    raise TaskError(f"{path}: this link leads back to itself", code="task_link") from error
                continue
            if not target.is_relative_to(root):
                raise TaskError(f"{path}: this link leads out of the task", code="task_link")


def _walk(tree: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(tree):
        yield from (path for name in names if (path := Path(directory, name)).is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
