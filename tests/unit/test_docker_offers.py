"""What an engine is told beyond the usual: GPUs and limits on disk."""

from __future__ import annotations

from typing import Any

from pier.image.model import Image
from pier.sandbox.contract import Limits, SandboxSpec
from pier.sandbox.docker.config import Placing, container_config


def host_side(spec: SandboxSpec, *, limits_ipc: bool = True) -> dict[str, Any]:
    return container_config(spec, "image", Placing("/idle", (), True, limits_ipc), {}, {})["HostConfig"]


def test_gpus_are_asked_for_as_engines_want_it() -> None:
    image = Image("x", "x")
    assert host_side(SandboxSpec(image, gpus=2))["DeviceRequests"] == [
        {"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}
    ]
    assert host_side(SandboxSpec(image, gpus=-1))["DeviceRequests"][0]["Count"] == -1
    assert "DeviceRequests" not in host_side(SandboxSpec(image))


def test_memory_that_belongs_to_no_process_is_limited() -> None:
    for memory, shm, queues in ((64 << 20, 32 << 20, "256"), (64 << 30, 64 << 20, "32000")):
        spec = SandboxSpec(Image("x", "x"), limits=Limits(memory=memory))
        host = host_side(spec)
        assert (host["ShmSize"], host["Sysctls"]["kernel.msgmni"]) == (shm, queues)
        assert host["Sysctls"]["net.ipv6.conf.lo.disable_ipv6"] == "0"
        assert "kernel.shmall" not in host_side(spec, limits_ipc=False)["Sysctls"]
