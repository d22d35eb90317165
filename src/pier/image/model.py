"""An image as a value: its name, its ordered read-only layers, and the settings that a container would start with.

Names (`ubuntu`, `ghcr.io/org/name:tag`, `localhost:5000/name@sha256:...`) are read as Docker reads them. Of several
platforms in a manifest the one that this machine runs is chosen.

The built-in image `host`: this machine's own root. Importing this loads nothing of the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import ImageError, TaskError

HOST = "host"
"""The reference of the built-in image that is this machine's own root, copy-on-write."""

SCRATCH = "scratch"
"""The reference of the empty image, which only a Dockerfile can start from."""

OnProgress = Callable[[str], None]
"""Told how long work goes, in lines for a person."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The part of an OCI image configuration that matters to a sandbox."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    labels: dict[str, str] = field(default_factory=dict)
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""
    healthcheck: dict[str, Any] | None = None
    on_build: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """What a sandbox's root is made from.

    `layers` are directories in overlay format (whiteouts as 0:0 character devices, opaque directories marked with
    `user.overlay.opaque`), lowest first, immutable and shared by all sandboxes. With `on_host` the machine's own root
    lies below them; the image `host` is that root with no layers of its own, made by each backend. Backends that have
    their own image store (Docker) use `reference` and ignore `layers`.
    """

    reference: str
    digest: str
    layers: tuple[Path, ...] = ()
    config: ImageConfig = field(default_factory=ImageConfig)
    on_host: bool = False

    @property
    def is_host(self) -> bool:
        """Whether the machine's own root lies below the layers."""
        return self.on_host or self.reference == HOST


DEFAULT_REGISTRY = "docker.io"
DEFAULT_TAG = "latest"

_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::\d+)?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is: a registry, a repository in it, and a tag or a digest (which goes first)."""

    registry: str
    repository: str
    tag: str = DEFAULT_TAG
    digest: str = ""

    def __str__(self) -> str:
        """The full name: the same for every way in which the image may be called."""
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.registry}/{self.repository}{end}"

    @property
    def familiar(self) -> str:
        """The short name that a person would type."""
        full = str(self)
        for prefix in (f"{DEFAULT_REGISTRY}/library/", f"{DEFAULT_REGISTRY}/"):
            if full.startswith(prefix):
                return full.removeprefix(prefix)
        return full


def parse(text: str) -> Reference:
    """Read a reference; `ImageError` with code `reference` if it is not one."""
    rest, _, digest = text.partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        raise _invalid(text, f"{digest!r} is not a sha256 digest")
    registry, slash, repository = rest.partition("/")
    if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
        registry, repository = DEFAULT_REGISTRY, rest
    repository, colon, tag = repository.partition(":")
    if registry in (DEFAULT_REGISTRY, "index.docker.io"):
        registry = DEFAULT_REGISTRY
        repository = repository if "/" in repository else f"library/{repository}"
    if not _REGISTRY.fullmatch(registry):
        raise _invalid(text, f"{registry!r} is not a registry")
    if not _NAME.fullmatch(repository):
        raise _invalid(text, f"{repository!r} is not a repository name (lower case letters, digits, . _ - and /)")
    if colon and not _TAG.fullmatch(tag):
        raise _invalid(text, f"{tag!r} is not a tag")
    return Reference(registry, repository, tag or DEFAULT_TAG, digest)


def is_digest(text: str) -> bool:
    """Whether `text` is a bare `sha256:...` digest."""
    return bool(_DIGEST.fullmatch(text))


def _invalid(text: str, why: str) -> ImageError:
    return ImageError(f"{text!r} is not an image reference: {why}", code="reference", blame="user")


_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "armv6l": "arm", "i686": "386"}


def architecture() -> str:
    """This machine's architecture as images name it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def choose_platform(descriptors: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """The descriptor of a manifest list for this machine."""
    wanted = architecture()
    offered: list[str] = []
    for descriptor in descriptors if isinstance(descriptors, list) else []:
        digest_of(descriptor)
        found = descriptor.get("platform") or {}
        if found.get("os") in ("linux", None) and found.get("architecture") in (wanted, None):
            return descriptor
        offered.append(f"{found.get('os')}/{found.get('architecture')}")
    raise ImageError(
        f"{where} has no image for linux/{wanted}, only for {', '.join(dict.fromkeys(offered))}",
        code="platform",
        blame="user",
    )


def digest_of(descriptor: Any) -> str:
    """The digest in a descriptor. It becomes part of paths and addresses, so it is checked to be one."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not is_digest(digest):
        raise ImageError(f"a manifest has {digest!r} where a sha256 digest should be", code="manifest")
    return digest


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


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an OSError into an `ImageError`: code `disk_full` if there is no space left, else `files`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ImageError(
                f"the disk is full: {error}", code="disk_full", hint="pier image gc --max-size 10G", retryable=True
            ) from error
        raise ImageError(f"{what}: {error}", code="files") from error
