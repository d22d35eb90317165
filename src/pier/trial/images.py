"""The images of trials: looked up or built, each once for all trials that need it at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from pier.errors import ImageError, PolicyError
from pier.image.model import HOST, Image, OnProgress, host_image, host_refusal
from pier.network.policy import NONE, PUBLIC, NetworkPolicy
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, BuildOrder
from pier.task.load import tree_digest


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """An image by reference, or by its build context, with the Dockerfile, the build arguments and the target stage."""

    reference: str | None = None
    context: Path | None = None
    dockerfile: Path | None = None
    args: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    network: NetworkPolicy | None = None
    """The network of its RUN and ADD instructions; None is the most open one that the machine supports."""
    host: bool = False
    """Whether the user allowed this machine's root, which a task cannot choose."""
    chosen: bool = False
    """Whether the user chose the reference, not a task."""

    @property
    def is_build(self) -> bool:
        return self.reference is None


def refuse_host(request: ImageRequest) -> None:
    """Raise the `TaskError` for a request that leads to this machine's root without the user's choice, as far as that
    is known without resolving any image."""
    if request.host:
        return
    if request.reference == HOST:
        raise host_refusal(f"docker_image = {request.reference!r}")
    if request.context is None:
        return
    from pier.image.build import find_host_base

    with contextlib.suppress(ImageError, OSError):  # the build reports these
        if where := find_host_base(request.context, request.dockerfile, dict(request.args), request.target):
            raise host_refusal(where)


Resolve = Callable[[ImageRequest, OnProgress], Awaitable[Image]]
Build = Callable[[ImageRequest, str, OnProgress], Awaitable[Image]]
Close = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _PendingImage:
    """An image that is being fetched or built, and the callbacks that receive its progress."""

    task: asyncio.Task[Image] = field(init=False)
    listeners: list[OnProgress] = field(default_factory=list)
    last: str = ""

    def notify(self, line: str) -> None:
        self.last = line
        for listener in self.listeners:
            listener(line)

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class TrialImages:
    """The images of trials. At most `builds` builds run at once; a failed one is repeated on the next request."""

    def __init__(
        self, resolve: Resolve, build: Build | None = None, *, builds: int = 2, close: Close | None = None
    ) -> None:
        self._close = close
        self._resolve = resolve
        self._build = build
        self._limit = asyncio.Semaphore(builds)
        self._pending: dict[str, _PendingImage] = {}
        self.known: dict[ImageRequest, Image] = {}
        """Images that need no lookup: that of a workspace replaces its task's."""

    async def get(self, request: ImageRequest, on_progress: OnProgress | None = None) -> Image:
        """The image of `request`. `on_progress` receives progress, also of a build that another trial started."""
        if request in self.known:
            return self.known[request]
        if request.reference == HOST and not request.host:
            raise host_refusal(f"docker_image = {request.reference!r}")
        image = await self._get(request, on_progress)
        if image.is_host and not request.host:
            raise host_refusal(f"docker_image = {request.reference!r}")
        return image

    async def _get(self, request: ImageRequest, on_progress: OnProgress | None) -> Image:
        key = request.reference or await asyncio.to_thread(_build_key, request)
        pending = self._pending.get(key)
        if pending is None or pending.failed:
            pending = self._pending[key] = _PendingImage()
            pending.task = asyncio.create_task(self._make(request, key, pending.notify))
        elif on_progress is not None and pending.last and not pending.task.done():
            on_progress(pending.last)
        if on_progress is None:
            return await asyncio.shield(pending.task)
        pending.listeners.append(on_progress)
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.listeners.remove(on_progress)

    async def close(self) -> None:
        """Cancel pending images."""
        tasks = [pending.task for pending in self._pending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pending.clear()
        if self._close is not None:
            await self._close()

    async def _make(self, request: ImageRequest, key: str, on_progress: OnProgress) -> Image:
        if request.reference is not None:
            return await self._resolve(request, on_progress)
        if self._build is None or request.context is None:
            raise ImageError(
                "the task has a Dockerfile, but this backend cannot build images",
                hint=f"run it with --image {HOST} or with an image that was built elsewhere",
                code="no_builder",
                blame="user",
            )
        async with self._limit:
            return await self._build(request, key, on_progress)


def _build_key(request: ImageRequest) -> str:
    if request.context is None:
        return ""
    content = (tree_digest(request.context), _file_key(request.context, request.dockerfile))
    return repr((*content, request.target, request.args, request.network, request.host))


def _file_key(context: Path, file: Path | None) -> str:
    """The key of a Dockerfile: its path below the context, or a digest if it is outside of the context."""
    if file is None or file.resolve().is_relative_to(context.resolve()):
        return str(file and file.resolve().relative_to(context.resolve()))
    ignored = file.with_name(f"{file.name}.dockerignore")
    parts = [path.read_bytes() for path in (file, ignored) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def open_images(backend: Backend, *, builds: int = 2) -> TrialImages:
    """Images that the backend or pier's store has, else pulled ones. Dockerfiles are built in local sandboxes, whose
    layers every backend accepts, or by the backend if it builds all images itself or no local sandbox can run."""
    builder = backend if backend.name == "local" else open_backend("local", backend.lease)

    async def resolve(request: ImageRequest, on_progress: OnProgress) -> Image:
        reference = request.reference or ""
        if reference == HOST:
            return await backend.find_image(HOST) or host_image()
        from pier.image.store import ImageStore
        from pier.sandbox.opening import resolve_image

        return await resolve_image(reference, backend, ImageStore(), on_progress, for_task=not request.chosen)

    async def build(request: ImageRequest, key: str, on_progress: OnProgress) -> Image:
        from pier.image.build import build_image
        from pier.image.store import ImageStore
        from pier.sandbox.opening import SandboxRunner, can_run

        assert request.context is not None
        context, dockerfile, args, target = request.context, request.dockerfile, dict(request.args), request.target
        if backend.builder == "own" or (backend.builder == "either" and not await can_run(builder)):
            order = BuildOrder(key, context, dockerfile, args, target, request.network, on_progress)
            return await backend.build_image(order)
        networks = (await builder.capabilities()).networks
        network = request.network or (PUBLIC if "public" in networks else NONE)
        if network.mode not in networks:
            raise PolicyError(
                f"this machine cannot build with the network mode {network.mode!r}, which the task asks for",
                hint="pier doctor",
            )
        return await build_image(
            ImageStore(),
            context,
            dockerfile,
            build_args=args,
            runner=SandboxRunner(builder),
            network=network,
            on_progress=on_progress,
            target=target,
            host=request.host,
        )

    async def close() -> None:
        if builder is not backend:
            await builder.close()

    return TrialImages(resolve, build, builds=builds, close=close)
