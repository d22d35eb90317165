"""Renders untrusted text of agents and tasks as inert HTML.

Everything is escaped. Terminal colours become spans with classes; other escape sequences are removed. Control and
bidirectional characters are shown as code points, so that no text can reorder or hide another. Markdown is rendered
without HTML, pictures or working links. Sizes are bounded before parsing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from markupsafe import Markup, escape

from pier.trial.diff import unified

MARKDOWN_LIMIT = 40_000
CODE_LIMIT = 40_000
CLIP = 6_000
"""Characters of one text that a page shows at first."""

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufeff\uffa0\ufff9-\ufffb\ue000\ue001\ud800-\udfff]|[\U000e0000-\U000e007f]"
)
_NAMES = {**{chr(code): chr(0x2400 + code) for code in range(0x20)}, "\x7f": "\u2421"}


def visible(text: str) -> Markup:
    """Escape a text and make invisible characters visible."""
    return escape(text) if text.isascii() and text.isprintable() else _mark(escape(text))


def _mark(html: str) -> Markup:
    return Markup(_HIDDEN.sub(_shown, html))


def _shown(found: re.Match[str]) -> str:
    char = found[0]
    code = f"U+{ord(char):04X}"
    return f'<span class="ctl" title="{code}">{_NAMES.get(char, code)}</span>'


@dataclass(frozen=True, slots=True)
class Clip:
    """The beginning of a text as HTML. `left` is the number of characters left out, `size` that of the whole text."""

    html: Markup
    left: int = 0
    size: int = 0

    def __bool__(self) -> bool:
        return self.size > 0


def plain(text: str, limit: int = CLIP) -> Clip:
    shown = text[:limit]
    return Clip(visible(shown), len(text) - len(shown), len(text))


# A terminal escape sequence: colours (CSI m), any other CSI, a hyperlink (OSC 8), another string, a single character.
_ANSI = re.compile(
    r"\x1b\[([0-9;:]*)m"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b\]8;[^;\x07\x1b]*;([^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_REWRITTEN = re.compile(r"^[^\n]*\r(?!\n|\Z)", re.MULTILINE)
_COLOURS = list(enumerate(("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")))
_ATTRIBUTES = {1: ("weight", "bold"), 2: ("weight", "dim"), 3: ("italic",) * 2, 4: ("under",) * 2, 9: ("strike",) * 2}
_RESETS = {22: "weight", 23: "italic", 24: "under", 29: "strike", 39: "fore", 49: "back"}
_STYLES = {
    **{code: (name, f"a-{value}") for code, (name, value) in _ATTRIBUTES.items()},
    **{code: (name, "") for code, name in _RESETS.items()},
    **{base + number: ("fore", f"f-{name}") for base in (30, 90) for number, name in _COLOURS},
    **{base + number: ("back", f"b-{name}") for base in (40, 100) for number, name in _COLOURS},
}
"""The property of a style that an SGR code sets, and its CSS class; an empty class resets the property."""


def terminal(text: str, limit: int = CLIP) -> Clip:
    """Terminal output: colours as spans, and the last state of lines that were rewritten in place."""
    shown = text[:limit]
    left = len(text) - len(shown)
    shown = _REWRITTEN.sub("", shown.replace("\r\n", "\n")).rstrip("\r")
    if "\x1b" not in shown and "\x9b" not in shown:
        return Clip(visible(shown), left, len(text))
    return Clip(Markup("".join(_spans(shown))), left, len(text))


def _spans(text: str) -> Iterator[str]:
    style: dict[str, str] = {}
    link, at = "", 0
    for found in _ANSI.finditer(text):
        yield _span(text[at : found.start()], style, link)
        at = found.end()
        if found[1] is not None:
            _apply(style, found[1])
        elif found[2] is not None:
            link = found[2]
    yield _span(text[at:], style, link)


def _span(text: str, style: dict[str, str], link: str) -> str:
    if not text:
        return ""
    classes = [*style.values(), *(["link"] if link else [])]
    if not classes:
        return visible(text)
    title = Markup(' title="{}"').format(_printable(link[:500])) if link else ""
    return f'<span class="{" ".join(classes)}"{title}>{visible(text)}</span>'


def _printable(text: str) -> str:
    return _HIDDEN.sub(lambda found: f"U+{ord(found[0]):04X}", text)


def _apply(style: dict[str, str], codes: str) -> None:
    """Apply an SGR sequence to a style. 256-colour and 24-bit colours are ignored."""
    numbers = [int(code) if code.isdigit() and len(code) < 4 else 0 for code in re.split("[;:]", codes)]
    place = 0
    while place < len(numbers):
        code = numbers[place]
        if code == 0:
            style.clear()
        elif code in (38, 48):
            place += 2 if numbers[place + 1 : place + 2] == [5] else 4
        elif code in _STYLES:
            name, css = _STYLES[code]
            style.pop(name, None)
            style |= {name: css} if css else {}
        place += 1


@cache
def _renderer() -> Any:
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False, "highlight": lambda text, name, _: code(text, name).html})
    made.enable(["table", "strikethrough"])
    rules: Any = getattr(made.renderer, "rules")  # noqa: B009 - the protocol does not name it
    rules["image"] = lambda tokens, index, *_: (
        f'<span class="link">[image: {visible(tokens[index].content)} {visible(_address(tokens[index], "src"))}]</span>'
    )
    rules["link_open"] = lambda tokens, index, *_: Markup('<span class="link" title="{}">').format(
        _printable(_address(tokens[index], "href"))
    )
    rules["link_close"] = lambda *_: "</span>"
    rules["fence"] = rules["code_block"] = lambda tokens, index, *_: (
        f'<pre class="code">{code(tokens[index].content, (tokens[index].info or "").split(" ")[0]).html}</pre>'
    )
    return made


def _address(token: Any, name: str) -> str:
    return str(token.attrGet(name) or "")[:500]


def markdown(text: str, limit: int = CLIP) -> Clip:
    """A message rendered as Markdown; a long one is shown as plain text."""
    if len(text) > min(limit, MARKDOWN_LIMIT):
        found = plain(text, limit)
        return Clip(Markup('<div class="pre">{}</div>').format(found.html), found.left, found.size)
    return Clip(_mark(_renderer().render(text)), 0, len(text))


@lru_cache(maxsize=128)
def _lexer(name: str) -> Any:
    """The lexer for a language or a file name; None if unknown."""
    from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
    from pygments.util import ClassNotFound

    try:
        return get_lexer_for_filename(name) if "." in name else get_lexer_by_name(name)
    except ClassNotFound:
        return None


def code(text: str, name: str = "", limit: int = CLIP) -> Clip:
    """Source code, highlighted if the language is known. `name` is the language or a file name."""
    shown = text[:limit]
    lexer = _lexer(name.rpartition("/")[2][-100:]) if name and len(shown) <= CODE_LIMIT else None
    if lexer is None:
        return Clip(visible(shown), len(text) - len(shown), len(text))
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    html = highlight(shown, lexer, HtmlFormatter(nowrap=True, classprefix="k-"))
    return Clip(_mark(html.rstrip("\n")), len(text) - len(shown), len(text))


def json_code(value: Any, limit: int = CLIP) -> Clip:
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = repr(value)
    return code(text, "json", limit)


def diff(text: str, limit: int = CLIP) -> Clip:
    """A unified diff, one span per line."""
    shown = text[:limit]
    html = "".join(_diff_line(line) for line in shown.split("\n"))
    return Clip(Markup(html), len(text) - len(shown), len(text))


def _diff_line(line: str) -> str:
    kinds = {"+": "add", "-": "del", "@": "at"}
    kind = "at" if line.startswith(("+++", "---", "diff ", "index ")) else kinds.get(line[:1], "same")
    return f'<span class="d-{kind}">{visible(line)}\n</span>'


def edit(old: str, new: str, limit: int = CLIP) -> Clip:
    """An edit as a diff."""
    found = unified("", *(f"{text.removesuffix(chr(10))}\n" for text in (old, new)))
    return diff("\n".join(found.removesuffix("\n").split("\n")[2:]), limit)
