"""The store of packs: each is built once under a lock, named by what is in it, and shared by every trial.

    <packs>/refs/<package>@<version>-<recipe>.json    what was asked for, and the digest that answers it
    <packs>/trees/<digest>/                           the pack itself; its files are never written again
    <packs>/build/                                    work in progress; what a dead build left is cleared by the next

`PIER_PACKS` moves the store; else it is in pier's home.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pier.agent.contract import PackSpec
from pier.agent.pack import build, runtime
from pier.errors import AgentError
from pier.files import locked, write_json
from pier.home import packs_home
from pier.sandbox.contract import Finding

RECIPE = 2
"""Raised when packs are built differently, so that older ones are built again."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pack:
    """A built pack: mount `path` at `PACK_PATH`, read-only."""

    path: Path
    digest: str
    version: str
    package: str
    bytes: int = 0


class PackStore:
    """The packs of one directory."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or packs_home()

    def find(self, spec: PackSpec) -> Pack | None:
        """The pack of a pinned spec, if it is built."""
        return self._read(self._reference(replace(spec, package=build.named(spec.package)))) if spec.version else None

    def all(self) -> list[Pack]:
        """Every built pack, by package."""
        found = (self._read(path) for path in sorted((self.root / "refs").glob("*.json")))
        return [pack for pack in found if pack is not None]

    def remove(self, pack: Pack) -> None:
        """Forget a pack and delete its tree unless another reference needs it."""
        for path in (self.root / "refs").glob("*.json"):
            found = self._read(path)
            if found is not None and (found.package, found.version) == (pack.package, pack.version):
                path.unlink(missing_ok=True)
        if not any(other.digest == pack.digest for other in self.all()):
            shutil.rmtree(pack.path, ignore_errors=True)

    def verify(self, pack: Pack) -> bool:
        """Whether the tree still has the contents that its name says."""
        return digest_tree(pack.path)[0] == pack.digest

    async def ensure(self, spec: PackSpec, on_progress: OnProgress | None = None) -> Pack:
        """The pack of `spec`, built first if it is missing. Several callers wait for one build, which goes on when the
        one that began it is cancelled."""
        say = on_progress or (lambda _: None)
        spec = replace(spec, package=build.named(spec.package))
        if spec.version in (None, "latest"):
            say(f"looking up the newest {spec.package}")
            spec = await asyncio.to_thread(resolve, spec)
        if found := self.find(spec):
            return found
        lock = self.root / "build" / f"{self._reference(spec).stem}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        while True:
            if found := await asyncio.to_thread(self._build_alone, spec, lock, say):
                return found
            await asyncio.sleep(0.2)

    def _build_alone(self, spec: PackSpec, lock: Path, say: OnProgress) -> Pack | None:
        """None while another process builds it. The thread that builds holds the lock, not the ones that wait."""
        with locked(lock, wait=False) as mine:
            return self.find(spec) or (self._build(spec, say) if mine else None)

    def _build(self, spec: PackSpec, say: OnProgress) -> Pack:
        scratch = self.root / "build" / self._reference(spec).stem
        shutil.rmtree(scratch, ignore_errors=True)
        tree = scratch / "tree"
        tree.mkdir(parents=True)
        try:
            say(f"installing {spec.package}@{spec.version}")
            build.build(spec, tree, scratch)
            say("adding loader, libraries and tools")
            runtime.complete(tree)
            _seal(tree)
            digest, size = digest_tree(tree)
            final = self.root / "trees" / digest
            final.parent.mkdir(parents=True, exist_ok=True)
            if not final.exists():
                tree.rename(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        reference = self._reference(spec)
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_json(reference, {**asdict(spec), "digest": digest, "bytes": size})
        say(f"built {spec.package}@{spec.version}, {size // 1_000_000} MB")
        return Pack(final, digest, spec.version or "", spec.package, size)

    def _reference(self, spec: PackSpec) -> Path:
        what = json.dumps([RECIPE, platform.machine(), asdict(replace(spec, version=None))], sort_keys=True)
        recipe = hashlib.sha256(what.encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", spec.package).strip("-")
        return self.root / "refs" / f"{name}@{spec.version}-{recipe}.json"

    def _read(self, path: Path) -> Pack | None:
        try:
            found = json.loads(path.read_text())
            tree = self.root / "trees" / found["digest"]
            pack = Pack(tree, found["digest"], found["version"], found["package"], found["bytes"])
        except (OSError, ValueError, KeyError):
            return None
        return pack if tree.is_dir() else None


def resolve(spec: PackSpec) -> PackSpec:
    """The same spec with a version. Blocks; needs the package index."""
    if spec.source not in ("npm", "pypi"):
        raise AgentError(f"packs are built from npm or pypi, not from {spec.source!r}", code="pack", blame="user")
    spec = replace(spec, package=build.named(spec.package))
    return replace(spec, version=build.newest(spec))


async def ensure_pack(spec: PackSpec, on_progress: OnProgress | None = None) -> Pack:
    """The pack of `spec` in the user's store, built on first use."""
    return await PackStore().ensure(spec, on_progress)


def _seal(tree: Path) -> None:
    """All users may read, none may write a file; directories stay writable for their owner, who may delete them."""
    for path in (tree, *tree.rglob("*")):
        if path.is_symlink():
            continue
        if path.is_dir():
            path.chmod(0o755)
        else:
            path.chmod(0o555 if path.stat().st_mode & 0o111 else 0o444)


def digest_tree(tree: Path) -> tuple[str, int]:
    """A digest over names, links, execute bits and contents, and how many bytes the files have."""
    total, size = hashlib.sha256(), 0
    for path in _files(tree):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            total.update(f"l {name}\0{path.readlink()}\n".encode())
            continue
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        status = path.stat()
        size += status.st_size
        total.update(f"{'x' if status.st_mode & 0o100 else 'f'} {name}\0{content}\n".encode())
    return total.hexdigest(), size


def _files(tree: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(tree):
        folders.sort()
        base = Path(directory)
        yield from (base / name for name in sorted(files))
        yield from (base / name for name in folders if (base / name).is_symlink())


def check_packs() -> list[Finding]:
    """One finding for each thing that building or using packs depends on."""
    npm = shutil.which("npm")
    loader = Path(runtime.MACHINE_LOADER).exists()
    certificates = next((path for path in runtime.CA_BUNDLES if Path(path).is_file()), None)
    store = PackStore()
    place = next(path for path in (store.root, *store.root.parents) if path.exists())
    free = shutil.disk_usage(place).free
    return [
        _finding("npm", npm is not None, npm or "missing; needed to build packs from npm", "install npm"),
        _python(),
        _finding(
            "loader",
            loader,
            runtime.MACHINE_LOADER if loader else "this machine has no glibc loader",
            "build packs on Debian or Ubuntu and set PIER_PACKS",
        ),
        _finding("certificates", certificates is not None, certificates or "no CA bundle", "install ca-certificates"),
        _finding(
            "store",
            free > 2_000_000_000 and os.access(place, os.W_OK),
            f"{store.root}, {free // 1_000_000_000} GB free",
            "set PIER_PACKS",
        ),
        *(_intact(store, pack) for pack in store.all()),
    ]


def _finding(subject: str, ok: bool, detail: str, fix: str) -> Finding:
    return Finding(subject, ok, detail, "" if ok else fix)


def _python() -> Finding:
    try:
        python = build.find_python(PackSpec("pypi", "").pythons)
    except AgentError as error:
        return Finding("python", False, error.message, error.hint or "")
    return Finding("python", True, f"{python.minor} at {python.program}")


def _intact(store: PackStore, pack: Pack) -> Finding:
    whole = store.verify(pack)
    detail = f"{pack.version} {'is whole' if whole else 'has changed since it was built'}"
    return _finding(pack.package, whole, detail, "pier agent rm, then pier agent pack")
