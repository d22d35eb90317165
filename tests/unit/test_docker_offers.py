"""What an engine is told beyond the usual: GPUs and limits on disk."""

from __future__ import annotations

from typing import Any

import pytest

from pier.image.model import Image
from pier.sandbox.contract import Limits, SandboxSpec
from pier.sandbox.docker.engine import Placing, can_limit_ipc, container_config


def host_side(spec: SandboxSpec, *, limits_ipc: bool = True) -> dict[str, Any]:
    return container_config(spec, "image", Placing("/idle", (), True, limits_ipc), {}, {})["HostConfig"]


def test_gpus_are_asked_for_as_engines_want_it() -> None:
    image = Image("x", "x")
    assert host_side(SandboxSpec(image, gpus=2))["DeviceRequests"] == [
        {"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}
    ]
    assert host_side(SandboxSpec(image, gpus=-1))["DeviceRequests"][0]["Count"] == -1
    assert "DeviceRequests" not in host_side(SandboxSpec(image))


@pytest.mark.parametrize(
    ("options", "kernel", "limits"),
    [
        (["name=seccomp,profile=builtin"], "5.15.0-91-generic", True),
        (["name=seccomp,profile=builtin", "name=rootless"], "5.15.0-91-generic", False),
        (["name=rootless"], "6.8.12", False),
        (["name=rootless"], "6.18.4", True),
        (["name=rootless"], None, False),
        (None, "3.10.0", True),
    ],
)
def test_a_rootless_engine_limits_system_v_memory_where_the_kernel_lets_it(
    options: list[str] | None, kernel: str | None, limits: bool
) -> None:
    """Others would refuse to start any container that has the settings."""
    found = can_limit_ipc({"SecurityOptions": options, "KernelVersion": kernel})
    host = host_side(SandboxSpec(Image("x", "x"), limits=Limits(memory=1 << 30)), limits_ipc=found)
    assert ("kernel.shmall" in host["Sysctls"], host["ShmSize"]) == (limits, 64 << 20)
