"""What a Dockerfile would have an engine's builder fetch.

A builder of an engine follows registries and URLs to any host, and says nothing of it. So the images that a file is
made from are at the engine before it builds, taken there by pier, which checks each host; everything else that the
builder would fetch by itself is refused.
"""

from __future__ import annotations

import csv
import re

from pier.errors import ImageError, PolicyError
from pier.image.dockerfile import Dockerfile, Instruction, expand, read, split
from pier.image.host import host_refusal
from pier.image.model import HOST, SCRATCH, Image, OnProgress, parse
from pier.image.registry import find_credentials
from pier.image.stage import arg_pairs
from pier.image.store import ImageStore
from pier.sandbox.docker.images import EngineImages
from pier.sandbox.order import BuildOrder

OWN_BUILDER = "build it with pier's own: --ek builder=pier"
_SYNTAX = re.compile(r"^\s*(?:#|//)\s*syntax\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_FRONTEND = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@][\w.:-]+)?")
"""Docker's own programs that read Dockerfiles, which no task can change."""
_REMOTE = re.compile(r"[^/]*://|[^/]+@[^/]+:")
"""A URL, or a repository as git names it."""
_VARIABLE = re.compile(r"\$\{?(\w+)")
_PLATFORM = re.compile(r"(?:TARGET|BUILD)\w+")
"""Arguments that builders set themselves."""
_FETCHING = re.compile(r"^\s*(?:FROM|ADD|COPY|RUN)\b", re.IGNORECASE | re.MULTILINE)
_TRIGGER = re.compile(r"\s*ADD\b|.*\bfrom=", re.IGNORECASE)


def refuse_fetches(order: BuildOrder) -> None:
    """Raise `PolicyError` if the builder may fetch something that the file names, apart from images."""
    file = read(order.file)
    frontends = _SYNTAX.findall(order.file.read_text(encoding="utf-8-sig"))
    for name in (*frontends, *filter(None, [order.args.get("BUILDKIT_SYNTAX")])):
        if not _FRONTEND.fullmatch(name):
            raise _refusal(order, f"a program that reads it ({name})")
    for instruction in file.instructions:
        if instruction.name == "ADD" and _adds_remote(instruction, file):
            raise _refusal(order, f"line {instruction.line}: what ADD names")
        # Builders that do not know here-documents take their lines for instructions.
        if any(_FETCHING.search(document.text) for document in instruction.heredocs):
            raise _refusal(order, f"line {instruction.line}: what some builders read in this here-document")
        mounts = (mount for mount in instruction.all("mount") if "from" in mount.lower())
        if any("$" in each for each in (*instruction.all("from"), *mounts)):
            raise _refusal(order, f"line {instruction.line}: an image that depends on a variable")
        if instruction.name == "FROM" and instruction.all("platform"):
            raise _refusal(order, f"line {instruction.line}: an image of another platform")
        names = _VARIABLE.findall(instruction.text) if instruction.name == "FROM" else []
        if unknown := [name for name in names if _PLATFORM.fullmatch(name) or name not in _arguments(order, file)]:
            raise _refusal(order, f"line {instruction.line}: an image that depends on {unknown[0]}")


def _refusal(order: BuildOrder, what: str) -> PolicyError:
    return PolicyError(f"{order.file}: an engine's builder would fetch, from any host, {what}", hint=OWN_BUILDER)


def _adds_remote(instruction: Instruction, file: Dockerfile) -> bool:
    """Whether an ADD has a URL, or a variable that may have one."""
    words = instruction.exec_form or split(instruction.text, file.escape)
    return any("$" in word or _REMOTE.match(expand(word, {}, file.escape)) for word in words[:-1])


async def bring_bases(images: EngineImages, order: BuildOrder) -> None:
    """Have the images at the engine that the file is made from. The engine pulls itself from registries that the user
    has logged in to; its builder knows no credentials."""
    for base in _bases(order):
        if base == HOST:
            raise host_refusal(f"{order.file}: FROM {base}")
        found = await images.find(base) or await _bring(images, base, order.on_progress)
        if found.is_host:
            raise host_refusal(f"{order.file}: FROM {base}")
        if any(_TRIGGER.match(trigger) for trigger in found.config.on_build):
            raise _refusal(order, f"what ONBUILD of {base} names")


async def _bring(images: EngineImages, base: str, on_progress: OnProgress | None) -> Image:
    named = parse(base)
    if await find_credentials(named.registry) is not None:
        return await images.pull(base, on_progress)
    if named.digest:
        hint = f"pier image pull --env docker {base}, if you trust its registry; or --ek builder=pier"
        message = f"the engine has no {base}, and only a registry can give it one by its digest"
        raise ImageError(message, code="image_missing", blame="user", hint=hint)
    image = await ImageStore().resolve(base, on_progress=on_progress, for_task=True)
    if not image.is_host:
        await images.load(image, str(named), on_progress)
    return image


def _bases(order: BuildOrder) -> list[str]:
    """The images that the stages of the file are made from, and that it copies or mounts from."""
    file = read(order.file)
    values = _arguments(order, file)
    stages, bases = {SCRATCH}, list[str]()
    for instruction in file.instructions:
        if instruction.name == "FROM":
            words = [expand(word, values, file.escape) for word in split(instruction.text, file.escape)]
            bases += [words[0]] if words and words[0].lower() not in stages else []
            stages |= {word.lower() for word in words[2:3]}
            continue
        sources = (expand(source, {}, file.escape) for source in _sources(instruction, file))
        bases += [source for source in sources if source.lower() not in stages and not source.isdigit()]
    return list(dict.fromkeys(base for base in bases if base))


def _sources(instruction: Instruction, file: Dockerfile) -> list[str]:
    """The stages and images that an instruction takes files from."""
    found = instruction.all("from")
    for row in csv.reader(expand(mount, {}, file.escape) for mount in instruction.all("mount")):
        parts = (part.partition("=") for part in row)
        found += [value for name, _, value in parts if name.lower() == "from"]
    return found


def _arguments(order: BuildOrder, file: Dockerfile) -> dict[str, str]:
    """The values that FROM sees: those of arguments before the first of them."""
    values: dict[str, str] = {}
    for instruction in file.instructions:
        if instruction.name == "FROM":
            break
        if instruction.name == "ARG":
            for name, default in arg_pairs(instruction, file, values).items():
                values[name] = order.args.get(name, default or "")
    return values
