"""What a store writes down: one JSON file for each image and one for each layer."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pier.image.model import ImageConfig

Origin = Literal["import", "docker", "pull", "build"]


class ConfigRecord(BaseModel):
    """`ImageConfig` on disk."""

    model_config = ConfigDict(extra="ignore")

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: list[str] = Field(default_factory=list)
    cmd: list[str] = Field(default_factory=list)
    shell: list[str] = Field(default_factory=lambda: ["/bin/sh", "-c"])
    labels: dict[str, str] = Field(default_factory=dict)
    exposed_ports: list[str] = Field(default_factory=list)
    volumes: list[str] = Field(default_factory=list)
    stop_signal: str = ""
    healthcheck: dict[str, Any] | None = None
    on_build: list[str] = Field(default_factory=list)

    @classmethod
    def of(cls, config: ImageConfig) -> ConfigRecord:
        return cls.model_validate({name: getattr(config, name) for name in cls.model_fields}, from_attributes=True)

    def value(self) -> ImageConfig:
        data = self.model_dump()
        for name in ("entrypoint", "cmd", "shell", "exposed_ports", "volumes", "on_build"):
            data[name] = tuple(data[name])
        return ImageConfig(**data)


class ImageRecord(BaseModel):
    """An image in the store. `layers` are ids, lowest first; `on_host` says that the machine's root lies below."""

    model_config = ConfigDict(extra="ignore")

    reference: str
    digest: str
    layers: list[str]
    config: ConfigRecord = Field(default_factory=ConfigRecord)
    on_host: bool = False
    origin: Origin = "import"
    source: str = ""
    created: str = ""


class LayerRecord(BaseModel):
    """A layer in the store: how it came and how many bytes its files hold."""

    model_config = ConfigDict(extra="ignore")

    id: str
    size: int = 0
    origin: Origin = "import"
    source: str = ""


def image_digest(layers: list[str], config: ConfigRecord, *, base: str = "") -> str:
    """The identity of an image: the same layers and settings have the same digest, on every machine."""
    value = json.dumps([base, layers, config.model_dump(mode="json")], sort_keys=True)
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"
