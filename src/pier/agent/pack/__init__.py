"""Packs: an agent with its own runtime in one read-only directory that is mounted into any image.

A pack brings its loader and its C library. Its programs name that loader by the fixed path of the mount, and the
loader looks for libraries in the pack alone; so they run on glibc, musl and near-empty roots alike, and none of it
leaks into the commands that the agent runs.
"""

from __future__ import annotations

from pier.agent.pack.store import Pack, PackStore, ensure_pack

__all__ = ["Pack", "PackStore", "ensure_pack"]
