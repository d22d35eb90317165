"""A Debian root file system for tests, bootstrapped once with this machine's own package sources in it: what reaches
packages here reaches them inside.

It is kept under `.cache/test`. Only root can make it; `python -m tests.debian` does, so that plain users find it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.parts import need_parts

CACHE = Path(__file__).parents[1] / ".cache" / "test"
COPIED = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/apt.conf.d", "etc/pip.conf", "etc/ssl/certs")


class Unavailable(Exception):
    """There is none, and the text says why none can be made."""


def debian_archive() -> Path:
    """The tar of the root file system."""
    need_parts()
    archive = CACHE / "debian.tar"
    if archive.exists():
        return archive
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise Unavailable("a Debian is made by debootstrap, as root")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "debian.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _bootstrap(archive)
    return archive


def _bootstrap(archive: Path) -> None:
    suite = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    if suite is None:
        raise Unavailable("this machine's release has no code name")
    root = archive.with_name(f"debian-{os.getpid()}")
    part = archive.with_suffix(".part")
    try:
        done = subprocess.run(
            ["unshare", "--mount", "debootstrap", "--variant=minbase", suite[1], str(root), mirror()],
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode != 0:
            raise Unavailable(f"debootstrap failed here: {done.stdout[-300:]} {done.stderr[-300:]}")
        for name in COPIED:
            _copy(Path("/") / name, root / name)
        for path in (root / "var/cache/apt/archives").glob("*.deb"):
            path.unlink()
        subprocess.run(["tar", "-C", str(root), "--one-file-system", "-cf", str(part), "."], check=True, timeout=600)
        part.replace(archive)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=False, ignore_dangling_symlinks=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def mirror() -> str:
    """Where this machine's own packages come from."""
    texts = [path.read_text() for path in Path("/etc/apt").rglob("*") if path.suffix in (".list", ".sources")]
    found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+/debian/?)(?:\s|$)", "\n".join(texts), re.MULTILINE)
    if not found:
        raise Unavailable("this machine has no Debian packages configured")
    return found[1]


if __name__ == "__main__":
    debian_archive()
