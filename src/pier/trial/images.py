"""The images that trials start from: looked up or built, the same one once, however many trials ask at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from pier.errors import ImageError, PolicyError
from pier.image.model import HOST, Image
from pier.network.policy import NONE, PUBLIC, NetworkPolicy
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend
from pier.sandbox.order import BuildOrder
from pier.task.digest import tree_digest


@dataclass(frozen=True, slots=True)
class ImageWish:
    """An image by reference, or by the directory that holds its Dockerfile (or another `dockerfile`), with the build
    arguments and the stage to build."""

    reference: str | None = None
    context: Path | None = None
    dockerfile: Path | None = None
    args: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    network: NetworkPolicy | None = None
    """What its RUN steps may reach; None is everything that the machine can offer."""

    @property
    def is_build(self) -> bool:
        return self.reference is None


Resolve = Callable[[str], Awaitable[Image]]
Build = Callable[[ImageWish, str], Awaitable[Image]]
Close = Callable[[], Awaitable[None]]


class TrialImages:
    """Gives images to trials. At most `builds` are built at once; a build that failed is tried again when asked for."""

    def __init__(
        self, resolve: Resolve, build: Build | None = None, *, builds: int = 2, close: Close | None = None
    ) -> None:
        self._close = close
        self._resolve = resolve
        self._build = build
        self._limit = asyncio.Semaphore(builds)
        self._waiting: dict[str, asyncio.Task[Image]] = {}

    async def get(self, wish: ImageWish) -> Image:
        """The image that `wish` asks for."""
        key = wish.reference or await asyncio.to_thread(_build_key, wish)
        task = self._waiting.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._make(wish, key))
            self._waiting[key] = task
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stop what is still being fetched or built."""
        tasks = list(self._waiting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.clear()
        if self._close is not None:
            await self._close()

    async def _make(self, wish: ImageWish, key: str) -> Image:
        if wish.reference is not None:
            return await self._resolve(wish.reference)
        if self._build is None or wish.context is None:
            raise ImageError(
                "this task brings a Dockerfile, and nothing here can build it",
                hint=f"run it with --image {HOST} or with an image that was built elsewhere",
                code="no_builder",
                blame="user",
            )
        async with self._limit:
            return await self._build(wish, key)


def _build_key(wish: ImageWish) -> str:
    if wish.context is None:
        return ""
    return repr((tree_digest(wish.context), wish.dockerfile, wish.target, wish.args, wish.network))


def open_images(backend: Backend, *, builds: int = 2) -> TrialImages:
    """Images that the backend has itself or pulls, else from pier's own store; Dockerfiles are built in local
    sandboxes, whose layers every backend can take, or by the backend if it is asked to or nothing else can."""
    from pier.image.store import ImageStore

    store = ImageStore()
    builder = backend if backend.name == "local" else open_backend("local", backend.lease)

    async def resolve(reference: str) -> Image:
        found = await backend.find_image(reference) or store.find(reference)
        return found or await backend.pull_image(reference) or await store.resolve(reference)

    async def build(wish: ImageWish, key: str) -> Image:
        from pier.image.build import build_image
        from pier.sandbox.building import SandboxRunner, can_run

        assert wish.context is not None
        if backend.builder == "own" or (backend.builder == "either" and not await can_run(builder)):
            return await backend.build_image(
                BuildOrder(key, wish.context, wish.dockerfile, dict(wish.args), wish.target, wish.network)
            )
        networks = (await builder.capabilities()).networks
        network = wish.network or (PUBLIC if "public" in networks else NONE)
        if network.mode not in networks:
            raise PolicyError(
                f"this machine cannot build with the network mode {network.mode!r}, which the task asks for",
                hint="pier doctor",
            )
        return await build_image(
            store,
            wish.context,
            wish.dockerfile,
            build_args=dict(wish.args),
            runner=SandboxRunner(builder),
            network=network,
            target=wish.target,
        )

    async def close() -> None:
        if builder is not backend:
            await builder.close()

    return TrialImages(resolve, build, builds=builds, close=close)
