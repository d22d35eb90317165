"""A small image made of the machine's static busybox: one layer, a second to make, nothing pulled."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pier.image.model import Image, ImageConfig

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def busybox_image(directory: Path) -> Image:
    """An image with a shell, small tools, two users and nothing else."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox-static is not installed")
    layer = directory / "layer"
    for name in ("bin", "etc", "tmp", "root", "proc", "sys", "dev", "srv", "usr/bin", "var", "home/user"):
        (layer / name).mkdir(parents=True)
    layer.chmod(0o755)
    (layer / "tmp").chmod(0o1777)
    shutil.copy(busybox, layer / "bin" / "busybox")
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (layer / "bin" / name).symlink_to("busybox")
    (layer / "usr" / "bin" / "env").symlink_to("../../bin/busybox")
    (layer / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n")
    (layer / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    (layer / "etc" / "hostname").write_text("busybox\n")
    return Image("test/busybox", f"sha256:{'b' * 64}", (layer,), ImageConfig(env={"PATH": PATH}))


def import_busybox(directory: Path, name: str = "test/busybox") -> None:
    """Put `busybox_image` into pier's own store under a name that Dockerfiles can use."""
    packed = directory / "busybox.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(busybox_image(directory / "busybox").layers[0], ".")
    subprocess.run([sys.executable, "-m", "pier", "image", "import", str(packed), name], check=True)


def add_program(layer: Path, program: str) -> None:
    """Put a program of this machine into a layer at the same path, with the libraries that it names."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for path in [program, *(part for part in told.split() if part.startswith("/"))]:
        target = layer / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(Path(path).resolve(), target)


def add_python(layer: Path) -> None:
    """Put Debian's own Python into a layer, without what is installed beside it and without modules that need more
    libraries than it does."""
    program = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib") / program.name
    if not library.is_dir():
        pytest.skip("this machine has no Python of Debian's own")
    add_program(layer, str(program))
    (layer / "usr/bin/python3").symlink_to(program.name)
    left_out = shutil.ignore_patterns("__pycache__", "config-*", "dist-packages", "lib2to3", "pydoc_data", "test")
    shutil.copytree(library, layer / str(library).lstrip("/"), ignore=left_out, symlinks=True)
