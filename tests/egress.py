"""What is tried in a sandbox to get out of it, and how the outcome is gathered, for the tests of closed networks.

`ATTEMPTS` runs inside a sandbox, as its root, and prints one JSON object: for each attempt what came of it. `run_world`
runs it under a policy in a fake internet and tells what came of the attempts, what the policy's log says and what
reached the internet. With Docker the engine itself runs in the fake internet, so that nothing of it has a way out
either, and `tools_image` gives it an image with the programs that the attempts need.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pier.image.model import Image
from tests.busybox import busybox_image
from tests.once import made_once
from tests.world import in_world

ALLOWED = (
    "allowed.test", "*.wild.test", "other.test:8443", "six.test", "inward.test", "loop.test", "metadata.test",
    "mapped.test", "93.184.216.99:80",
)  # fmt: skip

ATTEMPTS = r"""
import errno, json, os, socket, ssl, struct, sys, time

results = {}

def attempt(name):
    def run(body):
        try:
            results[name] = f"got {body()!r}"
        except OSError as error:
            results[name] = errno.errorcode.get(error.errno, type(error).__name__ + str(error))
    return run

def talk(address, port, data=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect((address, port))
        sock.sendall(data)
        return sock.recv(1000)

def to_name(name, port, data):
    with socket.create_connection((name, port), 30) as sock:
        sock.sendall(data)
        return sock.recv(1000)

def ask(server, name, kind=1, tcp=False):
    query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0)
    query += b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    query += b"\0" + struct.pack(">HH", kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as sock:
        sock.settimeout(30)
        sock.connect((server, 53))
        sock.send((struct.pack(">H", len(query)) if tcp else b"") + query)
        answer = sock.recv(1000)
        return {0: "NOERROR", 3: "NXDOMAIN"}.get(answer[5 if tcp else 3] & 15), len(answer) - len(query)

for number, (address, port) in enumerate([
    ("93.184.216.36", 80), ("93.184.216.34", 80), ("10.1.2.3", 80), ("192.168.1.1", 443), ("172.16.0.1", 22),
    ("169.254.169.254", 80), ("203.0.113.2", 7777), ("203.0.113.1", 53), ("192.0.0.1", 7777), ("127.0.0.1", 7777),
    ("8.8.8.8", 853), ("224.0.0.1", 80), ("255.255.255.255", 80), ("198.18.77.77", 80), ("93.184.216.99", 443),
]):
    attempt(f"tcp {address}:{port}")(lambda: talk(address, port))
for address in ("2001:470::34", "fd00:ec2::254", "2001:db8::2", "fd70:6965:72::1", "::ffff:93.184.216.36"):
    attempt(f"tcp6 {address}")(lambda: talk(address, 80, family=socket.AF_INET6))

@attempt("udp")
def _():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(30)
        sock.connect(("93.184.216.34", 9999))
        sock.send(b"x")
        return sock.recv(10)

attempt("name refused")(lambda: socket.getaddrinfo("refused.test", 80))
attempt("name that does not exist")(lambda: socket.getaddrinfo("missing.wild.test", 80))
attempt("name above a wildcard")(lambda: socket.getaddrinfo("wild.test", 80))
attempt("name like a rule")(lambda: socket.getaddrinfo("allowed.test.refused.test", 80))
attempt("dns to 8.8.8.8")(lambda: ask("8.8.8.8", "allowed.test"))
attempt("dns to the machine's own")(lambda: ask("203.0.113.1", "allowed.test"))
attempt("dns over tcp to 8.8.8.8")(lambda: ask("8.8.8.8", "allowed.test", tcp=True))
for kind in (1, 5, 10, 15, 16, 28, 33, 65, 255):
    attempt(f"tunnel {kind}")(lambda: ask("192.0.0.1", "c2VjcmV0LWRhdGE.refused.test", kind))
    attempt(f"tunnel over tcp {kind}")(lambda: ask("192.0.0.1", "c2VjcmV0LWRhdGE.refused.test", kind, tcp=True))
attempt("tunnel below an allowed name")(lambda: ask("192.0.0.1", "c2VjcmV0.allowed.test", 16))

@attempt("icmp")
def _():
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
        sock.settimeout(30)
        sock.sendto(b"\x08\x00\xf7\xfd\x00\x01\x00\x01", ("93.184.216.36", 0))
        kind = sock.recv(1000)[20]
        return {0: "reply", 3: "unreachable"}[kind]

@attempt("raw packet")
def _():
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        ends = socket.inet_aton("10.9.9.9") + socket.inet_aton("93.184.216.36")
        header = struct.pack(">BBHHHBBH", 0x45, 0, 28, 1, 0, 64, 17, 0) + ends
        return sock.sendto(header + struct.pack(">HHHH", 5, 5, 8, 0), ("93.184.216.36", 0))

attempt("vsock")(lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 1024)))
attempt("packet socket")(lambda: socket.socket(17, socket.SOCK_RAW, 3))
attempt("alg socket")(lambda: socket.socket(38, socket.SOCK_SEQPACKET))

@attempt("new route")
def _():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        body = struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 4, 253, 1, 0) + struct.pack("HHi", 8, 4, 1)
        sock.send(struct.pack("IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)
        code = -struct.unpack_from("i", sock.recv(1000), 16)[0]
        if code:
            raise OSError(code, "")
        return "added"

def http(*lines):
    return "\r\n".join((*lines, "", "")).encode()

plain = http("GET / HTTP/1.1", "Host: refused.test")
posted = http("POST / HTTP/1.1", "Host: allowed.test", "Content-Length: 3") + b"abc"
for name, data in {
    "http host disagrees": plain,
    "http absolute uri disagrees": http("GET http://refused.test/ HTTP/1.1", "Host: allowed.test"),
    "http second request disagrees": posted + plain,
    "connect method": http("CONNECT refused.test:443 HTTP/1.1", "Host: refused.test:443"),
    "http2 without tls": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http after an empty line": b"\r\n" + plain,
    "http in lower case": plain.lower(),
    "http after an upgrade that is refused": http("GET / HTTP/1.1", "Host: allowed.test", "Upgrade: x") + plain,
    "http with line feeds": plain.replace(b"\r", b""),
    "http with two lengths": posted.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n"),
}.items():
    attempt(name)(lambda: to_name("allowed.test", 80, data))

def hello(server_name):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(into, out, server_hostname=server_name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()

attempt("tls server name disagrees")(lambda: to_name("allowed.test", 443, hello("refused.test")))
attempt("tls server name agrees")(lambda: to_name("allowed.test", 443, hello("allowed.test")))
attempt("tls without server name")(lambda: to_name("allowed.test", 443, hello(None)))

def get(name, port=80):
    return to_name(name, port, http("GET / HTTP/1.1", f"Host: {name}:{port}"))

for name in ("inward.test", "loop.test", "metadata.test", "mapped.test"):
    attempt(f"name leads inward: {name}")(lambda: get(name))
attempt("port of another rule")(lambda: get("other.test"))
attempt("port of its rule")(lambda: get("other.test", 8443))
attempt("server speaks first")(lambda: socket.create_connection(("allowed.test", 25), 30).recv(100))
attempt("wildcard")(lambda: get("sub.wild.test"))
attempt("address by its rule")(lambda: talk("93.184.216.99", 80))

try:
    open("/etc/resolv.conf", "w").write("nameserver 8.8.8.8\noptions timeout:1 attempts:1\n")
except OSError:
    pass
attempt("own resolv.conf")(lambda: ask("8.8.8.8", "refused.test"))

for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", *sys.argv[1:]):
    attempt(f"engine {path}")(lambda: socket.socket(socket.AF_UNIX).connect(path))
print(json.dumps(results))
"""

_OUTSIDE = r"""
import asyncio, json, os, socket, sys, threading
from contextlib import nullcontext
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.host import host_image
from tests.egress import ATTEMPTS, COMMANDS, HOLD, tools_image
from tests.engine import engine

machine = socket.socket()
machine.bind(("0.0.0.0", 7777))
machine.listen()
touched = []
threading.Thread(target=lambda: [touched.append(str(machine.accept()[1])) for _ in range(99)], daemon=True).start()

async def main(kind, image, sockets):
    mode, hosts = sys.argv[1], tuple(json.loads(sys.argv[2]))
    decisions = []
    told = {"decisions": decisions}
    with Lease() as lease:
        async with open_backend(kind, lease) as backend:
            policy = NetworkPolicy(mode, hosts)
            note = lambda decision: decisions.append(decision.line())
            async with await backend.start(SandboxSpec(image, network=policy, on_decision=note)) as box:
                await box.write_file("/tmp/attempts.py", ATTEMPTS.encode())
                result = await box.exec(["/usr/bin/python3", "/tmp/attempts.py", *sockets], timeout=200)
                told["attempts"] = json.loads(result.stdout) if result.ok else {"failed": result.error_text}
            async with await backend.start(SandboxSpec(image, network=policy)) as box:
                told["commands"] = {}
                for name, command in COMMANDS.items():
                    result = await box.exec(command, timeout=100, env={"HOME": "/tmp"})
                    told["commands"][name] = [result.exit_code, result.text[-500:] + result.error_text[-500:]]
                serving = ["/usr/bin/python3", "-m", "http.server", "9999", "--directory", "/usr"]
                async with await backend.start(SandboxSpec(image, network=policy)) as other:
                    async with await other.spawn(serving):
                        while not (await other.exec(["curl", "-s", "-o", "/dev/null", "http://127.0.0.1:9999/"])).ok:
                            await asyncio.sleep(0.05)
                        told["neighbour"] = []
                        for address in ("192.0.0.2", "192.0.0.1", "127.0.0.1", "[fd70:6965:72::2]", "203.0.113.2"):
                            result = await box.exec(["curl", "-sS", "-m", "60", f"http://{address}:9999/"], timeout=100)
                            told["neighbour"].append(result.exit_code)
                await box.set_network(NetworkPolicy("allowlist", ("allowed.test",)))
                heard = []
                hear = lambda _, data: heard.append(data)
                holding = await box.spawn(["/usr/bin/python3", "-c", HOLD], on_output=hear)
                while b"220" not in b"".join(heard):
                    await asyncio.sleep(0.05)
                await box.set_network(NetworkPolicy("none"))
                async with asyncio.timeout(100):
                    await holding.wait()
                told["held"] = b"".join(heard).decode()
                allow = NetworkPolicy("allowlist", ("other.test",))
                for later in (NetworkPolicy("none"), allow, NetworkPolicy("public")):
                    await box.set_network(later)
                    rows = []
                    for name in ("allowed.test", "other.test"):
                        result = await box.exec(["curl", "-sS", "-m", "60", f"http://{name}/"], timeout=100)
                        rows.append(result.text.strip() if result.ok else "refused")
                    told["after " + later.mode] = rows
    told["seen"], told["touched"] = traffic.seen(), touched
    Path(sys.argv[3]).write_text(json.dumps(told))

with engine() if sys.argv[4] == "docker" else nullcontext() as running:
    if running is None:
        asyncio.run(main("local", host_image(), []))
    else:
        os.environ["DOCKER_HOST"] = running.url
        sockets = [str(running.socket), *map(str, (running.directory / "exec").glob("containerd/*.sock"))]
        asyncio.run(main("docker", tools_image(Path(sys.argv[5])), sockets))
        assert running.containers() == []
"""

HOLD = """
import socket
sock = socket.create_connection(("allowed.test", 25), 60)
print(sock.recv(100), flush=True)
sock.settimeout(None)
try:
    print("ended", sock.recv(100), flush=True)
except OSError as error:
    print("ended", error, flush=True)
"""
"""Keeps a connection open until somebody else ends it."""

COMMANDS = {
    "curl": ["curl", "-sS", "-m", "60", "http://allowed.test/path"],
    "curl over IPv6": ["curl", "-sS", "-6", "-m", "60", "http://allowed.test/path"],
    "curl to an IPv6 host": ["curl", "-sS", "-m", "60", "http://six.test/"],
    "curl over TLS": ["curl", "-sSk", "-m", "60", "https://allowed.test/tls"],
    "curl over TLS with another name": [
        "curl", "-sSk", "-m", "60", "--connect-to", "refused.test:443:allowed.test:443", "https://refused.test/",
    ],
    "git": ["git", "ls-remote", "http://allowed.test/repository.git"],
    "python": ["/usr/bin/python3", "-c", "import urllib.request as u; print(u.urlopen('http://allowed.test/py').read())"],
    "node": ["node", "-e", "fetch('http://allowed.test/js').then(r => r.text()).then(console.log)"],
    "redirect to a refused name": ["curl", "-sSL", "-m", "60", "http://allowed.test/to/refused.test"],
    "redirect to an address": ["curl", "-sSL", "-m", "60", "http://allowed.test/to/93.184.216.36"],
    "curl with another address": ["curl", "-sS", "-m", "60", "--resolve", "allowed.test:80:93.184.216.36", "http://allowed.test/"],
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """What one run of all attempts came to."""

    attempts: dict[str, str]
    commands: dict[str, tuple[int, str]]
    decisions: list[dict[str, Any]]
    seen: dict[str, int]
    touched: list[str]
    neighbour: list[int]
    held: str
    after: dict[str, list[str]] = field(default_factory=dict)

    def reached(self, address: str) -> list[str]:
        """What of the traffic that was seen went to an address."""
        return [row for row in self.seen if row.split()[1].startswith(address)]

    def refused(self, name: str) -> list[dict[str, Any]]:
        """The refusals in the policy's log that are about a name or an address."""
        return [row for row in self.decisions if row.get("name") == name and not row["allowed"]]


def tools_image(directory: Path) -> Image:
    """An image with this machine's python3, curl and git and what they need; what is not installed is left out."""
    image = busybox_image(directory)
    layer = image.layers[0]
    python = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib") / python.name
    shutil.copytree(library, layer / f"usr/lib/{python.name}", symlinks=True, ignore=_not_needed)
    (layer / "usr/bin/python3").symlink_to(python.name)
    found = [python, Path("/usr/bin/curl"), Path("/usr/bin/git"), Path("/usr/lib/git-core/git-remote-http")]
    programs = [path for path in found if path.exists()]
    for path in {*programs, *_libraries([*programs, *library.glob("lib-dynload/*.so")])}:
        target = layer / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path.resolve(), target)
    return image


def _not_needed(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name in ("__pycache__", "test", "idlelib", "ensurepip") or name[:7] == "config-"}


def _libraries(files: list[Path]) -> set[Path]:
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False)
    return {Path(word) for word in done.stdout.split() if word.startswith("/") and not word.endswith(":")}


def run_world(
    mode: str, hosts: tuple[str, ...], factory: pytest.TempPathFactory, backend: str = "local", helper: str = ""
) -> World:
    def run(directory: Path) -> None:
        (directory / "image").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIER_HOME", str(directory / "pier"))
            patch.setenv("PIER_DOCKER_HELPER", helper)
            told = (str(directory / "told.json"), backend, str(directory / "image"))
            done = in_world(_OUTSIDE, directory, mode, json.dumps(hosts), *told)
        assert (directory / "told.json").exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"

    place = made_once(factory, f"world-{backend}{helper}-{mode}", run)
    told = json.loads((place / "told.json").read_text())
    after = {name.removeprefix("after "): rows for name, rows in told.items() if name.startswith("after ")}
    return World(
        told["attempts"],
        told["commands"],
        told["decisions"],
        told["seen"],
        told["touched"],
        told["neighbour"],
        told["held"],
        after,
    )
