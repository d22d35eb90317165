"""Where tasks come from, and which of them are taken.

A source is a task directory, a directory of tasks, `URL[@REF][#PATH]` of a git repository, a `dataset.toml` or a
`registry.json` (with `#NAME[@VERSION]` if it holds several datasets). A directory is walked whether or not a
`dataset.toml` lies in it; digests are checked only when the file itself is the source. The order of tasks is by name,
the same on every machine, so that a seed always picks the same ones.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from pier.errors import TaskError, UsageError
from pier.task.dataset import find_entry, read_dataset
from pier.task.git import check_out, parse_git_reference
from pier.task.load import load_task
from pier.task.model import Origin, Task

Warn = Callable[[str], None]


def _ignore_warning(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tasks of a source are taken: globs against the names of their directories and the names that they give
    themselves, then a seeded shuffle, then the first `n_tasks`."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    n_tasks: int | None = None
    sample_seed: int | None = None


def resolve_sources(
    sources: Iterable[str | Path],
    selection: Selection | None = None,
    *,
    strict: bool = False,
    verify: bool = True,
    cache: Path | None = None,
    warn: Warn = _ignore_warning,
) -> list[Task]:
    """Read all tasks of `sources` that `selection` takes. A source without tasks is an error, and so is a pattern that
    matches no task of any source."""
    selection = selection or Selection()
    origins = [origin for source in sources for origin in find_tasks(source, cache=cache, warn=warn)]
    check_patterns(selection.include, origins)
    chosen = select(origins, selection)
    return [load_task(origin.path, strict=strict, verify=verify, origin=origin) for origin in chosen]


def find_tasks(source: str | Path, *, cache: Path | None = None, warn: Warn = _ignore_warning) -> list[Origin]:
    """Where the tasks of one source are, without reading them."""
    path = Path(source)
    text = str(source)
    if path.is_dir():
        return _in_directory(path, Origin(path), warn)
    base, _, fragment = text.partition("#")
    if Path(base).is_file():
        return _in_file(Path(base), fragment or None, cache)
    reference = parse_git_reference(text)
    if reference is None:
        raise TaskError(f"{text}: no such task, directory or repository", code="source_missing", blame="user")
    checkout = check_out(reference.url, reference.ref, cache=cache)
    found = checkout.directory / reference.path
    origin = Origin(found, git_url=checkout.url, git_commit=checkout.commit, git_path=reference.path)
    if not found.is_dir():
        raise TaskError(
            f"{text}: {reference.path!r} is not a directory at commit {checkout.commit}", code="source_missing"
        )
    return _in_directory(found, origin, warn)


def select(origins: Sequence[Origin], selection: Selection) -> list[Origin]:
    """The tasks that `selection` takes, in order of their directory's name."""
    if selection.n_tasks is not None and selection.n_tasks < 0:
        raise UsageError("the number of tasks cannot be negative")
    ordered = sorted(origins, key=lambda origin: (origin.path.name, str(origin.path)))
    kept = ordered
    if selection.include or selection.exclude:
        kept = [origin for origin in ordered if _matches(tuple(_names(origin)), selection)]
    if selection.sample_seed is not None:
        random.Random(selection.sample_seed).shuffle(kept)
    return kept if selection.n_tasks is None else kept[: selection.n_tasks]


def check_patterns(patterns: Sequence[str], origins: Sequence[Origin]) -> None:
    """Refuse a pattern that no task of any source matches: it is a typing error."""
    if not patterns:
        return
    named = [tuple(_names(origin)) for origin in origins]
    for pattern in patterns:
        if not any(_fits(names, pattern) for names in named):
            known = ", ".join(origin.path.name for origin in origins[:8])
            raise UsageError(f"no task matches {pattern!r}; there are: {known}{', ...' if len(origins) > 8 else ''}")


def _matches(names: Sequence[str], selection: Selection) -> bool:
    if selection.include and not any(_fits(names, pattern) for pattern in selection.include):
        return False
    return not any(_fits(names, pattern) for pattern in selection.exclude)


def _fits(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _names(origin: Origin) -> Iterator[str]:
    yield origin.path.name
    if origin.source:
        yield f"{origin.source}/{origin.path.name}"
    if name := _own_name(origin.path):
        yield name


def _own_name(directory: Path) -> str | None:
    """The name that a task gives itself. The rest of its file is checked when the task is loaded."""
    try:
        with (directory / "task.toml").open("rb") as stream:
            table = tomllib.load(stream).get("task")
    except (OSError, ValueError):
        return None
    name = table.get("name") if isinstance(table, dict) else None
    return name if isinstance(name, str) else None


def _in_directory(directory: Path, origin: Origin, warn: Warn) -> list[Origin]:
    if (directory / "task.toml").is_file():
        return [origin]
    children = _children_with(directory, "task.toml")
    if not children:
        deeper = sorted({path.parent.parent.name for path in directory.glob("*/*/task.toml")})
        if deeper:
            raise TaskError(
                f"{directory}: no task here, but in {len(deeper)} of its directories: {', '.join(deeper[:5])}",
                code="source_empty",
                blame="user",
                hint=f"{directory}/{deeper[0]}, or {directory}/*/ for all",
            )
        raise TaskError(
            f"{directory}: neither a task (no task.toml) nor a directory of tasks",
            code="source_empty",
            blame="user",
            hint=f"pier task init {directory}",
        )
    if (directory / "dataset.toml").is_file():
        _compare_with_dataset(directory / "dataset.toml", children, warn)
    source = directory.resolve().name
    return [_below(origin, child, source) for child in children]


def _children_with(directory: Path, name: str) -> list[Path]:
    return sorted(child for child in directory.iterdir() if (child / name).is_file())


def _compare_with_dataset(path: Path, children: Sequence[Path], warn: Warn) -> None:
    """Warn when a `dataset.toml` is out of date. The directory decides which tasks there are."""
    try:
        listed = {row.name.rpartition("/")[2] for row in read_dataset(path).tasks}
    except TaskError as error:
        warn(f"{error} (ignored: the tasks are the directories next to it)")
        return
    found = {child.name for child in children}
    if listed != found:
        counts = f"{len(found - listed)} tasks here are not listed, {len(listed - found)} listed ones are missing"
        warn(f"{path}: out of date: {counts}; give the file itself as the source to run what it lists")


def _in_file(path: Path, name: str | None, cache: Path | None) -> list[Origin]:
    if path.suffix == ".toml":
        return _in_dataset(path, Origin(path.parent))
    entry = find_entry(path, name)
    found: list[Origin] = []
    for task in entry.tasks:
        if task.git_url:
            checkout = check_out(task.git_url, task.git_commit_id, cache=cache)
            place = checkout.directory / task.path
            found.append(Origin(place, entry.name, task.git_url, checkout.commit, task.path))
        else:
            found.append(Origin(path.parent / task.path, entry.name))
    return found


def _in_dataset(path: Path, origin: Origin) -> list[Origin]:
    """The tasks of a `dataset.toml` lie in the directories next to it; digests that it gives must match."""
    dataset = read_dataset(path)
    found: list[Origin] = []
    for row in dataset.tasks:
        short = row.name.rpartition("/")[2]
        directory = next(
            (d for d in (path.parent / short, path.parent / row.name) if (d / "task.toml").is_file()), None
        )
        if directory is None:
            raise TaskError(f"{path}: the task {row.name!r} is not in {path.parent / short}", code="dataset")
        if row.digest and load_task(directory, verify=False).digest != row.digest:
            raise TaskError(f"{path}: the task {row.name!r} in {directory} does not have the digest {row.digest}")
        found.append(_below(origin, directory, dataset.dataset.name))
    return found


def _below(origin: Origin, directory: Path, source: str) -> Origin:
    git_path = None
    if origin.git_path is not None:
        git_path = str(PurePosixPath(origin.git_path) / directory.relative_to(origin.path).as_posix())
    return Origin(directory, source, origin.git_url, origin.git_commit, git_path)
