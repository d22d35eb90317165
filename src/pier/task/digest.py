"""The digest of a task's content, the same that Harbor's packager computes, and the checks that go with reading it.

It covers `task.toml`, `instruction.md`, `README.md`, `trajectory.json` and the trees `environment`, `tests`,
`solution` and `steps`, without what the task's `.gitignore` (or a short list of editors' left-overs) excludes.
Directories of tests and solutions may exclude more in `.harborignore` files, which also keep it out of sandboxes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pier.errors import TaskError

if TYPE_CHECKING:
    from pathspec import PathSpec, Pattern

DEFAULT_PATTERNS = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
"""What is left out of a task without a `.gitignore`; `is_left_over` says the same."""
IGNORE_FILE = ".harborignore"
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
        excluded = read_patterns((root / ".gitignore").read_text(errors="replace").splitlines()).match_file
    except FileNotFoundError:
        excluded = is_left_over
    found = [root / name for name in _FILES if (root / name).exists()]
    for tree in _TREES:
        found += _walk(root / tree)
    if any(path.name == IGNORE_FILE for path in found):
        found = _without_ignored_of(root, found)
    named = ((path.relative_to(root).as_posix(), path) for path in found)
    return sorted((relative, path) for relative, path in named if not excluded(relative))


def is_left_over(relative: str) -> bool:
    """Whether `DEFAULT_PATTERNS` match a file, without the library for patterns, which takes long to load."""
    parts = relative.split("/")
    return "__pycache__" in parts[:-1] or any(
        part == ".DS_Store" or part.endswith((".pyc", ".swp", ".swo", "~")) for part in parts
    )


def read_patterns(lines: Iterable[str]) -> PathSpec[Pattern]:
    """The patterns of a `.gitignore` file, for paths relative to its directory; invalid ones match nothing."""
    from pathspec import PathSpec, lookup_pattern

    patterns: list[Pattern] = []
    for line in lines:
        try:
            patterns.append(lookup_pattern("gitignore")(line))
        except ValueError:
            continue
    return PathSpec(patterns)


def _without_ignored_of(root: Path, files: list[Path]) -> list[Path]:
    scopes = [root / "tests", root / "solution", *root.glob("steps/*/tests"), *root.glob("steps/*/solution")]
    kept = {path for scope in scopes for path in kept_files(scope)}
    return [
        path
        for path in files
        if path in kept or (path.name != IGNORE_FILE and not any(path.is_relative_to(scope) for scope in scopes))
    ]


def kept_files(root: Path) -> Iterator[Path]:
    """The files below a directory of tests or a solution that no `.harborignore` in it excludes. A file's rules count
    for its own directory and all below; the innermost rule that matches decides, and excluded directories are final."""
    rules: dict[Path, tuple[tuple[Path, PathSpec[Pattern]], ...]] = {root.parent: ()}
    waiting = [root] if root.is_dir() else []
    while waiting:
        directory = waiting.pop()
        mine, own = rules[directory.parent], directory / IGNORE_FILE
        if own.is_file():
            mine = (*mine, (directory, read_patterns(own.read_text(errors="replace").splitlines())))
        rules[directory] = mine
        for path in sorted(directory.iterdir()):
            is_directory = path.is_dir() and not path.is_symlink()
            suffix = "/" if is_directory else ""
            checked = (each.check_file(f"{path.relative_to(base)}{suffix}").include for base, each in mine)
            said = [found for found in checked if found is not None]
            if path.name == IGNORE_FILE or (said and said[-1]):
                continue
            if is_directory:
                waiting.append(path)
            elif path.is_file() or path.is_symlink():
                yield path


def is_kept(directory: Path, name: str) -> bool:
    """Whether the file `name` of a directory of tests is there and not excluded."""
    path = directory / name
    return path.is_file() and (not (directory / IGNORE_FILE).is_file() or path in kept_files(directory))


@contextmanager
def without_ignored(directory: Path) -> Iterator[Path]:
    """`directory`, or a copy without what its `.harborignore` files exclude."""
    if not any(IGNORE_FILE in names for _, _, names in os.walk(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="pier-task-") as place:
        for path in kept_files(directory):
            target = Path(place, path.relative_to(directory))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
        yield Path(place)


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
