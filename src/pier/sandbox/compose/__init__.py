"""A compose file as values: services, and how they depend on one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pier.image.model import Image

MAIN = "main"
"""The service that the agent works in; all others are sidecars."""
LOGS = "/.pier/"
"""Paths below this stand for directories of logs of the host, which Harbor's tasks mount and pier fetches instead."""

Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]
Restart = Literal["no", "on-failure", "always"]


@dataclass(frozen=True, slots=True)
class ServiceBuild:
    """How a service's image is built."""

    context: Path
    dockerfile: Path | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """When a service counts as healthy. Times are in seconds. Without a test it is the image's own, at these times."""

    test: tuple[str, ...]
    interval: float = 30.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class Volume:
    """Something at `target`: a volume of the trial's own (`name`), or files of the task's (`source`), of which each
    trial has a copy. Volumes with the same name or source are the same one in every service."""

    target: str
    name: str = ""
    source: Path | None = None
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """One service. `command` and `entrypoint` that are None are the image's own; so are `workdir` and `user`."""

    name: str
    image: str | None = None
    build: ServiceBuild | None = None
    command: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    depends_on: Mapping[str, Condition] = field(default_factory=dict)
    health: Health | None = None
    ignore_health: bool = False
    """The image's own health check is not run either."""
    volumes: tuple[Volume, ...] = ()
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """What is in memory, each with the options that engines take for it."""
    workdir: str | None = None
    user: str | None = None
    hostname: str | None = None
    networks: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"default": ()})
    """The private networks that it is in, each with its further names there."""
    cpus: float | None = None
    memory: int | None = None
    processes: int | None = None
    shm_size: int | None = None
    gpus: int = 0
    extra_hosts: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = "no"
    restart_tries: int | None = None
    """How often it is started again at most; None is without an end."""
    init: bool = False
    """An init of the engine's is process 1, and not the service's own program."""
    tty: bool = False
    stdin_open: bool = False


@dataclass(frozen=True, slots=True)
class Compose:
    """A whole file. `networks` says of each private network whether it is internal: who is only in such ones reaches
    no host outside, whatever the policy. `notes` are what the file asks for without effect here."""

    path: Path
    services: Mapping[str, Service]
    networks: Mapping[str, bool]
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Service:
        return self.services[MAIN]


@dataclass(frozen=True, slots=True)
class Composition:
    """What a backend is asked to run: the file, the images of its services, and where their output goes."""

    compose: Compose
    images: Mapping[str, Image]
    on_output: Callable[[str, bytes], None] | None = field(default=None, compare=False, repr=False)
