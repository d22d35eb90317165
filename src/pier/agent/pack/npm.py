"""Builds packs from npm, with the machine's `npm` and whatever registry that is set to.

A `program` in the spec names the one native file of the package that is the whole agent; without it the package and
what it depends on go in, with their own node.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from pier.agent.contract import PackSpec
from pier.errors import AgentError

NODE_VERSION = "22.23.3"


def architecture() -> str:
    """This machine's processor in npm's words."""
    return {"aarch64": "arm64"}.get(platform.machine(), "x64")


def named(template: str) -> str:
    """A package or path with this machine's architecture filled in."""
    return template.replace("{arch}", architecture())


def newest(spec: PackSpec) -> str:
    """The newest version that the registry has."""
    return run_tool(["npm", "view", "--json", named(spec.package), "version"]).strip().strip('"')


def build(spec: PackSpec, root: Path, scratch: Path) -> None:
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
    run_tool(
        [
            "npm",
            "install",
            "--ignore-scripts",
            "--omit=dev",
            "--no-audit",
            "--no-fund",
            "--no-save",
            "--no-package-lock",
            "--engine-strict=false",
            "--loglevel=error",
            what,
        ],
        cwd=directory,
    )
    return directory / "node_modules"


def run_tool(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a package tool and give its output; a failure tells the end of what it said."""
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
