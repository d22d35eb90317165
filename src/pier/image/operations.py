"""The operations on a store's directories by name, and the program that runs one inside a user namespace.

The program reads `[operation, arguments]` from its stdin and writes the answer to its stdout, both JSON. Standard
library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from pier.errors import ImageError
from pier.idmap import IdMap, enter
from pier.image.adopt import adopt_layer, copy_tree, measure, remove_tree, unpack_archive
from pier.image.copying import copy_into, make_directories
from pier.image.disk import told_by_disk
from pier.image.packing import digest_layer

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


def main() -> None:
    """Enter the namespace, perform the operation, answer."""
    enter(IdMap.detect())
    operation, arguments = json.load(sys.stdin)
    try:
        answer = perform(operation, arguments)
    except ImageError as error:
        about = {"code": error.code, "blame": error.blame, "hint": error.hint, "retryable": error.retryable}
        answer = {"error": error.message, "about": about}
    json.dump(answer, sys.stdout)
