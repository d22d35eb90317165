"""The `host` image: this machine's own software, copy-on-write, and nothing else of it.

What is shown is listed here, alike for root and plain users: directories of software, and a copy of those files of /etc
that programs need and everybody may read. Homes, state of applications, keys, `/srv`, `/run` and whatever else this
machine has are not in it.

Directories that no sandbox sees, whatever it is made of: tasks, jobs, packs and pier's own state.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pier.errors import SandboxError
from pier.home import own_packs, packs_home, private_directories
from pier.image.model import host_image
from pier.sandbox.contract import Mount

_SOFTWARE = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix/store", "gnu/store")
_PACKAGES = ("var/lib/dpkg", "var/lib/rpm")
"""Where package managers note what is installed."""
_PARTS = frozenset({"bin", "sbin", "lib", "lib64", "libexec", "share"})
"""A directory of /opt that has one of these, or that has such a directory, is software."""
_MADE = ("proc", "sys", "dev", "root", "home", "tmp", "run", "run/lock", "mnt", "media", "srv", "opt", "app", "logs",
         "tests", "workspace", "solution", "etc", "var", "var/tmp", "var/log", "var/cache", "var/cache/debconf",
         "var/cache/apt/archives/partial", "var/lib", "var/lib/apt/lists/partial", "var/spool")  # fmt: skip
_MODES = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "run/lock": 0o1777}
_ETC_NAMES = """
    ImageMagick-6 ImageMagick-7 OpenCL R X11 adduser.conf alternatives apt/apt.conf apt/apt.conf.d apt/keyrings
    apt/preferences.d apt/sources.list apt/sources.list.d apt/trusted.gpg apt/trusted.gpg.d bash.bashrc
    bash_completion.d bashrc bindresvport.blacklist ca-certificates ca-certificates.conf crypto-policies debconf.conf
    debian_version debuginfod default/locale default/nss default/useradd deluser.conf dnf dpkg emacs ethertypes fish
    fonts gai.conf gdb glvnd groff group gtk-2.0 gtk-3.0 host.conf inputrc issue issue.net ld-musl-aarch64.path
    ld-musl-x86_64.path ld-musl-x86_64.d ld.so.cache ld.so.conf ld.so.conf.d libaudit.conf locale.alias locale.conf
    locale.gen localtime login.defs lsb-release magic magic.mime mailcap manpath.config maven mime.types mke2fs.conf
    nanorc netconfig networks nsswitch.conf os-release pam.conf pam.d passwd perl php pki/ca-trust pki/java pki/rpm-gpg
    pki/tls/cert.pem pki/tls/certs pki/tls/openssl.cnf profile profile.d protocols python python3 redhat-release rpc rpm
    ruby security services sgml shells skel ssl/cert.pem ssl/certs ssl/openssl.cnf terminfo texmf timezone tmux.conf
    ucf.conf vim vulkan wgetrc xattr.conf xdg xml yum.repos.d zsh
"""
_ETC = frozenset(_ETC_NAMES.split())
_ETC_PARENTS = {name.rpartition("/")[0] for name in _ETC} | {"pki"}
_ETC_BY_START = ("java-", "openmpi", "python3.", "postgresql-common")
_ETC_LARGEST = 1 << 20

__all__ = ["HostRoot", "host_image", "prepare"]


@dataclass(frozen=True, slots=True)
class HostRoot:
    """What to make a root from: a layer, directories of this machine that it is completed with, and directories in
    those that are hidden."""

    layers: tuple[Path, ...]
    trees: tuple[str, ...] = ()
    hidden: tuple[Path, ...] = ()


def prepare(layer: Path) -> HostRoot:
    """Make the layer in the directory `layer`, which is empty."""
    for name in _MADE:
        _make(layer, name)
    for name, mode in _MODES.items():
        (layer / name).chmod(mode)
    (layer / "var/run").symlink_to("/run")
    (layer / "var/lock").symlink_to("/run/lock")
    as_root = os.geteuid() == 0
    of_etc = [path for path in _listed() if path.is_dir() and not path.is_symlink()] if as_root else []
    _copy_etc(layer / "etc", without={str(path) for path in of_etc})
    trees: list[str] = []
    for path in (*_shown(), *of_etc):
        if path.is_symlink():
            (layer / path.relative_to("/")).symlink_to(path.readlink())
        elif path.is_dir() and _is_public(path.stat()) and os.access(path, os.R_OK | os.X_OK):
            _make(layer, str(path.relative_to("/")))
            trees.append(str(path))
    if as_root:
        _hide_from_root(layer, ["/usr/local", *(tree for tree in trees if tree.startswith(("/opt/", "/etc/")))])
    homes = (home for home in _homes() if any(home.is_relative_to(tree) for tree in trees))
    return HostRoot((layer,), tuple(trees), tuple(homes))


def _shown() -> Iterator[Path]:
    for name in (*_SOFTWARE, *_PACKAGES):
        yield Path("/") / name
    with contextlib.suppress(OSError):
        yield from (path for path in sorted(Path("/opt").iterdir()) if path.name != "pier" and _is_software(path))


def _is_software(path: Path) -> bool:
    try:
        names = os.listdir(path)
        return bool(_PARTS.intersection(names)) or any(
            (path / name / part).is_dir() for name in names for part in _PARTS
        )
    except OSError:
        return False


def _homes() -> Iterator[Path]:
    """Homes of people, wherever they are."""
    for entry in pwd.getpwall():
        if 1000 <= entry.pw_uid < 60000 and len(Path(entry.pw_dir).parts) > 2:
            yield Path(entry.pw_dir)


def _is_public(status: os.stat_result) -> bool:
    """Whether everybody may read it."""
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    return status.st_mode & wanted == wanted


def _make(layer: Path, name: str) -> None:
    path = layer
    for part in Path(name).parts:
        path = path / part
        if not path.is_dir():
            path.mkdir()
            path.chmod(0o755)


def _hide_from_root(layer: Path, directories: Iterable[str]) -> None:
    """Leave out what only root could read, however deep it lies. Of /usr all but /usr/local comes in packages, which
    everybody can have: of that only whole directories are left out."""
    for path in (*_not_public("/usr", deep=False), *(path for each in directories for path in _not_public(each))):
        inside = Path(path).relative_to("/")
        _make(layer, str(inside.parent))
        os.mknod(layer / inside, stat.S_IFCHR, 0)


def _not_public(directory: str, *, deep: bool = True) -> Iterator[str]:
    waiting = [directory]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                status = entry.stat(follow_symlinks=False)
                if not _is_public(status):
                    yield entry.path
                elif deep and stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)


def _listed() -> Iterator[Path]:
    etc = Path("/etc")
    yield from (etc / name for name in sorted(_ETC))
    yield from (path for path in sorted(etc.iterdir()) if path.name.startswith(_ETC_BY_START))


def _copy_etc(target: Path, without: set[str]) -> None:
    def left_out(directory: str, names: list[str]) -> set[str]:
        return {name for name in names if f"{directory}/{name}" in without or not _is_wanted(f"{directory}/{name}")}

    with contextlib.suppress(shutil.Error, OSError):
        shutil.copytree("/etc", target, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    for path in [target, *target.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    _write_shadows(target)


def _is_wanted(name: str) -> bool:
    """Whether an entry of /etc is copied: it is listed, or leads to something listed, and everybody may read it."""
    parts = name.split("/")[2:]
    listed = parts[0].startswith(_ETC_BY_START) or any("/".join(parts[:n]) in _ETC for n in range(1, len(parts) + 1))
    if not listed and "/".join(parts) not in _ETC_PARENTS:
        return False
    with contextlib.suppress(OSError):
        status = os.lstat(name)
        if stat.S_ISDIR(status.st_mode):
            return _is_public(status)
        if stat.S_ISREG(status.st_mode):
            return listed and _is_public(status) and status.st_size <= _ETC_LARGEST
        return listed and stat.S_ISLNK(status.st_mode)
    return False


def _write_shadows(etc: Path) -> None:
    """The accounts without passwords."""
    for name, listed, tail in (("shadow", "passwd", ":*:19000:0:99999:7:::"), ("gshadow", "group", ":*::")):
        with contextlib.suppress(FileNotFoundError):
            rows = (etc / listed).read_text().splitlines()
            (etc / name).write_text("".join(f"{row.split(':')[0]}{tail}\n" for row in rows if row))
            (etc / name).chmod(0o600)


_SIZE = 4096
_MOST = 512


def masks(mounts: Sequence[Mount], hidden: Iterable[Path], trees: Sequence[str] = ()) -> tuple[Mount, ...]:
    """Empty directories to be mounted over what is to be hidden of `mounts`, and of `trees` of this machine that a
    sandbox has at the same paths. A mount from inside of a hidden directory is of pier's own making and stays."""
    shown = [(tree, tree) for tree in trees]
    shown += [(_real(mount.source).rstrip("/"), mount.target) for mount in mounts if mount.source is not None]
    sources = tuple(source for source, _ in shown)
    found: set[str] = set()
    for path in _directories(hidden) if shown else ():
        for source, target in shown if path.startswith(sources) else ():
            inside = path.startswith(source) and (path[len(source) :].startswith("/") or path in trees)
            if inside and os.path.isdir(path):  # noqa: PTH112 - for every sandbox
                found.add(target.rstrip("/") + path[len(source) :])
    outermost = sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))
    if len(outermost) > _MOST:
        message = f"cannot hide {len(outermost)} directories, such as {outermost[0]}, from one sandbox"
        raise SandboxError(message, code="hidden_mount", blame="user", retryable=False, hint="mount less")
    return tuple(Mount(path, read_only=True, size=_SIZE) for path in outermost)


def refuse_hidden(mounts: Iterable[Mount], hidden: Iterable[Path] = ()) -> None:
    """Refuse to mount what no sandbox may see, apart from a pack."""
    for mount in mounts:
        if mount.source is None:
            continue
        source, packs = _real(mount.source), tuple(f"{_real(path)}/" for path in (packs_home(), own_packs()))
        if source.startswith(packs):
            continue
        for path in _directories(hidden):
            if source == path or source.startswith(f"{path}/"):
                message = f"cannot mount {source}: it lies in {path}, which no sandbox may see"
                raise SandboxError(message, code="hidden_mount", blame="user", retryable=False)


def _directories(hidden: Iterable[Path]) -> set[str]:
    return {_real(path) for path in (*hidden, *private_directories())} - {"/"}


@functools.lru_cache(maxsize=1024)
def _real(path: Path) -> str:
    return os.path.realpath(path)
