"""The programs that fetch things, unmodified, behind an allowlist: what they fetch, and where from.

`prepare` writes a directory with a repository for each of them, a certificate authority and a server's certificate.
`serve` puts it on the fake internet as `files.test`, over HTTPS and HTTP. `run_clients` runs them in a sandbox.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import shutil
import socketserver
import ssl
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path

from pier.image.model import Image, ImageConfig
from tests.world import in_world

DIRECTORY = "PIER_TEST_CLIENTS"
HOST, SECURE, PLAIN = "files.test", "https://files.test:4443", "http://files.test:8080"
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
RUST = "/opt/rust"

_APT = (
    "mkdir -p /tmp/{0}/lists/partial /tmp/{0}/archives/partial && cd /tmp/{0} && touch status && "
    "echo 'deb [trusted=yes] {1}/apt ./' > list && "
    "apt='apt-get -q -o Dir::Etc::sourcelist=/tmp/{0}/list -o Dir::Etc::sourceparts=- -o Dir::State=/tmp/{0} "
    "-o Dir::State::status=/tmp/{0}/status -o Dir::Cache=/tmp/{0} -o APT::Sandbox::User=root' && "
    "$apt update && $apt download tiny && dpkg-deb -f tiny_*.deb Description"
)
CLIENTS = {
    "curl": f"curl -sSf {SECURE}/hello.txt",
    "git over HTTPS": f"git clone -q {SECURE}/repo.git /tmp/one && cat /tmp/one/hello.txt",
    "git over HTTP": f"git clone -q {PLAIN}/repo.git /tmp/two && cat /tmp/two/hello.txt",
    "apt-get over HTTPS": _APT.format("a1", SECURE),
    "apt-get over HTTP": _APT.format("a2", PLAIN),
    "pip": f"/usr/bin/python3 -m pip --no-cache-dir download -q -d /tmp/pip -i {SECURE}/simple tiny && "
    "unzip -p /tmp/pip/tiny-1.0-py3-none-any.whl tiny.py 2>/dev/null || "
    "/usr/bin/python3 -c \"import sys; sys.path.insert(0, '/tmp/pip/tiny-1.0-py3-none-any.whl'); import tiny\"",
    "npm": f"mkdir /tmp/npm && cd /tmp/npm && npm install --registry {SECURE}/npm/ --no-audit --no-fund tiny && "
    "node -e \"require('tiny')\"",
    "node": f"node -e \"fetch('{SECURE}/hello.txt').then(r => r.text()).then(console.log)\"",
    "hey, a Go client": f"hey -n 1 -c 1 {SECURE}/hello.txt | tee /dev/stderr | grep -q '200' && echo hello",
    "cargo, a Rust client": "mkdir -p /tmp/crate/src && cd /tmp/crate && touch src/lib.rs && printf '"
    '[package]\\nname = "x"\\nversion = "0.1.0"\\n[dependencies]\\ntiny = {version = "1", registry = "world"}\\n'
    f"' > Cargo.toml && RUSTC={RUST}/bin/rustc CARGO_HOME=/tmp/cargo "
    f"CARGO_REGISTRIES_WORLD_INDEX=sparse+{SECURE}/index/ {RUST}/bin/cargo fetch && "
    "cat /tmp/cargo/registry/src/*/tiny-1.0.0/src/lib.rs",
}
"""For each client a line for a shell that ends well and prints hello."""
PROGRAMS = {"apt-get": "dpkg-deb", "pip": "/usr/lib/python3/dist-packages/pip", "hey,": "hey", "cargo,": "cargo"}


def missing(client: str) -> str | None:
    """Why a client cannot run here, or None."""
    program = PROGRAMS.get(client.split()[0], client.split()[0])
    if program == "cargo":
        return None if rust_toolchain() else "no Rust toolchain is installed"
    found = Path(program).exists() if program.startswith("/") else shutil.which(program, path="/usr/bin:/bin")
    return None if found else f"{program} is not installed"


def rust_toolchain() -> Path | None:
    """A directory with a cargo that needs no home."""
    home = Path(os.environ.get("RUSTUP_HOME", Path.home() / ".rustup")) / "toolchains"
    try:
        return next((path for path in sorted(home.glob("stable-*")) if (path / "bin" / "cargo").is_file()), None)
    except OSError:
        return None


def prepare(root: Path) -> None:
    """Write everything that the clients fetch, and the certificates, below `root`."""
    files = root / "files"
    files.mkdir()
    (files / "hello.txt").write_text("hello\n")
    _make_git(root, files)
    _make_apt(root, files)
    _make_wheel(files)
    _make_npm(files)
    _make_crate(files)
    _make_certificates(root)


def _run(*command: object, cwd: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _make_git(root: Path, files: Path) -> None:
    work = root / "work"
    work.mkdir()
    (work / "hello.txt").write_text("hello\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@files.test"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "hello"]):
        _run("git", *command, cwd=work)
    _run("git", "clone", "-q", "--bare", work, files / "repo.git", cwd=root)
    _run("git", "update-server-info", cwd=files / "repo.git")


def _make_apt(root: Path, files: Path) -> None:
    tree = root / "deb"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: x <x@files.test>\nDescription: hello\n"
    (tree / "DEBIAN" / "control").write_text(control)
    (files / "apt").mkdir()
    deb = files / "apt" / "tiny_1_all.deb"
    _run("dpkg-deb", "--root-owner-group", "-b", tree, deb, cwd=root)
    data = deb.read_bytes()
    told = f"Filename: ./{deb.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    (files / "apt" / "Packages").write_text(control + told)


def _make_wheel(files: Path) -> None:
    page = files / "simple" / "tiny"
    page.mkdir(parents=True)
    with zipfile.ZipFile(page / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "print('hello')\n")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    (page / "index.html").write_text('<!DOCTYPE html><a href="tiny-1.0-py3-none-any.whl">tiny</a>')


def _packed(entries: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return gzip.compress(packed.getvalue(), mtime=0)


def _make_npm(files: Path) -> None:
    (files / "npm").mkdir()
    about = {"name": "tiny", "version": "1.0.0", "main": "index.js"}
    code = "console.log('hello')\n"
    data = _packed({"package/package.json": json.dumps(about), "package/index.js": code})
    (files / "npm" / "tiny-1.0.0.tgz").write_bytes(data)
    told = {"tarball": f"{SECURE}/npm/tiny-1.0.0.tgz", "shasum": hashlib.sha1(data).hexdigest()}
    versions = {"1.0.0": {**about, "dist": told}}
    page = {"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": versions}
    (files / "npm" / "tiny").write_text(json.dumps(page))


def _make_crate(files: Path) -> None:
    manifest = '[package]\nname = "tiny"\nversion = "1.0.0"\nedition = "2021"\n'
    data = _packed({"tiny-1.0.0/Cargo.toml": manifest, "tiny-1.0.0/src/lib.rs": "// hello\n"})
    (files / "index" / "ti" / "ny").mkdir(parents=True)
    (files / "index" / "config.json").write_text(json.dumps({"dl": f"{SECURE}/index/{{crate}}-{{version}}.crate"}))
    (files / "index" / "tiny-1.0.0.crate").write_bytes(data)
    row = {"name": "tiny", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
    row["cksum"] = hashlib.sha256(data).hexdigest()
    (files / "index" / "ti" / "ny" / "tiny").write_text(json.dumps(row) + "\n")


def _make_certificates(root: Path) -> None:
    days, curve = ("-days", "2"), ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _run(
        "openssl",
        "req",
        "-x509",
        *curve,
        *days,
        "-subj",
        "/CN=World CA",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        cwd=root,
    )
    _run("openssl", "req", *curve, "-subj", f"/CN={HOST}", "-keyout", "server.key", "-out", "server.csr", cwd=root)
    (root / "names").write_text(f"subjectAltName=DNS:{HOST}\n")
    sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    _run("openssl", "x509", "-req", "-in", "server.csr", *sign, *days, "-out", "server.crt", cwd=root)
    usual = Path(BUNDLE)
    (root / "bundle.crt").write_text((usual.read_text() if usual.exists() else "") + (root / "ca.crt").read_text())


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return


class _Server(http.server.ThreadingHTTPServer):
    def server_bind(self) -> None:
        """Without a look at who this machine is: nobody answers that before the fake internet is up."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]


def serve(names: dict[str, str]) -> None:
    """Serve the directory that `$PIER_TEST_CLIENTS` names, on the fake internet."""
    root = Path(os.environ[DIRECTORY])
    names[HOST] = "93.184.216.60"
    handler = functools.partial(_Files, directory=str(root / "files"))
    for port in (4443, 8080):
        server = _Server(("", port), handler)
        if port == 4443:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(root / "server.crt", root / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()


def machine_image(directory: Path) -> Image:
    """An image that has nothing but what a container needs to use this machine's `/usr`, which is to be mounted."""
    layer = directory / "layer"
    for name in ("etc/ssl/certs", "tmp", "root", "proc", "sys", "dev", "usr", "var/lib/dpkg", "var/log", "opt/rust"):
        (layer / name).mkdir(parents=True)
    (layer / "tmp").chmod(0o1777)
    (layer / BUNDLE.lstrip("/")).touch()
    for name in ("bin", "sbin", "lib", "lib64"):
        (layer / name).symlink_to(f"usr/{name}")
    (layer / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in ("ld.so.cache", "ssl/openssl.cnf", "alternatives"):
        source, target = Path("/etc") / name, layer / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copy(source, target)
    return Image("test/machine", f"sha256:{'c' * 64}", (layer,), ImageConfig(env={"PATH": "/usr/bin:/bin"}))


_OUTSIDE = r"""
import asyncio, json, os, sys
from contextlib import nullcontext
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import Mount, SandboxSpec, open_backend
from pier.sandbox.host import host_image
from tests.clients import BUNDLE, CLIENTS, HOST, RUST, machine_image, rust_toolchain
from tests.engine import engine

async def main(kind, image, mounts):
    root = Path(sys.argv[1])
    mounts += [Mount(BUNDLE, root / "bundle.crt")]
    if rust_toolchain():
        mounts += [Mount(RUST, rust_toolchain())]
    told, decisions = {}, []
    env = {"NODE_EXTRA_CA_CERTS": BUNDLE, "HOME": "/tmp", "SSL_CERT_FILE": BUNDLE}
    with Lease() as lease:
        async with open_backend(kind, lease) as backend:
            policy = NetworkPolicy("allowlist", (HOST,))
            spec = SandboxSpec(image, network=policy, mounts=tuple(mounts), env=env,
                               on_decision=lambda decision: decisions.append(decision.line()))
            async with await backend.start(spec) as box:
                for name, line in CLIENTS.items():
                    result = await box.exec(["/bin/sh", "-c", line], cwd="/tmp", timeout=150)
                    told[name] = [result.exit_code, result.text[-1500:], result.error_text[-1500:]]
    Path(sys.argv[2]).write_text(json.dumps({"told": told, "decisions": decisions, "seen": traffic.seen()}))

with engine() if sys.argv[3] == "docker" else nullcontext() as running:
    if running is None:
        asyncio.run(main("local", host_image(), []))
    else:
        os.environ["DOCKER_HOST"] = running.url
        place = Path(sys.argv[1]) / "image"
        place.mkdir()
        asyncio.run(main("docker", machine_image(place), [Mount("/usr", Path("/usr"))]))
"""


def run_clients(backend: str, root: Path) -> dict[str, dict[str, list[object]]]:
    """Run all clients that are here in a sandbox of `backend`; what came of each, and what the policy said."""
    prepare(root)
    answer = root / "answer.json"
    done = in_world(_OUTSIDE, root, str(root), str(answer), backend, servers="tests.clients:serve")
    assert answer.exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(answer.read_text())
