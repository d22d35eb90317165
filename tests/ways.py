"""Ways to an engine other than its socket: TCP, TLS with certificates of the tests' own, and ssh to this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def make_certificates(directory: Path) -> Path:
    """An authority, a server's certificate for 127.0.0.1 and a client's, under the names that Docker has for them."""
    directory.mkdir()
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def run(*command: str) -> None:
        subprocess.run(command, cwd=directory, check=True, capture_output=True)

    run(*new, "-x509", "-subj", "/CN=tests", "-keyout", "ca-key.pem", "-out", "ca.pem")
    for name, use in (("server", "serverAuth"), ("client", "clientAuth")):
        run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}-key.pem", "-out", f"{name}.csr")
        (directory / f"{name}.ext").write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={use}\n")
        sign = ["openssl", "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-days", "2"]
        run(*sign, "-CAcreateserial", "-extfile", f"{name}.ext", "-out", f"{name}.pem")
    (directory / "cert.pem").write_bytes((directory / "client.pem").read_bytes())
    (directory / "key.pem").write_bytes((directory / "client-key.pem").read_bytes())
    return directory


def tls_options(certificates: Path, port: int) -> list[str]:
    """What an engine is started with to be served by TLS at a port, beside its socket."""
    files = {"tlscacert": "ca.pem", "tlscert": "server.pem", "tlskey": "server-key.pem"}
    options = [f"--{option}={certificates / name}" for option, name in files.items()]
    return [f"--host=tcp://127.0.0.1:{port}", "--tlsverify", *options]


@contextmanager
def by_tcp(path: Path) -> Iterator[str]:
    """A socket's engine at a TCP port without TLS."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ports: list[int] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(str(path))
        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await ended.wait()
        server.close()

    ended = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    ready.wait(START_SECONDS)
    try:
        yield f"tcp://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(START_SECONDS)


@dataclass
class Sshd:
    """An ssh server on loopback, and the directory with the `ssh` that knows its keys."""

    port: int
    path: Path
    process: subprocess.Popen[bytes]

    def sessions(self) -> list[int]:
        """The processes that serve connections."""
        told = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in told.split()]


def ssh_missing() -> str | None:
    """Why no ssh server can run here, or None."""
    if os.geteuid() != 0:
        return "an ssh server for this user needs root"
    lacking = [name for name in ("sshd", "ssh", "ssh-keygen") if _find(name) is None]
    return f"{lacking[0]} is not installed (apt-get install openssh-server)" if lacking else None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def sshd(directory: Path) -> Iterator[Sshd]:
    """Serve root's commands on loopback, with keys below `directory`."""
    directory.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    port = free_port()
    shutil.copy(directory / "user.pub", directory / "authorized")
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": directory / "host", "PidFile": "none", "UsePAM": "no",
        "AuthorizedKeysFile": directory / "authorized", "StrictModes": "no", "PermitRootLogin": "yes",
        "PasswordAuthentication": "no", "SetEnv": f"PATH={os.environ['PATH']}", "MaxStartups": "100",
    }  # fmt: skip
    (directory / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    known = (directory / "host.pub").read_text().split()
    (directory / "known").write_text(f"[127.0.0.1]:{port} {known[0]} {known[1]}\n")
    client = {"IdentityFile": directory / "user", "UserKnownHostsFile": directory / "known", "IdentitiesOnly": "yes"}
    (directory / "config").write_text("".join(f"{key} {value}\n" for key, value in client.items()))
    programs = directory / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory / "config"} "$@"\n')
    (programs / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([str(_find("sshd")), "-D", "-e", "-f", directory / "sshd_config"], stderr=log)
    try:
        _wait_for_port(port)
        yield Sshd(port, programs, process)
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens at {port}"
            time.sleep(0.05)
