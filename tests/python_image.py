"""An image with a shell, Python and OpenAI's client, made of this machine's own, under the names that examples use."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.busybox import add_program, busybox_image
from tests.parts import need_parts

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / ".cache" / "clients"
NAMES = ("python:3.11", "python:3.11-slim", "node:20-slim")
_LEFT_OUT = ("__pycache__", "config-*", "test", "tests", "idlelib", "lib2to3", "tkinter", "ensurepip", "pydoc_data")
_WANTED = (
    *("openai*", "httpx*", "httpcore*", "pydantic*", "anyio*", "h11*", "jiter*", "distro*", "sniffio*", "idna*"),
    *("certifi*", "truststore*", "typing_inspection*", "tqdm*", "typing_extensions*", "annotated_types*", "pip*"),
)
_ASK = """
import json, sys, sysconfig
print(json.dumps([sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.base_prefix]))
"""


def python_layer(directory: Path, files: dict[str, str]) -> Path:
    """The root file system; `files` are written into it."""
    need_parts()
    python = CLIENTS / "bin" / "python"
    if not (CLIENTS / "installed").is_file():
        pytest.skip("the official clients are not installed: .ci/clients")
    library, packages, prefix = json.loads(
        subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=True).stdout
    )
    layer = busybox_image(directory).layers[0]
    program = python.resolve()
    add_program(layer, str(program))
    inside = layer / library.lstrip("/")
    ignored = shutil.ignore_patterns(*_LEFT_OUT, "site-packages", "dist-packages")
    shutil.copytree(library, inside, ignore=ignored, symlinks=True)
    target = inside / "site-packages"
    for pattern in _WANTED:
        for found in Path(packages).glob(pattern):
            if found.is_dir():
                shutil.copytree(found, target / found.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(exist_ok=True)
                shutil.copy(found, target / found.name)
    for module in inside.rglob("*.so"):
        add_libraries(layer, module)
    _add_commands(layer, program, prefix, target)
    for name, text in files.items():
        (layer / name).parent.mkdir(parents=True, exist_ok=True)
        (layer / name).write_text(text)
    return layer


def add_libraries(layer: Path, module: Path) -> None:
    said = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=False).stdout
    for path in (part for part in said.split() if part.startswith("/")):
        copy = layer / path.lstrip("/")
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(path).resolve(), copy)


def _add_commands(layer: Path, program: Path, prefix: str, packages: Path) -> None:
    commands = layer / "usr" / "local" / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    path = f"/{packages.relative_to(layer)}"
    script = f'#!/bin/sh\nPYTHONHOME={prefix} PYTHONPATH="{path}${{PYTHONPATH:+:$PYTHONPATH}}" exec {program} "$@"\n'
    for name, text in {"python": script, "python3": script, "pip": '#!/bin/sh\nexec python -m pip "$@"\n'}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)


def pack_layer(layer: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w") as packed:
        packed.add(layer, ".")
    return archive


def import_layer(archive: Path, home: Path) -> None:
    """Put the image into the store of a `PIER_HOME` under all names."""
    for name in NAMES:
        command = [sys.executable, "-m", "pier", "image", "import", str(archive), name]
        subprocess.run(command, check=True, env={"PIER_HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True)
