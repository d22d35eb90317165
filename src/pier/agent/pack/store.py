"""The store of packs: each is built once under a lock, named by its content, and shared by all trials.

    <packs>/refs/<package>@<version>-<recipe>.json    a spec and the digest of its pack
    <packs>/trees/<digest>/                           a pack, never changed again
    <packs>/build/                                    work in progress; the next build clears what a dead one left

`PIER_PACKS` sets the directory of the store; the default is in pier's home.
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
"""Version of the build; a new one makes older packs obsolete."""

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
        """The pack of a spec with a version, if it is built."""
        return self._read(self._reference(replace(spec, package=build.named(spec.package)))) if spec.version else None

    def all(self) -> list[Pack]:
        """Every built pack, by package."""
        found = (self._read(path) for path in sorted((self.root / "refs").glob("*.json")))
        return [pack for pack in found if pack is not None]

    def remove(self, pack: Pack) -> None:
        """Remove the references to a pack, and its tree unless another reference needs it."""
        for path in (self.root / "refs").glob("*.json"):
            found = self._read(path)
            if found is not None and (found.package, found.version) == (pack.package, pack.version):
                path.unlink(missing_ok=True)
        if not any(other.digest == pack.digest for other in self.all()):
            shutil.rmtree(pack.path, ignore_errors=True)

    def verify(self, pack: Pack) -> bool:
        """Whether the tree still matches its digest."""
        return digest_tree(pack.path)[0] == pack.digest

    async def ensure(self, spec: PackSpec, on_progress: OnProgress | None = None) -> Pack:
        """The pack of `spec`, built on first use. Concurrent callers wait for one build, which continues if its caller
        is cancelled."""
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
        """Build the pack unless another thread or process holds the lock; None if it does."""
        with locked(lock, wait=False) as is_ours:
            return self.find(spec) or (self._build(spec, say) if is_ours else None)

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
        inputs = json.dumps([RECIPE, platform.machine(), asdict(replace(spec, version=None))], sort_keys=True)
        recipe = hashlib.sha256(inputs.encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", spec.package).strip("-")
        return self.root / "refs" / f"{name}@{spec.version}-{recipe}.json"

    def _read(self, path: Path) -> Pack | None:
        try:
            row = json.loads(path.read_text())
            tree = self.root / "trees" / row["digest"]
            pack = Pack(tree, row["digest"], row["version"], row["package"], row["bytes"])
        except (OSError, ValueError, KeyError):
            return None
        return pack if tree.is_dir() else None


def resolve(spec: PackSpec) -> PackSpec:
    """`spec` with the newest version in the registry. Blocks on the network."""
    if spec.source not in ("npm", "pypi"):
        message = f"invalid source {spec.source!r} of a pack: expected npm or pypi"
        raise AgentError(message, code="pack", blame="user")
    spec = replace(spec, package=build.named(spec.package))
    return replace(spec, version=build.newest(spec))


async def ensure_pack(spec: PackSpec, on_progress: OnProgress | None = None) -> Pack:
    """The pack of `spec` in the user's store, built on first use."""
    return await PackStore().ensure(spec, on_progress)


def _seal(tree: Path) -> None:
    """Make files readable for all users and writable for none. The owner can still delete the directories."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o555 if path.stat().st_mode & 0o111 else 0o444)


def digest_tree(tree: Path) -> tuple[str, int]:
    """A digest over names, links, execute bits and contents, and the total size of the files."""
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
    """Check the requirements of building and using packs, and that built packs are unchanged."""
    npm = shutil.which("npm") or ""
    loader = runtime.MACHINE_LOADER if Path(runtime.MACHINE_LOADER).exists() else ""
    bundle = next((path for path in runtime.CA_BUNDLES if Path(path).is_file()), "")
    store = PackStore()
    existing = next(path for path in (store.root, *store.root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    findings = [
        Finding("npm", bool(npm), npm or "missing; needed to build packs from npm", "install npm"),
        _python(),
        Finding(
            "loader",
            bool(loader),
            loader or "this machine has no glibc loader",
            "build packs on Debian or Ubuntu and set PIER_PACKS",
        ),
        Finding("certificates", bool(bundle), bundle or "no CA bundle", "install ca-certificates"),
        Finding(
            "store",
            free > 2_000_000_000 and os.access(existing, os.W_OK),
            f"{store.root}, {free // 1_000_000_000} GB free",
            "set PIER_PACKS",
        ),
    ]
    for pack in store.all():
        whole = store.verify(pack)
        detail = f"{pack.version} {'is intact' if whole else 'has changed since it was built'}"
        findings.append(Finding(pack.package, whole, detail, "pier agent rm, then pier agent pack"))
    return [replace(finding, fix="") if finding.ok else finding for finding in findings]


def _python() -> Finding:
    try:
        python = build.find_python(PackSpec("pypi", "").pythons)
    except AgentError as error:
        return Finding("python", False, error.message, error.hint or "")
    return Finding("python", True, f"{python.minor} at {python.program}")
