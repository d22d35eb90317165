"""The `host` image: this machine's own root, copy-on-write, without what is nobody's business inside a sandbox.

As root it is the whole root file system under a layer that empties homes, temporary directories, sockets, keys, other
engines' state and pier's own. A plain user cannot have that (files of other ids cannot be copied up), so there it is
put together: a small writable root with a copy of the readable part of `/etc`, and the system's directories bound
read-only into it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

from pier.home import pier_home
from pier.image.host import host_image

_EMPTIED = (
    "root", "home", "tmp", "var/tmp", "run", "mnt", "media", "lost+found", "old_root", "var/log", "var/mail",
    "var/spool/mail", "var/spool/cron", "var/backups", "var/lib/docker", "var/lib/containerd", "var/lib/containers",
    "var/lib/kubelet", "var/lib/rancher", "var/lib/cloud", "var/lib/pier", "var/lib/lxd", "var/lib/private",
    "etc/ssl/private", "etc/docker", "etc/kubernetes", "etc/letsencrypt", "etc/wireguard", "etc/openvpn",
    "etc/NetworkManager/system-connections", "etc/wpa_supplicant", "etc/ppp",
)  # fmt: skip
_GONE = ("etc/shadow-", "etc/gshadow-", "etc/krb5.keytab", "etc/.pwd.lock", ".dockerenv")
_HOST_KEYS = "etc/ssh/ssh_host_*_key"
_OPEN = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "run/lock": 0o1777}
_WRITABLE = ("root", "home", "tmp", "var/tmp", "run", "run/lock", "mnt", "media", "srv", "opt", "app", "logs", "tests",
             "workspace", "solution", "var/log", "var/cache", "var/lib", "var/spool")  # fmt: skip
_MADE = ("proc", "sys", "dev")
_NOT_BOUND = {*_MADE, "etc", "var", "boot", "lost+found", "old_root", *(name for name in _WRITABLE if "/" not in name)}
_SHADOWS = ("etc/shadow", "etc/gshadow")
_ETC_LARGEST = 1 << 20


__all__ = ["HostRoot", "host_image", "prepare"]


@dataclass(frozen=True, slots=True)
class HostRoot:
    """What to make a root from: layers, lowest first, and (source, target) pairs to bind read-only."""

    layers: tuple[Path, ...]
    binds: tuple[tuple[str, str], ...] = field(default=())


def prepare(directory: Path, *, whole: bool) -> HostRoot:
    """Make the layer in `directory`, which is empty. `whole`: this process is root and may take all of `/`."""
    if whole:
        _mask(directory)
        return HostRoot((Path("/"), directory))
    return HostRoot((directory,), _compose(directory))


def _mask(layer: Path) -> None:
    for name in (*_EMPTIED, *_private_directories()):
        if (Path("/") / name).is_dir() or name in _OPEN:
            _make(layer, name)
            os.setxattr(layer / name, b"user.overlay.opaque", b"y")
    for name, mode in _OPEN.items():
        _make(layer, name)
        (layer / name).chmod(mode)
    keys = [str(path.relative_to("/")) for path in Path("/").glob(_HOST_KEYS)]
    for name in (*_GONE, *keys):
        if (Path("/") / name).exists():
            _make(layer, str(Path(name).parent))
            os.mknod(layer / name, stat.S_IFCHR, 0)
    for name in _SHADOWS:
        _write_shadow(layer, name)


def _private_directories() -> list[str]:
    """Homes of people that are not under /home, and pier's own state."""
    found = [Path(entry.pw_dir) for entry in pwd.getpwall() if 1000 <= entry.pw_uid < 60000]
    found.append(pier_home().resolve())
    names = [str(path.relative_to("/")) for path in found if path.is_absolute() and len(path.parts) > 2]
    return [name for name in names if not any(name.startswith(f"{emptied}/") for emptied in _EMPTIED)]


def _make(layer: Path, name: str) -> None:
    """Make a directory with the modes that the machine's own have, so that merging changes nothing."""
    path = layer
    real = Path("/")
    for part in Path(name).parts:
        path, real = path / part, real / part
        if path.is_dir():
            continue
        path.mkdir()
        with contextlib.suppress(OSError):
            found = real.stat()
            path.chmod(stat.S_IMODE(found.st_mode))
            if os.geteuid() == 0:
                os.chown(path, found.st_uid, found.st_gid)


def _write_shadow(layer: Path, name: str) -> None:
    """The accounts without their passwords."""
    real = Path("/") / name
    try:
        rows = [row.split(":") for row in real.read_text().splitlines()]
        found = real.stat()
    except OSError:
        return
    _make(layer, str(Path(name).parent))
    path = layer / name
    path.write_text("".join(":".join([row[0], "*", *row[2:]]) + "\n" for row in rows if len(row) > 1))
    path.chmod(stat.S_IMODE(found.st_mode))
    if os.geteuid() == 0:
        os.chown(path, found.st_uid, found.st_gid)


def _compose(layer: Path) -> tuple[tuple[str, str], ...]:
    for name in (*_WRITABLE, *_MADE):
        (layer / name).mkdir(parents=True, exist_ok=True)
    for name, mode in _OPEN.items():
        (layer / name).chmod(mode)
    _copy_etc(layer / "etc")
    (layer / "var/run").symlink_to("/run")
    (layer / "var/lock").symlink_to("/run/lock")
    binds: list[tuple[str, str]] = []
    private = {str(pier_home().resolve())}
    for path in _bindable():
        place = layer / path.relative_to("/")
        if str(path) in private:
            continue
        if path.is_symlink():
            place.symlink_to(path.readlink())
        elif path.is_dir() and os.access(path, os.R_OK | os.X_OK) and not _holds(path, private):
            place.mkdir(exist_ok=True)
            binds.append((str(path), str(path)))
    if os.access("/var/lib/dpkg", os.R_OK | os.X_OK):
        (layer / "var/lib/dpkg").mkdir()
        binds.append(("/var/lib/dpkg", "/var/lib/dpkg"))
    return tuple(binds)


def _bindable() -> list[Path]:
    """The system's directories; those in /opt one by one, so that agents' packs can be mounted beside them."""
    top = [path for path in sorted(Path("/").iterdir()) if path.name not in _NOT_BOUND]
    opt = Path("/opt")
    readable = opt.is_dir() and not opt.is_symlink() and os.access(opt, os.R_OK | os.X_OK)
    return [*top, *(path for path in sorted(opt.iterdir()) if path.name != "pier")] if readable else top


def _holds(path: Path, private: set[str]) -> bool:
    return any(name.startswith(f"{path}/") for name in private)


def _copy_etc(target: Path) -> None:
    """What of /etc this user may read; passwords, keys and very large files stay out."""

    def left_out(directory: str, names: list[str]) -> set[str]:
        return {name for name in names if not _is_wanted(Path(directory) / name)}

    with contextlib.suppress(shutil.Error, OSError):
        shutil.copytree("/etc", target, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    for path in target.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    for name in _SHADOWS:
        users = [row.split(":")[0] for row in (target / "passwd").read_text().splitlines() if row]
        tail = ":*:19000:0:99999:7:::" if name == "etc/shadow" else ":*::"
        (target.parent / name).write_text("".join(f"{user}{tail}\n" for user in users))


def _is_wanted(path: Path) -> bool:
    name = str(path.relative_to("/"))
    if name in _EMPTIED or name in _GONE or path.match(f"/{_HOST_KEYS}"):
        return False
    try:
        found = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return True
    kind_is_fine = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size <= _ETC_LARGEST)
    needed = os.R_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0)
    return kind_is_fine and os.access(path, needed)
