"""Builds packs from npm and PyPI with this machine's `npm` and `pip` and their configured registries.

npm: if the spec names a `program`, the pack holds that one native file; else the package, its dependencies and node.
PyPI: a copy of one of this machine's Pythons with its standard library, and the package. Python locates its library
relative to its program, so the copy needs no variables. Byte code is compiled once, with hashes that are never checked:
Python could not cache it in a read-only pack and would compile it at every start.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pier.agent.contract import PACK_PATH, PackSpec
from pier.errors import AgentError

NODE_VERSION = "22.23.3"


ARCHITECTURE = {"aarch64": "arm64"}.get(platform.machine(), "x64")
"""This machine's processor by npm's name."""


def named(template: str) -> str:
    """A package or path with this machine's architecture filled in."""
    return template.replace("{arch}", ARCHITECTURE)


def pack_error(message: str, hint: str | None = None) -> AgentError:
    """The error for a pack that cannot be built on this machine."""
    return AgentError(message, code="pack", blame="infra", hint=hint)


def _build_from_npm(spec: PackSpec, root: Path, scratch: Path) -> None:
    modules = _install(f"{named(spec.package)}@{spec.version}", scratch / "agent")
    (root / "bin").mkdir()
    if not spec.program:
        modules.rename(root / "node_modules")
        node = _install(f"node-linux-{ARCHITECTURE}@{NODE_VERSION}", scratch / "node")
        (node / f"node-linux-{ARCHITECTURE}" / "bin" / "node").rename(root / "bin" / "node")
        return
    programs = sorted(modules.glob(named(spec.program)))
    if not programs:
        raise pack_error(
            f"{spec.package}@{spec.version} has no program {named(spec.program)} for this machine",
            f"pier agent pack with another version of {spec.package}",
        )
    program = programs[0].rename(root / "bin" / spec.program.rpartition("/")[2])
    program.chmod(0o755)


def _install(package: str, directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "package.json").write_text(json.dumps({"name": "pack", "private": True}))
    quiet = ["--no-audit", "--no-fund", "--no-save", "--no-package-lock", "--engine-strict=false", "--loglevel=error"]
    _run_tool(["npm", "install", "--ignore-scripts", "--omit=dev", *quiet, package], cwd=directory)
    return directory / "node_modules"


def _run_tool(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a package tool and return its output. The error shows the end of it."""
    try:
        environ = {**os.environ, **(env or {})}
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise pack_error(f"{command[0]} is needed to build this pack", f"install {command[0]}") from error
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-2000:]
        message = f"{' '.join(command[:3])} failed:\n{tail}"
        raise AgentError(message, code="pack", blame="infra", retryable=True, hint="try again")
    return done.stdout


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
    """The newest version in the registry; from PyPI, the newest for the pack's Python."""
    if spec.source == "npm":
        return _run_tool(["npm", "view", "--json", named(spec.package), "version"]).strip().strip('"')
    python = find_python(spec.pythons)
    pip = [str(python.program), "-m", "pip", "install"]
    report = _run_tool([*pip, "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", spec.package])
    return json.loads(report)["install"][0]["metadata"]["version"]


def _build_from_pypi(spec: PackSpec, root: Path, scratch: Path) -> None:
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
    pinned = [f"{spec.package}=={spec.version}", *spec.extras]
    _run_tool([*pip, "--prefer-binary", "--target", str(packages), *pinned], env={"TMPDIR": str(scratch)})
    shutil.rmtree(packages / "bin", ignore_errors=True)
    # Some files are not meant to compile (templates, syntax of other versions), so failures are ignored.
    command = [str(python.program), "-m", "compileall", "-qq", "-j", "2", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, "-s", str(root), "-p", PACK_PATH, str(library)], capture_output=True)


def find_python(minors: tuple[str, ...]) -> Python:
    """The first Python of this machine with one of the versions `minors`, in order of preference."""
    for minor in minors:
        for candidate in _candidates(minor):
            python = _probe(candidate)
            if python is not None and python.minor == minor:
                return python
    raise pack_error(f"no Python {' or '.join(minors)} with pip on this machine", f"install python{minors[0]}")


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
    done = subprocess.run([str(program), "-I", "-c", _PROBE], capture_output=True, text=True)
    if done.returncode or subprocess.run([str(program), "-m", "pip", "--version"], capture_output=True).returncode:
        return None
    executable, prefix, library, minor = json.loads(done.stdout)
    return Python(Path(executable), Path(prefix), Path(library), minor)


def build(spec: PackSpec, root: Path, scratch: Path) -> None:
    """Put the package of `spec` below `root`."""
    (_build_from_npm if spec.source == "npm" else _build_from_pypi)(spec, root, scratch)
