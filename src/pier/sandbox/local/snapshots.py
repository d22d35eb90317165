"""Frozen writable layers, and who still needs each of them.

A snapshot's layer lies below the sandbox that it was taken from, below sandboxes started from it and below later
snapshots of those. It is removed when the last of them is gone, whatever the order.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

from pier.lease import Lease
from pier.sandbox.linux.zygotes import Zygotes
from pier.sandbox.local.box import make_private

KIND = "snapshot"


class Snapshots:
    """The snapshots of one backend."""

    def __init__(self, lease: Lease, zygotes: Zygotes, base: Path) -> None:
        self._lease = lease
        self._zygotes = zygotes
        self._base = base
        self._holders: dict[Path, set[str]] = {}

    async def freeze(self, upper: Path) -> Path:
        """Take a writable layer that nothing writes to any more, and give the layer that it became."""
        id = secrets.token_hex(6)
        directory = self._base / id
        self._lease.write(KIND, id, {"directory": str(directory)})
        make_private(directory)
        layer = directory / "layer"
        await self._zygotes.ask_any({"op": "move", "path": str(upper), "to": str(layer)})
        self._holders[layer] = set()
        return layer

    def hold(self, holder: str, layers: Iterable[Path]) -> None:
        """Note that `holder` (an image or a sandbox) needs those of `layers` that are snapshots."""
        for layer in layers:
            if layer in self._holders:
                self._holders[layer].add(holder)

    async def release(self, holder: str) -> None:
        """Note that `holder` is gone, and remove what nobody needs any more."""
        for layer, holders in list(self._holders.items()):
            if holder not in holders:
                continue
            holders.discard(holder)
            if not holders:
                del self._holders[layer]
                await self._zygotes.tell_all({"op": "forget", "id": 0, "path": str(layer)})
                await self._zygotes.remove(layer.parent)
                self._lease.strike(KIND, layer.parent.name)
