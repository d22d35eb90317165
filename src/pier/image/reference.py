"""Names of images: `ubuntu`, `ghcr.io/org/name:tag`, `localhost:5000/name@sha256:...`, as Docker reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pier.errors import ImageError

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
