"""Real HTTP servers with two virtual hosts: `allowed.test`, and `refused.test`, which is also the default.

Each server answers with the name of the host that it was asked for, and writes the `Host` of every request to a file.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SERVERS = {"nginx": "nginx", "node": "node", "go": "go"}
"""Each server, and the program that it needs."""
PORTS = {"nginx": 8091, "node": 8092, "go": 8093}
SECRET = b"the secret of refused.test"

_NGINX = """
daemon off; master_process off; pid {directory}/nginx.pid; error_log {directory}/nginx.error; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    map "$status $http_host" $seen {{ "400 " 0; default 1; }}
    log_format hosts '$http_host'; access_log {log} hosts if=$seen;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    lingering_timeout 1s;
    server {{ listen {port} default_server; server_name refused.test; return 200 "{secret}"; }}
    server {{ listen {port}; server_name allowed.test; return 200 "allowed.test"; }}
}}
"""
_NODE = """
const http = require("http"), fs = require("fs"), log = fs.openSync("{log}", "a");
const see = (request) => {{
  const host = request.headers.host || "";
  fs.writeSync(log, host + "\\n");
  return /^allowed\\.test(:\\d+)?$/i.test(host) ? "allowed.test" : "{secret}";
}};
const server = http.createServer({{insecureHTTPParser: true, requireHostHeader: false}}, (request, response) => {{
  const text = see(request);
  request.resume().on("end", () => {{ response.write(text); response.end(); }});
}});
server.on("upgrade", (request, socket) => {{
  socket.on("error", () => undefined);
  const text = see(request);
  socket.write("HTTP/1.1 101 Switching Protocols\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n" + text);
  socket.on("data", (data) => socket.write(data)).on("end", () => socket.end());
}});
server.on("connect", (request, socket) => {{ socket.on("error", () => undefined); socket.end(see(request)); }});
server.on("clientError", (error, socket) => socket.destroy());
server.listen({port}, "0.0.0.0");
"""
_GO = """
package main

import ("fmt"; "io"; "net/http"; "os"; "strings")

func main() {{
	log, _ := os.OpenFile("{log}", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0644)
	panic(http.ListenAndServe(":{port}", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {{
		fmt.Fprintln(log, r.Host)
		io.Copy(io.Discard, r.Body)
		if strings.ToLower(strings.Split(r.Host, ":")[0]) == "allowed.test" {{
			fmt.Fprint(w, "allowed.test")
		}} else {{
			fmt.Fprint(w, "{secret}")
		}}
	}})))
}}
"""
_SOURCES = {"nginx": ("nginx.conf", _NGINX), "node": ("server.js", _NODE), "go": ("main.go", _GO)}


def missing(server: str) -> str | None:
    """Why a server cannot run here, or None."""
    return None if _program(server) else f"{SERVERS[server]} is not installed"


def _program(server: str) -> str | None:
    return shutil.which(SERVERS[server], path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/go/bin")


def prepare(server: str, directory: Path, port: int) -> list[str]:
    """Write the server's files below `directory`, and return the command that runs it. Its log is `hosts(...)`."""
    program = _program(server)
    assert program is not None
    name, text = _SOURCES[server]
    source = directory / name
    secret = SECRET.decode()
    source.write_text(text.format(directory=directory, log=directory / f"{server}.hosts", port=port, secret=secret))
    if server == "go":
        build = [program, "build", "-o", str(directory / "go-server"), str(source)]
        environ = {"GOCACHE": str(directory / "go-cache"), **os.environ, "GO111MODULE": "off", "GOFLAGS": ""}
        environ.setdefault("HOME", str(directory))
        subprocess.run(build, check=True, capture_output=True, env=environ, cwd=directory)
        return [str(directory / "go-server")]
    return [program, "-c", str(source), "-e", str(directory / "nginx.error")] if server == "nginx" else [program, name]


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def hosts(server: str, directory: Path) -> list[str]:
    """The `Host` of every request that the server has seen so far."""
    log = directory / f"{server}.hosts"
    return log.read_text().split() if log.exists() else []


def start_all(directory: Path) -> dict[str, int]:
    """Start all servers that can run here, on fixed ports of every address; they end with this process."""
    ports = {server: port for server, port in PORTS.items() if missing(server) is None}
    for server, port in ports.items():
        place = directory / server
        place.mkdir()
        with (place / "output").open("wb") as output:
            command = prepare(server, place, port)
            subprocess.Popen(command, cwd=place, stdout=output, stderr=output, preexec_fn=_end_with_parent)
    for port in ports.values():
        wait_for(port)
    return ports


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def running(server: str, directory: Path) -> Iterator[int]:
    """A server on a port of loopback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = prepare(server, directory, port)
    with ExitStack() as stack:
        output = stack.enter_context((directory / "output").open("wb"))
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output)
        try:
            wait_for(port)
            yield port
        finally:
            process.terminate()
            process.wait(30)
