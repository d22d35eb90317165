"""What a trial lends to a task of several services: the variables of its file, the images, a place for its logs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pier.agent.contract import AGENT_LOGS
from pier.image.model import Image
from pier.sandbox.compose import MAIN, Compose, Service
from pier.sandbox.compose.storage import LOGS
from pier.task import resolve_env
from pier.task.config import Environment
from pier.trial.images import ImageWish
from pier.trial.record import OutputFile, TrialRecord
from pier.verifier.folders import ARTIFACTS, TESTS, VERIFIER_LOGS

SERVICES = "services"
_MAIN_IMAGE = "pier-main-image"


def compose_variables(table: Environment, directory: Path, environ: Mapping[str, str] | None) -> dict[str, str]:
    """All that a compose file can see: what `[environment.env]` asks for, and the names that Harbor's tasks use. The
    directories of logs of the host are not mounted, so they have no real path."""
    harbor = {
        "CONTEXT_DIR": str(directory.resolve()),
        "MAIN_IMAGE_NAME": _MAIN_IMAGE,
        "PREBUILT_IMAGE_NAME": table.docker_image or _MAIN_IMAGE,
        "TEST_DIR": TESTS,
        "CPUS": str(table.cpus or ""),
        "MEMORY": f"{table.memory_mb}M" if table.memory_mb else "",
        "HOST_VERIFIER_LOGS_PATH": f"{LOGS}verifier",
        "HOST_AGENT_LOGS_PATH": f"{LOGS}agent",
        "HOST_ARTIFACTS_PATH": f"{LOGS}artifacts",
        "ENV_VERIFIER_LOGS_PATH": VERIFIER_LOGS,
        "ENV_AGENT_LOGS_PATH": AGENT_LOGS,
        "ENV_ARTIFACTS_PATH": ARTIFACTS,
    }
    return harbor | resolve_env(table.env, where="environment.env", environ=environ)


def service_wish(service: Service) -> ImageWish | None:
    """The image of a service, as its file says; None if that says nothing."""
    if service.build is not None:
        build = service.build
        return ImageWish(None, build.context, build.dockerfile, tuple(sorted(build.args.items())), build.target)
    if service.image and service.image != _MAIN_IMAGE:
        return ImageWish(service.image)
    return None


async def service_images(
    compose: Compose, main: ImageWish, get: Callable[[ImageWish], Awaitable[Image]]
) -> dict[str, Image]:
    """The images of all services, each fetched or built once. What one of them builds under a name is what the others
    mean by that name."""
    wishes = {name: main if name == MAIN else service_wish(service) for name, service in compose.services.items()}
    built = {one.image: wishes[name] for name, one in compose.services.items() if one.build and one.image}
    wishes = {name: built.get(compose.services[name].image or "", wish) for name, wish in wishes.items()}
    asked = (replace(wish or main, network=main.network) for wish in wishes.values())
    found = await asyncio.gather(*(get(wish) for wish in asked))
    return dict(zip(wishes, found, strict=True))


class ServiceLogs:
    """What services print, kept below a directory of the trial's: one file for each service."""

    def __init__(self, directory: Path, record: TrialRecord) -> None:
        self._directory = directory
        self._record = record
        self._files: dict[Path, OutputFile] = {}

    def of(self, group: str) -> Callable[[str, bytes], None]:
        """Where the services of one group print to; `group` is empty for those of the agent."""

        def keep(service: str, data: bytes) -> None:
            path = self._directory / group / f"{service}.log"
            if path not in self._files:
                self._files[path] = self._record.output(path).__enter__()
            self._files[path]("stdout", data)

        return keep

    def close(self) -> None:
        """Write what was held back. Idempotent."""
        while self._files:
            self._files.popitem()[1].__exit__()
