"""A stand-in for `docker compose`, for the calls that Harbor makes, so that Harbor's own code runs on a real engine
where compose is not installed.

`install` puts a program named `docker` into a directory that goes first on PATH. It turns `docker compose` into calls
of the real client and hands everything else to it. A trial has one container; Harbor's side container that closes the
network is replaced by the engine's own network `none`, and a policy that would need more is refused. As with compose,
a container that is taken down has ten seconds to end by itself.

    python tests/harbor_compose.py DIRECTORY      install it there by hand
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

MAIN = "main"
SIDE = "harbor-docker-egress-control-sidecar"
DOCKER, NETWORK, STOP = "HARBOR_COMPOSE_DOCKER", "HARBOR_COMPOSE_NETWORK", "HARBOR_COMPOSE_STOP_SECONDS"
PACKAGES = "HARBOR_COMPOSE_PACKAGES"
"""The real client; the network of trials that ask for a public one; how long a container may take to end; where the
package is that reads YAML, which only some calls need."""

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))")


def install(directory: Path) -> dict[str, str]:
    """Put the program into `directory`; what comes back goes into the environment of `harbor`."""
    real = shutil.which("docker")
    if real is None:
        raise FileNotFoundError("the docker client is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "docker"
    ours = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve())])
    program.write_text(
        f'#!/bin/sh\ncase "$1" in\ncompose | buildx | container) exec {ours} "$@" ;;\nesac\n'
        f'exec {shlex.quote(real)} "$@"\n'
    )
    program.chmod(0o755)
    import yaml

    packages = str(Path(yaml.__file__).parents[1])
    return {"PATH": f"{directory}:{os.environ['PATH']}", DOCKER: real, PACKAGES: packages}


def install_if_missing(directory: Path) -> dict[str, str]:
    """`install`, unless the client has compose already."""
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return {} if found.returncode == 0 else install(directory)


class Project:
    """One trial: its name and, read when they are needed, what its compose files say."""

    def __init__(self, name: str, files: list[str]) -> None:
        self.name = name
        self._files = files
        self._services: dict[str, dict[str, Any]] | None = None

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        if self._services is None:
            self._services = merged(self._files)
        return self._services

    @property
    def main(self) -> dict[str, Any]:
        return self.services.get(MAIN, {})

    @property
    def container(self) -> str:
        return f"{self.name}-{MAIN}-1"

    @property
    def built_image(self) -> str:
        return f"{self.name}-{MAIN}"

    @property
    def image(self) -> str:
        return self.main.get("image") or self.built_image


def main(arguments: list[str]) -> int:
    match arguments:
        case ["compose", *rest]:
            return compose(rest)
        case ["container", "run", "--rm", image, "sh", "-c", script] if image.startswith("alpine:") and "NFT" in script:
            return 0  # whether the kernel can do what Harbor's side container does: it is not needed here
        case ["buildx", "build", *rest] if SIDE in rest[-1]:
            return make_empty_image(rest)
        case [directory] if not directory.startswith("-"):
            print("\n".join(f"{key}={value}" for key, value in install(Path(directory)).items()))
            return 0
        case _:
            return hand_over(*arguments)


def compose(arguments: list[str]) -> int:
    """One call of `docker compose`."""
    project, command, rest = parse(arguments)
    match command:
        case "build":
            network = os.environ.get(NETWORK, "none")
            return docker(
                "build", "--quiet", "--network", network, "-t", project.image, project.main["build"]["context"]
            )
        case "up":
            return up(project)
        case "exec":
            return execute(project, rest)
        case "cp":
            paths = [re.sub(rf"^{MAIN}:", f"{project.container}:", path) for path in rest if not path.startswith("-")]
            return hand_over("cp", *paths)
        case "down" | "stop":
            return end(project, remove=command == "down", with_image="--rmi" in rest)
        case "ps":
            return hand_over("ps", "--filter", f"name=^{project.container}$", *rest)
        case _:
            return refuse(f"compose {command} is not something that Harbor was seen to ask for")


def parse(arguments: list[str]) -> tuple[Project, str, list[str]]:
    """The project, the command and its own arguments."""
    files: list[str] = []
    name, left = "", list(arguments)
    while left and left[0].startswith("-"):
        option, value = left.pop(0), left.pop(0)
        if option == "-f":
            files.append(value)
        elif option == "--project-name":
            name = value
    return Project(name, files), left[0], left[1:]


def merged(files: list[str]) -> dict[str, dict[str, Any]]:
    """The services of all files: later ones win, and lists and tables grow."""
    sys.path.append(os.environ[PACKAGES])
    import yaml

    services: dict[str, dict[str, Any]] = {}
    for file in files:
        document = filled(yaml.safe_load(Path(file).read_text()) or {}, os.environ)
        for name, service in (document.get("services") or {}).items():
            into = services.setdefault(name, {})
            for key, value in (service or {}).items():
                before = into.get(key)
                if isinstance(before, dict) and isinstance(value, dict):
                    into[key] = before | value
                elif isinstance(before, list) and isinstance(value, list) and key == "volumes":
                    into[key] = before + value
                else:
                    into[key] = value
    return services


def filled(value: Any, environ: Mapping[str, str]) -> Any:
    """`value` with its `${VARIABLES}` put in."""

    def found(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        return "$" if name is None else environ.get(name) or match["default"] or ""

    if isinstance(value, dict):
        return {key: filled(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, environ) for item in value]
    return _VARIABLE.sub(found, value) if isinstance(value, str) else value


def up(project: Project) -> int:
    """Make and start the container."""
    if others := set(project.services) - {MAIN, SIDE}:
        return refuse(f"services beside {MAIN} are not run: {', '.join(sorted(others))}")
    mode = project.services.get(SIDE, {}).get("environment", {}).get("EGRESS_CONTROL_INITIAL_NETWORK_MODE")
    if mode not in (None, "no-network"):
        return refuse(f"the network mode {mode!r} needs Harbor's side container")
    options = list(run_options(project, closed=mode is not None))
    command = project.main.get("command") or []
    return docker("run", "--detach", *options, project.image, *(command if isinstance(command, list) else [command]))


def run_options(project: Project, *, closed: bool) -> Iterator[str]:
    yield from ("--name", project.container, "--label", f"com.docker.compose.project={project.name}")
    yield from ("--network", "none" if closed else os.environ.get(NETWORK, "none"), "--pull", "never")
    for key, option in {"cpus": "--cpus", "mem_limit": "--memory", "user": "--user"}.items():
        if (value := project.main.get(key)) is not None:
            yield from (option, str(value))
    for key, value in (project.main.get("environment") or {}).items():
        yield from ("--env", f"{key}={value}")
    for volume in project.main.get("volumes") or []:
        if volume["type"] != "bind":
            refuse(f"a mount of the type {volume['type']!r} is not made")
        Path(volume["source"]).mkdir(parents=True, exist_ok=True)
        readonly = ",readonly" if volume.get("read_only") else ""
        yield from ("--mount", f"type=bind,source={volume['source']},target={volume['target']}{readonly}")


def execute(project: Project, arguments: list[str]) -> int:
    """Run a command in the container, with the client in this one's place."""
    options, left = [], list(arguments)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option in ("-w", "-e", "-u"):
            options += [option, left.pop(0)]
    service, *command = left
    if service == SIDE:
        return 0 if command == ["network-policy", "deny-all"] else refuse(f"{shlex.join(command)}: no side container")
    return hand_over("exec", "-i", *options, project.container, *command)


def end(project: Project, *, remove: bool, with_image: bool) -> int:
    """Stop the container, as compose does, and remove it."""
    stopped = docker("stop", "--time", os.environ.get(STOP, "10"), project.container, quiet=True)
    if not remove:
        return stopped
    docker("rm", "--force", "--volumes", project.container, quiet=True)
    if with_image:
        docker("rmi", project.built_image, quiet=True)
    return 0


def make_empty_image(arguments: list[str]) -> int:
    """An image without content under the name that Harbor's side container would have."""
    name = next(part for part in ",".join(arguments).split(",") if part.startswith("name=")).removeprefix("name=")
    nothing = bytes(1024)
    return subprocess.run([os.environ[DOCKER], "import", "-", name], input=nothing, check=False).returncode


def docker(*arguments: str, quiet: bool = False) -> int:
    where = subprocess.DEVNULL if quiet else None
    env = {**os.environ, "DOCKER_BUILDKIT": "0"}
    return subprocess.run([os.environ[DOCKER], *arguments], env=env, stdout=where, stderr=where, check=False).returncode


def hand_over(*arguments: str) -> NoReturn:
    os.execv(os.environ[DOCKER], ["docker", *arguments])


def refuse(why: str) -> NoReturn:
    sys.exit(f"harbor_compose: {why}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
