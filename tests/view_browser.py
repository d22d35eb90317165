"""A real browser for tests of the viewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright import sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def launched_browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def page_of(
    browser: sync_api.Browser, origin: str, errors: tuple[str, ...] = (), **options: Any
) -> Iterator[sync_api.Page]:
    """A page that fails the test on a request to anywhere else, or on a console error without one of the texts
    `errors`."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on(
        "request",
        lambda request: problems.append(request.url) if not request.url.startswith((origin, "data:")) else None,
    )
    page.on("popup", lambda popup: problems.append(f"popup {popup.url}"))
    try:
        yield page
    finally:
        context.close()
    assert [each for each in problems if not any(error in each for error in errors)] == []
