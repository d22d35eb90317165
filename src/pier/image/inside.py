"""The program that runs an operation on a store's directories inside a user namespace.

It reads `[operation, arguments]` from its stdin and writes the answer to its stdout, both JSON. Standard library only.
"""

from __future__ import annotations

import json
import sys

from pier.errors import ImageError
from pier.idmap import IdMap, enter
from pier.image.operations import perform


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
