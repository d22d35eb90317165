"""The digest of a task's content, the same that Harbor's packager computes, and the checks that go with reading it.

It covers `task.toml`, `instruction.md`, `README.md`, `trajectory.json` and the trees `environment`, `tests`,
`solution` and `steps`, without what the task's `.gitignore` (or a short list of editors' left-overs) excludes.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pathspec import PathSpec, Pattern, lookup_pattern

from pier.errors import TaskError

DEFAULT_PATTERNS = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
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
        rules = read_patterns((root / ".gitignore").read_text(errors="replace").splitlines())
    except FileNotFoundError:
        rules = read_patterns(DEFAULT_PATTERNS)
    found = [root / name for name in _FILES if (root / name).exists()]
    for tree in _TREES:
        found += _walk(root / tree)
    named = ((path.relative_to(root).as_posix(), path) for path in found)
    return sorted((relative, path) for relative, path in named if not rules.match_file(relative))


def read_patterns(lines: Iterable[str]) -> PathSpec[Pattern]:
    """The patterns of a `.gitignore` file, for paths relative to its directory; invalid ones match nothing."""
    patterns: list[Pattern] = []
    for line in lines:
        try:
            patterns.append(lookup_pattern("gitignore")(line))
        except ValueError:
            continue
    return PathSpec(patterns)


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
