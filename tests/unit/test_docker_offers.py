"""What an engine is told and asked for beyond the usual: GPUs and limits on disk."""

from __future__ import annotations

from typing import Any

import pytest

from pier.image.model import Image
from pier.sandbox.contract import Limits, SandboxSpec
from pier.sandbox.docker.config import Placing, container_config
from pier.sandbox.docker.offers import can_limit_disk, has_gpus

pytestmark = pytest.mark.plain

XFS = {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "xfs"]], "DockerRootDir": "/var/lib/docker"}
QUOTA = "30 1 8:2 / /var rw,relatime shared:1 - xfs /dev/b rw,attr2,prjquota\n"


def host_side(spec: SandboxSpec) -> dict[str, Any]:
    return container_config(spec, "image", Placing("/idle", (), True), {}, {})["HostConfig"]


def test_gpus_are_asked_for_as_engines_want_it() -> None:
    image = Image("x", "x")
    assert host_side(SandboxSpec(image, gpus=2))["DeviceRequests"] == [
        {"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}
    ]
    assert host_side(SandboxSpec(image, gpus=-1))["DeviceRequests"][0]["Count"] == -1
    assert "DeviceRequests" not in host_side(SandboxSpec(image))


def test_the_disk_is_limited_by_the_storage_driver() -> None:
    image = Image("x", "x")
    assert host_side(SandboxSpec(image, limits=Limits(disk=1 << 30)))["StorageOpt"] == {"size": "1073741824"}
    assert "StorageOpt" not in host_side(SandboxSpec(image))


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"Runtimes": {"runc": {}, "nvidia": {}}}, True),
        ({"Runtimes": {"runc": {}}, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, True),
        ({"Runtimes": {"runc": {}}}, False),
        ({"Runtimes": None, "DiscoveredDevices": None}, False),
    ],
)
def test_an_engine_says_whether_it_has_gpus(info: dict[str, Any], expected: bool) -> None:
    assert has_gpus(info) is expected


@pytest.mark.parametrize(
    ("info", "mounts", "expected"),
    [
        ({"Driver": "btrfs"}, "", True),
        (XFS, QUOTA, True),
        (XFS, QUOTA.replace(",prjquota", ""), False),
        (XFS, QUOTA + "31 30 8:3 / /var/lib/docker rw - xfs /dev/c rw\n", False),
        (XFS, "", False),
        ({**XFS, "DriverStatus": [["Backing Filesystem", "extfs"]]}, QUOTA, False),
        ({"Driver": "vfs"}, QUOTA, False),
    ],
)
def test_an_engine_says_whether_it_limits_disks(info: dict[str, Any], mounts: str, expected: bool) -> None:
    assert can_limit_disk(info, mounts) is expected
