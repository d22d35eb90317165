"""The private networks that the services of one trial share, as seen by the kernel.

A namespace of its own, the hub, holds one bridge for each network and no process; a pair of linked interfaces leads
from there into each service. All trials use the same addresses, since no hub knows of another: nothing can run out.
The hub has no way on. It is kept by a descriptor, and goes with whoever holds that.

Standard library only: this runs in processes that can import nothing any more.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Sequence

from pier.network import plumbing, rtnetlink
from pier.network.rtnetlink import Netlink

LENGTH = 24
FIRST, LAST = 2, 254
MOST = 200
"""So many networks a trial can have."""

_MTU = 65000
_libc = ctypes.CDLL(None, use_errno=True)


def hub_address(network: int) -> str:
    """Where the resolver of a private network is. The range is one for bench marks, which no policy ever dials."""
    return f"198.19.{network}.1"


def service_address(network: int, host: int) -> str:
    return f"198.19.{network}.{host}"


def make_hub(networks: int) -> list[int]:
    """Run in a process that ends after it: make a hub, and answer descriptors of its namespace and of the socket that
    hears what its networks ask for names."""
    if _libc.unshare(plumbing.NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    with Netlink() as netlink:
        netlink.set_up(1)
        for number in range(networks):
            netlink.make_bridge(_bridge(number))
            index = rtnetlink.link_index(_bridge(number))
            netlink.add_address(index, hub_address(number), LENGTH)
            netlink.set_up(index)
            netlink.stop_forwarding(index)
    return [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), plumbing.resolver(socket.AF_INET).detach()]


def join(hub: int, places: Sequence[tuple[int, int]]) -> None:
    """Run in a service's namespace, by a process that ends after it: link it to networks of a hub. `places` are pairs
    of a network's number and the service's own number there."""
    with Netlink() as netlink:
        for network, host in places:
            link = f"{plumbing.PRIVATE_LINK}{network}"
            netlink.make_pair(link, _port(network, host), hub, _MTU)
            index = rtnetlink.link_index(link)
            netlink.add_address(index, service_address(network, host), LENGTH)
            netlink.set_up(index)
    plumbing.enter(hub)
    with Netlink() as netlink:
        for network, host in places:
            index = rtnetlink.link_index(_port(network, host))
            netlink.set_master(index, rtnetlink.link_index(_bridge(network)))
            netlink.set_up(index)


def asker(address: str) -> tuple[int, int]:
    """The network and the number there of whoever asks from `address`."""
    _, _, network, host = struct.unpack("4B", socket.inet_aton(address))
    return network, host


def _bridge(network: int) -> str:
    return f"net{network}"


def _port(network: int, host: int) -> str:
    return f"port{network}.{host}"
