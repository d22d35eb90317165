"""Text that agents wrote, as HTML that does nothing."""

from __future__ import annotations

import re

import pytest

from pier.view.text import Clip, code, diff, edit, markdown, plain, terminal, visible

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.mark.parametrize("show", [plain, terminal, markdown, lambda text: code(text, "html"), diff])
def test_tags_are_escaped(show: object) -> None:
    html = show(SCRIPT).html  # type: ignore[operator]
    assert "<script" not in html and "<img" not in html
    assert "&lt;" in html


def test_control_and_bidirectional_characters_are_shown() -> None:
    html = visible("a\u202eb\x00c\u200bd\ufeff\x07\U000e0041")
    for name in ("U+202E", "U+0000", "U+200B", "U+FEFF", "U+0007", "U+E0041"):
        assert f'title="{name}"' in html
    assert "\u202e" not in html and "\x00" not in html
    assert visible("tab\tand\nline") == "tab\tand\nline"


def test_colours_become_spans_and_other_sequences_go() -> None:
    html = terminal("\x1b[1;31mred\x1b[0m \x1b[2Jclear \x1b]0;title\x07x \x1b[38;5;200mc\x1b[38;2;1;2;3mt").html
    assert html == '<span class="a-bold f-red">red</span> clear x ct'
    link = terminal("\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\ me").html
    assert link == '<span class="link" title="javascript:alert(1)">click</span> me'
    quoted = terminal('\x1b]8;;"><script>\x07click\x1b]8;;\x07').html
    assert "<script" not in quoted and '"><' not in quoted.replace('">click', "")


def test_lines_that_were_rewritten_are_shown_as_they_ended() -> None:
    assert terminal("10%\r50%\r100%\nnext\r\nlast").html == "100%\nnext\nlast"


def test_markdown_loads_nothing_and_links_nowhere() -> None:
    text = "# Hi\n![pic](https://evil.example/x.png) [go](javascript:alert(1)) <b>x</b> https://a.example\n\n```py\nx=1\n```"
    html = markdown(text).html
    assert "<h1>" in html and "href" not in html and "src=" not in html and "<b>" not in html
    assert "evil.example" in html and '<pre class="code">' in html
    other = markdown("[go](https://a.example/\u202ex)").html
    assert "\u202e" not in other and "href" not in other


def test_a_text_is_cut_and_the_rest_is_counted() -> None:
    found = plain("x" * 10_000, 100)
    assert (found.left, found.size, len(re.sub("<.*?>", "", found.html))) == (9_900, 10_000, 100)
    assert markdown("y" * 1_000_000).left == 1_000_000 - 6_000
    assert bool(Clip(visible(""))) is False


def test_edits_are_diffs() -> None:
    html = edit("a\nb\nc", "a\nB\nc").html
    assert '<span class="d-del">-b\n</span>' in html and '<span class="d-add">+B\n</span>' in html
    assert edit("x\n" * 5000, "y\n" * 5000, 100).left > 0
