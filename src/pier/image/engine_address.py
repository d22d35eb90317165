"""Where a Docker engine is and how to reach it: a unix socket, TCP with or without TLS, or ssh.

What is asked is what `docker` asks: `$DOCKER_HOST` (with `$DOCKER_TLS_VERIFY` and `$DOCKER_CERT_PATH`), else
`$DOCKER_CONTEXT`, else the current context of `~/.docker/config.json`, else the usual sockets. An address is one
string, which a later process can use as well: the engine's URL, and behind a `#` the directory of its certificates.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pier.errors import UsageError

_TLS, _TLS_UNVERIFIED = "#tls=", "#tls-unverified="
_SSH_SECONDS = 30
_KEPT_OPEN = 300.0
"""Seconds that an idle connection is kept: making one by ssh takes long."""
_MOST_AT_ONCE = 10
"""Connections by ssh, each of which is a process here and a session there."""


def engine_address(host: str = "", context: str = "") -> str:
    """Where an engine is expected: at `host` or that of `context`, if one is given, else as the variables say; empty if
    nothing says so and the usual sockets are not there."""
    if context:
        return _address_of(context)
    if url := host or os.environ.get("DOCKER_HOST"):
        return url + _tls_from_variables(url)
    name = os.environ.get("DOCKER_CONTEXT") or _current_context()
    if name and name != "default":
        return _address_of(name)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path("/var/run/docker.sock"), *([Path(runtime) / "docker.sock"] if runtime else [])]
    return next((f"unix://{place}" for place in places if place.is_socket()), "")


def shown(address: str) -> str:
    """An address as a person writes it."""
    return address.partition("#")[0]


def is_socket(address: str) -> bool:
    """Whether the engine is at a socket of this machine."""
    return address.startswith("unix://")


def _configuration() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _tls_from_variables(url: str) -> str:
    if not url.startswith(("tcp://", "https://")):
        return ""
    directory = os.environ.get("DOCKER_CERT_PATH") or _configuration()
    if os.environ.get("DOCKER_TLS_VERIFY"):
        return f"{_TLS}{directory}"
    return f"{_TLS_UNVERIFIED}{directory}" if os.environ.get("DOCKER_TLS") or url.startswith("https://") else ""


def _current_context() -> str:
    path = _configuration() / "config.json"
    try:
        return json.loads(path.read_text()).get("currentContext") or ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="set DOCKER_HOST", code="docker_config") from error


def _address_of(context: str) -> str:
    """The address of the engine that a context names."""
    key = hashlib.sha256(context.encode()).hexdigest()
    path = _configuration() / "contexts" / "meta" / key / "meta.json"
    try:
        endpoint: dict[str, Any] = json.loads(path.read_text())["Endpoints"]["docker"]
        url = endpoint["Host"]
    except FileNotFoundError:
        raise UsageError(
            f"unknown Docker context {context!r}: not in {path.parents[2]}", hint="docker context ls", code="no_context"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the Docker context {context!r} cannot be read: {path}: {error!r}",
            hint=f"docker context inspect {context}",
            code="no_context",
        ) from error
    certificates = _configuration() / "contexts" / "tls" / key / "docker"
    if url.startswith("tcp://") and certificates.is_dir():
        return f"{url}{_TLS_UNVERIFIED if endpoint.get('SkipTLSVerify') else _TLS}{certificates}"
    return url


def open_connector(address: str) -> tuple[aiohttp.BaseConnector, str]:
    """How to connect to the engine at `address`, and the URL below which its API is."""
    url = shown(address)
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return aiohttp.UnixConnector(url.removeprefix("unix://")), "http://docker"
    if parts.scheme == "ssh" and parts.hostname:
        return SshConnector(url), "http://docker"
    if parts.scheme in ("tcp", "http", "https") and parts.netloc:
        context = _tls(address)
        if context is None:
            return aiohttp.TCPConnector(), f"http://{parts.netloc}"
        return aiohttp.TCPConnector(ssl=context), f"https://{parts.netloc}"
    raise UsageError(
        f"invalid Docker engine address {url}",
        hint="unix:///run/docker.sock, tcp://host:2376 or ssh://user@host",
        code="engine_address",
    )


def is_encrypted(address: str) -> bool:
    """Whether the engine at `address` is spoken to by TLS."""
    return _TLS in address or _TLS_UNVERIFIED in address


def _tls(address: str) -> ssl.SSLContext | None:
    for mark in (_TLS, _TLS_UNVERIFIED):
        _, found, directory = address.partition(mark)
        if found:
            return _tls_context(Path(directory), verified=mark == _TLS)
    return None


def _tls_context(directory: Path, *, verified: bool) -> ssl.SSLContext:
    if verified and not directory.is_dir():
        hint = "set DOCKER_CERT_PATH to the directory with ca.pem, cert.pem and key.pem"
        raise UsageError(
            f"the directory of certificates {directory} is not there", hint=hint, code="docker_certificates"
        )
    ca, certificate, key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
    try:
        context = ssl.create_default_context(cafile=str(ca) if verified and ca.exists() else None)
        if not verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate.exists():
            context.load_cert_chain(str(certificate), str(key))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the certificates in {directory} cannot be used: {error}",
            hint="ca.pem, cert.pem and key.pem must be there: see DOCKER_CERT_PATH",
            code="docker_certificates",
        ) from error
    return context


class SshConnector(aiohttp.BaseConnector):
    """Each connection is the standard input and output of `docker system dial-stdio` on the engine's host, by the
    system's own `ssh` with its keys and configuration; no password is ever asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(limit=_MOST_AT_ONCE, keepalive_timeout=_KEPT_OPEN)
        self._argv = _ssh_argv(url)
        self._processes: set[asyncio.subprocess.Process] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self.complaint = ""
        """What ssh said when it last failed."""

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes.add(process)
        waiting = asyncio.ensure_future(self._wait(process))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        _, protocol = await asyncio.get_running_loop().create_connection(self._factory, sock=ours)
        return protocol

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        told = (await process.stderr.read())[-2000:].decode(errors="replace").strip()
        if await process.wait() > 0:
            self.complaint = told
        self._processes.discard(process)

    async def failure(self) -> str:
        """What ssh said, once the processes that failed have said it."""
        if self._waiting:
            await asyncio.wait(set(self._waiting), timeout=1)
        return self.complaint

    def close(self, *, abort_ssl: bool = False) -> Any:
        closing = super().close(abort_ssl=abort_ssl)
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        return closing

    async def ended(self) -> None:
        """Wait for the end of every process, after `close`."""
        if self._waiting:
            await asyncio.wait(set(self._waiting), timeout=_SSH_SECONDS)


def _ssh_argv(url: str) -> list[str]:
    parts = urlsplit(url)
    user = ["-l", parts.username] if parts.username else []
    port = ["-p", str(parts.port)] if parts.port else []
    options = [f"ConnectTimeout={_SSH_SECONDS}", "BatchMode=yes", "ServerAliveInterval=15"]
    there = ["docker", *(["--host", f"unix://{parts.path}"] if parts.path.strip("/") else []), "system", "dial-stdio"]
    flags = [part for option in options for part in ("-o", option)]
    return ["ssh", *flags, *user, *port, "-T", "--", str(parts.hostname), *there]
