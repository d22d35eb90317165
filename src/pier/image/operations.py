"""The operations on a store's directories by name, for whoever runs them as the owner of the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pier.image.adopt import adopt_layer
from pier.image.copying import copy_into, make_directories
from pier.image.disk import told_by_disk
from pier.image.packing import digest_layer
from pier.image.trees import copy_tree, measure, remove_tree, unpack_archive

OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "unpack_archive": unpack_archive,
    "copy_tree": copy_tree,
    "remove_tree": remove_tree,
    "measure": measure,
    "digest_layer": digest_layer,
    "adopt_layer": adopt_layer,
    "copy_into": copy_into,
    "make_directories": make_directories,
}
OWNING = frozenset({"unpack_archive", "copy_tree", "copy_into", "make_directories"})
"""The operations that give files their owners, and take `owners` to be told not to."""


def perform(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run an operation by name."""
    with told_by_disk(operation.replace("_", " ")):
        return OPERATIONS[operation](**arguments)
