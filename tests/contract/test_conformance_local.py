"""The embedded backend keeps every promise of the sandbox contract, as root and as a plain user."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.image.model import Image
from pier.sandbox.conformance import CHECKS, Check, verify
from pier.sandbox.contract import Backend
from tests.busybox import busybox_image

pytestmark = pytest.mark.plain


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


def test_the_suite_is_whole() -> None:
    assert len(CHECKS) >= 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_promise(check: Check, shared_backend: Backend, image: Image, tmp_path: Path) -> None:
    await verify(check, shared_backend, image, tmp_path)
