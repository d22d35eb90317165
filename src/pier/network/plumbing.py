"""The network of a sandbox, as seen by the kernel: set up from inside, by the sandbox's init, without a process left.

A second network namespace, the gateway's, hangs on the sandbox's own by a pair of linked interfaces. It has no way on:
its listening sockets are handed to pier, which serves them from outside, and when pier closes them the namespace is
gone.

A sandbox with the policy `none` has no such pair, only the loopback device. Each address that is not its own has a
route of last resort to that device, where packet rules refuse what arrives and hand its beginning to a socket. So an
attempt leads nowhere, is refused at once, and is known with its destination. A link that another policy adds has routes
that come first.

The services of one trial share private networks: a third namespace, the hub, holds one bridge for each network and no
process, with a pair of linked interfaces into each service. All trials use the same addresses, since no hub reaches
another. The hub is kept by a descriptor and goes with it.

Standard library only: this runs in processes that can import nothing any more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

from pier.network.netlink import (
    LOCAL,
    LOCAL_TABLE,
    NETFILTER,
    Netlink,
    attribute,
    commit,
    cut_datagrams,
    divert,
    link_index,
    message,
    refusing,
)

LINK = "eth0"
PRIVATE_LINK = "lan"
"""How links begin that lead to services of the same trial (`pier.network.plumbing`) and nowhere else."""
GATEWAY, INSIDE, LENGTH = "192.0.0.1", "192.0.0.2", 30
GATEWAY6, INSIDE6, LENGTH6 = "fd70:6965:72::1", "fd70:6965:72::2", 64
SYNTHETIC, SYNTHETIC_LENGTH = "198.18.0.0", 15
SYNTHETIC6, SYNTHETIC6_LENGTH = "fd70:6965:72:1::", 64
RESOLV_CONF = f"nameserver {GATEWAY}\noptions timeout:10 attempts:2\n"

NO_SIX = (errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EACCES, errno.ENODEV)
"""How the kernel says that it has no IPv6."""

_MTU = 65000
NEW_NETWORK = 0x40000000
_REFUSED = "192.0.2.1"
"""An address of the documentation range: no policy lets it through, save one that names it or is public."""

_libc = ctypes.CDLL(None, use_errno=True)


def connect(prefixes: Sequence[tuple[str, int]]) -> list[int]:
    """Run by a sandbox's init: make the gateway's namespace and link the sandbox to it. `prefixes` are the addresses
    that the gatekeeper serves, beside the synthetic ones.

    Answers descriptors: a TCP listener and a resolver's UDP socket for IPv4, a packet socket that sees what is
    attempted, and the first two once more for IPv6 where the kernel has it. If all addresses are served, there is one
    more packet socket, by which datagrams and echo requests come and go.
    """
    inside = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Netlink() as sandbox:
            if _libc.unshare(NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "cannot make a network namespace")
            try:
                return [sock.detach() for sock in _make_gateway(sandbox, inside, prefixes)]
            finally:
                enter(inside)
    finally:
        os.close(inside)


def _make_gateway(sandbox: Netlink, inside: int, prefixes: Sequence[tuple[str, int]]) -> list[socket.socket]:
    with Netlink() as gateway:
        gateway.set_up(1)
        gateway.make_pair("gateway", LINK, inside, _MTU)
        here, there = link_index("gateway"), _index_in(inside)
        gateway.set_up(here)
        gateway.add_address(here, GATEWAY, LENGTH)
        is_public = ("0.0.0.0", 0) in [tuple(prefix) for prefix in prefixes]
        _address_sandbox(sandbox, there)
        six = _has_six(gateway, sandbox, here, there)
        _serve_prefixes(gateway, here, prefixes, six)
    listener = _listener(socket.AF_INET, 0)
    divert(listener.getsockname()[1], datagrams=is_public)
    sockets = [listener, resolver(socket.AF_INET), _tap(_ATTEMPTS)]
    if six:
        sockets += [_listener(socket.AF_INET6, listener.getsockname()[1]), resolver(socket.AF_INET6)]
    return [*sockets, _tap(_DATAGRAMS)] if is_public else sockets


def disconnect() -> None:
    """Run in a sandbox's network namespace: remove the link, and with it every way out."""
    with Netlink() as sandbox:
        sandbox.delete_link(LINK)


def _index_in(namespace: int) -> int:
    """The number of the sandbox's end, which only a process in its namespace can look up and adjust."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(namespace)
        try:
            cut_datagrams(LINK)
            return link_index(LINK)
        finally:
            enter(here)
    finally:
        os.close(here)


def enter(namespace: int) -> None:
    """Go into another network namespace."""
    if _libc.setns(namespace, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _address_sandbox(sandbox: Netlink, index: int) -> None:
    sandbox.set_up(index)
    sandbox.add_address(index, INSIDE, LENGTH)
    sandbox.add_route("0.0.0.0", 0, index=index, via=GATEWAY)


def _has_six(gateway: Netlink, sandbox: Netlink, here: int, there: int) -> bool:
    """Address both ends for IPv6; False where the kernel has none."""
    try:
        gateway.add_address(here, GATEWAY6, LENGTH6)
        sandbox.add_address(there, INSIDE6, LENGTH6)
        sandbox.add_route("::", 0, index=there, via=GATEWAY6)
    except OSError as error:
        if error.errno in NO_SIX:
            return False
        raise
    return True


def _serve_prefixes(gateway: Netlink, index: int, prefixes: Sequence[tuple[str, int]], six: bool) -> None:
    """Make addresses the gateway's own. The link's own network goes first, or answers would come back here."""
    gateway.add_route("192.0.0.0", LENGTH, index=index, table=LOCAL_TABLE)
    wanted = [(SYNTHETIC, SYNTHETIC_LENGTH), *prefixes]
    if six:
        gateway.add_route("fd70:6965:72::", LENGTH6, index=index, table=LOCAL_TABLE)
        wanted.append((SYNTHETIC6, SYNTHETIC6_LENGTH))
    for prefix, length in wanted:
        if six or ":" not in prefix:
            gateway.add_route(prefix, length, index=1, kind=LOCAL, table=LOCAL_TABLE)


def _listener(family: int, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    sock.listen(1024)
    return sock


def resolver(family: int) -> socket.socket:
    """A socket that hears what is asked for names, at any address."""
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        sock.bind(("::", 53))
    else:
        sock.setsockopt(socket.IPPROTO_IP, 8, 1)
        sock.bind(("0.0.0.0", 53))
    return sock


def _tap(rows: Sequence[tuple[str, int, int, str, str]]) -> socket.socket:
    """A socket that sees those packets from the sandbox that a filter keeps."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
    code = _assemble(rows)
    buffer = ctypes.create_string_buffer(code, len(code))
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", len(rows), ctypes.addressof(buffer)))
    sock.setsockopt(263, 23, 1)
    sock.bind(("gateway", 3))
    return sock


_BYTE, _BYTE_AT_X, _HEADER_TO_X, _AND, _EQUAL, _RETURN = 0x30, 0x50, 0xB1, 0x54, 0x15, 0x06
_HALF, _HALF_AT_X = 0x28, 0x48
_ATTEMPTS: list[tuple[str, int, int, str, str]] = [
    ("", _BYTE, 0, "", ""), ("", _AND, 0xF0, "", ""), ("", _EQUAL, 0x40, "four", ""), ("", _EQUAL, 0x60, "six", "drop"),
    ("four", _BYTE, 9, "", ""), ("", _EQUAL, 2, "drop", ""), ("", _EQUAL, 6, "", "keep"),
    ("", _HEADER_TO_X, 0, "", ""), ("", _BYTE_AT_X, 13, "", ""), ("", _AND, 0x12, "", ""),
    ("", _EQUAL, 0x02, "keep", "drop"),
    ("six", _BYTE, 6, "", ""), ("", _EQUAL, 0, "drop", ""), ("", _EQUAL, 58, "echo", ""), ("", _EQUAL, 6, "", "keep"),
    ("", _BYTE, 53, "", ""), ("", _AND, 0x12, "", ""), ("", _EQUAL, 0x02, "keep", "drop"),
    ("echo", _BYTE, 40, "", ""), ("", _EQUAL, 128, "keep", "drop"),
    ("keep", _RETURN, 128, "", ""), ("drop", _RETURN, 0, "", ""),
]  # fmt: skip
"""What opens something: the first packet of a TCP connection, UDP, echo requests, and protocols without a name. A row
is a label, an operation, a value, and where to go if equal and if not; nothing is the next line."""

_DATAGRAMS: list[tuple[str, int, int, str, str]] = [
    ("", _BYTE, 0, "", ""), ("", _AND, 0xF0, "", ""), ("", _EQUAL, 0x40, "four", ""), ("", _EQUAL, 0x60, "six", "drop"),
    ("four", _HEADER_TO_X, 0, "", ""), ("", _BYTE, 9, "", ""),
    ("", _EQUAL, 1, "echo", ""), ("", _EQUAL, 17, "", "drop"),
    ("", _HALF_AT_X, 2, "", ""), ("", _EQUAL, 53, "drop", "keep"),
    ("echo", _BYTE_AT_X, 0, "", ""), ("", _EQUAL, 8, "keep", "drop"),
    ("six", _BYTE, 6, "", ""), ("", _EQUAL, 58, "echo6", ""), ("", _EQUAL, 17, "", "drop"),
    ("", _HALF, 42, "", ""), ("", _EQUAL, 53, "drop", "keep"),
    ("echo6", _BYTE, 40, "", ""), ("", _EQUAL, 128, "keep", "drop"),
    ("keep", _RETURN, 1 << 16, "", ""), ("drop", _RETURN, 0, "", ""),
]  # fmt: skip
"""UDP but for lookups, which go to a socket of their own, and echo requests."""


def _assemble(rows: Sequence[tuple[str, int, int, str, str]]) -> bytes:
    places = {row[0]: place for place, row in enumerate(rows) if row[0]}
    code = b""
    for place, (_, operation, value, then, otherwise) in enumerate(rows, 1):
        jumps = [places[label] - place if label else 0 for label in (then, otherwise)]
        code += struct.pack("HBBI", operation, *jumps, value)
    return code


def probe(mode: str, seconds: float = 20.0) -> dict[str, str]:
    """Run in a child of a sandbox's init, in its network namespace: try what the policy must refuse, and say how it
    was refused. Raises OSError if something got through."""
    links = sorted(name for _, name in socket.if_nameindex())
    if mode == "none":
        if any(name != "lo" and not name.startswith(PRIVATE_LINK) for name in links):
            raise OSError(errno.EISCONN, f"the sandbox has the links {links}, but its network is none")
        return {"links": " ".join(links), "tcp": _try_tcp(_REFUSED, 443, seconds), "udp": _try_udp(_REFUSED, 53)}
    if mode == "public":
        return {"links": " ".join(links), "dns": _try_name("probe.invalid", seconds)}
    return {
        "links": " ".join(links),
        "dns": _try_name("probe.invalid", seconds),
        "tcp": _try_tcp(_REFUSED, 443, seconds),
        "metadata": _try_tcp("169.254.169.254", 80, seconds),
        "gateway": _try_tcp(GATEWAY, 22, seconds),
    }


def _try_tcp(address: str, port: int, seconds: float) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(seconds)
        try:
            sock.connect((address, port))
            sock.send(b"\n")
            if sock.recv(1) == b"":
                return "closed"
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"a connection to {address}:{port} was neither made nor refused") from None
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
    raise OSError(errno.EISCONN, f"a connection to {address}:{port} was made, which the policy refuses")


def _try_udp(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect((address, port))
            sock.send(b"\n")
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
    raise OSError(errno.EISCONN, f"a datagram to {address} was sent, but the network is none")


def _try_name(name: str, seconds: float) -> str:
    query = b"\x70\x72\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    query += b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0\x00\x01\x00\x01"
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect((GATEWAY, 53))
        while time.monotonic() < deadline:
            sock.send(query)
            if select.select([sock], [], [], 2.0)[0]:
                answer = sock.recv(512)
                if answer[3] & 0x0F == 3:
                    return "NXDOMAIN"
                raise OSError(
                    errno.EPROTO, f"the resolver answered {answer[3] & 0x0F} for {name}, which does not exist"
                )
    raise OSError(errno.ETIMEDOUT, "the sandbox's resolver does not answer")


LAN_LENGTH = 24
FIRST, LAST = 2, 254
MOST = 200
"""The limit on the networks of one trial."""

_LAN_MTU = 65000


def hub_address(network: int) -> str:
    """Where the resolver of a private network is. The range is one for bench marks, which no policy ever dials."""
    return f"198.19.{network}.1"


def service_address(network: int, host: int) -> str:
    return f"198.19.{network}.{host}"


def make_hub(networks: int) -> list[int]:
    """Run in a process that ends after it: make a hub, and answer descriptors of its namespace and of the socket that
    hears what its networks ask for names."""
    if _libc.unshare(NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    with Netlink() as netlink:
        netlink.set_up(1)
        for number in range(networks):
            netlink.make_bridge(_bridge(number))
            index = link_index(_bridge(number))
            netlink.add_address(index, hub_address(number), LAN_LENGTH)
            netlink.set_up(index)
            netlink.stop_forwarding(index)
    return [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), resolver(socket.AF_INET).detach()]


def join(hub: int, places: Sequence[tuple[int, int]]) -> None:
    """Run in a service's namespace, by a process that ends after it: link it to networks of a hub. `places` are pairs
    of a network's number and the service's own number there."""
    with Netlink() as netlink:
        for network, host in places:
            link = f"{PRIVATE_LINK}{network}"
            netlink.make_pair(link, _port(network, host), hub, _LAN_MTU)
            index = link_index(link)
            netlink.add_address(index, service_address(network, host), LAN_LENGTH)
            netlink.set_up(index)
    enter(hub)
    with Netlink() as netlink:
        for network, host in places:
            index = link_index(_port(network, host))
            netlink.set_master(index, link_index(_bridge(network)))
            netlink.set_up(index)


def asker(address: str) -> tuple[int, int]:
    """The network of the service at `address`, and its number there."""
    _, _, network, host = struct.unpack("4B", socket.inet_aton(address))
    return network, host


def _bridge(network: int) -> str:
    return f"net{network}"


def _port(network: int, host: int) -> str:
    return f"port{network}.{host}"


_GROUP = 7
_HEAD = 600
"""How many bytes of a packet are logged: enough for a lookup's whole question."""
_LAST = 0xFFFFFFFF
"""The metric of a route that is taken when there is no other."""
_LACKING = (
    errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENOENT, errno.EINVAL, errno.ENOSYS,
    errno.EPERM, errno.EACCES,
)  # fmt: skip
"""How a kernel says that it has no packet log, or that not everybody may use it."""

_LISTEN = message(
    4 << 8 | 1,
    0x4,
    1,
    struct.pack(">BBH", socket.AF_UNSPEC, 0, _GROUP)
    + attribute(1, b"\1")
    + attribute(2, struct.pack(">IBx", _HEAD, 2))
    + attribute(5, struct.pack(">I", 1))
    + attribute(6, struct.pack(">H", 1)),
)
"""Binds a socket to the packet log: with packets, each at once, with a number."""
_RULES = refusing(_GROUP, GATEWAY)


def begin_without_network() -> tuple[dict[str, str], list[socket.socket]]:
    """Run by a sandbox's init in its network namespace, before anything else runs there: `listen_for_refused`; prove
    that there is no way out. Answers the proof and the sockets."""
    sockets = listen_for_refused()
    proof = probe("none") | {"attempts": "listed" if sockets else "not listed"}
    for sock in sockets[:1]:
        while receive_refused(sock) is not None:
            pass
    return proof, sockets


def listen_for_refused() -> list[socket.socket]:
    """Run by a sandbox's init in its network namespace: a socket that tells of refused packets, and one that sends
    answers to lookups. Nothing where the kernel cannot tell: what has no route is then refused in silence."""
    try:
        netlink = Netlink(NETFILTER)
        try:
            netlink.socket.send(_LISTEN)
            netlink.wait({1}, "cannot listen to refused packets (nfnetlink_log)")
            commit(_RULES, netlink)
            _add_routes_of_last_resort()
            answers = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
        except OSError:
            netlink.socket.close()
            raise
    except OSError as error:
        if error.errno in _LACKING:
            return []
        raise
    netlink.socket.setblocking(False)
    return [netlink.socket, answers]


def _add_routes_of_last_resort() -> None:
    with Netlink() as netlink:
        netlink.add_last_resort("127.0.0.1", _LAST)
        try:
            netlink.add_last_resort("::1", _LAST)
        except OSError as error:
            if error.errno not in NO_SIX:
                raise


def receive_refused(sock: socket.socket) -> bytes | None:
    """The next logged packets, empty if some were lost; None if there are no more."""
    try:
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except OSError as error:
        return b"" if error.errno == errno.ENOBUFS else None
