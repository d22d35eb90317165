"""Packs are built once, named by their contents, readable by all and removable."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.agent.contract import PackSpec
from pier.agent.pack.runtime import LOADER, read_elf
from pier.agent.pack.store import OnProgress, Pack, PackStore, digest_tree
from pier.errors import AgentError
from tests.npm_registry import Registry, serve

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is needed to build packs"),
]

SPEC = PackSpec("npm", "tiny-agent", "1.0.0", program="tiny-agent/bin/tiny")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    with serve() as found:
        monkeypatch.setenv("npm_config_registry", found.url)
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm-cache"))
        program = Path("/bin/bash").resolve().read_bytes()
        for version in ("1.0.0", "1.1.0"):
            found.add("tiny-agent", version, {"bin/tiny": (program, 0o644)})
        yield found


@pytest.fixture
def store(tmp_path: Path) -> PackStore:
    return PackStore(tmp_path / "packs")


async def test_a_pack_is_built_once_for_many_callers(registry: Registry, store: PackStore) -> None:
    told: list[str] = []
    packs = await asyncio.gather(*(store.ensure(SPEC, told.append) for _ in range(4)))
    assert len({pack.digest for pack in packs}) == 1
    assert registry.fetched == ["tiny-agent"]
    assert sum(line.startswith("built") for line in told) == 1
    assert (await store.ensure(SPEC)).path == packs[0].path
    assert registry.fetched == ["tiny-agent"]


async def test_a_build_whose_caller_is_gone_is_waited_for(
    registry: Registry, store: PackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, begun, go_on = store._build, [], threading.Event()

    def slowly(spec: PackSpec, say: OnProgress) -> Pack:
        begun.append(spec)
        go_on.wait(60)
        return build(spec, say)

    monkeypatch.setattr(store, "_build", slowly)
    first = asyncio.create_task(store.ensure(SPEC))
    async with asyncio.timeout(60):
        while not begun:
            await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(store.ensure(SPEC))
    await asyncio.wait({second}, timeout=0.5)
    go_on.set()
    assert store.verify(await second) and len(begun) == 1


async def test_a_pack_brings_its_loader_and_libraries(registry: Registry, store: PackStore) -> None:
    pack = await store.ensure(SPEC)
    program = read_elf(pack.path / "bin" / "tiny")
    assert program is not None and program.loader == LOADER
    assert (pack.path / "ld.so").stat().st_mode & 0o111
    assert (pack.path / "lib" / "libc.so.6").exists()
    assert b"/etc/ld.so.cache\0" not in (pack.path / "ld.so").read_bytes()
    for path in pack.path.rglob("*"):
        mode = path.stat().st_mode
        assert mode & 0o444 == 0o444
        assert path.is_dir() or not mode & 0o222
    assert store.verify(pack)


async def test_the_newest_version_is_looked_up_and_recorded(registry: Registry, store: PackStore) -> None:
    pack = await store.ensure(PackSpec("npm", "tiny-agent", program=SPEC.program))
    assert pack.version == "1.1.0"
    assert [found.version for found in store.all()] == ["1.1.0"]


async def test_a_removed_pack_is_gone_and_others_stay(registry: Registry, store: PackStore) -> None:
    one = await store.ensure(SPEC)
    two = await store.ensure(PackSpec("npm", "tiny-agent", "1.1.0", program=SPEC.program))
    assert one.digest == two.digest
    store.remove(one)
    assert store.find(SPEC) is None and two.path.is_dir()
    store.remove(two)
    assert not two.path.exists() and store.all() == []


async def test_what_a_dead_build_left_is_no_hindrance(registry: Registry, store: PackStore) -> None:
    torn = store.root / "build" / store._reference(SPEC).stem
    (torn / "tree" / "bin").mkdir(parents=True)
    (torn / "tree" / "bin" / "half").write_text("half")
    pack = await store.ensure(SPEC)
    assert not (pack.path / "bin" / "half").exists() and not torn.exists()


async def test_a_reference_without_its_tree_is_built_again(registry: Registry, store: PackStore) -> None:
    pack = await store.ensure(SPEC)
    shutil.rmtree(pack.path)
    assert store.find(SPEC) is None
    assert (await store.ensure(SPEC)).path.is_dir()


async def test_a_failed_build_says_why_and_leaves_nothing(registry: Registry, store: PackStore) -> None:
    with pytest.raises(AgentError, match="no program"):
        await store.ensure(PackSpec("npm", "tiny-agent", "1.0.0", program="tiny-agent/bin/other"))
    with pytest.raises(AgentError, match="npm install"):
        await store.ensure(PackSpec("npm", "no-such-agent", "1.0.0"))
    assert store.all() == [] and not list((store.root / "build").glob("*/"))


def test_a_digest_covers_names_links_modes_and_contents(tmp_path: Path) -> None:
    seen = set()

    def note() -> None:
        seen.add(digest_tree(tmp_path)[0])

    note()
    (tmp_path / "a").write_text("1")
    note()
    (tmp_path / "a").write_text("2")
    note()
    (tmp_path / "a").chmod(0o755)
    note()
    (tmp_path / "a").rename(tmp_path / "b")
    note()
    (tmp_path / "c").symlink_to("b")
    note()
    assert len(seen) == 6
