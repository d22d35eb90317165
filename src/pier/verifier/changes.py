"""Finds files of an agent that could influence a verifier: changed files of the sandbox, and files of artifacts.

Such a file does not prove cheating: projects have their own `conftest.py` or `calendar.py`. So it is noted in the
result. Changes that are never part of a solution (a replaced shell, a library that every program loads, a module that
every Python imports) are undone before the tests run.

Artifacts are copied to their original paths, next to the verifier's own files. Links that lead out of an artifact are
left out, since they would make other files (tests, an answer in the image) part of it. An artifact that covers `/tests`
or `/logs/verifier` is mixed with the verifier's own files: of its links only those to its own regular files are kept.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from pier.sandbox.contract import Change
from pier.tree import Entry, Tree, TreeError

LOGS = "/logs"
VERIFIER_LOGS = "/logs/verifier"
ARTIFACTS = "/logs/artifacts"
TESTS = "/tests"
"""Directories that exist in every sandbox of a task."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that could have influenced the verdict. `stopped`: it was undone before the verifier ran."""

    kind: str
    detail: str
    path: str | None = None
    stopped: bool = False


NOTE_LIMIT = 100
"""Maximum number of notes of one kind in a result; an agent may change a million files."""


def limited(notes: list[Note]) -> list[Note]:
    """At most `NOTE_LIMIT` notes of each kind, and the number of the others."""
    kept: list[Note] = []
    counts = Counter[str]()
    for note in notes:
        counts[note.kind] += 1
        if counts[note.kind] <= NOTE_LIMIT:
            kept.append(note)
    kept += [Note(kind, f"{n - NOTE_LIMIT} more of this kind") for kind, n in counts.items() if n > NOTE_LIMIT]
    return kept


def changed_since(before: Iterable[Change], after: Iterable[Change]) -> list[Change]:
    """The difference between two snapshots of a sandbox."""
    old = {change.path: change for change in before}
    gone = [Change(path, "removed") for path in old.keys() - {change.path for change in after}]
    return [change for change in after if old.get(change.path) != change] + gone


STARTUP = frozenset({"sitecustomize", "usercustomize"})
PYTEST = frozenset({"conftest.py", "pytest.ini", "pytest.toml", ".pytest.ini", ".pytest.toml"})

_DEMOS = frozenset({"test", "tests", "this", "antigravity", "idlelib", "turtledemo", "__main__"})
_INSTALLED_NAMES = """
    pytest _pytest py pluggy iniconfig packaging exceptiongroup tomli xdist ctrf hypothesis nose nose2 tox pip
    setuptools pkg_resources wheel coverage attr attrs pygments typing_extensions numpy pandas scipy requests yaml
"""
_INSTALLED = frozenset(_INSTALLED_NAMES.split())
"""Packages that verifiers commonly have, in addition to Python's own modules."""
_MODULES = (sys.stdlib_module_names | _INSTALLED) - _DEMOS
_CODE = (".py", ".pyc", ".so")
_RUNNERS = re.compile(
    r"((jest|vitest|vite|babel|playwright|karma|ava)\.config\.[a-z]+|vitest\.(workspace|projects)\.[a-z]+"
    r"|\.(mocha|babel|nyc|c8|tap)rc(\.[a-z]+)?|jasmine\.json|\.npmrc|\.yarnrc(\.yml)?|\.pnpmfile\.cjs|bunfig\.toml"
    r"|\.rspec(-local)?|phpunit(\.dist)?\.xml|phpunit\.xml\.dist|\.coveragerc|(nose2|unittest)\.cfg|uv\.toml)"
)
_RUNNER_PATHS = re.compile(
    r"/(node_modules/(\.bin/)?(jest|vitest|mocha|ava|tap|karma|playwright)(/package\.json)?|\.cargo/config(\.toml)?)$"
)
_LINKS = re.compile(r"node_modules|\.bin|\.cargo|(dist|site)-packages|.*\.(dist|egg)-info")
"""Directories whose name affects how their files are judged, which a link of that name would hide."""
_SECTIONS = {
    "setup.cfg": re.compile(rb"\[tool:pytest\]"),
    "tox.ini": re.compile(rb"\[pytest\]"),
    "entry_points.txt": re.compile(rb"[\[\]]pytest11[\[\]]"),
}
_TABLES = {
    "pyproject.toml": (tomllib.loads, ("tool",), {"pytest"}),
    "package.json": (json.loads, (), {"jest", "mocha", "ava", "vitest"}),
}
"""The parser of a file, the path of a table in it, and the keys of test runners in that table."""
_LONG_KEY = re.compile(rb"(?:\.[^.\n]*+){100}")
"""Possibly a dotted key, which takes quadratic time to parse."""


def is_read_by_itself(path: str) -> tuple[str, str] | None:
    """The kind and reader of a file that programs read in any directory; None for other files."""
    name = PurePosixPath(path).name
    if is_startup(path):
        return "startup", "Python imports this at each start"
    if name in PYTEST:
        return "pytest", "pytest reads this by itself"
    if name.endswith(".pth") and "-packages/" in path:
        return "startup", "Python may run lines of this at each start"
    if _RUNNERS.fullmatch(name) or _RUNNER_PATHS.search(path):
        return "runner", "a test runner reads this by itself"
    return None


def is_startup(path: str) -> bool:
    """Whether this is a module or package that Python imports at each start."""
    file = PurePosixPath(path)
    if file.name in STARTUP:  # a directory, or a link to one
        return True
    stem = file.name.partition(".")[0] if file.suffix == ".so" else file.stem
    return file.suffix in _CODE and (file.parent.name if stem == "__init__" else stem) in STARTUP


def shadowed_module(path: str) -> str | None:
    """The module of Python or of a test runner that this file replaces in imports; None if it replaces none. A package
    is judged by its `__init__` or `__main__`."""
    file = PurePosixPath(path)
    if file.suffix not in _CODE or "__pycache__" in file.parts:
        return None
    stem = file.name.partition(".")[0]
    name = file.parent.name if stem in ("__init__", "__main__") else stem
    return name if name in _MODULES or name.startswith("pytest_") else None


def import_root(path: str) -> str:
    """The directory that must be on the module search path for `shadowed_module` to take effect."""
    file = PurePosixPath(path)
    is_package = file.name.partition(".")[0] in ("__init__", "__main__")
    return str(file.parent.parent if is_package else file.parent)


def may_configure(path: str) -> bool:
    """Whether a file of this name can configure a test runner, depending on its content."""
    return PurePosixPath(path).name in _SECTIONS.keys() | _TABLES.keys()


def configures(path: str, content: bytes) -> bool:
    """Whether a file that `may_configure` configures a test runner; also if it cannot be parsed."""
    name = PurePosixPath(path).name
    if name in _SECTIONS:
        return _SECTIONS[name].search(content) is not None
    parse, keys, runners = _TABLES[name]
    if parse is tomllib.loads and _LONG_KEY.search(content):
        return True
    try:
        table = parse(content.decode("utf-8-sig"))
        for key in keys:
            table = table.get(key, {})
        return any(isinstance(table[key], dict | list) for key in runners & table.keys())
    except (ValueError, RecursionError, AttributeError):
        return True


Action = Literal["note", "remove", "restore"]

BIN_DIRECTORIES = tuple(f"{base}{name}" for base in ("/", "/usr/", "/usr/local/") for name in ("bin", "sbin"))
SHELLS = frozenset({"sh", "bash", "dash", "ash", "busybox", "env"})
TOOLS = frozenset(
    {"cat", "chmod", "cp", "find", "grep", "ln", "ls", "mkdir", "mv", "rm", "sed", "tee", "test", "touch", "true"}
)
_RUNTIMES = re.compile(
    r"(python|pypy|node|npm|npx|uv|uvx|pip|pytest|perl|ruby|java|go|cargo|rustc|gcc|make|curl)[\d.]*"
)
_LOADER = re.compile(r"(/usr)?/lib(32|64)?/(.*/)?(ld-linux[^/]*|ld-musl[^/]*|libc\.so\.6|libc\.musl[^/]*)")
_PROFILES = frozenset({".bashrc", ".bash_profile", ".profile", ".bash_login", ".zshenv", ".pythonrc"})
_PROFILE_PATHS = ("/etc/profile", "/etc/bash.bashrc", "/etc/environment", "/etc/profile.d/", "/etc/zsh/")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A path that an agent changed, why it matters, and the action to take."""

    kind: str
    path: str
    detail: str
    action: Action = "note"


def judge(changed: Iterable[Change], *, workdir: str) -> list[Suspicion]:
    """The entries of `changed` that could influence a verifier."""
    judged = (_judge(change, workdir) for change in sorted(changed, key=lambda change: change.path))
    return [suspicion for suspicion in judged if suspicion is not None]


def _judge(change: Change, workdir: str) -> Suspicion | None:
    path, name, added = change.path, PurePosixPath(change.path).name, change.kind == "added"
    inside = workdir != "/" and path.startswith(workdir.rstrip("/") + "/")
    if str(PurePosixPath(path).parent) in BIN_DIRECTORIES:
        return _judge_program(path, name, added)
    if change.kind == "removed":
        return None
    if path == "/etc/ld.so.preload":
        return Suspicion("loader", path, "every program loads the libraries named here", "remove")
    if path.startswith("/etc/ld.so.conf") or _LOADER.fullmatch(path):
        return Suspicion("loader", path, "this decides which libraries programs load")
    if (known := is_read_by_itself(path)) is not None:
        return Suspicion(known[0], path, known[1], _undo(path, added, inside))
    # New directories are not listed, so a name without a suffix may be a link to one.
    code = path if PurePosixPath(path).suffix else f"{path}/__init__.py"
    if import_root(code) == workdir and (module := shadowed_module(code)) is not None:
        return Suspicion("module", path, f"Python may import this in place of the module {module}")
    if path.startswith(_PROFILE_PATHS) or (name in _PROFILES and not inside):
        return Suspicion("profile", path, "shells may read this at their start")
    return None


def _undo(path: str, added: bool, inside: bool) -> Action:
    if is_startup(path) and not inside:
        return "remove" if added else "restore" if PurePosixPath(path).suffix else "note"
    return "remove" if PurePosixPath(path).name in PYTEST and added and path.count("/") == 1 else "note"


def _judge_program(path: str, name: str, added: bool) -> Suspicion | None:
    if not added and name in SHELLS | TOOLS:
        return Suspicion("program", path, "a program that verifiers rely on was replaced", "restore")
    if added and name in SHELLS | TOOLS and path.startswith("/usr/local/"):
        return Suspicion("program", path, "it takes precedence over a program that verifiers rely on", "remove")
    if _RUNTIMES.fullmatch(name):
        return Suspicion("program", path, "verifiers may run this" if added else "verifiers may run what was replaced")
    return None


_OWN = (TESTS, VERIFIER_LOGS)
_CONFIG_LIMIT = 128 * 1024
_CONFIGS_LIMIT = 2 * 1024 * 1024
"""Limits on one configuration file and on all of them. Files beyond them are noted unread: parsing 128 KiB takes a
second."""


@dataclass(frozen=True, slots=True)
class JudgedArtifact:
    """Paths below the artifact that are left out, and notes. `dropped`: the whole artifact is left out."""

    left_out: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()
    dropped: bool = False


def judge_artifact(kept: Tree, place: str, source: str, workdir: str = "/") -> JudgedArtifact:
    """Judge the artifact at `place` below `kept`, whose absolute path in the sandbox is `source`. `workdir` is the
    working directory of the verifier."""
    top = kept.find(place)
    if top is None or top.kind == "other":
        return JudgedArtifact(dropped=True)
    if top.kind == "link":
        return JudgedArtifact(notes=(_left_out(source, top.leads),), dropped=True)
    entries = [top, *(kept.entries(below=place) if top.kind == "directory" else ())]
    paths = [str(PurePosixPath(source, entry.path[len(place) :].lstrip("/"))) for entry in entries]
    mixed = any(PurePosixPath(own).is_relative_to(source) for own in _OWN)
    files = {path for path, entry in zip(paths, entries, strict=True) if entry.kind == "file" and not _is_own(path)}
    left_out: set[str] = set()
    notes: list[Note] = []
    judged: dict[str, Entry] = {}
    for path, entry in zip(paths, entries, strict=True):
        if entry.kind == "link" and _leads_out(path, entry.leads, source):
            notes.append(_left_out(path, entry.leads))
        elif entry.kind == "link" and mixed and _target(path, entry.leads) not in files:
            notes.append(_left_out(path, entry.leads, "it may lead to the verifier's own files"))
        elif _is_own(path):
            notes.append(Note("tests", "left out of an artifact: this path is the verifier's own", path, stopped=True))
        else:
            judged[path] = entry
            continue
        left_out.add(entry.path[len(place) :].lstrip("/"))
    return JudgedArtifact(frozenset(left_out), (*notes, *_steering(kept, judged, {source, workdir})))


def _left_out(path: str, leads: str, why: str = "it leads out of it") -> Note:
    return Note("link", f"left out of an artifact: {why}, to {leads}", path, stopped=True)


def _is_own(path: str) -> bool:
    """Whether a path is the verifier's own."""
    return any(PurePosixPath(path).is_relative_to(own) for own in _OWN)


def _target(path: str, leads: str) -> str:
    """The target of a link, if no directory on its path is a link."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), leads))


def _leads_out(path: str, leads: str, source: str) -> bool:
    """Whether a link may lead out of the artifact. A path with `..` after a name may: the name may be a link too."""
    parts = [part for part in PurePosixPath(leads).parts if part != "."]
    if leads.startswith("/"):
        return ".." in parts or not PurePosixPath(leads).is_relative_to(source)
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(PurePosixPath(path).relative_to(source).parts) - 1
    return ups > depth or ".." in parts[ups:]


def _steering(kept: Tree, judged: dict[str, Entry], searched: set[str]) -> Iterator[Note]:
    """Notes on files that the verifier may load by itself. Modules in a package may have any name but a test runner's,
    unless the package is one of the directories `searched` for imports."""
    packages = {str(PurePosixPath(path).parent) for path in judged if PurePosixPath(path).name == "__init__.py"}
    packages -= searched
    left = _CONFIGS_LIMIT
    for path, entry in judged.items():
        if entry.kind == "directory":
            continue
        if (known := is_read_by_itself(path)) is not None:
            yield Note(known[0], known[1], path)
        elif entry.kind == "link" and (detail := _behind_link(path)):
            yield Note(*detail, path)
        elif may_configure(path) and entry.kind == "file":
            left -= min(entry.size, _CONFIG_LIMIT)
            if left < 0:
                yield Note("runner", "it may configure a test runner", path)
            elif _configures(kept, entry):
                yield Note("runner", "it configures a test runner", path)
        elif (module := shadowed_module(path)) and (module in _INSTALLED or import_root(path) not in packages):
            yield Note("module", f"Python may import this in place of the module {module}", path)


def _behind_link(path: str) -> tuple[str, str] | None:
    """The kind and detail of a note on a link to a package, a configuration, or a directory of these."""
    if may_configure(path) or _LINKS.fullmatch(PurePosixPath(path).name):
        return "runner", "it may configure a test runner, from another place of the artifact"
    if module := shadowed_module(f"{path}/__init__.py"):
        return "module", f"Python may import this in place of the module {module}"
    return None


def _configures(kept: Tree, entry: Entry) -> bool:
    try:
        return configures(entry.path, kept.read(entry.path, _CONFIG_LIMIT))
    except TreeError:
        return True
