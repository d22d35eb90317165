"""Builds images from Dockerfiles without a daemon: one cached layer per instruction that changes files.

A layer is named by its content. Which layer an instruction comes to is written down under a key, the digest of
everything that could change it: the layers below, the instruction with its variables, and the files that it copies. So
what was done once is not done again, by whichever process or Dockerfile, and two processes that need the same make it
once. Instructions that only change settings are done here, the others in `pier.image.instructions`.

`StepRunner` is a seam: sandboxes are built on images, so the builder cannot import them.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pier.errors import ImageError, PierError
from pier.image.copying import Ignore, read_ignore
from pier.image.dockerfile import Dockerfile, Instruction, expand, read, split
from pier.image.model import HOST, SCRATCH, Image, ImageConfig, OnProgress, architecture, host_refusal
from pier.image.store import ImageStore, canonical
from pier.network.policy import PUBLIC, NetworkPolicy

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_NANOSECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


@dataclass(slots=True)
class BuildStage:
    """What a stage has come to: its layers (lowest first) and the settings of its image. `host_key` names what of the
    machine's root lies below them, if it does."""

    layers: list[Path] = field(default_factory=list)
    on_host: bool = False
    host_key: str = ""
    config: ImageConfig = field(default_factory=ImageConfig)
    args: dict[str, str] = field(default_factory=dict)
    has_cmd: bool = False

    @classmethod
    def start(cls, image: Image, host_key: str) -> BuildStage:
        """A stage on top of an image."""
        return cls(list(image.layers), image.is_host, host_key, replace(image.config, on_build=()))

    def set(self, **settings: Any) -> None:
        """Change settings of the image."""
        self.config = replace(self.config, **settings)

    @property
    def key(self) -> str:
        """What the files of the stage are, for cache keys: the same layers on the same base have the same."""
        return key_of(self.host_key, [layer.parent.name for layer in self.layers])

    def image(self) -> Image:
        """The stage so far, for a step to run on."""
        return Image("build", f"sha256:{self.key}", tuple(self.layers), self.config, self.on_host)

    def places(self) -> list[str]:
        """The directories to look into for what the image holds, lowest first."""
        return (["/"] if self.on_host else []) + [str(layer) for layer in self.layers]

    def values(self) -> dict[str, str]:
        """The variables that instructions see: ENV goes before ARG."""
        return {"PATH": DEFAULT_PATH, **self.args, **self.config.env}

    def path(self, text: str) -> str:
        """An absolute path; a relative one starts at the working directory. A slash at the end is kept."""
        joined = posixpath.normpath(posixpath.join("/", self.config.workdir, text))
        joined = "/" + joined.lstrip("/")
        is_directory = text.endswith(("/", "/.")) or text in (".", "")
        return joined.rstrip("/") + "/" if is_directory else joined


def key_of(*parts: object) -> str:
    """A cache key from plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


Apply = Callable[[BuildStage, Instruction, Dockerfile], None]


def _env(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.set(env=stage.config.env | pairs(instruction, file, stage.values()))


def _label(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.set(labels=stage.config.labels | pairs(instruction, file, stage.values()))


def _user(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.set(user=expand(instruction.text, stage.values(), file.escape).strip())


def _command(stage: BuildStage, instruction: Instruction) -> tuple[str, ...]:
    words = instruction.exec_form
    return tuple(words) if words is not None else (*stage.config.shell, instruction.text)


def _cmd(stage: BuildStage, instruction: Instruction, _: Dockerfile) -> None:
    stage.set(cmd=_command(stage, instruction))
    stage.has_cmd = True


def _entrypoint(stage: BuildStage, instruction: Instruction, _: Dockerfile) -> None:
    stage.set(entrypoint=_command(stage, instruction))
    if not stage.has_cmd:
        stage.set(cmd=())


def _shell(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    words = instruction.exec_form
    if not words:
        raise file.error(instruction, 'SHELL needs a JSON array such as ["/bin/bash", "-c"]')
    stage.set(shell=tuple(words))


def _expose(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    for word in split(instruction.text, file.escape):
        port = expand(word, stage.values(), file.escape)
        port = port if "/" in port else f"{port}/tcp"
        if not re.fullmatch(r"\d+(-\d+)?/(tcp|udp|sctp)", port.lower()):
            raise file.error(instruction, f"{word!r} is not a port such as 80 or 53/udp")
        stage.set(exposed_ports=tuple(dict.fromkeys((*stage.config.exposed_ports, port.lower()))))


def _volume(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    words = instruction.exec_form
    if words is None:
        words = split(instruction.text, file.escape)
    for word in words:
        path = expand(word, stage.values(), file.escape)
        stage.set(volumes=tuple(dict.fromkeys((*stage.config.volumes, path))))


def _stop_signal(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    stage.set(stop_signal=expand(instruction.text, stage.values(), file.escape))


def _maintainer(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    """Docker keeps the name outside of the settings; nothing here reads it."""


def _healthcheck(stage: BuildStage, instruction: Instruction, file: Dockerfile) -> None:
    kind, _, rest = instruction.text.partition(" ")
    if kind.upper() == "NONE":
        stage.set(healthcheck={"Test": ["NONE"]})
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
    stage.set(healthcheck=check)


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


_PROXIES = tuple(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "FTP", "NO", "ALL"))
PREDEFINED = frozenset(_PROXIES) | {name.lower() for name in _PROXIES}
"""Build arguments that RUN sees without an ARG, and that no cache key depends on."""


@dataclass(slots=True)
class Build:
    """What all instructions of one build share."""

    store: ImageStore
    context: Path
    file: Dockerfile
    ignore: Ignore
    build_args: Mapping[str, str]
    runner: StepRunner | None
    network: NetworkPolicy
    on_progress: OnProgress
    host: bool
    globals: dict[str, str] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    done: dict[int, BuildStage] = field(default_factory=dict)
    step: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """The instructions of one stage; `base` is what its FROM names."""

    start: Instruction
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


async def build_image(
    store: ImageStore,
    context: Path,
    dockerfile: Path | None = None,
    *,
    build_args: Mapping[str, str] | None = None,
    runner: StepRunner | None = None,
    network: NetworkPolicy = PUBLIC,
    on_progress: OnProgress | None = None,
    tag: str | None = None,
    target: str | None = None,
    host: bool = True,
) -> Image:
    """Build the image that `dockerfile` (`context/Dockerfile`) says, and keep it as `tag` or under its digest.

    RUN goes through `runner`; a build that needs none, or finds all in the cache, needs no runner. Errors are
    `ImageError`s with file and line; code `build` with the end of the output if a command failed. Without `host` a
    FROM that leads to this machine's root is a `TaskError` with code `host_image`.
    """
    if not context.is_dir():
        raise ImageError(f"the build context {context} is not a directory", code="build", blame="user")
    if tag:
        canonical(tag)
    path = dockerfile or context / "Dockerfile"
    build = Build(
        store,
        context.resolve(),
        read(path),
        read_ignore(context, path),
        dict(build_args or {}),
        runner,
        network,
        on_progress or (lambda _: None),
        host,
    )
    wanted, needed = _plan_stages(build, target)
    build.total = sum(len(build.parts[index].instructions) + 1 for index in needed)
    _warn_of_unused(build)
    for index in sorted(needed):
        build.done[index] = await _build_part(build, build.parts[index])
    stage = build.done[wanted]
    ids = [f"sha256:{layer.parent.name}" for layer in stage.layers]
    return store.put(tag, ids, stage.config, origin="build", source=str(path), base=stage.host_key)


def find_host_base(
    context: Path,
    dockerfile: Path | None = None,
    build_args: Mapping[str, str] | None = None,
    target: str | None = None,
) -> str | None:
    """The place of the FROM that has a build start from this machine's root; None if no stage that it needs does."""
    path = dockerfile or context / "Dockerfile"
    args = dict(build_args or {})
    build = Build(ImageStore(), context, read(path), Ignore(), args, None, PUBLIC, lambda _: None, False)
    parts = (build.parts[index] for index in sorted(_plan_stages(build, target)[1]))
    return next((f"{path}:{part.start.line}: FROM {part.base}" for part in parts if part.base == HOST), None)


def _plan_stages(build: Build, target: str | None) -> tuple[int, set[int]]:
    """Divide the instructions into stages: the index of the one to build, and of all that it needs."""
    _split(build)
    wanted = _find_target(build, target)
    return wanted, _needed(build, wanted)


def _split(build: Build) -> None:
    """Divide the instructions into stages; what comes before the first FROM are arguments for all FROMs."""
    build.globals = _platform_args()
    for instruction in build.file.instructions:
        if instruction.name == "FROM":
            build.parts.append(_from(build, instruction))
        elif build.parts:
            build.parts[-1].instructions.append(instruction)
        elif instruction.name == "ARG":
            for name, default in arg_pairs(instruction, build.file, build.globals).items():
                value = build.build_args.get(name, default)
                if value is not None:
                    build.globals[name] = value
        else:
            raise build.file.error(instruction, f"{instruction.name} comes before the first FROM")
    if not build.parts:
        raise ImageError(f"{build.file.path} has no FROM", code="dockerfile", blame="task")


def _from(build: Build, instruction: Instruction) -> Part:
    wanted = expand(instruction.flag("platform"), build.globals)
    if wanted and wanted.split("/")[:2] != build.globals["TARGETPLATFORM"].split("/")[:2]:
        raise build.file.error(instruction, f"FROM --platform={wanted} is not this machine's platform")
    words = [expand(word, build.globals, build.file.escape) for word in split(instruction.text, build.file.escape)]
    if len(words) == 1:
        name = ""
    elif len(words) == 3 and words[1].upper() == "AS":
        name = words[2].lower()
    else:
        raise build.file.error(instruction, "FROM needs an image, or an image AS a name")
    if not words[0]:
        raise build.file.error(instruction, f"FROM {instruction.text} names no image: an argument in it has no value")
    return Part(instruction, words[0], name)


def _platform_args() -> dict[str, str]:
    arch = architecture()
    values = {"PLATFORM": f"linux/{arch}", "OS": "linux", "ARCH": arch, "VARIANT": ""}
    return {f"{side}{key}": value for side in ("TARGET", "BUILD") for key, value in values.items()}


def find_stage(build: Build, name: str, before: int) -> int | None:
    """The index of the stage called `name` (or numbered so) among those before `before`."""
    for index in range(before - 1, -1, -1):
        if build.parts[index].name == name.lower() and name:
            return index
    return int(name) if name.isdigit() and int(name) < before else None


def _find_target(build: Build, target: str | None) -> int:
    if target is None:
        return len(build.parts) - 1
    found = find_stage(build, target, len(build.parts))
    if found is None:
        raise ImageError(f"{build.file.path} has no stage {target!r}", code="dockerfile", blame="user")
    return found


def _needed(build: Build, wanted: int) -> set[int]:
    """The stages that a stage is made from, itself included."""
    needed: set[int] = set()
    waiting = [wanted]
    while waiting:
        index = waiting.pop()
        if index in needed:
            continue
        needed.add(index)
        part = build.parts[index]
        bases = [part.base] if not part.base.isdigit() else []
        bases += [instruction.flag("from") for instruction in part.instructions if instruction.flag("from")]
        found = (find_stage(build, expand(name, build.globals), index) for name in bases)
        waiting += [other for other in found if other is not None]
    return needed


def _warn_of_unused(build: Build) -> None:
    declared = {
        word.partition("=")[0]
        for instruction in build.file.instructions
        if instruction.name == "ARG"
        for word in split(instruction.text, build.file.escape)
    }
    for name in sorted(set(build.build_args) - declared - PREDEFINED):
        build.on_progress(f"warning: the build argument {name} is not used by any ARG")


async def _build_part(build: Build, part: Part) -> BuildStage:
    from pier.image.instructions import add, copy, run, workdir

    stage = await _start(build, part)
    doers = {"RUN": run, "COPY": copy, "ADD": add, "WORKDIR": workdir}
    for instruction in part.instructions:
        build.step += 1
        build.on_progress(f"[{build.step}/{build.total}] {str(instruction).splitlines()[0]}")
        try:
            if instruction.name == "ARG":
                _take_args(build, stage, instruction)
            elif instruction.name in SETTINGS:
                SETTINGS[instruction.name](stage, instruction, build.file)
            else:
                await doers[instruction.name](build, stage, instruction)
        except PierError as error:
            raise located(error, instruction, build.file) from error
    return stage


async def _start(build: Build, part: Part) -> BuildStage:
    build.step += 1
    build.on_progress(f"[{build.step}/{build.total}] {part.start}")
    index = build.parts.index(part)
    earlier = None if part.base.isdigit() else find_stage(build, part.base, index)
    if earlier is not None:
        below = build.done[earlier]
        return BuildStage.start(below.image(), below.host_key)
    if part.base == SCRATCH:
        return BuildStage(config=ImageConfig(env={"PATH": DEFAULT_PATH}))
    try:
        image = await build.store.resolve(part.base, on_progress=build.on_progress, for_task=True)
    except ImageError as error:
        raise located(error, part.start, build.file) from error
    if image.is_host and not build.host:
        raise host_refusal(f"{build.file.path}:{part.start.line}: FROM {part.base}")
    _refuse_triggers(build, part, image)
    if image.reference == HOST:
        return BuildStage.start(image, key_of("host", image.digest, _host_packages()))
    return BuildStage.start(image, key_of("image", image.digest) if image.is_host else "")


def _refuse_triggers(build: Build, part: Part, image: Image) -> None:
    """Docker would run these instructions now; passing them over would give another image without a word."""
    if image.config.on_build:
        told = "; ".join(f"ONBUILD {trigger}" for trigger in image.config.on_build)
        why = f"the image {part.base} has triggers, which are not supported: {told}"
        hint = "build on an image without triggers, and write what they do into this Dockerfile"
        raise build.file.error(part.start, why, hint=hint)


def _host_packages() -> list[float]:
    """What changes when software is installed on this machine, so that layers made before are not used after."""
    databases = (Path("/var/lib/dpkg/status"), Path("/var/lib/rpm"), Path("/lib/apk/db/installed"))
    return [path.stat().st_mtime for path in databases if path.exists()]


def _take_args(build: Build, stage: BuildStage, instruction: Instruction) -> None:
    for name, default in arg_pairs(instruction, build.file, stage.values()).items():
        value = build.build_args.get(name, default if default is not None else build.globals.get(name))
        if value is not None:
            stage.args[name] = value
