"""An environment for Harbor and datacurve pier on this machine's own files, so that they make real jobs in seconds.

`$PEER` names the peer's package. Paths of a sandbox are moved below a temporary directory, also inside of scripts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

base: Any = import_module(os.environ["PEER"] + ".environments.base")
PLACES = ("/logs", "/tests", "/solution", "/tmp/answer")


class HostEnvironment(base.BaseEnvironment):
    root: Path
    is_mounted = supports_gpus = False
    can_disable_internet = True

    @staticmethod
    def type() -> str:
        return "host"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp())
        for name in ("logs/agent", "logs/verifier", "logs/artifacts", "tmp"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root)

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _moved(self, text: str) -> str:
        for place in PLACES:
            text = text.replace(place, f"{self.root}{place}")
        return text

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._at(target_path).parent.mkdir(parents=True, exist_ok=True)
        self._at(target_path).write_text(self._moved(Path(source_path).read_text()))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        for path in Path(source_dir).rglob("*"):
            if path.is_file():
                await self.upload_file(path, f"{target_dir}/{path.relative_to(source_dir)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._at(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if self._at(source_dir).is_dir():
            shutil.copytree(self._at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command: str, *_: Any, **__: Any) -> Any:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        child = await asyncio.create_subprocess_exec("bash", "-c", self._moved(command), **streams)
        out, err = await child.communicate()
        return base.ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=child.returncode)
