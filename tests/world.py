"""A fake internet for tests of closed networks.

`in_world(script)` runs a Python script in a network that has no way to the real one: a first namespace plays this
machine, a second one everything else. Whatever address a packet is sent to, it arrives in the second, where servers
answer for the public, private and metadata addresses that tests aim at, and everything that arrives is counted. So no
packet leaves even if a defence fails, and each one that got through is seen.

Works as root and as a plain user, who is root in a user namespace of this world's own for the set-up only.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path

from pier.network.netlink import LOCAL, LOCAL_TABLE, Netlink, link_index

NAMES = {
    "allowed.test": "93.184.216.34",
    "other.test": "93.184.216.35",
    "refused.test": "93.184.216.36",
    "sub.wild.test": "93.184.216.37",
    "inward.test": "10.1.2.3",
    "loop.test": "127.0.0.1",
    "metadata.test": "169.254.169.254",
    "mapped.test": "::ffff:169.254.169.254",
    "six.test": "2001:470::34",
}
"""The names that the fake internet knows, and where they lead. With several addresses (`a b`) each lookup gets the
next one."""

CERTIFICATE: list[str] = []
"""The file with the key and certificate of the world's TLS servers, if there is a program to make one."""

SERVERS = "PIER_WORLD_SERVERS"
PORTS = (80, 443, 8443, 25, 22, 9418)
DATAGRAM_PORT = 4433
_NEW_NETWORK, _NEW_MOUNTS, _NEW_USERS = 0x40000000, 0x00020000, 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def in_world(
    script: str, directory: Path, *arguments: str, timeout: float = 240, servers: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `script` (the source of a Python program) in a world of its own. `servers` is `module:function`; the function
    starts more servers on the fake internet, on ports of its own and in threads, and adds their names to `NAMES`."""
    program = directory / "script.py"
    program.write_text(script)
    command = [sys.executable, "-m", "tests.world", str(program), *arguments]
    root = Path(__file__).resolve().parent.parent
    environ = {**os.environ, SERVERS: servers}
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=timeout)


class Traffic:
    """What reached the fake internet: a count for each protocol, address and port, and the lines that servers heard."""

    def __init__(self, ask: socket.socket) -> None:
        self._ask = ask

    def seen(self) -> Counter[str]:
        """Counts like `tcp 93.184.216.34:80`, of everything so far but the resolver's own."""
        self._ask.send(b"seen")
        return Counter(json.loads(self._ask.recv(1 << 20)))


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _mount_resolver_files() -> None:
    """Names are resolved by the fake internet's resolver, as /etc/resolv.conf and nsswitch.conf say."""
    _unshare(_NEW_MOUNTS)
    _libc.mount(b"", b"/", b"", ctypes.c_ulong(16384 | (1 << 18)), None)
    with tempfile.TemporaryDirectory(prefix="world-") as directory:
        for name, text in (
            ("resolv.conf", "nameserver 203.0.113.1\n"),
            ("nsswitch.conf", "hosts: files dns\n"),
            ("hosts", "127.0.0.1 localhost\n"),
        ):
            path = Path(directory) / name
            path.write_text(text)
            target = os.path.realpath(f"/etc/{name}").encode()
            if _libc.mount(str(path).encode(), target, b"", ctypes.c_ulong(4096), None) != 0:
                raise OSError(ctypes.get_errno(), f"mount {target.decode()}")


def main() -> None:
    """Make the world, then run the script that was named, with `traffic` in its globals."""
    uid, gid = os.getuid(), os.getgid()
    if uid != 0:
        _unshare(_NEW_USERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount_resolver_files()
    _unshare(_NEW_NETWORK)
    with tempfile.TemporaryDirectory(prefix="world-") as directory:
        _make_certificate(Path(directory) / "server.pem")
        _run()


def _make_certificate(path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is not None:
        names = ",".join(f"DNS:{name}" for name in NAMES)
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")  # cheaper than RSA
        command = [openssl, "req", "-x509", *key, "-days", "2", "-subj", "/CN=world"]
        command += ["-addext", f"subjectAltName={names}", "-keyout", str(path), "-out", str(path) + ".crt"]
        subprocess.run(command, check=True, capture_output=True)
        path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
        CERTIFICATE.append(str(path))


def _run() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ours.close()
            _be_the_internet(theirs, here)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    theirs.close()
    assert ours.recv(100) == b"ready", "the fake internet did not start"
    with Netlink() as netlink:
        netlink.set_up(1)
        index = link_index("uplink")
        netlink.set_up(index)
        netlink.add_address(index, "203.0.113.2", 24)
        netlink.add_route("0.0.0.0", 0, index=index, via="203.0.113.1")
        netlink.add_address(index, "2001:db8::2", 64)
        netlink.add_route("::", 0, index=index, via="2001:db8::1")
    program = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    try:
        exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__", "traffic": Traffic(ours)})
    finally:
        ours.close()
        os.waitpid(child, 0)


def _be_the_internet(control: socket.socket, machine: int) -> None:
    _unshare(_NEW_NETWORK)
    with Netlink() as netlink:
        netlink.set_up(1)
        netlink.make_pair("world", "uplink", machine, 1500)
        index = link_index("world")
        netlink.set_up(index)
        netlink.add_address(index, "203.0.113.1", 24)
        netlink.add_address(index, "2001:db8::1", 64)
        netlink.add_route("203.0.113.0", 24, index=index, table=LOCAL_TABLE)
        netlink.add_route("2001:db8::", 64, index=index, table=LOCAL_TABLE)
        netlink.add_route("0.0.0.0", 0, index=1, kind=LOCAL, table=LOCAL_TABLE)
        netlink.add_route("::", 0, index=1, kind=LOCAL, table=LOCAL_TABLE)
    counts: Counter[str] = Counter()
    watch = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
    watch.bind(("world", 3))
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.bind(("203.0.113.1", 53))
    for port in PORTS:
        for family in (socket.AF_INET, socket.AF_INET6):
            server = socket.socket(family, socket.SOCK_STREAM)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            server.bind(("" if family == socket.AF_INET else "::", port))
            server.listen(64)
            threading.Thread(target=_serve, args=(server, port), daemon=True).start()
    if where := os.environ.get(SERVERS):
        module, _, function = where.partition(":")
        getattr(importlib.import_module(module), function)(NAMES)
    for family in (socket.AF_INET, socket.AF_INET6):
        threading.Thread(target=_echo_datagrams, args=(family,), daemon=True).start()
    control.send(b"ready")
    while True:
        for sock in select.select([control, watch, resolver], [], [])[0]:
            if sock is watch:
                data, source = watch.recvfrom(2048)
                if source[2] != 4:
                    _count(data, counts)
            elif sock is resolver:
                data, peer = resolver.recvfrom(2048)
                resolver.sendto(_resolve(data), peer)
            elif not control.recv(100):
                return
            else:
                _drain(watch, counts)
                control.send(json.dumps(counts).encode())


def _drain(watch: socket.socket, counts: Counter[str]) -> None:
    watch.setblocking(False)
    try:
        while True:
            data, source = watch.recvfrom(2048)
            if source[2] != 4:
                _count(data, counts)
    except BlockingIOError:
        watch.setblocking(True)


def _count(data: bytes, counts: Counter[str]) -> None:
    """Count what came in; the resolver's own queries and the link's own chatter are not of interest."""
    if data[0] >> 4 == 4:
        number, address, at = data[9], socket.inet_ntop(socket.AF_INET, data[16:20]), 4 * (data[0] & 15)
    elif data[0] >> 4 == 6:
        number, address, at = data[6], socket.inet_ntop(socket.AF_INET6, data[24:40]), 40
    else:
        return
    kind = {6: "tcp", 17: "udp", 1: "icmp", 58: "icmp6"}.get(number, str(number))
    port = struct.unpack_from(">H", data, at + 2)[0] if kind in ("tcp", "udp") else 0
    if address in ("203.0.113.1", "2001:db8::1") or address.startswith(("fe80", "ff")) or kind == "icmp6":
        return
    counts[f"{kind} {address}:{port}" if port else f"{kind} {address}"] += 1


def _resolve(query: bytes) -> bytes:
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode())
        at += size + 1
    name = ".".join(labels).lower()
    kind = struct.unpack_from(">H", query, at + 1)[0]
    address, *others = NAMES.get(name, "").split() or [""]
    if others and kind == 1:
        NAMES[name] = " ".join((*others, address))
    records = b""
    if address and (":" in address) == (kind == 28) and kind in (1, 28):
        packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
        records = struct.pack(">HHHIH", 0xC00C, kind, 1, 60, len(packed)) + packed
    if kind == 16 and address:
        text = b"v=world"
        records = struct.pack(">HHHIHB", 0xC00C, kind, 1, 60, len(text) + 1, len(text)) + text
    flags = 0x8180 | (0 if address else 3)
    header = query[:2] + struct.pack(">HHHHH", flags, 1, 1 if records else 0, 0, 0)
    return header + query[12 : at + 5] + records


def _echo_datagrams(family: int) -> None:
    """Whoever sends a datagram is told how long it was and at which address it arrived, from that address."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        level, option = (socket.IPPROTO_IP, 8) if family == socket.AF_INET else (socket.IPPROTO_IPV6, 49)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, 78, 1)
        sock.setsockopt(level, option, 1)
        sock.bind(("" if family == socket.AF_INET else "::", DATAGRAM_PORT))
        while True:
            data, extra, _, peer = sock.recvmsg(1 << 16, 256)
            info = extra[0][2]
            where, back = (info[8:12], bytes(4) + info[8:12] + bytes(4)) if len(info) == 12 else (info[:16], info)
            told = f"heard {len(data)} at {socket.inet_ntop(family, where)}\n".encode()
            kind = 8 if family == socket.AF_INET else socket.IPV6_PKTINFO
            sock.sendmsg([told + data[:1000]], [(level, kind, back)], 0, peer)


def _serve(server: socket.socket, port: int) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=_greet, args=(client, port), daemon=True).start()


def _greet(client: socket.socket, port: int) -> None:
    """HTTP servers answer HTTP and say which address was asked; others greet first, as mail servers do. Who says hello
    in TLS is answered in TLS."""
    with client:
        where = client.getsockname()[0]
        client.settimeout(60)
        try:
            if port == 443 and CERTIFICATE and client.recv(1, socket.MSG_PEEK) == b"\x16":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(CERTIFICATE[0])
                client = context.wrap_socket(client, server_side=True)
            if port in (25, 22):
                client.sendall(f"220 {where}\r\n".encode())
            data = client.recv(65536)
            if data.startswith((b"GET", b"POST", b"HEAD")):
                path = data.split()[1].decode()
                _answer_http(client, where, path)
            elif data:
                client.sendall(f"heard {len(data)} at {where}\n".encode())
        except OSError:
            return


def _answer_http(client: socket.socket, where: str, path: str) -> None:
    body = f"hello from {where}{path}\n".encode()
    status, extra = "200 OK", ""
    if "/info/refs" in path:
        body = b"0123456789" * 4 + b"\trefs/heads/main\n"
    if path.startswith("/to/"):
        status, extra = "302 Found", f"Location: http://{path[4:]}/\r\n"
    head = f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    client.sendall(head.encode() + body)


if __name__ == "__main__":
    main()
