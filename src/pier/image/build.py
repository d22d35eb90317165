"""Builds images from Dockerfiles without a daemon: one cached layer per instruction that changes files.

A layer is named by its content. Which layer an instruction comes to is written down under a key, the digest of
everything that could change it: the layers below, the instruction with its variables, and the files that it copies. So
what was done once is not done again, by whichever process or Dockerfile, and two processes that need the same make it
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pier.errors import ImageError, PierError
from pier.image.copying import Ignore, read_ignore
from pier.image.dockerfile import Dockerfile, Instruction, expand, read, split
from pier.image.model import HOST, SCRATCH, Image, OnProgress, architecture, host_refusal
from pier.image.stage import DEFAULT_PATH, SETTINGS, BuildStage, StepRunner, arg_pairs, key_of, located
from pier.image.store import ImageStore, canonical
from pier.network.policy import PUBLIC, NetworkPolicy

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
    _split(build)
    wanted = _find_target(build, target)
    needed = _needed(build, wanted)
    build.total = sum(len(build.parts[index].instructions) + 1 for index in needed)
    _warn_of_unused(build)
    for index in sorted(needed):
        build.done[index] = await _build_part(build, build.parts[index])
    stage = build.done[wanted]
    ids = [f"sha256:{layer.parent.name}" for layer in stage.layers]
    return store.put(tag, ids, stage.config(), origin="build", source=str(path), base=stage.host_key)


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
        return BuildStage(env={"PATH": DEFAULT_PATH})
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
