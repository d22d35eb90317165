"""What an engine is told beyond the usual: GPUs and limits on disk."""

from __future__ import annotations

from typing import Any

from pier.image.model import Image
from pier.sandbox.contract import SandboxSpec
from pier.sandbox.docker.engine import Placing, container_config


def host_side(spec: SandboxSpec) -> dict[str, Any]:
    return container_config(spec, "image", Placing("/idle", (), True), {}, {})["HostConfig"]


def test_gpus_are_asked_for_as_engines_want_it() -> None:
    image = Image("x", "x")
    assert host_side(SandboxSpec(image, gpus=2))["DeviceRequests"] == [
        {"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}
    ]
    assert host_side(SandboxSpec(image, gpus=-1))["DeviceRequests"][0]["Count"] == -1
    assert "DeviceRequests" not in host_side(SandboxSpec(image))
