"""Packs: an agent with its own runtime in one read-only directory that is mounted into any image.

A pack has a loader and a C library. Its programs name that loader by the fixed path of the mount, and the loader
searches the pack alone. So they run on glibc, musl and near-empty roots, without effect on the commands that the agent
runs.
"""

from __future__ import annotations

from pier.agent.pack.store import Pack, PackStore, ensure_pack

__all__ = ["Pack", "PackStore", "ensure_pack"]
