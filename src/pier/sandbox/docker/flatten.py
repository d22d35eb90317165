"""An image of pier's own store as one tar stream, for engines that know nothing of its layers."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pier.image.model import Image, ImageConfig, architecture

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


def write_flat(layers: tuple[Path, ...], sink: IO[bytes]) -> None:
    """Write what the layers (lowest first) show together, with owners, modes and links."""
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _merged(list(reversed(layers)), ""):
            found = path.lstat()
            info = archive.gettarinfo(str(path), arcname=name)
            if info is None:
                continue
            info.uname = info.gname = ""
            key = (found.st_dev, found.st_ino)
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and key in links:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, links[key], 0
                archive.addfile(info)
            elif stat.S_ISREG(found.st_mode):
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", found.st_size
                links[key] = name
                with path.open("rb") as stream:
                    archive.addfile(info, stream)
            else:
                archive.addfile(info)


def write_archive(image: Image, name: str, sink: IO[bytes]) -> None:
    """Write an image as `docker load` takes it: its files as one layer, its settings, and a name with a tag."""
    sink.seek(tarfile.BLOCKSIZE)
    layer = _Hashed(sink)
    write_flat(image.layers, layer)  # type: ignore[arg-type] - a tar stream is only written to
    sink.write(bytes(-layer.size % tarfile.BLOCKSIZE))
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": _settings(image.config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.hash.hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    for member, value in (("config.json", config), ("manifest.json", manifest)):
        data = json.dumps(value).encode()
        sink.write(_header(member, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE))
    sink.write(bytes(2 * tarfile.BLOCKSIZE))
    sink.seek(0)
    sink.write(_header("layer.tar", layer.size))


class _Hashed:
    """Counts and digests what is written."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.hash, self.size, self._sink = hashlib.sha256(), 0, sink

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._sink.write(data)


def _header(name: str, size: int) -> bytes:
    """A header of one block, whatever the size."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _settings(config: ImageConfig) -> dict[str, Any]:
    """The settings as an image's configuration has them."""
    return {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "WorkingDir": config.workdir,
        "User": config.user,
        "Entrypoint": list(config.entrypoint) or None,
        "Cmd": list(config.cmd) or None,
        "Shell": list(config.shell),
        "Labels": config.labels,
        "ExposedPorts": {port: {} for port in config.exposed_ports},
        "Volumes": {path: {} for path in config.volumes},
        "StopSignal": config.stop_signal,
        "Healthcheck": config.healthcheck,
    }


def _merged(roots: list[Path], name: str) -> Iterator[tuple[str, Path]]:
    """Everything below a directory that several layers have, topmost first, parents before children."""
    names: dict[str, list[Path]] = {}
    hidden: set[str] = set()
    for root in roots:
        directory = root / name
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.name in hidden:
                continue
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                hidden.add(entry.name)
                continue
            above = names.setdefault(entry.name, [])
            if above and not stat.S_ISDIR(found.st_mode):
                hidden.add(entry.name)
                continue
            above.append(root)
            if not stat.S_ISDIR(found.st_mode) or _is_opaque(Path(entry.path)):
                hidden.add(entry.name)
    for part in sorted(names):
        below = f"{name}/{part}" if name else part
        top = names[part][0] / below
        yield below, top
        if top.is_dir() and not top.is_symlink():
            yield from _merged(names[part], below)


def _is_opaque(path: Path) -> bool:
    for attribute in _OPAQUE:
        try:
            if os.getxattr(path, attribute, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False
