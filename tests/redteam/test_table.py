"""The documentation lists the routes that the suite tries, and no others."""

from __future__ import annotations

import pytest

from tests.redteam import ROUTES, SECTIONS
from tests.redteam.__main__ import PAGES, ROOT, load_routes, with_table

pytestmark = pytest.mark.plain


def test_every_section_has_routes() -> None:
    load_routes()
    assert {route.section for route in ROUTES} == set(SECTIONS)


@pytest.mark.parametrize("page", PAGES)
def test_the_table_in_the_documentation_is_current(page: str) -> None:
    load_routes()
    text = (ROOT / page).read_text()
    assert with_table(text, PAGES[page]) == text, "run `python -m tests.redteam`"
