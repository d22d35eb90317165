"""Builds packs from npm and PyPI, with the machine's `npm` and `pip` and the registries that these are set to.

npm: a `program` in the spec names the one native file of the package that is the whole agent; without it the package
and what it depends on go in, with their own node. PyPI: a copy of a Python of this machine with its standard library,
and the package. Python finds its library from where its program stands, so the copy needs no variables. Byte code is
compiled once with hashes that are never checked: a read-only pack would compile it at every start.
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


def architecture() -> str:
    """This machine's processor in npm's words."""
    return {"aarch64": "arm64"}.get(platform.machine(), "x64")


def named(template: str) -> str:
    """A package or path with this machine's architecture filled in."""
    return template.replace("{arch}", architecture())


def build_from_npm(spec: PackSpec, root: Path, scratch: Path) -> None:
    """Put the package below `root`."""
    modules = _install(f"{named(spec.package)}@{spec.version}", scratch / "agent")
    if spec.program:
        program = _native(spec, modules)
        (root / "bin").mkdir()
        (scratch / "agent" / program).rename(root / "bin" / spec.program.rpartition("/")[2])
        (root / "bin" / spec.program.rpartition("/")[2]).chmod(0o755)
        return
    modules.rename(root / "node_modules")
    node = _install(f"node-linux-{architecture()}@{NODE_VERSION}", scratch / "node")
    (root / "bin").mkdir()
    (node / f"node-linux-{architecture()}" / "bin" / "node").rename(root / "bin" / "node")


def _native(spec: PackSpec, modules: Path) -> Path:
    pattern = named(spec.program)
    found = sorted(modules.parent.glob(f"node_modules/{pattern}"))
    if not found:
        raise AgentError(
            f"{spec.package}@{spec.version} has no program {pattern} for this machine",
            code="pack",
            blame="infra",
            hint=f"pier agent pack with another version of {spec.package}",
        )
    return found[0]


def _install(what: str, directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "package.json").write_text(json.dumps({"name": "pack", "private": True}))
    quiet = ["--no-audit", "--no-fund", "--no-save", "--no-package-lock", "--engine-strict=false", "--loglevel=error"]
    run_tool(["npm", "install", "--ignore-scripts", "--omit=dev", *quiet, what], cwd=directory)
    return directory / "node_modules"


def run_tool(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a package tool and give its output; a failure shows the end of that."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise AgentError(
            f"{command[0]} is needed to build this pack", code="pack", blame="infra", hint=f"install {command[0]}"
        ) from error
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-2000:]
        raise AgentError(
            f"{' '.join(command[:3])} failed:\n{tail}", code="pack", blame="infra", retryable=True, hint="try again"
        )
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
    """The newest version that the registry has; of PyPI, for the Python that the pack would get."""
    if spec.source == "npm":
        return run_tool(["npm", "view", "--json", named(spec.package), "version"]).strip().strip('"')
    python = find_python(spec.pythons)
    pip = [str(python.program), "-m", "pip", "install"]
    report = run_tool([*pip, "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", spec.package])
    return json.loads(report)["install"][0]["metadata"]["version"]


def build_from_pypi(spec: PackSpec, root: Path, scratch: Path) -> None:
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


def build(spec: PackSpec, root: Path, scratch: Path) -> None:
    """Put the package of `spec` below `root`."""
    (build_from_npm if spec.source == "npm" else build_from_pypi)(spec, root, scratch)
