"""Files that an interpreter or a test runner loads by itself, or in place of another, judged by their paths.

A project has honest reasons for its own `conftest.py` or `calendar.py`, so such a file is not proof of cheating, and it
stays. It is worth a note, because a verifier that runs next to it may do what the file says.
"""

from __future__ import annotations

import re
import sys
from pathlib import PurePosixPath

STARTUP = frozenset(f"{stem}customize{end}" for stem in ("site", "user") for end in (".py", ".pyc", ".so"))
PYTEST = frozenset({"conftest.py", "pytest.ini", "pytest.toml", ".pytest.ini"})

_DEMOS = frozenset({"test", "tests", "this", "antigravity", "idlelib", "turtledemo", "__main__"})
_INSTALLED = frozenset(
    {
        "pytest",
        "_pytest",
        "py",
        "pluggy",
        "iniconfig",
        "packaging",
        "exceptiongroup",
        "tomli",
        "pip",
        "setuptools",
        "pkg_resources",
        "wheel",
        "coverage",
        "xdist",
        "ctrf",
        "hypothesis",
        "nose",
        "nose2",
        "tox",
        "attr",
        "attrs",
        "pygments",
        "typing_extensions",
        "numpy",
        "pandas",
        "scipy",
        "requests",
        "yaml",
    }
)
"""Packages that verifiers commonly have, in addition to Python's own modules."""
_MODULES = (sys.stdlib_module_names | _INSTALLED) - _DEMOS
_CODE = (".py", ".pyc", ".so")
_RUNNERS = re.compile(
    r"((jest|vitest|vite|babel|playwright|karma|ava)\.config\.[a-z]+|\.mocharc(\.[a-z]+)?|\.babelrc(\.[a-z]+)?|\.rspec"
    r"|phpunit\.xml(\.dist)?)"
)
_RUNNER_PATHS = re.compile(
    r"/(node_modules/(\.bin/)?(jest|vitest|mocha|ava|tap|karma|playwright)(/package\.json)?|\.cargo/config(\.toml)?)$"
)
_SECTIONS = {
    "pyproject.toml": re.compile(rb"^\s*\[\s*tool\.pytest\b", re.MULTILINE),
    "setup.cfg": re.compile(rb"^\[tool:pytest\]", re.MULTILINE),
    "tox.ini": re.compile(rb"^\[pytest\]", re.MULTILINE),
    "entry_points.txt": re.compile(rb"^\[pytest11\]", re.MULTILINE),
    "package.json": re.compile(rb'"(jest|mocha|ava|vitest)"\s*:\s*[{\[]'),
}


def is_read_by_itself(path: str) -> tuple[str, str] | None:
    """The kind of a file that is read wherever it lies, and why; None if it is another."""
    name = PurePosixPath(path).name
    if name in STARTUP:
        return "startup", "Python imports this at each start"
    if name in PYTEST:
        return "pytest", "pytest reads this by itself"
    if name.endswith(".pth") and "-packages/" in path:
        return "startup", "Python may run lines of this at each start"
    if _RUNNERS.fullmatch(name) or _RUNNER_PATHS.search(path):
        return "runner", "a test runner reads this by itself"
    return None


def shadowed_module(path: str) -> str | None:
    """The module of Python, or of a test runner, that is not imported where a directory with this file is searched
    first; None if the file hides none. A package counts by its `__init__` or `__main__`."""
    file = PurePosixPath(path)
    if file.suffix not in _CODE or "__pycache__" in file.parts:
        return None
    stem = file.name.partition(".")[0]
    name = file.parent.name if stem in ("__init__", "__main__") else stem
    return name if name in _MODULES or name.startswith("pytest_") else None


def import_root(path: str) -> str:
    """The directory that must be searched for `shadowed_module` to hide a module."""
    file = PurePosixPath(path)
    is_package = file.name.partition(".")[0] in ("__init__", "__main__")
    return str(file.parent.parent if is_package else file.parent)


def may_configure(path: str) -> bool:
    """Whether a file may have a section for a test runner, which its content says."""
    return PurePosixPath(path).name in _SECTIONS


def configures(path: str, content: bytes) -> bool:
    """Whether a file that `may_configure` has such a section."""
    return _SECTIONS[PurePosixPath(path).name].search(content) is not None
