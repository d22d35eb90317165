"""Opens what a few trials need, for commands that run trials without a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from pier.lease import Lease, sweep
from pier.sandbox import open_backend
from pier.trial.images import open_images
from pier.trial.spec import TrialServices


@asynccontextmanager
async def open_services(backend: str = "local", *, label: str = "trials") -> AsyncIterator[TrialServices]:
    """A backend with its lease and images; what dead owners left is swept first."""
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(Lease(label=label))
        opened = await stack.enter_async_context(open_backend(backend, lease))
        await sweep(dict.fromkeys(opened.kinds, opened.destroy))
        images = open_images(opened)
        stack.push_async_callback(images.close)
        yield TrialServices(backend=opened, images=images)
