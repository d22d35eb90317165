"""Renders pages with the templates: filters for numbers and texts, and page URLs.

`Links` builds the server's URLs; the export has subclasses for files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from pier import __version__
from pier.sizes import size_text
from pier.view import text
from pier.view.pages import Page
from pier.view.trial import TAB_NAMES

HERE = Path(__file__).parent
STATIC = HERE / "static"
_PRETTY_LIMIT = 8 << 20

BLAMES = ("agent", "task", "provider", "infra", "user")


class Links:
    """The URLs of pages on a server."""

    is_static = False

    def home(self, **query: Any) -> str:
        return "/" + _query(query)

    def job(self, job: str, **query: Any) -> str:
        return f"/jobs/{_quoted(job)}" + _query(query)

    def trial(self, job: str, trial: str, tab: str = "steps", **query: Any) -> str:
        tail = "" if tab == "steps" else f"/{tab}"
        return f"/jobs/{_quoted(job)}/{_quoted(trial)}{tail}" + _query(query)

    def piece(self, job: str, trial: str, piece: str, **query: Any) -> str:
        return f"/jobs/{_quoted(job)}/{_quoted(trial)}/steps/{piece}" + _query(query)

    def file(self, job: str, trial: str, path: str) -> str:
        return f"/files/{_quoted(job)}/{_quoted(trial)}/{quote(path)}"

    def compare(self, names: list[str]) -> str:
        return "/compare" + ("?" + urlencode([("job", name) for name in names]) if names else "")

    def search(self, **query: Any) -> str:
        return "/search" + _query(query)

    def asset(self, name: str) -> str:
        return f"/static/{name}?v={__version__}"

    def changed(self, query: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """A query with some parameters changed; it returns to the first page unless `page` is among them."""
        return {key: value for key, value in {**query, "page": "", **more}.items() if value not in ("", None)}

    def sorted_by(self, query: Mapping[str, Any], column: str) -> dict[str, Any]:
        """A query that sorts by a column, in reverse if it does so already."""
        now = str(query.get("sort", ""))
        return self.changed(query, sort=f"-{column}" if now == column else column)


def _query(values: Mapping[str, Any]) -> str:
    kept = [f"{key}={_quoted(str(value))}" for key, value in values.items() if value not in ("", None)]
    return "?" + "&".join(kept) if kept else ""


_quoted = lru_cache(4096)(partial(quote, safe=""))
"""Cached, since the URLs of a list repeat the same few names."""


@cache
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    numbers = (number, short, money, seconds, percent, reward, when, clock, heat, size)
    texts = (text.visible, text.plain, text.terminal, text.markdown, text.code, text.json_code, text.diff)
    made.filters |= {each.__name__: each for each in (*numbers, *texts, marked, pretty)}
    made.globals |= {
        "edit": text.edit,
        "BLAMES": BLAMES,
        "TAB_NAMES": TAB_NAMES,
        "version": __version__,
        "CLIP": text.CLIP,
    }
    return made


def render(page: Page, links: Links, **more: Any) -> str:
    context = {"LIMIT": text.CLIP, **page.data, **more}
    return environment().get_template(page.template).render(page=page, url=links, **context)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}"


def short(value: float | None) -> str:
    """A count in few characters: 950, 12.3k, 4.56M."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}" if value < 999.5 * limit else f"{value / limit:.0f}{unit}"
    return f"{value:g}" if value == int(value) else f"{value:.3g}"


def money(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "$0"
    return f"${value:,.2f}" if abs(value) >= 10 else f"${value:.3f}" if abs(value) >= 0.1 else f"${value:.4f}"


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value < 10:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {rest:02} s"


def size(value: int | None) -> str:
    return "–" if value is None else size_text(value)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if value not in (0, 1) else f"{value:.0f}"


def heat(value: float | None) -> str:
    """The colour class of a cell, by its mean reward."""
    return "h-none" if value is None else f"h-{round(10 * min(max(value, 0.0), 1.0))}"


def when(value: str | None) -> str:
    """A time in UTC, to the minute."""
    found = _moment(value)
    return found.strftime("%Y-%m-%d %H:%M") if found else "–"


def clock(value: str | float | None) -> str:
    found = _moment(value)
    return found.strftime("%H:%M:%S") if found else ""


def _moment(value: str | float | None) -> datetime | None:
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value) if value else None
        return found.astimezone(UTC) if found and found.tzinfo else found
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def pretty(value: str) -> str:
    """Indented JSON; other text unchanged."""
    if len(value) > _PRETTY_LIMIT:
        return value
    try:
        return json.dumps(json.loads(value), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return value


def marked(value: str) -> Markup:
    """An excerpt of the full-text search; each match is enclosed in two private-use characters."""
    html = str(text.visible(value))
    for code, tag in (("U+E000", "<mark>"), ("U+E001", "</mark>")):
        html = html.replace(f'<span class="ctl" title="{code}">{code}</span>', tag)
    return Markup(html)
