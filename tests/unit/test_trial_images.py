"""Images for many trials at once: each is made once, failures are tried again, nobody's cancellation is another's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pier.errors import ImageError
from pier.image.model import Image, OnProgress
from pier.network.policy import NONE
from pier.trial.images import ImageRequest, TrialImages, _build_key


class Maker:
    """Counts what it makes, and waits for `go` before it is done."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.at_once = 0
        self.most = 0
        self.go = asyncio.Event()
        self.fail = False

    async def resolve(self, request: ImageRequest, tell: OnProgress) -> Image:
        return await self.make(request.reference or "", tell)

    async def build(self, request: ImageRequest, key: str, tell: OnProgress) -> Image:
        return await self.make(key, tell)

    async def make(self, name: str, tell: OnProgress) -> Image:
        self.made.append(name)
        tell("it begins")
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await self.go.wait()
        finally:
            self.at_once -= 1
        tell("it ends")
        if self.fail:
            raise ImageError("it failed")
        return Image(name, name)


def context(tmp_path: Path, name: str, text: str) -> ImageRequest:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "Dockerfile").write_text(text)
    return ImageRequest(context=directory)


async def test_all_who_wait_are_told_how_it_goes(tmp_path: Path) -> None:
    maker = Maker()
    images = TrialImages(maker.resolve, maker.build)
    told: list[list[str]] = [[], []]
    first = asyncio.create_task(images.get(ImageRequest("ref"), told[0].append))
    await until_made(maker, 1)
    second = asyncio.create_task(images.get(ImageRequest("ref"), told[1].append))
    third = asyncio.create_task(images.get(ImageRequest("ref")))
    await asyncio.sleep(0)
    maker.go.set()
    await asyncio.gather(first, second, third)
    await images.get(ImageRequest("ref"), told[1].append)
    assert told == [["it begins", "it ends"], ["it begins", "it ends"]]
    await images.close()


def test_a_file_outside_of_its_context_is_known_by_its_content(tmp_path: Path) -> None:
    one, two = (context(tmp_path, name, "FROM x") for name in ("a", "b"))
    (tmp_path / "outside").write_text("FROM y")
    inside = [replace(request, dockerfile=(request.context or tmp_path) / "Dockerfile") for request in (one, two)]
    assert len({_build_key(request) for request in inside}) == 1
    before = _build_key(replace(one, dockerfile=tmp_path / "outside"))
    (tmp_path / "outside").write_text("FROM z")
    assert _build_key(replace(one, dockerfile=tmp_path / "outside")) != before


async def until_made(maker: Maker, count: int) -> None:
    async with asyncio.timeout(60):
        while len(maker.made) < count:
            await asyncio.sleep(0.01)


async def test_the_same_image_is_made_once(tmp_path: Path) -> None:
    maker = Maker()
    images = TrialImages(maker.resolve, maker.build)
    one, same = context(tmp_path, "a", "FROM x"), context(tmp_path, "b", "FROM x")
    waiting = [
        asyncio.create_task(images.get(request))
        for request in (one, same, one, ImageRequest("ref"), ImageRequest("ref"))
    ]
    await until_made(maker, 2)
    maker.go.set()
    found = await asyncio.gather(*waiting)
    assert len(maker.made) == 2
    assert len({image.digest for image in found}) == 2
    assert (await images.get(one)).digest == found[0].digest and len(maker.made) == 2
    await images.close()


async def test_builds_are_limited_and_lookups_are_not(tmp_path: Path) -> None:
    maker = Maker()
    images = TrialImages(maker.resolve, maker.build, builds=1)
    requests = [context(tmp_path, str(n), f"FROM x{n}") for n in range(3)]
    waiting = [asyncio.create_task(images.get(request)) for request in (*requests, ImageRequest("ref"))]
    await until_made(maker, 2)
    maker.go.set()
    await asyncio.gather(*waiting)
    assert len(maker.made) == 4 and maker.most == 2
    await images.close()


async def test_a_failure_is_tried_again_and_a_cancellation_is_ones_own() -> None:
    maker = Maker()
    images = TrialImages(maker.resolve)
    first, second = (asyncio.create_task(images.get(ImageRequest("ref"))) for _ in range(2))
    await until_made(maker, 1)
    first.cancel()
    maker.fail = True
    maker.go.set()
    with pytest.raises(ImageError):
        await second
    with pytest.raises(asyncio.CancelledError):
        await first
    maker.fail = False
    assert (await images.get(ImageRequest("ref"))).digest == "ref"
    assert len(maker.made) == 2
    await images.close()


async def test_without_a_builder_a_dockerfile_is_refused(tmp_path: Path) -> None:
    images = TrialImages(Maker().resolve)
    with pytest.raises(ImageError) as refused:
        await images.get(context(tmp_path, "a", "FROM x"))
    assert refused.value.code == "no_builder"
    await images.close()


async def test_closing_ends_what_is_under_way() -> None:
    maker = Maker()
    images = TrialImages(maker.resolve)
    waiting = asyncio.create_task(images.get(ImageRequest("ref")))
    await until_made(maker, 1)
    await images.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert maker.at_once == 0


async def test_what_is_built_otherwise_is_another_image(tmp_path: Path) -> None:
    maker = Maker()
    maker.go.set()
    images = TrialImages(maker.resolve, maker.build)
    plain = context(tmp_path, "a", "FROM x")
    requests = [
        replace(plain, **more)
        for more in ({}, {"network": NONE}, {"args": (("a", "b c=d"),)}, {"args": (("a", "b"), ("c", "d"))})
    ]
    assert len({(await images.get(request)).digest for request in requests}) == 4
    await images.close()
