"""`RUN --mount`: caches that outlive a build, private tmpfs, and parts of the context, for one command."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pier.errors import ImageError
from pier.image.copying import content_digest
from pier.image.dockerfile import Instruction
from pier.image.ignore import Ignore
from pier.image.stage import Stage
from pier.image.steps import StepMount
from pier.image.view import View
from pier.image.words import expand

if TYPE_CHECKING:
    from pier.image.build import Build
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


def read_mounts(build: Build, stage: Stage, instruction: Instruction) -> Mounts:
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
