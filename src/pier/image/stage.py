"""The state of one build stage, the instructions that only change settings, and the interface that RUN needs.

The interface is a seam: sandboxes are built on images, so the builder cannot import them.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from pier.errors import ImageError, PierError
from pier.image.dockerfile import Dockerfile, Instruction, expand, split
from pier.image.model import Image, ImageConfig
from pier.network.policy import PUBLIC, NetworkPolicy

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_NANOSECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


_LISTS = ("exposed_ports", "volumes")
_SETTINGS = tuple(each.name for each in fields(ImageConfig) if each.name != "on_build")
"""What a stage takes over from its base."""


@dataclass(slots=True)
class BuildStage:
    """What a stage has come to: its layers (lowest first) and the settings of its image. `host_key` names what of the
    machine's root lies below them, if it does."""

    layers: list[Path] = field(default_factory=list)
    on_host: bool = False
    host_key: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    labels: dict[str, str] = field(default_factory=dict)
    exposed_ports: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    stop_signal: str = ""
    healthcheck: dict[str, Any] | None = None
    args: dict[str, str] = field(default_factory=dict)
    has_cmd: bool = False

    @classmethod
    def start(cls, image: Image, host_key: str) -> BuildStage:
        """A stage on top of an image."""
        settings = {name: getattr(image.config, name) for name in _SETTINGS}
        copies = {name: dict(settings[name]) for name in ("env", "labels")}
        lists = {name: list(settings[name]) for name in _LISTS}
        return cls(list(image.layers), image.is_host, host_key, **{**settings, **copies, **lists})

    @property
    def key(self) -> str:
        """What the files of the stage are, for cache keys: the same layers on the same base have the same."""
        return key_of(self.host_key, [layer.parent.name for layer in self.layers])

    def config(self) -> ImageConfig:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        lists = {name: tuple(settings[name]) for name in _LISTS}
        return ImageConfig(**{**settings, "env": dict(self.env), "labels": dict(self.labels), **lists})

    def image(self) -> Image:
        """The stage so far, for a step to run on."""
        return Image("build", f"sha256:{self.key}", tuple(self.layers), self.config(), self.on_host)

    def places(self) -> list[str]:
        """The directories to look into for what the image holds, lowest first."""
        return (["/"] if self.on_host else []) + [str(layer) for layer in self.layers]

    def values(self) -> dict[str, str]:
        """The variables that instructions see: ENV goes before ARG."""
        return {"PATH": DEFAULT_PATH, **self.args, **self.env}

    def path(self, text: str) -> str:
        """An absolute path; a relative one starts at the working directory. A slash at the end is kept."""
        joined = posixpath.normpath(posixpath.join("/", self.workdir, text))
        joined = "/" + joined.lstrip("/")
        is_directory = text.endswith(("/", "/.")) or text in (".", "")
        return joined.rstrip("/") + "/" if is_directory else joined


def key_of(*parts: object) -> str:
    """A cache key from plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


Apply = Callable[[BuildStage, Instruction, Dockerfile], None]


def _env(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.env.update(pairs(instruction, file, stage.values()))


def _label(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.labels.update(pairs(instruction, file, stage.values()))


def _user(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.user = expand(instruction.text, stage.values(), file.escape).strip()


def _command(stage: BuildStage, instruction: Instruction) -> tuple[str, ...]:
    words = instruction.exec_form
    return tuple(words) if words is not None else (*stage.shell, instruction.text)


def _cmd(stage: BuildStage, instruction: Instruction, _: Dockerfile) -> None:
    stage.cmd = _command(stage, instruction)
    stage.has_cmd = True


def _entrypoint(stage: BuildStage, instruction: Instruction, _: Dockerfile) -> None:
    stage.entrypoint = _command(stage, instruction)
    if not stage.has_cmd:
        stage.cmd = ()


def _shell(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    words = instruction.exec_form
    if not words:
        raise file.error(instruction, 'SHELL needs a JSON array such as ["/bin/bash", "-c"]')
    stage.shell = tuple(words)


def _expose(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    for word in split(instruction.text, file.escape):
        port = expand(word, stage.values(), file.escape)
        port = port if "/" in port else f"{port}/tcp"
        if not re.fullmatch(r"\d+(-\d+)?/(tcp|udp|sctp)", port.lower()):
            raise file.error(instruction, f"{word!r} is not a port such as 80 or 53/udp")
        if port.lower() not in stage.exposed_ports:
            stage.exposed_ports.append(port.lower())


def _volume(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    words = instruction.exec_form
    if words is None:
        words = split(instruction.text, file.escape)
    for word in words:
        path = expand(word, stage.values(), file.escape)
        if path not in stage.volumes:
            stage.volumes.append(path)


def _stop_signal(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.stop_signal = expand(instruction.text, stage.values(), file.escape)


def _maintainer(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    """Docker keeps the name outside of the settings; nothing here reads it."""


def _healthcheck(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    kind, _, rest = instruction.text.partition(" ")
    if kind.upper() == "NONE":
        stage.healthcheck = {"Test": ["NONE"]}
        return
    if kind.upper() != "CMD" or not rest.strip():
        raise file.error(instruction, "HEALTHCHECK needs NONE or CMD and a command")
    inner = Instruction("CMD", rest.strip(), instruction.line)
    words = inner.exec_form
    check: dict[str, Any] = {"Test": ["CMD", *words] if words is not None else ["CMD-SHELL", inner.text]}
    names = {
        "interval": "Interval",
        "timeout": "Timeout",
        "start-period": "StartPeriod",
        "start-interval": "StartInterval",
    }
    for name, value in instruction.flags:
        if name == "retries":
            if not value.isdigit():
                raise file.error(instruction, f"--retries={value} is not a number")
            check["Retries"] = int(value)
        else:
            check[names[name]] = _duration(value, instruction, file)
    stage.healthcheck = check


def _duration(text: str, instruction: Instruction, file: Dockerfile) -> int:
    if not text or _DURATION.sub("", text):
        raise file.error(instruction, f"{text!r} is not a duration such as 30s or 1m30s")
    return int(sum(float(number) * _NANOSECONDS[unit] for number, unit in _DURATION.findall(text)))


SETTINGS: dict[str, Apply] = {
    "ENV": _env,
    "LABEL": _label,
    "USER": _user,
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "SHELL": _shell,
    "EXPOSE": _expose,
    "VOLUME": _volume,
    "STOPSIGNAL": _stop_signal,
    "HEALTHCHECK": _healthcheck,
    "MAINTAINER": _maintainer,
}
"""The instructions that change no file."""


def pairs(instruction: Instruction, file: Dockerfile, values: dict[str, str]) -> dict[str, str]:
    """`key=value ...`, or the old form `key value` where everything after the key is the value."""
    words = split(instruction.text, file.escape)
    if "=" not in words[0]:
        key, _, value = instruction.text.partition(" ")
        if not value.strip():
            raise file.error(instruction, f"{instruction.name} {key} has no value")
        return {expand(key, values, file.escape): expand(value.strip(), values, file.escape)}
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise file.error(instruction, f"{word!r} is not of the form key=value")
        found[expand(key, values, file.escape)] = expand(value, values, file.escape)
    return found


def arg_pairs(instruction: Instruction, file: Dockerfile, values: dict[str, str]) -> dict[str, str | None]:
    """The names of an ARG with their defaults, None if there is none. Later defaults see earlier ones."""
    found: dict[str, str | None] = {}
    seen = dict(values)
    for word in split(instruction.text, file.escape):
        name, equals, default = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
            raise file.error(instruction, f"{word!r} is not of the form NAME or NAME=default")
        found[name] = expand(default, seen, file.escape) if equals else None
        seen[name] = found[name] or ""
    return found


def located(error: PierError, instruction: Instruction, file: Dockerfile) -> ImageError:
    """An error from deeper down with the place of the instruction that led to it."""
    if isinstance(error, ImageError) and error.message.startswith(f"{file.path}:"):
        return error
    return ImageError(
        f"{file.path}:{instruction.line}: {instruction.name}: {error.message}",
        code=error.code,
        blame=error.blame,
        hint=error.hint,
        retryable=error.retryable,
    )


OnOutput = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class StepMount:
    """`RUN --mount`: a host directory (`source`) or a tmpfs that is there for one command and in no layer."""

    target: str
    source: Path | None = None
    read_only: bool = True
    size: int | None = None


@dataclass(frozen=True, slots=True)
class BuildStep:
    """A command to run on top of `image`, with all of its environment."""

    image: Image
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    network: NetworkPolicy = PUBLIC
    mounts: tuple[StepMount, ...] = ()


class StepRunner(Protocol):
    """Runs the commands of a build."""

    async def run(self, step: BuildStep, layer: Path, on_output: OnOutput) -> int:
        """Run `step` and give its exit code. If that is 0, what the command wrote is afterwards in the directory
        `layer` in overlay format, with owners as in the store; `layer` exists and is empty before."""
        ...
