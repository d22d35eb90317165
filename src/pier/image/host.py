"""The built-in image `host`: this machine's own root. Importing this loads nothing of the store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from pier.errors import TaskError
from pier.image.model import HOST, Image, ImageConfig

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def host_image() -> Image:
    """This machine's own root as an image; its digest tells machines and releases of their system apart."""
    facts = [os.uname().machine]
    for path in ("/etc/machine-id", "/etc/os-release"):
        with contextlib.suppress(OSError):
            facts.append(Path(path).read_text())
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    config = ImageConfig(env={"PATH": _PATH, "LANG": "C.UTF-8"})
    return Image(HOST, f"sha256:{digest}", config=config, on_host=True)


def host_refusal(where: str) -> TaskError:
    """The error for a task that asks for this machine's root: only the user gives that away."""
    message = f"{where}: a task cannot choose the image {HOST!r}, which shows this machine's software"
    return TaskError(message, hint=f"run it with --image {HOST}", code="host_image")
