"""The instructions that change files: RUN, COPY, ADD and WORKDIR.

`RUN --mount` gives one command caches that outlive a build, private tmpfs, and parts of the context.
"""

from __future__ import annotations

import asyncio
import csv
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier.errors import ImageError
from pier.image import owner
from pier.image.build import PREDEFINED, Build, BuildStage, BuildStep, StepMount, find_stage, key_of
from pier.image.copying import Ignore, content_digest
from pier.image.dockerfile import Heredoc, Instruction, expand, split
from pier.image.layer_directories import View
from pier.network.policy import NONE

if TYPE_CHECKING:
    from pier.image.store import ImageStore


_KNOWN = {
    "bind": {"type", "target", "dst", "destination", "source", "src", "ro", "readonly"},
    "cache": {"type", "target", "dst", "destination", "id", "sharing", "mode", "uid", "gid", "ro", "readonly"},
    "tmpfs": {"type", "target", "dst", "destination", "size"},
}


@dataclass(slots=True)
class Mounts:
    """The mounts of one RUN. Of `caches` the names are kept, and whether one build at a time may have them."""

    store: ImageStore

    mounts: list[StepMount] = field(default_factory=list)
    context: list[tuple[Path, str]] = field(default_factory=list)
    caches: list[tuple[str, bool]] = field(default_factory=list)

    async def key(self) -> list[str]:
        """What a cache key must know: where things are mounted, and what the context's parts hold."""
        rows = [f"{mount.target} {mount.size} {mount.read_only} {mount.source is None}" for mount in self.mounts]
        for root, path in self.context:
            rows.append(await asyncio.to_thread(content_digest, View([str(root)]), path, Ignore()))
        return rows

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[tuple[StepMount, ...]]:
        """The mounts, with what must exist before the command starts; a cache that is not shared is held meanwhile."""
        async with AsyncExitStack() as stack:
            for name, alone in sorted(set(self.caches)):
                path = self.store.caches.open(name)
                if alone:
                    await stack.enter_async_context(self.store.only_one(f"cache {path.name}"))
            yield tuple(self.mounts)


def read_mounts(build: Build, stage: BuildStage, instruction: Instruction) -> Mounts:
    """The `--mount` flags of a RUN; kinds and options that cannot be had are refused by name."""
    made = Mounts(build.store)
    for flag in instruction.all("mount"):
        values: dict[str, str] = {}
        for part in next(csv.reader([expand(flag, stage.values(), build.file.escape)]), []):
            key, _, value = part.partition("=")
            values[key.strip().lower()] = value
        kind = values.get("type", "bind")
        if kind not in _KNOWN:
            raise _refused(f"--mount=type={kind} is not supported")
        if unknown := sorted(set(values) - _KNOWN[kind]):
            raise _refused(f"--mount=type={kind},{unknown[0]} is not supported")
        target = values.get("target") or values.get("dst") or values.get("destination") or ""
        if not target:
            raise _refused(f"--mount={flag} has no target")
        _add(build, made, kind, values, stage.path(target).rstrip("/"))
    return made


def _add(build: Build, made: Mounts, kind: str, values: dict[str, str], target: str) -> None:
    if kind == "tmpfs":
        size = values.get("size", "")
        if size and not size.isdigit():
            raise _refused(f"--mount=type=tmpfs,size={size} is not a number of bytes")
        made.mounts.append(StepMount(target, None, False, int(size) if size else None))
    elif kind == "cache":
        sharing = values.get("sharing") or "shared"
        if sharing not in ("shared", "locked", "private"):
            raise _refused(f"--mount=type=cache,sharing={sharing} is neither shared, locked nor private")
        name = values.get("id") or target
        made.caches.append((name, sharing != "shared"))
        read_only = bool({"ro", "readonly"} & set(values))
        made.mounts.append(StepMount(target, build.store.caches.path(name), read_only))
    else:
        inside = (values.get("source") or values.get("src") or ".").strip("/") or "."
        source = (build.context / inside).resolve()
        if not source.is_relative_to(build.context):
            raise _refused(f"--mount=type=bind,source={inside} is outside of the context")
        if not source.exists():
            raise _refused(f"--mount=type=bind,source={inside} is not in the context")
        made.context.append((build.context, inside))
        made.mounts.append(StepMount(target, source, True))


def _refused(why: str) -> ImageError:
    return ImageError(why, code="dockerfile", blame="task")


_TAIL = 4096
_HEREDOC_WORD = re.compile(r"""\d*<<-?(['"]?)([A-Za-z0-9_][A-Za-z0-9_.-]*)\1$""")


Fill = Callable[[Path], Awaitable[object]]


async def _layer(build: Build, stage: BuildStage, key: str, what: str, fill: Fill) -> None:
    """Put the layer of the instruction with the key `key` on top of a stage: from the store, or made by `fill`, by one
    process at a time. An instruction that changes no file has no layer."""
    layer = _known_layer(build, key)
    if layer is not None:
        build.on_progress("  cached")
    else:
        async with build.store.only_one(f"step {key}"):
            layer = _known_layer(build, key)
            if layer is None:
                layer = await _make_layer(build, what[:500], fill)
                build.store.steps.note(key, layer, what[:500])
    if layer and (path := build.store.layers.path(layer)) is not None:
        stage.layers.append(path)


def _known_layer(build: Build, key: str) -> str | None:
    layer = build.store.steps.find(key)
    return layer if layer == "" or (layer and build.store.layers.use(layer) is not None) else None


async def _make_layer(build: Build, what: str, fill: Fill) -> str:
    async with build.store.layers.draft() as draft:
        await fill(draft.path)
        made = await owner.run("digest_layer", path=str(draft.path))
        if made["empty"]:
            return ""
        await draft.keep(made["digest"], size=made["size"], origin="build", source=what)
        return made["digest"]


async def workdir(build: Build, stage: BuildStage, instruction: Instruction) -> None:
    """WORKDIR: set the directory, and make it for the current user if it is missing."""
    path = stage.path(expand(instruction.text, stage.values(), build.file.escape))
    workdir = path.rstrip("/") or "/"
    stage.set(workdir=workdir)
    if workdir == "/":
        return

    async def fill(layer: Path) -> None:
        await owner.run(
            "make_directories", target=str(layer), layers=stage.places(), path=workdir, user=stage.config.user
        )

    key = key_of(stage.key, "WORKDIR", workdir, stage.config.user)
    await _layer(build, stage, key, str(instruction), fill)


async def run(build: Build, stage: BuildStage, instruction: Instruction) -> None:
    """RUN: a command in a sandbox; what it writes is the layer."""
    command = _run_command(stage, instruction)
    mounts = read_mounts(build, stage, instruction)
    network = _run_network(build, instruction)
    values = {**stage.args, **stage.config.env}
    proxies = {name: value for name, value in build.build_args.items() if name in PREDEFINED}
    key = key_of(
        stage.key,
        "RUN",
        command,
        values,
        stage.config.user,
        stage.config.workdir,
        network.mode,
        network.hosts,
        await mounts.key(),
    )

    async def fill(layer: Path) -> None:
        if build.runner is None:
            raise ImageError("RUN needs a sandbox, and this build was given none", code="build")
        output = _Output(build.on_progress)
        async with mounts.prepared() as there:
            step = BuildStep(
                stage.image(), command, {**proxies, **values}, stage.config.user, stage.config.workdir, network, there
            )
            code = await build.runner.run(step, layer, output.take)
        output.close()
        if code != 0:
            raise ImageError(
                f"the command failed with exit code {code}: {instruction.text[:300]}\n{output.tail()}",
                code="build",
                blame="task",
            )

    await _layer(build, stage, key, str(instruction), fill)


def _run_command(stage: BuildStage, instruction: Instruction) -> tuple[str, ...]:
    words = instruction.exec_form
    if words is not None:
        if not words:
            raise ImageError("the command is empty", code="dockerfile", blame="task")
        return tuple(words)
    if not instruction.heredocs:
        return (*stage.config.shell, instruction.text)
    first = instruction.heredocs[0]
    if len(instruction.heredocs) == 1 and _HEREDOC_WORD.fullmatch(instruction.text):
        return _script(first.text) if first.text.startswith("#!") else (*stage.config.shell, first.text)
    return (*stage.config.shell, instruction.text + "".join(f"\n{doc.text}{doc.name}" for doc in instruction.heredocs))


def _script(text: str) -> tuple[str, ...]:
    """A script with an interpreter line of its own, run from a file that is gone afterwards."""
    runner = 'f=$(mktemp) && printf %s "$1" >"$f" && chmod 755 "$f" && "$f"; c=$?; rm -f "$f"; exit $c'
    return ("/bin/sh", "-c", runner, "sh", text)


def _run_network(build: Build, instruction: Instruction) -> Any:
    wanted = instruction.flag("network")
    if wanted in ("", "default"):
        return build.network
    if wanted == "none":
        return NONE
    raise ImageError(f"--network={wanted} is not supported", code="dockerfile", blame="task")


class _Output:
    """Passes a command's output on by lines, and keeps its end for an error."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._open = b""
        self._tail = b""

    def take(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL:]
        *lines, self._open = (self._open + data).split(b"\n")
        for line in lines:
            self._on_line("  " + line.decode(errors="replace"))
        if len(self._open) > _TAIL:
            self.close()

    def close(self) -> None:
        if self._open:
            self._on_line("  " + self._open.decode(errors="replace"))
        self._open = b""

    def tail(self) -> str:
        text = self._tail.decode(errors="replace").strip("\n")
        return "\n".join(f"    {line}" for line in text.splitlines()[-20:])


@dataclass(slots=True)
class _Sources:
    """What COPY or ADD takes, and what the cache key must know of it."""

    known: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


async def copy(build: Build, stage: BuildStage, instruction: Instruction) -> None:
    """COPY from the context, from another stage or image, or from here-documents."""
    await _copy_or_add(build, stage, instruction)


async def add(build: Build, stage: BuildStage, instruction: Instruction) -> None:
    """ADD: like COPY, but archives of the context are unpacked, and a URL is fetched."""
    await _copy_or_add(build, stage, instruction)


async def _copy_or_add(build: Build, stage: BuildStage, instruction: Instruction) -> None:
    words, documents = _copy_words(build, stage, instruction)
    *paths, destination = words
    if len(paths) + len(documents) > 1 and not destination.endswith("/") and destination not in (".", "./"):
        raise ImageError("with more than one source the destination must end with a slash", blame="task", code="build")
    values = stage.values()
    chown = expand(instruction.flag("chown"), values, build.file.escape)
    mode = _mode(expand(instruction.flag("chmod"), values, build.file.escape))
    where = stage.path(destination)
    async with AsyncExitStack() as stack:
        sources = _Sources()
        for path in paths:
            await _take_source(build, instruction, path, sources, stack)
        if documents:
            await _take_documents(build, stage, documents, sources, stack)

        async def fill(layer: Path) -> None:
            await owner.run(
                "copy_into",
                target=str(layer),
                layers=stage.places(),
                sources=sources.known,
                destination=where,
                chown=chown,
                chmod=mode,
                unpack_archives=instruction.name == "ADD",
            )

        key = key_of(stage.key, instruction.name, sources.keys, where, chown, mode)
        await _layer(build, stage, key, str(instruction), fill)


def _copy_words(build: Build, stage: BuildStage, instruction: Instruction) -> tuple[list[str], list[Heredoc]]:
    """The sources and the destination, and the here-documents among the sources."""
    words = instruction.exec_form
    values = stage.values()
    if words is None:
        words = split(instruction.text, build.file.escape)
        if instruction.heredocs:
            words = [word for word in words if not _HEREDOC_WORD.fullmatch(word)]
    words = [expand(word, values, build.file.escape) for word in words]
    if not words or (len(words) == 1 and not instruction.heredocs):
        raise ImageError("it needs a source and a destination", code="dockerfile", blame="task")
    return words, list(instruction.heredocs)


def _mode(text: str) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-7]{1,5}", text) or int(text, 8) > 0o7777:
        raise ImageError(f"--chmod={text} is not an octal mode such as 755", code="dockerfile", blame="task")
    return int(text, 8)


async def _take_source(
    build: Build, instruction: Instruction, path: str, sources: _Sources, stack: AsyncExitStack
) -> None:
    name = expand(instruction.flag("from"), build.globals)
    if name:
        places, key = await _other_stage(build, name)
        sources.known.append({"layers": places, "path": path})
        sources.keys.append(key_of("from", key, path))
    elif instruction.name == "ADD" and re.match(r"https?://", path):
        from pier.image.outbound import download_for_add

        directory = await stack.enter_async_context(build.store.layers.scratch())
        file, digest = await download_for_add(path, directory, build.network, instruction.flag("checksum"))
        sources.known.append({"layers": [str(directory)], "path": f"/{file.name}", "reset": True})
        sources.keys.append(key_of("url", path, digest))
    elif re.match(r"(git@|git://|ssh://)", path) or (path.endswith(".git") and "://" in path):
        raise ImageError(f"git sources such as {path} are not supported", code="dockerfile", blame="task")
    else:
        view = View([str(build.context)])
        digest = await asyncio.to_thread(content_digest, view, path, build.ignore)
        known = {"layers": [str(build.context)], "path": path, "ignore": build.ignore.lines, "reset": True}
        sources.known.append(known)
        sources.keys.append(key_of("context", posixpath.basename(path.rstrip("/")), digest))


async def _other_stage(build: Build, name: str) -> tuple[list[str], str]:
    """Where to look for the files of `COPY --from`, and their key. Nothing of this machine's root can be copied."""
    index = find_stage(build, name, len(build.done) and max(build.done) + 1)
    if index is not None and index in build.done:
        stage = build.done[index]
        return [str(layer) for layer in stage.layers], stage.key
    image = await build.store.resolve(name, on_progress=build.on_progress, for_task=True)
    if image.is_host and not image.layers:
        raise ImageError("--from=host would read this machine's own files", code="dockerfile", blame="task")
    return [str(layer) for layer in image.layers], image.digest


async def _take_documents(
    build: Build, stage: BuildStage, documents: list[Heredoc], sources: _Sources, stack: AsyncExitStack
) -> None:
    directory = await stack.enter_async_context(build.store.layers.scratch())
    for number, document in enumerate(documents):
        text = document.text
        if document.expands:
            text = expand(text, stage.values(), build.file.escape, keep_quotes=True)
        place = directory / str(number)
        place.mkdir()
        (place / document.name).write_text(text)
        (place / document.name).chmod(0o644)
        sources.known.append({"layers": [str(place)], "path": f"/{document.name}", "reset": True})
        sources.keys.append(key_of("document", document.name, text))
