"""Builds packs from PyPI: a copy of a Python of this machine, its standard library, and the package.

Python finds its library from where its program stands, so the copy needs no variables and no virtual environment.
Byte code is compiled once with hashes that are never checked: a read-only pack would compile it at every start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pier.agent.contract import PACK_PATH, PackSpec
from pier.agent.pack.npm import run_tool
from pier.errors import AgentError

_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo", "config-*")
_PROBE = (
    "import json, sys, sysconfig as s; print(json.dumps([sys.executable, sys.base_prefix, s.get_path('stdlib'),"
    " '%d.%d' % sys.version_info[:2]]))"
)


@dataclass(frozen=True, slots=True)
class Python:
    """A Python on this machine."""

    program: Path
    prefix: Path
    library: Path
    minor: str


def newest(spec: PackSpec) -> str:
    """The newest version that the index has for the Python that the pack would get."""
    python = find_python(spec.pythons)
    pip = [str(python.program), "-m", "pip", "install"]
    report = run_tool([*pip, "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", spec.package])
    return json.loads(report)["install"][0]["metadata"]["version"]


def build(spec: PackSpec, root: Path, scratch: Path) -> None:
    """Put Python and the package below `root`."""
    python = find_python(spec.pythons)
    home = root / "python"
    library = home / "lib" / f"python{python.minor}"
    shutil.copytree(python.library, library, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (home / "bin").mkdir()
    shutil.copyfile(python.program.resolve(), home / "bin" / "python3")
    (home / "bin" / "python3").chmod(0o755)
    for shared in python.prefix.glob(f"lib/libpython{python.minor}*.so*"):
        (root / "lib").mkdir(exist_ok=True)
        shutil.copyfile(shared.resolve(), root / "lib" / shared.name)
    packages = library / "site-packages"
    pip = [str(python.program), "-m", "pip", "install", "--quiet", "--no-compile", "--no-warn-script-location"]
    what = [f"{spec.package}=={spec.version}", *spec.extras]
    run_tool([*pip, "--prefer-binary", "--target", str(packages), *what], env={"TMPDIR": str(scratch)})
    shutil.rmtree(packages / "bin", ignore_errors=True)
    _compile(python, library, root)


def _compile(python: Python, library: Path, root: Path) -> None:
    """Files that do not compile (templates, other versions' syntax) are expected, so failures are not reported."""
    command = [str(python.program), "-m", "compileall", "-qq", "-j", "2", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, "-s", str(root), "-p", PACK_PATH, str(library)], capture_output=True)


def find_python(minors: tuple[str, ...]) -> Python:
    """The first Python of this machine whose version is one of `minors`, in that order."""
    for minor in minors:
        for candidate in _candidates(minor):
            found = _probe(candidate)
            if found is not None and found.minor == minor:
                return found
    raise AgentError(
        f"no Python {' or '.join(minors)} with pip is on this machine",
        code="pack",
        blame="infra",
        hint=f"install python{minors[0]}",
    )


def _candidates(minor: str) -> Iterator[Path]:
    if sys.version_info[:2] == tuple(int(part) for part in minor.split(".")):
        yield Path(sys.executable)
    home = Path.home()
    roots = [Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions", home / ".local/share/uv/python"]
    for root in roots:
        yield from sorted(root.glob(f"*{minor}*/bin/python{minor}"), reverse=True)
    for directory in os.environ.get("PATH", os.defpath).split(":"):
        yield Path(directory) / f"python{minor}"


def _probe(program: Path) -> Python | None:
    if not program.is_file():
        return None
    found = subprocess.run([str(program), "-I", "-c", _PROBE], capture_output=True, text=True)
    if (
        found.returncode != 0
        or subprocess.run([str(program), "-m", "pip", "--version"], capture_output=True).returncode
    ):
        return None
    executable, prefix, library, minor = json.loads(found.stdout)
    return Python(Path(executable), Path(prefix), Path(library), minor)
